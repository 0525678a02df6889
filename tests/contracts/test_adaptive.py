"""The adaptive rule on targets whose best Gaussian is known: it gets there, and what it reports is true."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pymc as pm
import pytest

from matrix import (
    ADAPTIVE,
    COMBINATIONS,
    NATURAL,
    each_adaptive,
    each_full_adaptive,
    each_natural,
    fit,
    ignore,
    make_rule,
    state_of,
    two_seeds,
)
from targets import Quadratic, Walled, cauchy, flat, kinked, logistic, poisson, random_covariance, restrict

from pymc_ngvi import Status, fit_ngvi
from pymc_ngvi.fitting import loop, record
from pymc_ngvi.fitting.options import Choice
from pymc_ngvi.methods.adaptive import Conditioned

TOL = 0.05  # the default, nats
SMALL_GAP = 0.02  # nats; below it a reported gap need not be right
GAP_FACTOR = 3.0
glms = pytest.mark.parametrize("make", [logistic, poisson])


def for_seeds(*seeds, others):
    """Parametrise over all rows: several seeds for the defaults, a few for the other updates."""
    rows = [(choice, seed) for choice in ADAPTIVE for seed in (seeds if choice in NATURAL else others)]
    ids = [f"{'-'.join(vars(choice).values())}-seed{seed}" for choice, seed in rows]
    return pytest.mark.parametrize(("choice", "seed"), rows, ids=ids)


def correlated():
    """Return a logistic regression with a posterior whose correlations a diagonal family feels."""
    return logistic(seed=3)


def true_gap(target, q, family):
    """Return the ELBO that the best approximation has more than ``q``."""
    return target.elbo(*target.optimum(family)) - target.elbo(q.mean(), q.cov())


def assessed(rule, state):
    """Return the ELBO with its standard error, and the gap, as a fit reports them."""
    assessment = rule.assess(state.rule)
    return record.elbo_of(state.rule.q, assessment), assessment.gap


# --- it gets there ----------------------------------------------------------------------------------------------------


def gaussian_target(family, seed):
    """Return a target that the family holds, on scales four orders of magnitude apart, and its covariance."""
    rng = np.random.default_rng(seed)
    scales = np.geomspace(1e-2, 1e2, 6)
    cov = restrict(family, random_covariance(rng, 6, 100.0) * np.outer(scales, scales))
    return Quadratic(rng.standard_normal(6), np.linalg.inv(cov), log_evidence=-7.0), cov


@each_natural
@two_seeds
@pytest.mark.parametrize("distance", [0.0, 1e4], ids=["near", "far"])
def test_gaussian_target_is_exact_and_quick(choice, seed, distance):
    target, cov = gaussian_target(choice.family, seed)
    rule, state = fit(target, choice, seed=seed, location=np.full(6, distance))
    q, sd = state.rule.q, np.sqrt(np.diag(cov))
    assert state.status is Status.CONVERGED
    assert state.n_iterations <= 4
    np.testing.assert_allclose((q.mean() - target.mean) / sd, 0.0, atol=1e-6)
    np.testing.assert_allclose(q.cov() / np.outer(sd, sd), cov / np.outer(sd, sd), atol=1e-8)
    elbo, gap = assessed(rule, state)
    np.testing.assert_allclose(elbo.value, -7.0, atol=1e-6)
    assert gap < 1e-8


@for_seeds(1, 2, 3, others=(1,))
@pytest.mark.parametrize("make", [logistic, poisson, correlated])
def test_converges_to_within_the_tolerance_and_says_so_truly(choice, seed, make):
    """Gaps may be off by a factor of 3; below .02 nats nobody cares."""
    target = make().fresh()
    rule, state = fit(target, choice, seed=seed)
    assert state.status is Status.CONVERGED
    reported, gap = rule.assess(state.rule).gap, true_gap(target, state.rule.q, choice.family)
    assert -1e-9 < gap < TOL
    assert reported < TOL
    assert max(gap, reported) < SMALL_GAP or 1 / GAP_FACTOR < reported / gap < GAP_FACTOR
    if state.rule.q.exact_metric:  # otherwise small nats can hide large errors along correlations
        mean, cov = target.optimum(choice.family)
        np.testing.assert_allclose((state.rule.q.mean() - mean) / np.sqrt(np.diag(cov)), 0.0, atol=0.2)
        np.testing.assert_allclose(state.rule.q.sd() / np.sqrt(np.diag(cov)), 1.0, atol=0.2)


@each_full_adaptive
@two_seeds
def test_near_gaussian_targets_in_few_dimensions_are_found_more_closely(choice, seed):
    """The tolerance is in proportion to the dimension, up to 100: .005 nats here, and a factor of 3."""
    target = logistic(n=1000).fresh()
    _, state = fit(target, choice, seed=seed)
    assert state.status is Status.CONVERGED
    assert true_gap(target, state.rule.q, choice.family) < 0.015


@each_adaptive
@glms
def test_far_start(choice, make):
    """Ten prior standard deviations away, where the likelihood has saturated or overflows to 1e40.

    Updates other than the natural one move away from a wall of 1e40 by rounding only: they start at two.
    """
    target = make().fresh()
    location = np.full(target.n_dim, 20.0 if choice in NATURAL else 4.0)
    _, state = fit(target, choice, seed=1, location=location)
    assert state.status is Status.CONVERGED
    assert true_gap(target, state.rule.q, choice.family) < TOL


@each_full_adaptive
@two_seeds
@glms
@pytest.mark.parametrize("shift", [0.1, 0.2, 0.3])
def test_gap_of_a_state_that_has_not_converged(choice, seed, make, shift):
    """At states off the optimum by .02 to 1 nat: the estimate on fresh draws within a factor of 3."""
    target, rng = make(), np.random.default_rng(seed)
    mean, cov = target.optimum("full")
    factor = np.linalg.cholesky(cov)
    stretch = np.exp(shift * rng.standard_normal(target.n_dim))
    q = state_of(
        choice.family, mean + shift * factor @ rng.standard_normal(target.n_dim), (factor * stretch**2) @ factor.T
    )
    rule = make_rule(target, choice, seed=seed, n_draws=512)
    gap, reported = true_gap(target, q, "full"), rule.init(q).gap
    assert 0.01 < gap < 1.0
    assert max(gap, reported) < SMALL_GAP or 1 / GAP_FACTOR < reported / gap < GAP_FACTOR


@each_natural
@glms
def test_a_smaller_tolerance_is_honoured(choice, make):
    """A tenth of the default, which the default number of draws could not tell from noise."""
    target = make().fresh()
    _, state = fit(target, choice, seed=1, tol=0.005, max_draws=8192)
    assert state.status is Status.CONVERGED
    assert true_gap(target, state.rule.q, choice.family) < 0.005


@pytest.mark.parametrize(
    ("choice", "make"),
    [*((choice, poisson) for choice in NATURAL if choice.family in ("full", "sparse")), (COMBINATIONS[0], logistic)],
    ids=lambda value: getattr(value, "__name__", None) or "-".join(vars(value).values()),
)
def test_reported_elbo_is_right_within_its_standard_error(choice, make):
    """Over 40 seeds, the standardised errors are about 1 in size, with a mean near 0.

    Not exactly: their standard deviation is estimated from few pairs, and a set that looks good ends the fit.
    """
    scores = []
    for seed in range(40):
        target = make().fresh()
        rule, state = fit(target, choice, seed=seed)
        q = state.rule.q
        elbo, _ = assessed(rule, state)
        scores.append((elbo.value - target.elbo(q.mean(), q.cov())) / elbo.se)
    assert abs(np.mean(scores)) < 1.0
    assert 0.1 < np.sqrt(np.mean(np.square(scores))) < 1.6


# --- what it does on the way ------------------------------------------------------------------------------------------


@each_adaptive
@two_seeds
def test_the_elbo_does_not_fall_on_a_fixed_set(choice, seed):
    """But for the slack that the sampling error of the set allows; the first steps gain many nats."""
    target, states = logistic().fresh(), []
    fit(target, choice, seed=seed, observe=states.append, location=np.full(target.n_dim, 3.0))
    same_set = [(a.rule, b.rule) for a, b in pairwise(states) if a.rule.level == b.rule.level]
    assert same_set
    for old, new in same_set:
        assert new.elbo >= old.elbo - 0.5 * TOL
    assert -states[-1].history.losses[-1] > -states[0].history.losses[0] + 1.0


@each_adaptive
def test_nothing_is_certified_on_draws_that_led_to_the_state(choice):
    """A state of which everything says that it is perfect, but on used draws, is not converged."""
    rng = np.random.default_rng(1)
    cov = restrict(choice.family, random_covariance(rng, 3))
    target = Quadratic(np.zeros(3), np.linalg.inv(cov))
    rule = make_rule(target, choice, seed=1, n_draws=64)
    state = rule.init(state_of(choice.family, target.mean, cov))
    assert rule.terminate(state) is Status.CONVERGED
    assert rule.terminate(replace(state, fresh=False)) is None


@each_natural
def test_a_small_first_set_certifies_nothing_of_a_noisy_target(choice):
    """At the optimum itself: 8 draws can't show it, 1,024 can."""
    target = logistic()
    q = state_of(choice.family, *target.optimum(choice.family))
    few, many = make_rule(target, choice, seed=1), make_rule(target, choice, seed=1, n_draws=1024)
    assert few.terminate(few.init(q)) is None
    assert many.terminate(many.init(q)) is Status.CONVERGED


