"""Elimination orders of sparse matrices and their fronts: columns eliminated together, and where entries are."""

import functools

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import splu
from threadpoolctl import ThreadpoolController

from pymc_ngvi.core import linalg
from pymc_ngvi.core.memory import no_collections
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sizes import LARGE
from pymc_ngvi.core.types import Array, Bools, Indices

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
    #: A number for each part and place beside it, ascending.
    codes: Ints


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


@dataclass(frozen=True, eq=False)
class Fronts:
    """The fronts of a pattern and an order."""

    pattern: Pattern
    parts: Supernodes

    @classmethod
    def of(cls, pattern: Pattern) -> Self:
        """Return the fronts of a pattern in an order that fills in little."""
        return cls(pattern, supernodes(pattern))

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
            others = np.flatnonzero(s.codes[at] != codes)
            at[others] = np.minimum(np.searchsorted(s.codes, codes[others]), last)
            known[outside] = s.codes[at] == codes
            row[outside] = s.n_own[of] + at - s.first[of]
        return np.where(known, begin[low] + row, -1)

    @functools.cached_property
    def diagonal(self) -> Ints:
        """Where the panels have the diagonal, in the order of the coordinates."""
        every = np.arange(self.n_dim)
        return self.places(every, every)

    @functools.cached_property
    def globals_(self) -> Indices:
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
    return _Symbolic(place, start, n_own, n_beside, n_own + n_beside, every % n, first, every)


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
    across = moved[s.beside]
    ordered = s._replace(place=s.place + moved[s.place], start=start, beside=s.beside + across, codes=s.codes + across)
    return ordered, _Layout(inner, table, int((held + square).max()), int(roots.sum()))


# --- the Cholesky factor of a sparse matrix, solutions, the inverse on its entries, and the metric of Gaussians ---
#
# A precision S = L L^T whose pattern is that of L + L^T has no entry that its factor would fill in. On such matrices,
# :math:`\mathrm{tr}(S^{-1} E S^{-1} E)`, the Fisher metric of a Gaussian, is a sum of squares of as many numbers as L
# has [1]_: with :math:`S_N = L_N L_N^T` what is left of a front's own block when its turn comes, B what is beside,
# :math:`G = L_{BN} L_N^{-1}`, :math:`V = S^{-1}`, and E carried along as the elimination goes,
#
# .. math:: \sum_N |L_N^{-1} E_N L_N^{-T}|^2 + 2 |R^T (E_B - G E_N) L_N^{-T}|^2, \qquad R R^T = V_{BB}.
#
# References
# ----------
# .. [1] M. S. Andersen, J. Dahl and L. Vandenberghe (2013). Logarithmic barriers for sparse matrix cones. Optimization
#    Methods and Software 28(3). https://doi.org/10.1080/10556788.2012.684353


_blas = functools.cache(ThreadpoolController)


def _run(kernel: str, fronts: Fronts, *args: Any) -> Any:
    """Run what Numba compiles; BLAS keeps to one thread: fronts are small, and to wake others takes longer than these.

    To import Numba takes half a second, which small dense models need not wait for.
    """
    with no_collections(), _blas().limit(limits=1, user_api="blas") if fronts.n_products > LARGE else nullcontext():
        from pymc_ngvi.families import kernels

        return getattr(kernels, kernel)(*args)


