"""Priors of correlations integrate to one, whatever PyMC's constants are."""

import numpy as np
import pymc as pm
import pytest

from scipy import stats

import pymc_ngvi

from pymc_ngvi import LogDensity
from pymc_ngvi.density.new_priors import log_excess, unnormalised


@pytest.mark.parametrize("eta", [1.0, 2.0, 3.5])
def test_what_a_prior_of_a_correlation_integrates_to(eta):
    with pm.Model() as model:
        pm.LKJCorr("c", n=2, eta=eta)
    line = np.sinh(np.linspace(-9.0, 9.0, 2_001))  # tails are those of a power
    integral = np.trapezoid(np.exp(LogDensity(model).logp(line[:, None])), line)
    assert log_excess(model) == pytest.approx(np.log(integral), abs=1e-3)


@pytest.mark.parametrize("eta", [1.0, 2.5])
def test_the_prior_of_three_standard_deviations_and_their_correlations(eta):
    """By importance sampling, in six dimensions."""
    with pm.Model() as model:
        pm.LKJCholeskyCov("c", n=3, eta=eta, sd_dist=pm.LogNormal.dist(0.0, 0.5, shape=3), compute_corr=False)
    scale, n = 0.9, 200_000
    x = scale * stats.t.rvs(5, size=(n, 6), random_state=np.random.default_rng(1))
    logp = LogDensity(model).logp(x)
    logp[np.isnan(logp)] = -np.inf  # far out, where factors overflow
    weights = np.exp(logp - np.sum(stats.t.logpdf(x / scale, 5) - np.log(scale), axis=1))
    error = weights.std() / weights.mean() / np.sqrt(n)
    assert log_excess(model) == pytest.approx(np.log(weights.mean()), abs=4 * error)


def test_two_matrices_count_twice():
    with pm.Model() as model:
        pm.LKJCorr("c", n=2, eta=2.0, shape=(2, 2, 2))
    with pm.Model() as one:
        pm.LKJCorr("c", n=2, eta=2.0)
    assert log_excess(model) == pytest.approx(2.0 * log_excess(one))


def test_an_eta_that_is_a_variable_has_no_constant():
    with pm.Model() as model:
        pm.LKJCorr("c", n=2, eta=pm.Exponential("eta", 1.0))
    [reason] = unnormalised(model)
    assert reason == "the LKJ prior of 'c' has an eta that is not constant"


def test_correlations_of_three_variables_have_no_constant():
    with pm.Model() as model:
        pm.LKJCorr("c", n=3, eta=2.0)
    [reason] = unnormalised(model)
    assert reason == "the density of the LKJCorr prior of 'c' is not that of correlations, in PyMC"


def test_the_marginal_likelihood_does_not_depend_on_a_prior_that_says_nothing():
    """The data do not see the correlation: whatever its prior, log p(y) is that of the normal model alone."""
    y = np.array([0.5, -0.2, 1.0])
    values = []
    for eta in (None, 1.0, 4.0):
        with pm.Model() as model:
            mu = pm.Normal("mu", 0.0, 2.0)
            if eta is not None:
                pm.LKJCorr("c", n=2, eta=eta)
            pm.Normal("y", mu, 1.0, observed=y)
        values.append(
            pymc_ngvi.fit_ngvi(model, posterior="exact", random_seed=1, progressbar=False).log_marginal_likelihood
        )
    for value in values[1:]:
        assert value.value == pytest.approx(values[0].value, abs=4 * np.hypot(value.se, values[0].se) + 1e-6)
