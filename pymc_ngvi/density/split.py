"""Log p as a term of the globals and one term for each local coordinate, batched over draws and quadrature nodes.

    log p(g, b) = f_0(g) + sum_c f_c(g, b_path(c)),

where path(c) is the way from the root of c's tree to c itself (`pymc_ngvi.marginal.forest`). Elements of the factors
of the model are each assigned to the deepest coordinate that they depend on, as their graph tells.
"""

import functools

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.compile import Function
from pytensor.graph import Variable, ancestors, vectorize_graph
from pytensor.scalar import Add, Identity
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Sum
from scipy import sparse

from pymc_ngvi.core.refusal import Reason, RefusedFor, TooDenseError
from pymc_ngvi.core.sizes import CACHED, STREAMED
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.ops.elements import Facts
from pymc_ngvi.reading.affine import Dependences
from pymc_ngvi.rows.engines import OnTwoAxes
from pymc_ngvi.rows.expectation import Compiled, RowFunction

# --- rows by blocks: log p, a sum over rows, as a term of the globals and one for each local coordinate ---
#
#     log p(g, b) = f_0(g) + sum_c f_c(g, b_path(c)),
#
# where path(c) is the way from the root of c's tree to c itself (`pymc_ngvi.marginal.forest`). A row belongs to the
# deepest coordinate that its predictors depend on. A predictor is offset + X_g g + X_b b: its first two parts are
# computed once for each draw of the globals, whatever the number of quadrature nodes, and functions of globals alone,
# the exponential of a log scale for instance, once for all rows.
#
# Rows come first in all arrays here, then nodes, then draws: sums over the rows of a coordinate are sums of vectors.

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
        rows_first = function.rows_first if isinstance(function, OnTwoAxes) else function
        return _Kind(rows_first, slots, [one[:, None, None] for one in data], owner[at], self._forest.n_local)

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


# --- stands for the flat vector where graphs are put on two others: of some coordinates, and of the rest ---


class Pieces:
    """Pieces of the flat vector, taken from globals or local coordinates."""

    def __init__(self, globals_: NDArray[np.intp], n_dim: int, global_: Variable, local: Variable) -> None:
        self.global_, self.local = global_, local
        self._is_global = np.zeros(n_dim, dtype=bool)
        self._is_global[globals_] = True
        self._rank = np.where(self._is_global, np.cumsum(self._is_global), np.cumsum(~self._is_global)) - 1

    def __getitem__(self, where: slice) -> Variable:
        """Return a piece."""
        of_globals, rank = self._is_global[where], self._rank[where]
        if of_globals.all():
            return self.global_[int(rank[0]) : int(rank[-1]) + 1]
        if not of_globals.any():
            return self.local[int(rank[0]) : int(rank[-1]) + 1]
        at = np.empty(len(rank), dtype=np.intp)
        at[of_globals] = np.arange(int(of_globals.sum()))
        at[~of_globals] = int(of_globals.sum()) + np.arange(int((~of_globals).sum()))
        return pt.concatenate([self.global_[rank[of_globals]], self.local[rank[~of_globals]]])[at]


def local_input(n: int) -> Variable:
    """Return the symbolic vector of local coordinates."""
    return pt.vector("b", dtype="float64", shape=(n,))


#: Random halves of the local coordinates that are moved, to see what changes with them.
_N_MOVED = 8


class _Made(NamedTuple):
    """What is made once for the same globals."""

    pieces: Pieces
    #: The sum of the terms of globals alone; the elements of all others.
    of_globals: Function
    of_locals: Function
    #: These elements.
    arrays: list[Variable]
    #: All of them, one array after the other.
    elements: Variable
    #: Of ``elements``, as functions of local coordinates.
    facts: Facts


