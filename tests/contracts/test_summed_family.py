"""Gaussians whose precision is sparse but for sums over many coordinates, against dense ones."""

import numpy as np
import pymc as pm
import pytest

from scipy import sparse

from pymc_ngvi import LogDensity, Status, fit_ngvi, load
from pymc_ngvi.core.moments import Moments
from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.psis import Weights, WeightVerdict
from pymc_ngvi.core.target import MeanHessian
from pymc_ngvi.families import FullPrecisionState, FullState, SparseFamily, SummedState, fill
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure
from pymc_ngvi.families.matrices.sparse.summed import SummedStructure
from pymc_ngvi.fitting import auto, session
from pymc_ngvi.fitting.modes import climbs
from pymc_ngvi.mixtures.finite import search as mixture_search
from pymc_ngvi.reading import sums as wide
from pymc_ngvi.results.diagnosis import diagnose, missed_mass
from pymc_ngvi.steps.adaptive.secant import moments_of, natural_gradient
from pymc_ngvi.updates import natural

QUIET = {"progressbar": False, "random_seed": 1, "posterior": "gaussian"}


class Known(MeanHessian):
    """A Hessian by coordinates and sums."""

    def __init__(self, summed, joint):
        self._summed, self.joint = summed, joint
        whole = np.vstack([np.eye(summed.n_dim), summed.weights])
        self.dense = whole.T @ joint @ whole

    @property
    def summed(self):
        return self._summed

    def summed_values(self):
        pattern = self.summed.pattern
        return self.joint[pattern.rows, pattern.cols]


