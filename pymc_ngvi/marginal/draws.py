"""Weighted draws of all coordinates of a posterior."""

from typing import NamedTuple, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.psis import effective_size
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.sampling import N_PARTS


class Draws(NamedTuple):
    """Weighted draws of all coordinates."""

    #: shape (n, n_dim).
    theta: Array
    #: Up to a constant; -inf for a draw that does not count; shape (n,).
    log_weights: Array
    #: Equal where the globals are; shape (n,).
    of_globals: NDArray[np.intp]
    #: Which of some independent parts a draw is of; shape (n,).
    part: NDArray[np.intp]
    #: Independent draws that one of them is worth, in the mean, where all weigh the same.
    worth: float = 1.0

    @classmethod
    def of_equal_weight(cls, theta: Array, worth: float = 1.0) -> Self:
        """Return draws that all weigh the same."""
        number = np.arange(len(theta))
        return cls(theta, np.zeros(len(theta)), number, number % N_PARTS, worth)

    def reweighted(self, log_ratio: Array) -> Self:
        """Return the same draws, their weights times a ratio of densities; where it is NaN, a draw does not count."""
        return self._replace(log_weights=self.log_weights + np.where(np.isnan(log_ratio), -np.inf, log_ratio))

    @property
    def counts(self) -> NDArray[np.bool_]:
        """Which draws have any weight."""
        return np.isfinite(self.log_weights)

    @property
    def effective_size(self) -> float:
        """How many independent draws they are worth; where globals repeat, how many of these."""
        return min(self.worth * effective_size(self.log_weights), effective_size(self.by_globals()))

    def by_globals(self) -> Array:
        """Return the logarithms of weights of different globals, up to a constant: each that of all of its draws."""
        _, number = np.unique(self.of_globals, return_inverse=True)
        with np.errstate(divide="ignore"):
            sums: Array = np.log(np.bincount(number, np.exp(self.log_weights - self.log_weights.max())))
        return sums
