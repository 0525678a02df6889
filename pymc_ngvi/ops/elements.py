"""What is known of a graph: kinds, values and shapes of variables, and how elements are made of those of inputs."""

import enum
import itertools
import math

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytensor.scalar as ps
import pytensor.scalar.math as psm

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph import Apply, Constant, FunctionGraph, Op, Variable
from pytensor.graph.traversal import toposort
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.random.op import RNGConsumerOp
from pytensor.tensor.rewriting.shape import ShapeFeature
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.subtensor import indices_from_subtensor

from pymc_ngvi.core.messages import NotApart, TooDenseError
from pymc_ngvi.core.sparsity import Dependence, Ints, Pairs, RowKinds, everything, joined, union
from pymc_ngvi.core.types import Bools
from pymc_ngvi.graphs.backends import performed, quickly, without_c
from pymc_ngvi.graphs.private import parse_signature
from pymc_ngvi.graphs.programs import NAMES
from pymc_ngvi.rows.programs import OPERATIONS, Operation


class ScalarForm(enum.Enum):
    """What is known of a scalar operation."""

    SUM = "linear in all arguments together"
    PRODUCT = "linear in each argument, given the others"
    QUOTIENT = "linear in the first argument, given the second"
    CHOICE = "the second argument or the third"
    STEP = "constant but for jumps"
    SMOOTH = "a function with second derivatives"
    FUNCTION = "a function that is not listed here"

    def linear_in(self, n: int) -> range:
        """Return the places of the arguments, of ``n``, in each of which it is linear, given the others."""
        if self in (ScalarForm.SUM, ScalarForm.PRODUCT):
            return range(n)
        return {ScalarForm.QUOTIENT: range(1), ScalarForm.CHOICE: range(1, 3)}.get(self, range(0))

    def multiplied(self, n: int) -> list[tuple[int, int]]:
        """Return the pairs of arguments that multiply each other, or of which one divides the other."""
        if self is ScalarForm.PRODUCT:
            return list(itertools.combinations(range(n), 2))
        return [(0, 1)] if self is ScalarForm.QUOTIENT else []

    @classmethod
    def of(cls, node: Apply) -> "ScalarForm":
        """Return the form of a node; of none that goes element by element, nothing is known."""
        if not isinstance(node.op, Elemwise):
            return cls.FUNCTION
        return next((FORMS[kind] for kind in type(node.op.scalar_op).__mro__ if kind in FORMS), cls.FUNCTION)


FORMS: dict[type, ScalarForm] = {
    **dict.fromkeys((ps.Add, ps.Sub, ps.Neg, ps.Identity, ps.Cast, ps.Second), ScalarForm.SUM),
    ps.Mul: ScalarForm.PRODUCT,
    ps.TrueDiv: ScalarForm.QUOTIENT,
    ps.Switch: ScalarForm.CHOICE,
    **dict.fromkeys(
        (ps.LogicalComparison, ps.FixedLogicalComparison, ps.AND, ps.OR, ps.XOR, ps.Invert), ScalarForm.STEP
    ),
    **dict.fromkeys(
        (ps.Sign, ps.Floor, ps.Ceil, ps.Trunc, ps.RoundHalfToEven, ps.RoundHalfAwayFromZero), ScalarForm.STEP
    ),
    ps.IntDiv: ScalarForm.STEP,
    **dict.fromkeys((ps.Exp, ps.Expm1, ps.Log, ps.Log1p, ps.Sqr, ps.Sqrt, ps.Pow, ps.Reciprocal), ScalarForm.SMOOTH),
    **dict.fromkeys((ps.Abs, ps.Tanh, ps.Sin, ps.Cos, ps.ScalarMaximum, ps.ScalarMinimum), ScalarForm.SMOOTH),
    **dict.fromkeys((psm.Sigmoid, psm.Softplus, psm.GammaLn), ScalarForm.SMOOTH),
}


def register(kind: type, name: str, scalar: Operation, form: ScalarForm = ScalarForm.FUNCTION) -> None:
    """Add a scalar operation."""
    NAMES[kind], OPERATIONS[name], FORMS[kind] = name, scalar, form


