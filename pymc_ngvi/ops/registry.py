"""All operations: what is known of each, by the type of its Op."""

import functools
import math

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt

from pymc.distributions.dist_math import SplineWrapper
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.ops import DeepCopyOp, ViewOp
from pytensor.graph import Apply, Op, Variable, ancestors
from pytensor.raise_op import CheckAndRaise
from pytensor.scan.op import Scan
from pytensor.sparse import Dot as SparseDot
from pytensor.sparse import StructuredDot
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    ARange,
    ExtractDiag,
    Eye,
    Join,
    MakeVector,
    ScalarFromTensor,
    Split,
    TensorFromScalar,
)
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp, FillDiagonal, Repeat
from pytensor.tensor.linalg import (
    BlockDiagonal,
    Cholesky,
    Det,
    Eigh,
    Expm,
    MatrixInverse,
    SLogDet,
    Solve,
    SolveBase,
    SolveTriangular,
)
from pytensor.tensor.math import Argmax, Dot
from pytensor.tensor.random.op import RNGConsumerOp
from pytensor.tensor.reshape import JoinDims, SplitDims
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.signal.conv import AbstractConvolveNd
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.special import LogSoftmax, LogSumExp, Softmax
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
    indices_from_subtensor,
)
from scipy import sparse

from pymc_ngvi.core.messages import NotApart
from pymc_ngvi.core.sparsity import Dependence, Ints, RowKinds
from pymc_ngvi.core.types import Matrix
from pymc_ngvi.graphs.backends import python_loops
from pymc_ngvi.graphs.odes import Solution
from pymc_ngvi.graphs.programs import is_tail
from pymc_ngvi.ops.elements import (
    MOST_REDUCED,
    Apart,
    Elements,
    EntryByEntry,
    Facts,
    FromWays,
    Lifting,
    Rearranged,
    ScalarForm,
    Way,
    broadcast_index,
    by_matrix,
    core_op,
    differentiable_inputs,
    each,
    one_if_scalar,
    operands,
    over,
    targets,
)

# --- what is known of one operation of a graph: a record with an answer to each reading, or a refusal in words ---


#: Refusals that many operations share; each follows the name of the operation.
OF_MANY = "makes each element of many"
PASS = "takes a pass over its elements"
MIXES = "is not known to keep rows apart"
NOT_HOMOGENEOUS = "does not multiply its result by a power of what its argument is multiplied by"


class Extra(NamedTuple):
    """What a node takes beside a pass over its elements: counts of each sort."""

    #: Calls of other functions.
    thunks: int = 0
    #: Elements that Python computes one by one.
    in_python: int = 0
    #: Derivatives of incomplete beta and gamma functions.
    in_tails: int = 0
    #: Of differential equations.
    solutions: int = 0
    #: Elements of a matrix that is multiplied.
    read: int = 0
    #: Elements of an exp, a log and the like.
    functions: int = 0


def largest(variables: Sequence[Variable], unknown: int) -> int:
    """Return the elements of the largest of some variables; those of ``unknown`` size, at least."""
    return max((_all_elements(var, unknown) for var in variables), default=1)


def _all_elements(var: Variable, unknown: int) -> int:
    shape = getattr(var.type, "shape", ())
    size = int(math.prod(length for length in shape if length is not None))
    return max(size, unknown) if None in shape else size


