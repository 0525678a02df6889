"""The Gauss-Newton matrix of a model, in the place of its Hessian: -sum_i g_i g_i^T, and the Hessian of the prior."""

import contextlib

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytensor.tensor as pt

from pytensor.compile import Function
from pytensor.graph.basic import Variable

from pymc_ngvi.core.refusal import PatternWidened
from pymc_ngvi.core.sparsity.coloured import CACHED_ELEMENTS, slices
from pymc_ngvi.core.target import Independent, MeanHessian, Whitener
from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import Outer
from pymc_ngvi.density.gauss_newton.layers import by_layers
from pymc_ngvi.density.gauss_newton.parts import GaussNewtonGraphs, units
from pymc_ngvi.density.gauss_newton.squares import gradients_by_rows, squares_by_rows
from pymc_ngvi.density.sparse_hessian import SparseHessian
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.ops import cost

# --- the sums over rows of squared gradients: the diagonal of the Gauss-Newton matrix ---
# Squares are found in one of three ways. By layers: one backward pass for all rows, where the graph shows that rows do
# not depend on each other, and a check on single rows agrees. By rows: one backward pass for each row, where these are
# fewer than dimensions. By axes: the derivatives of all rows along each axis.

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


# --- the Hessian of all of log p but the log densities of rows: priors with their Jacobians ---


class Rest:
    """Means over draws of the Hessian. Nothing is built before something is asked for.

    Parameters
    ----------
    parts : GaussNewtonGraphs
    """

    def __init__(self, parts: GaussNewtonGraphs) -> None:
        self._parts = parts
        self._sparse: SparseHessian | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: the pattern is found again."""
        return {**self.__dict__, "_sparse": None}

    def mean_diagonal(self, theta: Array) -> Array:
        """Return the mean of the diagonal over draws, (n_dim,)."""
        while (coloured := self._pattern().coloured) is not None:
            with contextlib.suppress(PatternWidened):
                return coloured.diagonal(self._pattern().mean_values(theta))
        total = np.zeros(theta.shape[1])
        for point in theta:
            for at, axes in units(theta.shape[1], self._parts.n_in_call):
                total[at] += self._products(point[None], axes)[0][np.arange(len(at)), at]
        return total / len(theta)

    def mean_products(self, theta: Array, directions: Array) -> Array:
        """Return the mean over draws of the Hessian times each direction, (n_directions, n_dim)."""
        while (coloured := self._pattern().coloured) is not None:
            with contextlib.suppress(PatternWidened):
                return coloured.times(self._pattern().mean_values(theta), directions)
        return np.mean([self._products(point[None], directions)[0] for point in theta], axis=0)

    def _pattern(self) -> SparseHessian:
        if self._sparse is None:
            parts = self._parts
            self._sparse = SparseHessian(
                parts.rest, parts.theta, parts.start, parts.graphs.minibatches.rows, self._products,
                lambda: None, parts.widest,
            )  # fmt: skip
        return self._sparse

    def _products(self, theta: Array, directions: Array) -> Array:
        function = self._parts.functions.once(self._parts.functions.made.rest, self._compile)
        with np.errstate(all="ignore"):
            filled_up = [self._parts.functions.filled_up(np.ascontiguousarray(x)) for x in (theta, directions)]
            return np.asarray(function(*filled_up))[: len(theta), : len(directions)]

    def _compile(self) -> Function:
        parts = self._parts
        direction = parts.theta.type("direction")
        with without_c():
            [grad] = parts.graphs.simplify([graph.gradient(parts.rest, parts.theta)])
            [product] = parts.graphs.simplify([graph.hessian_product(grad, parts.theta, direction)])
            draws, directions, batched = graph.over_draws_and_directions(product, parts.theta, direction)
            batched = pt.broadcast_to(batched, (draws.shape[0], directions.shape[0], draws.shape[1]))
        return parts.functions.compile([draws, directions], batched)


# --- the gradients of all rows at draws: what Gauss-Newton matrices with correlations are made of ---
# They are found by layers, by rows or by axes, as `diagonal` says of squares.

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


# The Gauss-Newton matrix of a model, in the place of its Hessian: -sum_i g_i g_i^T, and the Hessian of the prior.


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
