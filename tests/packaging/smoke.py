"""Run by `check.py` with the Python of an environment that has the wheel and nothing else of the repository."""

import importlib.metadata
import importlib.resources
import pickle
import sysconfig

from pathlib import Path

import numpy as np
import pymc as pm

import pymc_ngvi

#: mu | y ~ N(sum y / (n + .01), 1 / (n + .01)) for the prior N(0, 10^2) and observations of unit variance.
Y = np.array([0.8, 1.1, 1.7])
PRECISION = len(Y) + 0.01


def main() -> None:
    """Fit, sample, report, save and load; raise AssertionError where something is not as it should be."""
    found = Path(pymc_ngvi.__file__).resolve()
    assert found.is_relative_to(Path(sysconfig.get_path("purelib")).resolve()), f"imported from {found}"
    distribution = importlib.metadata.distribution("pymc-ngvi")
    assert distribution.version == pymc_ngvi.__version__
    lost = [str(file) for file in distribution.files or [] if not file.locate().is_file()]
    assert not lost, lost
    assert (importlib.resources.files("pymc_ngvi") / "py.typed").is_file()

    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 10)
        pm.Normal("y", mu, 1, observed=Y)
        approx = pm.fit(method="ngvi", random_seed=1, progressbar=False)
    assert approx.converged, approx.status
    # One step is exact: the posterior is Gaussian.
    np.testing.assert_allclose(approx.mean_flat, Y.sum() / PRECISION, rtol=1e-8)
    np.testing.assert_allclose(approx.sd_flat, PRECISION**-0.5, rtol=1e-8)

    posterior = approx.sample(2_000, random_seed=1)["posterior"]
    assert dict(posterior.sizes) == {"chain": 4, "draw": 500}
    # Four Monte Carlo errors.
    assert abs(posterior["mu"].mean() - Y.sum() / PRECISION) < 4 * (PRECISION * 2_000) ** -0.5
    assert "mu" in str(approx.summary())
    approx.save("fit.nc")
    for again in (pymc_ngvi.load("fit.nc", model), pickle.loads(pickle.dumps(approx))):
        np.testing.assert_array_equal(again.mean_flat, approx.mean_flat)
    assert pymc_ngvi.fit_ngvi(model=model, family="diagonal", progressbar=False).converged
    print(f"pymc_ngvi {pymc_ngvi.__version__} from {found.parent}: fit, sample, summary and files work.")


if __name__ == "__main__":
    main()
