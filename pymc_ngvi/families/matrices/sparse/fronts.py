"""Elimination orders of sparse matrices and their fronts: columns eliminated together, and where entries are."""

import functools

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import splu

from pymc_ngvi.core.pattern import Pattern

Ints = NDArray[np.int64]

#: Multiples of the mean degree beyond which coordinates come last.
_HIGH = 4.0
#: Part of the rows of a front that a column has, from which on it joins the front, zeros and all; of a leaf, all.
_ALIKE = 0.5


class Supernodes(NamedTuple):
    """Coordinates that are eliminated together."""

    #: Of each coordinate; shape (n_dim,).
    part: Ints
    #: The deepest are eliminated first; those of one depth touch each other nowhere by then; shape (n_parts,).
    depth: Ints


def supernodes(pattern: Pattern) -> Supernodes:
    """Return coordinates in an order of minimum degree, those together whose columns of the factor are about the same.

    Those that touch many others come last, as they would anyway: the search for an order takes long among them.
    """
    degree = np.diff(pattern.matrix.indptr)
    is_last = degree > _HIGH * degree.mean()
    inner, n_last = np.flatnonzero(~is_last), int(is_last.sum())
    depth, size, part = [0] * (n_last > 0), [n_last] * (n_last > 0), np.zeros(len(inner), dtype=np.int64)
    # Any numbers will do that need no pivots.
    matrix = pattern.matrix[inner][:, inner] + sparse.diags_array(degree[inner] + 1.0)
    options = {"SymmetricMode": True}
    factor = splu(sparse.csc_array(matrix), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=options)
    lower = sparse.csc_array(factor.L)
    lower.sort_indices()
    count = np.diff(lower.indptr)
    parent = np.full(len(inner), -1)
    parent[count > 1] = lower.indices[lower.indptr[:-1][count > 1] + 1]
    has_children = np.isin(np.arange(len(inner)), parent)
    for j in range(len(inner) - 1, -1, -1):
        above, n_rows = part[parent[j]], count[j] + n_last
        if parent[j] >= 0 and n_rows >= (_ALIKE if has_children[j] else 1.0) * (size[above] + 1):
            part[j] = above
            size[above] += 1
        else:
            part[j] = len(depth)
            depth.append(depth[above] + 1 if parent[j] >= 0 else int(n_last > 0))
            size.append(n_rows)
    result = np.zeros(len(degree), dtype=np.int64)
    result[inner] = part[factor.perm_c]
    return Supernodes(result, np.array(depth, dtype=np.int64))


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
        is_local = (touched <= max(_GLOBAL * self.n_dim, _HIGH * touched.mean())) | (part[order] != part[order[-1]])
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


def fronts_of(pattern: Pattern) -> Fronts:
    """Return the fronts of a pattern in an order that fills in little."""
    return Fronts(pattern, supernodes(pattern))


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
