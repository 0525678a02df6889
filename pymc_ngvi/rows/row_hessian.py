"""Mean Hessians over draws of a sum over rows: elementwise second derivatives of each row, and products with X."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.covariances import consecutive
from pymc_ngvi.rows.expectation import Compiled
from pymc_ngvi.rows.linear_map import AffineMap

#: Predictors of a row whose second derivatives are quickly compiled.
FEW_PREDICTORS = 5
#: Values of a second derivative that are computed at a time; numbers in the predictors of draws.
_CACHED, _MOST_ELEMENTS = 2**16, 2**22
#: Fourth power of the step of the differences that check a Hessian, for values and curvatures of about 1, and the
#: relative error that tells of a wrong one.
_STEP, _TOLERANCE = 1e-14, 1e-3


@dataclass(frozen=True, eq=False)
class SecondDerivatives:
    """The second derivatives of rows by their predictors, those alone that are not 0 everywhere."""

    #: Returns the derivative by each pair, at most (n_points, n_rows), from predictors and data.
    function: Compiled
    #: The predictors of each row; shape (n_rows, k).
    index: NDArray[np.int64]
    #: Predictors of a row, the first not before the second; shape (int, int).
    pairs: list[tuple[int, int]]
    #: (1, n_rows) or (1, 1) each.
    data: list[Array]
    #: How many of the first predictors are the same for all rows: the function takes these with one column.
    n_shared: int = 0

    def add(self, eta: Array, total: Array) -> None:
        """Add the sums over draws to a total, (n_pairs, n_rows); ``eta`` is (n_draws, n_predictors)."""
        at_a_time = getattr(self.function, "at_a_time", _CACHED)
        n_rows = min(len(self.index), at_a_time)  # rows of one draw lie side by side
        size = max(1, at_a_time // n_rows)
        for draws in (slice(start, start + size) for start in range(0, len(eta), size)):
            for rows in (slice(start, start + n_rows) for start in range(0, len(self.index), n_rows)):
                columns = [c[rows] if a >= self.n_shared else c[:1] for a, c in enumerate(self.index.T)]
                predictors = [eta[draws, consecutive(column)] for column in columns]
                data = [d if d.shape[1] == 1 else d[:, rows] for d in self.data]
                with np.errstate(all="ignore"):  # densities overflow far from the mode: the caller sees it
                    for number, values in enumerate(self.function(*predictors, *data)):
                        at_all = np.broadcast_to(values, (len(predictors[0]), total[number, rows].shape[0]))
                        total[number, rows] += at_all.sum(axis=0)

    def entries(self, mean: Array) -> Iterator[tuple[Array, Ints, Ints]]:
        """Return values, rows and columns of the Hessian by all predictors, from means, (n_pairs, n_rows)."""
        for (a, b), values in zip(self.pairs, mean, strict=True):
            yield values, self.index[:, a], self.index[:, b]
            if a != b:
                yield values, self.index[:, b], self.index[:, a]


class RowHessian:
    """Mean Hessians over draws."""

    def __init__(self, linear: AffineMap, derivatives: list[SecondDerivatives]) -> None:
        self.linear = linear
        self._kinds = [kind for kind in derivatives if kind.pairs]

    def mean(self, theta: Array) -> sparse.csr_array:
        """Return the mean Hessian with respect to the predictors over draws, (n_draws, n_dim)."""
        n = len(self.linear.offset)
        totals = [np.zeros((len(kind.pairs), len(kind.index))) for kind in self._kinds]
        size = max(1, _MOST_ELEMENTS // max(n, 1))
        for start in range(0, len(theta), size):
            eta = self.linear(theta[start : start + size])
            for kind, total in zip(self._kinds, totals, strict=True):
                kind.add(eta, total)
        parts = [p for kind, total in zip(self._kinds, totals, strict=True) for p in kind.entries(total / len(theta))]
        if not parts:
            return sparse.csr_array((n, n))
        values, i, j = (np.concatenate(part) for part in zip(*parts, strict=True))
        return sparse.csr_array((values, (i, j)), shape=(n, n))

    def agrees(self, point: Array, values: Callable[[Array], Array], rng: np.random.Generator) -> bool:
        """Tell whether the curvature at a point, along a random line, is what differences of values are there."""
        matrix, along = self.mean(point[None]), rng.standard_normal((1, len(point)))
        moved = self.linear.times(along)[0]
        size = float(np.abs(moved) @ (abs(matrix) @ np.abs(moved)))
        [here] = values(point[None])
        if not (size > 0.0 and np.isfinite(size) and np.isfinite(here)):
            return True
        step = (_STEP * (1.0 + abs(here)) / size) ** 0.25
        low, high = values(np.concatenate([point - step * along, point + step * along]))
        apart = (low - here) + (high - here) - step**2 * float(moved @ (matrix @ moved))
        return not np.isfinite(apart) or abs(apart) <= _TOLERANCE * step**2 * size
