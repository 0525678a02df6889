"""Elements of a variable, each as a function of the few predictors that it depends on.

An element of ``exp(log_sd)[group]`` is a function of one predictor, whichever the group: lifted, the variable is an
elementwise function of as many rows as elements are asked for, in which each row has its own copy of what it reads.
"""

import functools
import hashlib
import math

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Dot
from pytensor.tensor.special import LogSoftmax, LogSumExp, Softmax

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.values import Array
from pymc_ngvi.reading.dependence import core_op, increment_targets, is_increment, moved_inputs, origins
from pymc_ngvi.reading.dependence_values import Facts

#: Elements that one element of a sum, or of another reduction, may be made of.
_MOST_REDUCED = 16


class CannotLift(Exception):
    """Elements depend on too much, or in a way that is not understood."""


class Apart(Exception):
    """Elements come from different variables.

    Parameters
    ----------
    labels : ndarray of int, shape (n_rows,)
        The same for elements that come from the same one.
    """

    def __init__(self, labels: Ints) -> None:
        super().__init__("elements come from different variables")
        self.labels = labels


class Source(NamedTuple):
    """Where known values of rows are from.

    Parameters
    ----------
    var : pytensor variable
        Whose value they are elements of; or, of weights, whose elements they weigh.
    elements : ndarray of int
        Which, flat.
    is_weight : bool
    """

    var: Variable
    elements: Ints
    is_weight: bool = False


