"""Which pairs of coordinates interact in log p: the sparsity pattern of its Hessian, from its graph."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import pytensor.scalar as ps

from pytensor.graph.basic import Apply, Variable, clone
from pytensor.sparse.math import Dot as SparseDot
from pytensor.sparse.math import StructuredDot
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.linalg.solvers.core import SolveBase
from pytensor.tensor.math import Dot
from pytensor.tensor.subtensor import AdvancedIncSubtensor, IncSubtensor

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sparsity.dependence_sets import Bools, RowKinds, TooDenseError
from pymc_ngvi.core.sparsity.interaction_pairs import Pairs
from pymc_ngvi.graphs.graph import inline_inner_graphs
from pymc_ngvi.reading.dependence import (
    Dependences,
    constant_condition,
    constant_factor,
    constant_operand,
    core_op,
    increment_targets,
    moved_inputs,
    origins,
)
from pymc_ngvi.reading.dependence_values import Facts

#: Entries of the lower triangle of a pattern, at most.
_MAX_ENTRIES = 40_000_000
#: Which elements of a node's inputs its outputs use linearly.
_Uses = list[tuple[Variable, Bools]]


@dataclass(frozen=True)
class HessianPattern:
    """The sparsity of a Hessian.

    Parameters
    ----------
    pattern : Pattern or None
        Every entry that is not 0 for all theta, and perhaps others; None where there are too many.
    opaque : tuple of str
        Ops that were not understood, taken as functions in which all coordinates that they depend on interact.
    """

    pattern: Pattern | None
    opaque: tuple[str, ...]


def hessian_pattern(
    logp: Variable, theta: Variable, *, max_entries: int = _MAX_ENTRIES, varying: Collection[Variable] = ()
) -> HessianPattern:
    """Return which entries of the Hessian of ``logp`` with respect to ``theta`` can differ from 0.

    Parameters
    ----------
    logp : pytensor scalar
        Simplified; it is not modified.
    theta : pytensor vector
        Of known length.
    max_entries : int, default 40,000,000
        Of the lower triangle.
    varying : collection of shared variables, optional
        Those that will change. The others count as constants, zeros among them too: pm.Data as it is now.

    Returns
    -------
    HessianPattern

    Notes
    -----
    A sum is linear, and so is what only moves elements. A product a b has the interactions of a, those of b, and those
    of the coordinates of a with the coordinates of b. In f(u) for any other function f, all coordinates of u interact,
    the kinks of absolute values and maxima included. The condition of a switch has no derivative, and counts for
    nothing.

    The work grows with the data and with the entries, never with the square of the dimension.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pymc_ngvi.reading.interaction import hessian_pattern
    >>> theta = pt.vector("theta", shape=(4,))
    >>> logp = -((theta[1:] - theta[:-1]) ** 2).sum()
    >>> hessian_pattern(logp, theta).pattern.matrix.astype(int).toarray().tolist()
    [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    """
    return PatternSearch(logp, theta, varying).run(max_entries)


class PatternSearch:
    """Finds the pattern of a Hessian, as often as data change; see `hessian_pattern`.

    Parameters
    ----------
    logp : pytensor scalar
    theta : pytensor vector
    varying : collection of shared variables, optional
    """

    def __init__(self, logp: Variable, theta: Variable, varying: Collection[Variable] = ()) -> None:
        _, copied = clone([theta], [logp], copy_inputs=False)  # inlining replaces inputs of nodes
        [self._logp] = inline_inner_graphs(copied)
        self._theta = theta
        self._facts = Facts(self._logp, theta, varying)
        self._is_fresh = True

    def run(self, max_entries: int = _MAX_ENTRIES) -> HessianPattern:
        """Find the pattern for the data as they are now."""
        if not self._is_fresh:
            self._facts.refresh()
        self._is_fresh = False
        facts, dependences = self._facts, Dependences(self._facts, self._theta)
        pairs = Pairs(facts.shape(self._theta)[0])
        try:
            _Walk(facts, dependences, pairs).run(self._logp)
            pattern = pairs.pattern(max_entries)
        except TooDenseError:
            pattern = None
        return HessianPattern(pattern, tuple(sorted(dependences.opaque)))


class _Walk:
    """Goes from log p towards theta, through all that enters it linearly, and notes what interacts.

    Parameters
    ----------
    facts : Facts
    dependences : Dependences
    pairs : Pairs
        To which interactions are added.
    """

    def __init__(self, facts: Facts, dependences: Dependences, pairs: Pairs) -> None:
        self.facts = facts
        self.dependences = dependences
        self.pairs = pairs

    def run(self, logp: Variable) -> None:
        """Visit each node once, after all that use it."""
        used: dict[Variable, Bools] = {logp: np.ones((), dtype=bool)}
        for node in reversed(self.facts.nodes):
            of_outputs = [used.pop(out, None) for out in node.outputs]
            if not any(u is not None and u.any() for u in of_outputs):
                continue
            for var, mask in self._visit(node, of_outputs):
                if self.facts.is_active(var):
                    used[var] = used[var] | mask if var in used else mask

    def _visit(self, node: Apply, used: list[Bools | None]) -> _Uses:
        masks = [
            np.zeros(self.facts.shape(out), dtype=bool) if u is None else u
            for out, u in zip(node.outputs, used, strict=True)
        ]
        uses = None
        op = core_op(node.op)
        if moved_inputs(node, self.facts) is not None:
            uses = self._rearranged(node, masks)
        else:
            for kind, rule in self._rules.items():
                if isinstance(op, kind) and (op is node.op or kind in (Dot, SolveBase)):
                    uses = rule(self, node, masks[0])
        if uses is not None:
            return uses
        for out, mask in zip(node.outputs, masks, strict=True):
            if mask.any() and self.facts.is_active(out):
                self.pairs.add_within(self.dependences.of(out), mask)
        return []

    def _rearranged(self, node: Apply, masks: list[Bools]) -> _Uses:
        moved = moved_inputs(node, self.facts) or []
        numbers, start = [], 1
        for var in moved:
            shape = self.facts.shape(var)
            size = int(np.prod(shape, dtype=np.int64))
            numbers.append(np.arange(start, start + size).reshape(shape))
            start += size
        flags = np.zeros(start, dtype=bool)
        for origin, mask in zip(origins(node, self.facts, numbers), masks, strict=True):
            flags[origin[mask]] = True
        flags[0] = False
        return [(var, flags[number]) for var, number in zip(moved, numbers, strict=True)]

    def _elemwise(self, node: Apply, used: Bools) -> _Uses | None:
        op = node.op.scalar_op
        if isinstance(op, ps.Add | ps.Sub | ps.Neg | ps.Identity | ps.Cast | ps.Second):
            return [self._unbroadcast(i, used) for i in self.facts.active_inputs(node)]
        if isinstance(op, ps.Switch):
            branches = constant_condition(self.facts, node)
            return [self._unbroadcast(b, used if keep is None else used & keep) for b, keep in branches]
        if isinstance(op, ps.Mul):
            return self._product(node, used)
        if isinstance(op, ps.TrueDiv):
            return self._quotient(node, used)
        return None

    def _unbroadcast(self, var: Variable, used: Bools) -> tuple[Variable, Bools]:
        shape = self.facts.shape(var)
        lead = used.ndim - len(shape)
        axes = tuple(axis for axis in range(used.ndim) if axis < lead or shape[axis - lead] == 1 != used.shape[axis])
        return var, used.any(axis=axes, keepdims=True).reshape(shape)

    def _product(self, node: Apply, used: Bools) -> _Uses:
        for factor in node.inputs:
            keep = constant_factor(self.facts, factor)
            used = used if keep is None else used & keep
        active = self.facts.active_inputs(node)
        for i, a in enumerate(active):
            for b in active[:i]:
                self._across(a, b, used)
        return [self._unbroadcast(i, used) for i in active]

    def _quotient(self, node: Apply, used: Bools) -> _Uses:
        """Take a / b as the product of a and 1 / b."""
        a, b = node.inputs
        keep = constant_factor(self.facts, a)
        used = used if keep is None else used & keep
        if self.facts.is_active(b):
            self.pairs.add_within(self.dependences.of(b), self._unbroadcast(b, used)[1])
            if self.facts.is_active(a):
                self._across(a, b, used)
        return [self._unbroadcast(a, used)]

    def _across(self, a: Variable, b: Variable, used: Bools) -> None:
        self.pairs.add_across(self.dependences.of(a), self.dependences.of(b), used)

    def _reduction(self, node: Apply, used: Bools) -> _Uses | None:
        if not isinstance(node.op.scalar_op, ps.Add):
            return None
        [var] = node.inputs
        shape = self.facts.shape(var)
        axes = range(len(shape)) if node.op.axis is None else node.op.axis
        return [(var, np.broadcast_to(np.expand_dims(used, tuple(axes)), shape))]

    def _cumulative(self, node: Apply, used: Bools) -> _Uses | None:
        if node.op.mode != "add":
            return None
        axis = node.op.axis
        return [(node.inputs[0], np.flip(np.logical_or.accumulate(np.flip(used, axis), axis), axis))]

    def _increment(self, node: Apply, used: Bools) -> _Uses | None:
        where = increment_targets(node, self.facts)
        if where is None:
            return None
        x, y = node.inputs[:2]
        return [(x, used), self._unbroadcast(y, used.ravel()[where])]

    def _dot(self, node: Apply, used: Bools) -> _Uses:
        """Take a @ b as a sum over k of products a[i, k] b[k, j]."""
        a, b = node.inputs
        constant = constant_operand(node, self.facts)
        if constant is not None:
            place, matrix = constant
            if place == 0:
                return [self._unbroadcast_batch(b, RowKinds.of(matrix).met(used))]
            met = RowKinds.of(matrix.T).met(used.swapaxes(-1, -2)).swapaxes(-1, -2)
            return [self._unbroadcast_batch(a, met)]
        rows, columns = used.any(axis=-1, keepdims=True), used.any(axis=-2, keepdims=True)
        if self.facts.is_active(a) and self.facts.is_active(b):
            parts = self.dependences.of(a).reduced([-2]), self.dependences.of(b).reduced([-1])
            shape = np.broadcast_shapes(parts[0].index.shape, parts[1].index.shape)
            self.pairs.add_across(*parts, np.ones(shape, dtype=bool))
        uses = [(a, rows), (b, columns)]
        return [self._unbroadcast_batch(var, mask) for var, mask in uses if self.facts.is_active(var)]

    def _unbroadcast_batch(self, var: Variable, mask: Bools) -> tuple[Variable, Bools]:
        """Broadcast a mask to a variable, whose batch axes may be shorter."""
        shape = self.facts.shape(var)
        lead = mask.ndim - len(shape)
        axes = tuple(
            axis for axis in range(mask.ndim - 2) if axis < lead or shape[axis - lead] == 1 != mask.shape[axis]
        )
        reduced = mask.any(axis=axes, keepdims=True)
        return var, np.broadcast_to(reduced.reshape(reduced.shape[lead:]), shape)

    def _sparse_dot(self, node: Apply, used: Bools) -> _Uses | None:
        constant = constant_operand(node, self.facts)
        if constant is None or any(i.type.ndim != 2 for i in node.inputs):
            return None
        return self._dot(node, used)

    def _solve(self, node: Apply, used: Bools) -> _Uses | None:
        """Take the solution as linear in the right-hand side, where the matrix does not depend on theta."""
        a, b = node.inputs
        if self.facts.is_active(a):
            return None
        columns = used if core_op(node.op).b_ndim == 2 else used[..., None]
        constant = constant_operand(node, self.facts)
        if constant is not None:
            met = RowKinds.of_inverse(constant[1]).met(columns)
        else:
            met = np.broadcast_to(columns.any(axis=-2, keepdims=True), columns.shape)
        return [self._unbroadcast(b, met.reshape(used.shape))]

    _rules: dict[type, Callable[["_Walk", Apply, Bools], _Uses | None]] = {  # noqa: RUF012
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
