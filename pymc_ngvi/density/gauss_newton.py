"""The Gauss-Newton matrix of a model, in the place of its Hessian: -sum_i g_i g_i^T, and the Hessian of the prior."""

import math

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytensor.tensor as pt

from pytensor.compile import Function
from pytensor.graph import Apply, Constant, FunctionGraph, Variable, ancestors, graph_replace
from pytensor.graph.utils import MethodNotDefined
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape
from pytensor.tensor.special import LogAddExp
from pytensor.tensor.subtensor import AdvancedSubtensor, Subtensor, indices_from_subtensor

from pymc_ngvi.core.messages import NotApart, logger
from pymc_ngvi.core.sizes import AT_ONCE, MOST_NUMBERS, STREAMED
from pymc_ngvi.core.sparsity import CACHED_ELEMENTS, slices
from pymc_ngvi.core.types import Array, GaussianState, Indices, MeanHessian, Outer, Target
from pymc_ngvi.density.flat import FlatGraphs, Functions
from pymc_ngvi.density.hessians import GraphHessian, ModelHessian, units
from pymc_ngvi.density.info import likelihood_rows
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.loops import MOST_DRAWS, vectorised
from pymc_ngvi.graphs.rewrites import copy_of
from pymc_ngvi.ops import cost
from pymc_ngvi.ops.registry import operation
from pymc_ngvi.reading.predictors import ROUNDING

# --- a log density taken apart for Gauss-Newton: the log densities of rows, their scales, and the rest ---


# --- where the free variables of a model meet the rows of its data: from the graph of the log densities of these ---
#
# Each variable of the graph has at most one axis of rows. It is followed from the log densities back through the
# operations that keep rows apart, to the places where what all rows share comes in: as weights of a matrix product, or
# element by element.


@dataclass(frozen=True)
class DenseLayer:
    """Weights of a matrix product with rows."""

    #: The weights, (n_in, n_out), or transposed.
    shared: Variable
    #: What is multiplied, (n_rows, n_in), and the product, (n_rows, n_out); or transposed.
    inputs: Variable
    tap: Variable
    transposed: bool

    def pair(self, slope: Variable) -> tuple[Variable, Variable]:
        """Return inputs and the slope of the product, with rows along the first axis."""
        return (self.inputs.T, slope.T) if self.transposed else (self.inputs, slope)

    def by_rows(self, slope: Variable) -> Variable:
        """Return the derivatives of each row with respect to the weights, (n_rows, ...)."""
        inputs, slope = self.pair(slope)
        first, second = (slope, inputs) if self.transposed else (inputs, slope)
        return first[:, :, None] * second[:, None, :]


@dataclass(frozen=True)
class Copied:
    """A variable that each row reads, element by element."""

    #: Of length 1 along the axis of rows.
    shared: Variable
    #: Copies of it, one for each row.
    tap: Variable
    axis: int

    def by_rows(self, slope: Variable) -> Variable:
        """Return the derivatives of each row with respect to the variable, (n_rows, ...)."""
        order = [self.axis, *["x" if k == self.axis else k for k in range(slope.type.ndim)]]
        return slope.dimshuffle(order)


#: Elements of theta that are of one row each, or of one group of rows, are a `Copied` of their own: ``tap`` and
#: ``shared`` are the same, and no element of theta is twice in a row of it.
Tap = DenseLayer | Copied


def find_taps(row: Variable, theta: Variable) -> tuple[Variable, list[Tap]]:
    """Find where theta comes into the log densities of rows, along their first axis."""
    if row.type.ndim not in (1, 2) or row.type.broadcastable[0]:
        raise NotApart("one row")
    fgraph = copy_of([row])
    search = _TapSearch(fgraph, theta)
    search.assign(fgraph.outputs[0], 0)
    for node in reversed(fgraph.toposort()):
        for out in node.outputs:
            if out in search.axes:
                search.follow(node, out, search.axes[out])
    if theta in search.axes:
        search.taps.append(Copied(theta, theta, 0))
    return fgraph.outputs[0], search.taps


def is_part(var: Variable, theta: Variable) -> bool:
    """Tell whether a variable has elements of theta, each of them once at most."""
    while var is not theta:
        node = var.owner
        if node is None or not isinstance(node.op, Subtensor | Reshape | DimShuffle):
            return False
        var = node.inputs[0]
    return True


