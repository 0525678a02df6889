"""The sums over rows of squared gradients: the diagonal of the Gauss-Newton matrix.

Squares are found in one of three ways. By layers: one backward pass for all rows, where the graph shows that rows do
not depend on each other, and a check on single rows agrees. By rows: one backward pass for each row, where these are
fewer than dimensions. By axes: the derivatives of all rows along each axis.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytensor.tensor as pt

from pytensor.compile import Function
from pytensor.graph.basic import Variable

from pymc_ngvi.core.sparsity.coloured import CACHED_ELEMENTS, slices
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.gauss_newton.layers import by_layers
from pymc_ngvi.density.gauss_newton.parts import GaussNewtonGraphs, units
from pymc_ngvi.density.gauss_newton.squares import squares_by_rows
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.ops import cost

#: Draws in one call, at most.
_MOST_DRAWS = 64

#: How squares, or gradients, are found.
Way = Literal["layers", "rows", "axes"]


@dataclass(frozen=True)
class Squares:
    """A compiled function for the sums of squared gradients.

    Parameters
    ----------
    way : {"layers", "rows", "axes"}
    function : Function
        By layers: of draws, (n_draws, n_dim), summed over them. Else of one draw and of units, (n, n_rows), or
        directions, (n, n_dim).
    n_in_call : int
        By layers: draws in one call. Else units, or directions.
    n_units : int
        Rows, or axes, in all.
    """

    way: Way
    function: Function
    n_in_call: int
    n_units: int = 0


class SquaredGradients:
    """Evaluates the sums of squares. Nothing is built before something is asked for.

    Parameters
    ----------
    parts : GaussNewtonGraphs
    """

    def __init__(self, parts: GaussNewtonGraphs) -> None:
        self._parts = parts

    def mean(self, theta: Array) -> Array:
        """Return the mean over draws, (n_dim,)."""
        squares = self.squares()
        if squares.way == "layers":
            total = sum(
                np.asarray(squares.function(np.ascontiguousarray(theta[rows])))
                for rows in slices(len(theta), squares.n_in_call)
            )
        else:
            total = _one_by_one(squares, theta)
        return np.asarray(total / len(theta))

    def squares(self) -> Squares:
        """Return what evaluates the squares."""
        return self._parts.functions.once(self._parts.functions.made.squares, self._compile)

    def _compile(self) -> Squares:
        parts = self._parts
        found = self._by_layers()
        if found is not None:
            return found
        n_dim, n_rows = parts.graphs.layout.n_dim, parts.n_rows
        if n_rows is not None and n_rows < n_dim:
            unit, gradients = parts.gradients_of_units()
            return Squares("rows", parts.functions.compile([parts.theta, unit], gradients**2), parts.n_in_call, n_rows)
        return Squares("axes", self._by_axes(), parts.n_in_call, n_dim)

    def _by_layers(self) -> Squares | None:
        parts, theta = self._parts, self._parts.theta

        def squares(weights: list[Variable]) -> Variable:
            triples = zip(parts.rows, weights, parts.scales, strict=True)
            return pt.add(pt.zeros_like(theta), *[squares_by_rows(row, theta, w) / s for row, w, s in triples])

        layers = by_layers(parts, squares)
        if layers is None:
            return None
        n_draws = int(np.clip(2 * CACHED_ELEMENTS // max(cost.estimate([layers.found]).widest, 1), 1, _MOST_DRAWS))
        return Squares("layers", parts.functions.compile([layers.draws], layers.batched.sum(axis=0)), n_draws)

    def _by_axes(self) -> Function:
        parts = self._parts
        with without_c():
            direction, derivatives = parts.derivatives_along()
            along = pt.add(
                pt.constant(0.0), *[(d**2).sum() / s for d, s in zip(derivatives, parts.scales, strict=True)]
            )
            [along] = parts.graphs.simplify([along])
            directions, batched = graph.over_directions(along, direction)
        return parts.functions.compile([parts.theta, directions], batched)


def _one_by_one(squares: Squares, theta: Array) -> Array:
    total = np.zeros(theta.shape[1])
    for point in theta:
        for at, block in units(squares.n_units, squares.n_in_call):
            values = np.asarray(squares.function(np.ascontiguousarray(point), block))
            if squares.way == "axes":
                total[at] += values
            else:
                total += values.sum(axis=0)
    return total
