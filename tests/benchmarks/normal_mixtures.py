"""Posteriors that no Gaussian fits, with evidence, moments and draws that do not come from variational inference.

Mixtures of normals: the posterior is the same in all orders of the components, so that one order, sampled with
importance weights, tells of all. Eight schools are among the tests.
"""

import functools
import itertools

import numpy as np
import pymc as pm

from mixture_posteriors import eight_schools, log_normal
from mixture_targets import Array, Modes, Target
from scipy.optimize import minimize
from scipy.special import gammaln, logsumexp
from scipy.stats import multivariate_t

N_WEIGHTED, DOF, WIDE = 100_000, 6.0, 0.2
MU_SD, SIGMA_SD, CONCENTRATION = 5.0, 2.0, 2.0


class NormalMixture:
    """Posterior of a mixture of normals with one standard deviation; nothing tells the components apart.

    mu_k ~ N(0, 5), weights ~ Dirichlet(2), sigma ~ half-normal(2). Coordinates are mu, the first K - 1 centred logs of
    the weights, and log sigma.

    Parameters
    ----------
    y : ndarray, shape (n_observations,)
    centres : ndarray, shape (n_components,)
        In rising order: where to look for the mode.

    Attributes
    ----------
    draws, weights : ndarray, shape (N_WEIGHTED, n_dim), (N_WEIGHTED,)
        Of the posterior with mu in rising order.
    log_z : float
    """

    def __init__(self, y: Array, centres: Array) -> None:
        self.y, self.n_components = y, len(centres)
        self.n_dim = 2 * self.n_components
        self.orders = list(itertools.permutations(range(self.n_components)))
        rng, start = np.random.default_rng(7), np.concatenate([centres, np.zeros(self.n_components)])
        found = minimize(lambda theta: -self.log_joint(theta[None])[0], start, method="BFGS", options={"gtol": 1e-3})
        mean, cov = found.x, found.hess_inv
        for n in (N_WEIGHTED // 10, N_WEIGHTED // 10, N_WEIGHTED):
            self.draws, log_weights = self._weighted(mean, cov, n, rng)
            self.weights = np.exp(log_weights - logsumexp(log_weights))
            mean, cov = self.weights @ self.draws, np.cov(self.draws.T, aweights=self.weights)
        self.mean, self.cov = mean, cov
        self.log_z = float(logsumexp(log_weights)) - np.log(len(log_weights) / len(self.orders))

    def _weighted(self, mean: Array, cov: Array, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Return draws of a Student-t, some of a wider one, and log p less their log density.

        That is -inf where mu is not in rising order.
        """
        parts = [(1.0 - WIDE, cov), (WIDE, 10.0 * cov)]
        proposals = [(w, multivariate_t(mean, c * (DOF - 2.0) / DOF, DOF)) for w, c in parts]
        draws = np.vstack([t.rvs(round(w * n), random_state=rng) for w, t in proposals])
        log_q = logsumexp([np.log(w) + t.logpdf(draws) for w, t in proposals], axis=0)
        rising = (np.diff(draws[:, : self.n_components], axis=1) > 0.0).all(axis=1)
        return draws, np.where(rising, self.log_joint(draws) - log_q, -np.inf)

    def log_joint(self, theta: Array) -> Array:
        """Return log p of the model at points (n_points, n_dim), Jacobian included."""
        k, log_sigma = self.n_components, theta[:, -1]
        mu, centred = theta[:, :k], _completed(theta[:, k:-1])
        log_w = centred - logsumexp(centred, axis=1, keepdims=True)
        # Dirichlet density, and the Jacobian K prod w of the centred logs.
        prior = gammaln(k * CONCENTRATION) - k * gammaln(CONCENTRATION) + np.log(k) + CONCENTRATION * log_w.sum(axis=1)
        prior += log_normal(mu, 0.0, MU_SD**2).sum(axis=1)
        prior += np.log(2.0) + log_normal(np.exp(log_sigma), 0.0, SIGMA_SD**2) + log_sigma
        likelihood = np.zeros(len(theta))
        for y in self.y:
            terms = log_w + log_normal(y, mu, np.exp(2.0 * log_sigma)[:, None])
            likelihood += np.logaddexp.reduce(terms, axis=1)
        return prior + likelihood

    def ordered_as(self, theta: Array, order: tuple[int, ...]) -> Array:
        """Return points with their components in another order: a linear map."""
        k, at = self.n_components, list(order)
        return np.hstack([theta[:, :k][:, at], _completed(theta[:, k:-1])[:, at][:, :-1], theta[:, -1:]])

    def sample(self, n: int, rng: np.random.Generator) -> Array:
        """Return weighted draws, drawn again, each in an order of its own."""
        drawn = self.draws[rng.choice(len(self.draws), n, p=self.weights)]
        which = rng.integers(len(self.orders), size=n)
        for k, order in enumerate(self.orders):
            drawn[which == k] = self.ordered_as(drawn[which == k], order)
        return drawn

    def moments(self) -> tuple[Array, Array]:
        """Return means and standard deviations over all orders."""
        in_orders = [self.ordered_as(self.draws, order) for order in self.orders]
        mean = np.mean([self.weights @ draws for draws in in_orders], axis=0)
        return mean, np.sqrt(np.mean([self.weights @ (draws - mean) ** 2 for draws in in_orders], axis=0))

    def modes(self) -> Modes:
        """Return one mode for each order of the components."""
        variances, vectors = np.linalg.eigh(self.cov)
        whitener = (vectors / np.sqrt(variances)).T
        axes = np.eye(self.n_dim)
        back = [self.ordered_as(axes, tuple(np.argsort(order))).T for order in self.orders]
        centres = np.vstack([self.ordered_as(self.mean[None], order) for order in self.orders])
        weights = np.full(len(self.orders), 1.0 / len(self.orders))
        return Modes(weights, centres, np.array([whitener @ b for b in back]), self._log_shares)

    def _log_shares(self, theta: Array) -> Array:
        ranks = np.argsort(np.argsort(theta[:, : self.n_components], axis=1), axis=1)
        inside = (ranks[:, None] == np.array(self.orders)).all(axis=2)
        return np.where(inside, 0.0, -np.inf)

    def build(self) -> pm.Model:
        """Return the PyMC model."""
        k = self.n_components
        with pm.Model() as model:
            mu = pm.Normal("mu", 0.0, MU_SD, shape=k)
            w = pm.Dirichlet("w", np.full(k, CONCENTRATION))
            sigma = pm.HalfNormal("sigma", SIGMA_SD)
            pm.NormalMixture("y", w, mu, sigma=sigma, observed=self.y)
        return model

    def target(self, name: str) -> Target:
        """Return the posterior as a target."""
        mean, sd = self.moments()
        names = ("mu", "w_simplex__", "sigma_log__")
        functions = self.build, self.sample, lambda theta: self.log_joint(theta) - self.log_z
        return Target(name, names, self.n_dim, *functions, self.log_z, self.modes(), mean=mean, sd=sd)


def _completed(centred: Array) -> Array:
    """Return coordinates that sum to zero with the last one of them, which follows from the others."""
    return np.hstack([centred, -centred.sum(axis=1, keepdims=True)])


@functools.cache
def normal_mixture(name: str, centres: tuple[float, ...]) -> Target:
    """Return the posterior given 40 simulated observations for each component."""
    rng = np.random.default_rng(100 + len(centres))
    label = rng.integers(len(centres), size=40 * len(centres))
    return NormalMixture(np.array(centres)[label] + rng.standard_normal(len(label)), np.array(centres)).target(name)


#: By name: functions that make them.
POSTERIORS = {
    "eight schools": eight_schools,
    "two normals": functools.partial(normal_mixture, "two normals", (-2.0, 2.0)),
    "three normals": functools.partial(normal_mixture, "three normals", (-4.0, 0.0, 4.0)),
}
