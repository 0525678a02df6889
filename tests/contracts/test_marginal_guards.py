"""Ways in which an exact posterior could be wrong without a word, against brute force: each is noticed, or avoided."""

import dataclasses

import numpy as np
import pytest

from marginal_terms import Gaussian, Groups, NumpyTerms, exact_state, forest_of, singles
from numpy.testing import assert_allclose

from pymc_ngvi.marginal import nodes
from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.fitting import Hopeless, Sampler
from pymc_ngvi.marginal.log_marginal import TOLERANCE, LogMarginal
from pymc_ngvi.marginal.nodes import PathRule
from pymc_ngvi.marginal.quadrature import blocks_off_centre, integrate
from pymc_ngvi.marginal.sampling import Pool
from pymc_ngvi.marginal.trees import leave_groups_out

SEEDS = [1, 2]
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


# --- 1: too few nodes -------------------------------------------------------------------------------------------------


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


def test_seven_nodes_are_not_called_exact(binary, monkeypatch):
    """Where seven are all there are: log tau is off by .2 sd, with importance weights that look fine."""
    monkeypatch.setitem(nodes.LADDER, 1, (3, 5, 7))
    groups, truth = binary
    state = exact_state(groups, *start(truth))
    assert state.khat < 0.5
    assert state.effective_size > 1_000
    assert abs(errors(state, truth)[0][1]) > 0.15
    assert state.checks.n_nodes == 7
    assert not state.checks.is_exact
    assert any("the quadrature has not settled with 7 nodes" in clause for clause in state.checks.failures)


@pytest.mark.parametrize("seed", SEEDS)
def test_nodes_are_enough_at_the_posterior(binary, seed):
    """The Gaussian fit is far from it, where effects are small and few nodes would do."""
    groups, truth = binary
    state = exact_state(groups, truth.mean[:2] - [0.0, 4.0 * truth.sd[1]], 0.2 * np.diag(truth.sd[:2] ** 2), seed)
    g = state.draw(32, np.random.default_rng(seed))[:, :2]
    points = state.rest.quadrature.reference(g)
    by_rule, by_many = (
        integrate(groups.terms, groups.forest, rule, g, points.centres, moments=False).log_marginal
        for rule in (state.rest.quadrature.rule, PathRule(121, 1))
    )
    assert np.std(by_rule - by_many) < 0.1


# --- 2: exponential tails of log tau ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("centred", [True, False])
def test_the_tail_of_a_log_scale(eight_schools, centred, seed):
    """Eight schools: where tau may be 0. Without its tail, the sd of log tau comes out a tenth too small."""
    state = exact_state(Groups.normal(Y, SIGMA, centred=centred), *start(eight_schools), seed)
    assert [(t.at, t.side) for t in state.rest.sampled.bend.tails] == [(1, -1)]
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


@pytest.mark.parametrize("seed", SEEDS)
def test_no_draw_is_lost_in_the_tail(seed):
    """Where tau is 0 nearly, predicted means of effects are off by thousands of their scales."""
    rng = np.random.default_rng(7)
    groups = Groups.logit(rng.binomial(4, 1.0 / (1.0 + np.exp(1.5 - 0.2 * rng.normal(size=60)))), 4)
    truth = groups.brute_force(np.linspace(-3.5, 0.0, 41), np.linspace(-14.0, 2.0, 101))
    state = exact_state(groups, *start(truth), seed)
    assert state.pool.g[:, 1].min() < -6.0
    assert not state.pool.lost.any()
    em, es = errors(state, truth)
    assert_allclose(em, 0.0, atol=0.05)
    assert_allclose(es, 0.0, atol=0.08)


def test_lost_draws_count_as_their_neighbours_do():
    """Their own log m may be anything."""
    rng = np.random.default_rng(8)
    g = rng.normal(size=(1_000, 2))
    lost = g[:, 1] < -1.8
    log_marginal = np.where(lost, -1e5, 0.0)
    pool = Pool(g, log_marginal, np.zeros(1_000), np.zeros(1_000, dtype=np.intp), lost)
    assert pool.weights()[0][lost].sum() == 0.0
    part = pool.part_lost(pool.weights()[0])
    assert part == pytest.approx(lost.mean(), rel=0.15)
    # Far outside of where there is weight, they count for nothing.
    outside = np.abs(g).max(axis=1) > 2.5
    pool = Pool(g, np.where(np.abs(g).max(axis=1) > 1.5, -1e5, 0.0), np.zeros(1_000), pool.scrambling, outside)
    assert pool.part_lost(pool.weights()[0]) < 0.1 * outside.mean()
    none = Pool(g, log_marginal, np.zeros(1_000), pool.scrambling, np.zeros(1_000, dtype=bool))
    assert none.part_lost(none.weights()[0]) == 0.0


