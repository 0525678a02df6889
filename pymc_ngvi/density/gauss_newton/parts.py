"""A log density taken apart for Gauss-Newton: the log densities of rows, their scales, and the rest."""

import functools

from collections.abc import Iterator

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.graph.basic import Variable
from pytensor.graph.utils import MethodNotDefined

from pymc_ngvi.core.sparsity.coloured import CACHED_ELEMENTS, slices
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.flat import FlatGraphs, Functions
from pymc_ngvi.density.rows import LikelihoodRows
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c

#: What PyTensor raises where an operation has no derivative.
NO_DERIVATIVE = (NotImplementedError, MethodNotDefined, TypeError)


class GaussNewtonGraphs:
    """The graphs on the flat vector; nothing is built before it is asked for."""

    def __init__(
        self, graphs: FlatGraphs, functions: Functions, rows: LikelihoodRows, start: Array, widest: int
    ) -> None:
        self.graphs, self.functions, self.start, self.widest = graphs, functions, start, widest
        self._rows = rows
        self.n_in_call = int(np.clip(2 * CACHED_ELEMENTS // max(widest, 1), 16, 4096))

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: graphs are made again."""
        return {name: value for name, value in self.__dict__.items() if name != "_made"}

    @functools.cached_property
    def _made(self) -> tuple[list[Variable], list[Variable], Variable]:
        with without_c():
            rows, scales, rest = self._rows.graphs()
            *rows, rest = self.graphs.simplify(self.graphs.on_flat_vector([*rows, *scales, rest]))
        return rows[: len(scales)], rows[len(scales) :], rest

    @property
    def theta(self) -> Variable:
        """The flat vector."""
        return self.graphs.theta

    @property
    def rows(self) -> list[Variable]:
        """Log densities of the elements of observed variables."""
        return self._made[0]

    @property
    def scales(self) -> list[Variable]:
        """The factors in them: ``total_size`` / batch size."""
        return self._made[1]

    @property
    def rest(self) -> Variable:
        """The rest of log p."""
        return self._made[2]

    @property
    def n_rows(self) -> int | None:
        """Rows in all; None where their number is not fixed."""
        sizes = [size_of(row) for row in self.rows]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def gradients_of_units(self) -> tuple[Variable, Variable]:
        """Return a matrix of weights of rows, (n, n_rows), and the gradients of their sums, (n, n_dim).

        A row counts without its scale, but for the root of it.
        """
        with without_c():
            unit = pt.vector("unit", dtype="float64", shape=(self.n_rows,))
            ends = np.cumsum([0, *[size_of(row) or 0 for row in self.rows]])
            weights = [
                unit[a:b].reshape(row.type.shape) / pt.sqrt(s)
                for row, s, a, b in zip(self.rows, self.scales, ends[:-1], ends[1:], strict=True)
            ]
            [grad] = self.graphs.simplify([weighted_gradient(self.rows, weights, self.theta)])
            return graph.over_directions(grad, unit)

    def derivatives_along(self) -> tuple[Variable, list[Variable]]:
        """Return a direction, and the derivatives of all rows along it, with their scales."""
        direction = self.theta.type("direction")
        return direction, graph.row_derivatives(self.rows, self.theta, direction)


def weighted_gradient(rows: list[Variable], weights: list[Variable], theta: Variable) -> Variable:
    """Return the gradient of the weighted sum of all rows."""
    total = pt.add(pt.constant(0.0), *[(w * row).sum() for w, row in zip(weights, rows, strict=True)])
    return graph.gradient(total, theta)


def size_of(row: Variable) -> int | None:
    """Return the number of elements; None where it is not fixed."""
    return None if None in row.type.shape else int(np.prod(row.type.shape))


def units(n: int, n_in_call: int) -> Iterator[tuple[NDArray[np.intp], Array]]:
    """Go through the unit vectors of n dimensions, a block at a time, with their indices."""
    for rows in slices(n, n_in_call):
        at = np.arange(rows.start, rows.stop)
        block = np.zeros((len(at), n))
        block[at - rows.start, at] = 1.0
        yield at, block
