"""Sums over many coordinates are found in models, and fits with them are those by dense Gaussians."""

import numpy as np
import pymc as pm
import pytest

from pymc_ngvi import LogDensity, Status, fit_ngvi, load
from pymc_ngvi.families import FullState, SparseFamily, SummedState
from pymc_ngvi.families import sparse as fill
from pymc_ngvi.families.sparse import SparseStructure, SummedStructure
from pymc_ngvi.fitting import modes as climbs
from pymc_ngvi.fitting import options as auto
from pymc_ngvi.fitting import session
from pymc_ngvi.reading import predictors as wide

QUIET = {"progressbar": False, "random_seed": 1, "posterior": "gaussian"}


# --- models -----------------------------------------------------------------------------------------------------------


def edges(side):
    index = np.arange(side**2).reshape(side, side)
    pairs = (index[:, :-1], index[:, 1:]), (index[:-1], index[1:])
    return np.concatenate([np.column_stack([a.ravel(), b.ravel()]) for a, b in pairs])


def icar(side=6):
    rng, n, (i, j) = np.random.default_rng(7), side**2, edges(side).T
    adjacent = np.zeros((n, n), dtype=int)
    adjacent[i, j] = adjacent[j, i] = 1
    x, surface = rng.standard_normal(n), np.add.outer(np.arange(side), -np.arange(side)).ravel() / 2.0
    counts = rng.poisson(np.exp(1.0 + 0.5 * x + surface))
    with pm.Model() as model:
        level, beta, sigma = pm.Normal("level", 0, 2), pm.Normal("beta", 0, 1), pm.HalfNormal("sigma", 1)
        phi = pm.ICAR("phi", W=adjacent)
        pm.Poisson("y", pm.math.exp(level + beta * x + sigma * phi), observed=counts)
    return model


def grouped(effects, n=40):
    """Return a model with effects of groups that are made by a function."""
    rng, group = np.random.default_rng(8), np.arange(3 * n) % n
    with pm.Model() as model:
        level, sd = pm.Normal("level", 0, 2), pm.HalfNormal("sd", 1)
        eta = level + effects(sd, n)[group]
        pm.Poisson("y", pm.math.exp(eta), observed=rng.poisson(2.0 * np.exp(0.5 * rng.standard_normal(n))[group]))
    return model


def zero_sum(sd, n):
    return pm.ZeroSumNormal("u", sigma=sd, shape=n)


def softly(sd, n):
    u = pm.Normal("u", 1.0, sd, shape=n)
    pm.Potential("sum", -0.5 * (pm.math.sum(u - 1.0) / 0.01) ** 2)
    return u


def centred(sd, n):
    u = pm.Normal("u", 0, 1, shape=n)
    return sd * (u - u.mean())


def weighted(sd, n):
    u = pm.Normal("u", 0, sd, shape=n)
    pm.Potential("sum", -0.5 * (pm.math.dot(np.linspace(1, 2, n), u) / 0.01) ** 2)
    return u


def tilted(sd, n):
    u = pm.Normal("u", 0, sd, shape=n)
    pm.Potential("tilt", 0.01 * u.sum())
    return u


MODELS = {
    "pm.ICAR": (icar, 36),
    "pm.ZeroSumNormal": (lambda: grouped(zero_sum), 39),
    "Potential": (lambda: grouped(softly), 40),
    "less the mean": (lambda: grouped(centred), 40),
    "weighted": (lambda: grouped(weighted), 40),
}


@pytest.fixture
def few(monkeypatch):
    """Let sums be over few coordinates: models of users have hundreds."""
    monkeypatch.setattr(wide, "_MANY", 20)
    monkeypatch.setattr(fill, "_MANY_PAIRS", 0)
    monkeypatch.setattr(auto, "_SMALL", 10)
    monkeypatch.setattr(auto, "_LESS", 0)
    of = fill.step_seconds
    for module in (auto, fill):
        monkeypatch.setattr(module, "step_seconds", lambda s: 1e-12 if isinstance(s, SparseStructure) else of(s))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_found(name):
    """Expectations and Hessians are those of a model whose sums are not looked for."""
    build, n = MODELS[name]
    density = LogDensity(build())
    q = FullState(density.initial_point(), 0.1 * np.eye(density.n_dim) + 0.02 * np.tri(density.n_dim, k=-1))
    [weights] = density.summed.weights
    assert np.count_nonzero(weights) == n
    found = density.expected(q)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide, "_MANY", 1_000)
        plain = LogDensity(build())
        assert plain.summed is None
        expected = plain.expected(q)
    np.testing.assert_allclose(found.value, expected.value, rtol=1e-10)
    size = np.abs(expected.grad).max()
    np.testing.assert_allclose(found.grad, expected.grad, atol=1e-9 * size)
    unit = np.eye(density.n_dim)
    dense = expected.hessian.products(unit)
    close = {"atol": 1e-9 * np.abs(dense).max()}
    np.testing.assert_allclose(found.hessian.products(unit), dense, **close)
    np.testing.assert_allclose(found.hessian.products(unit[:1]), dense[:1], **close)
    np.testing.assert_allclose(found.hessian.diagonal(), np.diagonal(dense), **close)
    joint = density.summed.pattern.symmetric(found.hessian.summed_values()).toarray()
    whole = np.vstack([unit, density.summed.weights])
    np.testing.assert_allclose(whole.T @ joint @ whole, dense, **close)
    assert density.summed.pattern.n_entries < 0.25 * density.n_dim**2
    linear = density.rows.linear_map
    np.testing.assert_allclose(linear.plain.times(unit), linear.times(unit), atol=1e-12)


