"""The inside given the outside: its integral and its draws, against closed forms, SciPy and grids."""

from itertools import pairwise

import numpy as np
import pytest

from latent_models import counts, level, one_effect, process
from marginal_terms import TREES, Gaussian, NumpyTerms, forest_of, logit_groups, singles
from numpy.testing import assert_allclose
from scipy import integrate as scipy_integrate
from scipy import stats
from scipy.special import logsumexp

from pymc_ngvi import LogDensity
from pymc_ngvi.density.rows_given import latent_rows
from pymc_ngvi.marginal.integral import TreeIntegral
from pymc_ngvi.marginal.quadrature import Centres, PathRule, blocks_off_centre, integrate, references
from pymc_ngvi.marginal.trees import draw_effects, moments_of_draws, numbers_of_candidates
from pymc_ngvi.nested.inside import LatentInside, LatentMarginal

SEEDS = [0, 1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TREES)
def test_log_m_of_a_gaussian(name, seed):
    """Exact about the right centres with any number of nodes; each block's part adds up to the whole."""
    rng = np.random.default_rng([seed, 1])
    gaussian = Gaussian(forest_of(TREES[name], 2), rng)
    forest = gaussian.forest
    g = rng.normal(size=(9, 2))
    for n_nodes in (1, 2, 3, 4):
        rule = PathRule(n_nodes, forest.n_levels)
        result = integrate(gaussian.terms, forest, rule, g, gaussian.centres(g))
        assert_allclose(result.log_marginal, gaussian.log_marginal(g), rtol=1e-10, atol=1e-10)
        assert result.of_blocks.shape == (9, forest.n_blocks)
        of_globals = gaussian.terms.terms(g, np.zeros((9, 1, forest.n_local)))[0]
        assert_allclose(result.of_blocks.sum(axis=1) + of_globals, result.log_marginal, rtol=1e-10, atol=1e-10)


def by_scipy(log_density, about, width):
    """Return the log integral, mean and variance of a density in one dimension, by adaptive quadrature."""
    top = log_density(about)
    ends = about + width * np.arange(-30.0, 31.0, 3.0)

    def moment(k):
        def integrand(b):
            return b**k * np.exp(log_density(b) - top)

        return sum(scipy_integrate.quad(integrand, *piece, epsabs=0, epsrel=1e-10)[0] for piece in pairwise(ends))

    values = [moment(k) for k in range(3)]
    mean = values[1] / values[0]
    return np.log(values[0]) + top, mean, values[2] / values[0] - mean**2


@pytest.mark.parametrize("sd", [0.5, 2.0, 4.0])
def test_blocks_of_one_against_adaptive_quadrature(sd):
    """Logit groups: all zeros, one success, half."""
    terms = logit_groups([0, 1, 3], 6, sd=sd)
    forest = singles(3)
    g = np.array([[-1.0], [0.7]])
    centres = Centres(np.zeros((2, 3)), np.full((2, 3, 1), 0.5 * sd))
    quadrature = TreeIntegral(terms, forest, lambda g: centres)
    quadrature.rule = PathRule(41, 1)
    points = quadrature.at(g)
    assert np.isfinite(points.log_estimate).all()
    blocks = integrate(terms, forest, quadrature.rule, g, points.centres)
    for i in range(2):
        for c in range(3):

            def log_density(b, i=i, c=c):
                local = np.full((1, 1, 3), b)
                return terms.terms(g[i : i + 1], local)[1][0, 0, c]

            log_m, mean, variance = by_scipy(log_density, points.centres.mean[i, c], points.centres.factor[i, c, 0])
            assert_allclose(blocks.of_blocks[i, c], log_m, atol=5e-5)
            assert_allclose(points.centres.mean[i, c], mean, atol=1e-4)
            assert_allclose(points.centres.factor[i, c, 0] ** 2, variance, rtol=1e-4)


