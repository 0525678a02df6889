"""Proposals for the globals, and the weighted draws that they give."""

import numpy as np
import pytest

from numpy.testing import assert_allclose
from scipy import integrate, stats
from scipy.special import ndtr

from pymc_ngvi.marginal.proposals import (
    Base,
    Proposal,
    StudentMixture,
    best_proposal,
    effective_size,
    first_proposal,
    tempered,
)
from pymc_ngvi.marginal.rounds import ProposalRounds
from pymc_ngvi.marginal.sampling import Pool, Round, Sequences
from pymc_ngvi.marginal.tails import Bend, Tail

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


def test_a_mixture_in_one_dimension_integrates_to_1():
    two = StudentMixture(np.array([0.2, 0.8]), np.array([[-1.0], [2.0]]), np.array([[[0.5]], [[1.5]]]), 5.0)
    total = integrate.quad(lambda x: np.exp(two.log_density(np.array([[x]]))[0]), -np.inf, np.inf)[0]
    assert_allclose(total, 1.0, atol=1e-6)


def test_a_proposal_with_a_tail_integrates_to_1():
    """With its component about the fold, and the Jacobian of the bend."""
    bend = Bend((Tail(0, -1, 0.8, -0.5),))
    proposal = first_proposal(Base(np.array([1.0]), np.array([[0.9]])), bend, 7.0, 1.3)
    assert len(proposal.mixture.shares) == 2
    assert_allclose(proposal.mixture.shares.sum(), 1.0)
    for q in (proposal, proposal.widened()):
        total = sum(
            integrate.quad(lambda g, q=q: np.exp(q.log_density(np.array([[g]]))[0]), low, low + 20.0, limit=200)[0]
            for low in np.arange(-200.0, 200.0, 20.0)
        )
        assert_allclose(total, 1.0, atol=1e-6)


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


def test_draws_of_any_number():
    for n in (1, 2, 3, 250):
        x = mixture().draws(n, np.random.default_rng(2))
        assert x.shape == (n, 3)
        assert np.isfinite(x).all()


def test_tails_of_draws_are_those_of_a_t():
    """Squared distances over p are F distributed."""
    one = StudentMixture(np.ones(1), MEAN[None], FACTOR[None], 7.0)
    x = np.concatenate([one.draws(1_024, np.random.default_rng(s)) for s in range(8)])
    square = np.sum(np.linalg.solve(FACTOR, (x - MEAN).T) ** 2, axis=0) / 3.0
    for p in (0.5, 0.9, 0.99):
        part = (square > stats.f.isf(1.0 - p, 3, 7)).mean()
        assert abs(part - (1.0 - p)) < 4.0 * np.sqrt(p * (1.0 - p) / len(x))


def test_widened():
    """A fifth is twice as wide."""
    old = Proposal(StudentMixture(np.ones(1), MEAN[None], FACTOR[None], 7.0), Bend())
    new = old.widened()
    assert_allclose(new.mixture.shares, [0.8, 0.2])
    assert_allclose(new.mixture.factors, [FACTOR, 2.0 * FACTOR])
    x = MEAN + np.random.default_rng(3).normal(size=(4, 3))
    wide = stats.multivariate_t(MEAN, 4.0 * COV, 7.0).pdf(x)
    assert_allclose(np.exp(new.log_density(x)), 0.8 * np.exp(old.log_density(x)) + 0.2 * wide, rtol=1e-10)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_effective_size():
    assert effective_size(np.zeros(7) - 1e4) == pytest.approx(7.0)
    assert effective_size(np.array([0.0, -np.inf, 0.0])) == pytest.approx(2.0)
    assert effective_size(np.log([3.0, 1.0])) == pytest.approx(16.0 / 10.0)
    assert effective_size(np.array([-np.inf, -np.inf])) == 0.0
    assert effective_size(np.empty(0)) == 0.0


