"""Verdicts on what coordinates do not show: the joint density of draws, and what is computed of them."""

import re

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from gaussian import SEEDS
from matrix import fit

from pymc_ngvi import Elbo, LogDensity, NGVIApproximation
from pymc_ngvi.density.functionals import PREDICTORS, Functionals, Group, functionals_of
from pymc_ngvi.families import DiagonalState, FullState
from pymc_ngvi.results.costs import direct_costs
from pymc_ngvi.results.diagnosis.functionals import first_order_of
from pymc_ngvi.results.diagnosis.joint_drift import JointDrift, trimmed_mean
from pymc_ngvi.results.diagnosis.ranks import limit_drift, rank_drift
from pymc_ngvi.results.diagnosis.weighted_shift import weighted_shift_of
from pymc_ngvi.results.distributions.variational import StateDistribution, distribution_of
from pymc_ngvi.results.posterior import MovePlan

pytestmark = pytest.mark.usefixtures("_one_blas_thread")

N_DIM, FAR = 20, 0.06
NO_LOCATION = Elbo(0.0, 0.1)


@dataclass(frozen=True)
class DrawnState:
    """Any distribution that there are draws of: its draws are what a function makes of normals and uniforms."""

    make: Callable[[np.ndarray, np.ndarray], np.ndarray]
    n_dim: int = N_DIM

    n_uniform = 1

    def params(self):
        return {}

    def cov(self):
        return np.eye(self.n_dim)

    def draws(self, base):
        return self.make(base[:, : self.n_dim], base[:, self.n_dim])

    def mean(self):
        return np.zeros(self.n_dim)

    def sd(self):
        return np.ones(self.n_dim)

    def log_density(self, theta):
        return np.full(len(theta), np.nan)


class OfDraws(StateDistribution):
    """As reports read it: no density, no weights."""

    family = "drawn"

    def log_density(self, theta):
        return None

    def kept_log_weights(self):
        return np.zeros(1_000)

    def plan(self, density):
        return MovePlan(density, DiagonalState(np.zeros(self.n_dim), np.ones(self.n_dim)), self.q.draws)

    def costs(self, density, record):
        return direct_costs(density, record, self.n_dim, 0)


@distribution_of.register
def _(q: DrawnState):
    return OfDraws(q)


def exactly(z, u):
    return z


def normal_model(n_dim=N_DIM):
    with pm.Model() as model:
        x = pm.Normal("x", shape=n_dim)
        pm.Deterministic("total", pt.sum(x))
        pm.Deterministic("rate", pt.exp(3.0 * x))
        pm.Deterministic("sum_of_rates", pt.exp(3.0 * x).sum())
    return model


@pytest.fixture(scope="module")
def normal():
    return LogDensity(normal_model())


def diagnosed(density, make, seed, **options):
    state = DrawnState(make, density.n_dim, **options)
    return NGVIApproximation(density, state).diagnose(draws=500, random_seed=seed)


# --- the joint density ---


def minority(z, u):
    """A few draws lie far out in one direction, to which no coordinate contributes much."""
    return z + np.where(u < FAR, 2.5, 0.0)[:, None] * np.sign(np.arange(z.shape[1]) % 2 - 0.5)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_minority_of_terrible_draws_is_a_reason(seed, normal):
    diagnosis = diagnosed(normal, minority, seed)
    (reason,) = [r for r in diagnosis.reasons if "A part of the draws" in r]
    assert "log p rises by more than 17 nats at" in reason
    assert "and falls as far at 0." in reason
    assert not diagnosis.reliable
    assert not [r for r in diagnosis.reasons if "`x[" in r]  # no coordinate says so
    assert not diagnosed(normal, exactly, seed).reasons


@pytest.mark.parametrize("seed", SEEDS)
def test_huge_changes_do_not_hide_behind_their_own_error(seed, normal):
    """Thousands of nats: the mean of the changes is no more than three of its standard errors."""

    def very_far(z, u):
        return z + np.where(u < FAR, 60.0 * (u / FAR) ** 2, 0.0)[:, None]

    diagnosis = diagnosed(normal, very_far, seed)
    assert diagnosis.log_p_drift.value < 3.0 * diagnosis.log_p_drift.se
    assert any("A part of the draws" in r for r in diagnosis.reasons)


