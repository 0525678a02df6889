"""Regressions with more coefficients than rows are fitted in the space of the rows, to the same answer."""

import numpy as np
import pymc as pm
import pytest

from matrix import two_seeds, whitener
from numpy.testing import assert_allclose
from scipy.stats import multivariate_normal

import pymc_ngvi

from pymc_ngvi import LogDensity
from pymc_ngvi.core.types import BaseDraws
from pymc_ngvi.density import by_rows, expectations
from pymc_ngvi.families import FullState
from pymc_ngvi.families.gaussian import LowRankState
from pymc_ngvi.methods import natural
from pymc_ngvi.methods.estimators import quadrature
from pymc_ngvi.methods.reparam import RowSpaceDensity

N_ROWS, N_COEFFICIENTS = 30, 120
NO_DRAWS = BaseDraws(np.empty((0, 0)), 1)
QUIET = {"progressbar": False, "random_seed": 1, "posterior": "gaussian"}


def data(seed=1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((N_ROWS, N_COEFFICIENTS)) * 4.0 / np.sqrt(N_COEFFICIENTS)
    x[3] = x[2]  # a row that adds nothing
    return x, x @ rng.standard_normal(N_COEFFICIENTS), rng


def logistic(seed=1):
    x, eta, rng = data(seed)
    a = pm.Normal("a", 0.5, 2.0)
    b = pm.Normal("b", np.linspace(-0.5, 0.5, N_COEFFICIENTS), 0.7, shape=N_COEFFICIENTS)
    pm.Bernoulli("y", logit_p=a + x @ b, observed=rng.random(N_ROWS) < 1.0 / (1.0 + np.exp(-eta)))


def linear(seed=1):
    x, eta, rng = data(seed)
    a = pm.Flat("a")
    sigma = pm.HalfNormal("sigma", 2.0)
    b = pm.Normal("b", 0.0, 0.7, shape=N_COEFFICIENTS)
    pm.Normal("y", a + x @ b, sigma, observed=eta + rng.standard_normal(N_ROWS))


def poisson(seed=1):
    x, eta, rng = data(seed)
    b = pm.Normal("b", 0.0, 0.3, shape=(N_COEFFICIENTS // 2, 2))
    pm.Potential("more", -0.5 * (b[0, 0] - 0.1) ** 2)  # one coefficient has two priors, and is kept
    pm.Poisson("y", pm.math.exp(0.3 * (x @ b.ravel())), observed=rng.poisson(np.exp(0.3 * eta)))


def density_of(make, **options):
    with pm.Model() as model:
        make(**options)
    return LogDensity(model)


@two_seeds
@pytest.mark.parametrize(("make", "n_dim"), [(logistic, 30), (linear, 31), (poisson, 30)])
@pytest.mark.parametrize("rho", [1.0, 0.4])
def test_a_step_is_the_natural_step_of_all_coordinates(make, n_dim, seed, rho, monkeypatch):
    """X X^T in the place of the covariance of a Gaussian process: the same step, whatever q."""
    monkeypatch.setattr(expectations, "_TOLERANCE", 1e-12)
    monkeypatch.setattr(expectations, "_PER_DIM", 0.0)
    density = density_of(make, seed=seed)
    target = RowSpaceDensity(density, density.seen_from_rows)
    assert abs(target.n_dim - n_dim) <= 1
    rng = np.random.default_rng(seed)
    root = np.tril(0.1 * rng.standard_normal((target.n_dim, target.n_dim)) / np.sqrt(target.n_dim), -1)
    q = FullState(0.1 * rng.standard_normal(target.n_dim), root + np.diag(rng.uniform(0.2, 0.6, target.n_dim)))
    whole = FullState(target.gaussian(q).mean(), np.linalg.cholesky(target.gaussian(q).cov()))
    elbos, steps = [], []
    for of, state in ((target, q), (density, whole)):
        evaluation = quadrature.evaluate(of, state, NO_DRAWS)
        elbos.append(evaluation.elbo)
        steps.append(natural(state, quadrature.moments(of, state, NO_DRAWS, evaluation), rho, True))
    found, expected = target.gaussian(steps[0]), steps[1]
    assert_allclose(elbos[0], elbos[1], rtol=1e-12)
    assert_allclose(found.mean(), expected.mean(), atol=1e-12 * np.abs(expected.mean()).max())
    assert_allclose(found.cov(), expected.cov(), atol=1e-12 * np.abs(expected.cov()).max())


@pytest.mark.parametrize("make", [logistic, linear, poisson])
def test_the_density_is_that_of_the_model_with_what_is_perpendicular_integrated_out(make):
    density = density_of(make)
    target = RowSpaceDensity(density, density.seen_from_rows)
    rng = np.random.default_rng(3)
    z = 0.3 * rng.standard_normal((4, target.n_dim))
    theta, along = target.space.to_theta(z), (target.space.axes() * target.space.scale()[:, None]).T
    logp, grad = density.logp_grad(theta)
    found, wider = (target.expected(FullState(z[0], width * np.eye(target.n_dim))) for width in (1e-5, 1e-4))
    sd, n_perpendicular = target.space.sd, len(target.space.normal) - target.space.basis.shape[1]
    integral = np.log(sd).sum() + 0.5 * n_perpendicular * np.log(2.0 * np.pi)
    assert_allclose(found.value, logp[0] + integral, rtol=1e-7)
    assert_allclose(found.grad, along @ grad[0], rtol=1e-5, atol=1e-4)
    hessian = density.mean_hessian(theta[:1]).products(along) @ along.T
    assert_allclose(wider.hessian.products(np.eye(target.n_dim)), hessian, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("make", [logistic, linear, poisson])
def test_the_fit_is_that_of_a_dense_covariance(make, monkeypatch):
    with pm.Model():
        make()
        found = pm.fit(method="ngvi", **QUIET)
    monkeypatch.setattr(expectations, "_FEWEST", 10**9)
    with pm.Model():  # what is known of the rows of the other model stays known
        make()
        dense = pm.fit(method="ngvi", family="full", **QUIET)
    assert isinstance(found.q, LowRankState)
    assert isinstance(dense.q, FullState)
    assert found.record.family == dense.record.family == "full"
    assert found.converged
    assert dense.converged
    gap = max(found.record.gap, dense.record.gap) + found.elbo.se + dense.elbo.se
    assert abs(found.elbo.value - dense.elbo.value) < 2.0 * gap
    assert_allclose(found.mean_flat, dense.mean_flat, atol=0.1 * dense.sd_flat.min())
    assert_allclose(found.q.cov(), dense.q.cov(), atol=0.01 * dense.sd_flat.max() ** 2)


def test_the_gaussian_that_is_returned_is_that_of_its_covariance():
    rng = np.random.default_rng(2)
    axes, d = np.linalg.qr(rng.standard_normal((30, 3)))[0], np.geomspace(0.1, 10.0, 30)
    turn = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    state = LowRankState(rng.standard_normal(30), d, axes, (turn * [20.0, -0.9, 2.0]) @ turn.T)
    held = d[:, None] * (np.eye(30) + axes @ state.core @ axes.T) * d
    known, theta = multivariate_normal(state.mean(), np.linalg.inv(held)), rng.standard_normal((4, 30))
    assert_allclose(state.cov(), known.cov, rtol=1e-9, atol=1e-10)
    assert_allclose(state.sd() ** 2, np.diag(known.cov), rtol=1e-9)
    assert_allclose(state.log_density(theta), known.logpdf(theta), rtol=1e-9)
    assert_allclose(state.entropy(), known.entropy(), rtol=1e-10)
    assert_allclose(state.whiten(theta), theta @ whitener(state), rtol=1e-8, atol=1e-10)
    assert_allclose(state.dewhiten(state.whiten(theta)), theta, rtol=1e-8, atol=1e-10)
    assert_allclose(state.precision_product(theta), theta @ held, rtol=1e-8, atol=1e-8)
    rows, cols = np.array([0, 3, 3, 5]), np.array([0, 3, 1, 2])
    assert_allclose(state.covariances(rows, cols), state.cov()[rows, cols], rtol=1e-9, atol=1e-12)
    with pytest.raises(NotImplementedError, match="low-rank"):
        state.divergence(state)


def test_what_the_fit_returns_can_be_drawn_from_saved_and_gone_on_with(tmp_path):
    with pm.Model() as model:
        linear()
        approx = pm.fit(method="ngvi", start={"sigma": 1.5}, **QUIET)
        before = approx.elbo.value
        approx.save(tmp_path / "fit.nc")
        loaded = pymc_ngvi.load(tmp_path / "fit.nc", model)
        again = pm.fit(method="ngvi", start=approx, **QUIET)
        approx.refine(50, progressbar=False, tol=1e-4)
    assert approx.elbo.value >= before - 1e-4
    assert abs(again.elbo.value - approx.elbo.value) < 0.01
    assert_allclose(loaded.q.mean(), loaded.mean_flat)
    assert_allclose(loaded.q.sd(), again.q.sd(), rtol=0.02)
    draws = loaded.q.draws(np.random.default_rng(2).standard_normal((20_000, loaded.q.n_dim)))
    assert_allclose(draws.std(axis=0), loaded.q.sd(), rtol=5.0 / np.sqrt(2 * 20_000))
    assert set(approx.sample(10).posterior.data_vars) == {"a", "b", "sigma"}


def test_other_data_are_seen_from_other_rows(monkeypatch):
    found = []
    monkeypatch.setattr(by_rows, "seen_from_rows", lambda rows: found.append(1) or expectations.seen_from_rows(rows))
    x, eta, _ = data()
    with pm.Model():
        rows = pm.Data("rows", x)
        y = pm.Data("y_data", (eta > 0.0).astype(int))
        b = pm.Normal("b", 0.0, 1.0, shape=N_COEFFICIENTS)
        pm.Bernoulli("y", logit_p=rows @ b, observed=y)
        inference = pymc_ngvi.NGVI(random_seed=1, posterior="gaussian")
        first = inference.fit(progressbar=False).elbo.value
        again = inference.fit(progressbar=False).elbo.value
        assert found == [1]
        pm.set_data({"rows": 0.5 * x[:10], "y_data": (eta[:10] > 0.0).astype(int)})
        second = inference.fit(progressbar=False)
        assert found == [1, 1]
        fresh = pm.fit(method="ngvi", **QUIET)
    assert again == first
    assert second.q.core.shape == (9, 9)
    assert second.elbo.value > first
    assert_allclose(second.elbo.value, fresh.elbo.value, atol=1e-6)


def laplace_prior():
    return pm.Laplace("b", 0, 1, shape=N_COEFFICIENTS)


def unknown_scale():
    return pm.Normal("b", 0, pm.HalfNormal("s"), shape=N_COEFFICIENTS)


@pytest.mark.parametrize("prior", [laplace_prior, unknown_scale])
def test_priors_that_are_no_fixed_normals_are_not_integrated_out(prior):
    def make():
        x, eta, _ = data()
        pm.Bernoulli("y", logit_p=x @ prior(), observed=eta > 0.0)

    assert density_of(make).seen_from_rows is None


def test_more_rows_than_half_of_the_coefficients():
    def make():
        rng = np.random.default_rng(1)
        x = rng.standard_normal((61, 120))
        pm.Bernoulli("y", logit_p=x @ pm.Normal("b", 0, 1, shape=120), observed=rng.random(61) < 0.5)

    assert density_of(make).seen_from_rows is None


def test_what_grows_without_end_is_named_as_in_the_model():
    def make():
        x, _, _ = data()
        b = pm.Normal("b", 0, 1, shape=N_COEFFICIENTS)
        pm.Bernoulli("y", logit_p=pm.Flat("a") + x @ b, observed=np.ones(N_ROWS, dtype=int))

    with pm.Model():
        make()
        with pytest.warns(pymc_ngvi.ConvergenceWarning, match="unbounded"):
            approx = pm.fit(method="ngvi", **QUIET)
    assert approx.record.growing == ("a",)
