"""Weighted likelihoods are rows, and have the posterior of rows that are repeated or counted."""

import numpy as np
import pymc as pm
import pytest

from pymc_ngvi import LogDensity, fit_ngvi

RNG = np.random.default_rng(1)
N_GROUPS = 12
GROUP = np.repeat(np.arange(N_GROUPS), 5)
X = RNG.normal(size=len(GROUP))
ANSWER = RNG.binomial(1, 1 / (1 + np.exp(-(-0.5 + 0.6 * X + RNG.normal(0, 0.7, N_GROUPS)[GROUP]))))
WEIGHT = RNG.integers(1, 6, size=len(GROUP))


def weighted_sum(eta, answer, weight):
    pm.Potential("answer", (weight * pm.logp(pm.Bernoulli.dist(logit_p=eta), answer)).sum())


def weighted_rows(eta, answer, weight):
    pm.Potential("answer", weight * pm.logp(pm.Bernoulli.dist(logit_p=eta), answer))


def weighted_data(eta, answer, weight):
    def logp(value, eta, weight):
        return weight * pm.logp(pm.Bernoulli.dist(logit_p=eta), value)

    pm.CustomDist("answer", eta, weight, logp=logp, observed=answer)


def counts(eta, answer, weight):
    pm.Binomial("answer", n=weight, logit_p=eta, observed=weight * answer)


def model_of(likelihood, rows=slice(None), weight=WEIGHT):
    with pm.Model() as model:
        level, slope = pm.Normal("level", 0, 2), pm.Normal("slope", 0, 1)
        sd = pm.HalfNormal("sd", 1)
        effect = pm.Normal("effect", 0, sd, shape=N_GROUPS)
        likelihood(level + slope * X[rows] + effect[GROUP[rows]], ANSWER[rows], weight)
    return model


def repeated():
    rows = np.repeat(np.arange(len(GROUP)), WEIGHT)
    return model_of(counts, rows, np.ones(len(rows), dtype=int))


def moments(model):
    approx = fit_ngvi(model, random_seed=1, progressbar=False)
    assert approx.is_exact
    return np.array([[float(of[name]) for name in ("level", "slope", "sd_log__")] for of in _mean_and_sd(approx)])


def _mean_and_sd(approx):
    return approx.mean_data, approx.std_data


@pytest.fixture(name="expected", scope="module")
def _expected():
    return moments(repeated())


@pytest.mark.parametrize("likelihood", [weighted_sum, weighted_rows, weighted_data])
def test_a_weighted_likelihood_is_a_sum_over_rows(likelihood):
    rows = LogDensity(model_of(likelihood)).rows
    assert rows is not None
    assert rows.n_rows == len(GROUP) + N_GROUPS + 3


@pytest.mark.parametrize("likelihood", [weighted_sum, weighted_data, counts])
def test_its_posterior_is_that_of_repeated_rows(likelihood, expected):
    """The same draws go into each: what differs is the rounding of log p, and where the quadrature ends for it."""
    np.testing.assert_allclose(moments(model_of(likelihood)), expected, atol=5e-3)


def test_weights_that_are_left_out_make_a_difference(expected):
    found = moments(model_of(counts, weight=np.ones(len(GROUP), dtype=int)))
    assert abs(found - expected).max() > 0.05


def test_weights_need_not_be_whole():
    """A weight of a half, on rows that are there twice, is one row."""
    twice = np.concatenate([np.arange(len(GROUP))] * 2)
    half = moments(model_of(weighted_sum, twice, np.full(len(twice), 0.5)))
    once = moments(model_of(counts, weight=np.ones(len(GROUP), dtype=int)))
    np.testing.assert_allclose(half, once, atol=5e-3)


def test_an_offset_is_a_coefficient_of_one():
    """The same rates, in other units of exposure, differ in the level by the logarithm of the unit."""
    exposure = RNG.uniform(0.5, 5.0, len(X))
    count = RNG.poisson(exposure * np.exp(0.3 + 0.4 * X))

    def means(unit):
        with pm.Model() as model:
            level, slope = pm.Normal("level", 0, 50), pm.Normal("slope", 0, 1)
            pm.Poisson("count", pm.math.exp(level + slope * X + np.log(exposure / unit)), observed=count)
        approx = fit_ngvi(model, random_seed=1, progressbar=False)
        return float(approx.mean_data["level"]), float(approx.mean_data["slope"])

    (level, slope), (hourly, same) = means(1.0), means(60.0)
    # The prior of the level, of sd 50, moves it by less than .001 sd.
    assert hourly - level == pytest.approx(np.log(60.0), abs=0.005)
    assert same == pytest.approx(slope, abs=0.005)
