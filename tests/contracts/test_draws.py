"""Importance weights: smoothing, corrected posteriors, draws as users get them, refusals."""

import numpy as np
import pymc as pm
import pytest

from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

import pymc_ngvi

from pymc_ngvi import LogDensity, NGVIApproximation
from pymc_ngvi.core.importance import Weights, pareto_khat, weigh
from pymc_ngvi.families import DiagonalState, MixtureState
from pymc_ngvi.results.reweighted import check_help

#: Errors of estimates that are allowed: four standard errors.
N_SE = 4.0


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constant", [0.0, 800.0])
def test_weights_are_the_ratios_but_in_the_tail(rng, constant):
    x = rng.normal(size=4_000)
    log_p, log_q = stats.norm(0.0, 1.2).logpdf(x), stats.norm.logpdf(x) + constant
    log_weights, found = weigh(log_p, log_q)
    assert np.exp(log_weights).sum() == pytest.approx(1.0, rel=1e-12)
    assert found.khat == pareto_khat(log_p, log_q)
    ratio = log_p - log_q + constant
    body = np.argsort(ratio)[: 4_000 - int(np.ceil(3 * 4_000**0.5))]  # the rest is smoothed
    difference = log_weights[body] - ratio[body]
    assert_allclose(difference, difference[0], rtol=0, atol=1e-10)
    # Means of ratios are 1: the tail is smoothed to about what it was.
    assert difference[0] == pytest.approx(-np.log(4_000 * np.exp(ratio).mean()), abs=0.01)
    assert found.effective == pytest.approx(1.0 / np.exp(2.0 * log_weights).sum())


def test_draws_outside_the_support_have_no_weight(rng):
    x = rng.normal(size=1_000)
    log_p = np.where(x > 0.5, stats.norm.logpdf(x), -np.inf)
    log_p[x < -2.0] = np.nan
    weights = np.exp(weigh(log_p, stats.norm.logpdf(x))[0])
    assert_array_equal(weights > 0.0, x > 0.5)
    assert_allclose(weights[x > 0.5], 1.0 / np.sum(x > 0.5))


def test_equal_weights_and_what_k_hat_allows(rng):
    x = rng.normal(size=2_000)
    log_weights, equal = weigh(3.0 + stats.norm.logpdf(x), stats.norm.logpdf(x))
    assert equal.khat == -np.inf
    assert_allclose(np.exp(log_weights), 1 / 2_000)
    check_help(equal)
    _, far = weigh(stats.t(2).logpdf(x), stats.norm(0, 0.4).logpdf(x))
    with pytest.raises(
        ValueError, match=r"k-hat is \d\.\d\d, and 2,000 draws of q allow for 0\.70 at most.*Fit a rich"
    ):
        check_help(far)
    uneven = Weights(0.7 - 1e-3, 150.0, 200, 0)
    with pytest.raises(ValueError, match=r"200 draws of q allow for 0\.57 at most.*Take 2,200 draws or more"):
        check_help(uneven)


# --- what users get ---------------------------------------------------------------------------------------------------

Y = np.array([[3, 1, 4], [1, 5, 9]])
SHAPE, RATE = 2.0 + Y.sum(0), 0.5 + len(Y)


@pytest.fixture(scope="module")
def model():
    """Independent conjugate rates: the posterior is Gamma(SHAPE, RATE)."""
    with pm.Model(coords={"group": ["a", "b", "c"], "day": [1, 2]}) as model:
        rate = pm.Gamma("rate", 2.0, 0.5, dims="group")
        pm.Deterministic("total", rate.sum())
        pm.Deterministic("twice", 2.0 * rate, dims="group")
        pm.Poisson("y", rate, observed=Y, dims=("day", "group"))
    return model