@each_natural
@pytest.mark.parametrize("error", ["mean", "sd"])
def test_one_coordinate_far_off_is_not_hidden_by_a_large_tolerance(choice, error):
    """Whitened errors of .3 in the mean, and of -.37 in the curvature, of one of 40 coordinates: .05 nats."""
    target = Quadratic(np.zeros(40), np.eye(40))
    mean, cov = np.zeros(40), np.eye(40)
    if error == "mean":
        mean[7] = 0.3
    else:
        cov[7, 7] = 0.63
    rule = make_rule(target, choice, seed=1, n_draws=64, tol=10.0)
    assert rule.terminate(rule.init(state_of(choice.family, np.zeros(40), np.eye(40)))) is Status.CONVERGED
    assert rule.terminate(rule.init(state_of(choice.family, mean, cov))) is None


@pytest.mark.parametrize("seed", [1, 2])
def test_a_scale_that_collapsed_is_found(seed):
    """Left to natural steps, sd ends below 1, twenty nats lower, and the fit calls itself converged."""
    rng, group = np.random.default_rng(3), np.repeat(np.arange(15), 6)
    y = 500.0 + 60.0 * rng.standard_normal(15)[group] + 80.0 * rng.standard_normal(90)
    with pm.Model() as model:
        b = pm.Normal("b", 0.0, pm.HalfNormal("sd", 300.0), shape=15)
        pm.Normal("y", pm.Normal("mu", 0.0, 1000.0) + b[group], pm.HalfNormal("sigma", 300.0), observed=y)
    steps = {"family": "full", "update": "natural", "estimator": "price", "step": "adaptive", "posterior": "gaussian"}
    approx = fit_ngvi(model=model, random_seed=seed, progressbar=False, backend="quick", **steps)
    assert approx.record.status is Status.CONVERGED
    assert approx.record.elbo.value > -547.0  # -546.45, with errors of 0.02
    assert np.exp(approx.mean_data["sd_log__"]) > 20.0