@dataclass(frozen=True, eq=False)
class SparseCholesky:
    """The factor L of a sparse matrix, or of many with one pattern, in the order of elimination."""

    fronts: Fronts
    #: The columns of L; shape (n_panels,), or (n, n_panels): what is said of one holds of each of many.
    panels: Array

    @classmethod
    def of(cls, fronts: Fronts, matrix: Array, terms: Array | None = None) -> "SparseCholesky | None":
        """Return the factor of a matrix, or that of each of many; None where one of them is not positive definite."""
        factor, found = cls.each(fronts, matrix, terms)
        return factor if found.all() else None

    @classmethod
    def each(cls, fronts: Fronts, matrix: Array, terms: Array | None = None) -> tuple["SparseCholesky", Bools]:
        """Return what became of a matrix, or of each of many, and which of them are positive definite."""
        sizes = np.zeros((0, 0)) if terms is None else _rows(terms)
        given = fronts.layout.table, fronts.layout.inner, fronts.layout.n_held, fronts.diagonal
        panels, found = _run("factor", fronts, *given, _rows(matrix), sizes, linalg.LEAST_PIVOT)
        return cls(fronts, panels.reshape(matrix.shape)), found

    def __getitem__(self, which: Any) -> "SparseCholesky":
        """Return some of many."""
        return SparseCholesky(self.fronts, self.panels[which])

    def log_det(self) -> Any:
        """Return the log determinant of L."""
        return np.log(self.panels[..., self.fronts.diagonal]).sum(axis=-1)

    # --- vectors are columns, (n_dim, n_vectors), in the order of the coordinates ---

    def solve(self, vectors: Array, *, transposed: bool = False) -> Array:
        """Return L^-1, or L^-T, times vectors."""
        return self._multiplied(vectors, True, transposed)

    def times(self, vectors: Array, *, transposed: bool = False) -> Array:
        """Return L, or L^T, times vectors."""
        return self._multiplied(vectors, False, transposed)

    def _multiplied(self, vectors: Array, inverse: bool, transposed: bool) -> Array:
        panels, s = _rows(self.panels), self.fronts.symbolic
        x = vectors.take(self.fronts.order, axis=-2).astype(np.float64, copy=False).reshape(len(panels), -1)
        given = self.fronts.layout.table, s.beside, panels, x
        _run("multiply", self.fronts, *given, vectors.shape[-1], inverse, transposed)
        return x.reshape(vectors.shape).take(s.place, axis=-2)

    # --- matrices in the form of panels ---

    def _on_fronts(self, kernel: str, *matrices: Array) -> Any:
        """Return what becomes of matrices."""
        layout = self.fronts.layout
        numbers = (_rows(matrix) for matrix in (self.panels, *matrices))
        found = _run(kernel, self.fronts, layout.table, layout.inner, layout.n_held, *numbers)
        return found.reshape(self.panels.shape)

    @functools.cached_property
    def matrix(self) -> Array:
        """The lower triangle of L L^T."""
        identity = np.zeros_like(self.panels)
        identity[..., self.fronts.diagonal] = 1.0
        return self.unwhitened(identity)

    @functools.cached_property
    def inverse(self) -> Array:
        """The inverse of L L^T where the lower triangle can differ from 0."""
        return self._on_fronts("inverse")

    def covariances(self, rows: Ints, cols: Ints, at: Ints) -> Array:
        """Return entries of the inverse, which are at these places of the panels."""
        return self.inverse[at]

    def product_trace(self, matrix: Array) -> float:
        """Return the trace of the inverse times a symmetric matrix, as panels."""
        at = self.fronts.diagonal
        return float(2.0 * (self.inverse @ matrix) - self.inverse[at] @ matrix[at])

    @functools.cached_property
    def _roots(self) -> Array:
        """Of each front, the root of the inverse beside."""
        layout = self.fronts.layout
        given = layout.table, layout.inner, layout.n_held, layout.n_roots
        roots, found = _run("roots", self.fronts, *given, _rows(self.inverse))
        if not found.all():
            raise np.linalg.LinAlgError("The precision is singular to rounding.")
        return roots

    def whitened(self, matrix: Array) -> Array:
        """Return a vector whose inner products are tr(V E V F), V the inverse, for symmetric matrices as panels."""
        return self._on_fronts("whiten", self._roots, matrix)

    def unwhitened(self, vector: Array) -> Array:
        """Return the matrix of a vector: the inverse of `whitened`."""
        return self._on_fronts("unwhiten", self._roots, vector)


def _rows(numbers: Array) -> Array:
    """Return numbers of one matrix as those of each of one."""
    return np.require(np.atleast_2d(numbers), np.float64, ("C", "W"))  # other arrays would be compiled for anew