def differentiable_inputs(node: Apply) -> list[Variable]:
    """Return the inputs on which the derivatives of a node's outputs can depend: not the condition of a switch."""
    form = ScalarForm.of(node)
    if form is ScalarForm.STEP:
        return []
    is_second = isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, ps.Second)
    return list(node.inputs[1:] if form is ScalarForm.CHOICE or is_second else node.inputs)


# --- what is known of the variables of a graph without a value for theta: kinds, values, shapes ---


class Kind(enum.IntEnum):
    """How a variable depends on theta: not at all, without derivatives or on data that vary, or with derivatives."""

    KNOWN, STEP, ACTIVE = 0, 1, 2


class Facts:
    """Kinds of all variables of a graph; values and shapes of those that matter for derivatives by theta."""

    def __init__(
        self, output: Variable, theta: Variable, varying: Collection[Variable] = (), *, conditions: bool = False
    ) -> None:
        order = list(toposort([output]))
        self._kinds: dict[Variable, Kind] = {theta: Kind.ACTIVE, **dict.fromkeys(varying, Kind.STEP)}
        for node in order:
            kind = self._kind_of_outputs(node)
            self._kinds.update(
                {
                    out: kind
                    if str(getattr(out.type, "dtype", "")).startswith(("float", "complex"))
                    else (Kind.STEP if kind is Kind.ACTIVE else kind)
                    for out in node.outputs
                }
            )
        wanted = {output}
        found = []
        for node in reversed(order):
            if not wanted.isdisjoint(node.outputs) and any(self.is_active(out) for out in node.outputs):
                found.append(node)
                wanted.update(self.active_inputs(node))
        self.nodes = found[::-1]
        self._values: dict[Variable, Any] = {}
        self._shapes: dict[Variable, tuple[int, ...]] = {}
        varying = [node for node in order if not all(map(self.is_known, node.outputs))]
        self._prepare(output, theta, varying if conditions else self.nodes)
        self.refresh()

    def is_active(self, var: Variable) -> bool:
        """Tell whether derivatives pass through a variable."""
        return self._kinds.get(var) is Kind.ACTIVE

    def is_known(self, var: Variable) -> bool:
        """Tell whether a variable has a value."""
        return self._kinds.get(var, Kind.KNOWN) is Kind.KNOWN

    def active_inputs(self, node: Apply) -> list[Variable]:
        """Return the inputs of a node through which derivatives pass."""
        return [i for i in differentiable_inputs(node) if self.is_active(i)]

    def value(self, var: Variable) -> Any:
        """Return the value of a known input of one of the ``nodes``."""
        if isinstance(var, SharedVariable):
            return var.get_value(borrow=True)
        return var.data if isinstance(var, Constant) else self._values[var]

    def shape(self, var: Variable) -> tuple[int, ...]:
        """Return the shape of an input or output of one of the ``nodes``."""
        if var in self._shapes:
            return self._shapes[var]
        static = _static_shape(var)
        if None not in static:
            return static
        return tuple(np.shape(self.value(var)))

    def _kind_of_outputs(self, node: Apply) -> Kind:
        if isinstance(node.op, Shape | Shape_i):
            return Kind.KNOWN
        if any(self.is_active(i) for i in differentiable_inputs(node)):
            return Kind.ACTIVE
        if isinstance(node.op, RNGConsumerOp) or not all(self.is_known(i) for i in node.inputs):
            return Kind.STEP
        return Kind.KNOWN

    def _prepare(self, output: Variable, theta: Variable, nodes: list[Apply]) -> None:
        """Make one function of the known inputs that are no constants, and of the shapes that types don't tell."""
        around = dict.fromkeys(var for node in nodes for var in (*node.inputs, *node.outputs))
        known = [var for var in around if self.is_known(var) and not isinstance(var, Constant | SharedVariable)]
        shapeless = [var for var in around if not self.is_known(var) and None in _static_shape(var)]
        feature = ShapeFeature()
        FunctionGraph(outputs=[output], clone=False, copy_inputs=False, features=[feature])
        shapes = [tuple(feature.shape_tuple(var)) for var in shapeless]
        self._evaluated, self._sized = known, list(zip(shapeless, map(len, shapes), strict=True))
        self._zeros = np.zeros(theta.type.shape)
        self._function = quickly([theta], [*known, *(length for shape in shapes for length in shape)])

    def refresh(self) -> None:
        """Take the values and shapes from the data as they are now."""
        # Only shapes can depend on theta here, and those don't depend on its values.
        results = self._function(self._zeros)
        self._values = dict(zip(self._evaluated, results, strict=False))
        lengths = iter(results[len(self._evaluated) :])
        self._shapes = {var: tuple(int(next(lengths)) for _ in range(n)) for var, n in self._sized}


