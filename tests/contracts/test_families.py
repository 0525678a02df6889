"""Families against scipy's multivariate normal, and the identities of whitening."""

import numpy as np
import pytest

from matrix import (
    OF_COVARIANCE,
    OF_PRECISION,
    WITH_FACTOR,
    as_matrix,
    each_family,
    factor_matrix,
    family_object,
    random_state,
    state_of,
    two_seeds,
    whitener,
)
from scipy import stats
from targets import Quadratic, random_covariance, restrict

from pymc_ngvi.core.types import Outer

pytestmark = two_seeds
of_covariance = pytest.mark.parametrize("family", OF_COVARIANCE)
N_DIM = 5


@pytest.fixture
def state(family, seed):
    return random_state(family, N_DIM, np.random.default_rng(seed))


def packed(state, matrix):
    """Return a symmetric matrix as a curvature in the form of the family, which leaves out what it does not store."""
    c_inv = np.linalg.inv(whitener(state))
    return state.curvature(Quadratic(np.zeros(N_DIM), c_inv.T @ matrix @ c_inv).mean_hessian(np.zeros((1, N_DIM))))


def half(lower):
    """Return the lower triangle with a halved diagonal."""
    return np.tril(lower) - 0.5 * np.diag(np.diag(lower))


def random_outer(rng, n_outer):
    return Outer(rng.standard_normal((n_outer, N_DIM)), rng.standard_normal((n_outer, N_DIM)), rng.standard_normal())


@pytest.fixture
def reference(state):
    return stats.multivariate_normal(state.mean(), state.cov())


@each_family
def test_log_density_and_entropy_are_those_of_a_multivariate_normal(state, reference, rng):
    theta = state.mean() + 3.0 * rng.standard_normal((20, N_DIM))
    np.testing.assert_allclose(state.log_density(theta), reference.logpdf(theta), rtol=1e-10)
    np.testing.assert_allclose(state.entropy(), reference.entropy(), rtol=1e-12)


@each_family
def test_draws_are_affine_with_the_stated_mean_and_covariance(state, rng):
    c = whitener(state)
    np.testing.assert_allclose(c @ c.T, state.cov(), rtol=1e-12)
    np.testing.assert_allclose(state.sd(), np.sqrt(np.diag(state.cov())), rtol=1e-12)
    z = rng.standard_normal((7, N_DIM))
    np.testing.assert_allclose(state.draws(z), state.mean() + z @ c.T, rtol=1e-12)
    np.testing.assert_array_equal(state.draws(np.zeros((1, N_DIM)))[0], state.mean())


@each_family
def test_log_density_at_draws_is_that_of_the_base_draws(state, rng):
    z = rng.standard_normal((7, N_DIM))
    expected = stats.norm.logpdf(z).sum(axis=1) - np.log(abs(np.linalg.det(whitener(state))))
    np.testing.assert_allclose(state.log_density(state.draws(z)), expected, rtol=1e-10)


@each_family
def test_whitened_gradient_of_log_q_is_minus_the_base_draw(state, rng):
    z = rng.standard_normal((7, N_DIM))
    grad = np.linalg.solve(state.cov(), (state.mean() - state.draws(z)).T).T
    np.testing.assert_allclose(state.whiten(grad), -z, rtol=1e-8)
    np.testing.assert_allclose(state.whiten(grad[0]), -z[0], rtol=1e-8)


