"""The posterior of the global parameters of a random-intercept logistic regression, without variational inference.

The intercept of each group is integrated out by Gauss-Hermite quadrature, which leaves the coefficients and the log
standard deviation of the intercepts: few enough for Newton's method, and for importance sampling.
"""

from typing import NamedTuple

import numpy as np

from models_glmm import PRIOR_SD, Array, Regression
from scipy.special import expit, log_expit, logsumexp
from scipy.stats import multivariate_t, qmc

SD_SCALE = 3.0  # of the half-normal prior
NODES = 32
#: Rounds of Newton's method at most, each with one matrix of second derivatives; size of the last step, in standard
#: deviations, up to which it has converged.
NEWTON_ROUNDS, STEPS_A_ROUND, CONVERGED = 20, 3, 1e-4
DIFFERENCE = 1e-4
#: Up to this many observations the moments are refined by importance sampling; beyond, the posterior is so nearly
#: Gaussian that its mode and curvature do.
SAMPLED_SIZE, N_SAMPLES = 20_000, 1_024
DEGREES = 8


class Moments(NamedTuple):
    """Means and standard deviations of coefficients and log standard deviation, (k + 1,), and how they were found."""

    mean: Array
    sd: Array
    how: str


class Marginal:
    """Log posterior of (beta, log s), beta ~ N(0, 10^2) and s half-normal, the Jacobian of the logarithm included.

    Parameters
    ----------
    data : Regression
        Rows sorted by group.
    n_nodes : int
        Nodes of the quadrature, under the prior of the intercepts: enough for groups of ten or so.
    """

    def __init__(self, data: Regression, n_nodes: int = NODES) -> None:
        self.data = data
        self._starts = np.flatnonzero(np.diff(data.group, prepend=-1))
        nodes, weights = np.polynomial.hermite_e.hermegauss(n_nodes)
        self._nodes, self._log_weights = nodes, np.log(weights / weights.sum())
        self._sign = 2.0 * data.y - 1.0

    def log_density(self, theta: Array) -> float:
        """Return the log posterior density, its normalising constant apart."""
        eta, s = self._predictor(theta)
        return float(logsumexp(self._joint(eta, s), axis=0).sum()) + self._log_prior(theta)

    def gradient(self, theta: Array) -> Array:
        """Return its gradient, (k + 1,)."""
        eta, s = self._predictor(theta)
        joint = self._joint(eta, s)
        weights = np.exp(joint - logsumexp(joint, axis=0))
        residual, slope = np.zeros(len(eta)), 0.0
        for node, weight in zip(self._nodes, weights, strict=True):
            at_node = weight[self.data.group] * (self.data.y - expit(eta + s * node))
            residual += at_node
            slope += s * node * at_node.sum()
        prior = np.append(-theta[:-1] / PRIOR_SD**2, 1.0 - (s / SD_SCALE) ** 2)
        return np.append(self.data.x.T @ residual, slope) + prior

    def moments(self, start: Array) -> Moments:
        """Return means and standard deviations, by Newton's method from ``start`` and importance sampling."""
        mode = start
        for _ in range(NEWTON_ROUNDS):
            covariance = np.linalg.inv(self._information(mode))
            for _ in range(STEPS_A_ROUND):
                grad = self.gradient(mode)
                mode = mode + covariance @ grad
            if np.sqrt(grad @ covariance @ grad) < CONVERGED:
                break
        else:
            raise RuntimeError(f"Newton's method has not converged in {NEWTON_ROUNDS * STEPS_A_ROUND} steps.")
        if len(self.data.y) > SAMPLED_SIZE:
            return Moments(mode, np.sqrt(np.diag(covariance)), "mode and curvature")
        return self._sampled(mode, covariance)

    def _sampled(self, mode: Array, covariance: Array) -> Moments:
        """Correct the Gaussian at the mode by importance sampling with Student t draws."""
        proposal = multivariate_t(mode, covariance, DEGREES)
        normal = qmc.MultivariateNormalQMC(np.zeros(len(mode)), seed=1).random(N_SAMPLES)
        chi = np.random.default_rng(1).chisquare(DEGREES, N_SAMPLES) / DEGREES
        theta = mode + normal @ np.linalg.cholesky(covariance).T / np.sqrt(chi)[:, None]
        log_weight = np.array([self.log_density(t) for t in theta]) - proposal.logpdf(theta)
        weight = np.exp(log_weight - logsumexp(log_weight))
        mean = weight @ theta
        return Moments(mean, np.sqrt(weight @ (theta - mean) ** 2), f"{N_SAMPLES} weighted draws")

    def _information(self, theta: Array) -> Array:
        steps = DIFFERENCE * np.eye(len(theta))
        rows = [(self.gradient(theta - e) - self.gradient(theta + e)) / (2 * DIFFERENCE) for e in steps]
        return (np.array(rows) + np.array(rows).T) / 2

    def _predictor(self, theta: Array) -> tuple[Array, float]:
        return self.data.x @ theta[:-1], float(np.exp(theta[-1]))

    def _joint(self, eta: Array, s: float) -> Array:
        """Return the log weight of each node plus the log likelihood of each group there, (n_nodes, n_groups)."""
        rows = [np.add.reduceat(log_expit(self._sign * (eta + s * node)), self._starts) for node in self._nodes]
        return np.array(rows) + self._log_weights[:, None]

    def _log_prior(self, theta: Array) -> float:
        return float(
            -0.5 * np.sum(theta[:-1] ** 2) / PRIOR_SD**2 - 0.5 * np.exp(2 * theta[-1]) / SD_SCALE**2 + theta[-1]
        )
