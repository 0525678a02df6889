"""The sparse family against a dense precision of the same Gaussian, with coordinates in the order of the blocks."""

import tracemalloc

from dataclasses import replace

import numpy as np
import pytest

from matrix import two_seeds
from scipy import stats
from targets import NumpyTarget, Quadratic

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.types import BaseDraws, Evaluation, Moments, Outer, PathMoments
from pymc_ngvi.estimators import ESTIMATORS
from pymc_ngvi.families.full import FullPrecisionState
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.families.sparse import SparseFamily, SparseState
from pymc_ngvi.updates import UPDATES

LABELS = {
    "several sizes": [7, -1, 3, 7, 1, 3, -1, 7, 0, 1],
    "numbers": [0, 1, 2, -1, 3],
    "empty border": [1, 0, 1, 2, 2],
    "no blocks": [-1, -1, -1],
}
pytestmark = pytest.mark.parametrize("name", LABELS)
each_update = pytest.mark.parametrize("update", ["natural", "cholesky_precision", "euclidean"])


class Sparse(NumpyTarget):
    """A constant Hessian with a pattern, in the coordinates of the model."""

    def __init__(self, hessian):
        super().__init__(len(hessian))
        self.hessian, self.pattern = hessian, Pattern.of(hessian)

    def _values(self, theta):
        return self.hessian[self.pattern.rows, self.pattern.cols]

    def _products(self, theta, directions):
        return directions @ self.hessian


class Pair:
    """A sparse state, the dense one of the same Gaussian, and the way between their coordinates."""

    def __init__(self, labels, rng):
        self.structure = ArrowStructure.of(labels)
        self.order, self.n_dim = self.structure.order, len(labels)
        ordered = np.asarray(labels)[self.order]
        self.mask = (ordered[:, None] == ordered) | (ordered[:, None] < 0) | (ordered < 0)
        self.lower = np.tril(self.mask)
        location = rng.standard_normal(self.n_dim)
        factor = rng.standard_normal((self.n_dim, self.n_dim)) * self.lower
        factor[np.diag_indices(self.n_dim)] = np.exp(0.5 * rng.standard_normal(self.n_dim))
        self.full = FullPrecisionState(location[self.order], factor)
        self.state = SparseState(location, self.packed(factor), self.structure)

    def packed(self, ordered):
        """Pack a lower-triangular or a symmetric matrix in the order of the blocks; what is outside is left out."""
        n, start, blocks = self.structure.n_local, 0, []
        for size in self.structure.sizes:
            blocks.append(ordered[start : start + size, start : start + size].ravel())
            start += size
        return np.concatenate([*blocks, ordered[n:, :n].T.ravel(), ordered[n:, n:].ravel()])

    def dense(self, packed):
        """Return a packed symmetric matrix in the order of the blocks."""
        return self.structure.dense(packed)[np.ix_(self.order, self.order)]

    def triangle(self, packed):
        return self.structure.dense(packed, triangular=True)

    def in_model(self, ordered):
        """Return a matrix in the coordinates of the model."""
        place = self.structure.place
        return ordered[np.ix_(place, place)]

    def expected(self, update, grad, curvature, rho):
        """Return the step of the dense state; that along a Euclidean gradient without the entries outside."""
        new = UPDATES[update](self.full, moments_of(grad[self.order], curvature), rho, False)
        return replace(new, factor=new.factor * self.lower) if update == "euclidean" else new

    def assert_same(self, state, full, rtol=1e-9):
        np.testing.assert_allclose(state.location[self.order], full.location, rtol=rtol, atol=rtol)
        np.testing.assert_allclose(self.triangle(state.factor), full.factor, rtol=rtol, atol=rtol)

    def symmetric(self, rng):
        half = rng.standard_normal((self.n_dim, self.n_dim))
        return (half + half.T) * self.mask

    def definite(self, rng):
        factor = rng.standard_normal((self.n_dim, self.n_dim)) * self.lower + 2.0 * np.eye(self.n_dim)
        return factor @ factor.T

    def outer(self, rng, n_outer, diagonal=0.4):
        """Return outer products in the coordinates of the model, and in those of the dense state."""
        left, right = rng.standard_normal((2, n_outer, self.n_dim))
        return Outer(left, right, diagonal), Outer(left[:, self.order], right[:, self.order], diagonal)


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