class _TapSearch:
    def __init__(self, fgraph: FunctionGraph, theta: Variable) -> None:
        self._fgraph, self._theta = fgraph, theta
        found = {theta}
        for node in fgraph.toposort():
            if not found.isdisjoint(node.inputs):
                found.update(out for out in node.outputs if "float" in getattr(out.type, "dtype", ""))
        self._depends = found
        self._copies: dict[tuple[Variable, int], Variable] = {}
        self.axes: dict[Variable, int] = {}
        self.taps: list[Tap] = []

    def assign(self, var: Variable, axis: int) -> None:
        """Note which axis of a variable is that of rows."""
        if var in self._depends and self.axes.setdefault(var, axis) != axis:
            raise NotApart("two axes of rows")

    def follow(self, node: Apply, out: Variable, axis: int) -> None:
        """Go on from the output of a node to its inputs."""
        op = node.op
        if is_part(out, self._theta):
            self.taps.append(Copied(out, out, axis))
        elif isinstance(op, Elemwise | LogAddExp) and all(i.type.ndim == out.type.ndim for i in node.inputs):
            self._elementwise(node, out, axis)
        elif isinstance(op, Dot):
            rows, shared = node.inputs if axis == 0 else node.inputs[::-1]
            self.assign(rows, axis)
            if shared in self._depends:
                self.taps.append(DenseLayer(shared, rows, out, transposed=axis == 1))
        elif isinstance(op, AdvancedSubtensor):
            source, index, *_ = node.inputs
            if axis != 0 or node.op.idx_list[0] != 0 or "int" not in index.type.dtype:
                raise NotApart("an index")
            if _counts_rows(index, source):
                self.assign(source, 0)
            elif is_part(source, self._theta) and index.type.ndim == 1 and len(node.inputs) == 2:
                self.taps.append(Copied(out, out, axis))
            else:
                raise NotApart("an index")
        else:
            rule = operation(op).axis
            found = None if isinstance(rule, str) or isinstance(op, Blockwise) else rule(node, out, axis)
            if found is None:
                raise NotApart(str(op))
            for var in node.inputs:
                self.assign(var, found)

    def _elementwise(self, node: Apply, out: Variable, axis: int) -> None:
        rowed = next(i for i in node.inputs if not i.type.broadcastable[axis])
        for at, var in enumerate(node.inputs):
            if var not in self._depends:
                continue
            if not var.type.broadcastable[axis]:
                self.assign(var, axis)
                continue
            if (var, axis) not in self._copies:
                shape = [rowed.shape[k] if k == axis else var.shape[k] for k in range(var.type.ndim)]
                static = [rowed.type.shape[k] if k == axis else var.type.shape[k] for k in range(var.type.ndim)]
                lengths = [s if n is None else n for s, n in zip(shape, static, strict=True)]
                self._copies[var, axis] = pt.alloc(var, *lengths)
                self.taps.append(Copied(var, self._copies[var, axis], axis))
            self._fgraph.change_node_input(node, at, self._copies[var, axis], check=False)


def _counts_rows(index: Variable, source: Variable) -> bool:
    """Tell whether an index takes each row in its turn."""
    if not isinstance(index, Constant) or index.data.ndim == 0 or index.data.size != index.data.shape[0]:
        return False
    n_rows = index.data.size
    return source.type.shape[0] in (None, n_rows) and np.array_equal(index.data.ravel(), np.arange(n_rows))


# --- the gradients of rows, and the sums of their squares, as graphs: one backward pass for all rows ---
#
# Rows do not depend on each other, so that the derivatives of the sum of their log densities by the outputs of a layer,
# delta, (n_rows, n_out), are those of each row. The derivatives of row i by the weights are x_i delta_i^T; squares
# sum up to (x^2)^T (delta^2). Where weights are used more than once, the sum over pairs of uses a and b is that of
# (x_a x_b)^T (delta_a delta_b), products of elements. All else that rows share, biases and scales, is small: its
# derivatives are found row by row.

#: Uses of one matrix of weights, whose products are formed in pairs.
_MOST_USES = 4
#: Elements of the derivatives of all rows with respect to what they share, where these are found row by row.
_MOST_ELEMENTS = 2 * STREAMED


def squares_by_rows(row: Variable, theta: Variable, weights: Variable) -> Variable:
    """Return sum_i w_i^2 g_i^2, (n_dim,), where g_i is the gradient of an element of ``row``."""
    found = _by_column(_squares, row, theta, weights)
    return found.sum(axis=0) if found.type.ndim == 2 else found