def test_a_pair_against_a_grid():
    """A root and a leaf, both with counts: a two-dimensional integral that is no Gaussian's."""

    def of_locals(g, b):
        root = 2.0 * b[..., 0] - np.exp(b[..., 0]) - 0.5 * b[..., 0] ** 2
        leaf = b[..., 1] - np.exp(b[..., 1]) - 0.5 * ((b[..., 1] - b[..., 0] - g[:, None, 0]) / 0.8) ** 2
        return np.stack([root, leaf], axis=-1)

    terms, forest = NumpyTerms(lambda g: 0.0 * g[:, 0], of_locals), forest_of([-1, 0], 1)
    g = np.array([[0.3], [-1.2]])
    quadrature = TreeIntegral(
        terms, forest, lambda g: Centres(np.zeros((2, 2)), np.tile([[1.0, 0.0], [0.5, 0.5]], (2, 1, 1)))
    )
    quadrature.rule = PathRule(13, 2)
    points = quadrature.at(g)
    line = np.linspace(-9.0, 5.0, 1_401)
    mesh = np.stack(np.meshgrid(line, line, indexing="ij"), axis=-1).reshape(1, -1, 2)
    for i in range(2):
        log_p = terms.terms(g[i : i + 1], mesh)[1].sum(axis=2)[0]
        weights = np.exp(log_p - log_p.max())
        log_m = np.log(weights.sum()) + log_p.max() + 2.0 * np.log(line[1] - line[0])
        assert_allclose(points.log_estimate[i], log_m, atol=1e-5)
        weights /= weights.sum()
        mean = weights @ mesh[0]
        cov = (weights[:, None] * (mesh[0] - mean)).T @ (mesh[0] - mean)
        assert_allclose(points.centres.mean[i], mean, atol=1e-3)
        assert_allclose(points.centres.factor[i], np.linalg.cholesky(cov), atol=2e-3)


def test_values_that_are_not_finite_count_as_no_density():
    """A density that ends at 0: NaN beyond."""
    terms = NumpyTerms(lambda g: g[:, 0], lambda g, b: np.where(b > 0.0, 4.0 * np.log(np.abs(b)) - b, np.nan))
    centres = Centres(np.full((1, 1), 5.0), np.full((1, 1, 1), np.sqrt(5.0)))
    result = integrate(terms, singles(1), PathRule(41, 1), np.zeros((1, 1)), centres)
    assert_allclose(result.log_marginal, np.log(24.0), atol=1e-3)
    assert np.isfinite(result.shape.mean).all()
    nowhere = NumpyTerms(lambda g: g[:, 0], lambda g, b: b + np.nan)
    rule = PathRule(5, 1)
    result = integrate(nowhere, singles(2), rule, np.zeros((1, 1)), Centres(np.ones((1, 2)), np.ones((1, 2, 1))))
    assert result.log_marginal[0] == -np.inf
    assert blocks_off_centre(singles(2), result.shape, rule, result.log_marginal[:, None]).all()


#: Widths of nodes over those that are right, and distances in the wider of both.
FAR = [(1e6, 1.0), (1e4, 1.0), (1e4, -5.0), (30.0, -3.0), (1.0, 100.0), (1.0, -30.0), (0.1, 5.0), (0.1, -30.0)]


@pytest.mark.parametrize(("width", "far"), FAR)
@pytest.mark.parametrize("name", ["singles", "pairs", "nested", "triples", "five levels"])
def test_centres_are_found_from_far_away(name, width, far):
    """Up to a million of the right scales off."""
    rng = np.random.default_rng(5)
    gaussian = Gaussian(forest_of(TREES[name], 2), rng)
    forest, g = gaussian.forest, rng.normal(size=(3, 2))
    right = gaussian.centres(g)
    off = Centres(right.mean + far * max(width, 1.0) * right.own(forest), width * right.factor)
    points = TreeIntegral(gaussian.terms, forest, lambda g: off).at(g)
    if (name, width) == ("five levels", 0.1):  # there and back takes more corrections than there are
        assert (np.isinf(points.log_estimate) | (np.abs(points.log_estimate - gaussian.log_marginal(g)) < 0.02)).all()
        return
    assert np.isfinite(points.log_estimate).all()
    assert_allclose(points.log_estimate, gaussian.log_marginal(g), atol=0.02)
    assert_allclose((points.centres.mean - right.mean) / right.own(forest), 0.0, atol=0.05)


