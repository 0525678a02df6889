"""Which coordinates of theta each element of each variable of a graph depends on."""

import math

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor.scalar as ps

from pytensor.compile.ops import DeepCopyOp, ViewOp
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.raise_op import CheckAndRaise
from pytensor.sparse.math import Dot as SparseDot
from pytensor.sparse.math import StructuredDot
from pytensor.tensor.basic import (
    Alloc,
    ExtractDiag,
    Join,
    MakeVector,
    ScalarFromTensor,
    Split,
    TensorFromScalar,
)
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp, FillDiagonal, Repeat
from pytensor.tensor.linalg.constructors import BlockDiagonal
from pytensor.tensor.linalg.solvers.core import SolveBase
from pytensor.tensor.math import Dot
from pytensor.tensor.reshape import JoinDims, SplitDims
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
    indices_from_subtensor,
)
from pytensor.tensor.utils import _parse_gufunc_signature
from scipy import sparse

from pymc_ngvi.core.sparsity.dependence_sets import (
    Bools,
    Dependence,
    Ints,
    RowKinds,
    TooDenseError,
    check_entries,
    everything,
    joined,
    union,
)
from pymc_ngvi.core.values import Matrix
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.reading.dependence_values import Facts

#: Ops of which each output element is one input element, and the number of inputs that have such elements (None: all).
_REARRANGING: dict[type, int | None] = {
    Alloc: 1,
    AdvancedIncSubtensor: 2,
    AdvancedSubtensor: 1,
    BlockDiagonal: None,
    DeepCopyOp: 1,
    DimShuffle: 1,
    ExtractDiag: 1,
    FillDiagonal: 2,
    IncSubtensor: 2,
    Join: None,
    JoinDims: 1,
    MakeVector: None,
    Repeat: 1,
    Reshape: 1,
    ScalarFromTensor: 1,
    SpecifyShape: 1,
    Split: 1,
    SplitDims: 1,
    Subtensor: 1,
    TensorFromScalar: 1,
    ViewOp: 1,
}


def core_op(op: Op) -> Op:
    """Return what a Blockwise Op does with each entry of its batch; any other Op itself."""
    return op.core_op if isinstance(op, Blockwise) else op


def is_increment(op: Op) -> bool:
    """Tell whether an Op adds to some elements, instead of setting them."""
    return isinstance(op, IncSubtensor | AdvancedIncSubtensor) and not op.set_instead_of_inc


def moved_inputs(node: Apply, facts: Facts) -> list[Variable] | None:
    """Return the inputs whose elements a node rearranges; None where it does something else, or unknown."""
    op = core_op(node.op)
    if isinstance(op, CheckAndRaise):
        return [node.inputs[0]]
    kinds = [n for kind, n in _REARRANGING.items() if isinstance(op, kind)]
    if not kinds or is_increment(op):
        return None
    moved = node.inputs if kinds[0] is None else node.inputs[: kinds[0]]
    where = node.inputs[len(moved) :]
    return list(moved) if all(facts.is_known(i) for i in where) else None


def origins(node: Apply, facts: Facts, numbers: list[Ints]) -> list[Ints]:
    """Run a node on whole numbers in place of values.

    Parameters
    ----------
    node : Apply
        One that rearranges.
    facts : Facts
    numbers : list of ndarray
        In place of the `moved_inputs`.

    Returns
    -------
    list of ndarray
        One for each output.
    """
    if isinstance(node.op, CheckAndRaise):
        return numbers
    # In double precision, as the Op expects; it holds these numbers exactly.
    values = [np.asarray(n, dtype=np.float64) for n in numbers]
    values += [facts.value(i) for i in node.inputs[len(numbers) :]]
    storage: list[list[Any]] = [[None] for _ in node.outputs]
    with without_c():  # a Blockwise Op makes a function of its core
        node.op.perform(node, values, storage)
    return [np.asarray(cell[0]).astype(np.int64) for cell in storage]


def increment_targets(node: Apply, facts: Facts) -> Ints | None:
    """Return the flat position to which each element of the second input is added; None if unknown."""
    x, y, *indices = node.inputs
    if not all(facts.is_known(i) for i in indices):
        return None
    where = indices_from_subtensor([facts.value(i) for i in indices], node.op.idx_list)
    shape = facts.shape(x)
    positions = np.arange(math.prod(shape)).reshape(shape)[tuple(where)]
    # y may be broadcast to the part of x that it is added to.
    return np.broadcast_to(positions, np.broadcast_shapes(positions.shape, facts.shape(y)))