def gradients_by_rows(row: Variable, theta: Variable, weights: Variable) -> Variable:
    """Return w_i g_i, (n_rows, n_dim), where g_i is the gradient of an element of ``row``; as `squares_by_rows`.

    Where ``row`` has columns, the gradients of the first column come first.
    """
    found = _by_column(_gradients, row, theta, weights)
    return found.reshape((-1, theta.type.shape[0])) if found.type.ndim > 2 else found


def _by_column(function: Callable[..., Variable], row: Variable, theta: Variable, weights: Variable) -> Variable:
    """Return a function of the weighted sum of rows; with one more axis in front, where these have columns."""
    row, taps = find_taps(row, theta)
    if row.type.ndim == 1:
        return function((weights * row).sum(), row, theta, taps)
    n_columns = row.type.shape[1]
    if n_columns is None:
        raise NotApart("columns without a number")
    unit = pt.vector("unit", dtype="float64", shape=(n_columns,))
    total = function((weights * row * unit).sum(), row, theta, taps)
    return vectorised([total], {unit: pt.constant(np.eye(n_columns))})[0]


def _slopes(cost: Variable, taps: list[Tap]) -> dict[Variable, Variable]:
    """Return the derivatives of a scalar with respect to the taps."""
    slopes = pt.grad(cost, [tap.tap for tap in taps], disconnected_inputs="ignore") if taps else []
    return dict(zip([tap.tap for tap in taps], slopes, strict=True))


def _squares(cost: Variable, row: Variable, theta: Variable, taps: list[Tap]) -> Variable:
    slopes, total = _slopes(cost, taps), pt.zeros_like(theta)
    for piece, (at, its) in _uses(taps, theta).items():
        squares = _of_piece(piece, its, theta, slopes, row.type.shape[0])
        total = pt.inc_subtensor(total[int(at[0]) : int(at[-1]) + 1], squares.ravel()) if len(at) else total
    return total


def _gradients(cost: Variable, row: Variable, theta: Variable, taps: list[Tap]) -> Variable:
    slopes, total = _slopes(cost, taps), pt.zeros((row.shape[0], theta.type.shape[0]))
    for piece, (at, its) in _uses(taps, theta).items():
        gradients = _each_row(piece, its, slopes)
        if len(at):
            where = total[:, int(at[0]) : int(at[-1]) + 1]
            total = pt.inc_subtensor(where, gradients.reshape((row.shape[0], len(at))))
    return total


def _uses(taps: list[Tap], theta: Variable) -> dict[Variable, tuple[Indices, list[Tap]]]:
    """Return the parts of theta that do not overlap, each with its indices and the taps that it leads to."""
    uses: defaultdict[Variable, list[Tap]] = defaultdict(list)
    for tap in taps:
        nodes = [v.owner for v in ancestors([tap.shared]) if v.owner is not None and theta in v.owner.inputs]
        pieces = dict.fromkeys(node.outputs[0] if isinstance(node.op, Subtensor) else theta for node in nodes)
        for piece in pieces or [theta]:
            uses[piece].append(tap)
    parts = [_elements(piece, theta) for piece in uses]
    every = np.concatenate([np.empty(0, dtype=np.intp), *parts])
    if len(np.unique(every)) < len(every):
        raise NotApart("parts that overlap")
    return {piece: (at, its) for at, (piece, its) in zip(parts, uses.items(), strict=True)}


def _elements(piece: Variable, theta: Variable) -> Indices:
    """Return the indices of a part of theta: a range."""
    every = np.arange(theta.type.shape[0])
    if piece is theta:
        return every
    [index] = indices_from_subtensor(piece.owner.inputs[1:], piece.owner.op.idx_list)
    bounds = [index.start, index.stop, index.step] if isinstance(index, slice) else [index]
    if not all(bound is None or isinstance(bound, Constant) for bound in bounds):
        raise NotApart("a part that is not fixed")
    values = [None if bound is None else int(bound.data) for bound in bounds]
    at = np.atleast_1d(every[slice(*values)] if isinstance(index, slice) else every[values[0]])
    if not np.array_equal(at, np.arange(at[0], at[0] + len(at)) if len(at) else at):
        raise NotApart("a part with gaps")
    return at