def test_a_draw_without_a_centre_is_lost():
    """The density grows without end in one block."""
    terms = NumpyTerms(lambda g: 0.0 * g[:, 0], lambda g, b: np.where(g[:, None] > 0.0, b, -0.5 * b**2))
    quadrature = TreeIntegral(terms, singles(1), lambda g: Centres(np.zeros((len(g), 1)), np.ones((len(g), 1, 1))))
    points = quadrature.at(np.array([[1.0], [-1.0]]))
    assert np.isfinite(points.log_estimate).tolist() == [False, True]
    assert_allclose(points.log_estimate[1], 0.5 * np.log(2.0 * np.pi), atol=1e-6)


def drawn(terms, forest, g, centres, skewness, seed, of_draw=None):
    """Draw effects, one for each of the globals, or for those given."""
    rng = np.random.default_rng(seed)
    of_draw = np.arange(len(g)) if of_draw is None else of_draw
    shifts, choices = rng.random((len(g), forest.n_local)), rng.random((len(of_draw), forest.n_local))
    k = numbers_of_candidates(forest.n_levels)[0]
    return draw_effects(terms, forest, g, centres, skewness, shifts, choices, of_draw, k)


def found(terms, forest, g, width=1.0, n_nodes=None):
    """Return right centres at one row of globals, and the skewness about them."""
    start = Centres(np.zeros((1, forest.n_local)), np.zeros((1, forest.n_local, forest.n_levels)))
    start.factor[:, np.arange(forest.n_local), forest.level] = width
    quadrature = TreeIntegral(terms, forest, lambda g: start)
    quadrature.rule = PathRule(n_nodes or references(forest.n_levels)[-1].n_nodes, forest.n_levels)
    points = quadrature.at(g)
    assert np.isfinite(points.log_estimate).all()
    return points


def repeated(points, n):
    """Return the centres of one point, n times."""
    c = points.centres
    return Centres(np.repeat(c.mean, n, axis=0), np.repeat(c.factor, n, axis=0))


class Exact:
    """A distribution on a line, from its log density."""

    def __init__(self, log_density, line):
        weights = np.exp(log_density - log_density.max())
        self.line, self.density = line, weights / weights.sum() / (line[1] - line[0])
        self.cdf = np.cumsum(weights) / weights.sum()
        self.mean = weights @ line / weights.sum()
        self.sd = np.sqrt(weights @ (line - self.mean) ** 2 / weights.sum())

    def check(self, draws, slack):
        """Assert that quantiles are right to within the Monte Carlo error and so many standard deviations."""
        for p in (0.01, 0.1, 0.5, 0.9, 0.99):
            expected = np.interp(p, self.cdf, self.line)
            error = np.sqrt(p * (1.0 - p) / len(draws)) / np.interp(expected, self.line, self.density)
            assert abs(np.quantile(draws, p) - expected) < 4.0 * error + slack * self.sd, p
        assert abs(draws.mean() - self.mean) < (4.0 / np.sqrt(len(draws)) + 0.5 * slack) * self.sd
        assert abs(draws.std() / self.sd - 1.0) < 4.0 / np.sqrt(len(draws)) + slack


@pytest.mark.parametrize("seed", SEEDS)
def test_quantiles_of_a_skewed_conditional(seed):
    """A group without a success of a logit model whose effects have an sd of 4; one of half successes; one of all."""
    terms, forest, n = logit_groups([0, 3, 6], 6, sd=4.0), singles(3), 20_000
    g = np.array([[-0.5]])
    points = found(terms, forest, g, 2.0)
    assert abs(points.skew[0, 0]) > 0.5
    draws = drawn(terms, forest, np.repeat(g, n, axis=0), repeated(points, n), points.skew[0], seed)
    line = np.linspace(-25.0, 25.0, 5_001)
    log_density = terms.terms(g, np.repeat(line[None, :, None], 3, axis=2))[1][0]
    for c in range(3):
        Exact(log_density[:, c], line).check(draws[:, c], slack=0.04)


