"""Rules for operations that move, add up and select elements."""

from collections.abc import Callable
from functools import singledispatch
from typing import Any

import numpy as np

from pytensor.graph.basic import Apply
from pytensor.graph.op import HasInnerGraph, Op, _NoPythonOp
from pytensor.tensor.basic import Alloc, ExtractDiag, Join, MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import All, Dot, Max, Sum
from pytensor.tensor.math import Any as AnyTrue
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.special import LogSumExp
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
    indices_from_subtensor,
)

from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.jets.arrays import JetKind, NoJet, Space
from pymc_ngvi.density.jets.elementwise import Rule
from pymc_ngvi.density.jets.linalg import OPERATIONS, of_matrices

_Kinds = list[JetKind]
#: Leading axes of an array of jets.
_LEAD = 2


@singledispatch
def structural(op: Op, node: Apply, kinds: _Kinds) -> Rule:
    """Return the rule of an operation.

    Raises
    ------
    NoJet
        Where there is none.
    """
    if JetKind.JET in kinds or isinstance(op, HasInnerGraph | _NoPythonOp):
        raise NoJet(f"{op} has no rule")
    return _at_each_point(node)


def _at_each_point(node: Apply) -> Rule:
    """Return the rule of whatever has no derivatives: PyTensor's own function, at one point after the other."""
    dtypes = [i.type.dtype for i in node.inputs]

    def at_point(inputs: tuple[AnyArray, ...], k: int) -> list[AnyArray]:
        values = [np.asarray(x[0, min(k, x.shape[1] - 1)], dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
        storage: list[list[Any]] = [[None] for _ in node.outputs]
        node.op.perform(node, values, storage)
        return [np.asarray(value) for [value] in storage]

    def rule(space: Space, *inputs: AnyArray) -> list[AnyArray]:
        found = [at_point(inputs, k) for k in range(max((x.shape[1] for x in inputs), default=1))]
        return [np.stack(values)[None] for values in zip(*found, strict=True)]

    return rule


def _only_first_varies(node: Apply, kinds: _Kinds, n_free: int = 1) -> None:
    if any(kind is not JetKind.FIXED for kind in kinds[n_free:]):
        raise NoJet(f"the arguments of {node.op} depend on the point")


def _fixed(x: AnyArray) -> AnyArray:
    """Return what is the same at all points, without the leading axes."""
    return np.asarray(x[0, 0])


def _axes(axes: tuple[int, ...] | None, ndim: int) -> tuple[int, ...]:
    return tuple(_LEAD + axis % ndim for axis in (range(ndim) if axes is None else axes))


@structural.register(TensorFromScalar)
@structural.register(ScalarFromTensor)
@structural.register(SpecifyShape)
def _same(op: Op, node: Apply, kinds: _Kinds) -> Rule:
    return lambda space, x, *rest: x


@structural.register
def _dim_shuffle(op: DimShuffle, node: Apply, kinds: _Kinds) -> Rule:
    kept = [axis for axis in op.new_order if axis != "x"]
    dropped = tuple(_LEAD + a for a in range(node.inputs[0].type.ndim) if a not in kept)
    remaining = sorted(kept)
    order = (0, 1, *[_LEAD + remaining.index(a) for a in kept])
    new = tuple(_LEAD + k for k, axis in enumerate(op.new_order) if axis == "x")
    is_ordered = kept == remaining

    def rule(space: Space, x: AnyArray) -> AnyArray:
        x = x.squeeze(dropped) if dropped else x
        x = x if is_ordered else x.transpose(order)
        return np.expand_dims(x, new) if new else x

    return rule


def _indices(node: Apply, n_before: int) -> Callable[[tuple[AnyArray, ...]], tuple[Any, ...]]:
    """Return a function from the inputs of a node to the indices among them, with those of the leading axes."""
    if all(hasattr(i, "data") for i in node.inputs[n_before:]):
        found = _with_numbers(node, [np.asarray(i.data) for i in node.inputs[n_before:]])
        return lambda inputs: found
    return lambda inputs: _with_numbers(node, [_fixed(x) for x in inputs[n_before:]])


def _with_numbers(node: Apply, values: list[AnyArray]) -> tuple[Any, ...]:
    numbers = [int(value) if value.ndim == 0 else value for value in values]
    return (slice(None), slice(None), *indices_from_subtensor(numbers, node.op.idx_list))


@structural.register
def _subtensor(op: Subtensor, node: Apply, kinds: _Kinds) -> Rule:
    _only_first_varies(node, kinds)
    at = _indices(node, 1)
    return lambda space, *x: x[0][at(x)]


@structural.register
def _advanced_subtensor(op: AdvancedSubtensor, node: Apply, kinds: _Kinds) -> Rule:
    _only_first_varies(node, kinds)
    _check_adjacent(op)
    at = _indices(node, 1)
    return lambda space, *x: x[0][at(x)]


def _check_adjacent(op: Op) -> None:
    """See that axes of arrays that index stay where they are, whatever axes are put before them."""
    at = [k for k, entry in enumerate(op.idx_list) if not isinstance(entry, slice)]
    if at != list(range(at[0], at[0] + len(at))):
        raise NoJet(f"{op} indexes axes that are apart")


@structural.register(IncSubtensor)
@structural.register(AdvancedIncSubtensor)
def _change_elements(op: IncSubtensor | AdvancedIncSubtensor, node: Apply, kinds: _Kinds) -> Rule:
    _only_first_varies(node, kinds, 2)
    is_advanced, is_set = isinstance(op, AdvancedIncSubtensor), op.set_instead_of_inc
    if is_advanced:
        _check_adjacent(op)
    at, ndim = _indices(node, 2), node.inputs[1].type.ndim

    def rule(space: Space, *inputs: AnyArray) -> AnyArray:
        where = at(inputs)
        x, y = space.lifted(inputs[0]).copy(), space.lifted(inputs[1])
        part = x[where]
        y = np.expand_dims(y, tuple(range(_LEAD, _LEAD + part.ndim - _LEAD - ndim)))
        if is_set:
            x[where] = y
        elif is_advanced:
            np.add.at(x, where, y)
        else:
            part += y
            x[where] = part
        return x

    return rule


@structural.register
def _reshape(op: Reshape, node: Apply, kinds: _Kinds) -> Rule:
    _only_first_varies(node, kinds)
    return lambda space, x, shape: x.reshape((*x.shape[:_LEAD], *_fixed(shape)))


@structural.register
def _alloc(op: Alloc, node: Apply, kinds: _Kinds) -> Rule:
    _only_first_varies(node, kinds)

    def rule(space: Space, x: AnyArray, *shape: AnyArray) -> AnyArray:
        lengths = tuple(int(_fixed(n)) for n in shape)
        x = np.expand_dims(x, tuple(range(_LEAD, _LEAD + len(lengths) - (x.ndim - _LEAD))))
        return np.broadcast_to(x, (*x.shape[:_LEAD], *lengths))

    return rule


@structural.register
def _length(op: Shape_i, node: Apply, kinds: _Kinds) -> Rule:
    return lambda space, x: np.full((1, 1), x.shape[_LEAD + op.i])


@structural.register
def _shape(op: Shape, node: Apply, kinds: _Kinds) -> Rule:
    return lambda space, x: np.array(x.shape[_LEAD:])[None, None]


@structural.register
def _make_vector(op: MakeVector, node: Apply, kinds: _Kinds) -> Rule:
    return lambda space, *x: np.stack(_together(space, x), axis=_LEAD)


@structural.register
def _join(op: Join, node: Apply, kinds: _Kinds) -> Rule:
    axis = _LEAD + op.axis % node.outputs[0].type.ndim
    return lambda space, *x: np.concatenate(_together(space, x), axis=axis)


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
        raise NoJet(f"{op} has no rule")
    axis = _LEAD + op.axis % node.inputs[0].type.ndim
    return lambda space, x: np.cumsum(x, axis=axis)


@structural.register
def _diagonal(op: ExtractDiag, node: Apply, kinds: _Kinds) -> Rule:
    first, second = _axes((op.axis1, op.axis2), node.inputs[0].type.ndim)
    return lambda space, x: np.diagonal(x, op.offset, first, second)


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
        y = np.empty((space.n_terms, *y0.shape[1:]))
        y[:1] = y0
        y[1:] = (share * x[1:]).sum(axis=axes)
        if space.order == 2:
            space.seconds(y)[:] += (share * space.products(x, x)).sum(axis=axes) - space.products(y, y)
        return y

    return rule


@structural.register(Dot)
def _matrices(op: Op, node: Apply, kinds: _Kinds) -> Rule:
    return of_matrices(op)


for _operation in OPERATIONS:
    structural.register(_operation, _matrices)


@structural.register
def _for_each(op: Blockwise, node: Apply, kinds: _Kinds) -> Rule:
    if isinstance(op.core_op, AdvancedSubtensor):
        return _elements_of_each(op, node, kinds)
    return of_matrices(op.core_op)


def _elements_of_each(op: Blockwise, node: Apply, kinds: _Kinds) -> Rule:
    """Select elements of each entry of a batch, by indices that may be its own."""
    _only_first_varies(node, kinds)
    if not all(isinstance(entry, int) for entry in op.core_op.idx_list):
        raise NoJet(f"{op} indexes by more than arrays")
    n_batch = op.batch_ndim(node)

    def rule(space: Space, x: AnyArray, *indices: AnyArray) -> AnyArray:
        at = [_fixed(index) for index in indices]
        ndim = max(index.ndim for index in at)
        at = [np.expand_dims(index, tuple(range(n_batch, n_batch + ndim - index.ndim))) for index in at]
        entries = np.ix_(*[np.arange(length) for length in x.shape[_LEAD : _LEAD + n_batch]])
        own = [entry.reshape(entry.shape + (1,) * (ndim - n_batch)) for entry in entries]
        where: tuple[Any, ...] = (slice(None), slice(None), *own, *[at[k] for k in op.core_op.idx_list])
        return np.asarray(x[where])

    return rule
