"""The integral of exp(log p) against closed forms, and its standard error."""

import dataclasses

import numpy as np
import pytest

from marginal_terms import TREES, Gaussian, Groups, NumpyTerms, exact_state, forest_of, singles
from scipy import stats
from scipy.special import gammaln, logsumexp

from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.fitting import Sampler
from pymc_ngvi.marginal.log_marginal import LogMarginal
from pymc_ngvi.marginal.trees import IntegratedTrees, leave_groups_out

SEEDS = [1, 2]


def near(state, expected, slack=5e-4):
    """Assert that the normaliser is within its error, which is small."""
    value, se = state.log_normaliser()
    assert se < 0.02
    assert abs(value - expected) < 5.0 * se + slack


def sampled(terms, forest, mean, cov, first_centres, seed=1):
    quadrature = LogMarginal(terms, forest, first_centres)
    sampler = Sampler(quadrature, np.asarray(mean, dtype=float), np.asarray(cov, dtype=float), seed)
    return IntegratedTrees(sampler.run(), sampler.sequences, forest, quadrature, None).with_pool(None)


def plain(log_p, mean, cov, seed=1):
    """Return the posterior of a model without local coordinates."""
    sampler = Sampler(log_p, np.asarray(mean, dtype=float), np.asarray(cov, dtype=float), seed)
    return IntegratedTrees(sampler.run(), sampler.sequences, forest_of([], len(mean)), None, None).with_pool(None)


# --- with local coordinates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "seed"), [("singles", 1), ("pairs", 2), ("nested", 1), ("five levels", 2)])
def test_a_gaussian(name, seed):
    """Of any shape of trees: half of log |2 pi P^-1|."""
    gaussian = Gaussian(forest_of(TREES[name], 3), np.random.default_rng(1))
    cov = np.linalg.inv(gaussian.precision)
    mean = gaussian.mean[:3] + 0.4
    state = sampled(gaussian.terms, gaussian.forest, mean, 0.6 * cov[:3, :3], gaussian.centres, seed)
    assert state.checks.is_exact
    near(state, 0.5 * (np.linalg.slogdet(cov)[1] + len(cov) * np.log(2.0 * np.pi)))
    np.testing.assert_allclose(state.mean(), gaussian.mean, atol=0.06 * np.sqrt(np.diag(cov)).max())
    np.testing.assert_allclose(state.cov(), cov, atol=0.12 * np.diag(cov).max())


def test_a_linear_mixed_model():
    """Known variances: the data are multivariate normal."""
    rng = np.random.default_rng(2)
    n_groups, per_group, sd_b, sd_y = 15, 4, 0.7, 0.9
    group = np.repeat(np.arange(n_groups), per_group)
    x = np.column_stack([np.ones(len(group)), rng.normal(size=len(group))])
    y = x @ [0.5, -0.3] + sd_b * rng.normal(size=n_groups)[group] + sd_y * rng.normal(size=len(group))
    by_group = np.eye(n_groups)[group]

    def of_locals(g, b):
        residual = y - (g @ x.T)[:, None] - b @ by_group.T
        return stats.norm.logpdf(b, 0.0, sd_b) + stats.norm.logpdf(residual, 0.0, sd_y) @ by_group

    terms = NumpyTerms(lambda g: stats.norm.logpdf(g, 0.0, 2.0).sum(axis=1), of_locals, size=100)
    cov = 4.0 * x @ x.T + sd_b**2 * by_group @ by_group.T + sd_y**2 * np.eye(len(y))
    state = sampled(
        terms,
        singles(n_groups, 2),
        [0.3, -0.2],
        0.02 * np.eye(2),
        lambda g: Centres(np.zeros((len(g), n_groups)), np.full((len(g), n_groups, 1), 0.5)),
    )
    near(state, stats.multivariate_normal(np.zeros(len(y)), cov).logpdf(y))
    # Each group given all others: the ratio of two such densities.
    left = leave_groups_out(state)
    assert (left.khat < 0.7).all()
    for i in (0, 7):
        rest = group != i
        expected = stats.multivariate_normal(np.zeros(len(y)), cov).logpdf(y)
        expected -= stats.multivariate_normal(np.zeros(rest.sum()), cov[np.ix_(rest, rest)]).logpdf(y[rest])
        np.testing.assert_allclose(left.log_density[i], expected, atol=0.03)
    np.testing.assert_array_equal(left.roots, 2 + np.arange(n_groups))


def test_counts_with_gamma_rates():
    """Integrated over its rate, each count is negative binomial; over the mean of the rates by a grid.

    The skewness of effects is the same whatever the globals: few nodes will do for the posterior of these, but the
    integral would miss .45 nats.
    """
    rng = np.random.default_rng(3)
    a = 2.5
    y = rng.poisson(rng.gamma(a, 4.0 / a, size=30)).astype(float)

    def of_locals(g, b):
        rate = a * np.exp(-g[:, None, :1])  # b is the log of a Gamma variable of mean exp(g)
        prior = a * np.log(rate) - gammaln(a) + a * b - rate * np.exp(b)
        return prior + y * b - np.exp(b) - gammaln(y + 1.0)

    terms = NumpyTerms(lambda g: stats.norm.logpdf(g[:, 0], 1.0, 0.7), of_locals, size=200)
    state = sampled(
        terms,
        singles(30),
        [1.0],
        [[0.05]],
        lambda g: Centres(np.ones((len(g), 30)), np.full((len(g), 30, 1), 0.5)),
    )
    line = np.linspace(-3.0, 5.0, 4_001)
    mean = np.exp(line)[:, None]
    log_m = stats.norm.logpdf(line, 1.0, 0.7) + stats.nbinom.logpmf(y, a, a / (a + mean)).sum(axis=1)
    near(state, logsumexp(log_m) + np.log(line[1] - line[0]), slack=0.01)
    assert state.checks.is_exact
    assert state.checks.n_nodes < 9