@pytest.mark.parametrize("name", TREES)
def test_gaussian_conditionals(name):
    """Mean and covariance of whole trees are right."""
    rng = np.random.default_rng(4)
    gaussian = Gaussian(forest_of(TREES[name], 2), rng)
    forest, n = gaussian.forest, 8_000
    g = np.repeat(rng.normal(size=(1, 2)), n, axis=0)
    gaussian.terms._size = 500
    draws = drawn(gaussian.terms, forest, g, gaussian.centres(g), np.zeros(forest.n_local), 5)
    mean, cov = gaussian.conditional(g[:1])
    sd = np.sqrt(np.diag(cov))
    z = (draws - mean) / sd
    assert_allclose(z.mean(axis=0), 0.0, atol=4.0 / np.sqrt(n))
    correlation = cov / np.outer(sd, sd)
    # A few candidates are a quadrature rule: moments are right up to its error.
    slack = 0.04 if numbers_of_candidates(forest.n_levels)[0] > 2 else 0.2
    assert_allclose(z.T @ z / n, correlation, atol=4.0 * np.sqrt(2.0 / n) + slack)


def test_a_heavy_tail_is_drawn():
    """A t with 3 degrees of freedom; of normal proposals, few candidates are far out, and the sd is 17 % short."""
    terms = NumpyTerms(lambda g: 0.0 * g[:, 0], lambda g, b: stats.t.logpdf(b, 3))
    n, forest = 4_000, singles(1)
    at = (terms, forest, np.zeros((n, 1)), Centres(np.zeros((n, 1)), np.full((n, 1, 1), np.sqrt(3.0))), np.zeros(1))
    shifts = (np.arange(n)[:, None] + 0.5) / n
    of_few, of_more = (moments_of_draws(*at, shifts, k)[1][0] for k in (numbers_of_candidates(1)[0], 33))
    assert_allclose([of_few, of_more], np.sqrt(3.0), rtol=0.05)
    assert of_few < of_more


def test_effects_of_many_groups_have_no_common_error():
    """E[1 + (b - mean) d log p / db] = 0: errors of half a percent in each variance would add up."""
    rng, n = np.random.default_rng(7), 1_000
    successes = rng.integers(0, 6, size=1_000)
    terms, forest, g = logit_groups(successes, 5, sd=1.0), singles(1_000), np.array([[0.3]])
    points = found(terms, forest, g)
    draws = drawn(terms, forest, np.repeat(g, n, axis=0), repeated(points, n), points.skew[0], 8)
    apart = draws - points.centres.mean
    score = successes - 5.0 / (1.0 + np.exp(-draws)) - (draws - g)
    values = np.mean(1.0 + apart * score, axis=1)
    assert abs(values.mean()) < 4.0 * values.std() / np.sqrt(n)


def test_moments_of_draws_are_those_of_draws():
    rng = np.random.default_rng(4)
    gaussian = Gaussian(forest_of(TREES["nested"], 2), rng)
    forest, n = gaussian.forest, 4_000
    g = rng.normal(size=(n, 2))
    centres, none = gaussian.centres(g), np.zeros(forest.n_local)
    shifts = rng.random((n, forest.n_local))
    mean, sd = moments_of_draws(gaussian.terms, forest, g, centres, none, shifts, 5)
    draws = draw_effects(gaussian.terms, forest, g, centres, none, shifts, rng.random(shifts.shape), np.arange(n), 5)
    assert_allclose((draws.mean(axis=0) - mean) / sd, 0.0, atol=4.0 / np.sqrt(n))
    assert_allclose(draws.std(axis=0) / sd, 1.0, atol=4.0 / np.sqrt(2.0 * n))