@each_family
def test_whitened_curvature_is_minus_ctrans_h_c(state, family, rng):
    half = rng.standard_normal((N_DIM, N_DIM))
    hessian = half + half.T  # indefinite
    c = whitener(state)
    expected = restrict(family, -c.T @ hessian @ c)
    curvature = state.curvature(Quadratic(np.zeros(N_DIM), -hessian).mean_hessian(np.zeros((1, N_DIM))))
    np.testing.assert_allclose(as_matrix(state, curvature), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(state.curvature_diagonal(curvature), np.diag(expected), rtol=1e-10, atol=1e-12)


@each_family
def test_whitened_curvature_of_log_q_is_the_identity(state):
    curvature = state.curvature(Quadratic(state.mean(), np.linalg.inv(state.cov())).mean_hessian(np.zeros((1, N_DIM))))
    np.testing.assert_allclose(state.curvature_error(curvature), 0.0, atol=1e-9)
    np.testing.assert_allclose(state.curvature_error(3.0 * curvature) / 2.0, curvature, rtol=1e-8, atol=1e-8)


@each_family
def test_params_round_trip(state, rng):
    params, z = {name: value.copy() for name, value in state.params().items()}, rng.standard_normal((3, N_DIM))
    for copy in (state.from_params(params), type(state).of_arrays(state.arrays())):
        assert copy.params().keys() == state.params().keys()
        np.testing.assert_array_equal(copy.draws(z), state.draws(z))
        np.testing.assert_array_equal(copy.cov(), state.cov())
    moved = state.from_params(params | {"mean": params["mean"] + 1.0})
    np.testing.assert_array_equal(moved.mean(), state.mean() + 1.0)
    np.testing.assert_array_equal(moved.cov(), state.cov())


@each_family
def test_from_scale_gives_uncorrelated_coordinates_and_keeps_no_reference(state, family, rng):
    location, scale = rng.standard_normal(N_DIM), np.exp(rng.standard_normal(N_DIM))
    start = family_object(family, N_DIM).from_scale(location, scale)
    expected_mean, expected_cov = location.copy(), np.diag(scale**2)
    location += 1.0
    scale *= 2.0
    np.testing.assert_array_equal(start.mean(), expected_mean)
    np.testing.assert_allclose(start.cov(), expected_cov, rtol=1e-14)


@each_family
def test_sample_moments(state, family, seed, rng):
    """Within 4.5 standard errors: 25 comparisons each."""
    n = 20_000
    draws = state.draws(rng.standard_normal((n, N_DIM)))
    whitened = np.linalg.solve(whitener(state), (draws - state.mean()).T)
    np.testing.assert_allclose(whitened.mean(axis=1), 0.0, atol=4.5 / np.sqrt(n))
    np.testing.assert_allclose(np.cov(whitened), np.eye(N_DIM), atol=4.5 * np.sqrt(2 / n))


@each_family
def test_memory_estimate_covers_what_a_state_holds(family, seed):
    """A dense family must not claim to need vectors only, nor one of small blocks a matrix."""
    n_dim = 400 * seed
    state = state_of(family, np.zeros(n_dim), random_covariance(np.random.default_rng(seed), n_dim))
    held = sum(value.nbytes for value in state.params().values())
    assert held < family_object(family, n_dim).memory_bytes(n_dim) < 128 * held


# --- what estimators, updates and step rules need ---------------------------------------------------------------------


@each_family
def test_factor_is_of_the_covariance_or_of_the_precision(state, family):
    factor = factor_matrix(state)
    product = np.linalg.inv(state.cov()) if family in OF_PRECISION else state.cov()
    assert state.factor_sign == (-1 if family in OF_PRECISION else 1)
    np.testing.assert_allclose(factor @ factor.T, product, rtol=1e-8, atol=1e-12)
    np.testing.assert_array_equal(factor, np.tril(factor))
    assert state.n_params == N_DIM + np.count_nonzero(restrict(family, np.tril(np.ones((N_DIM, N_DIM)))))


@each_family
def test_maps_between_the_spaces_are_the_whitener_and_its_inverse(state, rng):
    c, v = whitener(state), rng.standard_normal(N_DIM)
    np.testing.assert_allclose(state.unwhiten(v), c @ v, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(state.dewhiten(v), np.linalg.solve(c.T, v), rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(state.dewhiten(state.whiten(v)), v, rtol=1e-8, atol=1e-10)


@each_family
def test_operations_on_curvatures(state, family, rng):
    matrix = rng.standard_normal((N_DIM, N_DIM))
    matrix = restrict(family, matrix + matrix.T)
    curvature = packed(state, matrix)
    before = curvature.copy()
    moved = as_matrix(state, state.add_to_diagonal(curvature, -2.5))
    np.testing.assert_allclose(moved, matrix - 2.5 * np.eye(N_DIM), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(as_matrix(state, state.curvature_error(curvature)), matrix - np.eye(N_DIM), atol=1e-8)
    np.testing.assert_array_equal(curvature, before)


@pytest.mark.parametrize("family", [family for family in WITH_FACTOR if family != "sparse"])
def test_square_of_a_curvature(state, family, rng):
    """The sparse family has none: the square of an arrow matrix is dense."""
    matrix = rng.standard_normal((N_DIM, N_DIM))
    matrix = restrict(family, matrix + matrix.T)
    squared = state.squared(packed(state, matrix))
    np.testing.assert_allclose(as_matrix(state, squared), matrix @ matrix, rtol=1e-7, atol=1e-7)


@each_family
def test_flat_curvatures_have_the_inner_products_of_the_matrices(state, family, rng):
    """Of errors A - I, in the metric of the gap, secants take inner products."""
    first, second = (restrict(family, m + m.T) for m in rng.standard_normal((2, N_DIM, N_DIM)))
    a, b = packed(state, first), packed(state, second)
    assert state.flat(a).shape == (a.size,)
    np.testing.assert_allclose(state.flat(a) @ state.flat(b), np.sum(first * second), rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(state.unflat(state.flat(a)), a, rtol=1e-12)


@each_family
def test_order_of_outer_products_makes_the_factor_s_triangle_the_lower_one(state, family, rng):
    """The gradient of log p along a factor T of the precision is that of E[z w^T], of C that of E[w z^T]."""
    whitened, z = rng.standard_normal((2, 3, N_DIM))
    left, right = (z, whitened) if family in OF_PRECISION else (whitened, z)
    outer = state.outer(whitened, z)
    lower = restrict(family, np.tril(left.T @ right / 3))
    expected = lower + np.tril(lower, -1).T
    np.testing.assert_allclose(as_matrix(state, state.outer_mean(outer)), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(state.outer_diagonal(outer), np.diag(expected), rtol=1e-10, atol=1e-12)


@each_family
@pytest.mark.parametrize("n_outer", [1, 4])
def test_products_with_a_factor_of_a_few_outer_products(state, family, rng, n_outer):
    """The same as with the matrix, whose upper triangle is never looked at, and the lower triangle of explicit sums."""
    outer, factor = random_outer(rng, n_outer), factor_matrix(state)
    lower = np.tril(outer.left.T @ outer.right) / n_outer + outer.diagonal * np.eye(N_DIM)
    lower = restrict(family, lower)
    np.testing.assert_allclose(
        factor_matrix(state, state.times_lower_half(outer)), factor @ half(lower), rtol=1e-8, atol=1e-10
    )
    # Of the product with the inverse transpose, what the family does not store is left out at the end.
    whole = restrict(family, outer.left.T @ outer.right / n_outer + outer.diagonal * np.eye(N_DIM))
    expected = np.tril(np.linalg.solve(factor.T, whole))
    np.testing.assert_allclose(
        factor_matrix(state, state.inverse_transpose_times(outer)), expected, rtol=1e-7, atol=1e-8
    )


@each_family
def test_products_with_a_factor_of_a_matrix(state, family, rng):
    matrix = rng.standard_normal((N_DIM, N_DIM))
    matrix = restrict(family, matrix + matrix.T)
    error, factor = packed(state, matrix), factor_matrix(state)
    np.testing.assert_allclose(
        factor_matrix(state, state.times_lower_half(error)), factor @ half(matrix), rtol=1e-7, atol=1e-7
    )
    expected = np.tril(np.linalg.solve(factor.T, matrix))
    np.testing.assert_allclose(
        factor_matrix(state, state.inverse_transpose_times(error)), expected, rtol=1e-6, atol=1e-6
    )


@each_family
def test_products_are_gradients_of_the_elbo(state, family, rng):
    """Finite differences along random directions in the factor, of E_q[log p] + entropy for a quadratic log p."""
    target = Quadratic(rng.standard_normal(N_DIM), np.linalg.inv(random_covariance(rng, N_DIM)))
    base = np.zeros((1, N_DIM))
    error = -state.curvature_error(state.curvature(target.mean_hessian(base)))
    gradient = state.factor_sign * state.inverse_transpose_times(error)
    direction = restrict(family, np.tril(rng.standard_normal((N_DIM, N_DIM))))
    # In the form of a factor: the difference of two states.
    entries = state.factor
    steps = [pack_lower(state, 1e-6 * sign * direction) for sign in (1.0, -1.0)]
    up, down = (state.plus(np.zeros(N_DIM), step) for step in steps)
    slope = (target.elbo(up.mean(), up.cov()) - target.elbo(down.mean(), down.cov())) / 2e-6
    np.testing.assert_allclose(np.vdot(gradient, steps[0]) / 1e-6, slope, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(entries, state.factor)


def pack_lower(state, matrix):
    """Return a lower-triangular matrix in the form of a factor."""
    if state.factor.ndim == 2:
        return matrix
    if state.factor.shape == (N_DIM,):
        return np.diag(matrix).copy()
    order = factor_matrix(state, np.arange(1, state.structure.n_entries + 1))
    values = np.zeros(state.structure.n_entries)
    values[order[order > 0].astype(int) - 1] = matrix[order > 0]
    return values


@each_family
def test_scaled_columns(state, rng):
    scale = rng.standard_normal(N_DIM)
    expected = factor_matrix(state) * scale
    np.testing.assert_allclose(factor_matrix(state, state.scaled_columns(scale)), expected, rtol=1e-14)


@each_family
def test_plus_adds_to_mean_and_factor_and_keeps_the_diagonal_positive(state, rng):
    step, columns = rng.standard_normal(N_DIM), np.ones(N_DIM)
    columns[2] = 0.5
    new = state.plus(step, state.scaled_columns(columns - 1.0))
    np.testing.assert_array_equal(new.location, state.location + step)
    np.testing.assert_allclose(new.factor, state.scaled_columns(columns), rtol=1e-12)
    for bad in (0.0, -0.5, np.nan, np.inf):
        columns[2] = bad
        with np.errstate(invalid="ignore"):
            scaled = state.scaled_columns(columns) - state.factor
        assert state.plus(step, scaled) is None, bad
    assert state.plus(np.full(N_DIM, np.inf), np.zeros_like(state.factor)) is None


@each_family
def test_a_factor_with_negative_entries_is_of_the_same_gaussian(state, rng):
    """Signed steps may take a column of the factor through 0, but not to it."""
    columns = np.array([1.0, -1.0, 1.0, -1.0, 1.0])
    still = np.zeros(N_DIM)
    negative = state.plus(still, state.scaled_columns(columns - 1.0), signed=True)
    theta = state.mean() + rng.standard_normal((4, N_DIM))
    positive = negative.unsigned()
    for same in (negative, positive):
        np.testing.assert_allclose(same.log_density(theta), state.log_density(theta), rtol=1e-9)
        np.testing.assert_allclose(same.cov(), state.cov(), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(same.entropy(), state.entropy(), rtol=1e-12)
    assert (np.diag(factor_matrix(negative)) * columns > 0).all()
    np.testing.assert_allclose(positive.factor, state.factor, rtol=1e-12)
    assert state.unsigned() is state
    assert state.plus(still, state.scaled_columns(np.where(columns < 0, -1.0, 0.0)), signed=True) is None


@each_family
def test_division_by_a_precision(state, family, rng):
    root = rng.standard_normal((N_DIM, 2 * N_DIM))
    matrix, grad, c = restrict(family, root @ root.T), rng.standard_normal(N_DIM), whitener(state)
    before = state.factor.copy()
    new, displacement = state.precision_scaled_by(packed(state, matrix), grad)
    np.testing.assert_allclose(new.cov(), c @ np.linalg.solve(matrix, c.T), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(displacement, c @ np.linalg.solve(matrix, grad), rtol=1e-6, atol=1e-8)
    np.testing.assert_array_equal(new.location, state.location)
    factor = factor_matrix(new)
    np.testing.assert_array_equal(factor, np.tril(factor))
    assert (np.diag(factor) > 0.0).all()
    np.testing.assert_array_equal(state.factor, before)
    assert state.precision_scaled_by(packed(state, -matrix), grad) is None
    one_lost = restrict(family, np.diag([1.0, 1.0, 1.0, 1.0, -1e-3]))
    assert state.precision_scaled_by(packed(state, one_lost), grad) is None


@of_covariance
def test_division_by_a_function_of_a_curvature(state, family, rng):
    root = rng.standard_normal((N_DIM, 2 * N_DIM))
    matrix, grad, c = restrict(family, root @ root.T), rng.standard_normal(N_DIM), whitener(state)
    by_function, moved = state.precision_scaled_by_function(packed(state, matrix), lambda a: np.sqrt(a) + 1.0, grad)
    eigenvalues, vectors = np.linalg.eigh(matrix)
    inverse = (vectors / (np.sqrt(eigenvalues) + 1.0)) @ vectors.T
    np.testing.assert_allclose(by_function.cov(), c @ inverse @ c.T, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(moved, c @ inverse @ grad, rtol=1e-6, atol=1e-8)
    assert state.precision_scaled_by_function(packed(state, matrix), lambda a: -a, grad) is None


@pytest.mark.parametrize("family", OF_PRECISION)
def test_a_factor_of_the_precision_is_not_divided_by_functions(state, family, rng):
    """A function of the eigenvalues of an arrow matrix is none; steps are shortened instead, here and when dense."""
    assert (
        state.precision_scaled_by_function(packed(state, np.eye(N_DIM)), np.ones_like, rng.standard_normal(N_DIM))
        is None
    )


@of_covariance
@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_merging_averages_the_expectation_parameters(state, family, seed, weight):
    """For factors of the covariance alone: a mean of two covariances has no sparse inverse."""
    other = random_state(family, N_DIM, np.random.default_rng(seed + 100))
    merged = state.merged(other, weight)
    mean = (1 - weight) * state.mean() + weight * other.mean()
    second = sum(w * (q.cov() + np.outer(q.mean(), q.mean())) for w, q in ((1 - weight, state), (weight, other)))
    np.testing.assert_allclose(merged.mean(), mean, rtol=1e-12)
    expected = restrict(family, second - np.outer(mean, mean))
    np.testing.assert_allclose(merged.cov(), expected, rtol=1e-7, atol=1e-9)


@each_family
def test_only_the_sparse_family_tells_global_parameters_from_others(state, family):
    """Its border, in the tests the coordinates 3 and 4; the step rules judge these one by one."""
    if family == "sparse":
        np.testing.assert_array_equal(state.globals_, [3, 4])
    else:
        assert state.globals_ is None


@pytest.mark.parametrize("family", ["sparse"])
def test_a_held_step_is_the_one_of_the_others_given_the_global_parameters(state, family, rng):
    """The natural step of the conditional of the first three coordinates; mean and precision of the last stay."""
    root = rng.standard_normal((N_DIM, 2 * N_DIM))
    precision, grad = np.linalg.inv(state.cov()), rng.standard_normal(N_DIM)
    whitened_grad, curvature = state.without_globals(state.whiten(grad), packed(state, root @ root.T))
    new, displacement = state.precision_scaled_by(curvature, whitened_grad)
    np.testing.assert_allclose(displacement[3:], 0.0, atol=1e-12)
    np.testing.assert_allclose(new.cov()[3:, 3:], state.cov()[3:, 3:], rtol=1e-7, atol=1e-9)
    factor = factor_matrix(state)[:3, :3]
    conditional = factor @ (root @ root.T)[:3, :3] @ factor.T
    np.testing.assert_allclose(np.linalg.inv(new.cov())[:3, :3], conditional, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(displacement[:3], np.linalg.solve(conditional, grad[:3]), rtol=1e-6, atol=1e-8)
    # What is predicted of the others by the global parameters stays as well.
    regression, kept = (np.linalg.solve(q[:3, :3], q[:3, 3:]) for q in (np.linalg.inv(new.cov()), precision))
    np.testing.assert_allclose(regression, kept, rtol=1e-6, atol=1e-7)