def test_what_quick_rules_miss_everywhere_is_made_up_for():
    """A rule is judged by how log m changes with the globals: a constant that it is off by must not matter."""
    counts = np.random.default_rng(5).poisson(np.exp(0.5 + np.random.default_rng(6).normal(size=30)))
    groups = Groups.poisson(counts)
    truth = groups.brute_force(np.linspace(-1.5, 2.0, 61), np.linspace(-1.5, 1.2, 61))
    state = exact_state(groups, truth.mean[:2], np.diag(truth.sd[:2] ** 2))
    assert state.rest.quadrature.base is not None
    near(state, truth.log_normaliser, slack=0.005)
    pool = dataclasses.replace(state.pool, log_marginal=state.pool.log_marginal - 0.3)
    off = dataclasses.replace(state, pool=pool)
    near(off, truth.log_normaliser, slack=0.005)


# --- without ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gamma_prior_and_counts(seed):
    """Of log lambda, one skewed coordinate."""
    y, a, b = np.array([0.0, 1.0, 0.0, 2.0]), 1.3, 0.8
    total, n = y.sum(), len(y)

    def log_p(t):
        t = t[:, 0]
        prior = a * np.log(b) - gammaln(a) + a * t - b * np.exp(t)
        return prior + total * t - n * np.exp(t) - gammaln(y + 1.0).sum()

    expected = a * np.log(b) - gammaln(a) + gammaln(a + total) - (a + total) * np.log(b + n) - gammaln(y + 1.0).sum()
    near(plain(log_p, [-0.2], [[0.2]], seed), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_normal_sample_with_unknown_mean_and_variance(seed):
    """The conjugate prior: normal given the variance, whose inverse is Gamma distributed."""
    y = np.random.default_rng(4).normal(1.0, 2.0, size=9)
    m, k, a, b, n = 0.5, 0.4, 2.0, 3.0, 9

    def log_p(t):
        mu, v = t[:, 0], np.exp(np.clip(t[:, 1], -300.0, 300.0))
        prior = stats.norm.logpdf(mu, m, np.sqrt(v / k)) + stats.invgamma.logpdf(v, a, scale=b) + t[:, 1]
        return prior + stats.norm.logpdf(y[:, None], mu, np.sqrt(v)).sum(axis=0)

    k_n, a_n = k + n, a + 0.5 * n
    b_n = b + 0.5 * n * y.var() + 0.5 * k * n / (k + n) * (y.mean() - m) ** 2
    expected = gammaln(a_n) - gammaln(a) + a * np.log(b) - a_n * np.log(b_n)
    expected += 0.5 * np.log(k / k_n) - 0.5 * n * np.log(2.0 * np.pi)
    state = plain(log_p, [1.0, 1.0], np.diag([0.3, 0.1]), seed)
    near(state, expected)
    mean = (k * m + n * y.mean()) / k_n
    sd = np.sqrt(b_n / (a_n - 1.0) / k_n)
    np.testing.assert_allclose(state.mean()[0], mean, atol=0.06 * sd)
    np.testing.assert_allclose(state.sd()[0], sd, rtol=0.06)
    draws = state.draw(2_000, np.random.default_rng(seed))
    np.testing.assert_allclose(draws[:, 0].mean(), mean, atol=5.0 * sd / np.sqrt(2_000))


def test_the_standard_error_covers_the_truth():
    """In 20 seeds as often as it should: t with 7 degrees of freedom, at 95 %, misses more than 4 times in 1 of 400."""
    missed = 0
    for seed in range(20):
        state = plain(lambda t: t[:, 0] - np.exp(t[:, 0]) - 0.5 * t[:, 1] ** 2, [-0.4, 0.0], np.diag([0.7, 0.8]), seed)
        value, se = state.log_normaliser()
        assert 1e-5 < se < 0.02
        n = len(np.unique(state.pool.scrambling))
        missed += abs(value - 0.5 * np.log(2.0 * np.pi)) > stats.t.ppf(0.975, n - 1) * se
    assert missed <= 4


def test_constants_are_kept():
    """A constant in log p is one in the normaliser."""
    first = plain(lambda t: stats.norm.logpdf(t).sum(axis=1), [0.1, 0.0], np.eye(2))
    second = plain(lambda t: stats.norm.logpdf(t).sum(axis=1) - 12_345.0, [0.1, 0.0], np.eye(2))
    assert second.log_normaliser()[0] - first.log_normaliser()[0] == pytest.approx(-12_345.0, abs=1e-6)
