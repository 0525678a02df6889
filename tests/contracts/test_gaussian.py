"""Gaussians of every structure against dense matrices: density, draws, covariances, curvatures and steps."""

import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from matrix import as_matrix, symmetric_matrix
from scipy import linalg, sparse, stats
from threadpoolctl import threadpool_info, threadpool_limits

from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.types import MatrixHessian, MeanHessian, Outer
from pymc_ngvi.families import (
    BlockFamily,
    BlockStructure,
    DiagonalState,
    FullPrecisionState,
    FullState,
    SparseFamily,
    kernels,
)
from pymc_ngvi.families.fronts import Fronts, SparseCholesky
from pymc_ngvi.families.gaussian import Partition
from pymc_ngvi.families.sparse import Precisions, SparseStructure, SummedStructure, find_blocks, find_filled, step_flops
from pymc_ngvi.methods import UPDATES
from pymc_ngvi.methods.adaptive import moments_of, natural_gradient
from pymc_ngvi.methods.cholesky import plus, times_diagonal, with_positive_diagonal
from pymc_ngvi.methods.decay import moment_average
from pymc_ngvi.methods.estimators import Moments, PathMoments

# --- patterns ---------------------------------------------------------------------------------------------------------


def with_globals(inner, n=1):
    """Add coordinates that touch all others, before them."""
    beside = np.ones((len(inner), n))
    return np.block([[np.ones((n, n)), beside.T], [beside, inner]])


def chain(n):
    return np.eye(n) + np.eye(n, k=1) + np.eye(n, k=-1)


def lattice(side):
    return np.kron(chain(side), np.eye(side)) + np.kron(np.eye(side), chain(side)) > 0


def crossed(n_first, n_second, n_rows):
    rng = np.random.default_rng(3)
    links = np.zeros((n_first, n_second))
    links[rng.integers(n_first, size=n_rows), rng.integers(n_second, size=n_rows)] = 1.0
    return np.block([[np.eye(n_first), links], [links.T, np.eye(n_second)]])


