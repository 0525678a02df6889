"""A log density with some of its coordinates held: they get a narrow Gaussian of their own."""

from typing import Any

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.types import Array, TargetDensity


class Held:
    """The density of the other coordinates given some, times a Gaussian of these.

    A fit of it is one of the conditional posterior, by any family, in the coordinates of the whole.

    Parameters
    ----------
    target : TargetDensity
        Counts the evaluations.
    index : ndarray of int, shape (n_held,)
        Coordinates that are held.
    point, sd : ndarray, shape (n_held,)
        Of their Gaussian; what the others are given is ``point``.
    """

    def __init__(self, target: TargetDensity, index: NDArray[np.intp], point: Array, sd: Array) -> None:
        self._target, self._index, self._point, self._sd = target, index, point, sd
        self.n_dim, self.has_hessian, self.has_minibatch = target.n_dim, target.has_hessian, target.has_minibatch

    @property
    def pattern(self) -> Pattern | None:
        """That of the whole."""
        return self._target.pattern

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p, (n_draws,), and its gradient, (n_draws, n_dim)."""
        logp, grad = self._target.logp_grad(self._given(theta))
        standard = (theta[:, self._index] - self._point) / self._sd
        grad = grad.copy()
        grad[:, self._index] = -standard / self._sd
        return logp - 0.5 * np.sum(standard**2, axis=1), grad

    def mean_hessian_products(self, theta: Array, directions: Array) -> Array:
        """Return the mean over draws of hess log p times each direction, (n_directions, n_dim)."""
        free = directions.copy()
        free[:, self._index] = 0.0
        products = self._target.mean_hessian_products(self._given(theta), free)
        products[:, self._index] = -directions[:, self._index] / self._sd**2
        return products

    def mean_hessian_diagonal(self, theta: Array) -> Array:
        """Return the mean over draws of the diagonal of hess log p, (n_dim,)."""
        diagonal = self._target.mean_hessian_diagonal(self._given(theta))
        diagonal[self._index] = -(self._sd**-2)
        return diagonal

    def mean_hessian_values(self, theta: Array) -> Array:
        """Return the mean over draws of hess log p in the entries of ``pattern``, (n_entries,)."""
        values = self._target.mean_hessian_values(self._given(theta)).copy()
        pattern: Any = self.pattern
        is_held = np.zeros(self.n_dim, dtype=bool)
        is_held[self._index] = True
        values[is_held[pattern.rows] | is_held[pattern.cols]] = 0.0
        variance = np.ones(self.n_dim)
        variance[self._index] = self._sd**2
        own = is_held[pattern.rows] & (pattern.rows == pattern.cols)
        values[own] = -1.0 / variance[pattern.rows[own]]
        return values

    def mean_gauss_newton_diagonal(self, theta: Array) -> Array:
        """Return the mean over draws of the Gauss-Newton diagonal, (n_dim,)."""
        diagonal = self._target.mean_gauss_newton_diagonal(self._given(theta))
        diagonal[self._index] = self._sd**-2
        return diagonal

    def curvature(self, state: Any, theta: Array) -> Array:
        """Return the whitened curvature of the mean Hessian at the rows of ``theta``, as a state stores it."""
        result: Array = state.curvature(self, theta)
        return result

    def _given(self, theta: Array) -> Array:
        given = theta.copy()
        given[:, self._index] = self._point
        return given
