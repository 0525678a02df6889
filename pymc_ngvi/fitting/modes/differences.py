"""Curvatures of log p from differences of gradients: no second derivative is built, or compiled."""

from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.target import Density, MeanHessian, Whitener
from pymc_ngvi.core.types import Array

#: Length of differences: directions are those of a Gaussian of about the right width.
_LENGTH = 1e-4


@dataclass(frozen=True, eq=False)
class CurvedByDifferences:
    """A log density whose Hessian comes from differences of gradients, at one point at a time.

    Parameters
    ----------
    density : Density
    """

    density: Density
    has_hessian = True

    def mean_hessian(self, theta: Array) -> "HessianByDifferences":
        """Return the Hessian at the only point."""
        [point] = theta
        return HessianByDifferences(self.density, point)


@dataclass(frozen=True, eq=False)
class HessianByDifferences(MeanHessian):
    """The Hessian at a point.

    Parameters
    ----------
    density : Density
    point : ndarray, shape (n_dim,)
    """

    density: Density
    point: Array

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        ahead, behind = (self.density.logp_grad(self.point + side * directions)[1] for side in (_LENGTH, -_LENGTH))
        return (ahead - behind) / (2.0 * _LENGTH)

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return np.diagonal(self.products(np.eye(len(self.point)))).copy()

    def whitened(self, state: Whitener) -> Array:
        """Return the whitened curvature, as a state stores it."""
        return state.curvature(self)
