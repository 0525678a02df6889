"""Integrands in plain NumPy for the tests of `pymc_ngvi.marginal`, and forests written down by hand."""

from typing import NamedTuple

import numpy as np

from scipy.special import gammaln, logsumexp

from pymc_ngvi.core.scalars import softplus
from pymc_ngvi.marginal.exact import integrated
from pymc_ngvi.marginal.integral import TreeIntegral
from pymc_ngvi.marginal.quadrature import Centres, Forest, whole
from pymc_ngvi.marginal.sampler import Ratios

_HALF_LOG_2PI = 0.5 * np.log(2.0 * np.pi)


class NumpyTerms:
    """Terms of log p that are functions of arrays; it counts what it is asked for.

    Parameters
    ----------
    of_globals : callable
        From (n, p) to (n,).
    of_locals : callable
        From (n, p) and (n, n_nodes, n_local) to (n, n_nodes, n_local).
    size : int
        Draws at once: few, so that every test has several chunks.
    """

    def __init__(self, of_globals, of_locals, size=7):
        self._of_globals, self._of_locals, self._size = of_globals, of_locals, size
        self.n_evaluations = 0

    def plan(self, forest, n_draws, n_nodes):
        return whole(self, forest, self._size)

    def terms(self, g, local):
        self.n_evaluations += local.shape[0] * local.shape[1]
        with np.errstate(all="ignore"):
            return np.asarray(self._of_globals(g), dtype=float), np.asarray(self._of_locals(g, local), dtype=float)


def forest_of(parents, n_globals):
    """Return a forest whose globals come first; each local coordinate has the place of its parent, or -1."""
    parents = np.asarray(parents, dtype=np.intp)
    level = np.zeros(len(parents), dtype=np.intp)
    for i, parent in enumerate(parents):
        level[i] = 0 if parent < 0 else level[parent] + 1
    return Forest(np.arange(n_globals), n_globals + np.arange(len(parents)), parents, level)


def singles(n_local, n_globals=1):
    """Return a forest of blocks of one."""
    return forest_of(np.full(n_local, -1), n_globals)


#: Parents in trees of several kinds; in each there are trees of different sizes side by side.
TREES = {
    "singles": [-1] * 4,
    "pairs": [-1, 0, -1, 2, -1],
    "hubs": [-1, 0, 0, 0, -1, -1, 5],
    "nested": [-1, 0, 0, 1, 1, 2, -1, 6],
    "triples": [-1, 0, 1, -1, 3, 4],
    "chain of 7": [-1, 0, 0, 1, 1, 2, 2, -1],
    "four levels": [-1, 0, 1, 2, -1],
    "five levels": [-1, 0, 1, 2, 3],
}


