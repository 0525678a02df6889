"""Elimination orders of sparse matrices and their fronts: columns eliminated together, and where entries are."""

import functools

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

from pymc_ngvi.core.pattern import Pattern

Ints = NDArray[np.int64]

#: Coordinates that are not cut any further.
_LEAF = 10
#: Part of a component in the smaller half, at least, and in the separator, at most.
_LEAST_HALF, _MOST_BETWEEN = 0.05, 0.3
#: Multiples of the mean degree beyond which coordinates are set apart.
_HIGH = (4.0, 16.0, 64.0)
#: Part of the coordinates that touch one other at most, from which on they are eliminated first, as those of trees are.
_MANY = 0.05
#: Pairs of coordinates that touch one of those that come first, at most.
_MOST_PAIRS = 2e8
#: Part of those that are still open among which some are chosen in a slow round.
_SLOWLY = 0.1
#: Multiple of the root of the dimension that separators don't exceed in chains and maps.
_SMALL = 4.0


class Supernodes(NamedTuple):
    """Coordinates that are eliminated together."""

    #: Of each coordinate; shape (n_dim,).
    part: Ints
    #: The deepest are eliminated first; those of one depth touch each other nowhere by then; shape (n_parts,).
    depth: Ints


def candidates(graph: sparse.csr_array) -> list[Supernodes]:
    """Return orders of which one should be good."""
    degree = np.diff(graph.indptr)
    limits = np.unique(np.array(_HIGH) * degree.mean())
    leaves = _leaves(graph, degree > limits[1])
    if leaves.sum() >= _MANY * len(degree) and not leaves.all():
        rest, filled = _without(graph, leaves)
        return [_joined(parts, rest, leaves) for parts in candidates(filled)]
    found, largest = {}, np.inf
    for limit in limits:
        apart = np.flatnonzero(degree > limit)
        if len(apart) not in found:
            found[len(apart)] = parts = _dissected(graph, apart)
            sizes = np.bincount(parts.part)[int(len(apart) > 0) :]
            largest = min(largest, int(sizes.max(initial=0)))
    if largest <= _SMALL * np.sqrt(graph.shape[0]):
        return list(found.values())
    # Nothing separates.
    firsts = [independent(graph, slowly=True), *(_one_side(graph, degree > limit) for limit in limits[-1:])]
    bearable = [first for first in firsts if first.sum() > 1 and np.sum(degree[first].astype(float) ** 2) < _MOST_PAIRS]
    return [*found.values(), *(_beside(graph, first) for first in bearable)]


