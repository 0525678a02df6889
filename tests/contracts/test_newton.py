"""Steps of Newton in the mean and the standard deviations of predictors."""

import numpy as np
import pymc as pm
import pytest

from pymc_ngvi import LogDensity, Status, fit_ngvi
from pymc_ngvi.core.types import RowRules
from pymc_ngvi.families import FullState
from pymc_ngvi.methods import natural
from pymc_ngvi.methods.estimators import quadrature
from pymc_ngvi.methods.linesearch import LineSearch, newton


def wide_process(n=25, sd=100.0):
    """Return a classification by a Gaussian process of large variance, and the matrix of its predictors."""
    rng = np.random.default_rng(3)
    x = np.sort(rng.uniform(0.0, 6.0, n))
    y = (rng.uniform(size=n) < 1.0 / (1.0 + np.exp(-3.0 * np.sin(x)))).astype(int)
    root = np.linalg.cholesky(sd**2 * np.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-4 * np.eye(n))
    with pm.Model() as model:
        z = pm.Normal("z", 0.0, 1.0, shape=n)
        pm.Bernoulli("y", logit_p=pm.math.dot(root, z), observed=y)
    return model, root


def one_row(y=3):
    with pm.Model() as model:
        pm.Poisson("y", pm.math.exp(pm.Normal("a", 0.0, 10.0)), observed=y)
    return model


def fine(n_rows):
    """Return rules that are far finer than their default."""
    return RowRules(np.full(n_rows, 7, dtype=np.int16), np.ones(n_rows, dtype=np.float32))


def measured(target, q, rules=None):
    evaluation = quadrature.by_rules(target, q, rules)
    return evaluation, quadrature.moments(target, q, None, evaluation)


def newton_at(target, q, sites=None, rules=None):
    evaluation, moments = measured(target, q, rules)
    return newton(target, q, moments, evaluation.expectation.bends, sites)


def rule_of(density):
    return LineSearch(density, natural, quadrature, seed=0)


def state_with_sites(rule):
    """Return a state that steps of Newton have led to."""
    state = rule.init(FullState.from_scale(np.zeros(25), np.full(25, 0.1)))
    while state.sites is None or not state.bent or state.moments.gap > 1.0:
        state = rule.step(state)
    return state


def test_expected_derivatives_of_counts():
    """All derivatives of -exp have the expectation -exp(m + v / 2); the prior, in the same row, is quadratic."""
    q = FullState(np.array([0.4]), np.array([[0.7]]))
    bends = LogDensity(one_row()).expected(q, fine(1)).bends
    rate = -np.exp(0.4 + 0.7**2 / 2.0)
    assert bends.is_bent.all()
    np.testing.assert_allclose([bends.second[0] + 0.01, bends.third[0], bends.fourth[0]], rate, rtol=1e-6)


def test_the_slope_is_that_of_the_elbo_along_the_step():
    """Sites fall and rise; half of a step from where sites make up q, so that second order has its part in it, too."""
    target = LogDensity(wide_process()[0])
    state = state_with_sites(rule_of(target))
    q = newton(target, state.q, state.moments, state.bends, state.sites).propose(0.5)
    start, _ = measured(target, q, fine(50))
    found = newton_at(target, q, 0.9 * state.sites, fine(50))
    assert (found.sites_after(1.0) < 0.9 * state.sites).any()
    rise = [quadrature.by_rules(target, found.propose(h), fine(50)).elbo - start.elbo for h in (1e-4, 2e-4)]
    assert (4.0 * rise[0] - rise[1]) / 2e-4 == pytest.approx(found.slope, rel=1e-3)


def test_it_converges_quadratically():
    """Gaps are squared from step to step, where natural steps need some twenty for a tenth."""
    target = LogDensity(wide_process()[0])
    rule = rule_of(target)
    state, gaps = rule.init(FullState.from_scale(np.zeros(25), np.full(25, 0.1))), []
    while rule.terminate(state) is None:
        state = rule.step(state)
        gaps.append(state.moments.gap)
    assert state.n_newton == 3
    first = next(i for i, gap in enumerate(gaps) if gap < 0.1)
    assert gaps[first + 1] < 2e-3
    assert gaps[first + 2] < 1e-6


def test_a_wide_process_takes_few_expectations():
    """All of them, the start and the last check included; 108 without steps of Newton."""
    approx = fit_ngvi(wide_process()[0], random_seed=1, progressbar=False, posterior="gaussian")
    assert approx.record.status is Status.CONVERGED
    assert approx.n_gradients <= 20


def test_separable_data_with_wide_priors_take_few_expectations():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(60, 20))
    y = (x @ rng.normal(size=20) > 0.0).astype(int)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 200.0, shape=20)
        pm.Bernoulli("y", logit_p=pm.math.dot(x, beta), observed=y)
    approx = fit_ngvi(model, random_seed=1, progressbar=False, posterior="gaussian")
    assert approx.record.status is Status.CONVERGED
    assert approx.n_gradients <= 30


def test_rows_that_are_not_log_concave_may_have_negative_sites():
    rng = np.random.default_rng(1)
    y = np.concatenate([rng.normal(size=20), [30.0, -40.0]])
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 100.0, shape=22)
        pm.StudentT("y", nu=4.0, mu=mu + pm.Normal("a", 0.0, 100.0), sigma=1.0, observed=y)
    approx = fit_ngvi(model, random_seed=1, progressbar=False, posterior="gaussian", family="full")
    assert approx.record.status is Status.CONVERGED
    assert approx.n_gradients <= 30