class Gaussian:
    """A Gaussian log density, up to a constant, whose precision has entries on paths and beside globals only.

    Parameters
    ----------
    forest : Forest
        Globals first.
    rng : Generator
    """

    def __init__(self, forest, rng):
        n_globals, n = forest.n_globals, forest.n_dim
        self.forest = forest
        self.mean = rng.normal(size=n)
        on_path = np.zeros((forest.n_local, forest.n_local), dtype=bool)
        on_path[np.arange(forest.n_local)[:, None], forest.path] = True
        factor = np.zeros((n, n))
        # A sum of squares of combinations of a path and of globals has such a precision.
        for c in range(forest.n_local):
            row = np.zeros(n)
            row[n_globals:][on_path[c]] = rng.normal(0.0, 0.6, on_path[c].sum())
            row[n_globals + c] = rng.uniform(0.8, 2.0)
            row[:n_globals] = rng.normal(0.0, 0.4, n_globals)
            factor[n_globals + c] = row
        factor[:n_globals, :n_globals] = np.eye(n_globals) + 0.3 * rng.normal(size=(n_globals, n_globals))
        self.precision = factor.T @ factor
        self.terms = NumpyTerms(self._of_globals, self._of_locals)

    def _of_globals(self, g):
        d, m = g - self.mean[: self.forest.n_globals], self.forest.n_globals
        return -0.5 * np.einsum("ni,ij,nj->n", d, self.precision[:m, :m], d)

    def _of_locals(self, g, local):
        """Each product of two coordinates belongs to the deeper of them."""
        forest, m = self.forest, self.forest.n_globals
        d, of_g = local - self.mean[m:], g - self.mean[:m]
        cross = self.precision[m:, :m] @ of_g.T  # (n_local, n)
        result = -0.5 * np.diag(self.precision)[m:] * d**2 - d * cross.T[:, None]
        for c in range(forest.n_local):
            for level in range(forest.level[c]):
                a = forest.path[c, level]
                result[..., c] -= self.precision[m + c, m + a] * d[..., c] * d[..., a]
        return result

    def log_marginal(self, g):
        """Return the log integral over the local coordinates, in closed form."""
        m = self.forest.n_globals
        local = self.precision[m:, m:]
        schur = self.precision[:m, :m] - self.precision[:m, m:] @ np.linalg.solve(local, self.precision[m:, :m])
        d = g - self.mean[:m]
        constant = 0.5 * self.forest.n_local * np.log(2.0 * np.pi) - 0.5 * np.linalg.slogdet(local)[1]
        return constant - 0.5 * np.einsum("ni,ij,nj->n", d, schur, d)

    def conditional(self, g):
        """Return means, (n, n_local), and the covariance of the local coordinates given globals."""
        m = self.forest.n_globals
        cov = np.linalg.inv(self.precision[m:, m:])
        return self.mean[m:] - (g - self.mean[:m]) @ self.precision[:m, m:] @ cov, cov

    def centres(self, g):
        """Return the right centres: conditional means, and the factor of the conditional covariance."""
        mean, cov = self.conditional(g)
        return Centres(mean, np.broadcast_to(factor_of(self.forest, cov), (len(g), *factor_shape(self.forest))))


def factor_shape(forest):
    return forest.n_local, forest.n_levels


def factor_of(forest, cov):
    """Return rows of L for a covariance of this forest, by Cholesky of each path from the root downwards."""
    result = np.zeros(factor_shape(forest))
    for c in range(forest.n_local):
        path = forest.path[c, : forest.level[c] + 1]
        result[c, : len(path)] = np.linalg.cholesky(cov[np.ix_(path, path)])[-1]
    return result


def logit_groups(successes, size, sd=None):
    """Return the terms of logit models of groups: b_i ~ N(g0, sd or exp(g1)), ``successes`` of ``size`` in each."""
    successes = np.asarray(successes, dtype=float)

    def of_locals(g, b):
        centre = g[:, None, :1]
        log_sd = np.log(sd) if sd is not None else g[:, None, 1:2]
        prior = -0.5 * ((b - centre) / np.exp(log_sd)) ** 2 - log_sd - 0.5 * np.log(2.0 * np.pi)
        return prior + successes * b - size * np.logaddexp(0.0, b)

    def of_globals(g):
        result = -0.5 * (g[:, 0] / 3.0) ** 2
        return result if sd is not None else result - 0.5 * (g[:, 1] / 1.5) ** 2

    return NumpyTerms(of_globals, of_locals)