def test_most_draws_may_drift_where_no_coordinate_does(normal):
    """All coordinates are wider by a twentieth: the radius is off by .37 of its standard deviations, log p by .5."""
    found = JointDrift(Elbo(1.7, 0.2), 16.0, np.empty(0), 0, 256, N_DIM)
    assert found.is_much(found.location)  # beyond half of sqrt(d / 2), 1.6
    assert not found.is_much(Elbo(1.7, 0.6))
    assert not found.is_much(Elbo(1.5, 0.1))
    wide = diagnosed(normal, lambda z, u: 1.17 * z, 1)
    (reason,) = [r for r in wide.reasons if "joint density is off" in r]
    assert "where its standard deviation is about 3.2" in reason


@pytest.mark.parametrize(
    ("n_rises", "n_falls", "n_draws", "expected", "suspicious"),
    [
        (14, 0, 256, True, False),
        (7, 0, 256, True, False),  # half to the power of 7 is below .01
        (6, 0, 256, False, True),
        (14, 12, 256, False, False),  # log p has heavy tails
        (7, 0, 1_000, False, False),  # certain, but few
        (1, 0, 256, False, False),
    ],
)
def test_a_minority_is_judged_against_falls(n_rises, n_falls, n_draws, expected, suspicious):
    found = JointDrift(NO_LOCATION, 17.0, np.full(n_rises, 50.0), n_falls, n_draws, N_DIM)
    assert found.has_minority is expected
    assert found.is_suspicious is suspicious


def test_two_sets_of_draws_count_together():
    one = JointDrift(Elbo(1.0, 0.3), 17.0, np.full(5, 50.0), 0, 100, N_DIM)
    other = JointDrift(Elbo(2.0, 0.3), 17.0, np.full(9, 60.0), 1, 300, N_DIM)
    both = one.with_others(other)
    assert (len(both.rises), both.n_falls, both.n_draws) == (14, 1, 400)
    assert both.location.value == pytest.approx(1.75)
    assert both.location.se == pytest.approx(0.3 * np.hypot(0.25, 0.75))
    assert both.has_minority
    assert not one.with_others(one.with_others(one)).n_falls


def test_the_trimmed_mean_has_the_error_that_it_states():
    values = np.random.default_rng(1).standard_t(2, size=(2_000, 100))
    found = [trimmed_mean(v) for v in values]
    errors = np.array([e.value for e in found])
    assert abs(errors.mean()) < 4.0 * errors.std() / np.sqrt(2_000)
    assert np.mean([e.se for e in found]) == pytest.approx(errors.std(), rel=0.1)


def heavy(z, u):
    return np.random.default_rng(int(1e9 * u[0])).standard_t(1.5, size=z.shape)


@pytest.mark.parametrize("seed", range(4))
def test_heavy_tails_of_an_exact_posterior_are_no_alarm(seed):
    """log p and everything computed of draws has heavy tails; some of it has no mean."""
    with pm.Model() as model:
        x = pm.StudentT("x", nu=1.5, shape=N_DIM)
        pm.Deterministic("total", pt.exp(x).sum())
        pm.Deterministic("ratio", x[0] / x[1])
    assert not [r for r in diagnosed(LogDensity(model), heavy, seed).reasons if "`x[" not in r]


# --- what is computed of draws ---


def alternating(z, u):
    """Coordinates are right, one by one; neighbours cancel, so that sums are too narrow."""
    w = z.copy()
    w[:, 1::2] = -0.95 * z[:, ::2] + np.sqrt(1.0 - 0.95**2) * z[:, 1::2]
    return w


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sum_that_is_wrong_where_coordinates_are_right_is_a_reason(seed, normal):
    diagnosis = diagnosed(normal, alternating, seed)
    (reason,) = [r for r in diagnosis.reasons if "Deterministics are off" in r]
    assert "standard deviation of `total` (+" in reason
    assert not [r for r in diagnosis.reasons if "`x[" in r]


