"""The examples run, warn of nothing, and leave what they promise."""

import os
import subprocess
import sys

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Patients and visits of the epilepsy data.
N_PATIENTS, N_ROWS = 59, 236
#: Posterior of ``beta`` and ``sd`` by NUTS, 4 chains of 10,000 draws.
NUTS_MEAN = np.array([0.2117, 0.8847, -0.9352, 0.3390, 0.4737, -0.2640, 0.5443, 0.7510])
NUTS_SD = np.array([0.2757, 0.1403, 0.4238, 0.2151, 0.3707, 0.1598, 0.0664, 0.1627])


@pytest.fixture(scope="module")
def epilepsy(tmp_path_factory):
    """Run the example once, in a process of its own; warnings that our package is responsible for are errors."""
    pytest.importorskip("arviz", reason="arviz is in the dependency group example")
    pytest.importorskip("matplotlib", reason="matplotlib is in the dependency group example")
    folder = tmp_path_factory.mktemp("examples") / "new" / "folder"
    # A warning counts for the module that it points at: ours point at the example, `__main__`. ``-W`` takes module
    # names literally, so each of our modules is named.
    paths = (path.relative_to(EXAMPLES.parent) for path in EXAMPLES.parent.glob("pymc_ngvi/**/*.py"))
    modules = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    flags = [flag for module in ("__main__", *modules) for flag in ("-W", f"error:::{module}")]
    done = subprocess.run(
        [sys.executable, *flags, str(EXAMPLES / "epilepsy.py"), "--output", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path_factory.getbasetemp(),
        env={**os.environ, "MPLBACKEND": "Agg"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


def test_it_prints_how_the_fit_went(epilepsy):
    out, folder = epilepsy
    assert "Exact up to Monte Carlo error" in " ".join(out.split())
    assert str(folder / "epilepsy.png") in out
    assert (folder / "epilepsy.png").stat().st_size > 50_000  # a blank figure of this size takes about 10 kB
    assert "treatment" in out, "a table of the estimates"


def test_it_writes_draws_that_read_back(epilepsy):
    _, folder = epilepsy
    with xr.open_datatree(folder / "epilepsy.nc", engine="h5netcdf") as tree:
        posterior = tree["posterior"].load()
        shapes = {name: value.shape for name, value in posterior.data_vars.items()}
        assert shapes == {
            "beta": (4, 1000, 6),
            "sd": (4, 1000, 2),
            "z": (4, 1000, N_PATIENTS, 2),
            "b": (4, 1000, N_PATIENTS, 2),
        }
        assert list(posterior["term"].values) == ["intercept", "visit"]
        assert tree["observed_data"]["seizures"].shape == (N_ROWS,)
        assert set(tree["sample_stats"].data_vars) == {"global_draw"}  # log densities on request only
        assert all(np.isfinite(value).all() for value in posterior.data_vars.values())
        # A Deterministic is computed from the draws beside it.
        np.testing.assert_allclose(posterior["b"], posterior["z"] * posterior["sd"])


def test_its_estimates_are_those_of_nuts(epilepsy):
    """Beside the moments of 40,000 draws of NUTS, whose effective number is 1,400 or more."""
    _, folder = epilepsy
    with xr.open_datatree(folder / "epilepsy.nc", engine="h5netcdf") as tree:
        draws = np.concatenate([np.concatenate(tree["posterior"][name].to_numpy()) for name in ("beta", "sd")], axis=1)
    # The Monte Carlo error of NUTS is .027 sd, that of 4,000 draws .016: four times both.
    error = (draws.mean(axis=0) - NUTS_MEAN) / NUTS_SD
    assert np.abs(error).max() < 0.13, error.round(2)
    # Those of a standard deviation are .019 and .011 of it. A Gaussian has .58 and .66 of those of ``sd``.
    np.testing.assert_allclose(draws.std(axis=0) / NUTS_SD, 1.0, atol=0.09)
