"""Weighted pairs of hyperparameters and latent variables: some values of the first, draws of the second at each.

Each value has a Gaussian of its own; a pair has the weight w = p(y, x, theta) / (g(theta) q(x | theta)). Where these
are even, the pairs are the posterior up to simulation error. Where they vary too much given theta, those of theta
alone are taken, by the ELBO of each Gaussian and what it lacks, and the pairs are those of q.
"""

import functools

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.sizes import AT_ONCE
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.sampler import MOST_VARIANCE, mean_variance, normalised_weights
from pymc_ngvi.marginal.sampling import picked, smoothed_weights
from pymc_ngvi.rows.expectation import row_slices

#: Part of the draws at a value of the hyperparameters above which these are those of a mode.
_MOST_OF_DRAWS = 0.5


@stored("nested.pairs")
@dataclass(frozen=True, eq=False)
class WeightedPairs:
    """Weighted pairs of hyperparameters and latent variables."""

    #: Hyperparameters, in an order in which neighbours are near each other; shape (n, p).
    g: Array
    #: Of the proposal of these; shape (n,).
    log_density: Array
    #: log p(y, x, theta) - log q'(x | theta), -inf where p is 0: q' is what x is drawn from; shape (n, m).
    log_ratio: Array
    #: Of log p at these hyperparameters; shape (n,).
    elbo: Array
    #: log m by the ELBO and what it lacks, from a regression; shape (n,).
    log_by_elbo: Array
    #: Draws of the latent variables; shape (n, m, d).
    latents: Array
    #: log q' - log q; empty where all are draws of q; shape (n, m).
    log_mixed: Array = field(default_factory=lambda: np.empty((0, 0)))
    #: How many of the m, the last ones, are drawn from farther out than q.
    n_far: int = 0

    @classmethod
    def joined(cls, parts: "Sequence[WeightedPairs]", own: Sequence[NDArray[np.bool_]]) -> "WeightedPairs":
        """Return the pairs of several modes: of each those that are its own, (n, m), where most of the draws are."""
        rows = [is_own.mean(axis=1) > _MOST_OF_DRAWS for is_own in own]
        n = sum(of.sum() for of in rows)

        def of(name: str) -> Any:
            return np.concatenate([getattr(part, name)[r] for part, r in zip(parts, rows, strict=True)])

        log_n = np.concatenate([np.full(r.sum(), np.log(len(r) / n)) for r in rows])
        log_ratio = np.where(np.concatenate(own)[np.concatenate(rows)], of("log_ratio"), -np.inf)
        return cls(
            of("g"), of("log_density") + log_n, log_ratio, of("elbo"), of("log_by_elbo"), of("latents"),
            of("log_mixed") if len(parts[0].log_mixed) else parts[0].log_mixed, parts[0].n_far,
        )  # fmt: skip

    def lost(self, own: NDArray[np.bool_]) -> float:
        """Return the part of the weight of hyperparameters at which most draws are not those of the mode."""
        weights = normalised_weights(self.log_by_elbo - self.log_density)
        return float(weights[own.mean(axis=1) <= _MOST_OF_DRAWS].sum())

    def __len__(self) -> int:
        """Return the number of pairs."""
        return int(self.log_ratio.size)

    def check(self, n_globals: int, n_local: int) -> None:
        """Raise ValueError where the arrays do not go together."""
        n, m = self.log_ratio.shape
        flat = {a.shape for a in (self.log_density, self.elbo, self.log_by_elbo)}
        shapes = self.g.shape == (n, n_globals) and self.latents.shape == (n, m, n_local)
        mixed = self.log_mixed.shape in {(n, m), (0, 0)} and 0 <= self.n_far < m
        if not (shapes and mixed and flat == {(n,)}):
            raise ValueError("the arrays of the nested posterior do not go together")

    # --- weights ---

    @functools.cached_property
    def variance(self) -> float:
        """Variance of the log weights given the hyperparameters, in the mean over these."""
        return mean_variance(logsumexp(self.log_ratio, axis=1) - self.log_density, self.own_log_ratio)

    @property
    def n_own(self) -> int:
        """Draws of q at each value."""
        return int(self.log_ratio.shape[1]) - self.n_far

    @property
    def own_log_ratio(self) -> Array:
        """Log p - log q at the draws of q, (n, n_own)."""
        own = self.log_ratio[:, : self.n_own]
        return own + self.log_mixed[:, : self.n_own] if self.log_mixed.size else own

    @property
    def is_joint(self) -> bool:
        """Whether pairs are weighted together."""
        return self.variance <= MOST_VARIANCE

    @functools.cached_property
    def log_marginal(self) -> Array:
        """Log m at each value of the hyperparameters, (n,)."""
        if not self.is_joint:
            return self.log_by_elbo
        return logsumexp(self.log_ratio, axis=1) - np.log(self.log_ratio.shape[1])

    @property
    def lacking(self) -> float:
        """Nats that ELBOs lack of log m, in the mean."""
        return float(self.weights @ (self.log_marginal - self.elbo))

    @functools.cached_property
    def _smoothed(self) -> tuple[Array, float]:
        return smoothed_weights(self.log_marginal - self.log_density)

    @property
    def weights(self) -> Array:
        """Of the hyperparameters, (n,); they add up to 1."""
        return self._smoothed[0]

    @property
    def khat(self) -> float:
        """Pareto k-hat of the weights of the hyperparameters."""
        return self._smoothed[1]

    @functools.cached_property
    def of_pairs(self) -> Array:
        """Weights of the pairs, (n, m); they add up to 1."""
        if not self.is_joint:
            is_own = np.arange(self.log_ratio.shape[1]) < self.n_own
            return self.weights[:, None] * np.where(is_own, 1.0 / self.n_own, 0.0)
        # A single pair may have much weight in the tail of what grows fast with the latent variables.
        log_ratio = self.log_ratio - self.log_density[:, None]
        return smoothed_weights(log_ratio.ravel())[0].reshape(log_ratio.shape)

    @property
    def effective_size(self) -> float:
        """Of the pairs."""
        return float(1.0 / np.sum(self.of_pairs**2))

    # --- draws and moments ---

    def pick(self, uniform: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the pairs that uniform numbers pick by weight: the hyperparameters, and the draw given these."""
        rows = picked(self.of_pairs.ravel(), uniform)
        first, second = np.divmod(rows, self.log_ratio.shape[1])
        return first, second

    def log_weights_of(self, g: Array, latents: Array) -> Array:
        """Return the logarithms of the weights of some of the pairs, (n_pairs,); NaN for what is none of them."""
        place: dict[bytes, list[int]] = {}
        for i, row in enumerate(np.ascontiguousarray(self.g)):
            place.setdefault(row.tobytes(), []).append(i)
        result = np.full(len(g), np.nan)
        for i, row in enumerate(np.ascontiguousarray(g)):
            for first in place.get(row.tobytes(), []):
                is_same = (self.latents[first] == latents[i]).all(axis=1)
                if is_same.any():
                    result[i] = np.log(self.of_pairs[first, int(np.argmax(is_same))])
        return result

    def moments(self) -> tuple[Array, Array]:
        """Return means and standard deviations of the latent variables, (d,) each."""
        weights, latents = self.of_pairs.ravel(), self.latents.reshape(len(self), -1)
        mean, variance = weights @ latents, np.zeros(latents.shape[1])
        for rows in row_slices(len(weights), max(1, AT_ONCE // max(len(mean), 1))):
            variance += weights[rows] @ (latents[rows] - mean) ** 2
        return mean, np.sqrt(variance)
