"""What models at random have shown to be wrong: `tests/benchmarks/fuzzed.py`."""

import numpy as np
import pymc as pm
import pytest

import pymc_ngvi

QUIET = {"random_seed": 1, "progressbar": False}


def test_a_covariance_of_the_rows_of_the_fit_is_refused_at_others():
    x = np.linspace(0.0, 1.0, 5)
    with pm.Model() as model:
        at = pm.Data("at", x)
        sd = pm.HalfNormal("sd")
        pm.MvNormal("y", pm.Normal("slope") * at, cov=sd**2 * np.eye(5), observed=x**2)
    approx = pymc_ngvi.fit_ngvi(model, **QUIET)
    with pytest.raises(ValueError, match="The model can't be evaluated given 'at'"):
        approx.predict({"at": x[:3]}, random_seed=1)


def test_a_prior_on_a_circle_is_named_by_its_limits():
    with pm.Model() as model:
        pm.VonMises("y", pm.VonMises("mean", 0.0, 2.0), 2.0, observed=[0.3, 0.8])
    approx = pymc_ngvi.fit_ngvi(model, **QUIET)
    with pytest.raises(ValueError, match=r"the old one on \(-3.142, 3.142\)"):
        approx.with_prior(mean=pm.Normal.dist())
