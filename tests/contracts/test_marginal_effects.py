"""Draws of local coordinates given the globals: their distribution is the conditional one."""

import numpy as np
import pytest

from marginal_terms import TREES, Gaussian, NumpyTerms, forest_of, logit_groups, singles
from numpy.testing import assert_allclose
from scipy.special import gammaln, logsumexp

from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.effects import N_CANDIDATES, SplitNormal, draw_effects
from pymc_ngvi.marginal.log_marginal import LogMarginal
from pymc_ngvi.marginal.nodes import LADDER, PathRule

SEEDS = [0, 1]


def drawn(terms, forest, g, centres, skewness, seed, of_draw=None):
    """Draw effects, one for each of the globals, or for those given."""
    rng = np.random.default_rng(seed)
    of_draw = np.arange(len(g)) if of_draw is None else of_draw
    shifts, choices = rng.random((len(g), forest.n_local)), rng.random((len(of_draw), forest.n_local))
    return draw_effects(terms, forest, g, centres, skewness, shifts, choices, of_draw)


def found(terms, forest, g, width=1.0, n_nodes=None):
    """Return right centres at one row of globals, and the skewness about them."""
    start = Centres(np.zeros((1, forest.n_local)), np.zeros((1, forest.n_local, forest.n_levels)))
    start.factor[:, np.arange(forest.n_local), forest.level] = width
    quadrature = LogMarginal(terms, forest, lambda g: start)
    quadrature.rule = PathRule(n_nodes or LADDER[forest.n_levels][-1], forest.n_levels)
    points = quadrature.reference(g)
    assert not points.lost.any()
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


# --- the proposal -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skewness", [-1.5, -0.4, 0.0, 0.9])
def test_the_split_normal_is_a_distribution(skewness):
    proposal = SplitNormal.of_skewness(np.array([skewness]))
    u = np.linspace(0.0005, 0.9995, 1_000)[:, None]
    z = proposal.quantile(u)
    assert (np.diff(z[:, 0]) > 0.0).all()
    line = np.linspace(-12.0, 12.0, 24_001)[:, None]
    density = np.exp(proposal.log_density(line))[:, 0]
    cdf = np.cumsum(density) * (line[1, 0] - line[0, 0])
    assert_allclose(cdf[-1], 1.0, atol=1e-6)
    assert_allclose(np.interp(z[:, 0], line[:, 0], cdf), u[:, 0], atol=1e-3)
    mean = density @ line[:, 0] / density.sum()
    sd = np.sqrt(density @ (line[:, 0] - mean) ** 2 / density.sum())
    third = density @ (line[:, 0] - mean) ** 3 / density.sum() / sd**3
    assert abs(mean) < 0.1
    assert 1.0 <= sd < 1.2
    assert_allclose(third, np.clip(skewness, -0.9, 0.9), atol=0.25)


# --- one dimension ----------------------------------------------------------------------------------------------------


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
        Exact(log_density[:, c], line).check(draws.local[:, c], slack=0.04)
    assert (draws.efficiency > 0.6).all()
    assert (draws.efficiency <= 1.0 + 1e-12).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_proposal_costs_candidates_not_quantiles(seed):
    """Centres off by a fifth of an sd and too wide, no skewness: candidates are chosen by weight."""
    terms, forest, n = logit_groups([0], 6, sd=2.0), singles(1), 20_000
    g = np.array([[-0.5]])
    points = found(terms, forest, g, 1.0)
    off = repeated(points, n)
    off = Centres(off.mean + 0.2 * off.factor[:, :, 0], 1.2 * off.factor)
    draws = drawn(terms, forest, np.repeat(g, n, axis=0), off, np.zeros(1), seed)
    line = np.linspace(-15.0, 10.0, 5_001)
    Exact(terms.terms(g, line[None, :, None])[1][0, :, 0], line).check(draws.local[:, 0], slack=0.06)
    right = drawn(terms, forest, np.repeat(g, n, axis=0), repeated(points, n), points.skew[0], seed)
    assert draws.efficiency[0] < right.efficiency[0]


@pytest.mark.parametrize("name", TREES)
def test_gaussian_conditionals(name):
    """Candidates count nearly all; mean and covariance of whole trees are right."""
    rng = np.random.default_rng(4)
    gaussian = Gaussian(forest_of(TREES[name], 2), rng)
    forest, n = gaussian.forest, 8_000
    g = np.repeat(rng.normal(size=(1, 2)), n, axis=0)
    gaussian.terms._size = 500
    draws = drawn(gaussian.terms, forest, g, gaussian.centres(g), np.zeros(forest.n_local), 5)
    assert (draws.efficiency > 0.9).all()
    mean, cov = gaussian.conditional(g[:1])
    sd = np.sqrt(np.diag(cov))
    z = (draws.local - mean) / sd
    assert_allclose(z.mean(axis=0), 0.0, atol=4.0 / np.sqrt(n))
    correlation = cov / np.outer(sd, sd)
    # A few candidates are a quadrature rule: moments are right up to its error.
    slack = 0.04 if N_CANDIDATES[forest.n_levels] > 2 else 0.2
    assert_allclose(z.T @ z / n, correlation, atol=4.0 * np.sqrt(2.0 / n) + slack)