def _of_piece(
    piece: Variable, taps: list[Tap], theta: Variable, slopes: dict[Variable, Variable], n_rows: int | None
) -> Variable:
    """Return the sums of squares with respect to one part of theta."""
    dense = [tap for tap in taps if isinstance(tap, DenseLayer)]
    weights = taps[0].shared
    alike = all(tap.shared is weights for tap in dense) and len(dense) == len(taps) <= _MOST_USES
    if alike and is_part(weights, theta):
        return _back(weights, _products(dense, slopes), piece)
    if len(taps) == 1 and taps[0].tap is taps[0].shared:
        return _back(taps[0].tap, slopes[taps[0].tap] ** 2, piece)
    sizes = [int(np.prod([n or 1 for n in tap.shared.type.shape])) for tap in taps]
    if (n_rows or 1) * sum(sizes) > _MOST_ELEMENTS:
        raise NotApart("too many derivatives")
    return (_each_row(piece, taps, slopes) ** 2).sum(axis=0)


def _products(taps: list[DenseLayer], slopes: dict[Variable, Variable]) -> Variable:
    pairs = [tap.pair(slopes[tap.tap]) for tap in taps]
    total = pt.add(
        pt.constant(0.0),
        *[
            (1.0 if a == b else 2.0) * pt.dot((x * pairs[b][0]).T, slope * pairs[b][1])
            for a, (x, slope) in enumerate(pairs)
            for b in range(a + 1)
        ],
    )
    return total.T if taps[0].transposed else total


def _back(var: Variable, values: Variable, piece: Variable) -> Variable:
    """Return what stands at the elements of ``var``, at those of the part of theta that they are."""
    return pt.grad((var * values).sum(), piece, consider_constant=[values])


def _each_row(piece: Variable, taps: list[Tap], slopes: dict[Variable, Variable]) -> Variable:
    """Return the gradient of each row with respect to a part of theta, (n_rows, ...)."""
    if any(tap.tap is tap.shared for tap in taps):
        raise NotApart("parts of single rows")
    along = [tap.shared.type() for tap in taps]
    cost = pt.add(
        pt.constant(0.0), *[(tap.shared * direction).sum() for tap, direction in zip(taps, along, strict=True)]
    )
    back = pt.grad(cost, piece, consider_constant=along)
    by_rows = [tap.by_rows(slopes[tap.tap]) for tap in taps]
    [rows] = vectorised([back], dict(zip(along, by_rows, strict=True)))
    return rows


# --- whether the gradients of all rows, found in one backward pass, are those of single rows ---

#: Elements of log densities, and points, at which the squares by layers are checked.
_N_CHECKED, _N_POINTS = 6, 2
#: Relative error beyond which they are wrong; that of the largest entry may be in all.
_RELATIVE = 1e-6


def agrees(parts: "GaussNewton", weights: list[Variable], total: Variable) -> bool:
    """Tell whether sums of squares are those of explicit gradients, at random points, of rows at random."""
    rng = np.random.default_rng(0)
    weighted = [(w * row).sum() for w, row in zip(weights, parts.rows, strict=True)]
    grad = graph.gradient(pt.add(pt.constant(0.0), *weighted), parts.theta)
    outputs = parts.graphs.simplify([total, grad, *parts.scales])
    function = parts.functions.compile_for_few([parts.theta, *weights], outputs)
    shapes = parts.shapes()
    n_each = [int(np.prod(shape)) for shape in shapes]
    ends = np.cumsum([0, *n_each])

    def at(which: Indices, values: Array) -> list[Array]:
        flat = np.zeros(ends[-1])
        flat[which] = values
        bounds = zip(ends[:-1], ends[1:], shapes, strict=True)
        return [np.ascontiguousarray(flat[a:b].reshape(shape)) for a, b, shape in bounds]

    for _ in range(_N_POINTS):
        point = parts.start + 0.5 * rng.standard_normal(len(parts.start))
        chosen = rng.choice(ends[-1], size=min(_N_CHECKED, ends[-1]), replace=False)
        factors, expected = rng.uniform(0.5, 2.0, size=len(chosen)), np.zeros(len(point))
        with np.errstate(all="ignore"):
            total, _, *others = function(point, *at(chosen, factors))
            scales = np.repeat([float(s) for s in others], n_each)
            for element, factor in zip(chosen, factors, strict=True):
                gradient = function(point, *at(np.array([element]), np.array([factor])))[1]
                expected += gradient**2 / scales[element]
            close = np.abs(total - expected) <= _RELATIVE * np.abs(expected) + ROUNDING * expected.max(initial=0.0)
        if not (np.all(np.isfinite(expected)) and np.all(close)):
            return False
    return True


