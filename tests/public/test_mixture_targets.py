"""The targets that no Gaussian fits: model, NumPy density, draws, evidence and modes belong together."""

import functools

import numpy as np
import pytest

from mixture_posteriors import EFFECTS, ERRORS, POSTERIORS, posterior
from mixture_targets import TARGETS, grid, target
from scipy import stats
from scipy.special import logsumexp

from pymc_ngvi import LogDensity

NAMES = [*TARGETS, *POSTERIORS]
TWO_DIMENSIONAL = [name for name in TARGETS if target(name).n_dim == 2]
#: Standard errors: one of the 300 means that are tested here is further out by chance in 20 suites.
SIGMAS = 4.5
each = pytest.mark.parametrize("name", NAMES)


def known(name):
    return target(name) if name in TARGETS else posterior(name)


@functools.cache
def density(name):
    return LogDensity(known(name).build())


@functools.cache
def draws(name, n=20_000):
    return known(name).sample(n, np.random.default_rng(5))


def assert_means(values, expected):
    """Assert that the means of independent rows are as expected."""
    error = values.mean(axis=0) - expected
    assert np.all(np.abs(error) < SIGMAS * values.std(axis=0) / np.sqrt(len(values)))


def points_around(name, rng, n=40):
    """Return draws, half of them moved by a standard deviation or so."""
    theta = draws(name)[:n].copy()
    theta[::2] += rng.standard_normal((n // 2, theta.shape[1])) * draws(name).std(axis=0)
    return theta


# --- model and density ------------------------------------------------------------------------------------------------


@each
def test_coordinates_are_those_of_the_model(name):
    layout, expected = density(name).layout, known(name)
    assert tuple(v.value_name for v in layout.variables) == expected.value_names
    assert layout.n_dim == expected.n_dim == draws(name).shape[1]


@each
def test_the_model_has_the_log_density_times_the_evidence(name, rng):
    theta = points_around(name, rng)
    expected = known(name).log_density(theta) + known(name).log_z
    np.testing.assert_allclose(density(name).logp(theta), expected, rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize("name", TWO_DIMENSIONAL)
def test_densities_in_two_dimensions_are_normalised_and_have_the_mean_of_the_draws(name):
    # Of the Student-t mixture, 1e-7 is further out.
    theta, log_area = grid(np.full(2, -90.0), np.full(2, 90.0), 1201)
    masses = np.exp(known(name).log_density(theta) + log_area)
    assert masses.sum() == pytest.approx(1.0, abs=1e-6)
    assert_means(draws(name), masses @ theta)
    assert_means((draws(name) - masses @ theta) ** 2, masses @ (theta - masses @ theta) ** 2)


# --- draws ------------------------------------------------------------------------------------------------------------


@each
def test_draws_satisfy_the_identities_of_stein(name):
    """E[score] = 0 and E[score theta^T] = -I, whatever the density."""
    theta = draws(name)
    score = density(name).grad(theta)
    assert_means(score, 0.0)
    centred = theta - theta.mean(axis=0)
    products = np.einsum("ni,nj->nij", score, centred).reshape(len(theta), -1)
    assert_means(products, -np.eye(theta.shape[1]).ravel())


# --- what was asked of the targets ------------------------------------------------------------------------------------


# --- posteriors -------------------------------------------------------------------------------------------------------


def test_evidence_of_eight_schools_by_a_sum_over_mean_and_scale():
    theta, log_area = grid(np.array([-30.0, -16.0]), np.array([35.0, 12.0]), 701)
    mu, log_tau = theta.T
    total_sd = np.sqrt(ERRORS**2 + np.exp(2.0 * log_tau)[:, None])
    log_joint = stats.norm.logpdf(EFFECTS, mu[:, None], total_sd).sum(axis=1) + stats.norm.logpdf(mu, 0.0, 5.0)
    log_joint += stats.halfcauchy.logpdf(np.exp(log_tau), scale=5.0) + log_tau
    assert logsumexp(log_joint) + log_area == pytest.approx(posterior("eight schools").log_z, abs=1e-5)
