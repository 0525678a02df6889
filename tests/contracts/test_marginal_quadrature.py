"""Integrals over trees of local coordinates, and where their nodes are put."""

from itertools import pairwise

import numpy as np
import pytest

from marginal_terms import TREES, Gaussian, NumpyTerms, factor_of, forest_of, logit_groups, singles
from numpy.testing import assert_allclose
from scipy import integrate as scipy_integrate
from scipy import sparse
from scipy.special import gammaln, polygamma

from pymc_ngvi.marginal.centres import Centres, corrected_centres
from pymc_ngvi.marginal.conditional_gaussian import linear_centres
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.log_marginal import LogMarginal
from pymc_ngvi.marginal.nodes import LADDER, PathRule, first_rule, ladder, references
from pymc_ngvi.marginal.quadrature import blocks_off_centre, integrate
from pymc_ngvi.marginal.referred import Referred, joined_points
from pymc_ngvi.marginal.regression import Whitening

SEEDS = [0, 1]


def standard_normal_moments(n):
    """Return E z^k for k = 0, ..., n."""
    return np.array([0.0 if k % 2 else np.prod(np.arange(k - 1, 0, -2.0)) for k in range(n + 1)])


# --- nodes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_levels", LADDER)
def test_rules_are_exact_for_polynomials(n_levels):
    for rule in [PathRule(1, n_levels), *ladder(n_levels)]:
        k = min(2 * rule.n_nodes - 1, 20)
        density = np.exp(-0.5 * rule.line**2) / np.sqrt(2.0 * np.pi)
        moments = (np.exp(rule.log_weight) * density * rule.line ** np.arange(k + 1)[:, None]).sum(axis=1)
        expected = standard_normal_moments(k)
        assert_allclose(moments, expected, atol=1e-9 * expected.max())
        assert rule.nodes.shape == (rule.n_nodes**n_levels, n_levels)
        # The root changes slowest: what a coordinate's term depends on is found by strides.
        assert_allclose(rule.nodes[:: rule.n_nodes ** (n_levels - 1), 0], rule.line)
        assert_allclose(rule.nodes[: rule.n_nodes, -1], rule.line)
    assert first_rule(n_levels).n_nodes ** n_levels < 250


