"""Coordinates without funnels: those whose scale another one is the logarithm of are divided by it.

So it is of the entries of a Cholesky factor beside its diagonal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array

#: Largest logarithm of a scale that coordinates are divided by.
_FARTHEST = 200.0


@stored("exact.ratios")
@dataclass(frozen=True, eq=False)
class Ratios:
    """The map between globals and what is divided."""

    #: Which of the globals are divided, by the exponentials of which, over their values where nothing changes; (k,).
    at: NDArray[np.intp]
    by: NDArray[np.intp]
    centre: Array

    @classmethod
    def about(cls, pairs: Sequence[tuple[int, int]], g: Array) -> "Ratios":
        """Return the map that changes nothing at one value of the globals."""
        at, by = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
        return cls(at, by, g[by])

    def forward(self, g: Array) -> Array:
        """Return what is divided, (n, p)."""
        return self._times(g, -1.0)

    def inverse(self, y: Array) -> Array:
        """Return the globals, (n, p)."""
        return self._times(y, 1.0)

    def _times(self, g: Array, power: float) -> Array:
        result = np.array(g)
        np.multiply.at(result.T, self.at, np.exp(power * self._exponents(g)).T)
        return result

    def log_slope(self, g: Array) -> Array:
        """Return the log determinants of the derivatives of `forward`, (n,)."""
        return -self._exponents(g).sum(axis=1)

    def _exponents(self, g: Array) -> Array:
        return np.clip(g[:, self.by] - self.centre, -_FARTHEST, _FARTHEST)

    def normal(self, mean: Array, cov: Array) -> tuple[Array, Array]:
        """Return mean and covariance of what is divided, to first order."""
        slope, scale = np.eye(len(mean)), np.exp(-self._exponents(mean[None])[0])
        slope[self.at, self.at] = scale
        slope[self.at, self.by] = -mean[self.at] * scale
        return self.forward(mean[None])[0], slope @ cov @ slope.T
