"""The Gauss-Newton diagonal of a model: sums over rows of squared gradients, less the Hessian of all else.

Squares are found in one of three ways. By layers: one backward pass for all rows, where the graph shows that rows do
not depend on each other, and a check on single rows agrees. By rows: one backward pass for each row, where these are
fewer than dimensions. By axes: the derivatives of all rows along each axis.
"""

import contextlib
import logging

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.compile import Function
from pytensor.graph.basic import Variable
from pytensor.graph.replace import graph_replace
from pytensor.graph.utils import MethodNotDefined

from pymc_ngvi.core.types import Array
from pymc_ngvi.model.flat import FlatGraphs, Functions
from pymc_ngvi.model.gauss_newton.squares import squares_by_rows
from pymc_ngvi.model.gauss_newton.taps import CannotSplitError
from pymc_ngvi.model.graphs import cost, graph
from pymc_ngvi.model.graphs.backends import without_c
from pymc_ngvi.model.rows import Rows
from pymc_ngvi.model.sparsity.coloured import CACHED_ELEMENTS, slices
from pymc_ngvi.model.sparsity.hessian import PatternWidened, SparseHessian

#: Elements of log densities, and points, at which the squares by layers are checked.
_N_CHECKED, _N_POINTS = 6, 2
#: Relative error, and error relative to the largest entry, beyond which they are wrong.
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9

#: Elements of a temporary in one call by layers, and draws, at most.
_BATCH_ELEMENTS, _MOST_DRAWS = 4 * CACHED_ELEMENTS, 64
#: What PyTensor raises where an operation has no derivative.
_NO_DERIVATIVE = (NotImplementedError, MethodNotDefined, TypeError)

logger = logging.getLogger("pymc.ngvi")

#: How squares are found.
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


