"""Operations that add elements up along axes, or reduce them otherwise."""

import functools

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt

from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.special import LogSoftmax, LogSumExp, Softmax

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.ops.elements import FromWays
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.ops.lifting import MOST_REDUCED, Apart, CannotLift, Lifting, broadcast_index, operands
from pymc_ngvi.ops.record import OpRecord
from pymc_ngvi.ops.ways import Over, UpTo


def _reduced(node: Apply, facts: Facts) -> FromWays:
    [var] = node.inputs
    axes = range(var.type.ndim) if node.op.axis is None else node.op.axis
    is_sum = isinstance(node.op.scalar_op, ps.Add)
    return FromWays(node, facts, [(var, Over(facts, var, tuple(axes)))], node.inputs if is_sum else ())


def _lifted(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
    return functools.reduce(Elemwise(node.op.scalar_op), operands(lift, node, index, node.op.axis))


def _log_sum_exp(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
    return functools.reduce(pt.logaddexp, operands(lift, node, index, node.op.axis))


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
    return FromWays(node, facts, [(var, UpTo(node.op.axis or 0))], node.inputs if node.op.mode == "add" else ())


def _lifted_cumulated(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
    """Return the sum of the elements up to each, for elements that have as many before them."""
    [operand] = node.inputs
    shape, axis = lift.facts.shape(operand), node.op.axis or 0
    if node.op.mode != "add" or (node.op.axis is None and len(shape) != 1):
        raise CannotLift(f"PyTensor's {type(node.op).__name__} is lifted for sums along an axis only")
    places = np.unravel_index(index, shape)
    before = places[axis]
    if (before != before[0]).any():
        raise Apart(before)
    if before[0] >= MOST_REDUCED:
        raise CannotLift(f"{node.op} is over more than {MOST_REDUCED} elements")
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
OPERATIONS: dict[type, OpRecord] = {
    CAReduce: OpRecord(_reduced, _lifted, axis=_axis_left),
    CumOp: OpRecord(_cumulated, _lifted_cumulated),
    LogSumExp: OpRecord(_WRAPPED, _log_sum_exp, axis=_axis_left),
    **dict.fromkeys((Softmax, LogSoftmax), OpRecord(_WRAPPED, _softmax, axis=_axis_left)),
}
