"""How elements of one input of a node come into those of its output: in place, over axes, by a matrix, at indices."""

import math

from dataclasses import dataclass

import numpy as np

from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.subtensor import indices_from_subtensor
from scipy import sparse

from pymc_ngvi.core.sparsity.dependence_sets import Bools, Dependence, Ints, RowKinds, check_entries
from pymc_ngvi.core.values import Matrix
from pymc_ngvi.ops.facts import Facts

type Shape = tuple[int, ...]


class Way:
    """How elements of one input come into those of the output."""

    adds: tuple[int, ...] | None = None

    def spread(self, part: Dependence) -> Dependence:
        """Return on what the output depends by this input; it may be broadcast to the output."""
        raise NotImplementedError

    def gathered(self, used: Bools) -> Bools:
        """Return which elements of the input the used ones of the output are made of."""
        raise NotImplementedError


@dataclass(frozen=True)
class Each(Way):
    """Element by element, broadcast; where a known condition says ``branch``, if there is one."""

    facts: Facts
    var: Variable
    condition: Variable | None = None
    branch: bool = True

    def _chosen(self) -> Bools | None:
        if self.condition is None or not self.facts.is_known(self.condition):
            return None
        return np.asarray(self.facts.value(self.condition)).astype(bool) == self.branch

    def spread(self, part: Dependence) -> Dependence:  # noqa: D102
        chosen = self._chosen()
        return part if chosen is None else part.kept(chosen)

    def gathered(self, used: Bools) -> Bools:  # noqa: D102
        chosen = self._chosen()
        return unbroadcast(used if chosen is None else used & chosen, self.facts.shape(self.var))


@dataclass(frozen=True)
class Over(Way):
    """All elements along some axes, which the output has not, or has others in the place of."""

    facts: Facts
    var: Variable
    axes: tuple[int, ...]
    keepdims: bool = False

    @property
    def adds(self) -> tuple[int, ...]:  # type: ignore[override]  # noqa: D102
        return tuple(axis % self.var.type.ndim for axis in self.axes)

    def spread(self, part: Dependence) -> Dependence:  # noqa: D102
        return part.reduced(self.axes, keepdims=self.keepdims)

    def gathered(self, used: Bools) -> Bools:  # noqa: D102
        shape = self.facts.shape(self.var)
        if not self.keepdims:
            return np.broadcast_to(np.expand_dims(used, self.axes), shape)
        return unbroadcast(used.any(axis=self.axes, keepdims=True), shape, n_core=-min(self.axes))


@dataclass(frozen=True)
class UpTo(Way):
    """The elements up to each along an axis."""

    axis: int

    @property
    def adds(self) -> tuple[int, ...]:  # type: ignore[override]  # noqa: D102
        return (self.axis,)

    def spread(self, part: Dependence) -> Dependence:  # noqa: D102
        rows = np.moveaxis(part.index, self.axis, 0)
        n = len(rows)
        check_entries(n * (n + 1) // 2)
        before = RowKinds(sparse.csr_array(np.tri(n, dtype=bool)), np.arange(n))
        made = Dependence(part.sets, rows.reshape(n, -1)).multiplied(before)
        return Dependence(made.sets, np.moveaxis(made.index.reshape(rows.shape), 0, self.axis))

    def gathered(self, used: Bools) -> Bools:  # noqa: D102
        return np.flip(np.logical_or.accumulate(np.flip(used, self.axis), self.axis), self.axis)


@dataclass(frozen=True)
class ByMatrix(Way):
    """Products with a known matrix, or with its inverse; ``from_left``, or from the right.

    An input that has no axis of columns is one column.
    """

    facts: Facts
    var: Variable
    matrix: Matrix
    from_left: bool
    is_inverse: bool = False
    is_column: bool = False

    @property
    def adds(self) -> tuple[int, ...]:  # type: ignore[override]  # noqa: D102
        ndim = self.var.type.ndim
        return (ndim - 1,) if self.is_column or not self.from_left else (ndim - 2,)

    def _kinds(self) -> RowKinds:
        if self.is_inverse:
            return RowKinds.of_inverse(self.matrix)
        return RowKinds.of(self.matrix if self.from_left else self.matrix.T)

    def spread(self, part: Dependence) -> Dependence:  # noqa: D102
        if not self.from_left:
            return part.transposed().multiplied(self._kinds()).transposed()
        if self.is_column:
            made = Dependence(part.sets, part.index[..., None]).multiplied(self._kinds())
            return Dependence(made.sets, made.index[..., 0])
        return part.multiplied(self._kinds())

    def gathered(self, used: Bools) -> Bools:  # noqa: D102
        shape = self.facts.shape(self.var)
        if not self.from_left:
            return unbroadcast(self._kinds().met(used.swapaxes(-1, -2)).swapaxes(-1, -2), shape, n_core=2)
        if self.is_column:
            return unbroadcast(self._kinds().met(used[..., None])[..., 0], shape, n_core=1)
        return unbroadcast(self._kinds().met(used), shape, n_core=2)


@dataclass(frozen=True)
class AddedAt(Way):
    """Added to the elements of the first input that indices tell, which are known."""

    node: Apply
    facts: Facts

    def targets(self) -> Ints:
        """Return the flat position to which each element is added."""
        x, y, *indices = self.node.inputs
        where = indices_from_subtensor([self.facts.value(i) for i in indices], self.node.op.idx_list)
        shape = self.facts.shape(x)
        positions = np.arange(math.prod(shape)).reshape(shape)[tuple(where)]
        # y may be broadcast to the part of x that it is added to.
        return np.broadcast_to(positions, np.broadcast_shapes(positions.shape, self.facts.shape(y)))

    def spread(self, part: Dependence) -> Dependence:  # noqa: D102
        where = self.targets()
        return part.spread(where.shape).collected(where, self.facts.shape(self.node.inputs[0]))

    def gathered(self, used: Bools) -> Bools:  # noqa: D102
        return unbroadcast(used.ravel()[self.targets()], self.facts.shape(self.node.inputs[1]))


def unbroadcast(used: Bools, shape: Shape, n_core: int = 0) -> Bools:
    """Return which elements of an array are used where it is broadcast to others, but for its last axes."""
    lead, n_batch = used.ndim - len(shape), used.ndim - n_core
    axes = tuple(axis for axis in range(n_batch) if axis < lead or shape[axis - lead] == 1 != used.shape[axis])
    reduced = used.any(axis=axes, keepdims=True)
    return np.broadcast_to(reduced.reshape(reduced.shape[lead:]), shape)
