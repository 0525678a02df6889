"""The fronts of a sparse Cholesky factorisation: dense matrices that are handled together where they have one size.

A *front* is the coordinates that are eliminated together, its *own*, and those *beside* them that they touch by then,
which come later [1]_. The factor has a dense panel for each: all rows of the front, its own columns. What an
elimination changes beside is added to the front of the *parent*, the first that has any of these as its own.

Fronts of one depth and about one size form a *stack*; smaller ones are filled up with rows and columns of an identity.

References
----------
.. [1] J. W. H. Liu (1992). The multifrontal method for sparse matrix solution: theory and practice. SIAM Review 34(1).
   https://doi.org/10.1137/1034004
"""

import functools

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.families.matrices.sparse import order
from pymc_ngvi.families.matrices.sparse.order import Ints, Supernodes

#: Sizes to which fronts are filled up, as ratios to the next.
_RATIO = 1.25


class FrontStack(NamedTuple):
    """Fronts of one depth and size."""

    #: Places in the order of elimination; ``n_dim`` where filled up; shape (n_fronts, k) and (n_fronts, m).
    own: Ints
    beside: Ints
    #: Where its fronts begin among all, each (k + m)^2.
    at: int
    #: Where its panels begin among all, each (k + m) x k.
    panels: int
    #: Where the fronts, raveled, have the diagonal of filled-up columns of their own.
    filled: Ints
    #: Rows and columns of the lower triangle of an (m, m) matrix.
    lower: tuple[Ints, Ints]
    #: Where these are in the front of the parent, among all fronts; shape (n_fronts / n_alike, n_lower).
    to: Ints
    #: So many fronts, one after the other, have the same beside them: what they change there is added up first.
    n_alike: int = 1
    #: Whether no front changes any of these.
    is_leaf: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of fronts, coordinates of their own, and beside them."""
        return len(self.own), self.own.shape[1], self.beside.shape[1]

    @property
    def of_fronts(self) -> slice:
        """Where its fronts are among all."""
        n, k, m = self.shape
        return slice(self.at, self.at + n * (k + m) ** 2)

    @property
    def of_panels(self) -> slice:
        """Where its panels are among all."""
        n, k, m = self.shape
        return slice(self.panels, self.panels + n * (k + m) * k)


class _Symbolic(NamedTuple):
    """What is beside each part."""

    #: Of each coordinate, in the order of elimination; shape (n_dim,).
    place: Ints
    #: First place, coordinates of its own, and beside it; shape (n_parts,).
    start: Ints
    n_own: Ints
    n_beside: Ints
    #: Places, part after part.
    beside: Ints

    @property
    def flops(self) -> float:
        """Cost of a factorisation, and of the inverse on its entries, to a factor."""
        size = (self.n_own + self.n_beside).astype(float)
        return _products(self.n_own, self.n_beside) + 20.0 * float(np.sum(size**2))


class _Layout(NamedTuple):
    """Where the fronts of all parts are."""

    #: Coordinates of its own and beside, filled up; shape (n_parts,).
    k: Ints
    m: Ints
    #: Where its front begins among all, and its panel; shape (n_parts,).
    at: Ints
    panel: Ints
    #: -1 where nothing is beside; shape (n_parts,).
    parent: Ints
    #: Where the fronts of the parents have what is beside, part after part.
    inner: Ints
    #: Where that begins; shape (n_parts,).
    first: Ints
    #: Parts of one depth and size, those first that are eliminated first.
    stacks: list[Ints]


@dataclass(frozen=True, eq=False)
class Fronts:
    """The fronts of a pattern and an order."""

    pattern: Pattern
    parts: Supernodes

    @functools.cached_property
    def symbolic(self) -> _Symbolic:
        """What is beside each part."""
        return _symbolic(self.pattern, self.parts)

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return self.pattern.n_dim

    @property
    def place(self) -> Ints:
        """Places of the coordinates in the order of elimination."""
        return self.symbolic.place

    @property
    def flops(self) -> float:
        """Cost of a factorisation, and of the inverse on its entries, to a factor."""
        return self.symbolic.flops

    @property
    def n_products(self) -> float:
        """Multiplications in products of fronts as they are filled up, to a factor."""
        return _products(self._layout.k, self._layout.m)

    @property
    def n_stacks(self) -> int:
        """Number of stacks."""
        return len(self._layout.stacks)

    @property
    def n_entries(self) -> int:
        """Entries of the factor."""
        k, m = self.symbolic.n_own, self.symbolic.n_beside
        return int(np.sum(k * (k + 1) // 2 + k * m))

    @functools.cached_property
    def order(self) -> Ints:
        """The coordinates in the order of elimination."""
        return np.argsort(self.symbolic.place)

    @functools.cached_property
    def _layout(self) -> _Layout:
        return _layout(self.parts, self.symbolic)

    @functools.cached_property
    def stacks(self) -> list[FrontStack]:
        """All fronts, those first that are eliminated first."""
        return [_stack(which, self.symbolic, self._layout) for which in self._layout.stacks]

    @property
    def n_panels(self) -> int:
        """Numbers in all panels."""
        return int(np.sum((self._layout.k + self._layout.m) * self._layout.k))

    @property
    def n_fronts(self) -> int:
        """Numbers in all fronts."""
        return int(np.sum((self._layout.k + self._layout.m) ** 2))

    @functools.cached_property
    def _beside_codes(self) -> Ints:
        s = self.symbolic
        return np.repeat(np.arange(len(s.n_own)), s.n_beside) * self.n_dim + s.beside

    def places(self, rows: NDArray[np.integer], cols: NDArray[np.integer]) -> Ints:
        """Return where the panels have entries of a symmetric matrix, (n,); -1 where they have them not."""
        s, panel, filled_own = self.symbolic, self._layout.panel, self._layout.k
        i, j = s.place[rows], s.place[cols]
        low, high = np.minimum(i, j), np.maximum(i, j)
        part = self._part_of_place[low]
        row = high - s.start[part]
        outside = np.flatnonzero(row >= s.n_own[part])
        known = np.ones(len(low), dtype=bool)
        if len(outside):
            of = part[outside]
            codes = of * self.n_dim + high[outside]
            at = np.searchsorted(self._beside_codes, codes)
            at = np.minimum(at, max(len(self._beside_codes) - 1, 0))
            known[outside] = self._beside_codes[at] == codes if len(self._beside_codes) else False
            row[outside] = filled_own[of] + at - self._layout.first[of]
        return np.where(known, panel[part] + row * filled_own[part] + low - s.start[part], -1)

    @functools.cached_property
    def _part_of_place(self) -> Ints:
        s = self.symbolic
        result = np.empty(self.n_dim, dtype=np.int64)
        result[s.place] = self.parts.part
        return result

    @functools.cached_property
    def diagonal(self) -> Ints:
        """Where the panels have the diagonal, in the order of the coordinates."""
        every = np.arange(self.n_dim)
        return self.places(every, every)

    @functools.cached_property
    def filled_diagonal(self) -> Ints:
        """Where the panels have the diagonal of columns that were filled up."""
        parts = []
        for stack in self.stacks:
            _, k, m = stack.shape
            of, col = np.nonzero(stack.own == self.n_dim)
            parts.append(stack.panels + of * (k + m) * k + col * (k + 1))
        return np.concatenate(parts)

    @functools.cached_property
    def used(self) -> NDArray[np.bool_]:
        """Which entries of the panels are in the lower triangle, and were not filled up."""
        parts = []
        for stack in self.stacks:
            _, k, m = stack.shape
            row = np.concatenate([stack.own, stack.beside], axis=1) < self.n_dim
            col = stack.own < self.n_dim
            below = np.arange(k + m)[:, None] >= np.arange(k)
            parts.append((row[:, :, None] & col[:, None, :] & below).ravel())
        return np.concatenate(parts)


def _products(own: Ints, beside: Ints) -> float:
    """Return what products of matrices cost: a factorisation, and the inverse on its entries."""
    k, m = own.astype(float), beside.astype(float)
    return float(np.sum(k**3 + 3.0 * k**2 * m + 3.0 * k * m**2 + 0.5 * m**3))


def fronts_of(pattern: Pattern) -> Fronts:
    """Return the fronts of a pattern, in the best order that is found."""
    found = [Fronts(pattern, parts) for parts in order.candidates(pattern.matrix)]
    return min(found, key=lambda fronts: fronts.flops)


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
        here = np.unique(np.concatenate(waiting[d]))
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
    return _Symbolic(place, start, n_own, np.bincount(every // n, minlength=n_parts), every % n)


def _by_key(key: Ints, values: Ints) -> list[tuple[int, Ints]]:
    """Return the values of each key."""
    if not len(key):
        return []
    sequence = np.argsort(key, kind="stable")
    ends = np.flatnonzero(np.diff(key[sequence])) + 1
    return [(int(key[some[0]]), values[some]) for some in np.split(sequence, ends)]


def _filled_up(size: Ints) -> Ints:
    """Return sizes of which there are few."""
    steps = [0]
    while steps[-1] < size.max(initial=0):
        steps.append(max(steps[-1] + 1, int(steps[-1] * _RATIO)))
    return np.array(steps)[np.searchsorted(steps, size)]


def _layout(parts: Supernodes, s: _Symbolic) -> _Layout:
    """Lay out all fronts."""
    n, depth = len(s.place), parts.depth
    k, m = _filled_up(s.n_own), _filled_up(s.n_beside)
    sequence = np.lexsort((m, k, -depth))
    new = np.flatnonzero(np.any([np.diff(x[sequence], prepend=-1) != 0 for x in (k, m, depth)], axis=0))
    for filled, size in ((k, s.n_own), (m, s.n_beside)):  # as the largest of a stack, and no further
        filled[sequence] = np.repeat(np.maximum.reduceat(size[sequence], new), np.diff(np.append(new, len(sequence))))
    first = np.cumsum(s.n_beside) - s.n_beside
    owner = np.empty(n, dtype=np.int64)
    owner[s.place] = parts.part
    parent = np.full(len(depth), -1, dtype=np.int64)
    some = s.n_beside > 0
    parent[some] = owner[s.beside[first[some]]]
    above = np.repeat(parent, s.n_beside)
    inner = s.beside - s.start[above]
    outside = np.flatnonzero(inner >= s.n_own[above])
    of = above[outside]
    codes = np.repeat(np.arange(len(depth)), s.n_beside) * n + s.beside
    inner[outside] = k[of] + np.searchsorted(codes, of * n + s.beside[outside]) - first[of]
    at, panel = _begin((k + m) ** 2, sequence), _begin((k + m) * k, sequence)
    return _Layout(k, m, at, panel, parent, inner, first, np.split(sequence, new[1:]))


def _begin(size: Ints, sequence: Ints) -> Ints:
    """Return where each of some arrays begins, one after the other in a sequence."""
    result = np.empty(len(size), dtype=np.int64)
    result[sequence] = np.cumsum(size[sequence]) - size[sequence]
    return result


def _stack(which: Ints, s: _Symbolic, layout: _Layout) -> FrontStack:
    """Return the stack of some parts."""
    n = len(s.place)
    k, m = int(layout.k[which[0]]), int(layout.m[which[0]])
    column, row = np.arange(k), np.arange(m)
    own = s.start[which][:, None] + column
    extra = column >= s.n_own[which][:, None]
    own[extra] = n
    of, col = np.nonzero(extra)
    filled = of * (k + m) ** 2 + col * (k + m + 1)
    lower = np.tril_indices(m)
    begin = int(layout.at[which[0]]), int(layout.panel[which[0]])
    is_leaf = not np.isin(which, layout.parent).any()
    if not m:
        nothing = np.empty((len(which), 0), dtype=np.int64)
        return FrontStack(own, nothing, *begin, filled, lower, nothing, is_leaf=is_leaf)
    inside = row < s.n_beside[which][:, None]
    index = np.where(inside, layout.first[which][:, None] + row, 0)
    beside, there = np.where(inside, s.beside[index], n), np.where(inside, layout.inner[index], 0)
    big = layout.parent[which]
    wide = (layout.k + layout.m)[big]
    to = layout.at[big][:, None] + there[:, lower[0]] * wide[:, None] + there[:, lower[1]]
    n_alike = len(which) if (beside == beside[0]).all() else 1
    return FrontStack(own, beside, *begin, filled, lower, to[::n_alike], n_alike, is_leaf)


# --- what factorisations ask of fronts, whether these are of one matrix or of many as one ---


class AnyFronts(Protocol):
    """Fronts as factorisations see them: those of one matrix, or of many as one; see `Fronts` and `RepeatedFronts`."""

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""

    @property
    def n_panels(self) -> int:
        """Numbers in all panels."""

    @property
    def n_fronts(self) -> int:
        """Numbers in all fronts."""

    @property
    def place(self) -> Ints:
        """Places of the coordinates in the order of elimination."""

    @property
    def order(self) -> Ints:
        """The coordinates in the order of elimination."""

    @property
    def stacks(self) -> list[FrontStack]:
        """All fronts, those first that are eliminated first."""

    @property
    def diagonal(self) -> Ints:
        """Where the panels have the diagonal, in the order of the coordinates."""

    @property
    def used(self) -> NDArray[np.bool_]:
        """Which entries of the panels are in the lower triangle, and were not filled up."""