def test_given_coordinates_have_a_gaussian_of_their_own_and_the_others_the_density_given_them():
    """Where a scale may be lost, steps of the others are taken at places of it."""
    target, index, point, sd = logistic(), np.array([3, 1]), np.array([0.4, -1.0]), np.array([0.5, 2.0])
    conditioned = Conditioned(target, index, point, sd)
    theta = np.random.default_rng(1).standard_normal((3, target.n_dim))
    given = theta.copy()
    given[:, index] = point
    standard = (theta[:, index] - point) / sd
    logp, expected = target.logp_grad(given)
    expected[:, index] = -standard / sd
    found = conditioned.logp_grad(theta)
    np.testing.assert_allclose(found[0], logp - 0.5 * (standard**2).sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found[1], expected, rtol=1e-12)
    hessian, unit = target.mean_hessian(given).products(np.eye(target.n_dim)), np.eye(target.n_dim)
    hessian[index], hessian[:, index] = 0.0, 0.0
    hessian[index, index] = -1.0 / sd**2
    mean = conditioned.mean_hessian(theta)
    np.testing.assert_allclose(mean.products(unit), hessian, atol=1e-12)
    np.testing.assert_allclose(mean.diagonal(), np.diag(hessian), atol=1e-12)
    q = state_of("full", theta[0], unit)
    np.testing.assert_allclose(mean.whitened(q), -hessian, atol=1e-12)


# --- reproducible, resumable ------------------------------------------------------------------------------------------


# --- trouble ----------------------------------------------------------------------------------------------------------

TROUBLE = {
    "heavy tails": cauchy,
    "kinked": kinked,
    "no curvature": flat,
    "wall": lambda: Walled(logistic(), 1.0),
    "wall through the mode": lambda: Walled(logistic(), 0.0),
}


