"""A nested posterior as a distribution of flat vectors: weighted pairs of hyperparameters and latent variables."""

import functools

from dataclasses import dataclass
from typing import Any

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.marginal.sampling import Pool, Sampled, Sequences, evenly_picked
from pymc_ngvi.nested.earlier import pairs_of_earlier
from pymc_ngvi.nested.emulator import Predicted
from pymc_ngvi.nested.pairs import WeightedPairs
from pymc_ngvi.nested.verdict import NestedChecks

#: Interleaved parts of the values of the hyperparameters, whose spread is the error of the normalising constant.
_N_PARTS = 8


def sampled_of(pairs: WeightedPairs, proposal: Any, bend: Any) -> Sampled:
    """Return the hyperparameters of some pairs as what pools are made of."""
    n = len(pairs.g)
    pool = Pool(
        pairs.g, pairs.log_marginal, pairs.log_density, np.arange(n) % _N_PARTS, np.zeros(n, dtype=bool)
    )  # neighbours are in different parts
    return Sampled(pool, proposal, bend, 0.0, n)


@stored("nested.state")
@dataclass(frozen=True, eq=False)
class NestedState(PoolState):
    """The posterior of a latent Gaussian model.

    Parameters
    ----------
    globals_, locals_ : ndarray of int
        Coordinates of the hyperparameters, and of the latent variables.
    pairs : WeightedPairs
        Of hyperparameters and latent variables.
    predicted : Predicted
        The log density of the hyperparameters.
    checks : NestedChecks
    sampled, sequences, gaussian, number
        See `PoolState`.
    """

    globals_: NDArray[np.intp]
    locals_: NDArray[np.intp]
    pairs: WeightedPairs
    predicted: Predicted
    checks: NestedChecks

    kind = "nested"
    computed = ("_last", "_moments", "_smoothed")

    # --- files ---

    def content(self) -> dict[str, Any]:
        """Return what a file keeps."""
        names = ("sampled", "gaussian", "globals_", "locals_", "pairs", "predicted", "checks")
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
        if "supports" in parts:
            parts = pairs_of_earlier(parts)
            sampled = parts["sampled"]
            parts["sampled"] = sampled_of(parts["pairs"], sampled.proposal, sampled.bend)
        kinds = {"sampled": Sampled, "pairs": WeightedPairs, "predicted": Predicted, "checks": NestedChecks}
        for name, kind in kinds.items():
            if not isinstance(parts[name], kind):
                raise ValueError(f"what the nested posterior has as {name!r} is something else")
        index = np.concatenate([parts["globals_"], parts["locals_"]])
        fits = np.array_equal(np.sort(index), np.arange(density.n_dim))
        if not fits or parts["gaussian"].n_dim != density.n_dim:
            raise ValueError("the nested posterior is of another dimension")
        parts["pairs"].check(len(parts["globals_"]), len(parts["locals_"]))
        parts["sampled"].pool.check(len(parts["globals_"]))
        return cls(sequences=Sequences(parts["predicted"], parts.pop("seed")), **parts)

    # --- weights ---

    @functools.cached_property
    def _smoothed(self) -> tuple[Array, float]:
        return self.pairs.weights, self.pairs.khat

    def for_draws(self, n: int) -> Pool:
        """Return the pool: there is no other."""
        return self.pool

    def effective_size_for(self, n: int) -> float:
        """Return the effective size of the pairs that ``n`` draws are taken from."""
        return self.pairs.effective_size

    def effective_size_for_globals(self, n: int) -> float:
        """Return the effective size of the hyperparameters."""
        return self.effective_size

    def effective_for(self, n: int) -> float:
        """Return how many independent draws ``n`` of its draws are worth."""
        return min(float(n), self.pairs.effective_size)

    def draws_with_ratio(self, n: int) -> tuple[Array, Array] | None:
        """Return all draws at ``n`` values of the hyperparameters, picked by weight, and log p - log q.

        None where pairs are weighted together, and of an earlier version, which has no such weights.
        """
        if self.pairs.is_joint:
            return None
        rows = evenly_picked(self.weights, n, 0.5)
        latents = self.pairs.latents[rows, : self.pairs.n_own]
        theta = np.empty((*latents.shape[:2], self.n_dim))
        theta[:, :, self.globals_] = self.pairs.g[rows][:, None]
        theta[:, :, self.locals_] = latents
        return theta, self.pairs.own_log_ratio[rows]

    def weight_of(self, theta: Array) -> Array:
        """Return the log weights of pairs, (n_draws,); NaN for what is none of these draws."""
        return self.pairs.log_weights_of(theta[:, self.globals_], theta[:, self.locals_])

    def log_normaliser(self) -> tuple[float, float]:
        """Return the logarithm of the integral of exp(log p), and its error, with that of log m."""
        value, se = self.pool.log_normaliser()
        return value, float(np.hypot(se, self.checks.error))

    def elbo(self) -> tuple[float, float]:
        """Return the ELBO of the distribution of hyperparameters and latent variables, and its error, nats."""
        value, se = self.log_normaliser()
        return value - self.checks.lacking, se

    # --- draws ---

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return len(self.globals_) + len(self.locals_)

    @property
    def n_uniform(self) -> int:
        """Uniform numbers behind a draw."""
        return 1

    def draws(self, base: Array) -> Array:
        """Map base draws to draws: normals, which have no part, and behind them a uniform."""
        return self._picked(base[:, self.n_dim])

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """Return ``n`` draws of equal weight: as few repetitions as can be."""
        return self._picked(rng.permutation((np.arange(n) + rng.random()) / n))

    def _picked(self, uniform: Array) -> Array:
        first, second = self.pairs.pick(uniform)
        theta = np.empty((len(uniform), self.n_dim))
        theta[:, self.globals_] = self.pairs.g[first]
        theta[:, self.locals_] = self.pairs.latents[first, second]
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
        mean[self.locals_], sd[self.locals_] = self.pairs.moments()
        return mean, sd

    def cov(self) -> Array:
        """Return the covariance, (n_dim, n_dim)."""
        return self.cov_block(np.arange(self.n_dim))

    def cov_block(self, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates, (len(index), len(index)): correlations are those of the pairs."""
        index = np.asarray(index)
        place = np.empty(self.n_dim, dtype=np.intp)
        place[self.globals_] = np.arange(len(self.globals_))
        place[self.locals_] = np.arange(len(self.locals_))
        is_local = np.isin(index, self.locals_)
        g, x = self.pairs.correlations(place[index[is_local]])
        columns = np.empty((len(g), len(index)))
        columns[:, ~is_local] = g[:, place[index[~is_local]]]
        columns[:, is_local] = x
        sd = self._moments[1][index]
        result: Array = (columns.T @ columns) * np.outer(sd, sd)
        result[np.arange(len(index)), np.arange(len(index))] = sd**2
        return result
