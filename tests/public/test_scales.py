"""Scales of latent effects that a fit has lost, and regressions on raw data whose first steps are hopeless."""

import functools

import numpy as np
import pymc as pm
import pytest

from pymc_ngvi import fit_ngvi

pytestmark = pytest.mark.usefixtures("_compiled_once")

QUIET = {"progressbar": False, "backend": "quick"}


@functools.cache
def raw_intercepts():
    """Centred intercepts of 15 groups, with scales of hundreds."""
    rng = np.random.default_rng(3)
    group = np.repeat(np.arange(15), 6)
    y = 500.0 + 60.0 * rng.standard_normal(15)[group] + 80.0 * rng.standard_normal(90)
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 1000.0)
        b = pm.Normal("b", 0.0, pm.HalfNormal("sd", 300.0), shape=15)
        pm.Normal("y", mu + b[group], pm.HalfNormal("sigma", 300.0), observed=y)
    return model


@functools.cache
def raw_line():
    """200 heights and weights, with the scale's prior far too narrow."""
    rng = np.random.default_rng(2)
    x = rng.normal(170.0, 8.0, 200)
    y = -80.0 + 0.9 * x + 9.0 * rng.standard_normal(200)
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0.0, 50.0)
        beta = pm.Normal("beta", 0.0, 50.0, shape=1)
        pm.Normal("y", intercept + beta * x, pm.Exponential("sigma", 1.0), observed=y)
    return model


@functools.cache
def best_elbo(family):
    """Return the ELBO of a fit from where the data were made."""
    right = {"sd": 60.0, "sigma": 80.0, "mu": 500.0}
    return fit_ngvi(model=raw_intercepts(), family=family, random_seed=9, start=right, **QUIET).elbo.value


@pytest.mark.parametrize(("seed", "estimator"), [(1, None), (1, "price"), (2, "price")], ids=str)
@pytest.mark.parametrize("family", ["full", "sparse"])
def test_a_scale_that_collapsed_is_found(family, seed, estimator):
    """Left to natural steps, sd ends below 1, several nats lower, and the fit calls itself converged."""
    approx = fit_ngvi(model=raw_intercepts(), family=family, estimator=estimator, random_seed=seed, **QUIET)
    assert approx.converged
    assert approx.elbo.value > best_elbo(family) - 0.3  # tolerance of both, and noise of .02 nats each
    assert np.exp(approx.mean_data["sd_log__"]) > 20.0


@pytest.mark.parametrize(
    ("seed", "options"), [(1, {}), *[(seed, {"estimator": "price"}) for seed in (3, 11, 14)]], ids=str
)
def test_a_regression_on_raw_data_gets_away_from_its_start(seed, options):
    """Of the seeds of draws two stalled at a start a hundred thousand nats below."""
    approx = fit_ngvi(model=raw_line(), random_seed=seed, **options, **QUIET)
    assert approx.converged
    assert abs(approx.mean_data["sigma_log__"] - np.log(9.0)) < 0.2  # posterior standard deviation .05
    assert approx.elbo.value > -760.0
