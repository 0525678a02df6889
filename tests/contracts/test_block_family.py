"""The block family against dense matrices, and blocks by name."""

import numpy as np
import pymc as pm
import pytest

from matrix import two_seeds
from scipy import stats
from targets import NumpyTarget, Quadratic

from pymc_ngvi.core.types import BaseDraws, Evaluation, Moments, Outer, PathMoments
from pymc_ngvi.density import Layout
from pymc_ngvi.estimators import ESTIMATORS
from pymc_ngvi.families import block as blocks
from pymc_ngvi.families.block import BlockFamily, BlockState, BlockStructure
from pymc_ngvi.families.diagonal import DiagonalState
from pymc_ngvi.families.full import FullState
from pymc_ngvi.families.matrices import stacks
from pymc_ngvi.fitting.blocks import block_labels
from pymc_ngvi.updates import UPDATES

#: Blocks of sizes 1, 2, 2, 3, no two of them of neighbouring coordinates only.
LABELS = np.array([7, 3, 7, 1, 3, 7, 0, 1])
N_DIM = len(LABELS)
MASK = LABELS[:, None] == LABELS
EACH_UPDATE = ("natural", "natural_pd", "cholesky", "sqrt", "euclidean")
each_update = pytest.mark.parametrize("update", EACH_UPDATE)


def packed(structure, dense):
    """Return the entries of a dense matrix that lie in the blocks."""
    return dense[structure.order[structure.lines], structure.columns]


def random_factor(rng, mask):
    factor = np.tril(rng.standard_normal(mask.shape)) * mask
    factor[np.diag_indices_from(factor)] = np.exp(0.7 * rng.standard_normal(len(mask)))
    return factor


def pair_of_states(rng, labels=LABELS):
    """Return a block state and the dense state of the same Gaussian."""
    structure = BlockStructure(labels)
    location, factor = rng.standard_normal(len(labels)), random_factor(rng, labels[:, None] == labels)
    return BlockState(location, packed(structure, factor), structure), FullState(location, factor)


def symmetric(rng, mask, shift=0.0):
    half = rng.standard_normal(mask.shape)
    return (half + half.T + shift * np.eye(len(mask))) * mask


def definite(rng, mask):
    factor = random_factor(rng, mask)
    return factor @ factor.T


def random_outer(rng, n_outer, n_dim=N_DIM, diagonal=0.4):
    return Outer(rng.standard_normal((n_outer, n_dim)), rng.standard_normal((n_outer, n_dim)), diagonal)


def moments_of(grad, curvature):
    zero = np.zeros(len(grad))
    return Moments(grad, curvature, zero, zero, gap=0.0, floor=0.0, floor_sd=0.0)


def dense_factor(state):
    if isinstance(state, DiagonalState):
        return np.diag(state.scale)
    return state.structure.dense(state.factor) if isinstance(state, BlockState) else state.factor


