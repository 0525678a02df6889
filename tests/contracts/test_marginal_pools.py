"""Pools of several proposals, and points that are evaluated once."""

import numpy as np

from scipy import stats

from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.nodes import PathRule
from pymc_ngvi.marginal.proposals import Proposal
from pymc_ngvi.marginal.referred import Referred, Remembered
from pymc_ngvi.marginal.sampling import Plain, Sequences
from pymc_ngvi.marginal.student_mixture import StudentMixture
from pymc_ngvi.marginal.tails import Bend


def proposal(mean, df, n_far=0):
    means = np.array([[mean, 0.0], [0.0, 0.0]])
    return Proposal(
        StudentMixture(np.array([0.7, 0.3]), means, np.array([np.eye(2), 3.0 * np.eye(2)]), df), Bend(), n_far
    )


def test_a_proposal_beside_another_is_their_mixture():
    first, second = proposal(1.0, 7.0, 1), proposal(-2.0, 11.0, 1)
    g = np.random.default_rng(1).normal(0.0, 3.0, (50, 2))
    both = first.beside(second, 0.25)
    expected = np.logaddexp(np.log(0.75) + first.log_density(g), np.log(0.25) + second.log_density(g))
    np.testing.assert_allclose(both.log_density(g), expected, rtol=1e-12)
    near = 0.75 * 0.7 * stats.multivariate_t([1.0, 0.0], np.eye(2), 7.0).pdf(g)
    near += 0.25 * 0.7 * stats.multivariate_t([-2.0, 0.0], np.eye(2), 11.0).pdf(g)
    np.testing.assert_array_equal(both.is_far(g), near < 0.5 * np.exp(expected))


def test_a_pool_of_two_proposals_keeps_all_draws_and_the_normaliser():
    """The first proposal misses a half of the mass: by itself, its mean weight is half of what it is to be."""

    def log_p(g):
        return (
            3.0
            + stats.norm.logpdf(g[:, 1])
            + np.logaddexp(*(stats.norm.logpdf(g[:, 0], m, 0.5) for m in (-4, 4)))
            - np.log(2)
        )

    def one(mean):
        return Proposal(
            StudentMixture(np.ones(1), np.array([[mean, 0.0]]), np.array([np.diag([0.6, 1.1])]), 50.0), Bend()
        )

    sequences = Sequences(Plain(log_p), 3)
    pool = sequences.first(one(4.0))
    before = pool.log_normaliser()[0]
    assert abs(before - 3.0) > 0.4
    together, both, new = sequences.beside(pool, one(4.0), one(-4.0))
    assert len(together.g) == 2 * len(pool.g) == 2 * len(new.g)
    np.testing.assert_allclose(together.log_density, both.log_density(together.g))
    value, error = together.log_normaliser()
    assert abs(value - 3.0) < 4.0 * error < 0.02
    # A third one: two parts of three are of those before.
    third, _, _ = sequences.beside(together, both, one(0.0))
    assert len(third.g) == 3 * len(pool.g)
    value, error = third.log_normaliser()
    assert abs(value - 3.0) < 4.0 * error < 0.02


def test_of_an_enlarged_pool_nothing_is_kept():
    sequences = Sequences(Plain(lambda g: stats.norm.logpdf(g).sum(axis=1)), 3)
    first, other = proposal(0.0, 7.0), proposal(0.5, 7.0)
    pool = sequences.enlarged(sequences.first(first), first, 4_000.0)
    new, of_new, latest = sequences.beside(pool, first, other)
    assert new is latest
    assert of_new is other


def test_points_are_evaluated_once_by_a_rule():
    asked = []

    def evaluate(g):
        asked.append(g[:, 0].tolist())
        n = len(g)
        return Referred(g, 10.0 * g[:, 0], Centres(g.copy(), np.ones((n, 1, 1))), np.zeros((n, 1)), g[:, 0] > 8.0)

    remembered, rule = Remembered(), PathRule(3, 1)
    at = lambda *values, rule=rule: remembered.at(np.array(values, dtype=float)[:, None], rule, evaluate)  # noqa: E731
    at(1, 2, 9)
    found = at(4, 2, 9, 3, 1)
    assert asked == [[1, 2, 9], [4, 9, 3]]  # a lost one may be found later
    np.testing.assert_array_equal(found.g[:, 0], [4, 2, 9, 3, 1])
    np.testing.assert_array_equal(found.log_marginal, [40, 20, 90, 30, 10])
    np.testing.assert_array_equal(found.centres.mean[:, 0], [4, 2, 9, 3, 1])
    at(2, rule=PathRule(5, 1))
    assert asked[-1] == [2]
