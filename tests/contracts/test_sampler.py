"""Weighted draws of the outside: known densities, their integrals, and errors that are honest."""

import time

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from marginal_terms import TREES, Gaussian, Groups, exact_state, forest_of, state_of
from numpy.testing import assert_allclose
from scipy import stats
from scipy.special import expit, gammaln, log_expit, logsumexp

from pymc_ngvi.core.importance import effective_size
from pymc_ngvi.marginal.integral import TOLERANCE, TreeIntegral
from pymc_ngvi.marginal.pooled import relative_sd_errors
from pymc_ngvi.marginal.proposals import Margins, Proposal, StudentMixture
from pymc_ngvi.marginal.sampler import MOST_MOVED, MOST_SURE, Hopeless, Pairs, Sampler, find_modes, profiles

MEAN = np.array([0.5, -2.0, 3.0])

FACTOR = np.array([[1.2, 0.0, 0.0], [-0.4, 0.7, 0.0], [0.3, 0.9, 2.0]])

COV = FACTOR @ FACTOR.T


def mixture(df=7.0):
    means = np.array([MEAN, MEAN + np.array([2.0, -1.0, 0.0])])
    return StudentMixture(np.array([0.7, 0.3]), means, np.array([FACTOR, 0.5 * FACTOR]), df)


@pytest.mark.parametrize("df", [7.0, 20.0])
def test_log_density_is_that_of_scipy(df):
    x = MEAN + 3.0 * np.random.default_rng(1).normal(size=(20, 3))
    one = StudentMixture(np.ones(1), MEAN[None], FACTOR[None], df)
    assert_allclose(one.log_density(x), stats.multivariate_t(MEAN, COV, df).logpdf(x), rtol=1e-10)
    two = mixture(df)
    parts = [
        np.log(share) + stats.multivariate_t(m, f @ f.T, df).logpdf(x)
        for share, m, f in zip(two.shares, two.means, two.factors, strict=True)
    ]
    assert_allclose(two.log_density(x), np.logaddexp(*parts), rtol=1e-10)


def test_a_proposal_with_margins_integrates_to_1():
    """With the Jacobian of skewed margins, of which one has an exponential tail."""
    margins = Margins(np.array([0.3]), np.array([0.8]), np.array([-0.7]), np.array([0.55]), np.zeros(1), np.eye(1))
    proposal = Proposal(StudentMixture(np.ones(1), np.array([[0.2]]), np.array([[[1.3]]]), 7.0), margins)
    line = np.linspace(-1e4, 1e4, 4_000_001)
    assert_allclose(np.exp(proposal.log_density(line[:, None])).sum() * (line[1] - line[0]), 1.0, atol=1e-4)


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_have_the_moments_and_the_distribution_of_the_density(seed):
    two = mixture()
    n = 4_096
    x = two.draws(n, np.random.default_rng(seed))
    mean = two.shares @ two.means
    cov = sum(
        share * (7.0 / 5.0 * f @ f.T + np.outer(m - mean, m - mean))
        for share, m, f in zip(two.shares, two.means, two.factors, strict=True)
    )
    # Quasi-random draws are better than independent ones: within the errors of these in any case.
    sd = np.sqrt(np.diag(cov))
    assert (np.abs(x.mean(axis=0) - mean) < sd / np.sqrt(n)).all()
    assert (np.abs(np.cov(x.T) - cov) < 4.0 * np.outer(sd, sd) / np.sqrt(n)).all()
    component = stats.multivariate_t(MEAN, COV, 7.0)
    inside = np.sum(np.linalg.solve(FACTOR, (x - MEAN).T) ** 2, axis=0) < 3.0
    independent = np.random.default_rng(seed)
    reference = np.concatenate(
        [
            component.rvs(140_000, random_state=independent),
            stats.multivariate_t(two.means[1], 0.25 * COV, 7.0).rvs(60_000, random_state=independent),
        ]
    )
    expected = (np.sum(np.linalg.solve(FACTOR, (reference - MEAN).T) ** 2, axis=0) < 3.0).mean()
    assert abs(inside.mean() - expected) < 4.0 * 0.5 / np.sqrt(n)


