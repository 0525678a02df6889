"""Blocks evaluated part by part, again only where they are off their centres; draws that rules are learned from."""

import numpy as np

from marginal_terms import Gaussian, Groups, NumpyTerms, exact_state, forest_of
from numpy.testing import assert_allclose

from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.log_marginal import LogMarginal
from pymc_ngvi.marginal.parts import BatchPlan, SomeBlocks, sub_forest
from pymc_ngvi.marginal.regression import covering, gram_of, leverage_of


class ByTree(NumpyTerms):
    """Each tree is a part; the evaluations of each are counted."""

    def __init__(self, gaussian):
        self.gaussian, self.n = gaussian, np.zeros(gaussian.forest.n_blocks, dtype=int)

    def plan(self, forest, n_draws, n_nodes):
        return BatchPlan(4, [self.part(forest, block) for block in range(forest.n_blocks)])

    def part(self, forest, block):
        places = np.flatnonzero(forest.block == block)

        def terms(g, local):
            self.n[block] += local.shape[0] * local.shape[1]
            everywhere = np.zeros((*local.shape[:2], forest.n_local))
            everywhere[:, :, places] = local
            of_globals, of_locals = self.gaussian.terms.terms(g, everywhere)
            return of_globals * (block == 0), of_locals[:, :, places]

        return SomeBlocks(sub_forest(forest, places), places, slice(block, block + 1), terms)


def test_only_blocks_off_their_centres_are_evaluated_again(rng):
    """Trees of one and of two levels, a part each."""
    gaussian = Gaussian(forest_of([-1, 0, 0, -1, -1, 4], 2), rng)
    forest, g = gaussian.forest, rng.normal(size=(9, 2))
    right = gaussian.centres(g)
    mean = right.mean.copy()
    mean[3, forest.block == 2] += 1.2  # one tree, at one draw
    quadrature = LogMarginal(terms := ByTree(gaussian), forest, lambda g: Centres(mean, right.factor))
    points = quadrature.reference(g)
    assert_allclose(points.log_marginal, gaussian.log_marginal(g), atol=1e-3)
    assert_allclose(points.centres.mean, gaussian.conditional(g)[0], atol=0.01)
    assert not points.lost.any()
    assert quadrature.n_corrected >= 1
    n_nodes = quadrature.rule.n_nodes
    assert terms.n[0] == 9 * n_nodes**2
    assert terms.n[1] == 9 * n_nodes  # a tree of one level takes no nodes of a second
    assert terms.n[2] > 9 * n_nodes**2


def test_draws_are_added_until_nearly_all_are_within_reach(rng):
    n = 400
    u = rng.standard_t(5, size=(n, 3))
    features = np.column_stack([np.ones(n), u, u**2])
    near = np.abs(u).max(axis=1) < 0.8
    gram = gram_of(features[near], np.ones(near.sum()))
    before = leverage_of(gram, features) > 1.0
    assert before.mean() > 0.15
    weights = np.full(n, 0.5)
    rows = covering(gram, features, weights, 1.0, 50)
    assert 0 < len(rows) < 0.3 * before.sum()
    after = leverage_of(gram + (weights[rows, None] * features[rows]).T @ features[rows], features) > 1.0
    assert after.mean() <= 0.05
    assert len(covering(gram, features, weights, 1.0, 3)) == 3
    assert not len(covering(gram, features, weights, 1e6, 50))


def test_of_many_blocks_log_m_is_a_polynomial_by_itself():
    """Globals of many groups are all but Gaussian: means and sds are those of brute force, without nodes for most."""
    rng = np.random.default_rng(4)
    size, effects = 6, 0.4 + 1.1 * rng.normal(size=4_000)
    groups = Groups.logit(rng.binomial(size, 1.0 / (1.0 + np.exp(-effects))), size)
    truth = groups.brute_force(np.linspace(0.25, 0.55, 41), np.linspace(-0.11, 0.25, 41))
    state = exact_state(groups, truth.mean[:2] + 0.3 * truth.sd[:2], np.diag((0.8 * truth.sd[:2]) ** 2))
    assert state.rest.quadrature.base.rule.n_nodes == 0
    assert state.checks.is_exact
    assert_allclose((state.mean() - truth.mean) / truth.sd, 0.0, atol=0.08)
    assert_allclose(state.sd() / truth.sd, 1.0, atol=0.07)
