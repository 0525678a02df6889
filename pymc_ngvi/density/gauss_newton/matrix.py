"""The Gauss-Newton matrix of a model, in the place of its Hessian: -sum_i g_i g_i^T, and the Hessian of the prior."""

from collections.abc import Callable

import numpy as np

from pymc_ngvi.core.target import Independent, MeanHessian, Whitener
from pymc_ngvi.core.values import Array, Outer
from pymc_ngvi.density.gauss_newton.diagonal import SquaredGradients
from pymc_ngvi.density.gauss_newton.gradients import RowGradients
from pymc_ngvi.density.gauss_newton.parts import GaussNewtonGraphs
from pymc_ngvi.density.gauss_newton.rest import Rest


class GaussNewtonMatrix:
    """Evaluates the Gauss-Newton matrix. Nothing is built before something is asked for.

    Parameters
    ----------
    parts : GaussNewtonGraphs
    """

    def __init__(self, parts: GaussNewtonGraphs) -> None:
        self.parts = parts
        self.squared, self.gradients, self.rest = SquaredGradients(parts), RowGradients(parts), Rest(parts)

    def mean_diagonal(self, theta: Array) -> Array:
        """Return the mean over draws of the diagonal, (n_dim,); see `LogDensity.gauss_newton`."""
        with np.errstate(all="ignore"):
            return self.rest.mean_diagonal(theta) - self.squared.mean(theta)


class GaussNewtonHessian(MeanHessian):
    """The mean over draws of the Gauss-Newton matrix.

    Parameters
    ----------
    matrix : GaussNewtonMatrix
    theta : ndarray, shape (n_draws, n_dim)
    count : callable
        Counts the evaluation.
    """

    def __init__(self, matrix: GaussNewtonMatrix, theta: Array, count: Callable[[int], None]) -> None:
        self._matrix, self._theta, self._count = matrix, theta, count

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        self._count(len(self._theta))
        return self._matrix.mean_diagonal(self._theta)

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        self._count(len(self._theta))
        with np.errstate(all="ignore"):
            total = self._matrix.rest.mean_products(self._theta, directions)
            for gradients in self._matrix.gradients.at(self._theta):
                total -= (directions @ gradients.T) @ gradients / len(self._theta)
        return total

    def whitened(self, state: Whitener) -> Array:
        """Return the whitened curvature, as a state stores it: outer products of whitened gradients."""
        if isinstance(state, Independent):
            return super().whitened(state)
        self._count(len(self._theta))
        with np.errstate(all="ignore"):
            total = state.curvature(_RestHessian(self._matrix.rest, self._theta))
            for gradients in self._matrix.gradients.at(self._theta):
                whitened = state.whiten(gradients)
                total = total + state.outer_mean(Outer(whitened, whitened, 0.0)) * (len(whitened) / len(self._theta))
        return total


class _RestHessian(MeanHessian):
    def __init__(self, rest: Rest, theta: Array) -> None:
        self._rest, self._theta = rest, theta

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return self._rest.mean_diagonal(self._theta)

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        return self._rest.mean_products(self._theta, directions)