@dataclass(frozen=True)
class OpRecord:
    """What is known of an operation.

    A string in the place of a function says why there is none, in words that follow the name of the operation.
    """

    #: From a node and what is known of its graph to how its elements are made of those of its inputs: on what they
    #: depend, in what they are linear, what interacts in them, and what moves. None where this node is like one of
    #: which nothing is known.
    elements: Callable[[Apply, Facts], Elements | None] | str
    #: From what lifts, a node, an output and flat positions in it to these elements as a function of rows.
    lift: Callable[[Lifting, Apply, Variable, Ints], Variable] | str = OF_MANY
    #: From a node to the power of each input's factor in that of the output, where an input is multiplied by a
    #: number: what can be factored out. None for an input that no factor comes out of.
    degrees: Callable[[Apply], Sequence[float | None]] | str = NOT_HOMOGENEOUS
    #: From a node, an output and an axis of it to the axis of the inputs that it is, so that rows along it stay
    #: apart. None where there is no such axis.
    axis: Callable[[Apply, Variable, int], int | None] | str = MIXES
    #: From a node, and the size of what has none that is known, to what it takes beside a pass over its elements.
    work: Callable[[Apply, int], Extra] | str = PASS
    #: Whether the same holds of a batch of it.
    by_batch: bool = field(default=False, kw_only=True)

    @classmethod
    def refused(cls, why: str, **others: Any) -> "OpRecord":
        """Return the record of an operation that is not taken apart, but for some readings."""
        return cls(**dict.fromkeys(("elements", "lift", "degrees", "axis"), why) | others)


# --- operations that move elements, or set or add to some: none of them computes anything of an element ---

type Axis = Callable[[Apply, Variable, int], int | None]


def moves(n: int | None = 1, axis: Axis | str = MIXES, *, always: bool = False) -> OpRecord:
    """Return the record of an operation that moves the elements of its first ``n`` inputs, or of all (None)."""
    return OpRecord(
        partial(_moved, n=n, always=always),
        partial(_lifted_move, n=n, always=always),
        "moves several arguments, which have no common factor"
        if n != 1
        else lambda node: [1.0, *[None] * (len(node.inputs) - 1)],
        axis,
        by_batch=True,
    )


def _moved(node: Apply, facts: Facts, n: int | None, *, always: bool = False) -> Rearranged | None:
    moved, where = (node.inputs, []) if n is None else (node.inputs[:n], node.inputs[n:])
    return Rearranged(node, facts, list(moved)) if always or all(map(facts.is_known, where)) else None


def _lifted_move(
    lift: Lifting, node: Apply, var: Variable, index: Ints, n: int | None, *, always: bool = False
) -> Variable:
    found = _moved(node, lift.facts, n, always=always)
    if found is None:
        raise NotApart(f"PyTensor's {type(core_op(node.op)).__name__} {OF_MANY}")
    numbers, ends = found.numbered()
    origins = found.origins(numbers)[node.outputs.index(var)].ravel()[index]
    owner = np.where(origins > 0, np.searchsorted(ends, origins, side="right"), -1)
    if len(owner) and (owner != owner[0]).any():
        raise Apart(owner)
    at = int(owner[0])
    if at < 0:  # a zero that no input has
        return pt.zeros((1, 1))
    return lift.of(found.inputs[at], one_if_scalar(origins - numbers[at].flat[0], numbers[at].shape))


def _set_or_added(node: Apply, facts: Facts) -> Elements | None:
    if core_op(node.op).set_instead_of_inc:
        return _moved(node, facts, 2)
    x, y, *indices = node.inputs
    if isinstance(node.op, Blockwise) or not all(map(facts.is_known, indices)):
        return None

    def added(part: Dependence) -> Dependence:
        where = targets(node, facts)
        return part.spread(where.shape).collected(where, facts.shape(x))

    return FromWays(node, facts, [(x, each(facts)), (y, Way(added))], linear=(x, y))


