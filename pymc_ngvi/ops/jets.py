"""Forward differentiation: values with their first and second derivatives, carried along a graph at many points.

For recursions in few dimensions. PyTensor differentiates backwards: the graph of a Hessian product of a recursion has
tens of times the nodes of log p, and building it takes longer than the fit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce, singledispatch
from typing import Any

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt

from pytensor.compile import Function
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import HasInnerGraph, Op
from pytensor.graph.traversal import toposort
from pytensor.scan.op import Scan
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.linalg import (
    Cholesky,
    CholeskySolve,
    Det,
    MatrixInverse,
    SLogDet,
    Solve,
    SolveBase,
    SolveTriangular,
)
from pytensor.tensor.math import All, Dot, Max, Sum
from pytensor.tensor.math import Any as AnyTrue
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.special import LogAddExp, LogSumExp

from pymc_ngvi.core.linalg import or_nan
from pymc_ngvi.core.types import AnyArray, Array, Indices
from pymc_ngvi.graphs.backends import performed
from pymc_ngvi.graphs.loops import short_log_add_exp
from pymc_ngvi.graphs.private import NoPythonOp
from pymc_ngvi.graphs.programs import read
from pymc_ngvi.graphs.rewrites import dependent
from pymc_ngvi.ops.elements import Kind, Rearranged, core_op, targets
from pymc_ngvi.ops.registry import MOVEMENT, operation
from pymc_ngvi.rows.linear_map import consecutive
from pymc_ngvi.rows.programs import CannotFollow, OnNumPy, derivatives

# --- arrays of jets: values with first and second derivatives ---
#
# Each has two leading axes: terms and points. The terms are the value, its derivatives by each coordinate, and its
# second derivatives by each pair of coordinates, of which there is one of (i, j) and (j, i). What does not depend on
# the point has one value in the place of as many as there are points, and what has no derivatives has the value alone.


class Space:
    """The points of one evaluation, and how many derivatives are wanted."""

    def __init__(self, n_dim: int, n_points: int, order: int) -> None:
        self.n_dim, self.n_points, self.order = n_dim, n_points, order

    @cached_property
    def n_terms(self) -> int:
        """Terms of a jet."""
        n = self.n_dim
        return 1 + (n if self.order else 0) + (n * (n + 1) // 2 if self.order == 2 else 0)

    @cached_property
    def pairs(self) -> tuple[Indices, Indices]:
        """Coordinates of each second derivative."""
        first, second = np.tril_indices(self.n_dim)
        return first, second

    def of_points(self, theta: Array) -> Array:
        """Return the jets of coordinates, (n_terms, n_points, n_dim), at points, (n_points, n_dim)."""
        jets = np.zeros((self.n_terms, *theta.shape))
        jets[0] = theta
        if self.order:
            jets[1 : 1 + self.n_dim] = np.eye(self.n_dim)[:, None]
        return jets

    def lifted(self, x: AnyArray) -> AnyArray:
        """Return an array with all terms and points."""
        if x.shape[:2] == (self.n_terms, self.n_points):
            return x
        result = np.zeros((self.n_terms, self.n_points, *x.shape[2:]))
        result[: len(x)] = x
        return result

    def apart(self, x: Array) -> list[Array]:
        """Return values, (n_points, ...), and derivatives of each order, with an axis of coordinates more each."""
        moved = np.moveaxis(self.lifted(x), 0, -1)
        result, n = [moved[..., 0]], self.n_dim
        if self.order:
            result.append(np.ascontiguousarray(moved[..., 1 : 1 + n]))
        if self.order == 2:
            second, (i, j) = np.empty((*moved.shape[:-1], n, n)), self.pairs
            second[..., i, j] = second[..., j, i] = moved[..., 1 + n :]
            result.append(second)
        return result

    def seconds(self, x: Array) -> Array:
        """Return the second derivatives of a jet."""
        return x[1 + self.n_dim :]

    def products(self, x: Array, y: Array) -> Array:
        """Return what a product adds to second derivatives: x_i y_j + x_j y_i, or x_i x_j where both are the same."""
        i, j = self.pairs
        x1 = x[1 : 1 + self.n_dim]
        if x is y:
            return x1[i] * x1[j]
        y1 = y[1 : 1 + self.n_dim]
        both: Array = x1[i] * y1[j]
        both += x1[j] * y1[i]
        return both


# --- rules for operations element by element ---

#: From the points and jets of the inputs to jets of the output, or of each output.
type Rule = Callable[..., AnyArray | list[AnyArray]]


def elementwise(node: Apply, kinds: list[Kind]) -> Rule:
    """Return the rule of an operation."""
    op, scalar_op = node.op, node.op.scalar_op
    if len(node.outputs) > 1:
        raise CannotFollow(f"{op} has several outputs")
    is_real = node.outputs[0].type.dtype.startswith("float")
    jets = [k for k, kind in enumerate(kinds) if kind is Kind.ACTIVE and is_real]
    if isinstance(scalar_op, ps.Switch) and jets:
        if kinds[0] is Kind.ACTIVE:
            raise CannotFollow(f"{op} depends on coordinates by its condition")
        return _switch
    if isinstance(scalar_op, ps.ScalarMaximum | ps.ScalarMinimum) and jets and len(kinds) == 2:
        chosen = np.greater_equal if isinstance(scalar_op, ps.ScalarMaximum) else np.less_equal
        return lambda space, x, y: _switch(space, chosen(x[:1], y[:1]) | np.isnan(x[:1]), x, y)
    if isinstance(scalar_op, ps.Add) and jets:
        return _add
    if isinstance(scalar_op, ps.Sub) and jets:
        return _on_all_terms(np.subtract) if len(jets) == 2 else lambda space, x, y: _add(space, x, -y)
    if isinstance(scalar_op, ps.Neg) and jets:
        return _on_all_terms(np.negative)
    if isinstance(scalar_op, ps.Mul) and len(jets) == 1 and len(kinds) == 2:
        return _on_all_terms(np.multiply)
    if isinstance(scalar_op, ps.TrueDiv) and jets == [0]:
        return _on_all_terms(np.true_divide)
    try:
        return Elementwise(node, jets)
    except CannotFollow:
        if jets:
            raise
        return structural(op, node, kinds)


def _on_all_terms(function: Callable[..., AnyArray]) -> Rule:
    """Return the rule of a function that is linear in its jets."""
    return lambda space, *x: function(*x)


def _add(space: Space, *terms: AnyArray) -> AnyArray:
    """Add up jets, and what has no derivatives."""
    jets, rest = ([x for x in terms if (len(x) == space.n_terms) is is_jet] for is_jet in (True, False))
    out = reduce(np.add, jets)
    if not rest:
        return out
    more = reduce(np.add, rest)
    shape = np.broadcast_shapes(out.shape[1:], more.shape[1:])
    out = np.broadcast_to(out, (len(out), *shape)).copy() if out.shape[1:] != shape or len(jets) == 1 else out
    out[0] += more[0]
    return out


def _switch(space: Space, condition: AnyArray, x: AnyArray, y: AnyArray) -> AnyArray:
    if len(x) == len(y):
        return np.where(condition, x, y)
    n = max(len(x), len(y))
    parts = [part if len(part) == n else np.concatenate([part, np.zeros((n - 1, *part.shape[1:]))]) for part in (x, y)]
    return np.where(condition, *parts)


class Elementwise:
    """The rule of a function of some jets, by its derivatives, or of none."""

    def __init__(self, node: Apply, jets: list[int]) -> None:
        by = list(dict.fromkeys(node.inputs[k] for k in jets))
        others = [i for i in node.inputs if not (isinstance(i, Constant) and i.data.size == 1)]
        inputs = list(dict.fromkeys([*by, *others]))
        self._read, self._dtype = [node.inputs.index(var) for var in inputs], node.outputs[0].type.dtype
        self._integers = [k for k, var in enumerate(inputs) if var.type.dtype.startswith(("int", "uint"))]
        writer, [value] = read(inputs, node.outputs)
        found = derivatives(writer, [value], len(by), 2)
        self._run = [
            OnNumPy(writer.written([d for (_, *at), d in found.items() if len(at) <= order])).run for order in (0, 1, 2)
        ]
        #: The inputs that each derivative is by.
        self._slopes, self._curves = (
            [[self._read[a] for a in at] for _, *at in found if len(at) == order] for order in (1, 2)
        )
        self._is_jet, self._reads_all = bool(by), 0 < len(writer.inputs_of(value)) == len(inputs)

    def __call__(self, space: Space, *inputs: AnyArray) -> AnyArray:
        """Return the jets of the output."""
        values = [inputs[k][0] for k in self._read]
        for k in self._integers:
            values[k] = values[k].astype(np.float64)
        value, *found = self._run[space.order if self._slopes else 0](*values)
        if not self._reads_all:
            value = np.broadcast_to(value, np.broadcast_shapes(*[x.shape[1:] for x in inputs]))
        if not found:
            alone = np.asarray(value, self._dtype)[None]
            return space.lifted(alone) if self._is_jet else alone
        out = np.empty((space.n_terms, *value.shape))
        out[0], rest = value, out[1:]
        np.multiply(found[0], inputs[self._slopes[0][0]][1:], out=rest)
        for slope, [k] in zip(found[1:], self._slopes[1:], strict=False):
            rest += slope * inputs[k][1:]
        second = space.seconds(out)
        for curve, (k, m) in zip(found[len(self._slopes) :], self._curves, strict=False):
            second += curve * space.products(inputs[k], inputs[m])
        return out


# --- the rule for loops: jets are carried from step to step ---


class Loop:
    """Runs a loop at all points."""

    def __init__(self, node: Apply, kinds: list[Kind]) -> None:
        op: Scan = node.op
        info = op.info
        if info.as_while or info.n_mit_mot or info.n_untraced_sit_sot:
            raise CannotFollow(f"{op} is a loop of another sort")
        self._taps = [*info.mit_sot_in_slices, *info.sit_sot_in_slices]
        self._n_seqs, self._n_states = info.n_seqs, len(self._taps)
        self._n_collected = info.n_nit_sot
        first_state = 1 + info.n_seqs
        if kinds[0] is not Kind.KNOWN:
            raise CannotFollow("the number of steps depends on the point")
        states = kinds[first_state : first_state + self._n_states]
        seqs, others = kinds[1:first_state], kinds[first_state + self._n_states + self._n_collected :]
        inner = op.fgraph
        while True:
            given = [*seqs, *[k for k, taps in zip(states, self._taps, strict=True) for _ in taps], *others]
            self._step = Program(inner.inputs, given, inner.outputs)
            found = self._step.kinds
            wider = [max(old, new) for old, new in zip(states, found[: self._n_states], strict=True)]
            if wider == states:
                break
            states = wider
        self.kinds = [*states, *found[self._n_states :]]

    def __call__(self, space: Space, *inputs: AnyArray) -> list[AnyArray]:
        """Return the outputs of the loop."""
        n_steps = int(inputs[0][0, 0])
        at = 1 + self._n_seqs
        seqs, buffers = inputs[1:at], inputs[at : at + self._n_states]
        others = inputs[at + self._n_states + self._n_collected :]
        states = [
            [self._as(space, buffer[:, :, k], kind) for k in range(-min(taps))]
            for buffer, taps, kind in zip(buffers, self._taps, self.kinds, strict=False)
        ]
        collected: list[list[AnyArray]] = [[] for _ in range(self._n_collected)]
        for t in range(n_steps):
            lagged = [past[tap] for past, taps in zip(states, self._taps, strict=True) for tap in taps]
            outputs = self._step(space, [*[seq[:, :, t] for seq in seqs], *lagged, *others])
            for past, out, kind in zip(states, outputs, self.kinds, strict=False):
                past.append(self._as(space, out, kind))
            for kept, out in zip(collected, outputs[self._n_states :], strict=True):
                kept.append(out)
        results = [self._filled(space, b, past, k) for b, past, k in zip(buffers, states, self.kinds, strict=False)]
        return results + [np.stack(kept, axis=2) for kept in collected]

    @staticmethod
    def _as(space: Space, x: AnyArray, kind: Kind) -> AnyArray:
        """Return a state with the same axes at each step."""
        if kind is Kind.ACTIVE:
            return space.lifted(x)
        return np.broadcast_to(x, (1, space.n_points, *x.shape[2:]))

    def _filled(self, space: Space, buffer: AnyArray, past: list[AnyArray], kind: Kind) -> AnyArray:
        """Return the last states, as many as the buffer has room for."""
        length = buffer.shape[2]
        found = np.stack(past[-length:], axis=2)
        if len(past) >= length:
            return found
        rest = [self._as(space, buffer[:, :, k], kind) for k in range(len(past), length)]
        return np.concatenate([found, np.stack(rest, axis=2)], axis=2)


# --- a graph as a list of rules on jets ---

#: In the place of what nothing reads any more.
_NOTHING: AnyArray = np.empty(0)


@dataclass
class _Call:
    """A rule, the slots that it reads and writes, and those that nothing reads afterwards."""

    rule: Rule | Loop
    read: list[int]
    write: list[int]
    last: list[int]


def _by_others(node: Apply) -> list[Variable] | None:
    """Return what a node makes by other operations, for one that stands for these; None for one with its own rule."""
    op, inputs = core_op(node.op), node.inputs
    match op:
        case LogAddExp():
            return [short_log_add_exp(inputs)]
        case OpFromGraph() if not isinstance(op, LogSumExp):
            return list(op.fgraph.bind(dict(zip(op.fgraph.inputs, inputs, strict=True))))
        case Elemwise(scalar_op=ps.Mul()) if len(inputs) > 2:
            return [reduce(op, inputs)]
        case MatrixInverse():
            return [pt.linalg.solve(inputs[0], pt.eye(inputs[0].shape[-1]))]
        case Det():
            sign, log_size = Blockwise(SLogDet())(inputs[0])
            return [sign * pt.exp(log_size)]
        case Cholesky(lower=False):
            return [pt.linalg.cholesky(inputs[0].mT).mT]
        case CholeskySolve() | SolveTriangular() | Solve(assume_a="pos") | Solve(b_ndim=1):
            return [_solved(op, *inputs)]
    return None


def _solved(op: SolveBase, a: Variable, b: Variable) -> Variable:
    """Return the solution of linear systems by that with any matrix, and a matrix of right-hand sides."""
    if op.b_ndim == 1:
        b = pt.expand_dims(b, -1)
    if isinstance(op, SolveTriangular):
        triangle, beside = (pt.tril, -1) if op.lower else (pt.triu, 1)
        result = pt.linalg.solve(triangle(a, beside) + pt.eye(a.shape[-1]) if op.unit_diagonal else triangle(a), b)
    elif isinstance(op, Solve) and op.assume_a != "pos":
        result = pt.linalg.solve(a, b)
    else:
        if isinstance(op, Solve):
            factor = pt.linalg.cholesky(a if op.lower else a.mT)
        else:
            factor = pt.tril(a) if op.lower else pt.triu(a).mT
        result = pt.linalg.solve(factor.mT, pt.linalg.solve(factor, b))
    return result[..., 0] if op.b_ndim == 1 else result


class Program:
    """Evaluates outputs of a graph, with their derivatives."""

    def __init__(self, inputs: list[Variable], kinds: list[Kind], outputs: list[Variable]) -> None:
        self._calls: list[_Call] = []
        self._slots = {var: k for k, var in enumerate(inputs)}
        self._kinds, self._n_inputs = list(kinds), len(inputs)
        self._constants: dict[int, AnyArray] = {}
        for node in toposort(outputs, blockers=inputs):
            self._translate(node)
        self._outputs = [self._slot(out) for out in outputs]
        self.kinds = [self._kinds[k] for k in self._outputs]
        kept = {*self._outputs, *self._constants, *range(self._n_inputs)}
        seen: set[int] = set(kept)
        for call in reversed(self._calls):
            call.last = [k for k in dict.fromkeys([*call.read, *call.write]) if k not in seen]
            seen.update(call.last)

    def _new(self, var: Variable, kind: Kind) -> int:
        self._slots[var] = len(self._kinds)
        self._kinds.append(kind)
        return self._slots[var]

    def _slot(self, var: Variable) -> int:
        if var not in self._slots:
            assert isinstance(var, Constant)
            self._constants[self._new(var, Kind.KNOWN)] = np.asarray(var.data)[None, None]
        return self._slots[var]

    def _translate(self, node: Apply) -> None:
        op = node.op
        if (others := _by_others(node)) is not None:
            self._inline(node, others)
            return
        read = [self._slot(i) for i in node.inputs]
        kinds = [self._kinds[k] for k in read]
        if isinstance(op, Scan):
            loop = Loop(node, kinds)
            write = [self._new(out, kind) for out, kind in zip(node.outputs, loop.kinds, strict=True)]
            self._calls.append(_Call(loop, read, write, []))
            return
        rule = elementwise(node, kinds) if isinstance(op, Elemwise) else structural(op, node, kinds)
        kind = Kind.KNOWN if isinstance(op, Shape | Shape_i) else max(kinds, default=Kind.KNOWN)
        of_integers = min(kind, Kind.STEP)
        is_real = [out.type.dtype.startswith("float") for out in node.outputs]
        write = [self._new(out, kind if real else of_integers) for out, real in zip(node.outputs, is_real, strict=True)]
        self._calls.append(_Call(rule, read, write, []))

    def _inline(self, node: Apply, outputs: list[Variable]) -> None:
        """Go through the graph that a node stands for."""
        for part in toposort(outputs, blockers=list(self._slots)):
            self._translate(part)
        for out, inner_out in zip(node.outputs, outputs, strict=True):
            self._slots[out] = self._slot(inner_out)

    def __call__(self, space: Space, inputs: list[AnyArray]) -> list[AnyArray]:
        """Return the outputs."""
        values: list[AnyArray] = [*inputs, *[_NOTHING] * (len(self._kinds) - self._n_inputs)]
        for slot, constant in self._constants.items():
            values[slot] = constant
        for call in self._calls:
            found = call.rule(space, *[values[k] for k in call.read])
            if isinstance(found, list):
                for slot, value in zip(call.write, found, strict=True):
                    values[slot] = value
            else:
                values[call.write[0]] = found
            for slot in call.last:
                values[slot] = _NOTHING
        return [values[k] for k in self._outputs]


# --- rules for operations that move, add up and select elements ---

_Kinds = list[Kind]
#: Leading axes of an array of jets.
_LEAD = 2


@singledispatch
def structural(op: Op, node: Apply, kinds: _Kinds) -> Rule:
    """Return the rule of an operation."""
    if type(core_op(op)) in _OF_MATRICES:
        return _OF_MATRICES[type(core_op(op))]
    if not MOVEMENT.keys().isdisjoint(type(core_op(op)).__mro__):
        return Movement(node, kinds)
    if Kind.ACTIVE in kinds or isinstance(op, HasInnerGraph | NoPythonOp):
        raise CannotFollow(f"{op} has no rule")
    dtypes = [i.type.dtype for i in node.inputs]

    def at_point(inputs: tuple[AnyArray, ...], k: int) -> list[AnyArray]:
        values = [np.asarray(x[0, min(k, x.shape[1] - 1)], dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
        return [np.asarray(value) for [value] in performed(node, values)]

    def rule(space: Space, *inputs: AnyArray) -> list[AnyArray]:
        found = [at_point(inputs, k) for k in range(max((x.shape[1] for x in inputs), default=1))]
        return [np.stack(values)[None] for values in zip(*found, strict=True)]

    return rule


def _axes(axes: tuple[int, ...] | None, ndim: int) -> tuple[int, ...]:
    return tuple(_LEAD + axis % ndim for axis in (range(ndim) if axes is None else axes))


class Movement:
    """The rule of an operation that moves elements, or adds some to others: where they go is found once.

    It tells records what is known of its inputs: which are the same at all points, and, when it is evaluated, values.
    """

    def __init__(self, node: Apply, kinds: _Kinds) -> None:
        rule: Any = operation(node.op).elements
        self._node, self._kinds = node, dict(zip(node.inputs, kinds, strict=True))
        self._values = dict[Variable, AnyArray]()
        self._elements = rule(node, self)
        self._adds = not isinstance(self._elements, Rearranged)
        self._n = 2 if self._adds else len(self._elements.inputs)
        if self._elements is None or any(kind is not Kind.KNOWN for kind in kinds[self._n :]):
            raise CannotFollow(f"the arguments of {node.op} depend on the point")
        self._varies = not all(isinstance(var, Constant) for var in node.inputs[self._n :])
        self._places: dict[object, Any] = {}

    def is_known(self, var: Variable) -> bool:
        """Tell whether an input is the same at all points."""
        return self._kinds[var] is Kind.KNOWN

    def value(self, var: Variable) -> AnyArray:
        """Return the value of an input at the first point."""
        return self._values[var]

    def shape(self, var: Variable) -> tuple[int, ...]:
        """Return the shape of an input."""
        return self._values[var].shape

    def __call__(self, space: Space, *inputs: AnyArray) -> list[AnyArray]:
        """Return the outputs."""
        moved = inputs[:1] if self._n == 1 else _together(space, inputs[: self._n])
        key: tuple[object, ...] = moved[0].shape if self._n == 1 else tuple([x.shape for x in moved])
        if self._varies:
            key += tuple([x.tobytes() for x in inputs[self._n :]])
        places = self._places.get(key)
        if places is None:
            values = [np.asarray(x[0, 0], var.type.dtype) for x, var in zip(inputs, self._node.inputs, strict=True)]
            self._values = dict(zip(self._node.inputs, values, strict=True))
            places = self._places[key] = self._found(moved[0].shape[:_LEAD])
        flat = [x if x.ndim == _LEAD + 1 else x.reshape(*x.shape[:_LEAD], -1) for x in moved]
        if self._adds:
            return [self._added(flat[0].copy(), moved[1], *places[0]).reshape(moved[0].shape)]
        whole = flat[0] if len(flat) == 1 else np.concatenate(flat, axis=_LEAD)
        return [whole[:, :, at].reshape(shape) for at, shape in places]

    def _found(self, lead: tuple[int, ...]) -> list[tuple[Any, tuple[int, ...]]]:
        """Return which of all elements each output has, or each that is added is added to, and their shape."""
        if self._adds:
            origins = [targets(self._node, self)]  # type: ignore[arg-type]
        else:
            origins = [origin - 1 for origin in self._elements.origins(self._elements.numbered()[0])]
        return [(consecutive(origin.ravel()), (*lead, *origin.shape)) for origin in origins]

    @staticmethod
    def _added(x: AnyArray, y: AnyArray, at: Any, shape: tuple[int, ...]) -> AnyArray:
        y = np.expand_dims(y, tuple(range(_LEAD, _LEAD + len(shape) - y.ndim)))
        y = np.broadcast_to(y, shape).reshape(*shape[:_LEAD], -1)
        if isinstance(at, slice):
            x[:, :, at] += y
        else:
            np.add.at(x, (slice(None), slice(None), at), y)  # type: ignore[arg-type]
        return x


@structural.register
def _length(op: Shape_i, node: Apply, kinds: _Kinds) -> Rule:
    return lambda space, x: np.full((1, 1), x.shape[_LEAD + op.i])


@structural.register
def _shape(op: Shape, node: Apply, kinds: _Kinds) -> Rule:
    return lambda space, x: np.array(x.shape[_LEAD:])[None, None]


def _together(space: Space, parts: tuple[AnyArray, ...]) -> list[AnyArray]:
    """Return arrays with the same leading axes."""
    same = all(part.shape[:_LEAD] == parts[0].shape[:_LEAD] for part in parts)
    return list(parts) if same else [space.lifted(part) for part in parts]


@structural.register
def _sum(op: Sum, node: Apply, kinds: _Kinds) -> Rule:
    axes = _axes(op.axis, node.inputs[0].type.ndim)
    return lambda space, x: x.sum(axis=axes)


@structural.register(All)
@structural.register(AnyTrue)
def _truth(op: CAReduce, node: Apply, kinds: _Kinds) -> Rule:
    axes, function = _axes(op.axis, node.inputs[0].type.ndim), np.all if isinstance(op, All) else np.any
    return lambda space, x: function(x[:1], axis=axes)


@structural.register
def _max(op: Max, node: Apply, kinds: _Kinds) -> Rule:
    axes = _axes(op.axis, node.inputs[0].type.ndim)

    def rule(space: Space, x: AnyArray) -> AnyArray:
        kept = np.moveaxis(x, axes, range(-len(axes), 0))
        flat = kept.reshape((*kept.shape[: kept.ndim - len(axes)], -1))
        largest = flat[:1].argmax(axis=-1)[..., None]
        return np.take_along_axis(flat, np.broadcast_to(largest, (len(flat), *largest.shape[1:])), axis=-1)[..., 0]

    return rule


@structural.register
def _cumulated(op: CumOp, node: Apply, kinds: _Kinds) -> Rule:
    if op.mode != "add" or op.axis is None:
        raise CannotFollow(f"{op} has no rule")
    axis = _LEAD + op.axis % node.inputs[0].type.ndim
    return lambda space, x: np.cumsum(x, axis=axis)


@structural.register
def _log_sum_exp(op: LogSumExp, node: Apply, kinds: _Kinds) -> Rule:
    axes = _axes(op.axis, node.inputs[0].type.ndim)

    def rule(space: Space, x: AnyArray) -> AnyArray:
        value = x[:1]
        largest = value.max(axis=axes, keepdims=True, initial=-np.inf)
        largest = np.where(np.isinf(largest), 0.0, largest)
        share = np.exp(value - largest)
        total = share.sum(axis=axes, keepdims=True)
        y0 = (np.log(total) + largest).squeeze(axes)
        if len(x) == 1 or not space.order:
            return y0
        share /= total
        y = space.lifted(y0)
        y[1:] = (share * x[1:]).sum(axis=axes)
        if space.order == 2:
            space.seconds(y)[:] += (share * space.products(x, x)).sum(axis=axes) - space.products(y, y)
        return y

    return rule


# --- rules for operations of linear algebra, on the last axes: whatever axes are before them is a batch ---
# Each is solved for the derivatives that are not known yet: those of A X = B, of A = L L', and of log |A|.
# `_by_others` says what is done by these.


def _crossed(space: Space, x: AnyArray, y: AnyArray) -> AnyArray:
    """Return what the first derivatives of two matrices add to the second ones of their product."""
    i, j = space.pairs
    x1, y1 = x[1 : 1 + space.n_dim], y[1 : 1 + space.n_dim]
    both: AnyArray = np.matmul(x1[i], y1[j])
    both += np.matmul(x1[j], y1[i])
    return both


def _products(space: Space, x: AnyArray, y: AnyArray) -> AnyArray:
    if len(x) == 1 or len(y) == 1:
        return np.matmul(x, y)
    out: AnyArray = np.matmul(x, y[:1])
    out[1:] += np.matmul(x[:1], y[1:])
    if space.order == 2:
        space.seconds(out)[:] += _crossed(space, x, y)
    return out


def _solution(space: Space, a: AnyArray, b: AnyArray) -> AnyArray:
    value = or_nan(np.linalg.solve, a[:1], b[:1])
    if len(a) == len(b) == 1:
        return value
    inverse, n = or_nan(np.linalg.inv, a[:1]), space.n_dim
    rest = b[1:] if len(a) == 1 else (b[1:] if len(b) > 1 else 0.0) - np.matmul(a[1:], value)
    out = space.lifted(value)
    out[1 : 1 + n] = np.matmul(inverse, rest[:n])
    if space.order == 2:
        seconds = rest[n:] if len(a) == 1 else rest[n:] - _crossed(space, a, out)
        space.seconds(out)[:] = np.matmul(inverse, seconds)
    return out


def _lower_factor(space: Space, a: AnyArray) -> AnyArray:
    """Return L of A = L L'; only the lower triangle of A is read."""
    a = np.tril(a) + np.tril(a, -1).mT
    factor = or_nan(np.linalg.cholesky, a[:1])
    if len(a) == 1:
        return factor
    inverse, n = or_nan(np.linalg.inv, factor), space.n_dim
    half = np.tril(np.ones(a.shape[-2:])) - 0.5 * np.eye(a.shape[-1])

    def derivatives(of_product: AnyArray) -> AnyArray:
        return np.matmul(factor, half * (inverse @ of_product @ inverse.mT))

    out = space.lifted(factor)
    out[1 : 1 + n] = derivatives(a[1 : 1 + n])
    if space.order == 2:
        space.seconds(out)[:] = derivatives(space.seconds(a) - _crossed(space, out, out.mT))
    return out