@pytest.mark.parametrize("seed", range(4))
def test_an_exact_lognormal_total_is_no_alarm(seed, normal):
    """`sum_of_rates` has a standard deviation of 8,000 times its median: moments of 256 draws say nothing."""
    diagnosis = diagnosed(normal, exactly, seed)
    assert diagnosis.reliable, diagnosis.reasons
    assert "`total`, `rate`, `sum_of_rates`" in diagnosis.computed
    assert "Computed" in str(diagnosis)


@pytest.mark.parametrize("seed", SEEDS)
def test_predictors_are_compared_where_there_is_no_deterministic(seed):
    """The mean of a regression is that of its predictors: right in each coefficient, wrong in sums of these."""
    x = np.abs(np.random.default_rng(1).normal(size=(40, 2))) + 1.0
    with pm.Model() as model:
        beta = pm.Normal("beta", shape=2)
        pm.Normal("y", x @ beta, 5.0, observed=np.zeros(40))
    approx = fit(model)
    assert approx.density.by_rows.are_known
    functionals = functionals_of(approx.density, approx._posterior.constrain)
    assert [g.name for g in functionals.groups] == [PREDICTORS]
    theta = np.array([[1.0, 0.0], [0.5, -2.0]])
    np.testing.assert_allclose(functionals.at(theta), np.column_stack([theta @ x.T, (theta @ x.T).sum(axis=1)]))
    apart = approx.q.cov().copy()
    apart[0, 1] = apart[1, 0] = 0.98 * np.sqrt(apart[0, 0] * apart[1, 1])
    wrong = NGVIApproximation(approx.density, FullState(approx.mean_flat, np.linalg.cholesky(apart)))
    reasons = wrong.diagnose(random_seed=seed).reasons
    assert any("Linear predictors are off" in r and "the sum of linear predictors" in r for r in reasons)
    assert not [r for r in approx.diagnose(random_seed=seed).reasons if "predictor" in r]


@pytest.mark.parametrize("likelihood", ["observed", "potential"])
def test_predictors_of_priors_are_no_predictors_that_people_look_at(likelihood):
    """A normal prior with a covariance is a function of its whitened vector, which nobody has heard of."""
    x = np.random.default_rng(1).normal(size=(12, 3)) + 1.0
    with pm.Model() as model:
        effects = pm.MvNormal("effects", np.zeros(3), chol=np.array([[1.0, 0, 0], [0.5, 1.0, 0], [0.3, 0.2, 0.7]]))
        if likelihood == "observed":
            pm.Poisson("y", pt.exp(x @ effects), observed=np.ones(12, dtype=int))
        else:
            pm.Potential("y", (x @ effects - pt.exp(x @ effects)).sum())
    approx = fit(model)
    n_of_prior = approx.density.by_rows.found.linear_map.plain.dense.shape[0] - len(x)
    assert n_of_prior > 0  # else nothing is tested
    [group] = functionals_of(approx.density, approx._posterior.constrain).groups
    assert group.name == PREDICTORS
    assert group.size == len(x)
    theta = np.array([[1.0, 0.0, -1.0], [0.5, -2.0, 0.1]])
    values = functionals_of(approx.density, approx._posterior.constrain).at(theta)
    np.testing.assert_allclose(values, np.column_stack([theta @ x.T, (theta @ x.T).sum(axis=1)]))


def test_a_prior_alone_has_no_predictors_to_look_at():
    with pm.Model() as model:
        effects = pm.MvNormal("effects", np.zeros(2), chol=np.array([[1.0, 0.0], [0.9, 0.5]]))
        pm.Normal("y", effects, 1.0, observed=np.zeros(2))
    assert functionals_of((approx := fit(model)).density, approx._posterior.constrain) is None


