"""The gradients of all rows at draws: what Gauss-Newton matrices with correlations are made of.

They are found by layers, by rows or by axes, as `diagonal` says of squares.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytensor.tensor as pt

from pytensor.compile import Function
from pytensor.graph.basic import Variable

from pymc_ngvi.core.sparsity.coloured import slices
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.gauss_newton.diagonal import Way
from pymc_ngvi.density.gauss_newton.layers import by_layers
from pymc_ngvi.density.gauss_newton.parts import GaussNewtonGraphs, units
from pymc_ngvi.density.gauss_newton.squares import gradients_by_rows
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c

#: Numbers in the gradients that one call returns, about, and in those at one draw, at most.
_IN_CALL, _MOST = 4_000_000, 250_000_000


@dataclass(frozen=True)
class Gradients:
    """A compiled function for the gradients of rows.

    Parameters
    ----------
    way : {"layers", "rows", "axes"}
    function : Function
        By layers: of draws, (n_draws, n_dim), to gradients, (n_draws, n_rows, n_dim). Else of one draw and of units,
        (n, n_rows), or directions, (n, n_dim), to gradients, (n, n_dim), or derivatives, (n, n_rows).
    """

    way: Way
    function: Function


class RowGradients:
    """Evaluates the gradients of rows. Nothing is built before something is asked for.

    Parameters
    ----------
    parts : GaussNewtonGraphs
    """

    def __init__(self, parts: GaussNewtonGraphs) -> None:
        self._parts = parts

    def at(self, theta: Array) -> Iterator[Array]:
        """Go through the gradients at draws, a few draws at a time: (n, n_dim).

        Each row counts with the root of its scale: -sum g g^T estimates the Hessian of all rows of the data.

        Raises
        ------
        ValueError
            Where those at one draw would take too much memory.
        """
        n_dim, n_rows = theta.shape[1], self._n_rows(theta[0])
        if n_rows * n_dim > _MOST:
            raise ValueError(
                f"estimator='gauss_newton' with correlations holds the gradients of {n_rows:,} rows in {n_dim:,} "
                f"dimensions, {8e-9 * n_rows * n_dim:.0f} GB: take pm.Minibatch, or family='diagonal'."
            )
        gradients: Gradients = self._parts.functions.once(self._parts.functions.made.row_gradients, self._compile)
        if gradients.way == "layers":
            for rows in slices(len(theta), max(1, _IN_CALL // max(n_rows * n_dim, 1))):
                found = np.asarray(gradients.function(np.ascontiguousarray(theta[rows])))
                yield found.reshape(-1, n_dim)
        else:
            yield from (self._one_by_one(gradients, np.ascontiguousarray(point), n_rows) for point in theta)

    def _n_rows(self, point: Array) -> int:
        parts = self._parts
        if parts.n_rows is not None:
            return parts.n_rows

        def compiled() -> Function:
            return parts.functions.compile_for_few([parts.theta], pt.add(0, *[row.size for row in parts.rows]))

        return int(parts.functions.once(parts.functions.made.n_rows, compiled)(point))

    def _one_by_one(self, gradients: Gradients, point: Array, n_rows: int) -> Array:
        found = np.empty((n_rows, len(point)))
        n_units = n_rows if gradients.way == "rows" else len(point)
        for at, block in units(n_units, self._parts.n_in_call):
            values = np.asarray(gradients.function(point, block))
            if gradients.way == "rows":
                found[at] = values
            else:
                found[:, at] = values.T
        return found

    def _compile(self) -> Gradients:
        parts = self._parts
        function = self._by_layers()
        if function is not None:
            return Gradients("layers", function)
        if parts.n_rows is not None and parts.n_rows < parts.graphs.layout.n_dim:
            unit, gradients = parts.gradients_of_units()
            return Gradients("rows", parts.functions.compile([parts.theta, unit], gradients))
        with without_c():
            direction, derivatives = parts.derivatives_along()
            scaled = [d.ravel() / pt.sqrt(s) for d, s in zip(derivatives, parts.scales, strict=True)]
            [along] = parts.graphs.simplify([pt.concatenate(scaled)])
            directions, batched = graph.over_directions(along, direction)
        return Gradients("axes", parts.functions.compile([parts.theta, directions], batched))

    def _by_layers(self) -> Function | None:
        parts, theta = self._parts, self._parts.theta

        def gradients(weights: list[Variable]) -> Variable:
            triples = zip(parts.rows, weights, parts.scales, strict=True)
            return pt.concatenate([gradients_by_rows(row, theta, w) / pt.sqrt(s) for row, w, s in triples], axis=0)

        layers = by_layers(parts, gradients, lambda found: (found**2).sum(axis=0))
        return None if layers is None else parts.functions.compile([layers.draws], layers.batched)
