"""Gaussians with a sparse precision of any shape, against dense ones."""

import numpy as np
import pymc as pm
import pytest

from scipy import sparse

from pymc_ngvi import ConvergenceWarning, Status, fit_ngvi, load
from pymc_ngvi.core.hessians import MatrixHessian
from pymc_ngvi.core.moments import Moments
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.families import FilledState, FullPrecisionState, SparseFamily, SparseState, fill
from pymc_ngvi.families.fill import find_filled
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure
from pymc_ngvi.steps.adaptive.secant import moments_of, natural_gradient
from pymc_ngvi.updates import natural

QUIET = {"progressbar": False, "random_seed": 1, "posterior": "gaussian"}


def lattice(side):
    """Return a lattice, and a coordinate that touches everything, before it."""
    one, path = sparse.eye_array(side), sparse.diags_array([np.ones(side - 1)] * 2, offsets=[-1, 1])
    inner = (sparse.kron(path, one) + sparse.kron(one, path)).toarray()
    return np.block([[np.ones((1, 1)), np.ones((1, side**2))], [np.zeros((side**2, 1)), inner]])


class Pair:
    """A state, and a dense one of the same distribution."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.pattern = Pattern.of(lattice(5))
        self.structure = FilledStructure.of(self.pattern)
        self.n_dim = self.pattern.n_dim
        self.location = self.rng.standard_normal(self.n_dim)
        self.precision = self.matrix(2.0)
        self.state = self.of(self.location, self.precision)
        self.dense = FullPrecisionState(self.location, np.linalg.cholesky(self.precision))

    def matrix(self, excess):
        """Return a random matrix of the pattern; for an excess above 0, positive definite."""
        values = self.pattern.symmetric(self.rng.standard_normal(self.pattern.n_entries)).toarray()
        return values + np.diag(np.abs(values).sum(axis=1) * excess)

    def hessian(self, matrix):
        return MatrixHessian(-matrix, self.pattern)

    def of(self, location, precision):
        start = SparseFamily(self.structure).from_scale(location, np.ones(self.n_dim))
        return start.precision_scaled_by(start.curvature(self.hessian(precision)), np.zeros(self.n_dim))[0]


@pytest.fixture(params=[1, 2], ids=["seed1", "seed2"])
def pair(request):
    return Pair(request.param)


def test_the_distribution_is_that_of_the_dense_state(pair):
    state, dense = pair.state, pair.dense
    assert isinstance(state, FilledState)
    theta = pair.location + pair.rng.standard_normal((4, pair.n_dim))
    np.testing.assert_allclose(state.log_density(theta), dense.log_density(theta), rtol=1e-10)
    np.testing.assert_allclose(state.entropy(), dense.entropy(), rtol=1e-12)
    np.testing.assert_allclose(state.cov(), dense.cov(), atol=1e-12)
    np.testing.assert_allclose(state.sd(), dense.sd(), rtol=1e-10)
    i, j = np.meshgrid(np.arange(pair.n_dim), np.arange(pair.n_dim))  # inside the pattern, and outside
    np.testing.assert_allclose(state.covariances(i.ravel(), j.ravel()), dense.cov()[i.ravel(), j.ravel()], atol=1e-12)
    some = np.array([3, 0, 17])
    np.testing.assert_allclose(state.cov_block(some), dense.cov()[np.ix_(some, some)], atol=1e-12)
    vectors = pair.rng.standard_normal((3, pair.n_dim))
    np.testing.assert_allclose(state.precision_product(vectors), vectors @ pair.precision, rtol=1e-9, atol=1e-9)


def test_draws_have_the_covariance(pair):
    """Whitened by the dense factor, within 5 standard errors."""
    n = 40_000
    draws = pair.state.draws(pair.rng.standard_normal((n, pair.n_dim)))
    whitened = (draws - pair.location) @ np.linalg.cholesky(pair.precision)
    np.testing.assert_allclose(whitened.T @ whitened / n, np.eye(pair.n_dim), atol=5.0 * np.sqrt(2.0 / n))


def test_the_whitener_is_a_root_of_the_covariance(pair):
    unit = np.eye(pair.n_dim)
    root = pair.state.unwhiten(unit).T
    np.testing.assert_allclose(root @ root.T, pair.dense.cov(), atol=1e-12)
    np.testing.assert_allclose(pair.state.whiten(unit), root, atol=1e-12)
    np.testing.assert_allclose(pair.state.dewhiten(pair.state.whiten(unit)), unit, atol=1e-10)


def test_global_coordinates_come_last(pair):
    """Their draws depend on base draws of their own alone, which is what step rules assume of them."""
    np.testing.assert_array_equal(pair.state.globals_, [0])
    base = pair.rng.standard_normal((2, pair.n_dim))
    base[1, 0] = base[0, 0]
    draws = pair.state.draws(base)
    assert draws[0, 0] == draws[1, 0]


def test_curvatures_have_the_metric_of_the_gap(pair):
    first, second = pair.matrix(0.0), pair.matrix(0.0)
    a, b = (pair.state.curvature(pair.hessian(m)) for m in (first, second))
    c = pair.dense.unwhiten(np.eye(pair.n_dim)).T
    dense = [c.T @ m @ c for m in (first, second)]
    np.testing.assert_allclose(pair.state.flat(a) @ pair.state.flat(b), np.sum(dense[0] * dense[1]), rtol=1e-9)
    same = pair.state.curvature(pair.hessian(pair.precision))
    np.testing.assert_allclose(pair.state.curvature_error(same), 0.0, atol=1e-10)
    assert pair.state.curvature_diagonal(same) == pytest.approx(np.ones(pair.n_dim))
    error = pair.state.curvature_error(a)
    np.testing.assert_allclose(error @ error, np.sum((dense[0] - np.eye(pair.n_dim)) ** 2), rtol=1e-9)


@pytest.mark.parametrize("rho", [0.3, 1.0])
def test_natural_steps_are_those_of_the_dense_state(pair, rho):
    matrix, grad = pair.matrix(1.5), pair.rng.standard_normal(pair.n_dim)
    found = []
    for state in (pair.state, pair.dense):
        none = np.zeros(pair.n_dim)
        curvature = state.curvature(pair.hessian(matrix))
        moments = Moments(state.whiten(grad), curvature, none, none, 0.0, 0.0, 0.0)
        again = moments_of(state, moments, natural_gradient(state, moments))
        found.append(natural(state, again, rho, True))
    np.testing.assert_allclose(found[0].location, found[1].location, atol=1e-10)
    np.testing.assert_allclose(found[0].cov(), found[1].cov(), atol=1e-11)
    np.testing.assert_allclose(
        found[0].precision_product(np.eye(pair.n_dim)), (1 - rho) * pair.precision + rho * matrix, atol=1e-9
    )


def test_a_step_that_is_not_positive_definite_is_none(pair):
    curvature = pair.state.curvature(pair.hessian(-pair.precision))
    for rho in (0.5, 0.7, 1.0):  # at 0.5, all that is left is rounding
        scaled = pair.state.add_to_diagonal(rho * curvature, 1.0 - rho)
        assert pair.state.precision_scaled_by(scaled, np.zeros(pair.n_dim)) is None
    assert pair.state.precision_scaled_by(np.full_like(curvature, np.nan), np.zeros(pair.n_dim)) is None


def test_what_is_known_of_a_curvature_is_what_would_be_found(pair):
    """Sums with the identity are known; others, and those of another state, are not."""
    curvature = pair.state.curvature(pair.hessian(pair.matrix(1.5)))
    known = pair.structure._curvature[0]
    diagonal = pair.structure.fronts.diagonal
    plain = pair.state.add_to_diagonal(0.3 * curvature, 0.7)
    assert known.parts(plain, diagonal) == pytest.approx((0.7, 0.3))
    bent = plain.copy()
    bent[diagonal[3]] += 1e-9
    assert known.parts(bent, diagonal) is None
    assert known.parts(np.full_like(plain, np.nan), diagonal) is None
    cholesky = pair.structure.factor(pair.state.factor)
    np.testing.assert_allclose(
        pair.structure.unwhitened(pair.state.factor, plain), cholesky.unwhitened(plain), atol=1e-10
    )
    other = pair.of(pair.location, 2.0 * pair.precision)
    found = pair.structure.unwhitened(other.factor, plain)
    np.testing.assert_allclose(found, pair.structure.factor(other.factor).unwhitened(plain), atol=1e-10)


def test_a_step_without_globals_leaves_them_alone(pair):
    matrix, grad = pair.matrix(1.5), pair.rng.standard_normal(pair.n_dim)
    grad, curvature = pair.state.without_globals(grad, pair.state.curvature(pair.hessian(matrix)))
    growth, moves = [], []
    for rho in (0.02, 0.01):
        new, displacement = pair.state.precision_scaled_by(pair.state.add_to_diagonal(rho * curvature, 1 - rho), grad)
        growth.append(new.sd() / pair.state.sd() - 1.0)
        moves.append(displacement / pair.state.sd())
    assert np.abs(growth[1][1:]).max() > 1e-4
    assert abs(growth[1][0]) < 1e-5
    np.testing.assert_allclose(growth[0][0] / growth[1][0], 4.0, rtol=0.1)  # of second order in the step
    assert abs(moves[1][0]) < 0.01 * np.abs(moves[1]).max()


def test_divergence_and_precision_of_another_state(pair):
    other_precision = pair.matrix(2.0)
    other = pair.of(pair.location + 1.0, other_precision)
    dense = FullPrecisionState(other.location, np.linalg.cholesky(other_precision))
    np.testing.assert_allclose(pair.state.divergence(other), pair.dense.divergence(dense), rtol=1e-10)
    np.testing.assert_allclose(pair.state.divergence(pair.state), 0.0, atol=1e-10)
    expected = pair.state.curvature(pair.hessian(other_precision))
    np.testing.assert_allclose(pair.state.whitened_precision(other), expected, atol=1e-10)


def test_arrays_make_the_same_state(pair):
    copy = FilledState.of_arrays(pair.state.arrays())
    np.testing.assert_array_equal(copy.cov(), pair.state.cov())
    other = pair.state.from_params({k: 2.0 * v for k, v in pair.state.params().items()})
    np.testing.assert_allclose(other.sd(), 0.5 * pair.state.sd())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("precision_rows", lambda a: a[::-1]),
        ("precision_cols", lambda a: a + 1),
        ("precision_rows", lambda a: a[:-1]),
        ("precision_part", lambda a: a + 1),
        ("precision_depth", lambda a: a - 1),
    ],
    ids=["rows in reverse", "cols outside", "too few rows", "parts from 1", "depths below 0"],
)
def test_arrays_that_make_no_structure_are_refused(name, change):
    arrays = dict(Pair(1).state.arrays())
    arrays[name] = change(arrays[name])
    with pytest.raises(ValueError, match="is none"):
        FilledState.of_arrays(arrays)


def test_a_hessian_with_other_entries_is_refused(pair):
    wider = Pattern.of(np.ones((pair.n_dim,) * 2))
    with pytest.raises(ValueError, match="leaves out"):
        pair.state.curvature(MatrixHessian(-np.eye(pair.n_dim), wider))
    with pytest.raises(ValueError, match="counts as dense"):
        pair.state.curvature(MatrixHessian(-np.eye(pair.n_dim)))


def test_what_it_does_not_know_says_so(pair):
    for operation in (pair.state.merged, pair.state.squared, pair.state.times_lower_half):
        with pytest.raises(NotImplementedError, match="natural steps"):
            operation(pair.state, 0.5)


def test_memory_covers_what_a_state_holds(pair):
    held = sum(value.nbytes for value in pair.state.params().values())
    assert held < SparseFamily(pair.structure).memory_bytes(pair.n_dim) < 1000 * held
    assert pair.state.n_params == pair.n_dim + pair.structure.fronts.n_entries


def test_arrows_stay_where_they_cost_no_more():
    """Groups beside globals, and small chains; not long ones, nor maps."""
    groups = np.eye(400)
    groups[:4] = 1.0
    assert find_filled(Pattern.of(groups)) is None
    for n, is_filled in ((200, False), (4000, True)):
        chain = sparse.diags_array([np.ones(n), np.ones(n - 1)], offsets=[0, 1])
        assert (find_filled(Pattern.of(chain)) is not None) is is_filled


# --- fits -------------------------------------------------------------------------------------------------------------


def map_of_counts(side=18):
    rng = np.random.default_rng(7)
    index = np.arange(side**2).reshape(side, side)
    i = np.concatenate([index[:, :-1].ravel(), index[:-1].ravel()])
    j = np.concatenate([index[:, 1:].ravel(), index[1:].ravel()])
    y = rng.poisson(np.exp(np.add.outer(np.sin(np.arange(side) / 3), np.cos(np.arange(side) / 4)))).ravel()
    with pm.Model() as model:
        log_sd = pm.Normal("log_sd", -1, 1)
        field = pm.Normal("field", 0, 3, shape=side**2)
        scaled = (field[i] - field[j]) * pm.math.exp(-log_sd)
        pm.Potential("smooth", -0.5 * (scaled**2).sum() - side**2 * log_sd)
        pm.Poisson("y", pm.math.exp(field), observed=y)
    return model


@pytest.fixture(scope="module")
def always():
    """Take fill-in wherever it can be had: models that gain by it are large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "_MUCH", np.inf)
        patch.setattr(fill, "_LITTLE", 0.0)
        find_filled.cache_clear()
        yield
    find_filled.cache_clear()