def tree(n):
    child, result = np.arange(1, n), np.eye(n)
    result[child, (child - 1) // 2] = 1.0
    return result + result.T > 0


def together(labels):
    """Return blocks of coordinates of the same label; those below 0 touch everything."""
    labels = np.asarray(labels)
    return (labels[:, None] == labels) | (labels[:, None] < 0) | (labels < 0)


BLOCKS = np.array([7, 3, 7, 1, 3, 7, 0, 1])
ARROW = np.array([7, -1, 3, 7, 1, 3, -1, 7, 0, 1])
#: What has the entries in which a factor, or a precision, can differ from 0, and the family.
CASES = {
    "full": (np.ones((5, 5)), lambda mask: FullState),
    "full precision": (np.ones((5, 5)), lambda mask: FullPrecisionState),
    "diagonal": (np.eye(5), lambda mask: DiagonalState),
    "blocks": (together(BLOCKS), lambda mask: BlockFamily(BlockStructure(BLOCKS))),
    "one block": (np.ones((4, 4)), lambda mask: BlockFamily(BlockStructure(np.zeros(4, dtype=int)))),
    "arrow": (together(ARROW), lambda mask: SparseFamily(SparseStructure.of_blocks(Partition(ARROW)))),
    "arrow of numbers": (
        together([0, 1, -1, 2]),
        lambda mask: SparseFamily(SparseStructure.of_blocks(Partition([0, 1, -1, 2]))),
    ),
    "no border": (
        together([1, 0, 1, 2, 2]),
        lambda mask: SparseFamily(SparseStructure.of_blocks(Partition([1, 0, 1, 2, 2]))),
    ),
    "border alone": (together([-1] * 3), lambda mask: SparseFamily(SparseStructure.of_blocks(Partition([-1] * 3)))),
    "arrow that is not full": (
        together(ARROW) & (np.add.outer(ARROW, ARROW) != 14),
        lambda mask: SparseFamily(SparseStructure.of_blocks(Partition(ARROW))),
    ),
    **{
        name: (mask, lambda mask: SparseFamily(SparseStructure.of(Pattern.of(mask))))
        for name, mask in {
            "lattice": with_globals(lattice(5)),
            "chain": chain(60),
            "chains apart": linalg.block_diag(chain(20), chain(35)),
            "crossed": crossed(30, 12, 120),
            "tree": with_globals(tree(50)),
            "groups in groups": with_globals(linalg.block_diag(*[with_globals(np.eye(6), 2)] * 3, np.ones((4, 4)))),
        }.items()
    },
    "sums": (None, None),
}
WITH_FACTOR = tuple(CASES)[:9]


class Joint(MeanHessian):
    """A Hessian by coordinates and sums."""

    def __init__(self, summed, joint):
        self._summed, self.joint = summed, joint

    @property
    def summed(self):
        return self._summed

    def summed_values(self):
        pattern = self.summed.pattern
        return self.joint[pattern.rows, pattern.cols]


class Case:
    """A Gaussian of a structure, with its moments as plain arrays."""

    def __init__(self, name, seed):
        mask, make = CASES[name]
        self.rng, self.mask = np.random.default_rng(seed), np.asarray(mask, dtype=float)
        self.family, self.n_dim = make(self.mask), len(self.mask)
        self.pattern = Pattern.of(self.mask) if name not in WITH_FACTOR or self.is_arrow else None
        self.begin()

    @property
    def is_arrow(self):
        return isinstance(self.family, SparseFamily)

    def begin(self):
        self.mean = self.rng.standard_normal(self.n_dim)
        self.precision, hessian = self.random(1.5)
        self.cov = np.linalg.inv(self.precision)
        self.state = self.of(self.mean, hessian)

    def random(self, excess=0.0):
        """Return minus a random Hessian, and it; for an excess above 0, the first is positive definite."""
        matrix = self.rng.standard_normal((self.n_dim, self.n_dim)) * self.mask
        matrix = matrix + matrix.T
        if excess:
            matrix += excess * np.diag(np.abs(matrix).sum(axis=1))
        return matrix, MatrixHessian(-matrix, self.pattern)

    def of(self, mean, hessian):
        """Return the state of a mean and of a precision, minus a Hessian."""
        start = self.family.from_scale(mean, np.linspace(0.5, 2.0, self.n_dim))
        return start.precision_scaled_by(start.curvature(hessian), np.zeros(self.n_dim))[0]

    def other(self):
        """Return a mean, a precision, and the state of both."""
        mean, (precision, hessian) = self.rng.standard_normal(self.n_dim), self.random(1.5)
        return mean, precision, self.of(mean, hessian)


class Sums(Case):
    """A lattice with a coordinate that touches all of it, and two sums over many coordinates."""

    def __init__(self, seed):
        self.rng, self.n_dim = np.random.default_rng(seed), 26
        joint, weights = with_globals(lattice(5)), np.zeros((2, 26))
        weights[0, 1:], weights[1, 4:] = 1.0, self.rng.standard_normal(22)
        beside = np.ones((26, 2))
        joint = np.block([[joint, beside], [beside.T, np.ones((2, 2))]])
        self.summed = SummedPattern(Pattern.of(joint), weights)
        self.family = SparseFamily(SummedStructure.of_sums(self.summed))
        self.begin()

    def random(self, excess=0.0):
        pattern = self.summed.pattern
        joint = pattern.symmetric(self.rng.standard_normal(pattern.n_entries)).toarray()
        if excess:
            joint += np.diag(excess * np.abs(joint).sum(axis=1))
            joint[26:, 26:] += 100.0 * np.eye(2)
        whole = np.vstack([np.eye(26), self.summed.weights])
        return whole.T @ joint @ whole, Joint(self.summed, -joint)


@pytest.fixture(params=[1, 2], ids=["seed1", "seed2"])
def case(request, name):
    return Sums(request.param) if name == "sums" else Case(name, request.param)


each_case = pytest.mark.parametrize("name", CASES)
with_factor = pytest.mark.parametrize("name", WITH_FACTOR)
of_covariance = pytest.mark.parametrize("name", ["full", "diagonal", "blocks", "one block"])


def without_noise(state, grad, curvature):
    none = np.zeros(len(grad))
    return Moments(state.whiten(grad), curvature, none, none, gap=0.0, floor=0.0, floor_sd=0.0)


def root_of(state):
    """Return C as draws show it."""
    return (state.draws(np.eye(state.n_dim)) - state.mean()).T


# --- the distribution -------------------------------------------------------------------------------------------------


@each_case
def test_no_draws_are_none(case):
    none = np.empty((0, case.n_dim))
    assert case.state.draws(none).shape == case.state.whiten(none).shape == none.shape
    assert case.state.log_density(none).shape == (0,)


@each_case
def test_distribution_is_that_of_a_multivariate_normal(case):
    state, reference = case.state, stats.multivariate_normal(case.mean, case.cov)
    theta = case.mean + case.rng.standard_normal((6, case.n_dim))
    np.testing.assert_allclose(state.log_density(theta), reference.logpdf(theta), rtol=1e-8)
    np.testing.assert_allclose(state.entropy(), reference.entropy(), rtol=1e-9)
    np.testing.assert_allclose(state.cov(), case.cov, rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(state.sd(), np.sqrt(np.diag(case.cov)), rtol=1e-8)
    some = case.rng.permutation(case.n_dim)[:3]
    np.testing.assert_allclose(state.cov_block(some), case.cov[np.ix_(some, some)], rtol=1e-7, atol=1e-10)
    i, j = np.indices((case.n_dim,) * 2).reshape(2, -1)  # inside the pattern and outside
    np.testing.assert_allclose(state.covariances(i, j), case.cov[i, j], rtol=1e-7, atol=1e-10)
    vectors = case.rng.standard_normal((3, case.n_dim))
    np.testing.assert_allclose(state.precision_product(vectors), vectors @ case.precision, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(state.covariance_times(vectors), vectors @ case.cov, rtol=1e-7, atol=1e-8)
    state.mean()[0] = 99.0
    np.testing.assert_array_equal(state.mean(), case.mean)


@each_case
def test_draws_are_affine_and_whitening_undoes_them(case):
    state, root = case.state, root_of(case.state)
    np.testing.assert_allclose(root @ root.T, case.cov, rtol=1e-7, atol=1e-10)
    z = case.rng.standard_normal((4, case.n_dim))
    theta = state.draws(z)
    np.testing.assert_allclose(theta, case.mean + z @ root.T, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(state.whiten((case.mean - theta) @ case.precision), -z, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(state.unwhiten(z[0]), root @ z[0], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(state.dewhiten(state.whiten(z)), z, rtol=1e-6, atol=1e-8)


@each_case
def test_other_parameters_make_a_state_of_the_same_form(case):
    params = case.state.params()
    moved = case.state.from_params(params | {"mean": params["mean"] + 1.0})
    np.testing.assert_array_equal(moved.mean(), case.mean + 1.0)
    np.testing.assert_array_equal(moved.cov(), case.state.cov())


@each_case
def test_families_start_without_correlations_and_say_what_memory_they_take(case):
    location, scale = case.rng.standard_normal(case.n_dim), np.exp(case.rng.standard_normal(case.n_dim))
    starts = case.family.from_scale(location, scale), case.state.with_scale(location, scale)
    expected = location.copy(), np.diag(scale**2)
    location += 1.0
    scale *= 2.0
    for start in starts:
        np.testing.assert_array_equal(start.mean(), expected[0])
        np.testing.assert_allclose(start.cov(), expected[1], rtol=1e-12, atol=1e-14)
    held = sum(value.nbytes for value in case.state.params().values())
    assert held < case.family.memory_bytes(case.n_dim) < 2_000 * held


# --- curvatures -------------------------------------------------------------------------------------------------------


@each_case
def test_curvatures_have_the_metric_of_the_gap(case):
    """tr(V E V F) of two errors of the precision, and of natural gradients with the whitened gradient before them."""
    state, (first, a), (second, b) = case.state, case.random(), case.random()
    a, b = state.curvature(a), state.curvature(b)
    expected = np.trace(case.cov @ first @ case.cov @ second)
    scale = np.linalg.norm(case.cov @ first) * np.linalg.norm(case.cov @ second)
    flat = [m.ravel() for m in (a, b)]
    np.testing.assert_allclose(state.inner(*flat), expected, rtol=1e-8, atol=1e-9 * scale)
    relative = case.cov @ (first - case.precision)
    error = state.add_to_diagonal(a, -1.0).ravel()
    np.testing.assert_allclose(state.inner(error, error), np.trace(relative @ relative), rtol=1e-8)
    longer = np.concatenate([np.full(case.n_dim, 2.0), error])
    expected = 4.0 * case.n_dim + np.trace(relative @ relative)
    np.testing.assert_allclose(state.inner(longer, longer), expected, rtol=1e-8)


@pytest.mark.parametrize("name", ["diagonal", "blocks"])
def test_entries_of_a_hessian_between_blocks_have_no_part(case):
    hessian = case.rng.standard_normal((case.n_dim,) * 2)
    hessian, root = hessian + hessian.T, root_of(case.state)
    for sign in (1.0, np.nan):  # they must neither show nor leak
        matrix = np.where((case.mask == 0) & np.isnan(sign), 1e3, hessian)
        curvature = as_matrix(case.state, case.state.curvature(MatrixHessian(matrix)))
        np.testing.assert_allclose(curvature, -(root.T @ hessian @ root) * case.mask, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["arrow", "lattice", "chain"])
def test_hessians_with_other_entries_are_refused(case):
    with pytest.raises(ValueError, match="counts as dense"):
        case.state.curvature(MatrixHessian(np.eye(case.n_dim)))
    with pytest.raises(ValueError, match=r"leaves out|between two blocks"):
        case.state.curvature(MatrixHessian(np.eye(case.n_dim), Pattern.of(np.ones((case.n_dim,) * 2))))


# --- steps ------------------------------------------------------------------------------------------------------------


@each_case
@pytest.mark.parametrize("rho", [0.3, 1.0])
def test_natural_step(case, rho):
    """S' = (1 - rho) S - rho H, and the mean moves with the new precision: exact for rho = 1."""
    (precision, hessian), mean = case.random(1.2), case.rng.standard_normal(case.n_dim)
    grad = precision @ (mean - case.mean)
    moments = without_noise(case.state, grad, case.state.curvature(hessian))
    new = UPDATES["natural"](case.state, moments, rho, False)
    again = moments_of(case.state, moments, natural_gradient(case.state, moments))  # there, and back again
    assert again is not moments
    for state in (new, UPDATES["natural"](case.state, again, rho, False)):
        expected = np.linalg.inv((1 - rho) * case.precision + rho * precision)
        np.testing.assert_allclose(state.cov(), expected, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(state.mean(), case.mean + rho * expected @ grad, rtol=1e-6, atol=1e-8)
    if rho == 1.0:
        np.testing.assert_allclose(new.mean(), mean, rtol=1e-6, atol=1e-8)


@each_case
def test_steps_without_a_precision_are_none(case):
    """At half of the way to minus the precision, all that is left is rounding."""
    state = case.state
    curvature, zero = state.curvature(case.random(1.5)[1]), np.zeros(case.n_dim)
    identity = state.add_to_diagonal(0.0 * curvature, 1.0)
    for rho in (0.5, 0.7, 1.0):
        assert state.precision_scaled_by(state.add_to_diagonal(-rho * identity, 1.0 - rho), zero) is None
    for bad in (np.nan, np.inf, -np.inf):
        with np.errstate(invalid="ignore"):
            assert state.precision_scaled_by(bad * identity, zero) is None
            assert state.precision_scaled_by(identity, np.full(case.n_dim, bad))[0] is not None


@each_case
def test_divergence_and_precision_of_another_state(case):
    mean, precision, other = case.other()
    apart = mean - case.mean
    square = np.trace(precision @ case.cov) + apart @ precision @ apart - case.n_dim
    kl = 0.5 * (square - np.linalg.slogdet(precision)[1] - np.linalg.slogdet(case.cov)[1])
    np.testing.assert_allclose(case.state.divergence(other), kl, rtol=1e-8)
    np.testing.assert_allclose(case.state.divergence(case.state), 0.0, atol=1e-9)
    again = case.state.precision_scaled_by(case.state.whitened_precision(other), np.zeros(case.n_dim))
    np.testing.assert_allclose(again[0].cov(), other.cov(), rtol=1e-6, atol=1e-9)


def test_only_the_whole_of_a_precision_with_sums_has_to_be_positive_definite():
    """Where all effects move against the global coordinate, the sparse part goes down; the sum holds them."""
    case = Sums(1)
    n, edges = case.n_dim, lattice(5) - np.eye(25)
    joint = np.zeros((n + 2, n + 2))
    joint[1:n, 1:n] = 0.05 * (np.diag(edges.sum(axis=1)) - edges) + np.eye(n - 1)
    joint[0, 1:n] = joint[1:n, 0] = 1.0
    joint[0, 0], joint[n, n] = n - 1.0 - 5.0, 10.0
    assert np.linalg.eigvalsh(joint[:n, :n])[0] < -0.01
    whole = np.vstack([np.eye(n), case.summed.weights])
    state = case.of(case.mean, Joint(case.summed, -joint))
    np.testing.assert_allclose(state.cov(), np.linalg.inv(whole.T @ joint @ whole), rtol=1e-8, atol=1e-10)


# --- factors ----------------------------------------------------------------------------------------------------------


def dense_twin(case):
    """Return the dense state of the same Gaussian, coordinates as its factor has them, and their order."""
    order = case.state.structure.order if case.is_arrow else np.arange(case.n_dim)
    square = np.ix_(order, order)
    if case.state.factor_sign < 0:
        return FullPrecisionState(case.mean[order], np.linalg.cholesky(case.precision[square])), order
    return FullState(case.mean[order], np.linalg.cholesky(case.cov[square])), order


def of_factor(name):
    """Return the updates that go with a structure."""
    of_precision = name in ("full precision", "arrow", "arrow of numbers", "no border", "border alone")
    return ("cholesky_precision", "euclidean") if of_precision else ("cholesky", "sqrt", "euclidean", "natural_pd")


@pytest.mark.parametrize(("name", "update"), [(name, update) for name in WITH_FACTOR for update in of_factor(name)])
@pytest.mark.parametrize("n_outer", [0, 1, 3])
def test_steps_of_a_factor_are_those_of_a_dense_one(case, update, n_outer):
    """From a Hessian, or from outer products; of a Euclidean gradient of an arrow, entries outside are left out."""
    state, (full, order) = case.state, dense_twin(case)
    mask, grad = case.mask[np.ix_(order, order)], case.rng.standard_normal(case.n_dim)
    if n_outer:
        left, right = case.rng.standard_normal((2, n_outer, case.n_dim))
        outer, whole = Outer(left, right, 0.4), Outer(left[:, order], right[:, order], 0.4)
        moments, curvature = PathMoments(state, grad, outer), np.eye(case.n_dim) - full.outer_mean(whole) * mask
    else:
        precision, hessian = case.random(1.2)
        moments = without_noise(state, case.precision @ grad, state.curvature(hessian))
        grad = moments.grad
        curvature = full.curvature(MatrixHessian(-precision[np.ix_(order, order)]))
    none = np.zeros(case.n_dim)
    twin = Moments(grad[order], curvature, none, none, gap=0.0, floor=0.0, floor_sd=0.0)
    new, expected = UPDATES[update](state, moments, 0.01, False), UPDATES[update](full, twin, 0.01, False)
    root = np.tril(expected.factor) * mask
    square = root @ root.T
    square = square if state.factor_sign > 0 else np.linalg.inv(square)
    np.testing.assert_allclose(new.mean()[order], expected.mean(), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(new.cov()[np.ix_(order, order)], square, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["full", "diagonal", "blocks", "one block"])
@pytest.mark.parametrize("weight", [0.0, 0.3, 0.9])
def test_merging_averages_the_expectation_parameters(case, weight):
    mean, precision, other = case.other()
    merged, apart = moment_average(case.state, other, weight), mean - case.mean
    cov = (1 - weight) * case.cov + weight * np.linalg.inv(precision) + weight * (1 - weight) * np.outer(apart, apart)
    np.testing.assert_allclose(merged.mean(), case.mean + weight * apart, rtol=1e-10)
    np.testing.assert_allclose(merged.cov(), cov * case.mask, rtol=1e-7, atol=1e-9)


@of_covariance
def test_division_by_a_function_of_a_curvature(case):
    (matrix, hessian), grad, root = case.random(1.5), case.rng.standard_normal(case.n_dim), root_of(case.state)
    curvature = case.state.curvature(hessian)
    new, moved = case.state.precision_scaled_by_function(curvature, lambda a: np.sqrt(a) + 1.0, grad)
    values, vectors = np.linalg.eigh(root.T @ matrix @ root)
    inverse = (vectors / (np.sqrt(values) + 1.0)) @ vectors.T
    np.testing.assert_allclose(new.cov(), root @ inverse @ root.T, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(moved, root @ inverse @ grad, rtol=1e-6, atol=1e-8)
    for refused in (lambda a: -a, np.zeros_like, lambda a: np.full_like(a, np.nan)):
        assert case.state.precision_scaled_by_function(curvature, refused, grad) is None


@with_factor
def test_steps_in_the_factor_keep_its_diagonal_away_from_0(case):
    """Signed steps may take a column of the factor through 0, but not to it: the Gaussian is the same."""
    state, still, columns = case.state, np.zeros(case.n_dim), np.ones(case.n_dim)
    columns[2] = 0.5
    new = plus(state, np.ones(case.n_dim), times_diagonal(state, columns - 1.0))
    np.testing.assert_array_equal(new.mean(), case.mean + 1.0)
    np.testing.assert_allclose(new.factor, times_diagonal(state, columns), rtol=1e-12)
    for bad in (0.0, -0.5, np.nan, np.inf):
        columns[2] = bad
        with np.errstate(invalid="ignore"):
            assert plus(state, still, times_diagonal(state, columns) - state.factor) is None, bad
    assert plus(state, np.full(case.n_dim, np.inf), np.zeros_like(state.factor)) is None
    signs = np.where(np.arange(case.n_dim) % 2, -1.0, 1.0)
    negative = plus(state, still, times_diagonal(state, signs - 1.0), signed=True)
    for same in (negative, with_positive_diagonal(negative)):
        np.testing.assert_allclose(same.cov(), case.cov, rtol=1e-7, atol=1e-10)
        np.testing.assert_allclose(same.entropy(), state.entropy(), rtol=1e-10)
    np.testing.assert_allclose(with_positive_diagonal(negative).factor, state.factor, rtol=1e-12)
    assert plus(state, still, times_diagonal(state, np.where(signs < 0, -1.0, 0.0)), signed=True) is None


@pytest.mark.parametrize("labels", [[0, 0], [0, 0, 1, 1], [0, 0, 1]], ids=["one", "stacked", "with a single one"])
def test_blocks_that_are_singular_to_rounding_are_refused_whatever_their_scales(labels):
    """LAPACK accepts a pivot of rounding size; coordinates on scales far apart are no reason to refuse."""
    n, structure = len(labels), BlockStructure(np.array(labels))
    state = BlockFamily(structure).from_scale(np.zeros(n), np.ones(n))
    nearly = np.eye(n)
    nearly[0, 1] = nearly[1, 0] = 1.0 - 1e-15
    assert np.linalg.cholesky(nearly)[1, 1] > 0.0
    assert state.precision_scaled_by(state.curvature(MatrixHessian(-nearly)), np.zeros(n)) is None
    nearly[0, 1] = nearly[1, 0] = 0.9
    scaled = nearly * np.outer([1.0, 1e-6, 1.0, 1.0][:n], [1.0, 1e-6, 1.0, 1.0][:n])
    new, _ = state.precision_scaled_by(state.curvature(MatrixHessian(-scaled)), np.zeros(n))
    np.testing.assert_allclose(new.cov() @ scaled, np.eye(n), atol=1e-8)


@pytest.mark.parametrize("name", ["chain", "lattice", "crossed", "groups in groups"])
@pytest.mark.parametrize("n", [1, 5, 64])
def test_many_precisions_of_one_pattern(case, n):
    """Solutions, determinants, inverses on the pattern and the metric are those of each; each may have no factor."""
    fronts, (i, j) = Fronts.of(case.pattern), (case.pattern.rows, case.pattern.cols)
    matrices = np.array([case.random(1.5)[0] for _ in range(n)])
    panels, at = np.zeros((2, n, fronts.n_panels)), fronts.places(i, j)
    panels[:, :, at] = matrices[:, i, j], case.rng.standard_normal((n, len(at)))
    factor = SparseCholesky.of(fronts, panels[0])
    np.testing.assert_allclose(2.0 * factor.log_det(), np.linalg.slogdet(matrices)[1], rtol=1e-9)
    np.testing.assert_allclose(factor.inverse[:, at], np.linalg.inv(matrices)[:, i, j], rtol=1e-8, atol=1e-12)
    vectors = case.rng.standard_normal((n, case.n_dim, 2))
    solved = factor.solve(factor.solve(vectors), transposed=True)
    np.testing.assert_allclose(solved, np.linalg.solve(matrices, vectors), rtol=1e-8, atol=1e-10)
    product = factor.times(factor.times(vectors, transposed=True))
    np.testing.assert_allclose(product, matrices @ vectors, rtol=1e-9, atol=1e-9)
    again = SparseCholesky(fronts, factor.panels)
    np.testing.assert_allclose(again.matrix, panels[0], rtol=1e-9, atol=1e-9)
    error = np.zeros((n, case.n_dim, case.n_dim))
    error[:, i, j] = error[:, j, i] = panels[1][:, at]
    relative, whitened = np.linalg.solve(matrices, error), factor.whitened(panels[1])
    np.testing.assert_allclose((whitened**2).sum(axis=1), np.einsum("nij,nji->n", relative, relative), rtol=1e-8)
    np.testing.assert_allclose(factor.unwhitened(whitened), panels[1], rtol=1e-8, atol=1e-9)
    for bad in (-1.0, np.inf, np.nan):
        panels[0, -1, fronts.diagonal[4]] = bad
        assert SparseCholesky.of(fronts, panels[0]) is None
        some, there = SparseCholesky.each(fronts, panels[0])
        np.testing.assert_array_equal(there, np.arange(n) < n - 1)
        np.testing.assert_array_equal(some.panels[there], factor.panels[there])


@pytest.mark.parametrize("n", [1, 5, 64])
@pytest.mark.parametrize("seed", [1, 2])
def test_many_precisions_beside_sums(n, seed):
    """A chain with two sums over all of it, against the dense matrices; each may have no factor."""
    rng, d, at = np.random.default_rng(seed), 30, np.arange(30)
    weights = rng.standard_normal((2, d))
    matrices = np.zeros((n, d + 2, d + 2))
    matrices[:, at, at] = 2.0 + rng.random((n, d))
    matrices[:, at[1:], at[:-1]] = matrices[:, at[:-1], at[1:]] = -0.7 * rng.random((n, 1))
    matrices[:, d:, :4] = across = 0.1 * rng.standard_normal((n, 2, 4))
    matrices[:, :4, d:] = across.mT
    matrices[:, d:, d:] = 0.5 * np.eye(2) + 0.1
    pattern = Pattern.of(np.abs(matrices).sum(axis=0))
    precisions, both = Precisions(pattern, weights), np.vstack([np.eye(d), weights])
    dense, entries = both.T @ matrices @ both, matrices[:, pattern.rows, pattern.cols]
    factors, there = precisions.factored(entries)
    assert there.all()
    np.testing.assert_allclose(2.0 * factors.log_det, np.linalg.slogdet(dense)[1], rtol=1e-10)
    joint = both @ np.linalg.inv(dense) @ both.T
    np.testing.assert_allclose(factors.covariance, joint[:, pattern.rows, pattern.cols], rtol=1e-8, atol=1e-11)
    z = rng.standard_normal((n, d, 3))
    x = factors.solve(z, transposed=True)
    np.testing.assert_allclose(np.einsum("ndm,nde,nem->nm", x, dense, x), (z**2).sum(axis=1), rtol=1e-9)
    np.testing.assert_allclose(factors.times_covariance(z[:, :, 0]), np.linalg.solve(dense, z[:, :, :1])[:, :, 0])
    entries[-1] *= -1.0
    some, there = precisions.factored(entries)
    np.testing.assert_array_equal(there, np.arange(n) < n - 1)
    if n > 1:
        np.testing.assert_array_equal(some.log_det, factors.log_det[:-1])


# --- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["blocks", "arrow", "filled"])
def test_thousands_of_blocks_make_no_dense_matrix(form):
    """Which would be 2 GiB."""
    n, labels = 16_000, np.random.default_rng(0).permutation(8_000).repeat(2)
    pairs = sparse.kron(sparse.eye_array(n // 2), np.ones((2, 2)))
    pattern = Pattern.of(pairs)
    family = {
        "blocks": lambda: BlockFamily(BlockStructure(labels)),
        "arrow": lambda: SparseFamily(SparseStructure.of_blocks(Partition(labels))),
        "filled": lambda: SparseFamily(SparseStructure.of(pattern)),
    }[form]()
    tracemalloc.start()
    state = family.from_scale(np.zeros(n), np.full(n, 0.5))
    doubled = state.add_to_diagonal(state.add_to_diagonal(np.zeros_like(state.factor), 1.0), 1.0)
    new = UPDATES["natural"](
        state, Moments(np.ones(n), doubled, *np.zeros((2, n)), gap=0.0, floor=0.0, floor_sd=0.0), 1.0, False
    )
    new.draws(np.zeros((2, n)))
    sd, peak = new.sd(), tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_allclose(sd, 0.5 / np.sqrt(2.0), rtol=1e-12)
    np.testing.assert_allclose(new.mean(), 0.25, rtol=1e-12)
    assert peak < 2**26
    assert family.memory_bytes(n) < 2**29


def rasch(n_persons, n_items):
    return np.block(
        [[np.eye(n_persons), np.ones((n_persons, n_items))], [np.ones((n_items, n_persons)), np.eye(n_items)]]
    )


#: Pattern, and how many times less a step should cost than with a dense precision.
MODELS = {
    "intercepts": (with_globals(np.eye(300), 6), 2_000),
    "slopes": (with_globals(np.kron(np.eye(59), np.ones((2, 2))), 8), 100),
    "crossed": (with_globals(crossed(150, 150, 600), 4), 4),
    "rasch": (rasch(500, 20), 500),
    "chain": (chain(400), 100),
    "grid": (lattice(25), 12),
}


@pytest.mark.parametrize("model", MODELS)
def test_blocks_are_independent_and_a_step_costs_far_less_than_a_dense_one(model):
    """In whatever order coordinates are; the same pattern gives the same structure."""
    matrix, factor = MODELS[model]
    order = np.random.default_rng(3).permutation(len(matrix))
    for pattern in (Pattern.of(matrix), Pattern.of(matrix[np.ix_(order, order)])):
        structure, again = find_blocks(pattern), find_blocks(pattern)
        values = np.arange(1.0, pattern.n_entries + 1)
        of_factor = SparseStructure.of_blocks(structure)
        panels = of_factor.panels_of(pattern, values)  # no entry is lost, none lies between blocks
        matrix = symmetric_matrix(of_factor, of_factor.mirrored(panels))
        np.testing.assert_allclose(matrix, pattern.symmetric(values).toarray())
        assert step_flops(structure.sizes, len(structure.border)) < 3.0 * len(matrix) ** 3 / factor
        np.testing.assert_array_equal(structure.order, again.order)


def test_what_a_model_s_own_grouping_is():
    for model, border, sizes in (
        (MODELS["intercepts"][0], np.arange(6), [1] * 300),
        (MODELS["slopes"][0], np.arange(8), [2] * 59),
        (MODELS["rasch"][0], np.arange(500, 520), [1] * 500),
        (np.ones((30, 30)), np.arange(30), []),
        (np.eye(40), [], [1] * 40),
        (np.kron(np.eye(10), np.ones((4, 4))), [], [4] * 10),
    ):
        structure = find_blocks(Pattern.of(model))
        np.testing.assert_array_equal(structure.border, border)
        np.testing.assert_array_equal(structure.sizes, sizes)


def test_arrows_stay_where_they_cost_no_more():
    """Groups beside globals, and small chains; not long ones."""
    assert find_filled(Pattern.of(with_globals(np.eye(396), 4))) is None
    for n, is_filled in ((200, False), (4000, True)):
        long = sparse.diags_array([np.ones(n), np.ones(n - 1)], offsets=[0, 1])
        assert (find_filled(Pattern.of(long)) is not None) is is_filled


# --- loops that Numba compiles: without a cache, with an empty one that two processes fill, in threads, and forked ---

#: Factors a chain, in a process of its own.
SCRIPT = """
import multiprocessing
import sys
import warnings

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import pymc_ngvi

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.families.fronts import Fronts, SparseCholesky

assert "numba" not in sys.modules
if "no cache" in sys.argv:
    import numba

    compiled = numba.njit

    def refuse(*args, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compiled(*args, **options)

    numba.njit = refuse

matrix = 3.0 * np.eye(40) + np.eye(40, k=1) + np.eye(40, k=-1)
fronts = Fronts.of(Pattern.of(matrix))
panels = np.zeros(fronts.n_panels)
panels[fronts.places(fronts.pattern.rows, fronts.pattern.cols)] = matrix[fronts.pattern.rows, fronts.pattern.cols]


def found(_):
    return SparseCholesky.of(fronts, panels).log_det()


expected = 0.5 * np.linalg.slogdet(matrix)[1]
for each in map(found, range(2)):
    np.testing.assert_allclose(each, expected, rtol=1e-12)
if "others" in sys.argv:
    warnings.simplefilter("ignore")
    with ThreadPoolExecutor(4) as pool, multiprocessing.get_context("fork").Pool(2) as processes:
        for each in (*pool.map(found, range(40)), *processes.map(found, range(4))):
            np.testing.assert_allclose(each, expected, rtol=1e-12)
"""


@pytest.mark.parametrize("how", [pytest.param("no cache", marks=pytest.mark.slow), "others"])
def test_loops_are_compiled_wherever_they_run(how, tmp_path):
    """With an empty cache by two processes at once."""
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", SCRIPT, how], env=env) for _ in range(1 + (how == "others"))]
    assert [process.wait(timeout=300) for process in started] == [0] * len(started)
    assert any(tmp_path.iterdir()) == (how == "others")


def test_large_fronts_keep_linear_algebra_to_one_thread(monkeypatch):
    """Where it wakes others, a factor of 2,100 coordinates took a hundred times as long beside another job."""
    matrix = np.eye(60) + 0.01
    pattern = Pattern.of(sparse.csr_array(matrix))
    structure = SparseStructure.of(pattern)
    panels = structure.panels_of(pattern, matrix[pattern.rows, pattern.cols])
    threads, factor = [], kernels.factor

    def watched(*args):
        threads.extend(library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas")
        return factor(*args)

    monkeypatch.setattr(kernels, "factor", watched)
    with threadpool_limits(2, user_api="blas"):
        assert SparseCholesky.of(structure, panels) is not None
    assert set(threads) == {1}