def core_axes(node: Apply) -> tuple[list[int], list[int]] | None:
    """Return the numbers of core axes of each input and of each output; None for an Op without a signature."""
    signature = getattr(node.op, "signature", None) or getattr(node.op, "gufunc_signature", None)
    if signature is None:
        return None
    inputs, outputs = _parse_gufunc_signature(signature)
    return [len(axes) for axes in inputs], [len(axes) for axes in outputs]


def constant_operand(node: Apply, facts: Facts) -> tuple[int, Matrix] | None:
    """Return which operand of a matrix product, if one, is a known matrix, the same for a whole batch; and the matrix.

    Returns
    -------
    place, matrix : 0 or 1, and an array of two axes, sparse or dense
    """
    for place, var in enumerate(node.inputs):
        if facts.is_known(var):
            value = facts.value(var)
            if sparse.issparse(value):
                return place, value
            if math.prod(value.shape[:-2]) == 1 and value.ndim >= 2:
                return place, value.reshape(value.shape[-2:])
    return None


def constant_factor(facts: Facts, var: Variable) -> Bools | None:
    """Return where a known factor is not 0; None where it can't be told, or is so nowhere."""
    if not facts.is_known(var):
        return None
    keep = np.asarray(facts.value(var)) != 0
    return None if keep.all() else keep


def constant_condition(facts: Facts, node: Apply) -> list[tuple[Variable, Bools | None]]:
    """Return the two branches of a switch, and where each is chosen (None: unknown)."""
    condition, yes, no = node.inputs
    if not facts.is_known(condition):
        return [(yes, None), (no, None)]
    chosen = np.asarray(facts.value(condition)).astype(bool)
    return [(yes, chosen), (no, ~chosen)]


