"""Which coordinates interact: sets of coordinates, and mean Hessians from one product for each colour."""

import functools
import itertools
import math

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

from pymc_ngvi.core.linalg import SMALL
from pymc_ngvi.core.messages import TooDenseError
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sizes import AT_ONCE, CACHED, HELD
from pymc_ngvi.core.types import Array, Bools, Indices, Matrix

# --- on which coordinates each element of an array depends: sets of coordinates, each kept once, and unions of them ---

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dependence:
    """The coordinates that each element of an array depends on.

    A million observations of a hundred thousand groups have no more than a hundred thousand different sets, so that
    an element holds the number of its set only.
    """

    #: Set 0 is empty; shape (n_sets, n_dim).
    sets: sparse.csr_array
    #: The set of each element, in the shape of the array.
    index: Ints

    @classmethod
    def identity(cls, n_dim: int) -> "Dependence":
        """Return that of the flat vector on itself."""
        return cls(_with_empty(sparse.eye_array(n_dim, dtype=bool, format="csr")), np.arange(1, n_dim + 1))

    def kept(self, keep: Bools) -> "Dependence":
        """Return the same with no dependence where ``keep``, broadcast with the array, is False."""
        return self if keep.all() else Dependence(self.sets, np.where(keep, self.index, 0))

    def spread(self, shape: tuple[int, ...]) -> "Dependence":
        """Broadcast to ``shape``."""
        return self if self.index.shape == shape else Dependence(self.sets, np.broadcast_to(self.index, shape))

    def reduced(self, axes: Sequence[int], *, keepdims: bool = False) -> "Dependence":
        """Return the union over axes, which may count from the end."""
        shape = self.index.shape
        over = {axis % len(shape) for axis in axes}
        kept = tuple(1 if axis in over else length for axis, length in enumerate(shape))
        out = kept if keepdims else tuple(length for axis, length in enumerate(shape) if axis not in over)
        if kept == shape:
            return Dependence(self.sets, self.index.reshape(out))
        return self.collected(np.broadcast_to(np.arange(math.prod(kept)).reshape(kept), shape), out)

    def collected(self, where: Ints, shape: tuple[int, ...]) -> "Dependence":
        """Return an array of ``shape``, each element of which is the union of those that ``where`` sends to it."""
        n_out, n_sets = math.prod(shape), self.sets.shape[0]
        members = _ones(where.ravel(), self.index.ravel(), (n_out, n_sets))
        first, inverse = _distinct(members)
        chosen = members[first]
        check_entries(int(np.diff(self.sets.indptr)[chosen.indices].sum(dtype=np.int64)))
        return Dependence(_with_empty(chosen @ self.sets), inverse.reshape(shape) + 1)

    def multiplied(self, matrix: "RowKinds", axis: int) -> "Dependence":
        """Return the dependence of products of a matrix with an array along an axis."""
        by_row = np.moveaxis(self.index, axis, 0)
        flat = by_row.reshape(len(by_row), -1)
        n_kinds, m = matrix.rows.shape[0], flat.shape[1]
        entries = matrix.rows.tocoo()
        check_entries(entries.nnz * m)
        # Row r of the matrix and column j of the array make element r m + j.
        where = entries.coords[0][:, None].astype(np.int64) * m + np.arange(m)
        made = Dependence(self.sets, flat[entries.coords[1]]).collected(where, (n_kinds, m))
        index = made.index[matrix.kind].reshape(-1, *by_row.shape[1:])
        return Dependence(made.sets, np.moveaxis(index, 0, axis))


