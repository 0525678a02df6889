"""Predictive densities of groups that are left out: beside numerical integrals, and a fit without the group."""

import numpy as np
import pymc as pm
import pytest

from scipy.special import logsumexp
from scipy.stats import halfcauchy, norm

import pymc_ngvi

pytestmark = pytest.mark.usefixtures("_compiled_once")

Y = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools(*, centred):
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0.0, 5.0), pm.HalfCauchy("tau", 5.0)
        theta = pm.Normal("theta", mu, tau, shape=8) if centred else mu + tau * pm.Normal("z", shape=8)
        pm.Normal("y", theta, ERRORS, observed=Y)
    return model


def schools_by_a_grid():
    """Return log p(y_i | all others), (8,): given mu and tau, observations are independent and normal."""
    mu, log_tau = np.linspace(-40.0, 40.0, 401)[:, None], np.linspace(-30.0, 12.0, 1_001)
    prior = norm.logpdf(mu, 0.0, 5.0) + halfcauchy.logpdf(np.exp(log_tau), 0.0, 5.0) + log_tau
    parts = [norm.logpdf(y, mu, np.hypot(np.exp(log_tau), e)) for y, e in zip(Y, ERRORS, strict=True)]
    joint = prior + sum(parts)
    return np.array([logsumexp(joint) - logsumexp(joint - part) for part in parts])


@pytest.mark.parametrize("centred", [True, False])
def test_schools(centred):
    """Constants of the data belong to the groups, and those of standard normal effects to nobody twice."""
    approx = pymc_ngvi.fit_ngvi(model=schools(centred=centred), random_seed=1, progressbar=False)
    assert approx.is_exact
    left = approx.leave_out(random_seed=1)
    # Four errors of about 2,000 draws of mu and tau, by which densities vary by a fifth.
    np.testing.assert_allclose(left.elpd_i, schools_by_a_grid(), atol=4 * 0.2 / np.sqrt(2_000))


def counts(y, x, group):
    with pm.Model() as model:
        a, b, s = pm.Normal("a", 0.0, 2.0), pm.Normal("b", 0.0, 1.0), pm.HalfNormal("s", 1.0)
        z = pm.Normal("z", shape=int(group.max()) + 1)
        pm.Poisson("y", pm.math.exp(a + b * x + s * z[group]), observed=y)
    return model


def test_counts_beside_a_fit_without_the_group():
    """What is linear in the coefficients, y (a + b x), and log y! are of the group, too."""
    rng = np.random.default_rng(2)
    group = np.repeat(np.arange(12), 4)
    x = rng.normal(size=48)
    y = rng.poisson(np.exp(1.0 + 0.4 * x + 0.6 * rng.normal(size=12)[group]))
    approx = pymc_ngvi.fit_ngvi(model=counts(y, x, group), random_seed=1, progressbar=False)
    left = approx.leave_out(groups=group, random_seed=1)
    assert float(left.pareto_k[-1]) < 0.5
    kept = group < 11
    without = pymc_ngvi.fit_ngvi(model=counts(y[kept], x[kept], group[kept]), random_seed=2, progressbar=False)
    all_of_it, rest = approx.log_marginal_likelihood, without.log_marginal_likelihood
    error = np.hypot(all_of_it.se, rest.se)
    assert abs(float(left.elpd_i[-1]) - (all_of_it.value - rest.value)) < 4 * error + 0.03