def _static_shape(var: Any) -> tuple[Any, ...]:
    return tuple(getattr(var.type, "shape", ()))


# --- what rules need to lift elements of a variable to rows; see `OpRecord` ---


#: Elements that one element of a sum, or of another reduction, may be made of.
MOST_REDUCED = 16


class Apart(Exception):
    """Elements come from different variables."""

    def __init__(self, labels: Ints) -> None:
        super().__init__("elements come from different variables")
        self.labels = labels


#: A `pymc_ngvi.reading.predictors.Lift`, which is above.
type Lifting = Any


def operands(lift: Lifting, node: Apply, index: Ints, axis: int | Sequence[int] | None) -> list[Variable]:
    """Return the elements that those of a reduction of the only input are made of."""
    [operand] = node.inputs
    shape = lift.facts.shape(operand)
    over = range(len(shape)) if axis is None else np.atleast_1d(axis) % len(shape)
    n_reduced = math.prod(shape[a] for a in over)
    what = type(node.op).__name__
    if not 0 < n_reduced <= MOST_REDUCED:
        raise NotApart(f"it has a {what} over {n_reduced} elements")
    positions = np.moveaxis(np.arange(math.prod(shape)).reshape(shape), tuple(over), range(-len(over), 0))
    columns = positions.reshape(-1, n_reduced)[index].T
    return [lift.of(operand, one_if_scalar(np.ascontiguousarray(column), shape)) for column in columns]


def broadcast_index(index: Ints, shape: tuple[int, ...], inner: tuple[int, ...]) -> Ints:
    """Return the positions in an operand of those in the result of an elementwise function."""
    if inner == shape:
        return index
    if math.prod(inner) == 1:
        return np.zeros(1, dtype=np.int64)
    inner = (1,) * (len(shape) - len(inner)) + tuple(inner)
    places = np.unravel_index(index, shape)
    kept = tuple(p if n > 1 else np.zeros_like(p) for p, n in zip(places, inner, strict=True))
    return np.ravel_multi_index(kept, inner)


def one_if_scalar(index: Ints, shape: tuple[int, ...]) -> Ints:
    """Return positions, one of them where there is no other."""
    return np.zeros(1, dtype=np.int64) if math.prod(shape) == 1 else index


# --- how elements of an input of a node come into those of its output: in place, over axes, by a matrix, at indices ---


class Way(NamedTuple):
    """How elements of one input come into those of the output."""

    #: From the dependence of the input to that of the output by this input; it may be broadcast to the output.
    spread: Callable[[Dependence], Dependence]
    #: Along which the input is added up; None where it is not.
    axes: tuple[int, ...] | None = None

    def gathered(self, used: Bools, shape: tuple[int, ...]) -> Bools:
        """Return which elements of the input, of a shape, the used ones of the output are made of."""
        own = Dependence.identity(math.prod(shape))
        made = self.spread(Dependence(own.sets, own.index.reshape(shape)))
        sets = np.zeros(made.sets.shape[0], dtype=bool)
        sets[np.broadcast_to(made.index, used.shape)[used]] = True
        return np.asarray(made.sets.T @ sets).reshape(shape)


def each(facts: Facts, condition: Variable | None = None, *, branch: bool = True) -> Way:
    """Return the way element by element, broadcast; where a known condition says ``branch``, if there is one."""
    if condition is None or not facts.is_known(condition):
        return Way(lambda part: part)
    return Way(lambda part: part.kept(np.asarray(facts.value(condition)).astype(bool) == branch))


def over(axes: tuple[int, ...], *, keepdims: bool = False) -> Way:
    """Return the way of all elements along some axes, which the output has not, or has others in the place of."""
    return Way(lambda part: part.reduced(axes, keepdims=keepdims), axes)


