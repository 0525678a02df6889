"""Gradients of a sum over rows at many points: derivatives of each row by its predictors, and products with X."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.expectation import Compiled, row_slices
from pymc_ngvi.rows.linear_map import AffineMap

#: Numbers in the predictors of points, and in the derivatives of rows, that are computed at once.
_MOST_AT_ONCE = 2**20


@dataclass(frozen=True, eq=False)
class FirstDerivatives:
    """Rows with their derivatives by their predictors, those alone that are not 0 everywhere."""

    #: Returns the value and the derivatives, at most (n_points, n_rows), from predictors and data.
    function: Compiled
    #: The predictors of each row; shape (n_rows, k).
    index: NDArray[np.int64]
    #: By which predictor of a row each derivative is.
    by: list[int]
    #: (1, n_rows) or (1, 1) each.
    data: list[Array]
    #: How many of the first predictors are the same for all rows: the function takes these with one column.
    n_shared: int = 0

    def _is_one(self, a: int) -> bool:
        return a < self.n_shared or len(self.index) == 1

    @property
    def places(self) -> list[NDArray[np.int64]]:
        """The predictors that derivatives are by, for each of ``by``: one where all rows share it."""
        return [self.index[:1, a] if self._is_one(a) else self.index[:, a] for a in self.by]

    def __call__(self, eta: Array) -> tuple[Array, list[Array]]:
        """Return the sum over rows, (n_points,), and derivatives, (n_places, n_points) each, at predictors."""
        shape = len(eta), len(self.index)
        predictors = [
            eta[:, self.index[:1, a] if self._is_one(a) else self.index[:, a]] for a in range(int(self.index.shape[1]))
        ]
        value, *slopes = (np.broadcast_to(x, shape) for x in self.function(*predictors, *self.data))
        of_places = [
            slope.sum(axis=1)[None] if self._is_one(a) else slope.T for a, slope in zip(self.by, slopes, strict=True)
        ]
        return value.sum(axis=1), of_places


class RowGradient:
    """A sum over rows with its gradient."""

    def __init__(self, linear: AffineMap, slope: Array, derivatives: Sequence[FirstDerivatives]) -> None:
        self._linear, self._slope, self._kinds = linear, slope, derivatives
        places = np.concatenate([np.empty(0, dtype=np.int64), *(at for kind in derivatives for at in kind.places)])
        entries = np.ones(len(places)), (places, np.arange(len(places)))
        self._to_predictors = sparse.csr_array(entries, shape=(len(slope), len(places)))

    @np.errstate(all="ignore")  # densities overflow far from the mode: the caller sees what is not finite
    def __call__(self, theta: Array) -> tuple[Array, Array]:
        """Return the sum, (n_points,), and its gradient, (n_points, n_dim), at points (n_points, n_dim)."""
        at_once = max(1, _MOST_AT_ONCE // max(*self._to_predictors.shape, 1))
        total, grad = np.empty(len(theta)), np.empty(theta.shape)
        for at in row_slices(len(theta), at_once):
            total[at], grad[at] = self._few(theta[at])
        return total, grad

    def _few(self, theta: Array) -> tuple[Array, Array]:
        eta = self._linear(theta)
        total: Array = eta @ self._slope
        slopes, start = np.empty((self._to_predictors.shape[1], len(theta))), 0
        for kind in self._kinds:
            value, found = kind(eta)
            total += value
            for part in found:
                slopes[start : start + len(part)] = part
                start += len(part)
        by_predictor: Array = self._to_predictors @ slopes
        by_predictor += self._slope[:, None]
        return total, self._linear.transposed_times(by_predictor.T)