@pytest.fixture(scope="module")
def fitted(always):
    model = map_of_counts()
    return model, {f: fit_ngvi(model=model, family=f, **QUIET) for f in ("sparse", "full")}


def test_a_fit_is_that_of_the_dense_family(fitted):
    filled, full = fitted[1]["sparse"], fitted[1]["full"]
    assert isinstance(filled.q, FilledState)
    assert filled.status is full.status is Status.CONVERGED
    assert abs(filled.elbo.value - full.elbo.value) < 1e-3  # nats; tol asks for 0.05
    np.testing.assert_allclose(filled.q.sd(), full.q.sd(), rtol=2e-3)
    assert np.abs((filled.q.mean() - full.q.mean()) / full.q.sd()).max() < 0.02


def test_results_are_saved_and_described(fitted, tmp_path):
    model, approx = fitted[0], fitted[1]["sparse"]
    approx.save(tmp_path / "map.nc")
    again = load(tmp_path / "map.nc", model)
    assert isinstance(again.q, FilledState)
    np.testing.assert_array_equal(again.q.sd(), approx.q.sd())
    np.testing.assert_allclose(approx.cov_of("log_sd").to_numpy(), approx.q.sd()[:1, None] ** 2, rtol=1e-8)
    assert "1 global parameter" in str(approx.structure) or "separators" in str(approx.structure)
    assert approx.summary(var_names=["log_sd"]) is not None
    assert np.isfinite(approx.sample(20, random_seed=1).posterior["field"].to_numpy()).all()


def test_draws_fit_it_too(fitted):
    """Adaptive steps on draws end where exact expectations do; 0.2 nats are 4 times the tolerance."""
    model, exact = fitted
    approx = fit_ngvi(model=model, family="sparse", estimator="price", step="adaptive", **QUIET)
    assert isinstance(approx.q, FilledState)
    assert approx.status is Status.CONVERGED
    error = (approx.q.mean() - exact["full"].q.mean()) / exact["full"].q.sd()
    assert np.abs(error).max() < 0.5
    assert np.sqrt(np.mean(error**2)) < 0.1


def test_other_updates_and_components_take_an_arrow(always):
    model = map_of_counts(6)
    with pytest.warns(ConvergenceWarning):
        approx = fit_ngvi(2, model=model, family="sparse", update="cholesky_precision", **QUIET)
    with pytest.warns(ConvergenceWarning):
        mixture = fit_ngvi(2, model=model, family="mixture", components="sparse", n_components=1, **QUIET)
    assert isinstance(approx.q, SparseState)
    assert isinstance(mixture.q.components[0], SparseState)