def by_matrix(kinds: Callable[[], RowKinds], axis: int) -> Way:
    """Return products along an axis with a known matrix, whose rows are found when they are needed."""
    return Way(lambda part: part.multiplied(kinds(), axis), (axis,))


def targets(node: Apply, facts: Facts) -> Ints:
    """Return the flat position in its first input to which a node adds each element, by indices that are known."""
    x, y, *indices = node.inputs
    where = indices_from_subtensor([facts.value(i) for i in indices], node.op.idx_list)
    shape = facts.shape(x)
    positions = np.arange(math.prod(shape)).reshape(shape)[tuple(where)]
    # y may be broadcast to the part of x that it is added to.
    return np.broadcast_to(positions, np.broadcast_shapes(positions.shape, facts.shape(y)))


#: From a variable through which derivatives pass to its dependence.
type Of = Callable[[Variable], Dependence]
#: Which elements of inputs are used linearly.
type Uses = list[tuple[Variable, Bools]]


@dataclass(frozen=True)
class Elements:
    """How the elements of the outputs of a node are made of those of its inputs; nothing is known of it but that."""

    node: Apply
    facts: Facts

    def depends(self, of: Of) -> list[Dependence]:
        """Return the dependence of each output: each element on all elements of all inputs."""
        node, facts = self.node, self.facts
        steps = not all(facts.is_known(i) or facts.is_active(i) for i in node.inputs)
        if steps and any(None in out.type.shape for out in node.outputs):
            raise TooDenseError  # even the shape may depend on theta
        parts = [of(i) for i in facts.active_inputs(node)]
        return [everything(parts, facts.shape(out)) for out in node.outputs]

    def uses(self, used: list[Bools], of: Of, pairs: Pairs) -> Uses | None:
        """Return which elements of inputs come linearly into used ones of the outputs, and note what interacts."""
        return None

    def is_linear(self, varying: list[Variable]) -> bool:
        """Tell whether the outputs are affine functions of the inputs that vary, all others fixed."""
        return False

    def added_axes(self, var: Variable) -> tuple[int, ...] | None:
        """Return the axes of an input along which it is added up; None where it is not."""
        return None


@dataclass(frozen=True)
class FromWays(Elements):
    """An output that inputs come into, each in its way."""

    #: shape (Variable, Way).
    ways: Sequence[tuple[Variable, Way]]
    #: Those in which it is linear, given the others.
    linear: Sequence[Variable] = ()
    #: Pairs of these that multiply each other, or that one divides; shape (Variable, Variable).
    products: Sequence[tuple[Variable, Variable]] = ()
    #: Whether the products are those of the columns of one with the rows of the other.
    is_inner: bool = False
    #: Where one of these is known to be 0, so is the output.
    factors: Sequence[Variable] = ()

    def depends(self, of: Of) -> list[Dependence]:  # noqa: D102
        parts = [way.spread(of(var)) for var, way in self._active()]
        made = union(parts, self.facts.shape(self.node.outputs[0]))
        for keep in self._kept():
            made = made.kept(keep)
        return [made] * len(self.node.outputs)

    def uses(self, used: list[Bools], of: Of, pairs: Pairs) -> Uses | None:  # noqa: D102
        if not any(map(self.facts.is_active, self.linear)):
            return None
        mask = used[0]
        for keep in self._kept():
            mask = mask & keep
        for a, b in self.products:
            if self.facts.is_active(a) and self.facts.is_active(b):
                self._note(of(a), of(b), mask, pairs)
        uses = []
        for var, way in self._active():
            if var in self.linear:
                uses.append((var, way.gathered(mask, self.facts.shape(var))))
            else:
                pairs.add_within(of(var), way.gathered(mask, self.facts.shape(var)))
        return uses

    def is_linear(self, varying: list[Variable]) -> bool:  # noqa: D102
        multiplied = any(a in varying and b in varying for a, b in self.products)
        return not multiplied and all(var in self.linear for var in varying)

    def added_axes(self, var: Variable) -> tuple[int, ...] | None:  # noqa: D102
        axes = next((way.axes for other, way in self.ways if other is var), None)
        return None if axes is None else tuple(axis % var.type.ndim for axis in axes)

    def _active(self) -> list[tuple[Variable, Way]]:
        return [(var, way) for var, way in self.ways if self.facts.is_active(var)]

    def _kept(self) -> Iterator[Bools]:
        """Yield where known factors are not 0, of those that are so somewhere."""
        for var in self.factors:
            if self.facts.is_known(var):
                keep = np.asarray(self.facts.value(var)) != 0
                if not keep.all():
                    yield keep

    def _note(self, a: Dependence, b: Dependence, used: Bools, pairs: Pairs) -> None:
        if self.is_inner:
            a, b = a.reduced([-2]), b.reduced([-1])
            used = np.ones(np.broadcast_shapes(a.index.shape, b.index.shape), dtype=bool)
        pairs.add_across(a, b, used)