@pytest.mark.usefixtures("few")
def test_without_sums_nothing_changes():
    """Log p is linear in the sum over all effects."""
    density = LogDensity(grouped(tilted))
    assert density.summed is None
    assert density.pattern is not None
    assert density.rows.linear_map is density.rows.predictors.linear_map


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", ["pm.ICAR", "pm.ZeroSumNormal"])
def test_a_fit_is_that_of_the_dense_family(name, tmp_path):
    model = MODELS[name][0]()
    approx, full = fit_ngvi(model=model, **QUIET), fit_ngvi(model=model, family="full", **QUIET)
    assert isinstance(approx.q, SummedState)
    assert approx.status is full.status is Status.CONVERGED
    assert abs(approx.elbo.value - full.elbo.value) < 1e-3  # nats; tol asks for 0.05
    np.testing.assert_allclose(approx.q.sd(), full.q.sd(), rtol=5e-3)
    assert np.abs((approx.q.mean() - full.q.mean()) / full.q.sd()).max() < 0.02
    approx.save(tmp_path / "sums.nc")
    again = load(tmp_path / "sums.nc", model)
    assert isinstance(again.q, SummedState)
    np.testing.assert_array_equal(again.q.sd(), approx.q.sd())
    np.testing.assert_allclose(approx.cov_of("level").to_numpy(), approx.q.sd()[:1, None] ** 2, rtol=1e-8)
    # Where another fit began from it, or from the dense one, it ends at once, or there.
    for start, most in ((approx, 3), (full, approx.n_iterations + 5)):
        other = fit_ngvi(model=model, start=start, **QUIET)
        assert isinstance(other.q, SummedState)
        assert other.n_iterations <= most
        assert abs(other.elbo.value - full.elbo.value) < 1e-3
    words = {"pm.ICAR": "a sum over 36 coordinates of `phi`", "pm.ZeroSumNormal": "39 coordinates of `u_zerosum__`"}
    assert words[name] in str(approx.structure)
    assert np.isfinite(approx.sample(20, random_seed=1).posterior["level"].to_numpy()).all()


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", ["pm.ICAR", "less the mean"])
def test_hessians_at_draws_have_the_same_sums(name):
    """A factor takes them as it takes expectations."""
    density, rng = LogDensity(MODELS[name][0]()), np.random.default_rng(3)
    theta = density.initial_point() + 0.3 * rng.standard_normal((2, density.n_dim))
    found = density.mean_hessian(theta)
    summed, whole = density.summed, np.vstack([np.eye(density.n_dim), density.summed.weights])
    joint = summed.pattern.symmetric(found.summed_values()).toarray()
    dense = found.products(np.eye(density.n_dim))
    np.testing.assert_allclose(whole.T @ joint @ whole, dense, atol=1e-9 * np.abs(dense).max())
    state = SparseFamily(SummedStructure.of_sums(summed)).from_scale(theta[0], np.linspace(0.5, 2.0, density.n_dim))
    assert np.isfinite(found.whitened(state)).all()


@pytest.mark.usefixtures("few")
def test_modes_are_looked_for(monkeypatch):
    """Gaussians about the ends of climbs are of the family of the fit."""
    monkeypatch.setattr(climbs, "MOST_NEWTON", 20)
    approx = fit_ngvi(model=icar(), **QUIET)
    q, rng = approx.q, np.random.default_rng(1)
    assert isinstance(q, SummedState)
    points = q.draws(3.0 * rng.standard_normal((4, q.n_dim)))
    [mode], _ = climbs.modes_from(approx.density, q, points, np.broadcast_to(q.sd(), points.shape))
    assert isinstance(mode.gaussian, SummedState)


@pytest.mark.usefixtures("few")
def test_draws_take_a_family_of_their_own(monkeypatch):
    """A fit that rows do not serve goes on with draws, and those have no sums."""
    monkeypatch.setattr(session.FitSession, "_rows_fail", lambda self: self.options.choice.estimator == "quadrature")
    seen = []
    callback = lambda approx, losses, i: seen.append(type(approx.q))  # noqa: E731
    approx = fit_ngvi(model=grouped(zero_sum, 25), callbacks=[callback], **QUIET)
    assert approx.record.estimator == "price"
    assert approx.status is Status.CONVERGED
    assert (seen[0], seen[-1], type(approx.q)) == (SummedState, FullState, FullState)
    assert np.isfinite(approx.sample(5, random_seed=1).posterior["u"].to_numpy()).all()