def assert_same_state(state, expected, rtol=1e-9):
    np.testing.assert_allclose(state.location, expected.location, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(dense_factor(state), dense_factor(expected), rtol=rtol, atol=rtol)


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


@pytest.fixture
def states(rng):
    return pair_of_states(rng)


@pytest.fixture
def dense(states):
    """Unpack; entries outside the blocks are 0."""
    return states[0].structure.dense


@pytest.fixture
def pack(states):
    return lambda matrix: packed(states[0].structure, matrix)


# --- the structure ----------------------------------------------------------------------------------------------------


def test_structure_of_interleaved_labels():
    structure = BlockStructure(LABELS)
    np.testing.assert_array_equal(structure.order, [6, 1, 4, 3, 7, 0, 2, 5])
    np.testing.assert_array_equal(structure.sizes, [1, 2, 2, 3])
    assert [(s.n_blocks, s.size) for s in structure.stacks] == [(1, 1), (2, 2), (1, 3)]
    assert structure.n_entries == 18
    matrix = np.arange(64.0).reshape(8, 8)
    np.testing.assert_array_equal(structure.dense(packed(structure, matrix)), matrix * MASK)
    np.testing.assert_array_equal(packed(structure, matrix)[structure.diagonal], np.diag(matrix))
    parts = structure.unpack(packed(structure, matrix))
    np.testing.assert_array_equal(parts.blocks[1][1], matrix[np.ix_([3, 7], [3, 7])])
    np.testing.assert_array_equal(structure.pack(parts), packed(structure, matrix))


@pytest.mark.parametrize("lead", [(), (1,), (4,), (2, 3), (0,)])
def test_join_is_the_inverse_of_split(lead):
    structure = BlockStructure(LABELS)
    vectors = np.arange(float(np.prod((*lead, N_DIM)))).reshape(*lead, N_DIM)
    np.testing.assert_array_equal(structure.join(*structure.split(vectors), lead), vectors)


def test_structures_are_read_only_and_keep_no_reference():
    labels = LABELS.copy()
    structure = BlockStructure(labels)
    labels[:] = 0
    np.testing.assert_array_equal(structure.labels, LABELS)
    for array in (structure.labels, structure.order, structure.sizes):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockStructure(np.zeros((2, 2), dtype=int)), r"\(n_dim,\).*got shape \(2, 2\)"),
        (lambda: BlockStructure(np.zeros(0, dtype=int)), "one coordinate at least"),
        (lambda: BlockStructure.from_arrays([0, 2], [1, 1]), r"permutation of 0\.\.1; got \[0 2\]"),
        (lambda: BlockStructure.from_arrays([0, 1], [1]), r"add up to 2; got \[1\]"),
        (lambda: BlockStructure.from_arrays([0, 1], [0, 2]), r"positive .* got \[0 2\]"),
    ],
)
def test_bad_structures(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- stacks of matrices -----------------------------------------------------------------------------------------------


@two_seeds
@pytest.mark.parametrize("size", [1, 2, 5, 17])
@pytest.mark.parametrize("n_blocks", [1, 3])
def test_stacks_matrix_by_matrix(rng, n_blocks, size):
    lower = np.array([random_factor(rng, np.ones((size, size))) for _ in range(n_blocks)])
    rhs = rng.standard_normal((n_blocks, size, 2))
    upper = lower.swapaxes(1, 2)
    # Residuals: the condition of a random triangle is large.
    for factor, x in ((lower, stacks.solve_lower(lower, rhs)), (upper, stacks.solve_upper(upper, rhs))):
        np.testing.assert_allclose(factor @ x, rhs, atol=1e-12 * np.abs(x).max())
    matrix = lower @ upper + np.eye(size)
    factor, reverse = stacks.cholesky(matrix), stacks.reverse_cholesky(matrix)
    np.testing.assert_allclose(factor, np.linalg.cholesky(matrix), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(reverse @ reverse.swapaxes(1, 2), matrix, rtol=1e-9, atol=1e-10)
    np.testing.assert_array_equal(reverse, np.triu(reverse))
    roots = rng.standard_normal((n_blocks, size, size))
    wide = np.concatenate([roots, rng.standard_normal((n_blocks, size, 3))], axis=2)
    for root, triangle, make in (
        (wide, np.tril, stacks.cholesky_of_product),
        (roots, np.triu, stacks.reverse_cholesky_of_product),
    ):
        result = make(root)
        np.testing.assert_allclose(result @ result.swapaxes(1, 2), root @ root.swapaxes(1, 2), atol=1e-12 * size)
        np.testing.assert_array_equal(result, triangle(result))
        assert (np.diagonal(result, axis1=1, axis2=2) > 0.0).all()


# --- the distribution -------------------------------------------------------------------------------------------------


@two_seeds
def test_distribution_is_that_of_a_multivariate_normal(states, rng):
    state, full = states
    reference = stats.multivariate_normal(full.location, full.factor @ full.factor.T)
    theta = state.mean() + 3.0 * rng.standard_normal((20, N_DIM))
    np.testing.assert_allclose(state.log_density(theta), reference.logpdf(theta), rtol=1e-10)
    np.testing.assert_allclose(state.entropy(), reference.entropy(), rtol=1e-12)
    np.testing.assert_allclose(state.cov(), reference.cov, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(state.sd(), np.sqrt(np.diag(reference.cov)), rtol=1e-12)
    z = rng.standard_normal((5, N_DIM))
    np.testing.assert_allclose(state.draws(z), full.draws(z), rtol=1e-12)
    np.testing.assert_array_equal(state.draws(np.zeros((1, N_DIM)))[0], state.mean())


@two_seeds
def test_mean_is_a_copy(states):
    state, _ = states
    state.mean()[0] = 99.0
    assert state.location[0] != 99.0


@two_seeds
@pytest.mark.parametrize("dtype", [np.intp, np.float64, np.float32, np.int32])
def test_arrays_make_the_state_again(states, dtype):
    state, _ = states
    arrays = {name: value.copy() for name, value in state.arrays().items()}
    assert list(arrays) == ["mean", "cholesky_blocks", "block_order", "block_sizes"]
    for name in ("block_order", "block_sizes"):
        arrays[name] = arrays[name].astype(dtype)
    copy = BlockState.of_arrays(arrays)
    for name, value in state.arrays().items():
        np.testing.assert_array_equal(copy.arrays()[name], value)
    np.testing.assert_array_equal(copy.cov(), state.cov())


@two_seeds
def test_n_params_counts_each_number_once(states):
    state, _ = states
    assert state.n_params == N_DIM + 1 + 3 + 3 + 6
    assert state.n_dim == N_DIM
    assert (state.n_uniform, state.exact_metric, state.factor_sign) == (0, False, 1)


@two_seeds
def test_family_starts_without_correlations(rng):
    family = BlockFamily(BlockStructure(LABELS))
    location, scale = rng.standard_normal(N_DIM), np.exp(rng.standard_normal(N_DIM))
    start = family.from_scale(location, scale)
    expected = location.copy()
    location += 1.0
    np.testing.assert_array_equal(start.mean(), expected)
    np.testing.assert_allclose(start.cov(), np.diag(scale**2), rtol=1e-14)


def test_memory_grows_with_the_blocks_not_with_the_square_of_the_dimension():
    n_dim = 100_000
    pairs = BlockFamily(BlockStructure(np.arange(n_dim) // 2))
    assert 56 * 8 * 2 * n_dim < pairs.memory_bytes(n_dim) < 200 * 8 * n_dim
    one = BlockFamily(BlockStructure(np.zeros(400, dtype=int)))
    assert FullState.memory_bytes(400) <= one.memory_bytes(400) < 1.1 * FullState.memory_bytes(400)


# --- whitening and curvatures -----------------------------------------------------------------------------------------


@two_seeds
def test_maps_between_spaces(states, rng):
    state, full = states
    for vectors in (rng.standard_normal(N_DIM), rng.standard_normal((3, N_DIM)), rng.standard_normal((2, 3, N_DIM))):
        np.testing.assert_allclose(state.whiten(vectors), vectors @ full.factor, rtol=1e-11, atol=1e-12)
    vector = rng.standard_normal(N_DIM)
    np.testing.assert_allclose(state.unwhiten(vector), full.factor @ vector, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(state.dewhiten(vector), np.linalg.solve(full.factor.T, vector), rtol=1e-9, atol=1e-10)


@two_seeds
def test_curvature_is_the_blocks_of_minus_ctrans_h_c(states, rng, dense):
    """The Hessian has entries outside the blocks: they must neither show nor leak."""
    state, full = states
    hessian = symmetric(rng, np.ones_like(MASK))
    target = Quadratic(np.zeros(N_DIM), -hessian)
    expected = -(full.factor.T @ hessian @ full.factor) * MASK
    curvature = state.curvature(target.mean_hessian(np.zeros((3, N_DIM))))
    np.testing.assert_allclose(dense(curvature), expected, rtol=1e-11, atol=1e-12)
    assert target.n_hessians == 3


@two_seeds
@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_curvature_in_chunks_of_any_size(states, rng, monkeypatch, rows):
    """Chunks may end within a block; however many there are, a Hessian a draw is counted."""
    state, _ = states
    target = Watched(symmetric(rng, np.ones_like(MASK)))
    theta = np.zeros((4, N_DIM))
    whole = state.curvature(target.mean_hessian(theta))
    monkeypatch.setattr(blocks, "_DIRECTIONS", rows * N_DIM)
    target.most_directions = target.n_hessians = 0
    np.testing.assert_allclose(state.curvature(target.mean_hessian(theta)), whole, rtol=1e-13)
    assert target.most_directions == rows
    assert target.n_hessians == 4


@two_seeds
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_curvature_of_a_hessian_that_is_not_finite_warns_of_nothing(states, rng, bad):
    state, _ = states
    hessian = symmetric(rng, MASK)
    hessian[1, 1] = bad
    curvature = state.curvature(Watched(hessian).mean_hessian(np.zeros((1, N_DIM))))
    assert state.precision_scaled_by(curvature, np.zeros(N_DIM)) is None


class Watched(NumpyTarget):
    """A constant Hessian; remembers the most directions that were asked for at once."""

    def __init__(self, hessian):
        super().__init__(len(hessian))
        self.hessian, self.most_directions = hessian, 0

    def _products(self, theta, directions):
        self.most_directions = max(self.most_directions, len(directions))
        with np.errstate(all="ignore"):
            return directions @ self.hessian


@two_seeds
def test_operations_on_curvatures(states, rng, pack, dense):
    state, full = states
    matrix = symmetric(rng, MASK)
    curvature = pack(matrix)
    np.testing.assert_array_equal(dense(state.curvature_error(curvature)), full.curvature_error(matrix))
    np.testing.assert_array_equal(state.curvature_diagonal(curvature), np.diag(matrix))
    np.testing.assert_array_equal(dense(state.add_to_diagonal(curvature, 2.5)), matrix + 2.5 * np.eye(N_DIM))
    np.testing.assert_allclose(dense(state.squared(curvature)), matrix @ matrix, rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(curvature, pack(matrix))  # nothing was modified


# --- outer products ---------------------------------------------------------------------------------------------------


@two_seeds
@pytest.mark.parametrize("suffix_sums", [0, 1, 40])
@pytest.mark.parametrize("n_outer", [1, 2, 5])
def test_outer_products_are_those_of_a_dense_state_in_the_blocks(states, rng, dense, n_outer, suffix_sums, monkeypatch):
    monkeypatch.setattr(blocks, "SUFFIX_SUMS", suffix_sums)
    state, full = states
    outer = random_outer(rng, n_outer)
    np.testing.assert_allclose(dense(state.outer_mean(outer)), full.outer_mean(outer) * MASK, rtol=1e-12, atol=1e-14)
    # In the blocks alone: the lower triangle of I - A, masked, has no effect outside them.
    error = full.outer_mean(outer) * MASK
    for method in ("times_lower_half", "inverse_transpose_times"):
        product = getattr(state, method)(outer)
        np.testing.assert_allclose(dense(product), getattr(full, method)(error), rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(product, getattr(state, method)(state.outer_mean(outer)), rtol=1e-9, atol=1e-10)
    np.testing.assert_array_equal(state.outer(outer.left, outer.right).left, outer.left)


@two_seeds
@pytest.mark.parametrize("estimator", ["stein", "pathwise"])
@pytest.mark.parametrize("n_replicates", [1, 2])
@pytest.mark.parametrize("stl", [True, False])
def test_estimators_from_gradients_agree_with_a_dense_state_in_the_blocks(
    states, rng, dense, estimator, n_replicates, stl
):
    state, full = states
    target = Quadratic(rng.standard_normal(N_DIM), definite(rng, np.ones_like(MASK)))
    base = BaseDraws(rng.standard_normal((4, N_DIM)), n_replicates, antithetic=False)
    theta = state.draws(base.z)
    logp, grad = target.logp_grad(theta)
    evaluation = Evaluation(theta, logp, grad, np.ones(4, dtype=bool), 0.0)
    moments, reference = (ESTIMATORS[estimator].moments(target, q, base, evaluation, stl=stl) for q in (state, full))
    np.testing.assert_allclose(dense(moments.curvature), reference.curvature * MASK, rtol=1e-10, atol=1e-11)
    np.testing.assert_allclose(moments.grad, reference.grad, rtol=1e-10)
    np.testing.assert_allclose(moments.curvature_se, reference.curvature_se, rtol=1e-8)
    # C is block diagonal, so the blocks of a dense product with the masked error are the products of the blocks.
    error = reference.error(full)
    assert isinstance(error, Outer) == (n_replicates == 1)
    error = full.outer_mean(error) if isinstance(error, Outer) else error
    np.testing.assert_allclose(
        dense(state.times_lower_half(moments.error(state))),
        full.times_lower_half(error * MASK),
        rtol=1e-9,
        atol=1e-10,
    )


# --- steps ------------------------------------------------------------------------------------------------------------


@two_seeds
@each_update
@pytest.mark.parametrize("rho", [1.0, 0.3])
def test_updates_equal_those_of_a_dense_state(states, rng, pack, update, rho):
    state, full = states
    grad, curvature = rng.standard_normal(N_DIM), definite(rng, MASK)
    rho = 0.01 * rho if update in ("cholesky", "euclidean") else rho
    new = UPDATES[update](state, moments_of(grad, pack(curvature)), rho, False)
    assert_same_state(new, UPDATES[update](full, moments_of(grad, curvature), rho, False))
    assert new.structure is state.structure


@two_seeds
@pytest.mark.parametrize("update", ["cholesky", "sqrt", "euclidean"])
@pytest.mark.parametrize("n_outer", [1, 3])
def test_updates_from_outer_products_equal_those_of_a_dense_state(states, rng, update, n_outer):
    state, full = states
    grad, outer = rng.standard_normal(N_DIM), random_outer(rng, n_outer)
    curvature = full.add_to_diagonal(-full.outer_mean(outer) * MASK, 1.0)
    new = UPDATES[update](state, PathMoments(state, grad, outer), 0.01, False)
    assert_same_state(new, UPDATES[update](full, moments_of(grad, curvature), 0.01, False))


@two_seeds
def test_natural_step_of_size_1_is_exact_for_a_target_with_these_blocks(states, rng):
    state, _ = states
    target = Quadratic(rng.standard_normal(N_DIM), definite(rng, MASK))
    grad = state.whiten(target.logp_grad(state.mean()[None])[1][0])
    new = UPDATES["natural"](
        state, moments_of(grad, state.curvature(target.mean_hessian(state.mean()[None]))), 1.0, False
    )
    np.testing.assert_allclose(new.mean(), target.mean, rtol=1e-8)
    np.testing.assert_allclose(new.cov() @ target.precision, np.eye(N_DIM), atol=1e-8)


@two_seeds
@each_update
def test_one_block_is_the_full_family(rng, update):
    state, full = pair_of_states(rng, np.zeros(6, dtype=int))
    grad, curvature = rng.standard_normal(6), definite(rng, np.ones((6, 6)))
    rho = 0.001 if update in ("cholesky", "euclidean") else 0.7
    new = UPDATES[update](state, moments_of(grad, curvature.ravel()), rho, False)
    assert_same_state(new, UPDATES[update](full, moments_of(grad, curvature), rho, False), rtol=1e-12)
    hessian = symmetric(rng, np.ones((6, 6)))
    target, theta = Quadratic(np.zeros(6), hessian), np.zeros((1, 6))
    np.testing.assert_allclose(
        state.curvature(target.mean_hessian(theta)).reshape(6, 6),
        full.curvature(target.mean_hessian(theta)),
        rtol=1e-12,
        atol=1e-13,
    )
    assert (state.n_params, state.factor.size) == (full.n_params, 36)


@two_seeds
@each_update
def test_single_coordinates_are_the_diagonal_family(rng, update):
    state, full = pair_of_states(rng, np.array([4, 2, 0, 1]))
    diagonal = DiagonalState(full.location, np.diag(full.factor))
    grad, curvature = rng.standard_normal(4), np.exp(rng.standard_normal(4))
    moments = moments_of(grad, curvature[state.structure.order])
    rho = 0.01 if update in ("cholesky", "euclidean") else 0.7
    expected = UPDATES[update](diagonal, moments_of(grad, curvature), rho, False)
    assert_same_state(UPDATES[update](state, moments, rho, False), expected, rtol=1e-12)
    target, theta = Quadratic(np.zeros(4), symmetric(rng, np.ones((4, 4)))), np.zeros((1, 4))
    np.testing.assert_allclose(
        state.curvature_diagonal(state.curvature(target.mean_hessian(theta))),
        diagonal.curvature(target.mean_hessian(theta)),
        rtol=1e-12,
    )
    assert state.n_params == diagonal.n_params
    outer = random_outer(rng, 2, 4)
    np.testing.assert_allclose(
        state.curvature_diagonal(state.times_lower_half(outer)), diagonal.times_lower_half(outer), rtol=1e-12
    )


@two_seeds
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_merged_has_the_moments_of_the_mixture_in_the_blocks(states, rng, weight):
    state, _ = states
    other = BlockState(rng.standard_normal(N_DIM), packed(state.structure, random_factor(rng, MASK)), state.structure)
    merged = state.merged(other, weight)
    apart = other.location - state.location
    cov = (1 - weight) * state.cov() + weight * other.cov() + weight * (1 - weight) * np.outer(apart, apart) * MASK
    np.testing.assert_allclose(merged.cov(), cov, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(merged.mean(), state.location + weight * apart, rtol=1e-12)


@two_seeds
def test_merged_where_the_covariance_is_all_but_singular(rng):
    """Two stacked blocks with a condition beyond 1e16: their covariance has no Cholesky factor."""
    structure = BlockStructure(np.array([0, 0, 1, 1]))
    factor = np.array([1.0, 0.0, 1.0, 1e-9, 2.0, 0.0, -1.0, 1e-9])
    state = BlockState(rng.standard_normal(4), factor, structure)
    merged = state.merged(state, 0.4)
    np.testing.assert_allclose(merged.factor, factor, rtol=1e-5)


# --- guards -----------------------------------------------------------------------------------------------------------


@two_seeds
@pytest.mark.parametrize("label", np.unique(LABELS))
def test_one_indefinite_block_is_refused_or_corrected(states, rng, pack, label):
    state, full = states
    grad, curvature = rng.standard_normal(N_DIM), definite(rng, MASK)
    at = label == LABELS
    curvature[np.ix_(at, at)] -= 10.0 * curvature[np.ix_(at, at)].trace() * np.eye(at.sum())
    moments, dense_moments = moments_of(grad, pack(curvature)), moments_of(grad, curvature)
    assert UPDATES["natural"](state, moments, 1.0, False) is None
    assert UPDATES["cholesky"](state, moments_of(grad, pack(-1e3 * curvature)), 1.0, False) is None
    for update in ("natural", "natural_pd"):
        new = UPDATES[update](state, moments, 0.8, True)
        assert np.linalg.eigvalsh(new.cov()).min() > 0.0
        assert_same_state(new, UPDATES[update](full, dense_moments, 0.8, True), rtol=1e-8)


@two_seeds
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("label", [0, 3, 7])
def test_curvatures_that_are_not_finite_are_refused(states, rng, bad, label):
    state, _ = states
    grad, curvature = rng.standard_normal(N_DIM), definite(rng, MASK)
    at = np.flatnonzero(label == LABELS)
    curvature[at[-1], at[0]] = curvature[at[0], at[-1]] = bad
    matrix = packed(state.structure, curvature)
    assert state.precision_scaled_by(matrix, grad) is None
    assert state.precision_scaled_by_function(matrix, np.exp, grad) is None
    with np.errstate(invalid="ignore"):
        assert state.plus(grad, matrix) is None
    assert UPDATES["natural"](state, moments_of(grad, matrix), 1.0, True) is None


@two_seeds
@pytest.mark.parametrize("values", [[np.nan] * 2, [np.inf] * 2, [0.0] * 2, [-1.0] * 2])
def test_functions_without_finite_positive_values_are_refused(states, pack, values):
    state, _ = states
    one_bad = lambda a: np.asarray(values) if a.shape == (2, 2) else np.ones_like(a)  # noqa: E731
    assert state.precision_scaled_by_function(pack(np.eye(N_DIM)), one_bad, np.zeros(N_DIM)) is None


@pytest.mark.parametrize("labels", [[0, 0], [0, 0, 1, 1], [0, 0, 1]], ids=["one", "stacked", "with a single one"])
def test_numerically_singular_blocks_are_refused_whatever_their_scales(labels):
    """LAPACK accepts a pivot of rounding size; coordinates on scales far apart are no reason to refuse."""
    structure = BlockStructure(np.array(labels))
    state = BlockFamily(structure).from_scale(np.zeros(len(labels)), np.ones(len(labels)))
    nearly, scales = np.eye(len(labels)), np.ones(len(labels))
    nearly[0, 1] = nearly[1, 0] = 1.0 - 1e-15
    scales[1] = 1e-6
    assert np.linalg.cholesky(nearly)[1, 1] > 0.0
    assert state.precision_scaled_by(packed(structure, nearly), np.zeros(len(labels))) is None
    nearly[0, 1] = nearly[1, 0] = 0.9
    scaled = nearly * np.outer(scales, scales)
    new, _ = state.precision_scaled_by(packed(structure, scaled), np.zeros(len(labels)))
    np.testing.assert_allclose(new.cov() @ scaled, np.eye(len(labels)), atol=1e-8)


def test_rounding_left_in_a_single_coordinate_is_no_precision():
    structure = BlockStructure(np.array([0, 1]))
    state = BlockFamily(structure).from_scale(np.zeros(2), np.ones(2))
    assert state.precision_scaled_by(np.array([1.0, 1e-14]), np.zeros(2)) is None
    assert state.precision_scaled_by(np.array([1.0, 1e-10]), np.zeros(2)) is not None


@two_seeds
def test_plus_keeps_the_diagonal_positive_and_the_state_finite(states, rng, dense):
    state, full = states
    location_step, factor_step = rng.standard_normal(N_DIM), packed(state.structure, random_factor(rng, MASK))
    assert_same_state(state.plus(location_step, factor_step), full.plus(location_step, dense(factor_step)))
    assert state.plus(np.where(np.arange(N_DIM) == 3, np.nan, 0.0), factor_step) is None
    for coordinate in range(N_DIM):
        step = np.zeros_like(factor_step)
        step[state.structure.diagonal[coordinate]] = -full.factor[coordinate, coordinate]
        assert state.plus(location_step, step) is None


# --- size -------------------------------------------------------------------------------------------------------------


class Chain(NumpyTarget):
    """Tridiagonal precision with ``coupling`` beside a diagonal of 2: no dense matrix anywhere."""

    def __init__(self, n_dim, coupling):
        super().__init__(n_dim)
        self.coupling, self.most_directions = coupling, 0

    def _products(self, theta, directions):
        self.most_directions = max(self.most_directions, len(directions))
        result = -2.0 * directions
        result[:, 1:] -= self.coupling * directions[:, :-1]
        result[:, :-1] -= self.coupling * directions[:, 1:]
        return result


def test_thousands_of_small_blocks_take_a_few_calls_and_no_dense_matrix():
    n_dim = 4_000
    structure = BlockStructure(np.random.default_rng(0).permutation(n_dim // 2).repeat(2))
    state = BlockFamily(structure).from_scale(np.zeros(n_dim), np.full(n_dim, 0.5))
    target = Chain(n_dim, 0.9)
    curvature = state.curvature(target.mean_hessian(np.zeros((2, n_dim))))
    assert target.n_hessians == 2
    assert target.most_directions <= n_dim // 2
    new, _ = state.precision_scaled_by(curvature, np.zeros(n_dim))
    expected = np.linalg.inv([[2.0, 0.9], [0.9, 2.0]])
    (c,) = new.structure.unpack(new.factor).blocks
    np.testing.assert_allclose(c @ c.swapaxes(1, 2), np.broadcast_to(expected, c.shape), rtol=1e-12)
    base = np.random.default_rng(1).standard_normal((3, n_dim))
    log_density = stats.norm.logpdf(base).sum(axis=1) - 0.5 * (n_dim // 2) * np.linalg.slogdet(expected)[1]
    np.testing.assert_allclose(new.log_density(new.draws(base)), log_density, rtol=1e-12)


# --- blocks by name ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layout():
    """Coordinates: a 0, b 1..3, sd 4, z 5..8."""
    with pm.Model() as model:
        pm.Normal("a")
        pm.Normal("b", shape=3)
        pm.HalfNormal("sd")
        pm.Normal("z", shape=(2, 2))
    return Layout.from_model(model, model.initial_point())


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (None, [0, 1, 1, 1, 2, 3, 3, 3, 3]),
        ([], [0, 1, 1, 1, 2, 3, 3, 3, 3]),
        ([["sd", "a"]], [0, 1, 1, 1, 0, 2, 2, 2, 2]),
        ([["sd_log__", "b"]], [0, 1, 1, 1, 1, 2, 2, 2, 2]),
        ([["z[0, 1]", "b[2]"]], [0, 1, 1, 2, 3, 4, 2, 4, 4]),
        ([["z[0,1]", "b[2]"]], [0, 1, 1, 2, 3, 4, 2, 4, 4]),
        ((("z", "sd"), ("b[0]",), {"b[1]", "a"}), [0, 1, 0, 2, 3, 3, 3, 3, 3]),
        ([["b", "b[1]"]], [0, 1, 1, 1, 2, 3, 3, 3, 3]),
        ([["a", "b", "sd", "z"]], [0] * 9),
    ],
)
def test_block_labels(layout, blocks, expected):
    np.testing.assert_array_equal(block_labels(layout, blocks), expected)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ("ab", r"sequence of sequences of names.*blocks is 'ab'"),
        (["a", "b"], r"sequence of sequences.*blocks\[0\] is 'a'"),
        (3, r"sequence of sequences.*blocks is 3"),
        ([["a"], 3], r"blocks\[1\] is 3"),
        ([["a", 1]], r"in blocks\[0\] there is 1, no name"),
        ([["a"], []], r"blocks\[1\] is empty"),
        ([["a", "zz"]], r"'zz', which is no free variable: did you mean 'z'\? Valid: 'a', 'b', 'sd_log__', 'z', 'sd'"),
        ([["w[0]"]], r"'w\[0\]', which is no free variable"),
        (
            [["b[3]"]],
            r"'b\[3\]', which is no coordinate of 'b': .* shape \(3,\), coordinates from 'b\[0\]' to 'b\[2\]'",
        ),
        ([["b[-1]"]], r"'b\[-1\]', which is no coordinate"),
        ([["b[x]"]], r"'b\[x\]', which is no coordinate"),
        ([["b[0"]], r"'b\[0', which is no coordinate"),
        ([["z[0]"]], r"no coordinate of 'z': .* shape \(2, 2\), coordinates from 'z\[0, 0\]' to 'z\[1, 1\]'"),
        ([["sd[0]"]], r"no coordinate of 'sd': its value 'sd_log__' has shape \(\)\.$"),
        ([["a"], ["b", "a"]], r"blocks\[0\] = \['a'\] and blocks\[1\] = \['b', 'a'\] share 'a'"),
        ([["b[1]", "a"], ["b"]], r"share 'b\[1\]'; each coordinate should be in one block"),
        ([["sd"], ["sd_log__"]], r"share 'sd_log__'"),
    ],
)
def test_blocks_that_make_no_partition(layout, blocks, message):
    with pytest.raises(ValueError, match=message):
        block_labels(layout, blocks)


def test_variables_without_entries_have_no_block():
    with pm.Model() as model:
        pm.Normal("nothing", shape=0)
        pm.Normal("a", shape=2)
    layout = Layout.from_model(model, model.initial_point())
    np.testing.assert_array_equal(block_labels(layout, [["nothing"]]), [0, 0])