@dataclass(frozen=True)
class Rearranged(Elements):
    """Outputs each element of which is one element of an input, or known.

    The Op is run on whole numbers in the place of values, to see where these go.
    """

    #: The first ones, whose elements move.
    inputs: Sequence[Variable]

    def origins(self, numbers: list[Ints]) -> list[Ints]:
        """Run the node on whole numbers, those of each input in its shape."""
        if isinstance(self.node.op, CheckAndRaise):
            return numbers
        # In double precision, as the Op expects; it holds these numbers exactly.
        values = [np.asarray(n, dtype=np.float64) for n in numbers]
        values += [self.facts.value(i) for i in self.node.inputs[len(numbers) :]]
        with without_c():  # a Blockwise Op makes a function of its core
            return [np.asarray(out).astype(np.int64) for [out] in performed(self.node, values)]

    def numbered(self) -> tuple[list[Ints], Ints]:
        """Return the elements of all inputs, counted from 1; and where the numbers of each input end."""
        shapes = [self.facts.shape(var) for var in self.inputs]
        ends = 1 + np.cumsum([math.prod(shape) for shape in shapes])
        starts = [1, *ends[:-1].tolist()]
        return [start + np.arange(math.prod(s)).reshape(s) for start, s in zip(starts, shapes, strict=True)], ends

    def depends(self, of: Of) -> list[Dependence]:  # noqa: D102
        active = list(filter(self.facts.is_active, self.inputs))
        sets, indices = joined([of(var) for var in active])
        by_input = dict(zip(active, indices, strict=True))
        return [
            Dependence(sets, index)
            for index in self.origins(
                [by_input[i] if i in by_input else np.zeros(self.facts.shape(i), dtype=np.int64) for i in self.inputs]
            )
        ]

    def uses(self, used: list[Bools], of: Of, pairs: Pairs) -> Uses | None:  # noqa: D102
        numbers, ends = self.numbered()
        flags = np.zeros(ends[-1], dtype=bool)
        for origin, mask in zip(self.origins(numbers), used, strict=True):
            flags[origin[mask]] = True
        flags[0] = False
        return [(var, flags[number]) for var, number in zip(self.inputs, numbers, strict=True)]

    def is_linear(self, varying: list[Variable]) -> bool:  # noqa: D102
        return all(var in self.inputs for var in varying)


class EntryByEntry(Elements):
    """Outputs each entry of which is made of all of that entry of the inputs."""

    def depends(self, of: Of) -> list[Dependence]:  # noqa: D102
        signature = getattr(self.node.op, "signature", None) or self.node.op.gufunc_signature
        inputs, outputs = parse_signature(signature)
        n_in, n_out = [len(axes) for axes in inputs], [len(axes) for axes in outputs]
        shapes = [self.facts.shape(out) for out in self.node.outputs]
        parts = []
        for var, n_core in zip(self.node.inputs, n_in, strict=True):
            if self.facts.is_active(var):
                part = of(var)
                parts.append(part.reduced(range(part.index.ndim - n_core, part.index.ndim)))
        made = union(parts, shapes[0][: len(shapes[0]) - n_out[0]])
        return [
            Dependence(made.sets, made.index.reshape(made.index.shape + (1,) * n_core)).spread(shape)
            for shape, n_core in zip(shapes, n_out, strict=True)
        ]


def core_op(op: Op) -> Op:
    """Return what a Blockwise Op does with each entry of its batch; any other Op itself."""
    return op.core_op if isinstance(op, Blockwise) else op