@pytest.fixture(scope="module")
def approx(model):
    """A Gaussian of the logarithms whose means are too high and whose standard deviations are too large."""
    sd = SHAPE**-0.5
    q = DiagonalState.from_scale(np.log(SHAPE / RATE) + 0.2 * sd, 1.3 * sd)
    return NGVIApproximation(LogDensity(model), q, random_seed=1)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_conjugate_posterior_is_corrected(approx, seed, tmp_path):
    found = approx.corrected(10_000, random_seed=seed)
    assert found.checks.is_reliable
    assert not found.is_exact
    assert found.checks.khat < 0.5
    assert 1_000 < found.checks.effective_size < 10_000
    posterior, draws = stats.gamma(SHAPE, scale=1 / RATE), found.sample(4_000, random_seed=seed).posterior
    error = N_SE / found.checks.effective_size**0.5
    assert np.all(np.abs(draws["rate"].mean(("chain", "draw")) - posterior.mean()) < error * posterior.std())
    assert_allclose(draws["rate"].std(("chain", "draw")), posterior.std(), rtol=1.5 * error)  # skewed
    before = approx.sample(4_000, random_seed=seed).posterior["rate"].mean(("chain", "draw"))
    assert np.all(np.abs(before - posterior.mean()) > error * posterior.std())
    assert_allclose(draws["total"], draws["rate"].sum("group"))
    # p(y) of each group: the prior over the posterior, times the likelihood, at any rate.
    one = np.ones(3)
    log_p = stats.gamma(2.0, scale=2.0).logpdf(one) - posterior.logpdf(one) + stats.poisson(one).logpmf(Y).sum(axis=0)
    value, se = found.log_marginal_likelihood
    assert abs(value - log_p.sum()) < N_SE * se < 0.1
    again = approx.corrected(10_000, random_seed=seed)
    assert_array_equal(found.mean_flat, again.mean_flat)
    found.save(tmp_path / "corrected.nc")
    loaded = pymc_ngvi.load(tmp_path / "corrected.nc", approx.model)
    assert_array_equal(loaded.mean_flat, found.mean_flat)
    assert str(loaded.checks) == str(found.checks)


def test_wrong_weights_of_modes_are_corrected():
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 20.0)
        two = pm.NormalMixture.dist([0.8, 0.2], mu=[-5.0, 5.0], sigma=[1.0, 1.0])
        pm.Potential("modes", pm.logp(two, x))
    q = MixtureState.of([DiagonalState.from_scale(np.array([m]), np.array([1.1])) for m in (-5.0, 5.0)])
    found = NGVIApproximation(LogDensity(model), q).corrected(random_seed=1)
    draws = found.sample(2_000, random_seed=1)["posterior"]["x"]
    # The prior has hardly any slope: exp(-25 / 800) is the same on both sides.
    assert float((draws < 0).mean()) == pytest.approx(0.8, abs=N_SE * 0.5 / 2_000**0.5)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_q_too_narrow_is_refused():
    with pm.Model() as model:
        pm.StudentT("x", nu=2.0, mu=0.0, sigma=1.0)
    approx = NGVIApproximation(LogDensity(model), DiagonalState.from_scale(np.zeros(1), np.array([0.3])))
    with pytest.raises(ValueError, match=r"k-hat is .* allow for 0\.\d\d at most"):
        approx.corrected(1_000, random_seed=1)
    assert approx.sample(12)["posterior"].sizes["draw"] == 3


def test_other_data_than_those_of_the_fit_are_refused():
    with pm.Model() as model:
        y = pm.Data("y", [0.3, 0.6])
        x = pm.Normal("x", 0.0, 1.0)
        pm.Normal("obs", x, 1.0, observed=y)
    approx = NGVIApproximation(LogDensity(model), DiagonalState.from_scale(np.array([0.5]), np.ones(1)))
    with model:
        pm.set_data({"y": [3.0, 4.0]})
    with pytest.raises(ValueError, match="'y' were changed after the fit"):
        approx.corrected(1_000, random_seed=1)


def test_too_few_draws_are_refused(approx):
    with pytest.raises(ValueError, match="at least 100 draws; got 95"):
        approx.corrected(95)
    with pytest.raises(ValueError, match="whole number of at least 1; got 0"):
        approx.corrected(0)
