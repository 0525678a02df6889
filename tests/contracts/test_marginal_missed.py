"""What proposals miss: thin tails, shelves and ridges far from the bulk; and errors of standard deviations."""

import dataclasses

import numpy as np
import pymc as pm
import pytest

from marginal_terms import Groups
from scipy.special import expit, log_expit, logsumexp

import pymc_ngvi

from pymc_ngvi.core.stored import entry_of
from pymc_ngvi.marginal import log_marginal
from pymc_ngvi.marginal.adaptation import Adaptation
from pymc_ngvi.marginal.fitting import Sampler
from pymc_ngvi.marginal.log_marginal import LogMarginal
from pymc_ngvi.marginal.nodes import ladder
from pymc_ngvi.marginal.proposals import Base, Proposal, effective_size
from pymc_ngvi.marginal.quadrature import integrate
from pymc_ngvi.marginal.ridges import ridges, work_in_dimensions
from pymc_ngvi.marginal.rounds import ProposalRounds, moved
from pymc_ngvi.marginal.sampling import (
    Plain,
    Pool,
    Round,
    Sequences,
    Weighted,
    has_light_tail,
    relative_sd_errors,
)
from pymc_ngvi.marginal.student_mixture import StudentMixture
from pymc_ngvi.marginal.tails import Bend
from pymc_ngvi.marginal.verdict import MOST_ERROR, MOST_MISSED, SAID_ERROR, Checks

GOOD = Checks(0.2, 1_900.0, 2_250, 4, 0)
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


def t_proposal(df=7.0, scale=1.0, p=2):
    return Proposal(StudentMixture(np.ones(1), np.zeros((1, p)), scale * np.eye(p)[None], df), Bend())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_shelf_far_from_the_bulk_is_found(seed):
    sampled = Sampler(shelf, np.zeros(2), np.eye(2), seed).run()
    weights, _ = sampled.pool.weights()
    mean = weights @ sampled.pool.g
    sd = np.sqrt(weights @ (sampled.pool.g - mean) ** 2)
    assert abs(sd[0] / sd_of_x() - 1.0) < 0.1
    assert sampled.missed < MOST_MISSED


@pytest.mark.parametrize(("mass", "is_missed"), [(1.5e-6, False), (1e-3, True)])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_draw_far_out_is_not_believed_alone(mass, is_missed, seed):
    """There are hardly any where it is, so that its weight is large, whatever it has found."""

    def log_density(g):
        x = g[:, 0]
        return np.logaddexp(-0.5 * x**2, np.log(mass) - 0.5 * (x + 25.0) ** 2)

    plain, proposal, rng = Plain(log_density), t_proposal(p=1), np.random.default_rng(seed)
    adaptation = Adaptation(plain, Base(np.zeros(1), np.eye(1)), Bend(), 7.0, rng, is_plain=True)
    g = proposal.draws(2_000, rng)
    g = g[np.abs(g[:, 0]) < 6.0]
    pool = Pool(g, plain(g)[0], proposal.log_density(g), np.zeros(len(g), dtype=int), np.zeros(len(g), dtype=bool))
    far = 3.0 * rng.standard_normal((128, 1))
    far[0] = -25.0
    adaptation._far.append(Round(proposal.far(), far, plain(far)[0]))
    assert adaptation._moved(proposal, pool) > 1.0
    assert (adaptation.missed(proposal, pool) > 1.0) == is_missed
    n = adaptation.n_drawn
    assert n == 4 * 128
    adaptation.missed(proposal, pool)
    assert adaptation.n_drawn == n


def sinusoid(theta):
    """log p of the frequency (on the logit scale), two amplitudes and the log noise of a sinusoid in noise."""
    rng, t = np.random.default_rng(3), np.linspace(0, 10, 25)
    y = np.sin(2 * np.pi * 0.35 * t + 0.5) + rng.normal(0, 0.8, 25)
    u, a, b, log_s = theta.T
    angle = 2 * np.pi * 1.2 * expit(u)[:, None] * t
    apart = y - a[:, None] * np.sin(angle) - b[:, None] * np.cos(angle)
    prior = log_expit(u) + log_expit(-u) - 0.5 * (a**2 + b**2) - 0.5 * np.exp(2 * log_s) + log_s
    return prior - 0.5 * np.exp(-2 * log_s) * np.sum(apart**2, axis=1) - 25 * log_s