SEEDS = [1, 2]


def near(state, expected, slack=5e-4):
    """Assert that the normaliser is within its error, which is small."""
    value, se = state.log_normaliser
    assert se < 0.02
    assert abs(value - expected) < 5.0 * se + slack


def sampled(terms, forest, mean, cov, first_centres, seed=1):
    return state_of(TreeIntegral(terms, forest, first_centres, np.sqrt(np.diag(cov))), forest, mean, cov, seed)


def plain(log_p, mean, cov, seed=1, others=()):
    """Return the posterior of a model without local coordinates."""
    return state_of(None, forest_of([], len(mean)), mean, cov, seed, log_p, others)


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


def test_the_standard_error_covers_the_truth():
    """In 20 seeds as often as it should: t with 7 degrees of freedom, at 95 %, misses more than 4 times in 1 of 400."""
    missed = 0
    for seed in range(20):
        state = plain(lambda t: t[:, 0] - np.exp(t[:, 0]) - 0.5 * t[:, 1] ** 2, [-0.4, 0.0], np.diag([0.7, 0.8]), seed)
        value, se = state.log_normaliser
        assert 1e-5 < se < 0.02
        n = len(np.unique(state.pool.part))
        missed += abs(value - 0.5 * np.log(2.0 * np.pi)) > stats.t.ppf(0.975, n - 1) * se
    assert missed <= 4


Y = np.array([2.8, 0.8, -0.3, 0.7, -0.1, 0.1, 1.8, 1.2])  # eight schools, in units of 10

SIGMA = np.array([1.5, 1.0, 1.6, 1.1, 0.9, 1.1, 1.0, 1.8])


def binary_groups(n_groups=100, size=7, mu=-2.0, tau=4.0, **kwargs):
    """Groups of few binary outcomes with large effects: conditionals are skewed, and some are half flat."""
    rng = np.random.default_rng(3)
    p = 1.0 / (1.0 + np.exp(-(mu + tau * rng.normal(size=n_groups))))
    return Groups.logit(rng.binomial(size, p), size, **kwargs)


@pytest.fixture(scope="module")
def binary():
    """The groups, and what brute force says of them."""
    groups = binary_groups()
    return groups, groups.brute_force(np.linspace(-6.0, 2.0, 41), np.linspace(0.6, 2.4, 41))


@pytest.fixture(scope="module")
def eight_schools():
    """What brute force says of eight schools; the same in both parametrisations."""
    return Groups.normal(Y, SIGMA).brute_force(np.linspace(-6.0, 7.0, 53), np.linspace(-14.0, 3.0, 137))


def errors(state, truth):
    """Return errors of means and of sds of the globals in posterior sds."""
    return (state.mean()[:2] - truth.mean[:2]) / truth.sd[:2], state.sd()[:2] / truth.sd[:2] - 1.0


