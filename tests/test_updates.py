"""Updates against explicit matrices, finite differences and the exact answer of a Gaussian target."""

import hypothesis.strategies as st
import numpy as np
import pytest

from hypothesis import given, settings
from hypothesis.extra.numpy import arrays
from matrix import each_family, random_state, state_of, two_seeds, whitener
from targets import logistic, random_covariance, restrict

from pymc_ngvi.types import Moments
from pymc_ngvi.updates import natural

step_sizes = pytest.mark.parametrize("rho", [1.0, 0.5, 0.01])


def moments_of(state, grad, curvature):
    """Return whitened moments of E[grad log p] and -E[hess log p], both given in the coordinates of theta."""
    c = whitener(state)
    dense = c.T @ curvature @ c
    diagonal = state.curvature_error(np.zeros(state.n_dim)).ndim == 1 and "sd" in state.params()
    return whitened_moments(c.T @ grad, np.diag(dense).copy() if diagonal else 0.5 * (dense + dense.T))


def whitened_moments(grad, curvature):
    """Return moments as an estimator without noise would."""
    zero = np.zeros(len(grad))
    return Moments(grad, curvature, grad_se=zero, curvature_se=zero, gap=0.0, floor=0.0, floor_sd=0.0)


def random_moments(state, rng, *, definite=True):
    """Return a gradient and a random curvature, positive definite or not, in the coordinates of theta."""
    half = rng.standard_normal((state.n_dim, state.n_dim))
    curvature = half @ half.T + np.eye(state.n_dim) if definite else half + half.T - 3.0 * np.eye(state.n_dim)
    return rng.standard_normal(state.n_dim), curvature


def assert_same_gaussian(state, mean, cov, rtol):
    """Compare in units of the standard deviations of the answer."""
    sd = np.sqrt(np.diag(cov))
    np.testing.assert_allclose(state.mean() / sd, mean / sd, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(state.cov() / np.outer(sd, sd), cov / np.outer(sd, sd), rtol=rtol, atol=rtol)


@each_family
@two_seeds
@step_sizes
def test_natural_step_in_explicit_matrices(family, seed, rho):
    """S' = (1-rho) S + rho E[-H], mu' = mu + rho S'^-1 g: with the new precision, not the old one."""
    rng = np.random.default_rng(seed)
    state = random_state(family, 4, rng)
    grad, curvature = random_moments(state, rng)
    precision = (1 - rho) * np.linalg.inv(state.cov()) + rho * restrict(family, curvature)
    new = natural(state, moments_of(state, grad, curvature), rho, False)
    cov = np.linalg.inv(precision)
    assert_same_gaussian(new, state.mean() + rho * cov @ grad, cov, rtol=1e-8)


def _natural_parameters(family, mean, cov):
    """Return minimal natural parameters: S mu, and the stored entries of -S/2 (off-diagonals counted twice)."""
    precision = np.linalg.inv(cov)
    linear = precision @ mean
    rows, columns = (np.diag_indices(2) if family == "diagonal" else np.tril_indices(2)) if len(mean) == 2 else ()
    twice = np.where(rows == columns, 1.0, 2.0)
    return np.concatenate([linear, -0.5 * twice * precision[rows, columns]])


def _from_natural(family, natural_parameters):
    rows, columns = np.diag_indices(2) if family == "diagonal" else np.tril_indices(2)
    twice = np.where(rows == columns, 1.0, 2.0)
    precision = np.zeros((2, 2))
    precision[rows, columns] = precision[columns, rows] = -2.0 * natural_parameters[2:] / twice
    cov = np.linalg.inv(precision)
    return cov @ natural_parameters[:2], cov


def _log_partition(family, natural_parameters):
    mean, cov = _from_natural(family, natural_parameters)
    return 0.5 * mean @ np.linalg.solve(cov, mean) + 0.5 * np.linalg.slogdet(cov)[1]


def _derivatives(function, x, h=1e-4):
    """Return gradient and Hessian by central differences, relative errors about 1e-6."""
    steps = h * np.diag(np.maximum(np.abs(x), 0.1))
    sizes = np.diag(steps)
    grad = np.array([(function(x + s) - function(x - s)) for s in steps]) / (2 * sizes)
    signs = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
    hessian = np.array([[sum(i * j * function(x + i * a + j * b) for i, j in signs) for b in steps] for a in steps])
    return grad, hessian / (4 * np.outer(sizes, sizes))


@each_family
@two_seeds
def test_natural_step_is_the_inverse_fisher_information_times_the_gradient_of_the_elbo(family, seed):
    """Fisher information and gradient by finite differences in the natural parameters of q."""
    target = logistic(n=20, n_dim=2, seed=seed)
    rng = np.random.default_rng(seed)
    state = state_of(family, 0.3 * rng.standard_normal(2), 0.3 * random_covariance(rng, 2, 3.0))
    x = _natural_parameters(family, state.mean(), state.cov())
    _, fisher = _derivatives(lambda x: _log_partition(family, x), x)
    grad, _ = _derivatives(lambda x: target.elbo(*_from_natural(family, x)), x)
    direction = np.linalg.solve(fisher, grad)
    rho = 0.1
    new = natural(state, moments_of(state, *target.moments(state.mean(), state.cov())), rho, False)
    taken = (_natural_parameters(family, new.mean(), new.cov()) - x) / rho
    np.testing.assert_allclose(taken, direction, rtol=1e-4, atol=1e-4 * np.abs(direction).max())


@each_family
@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), condition=st.floats(1.0, 1e3), scale=st.floats(0.05, 1e3))
def test_one_step_of_size_1_is_exact_for_a_gaussian_target(family, seed, condition, scale):
    """From any state; in a diagonal family on a diagonal target (for others the mean takes several steps)."""
    rng = np.random.default_rng(seed)
    state = random_state(family, 3, rng)
    cov = scale**2 * restrict(family, random_covariance(rng, 3, condition))
    mean = scale * 10.0 * rng.standard_normal(3)
    precision = np.linalg.inv(cov)
    new = natural(state, moments_of(state, precision @ (mean - state.mean()), precision), 1.0, False)
    assert_same_gaussian(new, mean, cov, rtol=1e-8)


