"""Mean Hessians over draws of a sum over rows: elementwise second derivatives of each row, and products with X."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.compile import Function
from pytensor.graph.basic import Variable, equal_computations
from scipy import sparse

from pymc_ngvi.core.values import Array
from pymc_ngvi.model.graphs import graph
from pymc_ngvi.model.graphs.backends import without_c
from pymc_ngvi.model.predictors.compiled import CompiledOnce
from pymc_ngvi.model.predictors.linear_map import AffineMap
from pymc_ngvi.model.predictors.terms import Rows
from pymc_ngvi.model.sparsity.dependence_sets import Ints

#: Predictors of a row whose second derivatives are quickly compiled.
FEW_PREDICTORS = 5
#: Values of a second derivative that are computed at a time; numbers in the predictors of draws.
_CACHED, _MOST_ELEMENTS = 2**16, 2**22
#: Fourth power of the step of the differences that check a Hessian, for values and curvatures of about 1, and the
#: relative error that tells of a wrong one.
_STEP, _TOLERANCE = 1e-14, 1e-3


@dataclass(frozen=True, eq=False)
class SecondDerivatives:
    """The second derivatives of rows by their predictors, those alone that are not 0 everywhere.

    Parameters
    ----------
    rows : Rows
    pairs : list of (int, int)
        Predictors of a row, the first not before the second.
    graphs : list of pytensor variables
        The derivative by each pair, (n_points, n_rows).
    """

    rows: Rows
    pairs: list[tuple[int, int]]
    graphs: list[Variable]

    @classmethod
    def of(cls, rows: Rows) -> "SecondDerivatives":
        """Differentiate rows.

        Raises
        ------
        MissingDerivativeError
            If an operation has no second derivative.
        """
        pairs, graphs = [], []
        with without_c():
            [value] = graph.with_branches([rows.value])
            for a, slope in enumerate(graph.slopes(value.sum(), rows.slots, "first")):
                if slope is None:
                    continue
                for b, second in enumerate(graph.slopes(slope.sum(), rows.slots[: a + 1], "second")):
                    if second is not None:
                        pairs.append((a, b))
                        graphs.append(second)
        return cls(rows, pairs, graphs)

    def of_alike(self, rows: Rows) -> "SecondDerivatives | None":
        """Return those of rows that are the same function, of other predictors and data; None for another function."""
        old, new = [*self.rows.slots, *self.rows.data], [*rows.slots, *rows.data]
        alike = [v.type for v in old] == [v.type for v in new]
        if not alike or not equal_computations([rows.value], [self.rows.value], new, old):
            return None
        data = dict(zip(self.rows.data, rows.data.values(), strict=True))
        return replace(self, rows=replace(self.rows, index=rows.index, data=data))

    def compile(self, compile_: CompiledOnce) -> "CompiledDerivatives":
        """Return what evaluates them."""
        [first, *_] = self.rows.slots
        function = compile_([*self.rows.slots, *self.rows.data], [g + pt.zeros_like(first) for g in self.graphs])
        return CompiledDerivatives(function, self.rows.index, self.pairs, list(self.rows.data.values()))


@dataclass(frozen=True, eq=False)
class CompiledDerivatives:
    """Evaluates the second derivatives of rows.

    Parameters
    ----------
    function : Function
    index : ndarray of int, shape (n_rows, k)
        The predictors of each row.
    pairs : list of (int, int)
    data : list of ndarray
        (1, n_rows) or (1, 1) each.
    """

    function: Function
    index: NDArray[np.int64]
    pairs: list[tuple[int, int]]
    data: list[Array]

    def add(self, eta: Array, total: Array) -> None:
        """Add the sums over draws to a total, (n_pairs, n_rows); ``eta`` is (n_draws, n_predictors)."""
        n_rows = min(len(self.index), _CACHED)  # rows of one draw lie side by side
        size = max(1, _CACHED // n_rows)
        for draws in (slice(start, start + size) for start in range(0, len(eta), size)):
            for rows in (slice(start, start + n_rows) for start in range(0, len(self.index), n_rows)):
                predictors = [eta[draws, _places(column[rows])] for column in self.index.T]
                data = [d if d.shape[1] == 1 else d[:, rows] for d in self.data]
                with np.errstate(all="ignore"):  # densities overflow far from the mode: the caller sees it
                    for number, values in enumerate(self.function(*predictors, *data)):
                        total[number, rows] += np.asarray(values).sum(axis=0)

    def entries(self, mean: Array) -> Iterator[tuple[Array, Ints, Ints]]:
        """Return values, rows and columns of the Hessian by all predictors, from means, (n_pairs, n_rows)."""
        for (a, b), values in zip(self.pairs, mean, strict=True):
            yield values, self.index[:, a], self.index[:, b]
            if a != b:
                yield values, self.index[:, b], self.index[:, a]


class RowHessian:
    """Mean Hessians over draws.

    Parameters
    ----------
    linear : AffineMap
        The predictors.
    derivatives : list of SecondDerivatives
    compile_ : CompiledOnce
    """

    def __init__(self, linear: AffineMap, derivatives: list[SecondDerivatives], compile_: CompiledOnce) -> None:
        self.linear = linear
        self._kinds = [d.compile(compile_) for d in derivatives if d.pairs]

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
        """Tell whether the curvature at a point, along a random line, is what differences of values are there.

        Parameters
        ----------
        point : ndarray, shape (n_dim,)
        values : callable
            Sums over rows at points, (n_points, n_dim).
        rng : Generator
        """
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


def _places(index: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Return a slice where an index is one: no copy is made then."""
    if len(index) and index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return index