class Groups:
    """Groups with one effect each, b_i ~ N(mu, tau), and their posterior by brute force on a grid of mu and log tau.

    Parameters
    ----------
    of_eta : callable
        From the linear predictor, (..., n_groups), and data, (n_groups,), to the log likelihood of each group.
    y : array-like, shape (n_groups,)
    centred : bool
    prior_sd : float
        Of tau, half normal; mu is N(0, 3).
    """

    def __init__(self, of_eta, y, centred=True, prior_sd=2.0):
        self._of_eta, self._y, self.centred, self._prior_sd = of_eta, np.asarray(y), centred, prior_sd
        self.forest = singles(len(self._y), 2)
        self.terms = NumpyTerms(self.log_prior, self._of_locals, size=64)

    @classmethod
    def logit(cls, successes, size, **kwargs):
        return cls(lambda eta, y: y * eta - size * softplus(eta), successes, **kwargs)

    @classmethod
    def poisson(cls, counts, **kwargs):
        return cls(lambda eta, y: y * eta - np.exp(eta) - gammaln(y + 1.0), counts, **kwargs)

    @classmethod
    def normal(cls, y, sd, **kwargs):
        """Return Normal data with known sds; ``y`` as complex numbers carries both."""
        both = np.asarray(y) + 1j * np.asarray(sd)
        return cls(
            lambda eta, y: -0.5 * ((y.real - eta) / y.imag) ** 2 - np.log(y.imag) - _HALF_LOG_2PI, both, **kwargs
        )

    def log_prior(self, g):
        of_mu = -0.5 * (g[:, 0] / 3.0) ** 2 - np.log(3.0) - _HALF_LOG_2PI
        of_tau = -0.5 * (np.exp(np.minimum(g[:, 1], 300.0)) / self._prior_sd) ** 2 + g[:, 1]
        return of_mu + of_tau + np.log(2.0 / self._prior_sd) - _HALF_LOG_2PI

    def _of_locals(self, g, local):
        mu, log_tau = g[:, None, :1], g[:, None, 1:]
        if self.centred:
            return -0.5 * ((local - mu) / np.exp(log_tau)) ** 2 - log_tau - _HALF_LOG_2PI + self._of_eta(local, self._y)
        return -0.5 * local**2 - _HALF_LOG_2PI + self._of_eta(mu + np.exp(log_tau) * local, self._y)

    def start(self, g):
        """Return centres to begin with: wide, and not about the right means."""
        n = self.forest.n_local
        return Centres(np.zeros((len(g), n)), np.ones((len(g), n, 1)))

    def brute_force(self, mu, log_tau, n_z=101):
        """Return the log normaliser, and means and sds of mu, log tau and the effects mu + tau z, by grids."""
        y, which, how_often = np.unique(self._y, return_inverse=True, return_counts=True)
        z = np.linspace(-8.0, 8.0, n_z)
        log_weight = -0.5 * z**2 - _HALF_LOG_2PI + np.log(z[1] - z[0])
        g = np.stack(np.meshgrid(mu, log_tau, indexing="ij"), axis=-1).reshape(-1, 2)
        log_m, first, second = np.empty(len(g)), [], []
        for start in range(0, len(g), 256):
            part = slice(start, start + 256)
            b = g[part, None, :1] + np.exp(g[part, None, 1:]) * z[:, None]  # (n, n_z, 1)
            parts = log_weight[:, None] + self._of_eta(b, y)
            total = logsumexp(parts, axis=1)
            log_m[part] = self.log_prior(g[part]) + total @ how_often
            weights = np.exp(parts - total[:, None])
            first.append((weights * b).sum(axis=1))
            second.append((weights * b**2).sum(axis=1))
        w = np.exp(log_m - log_m.max())
        log_normaliser = np.log(w.sum() * (mu[1] - mu[0]) * (log_tau[1] - log_tau[0])) + log_m.max()
        w /= w.sum()
        rim = w.reshape(len(mu), len(log_tau))
        assert max(rim[0].sum(), rim[-1].sum(), rim[:, 0].sum(), rim[:, -1].sum()) < 1e-4
        x = np.concatenate([g, np.concatenate(first)[:, which]], axis=1)
        squares = np.concatenate([g**2, np.concatenate(second)[:, which]], axis=1)
        mean = w @ x
        return BruteForce(log_normaliser, mean, np.sqrt(w @ squares - mean**2), g, w)


class BruteForce(NamedTuple):
    """What a grid says: first the two globals, then the effects; and the grid with its weights."""

    log_normaliser: float
    mean: np.ndarray
    sd: np.ndarray
    g: np.ndarray
    weights: np.ndarray


class Density(NamedTuple):
    """A log density without data."""

    logp: object


def state_of(quadrature, forest, mean, cov, seed=1, log_p=None, others=()):
    """Return the exact posterior, from a Gaussian with these moments of the globals; values cost next to nothing."""
    mean, cov = np.asarray(mean, dtype=float), np.asarray(cov, dtype=float)
    ratios = Ratios.about([], mean)
    return integrated(Density(log_p), forest, quadrature, ratios, mean, cov, seed, 1e-6, others=others)


def exact_state(groups, mean, cov, seed=1):
    """Return the exact posterior of groups."""
    quadrature = TreeIntegral(groups.terms, groups.forest, groups.start, np.sqrt(np.diag(cov)))
    return state_of(quadrature, groups.forest, mean, cov, seed)