@pytest.mark.parametrize("seed", [3, 11])
def test_a_large_pool_with_a_heavy_tail_teaches_the_next_one(seed):
    """Between the modes, amplitudes follow the frequency, and few draws are there: first pools of 2,000 look good."""
    modes = [[-0.865, 0.97, 0.11, -0.02], [-0.12, -0.08, 0.13, 0.23], [1.98, -0.03, 0.67, 0.08]]
    sds = [[0.04, 0.27, 0.43, 0.14], [0.2, 0.3, 0.3, 0.14], [0.1, 0.3, 0.3, 0.14]]
    given = [(np.array(mean), np.diag(np.square(sd))) for mean, sd in zip(modes, sds, strict=True)]
    sampled = Sampler(sinusoid, *given[0], seed, others=given[1:]).run()
    weights, khat = sampled.pool.weights()
    assert has_light_tail(khat, len(weights))
    assert effective_size(sampled.pool.log_ratio) > 2_000
    frequency = 1.2 * expit(sampled.pool.g[:, 0])
    mean = weights @ frequency
    # By a grid of frequency and noise, amplitudes integrated: .394 and .164, each with four errors of 2,000 draws.
    assert abs(mean - 0.394) < 4 * 0.164 / np.sqrt(2_000)
    assert abs(np.sqrt(weights @ (frequency - mean) ** 2) / 0.164 - 1.0) < 4 * 0.04


def test_a_pool_that_misses_a_shelf_is_moved_by_draws_far_out():
    """A proposal about the bulk alone: k-hat says nothing, since no draw is on the shelf."""
    rng = np.random.default_rng(1)
    near = t_proposal(30.0)
    g = near.draws(1_000, rng)
    bulk = lambda g: -0.5 * np.sum(g**2, axis=1)  # noqa: E731
    far = Proposal(ridges(shelf, np.zeros(2), np.ones(2), np.arange(2)), Bend())
    there = far.draws(256, rng)
    rounds = ProposalRounds()
    rounds.add(Round(near, g, shelf(g)))
    before = rounds.pooled()
    rounds.add(Round(far, there, shelf(there)))
    assert moved(before, rounds.pooled()) > 1.0
    same = ProposalRounds()
    same.add(Round(near, g, bulk(g)))
    before = same.pooled()
    same.add(Round(far, there, bulk(there)))
    assert moved(before, same.pooled()) < 1.0


def test_a_ridge_is_followed_where_it_bends():
    found = ridges(shelf, np.zeros(2), np.ones(2), np.array([0]))
    left = found.means[found.means[:, 0] < -5.0]
    assert len(left) >= 2
    np.testing.assert_allclose(left[:, 1], 0.05 * left[:, 0] ** 2, atol=0.1)
    # No farther than log m is high, and with components as thin as the ridge: the rest is its slope.
    assert found.means[:, 0].min() > -20.0
    sd = np.sqrt(np.sum(found.factors**2, axis=2))
    assert sd[found.means[:, 0] < -5.0, 0].min() > 0.5


def test_ridges_of_a_gaussian_end_where_its_mass_does():
    calls = []

    def gaussian(g):
        calls.append(len(g))
        return -0.5 * np.sum(g**2, axis=1)

    found = ridges(gaussian, np.zeros(3), np.ones(3), np.arange(3))
    assert np.abs(found.means).max() < np.sqrt(20.0)
    assert sum(calls) <= 3 * work_in_dimensions(3)
    assert ridges(lambda g: np.where(g[:, 0] == 0.0, 0.0, -np.inf), np.zeros(1), np.ones(1), np.array([0])) is None


def test_rounds_are_those_of_the_mixture():
    rng = np.random.default_rng(1)
    both, rounds = [], ProposalRounds()
    for proposal, n in ((t_proposal(scale=1.5), 100), (t_proposal(scale=3.0), 60)):
        g = proposal.draws(n, rng)
        both.append(Round(proposal, g, shelf(g)))
        rounds.add(both[-1])
    found = rounds.pooled()
    log_q = np.logaddexp(*(np.log(len(r.g) / 160) + r.proposal.log_density(found.g) for r in both))
    np.testing.assert_allclose(found.g, np.concatenate([r.g for r in both]))
    np.testing.assert_allclose(found.log_weights, shelf(found.g) - log_q, rtol=1e-12)
    rounds.forget_first()
    np.testing.assert_allclose(rounds.pooled().log_weights, both[1].log_weights, rtol=1e-12)