@pytest.mark.parametrize(
    ("choice", "seed"),
    [(c, 1) for c in NATURAL] + [(c, 2) for c in ADAPTIVE if c.family == "full"],
    ids=lambda value: "-".join(vars(value).values()) if isinstance(value, Choice) else f"seed{value}",
)
@pytest.mark.parametrize("make", TROUBLE.values(), ids=TROUBLE)
def test_a_nasty_target_ends_with_a_status_and_a_finite_state(choice, seed, make):
    """No error, no warning (they are errors here), nothing that is not finite."""
    rule, state = fit(make(), choice, seed=seed)
    assert state.status.ended_by_itself or state.status is Status.MAX_ITERATIONS
    assert np.isfinite(state.rule.q.mean()).all()
    assert np.isfinite(state.rule.q.sd()).all()
    assert (state.rule.q.sd() > 0).all()
    assert np.isfinite(state.history.losses).all()
    assert (state.history.gaps >= 0).all()
    elbo, gap = assessed(rule, state)
    assert np.isfinite(elbo.value)
    assert gap >= 0


@each_natural
def test_a_density_without_curvature_never_counts_as_converged(choice):
    for make in (kinked, flat):
        _, state = fit(make(), choice, seed=1)
        assert state.status is not Status.CONVERGED


@each_adaptive
@two_seeds
def test_draws_that_are_not_finite_are_dropped_and_counted(choice, seed):
    """A wall two standard deviations off: the fit stays within it, mostly."""
    mean, cov = logistic().optimum(choice.family)
    inside = logistic()
    target = Walled(inside, mean[0] + 2.0 * np.sqrt(cov[0, 0]))
    _, state = fit(target, choice, seed=seed)
    assert state.rule.n_dropped > 0
    # Two per cent of the draws lie beyond the wall: the answer stays near that without a wall.
    error = (state.rule.q.mean() - mean) / np.sqrt(np.diag(cov))
    assert (np.abs(error) < 0.6).all()
    assert 0.6 < state.rule.q.sd()[0] / np.sqrt(cov[0, 0]) < 1.1


@each_natural
def test_too_few_draws_are_said_to_be_too_few_and_more_help(choice):
    target = logistic().fresh()
    _, state = fit(target, choice, seed=1, max_draws=16)
    assert state.status is Status.NOISE_LIMITED
    assert state.n_iterations < 200
    more = make_rule(target, choice, seed=1, max_draws=1024)
    again = loop.run(more, loop.reopen(more, state), 200, ignore)
    assert again.status is Status.CONVERGED
    assert again.n_iterations > state.n_iterations
    assert true_gap(target, again.rule.q, choice.family) < TOL


@each_natural
def test_a_kink_at_the_mode_is_named(choice):
    """The curvature is 0 at every draw: no estimate of it can lead to the right width."""
    rule, state = fit(kinked(), choice, seed=1)
    assert state.status is Status.NOT_SMOOTH
    # 1/2 |g|^2 + d/4 with d = 3: the gap is there and is reported.
    np.testing.assert_allclose(rule.assess(state.rule).gap, 0.75, atol=0.05)


class Vanishing(Quadratic):
    """Not finite anywhere from one evaluation on."""

    def __init__(self, inside, at):
        self.__dict__.update(inside.fresh().__dict__)
        self.inside, self.calls, self.at = inside, 0, at

    def logp_grad(self, theta):
        self.calls += 1
        logp, grad = self.inside.logp_grad(theta)
        return (logp, grad) if self.calls < self.at else (np.full_like(logp, np.nan), grad)

    def mean_hessian(self, theta):
        return self.inside.mean_hessian(theta)


@each_natural
@pytest.mark.parametrize("call", range(8, 22, 2), ids="evaluation{}".format)
def test_a_density_that_vanishes_ends_the_fit_and_keeps_the_state_with_its_draws(choice, call):
    """Whichever step it happens in: what is assessed are draws of the state that is kept."""
    rule, state = fit(Vanishing(logistic().fresh(), call), choice, seed=1)
    assert state.status.ended_by_itself
    theta = rule.assess(state.rule)[0]
    np.testing.assert_allclose(theta, state.rule.q.draws(state.rule.base.z), rtol=1e-12)


class Blind(Walled):
    """Another target, finite only at sets of draws about 0: wherever a step leads, nothing is."""

    def _outside(self, theta):
        return np.full(len(theta), np.abs(theta.mean(axis=0)).max() > 1e-9)


STUDENT_T = next(choice for choice in COMBINATIONS if choice.family == "student_t")


@pytest.mark.parametrize("choice", [*NATURAL, STUDENT_T], ids=lambda c: c.family)
def test_a_fit_whose_steps_all_lead_outside_says_so(choice):
    inside = Quadratic(np.full(3, 1e3), np.eye(3))
    _, state = fit(Blind(inside, None), choice, seed=1)
    assert state.status is Status.NO_FINITE_TRIAL
    np.testing.assert_array_equal(state.rule.q.mean(), np.zeros(3))