@dataclass(frozen=True, eq=False)
class RowKinds:
    """Where a matrix is not 0, each kind of row kept once."""

    #: shape (n_kinds, n_columns).
    rows: sparse.csr_array
    #: shape (n_rows,).
    kind: Ints

    @classmethod
    def of(cls, matrix: Matrix) -> "RowKinds":
        """Return those of a matrix, sparse or dense."""
        if sparse.issparse(matrix):
            entries = sparse.csr_array(matrix != 0)
            first, kind = _distinct(entries)
            return cls(entries[first], kind)
        keep = np.asarray(matrix) != 0
        if keep.all():  # a design matrix: nothing to tell apart
            return cls(sparse.csr_array(keep[:1]), np.zeros(len(keep), dtype=np.int64))
        random = _random(keep.shape[1])
        # By parts: the products of whole numbers are formed from a copy of a part.
        first, kind = _kinds(np.concatenate([keep[i : i + CACHED] @ random for i in range(0, len(keep), CACHED)]))
        return cls(sparse.csr_array(keep[first]), kind)

    @classmethod
    def of_inverse(cls, matrix: Matrix) -> "RowKinds":
        """Return where the inverse of a matrix, dense, can differ from 0: within parts that no entry connects."""
        n_parts, part = csgraph.connected_components(sparse.csr_array(np.asarray(matrix) != 0), directed=False)
        return cls(_ones(part, np.arange(len(part)), (n_parts, len(part))), part.astype(np.int64))

    @classmethod
    def up_to(cls, n: int) -> "RowKinds":
        """Return those of a lower triangle of ones: of sums of all elements up to each."""
        check_entries(n * (n + 1) // 2)
        return cls(sparse.csr_array(np.tri(n, dtype=bool)), np.arange(n))


def union(parts: Sequence[Dependence], shape: tuple[int, ...]) -> Dependence:
    """Return the union, element by element, of arrays broadcast to ``shape``."""
    # From the smallest: what is said by a few numbers is united before it is broadcast.
    first, *others = sorted(parts, key=lambda part: part.index.size)
    for other in others:
        first = _pair(first, other)
    return first.spread(shape)


def joined(parts: Sequence[Dependence]) -> tuple[sparse.csr_array, list[Ints]]:
    """Return the sets of several arrays together, and the index of each into these."""
    stacked: list[sparse.csr_array] = []
    offsets: dict[int, int] = {}
    total = 0
    for part in parts:
        if id(part.sets) not in offsets:
            offsets[id(part.sets)] = total
            stacked.append(part.sets)
            total += part.sets.shape[0]
    if len(stacked) == 1:
        return stacked[0], [part.index for part in parts]
    check_entries(sum(s.nnz for s in stacked))
    # Set 0 of each part is empty, so that a shifted 0 still stands for nothing.
    return sparse.vstack(stacked, format="csr"), [part.index + offsets[id(part.sets)] for part in parts]


def everything(parts: Sequence[Dependence], shape: tuple[int, ...]) -> Dependence:
    """Return an array of ``shape`` of which each element depends on all elements of all parts."""
    return union([Dependence(p.sets, p.index.ravel()).reduced([0]) for p in parts], ()).spread(shape)


def pairs_of(a: Ints, b: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the different pairs of two indices of equal shape, and for each element the number of its pair."""
    first, kind = _kinds((a.astype(np.int64) * (int(b.max(initial=0)) + 1) + b).ravel())
    return a.ravel()[first], b.ravel()[first], kind.reshape(a.shape)


def check_entries(number: int) -> None:
    """Raise TooDenseError if a matrix of this many entries would be too large."""
    if number > HELD:
        raise TooDenseError


def _pair(a: Dependence, b: Dependence) -> Dependence:
    if a is b or (a.sets is b.sets and (a.index is b.index or np.array_equal(a.index, b.index))):
        return a
    ia, ib = np.broadcast_arrays(a.index, b.index)
    if a.index.size == 1:  # one set, added to each of the other's
        pb, inverse = np.unique(b.index, return_inverse=True)
        pa, inverse = np.full(len(pb), a.index.item()), inverse.reshape(ib.shape)
    else:
        pa, pb, inverse = pairs_of(ia, ib)
    lengths_a, lengths_b = np.diff(a.sets.indptr), np.diff(b.sets.indptr)
    check_entries(int(lengths_a[pa].sum(dtype=np.int64) + lengths_b[pb].sum(dtype=np.int64)))
    return Dependence(_with_empty(a.sets[pa] + b.sets[pb]), inverse + 1)


def _distinct(matrix: sparse.csr_array) -> tuple[Ints, Ints]:
    """Return the first row of each kind, and the kind of each row, by a 64-bit hash of their patterns."""
    return _kinds(matrix @ _random(matrix.shape[1]))


def _kinds(codes: Ints) -> tuple[Ints, Ints]:
    """Return where each different number comes first, and for each number which of these it is."""
    kind, different = pd.factorize(codes)  # no sort: five times as fast as NumPy's unique
    first = np.empty(len(different), dtype=np.int64)
    first[kind[::-1]] = np.arange(len(codes) - 1, -1, -1)
    return first, kind


def _random(n: int) -> Ints:
    # Sums of them modulo 2^64 tell sets apart: that any two of a million agree has a probability of 1e-7.
    return np.random.default_rng(0).integers(-(2**63), 2**63, size=n, dtype=np.int64)


def _ones(rows: Ints, cols: Ints, shape: tuple[int, int]) -> sparse.csr_array:
    return sparse.coo_array((np.ones(len(rows), dtype=bool), (rows, cols)), shape=shape).tocsr()


def _with_empty(sets: sparse.csr_array) -> sparse.csr_array:
    """Put the empty set before others."""
    made = sparse.csr_array(sets)
    pointers = np.concatenate([made.indptr[:1], made.indptr])
    return sparse.csr_array((made.data, made.indices, pointers), shape=(made.shape[0] + 1, made.shape[1]))


# --- pairs of coordinates that interact, collected as products of sets and written out once ---


#: Pairs, repetitions counted, that are formed at a time, and in all: about twenty seconds' work.
_PAIRS_AT_A_TIME = 20_000_000
_MAX_PAIRS = 300_000_000
#: Largest sets of which others may be parts.
_MAX_COVERS = 32


@dataclass
class Pairs:
    """Sets whose coordinates all interact with one another, and pairs of sets that interact across."""

    n_dim: int
    _within: dict[int, tuple[sparse.csr_array, Bools]] = field(default_factory=dict)
    _across: list[tuple[sparse.csr_array, sparse.csr_array]] = field(default_factory=list)

    def add_within(self, part: Dependence, used: Bools) -> None:
        """Let all coordinates of each used element interact."""
        if id(part.sets) not in self._within:
            self._within[id(part.sets)] = (part.sets, np.zeros(part.sets.shape[0], dtype=bool))
        self._within[id(part.sets)][1][part.index[used]] = True

    def add_across(self, a: Dependence, b: Dependence, used: Bools) -> None:
        """Let the coordinates of each element of ``a`` interact with those of the same element of ``b``."""
        a, b = _aligned(a, used.ndim), _aligned(b, used.ndim)
        shapes = list(zip(a.index.shape, b.index.shape, used.shape, strict=True))
        one_a = tuple(axis for axis, (length, _, full) in enumerate(shapes) if length == 1 != full)
        one_b = tuple(axis for axis, (_, length, full) in enumerate(shapes) if length == 1 != full)
        if used.all() or not (one_a and one_b):
            # A factor that is the same all along an axis meets the union of the other over it.
            a = a.kept(used.any(axis=one_a, keepdims=True)).reduced(one_b, keepdims=True)
            b = b.kept(used.any(axis=one_b, keepdims=True)).reduced(one_a, keepdims=True)
        else:
            a, b = a.kept(used), b.kept(used)
        ia, ib, _ = pairs_of(a.index.ravel(), b.index.ravel())
        keep = (np.diff(a.sets.indptr)[ia] > 0) & (np.diff(b.sets.indptr)[ib] > 0)
        if keep.any():
            for part, chosen in ((a, ia[keep]), (b, ib[keep])):
                check_entries(int(np.diff(part.sets.indptr)[chosen].sum(dtype=np.int64)))
            self._across.append((a.sets[ia[keep]], b.sets[ib[keep]]))

    def pattern(self, max_entries: int) -> Pattern:
        """Return the pattern of all that interact."""
        left, right = self._factors()
        reach = np.diff(left.indptr).astype(np.int64) * np.diff(right.indptr)
        if reach.max(initial=0) > 2 * max_entries or reach.sum() > _MAX_PAIRS:
            raise TooDenseError
        return _lower_product(left, right, max_entries)

    def _factors(self) -> tuple[sparse.csr_array, sparse.csr_array]:
        """Return two matrices L and R such that the pairs are where L^T R is not 0, in either triangle."""
        diagonal = sparse.eye_array(self.n_dim, dtype=bool, format="csr")
        sets = sparse.vstack([diagonal, *(s[used] for s, used in self._within.values())], "csr")
        kept, sets = [], sets[_distinct(sets)[0]]
        for _ in range(_MAX_COVERS):
            lengths = np.diff(sets.indptr).astype(np.int64)
            if (lengths**2).sum() <= _PAIRS_AT_A_TIME:
                break
            largest = sets[[lengths.argmax()]]
            kept.append(largest)
            inside = np.zeros(sets.shape[1], dtype=np.int64)
            inside[largest.indices] = 1
            sets = sets[sets @ inside < lengths]
        within = sparse.vstack([*kept, sets], format="csr")
        if not self._across:
            return within, within
        across = sparse.hstack([sparse.vstack(side) for side in zip(*self._across, strict=True)], "csr")
        across = across[_distinct(across)[0]]
        left, right = across[:, : self.n_dim], across[:, self.n_dim :]
        return (
            sparse.vstack([within, left, right], format="csr"),
            sparse.vstack([within, right, left], format="csr"),
        )


def _aligned(part: Dependence, ndim: int) -> Dependence:
    """Put axes of length 1 before those of an array."""
    shape = part.index.shape
    return Dependence(part.sets, part.index.reshape((1,) * (ndim - len(shape)) + shape))


def _lower_product(left: sparse.csr_array, right: sparse.csr_array, max_entries: int) -> Pattern:
    """Return where the lower triangle of ``left.T @ right`` is not 0, some rows of it at a time."""
    n_dim = left.shape[1]
    by_row = left.T.tocsr()
    lengths = np.diff(right.indptr).astype(np.int64)
    work = np.concatenate([[0], np.cumsum(lengths[by_row.indices])])[by_row.indptr]
    codes, total, start = [], 0, 0
    while start < n_dim:
        stop = max(start + 1, int(np.searchsorted(work, work[start] + _PAIRS_AT_A_TIME, side="right")) - 1)
        block = (by_row[start:stop] @ right[:, :stop]).tocsr()
        i = np.repeat(np.arange(start, stop), np.diff(block.indptr))
        below = block.indices <= i
        made = i[below] * n_dim + block.indices[below]
        made.sort()
        codes.append(made)
        total += len(made)
        if total > max_entries:
            raise TooDenseError
        start = stop
    rows, cols = np.divmod(np.concatenate(codes), n_dim)
    return Pattern(rows, cols, n_dim)


# --- colourings of a sparse symmetric matrix: all of its entries from few matrix-vector products ---
#
# A column may share a colour, that is a product, with others as long as every entry can be read off somewhere: entry
# (i, j) from the product of j's colour at row i if no other column of that colour has an entry in row i, or, as the
# matrix is symmetric, from the product of i's colour at row j. This is a star colouring of the graph of the matrix
# (Gebremedhin, Manne and Pothen, 2005).


#: Edges of a graph that is coloured vertex by vertex in Python: a second; and over all the orders that are tried.
_GREEDY_EDGES, _ALL_GREEDY_EDGES = 2_000_000, 300_000
#: Sets of vertices with a colour of their own that are tried.
_N_CUTS = 8


@dataclass(frozen=True, eq=False)
class Colouring:
    """Columns of a symmetric matrix, grouped so that the sums over groups determine all entries."""

    #: 0, ..., n_colours - 1; shape (n_dim,).
    colours: Indices
    n_colours: int
    #: Where each entry of the pattern is found in the products, flattened; shape (n_entries,).
    places: Indices

    @classmethod
    def of(cls, pattern: Pattern) -> Self:
        """Return a colouring of a pattern with few colours."""
        below = pattern.off_diagonal
        rows, cols, n_dim = pattern.rows[below], pattern.cols[below], pattern.n_dim
        own = _own_colours(rows, cols, n_dim)
        n_own = int(own.sum())
        inside = ~(own[rows] | own[cols])
        rest = np.flatnonzero(~own)
        # The edges of the rest, as 32-bit indices, which the graph routines want.
        i, j = (np.cumsum(~own) - 1).astype(np.int32)[np.stack([rows, cols])[:, inside]]
        both = np.concatenate([i, j]), np.concatenate([j, i])
        graph = sparse.coo_array((np.ones(2 * len(i), dtype=np.int8), both), shape=(len(rest),) * 2).tocsr()
        colours = np.empty(n_dim, dtype=np.intp)
        colours[own] = np.arange(n_own)
        colours[rest] = n_own + _colour_rest(graph)
        n_colours = int(colours.max(initial=-1)) + 1
        at_row = colours[pattern.cols] * pattern.n_dim + pattern.rows
        at_col = colours[pattern.rows] * pattern.n_dim + pattern.cols
        # Where another column of a colour has an entry in the row of one, it is alone in the column of the other.
        places = np.concatenate([at_row, at_col[below]])
        _, which, counts = np.unique(places, return_inverse=True, return_counts=True)
        return cls(colours, n_colours, np.where(counts[which[: len(at_row)]] == 1, at_row, at_col))

    def directions(self) -> Array:
        """Return the sum of the unit vectors of each colour, (n_colours, n_dim)."""
        directions = np.zeros((self.n_colours, len(self.colours)))
        directions[self.colours, np.arange(len(self.colours))] = 1.0
        return directions


# --- the choice of colours --------------------------------------------------------------------------------------------


def _own_colours(rows: Indices, cols: Indices, n_dim: int) -> Bools:
    """Choose the vertices with a colour of their own: those of the highest degrees, down to one of the widest gaps.

    What the rest will need is estimated by its highest degree: neighbours of one vertex mostly need different colours.
    """
    degrees = _degrees(rows, cols, n_dim)
    best, fewest = np.zeros(n_dim, dtype=bool), degrees.max(initial=0) + 1
    descending = np.sort(degrees)[::-1]
    ratios = (descending[:-1] + 1.0) / (descending[1:] + 1.0)
    for cut in np.sort(np.argsort(-ratios, kind="stable")[:_N_CUTS]):
        if ratios[cut] == 1.0 or cut + 2 >= fewest:
            continue
        own = degrees >= descending[cut]
        inside = ~(own[rows] | own[cols])
        total = own.sum() + _degrees(rows[inside], cols[inside], n_dim).max(initial=0) + 1
        if total < fewest:
            best, fewest = own, total
    return best


def _degrees(rows: Indices, cols: Indices, n_dim: int) -> Indices:
    return np.bincount(np.concatenate([rows, cols]), minlength=n_dim)


def _colour_rest(graph: sparse.csr_array) -> Indices:
    """Return the best colouring found: by components, and greedy star colourings in as many orders as there is time."""
    n_dim = graph.shape[0]
    if not graph.nnz:
        return np.zeros(n_dim, dtype=np.intp)
    best, degrees, work = _by_component(graph), np.diff(graph.indptr), max(graph.nnz // 2, n_dim)
    last = int(np.argmax(best))
    if best[last] <= 2 or degrees[last] == best[last] or work > _GREEDY_EDGES:  # a clique needs as many
        return best
    rcm = csgraph.reverse_cuthill_mckee(graph, symmetric_mode=True)
    orders = [rcm, np.argsort(-degrees, kind="stable"), np.arange(n_dim)][: max(_ALL_GREEDY_EDGES // work, 1)]
    flat = graph.indices.tolist()
    neighbours = [flat[a:b] for a, b in itertools.pairwise(graph.indptr.tolist())]
    return min([best, *(_star_colouring(neighbours, order.tolist()) for order in orders)], key=lambda c: int(c.max()))


def _by_component(graph: sparse.csr_array) -> Indices:
    """Colour the members of each connected component 0, 1, 2, ..."""
    n_components, labels = csgraph.connected_components(graph, directed=False)
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels, minlength=n_components)
    colours = np.empty(len(labels), dtype=np.intp)
    colours[order] = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return colours


def _star_colouring(neighbours: list[list[int]], order: list[int]) -> Indices:
    """Give each vertex in turn the first colour that closes no path of four vertices in two colours.

    Sets of colours are the bits of integers. A vertex is the centre of a star for each colour that two of its
    neighbours have: another neighbour of a leaf must not get the colour of the centre.
    """
    n_dim = len(neighbours)
    bits = [0] * n_dim  # the colour; 0 before there is one
    once, twice = [0] * n_dim, [0] * n_dim  # colours of one neighbour or more; of two or more
    centres = [0] * n_dim  # of the stars that the vertex is a leaf of
    for v in order:
        forbidden, doubled = 0, twice[v]
        for w in neighbours[v]:
            bit = bits[w]
            if bit:
                forbidden |= bit | centres[w]
                if bit & doubled:  # v becomes a centre: its leaves' other neighbours must differ from it
                    forbidden |= once[w]
        new = ~forbidden & (forbidden + 1)
        bits[v] = new
        for w in neighbours[v]:
            if bits[w] & doubled:
                centres[w] |= new
            if not once[w] & new:
                once[w] |= new
            elif twice[w] & new:
                centres[v] |= bits[w]
            else:
                twice[w] |= new
                if bits[w]:
                    for u in neighbours[w]:
                        if bits[u] == new:
                            centres[u] |= bits[w]
    return np.array([bit.bit_length() - 1 for bit in bits], dtype=np.intp)


#: Multiplies the mean of the Hessians at (n_draws, n_dim) with (n_directions, n_dim), along these alone.
Products = Callable[[Array, Array], Array]

#: Elements of a temporary: past the first, temporaries leave the cache; past the second, several fill the memory.
CACHED_ELEMENTS, _MOST_ELEMENTS = CACHED // 2, AT_ONCE
#: Relative error of a product with a random vector that tells of a missing entry.
_TOLERANCE = SMALL
#: An entry that is smaller than this, relative to the largest of its row and column, is a rounding error.
_ROUNDING = 1e-12


class ColouredHessian:
    """The mean Hessian at the entries of a pattern."""

    def __init__(self, pattern: Pattern, colouring: Colouring, products: Products) -> None:
        self.pattern, self.colouring, self._products = pattern, colouring, products

    @property
    def n_colours(self) -> int:
        """Products for one Hessian."""
        return self.colouring.n_colours

    def mean_values(self, theta: Array) -> Array:
        """Return the mean over draws at the entries of the pattern, (n_entries,)."""
        return self._products(theta, self.colouring.directions()).ravel()[self.colouring.places]

    @functools.cached_property
    def _entries(self) -> sparse.csr_array:
        """Where both triangles of the matrix find their values."""
        return self.pattern.symmetric(np.arange(self.pattern.n_entries))

    def times(self, values: Array, directions: Array) -> Array:
        """Multiply the symmetric matrix with these values with each direction, (n_directions, n_dim)."""
        entries = self._entries
        matrix = sparse.csr_array((values[entries.data], entries.indices, entries.indptr), shape=entries.shape)
        return np.ascontiguousarray((matrix @ directions.T).T)

    def diagonal(self, values: Array) -> Array:
        """Return the diagonal of the matrix with these values, (n_dim,)."""
        return values[~self.pattern.off_diagonal]

    # --- entries that the pattern lacks -------------------------------------------------------------------------------

    def inconsistent_rows(self, point: Array, rng: np.random.Generator) -> Indices:
        """Return the rows in which the Hessian at one point does not give its product with a random vector.

        None where either is not finite: nothing is known then.
        """
        vector = rng.standard_normal((1, len(point)))
        values = self.mean_values(point[None])
        with np.errstate(all="ignore"):
            expected = self._products(point[None], vector)[0]
            error = np.abs(self.times(values, vector)[0] - expected)
            scale = np.maximum(self.times(np.abs(values), np.abs(vector))[0], np.abs(expected))
        if not np.all(np.isfinite(scale)):
            return np.empty(0, dtype=np.intp)
        # Rounding errors may come from terms that cancel in a row.
        return np.flatnonzero(error > _TOLERANCE * scale + _ROUNDING * scale.max(initial=0.0))

    def missing_entries(self, point: Array, rows: Indices, known: Pattern) -> Pattern | None:
        """Add the entries of some rows to those that are known; None where these are too many to look at."""
        if len(rows) * len(point) > HELD:
            return None
        wider = known.matrix.astype(np.int8)
        for part in slices(len(rows), max(_MOST_ELEMENTS // len(point), 1)):
            axes = np.zeros((part.stop - part.start, len(point)))
            axes[np.arange(len(axes)), rows[part]] = 1.0
            inside = sparse.coo_array(significant(self._products(point[None], axes)))
            shape = (len(point), len(point))
            wider = wider + sparse.coo_array((inside.data.astype(np.int8), (rows[part][inside.row], inside.col)), shape)
        return Pattern.of(wider)


def significant(rows: Array) -> Bools:
    """Tell which entries of rows of a matrix are more than rounding errors of the largest of the row."""
    size = np.abs(rows)
    return size > _ROUNDING * size.max(axis=1, keepdims=True, initial=0.0)


def batch(widest: int, n_directions: int) -> tuple[int, int]:
    """Return how many draws and directions to evaluate in one call, of which one has ``widest`` elements."""
    most = min(max(_MOST_ELEMENTS // max(widest, 1), 1), max(n_directions, 1))
    n_directions = -(-max(n_directions, 1) // -(-max(n_directions, 1) // most))  # parts of about the same size
    return int(np.clip(CACHED_ELEMENTS // (max(widest, 1) * n_directions), 1, 64)), n_directions


def slices(n: int, size: int) -> list[slice]:
    """Cut range(n) into slices of at most ``size``; at least one, so that no rows give an empty result."""
    return [slice(i, min(i + size, n)) for i in range(0, n, size)] or [slice(0, 0)]