# --- 3: loose centres -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_nodes", [3, 4, 5, 7, 9])
def test_centres_that_are_accepted_give_the_right_integral(n_nodes):
    """Of a Gaussian, for nodes off by up to 1.5 sds, too near or too far from each other by a factor of up to 3."""
    terms = NumpyTerms(lambda g: 0.0 * g[:, 0], lambda g, b: -0.5 * b**2 - 0.5 * np.log(2.0 * np.pi), size=10_000)
    mean, scale = np.meshgrid(np.linspace(-1.5, 1.5, 61), np.exp(np.linspace(-1.1, 1.1, 61)))
    centres = Centres(mean.reshape(-1, 1), scale.reshape(-1, 1, 1))
    rule = PathRule(n_nodes, 1)
    result = integrate(terms, singles(1), rule, np.zeros((len(centres), 1)), centres)
    accepted = ~blocks_off_centre(singles(1), result.shape, rule, result.log_marginal[:, None])[:, 0]
    assert accepted.mean() > 0.02
    assert np.abs(result.log_marginal[accepted]).max() < 0.01
    assert np.abs(result.log_marginal).max() > 0.1


def test_loose_centres_do_not_change_log_m_with_the_globals():
    """Forty blocks whose first centres are off by a part of an sd that depends on the globals."""
    rng = np.random.default_rng(9)
    gaussian = Gaussian(forest_of([-1] * 40, 2), rng)
    g = rng.normal(size=(50, 2))

    def off(g):
        right = gaussian.centres(g)
        return Centres(right.mean + np.tanh(g[:, :1]) * right.factor[:, :, 0], 0.7 * right.factor)

    quadrature = LogMarginal(gaussian.terms, gaussian.forest, off)
    quadrature.rule = PathRule(3, 1)
    points = quadrature.reference(g)
    assert np.std(points.log_marginal - gaussian.log_marginal(g)) < 0.05
    uncorrected = integrate(gaussian.terms, gaussian.forest, PathRule(3, 1), g, off(g)).log_marginal
    assert np.std(uncorrected - gaussian.log_marginal(g)) > 0.5


# --- 4: one base node where there are such tails ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_more_than_one_base_node_where_a_scale_may_be_0(seed):
    """One node follows no skewness that changes with the scale; where scales are far from 0 it is enough."""
    groups = Groups.normal(Y, SIGMA, centred=False)
    quadrature = LogMarginal(groups.terms, groups.forest, groups.start)
    sampler = Sampler(quadrature, np.array([0.6, -1.2]), np.diag([0.2, 0.8]), seed)
    assert sampler.run().bend.tails
    assert quadrature.base is None or quadrature.base.rule.n_nodes > 1
    # One node is what would be taken otherwise.
    known = sampler._known
    quadrature.learn_base(
        known, np.exp(0.25 * (known.log_marginal - known.log_marginal.max())), tolerance=0.1, least=1, reach=1.5
    )
    assert quadrature.base.rule.n_nodes == 1


def test_one_base_node_where_that_is_enough(binary):
    groups, truth = binary
    before = groups.terms.n_evaluations
    state = exact_state(groups, *start(truth))
    assert not state.rest.sampled.bend.tails
    assert state.rest.quadrature.base.rule.n_nodes == 1
    # Most draws were evaluated at one node, not at those of the reference.
    assert groups.terms.n_evaluations - before < 0.5 * state.checks.n_nodes * len(state.pool.g)


@pytest.mark.parametrize("most", [1, 100])
def test_a_base_rule_that_differs_from_the_reference_is_replaced(binary, monkeypatch, most):
    """The check on draws held out: where one node, or any number, is wrong, there are more, or the reference itself."""
    groups, truth = binary
    made = []
    learn = LogMarginal.learn_base

    def spoiled(self, points, weights, **how):
        learn(self, points, weights, **how)
        if self.base is not None:
            made.append(self.base.rule.n_nodes)
            if self.base.rule.n_nodes <= most:
                self.base.coefficients[2] += 0.5

    monkeypatch.setattr(LogMarginal, "learn_base", spoiled)
    state = exact_state(groups, *start(truth))
    assert 1 in made
    base = state.rest.quadrature.base
    assert base is None if most > 41 else base is not None and base.rule.n_nodes > 1
    assert state.checks.difference < 0.15
    assert state.checks.is_exact
    em, es = errors(state, truth)
    assert_allclose(em, 0.0, atol=0.1)
    assert_allclose(es, 0.0, atol=0.1)