def test_large_deterministics_are_looked_at_in_part_and_by_their_sum():
    with pm.Model() as model:
        x = pm.Normal("x", shape=3)
        pm.Deterministic("large", x[0] * np.arange(1_000.0))
        pm.Deterministic("table", x[:, None] * np.ones(4))
        pm.Deterministic("one", x[1] ** 3)
        pm.Deterministic("none", pt.zeros((0,)))
    approx = NGVIApproximation(LogDensity(model), DiagonalState(np.zeros(3), np.ones(3)))
    functionals = functionals_of(approx.density, approx._posterior.constrain)
    large, table, one = functionals.groups
    assert (len(large.index), len(table.index), len(one.index)) == (287, 12, 1)
    assert (large.index[0], large.index[-1]) == (0, 999)
    assert [large.label(1), large.label(287), table.label(5), one.label(0)] == [
        "`large[3]`", "the sum of `large`", "`table[1, 1]`", "`one`",
    ]  # fmt: skip
    theta = np.array([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])
    values = functionals.at(theta)
    assert values.shape == (2, 302)
    assert np.flatnonzero(functionals.is_whole).tolist() == [287, 300, 301]
    assert values[:, [287, 300, 301]].tolist() == [[499_500.0, 24.0, 8.0], [0.0, 4.0, 1.0]]


def test_a_deterministic_that_fails_is_not_for_a_diagnosis_to_tell(monkeypatch, normal):
    approx = NGVIApproximation(normal, DiagonalState(np.zeros(N_DIM), np.ones(N_DIM)))

    def refuse(*_, **__):
        raise ValueError("no such value")

    monkeypatch.setattr(type(approx._posterior.constrain), "__call__", refuse)
    diagnosis = approx.diagnose(draws=500, random_seed=1)
    assert diagnosis.reliable
    assert not diagnosis.computed


def test_constants_and_missing_values_say_nothing():
    before = np.random.default_rng(1).normal(size=(200, 3))
    before[:, 1] = 4.0
    before[7, 2] = np.nan
    mean, sd = rank_drift(before, 3.0 * before[::-1] + np.array([5.0, 0.0, 5.0]))
    assert mean.beyond(0.1).tolist() == [0]
    assert not mean.value[1:].any()
    assert not sd.value[1:].any()


@pytest.mark.parametrize("power", [1.0, 9.0])
def test_ranks_are_blind_to_scales(power):
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(256, 40)), 0.5 + 1.4 * rng.normal(size=(256, 40))
    mean, sd = rank_drift(np.exp(power * x), np.exp(power * y))
    assert len(mean.beyond(0.3, 1.0)) > 20
    assert len(sd.beyond(0.15, 1.0)) > 10
    same = rank_drift(x, y)
    np.testing.assert_allclose(mean.value, same[0].value)


@pytest.mark.parametrize("shape", ["normal", "cauchy"])
def test_rank_drift_of_the_same_law_is_within_its_errors(shape):
    rng = np.random.default_rng(3)
    draw = rng.standard_normal if shape == "normal" else rng.standard_cauchy
    for estimates in rank_drift(draw((256, 2_000)), draw((256, 2_000))):
        assert np.std(estimates.value / estimates.se) == pytest.approx(1.0, abs=0.1)
        assert len(estimates.beyond(0.0)) <= 2


def test_limits_drift_where_a_tail_alone_is_longer():
    rng = np.random.default_rng(4)
    x, y = rng.standard_normal((2, 2_000, 30))
    upper = limit_drift(np.exp(x), np.exp(np.where(y > 0.0, 1.4 * y, y)), 0.945)
    assert upper.value.mean() == pytest.approx(0.4 * 1.598, abs=0.05)
    assert len(upper.beyond(0.3, 1.0)) > 25
    assert not len(limit_drift(np.exp(x), np.exp(np.where(y > 0.0, 1.4 * y, y)), 0.055).beyond(0.1))


@pytest.mark.parametrize("level", [0.055, 0.945])
def test_limits_of_the_same_law_are_within_their_errors(level):
    rng = np.random.default_rng(5)
    found = limit_drift(rng.standard_cauchy((256, 2_000)), rng.standard_cauchy((256, 2_000)), level)
    assert np.std(found.value / found.se) == pytest.approx(1.0, abs=0.15)
    assert len(found.beyond(0.0)) <= 2


