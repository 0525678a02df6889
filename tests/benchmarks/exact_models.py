"""Models of the benchmark of exact posteriors: eight schools with the answer, and models that have none."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pymc as pm

from measure import Array
from scipy.special import expit, logsumexp
from scipy.stats import halfcauchy, norm

# --- eight schools ----------------------------------------------------------------------------------------------------

EFFECTS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
#: Scales of the priors N(0, 5^2) of mu and half-Cauchy of tau.
_MU_SD, _TAU_SCALE = 5.0, 5.0
#: Ends of the grid and its points: the posterior of log tau falls as exp(log tau) to the left.
_MU, _N_MU, _LOG_TAU, _N_LOG_TAU = 40.0, 401, (-30.0, 12.0), 2_001


class Answer(NamedTuple):
    """What is known of a posterior: moments of the unconstrained coordinates, (mu, log tau, effects)."""

    mean: Array
    sd: Array
    log_evidence: float
    elpd: float


def schools(centred: bool) -> pm.Model:
    """Return the model of Rubin (1981), as in Gelman et al., Bayesian Data Analysis, section 5.5."""
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0.0, _MU_SD), pm.HalfCauchy("tau", _TAU_SCALE)
        if centred:
            theta = pm.Normal("theta", mu, tau, shape=len(EFFECTS))
        else:
            theta = mu + tau * pm.Normal("z", 0.0, 1.0, shape=len(EFFECTS))
        pm.Normal("y", theta, ERRORS, observed=EFFECTS)
    return model


def schools_answer(centred: bool) -> Answer:
    """Return the exact posterior by the trapezoidal rule over (mu, log tau): given these, effects are Gaussian."""
    mu, log_tau = np.linspace(-_MU, _MU, _N_MU)[:, None], np.linspace(*_LOG_TAU, _N_LOG_TAU)
    tau = np.exp(log_tau)
    log_prior = norm.logpdf(mu, 0.0, _MU_SD) + halfcauchy.logpdf(tau, 0.0, _TAU_SCALE) + log_tau
    total = tau**2 + ERRORS[:, None] ** 2  # (schools, log tau): variance of y given (mu, tau)
    log_lik = [norm.logpdf(y, mu, np.sqrt(v)) for y, v in zip(EFFECTS, total, strict=True)]
    log_joint = log_prior + sum(log_lik)
    log_cell = np.log((mu[1, 0] - mu[0, 0]) * (log_tau[1] - log_tau[0]))
    log_evidence = float(logsumexp(log_joint)) + log_cell
    without = [float(logsumexp(log_joint - part)) + log_cell for part in log_lik]
    weight = np.exp(log_joint - logsumexp(log_joint))
    parts: list[tuple[Array, Array | float]] = [(mu, 0.0), (log_tau, 0.0)]
    for y, e, v in zip(EFFECTS, ERRORS, total, strict=True):
        if centred:
            parts.append(((y * tau**2 + mu * e**2) / v, tau**2 * e**2 / v))
        else:
            parts.append((tau * (y - mu) / v, e**2 / v))
    mean = np.array([np.sum(weight * m) for m, _ in parts])
    sd = np.sqrt([np.sum(weight * (v + (m - c) ** 2)) for (m, v), c in zip(parts, mean, strict=True)])
    return Answer(mean, sd, log_evidence, float(sum(log_evidence - other for other in without)))


# --- models that have none --------------------------------------------------------------------------------------------


def wide_blocks() -> pm.Model:
    """Eight slopes in each of 40 groups, all of them in every likelihood term: blocks of 8 with no structure."""
    rng, k, n_groups = np.random.default_rng(1), 8, 40
    x, group = rng.normal(size=(n_groups * 20, k)), np.repeat(np.arange(n_groups), 20)
    y = (x * rng.normal(0.0, 0.7, (n_groups, k))[group]).sum(axis=1) + rng.normal(size=len(group))
    with pm.Model() as model:
        mu, sd = pm.Normal("mu", 0.0, 1.0, shape=k), pm.HalfNormal("sd", 1.0, shape=k)
        slope, noise = pm.Normal("slope", mu, sd, shape=(n_groups, k)), pm.HalfNormal("noise", 1.0)
        pm.Normal("y", (x * slope[group]).sum(axis=1), noise, observed=y)
    return model


def many_globals() -> pm.Model:
    """A logistic regression of 120 coefficients with an intercept for each of 40 groups."""
    rng, k, n_groups = np.random.default_rng(2), 120, 40
    x, group = rng.normal(size=(n_groups * 15, k)), np.repeat(np.arange(n_groups), 15)
    eta = x @ rng.normal(0.0, 0.2, k) + rng.normal(size=n_groups)[group]
    with pm.Model() as model:
        beta, sd = pm.Normal("beta", 0.0, 0.5, shape=k), pm.HalfNormal("sd", 1.0)
        u = pm.Normal("u", 0.0, sd, shape=n_groups)
        pm.Bernoulli("y", logit_p=x @ beta + u[group], observed=rng.random(len(eta)) < expit(eta))
    return model


def crossed() -> pm.Model:
    """Right and wrong answers of 200 persons to 150 items, both with effects of unknown scale."""
    rng, n_persons, n_items = np.random.default_rng(3), 200, 150
    eta = rng.normal(size=(n_persons, 1)) + rng.normal(size=n_items)
    with pm.Model() as model:
        of_person, of_item = pm.HalfNormal("of_person", 1.0), pm.HalfNormal("of_item", 1.0)
        person, item = (
            pm.Normal("person", 0.0, of_person, shape=n_persons),
            pm.Normal("item", 0.0, of_item, shape=n_items),
        )
        pm.Bernoulli("y", logit_p=person[:, None] + item, observed=rng.random(eta.shape) < expit(eta))
    return model


def long_walk() -> pm.Model:
    """Counts along a random walk of 300 steps: one block, too long for a tree of few levels."""
    rng, n = np.random.default_rng(4), 300
    y = rng.poisson(np.exp(1.0 + np.cumsum(rng.normal(0.0, 0.1, n))))
    with pm.Model() as model:
        sd = pm.HalfNormal("sd", 0.5)
        walk = pm.GaussianRandomWalk("walk", mu=0.0, sigma=sd, init_dist=pm.Normal.dist(1.0, 1.0), shape=n)
        pm.Poisson("y", pm.math.exp(walk), observed=y)
    return model


def dense_regression() -> pm.Model:
    """A logistic regression of 40 coefficients: no groups, and too many for importance sampling alone."""
    rng, k = np.random.default_rng(5), 40
    x = rng.normal(size=(400, k))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 1.0, shape=k)
        pm.Bernoulli("y", logit_p=x @ beta, observed=rng.random(400) < expit(x @ rng.normal(0.0, 0.5, k)))
    return model


#: By title.
WITHOUT: dict[str, Callable[[], pm.Model]] = {
    "40 groups of 8 slopes": wide_blocks,
    "120 coefficients, 40 groups": many_globals,
    "200 persons x 150 items": crossed,
    "random walk of 300 steps": long_walk,
    "regression of 40 coefficients": dense_regression,
}