def start(truth, off=0.5, part=0.5):
    """Return moments of the globals as of a Gaussian fit that is off by so many sds, and too narrow."""
    return truth.mean[:2] + off * truth.sd[:2], part * np.diag(truth.sd[:2] ** 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_as_many_nodes_as_it_takes(binary, seed):
    groups, truth = binary
    state = exact_state(groups, *start(truth), seed)
    assert state.checks.n_nodes > 13
    assert state.checks.rule_error < TOLERANCE
    assert state.checks.is_exact
    em, es = errors(state, truth)
    assert_allclose(em, 0.0, atol=0.06)
    assert_allclose(es, 0.0, atol=0.06)
    # The effects themselves, too.
    assert_allclose((state.mean() - truth.mean)[2:] / truth.sd[2:], 0.0, atol=0.06)
    assert_allclose(state.sd()[2:] / truth.sd[2:], 1.0, atol=0.06)


def test_nodes_that_are_too_few_do_not_settle(binary):
    """There are more from then on: enough of them."""
    groups, truth = binary
    quadrature = TreeIntegral(groups.terms, groups.forest, groups.start, truth.sd[:2])
    first, points = quadrature.rule.n_nodes, quadrature.at(truth.g)
    assert not quadrature.settles(points, truth.weights)
    assert quadrature.rule.n_nodes > first
    assert quadrature.rule_error < TOLERANCE
    assert quadrature.settles(points, truth.weights)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("centred", [True, False])
def test_the_tail_of_a_log_scale(eight_schools, centred, seed):
    """Eight schools: where tau may be 0. Without its tail, the sd of log tau comes out a tenth too small."""
    state = exact_state(Groups.normal(Y, SIGMA, centred=centred), *start(eight_schools), seed)
    assert state.checks.is_exact
    em, es = errors(state, eight_schools)
    assert_allclose(em, 0.0, atol=0.05)
    assert_allclose(es, 0.0, atol=0.05)
    # The quantile of 1 % lies far down the tail.
    order = np.argsort(eight_schools.g[:, 1])
    exact = np.interp(0.01, np.cumsum(eight_schools.weights[order]), eight_schools.g[order, 1])
    draws = state.draw(2_000, np.random.default_rng(seed))[:, 1]
    density = 0.01  # the tail falls as exp(log tau) does: its density is its probability
    assert abs(np.quantile(draws, 0.01) - exact) < 4.0 * np.sqrt(0.01 * 0.99 / 2_000) / density


def test_the_same_seed_gives_the_same_bits(binary):
    groups, truth = binary
    first, second, other = (exact_state(groups, *start(truth), seed) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first.pool.g, second.pool.g)
    np.testing.assert_array_equal(first.pool.log_ratio, second.pool.log_ratio)
    np.testing.assert_array_equal(first.mean(), second.mean())
    a, b = (s.draw(50, np.random.default_rng(1)) for s in (first, second))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first.pool.g, other.pool.g)
    # A larger pool is another one, the same whoever asks for it.
    larger, again = first.for_draws(3_000), second.for_draws(3_000)
    assert effective_size(larger.log_ratio) > 2_500
    np.testing.assert_array_equal(larger.log_ratio, again.log_ratio)


#: A shelf along x: weight, mean and sd there, sd of y about a parabola.
SHELF, WEIGHT = (-6.0, 2.5), 0.06


def shelf(g):
    """Bulk N(0, I), and a thin shelf far to the left of it on which y follows x along a parabola."""
    x, y = g.T
    bulk = -0.5 * (x**2 + y**2) - np.log(2 * np.pi)
    mean, sd = SHELF
    on_shelf = -0.5 * ((x - mean) / sd) ** 2 - 0.5 * ((y - 0.05 * x**2) / 0.3) ** 2 - np.log(2 * np.pi * sd * 0.3)
    return np.logaddexp(np.log1p(-WEIGHT) + bulk, np.log(WEIGHT) + on_shelf)


def sd_of_x():
    mean, sd = SHELF
    square = WEIGHT * (mean**2 + sd**2) + (1 - WEIGHT)
    return np.sqrt(square - (WEIGHT * mean) ** 2)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_shelf_far_from_the_bulk_is_found(seed):
    # A fit hands on the heaviest draws about it, near and far.
    scale = np.repeat([1.0, 3.0, 10.0], 500)[:, None]
    theta = scale * np.random.default_rng(seed).normal(size=(1_500, 2))
    log_q = logsumexp([stats.norm.logpdf(theta, 0.0, s).sum(axis=1) for s in (1.0, 3.0, 10.0)], axis=0)
    heaviest = theta[np.argsort(log_q - shelf(theta))[:4]]
    state = plain(shelf, np.zeros(2), np.eye(2), seed, list(heaviest))
    assert abs(state.sd()[0] / sd_of_x() - 1.0) < 0.1
    assert state.checks.missed < MOST_MOVED