# --- Gaussian conditionals: closed forms ------------------------------------------------------------------------------


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
        result = integrate(gaussian.terms, forest, rule, g, gaussian.centres(g), by_block=True)
        assert_allclose(result.log_marginal, gaussian.log_marginal(g), rtol=1e-10, atol=1e-10)
        assert result.of_blocks.shape == (9, forest.n_blocks)
        of_globals = gaussian.terms.terms(g, np.zeros((9, 1, forest.n_local)))[0]
        assert_allclose(result.of_blocks.sum(axis=1) + of_globals, result.log_marginal, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", TREES)
def test_standardised_moments_of_a_gaussian(name):
    """About the right centres: mean 0, covariance I on every path, no skewness, and the parabola says the same."""
    rng = np.random.default_rng(2)
    gaussian = Gaussian(forest_of(TREES[name], 2), rng)
    forest, g = gaussian.forest, rng.normal(size=(9, 2))
    rule = PathRule(3, forest.n_levels)
    shape = integrate(gaussian.terms, forest, rule, g, gaussian.centres(g)).shape
    assert_allclose(shape.mean, 0.0, atol=1e-10)
    assert_allclose(shape.cov, np.broadcast_to(np.eye(forest.n_levels), shape.cov.shape), atol=1e-10)
    assert_allclose(shape.skew, 0.0, atol=1e-10)
    leaves = np.setdiff1d(np.arange(forest.n_local), forest.parent)
    assert_allclose(shape.width[:, leaves], 1.0, atol=1e-10)
    assert not blocks_off_centre(forest, shape, rule, np.zeros((9, 1))).any()
    again = corrected_centres(gaussian.centres(g), shape, forest)
    assert_allclose(again.mean, gaussian.conditional(g)[0], atol=1e-9)
    assert_allclose(again.factor, gaussian.centres(g).factor, atol=1e-9)


@pytest.mark.parametrize("name", ["singles", "pairs", "hubs"])
def test_a_gaussian_about_other_centres(name):
    """Right scales, means off by a part of an sd: log m to 1e-10 with enough nodes, and one correction is enough."""
    rng = np.random.default_rng(3)
    gaussian = Gaussian(forest_of(TREES[name], 2), rng)
    forest, g = gaussian.forest, rng.normal(size=(5, 2))
    right = gaussian.centres(g)
    off = Centres(right.mean + 0.6 * rng.uniform(-1.0, 1.0, right.mean.shape) * right.own(forest), right.factor)
    result = integrate(gaussian.terms, forest, PathRule(27, forest.n_levels), g, off)
    assert_allclose(result.log_marginal, gaussian.log_marginal(g), rtol=1e-10, atol=1e-10)
    again = corrected_centres(off, result.shape, forest)
    assert_allclose(again.mean, right.mean, atol=1e-8)
    assert_allclose(again.factor, right.factor, atol=1e-8)


def test_chunks_of_draws_make_no_difference():
    rng = np.random.default_rng(4)
    gaussian = Gaussian(forest_of(TREES["nested"], 2), rng)
    g, rule = rng.normal(size=(9, 2)), PathRule(3, 3)
    results = []
    for size in (1, 4, 100):
        gaussian.terms._size = size
        results.append(integrate(gaussian.terms, gaussian.forest, rule, g, gaussian.centres(g), by_block=True))
    for other in results[1:]:
        assert_allclose(other.log_marginal, results[0].log_marginal, rtol=1e-13)
        assert_allclose(other.of_blocks, results[0].of_blocks, rtol=1e-12)
        assert_allclose(other.shape.cov, results[0].shape.cov, atol=1e-12)


# --- other conditionals -----------------------------------------------------------------------------------------------


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
    quadrature = LogMarginal(terms, forest, lambda g: centres)
    quadrature.rule = PathRule(41, 1)
    points = quadrature.reference(g)
    assert not points.lost.any()
    blocks = integrate(terms, forest, quadrature.rule, g, points.centres, by_block=True)
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
    quadrature = LogMarginal(
        terms, forest, lambda g: Centres(np.zeros((2, 2)), np.tile([[1.0, 0.0], [0.5, 0.5]], (2, 1, 1)))
    )
    quadrature.rule = PathRule(13, 2)
    points = quadrature.reference(g)
    line = np.linspace(-9.0, 5.0, 1_401)
    mesh = np.stack(np.meshgrid(line, line, indexing="ij"), axis=-1).reshape(1, -1, 2)
    for i in range(2):
        log_p = terms.terms(g[i : i + 1], mesh)[1].sum(axis=2)[0]
        weights = np.exp(log_p - log_p.max())
        log_m = np.log(weights.sum()) + log_p.max() + 2.0 * np.log(line[1] - line[0])
        assert_allclose(points.log_marginal[i], log_m, atol=1e-5)
        weights /= weights.sum()
        mean = weights @ mesh[0]
        cov = (weights[:, None] * (mesh[0] - mean)).T @ (mesh[0] - mean)
        assert_allclose(points.centres.mean[i], mean, atol=1e-3)
        assert_allclose(points.centres.factor[i], np.linalg.cholesky(cov), atol=2e-3)


def test_skewness_of_a_conditional():
    """b = log of a Gamma variable of shape a: its cumulants are polygamma functions."""
    shape = np.array([1.5, 4.0, 30.0])
    terms = NumpyTerms(lambda g: 0.0 * g[:, 0], lambda g, b: shape * b - np.exp(b) - gammaln(shape))
    quadrature = LogMarginal(terms, singles(3), lambda g: Centres(np.zeros((len(g), 3)), np.ones((len(g), 3, 1))))
    quadrature.rule = PathRule(41, 1)
    points = quadrature.reference(np.zeros((1, 1)))
    assert_allclose(points.log_marginal, 0.0, atol=1e-5)
    assert_allclose(points.centres.mean[0], polygamma(0, shape), atol=1e-4)
    assert_allclose(points.centres.variance()[0], polygamma(1, shape), rtol=1e-3)
    assert_allclose(points.skew[0], polygamma(2, shape) / polygamma(1, shape) ** 1.5, atol=2e-3)


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


# --- from far away ----------------------------------------------------------------------------------------------------


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
    points = LogMarginal(gaussian.terms, forest, lambda g: off).reference(g)
    if (name, width) == ("five levels", 0.1):  # there and back takes more corrections than there are
        assert (points.lost | (np.abs(points.log_marginal - gaussian.log_marginal(g)) < 0.02)).all()
        return
    assert not points.lost.any()
    assert_allclose(points.log_marginal, gaussian.log_marginal(g), atol=0.02)
    assert_allclose((points.centres.mean - right.mean) / right.own(forest), 0.0, atol=0.05)


@pytest.mark.parametrize("width", [1e-3, 0.01, 0.1])
@pytest.mark.parametrize("name", TREES)
def test_nodes_too_near_to_each_other_are_noticed(name, width):
    """Corrected, or lost: no rule takes scales for right that are not, whatever the globals."""
    rng = np.random.default_rng(6)
    gaussian = Gaussian(forest_of(TREES[name], 2), rng)
    forest, g = gaussian.forest, rng.normal(size=(3, 2))
    right = gaussian.centres(g)
    off = Centres(right.mean + 0.5 * right.own(forest), width * right.factor)
    for rule in references(forest.n_levels):
        quadrature = LogMarginal(gaussian.terms, forest, lambda g: off)
        quadrature.rule = rule
        points = quadrature.reference(g)
        assert (points.lost | (np.abs(points.log_marginal - gaussian.log_marginal(g)) < 0.02)).all()
    assert first_rule(forest.n_levels).n_nodes >= references(forest.n_levels)[0].n_nodes


def test_draws_that_need_no_correction_are_left_alone():
    rng = np.random.default_rng(6)
    gaussian = Gaussian(singles(4, 2), rng)
    g = rng.normal(size=(6, 2))
    right = gaussian.centres(g)
    mean = right.mean.copy()
    mean[2] += 3.0
    quadrature = LogMarginal(gaussian.terms, gaussian.forest, lambda g: Centres(mean, right.factor))
    before = gaussian.terms.n_evaluations
    points = quadrature.reference(g)
    assert quadrature.n_corrected == 1
    n_first = 6 * first_rule(1).n_nodes
    assert gaussian.terms.n_evaluations - before == n_first + 7  # the wide rule, once, at one draw
    assert_allclose(points.log_marginal, gaussian.log_marginal(g), atol=1e-6)


def test_a_draw_without_a_centre_is_lost():
    """The density grows without end in one block."""
    terms = NumpyTerms(lambda g: 0.0 * g[:, 0], lambda g, b: np.where(g[:, None] > 0.0, b, -0.5 * b**2))
    quadrature = LogMarginal(terms, singles(1), lambda g: Centres(np.zeros((len(g), 1)), np.ones((len(g), 1, 1))))
    points = quadrature.reference(np.array([[1.0], [-1.0]]))
    assert points.lost.tolist() == [True, False]
    assert_allclose(points.log_marginal[1], 0.5 * np.log(2.0 * np.pi), atol=1e-6)


# --- centres of a Gaussian --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TREES)
def test_linear_centres_are_the_conditional_of_a_dense_gaussian(name):
    rng = np.random.default_rng(7)
    gaussian = Gaussian(forest_of(TREES[name], 3), rng)
    forest = gaussian.forest
    found = linear_centres(forest, gaussian.sparse_precision, gaussian.mean)
    g = 3.0 * rng.normal(size=(5, 3))
    mean, cov = gaussian.conditional(g)
    centres = found(g)
    assert_allclose(centres.mean, mean, rtol=1e-9, atol=1e-9)
    assert_allclose(centres.factor[2], factor_of(forest, cov), rtol=1e-9, atol=1e-9)
    assert_allclose(centres.variance(), np.tile(np.diag(cov), (5, 1)), rtol=1e-9)
    # What is off the paths has the covariance that the paths imply.
    z = rng.normal(size=(1, 400_000 // forest.n_local, forest.n_local))
    draws = centres[:1].at_own(z, forest)[0]
    se = np.sqrt((np.outer(np.diag(cov), np.diag(cov)) + cov**2) / len(draws))
    assert (np.abs(np.cov(draws.T) - cov) < 5.0 * se).all()


def test_globals_in_between():
    """Coordinates in another order than globals first."""
    rng = np.random.default_rng(8)
    gaussian = Gaussian(forest_of(TREES["pairs"], 2), rng)
    order = np.array([2, 0, 3, 4, 1, 5, 6])  # which coordinate of the Gaussian is at each place
    forest = Forest(np.array([1, 4]), np.array([0, 2, 3, 5, 6]), gaussian.forest.parent, gaussian.forest.level)
    precision = sparse.csr_array(gaussian.precision[np.ix_(order, order)])
    found = linear_centres(forest, precision, gaussian.mean[order])
    g = rng.normal(size=(3, 2))
    assert_allclose(found(g).mean, gaussian.conditional(g)[0], rtol=1e-9)


def test_a_precision_that_is_not_positive_still_gives_factors():
    """As of a mean Hessian far from the posterior: the coordinate's own entry is taken."""
    forest = forest_of([-1, 0, -1], 1)
    precision = np.diag([1.0, 1.0, 0.5, -2.0])
    precision[1, 2] = precision[2, 1] = 1.0  # 1 - 1 / .5 < 0
    found = linear_centres(forest, sparse.csr_array(precision), np.zeros(4))
    centres = found(np.zeros((1, 1)))
    assert np.isfinite(centres.factor).all()
    assert (centres.own(forest) > 0.0).all()
    assert_allclose(centres.own(forest)[0, [0, 2]], [1.0, 1.0 / np.sqrt(2.0)])


# --- centres by regression --------------------------------------------------------------------------------------------


def whitening(p):
    return Whitening(lambda g: g, np.zeros(p), np.eye(p))


@pytest.mark.parametrize("name", ["singles", "pairs", "nested"])
def test_predicted_centres_of_a_gaussian_are_right(name):
    """Means are linear in the globals, factors constant: the regression has them, far out too."""
    rng = np.random.default_rng(9)
    gaussian = Gaussian(forest_of(TREES[name], 2), rng)
    quadrature = LogMarginal(gaussian.terms, gaussian.forest, gaussian.centres, whitening=whitening(2))
    quadrature.learn_centres(quadrature.reference(rng.normal(size=(60, 2))))
    g = 2.0 * rng.normal(size=(10, 2))
    predicted, right = quadrature.predicted(g), gaussian.centres(g)
    assert_allclose(predicted.mean, right.mean, atol=1e-6)
    assert_allclose(predicted.factor, right.factor, atol=1e-6)
    before = gaussian.terms.n_evaluations
    points = quadrature.reference(g)
    rule = quadrature.rule
    assert gaussian.terms.n_evaluations - before == 10 * rule.n_nodes**rule.n_levels  # nothing corrected
    assert_allclose(points.log_marginal, gaussian.log_marginal(g), atol=1e-8)


def test_points_join():
    rng = np.random.default_rng(10)
    gaussian = Gaussian(forest_of(TREES["pairs"], 2), rng)
    quadrature = LogMarginal(gaussian.terms, gaussian.forest, gaussian.centres)
    parts = [quadrature.reference(rng.normal(size=(n, 2))) for n in (3, 4)]
    both = joined_points(parts)
    assert isinstance(both, Referred)
    rows = np.array([5, 1])
    assert_allclose(both[rows].log_marginal, [parts[1].log_marginal[2], parts[0].log_marginal[1]])
    assert_allclose(both[rows].centres.mean, [parts[1].centres.mean[2], parts[0].centres.mean[1]])


# --- how many nodes ---------------------------------------------------------------------------------------------------


def chosen(terms, forest, g, start):
    """Return the quadrature after its rule was chosen at some globals."""
    quadrature = LogMarginal(terms, forest, start, whitening=whitening(g.shape[1]))
    points = quadrature.reference(g)
    quadrature.learn_centres(points)
    quadrature.choose_rule(points)
    return quadrature


def test_the_fewest_nodes_for_a_gaussian():
    rng = np.random.default_rng(11)
    gaussian = Gaussian(forest_of(TREES["hubs"], 2), rng)
    quadrature = chosen(gaussian.terms, gaussian.forest, rng.normal(size=(24, 2)), gaussian.centres)
    assert quadrature.rule == ladder(2)[0]
    assert quadrature.rule_error < 1e-8


def test_more_nodes_for_skewed_conditionals():
    """Groups of few binary outcomes with a large sd; the error that is left is what the next rule changes."""
    rng = np.random.default_rng(12)
    terms = logit_groups(np.repeat([0, 1, 3], 20), 3)
    g = np.array([-1.0, np.log(4.0)]) + [0.6, 0.2] * rng.normal(size=(24, 2))
    start = lambda g: Centres(np.zeros((len(g), 60)), np.full((len(g), 60, 1), 2.0))  # noqa: E731
    quadrature = chosen(terms, singles(60, 2), g, start)
    assert quadrature.rule.n_nodes > 9
    assert quadrature.rule_error < 0.03
    points = quadrature.reference(g)
    best = integrate(terms, quadrature.forest, PathRule(61, 1), g, points.centres, moments=False).log_marginal
    assert np.std(points.log_marginal - best) < 0.06


def test_a_base_rule_of_one_node_for_a_gaussian_and_its_log_m():
    rng = np.random.default_rng(13)
    gaussian = Gaussian(forest_of(TREES["nested"], 2), rng)
    g = rng.normal(size=(60, 2))
    quadrature = chosen(gaussian.terms, gaussian.forest, g[:24], gaussian.centres)
    points = quadrature.reference(g)
    quadrature.learn_base(points, np.ones(60), tolerance=0.05, least=1, reach=1.5)
    assert quadrature.base.rule.n_nodes == 1
    other = rng.normal(size=(30, 2))
    before = gaussian.terms.n_evaluations
    values, lost = quadrature(other)
    assert gaussian.terms.n_evaluations - before == 30
    assert not lost.any()
    assert_allclose(values, gaussian.log_marginal(other), atol=1e-4)


def test_draws_that_the_base_rule_finds_off_their_centres_are_done_by_the_reference():
    """Regressions are cut off far out: predictions are wrong there."""
    rng = np.random.default_rng(15)
    gaussian = Gaussian(forest_of(TREES["pairs"], 2), rng)
    g = rng.normal(size=(60, 2))
    quadrature = LogMarginal(gaussian.terms, gaussian.forest, gaussian.centres, whitening=whitening(2))
    quadrature.rule = PathRule(7, 2)
    points = quadrature.reference(g)
    quadrature.learn_centres(points)
    quadrature.learn_base(points, np.ones(60), tolerance=0.05, least=3, reach=1.5)
    assert quadrature.base.rule.n_nodes == 3
    far = np.array([[0.5, -0.5], [20.0, 25.0], [0.1, 0.2]])
    before = gaussian.terms.n_evaluations
    values, lost = quadrature(far)
    assert gaussian.terms.n_evaluations - before > 3 * 9
    assert not lost.any()
    assert_allclose(values, gaussian.log_marginal(far), rtol=1e-6, atol=1e-3)


def test_a_base_rule_is_as_near_to_the_reference_as_it_says():
    rng = np.random.default_rng(14)
    terms = logit_groups(np.repeat([0, 2, 4], 20), 6)
    centre, spread = np.array([-0.3, 0.3]), np.array([0.2, 0.15])
    start = lambda g: Centres(np.zeros((len(g), 60)), np.full((len(g), 60, 1), 0.8))  # noqa: E731
    g = centre + spread * rng.normal(size=(80, 2))
    quadrature = LogMarginal(terms, singles(60, 2), start, whitening=Whitening(lambda g: g, centre, np.diag(spread)))
    points = quadrature.reference(g)
    quadrature.learn_centres(points)
    quadrature.choose_rule(points[np.arange(24)])
    points = quadrature.reference(g)
    quadrature.learn_centres(points)
    quadrature.learn_base(points, np.ones(80), tolerance=0.1, least=1, reach=1.5)
    assert quadrature.base is not None
    other = centre + spread * rng.normal(size=(100, 2))
    values, _ = quadrature(other)
    error = np.std(values - quadrature.reference(other).log_marginal)
    assert error < 2.0 * max(quadrature.base.residual, 0.01)
    assert quadrature.base.residual < 0.1
    # No rule is good enough for a tolerance of 0, and then there is none.
    quadrature.learn_base(points, np.ones(80), tolerance=0.0, least=1, reach=1.5)
    assert quadrature.base is None
    assert_allclose(quadrature(other)[0], quadrature.reference(other).log_marginal)
