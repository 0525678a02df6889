"""Families against scipy's multivariate normal, and the identities of whitening."""

import numpy as np
import pytest

from matrix import each_family, random_state, state_of, two_seeds, whitener
from scipy import stats
from targets import Quadratic, random_covariance, restrict

from pymc_ngvi.families import FAMILIES

pytestmark = [each_family, two_seeds]
N_DIM = 5


@pytest.fixture
def state(family, seed):
    return random_state(family, N_DIM, np.random.default_rng(seed))


@pytest.fixture
def reference(state):
    return stats.multivariate_normal(state.mean(), state.cov())


def test_log_density_and_entropy_are_those_of_a_multivariate_normal(state, reference, rng):
    theta = state.mean() + 3.0 * rng.standard_normal((20, N_DIM))
    np.testing.assert_allclose(state.log_density(theta), reference.logpdf(theta), rtol=1e-10)
    np.testing.assert_allclose(state.entropy(), reference.entropy(), rtol=1e-12)


def test_draws_are_affine_with_the_stated_mean_and_covariance(state, rng):
    c = whitener(state)
    np.testing.assert_allclose(c @ c.T, state.cov(), rtol=1e-12)
    np.testing.assert_allclose(state.sd(), np.sqrt(np.diag(state.cov())), rtol=1e-12)
    z = rng.standard_normal((7, N_DIM))
    np.testing.assert_allclose(state.draws(z), state.mean() + z @ c.T, rtol=1e-12)
    np.testing.assert_array_equal(state.draws(np.zeros((1, N_DIM)))[0], state.mean())


def test_log_density_at_draws_is_that_of_the_base_draws(state, rng):
    z = rng.standard_normal((7, N_DIM))
    expected = stats.norm.logpdf(z).sum(axis=1) - np.log(abs(np.linalg.det(whitener(state))))
    np.testing.assert_allclose(state.log_density(state.draws(z)), expected, rtol=1e-10)


def test_whitened_gradient_of_log_q_is_minus_the_base_draw(state, rng):
    z = rng.standard_normal((7, N_DIM))
    grad = np.linalg.solve(state.cov(), (state.mean() - state.draws(z)).T).T
    np.testing.assert_allclose(state.whiten(grad), -z, rtol=1e-8)
    np.testing.assert_allclose(state.whiten(grad[0]), -z[0], rtol=1e-8)


def test_whitened_curvature_is_minus_ctrans_h_c(state, family, rng):
    half = rng.standard_normal((N_DIM, N_DIM))
    hessian = half + half.T  # indefinite
    c = whitener(state)
    expected = restrict(family, -c.T @ hessian @ c)
    curvature = state.curvature(Quadratic(np.zeros(N_DIM), -hessian), np.zeros((1, N_DIM)))
    dense = curvature if curvature.ndim == 2 else np.diag(curvature)
    np.testing.assert_allclose(dense, expected, rtol=1e-10, atol=1e-12)


def test_whitened_curvature_of_log_q_is_the_identity(state):
    curvature = state.curvature(Quadratic(state.mean(), np.linalg.inv(state.cov())), np.zeros((1, N_DIM)))
    np.testing.assert_allclose(state.curvature_error(curvature), 0.0, atol=1e-9)
    np.testing.assert_allclose(state.curvature_error(3.0 * curvature) / 2.0, curvature, rtol=1e-8, atol=1e-8)


def test_params_round_trip(state, rng):
    copy = type(state).from_params({name: value.copy() for name, value in state.params().items()})
    z = rng.standard_normal((3, N_DIM))
    np.testing.assert_array_equal(copy.draws(z), state.draws(z))
    np.testing.assert_array_equal(copy.cov(), state.cov())
    assert copy.params().keys() == state.params().keys()
    assert copy.n_dim == state.n_dim == N_DIM


def test_from_scale_gives_uncorrelated_coordinates_and_keeps_no_reference(state, family, rng):
    location, scale = rng.standard_normal(N_DIM), np.exp(rng.standard_normal(N_DIM))
    start = FAMILIES[family].from_scale(location, scale)
    expected_mean, expected_cov = location.copy(), np.diag(scale**2)
    location += 1.0
    scale *= 2.0
    np.testing.assert_array_equal(start.mean(), expected_mean)
    np.testing.assert_allclose(start.cov(), expected_cov, rtol=1e-14)


def test_sample_moments(state, family, seed, rng):
    """Within 4.5 standard errors: 25 comparisons each."""
    n = 20_000
    draws = state.draws(rng.standard_normal((n, N_DIM)))
    whitened = np.linalg.solve(whitener(state), (draws - state.mean()).T)
    np.testing.assert_allclose(whitened.mean(axis=1), 0.0, atol=4.5 / np.sqrt(n))
    np.testing.assert_allclose(np.cov(whitened), np.eye(N_DIM), atol=4.5 * np.sqrt(2 / n))


def test_memory_estimate_covers_what_a_state_holds(family, seed):
    """A dense family must not claim to need vectors only, nor a diagonal one a matrix."""
    n_dim = 400 * seed
    state = state_of(family, np.zeros(n_dim), random_covariance(np.random.default_rng(seed), n_dim))
    held = sum(value.nbytes for value in state.params().values())
    assert held < FAMILIES[family].memory_bytes(n_dim) < 128 * held