# --- what is made of the gradients of all rows in one backward pass, where a check on single rows agrees ---


def by_layers(
    parts: "GaussNewton",
    of_rows: Callable[[list[Variable]], Variable],
    squares_of: Callable[[Variable], Variable] = lambda found: found,
) -> tuple[Variable, Variable, Variable] | None:
    """Return a function of the flat vector, as graphs, that has the gradients of all rows in one backward pass.

    They are what it is at one draw, draws, (n_draws, n_dim), and what it is at each of these, along the first axis.
    """
    if parts.graphs.shares_calls:  # recursions, whose steps are no layers
        return None
    weights = [row.type() for row in parts.rows]
    try:
        with without_c():
            found = of_rows(weights)
            if not agrees(parts, weights, squares_of(found)):
                logger.debug("Gradients by layers are not those of single rows: they are found axis by axis.")
                return None
            ones = {w: pt.ones_like(row) for w, row in zip(weights, parts.rows, strict=True)}
            [found] = parts.graphs.simplify(list(graph_replace([found], ones, strict=False)))
            draws, [batched] = graph.over_draws([found], parts.theta)
    except (NotApart, graph.MissingDerivativeError, NotImplementedError, MethodNotDefined, TypeError) as error:
        logger.debug("No gradients by layers: %s", error)
        return None
    return found, draws, batched


# --- the sums over rows of squared gradients: the diagonal of the Gauss-Newton matrix ---
# Squares are found in one of two ways. By layers: one backward pass for all rows, where the graph shows that rows do
# not depend on each other, and a check on single rows agrees. By axes: the derivatives of all rows along each axis.

#: How squares, or gradients, are found.
Way = Literal["layers", "axes"]


@dataclass(frozen=True)
class RowFunction:
    """A compiled function for the gradients of rows, or, by layers, for the sums of their squares."""

    way: Way
    #: By layers: of draws, (n_draws, n_dim), to gradients, (n_draws, n_rows, n_dim), or squares summed over draws and
    #: rows. Else of one draw and of directions, (n, n_dim), to derivatives, (n, n_rows).
    function: Function
    #: By layers: draws in one call. Else directions.
    n_in_call: int

    def blocks(self, point: Array) -> Iterator[tuple[Indices, Array]]:
        """Go through axes, with the derivatives of all rows along them at one draw."""
        for at, block in units(len(point), self.n_in_call):
            yield at, np.asarray(self.function(np.ascontiguousarray(point), block))


def by_axes(parts: "GaussNewton") -> RowFunction:
    """Return what finds the derivatives of all rows along single axes."""
    with without_c():
        direction = parts.theta.type("direction")
        derivatives = graph.row_derivatives(parts.rows, parts.theta, direction)
        scaled = [d.ravel() / pt.sqrt(s) for d, s in zip(derivatives, parts.scales, strict=True)]
        along = parts.graphs.simplify([pt.concatenate(scaled)])
        directions, [batched] = graph.over_draws(along, direction)
    return RowFunction("axes", parts.functions.compile([parts.theta, directions], batched), parts.rest.n_in_call)


# --- the gradients of all rows at draws: what Gauss-Newton matrices with correlations are made of ---
# They are found by layers or by axes, as their squares are.

#: Numbers in the gradients that one call returns, about, and in those at one draw, at most.
_IN_CALL, _MOST = AT_ONCE, 2 * MOST_NUMBERS