@pytest.fixture
def pair(name, rng):
    return Pair(LABELS[name], rng)


def moments_of(grad, curvature):
    zero = np.zeros(len(grad))
    return Moments(grad, curvature, zero, zero, gap=0.0, floor=0.0, floor_sd=0.0)


# --- the distribution -------------------------------------------------------------------------------------------------


@two_seeds
def test_distribution_is_that_of_a_multivariate_normal(pair, rng):
    state = pair.state
    cov = pair.in_model(np.linalg.inv(pair.full.factor @ pair.full.factor.T))
    reference = stats.multivariate_normal(state.location, cov)
    theta = state.mean() + rng.standard_normal((6, pair.n_dim))
    np.testing.assert_allclose(state.log_density(theta), reference.logpdf(theta), rtol=1e-7)
    np.testing.assert_allclose(state.entropy(), reference.entropy(), rtol=1e-9)
    np.testing.assert_allclose(state.cov(), cov, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(state.sd(), np.sqrt(np.diag(cov)), rtol=1e-8)
    index = rng.permutation(pair.n_dim)[:3]
    np.testing.assert_allclose(state.cov_block(index), cov[np.ix_(index, index)], rtol=1e-7, atol=1e-9)
    z = rng.standard_normal((5, pair.n_dim))
    np.testing.assert_allclose(state.draws(z)[:, pair.order], pair.full.draws(z[:, pair.order]), rtol=1e-9, atol=1e-10)
    np.testing.assert_array_equal(state.draws(np.zeros((1, pair.n_dim)))[0], state.mean())
    state.mean()[0] = 99.0
    assert state.location[0] != 99.0


@two_seeds
@pytest.mark.parametrize("dtype", [np.intp, np.float32])
def test_arrays_make_the_state_again(pair, dtype):
    params = {name: value.copy() for name, value in pair.state.arrays().items()}
    assert list(params) == ["mean", "precision_cholesky_blocks", "block_order", "block_sizes"]
    for name in ("block_order", "block_sizes"):
        params[name] = params[name].astype(dtype)
    copy = SparseState.of_arrays(params)
    for name, value in pair.state.arrays().items():
        np.testing.assert_array_equal(copy.arrays()[name], value)
    np.testing.assert_array_equal(copy.cov(), pair.state.cov())


@two_seeds
def test_n_params_counts_each_number_once(pair):
    state = pair.state
    assert state.n_params == pair.n_dim + pair.lower.sum()
    assert (state.n_dim, state.n_uniform, state.exact_metric, state.factor_sign) == (pair.n_dim, 0, True, -1)
    assert state.factor is state.factor


@two_seeds
def test_family_starts_without_correlations(pair, rng):
    location, scale = rng.standard_normal(pair.n_dim), np.exp(rng.standard_normal(pair.n_dim))
    start = SparseFamily(pair.structure).from_scale(location, scale)
    expected = location.copy()
    location += 1.0
    np.testing.assert_array_equal(start.mean(), expected)
    np.testing.assert_allclose(start.cov(), np.diag(scale**2), rtol=1e-14)
    np.testing.assert_allclose(start.sd(), scale, rtol=1e-14)


# --- whitening and curvatures -----------------------------------------------------------------------------------------


@two_seeds
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_maps_between_spaces(pair, rng, lead):
    vectors = rng.standard_normal((*lead, pair.n_dim))
    factor = pair.full.factor
    for method, matrix in (
        ("whiten", np.linalg.inv(factor)),
        ("unwhiten", np.linalg.inv(factor.T)),
        ("dewhiten", factor),
    ):
        result = getattr(pair.state, method)(vectors)
        assert result.shape == vectors.shape
        np.testing.assert_allclose(result[..., pair.order], vectors[..., pair.order] @ matrix.T, rtol=1e-7, atol=1e-8)


@two_seeds
def test_curvature_is_that_of_the_dense_state(pair, rng):
    """Whether or not the Hessian has all entries that the structure allows."""
    theta = np.zeros((3, pair.n_dim))
    whole, few = pair.symmetric(rng), pair.symmetric(rng) * (rng.random(pair.mask.shape) < 0.5)
    for ordered in (whole, few + few.T):
        target = Sparse(pair.in_model(ordered))
        expected = pair.full.curvature(Sparse(ordered).mean_hessian(theta))
        curvature = pair.state.curvature(target.mean_hessian(theta))
        np.testing.assert_allclose(pair.dense(curvature), expected, rtol=1e-8, atol=1e-8 * np.abs(expected).max())
        assert target.n_hessians == 3


@two_seeds
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_curvature_of_a_hessian_that_is_not_finite_warns_of_nothing(pair, rng, bad):
    for coordinate in (0, -1):
        hessian = -pair.definite(rng)
        hessian[coordinate, coordinate] = bad
        curvature = pair.state.curvature(Sparse(pair.in_model(hessian)).mean_hessian(np.zeros((1, pair.n_dim))))
        assert pair.state.precision_scaled_by(curvature, np.zeros(pair.n_dim)) is None


@two_seeds
def test_a_dense_hessian_is_refused(pair, rng):
    target = Sparse(np.eye(pair.n_dim))
    target.pattern = None
    with pytest.raises(ValueError, match="counts as dense: take another family"):
        pair.state.curvature(target.mean_hessian(np.zeros((1, pair.n_dim))))


@two_seeds
def test_operations_on_curvatures(pair, rng):
    state, full, matrix = pair.state, pair.full, pair.symmetric(rng)
    curvature = pair.packed(matrix)
    np.testing.assert_array_equal(pair.dense(state.curvature_error(curvature)), full.curvature_error(matrix))
    np.testing.assert_array_equal(state.curvature_diagonal(curvature)[pair.order], np.diag(matrix))
    added = state.add_to_diagonal(curvature, 2.5)
    np.testing.assert_array_equal(pair.dense(added), matrix + 2.5 * np.eye(pair.n_dim))
    np.testing.assert_array_equal(curvature, pair.packed(matrix))  # nothing was modified


@two_seeds
def test_flat_is_an_isometry(pair, rng):
    state, a, b = pair.state, pair.symmetric(rng), pair.symmetric(rng)
    product = state.flat(pair.packed(a)) @ state.flat(pair.packed(b))
    np.testing.assert_allclose(product, np.sum(a * b), rtol=1e-12)
    np.testing.assert_allclose(state.unflat(state.flat(pair.packed(a))), pair.packed(a), rtol=1e-14)


# --- outer products ---------------------------------------------------------------------------------------------------


@two_seeds
@pytest.mark.parametrize("n_outer", [1, 2, 5])
def test_outer_products_are_those_of_a_dense_state(pair, rng, n_outer):
    state, full = pair.state, pair.full
    outer, ordered = pair.outer(rng, n_outer)
    mean = full.outer_mean(ordered)
    np.testing.assert_allclose(pair.dense(state.outer_mean(outer)), mean * pair.mask, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(state.outer_diagonal(outer)[pair.order], np.diag(mean), rtol=1e-10, atol=1e-12)
    # A Euclidean gradient in some entries is that in all, without the others: no mask before.
    gradient = full.inverse_transpose_times(mean) * pair.lower
    # A natural gradient is projected: masked before the product.
    natural = full.times_lower_half(mean * pair.mask)
    for method, expected in (("inverse_transpose_times", gradient), ("times_lower_half", natural)):
        scale = np.abs(expected).max()
        for error in (outer, state.outer_mean(outer)):
            product = getattr(state, method)(error)
            np.testing.assert_allclose(pair.triangle(product), expected, rtol=1e-7, atol=1e-9 * scale)
            np.testing.assert_allclose(product, pair.packed(pair.triangle(product)))  # nothing above a diagonal


@two_seeds
def test_the_step_of_algorithm_2c_is_the_projection_of_the_dense_natural_gradient(pair, rng):
    """Its distance to the dense one is orthogonal, in the Fisher metric, to each entry that the factor has."""
    outer, ordered = pair.outer(rng, 2, diagonal=0.0)
    factor = pair.full.factor
    natural = pair.full.times_lower_half(ordered)
    projected = pair.triangle(pair.state.times_lower_half(outer))
    cov = np.linalg.inv(factor @ factor.T)

    def precision_change(step):
        return step @ factor.T + factor @ step.T

    rest = cov @ precision_change(natural - projected) @ cov
    units = np.eye(pair.n_dim)
    inner = [np.sum(rest * precision_change(np.outer(units[i], units[j]))) for i, j in np.argwhere(pair.lower)]
    whole = cov @ precision_change(natural) @ cov
    scale = max(
        np.abs(np.sum(whole * precision_change(np.outer(units[i], units[j])))) for i, j in np.argwhere(pair.lower)
    )
    np.testing.assert_allclose(inner, 0.0, atol=1e-9 * scale)
    if not pair.mask.all() and pair.structure.n_border:  # to take entries out of it would be something else
        assert np.abs(projected - natural * pair.lower).max() > 1e-3 * np.abs(natural).max()


@two_seeds
@pytest.mark.parametrize("estimator", ["stein", "pathwise"])
@pytest.mark.parametrize("n_replicates", [1, 2])
@pytest.mark.parametrize("stl", [True, False])
def test_estimators_from_gradients_agree_with_a_dense_state(pair, rng, estimator, n_replicates, stl):
    precision = pair.definite(rng)
    z = rng.standard_normal((4, pair.n_dim))
    results = []
    for q, order in ((pair.state, np.arange(pair.n_dim)), (pair.full, pair.order)):
        of_target = precision if q is pair.full else pair.in_model(precision)
        target, base = (
            Quadratic(np.zeros(pair.n_dim), of_target),
            BaseDraws(z[:, order], n_replicates, antithetic=False),
        )
        theta = q.draws(base.z)
        evaluation = Evaluation(theta, *target.logp_grad(theta), np.ones(4, dtype=bool), 0.0)
        results.append(ESTIMATORS[estimator].moments(target, q, base, evaluation, stl=stl))
    moments, reference = results
    np.testing.assert_allclose(moments.grad[pair.order], reference.grad, rtol=1e-7)
    np.testing.assert_allclose(moments.curvature_se[pair.order], reference.curvature_se, rtol=1e-6)
    scale = np.abs(reference.curvature).max()
    np.testing.assert_allclose(
        pair.dense(moments.curvature), reference.curvature * pair.mask, rtol=1e-7, atol=1e-9 * scale
    )


# --- steps ------------------------------------------------------------------------------------------------------------


@two_seeds
@each_update
@pytest.mark.parametrize("rho", [1.0, 0.3])
def test_updates_equal_those_of_a_dense_state(pair, rng, update, rho):
    grad, curvature = rng.standard_normal(pair.n_dim), pair.definite(rng)
    rho = 0.01 * rho if update != "natural" else rho
    new = UPDATES[update](pair.state, moments_of(grad, pair.packed(curvature)), rho, False)
    pair.assert_same(new, pair.expected(update, grad, curvature, rho), rtol=1e-8)
    assert new.structure is pair.structure


@two_seeds
@pytest.mark.parametrize("update", ["cholesky_precision", "euclidean"])
@pytest.mark.parametrize("n_outer", [1, 3])
def test_updates_from_outer_products_equal_those_of_a_dense_state(pair, rng, update, n_outer):
    grad, (outer, ordered) = rng.standard_normal(pair.n_dim), pair.outer(rng, n_outer)
    curvature = pair.full.add_to_diagonal(-pair.full.outer_mean(ordered) * pair.mask, 1.0)
    new = UPDATES[update](pair.state, PathMoments(pair.state, grad, outer), 0.01, False)
    pair.assert_same(new, pair.expected(update, grad, curvature, 0.01))


@two_seeds
def test_natural_step_of_size_1_is_exact_for_a_target_with_this_structure(pair, rng):
    precision, mean = pair.in_model(pair.definite(rng)), rng.standard_normal(pair.n_dim)
    state, target = pair.state, Sparse(-precision)
    grad = state.whiten((mean - state.mean()) @ precision)
    curvature = state.curvature(target.mean_hessian(state.mean()[None]))
    new = UPDATES["natural"](state, moments_of(grad, curvature), 1.0, False)
    np.testing.assert_allclose(new.mean(), mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(new.cov() @ precision, np.eye(pair.n_dim), atol=1e-6)


@two_seeds
def test_no_step_without_a_positive_definite_precision(pair, rng):
    """Nor is there a correction: a function of eigenvalues has no sparse form."""
    for coordinate in range(pair.n_dim):
        curvature = np.eye(pair.n_dim)
        curvature[coordinate, coordinate] = -3.0
        moments = moments_of(np.zeros(pair.n_dim), pair.packed(curvature))
        for correct in (True, False):
            assert UPDATES["natural"](pair.state, moments, 0.5, correct) is None
        assert UPDATES["natural"](pair.state, moments, 0.2, False) is not None
    assert (
        pair.state.precision_scaled_by_function(pair.packed(np.eye(pair.n_dim)), np.abs, np.zeros(pair.n_dim)) is None
    )


@two_seeds
def test_scaled_columns_and_signs(pair, rng):
    scale = rng.standard_normal(pair.n_dim)
    scaled = pair.triangle(pair.state.scaled_columns(scale))
    np.testing.assert_array_equal(scaled, pair.full.scaled_columns(scale[pair.order]))
    signs = np.where(np.arange(pair.n_dim) % 2, -1.0, 1.0)
    turned = SparseState(pair.state.location, pair.state.scaled_columns(signs), pair.structure)
    np.testing.assert_allclose(turned.cov(), pair.state.cov(), rtol=1e-9, atol=1e-12)
    assert turned.entropy() == pair.state.entropy()
    pair.assert_same(turned.unsigned(), pair.full, rtol=1e-14)
    assert pair.state.unsigned() is pair.state


@two_seeds
def test_plus_keeps_the_diagonal_positive_and_the_state_finite(pair, rng):
    state, full = pair.state, pair.full
    location_step, factor_step = rng.standard_normal(pair.n_dim), np.abs(pair.symmetric(rng)) * pair.lower
    expected = full.plus(location_step[pair.order], factor_step)
    pair.assert_same(state.plus(location_step, pair.packed(factor_step)), expected)
    assert state.plus(np.where(np.arange(pair.n_dim) == 1, np.nan, 0.0), pair.packed(factor_step)) is None
    for place in range(pair.n_dim):
        for factor, signed_too in ((-1.0, True), (-1.5, False)):
            step = np.zeros((pair.n_dim, pair.n_dim))
            step[place, place] = factor * full.factor[place, place]
            assert state.plus(location_step, pair.packed(step)) is None
            assert (state.plus(location_step, pair.packed(step), signed=True) is None) == signed_too


# --- size -------------------------------------------------------------------------------------------------------------


def test_a_step_with_thousands_of_blocks_makes_no_dense_matrix(name):
    """For any of the structures, repeated until a dense matrix would be 2 GiB."""
    labels = np.asarray(LABELS[name])
    n_copies, base = 16_000 // max((labels >= 0).sum(), 1), labels[labels >= 0]
    many = np.concatenate([*(base + 10 * i for i in range(n_copies)), np.full((labels < 0).sum(), -1)])
    structure = ArrowStructure.of(many)
    tracemalloc.start()
    state = SparseFamily(structure).from_scale(np.zeros(len(many)), np.full(len(many), 0.5))
    grad = np.ones(len(many))
    curvature = np.where(np.isin(np.arange(structure.n_entries), structure.diagonal), 2.0, 0.0)
    new = UPDATES["natural"](state, moments_of(grad, curvature), 1.0, False)
    new.draws(np.zeros((2, len(many))))
    sd = new.sd()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_allclose(sd, 0.5 / np.sqrt(2.0), rtol=1e-12)
    np.testing.assert_allclose(new.mean(), 0.25, rtol=1e-12)
    assert peak < 2**26
    assert SparseFamily(structure).memory_bytes(len(many)) < 2**28