@pytest.mark.parametrize("is_heavy", [False, True])
def test_errors_of_standard_deviations_are_their_spread(is_heavy):
    """Over 60 sets of weighted draws, from a t of 5 or 30 degrees of freedom that is too wide."""
    sds, errors = [], []
    df = 5.0 if is_heavy else 30.0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        g = 1.3 * rng.standard_t(df, size=(1_000, 2))
        log_weights = -3.0 * np.log1p(g**2 / 5.0) + 0.5 * (df + 1) * np.log1p((g / 1.3) ** 2 / df)
        log_weights = log_weights.sum(axis=1) if is_heavy else -0.2 * np.sum(g**2, axis=1)
        weights = np.exp(log_weights - logsumexp(log_weights))
        sds.append(np.sqrt(weights @ (g - weights @ g) ** 2))
        errors.append(relative_sd_errors(g, weights))
    spread = np.std(sds, axis=0) / np.mean(sds, axis=0)
    np.testing.assert_allclose(np.median(errors, axis=0), spread, rtol=0.35)


# --- where it begins ---


def test_the_mode_of_a_quadratic_and_its_curvature():
    precision, top = np.array([[2.0, 0.9, 0.0], [0.9, 1.0, -0.3], [0.0, -0.3, 5.0]]), np.array([3.0, -2.0, 0.5])

    def quadratic(x):
        return -0.5 * np.einsum("ni,ij,nj->n", x - top, precision, x - top)

    starts = np.array([[0.0, 0.0, 0.0], [np.nan, 0.0, 0.0], [9.0, 9.0, -9.0]])
    modes = find_modes(quadratic, starts, np.full(3, 0.5))
    assert len(modes) == 2
    for mode in modes:
        assert quadratic(mode.at[None])[0] > -0.04  # twice what a step must promise
        assert_allclose(mode.cov, np.linalg.inv(precision), rtol=1e-6, atol=1e-8)


def test_profiles_are_highest_in_the_other_coordinates():
    """Points keep the coordinate of their line; those that can't come high enough stay."""

    def bent(x):
        return -0.5 * (x[:, 0] ** 2 + ((x[:, 1] - np.tanh(x[:, 0])) / 0.2) ** 2 + (x[:, 2] - x[:, 1]) ** 2)

    cov = np.array([[1.0, 0.6, 0.6], [0.6, 0.5, 0.5], [0.6, 0.5, 1.5]])
    points = (np.array([2.0, -3.0])[:, None, None] * cov / np.sqrt(np.diag(cov))[:, None]).reshape(-1, 3)
    found = profiles(bent, points, bent(points), cov, np.array([-9.0, -9.0, -9.0, -9.0, 0.0, 0.0]))
    of_first, kept = found.at[[0, 3]], found.at[[1, 2, 4, 5], [1, 2, 1, 2]]
    assert_allclose(of_first[:, 0], points[[0, 3], 0])
    assert_allclose(of_first[:, 1:], np.tanh(of_first[:, :1]).repeat(2, axis=1), atol=0.2 * np.sqrt(2.0 * 0.02))
    assert_allclose(kept, points[[1, 2, 4, 5], [1, 2, 1, 2]])
    assert_allclose(found.at[4:], points[4:])
    assert_allclose(found.value, bent(found.at))


# --- one sampler that knows nothing of what is inside: known densities, in 1 to 40 dimensions ---

THREE_SEEDS = [1, 2, 3]
#: Of the logarithm of a half-normal number.
LOG_HALF_NORMAL = (-0.5 * (np.euler_gamma + np.log(2.0)), np.pi / np.sqrt(8.0))


class Known(NamedTuple):
    """A log density, its integral, means and standard deviations."""

    log_density: Any
    mean: Any
    sd: Any
    log_total: float = np.nan