@dataclass
class Lift:
    """Lifts elements of variables to rows.

    Parameters
    ----------
    facts : Facts
    predictors : pytensor vector

    Attributes
    ----------
    slots : dict
        Inputs of the lifted function, (n_points, n_rows) each, with the predictor that each row reads there.
    data : dict
        Inputs for known values, (1, n_rows) each or (1, 1), with these.
    sources : dict
        Where these are from.
    """

    facts: Facts
    predictors: Variable
    slots: dict[Variable, Ints] = field(default_factory=dict)
    data: dict[Variable, Array] = field(default_factory=dict)
    sources: dict[Variable, Source] = field(default_factory=dict)
    _done: dict[tuple[Variable, bytes], Variable] = field(default_factory=dict)

    def of(self, var: Variable, index: Ints) -> Variable:
        """Return elements of a variable as a function of rows.

        Parameters
        ----------
        var : pytensor variable
        index : ndarray of int, shape (n_rows,) or (1,)
            Flat positions in it.

        Raises
        ------
        CannotLift
        Apart
            If elements have to be lifted in groups.
        """
        key = (var, hashlib.blake2b(index.tobytes(), digest_size=16).digest())
        if key not in self._done:
            self._done[key] = self._lifted(var, index)
        return self._done[key]

    def copy(self) -> "Lift":
        """Return another one that has lifted the same, and goes on by itself."""
        return replace(
            self, slots=dict(self.slots), data=dict(self.data), sources=dict(self.sources), _done=dict(self._done)
        )

    def back_to(self, other: "Lift") -> None:
        """Forget what was lifted since another one was like this one."""
        self.slots, self.data, self.sources, self._done = other.slots, other.data, other.sources, other._done

    def columns(self, n_rows: int) -> Ints:
        """Return the predictors of each row, (n_rows, n_slots)."""
        return np.stack([np.broadcast_to(at, n_rows) for at in self.slots.values()], axis=1)

    def _lifted(self, var: Variable, index: Ints) -> Variable:
        if var is self.predictors:
            return self._slot(index)
        if self.facts.is_known(var):
            return self._known(var, index)
        node = var.owner
        if node is None:
            raise CannotLift(f"{var} varies")
        if moved_inputs(node, self.facts) is not None:
            return self._moved(node, var, index)
        if (
            isinstance(node.op, Elemwise)
            and isinstance(node.op.scalar_op, ps.Switch)
            and self.facts.is_known(node.inputs[0])
        ):
            return self._switched(node, var, index)
        if isinstance(node.op, Elemwise) and len(node.outputs) == 1:
            return node.op(*self._elements(node, index))
        if isinstance(node.op, CAReduce):
            return functools.reduce(Elemwise(node.op.scalar_op), self._operands(node, index, node.op.axis))
        if isinstance(node.op, LogSumExp):
            return functools.reduce(pt.logaddexp, self._operands(node, index, node.op.axis))
        if isinstance(node.op, Softmax | LogSoftmax):
            return self._softmax(node, index)
        if isinstance(node.op, CumOp) and node.op.mode == "add":
            return self._cumulative(node, index)
        op = core_op(node.op)
        if is_increment(op):
            return self._incremented(node, index)
        if isinstance(op, Dot):
            return self._product(node, index)
        raise CannotLift(f"PyTensor's {type(op).__name__} makes each element of many")

    def _elements(self, node: Apply, index: Ints) -> list[Variable]:
        """Return the elements of the inputs that those of an elementwise function are made of."""
        shape = np.broadcast_shapes(*[self.facts.shape(i) for i in node.inputs])
        return [self.of(i, _broadcast(index, shape, self.facts.shape(i))) for i in node.inputs]

    def _switched(self, node: Apply, var: Variable, index: Ints) -> Variable:
        """Return elements that data choose from two branches: rows of different predictors are kept apart."""
        try:
            condition = np.broadcast_to(self.facts.value(node.inputs[0]), self.facts.shape(var)).ravel()[index] != 0
        except KeyError:
            return node.op(*self._elements(node, index))
        if len(index) and (condition == condition[0]).all():
            branch = node.inputs[1 if condition[0] else 2]
            return self.of(branch, _broadcast(index, self.facts.shape(var), self.facts.shape(branch)))
        result = node.op(*self._elements(node, index))
        reads = [{v for v in ancestors([branch]) if v in self.slots} for branch in result.owner.inputs[1:]]
        if reads[0] != reads[1] and all(reads):
            raise Apart(condition.astype(np.int64))
        return result

    def _slot(self, index: Ints) -> Variable:
        slot = pt.matrix(f"predictor {len(self.slots)}", dtype="float64", shape=(None, None))
        self.slots[slot] = index
        return slot

    def _known(self, var: Variable, index: Ints) -> Variable:
        if isinstance(var, Constant) and np.size(var.data) == 1:
            return pt.constant(np.reshape(var.data, (1, 1)))
        try:
            value = np.asarray(self.facts.value(var))
        except KeyError as error:
            raise CannotLift(f"the value of {var} is not at hand") from error
        rows = value.reshape(1, -1)[:, index]
        given = pt.tensor(f"data {len(self.data)}", dtype=rows.dtype, shape=(1, 1 if len(index) == 1 else None))
        self.data[given], self.sources[given] = rows, Source(var, index)
        return given

    def _moved(self, node: Apply, var: Variable, index: Ints) -> Variable:
        moved = moved_inputs(node, self.facts) or []
        shapes = [self.facts.shape(i) for i in moved]
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        starts = ends - [math.prod(shape) for shape in shapes]
        numbers = [s + np.arange(math.prod(shape)).reshape(shape) for s, shape in zip(starts, shapes, strict=True)]
        found = origins(node, self.facts, numbers)[node.outputs.index(var)].ravel()[index]
        owner = np.searchsorted(ends, found, side="right")
        if len(owner) and (owner != owner[0]).any():
            raise Apart(owner)
        at = int(owner[0])
        return self.of(moved[at], _one_if_scalar(found - starts[at], shapes[at]))

    def _operands(self, node: Apply, index: Ints, axis: int | tuple[int, ...] | None) -> list[Variable]:
        """Return the elements that those of a reduction are made of."""
        [operand] = node.inputs
        shape = self.facts.shape(operand)
        over = range(len(shape)) if axis is None else np.atleast_1d(axis) % len(shape)
        n_reduced = math.prod(shape[a] for a in over)
        if not 0 < n_reduced <= _MOST_REDUCED:
            raise CannotLift(f"it has a {type(node.op).__name__} over {n_reduced} elements")
        positions = np.moveaxis(np.arange(math.prod(shape)).reshape(shape), tuple(over), range(-len(over), 0))
        columns = positions.reshape(-1, n_reduced)[index].T
        return [self.of(operand, _one_if_scalar(np.ascontiguousarray(column), shape)) for column in columns]

    def _softmax(self, node: Apply, index: Ints) -> Variable:
        [operand] = node.inputs
        shape = self.facts.shape(operand)
        over = range(len(shape)) if node.op.axis is None else np.atleast_1d(node.op.axis) % len(shape)
        kept = tuple(1 if a in over else length for a, length in enumerate(shape))
        parts = self._operands(node, _broadcast(index, shape, kept), node.op.axis)
        log_p = self.of(operand, index) - functools.reduce(pt.logaddexp, parts)
        return log_p if isinstance(node.op, LogSoftmax) else pt.exp(log_p)

    def _incremented(self, node: Apply, index: Ints) -> Variable:
        """Return elements to each of which another is added, or to none of which."""
        base, added = node.inputs[:2]
        targets = increment_targets(node, self.facts)
        if targets is None or np.unique(targets).size < targets.size:
            raise CannotLift("it adds to elements several times")
        targets = targets.ravel()
        source = np.full(math.prod(self.facts.shape(base)), -1, dtype=np.int64)
        source[targets] = np.arange(len(targets))
        from_ = source[index]
        if ((from_ >= 0) != (from_[0] >= 0)).any():
            raise Apart((from_ >= 0).astype(np.int64))
        value = self.of(base, index)
        return value if from_[0] < 0 else value + self.of(added, _one_if_scalar(from_, self.facts.shape(added)))

    def _product(self, node: Apply, index: Ints) -> Variable:
        """Return the elements of a product of two matrices, or vectors, as sums."""
        shapes = [self.facts.shape(i) for i in node.inputs]
        if not isinstance(node.op, Dot) or max(map(len, shapes)) > 2:
            raise CannotLift("it has a product of unknown arrays")
        (n, inner), (_, p) = (shapes[0] if len(shapes[0]) == 2 else (1, *shapes[0])), (*shapes[1], 1)[:2]
        if not 0 < inner <= _MOST_REDUCED:
            raise CannotLift(f"it has a product of unknown matrices over {inner} elements")
        row, col = np.unravel_index(index, (n, p))
        parts = []
        for at in range(inner):
            left, right = self.of(node.inputs[0], row * inner + at), self.of(node.inputs[1], at * p + col)
            parts.append(left * right)
        return functools.reduce(pt.add, parts)

    def _cumulative(self, node: Apply, index: Ints) -> Variable:
        """Return the sum of the elements up to each, for elements that have as many before them."""
        [operand] = node.inputs
        shape, axis = self.facts.shape(operand), node.op.axis
        places = np.unravel_index(index, shape)
        before = places[axis]
        if (before != before[0]).any():
            raise Apart(before)
        if before[0] >= _MOST_REDUCED:
            raise CannotLift(f"{node.op} is over more than {_MOST_REDUCED} elements")
        parts = []
        for at in range(int(before[0]) + 1):
            here = (*places[:axis], np.full_like(before, at), *places[axis + 1 :])
            parts.append(self.of(operand, np.ravel_multi_index(here, shape)))
        return functools.reduce(pt.add, parts)


def _broadcast(index: Ints, shape: tuple[int, ...], inner: tuple[int, ...]) -> Ints:
    """Return the positions in an operand of those in the result of an elementwise function."""
    if inner == shape:
        return index
    if math.prod(inner) == 1:
        return np.zeros(1, dtype=np.int64)
    inner = (1,) * (len(shape) - len(inner)) + tuple(inner)
    places = np.unravel_index(index, shape)
    kept = tuple(p if n > 1 else np.zeros_like(p) for p, n in zip(places, inner, strict=True))
    return np.ravel_multi_index(kept, inner)


def _one_if_scalar(index: Ints, shape: tuple[int, ...]) -> Ints:
    return np.zeros(1, dtype=np.int64) if math.prod(shape) == 1 else index
