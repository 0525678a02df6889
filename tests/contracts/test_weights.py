"""Mixtures of Gaussians: the distribution itself against independent formulas, and steps of the weights."""

import numpy as np
import pytest

from matrix import state_of
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from targets import random_covariance

from pymc_ngvi.families import MixtureState
from pymc_ngvi.families.mixture import COMPONENTS
from pymc_ngvi.methods.mixtures import stepped_weights

each_family = pytest.mark.parametrize("family", COMPONENTS)


def component(family, mean, cov):
    """Return a Gaussian; a diagonal one has the variances only."""
    return state_of(family, np.asarray(mean), cov)


def random_mixture(family, rng, n_dim=3, n_components=4):
    means = 2.0 * rng.standard_normal((n_components, n_dim))
    components = [component(family, mean, random_covariance(rng, n_dim)) for mean in means]
    return MixtureState.of(components, rng.standard_normal(n_components))


# --- the distribution -------------------------------------------------------------------------------------------------


@each_family
def test_density_and_moments_against_independent_formulas(family, rng):
    q, theta = random_mixture(family, rng), 2.0 * rng.standard_normal((50, 3))
    terms = [multivariate_normal(c.mean(), c.cov()).logpdf(theta) for c in q.components]
    np.testing.assert_allclose(q.log_density(theta), logsumexp(q.log_weights[:, None] + terms, axis=0), rtol=1e-10)
    mean, apart = q.weights @ q.means, q.means - q.weights @ q.means
    cov = np.einsum("k,kij->ij", q.weights, [c.cov() for c in q.components]) + (q.weights * apart.T) @ apart
    np.testing.assert_allclose(q.mean(), mean, rtol=1e-12)
    np.testing.assert_allclose(q.sd(), np.sqrt(np.diag(cov)), rtol=1e-12)
    np.testing.assert_allclose(q.cov(), cov, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(q.cov_block(np.array([2, 0])), cov[np.ix_([2, 0], [2, 0])], rtol=1e-10)
    assert (q.n_dim, q.n_components) == (3, 4)


@each_family
def test_draws_have_the_moments_and_weights_of_the_mixture(family, rng):
    q = random_mixture(family, rng)
    n = 40_000
    uniforms = (np.arange(n) + 0.5) / n
    theta = q.draws(np.column_stack([rng.standard_normal((n, 3)), rng.permutation(uniforms)]))
    assert (np.abs(theta.mean(axis=0) - q.mean()) < 4.5 * q.sd() / np.sqrt(n)).all()
    squares = (theta - q.mean()) ** 2
    assert (np.abs(squares.mean(axis=0) - q.sd() ** 2) < 4.5 * squares.std(axis=0) / np.sqrt(n)).all()
    # The mean responsibility is the weight.
    shares = q.responsibilities(theta)
    assert (np.abs(shares.mean(axis=0) - q.weights) < 4.5 * shares.std(axis=0) / np.sqrt(n)).all()


@each_family
def test_responsibilities_are_shares_of_the_density(family, rng):
    q = random_mixture(family, rng)
    theta = 2.0 * rng.standard_normal((30, 3))
    shares = q.responsibilities(theta)
    np.testing.assert_allclose(shares.sum(axis=1), 1.0, rtol=1e-12)
    densities = [multivariate_normal(c.mean(), c.cov()).pdf(theta) for c in q.components]
    parts = np.exp(q.log_weights)[:, None] * densities
    np.testing.assert_allclose(shares.T, parts / np.sum(parts, axis=0), rtol=1e-8, atol=1e-200)


@each_family
def test_far_from_all_components_nothing_underflows(family):
    """The densities themselves are 0 in numbers there."""
    q = MixtureState.of([component(family, m, np.eye(2)) for m in ([0.0, 0.0], [1.0, 0.0])], np.log([0.9, 0.1]))
    theta = np.array([[1e3, 0.0], [-1e3, 0.0], [0.5, 1e3]])
    gaussian = -0.5 * np.sum((theta[:, None] - q.means) ** 2, axis=2) - np.log(2 * np.pi)
    nearest = [gaussian[0, 1] + np.log(0.1), gaussian[1, 0] + np.log(0.9), gaussian[2, 0]]
    np.testing.assert_allclose(q.log_density(theta), nearest, rtol=1e-14)
    np.testing.assert_allclose(q.responsibilities(theta), [[0.0, 1.0], [1.0, 0.0], [0.9, 0.1]], rtol=1e-9, atol=1e-300)


# --- steps of the weights ---------------------------------------------------------------------------------------------


def test_step_of_the_weights_by_hand():
    new = stepped_weights(np.log([0.25, 0.75]), np.array([np.log(3.0), np.log(1.0)]), 1.0)
    np.testing.assert_allclose(np.exp(new), [0.5, 0.5], rtol=1e-12)
    new = stepped_weights(np.log([0.5, 0.5]), np.array([np.log(4.0), 0.0]), 0.5)
    np.testing.assert_allclose(np.exp(new), [2.0 / 3.0, 1.0 / 3.0], rtol=1e-12)
