"""What all Gaussians share, whatever they hold of the covariance."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from pymc_ngvi.core.types import Array, Outer


@dataclass(frozen=True)
class Gaussian:
    """A mean.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    """

    location: Array

    n_uniform = 0

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return len(self.location)

    def mean(self) -> Array:
        """Return a copy of the mean."""
        return self.location.copy()

    def add_to_diagonal(self, curvature: Array, value: float) -> Array:
        """Return A + value * I."""
        raise NotImplementedError

    def curvature_error(self, curvature: Array) -> Array:
        """Return A - I."""
        return self.add_to_diagonal(curvature, -1.0)

    def outer(self, whitened: Array, z: Array) -> Outer:
        """Order whitened gradients and base draws: the lower triangle is that of E[w z^T]."""
        return Outer(whitened, z, 0.0)

    def outer_diagonal(self, outer: Outer) -> Array:
        """Return the diagonal of the mean of outer products."""
        result: Array = np.einsum("bi,bi->i", outer.left, outer.right) / len(outer.left) + outer.diagonal
        return result

    def divided_by_function(
        self, curvature: Array, function: Callable[[Array], Array], grad: Array
    ) -> tuple[Self, Array] | None:
        """Return None: not every family can divide by a function of the eigenvalues of a curvature."""
        return None