class GaussNewtonDiagonal:
    """Evaluates the Gauss-Newton diagonal. Nothing is built before something is asked for.

    Parameters
    ----------
    graphs : FlatGraphs
    functions : Functions
    rows : Rows
    start : ndarray, shape (n_dim,)
    widest : int
        Elements of the largest temporary of log p.

    Attributes
    ----------
    n_in_call : int
        Directions in one call at one draw.
    """

    def __init__(
        self,
        graphs: FlatGraphs,
        functions: Functions,
        rows: Rows,
        start: Array,
        widest: int,
    ) -> None:
        self._graphs, self._functions, self._rows, self._start = graphs, functions, rows, start
        self._widest = widest
        self.n_in_call = int(np.clip(2 * CACHED_ELEMENTS // max(widest, 1), 16, 4096))
        self._made: tuple[list[Variable], list[Variable], Variable] | None = None
        self._rest: SparseHessian | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: graphs are made again."""
        return {**self.__dict__, "_made": None, "_rest": None}

    def mean(self, theta: Array) -> Array:
        """Return the mean over draws, (n_dim,); see `SecondOrder.mean_gauss_newton_diagonal`."""
        squares = self.squares()
        with np.errstate(all="ignore"):
            if squares.way == "layers":
                total = sum(
                    np.asarray(squares.function(np.ascontiguousarray(theta[rows])))
                    for rows in slices(len(theta), squares.n_in_call)
                )
            else:
                total = self._one_by_one(squares, theta)
            return np.asarray(total / len(theta) - self._mean_rest(theta))

    def squares(self) -> Squares:
        """Return what evaluates the squares."""
        found: Squares = self._functions.named("gauss_newton", self._compile)
        return found

    def _one_by_one(self, squares: Squares, theta: Array) -> Array:
        total = np.zeros(theta.shape[1])
        for point in theta:
            for at, units in _units(squares.n_units, squares.n_in_call):
                values = np.asarray(squares.function(np.ascontiguousarray(point), units))
                if squares.way == "axes":
                    total[at] += values
                else:
                    total += values.sum(axis=0)
        return total

    # --- squares ---

    def _parts(self) -> tuple[list[Variable], list[Variable], Variable]:
        """Return log densities of rows, the scales in them, and the rest of log p, on the flat vector."""
        if self._made is None:
            graphs = self._graphs
            with without_c():
                rows, scales, rest = self._rows.graphs()
                *rows, rest = graphs.simplify(graphs.on_flat_vector([*rows, *scales, rest]))
            self._made = rows[: len(scales)], rows[len(scales) :], rest
        return self._made

    def _compile(self) -> Squares:
        rows, scales, _ = self._parts()
        found = self._by_layers(rows, scales)
        if found is not None:
            return found
        sizes = [_size(row) for row in rows]
        n_rows = sum(size for size in sizes if size is not None)
        if None not in sizes and n_rows < self._graphs.layout.n_dim:
            return Squares("rows", self._by_rows(rows, scales), self.n_in_call, n_rows)
        return Squares("axes", self._by_axes(rows, scales), self.n_in_call, self._graphs.layout.n_dim)

    def _by_layers(self, rows: list[Variable], scales: list[Variable]) -> Squares | None:
        graphs, functions = self._graphs, self._functions
        theta, weights = graphs.theta, [row.type() for row in rows]
        if graphs.shares_calls:  # recursions, whose steps are no layers
            return None
        try:
            with without_c():
                squares = [squares_by_rows(row, theta, w) / s for row, w, s in zip(rows, weights, scales, strict=True)]
                total = pt.add(pt.zeros_like(theta), *squares)
                if not self._agrees(rows, scales, weights, total):
                    logger.info("Gradients by layers are not those of single rows: squares are found one by one.")
                    return None
                ones = {w: pt.ones_like(row) for w, row in zip(weights, rows, strict=True)}
                [total] = graphs.simplify(list(graph_replace([total], ones, strict=False)))
                draws, [batched] = graph.over_draws([total], theta)
        except (CannotSplitError, graph.MissingDerivativeError, *_NO_DERIVATIVE) as error:
            logger.debug("No squares by layers: %s", error)
            return None
        widest = cost.estimate([total], along=theta).widest
        n_draws = int(np.clip(_BATCH_ELEMENTS // max(widest, 1), 1, _MOST_DRAWS))
        return Squares("layers", functions.compile([draws], batched.sum(axis=0)), n_draws)

    def _agrees(self, rows: list[Variable], scales: list[Variable], weights: list[Variable], total: Variable) -> bool:
        """Tell whether squares by layers are those of explicit gradients, at random points, of rows at random."""
        theta, rng = self._graphs.theta, np.random.default_rng(0)
        grad = _weighted_gradient(rows, weights, theta)
        function = self._functions.compile_for_few([theta, *weights], self._graphs.simplify([total, grad, *scales]))
        shapes = self._shapes(rows)
        for _ in range(_N_POINTS):
            point = self._start + 0.5 * rng.standard_normal(len(self._start))
            with np.errstate(all="ignore"):
                if not _checked_at(function, point, shapes, rng):
                    return False
        return True

    def _shapes(self, rows: list[Variable]) -> list[tuple[int, ...]]:
        """Return the shapes of the log densities, for the data as they are now."""
        if all(_size(row) is not None for row in rows):
            return [row.type.shape for row in rows]
        function = self._functions.compile_for_few([self._graphs.theta], [row.shape for row in rows])
        return [tuple(int(n) for n in shape) for shape in function(self._start)]

    def _by_rows(self, rows: list[Variable], scales: list[Variable]) -> Function:
        graphs = self._graphs
        with without_c():
            unit = pt.vector("unit", dtype="float64", shape=(sum(_size(row) or 0 for row in rows),))
            ends = np.cumsum([0, *[_size(row) or 0 for row in rows]])
            weights = [
                unit[a:b].reshape(row.type.shape) / pt.sqrt(s)
                for row, s, a, b in zip(rows, scales, ends[:-1], ends[1:], strict=True)
            ]
            [grad] = graphs.simplify([_weighted_gradient(rows, weights, graphs.theta)])
            units, batched = graph.over_directions(grad, unit)
        return self._functions.compile([graphs.theta, units], batched**2)

    def _by_axes(self, rows: list[Variable], scales: list[Variable]) -> Function:
        graphs = self._graphs
        direction = graphs.theta.type("direction")
        with without_c():
            derivatives = graph.row_derivatives(rows, graphs.theta, direction)
            along = pt.add(pt.constant(0.0), *[(d**2).sum() / s for d, s in zip(derivatives, scales, strict=True)])
            [along] = graphs.simplify([along])
            directions, batched = graph.over_directions(along, direction)
        return self._functions.compile([graphs.theta, directions], batched)

    # --- the rest of log p ---

    def _mean_rest(self, theta: Array) -> Array:
        """Return the mean diagonal of the Hessian of priors with their Jacobians, (n_dim,)."""
        if self._rest is None:
            graphs = self._graphs
            self._rest = SparseHessian(
                self._parts()[2], graphs.theta, self._start, graphs.minibatches.rows, self._rest_products,
                lambda: None, self._widest, self._functions.fixed_size,
            )  # fmt: skip
        while (coloured := self._rest.coloured) is not None:
            with contextlib.suppress(PatternWidened):
                return coloured.diagonal(self._rest.mean_values(theta))
        total = np.zeros(theta.shape[1])
        for point in theta:
            for at, axes in _units(theta.shape[1], self.n_in_call):
                total[at] += self._rest_products(point[None], axes)[0][np.arange(len(at)), at]
        return total / len(theta)

    def _rest_products(self, theta: Array, directions: Array) -> Array:
        function = self._functions.named("gauss_newton_rest", self._compile_rest)
        with np.errstate(all="ignore"):
            return np.asarray(function(np.ascontiguousarray(theta), np.ascontiguousarray(directions)))

    def _compile_rest(self) -> Function:
        graphs, rest = self._graphs, self._parts()[2]
        direction = graphs.theta.type("direction")
        with without_c():
            [grad] = graphs.simplify([graph.gradient(rest, graphs.theta)])
            [product] = graphs.simplify([graph.hessian_product(grad, graphs.theta, direction)])
            draws, directions, batched = graph.over_draws_and_directions(product, graphs.theta, direction)
            batched = pt.broadcast_to(batched, (draws.shape[0], directions.shape[0], draws.shape[1]))
        return self._functions.compile([draws, directions], batched)


def _weighted_gradient(rows: list[Variable], weights: list[Variable], theta: Variable) -> Variable:
    total = pt.add(pt.constant(0.0), *[(w * row).sum() for w, row in zip(weights, rows, strict=True)])
    return graph.gradient(total, theta)


def _checked_at(function: Function, point: Array, shapes: list[tuple[int, ...]], rng: np.random.Generator) -> bool:
    """Tell whether squares are those of explicit gradients of single rows, at one point."""
    n_each = [int(np.prod(shape)) for shape in shapes]
    ends = np.cumsum([0, *n_each])
    chosen = rng.choice(ends[-1], size=min(_N_CHECKED, ends[-1]), replace=False)
    factors = rng.uniform(0.5, 1.5, size=len(chosen))

    def at(which: NDArray[np.intp], values: Array) -> list[Array]:
        flat = np.zeros(ends[-1])
        flat[which] = values
        parts = zip(ends[:-1], ends[1:], shapes, strict=True)
        return [np.ascontiguousarray(flat[a:b].reshape(shape)) for a, b, shape in parts]

    total, _, *others = function(point, *at(chosen, factors))
    scales = np.repeat([float(s) for s in others], n_each)
    expected = np.zeros(len(point))
    for element, factor in zip(chosen, factors, strict=True):
        gradient = function(point, *at(np.array([element]), np.array([factor])))[1]
        expected += gradient**2 / scales[element]
    close = np.abs(total - expected) <= _RELATIVE * np.abs(expected) + _ABSOLUTE * expected.max(initial=0.0)
    return bool(np.all(np.isfinite(expected)) and np.all(close))


def _size(row: Variable) -> int | None:
    return None if None in row.type.shape else int(np.prod(row.type.shape))


def _units(n: int, n_in_call: int) -> Iterator[tuple[NDArray[np.intp], Array]]:
    """Go through the unit vectors of n dimensions, a block at a time, with their indices."""
    for rows in slices(n, n_in_call):
        at = np.arange(rows.start, rows.stop)
        units = np.zeros((len(at), n))
        units[at - rows.start, at] = 1.0
        yield at, units