def test_only_draws_with_weight_are_evaluated_anew():
    rng = np.random.default_rng(1)
    g = (proposal := t_proposal(scale=5.0)).draws(256, rng)
    rounds, asked = ProposalRounds(), []
    rounds.add(Round(proposal, g, -0.5 * np.sum(g**2, axis=1)))

    def anew(g):
        asked.append(g)
        return -0.5 * np.sum(g**2, axis=1) + 1.0, np.zeros(len(g), dtype=bool)

    rounds.evaluate_anew(anew)
    [rows] = asked
    assert 0 < len(rows) < 256
    assert np.sum(rows**2, axis=1).max() < 2.0 * 25.0
    changed = rounds.pooled().log_marginal + 0.5 * np.sum(g**2, axis=1)
    np.testing.assert_allclose(np.sort(np.unique(changed.round(9))), [0.0, 1.0])


# --- proposals that are far wider ---


@pytest.mark.parametrize("p", [1, 2, 5, 20])
def test_a_proposal_far_wider_is_as_many_nats_below(p):
    far = t_proposal(p=p, df=1e6).far()
    g = far.draws(4_096, np.random.default_rng(1))
    below = 0.5 * np.mean(np.sum(g**2, axis=1)) - 0.5 * p
    assert 2.0 < below < 12.0


def test_the_defence_bounds_weights():
    near = t_proposal()
    proposal = near.defended(0.1)
    g = 4.0 * np.random.default_rng(1).standard_normal((500, 2))
    assert (near.far().log_density(g) - proposal.log_density(g)).max() <= np.log(10.0) + 1e-9
    draws = proposal.draws(4_096, np.random.default_rng(1))
    assert 0.02 < proposal.is_far(draws).mean() < 0.1
    assert not near.is_far(draws).any()
    assert not proposal.is_far(np.zeros((1, 2))).any()


def test_components_of_a_large_mixture_are_widened_as_one():
    rng = np.random.default_rng(1)
    means = rng.normal(size=(9, 2))
    mixture = StudentMixture(np.full(9, 1 / 9), means, np.repeat(0.1 * np.eye(2)[None], 9, axis=0), 7.0)
    far = Proposal(mixture, Bend()).far().mixture
    assert len(far.shares) == 2
    np.testing.assert_allclose(far.means, np.repeat(means.mean(axis=0)[None], 2, axis=0), atol=1e-12)


def test_far_draws_are_evaluated_with_care():
    asked = []

    class Careful(Plain):
        def with_care(self, g, far):
            asked.append(far.sum())
            return self(g)

    sequences = Sequences(Careful(shelf), 1)
    proposal = t_proposal().defended()
    pool = sequences.first(proposal)
    assert asked == [proposal.is_far(pool.g).sum()]
    sequences.again(pool, proposal)
    assert asked[1] == asked[0] > 0


def test_effects_of_far_globals_are_about_corrected_centres():
    """Beyond the reach of a base rule regressions extrapolate, and effects that are drawn about these are far out."""
    rng = np.random.default_rng(2)
    group = np.repeat(np.arange(30), 6)
    y = rng.poisson(np.exp(1.0 + rng.normal(0.0, 0.7, 30)[group]))
    with pm.Model() as model:
        b, s = pm.Normal("b", 0.0, 2.0), pm.HalfNormal("s", 1.0)
        a = pm.Normal("a", 0.0, 1.0, shape=30)
        pm.Poisson("y", pm.math.exp(b + s * a[group]), observed=y)
    quadrature = pymc_ngvi.fit_ngvi(
        model=model, posterior="exact", random_seed=1, progressbar=False
    )._state.rest.quadrature
    assert quadrature.base is not None
    factor, mean = quadrature.whitening.factor, quadrature.whitening.mean
    g = quadrature.reference(mean + np.array([[0.0, 0.0], [12.0, -9.0]]) @ factor.T).g
    assert quadrature.base.is_beyond(quadrature.whitening.features(g)).tolist() == [False, True]
    right, found, predicted = quadrature.reference(g[1:]).centres, quadrature.centres(g), quadrature.predicted(g)
    np.testing.assert_allclose(found.mean[1], right.mean[0], rtol=1e-9)
    np.testing.assert_array_equal(found.mean[0], predicted.mean[0])
    assert np.abs(predicted.mean[1] - right.mean[0]).max() > 1.0


# --- errors of standard deviations ---


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


def test_the_error_of_equal_weights_of_a_gaussian():
    g = np.random.default_rng(1).standard_normal((20_000, 3))
    errors = relative_sd_errors(g, np.full(20_000, 1 / 20_000))
    np.testing.assert_allclose(errors, 1 / np.sqrt(40_000), rtol=0.1)
    assert relative_sd_errors(np.zeros((10, 1)), np.full(10, 0.1)) == 0.0