def _one_side(graph: sparse.csr_array, apart: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the larger side of a graph with two, within each of which nothing touches, as of two crossed effects.

    The sides of each component apart; none where there are not two.
    """
    result = np.zeros(graph.shape[0], dtype=bool)
    inside = np.flatnonzero(~apart)
    inner = graph[inside][:, inside]
    n_components, component = csgraph.connected_components(inner, directed=False)
    side = _levels(inner, component.astype(np.int64)) % 2 == 1
    whole = inner.tocoo()
    within = (side[whole.row] == side[whole.col]) & (whole.row != whole.col)
    if not within.any():
        size = np.bincount(component)
        larger = 2 * np.bincount(component, side, minlength=n_components) > size
        result[inside] = side == larger[component]
    return result


def _leaves(graph: sparse.csr_array, apart: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return coordinates that touch no more than one other, but for those apart; of two that touch each other, one."""
    whole = graph.tocoo()
    inner = (whole.row != whole.col) & ~apart[whole.row] & ~apart[whole.col]
    row, col = whole.row[inner], whole.col[inner]
    result = ~apart & (np.bincount(row, minlength=len(apart)) <= 1)
    result[row[result[row] & result[col] & (row > col)]] = False
    return result


def _without(graph: sparse.csr_array, first: NDArray[np.bool_]) -> tuple[Ints, sparse.csr_array]:
    """Return which coordinates are left when independent ones were eliminated, and their pattern, filled in by that."""
    rest, inner = np.flatnonzero(~first), np.flatnonzero(first)
    among, between = graph[rest][:, rest].astype(np.int32), graph[rest][:, inner].astype(np.int32)
    return rest, (among + between @ between.T).astype(bool).tocsr()


def _joined(found: Supernodes, rest: Ints, first: NDArray[np.bool_]) -> Supernodes:
    """Return the order of all from that of the rest, which comes after ``first``."""
    inner = np.flatnonzero(first)
    part = np.empty(len(first), dtype=np.int64)
    part[rest], part[inner] = found.part, len(found.depth) + np.arange(len(inner))
    return Supernodes(part, np.append(found.depth, np.full(len(inner), found.depth.max(initial=-1) + 1)))


def _beside(graph: sparse.csr_array, first: NDArray[np.bool_]) -> Supernodes:
    """Eliminate independent coordinates first, and dissect what is left."""
    rest, filled = _without(graph, first)
    degree = np.diff(filled.indptr)
    return _joined(_dissected(filled, np.flatnonzero(degree > _HIGH[0] * degree.mean())), rest, first)


def _dissected(graph: sparse.csr_array, apart: Ints) -> Supernodes:
    """Cut into halves until these are small, coordinates ``apart`` aside."""
    part = np.full(graph.shape[0], -1, dtype=np.int64)
    part[apart] = 0
    depth = [np.zeros(int(len(apart) > 0), dtype=np.int64)]
    n_parts = len(depth[0])
    open_ = np.flatnonzero(part < 0)
    graph = graph[open_][:, open_]
    while len(open_):
        component = _cut(graph)
        done = component >= 0
        found, here = np.unique(component[done], return_inverse=True)
        part[open_[done]] = n_parts + here
        n_parts += len(found)
        depth.append(np.full(len(found), len(depth)))
        left = np.flatnonzero(~done)
        graph, open_ = graph[left][:, left], open_[left]
    return Supernodes(part, np.concatenate(depth))


def _cut(graph: sparse.csr_array) -> Ints:
    """Return the component of each coordinate of a separator, and of small components; -1 for others."""
    n_components, component = csgraph.connected_components(graph, directed=False)
    component = component.astype(np.int64)
    size = np.bincount(component)
    small = size <= _LEAF
    result = np.where(small[component], component, -1)
    if small.all():
        return result
    level = _levels(graph, component)
    # Each level of each component, one after the other.
    depth = np.zeros(n_components, dtype=np.int64)
    np.maximum.at(depth, component, level)
    start = np.cumsum(depth + 1) - (depth + 1)
    count = np.bincount(start[component] + level, minlength=int(depth.sum()) + n_components)
    owner = np.repeat(np.arange(n_components), depth + 1)
    until = np.cumsum(count)
    before = until - count - (until - count)[start][owner]
    less = np.minimum(before, size[owner] - before - count)
    with np.errstate(divide="ignore"):
        score = np.where(less >= _LEAST_HALF * size[owner], count / less, np.inf)
    order = np.lexsort((score, owner))
    best = order[start]
    separates = np.isfinite(score[best]) & (count[best] <= _MOST_BETWEEN * size)
    chosen = separates[component] & (level == (best - start)[component])
    # What touches nothing beyond stays on its side.
    beyond = graph @ (separates[component] & (level == (best - start)[component] + 1))
    result[chosen & beyond] = component[chosen & beyond]
    dense = ~separates[component]
    result[dense] = component[dense]
    return result


def _levels(graph: sparse.csr_array, component: Ints) -> Ints:
    """Return the distance of each vertex from one at the rim of its component."""
    n = graph.shape[0]
    start = np.unique(component, return_index=True)[1]
    distance = np.zeros(n, dtype=np.int64)
    for _ in range(2):
        root = sparse.csr_array((np.ones(len(start), dtype=bool), (np.zeros(len(start), int), start)), shape=(1, n + 1))
        whole = sparse.vstack([sparse.csr_array((graph.data, graph.indices, graph.indptr), shape=(n, n + 1)), root])
        order, before = csgraph.breadth_first_order(whole.tocsr(), n, directed=True)
        distance = _depths(order, before)[:n]
        last = np.lexsort((distance, component))
        start = last[np.cumsum(np.bincount(component)) - 1]
    return distance


def _depths(order: Ints, before: Ints) -> Ints:
    """Return the distance of each vertex from the first of a breadth-first order, less one."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    jump = np.zeros(len(order), dtype=np.int64)
    jump[1:] = place[before[order[1:]]]
    steps = np.ones(len(order), dtype=np.int64)
    steps[0] = 0
    while jump.any():
        steps += steps[jump]
        jump = jump[jump]
    result = np.empty(len(order), dtype=np.int64)
    result[order] = steps - 1
    return result


def independent(graph: sparse.csr_array, *, slowly: bool = False) -> NDArray[np.bool_]:
    """Return a largest set of coordinates that touch each other nowhere, as far as it is found; those of low degree."""
    n_dim = graph.shape[0]
    # Those of low degree first; equals in an arbitrary order that is always the same: in that of their indices, a chain
    # would take a round for each coordinate.
    ties = np.random.default_rng(0).permutation(n_dim)
    rank = np.argsort(np.lexsort((ties, np.diff(graph.indptr)))).astype(np.float64) + 1.0
    links = (graph.astype(np.float64) - sparse.diags_array(graph.diagonal().astype(np.float64))).tocsr()
    links.eliminate_zeros()
    chosen, open_ = np.zeros(n_dim, dtype=bool), np.ones(n_dim, dtype=bool)
    while open_.any():
        few = open_
        if slowly:
            left = links @ open_.astype(np.float64)
            rank = np.argsort(np.lexsort((ties, left, ~open_))).astype(np.float64) + 1.0
            few = open_ & (rank <= max(1.0, _SLOWLY * open_.sum()))
        nearest = _least_neighbour(links, np.where(open_, rank, np.inf))
        new = few & (rank < nearest)
        chosen |= new
        open_ &= ~new & ~(links @ new.astype(np.float64) > 0.0)
    return chosen


def _least_neighbour(links: sparse.csr_array, rank: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least rank among the neighbours of each vertex, inf where there are none."""
    result = np.full(links.shape[0], np.inf)
    some = np.flatnonzero(np.diff(links.indptr))
    if len(some):
        result[some] = np.minimum.reduceat(rank[links.indices], links.indptr[some])
    return result


# --- the fronts of a sparse Cholesky factorisation: dense matrices, one for what is eliminated together ---


class _Symbolic(NamedTuple):
    """What is beside each part."""

    #: Of each coordinate, in an order of elimination; shape (n_dim,).
    place: Ints
    #: First place, coordinates of its own, beside it, and both; shape (n_parts,).
    start: Ints
    n_own: Ints
    n_beside: Ints
    size: Ints
    #: Places, part after part; and where those of a part begin.
    beside: Ints
    first: Ints

    @property
    def codes(self) -> Ints:
        """A number for each part and place beside it, ascending."""
        return np.repeat(np.arange(len(self.n_own)), self.n_beside) * len(self.place) + self.beside


class _Layout(NamedTuple):
    """Where the numbers of fronts are."""

    #: Where the fronts of the parents have what is beside, part after part.
    inner: Ints
    #: See `kernels`; shape (n_rows, n_columns).
    table: Ints
    #: Numbers that are held at once, and in all roots.
    n_held: int
    n_roots: int


#: Part of the coordinates that a global parameter touches, at least.
_GLOBAL = 0.1
#: Multiplications from which on a call of LAPACK takes no longer than loops.
LARGE = 16_000.0


@dataclass(frozen=True, eq=False)
class Fronts:
    """The fronts of a pattern and an order."""

    pattern: Pattern
    parts: Supernodes

    @functools.cached_property
    def _by_depth(self) -> _Symbolic:
        return _symbolic(self.pattern, self.parts)

    @functools.cached_property
    def _both(self) -> tuple[_Symbolic, _Layout]:
        return _layout(self.parts, self._by_depth)

    symbolic = property(lambda self: self._both[0])
    layout = property(lambda self: self._both[1])

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return self.pattern.n_dim

    @functools.cached_property
    def n_products(self) -> float:
        """Multiplications in products of fronts, to a factor."""
        k, m = self._by_depth.n_own.astype(float), self._by_depth.n_beside.astype(float)
        return float(np.sum((k + m) ** 3 - 0.5 * m**3))

    @property
    def n_fronts(self) -> int:
        """Numbers in all fronts."""
        return int(np.sum(self._by_depth.size**2))

    @property
    def n_panels(self) -> int:
        """Numbers in all panels."""
        return int(np.sum(self._by_depth.size * self._by_depth.n_own))

    @property
    def n_entries(self) -> int:
        """Entries of the factor."""
        k = self._by_depth.n_own
        return self.n_panels - int(np.sum(k * (k - 1) // 2))

    @functools.cached_property
    def order(self) -> Ints:
        """The coordinates in the order of elimination."""
        return np.argsort(self.symbolic.place)

    @functools.cached_property
    def _columns(self) -> tuple[Ints, Ints]:
        """Of each place, the part, and where its column begins in the panels."""
        part = self.parts.part[self.order]
        size = self.symbolic.size[part]
        return part, np.cumsum(size) - size

    @functools.cached_property
    def _codes(self) -> Ints:
        return self.symbolic.codes

    def places(self, rows: NDArray[np.integer], cols: NDArray[np.integer]) -> Ints:
        """Return where the panels have entries of a symmetric matrix, (n,); -1 where they have them not."""
        s, (owner, begin) = self.symbolic, self._columns
        i, j = s.place[rows], s.place[cols]
        low, high = np.minimum(i, j), np.maximum(i, j)
        part = owner[low]
        row = high - s.start[part]
        known = row < s.n_own[part]
        outside = np.flatnonzero(~known)
        if len(outside) and len(s.beside):
            of, last = part[outside], len(s.beside) - 1
            codes, first = of * self.n_dim + high[outside], np.minimum(s.first[of], last)
            at = np.clip(first + high[outside] - s.beside[first], 0, last)  # as with a border, no gaps between
            others = np.flatnonzero(self._codes[at] != codes)
            at[others] = np.minimum(np.searchsorted(self._codes, codes[others]), last)
            known[outside] = self._codes[at] == codes
            row[outside] = s.n_own[of] + at - s.first[of]
        return np.where(known, begin[low] + row, -1)

    @functools.cached_property
    def diagonal(self) -> Ints:
        """Where the panels have the diagonal, in the order of the coordinates."""
        every = np.arange(self.n_dim)
        return self.places(every, every)

    @functools.cached_property
    def globals_(self) -> NDArray[np.intp]:
        """Coordinates that touch a large part of the others, and come last."""
        order, part = self.order, self.parts.part
        touched = (np.diff(self.pattern.matrix.indptr) - 1)[order]
        is_local = (touched <= max(_GLOBAL * self.n_dim, _HIGH[0] * touched.mean())) | (part[order] != part[order[-1]])
        n_last = int(np.argmax(is_local[::-1])) if is_local.any() else self.n_dim
        return np.sort(order[self.n_dim - n_last :])

    @functools.cached_property
    def columns(self) -> Ints:
        """The coordinate of the column of each entry of the panels."""
        return np.repeat(self.order, self.symbolic.size[self.parts.part[self.order]])

    @functools.cached_property
    def is_closed(self) -> bool:
        """Whether all that comes after a front up to the root is beside it, but for fronts with nothing beside."""
        own, beside, parent = self.layout.table[:, [0, 1, 6]].T
        return bool((beside == np.where(parent < 0, 0, (own + beside)[parent])).all())

    def in_last(self, n: int) -> NDArray[np.bool_]:
        """Tell which entries of the panels are in one of the last n rows."""
        s, (part, begin) = self.symbolic, self._columns
        end = begin + s.size[part]
        n_last = np.bincount(s.codes[s.beside >= self.n_dim - n] // self.n_dim, minlength=len(s.n_own))
        n_last[part[-1]] = n
        change = np.zeros(self.n_panels + 1, dtype=np.int64)
        np.add.at(change, end - n_last[part], 1)
        np.subtract.at(change, end, 1)
        return np.cumsum(change)[:-1] > 0


def fronts_of(pattern: Pattern) -> Fronts:
    """Return the fronts of a pattern, in the best order that is found."""
    found = [Fronts(pattern, parts) for parts in candidates(pattern.matrix)]
    return min(found, key=lambda fronts: fronts.n_products + 20.0 * fronts.n_fronts)


def _symbolic(pattern: Pattern, parts: Supernodes) -> _Symbolic:
    """Find what is beside each part, from the deepest on."""
    part, depth = parts
    n, n_parts = pattern.n_dim, len(depth)
    touched = np.bincount(np.concatenate([pattern.rows, pattern.cols]), minlength=n)
    sequence = np.lexsort((touched, part, -depth[part]))  # within parts, those that touch most come last
    place = np.empty(n, dtype=np.int64)
    place[sequence] = np.arange(n)
    n_own = np.bincount(part, minlength=n_parts)
    start = np.full(n_parts, n, dtype=np.int64)
    np.minimum.at(start, part, place)
    i, j = place[pattern.rows], place[pattern.cols]
    low, high = np.minimum(i, j), np.maximum(i, j)
    owner = part[sequence]  # by place
    across = owner[low] != owner[high]
    codes = owner[low[across]] * n + high[across]
    level = depth[codes // n]
    n_depths = int(depth.max()) + 1
    waiting: list[list[Ints]] = [[] for _ in range(n_depths)]
    for d, some in _by_key(level, codes):
        waiting[d].append(some)
    done = []
    for d in range(n_depths - 1, -1, -1):
        if not waiting[d]:
            continue
        here = np.sort(np.concatenate(waiting[d]))
        here = here[np.diff(here, prepend=-1) > 0]
        done.append(here)
        of, at = here // n, here % n
        first = np.flatnonzero(np.diff(of, prepend=-1))
        parent = np.repeat(owner[at[first]], np.diff(np.append(first, len(of))))
        beyond = owner[at] != parent
        passed = parent[beyond] * n + at[beyond]
        for e, some in _by_key(depth[parent[beyond]], passed):
            waiting[e].append(some)
        waiting[d] = []
    every = np.sort(np.concatenate([*done, np.empty(0, dtype=np.int64)]))
    n_beside = np.bincount(every // n, minlength=n_parts)
    first = np.cumsum(n_beside) - n_beside
    return _Symbolic(place, start, n_own, n_beside, n_own + n_beside, every % n, first)


def _by_key(key: Ints, values: Ints) -> list[tuple[int, Ints]]:
    """Return the values of each key."""
    if not len(key):
        return []
    sequence = np.argsort(key, kind="stable")
    ends = np.flatnonzero(np.diff(key[sequence])) + 1
    return [(int(key[some[0]]), values[some]) for some in np.split(sequence, ends)]


def _layout(parts: Supernodes, s: _Symbolic) -> tuple[_Symbolic, _Layout]:
    """Lay out all fronts, and put them in their order."""
    n, n_parts, every = len(s.place), len(parts.depth), np.arange(len(parts.depth))
    owner = np.empty(n, dtype=np.int64)
    owner[s.place] = parts.part
    parent = np.full(n_parts, n_parts)  # one above all
    parent[s.n_beside > 0] = owner[s.beside[s.first[s.n_beside > 0]]]
    above = np.repeat(parent, s.n_beside)
    inner = s.beside - s.start[above]
    outside = np.flatnonzero(inner >= s.n_own[above])
    of = above[outside]
    inner[outside] = s.n_own[of] + np.searchsorted(s.codes, of * n + s.beside[outside]) - s.first[of]
    # Leaves come first; those with the same beside them have the same sum of arbitrary numbers.
    is_leaf = np.bincount(parent, minlength=n_parts + 1)[:-1] == 0
    mark = np.zeros(n_parts, dtype=np.int64)
    np.add.at(mark, np.repeat(every, s.n_beside), np.random.default_rng(0).integers(2**62, size=n)[s.beside])
    alike = np.where(is_leaf, [s.n_own, s.n_beside, mark], [np.zeros_like(every), np.zeros_like(every), every])
    siblings = np.lexsort((s.start, *alike, ~is_leaf, parent))
    n_below, before, held = np.ones(n_parts + 1, dtype=np.int64), *np.zeros((2, n_parts + 1), dtype=np.int64)
    square = np.append(s.size**2, 0)
    levels = [which for _, which in _by_key(parts.depth, every)]
    for which in reversed(levels):
        np.add.at(n_below, parent[which], n_below[which])
    total = np.cumsum(n_below[siblings]) - n_below[siblings]
    before[siblings] = total - total[np.searchsorted(parent[siblings], parent[siblings])]
    for which in levels:
        before[which] += before[parent[which]]
        held[which] = held[parent[which]] + square[parent[which]]
    sequence = np.argsort((before + n_below)[:-1])
    same = np.diff(np.vstack([parent, is_leaf, alike])[:, sequence], axis=1) == 0
    begins = np.append(True, ~same.all(axis=0))
    row = np.empty(n_parts + 1, dtype=np.int64)
    row[sequence], row[-1] = np.cumsum(begins) - 1, -1
    head = sequence[begins]
    start, panel = np.empty_like(every), np.empty_like(every)
    for result, size in ((start, s.n_own), (panel, s.n_own * s.size)):
        result[sequence] = np.cumsum(size[sequence]) - size[sequence]
    opens = np.zeros(len(head), dtype=bool)
    opens[np.unique(parent[head], return_index=True)[1]] = True
    roots = s.n_beside[head] ** 2
    columns = (
        s.n_own,
        s.n_beside,
        np.bincount(row[:-1])[row[:-1]],
        panel,
        start,
        s.first,
        row[parent],
        is_leaf,
        held[:-1],
    )
    table = np.column_stack([*(column[head] for column in columns), opens, np.cumsum(roots) - roots]).astype(np.int64)
    moved = (start - s.start)[owner]
    ordered = s._replace(place=s.place + moved[s.place], start=start, beside=s.beside + moved[s.beside])
    return ordered, _Layout(inner, table, int((held + square).max()), int(roots.sum()))