def of_pair(g, b):
    """Terms of a root with a count of 2 and a leaf with a count of 1."""
    root = 2.0 * b[..., 0] - np.exp(b[..., 0]) - 0.5 * (b[..., 0] / 1.2) ** 2
    leaf = b[..., 1] - np.exp(b[..., 1]) - 0.5 * ((b[..., 1] - b[..., 0] - g[:, None, 0]) / 0.8) ** 2
    return np.stack([root, leaf], axis=-1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pair_against_brute_force(seed):
    terms, forest, n = NumpyTerms(lambda g: 0.0 * g[:, 0], of_pair, size=2_000), forest_of([-1, 0], 1), 20_000
    g = np.array([[-0.4]])
    points = found(terms, forest, g)
    draws = drawn(terms, forest, np.repeat(g, n, axis=0), repeated(points, n), points.skew[0], seed)
    line = np.linspace(-7.0, 4.0, 701)
    mesh = np.stack(np.meshgrid(line, line, indexing="ij"), axis=-1).reshape(1, -1, 2)
    log_p = of_pair(g, mesh).sum(axis=2)[0].reshape(701, 701)
    for c in range(2):
        Exact(logsumexp(log_p, axis=1 - c), line).check(draws[:, c], slack=0.04)
    weights = np.exp(log_p - log_p.max())
    weights /= weights.sum()
    a, b = (Exact(logsumexp(log_p, axis=1 - c), line) for c in range(2))
    covariance = (line - a.mean) @ weights @ (line - b.mean)
    expected = covariance / (a.sd * b.sd)
    assert_allclose(np.corrcoef(draws.T)[0, 1], expected, atol=4.0 / np.sqrt(n) + 0.03)


def marginal_of(make, seed=1):
    density = LogDensity(make())
    given = latent_rows(density)
    return density, given, LatentMarginal(given, seed)


def test_log_m_of_a_gaussian_model_is_exact():
    density, _, marginal = marginal_of(level)
    data = density.model.rvs_to_values[density.model["y"]].data
    n = len(data)
    for log_step, log_noise in ((-0.7, 0.1), (-1.5, 0.4), (0.3, -0.5)):
        step, noise = np.exp(log_step), np.exp(log_noise)
        times = np.arange(n)
        cov = 9.0 + step**2 * np.minimum(times[:, None], times) + noise**2 * np.eye(n)
        expected = stats.multivariate_normal(np.zeros(n), cov).logpdf(data)
        expected += (
            stats.halfnorm(scale=1.0).logpdf(step) + log_step + stats.halfnorm(scale=2.0).logpdf(noise) + log_noise
        )
        [found] = marginal(np.array([[log_step, log_noise]]))
        assert found == pytest.approx(expected, abs=1e-6)


def test_draws_and_log_m_have_the_same_density_of_what_is_divided():
    """One hyperparameter is divided by the exponential of another: with normal data, each weight is m in that unit."""
    _, given, marginal = marginal_of(level)
    start, g = given.first, given.first + np.array([[0.0, 0.0], [0.4, -0.7], [-0.5, 0.6]])
    inside = LatentInside(marginal, start, [(0, 1)])
    y = inside.bend.forward(g)
    assert np.abs(inside.bend.log_slope(g)).max() > 0.1
    log_m = inside.log_m(y)
    np.testing.assert_allclose(log_m, marginal(g) - inside.bend.log_slope(g), rtol=1e-12)
    pairs = inside.pairs(y, 16, np.random.default_rng(1))
    np.testing.assert_allclose(logsumexp(pairs.log_ratio, axis=1) - np.log(16.0), log_m, atol=1e-6)


def test_what_the_elbo_lacks_is_added():
    """One latent variable, whose integral is known; by the mean of 24 sets of draws."""
    given, log_s = latent_rows(LogDensity(one_effect())), np.array([0.0, 1.0])
    found = [LatentMarginal(given, seed).at(log_s[:, None]) for seed in range(24)]
    values, corrections = (np.mean([[getattr(m, name) for m in pair] for pair in found], axis=0)
                           for name in ("value", "correction"))  # fmt: skip
    for k, s in enumerate(np.exp(log_s)):

        def density(b, s=s):
            return stats.norm(0.0, s).pdf(b) * np.prod(stats.poisson(np.exp(b)).pmf([0, 1, 4]))

        exact = np.log(scipy_integrate.quad(density, -12.0, 8.0, epsabs=1e-14)[0]) + stats.halfnorm.logpdf(s) + log_s[k]
        lacks = exact - (values[k] - corrections[k])
        error = np.sqrt(2.0 * lacks / (24 * 512))  # half of the variance of log weights is missing
        assert abs(values[k] - exact) < 3.0 * error < 0.5 * lacks


@pytest.mark.parametrize("make", [process, counts])
def test_a_fit_does_not_hang_on_where_it_begins(make):
    density, given, marginal = marginal_of(make)
    start = density.initial_point()[given.outside][None]
    there = marginal(start + 0.4)
    for step in (0.0, -0.5, 1.0):
        marginal(start + step)
    np.testing.assert_allclose(marginal(start + 0.4), there, atol=5e-3)