class GaussNewton:
    """Evaluates the Gauss-Newton matrix of a log density: that of its rows, and the Hessian of the rest.

    Raises ValueError for models with Potentials, without observed variables, or with multivariate ones.
    """

    def __init__(self, graphs: FlatGraphs, functions: Functions, start: Array) -> None:
        self.graphs, self.functions, self.start, self.theta = graphs, functions, start, graphs.theta
        with without_c():
            rows, scales, rest = likelihood_rows(graphs.model, graphs.factors)
            *rows, rest = graphs.simplify(graphs.on_flat_vector([*rows, *scales, rest]))
        #: Log densities of the elements of observed variables, and the factors in them: ``total_size`` / batch size.
        self.rows, self.scales = rows[: len(scales)], rows[len(scales) :]
        self.rest = GraphHessian(rest, graphs, functions, start)

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the log densities of rows, with the data as they are now."""
        static = [row.type.shape for row in self.rows]
        if not any(None in shape for shape in static):
            return static
        outputs, compile_ = [row.shape for row in self.rows], self.functions.compile_for_few
        function = self.functions.once("shapes of rows", lambda: compile_([self.theta], outputs))
        return [tuple(int(n) for n in shape) for shape in function(self.start)]

    def mean_diagonal(self, theta: Array) -> Array:
        """Return the mean over draws of the diagonal, (n_dim,); see `LogDensity.gauss_newton`."""
        with np.errstate(all="ignore"):
            of_rest, squares, total = self.rest.mean_diagonal(theta), self.squares(), np.zeros(theta.shape[1])
            if squares.way == "layers":
                for rows in slices(len(theta), squares.n_in_call):
                    total += np.asarray(squares.function(np.ascontiguousarray(theta[rows])))
                return of_rest - total / len(theta)
            for point in theta:
                for at, values in squares.blocks(point):
                    total[at] += (values**2).sum(axis=1)
            return of_rest - total / len(theta)

    def squares(self) -> RowFunction:
        """Return what evaluates the squares."""
        return self.functions.once("squares", self._compile_squares)

    def _compile_squares(self) -> RowFunction:
        theta = self.theta

        def squares(weights: list[Variable]) -> Variable:
            triples = zip(self.rows, weights, self.scales, strict=True)
            return pt.add(pt.zeros_like(theta), *[squares_by_rows(row, theta, w) / s for row, w, s in triples])

        layers = by_layers(self, squares)
        if layers is None:
            return by_axes(self)
        found, draws, batched = layers
        n_draws = int(np.clip(2 * CACHED_ELEMENTS // max(cost.estimate([found]).widest, 1), 1, MOST_DRAWS))
        return RowFunction("layers", self.functions.compile([draws], batched.sum(axis=0)), n_draws)

    def gradients(self, theta: Array) -> Iterator[Array]:
        """Go through the gradients of rows at draws, a few draws at a time: (n, n_dim).

        Each row counts with the root of its scale: -sum g g^T estimates the Hessian of all rows of the data.
        """
        n_dim, n_rows = theta.shape[1], sum(map(math.prod, self.shapes()))
        if n_rows * n_dim > _MOST:
            raise ValueError(
                f"estimator='gauss_newton' with correlations holds the gradients of {n_rows:,} rows in {n_dim:,} "
                f"dimensions, {8e-9 * n_rows * n_dim:.0f} GB: take pm.Minibatch, or family='diagonal'."
            )
        gradients: RowFunction = self.functions.once("row gradients", self._compile_gradients)
        if gradients.way == "layers":
            for rows in slices(len(theta), max(1, _IN_CALL // max(n_rows * n_dim, 1))):
                yield np.asarray(gradients.function(np.ascontiguousarray(theta[rows]))).reshape(-1, n_dim)
            return
        for point in theta:
            found = np.empty((n_rows, n_dim))
            for at, values in gradients.blocks(point):
                found[:, at] = values.T
            yield found

    def _compile_gradients(self) -> RowFunction:
        theta = self.theta

        def gradients(weights: list[Variable]) -> Variable:
            triples = zip(self.rows, weights, self.scales, strict=True)
            return pt.concatenate([gradients_by_rows(row, theta, w) / pt.sqrt(s) for row, w, s in triples], axis=0)

        layers = by_layers(self, gradients, lambda found: (found**2).sum(axis=0))
        if layers is None:
            return by_axes(self)
        _, draws, batched = layers
        return RowFunction("layers", self.functions.compile([draws], batched), 1)


class GaussNewtonHessian(MeanHessian):
    """The mean over draws of the Gauss-Newton matrix."""

    def __init__(self, matrix: Callable[[], GaussNewton], theta: Array, counter: Target) -> None:
        self._matrix, self._theta, self._counter = matrix, theta, counter

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        self._counter.n_hessians += len(self._theta)
        return self._matrix().mean_diagonal(self._theta)

    def whitened(self, state: GaussianState) -> Array:
        """Return the whitened curvature, as a state stores it: outer products of whitened gradients."""
        if hasattr(state, "scale"):  # coordinates are independent
            return super().whitened(state)
        matrix = self._matrix()
        with np.errstate(all="ignore"):
            total = state.curvature(ModelHessian(self._counter, matrix.rest, [self._theta]))
            for gradients in matrix.gradients(self._theta):
                whitened = state.whiten(gradients)
                total = total + state.outer_mean(Outer(whitened, whitened, 0.0)) * (len(whitened) / len(self._theta))
        return total