# --- weights ---


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_say_which_limits_are_off(seed):
    """Two coordinates are right one by one, but not their sum: its limits are off by half of its standard deviation."""
    with pm.Model() as model:
        x = pm.MvNormal("x", np.zeros(2), np.array([[1.0, 0.7], [0.7, 1.0]]))
        pm.Deterministic("size", pt.exp(2.0 * x.sum()))
    approx = NGVIApproximation(LogDensity(model), DiagonalState(np.zeros(2), np.ones(2)))
    (reason,) = [r for r in approx.diagnose(draws=10_000, random_seed=seed).reasons if "weights" in r]
    # What the density has for a predictor, a difference of the coordinates, is too wide as their sum is too narrow.
    assert re.search(r"the (lower|upper) 89 % limit of (`size`|linear predictor 0) \([+-]0\.", reason)
    assert "importance='psis'" in reason


def test_weighted_limits_are_those_of_the_posterior():
    """p = N(.5, 1.2), q = N(0, 1.3), of which a heavy-tailed function is computed."""
    theta = 1.3 * np.random.default_rng(1).normal(size=(20_000, 1))
    log_ratio = -0.5 * ((theta[:, 0] - 0.5) / 1.2) ** 2 + 0.5 * (theta[:, 0] / 1.3) ** 2
    functionals = Functionals((Group("f", (), np.array([0])),), lambda x: {"f": np.exp(5.0 * x[:, 0])}, 0.0)
    shift = weighted_shift_of(functionals, theta, log_ratio)
    expected = {"mean": 0.5 / 1.3, "sd": 1.2 / 1.3 - 1.0}
    expected |= {name: (0.5 + sign * 1.2 * 1.598) / 1.3 - sign * 1.598 for name, sign in (("lower", -1), ("upper", 1))}
    for name, value in expected.items():
        estimates = getattr(shift, name)
        assert estimates.value[0] == pytest.approx(value, abs=4.0 * estimates.se[0])
        assert 0.002 < estimates.se[0] < 0.05


def test_weights_of_a_right_q_move_nothing():
    rng = np.random.default_rng(8)
    x = rng.normal(size=(150, 3))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 5.0, shape=3)
        odds = pm.Deterministic("odds", pt.exp(x @ beta))
        pm.Bernoulli("y", p=odds / (1.0 + odds), observed=rng.random(150) < 0.5)
    diagnosis = fit(model).diagnose(draws=4_000, random_seed=1)
    assert diagnosis.reliable, diagnosis.reasons
    assert not [r for r in diagnosis.remarks if "weights move" in r]


def test_what_gaussians_miss_moves_means_of_cubes_and_not_of_coordinates():
    """Of p = q exp(h) with h = a (x^3 - 3 x): E_p[f] - E_q[f] is a Cov_q(f, x^3 - 3 x), to first order in a."""
    x = np.random.default_rng(4).standard_normal((64, 16, 1))
    log_ratio = 0.05 * (x[:, :, 0] ** 3 - 3.0 * x[:, :, 0])

    def evaluate(theta):
        return {"cube": theta[:, 0] ** 3, "x": theta[:, 0]}

    groups = tuple(Group(name, (), np.zeros(1, dtype=np.intp)) for name in ("cube", "x"))
    found = first_order_of(Functionals(groups, evaluate, 1e-6), x, log_ratio)
    expected = 0.05 * 6.0 / np.sqrt(15.0)
    assert abs(found.value[0] - expected) < 4.0 * found.se[0]
    assert found.value[0] > 4.0 * found.se[0]
    assert abs(found.value[1]) < 4.0 * found.se[1]
    # Constants of log p, other ones at each value of the hyperparameters, do not matter.
    again = first_order_of(Functionals(groups, evaluate, 1e-6), x, log_ratio + np.arange(64.0)[:, None])
    np.testing.assert_allclose(again.value, found.value, rtol=1e-9, atol=1e-12)
