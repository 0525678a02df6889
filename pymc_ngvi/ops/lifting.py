"""What rules need to lift elements of a variable to rows; see `OpRecord`."""

import math

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pytensor.graph.basic import Apply, Variable

from pymc_ngvi.core.refusal import NotApart, Reason
from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.ops.facts import Facts

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