# --- trees ------------------------------------------------------------------------------------------------------------


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
        Exact(logsumexp(log_p, axis=1 - c), line).check(draws.local[:, c], slack=0.04)
    weights = np.exp(log_p - log_p.max())
    weights /= weights.sum()
    a, b = (Exact(logsumexp(log_p, axis=1 - c), line) for c in range(2))
    covariance = (line - a.mean) @ weights @ (line - b.mean)
    expected = covariance / (a.sd * b.sd)
    assert_allclose(np.corrcoef(draws.local.T)[0, 1], expected, atol=4.0 / np.sqrt(n) + 0.03)
    assert (draws.efficiency > 0.6).all()


def test_a_hub_with_leaves_against_brute_force():
    """What a hub is, given all of its leaves: the integrals over these are its weights."""
    counts = np.array([0.0, 4.0, 1.0])

    def of_locals(g, b):
        root = -0.5 * b[..., :1] ** 2
        leaves = counts * b[..., 1:] - np.exp(b[..., 1:]) - 0.5 * ((b[..., 1:] - b[..., :1]) / 0.6) ** 2
        return np.concatenate([root, leaves], axis=-1)

    terms, forest, n = NumpyTerms(lambda g: 0.0 * g[:, 0], of_locals, size=2_000), forest_of([-1, 0, 0, 0], 1), 20_000
    g = np.zeros((1, 1))
    points = found(terms, forest, g)
    draws = drawn(terms, forest, np.zeros((n, 1)), repeated(points, n), points.skew[0], 2)
    line = np.linspace(-5.0, 5.0, 501)
    joint = -0.5 * ((line[:, None] - line) / 0.6) ** 2  # leaf by hub
    messages = [logsumexp(joint + (y * line - np.exp(line))[:, None], axis=0) for y in counts]
    Exact(-0.5 * line**2 + sum(messages), line).check(draws.local[:, 0], slack=0.04)
    others = -0.5 * line**2 + messages[0] + messages[2]
    leaf = logsumexp(joint + others, axis=1) + counts[1] * line - np.exp(line)
    Exact(leaf, line).check(draws.local[:, 2], slack=0.04)


# --- bookkeeping ------------------------------------------------------------------------------------------------------


def test_chunks_and_repeated_globals_make_no_difference():
    """Draws of one point share its candidates and choose for themselves."""
    rng = np.random.default_rng(6)
    gaussian = Gaussian(forest_of(TREES["nested"], 2), rng)
    forest = gaussian.forest
    g = rng.normal(size=(9, 2))
    of_draw = np.array([0, 0, 1, 4, 4, 4, 7, 7, 8])  # as many as there are points, but not one of each
    shifts, choices = rng.random((9, forest.n_local)), rng.random((9, forest.n_local))
    results = []
    for size in (1, 4, 100):
        gaussian.terms._size = size
        results.append(
            draw_effects(
                gaussian.terms, forest, g, gaussian.centres(g), np.zeros(forest.n_local), shifts, choices, of_draw
            )
        )
    for other in results[1:]:
        assert_allclose(other.local, results[0].local, rtol=1e-12)
        assert_allclose(other.efficiency, results[0].efficiency, rtol=1e-12)
    for draw in (0, 1, 4, 8):
        one = of_draw[[draw]]
        about, none = gaussian.centres(g[one]), np.zeros(forest.n_local)
        alone = draw_effects(
            gaussian.terms, forest, g[one], about, none, shifts[one], choices[[draw]], np.zeros(1, dtype=np.intp)
        )
        assert_allclose(alone.local[0], results[0].local[draw], rtol=1e-12)


def test_candidates_without_density_are_not_chosen():
    """A Gamma variable: half of the candidates may be below 0."""
    terms = NumpyTerms(lambda g: 0.0 * g[:, 0], lambda g, b: np.where(b > 0.0, np.log(np.abs(b)) - b, np.nan))
    n = 4_000
    centres = Centres(np.full((n, 1), 1.5), np.full((n, 1, 1), 1.5))
    draws = drawn(terms, singles(1), np.zeros((n, 1)), centres, np.array([1.0]), 7)
    assert (draws.local > 0.0).all()
    assert gammaln(2.0) == 0.0
    assert abs(draws.local.mean() - 2.0) < 0.25
    assert draws.efficiency[0] < 0.95