def _signs_and_log_determinants(space: Space, a: AnyArray) -> list[AnyArray]:
    sign, value = np.linalg.slogdet(a[:1])
    if len(a) == 1:
        return [sign, value]
    relative = np.matmul(or_nan(np.linalg.inv, a[:1]), a[1:])
    out = space.lifted(value)
    out[1:] = np.trace(relative, axis1=-2, axis2=-1)
    if space.order == 2:
        i, j = space.pairs
        space.seconds(out)[:] -= (relative[i] * relative[j].mT).sum(axis=(-2, -1))
    return [space.lifted(sign), out]


#: Rules of operations on matrices, which are those of batches, too.
_OF_MATRICES: dict[type, Rule] = {
    Dot: _products, Solve: _solution, Cholesky: _lower_factor, SLogDet: _signs_and_log_determinants,
}  # fmt: skip


# --- log p, its gradient and its Hessian at many points, from one pass through its graph ---

#: Coordinates up to which second derivatives by all pairs are carried along.
MOST_DIMENSIONS = 20


def forward_mode(logp: Variable, theta: Variable) -> tuple[Program, list[Variable]]:
    """Return a log density as rules on jets, and what these read that does not depend on theta."""
    varying = dependent([logp], theta)
    nodes = [node for node in toposort([logp]) if node.outputs[0] in varying]
    read = dict.fromkeys(i for node in nodes for i in node.inputs if i not in varying)
    given = [var for var in read if not isinstance(var, Constant)]
    kinds = [Kind.ACTIVE, *[Kind.KNOWN] * len(given)]
    return Program([theta, *given], kinds, [logp]), given


class Jets:
    """Evaluates a log density and its derivatives; see `forward_mode`."""

    def __init__(
        self, program: Program, given: list[Variable], compile_: Callable[[list[Variable], list[Variable]], Function]
    ) -> None:
        self._program, self._given = program, compile_([], given) if given else None

    def __call__(self, theta: Array, order: int) -> list[Array]:
        """Return log p, (n_points,), and its derivatives up to an order at points, (n_points, n_dim)."""
        space = Space(theta.shape[1], len(theta), order)
        given: list[AnyArray] = [] if self._given is None else [np.asarray(x)[None, None] for x in self._given()]
        with np.errstate(all="ignore"):
            [jets] = self._program(space, [space.of_points(theta), *given])
        return space.apart(jets)
