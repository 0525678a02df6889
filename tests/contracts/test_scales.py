"""Scales of latent effects that a fit has lost, and regressions on raw data whose first steps are hopeless."""

import functools

import numpy as np
import pymc as pm
import pytest

from pymc_ngvi import LogDensity, fit_ngvi
from pymc_ngvi.estimators import Price
from pymc_ngvi.families import DiagonalState, FullState
from pymc_ngvi.graphs import graph
from pymc_ngvi.steps.adaptive import rule as adaptive
from pymc_ngvi.steps.adaptive.scales import Conditioned, lost_scales

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


@pytest.fixture(scope="module")
def density():
    return LogDensity(raw_intercepts(), "quick")


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


def test_nothing_changes_where_no_scale_is_lost(monkeypatch):
    """The same bits, and two Hessians: one after the first set, one at the end."""
    approx = fit_ngvi(model=raw_line(), random_seed=3, estimator="price", **QUIET)
    monkeypatch.setattr(adaptive, "MAX_RECOVERIES", 0)
    plain = fit_ngvi(model=raw_line(), random_seed=3, estimator="price", **QUIET)
    np.testing.assert_array_equal(approx.mean_flat, plain.mean_flat)
    assert approx.n_gradients == plain.n_gradients
    assert approx.n_hessians == plain.n_hessians + 2


@pytest.mark.parametrize(
    ("seed", "options"), [(1, {}), *[(seed, {"estimator": "price"}) for seed in (3, 11, 14)]], ids=str
)
def test_a_regression_on_raw_data_gets_away_from_its_start(seed, options):
    """Of the seeds of draws two stalled at a start a hundred thousand nats below."""
    approx = fit_ngvi(model=raw_line(), random_seed=seed, **options, **QUIET)
    assert approx.converged
    assert abs(approx.mean_data["sigma_log__"] - np.log(9.0)) < 0.2  # posterior standard deviation .05
    assert approx.elbo.value > -760.0


def test_lost_scales_are_those_whose_curvature_is_owed_to_the_spread(density):
    """With effects all but 0 the scale follows their spread; with effects at a distance the data hold it."""
    names = {v.name: v.where for v in density.layout.variables}
    sd = names["sd"].start
    location = density.initial_point()
    location[names["mu"]], location[sd], location[names["sigma"]] = 500.0, 0.0, np.log(100.0)
    q = _with_own_curvature(density, location)
    assert [g.tolist() for g in lost_scales(density, Price(), q)] == [[sd]]
    location[names["b"]], location[sd] = np.linspace(-90.0, 90.0, 15), np.log(50.0)
    assert lost_scales(density, Price(), _with_own_curvature(density, location)) == []


def _with_own_curvature(density, location):
    """Return the diagonal Gaussian about a location whose effects spread as their prior, fitted to log p in scales."""
    b = next(v for v in density.layout.variables if v.name == "b").where
    sd = next(v for v in density.layout.variables if v.name == "sd").where
    scale = np.full(density.n_dim, 0.05)
    scale[b] = min(np.exp(location[sd])[0], 5.0)
    rng = np.random.default_rng(1)
    curvature = -density.mean_hessian(location + scale * rng.standard_normal((256, density.n_dim))).diagonal()
    return DiagonalState.from_scale(location, 1.0 / np.sqrt(np.abs(curvature)))


def test_given_coordinates_have_a_gaussian_of_their_own_and_the_others_the_density_given_them(density):
    index, point, sd = np.array([2, 16]), np.array([40.0, 3.0]), np.array([5.0, 0.5])
    conditioned = Conditioned(density, index, point, sd)
    theta = density.initial_point() + np.random.default_rng(1).standard_normal((3, density.n_dim))
    given = theta.copy()
    given[:, index] = point
    standard = (theta[:, index] - point) / sd
    logp, grad = conditioned.logp_grad(theta)
    np.testing.assert_allclose(logp, density.logp(given) - 0.5 * (standard**2).sum(axis=1))
    expected = density.grad(given)
    expected[:, index] = -standard / sd
    np.testing.assert_allclose(grad, expected)
    hessian = density.hessian(given).mean(axis=0)
    hessian[index], hessian[:, index] = 0.0, 0.0
    hessian[index, index] = -1.0 / sd**2
    np.testing.assert_allclose(conditioned.mean_hessian(theta).products(np.eye(density.n_dim)), hessian, atol=1e-12)
    np.testing.assert_allclose(conditioned.mean_hessian(theta).diagonal(), np.diag(hessian), atol=1e-12)
    values = density.pattern.symmetric(conditioned.mean_hessian(theta).values()).toarray()
    np.testing.assert_allclose(values, hessian, atol=1e-12)
    q = FullState.from_scale(theta[0], np.ones(density.n_dim))
    np.testing.assert_allclose(conditioned.mean_hessian(theta).whitened(q), -hessian, atol=1e-12)


def test_no_graph_of_a_hessian_is_made_where_a_row_is_a_whole_density(monkeypatch):
    y = np.random.default_rng(0).normal(size=(40, 2))
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 2.0)
        mean = pm.Normal("mean")
        pm.MvNormal("y", mean * np.ones(2), cov=scale * np.eye(2) + 0.3, observed=y)
    monkeypatch.setattr(graph, "hessian_product", lambda *_: pytest.fail("a Hessian product was made"))
    approx = fit_ngvi(model=model, posterior="gaussian", random_seed=1, **QUIET)
    assert approx.record.estimator == "quadrature"
    assert approx.converged