@each_family
@two_seeds
def test_diagonal_part_of_a_correlated_gaussian_is_exact_in_one_step(family, seed):
    """The precision of the best q in a restricted family: the restriction of the target's precision."""
    rng = np.random.default_rng(seed)
    state, precision = random_state(family, 4, rng), np.linalg.inv(random_covariance(rng, 4))
    new = natural(state, moments_of(state, np.zeros(4), precision), 1.0, False)
    np.testing.assert_allclose(np.linalg.inv(new.cov()), restrict(family, precision), rtol=1e-8, atol=1e-8)


@each_family
def test_the_given_values_are_not_modified(family, rng):
    state = random_state(family, 4, rng)
    for definite in (True, False):
        moments = moments_of(state, *random_moments(state, rng, definite=definite))
        before = [state.mean().copy(), state.cov().copy(), moments.grad.copy(), moments.curvature.copy()]
        natural(state, moments, 0.7, True)
        for kept, now in zip(before, [state.mean(), state.cov(), moments.grad, moments.curvature], strict=True):
            np.testing.assert_array_equal(kept, now)


# --- where the new precision would not be positive definite -----------------------------------------------------------


@each_family
@two_seeds
def test_indefinite_curvature_is_refused_or_corrected(family, seed):
    rng = np.random.default_rng(seed)
    state = random_state(family, 4, rng)
    moments = moments_of(state, *random_moments(state, rng, definite=False))
    assert natural(state, moments, 1.0, False) is None
    new = natural(state, moments, 1.0, True)
    assert np.isfinite(new.mean()).all()
    assert np.linalg.eigvalsh(new.cov()).min() > 0


@each_family
@step_sizes
def test_correction_changes_nothing_where_the_step_is_valid(family, rho, rng):
    state = random_state(family, 4, rng)
    moments = moments_of(state, *random_moments(state, rng))
    plain, allowed = natural(state, moments, rho, False), natural(state, moments, rho, True)
    np.testing.assert_array_equal(plain.mean(), allowed.mean())
    np.testing.assert_array_equal(plain.cov(), allowed.cov())


@each_family
@pytest.mark.parametrize(("curvature", "rho"), [(-1.0, 1.0), (-0.5, 1.0), (0.0, 1.0), (-0.5, 0.8), (-1.5, 0.8)])
def test_corrected_precision_in_one_dimension(family, curvature, rho):
    """S' = S + rho G + rho^2/2 G S^-1 G with G = (a - 1) S, and the mean moves with the new precision.

    This form is positive for any G; only directions that the plain step would lose need it.
    """
    state = state_of(family, np.array([1.0]), np.array([[4.0]]))
    precision, g = 0.25, (curvature - 1.0) * 0.25
    expected = precision + rho * g + 0.5 * rho**2 * g / precision * g
    new = natural(state, moments_of(state, np.array([0.3]), np.array([[curvature * precision]])), rho, True)
    np.testing.assert_allclose(1.0 / new.cov()[0, 0], expected, rtol=1e-12)
    np.testing.assert_allclose(new.mean()[0], 1.0 + rho * 0.3 / expected, rtol=1e-12)