def test_tempered():
    log_weights = 5.0 * np.random.default_rng(4).normal(size=400)
    assert effective_size(log_weights) < 20.0
    found = tempered(log_weights, 60.0)
    assert effective_size(found) >= 60.0
    assert effective_size(found / 0.8) < 60.0  # no more than it takes
    assert_allclose(tempered(log_weights, 1.0), log_weights)


def skewed_log_density(x):
    """A banana: x0 ~ N, x1 given x0 about a parabola; both with a skewed part."""
    first = stats.skewnorm.logpdf(x[:, 0], 4.0)
    return first + stats.norm.logpdf(x[:, 1], 0.6 * (x[:, 0] - 0.8) ** 2, 0.5)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_best_proposal_of_a_skewed_target_is_better_than_the_base(seed):
    """Fitted to weighted draws of the base; judged on new ones. One t with the right moments has .65."""
    rng = np.random.default_rng(seed)
    base = Base(np.array([0.78, 0.22]), np.diag([0.62, 0.5]))
    proposal = first_proposal(base, Bend(), 7.0, 1.3)
    for _ in range(2):
        x = proposal.draws(1_024, rng)
        log_m = skewed_log_density(x)
        proposal = best_proposal(x, log_m - proposal.log_density(x), log_m, base, Bend(), 7.0)

    def efficiency(q):
        x = q.draws(4_096, np.random.default_rng([seed, 1]))
        return effective_size(skewed_log_density(x) - q.log_density(x)) / len(x)

    assert efficiency(first_proposal(base, Bend(), 7.0, 1.3)) < 0.7
    assert efficiency(proposal) > 0.8


@pytest.mark.parametrize("p", [2, 12])
def test_the_best_proposal_of_a_gaussian_far_from_the_base(p):
    """Mean and scales of the base are off; three rounds later most of the efficiency that a t can have is there."""
    rng = np.random.default_rng(5)
    mean, sd = 0.7 * rng.normal(size=p), np.exp(0.4 * rng.normal(size=p))

    def log_p(x):
        return stats.norm.logpdf(x, mean, sd).sum(axis=1)

    base = Base(np.zeros(p), np.eye(p))
    q = first_proposal(base, Bend(), max(7.0, p), 1.3)
    for _ in range(3):
        x = q.draws(1_024, rng)
        log_weights = log_p(x) - q.log_density(x)
        before = effective_size(log_weights) / len(x)
        q = best_proposal(x, tempered(log_weights, 2.5 * p), log_p(x), base, Bend(), max(7.0, p))
    x = q.draws(2_048, rng)
    after = effective_size(log_p(x) - q.log_density(x)) / len(x)
    ideal = StudentMixture(np.ones(1), mean[None], np.diag(sd)[None] * np.sqrt(5 / 7), max(7.0, p))
    x = ideal.draws(2_048, rng)
    best = effective_size(log_p(x) - ideal.log_density(x)) / len(x)
    assert after > 0.75 * best
    assert after >= before - 0.05


def test_few_draws_and_draws_without_density_give_a_proposal():
    rng = np.random.default_rng(6)
    base = Base(np.zeros(2), np.eye(2))
    q = first_proposal(base, Bend(), 7.0, 1.3)
    x = q.draws(30, rng)
    log_m = np.where(x[:, 0] > 0.0, -0.5 * (x**2).sum(axis=1), -np.inf)
    found = best_proposal(x, log_m - q.log_density(x), log_m, base, Bend(), 7.0)
    assert np.isfinite(found.log_density(x)).all()
    assert np.isfinite(found.draws(8, rng)).all()


