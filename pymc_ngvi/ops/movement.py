"""Operations that move elements, or set or add to some: none of them computes anything of an element."""

import math

from collections.abc import Callable
from functools import partial

import numpy as np
import pytensor.tensor as pt

from pytensor.compile.ops import DeepCopyOp, ViewOp
from pytensor.graph.basic import Apply, Variable
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import Alloc, ExtractDiag, Join, MakeVector, ScalarFromTensor, Split, TensorFromScalar
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.extra_ops import FillDiagonal, Repeat
from pytensor.tensor.linalg.constructors import BlockDiagonal
from pytensor.tensor.reshape import JoinDims, SplitDims
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
    indices_from_subtensor,
)

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.ops.elements import Elements, FromWays, Rearranged, core_op
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.ops.lifting import Apart, CannotLift, Lifting, one_if_scalar
from pymc_ngvi.ops.record import MIXES, OF_MANY, OpRecord
from pymc_ngvi.ops.ways import AddedAt, Each

type Axis = Callable[[Apply, Variable, int], int | None]


def moves(n: int | None = 1, axis: Axis | str = MIXES, *, always: bool = False) -> OpRecord:
    """Return the record of an operation that moves the elements of its first ``n`` inputs, or of all (None).

    Parameters
    ----------
    n : int or None, default 1
    axis : callable or str
        See `OpRecord`.
    always : bool
        Whether it does so though the other inputs, which say where to, are not known.
    """
    powers = "moves several arguments, which have no common factor" if n != 1 else _first_alone
    elements, lift = partial(_moved, n=n, always=always), partial(_lifted, n=n, always=always)
    return OpRecord(elements, lift, powers, axis, by_batch=True)


def _moved(node: Apply, facts: Facts, n: int | None, *, always: bool = False) -> Rearranged | None:
    moved, where = (node.inputs, []) if n is None else (node.inputs[:n], node.inputs[n:])
    return Rearranged(node, facts, list(moved)) if always or all(map(facts.is_known, where)) else None


def _lifted(lift: Lifting, node: Apply, var: Variable, index: Ints, n: int | None, *, always: bool = False) -> Variable:
    found = _moved(node, lift.facts, n, always=always)
    if found is None:
        raise CannotLift(f"PyTensor's {type(core_op(node.op)).__name__} {OF_MANY}")
    numbers, ends = found.numbered()
    origins = found.origins(numbers)[node.outputs.index(var)].ravel()[index]
    owner = np.where(origins > 0, np.searchsorted(ends, origins, side="right"), -1)
    if len(owner) and (owner != owner[0]).any():
        raise Apart(owner)
    at = int(owner[0])
    if at < 0:  # a zero that no input has
        return pt.zeros((1, 1))
    return lift.of(found.inputs[at], one_if_scalar(origins - numbers[at].flat[0], numbers[at].shape))


def _first_alone(node: Apply) -> list[float | None]:
    return [1.0, *[None] * (len(node.inputs) - 1)]


def _set_or_added(node: Apply, facts: Facts) -> Elements | None:
    if core_op(node.op).set_instead_of_inc:
        return _moved(node, facts, 2)
    x, y, *indices = node.inputs
    if isinstance(node.op, Blockwise) or not all(map(facts.is_known, indices)):
        return None
    return FromWays(node, facts, [(x, Each(facts, x)), (y, AddedAt(node, facts))], linear=(x, y))


def _lifted_set_or_added(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
    if core_op(node.op).set_instead_of_inc:
        return _lifted(lift, node, var, index, 2)
    return _added(lift, _set_or_added(node, lift.facts), node, index)


def _added(lift: Lifting, found: Elements | None, node: Apply, index: Ints) -> Variable:
    """Return elements to each of which another is added, or to none of which."""
    base, added = node.inputs[:2]
    targets = AddedAt(node, lift.facts).targets() if found is not None else None
    if targets is None or np.unique(targets).size < targets.size:
        raise CannotLift("it adds to elements several times")
    targets = targets.ravel()
    source = np.full(math.prod(lift.facts.shape(base)), -1, dtype=np.int64)
    source[targets] = np.arange(len(targets))
    from_ = source[index]
    if ((from_ >= 0) != (from_[0] >= 0)).any():
        raise Apart((from_ >= 0).astype(np.int64))
    value = lift.of(base, index)
    return value if from_[0] < 0 else value + lift.of(added, one_if_scalar(from_, lift.facts.shape(added)))


def _axis_of_dims(node: Apply, out: Variable, axis: int) -> int | None:
    found = node.op.new_order[axis]
    return int(found) if isinstance(found, int) else None


def _axis_of_shape(node: Apply, out: Variable, axis: int) -> int | None:
    first = node.inputs[0]
    return 0 if axis == 0 and first.type.shape[:1] == out.type.shape[:1] not in ((), (None,)) else None


def _axis_of_joined(node: Apply, out: Variable, axis: int) -> int | None:
    return axis if node.op.axis % out.type.ndim != axis else None


def _axis_of_part(node: Apply, out: Variable, axis: int) -> int | None:
    """Return the axis of which a part is taken, where that is all of it."""
    ndim = node.inputs[0].type.ndim
    indices = list(indices_from_subtensor(node.inputs[1:], node.op.idx_list))
    indices += [slice(None)] * (ndim - len(indices))
    kept = [k for k, index in enumerate(indices) if isinstance(index, slice)]
    return kept[axis] if indices[kept[axis]] == slice(None) else None


OPERATIONS: dict[type, OpRecord] = {
    **dict.fromkeys((Alloc, AdvancedSubtensor, DeepCopyOp, ExtractDiag, JoinDims, Repeat, ScalarFromTensor), moves()),
    **dict.fromkeys((SpecifyShape, Split, SplitDims, TensorFromScalar, ViewOp), moves()),
    DimShuffle: moves(axis=_axis_of_dims),
    Reshape: moves(axis=_axis_of_shape),
    Subtensor: moves(axis=_axis_of_part),
    **dict.fromkeys((BlockDiagonal, MakeVector), moves(None)),
    Join: moves(None, _axis_of_joined),
    CheckAndRaise: moves(always=True),
    FillDiagonal: moves(2),
    **dict.fromkeys(
        (IncSubtensor, AdvancedIncSubtensor),
        OpRecord(_set_or_added, _lifted_set_or_added, "changes elements, not all by one factor", by_batch=True),
    ),
}
