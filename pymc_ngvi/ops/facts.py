"""What is known of the variables of a graph without a value for theta: kinds, values, shapes."""

import enum
import math

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
import pytensor

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import toposort
from pytensor.tensor.random.op import RNGConsumerOp
from pytensor.tensor.rewriting.shape import ShapeFeature
from pytensor.tensor.shape import Shape, Shape_i

from pymc_ngvi.core.refusal import NotApart, Reason
from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.graphs.backends import quick_mode, without_c
from pymc_ngvi.ops.scalars import differentiable_inputs


class Kind(enum.Enum):
    """How a variable depends on theta."""

    KNOWN = "not at all"
    STEP = "with derivatives of 0, or on data that vary"
    ACTIVE = "with derivatives"


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
        self._prepare(output, theta, self._varying(order) if conditions else self.nodes)
        self.refresh()

    def kind(self, var: Variable) -> Kind:
        """Return how a variable depends on theta."""
        return self._kinds.get(var, Kind.KNOWN)

    def is_active(self, var: Variable) -> bool:
        """Tell whether derivatives pass through a variable."""
        return self.kind(var) is Kind.ACTIVE

    def is_known(self, var: Variable) -> bool:
        """Tell whether a variable has a value."""
        return self.kind(var) is Kind.KNOWN

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

    def _varying(self, order: list[Apply]) -> list[Apply]:
        return [node for node in order if not all(self.is_known(out) for out in node.outputs)]

    def _prepare(self, output: Variable, theta: Variable, nodes: list[Apply]) -> None:
        """Make one function of the known inputs that are no constants, and of the shapes that types don't tell."""
        around = dict.fromkeys(var for node in nodes for var in (*node.inputs, *node.outputs))
        known = [var for var in around if self.is_known(var) and not isinstance(var, Constant | SharedVariable)]
        shapeless = [var for var in around if not self.is_known(var) and None in _static_shape(var)]
        feature = ShapeFeature()
        FunctionGraph(outputs=[output], clone=False, copy_inputs=False, features=[feature])
        shapes = [tuple(feature.shape_tuple(var)) for var in shapeless]
        self._evaluated, self._sized = known, list(zip(shapeless, [len(shape) for shape in shapes], strict=True))
        self._function, self._zeros = None, np.zeros(theta.type.shape)
        if not known and not shapeless:
            return
        with without_c():
            outputs = [*known, *(length for shape in shapes for length in shape)]
            self._function = pytensor.function([theta], outputs, mode=quick_mode(), on_unused_input="ignore")

    def refresh(self) -> None:
        """Take the values and shapes from the data as they are now."""
        if self._function is None:
            return
        with without_c():
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


class CannotLift(NotApart):
    """Elements depend on too much, or in a way that is not understood."""

    reason = Reason.NOT_LIFTED


class Apart(Exception):
    """Elements come from different variables."""

    def __init__(self, labels: Ints) -> None:
        super().__init__("elements come from different variables")
        self.labels = labels


class Lifting(Protocol):
    """Lifts elements of variables."""

    @property
    def facts(self) -> Facts:
        """What is known of the graph."""

    def of(self, var: Variable, index: Ints) -> Variable:
        """Return elements of a variable, by their flat positions, as a function of rows."""

    def reads(self, value: Variable) -> set[Variable]:
        """Return the predictors that a function of rows reads."""


def operands(lift: Lifting, node: Apply, index: Ints, axis: int | Sequence[int] | None) -> list[Variable]:
    """Return the elements that those of a reduction of the only input are made of."""
    [operand] = node.inputs
    shape = lift.facts.shape(operand)
    over = range(len(shape)) if axis is None else np.atleast_1d(axis) % len(shape)
    n_reduced = math.prod(shape[a] for a in over)
    what = type(node.op).__name__
    if not 0 < n_reduced <= MOST_REDUCED:
        raise CannotLift(f"it has a {what} over {n_reduced} elements")
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
