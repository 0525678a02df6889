"""Weighted draws of all coordinates of a posterior."""

from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.sampling import N_PARTS


class JointDraws(NamedTuple):
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
    def of_equal_weight(cls, theta: Array, worth: float = 1.0) -> "JointDraws":
        """Return draws that all weigh the same."""
        number = np.arange(len(theta))
        return cls(theta, np.zeros(len(theta)), number, number % N_PARTS, worth)

    def by_globals(self, log_weights: Array) -> Array:
        """Return the logarithms of weights of different globals, up to a constant: each that of all of its draws."""
        _, number = np.unique(self.of_globals, return_inverse=True)
        with np.errstate(divide="ignore"):
            sums: Array = np.log(np.bincount(number, np.exp(log_weights - log_weights.max())))
        return sums
