"""A nested posterior as a distribution of flat vectors: hyperparameters from a pool, latent variables given these."""

import functools

from dataclasses import dataclass
from typing import Any

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.fitting import Sampled
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.marginal.regression import Whitening
from pymc_ngvi.marginal.sampling import Pool, Sequences, picked
from pymc_ngvi.nested.emulator import Predicted
from pymc_ngvi.nested.supports import Supports
from pymc_ngvi.nested.verdict import NestedChecks


@stored("nested.state")
@dataclass(frozen=True, eq=False)
class NestedState(PoolState):
    """The posterior of a latent Gaussian model.

    Parameters
    ----------
    globals_, locals_ : ndarray of int
        Coordinates of the hyperparameters, and of the latent variables.
    supports : Supports
        The latent variables given hyperparameters.
    predicted : Predicted
        Their log density, of which more draws may be made.
    checks : NestedChecks
    sampled, sequences, gaussian, number
        See `PoolState`.
    """

    globals_: NDArray[np.intp]
    locals_: NDArray[np.intp]
    supports: Supports
    predicted: Predicted
    checks: NestedChecks

    kind = "nested"
    computed = ("_last", "_moments")

    # --- files ---

    def content(self) -> dict[str, Any]:
        """Return what a file keeps."""
        names = ("sampled", "gaussian", "globals_", "locals_", "supports", "predicted", "checks")
        return {"seed": self.sequences.seed, **{name: getattr(self, name) for name in names}}

    @classmethod
    def of_content(cls, content: dict[str, Any], density: Any) -> "NestedState":
        """Return the posterior on a model: the inverse of `content`.

        Raises
        ------
        ValueError
            If the parts do not go together.
        """
        parts = dict(content)
        kinds = {"sampled": Sampled, "supports": Supports, "predicted": Predicted, "checks": NestedChecks}
        for name, kind in kinds.items():
            if not isinstance(parts[name], kind):
                raise ValueError(f"what the nested posterior has as {name!r} is something else")
        index = np.concatenate([parts["globals_"], parts["locals_"]])
        fits = np.array_equal(np.sort(index), np.arange(density.n_dim))
        if not fits or parts["supports"].n_dim != len(parts["locals_"]) or parts["gaussian"].n_dim != density.n_dim:
            raise ValueError("the nested posterior is of another dimension")
        parts["sampled"].pool.check(len(parts["globals_"]))
        return cls(sequences=Sequences(parts["predicted"], parts.pop("seed")), **parts)

    # --- draws ---

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return len(self.globals_) + len(self.locals_)

    @property
    def n_uniform(self) -> int:
        """Uniform numbers behind a draw."""
        return 1

    def log_normaliser(self) -> tuple[float, float]:
        """Return the logarithm of the integral of exp(log p), and its error, with that of log m."""
        value, se = self.pool.log_normaliser()
        return value, float(np.hypot(se, self.checks.error))

    def elbo(self) -> tuple[float, float]:
        """Return the ELBO of the distribution of hyperparameters and latent variables, and its error, nats."""
        value, se = self.log_normaliser()
        return value - self.checks.lacking, se

    def draws(self, base: Array) -> Array:
        """Map base draws to draws: normals, of which some have no part, and behind them a uniform."""
        rows = picked(self.weights, base[:, self.n_dim])
        return self._joined(self.pool, rows, base[:, : len(self.locals_)])

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """Return ``n`` draws of equal weight; the pool they are taken from is made larger for many."""
        pool = self.for_draws(n)
        weights = self.weights if pool is self.pool else pool.weights()[0]
        rows = picked(weights, rng.permutation((np.arange(n) + rng.random()) / n))
        return self._joined(pool, rows, rng.standard_normal((n, len(self.locals_))))

    def _joined(self, pool: Pool, rows: NDArray[np.intp], base: Array) -> Array:
        theta = np.empty((len(rows), self.n_dim))
        theta[:, self.globals_] = pool.g[rows]
        theta[:, self.locals_] = self.supports.draw(self._standardised(pool.g[rows]), base)
        return theta

    # --- moments ---

    def mean(self) -> Array:
        """Return the mean, (n_dim,)."""
        return self._moments[0].copy()

    def sd(self) -> Array:
        """Return the standard deviations, (n_dim,)."""
        return self._moments[1].copy()

    @functools.cached_property
    def _moments(self) -> tuple[Array, Array]:
        mean, sd = np.empty(self.n_dim), np.empty(self.n_dim)
        g, weights = self.pool.g, self.weights
        mean[self.globals_] = weights @ g
        sd[self.globals_] = np.sqrt(weights @ (g - mean[self.globals_]) ** 2)
        mean[self.locals_], sd[self.locals_] = self.supports.moments(self._standardised(g), weights)
        return mean, sd

    def cov(self) -> Array:
        """Return the covariance, (n_dim, n_dim)."""
        return self.cov_block(np.arange(self.n_dim))

    def cov_block(self, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates, (len(index), len(index))."""
        place = np.full(self.n_dim, -1, dtype=np.intp)
        place[self.locals_] = np.arange(len(self.locals_))
        index = np.asarray(index)
        is_local = place[index] >= 0
        local = place[index][is_local]
        points = self._standardised(self.pool.g)
        together = np.empty((len(points), len(index)))
        together[:, ~is_local] = self.pool.g[:, np.searchsorted(self.globals_, index[~is_local])]
        together[:, is_local] = self.supports.mean(points, local)
        together -= self.weights @ together
        result: Array = (self.weights[:, None] * together).T @ together
        result[np.ix_(is_local, is_local)] += self.supports.covariance(points, self.weights, local)
        return result

    @property
    def whitening(self) -> Whitening:
        """Standardises the hyperparameters."""
        return self.predicted.whitening

    def _standardised(self, g: Array) -> Array:
        return self.whitening.whitened(g)