def test_an_error_is_said_and_then_stands_against_exact():
    at = lambda error: dataclasses.replace(GOOD, sd_error=error)  # noqa: E731
    assert "standard deviation" not in at(SAID_ERROR).sentence
    assert "(effective sample size 1,900; a standard deviation is known to 9 % only)" in at(0.09).sentence
    assert at(MOST_ERROR).is_exact
    [clause] = at(0.31).failures
    assert "known to 31 % only" in clause
    assert not at(np.nan).is_exact


def test_missed_mass_stands_against_exact():
    assert dataclasses.replace(GOOD, missed=MOST_MISSED).is_exact
    [clause] = dataclasses.replace(GOOD, missed=1.5).failures
    assert "missed" in clause
    assert not dataclasses.replace(GOOD, missed=np.nan).is_exact


def test_moved_is_in_what_moments_may():
    rng = np.random.default_rng(1)
    g = rng.standard_normal((40_000, 1))
    flat = np.zeros(len(g))
    same = Weighted(g, flat, flat)
    assert moved(same, same) == 0.0
    assert moved(same, same._replace(g=g + 0.05)) == pytest.approx(1.0, rel=0.02)
    assert moved(same, same._replace(g=1.05 * g)) == pytest.approx(np.log(1.05) / 0.05, rel=0.02)
    few = Weighted(g[:200], flat[:200], flat[:200])
    assert moved(few, few._replace(g=few.g + 0.05)) < 0.5
    assert moved(few, few._replace(log_weights=np.full(200, -np.inf))) == np.inf


# --- lost draws ---


def test_centres_of_lost_draws_are_found(monkeypatch):
    """Far out, regressions extrapolate: centres are found on the way from a draw that has them."""
    rng = np.random.default_rng(7)
    groups = Groups.logit(rng.binomial(40, 1.0 / (1.0 + np.exp(1.5 - rng.normal(size=20)))), 40)
    quadrature = LogMarginal(groups.terms, groups.forest, groups.start)
    Sampler(quadrature, np.array([-1.5, 0.0]), np.diag([0.1, 0.1]), 1).run()
    g = np.array([-1.5, 0.0]) + rng.standard_normal((200, 2)) * [4.0, 3.0]
    monkeypatch.setattr(log_marginal, "_MOST_FOUND", 0)
    before = quadrature.reference(g)
    monkeypatch.undo()
    after = quadrature.reference(g)
    assert before.lost.sum() >= 4
    assert after.lost.sum() < 0.5 * before.lost.sum()
    kept = ~before.lost
    np.testing.assert_array_equal(after.log_marginal[kept], before.log_marginal[kept])
    found = np.flatnonzero(before.lost & ~after.lost)
    points = after[found]
    best = ladder(1)[-1]
    exact = integrate(groups.terms, groups.forest, best, points.g, points.centres, moments=False).log_marginal
    np.testing.assert_allclose(points.log_marginal, exact, atol=0.3)


# --- what is said of it ---


@pytest.fixture(scope="module")
def fitted():
    with pm.Model() as model:
        rate = pm.HalfNormal("rate", 1.0)
        pm.Poisson("y", rate * np.array([1.0, 2.0, 3.0]), observed=[0, 1, 0])
    return pymc_ngvi.fit_ngvi(model=model, posterior="exact", random_seed=1, progressbar=False)


def test_a_summary_names_the_parameters_of_thin_tails(fitted, monkeypatch):
    assert "thin tails" not in str(fitted.summary(draws=200))
    monkeypatch.setitem(vars(fitted._state), "sd_errors", np.array([0.093]))
    text = " ".join(str(fitted.summary(draws=200)).split())
    assert "Few draws are in thin tails: the standard deviation is known of `rate_log__` within 9 % only." in text


def test_a_gaussian_has_no_errors_of_weights(fitted):
    assert fitted.gaussian._distribution.sd_errors() is None
    np.testing.assert_array_equal(fitted._distribution.sd_errors(), fitted._state.sd_errors)


def test_what_files_of_before_lack_has_a_value(fitted):
    """Checks without errors of standard deviations, samples without what was missed, proposals without a defence."""
    for value in (fitted.checks, fitted._state.rest.sampled, fitted._state.rest.sampled.proposal):
        entry = entry_of(type(value))
        kept = {k: v for k, v in entry.fields(value).items() if k not in ("sd_error", "missed", "n_far")}
        made = entry.make(**kept)
        assert {getattr(made, k, 0) for k in ("sd_error", "missed", "n_far")} == {0}
