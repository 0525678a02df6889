"""Eight schools, centred, with evidence, moments and draws that do not come from variational inference.

Given the scale of the effects all is Gaussian, which leaves a sum over a fine grid.
"""

import functools

from typing import NamedTuple

import numpy as np
import pymc as pm

from mixture_targets import LOG_2PI, Array, Target
from scipy.special import logsumexp

EFFECTS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
PRIOR_SD = 5.0
#: Of log tau: beyond its ends less than 1e-10 of the posterior.
GRID = np.linspace(-25.0, 12.0, 37_001)


def log_normal(x: Array, mean: Array | float, variance: Array | float) -> Array:
    return -0.5 * ((x - mean) ** 2 / variance + np.log(variance) + LOG_2PI)


class GivenScale(NamedTuple):
    """The posterior of eight schools given values of log tau, each (n_values,) or (n_values, 8).

    Parameters
    ----------
    log_joint : ndarray
        Log density of data and log tau, means and effects integrated out.
    mean, variance : ndarray
        Of mu.
    shrinkage, residual : ndarray
        The effect of a school is ``mu + shrinkage * (y - mu)`` in the mean, with variance ``residual``.
    """

    log_joint: Array
    mean: Array
    variance: Array
    shrinkage: Array
    residual: Array

    @classmethod
    def at(cls, log_tau: Array) -> "GivenScale":
        tau = np.exp(log_tau)[:, None]
        marginal = ERRORS**2 + tau**2
        variance = 1.0 / (1.0 / PRIOR_SD**2 + (1.0 / marginal).sum(axis=1))
        mean = variance * (EFFECTS / marginal).sum(axis=1)
        # p(y) = p(y | mu) p(mu) / p(mu | y), at the mean of the last.
        log_y = log_normal(EFFECTS, mean[:, None], marginal).sum(axis=1)
        log_y += log_normal(mean, 0.0, PRIOR_SD**2) - log_normal(mean, mean, variance)
        shrinkage = tau**2 / marginal
        return cls(log_y + _log_half_cauchy(log_tau), mean, variance, shrinkage, shrinkage * ERRORS**2)


def _log_half_cauchy(log_tau: Array) -> Array:
    """Return the log density of log tau, tau half-Cauchy of scale 5."""
    return np.log(2.0 / (np.pi * PRIOR_SD)) - np.log1p(np.exp(2.0 * log_tau) / PRIOR_SD**2) + log_tau


@functools.cache
def eight_schools() -> Target:
    """Eight schools, centred: mu ~ N(0, 5), tau ~ half-Cauchy(5), effects ~ N(mu, tau)."""
    given = GivenScale.at(GRID)
    log_z = float(logsumexp(given.log_joint)) + np.log(GRID[1] - GRID[0])
    p = np.exp(given.log_joint - logsumexp(given.log_joint))
    means = given.mean[:, None] + given.shrinkage * (EFFECTS - given.mean[:, None])
    variances = given.residual + (1.0 - given.shrinkage) ** 2 * given.variance[:, None]
    columns = np.column_stack([given.mean, GRID, means])
    within = np.column_stack([given.variance, np.zeros(len(GRID)), variances])
    mean = p @ columns
    sd = np.sqrt(p @ (within + (columns - mean) ** 2))

    def build() -> pm.Model:
        with pm.Model() as model:
            mu = pm.Normal("mu", 0.0, PRIOR_SD)
            tau = pm.HalfCauchy("tau", PRIOR_SD)
            theta = pm.Normal("theta", mu, tau, shape=8)
            pm.Normal("y", theta, ERRORS, observed=EFFECTS)
        return model

    def sample(n: int, rng: np.random.Generator) -> Array:
        log_tau = np.interp(rng.random(n), np.cumsum(p) - 0.5 * p, GRID)
        at = GivenScale.at(log_tau)
        mu = (at.mean + np.sqrt(at.variance) * rng.standard_normal(n))[:, None]
        theta = mu + at.shrinkage * (EFFECTS - mu) + np.sqrt(at.residual) * rng.standard_normal((n, 8))
        return np.column_stack([mu, log_tau, theta])

    def log_density(point: Array) -> Array:
        mu, log_tau, theta = point[:, :1], point[:, 1], point[:, 2:]
        effects = log_normal(theta, mu, np.exp(2.0 * log_tau)[:, None]) + log_normal(EFFECTS, theta, ERRORS**2)
        priors = log_normal(mu[:, 0], 0.0, PRIOR_SD**2) + _log_half_cauchy(log_tau)
        return effects.sum(axis=1) + priors - log_z

    names = ("mu", "tau_log__", "theta")
    return Target("eight schools", names, 10, build, sample, log_density, log_z, mean=mean, sd=sd)