class Pair:
    """A state of a lattice, a coordinate that touches all of it, and two sums; and a dense one of its distribution."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        side, n = 5, 26
        one, path = sparse.eye_array(side), sparse.diags_array([np.ones(side - 1)] * 2, offsets=[-1, 1])
        lattice = (sparse.kron(path, one) + sparse.kron(one, path)).toarray()
        joint = np.ones((n + 2, n + 2))
        joint[1:n, 1:n] = lattice
        weights = np.zeros((2, n))
        weights[0, 1:], weights[1, 4:] = 1.0, self.rng.standard_normal(n - 4)
        self.n_dim, self.summed = n, SummedPattern(Pattern.of(joint), weights)
        self.structure = SummedStructure.of_sums(self.summed)
        self.location = self.rng.standard_normal(n)
        self.hessian = self.random(1.5)
        self.precision = -self.hessian.dense
        self.state = self.of(self.hessian)
        self.dense = FullPrecisionState(self.location, np.linalg.cholesky(self.precision))

    def random(self, excess):
        """Return a random Hessian; for an excess above 0, negative definite, and large along the sums."""
        pattern = self.summed.pattern
        joint = pattern.symmetric(self.rng.standard_normal(pattern.n_entries)).toarray()
        if excess:
            joint -= np.diag(excess * np.abs(joint).sum(axis=1))
            joint[self.n_dim :, self.n_dim :] -= 100.0 * np.eye(2)
        return Known(self.summed, joint)

    def of(self, hessian):
        start = SparseFamily(self.structure).from_scale(self.location, np.linspace(0.5, 2.0, self.n_dim))
        return start.precision_scaled_by(start.curvature(hessian), np.zeros(self.n_dim))[0]

    def whitened(self, state, hessian):
        if state is self.state:
            return state.curvature(hessian)
        root = state.unwhiten(np.eye(self.n_dim))
        return -root @ hessian.dense @ root.T


@pytest.fixture(params=[1, 2], ids=["seed1", "seed2"])
def pair(request):
    return Pair(request.param)


def test_the_distribution_is_that_of_the_dense_state(pair):
    state, dense = pair.state, pair.dense
    assert isinstance(state, SummedState)
    theta = pair.location + pair.rng.standard_normal((4, pair.n_dim))
    np.testing.assert_allclose(state.log_density(theta), dense.log_density(theta), rtol=1e-10)
    np.testing.assert_allclose(state.entropy(), dense.entropy(), rtol=1e-12)
    np.testing.assert_allclose(state.cov(), dense.cov(), atol=1e-12)
    np.testing.assert_allclose(state.sd(), dense.sd(), rtol=1e-10)
    i, j = np.meshgrid(np.arange(pair.n_dim), np.arange(pair.n_dim))  # inside the pattern, and outside
    np.testing.assert_allclose(state.covariances(i.ravel(), j.ravel()), dense.cov()[i.ravel(), j.ravel()], atol=1e-12)
    vectors = pair.rng.standard_normal((3, pair.n_dim))
    np.testing.assert_allclose(state.precision_product(vectors), vectors @ pair.precision, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(state.covariance_times(vectors), vectors @ dense.cov(), atol=1e-12)


def test_the_whitener_is_a_root_of_the_covariance(pair):
    """Draws are the mean and unwhitened normals."""
    unit = np.eye(pair.n_dim)
    root = pair.state.unwhiten(unit).T
    np.testing.assert_allclose(root @ root.T, pair.dense.cov(), atol=1e-12)
    np.testing.assert_allclose(pair.state.whiten(unit), root, atol=1e-12)
    np.testing.assert_allclose(pair.state.dewhiten(pair.state.whiten(unit)), unit, atol=1e-10)
    np.testing.assert_allclose(pair.state.draws(unit) - pair.location, root.T, atol=1e-12)


def test_curvatures_have_the_metric_of_the_gap(pair):
    state, cov = pair.state, pair.dense.cov()
    first, second = pair.random(0.0), pair.random(0.0)
    a, b = state.curvature(first), state.curvature(second)
    expected = np.trace(cov @ first.dense @ cov @ second.dense)
    np.testing.assert_allclose(state.inner(a, b), expected, rtol=1e-9)
    same = state.curvature_error(state.curvature(pair.hessian))
    assert state.inner(same, same) < 1e-18
    relative = cov @ (first.dense + pair.precision)
    error = state.curvature_error(a)
    np.testing.assert_allclose(state.inner(error, error), np.trace(relative @ relative), rtol=1e-9)
    # With the whitened gradient before it, the length of a natural gradient.
    longer = np.concatenate([np.full(pair.n_dim, 2.0), error])
    np.testing.assert_allclose(state.inner(longer, longer), 4.0 * pair.n_dim + np.trace(relative @ relative), rtol=1e-9)


@pytest.mark.parametrize("rho", [0.3, 1.0])
@pytest.mark.parametrize("is_known", [True, False])
def test_natural_steps_are_those_of_the_dense_state(pair, rho, is_known):
    hessian, grad = pair.random(1.2), pair.rng.standard_normal(pair.n_dim)
    found = []
    for state in (pair.state, pair.dense):
        none = np.zeros(pair.n_dim)
        moments = Moments(state.whiten(grad), pair.whitened(state, hessian), none, none, 0.0, 0.0, 0.0)
        again = moments_of(state, moments, natural_gradient(state, moments))
        if not is_known:
            pair.structure._last.clear()
        found.append(natural(state, again, rho, True))
    np.testing.assert_allclose(found[0].location, found[1].location, atol=1e-10)
    np.testing.assert_allclose(found[0].cov(), found[1].cov(), atol=1e-11)
    expected = (1 - rho) * pair.precision - rho * hessian.dense
    np.testing.assert_allclose(found[0].precision_product(np.eye(pair.n_dim)), expected, atol=1e-9)
    for one, other in ((0, 1), (1, 0)):  # and how far they are apart
        states = [(pair.state, found[0]), (pair.dense, found[1])]
        kl = [both[one].divergence(both[other]) for both in states]
        np.testing.assert_allclose(kl[0], kl[1], rtol=1e-9)
    precision = pair.state.unflat(pair.state.whitened_precision(found[0]))
    again = pair.state.precision_scaled_by(precision, none)[0]
    np.testing.assert_allclose(again.cov(), found[1].cov(), atol=1e-11)


def test_a_step_that_is_not_positive_definite_is_none(pair):
    opposite = Known(pair.summed, -pair.hessian.joint)
    curvature = pair.state.curvature(opposite)
    for rho in (0.5, 0.7, 1.0):  # at 0.5, all that is left is rounding
        scaled = pair.state.add_to_diagonal(rho * curvature, 1.0 - rho)
        assert pair.state.precision_scaled_by(scaled, np.zeros(pair.n_dim)) is None
    assert pair.state.precision_scaled_by(np.full_like(curvature, np.nan), np.zeros(pair.n_dim)) is None
    opposite.joint[:] = np.inf
    curvature = pair.state.curvature(opposite)
    assert not np.isfinite(pair.state.inner(curvature, curvature))
    assert pair.state.precision_scaled_by(pair.state.curvature(opposite), np.zeros(pair.n_dim)) is None


def test_only_the_whole_has_to_be_positive_definite(pair):
    """Where all effects move against the global coordinate, the sparse part goes down; the sum holds them."""
    n, joint = pair.n_dim, np.zeros_like(pair.hessian.joint)
    lattice = pair.summed.among.matrix.toarray()[1:, 1:].astype(float)
    joint[1:n, 1:n] = 0.05 * (np.diag(lattice.sum(axis=1)) - lattice)
    joint[1:n, 1:n] += np.eye(n - 1)
    joint[0, 1:n] = joint[1:n, 0] = 1.0
    joint[0, 0] = n - 1.0 - 5.0
    joint[n, n] = 10.0
    hessian = Known(pair.summed, -joint)
    assert np.linalg.eigvalsh(joint[:n, :n])[0] < -0.01
    np.testing.assert_allclose(pair.of(hessian).cov(), np.linalg.inv(-hessian.dense), rtol=1e-8, atol=1e-10)


def test_arrays_make_the_same_state(pair):
    again = SummedState.of_arrays(pair.state.arrays())
    np.testing.assert_array_equal(again.cov(), pair.state.cov())
    for name, value in (("sum_pins", np.array([pair.n_dim])), ("sum_weights", np.ones((2, 3)))):
        with pytest.raises(ValueError, match="the sums of the precision are none"):
            SummedState.of_arrays({**pair.state.arrays(), name: value})


def test_other_hessians_are_refused(pair):
    other = SummedPattern(pair.summed.pattern, pair.summed.weights[:1])
    with pytest.raises(ValueError, match="other sums"):
        pair.state.curvature(Known(other, np.zeros_like(pair.hessian.joint)[:-1, :-1]))
    with pytest.raises(ValueError, match="no sums over many"):
        MeanHessian.summed_values(pair.hessian)
    with pytest.raises(NotImplementedError, match="exact expectations only"):
        pair.state.curvature_diagonal(pair.state.curvature(pair.hessian))


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
        monkeypatch.setattr(module, "step_seconds", lambda s: 1e-12 if isinstance(s, FilledStructure) else of(s))


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
    assert "beside 1 sum over many coordinates" in str(approx.summary(var_names=["level"]))
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
    for module, limit in ((climbs, "MOST_NEWTON"), (missed_mass, "_MOST_DENSE")):
        monkeypatch.setattr(module, limit, 20)
    approx, ends = fit_ngvi(model=icar(), **QUIET), []
    assert isinstance(approx.q, SummedState)
    local = mixture_search.local_component
    for module in (climbs, mixture_search):
        monkeypatch.setattr(module, "local_component", lambda *given: ends.append(found := local(*given)) or found)
    monkeypatch.setattr(Weights, "verdict", lambda self, n_dim=None: WeightVerdict.UNEVEN)
    monkeypatch.setattr(diagnose, "_OF_GRADIENTS", 10.0)
    monkeypatch.setattr(diagnose, "has_one_mode", lambda density: False)
    posterior, rng = approx._posterior, np.random.default_rng(1)
    for look in (
        lambda: approx.diagnose(random_seed=1),
        lambda: missed_mass.other_modes(posterior.density, posterior.distribution, approx.elbo.value, rng),
    ):
        look()
        assert ends
        assert all(isinstance(end, SummedState) for end in ends)
        ends.clear()


@pytest.mark.usefixtures("few")
def test_marginal_sds_are_those_of_dense_algebra():
    """With normal noise of a known scale the posterior is normal, and a fit is exact."""
    side, noise = 6, 0.5
    n, (i, j) = side**2, edges(side).T
    adjacent = np.zeros((n, n), dtype=int)
    adjacent[i, j] = adjacent[j, i] = 1
    with pm.Model() as model:
        level = pm.Flat("level", initval=0.0)
        phi = pm.ICAR("phi", W=adjacent, sigma=0.7, zero_sum_stdev=0.001)
        pm.Normal("y", level + phi, noise, observed=np.sin(np.arange(n)))
    approx = fit_ngvi(model=model, **QUIET)
    assert isinstance(approx.q, SummedState)
    laplacian = np.diag(adjacent.sum(axis=1)) - adjacent
    design = np.hstack([np.ones((n, 1)), np.eye(n)])
    precision = design.T @ design / noise**2
    precision[1:, 1:] += laplacian / 0.7**2 + 1.0 / (0.001 * n) ** 2
    np.testing.assert_allclose(approx.q.sd(), np.sqrt(np.diagonal(np.linalg.inv(precision))), rtol=1e-6)


@pytest.mark.usefixtures("few")
def test_draws_take_a_family_of_their_own(monkeypatch):
    """A fit that rows do not serve goes on with draws, and those have no sums."""
    monkeypatch.setattr(session.FitSession, "_rows_fail", lambda self: self._options.choice.estimator == "quadrature")
    seen = []
    callback = lambda approx, losses, i: seen.append(type(approx.q))  # noqa: E731
    approx = fit_ngvi(model=grouped(zero_sum, 25), callbacks=[callback], **QUIET)
    assert approx.record.estimator == "price"
    assert approx.status is Status.CONVERGED
    assert (seen[0], seen[-1], type(approx.q)) == (SummedState, FullState, FullState)
    assert np.isfinite(approx.sample(5, random_seed=1).posterior["u"].to_numpy()).all()
