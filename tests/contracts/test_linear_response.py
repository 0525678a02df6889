"""Linear response: exact for Gaussians, the response of the optimum for others, by name and scale, refusals."""

import dataclasses

import numpy as np
import pymc as pm
import pytest
import xarray as xr

from numpy.testing import assert_allclose, assert_array_equal
from scipy import optimize
from scipy.special import expit

from pymc_ngvi import LogDensity, NGVIApproximation, Status
from pymc_ngvi.core.draws import sobol_draws
from pymc_ngvi.families import BlockFamily, BlockStructure, DiagonalState, FullState, MixtureState
from pymc_ngvi.results.corrections import response
from pymc_ngvi.results.corrections.response import ElboHessian, products_at

FIT = {"method": "ngvi", "progressbar": False, "backend": "quick"}
#: Coordinates of blocks that are not one behind the other.
LABELS = np.array([0, 1, 0, 2, 1, 0])


def random_q(kind, n_dim, seed):
    rng = np.random.default_rng(seed)
    q = DiagonalState.from_scale(rng.normal(size=n_dim), rng.uniform(0.3, 1.5, n_dim))
    if kind == "diagonal":
        return q
    made = BlockFamily(BlockStructure(LABELS[:n_dim])).from_scale(q.location, q.scale)
    parts = made.structure.unpack(made.factor.copy())
    for c in parts.blocks:
        c += np.tril(0.3 * rng.normal(size=c.shape), -1)
    return dataclasses.replace(made, factor=made.structure.pack(parts))


def held_or_differences(monkeypatch, products):
    monkeypatch.setattr(response, "_HELD", 2**24 if products == "held" else 0)


# --- Gaussians --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("products", ["held", "differences"])
@pytest.mark.parametrize("kind", ["diagonal", "block"])
@pytest.mark.parametrize("seed", [1, 2])
def test_exact_for_a_gaussian_wherever_q_is(kind, seed, products, monkeypatch):
    held_or_differences(monkeypatch, products)
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(6, 6)) + np.diag(rng.uniform(0.1, 3.0, 6))
    cov = root @ root.T
    with pm.Model() as model:
        pm.MvNormal("x", rng.normal(size=6), cov=cov)
    approx = NGVIApproximation(LogDensity(model), random_q(kind, 6, seed))
    found = approx.linear_response(tol=1e-10)
    size = np.sqrt(np.diag(cov))
    assert_allclose(found.cov / np.outer(size, size), cov / np.outer(size, size), atol=1e-6)
    assert_allclose(found.sd["x"], size, rtol=1e-6)
    xr.testing.assert_identical(found.cov * 0.0, approx.cov_of("x") * 0.0)  # labelled alike
    some = approx.linear_response(["x"], draws=2, tol=1e-10)
    assert_allclose(some.cov, cov, rtol=1e-5, atol=1e-6 * cov.max())


def test_a_fit_that_left_correlations_out():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(30, 1)) + 0.3 * rng.normal(size=(30, 3))  # collinear
    with pm.Model():
        beta = pm.Normal("beta", 0.0, 2.0, shape=3)
        pm.Normal("y", x @ beta, 1.0, observed=x.sum(1))
        approx = pm.fit(family="diagonal", random_seed=1, **FIT)
    exact = np.linalg.inv(x.T @ x + np.eye(3) / 4.0)
    assert_allclose(approx.linear_response().cov, exact, atol=1e-6)
    assert np.all(approx.sd_flat < 0.6 * np.sqrt(np.diag(exact)))


# --- others -----------------------------------------------------------------------------------------------------------


def logistic(n_dim=2, seed=5):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(25, 1)) + 0.5 * rng.normal(size=(25, n_dim))
    y = (rng.random(25) < expit(x.sum(1))).astype(int)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=n_dim)
        pm.Bernoulli("y", logit_p=x @ beta, observed=y)
    return model, x, y