@dataclass
class Double:
    """An inside of nothing but log weights, which vary given the outside, and are not to be had everywhere."""

    log_density: Any
    variance: float = 0.0
    #: Part of all values at which there is no fit.
    fails: float = 0.0
    seconds: float = 0.0
    n_values: int = 0

    def log_m(self, g):
        self.n_values += len(g)
        time.sleep(self.seconds * len(g))
        value = np.asarray(self.log_density(g), dtype=float)
        return np.where(np.modf(np.abs(1e4 * np.sin(1e3 * g[:, 0])))[0] < self.fails, -np.inf, value)

    def pairs(self, g, n_draws, rng):
        half = np.sqrt(self.variance) * rng.standard_normal((len(g), n_draws // 2))
        noise = np.concatenate([half, -half], axis=1) - 0.5 * self.variance
        log_m = self.log_m(g)
        return Pairs(log_m[:, None] + noise, noise, log_m)


def sample(known, seed, scale=0.5, start=None, **options):
    inside = Double(known.log_density, **options)
    p = len(known.mean)
    sampler = Sampler(inside, np.zeros(p) if start is None else np.array(start), np.full(p, scale), seed)
    return sampler.run(), inside


def agrees(known, found, slack=0.03):
    """Assert that moments and the integral are right, up to four of the errors that so many draws have."""
    weights = found.weights
    error, of_sd = 4.0 / np.sqrt(found.effective_size), 4.0 * relative_sd_errors(found.g, weights)
    mean = weights @ found.g
    sd = np.sqrt(weights @ (found.g - mean) ** 2)
    assert (np.abs(mean - known.mean) < (slack + error) * np.array(known.sd)).all(), mean
    assert (np.abs(sd / known.sd - 1.0) < slack + of_sd).all(), sd
    if np.isfinite(known.log_total):
        total = logsumexp(found.log_marginal - found.log_density) - np.log(len(found.g))
        assert abs(total - known.log_total) < slack + error


def gaussian(p):
    rng = np.random.default_rng(p)
    root = rng.normal(size=(p, p)) / np.sqrt(p) + np.eye(p)
    mean, cov = rng.normal(size=p), root @ root.T
    inverse = np.linalg.inv(cov)
    log_total = 0.5 * (p * np.log(2.0 * np.pi) + np.linalg.slogdet(cov)[1])
    return Known(
        lambda g: -0.5 * np.einsum("ni,ij,nj->n", g - mean, inverse, g - mean), mean, np.sqrt(np.diag(cov)), log_total
    )


def log_scales(p):
    """Logarithms of half-normal scales: densities fall like e^t on the left."""
    mean, sd = LOG_HALF_NORMAL
    log_total = 0.5 * p * np.log(np.pi / 2.0)
    return Known(lambda g: (g - 0.5 * np.exp(2.0 * g)).sum(axis=1), np.full(p, mean), np.full(p, sd), log_total)


def funnel(sd=1.0, p=3):
    """Effects whose logarithm of a scale is the first coordinate."""

    def log_density(g):
        return (
            -0.5 * (g[:, 0] / sd) ** 2 - 0.5 * (g[:, 1:] ** 2).sum(axis=1) * np.exp(-g[:, 0]) - 0.5 * (p - 1) * g[:, 0]
        )

    log_total = 0.5 * p * np.log(2.0 * np.pi) + np.log(sd)
    return Known(log_density, np.zeros(p), np.r_[sd, np.full(p - 1, np.exp(0.25 * sd**2))], log_total)


def by_grid(log_density, *axes):
    points = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(len(axes), -1).T
    values = log_density(points)
    total = logsumexp(values)
    weights = np.exp(values - total)
    mean = weights @ points
    volume = float(np.sum([np.log(axis[1] - axis[0]) for axis in axes]))
    return Known(log_density, mean, np.sqrt(weights @ (points - mean) ** 2), float(total + volume))


def ridge():
    """A product of a scale and a loading is known, neither of both."""

    def log_density(g):
        return -0.5 * ((np.exp(g[:, 0]) * g[:, 1] - 1.0) / 0.3) ** 2 - 0.5 * (g**2).sum(axis=1)

    return by_grid(log_density, np.linspace(-6.0, 6.0, 601), np.linspace(-6.0, 6.0, 601))


def limited(p):
    """What all but the first coordinate are has limits, where the first one has none: its tails bend away."""

    def log_density(g):
        others = (g[:, 1:] + 4.0 * expit(g[:, :1])) / 0.1
        return log_expit(g[:, 0]) + log_expit(-g[:, 0]) - 0.5 * (others**2).sum(axis=1)

    of_others = np.sqrt(16.0 / 12.0 + 0.01)
    return Known(
        log_density, np.r_[0.0, np.full(p - 1, -2.0)], np.r_[np.pi / np.sqrt(3.0), np.full(p - 1, of_others)],
        (p - 1) * np.log(0.1 * np.sqrt(2.0 * np.pi)),
    )  # fmt: skip


def two_modes(p):
    means, sds, shares = np.array([-2.0, 3.0]), np.array([1.0, 0.7]), np.array([0.7, 0.3])

    def log_density(g):
        first = np.log(shares) - np.log(sds) - 0.5 * ((g[:, :1] - means) / sds) ** 2
        return logsumexp(first, axis=1) - 0.5 * (g[:, 1:] ** 2).sum(axis=1)

    mean = shares @ means
    sd = np.sqrt(shares @ (sds**2 + means**2) - mean**2)
    return Known(log_density, np.r_[mean, np.zeros(p - 1)], np.r_[sd, np.ones(p - 1)], 0.5 * p * np.log(2.0 * np.pi))


def student(p, df=5.0):
    log_total = gammaln(0.5 * df) + 0.5 * p * np.log(df * np.pi) - gammaln(0.5 * (df + p))
    sd = np.sqrt(df / (df - 2.0))
    return Known(lambda g: -0.5 * (df + p) * np.log1p((g**2).sum(axis=1) / df), np.zeros(p), np.full(p, sd), log_total)


@pytest.mark.parametrize("seed", THREE_SEEDS)
@pytest.mark.parametrize("p", [1, 2, 4, 10, 20, 40])
def test_gaussians(p, seed):
    found, _ = sample(known := gaussian(p), seed)
    agrees(known, found)
    assert found.khat < 0.5
    assert found.is_settled


@pytest.mark.parametrize("seed", THREE_SEEDS)
@pytest.mark.parametrize("p", [1, 2, 4, 10, 20, 40])
def test_scales_near_0(p, seed):
    found, _ = sample(known := log_scales(p), seed)
    assert found.is_settled
    agrees(known, found, 0.1 if p > MOST_SURE else 0.03)  # of many, an integral is 0.15 to 0.2 too small


@pytest.mark.parametrize("seed", THREE_SEEDS)
@pytest.mark.parametrize(
    "known",
    [funnel(), ridge(), two_modes(1), two_modes(2), student(1), student(3)],
    ids=["funnel", "ridge", "two modes, 1", "two modes, 2", "t, 1", "t, 3"],
)
def test_densities_that_are_no_gaussians(known, seed):
    found, _ = sample(known, seed)
    assert found.is_settled
    agrees(known, found)


@pytest.mark.parametrize("seed", THREE_SEEDS)
@pytest.mark.parametrize("p", [3, 6])
def test_tails_that_bend_away(p, seed):
    known = limited(p)
    found = Sampler(Double(known.log_density), np.array(known.mean), np.full(p, 0.5), seed, seconds=0.0).run()
    agrees(known, found)


@pytest.mark.parametrize("log_total", [-40.0, 0.0, 40.0])
@pytest.mark.parametrize(("share", "is_heavy"), [(0.01, False), (0.05, True)])
def test_what_a_look_draws_about(share, is_heavy, log_total):
    """A bump at which weights are 1.2 or 2.8 nats above their mean, 2 being the limit."""
    bump = np.array([5.0, 0.0])

    def log_density(g):
        other = np.log(share) - 0.5 * ((g - bump) ** 2).sum(axis=1)
        return log_total + np.logaddexp(-0.5 * (g**2).sum(axis=1), other)

    sampler = Sampler(Double(log_density), np.zeros(2), np.ones(2), 1, seconds=0.0)
    near, wide = (StudentMixture(np.ones(1), np.zeros((1, 2)), sd * np.eye(2)[None], 1e6) for sd in (1.0, 3.0))
    sampler._add((near, 512), (wide, 64))
    assert sampler._draw_along(sampler._pooled()) == is_heavy
    assert len(sampler._rounds) == 2 + is_heavy


@pytest.mark.parametrize("seed", THREE_SEEDS)
def test_an_integral_over_a_part(seed):
    """Where log m is -inf, there is nothing."""
    found, _ = sample(known := Known(
        lambda g: np.where(g[:, 0] < 0.0, -0.5 * (g**2).sum(axis=1), -np.inf),
        np.array([-np.sqrt(2.0 / np.pi), 0.0]), np.array([np.sqrt(1.0 - 2.0 / np.pi), 1.0]), np.log(np.pi),
    ), seed)  # fmt: skip
    assert 0.2 < found.has_fit.mean() < 0.9
    agrees(known, found)
    total = logsumexp(found.log_marginal - found.log_density) - np.log(len(found.g))
    assert abs(total - known.log_total) < 0.05  # values without a fit are 0.12 of it


@pytest.mark.parametrize("seed", THREE_SEEDS)
def test_an_effect_without_data(seed):
    """One coordinate is well known, another one has its prior."""
    mean, sd = LOG_HALF_NORMAL
    known = Known(
        lambda g: -0.5 * ((g[:, 0] - 4.0) / 0.05) ** 2 + g[:, 1] - 0.5 * np.exp(2.0 * g[:, 1]),
        np.array([4.0, mean]),
        np.array([0.05, sd]),
    )
    found, _ = sample(known, seed)
    assert found.is_settled
    agrees(known, found)


@pytest.mark.parametrize("seed", THREE_SEEDS)
@pytest.mark.parametrize("variance", [0.2, 0.8])
def test_weights_given_the_outside(variance, seed):
    """Log m is known by the draws of the inside, and pairs are weighted together."""
    found, _ = sample(known := log_scales(3), seed, variance=variance)
    assert found.is_settled
    agrees(known, found)
    assert found.variance == pytest.approx(variance, rel=0.2)
    # Draws at a value follow from those of a round before it, so that more of them make up for weights that vary.
    noise = np.expm1(variance) / found.pairs.log_ratio.shape[1]
    assert noise < 0.15


@pytest.mark.parametrize("seed", THREE_SEEDS)
def test_fits_that_fail_alone(seed):
    """Values without a fit count as nothing, and are counted."""
    found, _ = sample(known := gaussian(3), seed, fails=0.03)
    agrees(known._replace(log_total=np.nan), found)
    assert found.lost == pytest.approx(0.03, abs=0.02)
    assert np.isfinite(found.log_marginal).all()


def test_a_dear_inside():
    """It takes as many values as its seconds allow, and few hundred in any case."""
    known = gaussian(3)
    inside = Double(known.log_density, seconds=0.002)
    found = Sampler(inside, np.zeros(3), np.full(3, 0.5), 1, most=250).run()
    agrees(known, found)
    assert inside.n_values < 450


def test_a_mode_that_is_lost():
    """Given the inside, a value may depend on those that it is asked for with: there, no climb goes on."""

    def log_density(g):
        is_far = g[:, 0] > 4.0
        values = -0.5 * np.minimum((g**2).sum(axis=1), 30.0 + ((g - [9.0, 0.0]) ** 2).sum(axis=1))
        return np.where(is_far & is_far.all(), -np.inf, values)

    found = Sampler(Double(log_density), np.zeros(2), np.ones(2), 1, others=[np.array([8.0, 1.0])]).run()
    assert_allclose(found.weights @ found.g, 0.0, atol=0.15)


@pytest.mark.parametrize("seed", THREE_SEEDS)
def test_an_improper_direction_is_refused(seed):
    """One coordinate has no end."""
    known = Known(lambda g: -0.5 * g[:, 0] ** 2 - 0.0 * g[:, 1], np.zeros(2), np.ones(2))
    with pytest.raises(Hopeless, match="improper"):
        sample(known, seed)


def test_nowhere_finite_is_refused():
    known = Known(lambda g: np.full(len(g), -np.inf), np.zeros(2), np.ones(2))
    with pytest.raises(Hopeless):
        sample(known, 1)
