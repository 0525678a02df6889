"""Updates against explicit matrices, finite differences and the exact answer of a Gaussian target."""

import numpy as np
import pytest

from matrix import (
    NATURAL_FAMILIES,
    OF_COVARIANCE,
    OF_PRECISION,
    PAIRS,
    as_curvature,
    as_matrix,
    half_triangle,
    moments_of,
    random_state,
    state_of,
    stored,
    two_seeds,
    whitened_moments,
    whitener,
)
from targets import random_covariance

from pymc_ngvi.fitting.options import AXES
from pymc_ngvi.methods import natural

step_sizes = pytest.mark.parametrize("rho", [1.0, 0.5, 0.01])


each_pair = pytest.mark.parametrize(("family", "update"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
each_family = pytest.mark.parametrize("family", NATURAL_FAMILIES)
#: With a correction of natural steps that would be lost: it needs functions of the eigenvalues of a curvature.
each_corrected = pytest.mark.parametrize("family", OF_COVARIANCE)


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


def step_in_matrices(family, update, state, grad, curvature, rho):
    """Return mean and covariance after a step from E[grad log p] and -E[hess log p], in the coordinates of theta.

    The gradients in the factors C and T are tril((S + H) C) and tril(-Sigma (S + H) T^-T), with a precision S and a
    mean Hessian H; the Fisher information divides them as C thalf(C^T .) and T thalf(T^T .).
    """
    mean, cov = state.mean(), state.cov()
    precision, excess = np.linalg.inv(cov), stored(family, curvature) - np.linalg.inv(cov)
    if update == "natural":
        new = np.linalg.inv(precision + rho * excess)
        return mean + rho * new @ grad, new
    if update == "natural_pd":
        return mean + rho * cov @ grad, np.linalg.inv(precision + rho * excess + 0.5 * rho**2 * excess @ cov @ excess)
    of_precision = family in OF_PRECISION
    factor = np.linalg.cholesky(precision if of_precision else cov)
    gradient = np.tril(cov @ excess @ np.linalg.inv(factor).T if of_precision else -excess @ factor)
    if update == "euclidean":
        new, location = factor + rho * gradient, mean + rho * grad
    else:
        change = rho * half_triangle(factor.T @ gradient)
        if update == "sqrt":
            np.fill_diagonal(change, np.expm1(np.diag(change)))
        new, location = factor + factor @ change, mean + rho * cov @ grad
    return location, np.linalg.inv(new @ new.T) if of_precision else new @ new.T


@each_pair
@two_seeds
@step_sizes
def test_step_in_explicit_matrices(family, update, seed, rho):
    """Every formula in the coordinates of theta; the natural mean moves with the new precision, not the old one."""
    rng = np.random.default_rng(seed)
    state = random_state(family, 4, rng)
    rho = 1e-3 * rho if update == "euclidean" else rho
    root = np.linalg.inv(whitener(state))
    # Whitened eigenvalues below 3, so that no factor's diagonal changes its sign.
    grad, curvature = rng.standard_normal(4), root.T @ (3.0 * random_covariance(rng, 4)) @ root
    new = AXES["update"][update](state, moments_of(state, grad, curvature), rho, False)
    assert_same_gaussian(new, *step_in_matrices(family, update, state, grad, curvature, rho), rtol=1e-8)


# --- what the other updates do on a Gaussian target -------------------------------------------------------------------


# --- steps from the gradient at one draw, in loops --------------------------------------------------------------------


# --- variational online Gauss-Newton ----------------------------------------------------------------------------------


# --- where the new precision would not be positive definite -----------------------------------------------------------


@pytest.mark.parametrize("family", OF_PRECISION)
@two_seeds
def test_indefinite_curvature_is_refused_where_there_is_no_correction(family, seed):
    """Whether or not one is allowed: the step is to be made shorter, which the rule does."""
    rng = np.random.default_rng(seed)
    state = random_state(family, 4, rng)
    moments = moments_of(state, *random_moments(state, rng, definite=False))
    assert natural(state, moments, 1.0, False) is None
    assert natural(state, moments, 1.0, True) is None
    smallest = np.linalg.eigvalsh(as_matrix(state, moments.curvature)).min()
    limit = 1.0 / (1.0 - smallest)  # (1 - rho) + rho a = 0 along the worst direction
    for correct in (False, True):
        assert natural(state, moments, 1.01 * limit, correct) is None
        new = natural(state, moments, 0.99 * limit, correct)
        assert np.isfinite(new.mean()).all()
        assert np.linalg.eigvalsh(new.cov()).min() > 0


@each_corrected
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


@each_corrected
@pytest.mark.parametrize(("curvature", "rho"), [(-2.0, 1.0), (-9.0, 1.0), (-1e6, 0.5)])
def test_correction_of_a_direction_far_out_leaves_its_precision(family, curvature, rho):
    """The quadratic term is not let grow beyond excesses of -2, where it cancels the linear one."""
    state = state_of(family, np.array([1.0]), np.array([[4.0]]))
    new = natural(state, moments_of(state, np.array([0.3]), np.array([[0.25 * curvature]])), rho, True)
    np.testing.assert_allclose(new.cov()[0, 0], 4.0, rtol=1e-12)
    np.testing.assert_allclose(new.mean()[0], 1.0 + rho * 0.3 * 4.0, rtol=1e-12)


@each_corrected
def test_correction_leaves_the_directions_that_are_not_lost(family, rng):
    """Whitened curvatures 5, 1 and -0.4: with rho = 1 only the last needs the correction, 1 - 1.4 + .98."""
    state = random_state("diagonal", 3, rng)
    state = state_of(family, state.mean(), state.cov())
    curvature = np.diag([5.0, 1.0, -0.4]) / state.cov().clip(1e-300)
    curvature[~np.eye(3, dtype=bool)] = 0.0
    new = natural(state, moments_of(state, np.zeros(3), curvature), 1.0, True)
    np.testing.assert_allclose(np.diag(state.cov()) / np.diag(new.cov()), [5.0, 1.0, 0.58], rtol=1e-10)


@each_family
@pytest.mark.parametrize("rho", [0.5, 0.75, 0.1])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_precision_that_cancels_to_rounding_counts_as_lost(family, rho, aligned):
    """(1-rho) + rho a = 0 along one direction: what rounding leaves must not become a standard deviation of 1e8.

    Be it a coordinate or any other; coordinates 0 and 3 share a block. In whatever order a processor adds: so the
    curvature gets an error of some roundings.
    """
    lost = 1.0 - 1.0 / rho
    state = state_of(family, np.zeros(4), np.eye(4))
    for seed in range(40):
        noise = 2e-15 * abs(lost) * np.random.default_rng(seed).uniform(-1.0, 1.0, (4, 4))
        rotation = np.linalg.qr(np.random.default_rng(seed).standard_normal((2, 2)))[0]
        curvature = np.diag([1.0, 2.0, 0.5, lost * (1 - 1e-16 * seed)])
        if family in ("full", *OF_PRECISION) and not aligned:
            rotation = np.linalg.qr(np.random.default_rng(seed).standard_normal((4, 4)))[0]
            curvature = rotation @ curvature @ rotation.T
        elif family == "block" and not aligned:
            curvature[np.ix_([0, 3], [0, 3])] = rotation @ curvature[np.ix_([0, 3], [0, 3])] @ rotation.T
        curvature += noise + noise.T
        new = natural(state, whitened_moments(np.zeros(4), as_curvature(state, curvature)), rho, True)
        if family in OF_PRECISION:  # no correction: no step, then
            assert new is None
        else:
            assert new.sd().max() < 1e4


@each_family
@pytest.mark.parametrize("huge", [1e10, 1e16, 1e20], ids="{:.0e}".format)
def test_curvature_huge_along_one_coordinate(family, huge):
    """A first standard deviation far too wide for one coordinate, as raw predictors give: scales are no obstacle."""
    state = state_of(family, np.zeros(3), np.eye(3))
    curvature = np.diag([1.0, huge, 2.0])
    new = natural(state, moments_of(state, np.array([1.0, huge, 1.0]), curvature), 1.0, True)
    assert_same_gaussian(new, np.array([1.0, 1.0, 0.5]), np.diag([1.0, 1.0 / huge, 0.5]), rtol=1e-8)