def test_rounds_are_pooled_as_draws_of_the_mixture():
    """Estimates have the right mean, whatever the rounds; a round far off does no harm."""
    rng = np.random.default_rng(7)

    def log_m(x):
        return stats.norm.logpdf(x[:, 0], 0.3, 1.0)

    rounds = []
    for centre, n in [(0.0, 512), (8.0, 256)]:
        q = first_proposal(Base(np.array([centre]), np.eye(1)), Bend(), 7.0, 1.0)
        x = q.draws(n, rng)
        rounds.append(Round(q, x, log_m(x)))
    together = ProposalRounds()
    for one in rounds:
        together.add(one)
    g, values, log_weights = together.pooled()
    assert_allclose(values, log_m(g))
    w = np.exp(log_weights)
    assert w.mean() == pytest.approx(1.0, abs=0.02)
    assert (w @ g[:, 0]) / w.sum() == pytest.approx(0.3, abs=0.02)
    # Weights are bounded by those of the nearer proposal.
    assert w.max() < 1.5 * np.exp(rounds[0].log_weights).max() + 1e-9
    assert rounds[0].efficiency > 0.9 > 0.1 > rounds[1].efficiency


# --- pools ------------------------------------------------------------------------------------------------------------


def pool_of(seed, shift=0.3):
    """Return a pool of 8 sequences for a Gaussian, its proposal, and what makes more."""
    q = first_proposal(Base(np.zeros(2), np.eye(2)), Bend(), 7.0, 1.2)

    def function(g):
        return 1.7 + stats.norm.logpdf(g, shift).sum(axis=1), np.zeros(len(g), dtype=bool)

    sequences = Sequences(function, seed)
    return sequences.first(q), q, sequences


def test_a_pool_has_weights_and_a_normaliser():
    pool, q, sequences = pool_of(1)
    assert pool.g.shape == (2_000, 2)
    np.testing.assert_array_equal(pool.scrambling, np.repeat(np.arange(8), 250))
    weights, khat = pool.weights()
    assert_allclose(weights.sum(), 1.0)
    assert khat < 0.5
    assert_allclose(weights @ pool.g, 0.3, atol=4.0 / np.sqrt(2_000))
    assert_allclose(weights @ ndtr(pool.g - 0.3), 0.5, atol=0.02)
    value, se = pool.log_normaliser()
    assert abs(value - 1.7) < 4.0 * se < 0.1
    # A larger pool begins with the smaller one, in however many steps it was made.
    at_once = sequences.enlarged(pool, q, 3_000)
    in_steps = sequences.enlarged(sequences.enlarged(pool, q, 2_200), q, 3_000)
    for larger in (at_once, in_steps):
        assert effective_size(larger.log_ratio) >= 3_000
        n = min(len(at_once.g), len(in_steps.g))
        np.testing.assert_array_equal(larger.g[:2_000], pool.g)
        np.testing.assert_array_equal(larger.g[:n], at_once.g[:n])
        np.testing.assert_array_equal(larger.scrambling, np.arange(len(larger.g)) // 250)
    assert len(sequences.enlarged(pool, q, 1e9).g) == 16_000


def test_the_normaliser_of_one_sequence_has_no_error():
    pool, _, _ = pool_of(1)
    fields = (pool.g, pool.log_marginal, pool.log_density, pool.scrambling, pool.lost)
    assert Pool(*(field[:250] for field in fields)).log_normaliser()[1] == np.inf


def test_draws_without_density_have_no_weight():
    pool, _, _ = pool_of(2)
    log_marginal = pool.log_marginal.copy()
    log_marginal[::3] = -np.inf
    weights, _ = Pool(pool.g, log_marginal, pool.log_density, pool.scrambling, pool.lost).weights()
    assert (weights[::3] == 0.0).all()
    assert_allclose(weights.sum(), 1.0)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_the_standard_error_of_the_normaliser_is_honest(shift):
    """Over 60 seeds: about as large as the spread."""
    values, errors = zip(*[pool_of(seed, shift=shift)[0].log_normaliser() for seed in range(60)], strict=True)
    z = (np.array(values) - 1.7) / np.array(errors)
    # t with 7 degrees of freedom has an sd of 1.18; its sd over 60 seeds has an error of about .15.
    assert 0.7 < np.std(z) < 1.8
    assert abs(np.mean(z)) < 0.6
    assert (np.abs(z) < stats.t.ppf(0.975, 7)).mean() > 0.85
