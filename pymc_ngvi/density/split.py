"""Log p by its rows as a term of the globals and one term for each local coordinate, at draws and quadrature nodes.

    log p(g, b) = f_0(g) + sum_c f_c(g, b_path(c)),

where path(c) is the way from the root of c's tree to c itself (`pymc_ngvi.marginal.forest`). A row belongs to the
deepest coordinate that its predictors depend on. A predictor is offset + X_g g + X_b b: its first two parts are
computed once for each draw of the globals, whatever the number of quadrature nodes, and functions of globals alone,
the exponential of a log scale for instance, once for all rows.

Rows come first in all arrays here, then nodes, then draws: sums over the rows of a coordinate are sums of vectors.
"""

import functools

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.refusal import Reason, RefusedFor
from pymc_ngvi.core.sizes import STREAMED
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.rows.expectation import Compiled, RowFunction

type Integers = NDArray[np.intp]

#: Why terms can't be told apart.
SEVERAL = "an element of log p depends on several blocks of local coordinates at once"


class CannotSplit(RefusedFor):
    """A term of log p depends on local coordinates that are not on one path."""

    reason = Reason.NOT_SPLIT


#: A `pymc_ngvi.marginal.forest.Forest`, which is above.
type Trees = Any


@dataclass(frozen=True, eq=False)
class _Slot:
    """A predictor of each row."""

    #: Whether it depends on local coordinates; and whether it is one predictor for all rows.
    is_local: bool
    is_same: bool
    #: shape (n_rows,).
    offset: Array
    #: shape (n_rows, n_globals).
    of_globals: sparse.csr_array
    #: One row each where all rows have the same predictor; shape (n_rows, n_local).
    of_locals: sparse.csr_array

    def part(self, rows: slice, place: Integers, n_local: int) -> "_Slot":
        """Return that of some rows, with columns only for some coordinates, whose numbers are in ``place``."""
        rows = slice(0, 1) if self.is_same else rows
        local = _rows_of(self.of_locals, rows)
        local = sparse.csr_array((local.data, place[local.indices], local.indptr), shape=(local.shape[0], n_local))
        return _Slot(self.is_local, self.is_same, self.offset[rows], _rows_of(self.of_globals, rows), local)

    def at(self, g: Array, local: Array | None, n_nodes: int) -> Array:
        """Return values, (n_rows or 1, n_nodes or 1, n), at globals (n, p) and locals (n_local, n_nodes * n)."""
        first = self.of_globals.toarray() @ g.T
        first += self.offset[:, None]
        if not self.is_local:
            return first[:, None]
        result: Array = (self.of_locals @ local).reshape(len(first), n_nodes, len(g))
        result += first[:, None]
        return result


@dataclass(frozen=True, eq=False)
class _Kind:
    """Rows that are the same function, in the order of the blocks that they belong to."""

    function: Compiled
    slots: list[_Slot]
    #: (n_rows, 1, 1) or (1, 1, 1) each.
    data: list[Array]
    #: Place of the coordinate that each belongs to; -1 for none; shape (n_rows,).
    owner: Integers
    n_local: int

    def part(self, rows: slice, place: Integers, n_local: int) -> "_Kind":
        """Return some of the rows, with coordinates numbered by ``place``."""
        slots = [slot.part(rows, place, n_local) for slot in self.slots]
        data = [d if len(d) == 1 else d[rows] for d in self.data]
        return _Kind(self.function, slots, data, place[self.owner[rows]], n_local)

    @functools.cached_property
    def _to_owners(self) -> sparse.csr_array | None:
        """Adds rows up by coordinate; None where each coordinate has one row, in order."""
        n = len(self.owner)
        if n == self.n_local and np.array_equal(self.owner, np.arange(n)):
            return None
        return sparse.csr_array((np.ones(n), (self.owner, np.arange(n))), shape=(self.n_local, n))

    def values(self, g: Array, local: Array | None, n_nodes: int) -> Array:
        """Return the values of the rows, (n_rows, n_nodes, n)."""
        [result] = self.function(*[slot.at(g, local, n_nodes) for slot in self.slots], *self.data)
        return np.broadcast_to(np.asarray(result), (len(self.owner), n_nodes, len(g)))

    def add(self, g: Array, local: Array, n_nodes: int, total: Array) -> None:
        """Add the sums of coordinates to ``total``, (n_local, n_nodes * n)."""
        values = self.values(g, local, n_nodes).reshape(len(self.owner), -1)
        total += values if self._to_owners is None else self._to_owners @ values


@dataclass(frozen=True, eq=False)
class BlockTerms:
    """The terms of some blocks."""

    kinds: list[_Kind]
    #: What is linear; shape (n_local,).
    slope: Array

    # Far out, densities overflow: the caller sees it.
    @np.errstate(all="ignore")
    def terms(self, g: Array, local: Array) -> Array:
        """Return the terms, (n, n_nodes, n_local), of local coordinates of that shape beside globals (n, p)."""
        n, n_nodes, n_local = local.shape
        flat = np.ascontiguousarray(local.transpose(2, 1, 0)).reshape(n_local, -1)
        total = self.slope[:, None] * flat
        for kind in self.kinds:
            kind.add(g, flat, n_nodes, total)
        return total.reshape(n_local, n_nodes, n).transpose(2, 1, 0)