# --- bits -------------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bits(binary):
    groups, truth = binary
    first, second, other = (exact_state(groups, *start(truth), seed) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first.pool.g, second.pool.g)
    np.testing.assert_array_equal(first.pool.log_ratio, second.pool.log_ratio)
    np.testing.assert_array_equal(first.mean(), second.mean())
    a, b = (s.draw(50, np.random.default_rng(1)) for s in (first, second))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first.pool.g, other.pool.g)
    # A larger pool begins with the smaller one, whoever asks for it.
    larger, again = first.for_draws(3_000), second.for_draws(3_000)
    n = len(first.pool.g)
    assert len(larger.g) > n
    np.testing.assert_array_equal(larger.g[:n], first.pool.g)
    np.testing.assert_array_equal(larger.log_ratio, again.log_ratio)


def test_draws_have_the_moments_of_the_pool(binary):
    groups, truth = binary
    state = exact_state(groups, *start(truth))
    n = 2_000
    theta = state.draw(n, np.random.default_rng(2))
    assert theta.shape == (n, groups.forest.n_dim)
    z = (theta - state.mean()) / state.sd()
    assert_allclose(z.mean(axis=0), 0.0, atol=5.0 / np.sqrt(n))
    assert_allclose(z.std(axis=0), 1.0, atol=0.15)
    index = np.array([1, 5, 0, 40])
    cov = state.cov_block(index)
    assert_allclose(np.sqrt(np.diag(cov)), state.sd()[index], rtol=1e-9)
    correlation = cov / np.outer(state.sd()[index], state.sd()[index])
    assert_allclose(np.corrcoef(theta[:, index].T), correlation, atol=5.0 / np.sqrt(n) + 0.02)
    assert_allclose(state.cov()[np.ix_(index, index)], cov, rtol=1e-9)


def test_lost_draws_count_in_the_verdict(binary):
    groups, truth = binary
    state = exact_state(groups, *start(truth))
    pool = state.pool
    lost = pool.g[:, 1] > truth.mean[1] + 1.5 * truth.sd[1]
    log_marginal = np.where(lost, pool.log_marginal - 1e4, pool.log_marginal)
    spoiled = Pool(pool.g, log_marginal, pool.log_density, pool.scrambling, lost)
    checks = dataclasses.replace(state, pool=spoiled).checks
    assert checks.lost == pytest.approx(state.weights[lost].sum(), rel=0.5)
    assert any("quadrature nodes off their centres" in clause for clause in checks.failures)


# --- what would take too long -----------------------------------------------------------------------------------------


def test_a_pool_without_a_cheap_rule_is_refused_beyond_the_evaluations_there_may_be(monkeypatch):
    """By number: three evaluations of each of 3,000 draws or so."""
    monkeypatch.setattr(LogMarginal, "learn_base", lambda self, *args, **kwargs: None)

    def run(most):
        groups = Groups.normal(Y, SIGMA, centred=False)
        quadrature = LogMarginal(groups.terms, groups.forest, groups.start)
        return Sampler(quadrature, np.array([0.6, -1.2]), np.diag([0.2, 0.8]), 1, lambda n: n <= most).run()

    with pytest.raises(Hopeless, match=r"takes 3 evaluations of log p"):
        run(5_000)
    assert len(run(50_000).pool.g) >= 2_000


# --- groups left out --------------------------------------------------------------------------------------------------


COUNTS = np.array([2, 0, 4, 1, 9, 3, 1, 2])


@pytest.mark.parametrize(("of", "groups", "within"), [("schools", (0, 2), 0.03), ("counts", (0, 4), 0.12)])
def test_densities_of_groups_left_out_are_ratios_of_normalisers(of, groups, within):
    """p(y_i | y_-i) = p(y) / p(y_-i), both by brute force.

    Without the count of 9, the scale of the effects is likely where the posterior hardly is: half a nat is lost without
    the draws of least weight. Four Monte Carlo errors.
    """

    def groups_of(keep):
        if of == "schools":
            return Groups.normal(Y[keep], SIGMA[keep], centred=False)
        return Groups.poisson(COUNTS[keep], centred=False)

    grid = np.linspace(-6.0, 8.0, 57), np.linspace(-12.0, 4.0, 129)
    every = np.arange(len(Y))
    all_groups = groups_of(every)
    left = leave_groups_out(exact_state(all_groups, [0.6, -1.2], np.diag([0.2, 0.8])))
    for i in groups:
        others = groups_of(every != i)
        expected = all_groups.brute_force(*grid).log_normaliser - others.brute_force(*grid).log_normaliser
        assert abs(left.log_density[i] - expected) < within
    assert left.khat.max() < 0.7