class SplitDensity:
    """The terms of log p, compiled."""

    def __init__(self, density: LogDensity, forest: Trees, point: Array) -> None:
        self.forest = forest
        self.n_evaluations = 0
        before = density.compile_seconds
        once, beside = density.functions.once, tuple(forest.globals_.tolist())
        self._made: _Made = once(("terms beside", beside), lambda: self._make(density))
        self.compile_seconds = density.compile_seconds - before
        # Found each time: other data, or other indices of groups, may bring other ones.
        owner = self._owners(point)
        self.n_elements = len(owner)
        ends = np.cumsum([self._made.facts.shape(array)[0] for array in self._made.arrays])[:-1]
        self._sums = [_Sums.of(of_array, forest.n_local) for of_array in np.split(owner, ends)]
        self._check(owner, point)

    def _make(self, density: LogDensity) -> _Made:
        """Return the functions of the terms, and what tells which coordinates they depend on."""
        globals_ = self.forest.globals_
        given = pt.vector("g", dtype="float64", shape=(len(globals_),))
        pieces = Pieces(globals_, density.n_dim, given, local_input(density.n_dim - len(globals_)))
        first, arrays = self._graphs(density, pieces)
        with without_c():
            elements = pt.concatenate(arrays)
            facts = Facts(elements, pieces.local, [pieces.global_])
        draws = pt.matrix("globals", dtype="float64", shape=(None, pieces.global_.type.shape[0]))
        nodes = pt.matrix("nodes", dtype="float64", shape=(None, self.forest.n_local))
        both = pt.tensor3("locals", dtype="float64", shape=(None, None, self.forest.n_local))
        # Nodes first, then draws: what depends on globals alone has no axis of nodes, and is computed once a draw.
        batched = vectorize_graph(arrays, {pieces.local: nodes})
        batched = vectorize_graph(batched, {pieces.global_: draws, nodes: both})
        lead = both.shape[:2]
        batched = [e if e.ndim > 2 else pt.broadcast_to(e, (*lead, e.shape[-1])) for e in batched]
        [first] = vectorize_graph([first], {pieces.global_: draws})
        if first.ndim == 0:
            first = pt.broadcast_to(first, (draws.shape[0],))
        compile_ = density.functions.compile
        return _Made(pieces, compile_([draws], [first]), compile_([draws, both], batched), arrays, elements, facts)

    @staticmethod
    def _graphs(density: LogDensity, pieces: Pieces) -> tuple[Variable, list[Variable]]:
        """Return the sum of the terms of globals alone, and the elements of all others."""
        with without_c():
            terms = [part for factor in density.graphs.factors for part in _summands(factor.logp)]
            terms = graph.on_flat_vector(density.model, density.layout, terms, pieces)
            # Checks of parameters tie all elements together; where one would fail, log p is not finite anyway.
            terms = graph.simplify(terms, check_bounds=False)
            terms = [part for term in terms for part in _summands(term)]
            of_locals = [pieces.local in set(ancestors([t])) for t in terms]
            alone = [t.sum() for t, is_local in zip(terms, of_locals, strict=True) if not is_local]
            outputs = [pt.add(pt.constant(0.0), *alone)]
            outputs += [t.flatten() for t, is_local in zip(terms, of_locals, strict=True) if is_local]
            first, *elements = graph.inline_inner_graphs(graph.simplify(outputs))
        return first, elements

    # --- which element belongs to which coordinate ---

    def _owners(self, point: Array) -> Integers:
        """Return the place of the deepest coordinate that each element depends on, -1 for none."""
        made = self._made
        made.facts.refresh()
        dependences = Dependences(made.facts, made.pieces.local)
        try:
            depends = dependences.of(made.elements)
        except TooDenseError:
            raise CannotSplit(SEVERAL) from None
        if not dependences.opaque:
            return owners([depends.sets[depends.index]], self.forest)
        changed = self._changed(point, np.eye(self.forest.n_local, dtype=np.bool_))
        return owners([sparse.csr_array(changed.T)], self.forest)

    def _check(self, owner: Integers, point: Array) -> None:
        """See that no element changes where only coordinates move that are not on the path to its own."""
        moved = np.random.default_rng(0).random((_N_MOVED, self.forest.n_local)) < 0.5
        may_change = moved[:, self.forest.path[owner]].any(axis=-1) & (owner >= 0)
        if (self._changed(point, moved) & ~may_change).any():
            raise CannotSplit(SEVERAL)

    def _changed(self, point: Array, moved: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which elements, (n_moves, n_elements), change with which local coordinates, (n_moves, n_local)."""
        forest, rng = self.forest, np.random.default_rng(0)
        g = point[forest.globals_] + 0.1 * rng.standard_normal(len(forest.globals_))
        b = point[forest.locals_] + 0.3 * rng.standard_normal(forest.n_local)
        step = rng.uniform(0.3, 1.0, forest.n_local) * rng.choice([-1.0, 1.0], forest.n_local)
        first, *others = np.concatenate(self._elements(g, b + np.concatenate([0 * moved[:1], moved]) * step), axis=1)
        return np.array(others) != first

    def _elements(self, g: Array, local: Array) -> list[Array]:
        """Return the elements at several local points beside one of the globals, (n_points, n_elements) each."""
        parts: list[list[Array]] = []
        size = max(1, int(16 * CACHED // max(local.shape[1], 1)))
        for start in range(0, len(local), size):
            with np.errstate(all="ignore"):
                values = self._made.of_locals(
                    np.ascontiguousarray(g[None]), np.ascontiguousarray(local[None, start : start + size])
                )
            parts.append([np.asarray(v)[0] for v in values])
        return [np.concatenate(p) for p in zip(*parts, strict=True)]

    # --- evaluation ---

    def chunk(self, n_nodes: int) -> int:
        """Return how many draws to evaluate at once, at ``n_nodes`` nodes each, so that temporaries stay in cache."""
        return max(1, int(CACHED // (n_nodes * max(self.n_elements, self.forest.n_local))))

    def terms(self, g: Array, local: Array) -> tuple[Array, Array]:
        """Evaluate the terms."""
        n, n_nodes, n_local = local.shape
        self.n_evaluations += n * n_nodes
        with np.errstate(all="ignore"):  # far out, densities overflow: the caller sees it
            result = np.zeros((n, n_nodes, n_local))
            of_globals = np.array(self._made.of_globals(np.ascontiguousarray(g))[0])
            values = self._made.of_locals(np.ascontiguousarray(g), np.ascontiguousarray(local))
            for value, sums in zip(values, self._sums, strict=True):
                array = np.asarray(value)
                sums.add(array, result)
                if len(sums.alone):
                    of_globals += array[:, 0, sums.alone].sum(axis=-1)
        return of_globals, result


class _Sums(NamedTuple):
    """Sums of elements by coordinate."""

    #: Elements that depend on no local coordinate.
    alone: Integers
    #: Coordinates that have elements, ascending.
    places: Integers
    #: Where the run of each of these begins, if its elements are neighbours; one element each if there are as many.
    starts: Integers | None
    #: Otherwise: (n_local, n_elements).
    matrix: sparse.csr_array | None
    n_elements: int

    @classmethod
    def of(cls, owners: Integers, n_local: int) -> "_Sums":
        """Return the sums for the coordinate of each element, -1 for none."""
        alone = np.flatnonzero(owners < 0)
        if not len(alone) and (np.diff(owners) >= 0).all():
            places, starts = np.unique(owners, return_index=True)
            return cls(alone, places, starts, None, len(owners))
        keep = owners >= 0
        at = (owners[keep], np.flatnonzero(keep))
        matrix = sparse.csr_array((np.ones(int(keep.sum())), at), shape=(n_local, len(owners)))
        return cls(alone, np.unique(owners[keep]), None, matrix, len(owners))

    def add(self, values: Array, result: Array) -> None:
        """Add the sums of values, (n, n_nodes, n_elements), to a result, (n, n_nodes, n_local)."""
        if self.matrix is not None:
            flat = values.reshape(-1, self.n_elements)
            result += (self.matrix @ flat.T).T.reshape(result.shape)
        else:
            assert self.starts is not None
            sums = values if len(self.places) == self.n_elements else np.add.reduceat(values, self.starts, axis=-1)
            if len(self.places) == result.shape[-1]:
                result += sums
            else:
                result[..., self.places] += sums


def _summands(term: Variable) -> list[Variable]:
    """Return the parts of a sum over everything, as a Potential or a joint density may be; else the term itself."""
    node = term.owner
    if node is None or term.ndim:
        return [term]
    op = node.op
    if isinstance(op, Sum) and (op.axis is None or len(op.axis) == node.inputs[0].ndim):
        return [part for part in [node.inputs[0]] if part.ndim] or _summands(node.inputs[0])
    if isinstance(op, Elemwise) and isinstance(op.scalar_op, Add | Identity):
        return [part for given in node.inputs for part in _summands(given)]
    if isinstance(op, DimShuffle) and not node.inputs[0].ndim:
        return _summands(node.inputs[0])
    return [term]