class RowTerms:
    """The terms of log p, from its rows."""

    def __init__(self, rows: Expectations, forest: Trees) -> None:
        self._forest = forest
        self._linear = linear = rows.linear_map.plain
        whole = linear.rest.tocsc()
        dense = sparse.csc_array(
            (linear.dense.T.ravel(), np.tile(np.arange(len(linear.dense)), linear.dense.shape[1]),
             len(linear.dense) * np.arange(linear.dense.shape[1] + 1)), shape=linear.dense.shape,
        )  # fmt: skip
        spread = sparse.csc_array((np.ones(len(linear.columns)), (np.arange(len(linear.columns)), linear.columns)),
                                  shape=(len(linear.columns), whole.shape[1]))  # fmt: skip
        whole = sparse.csc_array(whole + dense @ spread)
        self._of_globals = sparse.csr_array(whole[:, forest.globals_])
        self._of_locals = sparse.csr_array(whole[:, forest.locals_])
        self._of_locals.eliminate_zeros()
        slope = linear.transposed_times(rows.terms.slope[None])[0]
        self._constant = rows.constant + float(rows.terms.slope @ linear.offset)
        self._slope_of_globals, self._slope = slope[forest.globals_], slope[forest.locals_]
        self._kinds: list[_Kind] = []
        self._alone: list[_Kind] = []
        for rows_ in rows.functions:
            owner = owners([self._of_locals[column] for column in rows_.index.T], forest)
            block = np.append(forest.block, -1)[owner]
            order = np.argsort(block, kind="stable")
            first = int(np.searchsorted(block[order], 0))
            if first:
                self._alone.append(self._kind(rows_, order[:first], owner))
            if first < len(order):
                self._kinds.append(self._kind(rows_, order[first:], owner))
        n_blocks = int(forest.block.max()) + 1
        self.n_rows = np.zeros(n_blocks, dtype=np.intp)
        for made in self._kinds:
            self.n_rows += np.bincount(forest.block[made.owner], minlength=n_blocks)
        self._starts = [
            np.searchsorted(forest.block[kind.owner], np.arange(n_blocks + 1)).astype(np.intp) for kind in self._kinds
        ]

    def _kind(self, rows: RowFunction, at: Integers, owner: Integers) -> _Kind:
        function, data = rows.function, [d[0] if d.shape[1] == 1 else d[0, at] for d in rows.data]
        slots = [self._slot(column) for column in rows.index[at].T]
        return _Kind(function, slots, [one[:, None, None] for one in data], owner[at], self._forest.n_local)

    def _slot(self, column: Integers) -> _Slot:
        is_same = bool((column == column[0]).all())
        column = column[:1] if is_same else column
        of_locals = self._of_locals[column]
        return _Slot(of_locals.nnz > 0, is_same, self._linear.offset[column], self._of_globals[column], of_locals)

    @np.errstate(all="ignore")
    def of_globals(self, g: Array) -> Array:
        """Return the term of the globals alone, (n,), at points (n, p)."""
        total: Array = self._constant + g @ self._slope_of_globals
        for kind in self._alone:
            size = max(1, STREAMED // len(kind.owner))
            for start in range(0, len(g), size):
                part = slice(start, start + size)
                total[part] += kind.values(g[part], None, 1)[:, 0].sum(axis=0)
        return total

    def of_blocks(self, first: int, last: int, places: Integers) -> BlockTerms:
        """Return the terms of the blocks from ``first`` to before ``last``, whose coordinates are at ``places``."""
        place = np.full(self._forest.n_local, -1, dtype=np.intp)
        place[places] = np.arange(len(places))
        parts = [
            kind.part(slice(int(starts[first]), int(starts[last])), place, len(places))
            for kind, starts in zip(self._kinds, self._starts, strict=True)
            if starts[first] < starts[last]
        ]
        return BlockTerms(parts, self._slope[places])


def owners(of_locals: Sequence[sparse.csr_array], forest: Trees) -> Integers:
    """Return the place of the deepest coordinate that each row depends on, (n_rows,), -1 for none."""
    n_rows = of_locals[0].shape[0]
    row = np.concatenate([np.repeat(np.arange(n_rows), np.diff(x.indptr)) for x in of_locals])
    place = np.concatenate([x.indices for x in of_locals]).astype(np.intp)
    owner = np.full(n_rows, -1, dtype=np.intp)
    order = np.argsort(forest.level[place], kind="stable")
    owner[row[order]] = place[order]  # the deepest comes last
    if (forest.path[owner[row], forest.level[place]] != place).any():
        raise CannotSplit(SEVERAL)
    return owner


def _rows_of(matrix: sparse.csr_array, rows: slice) -> sparse.csr_array:
    """Return some rows that follow each other, without a copy of the entries."""
    indptr = matrix.indptr[rows.start : rows.stop + 1]
    entries = slice(int(indptr[0]), int(indptr[-1]))
    parts = (matrix.data[entries], matrix.indices[entries], indptr - indptr[0])
    return sparse.csr_array(parts, shape=(rows.stop - rows.start, matrix.shape[1]))