@each_family
def test_correction_leaves_the_directions_that_are_not_lost(family, rng):
    """Whitened curvatures 5, 1 and -0.4: with rho = 1 only the last needs the correction, 1 - 1.4 + .98."""
    state = random_state("diagonal", 3, rng)
    state = state_of(family, state.mean(), state.cov())
    curvature = np.diag([5.0, 1.0, -0.4]) / state.cov().clip(1e-300)
    curvature[~np.eye(3, dtype=bool)] = 0.0
    new = natural(state, moments_of(state, np.zeros(3), curvature), 1.0, True)
    np.testing.assert_allclose(np.diag(state.cov()) / np.diag(new.cov()), [5.0, 1.0, 0.58], rtol=1e-10)


def test_correction_does_not_depend_on_the_orientation(rng):
    """Rotating the whitened curvature rotates the new precision: the correction works on eigenvalues."""
    vectors = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    curvature = (vectors * np.array([5.0, 1.0, -0.4])) @ vectors.T
    state = state_of("full", np.zeros(3), np.eye(3))
    new = natural(state, moments_of(state, np.zeros(3), curvature), 1.0, True)
    np.testing.assert_allclose(new.cov(), (vectors / np.array([5.0, 1.0, 0.58])) @ vectors.T, rtol=1e-10, atol=1e-12)


@each_family
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_curvature_that_is_not_finite_gives_no_step(family, bad, rng):
    state = random_state(family, 3, rng)
    moments = moments_of(state, *random_moments(state, rng))
    moments.curvature[0] = bad
    assert natural(state, moments, 0.5, True) is None
    assert natural(state, moments, 0.5, False) is None


#: Whitened curvatures of any sign from 0 and 1e-12 to 1e12.
extreme = st.one_of(
    st.just(0.0),
    st.builds(lambda sign, exponent: sign * 10.0**exponent, st.sampled_from([-1.0, 1.0]), st.floats(-12, 12)),
)


@each_family
@settings(max_examples=100)
@given(
    eigenvalues=arrays(float, 4, elements=extreme),
    seed=st.integers(0, 2**32 - 1),
    rho=st.floats(1e-3, 1.0),
)
def test_corrected_step_is_always_finite_and_positive_definite(family, eigenvalues, seed, rho):
    """Indefinite, singular, nearly singular and huge curvature, in a random orientation."""
    rng = np.random.default_rng(seed)
    state = random_state(family, 4, rng)
    vectors = np.linalg.qr(rng.standard_normal((4, 4)))[0]
    curvature = (vectors * eigenvalues) @ vectors.T
    if family == "diagonal":
        curvature = np.diag(curvature).copy()
    new = natural(state, whitened_moments(rng.standard_normal(4), curvature), rho, True)
    assert new is not None
    assert np.isfinite(new.mean()).all()
    assert np.isfinite(new.sd()).all()
    # The sum of the logarithms of the pivots: finite where all are positive.
    assert np.isfinite(new.entropy())


@each_family
@pytest.mark.parametrize("rho", [0.5, 0.75, 0.1])
def test_a_precision_that_cancels_to_rounding_counts_as_lost(family, rho):
    """(1-rho) + rho a = 0 along one direction: what rounding leaves must not become a standard deviation of 1e8."""
    lost = 1.0 - 1.0 / rho
    for seed in range(20):
        vectors = np.linalg.qr(np.random.default_rng(seed).standard_normal((4, 4)))[0]
        curvature = (vectors * np.array([lost, 1.0, 2.0, 0.5])) @ vectors.T
        if family == "diagonal":
            curvature = np.array([lost * (1 - 1e-16 * seed), 1.0, 2.0, 0.5])
        state = state_of(family, np.zeros(4), np.eye(4))
        new = natural(state, whitened_moments(np.zeros(4), curvature), rho, True)
        assert new.sd().max() < 1e4


@each_family
@pytest.mark.parametrize("huge", [1e10, 1e16, 1e20], ids="{:.0e}".format)
def test_curvature_huge_along_one_coordinate(family, huge):
    """A first standard deviation far too wide for one coordinate, as raw predictors give: scales are no obstacle."""
    state = state_of(family, np.zeros(3), np.eye(3))
    curvature = np.diag([1.0, huge, 2.0])
    new = natural(state, moments_of(state, np.array([1.0, huge, 1.0]), curvature), 1.0, True)
    assert_same_gaussian(new, np.array([1.0, 1.0, 0.5]), np.diag([1.0, 1.0 / huge, 0.5]), rtol=1e-8)
