"""Verdicts on what coordinates do not show: the joint density of draws, and what is computed of them."""

import re

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from gaussian import SEEDS, fit
from scipy import stats

from pymc_ngvi import LogDensity, NGVIApproximation
from pymc_ngvi.density.constrain import PREDICTORS, Functionals, Group, functionals_of
from pymc_ngvi.families import DiagonalState, FullState
from pymc_ngvi.results import diagnosis as making
from pymc_ngvi.results.diagnosis import weighted_shift_of
from pymc_ngvi.results.distributions import Distribution, MovePlan, distribution_of

pytestmark = pytest.mark.usefixtures("_one_blas_thread")

N_DIM, FAR = 20, 0.06


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


class OfDraws(Distribution):
    """As reports read it: weights in the place of a density."""

    def log_density(self, theta):
        return -0.5 * np.sum(theta**2, axis=1)

    def kept_log_weights(self):
        return np.zeros(1_000)

    def plan(self, density):
        return MovePlan(density, DiagonalState(np.zeros(self.n_dim), np.ones(self.n_dim)), self.q.draws)


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
    (reason,) = [r for r in diagnosis.reasons if "Some draws are far" in r]
    assert "raises log p by more than 17 nats at" in reason
    assert "and lowers it as much at 0." in reason
    assert not diagnosis.reliable
    assert not diagnosed(normal, exactly, seed).reasons


@pytest.mark.parametrize("seed", SEEDS)
def test_huge_changes_do_not_hide_behind_their_own_error(seed, normal):
    """Thousands of nats: the mean of the changes is a few of its standard errors."""

    def very_far(z, u):
        return z + np.where(u < FAR, 60.0 * (u / FAR) ** 2, 0.0)[:, None]

    diagnosis = diagnosed(normal, very_far, seed)
    assert diagnosis.log_p_drift.value < 6.0 * diagnosis.log_p_drift.se
    assert any("Some draws are far" in r for r in diagnosis.reasons)


def test_most_draws_may_drift_where_no_coordinate_does():
    """Neighbours are correlated, and in draws they are not."""
    with pm.Model() as model:
        cov = np.kron(np.eye(N_DIM // 2), [[1.0, 0.5], [0.5, 1.0]])
        pm.MvNormal("x", np.zeros(N_DIM), cov=cov)
    (reason,) = diagnosed(LogDensity(model), exactly, 1).reasons
    assert "joint density is off" in reason
    assert "nats (limit 1.8), though no single parameter" in reason


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
    assert [r for r in diagnosis.reasons if "changes the standard deviation of `total` (+" in r]
    assert not [r for r in diagnosis.reasons if "`x[" in r]


@pytest.mark.parametrize("seed", range(4))
def test_an_exact_lognormal_total_is_no_alarm(seed, normal):
    """`sum_of_rates` has a standard deviation of 8,000 times its median: moments of 256 draws say nothing."""
    diagnosis = diagnosed(normal, exactly, seed)
    assert diagnosis.reliable, diagnosis.reasons
    assert "`total`, `rate`, `sum_of_rates`" in diagnosis.computed
    assert "Computed" in str(diagnosis)


def test_what_takes_no_time_is_affordable_in_any():
    predictors_alone = Functionals((), lambda theta: {}, 0.0, None)
    assert predictors_alone.affordable(1e6) > 10_000


@pytest.mark.parametrize("seed", SEEDS)
def test_predictors_are_compared_where_there_is_no_deterministic(seed, monkeypatch):
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
    assert any("standard deviation of the sum of linear" in r for r in reasons)
    monkeypatch.setattr(making, "_MOVED", 40)  # a few draws do not find the right one too narrow either
    right = NGVIApproximation(approx.density, approx.q)
    assert not right.diagnose(draws=1_000, random_seed=seed).reasons


# --- weights ---


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_say_which_limits_are_off(seed, monkeypatch):
    """Moments are nearly right, and limits are not, as q is not skewed."""
    alpha = 4.0
    mean = np.sqrt(2.0 / np.pi) * alpha / np.hypot(1.0, alpha)
    sd = 1.05 * np.sqrt(1.0 - mean**2)  # or else importance weights would be of no use
    with pm.Model() as model:
        pm.SkewNormal("x", mu=0.0, sigma=1.0, alpha=alpha)
    approx = NGVIApproximation(LogDensity(model), DiagonalState(np.array([mean]), np.array([sd])))
    monkeypatch.setattr(making, "_MOVED", 40)  # moved draws tell, too, where they are many
    (reason,) = [r for r in approx.diagnose(draws=10_000, random_seed=seed).reasons if "lower" in r]
    said = r"mportance weighting changes the lower 89 % limit of `x` \(([+-]\d\.\d+)"
    expected = (stats.skewnorm(alpha).ppf(0.055) - mean) / sd - stats.norm.ppf(0.055)
    assert float(re.search(said, reason)[1]) == pytest.approx(expected, abs=0.1)  # four of its errors


def test_weighted_limits_are_those_of_the_posterior():
    """p = N(.5, 1.2), q = N(0, 1.3), of which a heavy-tailed function is computed."""
    theta = 1.3 * np.random.default_rng(1).normal(size=(20_000, 1))
    log_ratio = -0.5 * ((theta[:, 0] - 0.5) / 1.2) ** 2 + 0.5 * (theta[:, 0] / 1.3) ** 2
    functionals = Functionals((Group("f", (), np.array([0])),), lambda x: {"f": np.exp(5.0 * x[:, 0])}, 0.0)
    shift = weighted_shift_of(functionals.at(theta), log_ratio, functionals)
    expected = {"mean": 0.5 / 1.3, "sd": 1.2 / 1.3 - 1.0}
    expected |= {name: (0.5 + sign * 1.2 * 1.598) / 1.3 - sign * 1.598 for name, sign in (("lower", -1), ("upper", 1))}
    for name, value in expected.items():
        estimates = shift.measures[name]
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
