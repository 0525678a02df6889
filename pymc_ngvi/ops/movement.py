"""Operations that move elements, or set or add to some: none of them computes anything of an element."""

import math

import numpy as np

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
from pytensor.tensor.subtensor import AdvancedIncSubtensor, AdvancedSubtensor, IncSubtensor, Subtensor

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.ops.elements import Elements, Made, Moved, core_op
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.ops.lifting import Apart, CannotLift, Lifting, one_if_scalar
from pymc_ngvi.ops.operation import OF_MANY, Operation
from pymc_ngvi.ops.ways import AddedAt, Each


def moves(n: int | None = 1, *, always: bool = False) -> Operation:
    """Return the record of an operation that moves the elements of its first ``n`` inputs, or of all (None).

    Parameters
    ----------
    n : int or None, default 1
    always : bool
        Whether it does so though the other inputs, which say where to, are not known.
    """

    def elements(node: Apply, facts: Facts) -> Moved | None:
        moved, where = (node.inputs, []) if n is None else (node.inputs[:n], node.inputs[n:])
        return Moved(node, facts, list(moved)) if always or all(map(facts.is_known, where)) else None

    def lifted(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
        found = elements(node, lift.facts)
        if found is None:
            raise CannotLift(f"PyTensor's {core_op(node.op)} {OF_MANY}")
        numbers, ends = found.numbered()
        origins = found.origins(numbers)[node.outputs.index(var)].ravel()[index]
        owner = np.searchsorted(ends, origins, side="right")
        if len(owner) and (owner != owner[0]).any():
            raise Apart(owner)
        at = int(owner[0])
        return lift.of(found.inputs[at], one_if_scalar(origins - numbers[at].flat[0], numbers[at].shape))

    def degrees(node: Apply) -> list[float | None]:
        return [1.0] + [None] * (len(node.inputs) - 1)

    return Operation(
        elements, lifted, degrees if n == 1 else "moves several arguments, which have no common factor", True
    )


def _set_or_added() -> Operation:
    """Return the record of what sets some elements, or adds to them."""
    sets = moves(2)

    def elements(node: Apply, facts: Facts) -> Elements | None:
        if core_op(node.op).set_instead_of_inc:
            return sets.elements(node, facts)
        x, y, *indices = node.inputs
        if isinstance(node.op, Blockwise) or not all(map(facts.is_known, indices)):
            return None
        return Made(node, facts, [(x, Each(facts, x)), (y, AddedAt(node, facts))], linear=(x, y))

    def lifted(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
        is_set = core_op(node.op).set_instead_of_inc
        return sets.lift(lift, node, var, index) if is_set else _added(lift, elements(node, lift.facts), node, index)

    return Operation(elements, lifted, sets.degrees, by_batch=True)


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


OPERATIONS: dict[type, Operation] = {
    **dict.fromkeys(
        (Alloc, AdvancedSubtensor, DeepCopyOp, DimShuffle, ExtractDiag, JoinDims, Repeat, Reshape), moves()
    ),
    **dict.fromkeys((ScalarFromTensor, SpecifyShape, Split, SplitDims, Subtensor, TensorFromScalar, ViewOp), moves()),
    **dict.fromkeys((BlockDiagonal, Join, MakeVector), moves(None)),
    CheckAndRaise: moves(always=True),
    FillDiagonal: moves(2),
    **dict.fromkeys((IncSubtensor, AdvancedIncSubtensor), _set_or_added()),
}