def _lifted_set_or_added(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
    """Return elements that are set, or to each of which another is added, or to none of which."""
    if core_op(node.op).set_instead_of_inc:
        return _lifted_move(lift, node, var, index, 2)
    base, added = node.inputs[:2]
    where = targets(node, lift.facts).ravel() if _set_or_added(node, lift.facts) is not None else None
    if where is None or np.unique(where).size < where.size:
        raise NotApart("it adds to elements several times")
    source = np.full(math.prod(lift.facts.shape(base)), -1, dtype=np.int64)
    source[where] = np.arange(len(where))
    from_ = source[index]
    if ((from_ >= 0) != (from_[0] >= 0)).any():
        raise Apart((from_ >= 0).astype(np.int64))
    value = lift.of(base, index)
    return value if from_[0] < 0 else value + lift.of(added, one_if_scalar(from_, lift.facts.shape(added)))


def _axis_of_shape(node: Apply, out: Variable, axis: int) -> int | None:
    first = node.inputs[0]
    return 0 if axis == 0 and first.type.shape[:1] == out.type.shape[:1] not in ((), (None,)) else None


def _axis_of_part(node: Apply, out: Variable, axis: int) -> int | None:
    """Return the axis of which a part is taken, where that is all of it."""
    ndim = node.inputs[0].type.ndim
    indices = list(indices_from_subtensor(node.inputs[1:], node.op.idx_list))
    indices += [slice(None)] * (ndim - len(indices))
    kept = [k for k, index in enumerate(indices) if isinstance(index, slice)]
    return kept[axis] if indices[kept[axis]] == slice(None) else None


MOVEMENT: dict[type, OpRecord] = {
    **dict.fromkeys((Alloc, AdvancedSubtensor, DeepCopyOp, ExtractDiag, JoinDims, Repeat, ScalarFromTensor), moves()),
    **dict.fromkeys((SpecifyShape, Split, SplitDims, TensorFromScalar, ViewOp), moves()),
    DimShuffle: moves(axis=lambda node, out, axis: None if (kept := node.op.new_order[axis]) == "x" else kept),
    Reshape: moves(axis=_axis_of_shape),
    Subtensor: moves(axis=_axis_of_part),
    **dict.fromkeys((BlockDiagonal, MakeVector), moves(None)),
    Join: moves(None, lambda node, out, axis: axis if node.op.axis % out.type.ndim != axis else None),
    CheckAndRaise: moves(always=True),
    FillDiagonal: moves(2),
    **dict.fromkeys(
        (IncSubtensor, AdvancedIncSubtensor),
        OpRecord(_set_or_added, _lifted_set_or_added, "changes elements, not all by one factor", by_batch=True),
    ),
}

# --- operations that add elements up along axes, or reduce them otherwise ---


def _reduced(node: Apply, facts: Facts) -> FromWays:
    [var] = node.inputs
    axes = range(var.type.ndim) if node.op.axis is None else node.op.axis
    is_sum = isinstance(node.op.scalar_op, ps.Add)
    return FromWays(node, facts, [(var, over(tuple(axes)))], node.inputs if is_sum else ())


def _lifted_reduction(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
    of_two = pt.logaddexp if isinstance(node.op, LogSumExp) else Elemwise(node.op.scalar_op)
    return functools.reduce(of_two, operands(lift, node, index, node.op.axis))


def _softmax(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
    [operand] = node.inputs
    shape = lift.facts.shape(operand)
    over = range(len(shape)) if node.op.axis is None else np.atleast_1d(node.op.axis) % len(shape)
    kept = tuple(1 if a in over else length for a, length in enumerate(shape))
    parts = operands(lift, node, broadcast_index(index, shape, kept), node.op.axis)
    log_p = lift.of(operand, index) - functools.reduce(pt.logaddexp, parts)
    return log_p if isinstance(node.op, LogSoftmax) else pt.exp(log_p)


def _cumulated(node: Apply, facts: Facts) -> FromWays | None:
    [var] = node.inputs
    if node.op.axis is None and var.type.ndim != 1:
        return None
    axis = node.op.axis or 0
    way = by_matrix(lambda: RowKinds.up_to(facts.shape(var)[axis]), axis)
    return FromWays(node, facts, [(var, way)], node.inputs if node.op.mode == "add" else ())


def _lifted_cumulated(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
    """Return the sum of the elements up to each, for elements that have as many before them."""
    [operand] = node.inputs
    shape, axis = lift.facts.shape(operand), node.op.axis or 0
    if node.op.mode != "add" or (node.op.axis is None and len(shape) != 1):
        raise NotApart(f"PyTensor's {type(node.op).__name__} is lifted for sums along an axis only")
    places = np.unravel_index(index, shape)
    before = places[axis]
    if (before != before[0]).any():
        raise Apart(before)
    if before[0] >= MOST_REDUCED:
        raise NotApart(f"{node.op} is over more than {MOST_REDUCED} elements")
    parts = []
    for at in range(int(before[0]) + 1):
        here = (*places[:axis], np.full_like(before, at), *places[axis + 1 :])
        parts.append(lift.of(operand, np.ravel_multi_index(here, shape)))
    return functools.reduce(pt.add, parts)


def _axis_left(node: Apply, out: Variable, axis: int) -> int | None:
    """Return an axis that is not reduced."""
    [var] = node.inputs
    if node.op.axis is None:
        return None
    if out.type.ndim == var.type.ndim:
        return axis if axis not in node.op.axis else None
    return [k for k in range(var.type.ndim) if k not in node.op.axis][axis]


_WRAPPED = "is read by the graph that it stands for"
REDUCTIONS: dict[type, OpRecord] = {
    CAReduce: OpRecord(_reduced, _lifted_reduction, axis=_axis_left),
    CumOp: OpRecord(_cumulated, _lifted_cumulated),
    LogSumExp: OpRecord(_WRAPPED, _lifted_reduction, axis=_axis_left),
    **dict.fromkeys((Softmax, LogSoftmax), OpRecord(_WRAPPED, _softmax, axis=_axis_left)),
}

# --- products of matrices, and solutions of linear systems ---


def _known_operand(node: Apply, facts: Facts) -> tuple[int, Matrix] | None:
    """Return which operand of a product, if one, is a known matrix, the same for a whole batch; and the matrix."""
    for place, var in enumerate(node.inputs):
        if facts.is_known(var):
            value = facts.value(var)
            if sparse.issparse(value):
                return place, value
            if math.prod(value.shape[:-2]) == 1 and value.ndim >= 2:
                return place, value.reshape(value.shape[-2:])
    return None


def _product(node: Apply, facts: Facts) -> FromWays:
    """Take a @ b as a sum over k of products a[i, k] b[k, j]."""
    a, b = node.inputs
    known = _known_operand(node, facts)
    if known is not None:
        place, matrix = known
        var, axis, by_row = (b, -2, matrix) if place == 0 else (a, -1, matrix.T)
        return FromWays(node, facts, [(var, by_matrix(partial(RowKinds.of, by_row), axis))], [var])
    ways = [(a, over((-1,), keepdims=True)), (b, over((-2,), keepdims=True))]
    return FromWays(node, facts, ways, [a, b], [(a, b)], is_inner=True)


def _sparse_product(node: Apply, facts: Facts) -> FromWays | None:
    is_known = _known_operand(node, facts) is not None and all(i.type.ndim == 2 for i in node.inputs)
    return _product(node, facts) if is_known else None


def _solution(node: Apply, facts: Facts) -> FromWays | None:
    """Take the solution as linear in the right-hand side: a column depends on that column, and on all of the matrix."""
    a, b = node.inputs
    axis, known = -core_op(node.op).b_ndim, _known_operand(node, facts)
    if known is not None and known[0] == 0:
        return FromWays(node, facts, [(b, by_matrix(partial(RowKinds.of_inverse, known[1]), axis))], [b])
    of_b = b, over((axis,), keepdims=True)
    if facts.is_active(a):
        return None if axis == -1 else FromWays(node, facts, [(a, over((-2, -1), keepdims=True)), of_b])
    return FromWays(node, facts, [of_b], [b])


def _lifted_product(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
    """Return the elements of a product of two matrices, or vectors, as sums."""
    shapes = [lift.facts.shape(i) for i in node.inputs]
    if not isinstance(node.op, Dot) or max(map(len, shapes)) > 2:
        raise NotApart("it has a product of unknown arrays")
    (n, inner), (_, p) = (shapes[0] if len(shapes[0]) == 2 else (1, *shapes[0])), (*shapes[1], 1)[:2]
    if not 0 < inner <= MOST_REDUCED:
        raise NotApart(f"it has a product of unknown matrices over {inner} elements")
    row, col = np.unravel_index(index, (n, p))
    parts = []
    for at in range(inner):
        left, right = lift.of(node.inputs[0], row * inner + at), lift.of(node.inputs[1], at * p + col)
        parts.append(left * right)
    return functools.reduce(pt.add, parts)


PRODUCTS: dict[type, OpRecord] = {
    Dot: OpRecord(
        _product,
        _lifted_product,
        lambda node: [1.0, 1.0],
        "multiplies rows by what they share",
        lambda node, unknown: Extra(read=largest(node.inputs, unknown) if isinstance(node.op, Dot) else 0),
        by_batch=True,
    ),
    **dict.fromkeys((SparseDot, StructuredDot), OpRecord(_sparse_product, OF_MANY, "is of a matrix that is known")),
    SolveBase: OpRecord(
        _solution,
        OF_MANY,
        lambda node: [-1.0, 1.0] if isinstance(core_op(node.op), Solve | SolveTriangular) else [None, None],
        by_batch=True,
    ),
    Cholesky: OpRecord("makes each element of all those of a matrix", OF_MANY, lambda node: [0.5], by_batch=True),
}

# --- operations element by element; what they do to a number is in `FORMS` and in `rows.programs.OPERATIONS` ---

#: Functions of one argument that cost no more than a pass.
_CHEAP = {"neg", "abs", "sqr", "sqrt", "cast", "identity", "sign", "isnan", "isinf", "invert", "reciprocal"}


def _elements(node: Apply, facts: Facts) -> FromWays:
    form, inputs = ScalarForm.of(node), node.inputs
    linear = [inputs[k] for k in form.linear_in(len(inputs))]
    ways = [(var, each(facts)) for var in differentiable_inputs(node)]
    if form is ScalarForm.CHOICE:
        ways = [(var, each(facts, inputs[0], branch=var is inputs[1])) for var in linear]
    unknown = [k for k, var in enumerate(inputs) if not facts.is_known(var)]
    pairs = [(inputs[a], inputs[b]) for a, b in form.multiplied(len(inputs)) if a in unknown and b in unknown]
    return FromWays(
        node, facts, ways, linear, pairs, factors=linear if form in (ScalarForm.PRODUCT, ScalarForm.QUOTIENT) else ()
    )


def _lifted(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
    if ScalarForm.of(node) is ScalarForm.CHOICE and lift.facts.is_known(node.inputs[0]):
        return _switched(lift, node, var, index)
    return node.op(*_parts(lift, node, index))


def _parts(lift: Lifting, node: Apply, index: Ints) -> list[Variable]:
    """Return the elements of the inputs that those of an elementwise function are made of."""
    shapes = [lift.facts.shape(i) for i in node.inputs]
    whole = np.broadcast_shapes(*shapes)
    return [lift.of(i, broadcast_index(index, whole, shape)) for i, shape in zip(node.inputs, shapes, strict=True)]


def _switched(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
    """Return elements that data choose from two branches: rows of different predictors are kept apart."""
    shape = lift.facts.shape(var)
    try:
        condition = np.broadcast_to(lift.facts.value(node.inputs[0]), shape).ravel()[index] != 0
    except KeyError:
        return node.op(*_parts(lift, node, index))
    if len(index) and (condition == condition[0]).all():
        branch = node.inputs[1 if condition[0] else 2]
        return lift.of(branch, broadcast_index(index, shape, lift.facts.shape(branch)))
    result = node.op(*_parts(lift, node, index))
    reads = [lift.slots.keys() & set(ancestors([branch])) for branch in result.owner.inputs[1:]]
    if reads[0] != reads[1] and all(reads):
        raise Apart(condition.astype(np.int64))
    return result


def _degrees(node: Apply) -> list[float | None]:
    form, n = ScalarForm.of(node), len(node.inputs)
    if form is ScalarForm.QUOTIENT:
        return [1.0, -1.0]
    return [1.0 if form is ScalarForm.PRODUCT else None] * n


def _work(node: Apply, unknown: int) -> Extra:
    size, scalar = largest(node.outputs, unknown), node.op.scalar_op
    name = str(getattr(scalar, "name", None) or type(scalar).__name__).lower()
    is_function = isinstance(scalar, ps.UnaryScalarOp) and not isinstance(scalar, ps.Cast) and name not in _CHEAP
    return Extra(
        in_python=size if python_loops([node]) else 0,
        in_tails=size if is_tail(node) else 0,
        functions=largest(node.outputs[:1], unknown) if is_function else 0,
    )


ELEMENTWISE: dict[type, OpRecord] = {
    Elemwise: OpRecord(_elements, _lifted, _degrees, "reads what rows share, element by element", _work),
}

# --- operations that are not taken apart, and why ---

_OF_MATRIX = "makes each element of all those of a matrix"
_LENGTHS = "tells or takes lengths, and moves no values"
_BY_ORDER = "depends on the order of values"


def _steps(node: Apply, unknown: int) -> Extra:
    n_steps = getattr(node.inputs[0], "data", None)
    return Extra(thunks=(unknown if n_steps is None else int(n_steps)) * len(node.op.fgraph.apply_nodes))


REFUSED: dict[type, OpRecord] = {
    **dict.fromkeys((Det, Eigh, Expm, SLogDet), OpRecord.refused(_OF_MATRIX)),
    MatrixInverse: OpRecord.refused(_OF_MATRIX, degrees=lambda node: [-1.0], by_batch=True),
    **dict.fromkeys((AllocEmpty, ARange, Eye, Shape, Shape_i), OpRecord.refused(_LENGTHS)),
    **dict.fromkeys((Argmax, ArgSortOp, SortOp), OpRecord.refused(_BY_ORDER)),
    AbstractConvolveNd: OpRecord.refused("adds up products of neighbours"),
    OpFromGraph: OpRecord.refused("stands for a graph, which is read in its place"),
    RNGConsumerOp: OpRecord.refused("draws at random"),
    Scan: OpRecord.refused("runs a graph of its own, step by step", work=_steps),
    Solution: OpRecord.refused("solves differential equations", work=lambda node, unknown: Extra(solutions=1)),
    SplineWrapper: OpRecord.refused("evaluates a spline, whose derivatives it alone knows"),
}

# --- all operations: what is known of each, by the type of its Op ---

RECORDS: dict[type, OpRecord] = {**MOVEMENT, **ELEMENTWISE, **REDUCTIONS, **PRODUCTS, **REFUSED}
#: Of what is not in the table.
UNKNOWN = OpRecord.refused("makes each element of many")
#: Of batches of what is said of single ones alone.
BATCH = OpRecord.refused("makes each element of all of its entry of a batch")


def register(operations: dict[type, OpRecord]) -> None:
    """Add the records of operations, by the types of their Ops; subclasses have those of the nearest class."""
    RECORDS.update(operations)


def operation(op: Op) -> OpRecord:
    """Return what is known of an operation."""
    is_batch = isinstance(op, Blockwise)
    kind = type(op.core_op if is_batch else op)
    found = next((RECORDS[base] for base in kind.__mro__ if base in RECORDS), UNKNOWN)
    return BATCH if is_batch and not found.by_batch and found is not UNKNOWN else found


def elements(node: Apply, facts: Facts) -> Elements:
    """Return how the elements of the outputs of a node are made of those of its inputs."""
    rule = operation(node.op).elements
    found = None if isinstance(rule, str) else rule(node, facts)
    if found:
        return found
    by_entry = (getattr(node.op, "signature", None) or getattr(node.op, "gufunc_signature", None)) is not None
    return (EntryByEntry if by_entry else Elements)(node, facts)