class Dependences:
    """Computes the dependence of variables when it is asked for, and keeps it.

    Parameters
    ----------
    facts : Facts
    theta : pytensor vector

    Attributes
    ----------
    opaque : set of str
        Ops that were not understood: each element of their outputs counts as one that depends on all of their inputs.
    """

    def __init__(self, facts: Facts, theta: Variable) -> None:
        self.facts = facts
        self.opaque: set[str] = set()
        self._done: dict[Variable, Dependence] = {theta: Dependence.identity(facts.shape(theta)[0])}
        self._position = {node: i for i, node in enumerate(facts.nodes)}

    def of(self, var: Variable) -> Dependence:
        """Return the dependence of an active variable."""
        for node in self._missing(var):
            for out, made in zip(node.outputs, self._compute(node), strict=True):
                self._done[out] = made
        return self._done[var]

    def _missing(self, var: Variable) -> list[Apply]:
        missing: set[Apply] = set()
        stack = [var]
        while stack:
            node = stack.pop().owner
            if node is not None and node not in missing and node.outputs[0] not in self._done:
                missing.add(node)
                stack.extend(i for i in self.facts.active_inputs(node) if i not in self._done)
        return sorted(missing, key=self._position.__getitem__)

    def _compute(self, node: Apply) -> list[Dependence]:
        op = core_op(node.op)
        if moved_inputs(node, self.facts) is not None:
            return self._rearranged(node)
        for kind, rule in self._rules.items():
            if isinstance(op, kind) and (op is node.op or kind in (Dot, SolveBase)):
                made = rule(self, node)
                if made is not None:
                    return [made] * len(node.outputs)
        return self._by_batch(node) or self._opaque(node)

    def _opaque(self, node: Apply) -> list[Dependence]:
        self.opaque.add(type(core_op(node.op)).__name__)
        steps = not all(self.facts.is_known(i) or self.facts.is_active(i) for i in node.inputs)
        if steps and any(None in out.type.shape for out in node.outputs):
            raise TooDenseError  # even the shape may depend on theta
        parts = [self._done[i] for i in self.facts.active_inputs(node)]
        return [everything(parts, self.facts.shape(out)) for out in node.outputs]

    def _rearranged(self, node: Apply) -> list[Dependence]:
        moved = moved_inputs(node, self.facts) or []
        active = [i for i in moved if self.facts.is_active(i)]
        sets, indices = joined([self._done[i] for i in active])
        by_input = dict(zip(active, indices, strict=True))
        numbers = [by_input[i] if i in by_input else np.zeros(self.facts.shape(i), dtype=np.int64) for i in moved]
        return [Dependence(sets, index) for index in origins(node, self.facts, numbers)]

    def _increment(self, node: Apply) -> Dependence | None:
        where = increment_targets(node, self.facts)
        if where is None:
            return None
        x, y = node.inputs[:2]
        shape = self.facts.shape(x)
        parts = [self._done[x]] if self.facts.is_active(x) else []
        if self.facts.is_active(y):
            parts.append(self._done[y].spread(where.shape).collected(where, shape))
        return union(parts, shape)

    def _elemwise(self, node: Apply) -> Dependence:
        scalar_op = node.op.scalar_op
        shape = np.broadcast_shapes(*[self.facts.shape(i) for i in node.inputs])
        active = self.facts.active_inputs(node)
        if isinstance(scalar_op, ps.Switch):
            return self._switch(node, shape)
        made = union([self._done[i] for i in active], shape)
        if isinstance(scalar_op, ps.Mul):
            for factor in node.inputs:
                keep = constant_factor(self.facts, factor)
                made = made if keep is None else made.kept(keep)
        return made

    def _switch(self, node: Apply, shape: tuple[int, ...]) -> Dependence:
        branches = [(b, keep) for b, keep in constant_condition(self.facts, node) if self.facts.is_active(b)]
        parts = [self._done[b] for b, _ in branches]
        if len(parts) == 2 and branches[0][1] is not None:
            sets, (yes, no) = joined(parts)
            return Dependence(sets, np.broadcast_to(np.where(branches[0][1], yes, no), shape))
        made = union(parts, shape)
        return made if branches[0][1] is None else made.kept(branches[0][1])

    def _reduction(self, node: Apply) -> Dependence:
        part = self._done[node.inputs[0]]
        axes = range(part.index.ndim) if node.op.axis is None else node.op.axis
        return part.reduced(list(axes))

    def _cumulative(self, node: Apply) -> Dependence:
        part = self._done[node.inputs[0]]
        rows = np.moveaxis(part.index, node.op.axis, 0)
        n = len(rows)
        check_entries(n * (n + 1) // 2)
        before = RowKinds(sparse.csr_array(np.tri(n, dtype=bool)), np.arange(n))
        made = Dependence(part.sets, rows.reshape(n, -1)).multiplied(before)
        return Dependence(made.sets, np.moveaxis(made.index.reshape(rows.shape), 0, node.op.axis))

    def _dot(self, node: Apply) -> Dependence:
        a, b = node.inputs
        constant = constant_operand(node, self.facts)
        if constant is not None:
            place, matrix = constant
            if place == 0:
                return self._done[b].multiplied(RowKinds.of(matrix))
            return self._done[a].transposed().multiplied(RowKinds.of(matrix.T)).transposed()
        parts = [self._done[i].reduced([axis], keepdims=True) for i, axis in ((a, -1), (b, -2)) if i in self._done]
        return union(parts, self.facts.shape(node.outputs[0]))

    def _sparse_dot(self, node: Apply) -> Dependence | None:
        constant = constant_operand(node, self.facts)
        if constant is None or any(i.type.ndim != 2 for i in node.inputs):
            return None
        return self._dot(node)

    def _solve(self, node: Apply) -> Dependence:
        """Each column of the solution depends on that column of the right-hand side, and on the whole matrix."""
        a, b = node.inputs
        columns = core_op(node.op).b_ndim == 2
        shape = self.facts.shape(node.outputs[0])
        constant = constant_operand(node, self.facts)
        if constant is not None and constant[0] == 0:
            part = self._done[b]
            as_columns = part if columns else Dependence(part.sets, part.index[..., None])
            made = as_columns.multiplied(RowKinds.of_inverse(constant[1]))
            return Dependence(made.sets, made.index.reshape(shape))
        parts = []
        if self.facts.is_active(a):
            matrix = self._done[a].reduced([-2, -1], keepdims=True)
            parts.append(matrix if columns else Dependence(matrix.sets, matrix.index[..., 0]))
        if self.facts.is_active(b):
            parts.append(self._done[b].reduced([-2 if columns else -1], keepdims=True))
        return union(parts, shape)

    def _by_batch(self, node: Apply) -> list[Dependence] | None:
        """Each entry of a batch depends on all of that entry of the inputs."""
        axes = core_axes(node)
        if axes is None:
            return None
        shapes = [self.facts.shape(out) for out in node.outputs]
        batch = shapes[0][: len(shapes[0]) - axes[1][0]]
        parts = []
        for var, n_core in zip(node.inputs, axes[0], strict=True):
            if self.facts.is_active(var):
                part = self._done[var]
                parts.append(part.reduced(range(part.index.ndim - n_core, part.index.ndim)))
        made = union(parts, batch)
        return [
            Dependence(made.sets, made.index.reshape(batch + (1,) * n_core)).spread(shape)
            for shape, n_core in zip(shapes, axes[1], strict=True)
        ]

    _rules: dict[type, Callable[["Dependences", Apply], Dependence | None]] = {  # noqa: RUF012
        Elemwise: _elemwise,
        CAReduce: _reduction,
        CumOp: _cumulative,
        Dot: _dot,
        SparseDot: _sparse_dot,
        StructuredDot: _sparse_dot,
        SolveBase: _solve,
        IncSubtensor: _increment,
        AdvancedIncSubtensor: _increment,
    }