@pytest.mark.parametrize("products", ["held", "differences"])
@pytest.mark.parametrize("kind", ["diagonal", "block"])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_hessian_is_the_derivative_of_the_elbo_s_gradient(kind, seed, products, monkeypatch):
    held_or_differences(monkeypatch, products)
    n_dim, rng = 6, np.random.default_rng(seed)
    density = LogDensity(logistic(n_dim)[0], backend="quick")
    q = random_q(kind, n_dim, seed)
    z = sobol_draws(16, n_dim, rng).z
    structure = BlockStructure(LABELS) if kind == "block" else BlockStructure(np.arange(n_dim))
    c = structure.dense(q.factor) if kind == "block" else np.diag(q.scale)
    stored = np.tril(np.ones((n_dim, n_dim)))[np.ix_(np.argsort(structure.order), np.argsort(structure.order))] > 0
    stored &= structure.dense(np.ones(structure.n_entries)) > 0  # entries of E: the lower triangles of blocks

    def gradient(u, e):
        """Of mean log p(m + C (u + (I + E) z)) + sum log (1 + E_ii)."""
        theta = q.location + (u + z @ (np.eye(n_dim) + e).T) @ c.T
        grad = density.logp_grad(theta)[1] @ c
        return grad.mean(0), np.where(stored, grad.T @ z / len(z), 0.0) + np.diag(1.0 / (1.0 + np.diag(e)))

    u, e = rng.normal(size=n_dim), np.where(stored, rng.normal(size=(n_dim, n_dim)), 0.0)
    step = 1e-5
    plus, minus = gradient(step * u, step * e), gradient(-step * u, -step * e)
    of_u, of_e = (-(a - b) / (2 * step) for a, b in zip(plus, minus, strict=True))
    lines = structure.order[structure.lines]
    hessian = ElboHessian(q, z, products_at(density, q.draws(z), q.sd(), n_tilts=6))
    found = hessian(np.concatenate([u, e[lines, structure.columns]]))
    assert_allclose(found[:n_dim], of_u, rtol=1e-5, atol=1e-6)
    assert_allclose(structure.dense(found[n_dim:]), of_e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", [1, 2])
def test_it_is_how_the_optimum_moves(seed):
    """Find the optimum on the same draws, tilt log p, and find it again."""
    model, x, y = logistic(seed=seed)
    z = sobol_draws(64, 2, np.random.default_rng(seed)).z

    def optimum(tilt, start):
        def loss(params):
            m, log_s = params[:2], params[2:]
            theta = m + np.exp(log_s) * z
            eta = theta @ x.T
            log_p = (y * eta - np.logaddexp(0.0, eta)).sum(1) - 0.125 * (theta**2).sum(1) + theta @ tilt
            grad = (y - expit(eta)) @ x - 0.25 * theta + tilt
            of_scale = (grad * z).mean(0) * np.exp(log_s) + 1.0
            return -log_p.mean() - log_s.sum(), -np.concatenate([grad.mean(0), of_scale])

        return optimize.minimize(loss, start, jac=True, method="BFGS", options={"gtol": 1e-10}).x

    best = optimum(np.zeros(2), np.zeros(4))
    step = 1e-3
    moved = [(optimum(step * t, best) - optimum(-step * t, best))[:2] / (2 * step) for t in np.eye(2)]
    q = DiagonalState.from_scale(best[:2], np.exp(best[2:]))
    approx = NGVIApproximation(LogDensity(model, backend="quick"), q)
    found = approx.linear_response(draws=64, tol=1e-10, random_seed=seed)
    assert_allclose(found.cov, moved, rtol=1e-4)


def test_standard_deviations_of_a_logistic_regression_come_near():
    """Against the posterior on a grid: q itself is far too narrow."""
    model, x, y = logistic()
    with model:
        approx = pm.fit(family="diagonal", random_seed=1, **FIT)
    at = np.linspace(-6.0, 9.0, 400)
    grid = np.stack(np.meshgrid(at, at, indexing="ij"), axis=-1)
    eta = grid @ x.T
    log_p = (y * eta - np.logaddexp(0.0, eta)).sum(-1) - 0.125 * (grid**2).sum(-1)
    mass = np.exp(log_p - log_p.max())
    mass /= mass.sum()
    mean = np.einsum("ij,ijk->k", mass, grid)
    cov = np.einsum("ij,ijk,ijl->kl", mass, grid - mean, grid - mean)
    sd = np.sqrt(np.diag(cov))
    found = approx.linear_response()
    assert np.all(approx.sd_flat < 0.85 * sd)
    assert_allclose(found.sd["beta"], sd, rtol=0.08)
    assert float(found.cov[0, 1]) / np.prod(found.sd["beta"].values) == pytest.approx(cov[0, 1] / sd.prod(), abs=0.1)


# --- names and scales -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    """A posterior that is Gaussian in log scale, level and slope, with known covariance: no data."""
    with pm.Model(coords={"term": ["level", "slope"], "obs": range(40)}) as model:
        scale = pm.LogNormal("scale", 0.3, 0.5)
        beta = pm.Normal("beta", pm.math.log(scale), 0.4, dims="term")
        x = np.linspace(-1.0, 1.0, 40)
        pm.Deterministic("mu", beta[0] + x * beta[1], dims="obs")
        pm.Deterministic("sum", beta.sum() + pm.math.log(scale))
    return model


#: Of log scale, level, slope.
COV = 0.25 * np.ones((3, 3)) + np.diag([0.0, 0.16, 0.16])


@pytest.fixture(scope="module")
def approx(model):
    q = DiagonalState.from_scale(np.full(3, 0.3), np.array([0.2, 0.4, 0.4]))
    return NGVIApproximation(LogDensity(model, backend="quick"), q)


def test_the_order_of_the_layout(approx):
    assert [approx.layout.label(i) for i in range(3)] == ["scale_log__", "beta[0]", "beta[1]"]


def test_quantities_by_name(approx):
    all_of_it = approx.linear_response()
    assert list(all_of_it.cov["unconstrained"].values) == ["scale_log__", "beta[0]", "beta[1]"]
    assert_allclose(all_of_it.cov, COV, rtol=1e-6)
    assert set(all_of_it.sd.data_vars) == {"scale_log__", "beta"}
    some = approx.linear_response(["sum", "scale", "beta"])
    jacobian = np.array([[1.0, 1.0, 1.0], [np.exp(0.3), 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert some.cov.dims == ("quantity", "quantity_2")
    assert list(some.cov["quantity_2"].values) == ["sum", "scale", "beta[0]", "beta[1]"]
    assert_allclose(some.cov, jacobian @ COV @ jacobian.T, rtol=1e-6)
    assert some.sd["sum"].shape == ()
    assert list(some.sd["term"].values) == ["level", "slope"]
    assert float(some.sd["beta"].sel(term="slope")) == pytest.approx(0.41**0.5)
    alone = approx.linear_response("scale_log__")
    assert_allclose(alone.cov, [[0.25]], rtol=1e-6)
    assert alone.cov.dims == ("unconstrained", "unconstrained_2")
    assert 0 < alone.n_products < all_of_it.n_products


def test_many_functions_of_few_coordinates(approx):
    """A line of 40 points takes two solves, and its covariance has rank 2."""
    found = approx.linear_response("mu")
    x = np.linspace(-1.0, 1.0, 40)
    jacobian = np.column_stack([np.ones(40), x])
    assert_allclose(found.cov, jacobian @ COV[1:, 1:] @ jacobian.T, rtol=1e-6, atol=1e-8)
    assert found.sd["mu"].dims == ("obs",)
    assert found.cov["quantity"].values[3] == "mu[3]"
    two = approx.linear_response("beta")
    assert found.n_products == two.n_products


def test_the_draws_are_fixed_but_for_another_seed():
    with logistic()[0]:
        approx = pm.fit(family="diagonal", random_seed=1, **FIT)
    first = approx.linear_response().cov
    assert_array_equal(first, approx.linear_response().cov)
    other = approx.linear_response(random_seed=7).cov
    assert not np.array_equal(first, other)
    assert_allclose(other, first, rtol=0.05)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_families_with_correlations_are_refused(model):
    density = LogDensity(model, backend="quick")
    full = FullState(np.zeros(3), np.eye(3))
    for q in (full, MixtureState.of([full, full])):
        with pytest.raises(
            ValueError, match=rf"leave out, and q is a {type(q).__name__}, which has its own: see cov_of"
        ):
            NGVIApproximation(density, q).linear_response()


def test_a_fit_that_has_not_converged_is_refused():
    with logistic()[0]:
        approx = pm.fit(0, family="diagonal", **FIT)
    assert approx.status is Status.NOT_STARTED
    with pytest.raises(ValueError, match=r"has not converged \(not started\).*Call refine"):
        approx.linear_response()


@pytest.mark.parametrize("products", ["held", "differences"])
def test_a_saddle_of_the_elbo_is_refused(products, monkeypatch):
    """Between two modes: log p is convex there."""
    held_or_differences(monkeypatch, products)
    with pm.Model() as model:
        x = pm.Flat("x", shape=2)
        pm.Potential("modes", pm.math.sum(4.0 * x**2 - x**4))
    approx = NGVIApproximation(
        LogDensity(model, backend="quick"), DiagonalState.from_scale(np.zeros(2), np.full(2, 0.1))
    )
    with pytest.raises(ValueError, match=r"not negative definite, so that q is not at an optimum\. Fit with a smaller"):
        approx.linear_response()


def test_what_conjugate_gradients_do_not_reach_is_refused(approx, monkeypatch):
    monkeypatch.setattr(response, "_MOST_ITERATIONS", 1)
    with pytest.raises(ValueError, match=r"nearly singular \(1 steps .* relative residual of 1e-06\)"):
        approx.linear_response()


def test_draws_outside_the_support_are_refused():
    with pm.Model() as model:
        x = pm.Flat("x")
        pm.Potential("half", pm.math.log(x))
    approx = NGVIApproximation(LogDensity(model, backend="quick"), DiagonalState.from_scale(np.ones(1), np.ones(1)))
    with pytest.raises(ValueError, match="not finite at some of 128 draws"):
        approx.linear_response()


def test_bad_arguments_are_refused(approx):
    for draws in (0, 1, 3, 100, 2.5):
        with pytest.raises(ValueError, match=f"a power of 2, at least 2; got {draws}"):
            approx.linear_response(draws=draws)
    with pytest.raises(
        ValueError, match="No variable is called 'beat'; there are 'scale_log__', 'beta', 'scale', 'mu'"
    ):
        approx.linear_response(["beta", "beat"])


def test_other_data_and_minibatches_are_refused():
    q = DiagonalState.from_scale(np.zeros(1), np.ones(1))
    with pm.Model() as model:
        y = pm.Data("y", [0.3, 0.6])
        pm.Normal("obs", pm.Normal("x"), 1.0, observed=y)
    approx = NGVIApproximation(LogDensity(model, backend="quick"), q)
    with model:
        pm.set_data({"y": [3.0, 4.0]})
    with pytest.raises(ValueError, match="'y' were changed after the fit"):
        approx.linear_response()
    with pm.Model() as model:
        pm.Normal("obs", pm.Normal("x"), 1.0, observed=pm.Minibatch(np.arange(20.0), batch_size=5), total_size=20)
    with pytest.raises(ValueError, match=r"pm\.Minibatch data, and linear response needs"):
        NGVIApproximation(LogDensity(model, backend="quick"), q).linear_response()
