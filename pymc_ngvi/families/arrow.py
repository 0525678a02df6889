"""Arrow matrices: block-diagonal but for a border that all blocks may touch, in packed form.

Coordinates are *local*, in blocks that touch each other in no entry, or in the *border*; the border comes last. With
these blocks, lower-triangular arrow matrices are closed under products and inverses, and so is a congruence by one of
a symmetric arrow matrix: no operation fills in more entries, and none loops over blocks. Blocks of one size are stacked
(`BlockStructure`).

A packed matrix is a vector: the blocks; then the rows of the local coordinates in the columns of the border,
(n_local, n_border), which stand for both triangles of a symmetric matrix and for the lower one of a triangular matrix;
then the corner, (n_border, n_border).
"""

import functools

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from numpy.typing import ArrayLike, NDArray

from pymc_ngvi.core import linalg
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.families import stacks
from pymc_ngvi.families.block_structure import BlockStructure

#: Pivots this many times the least one are taken for as large as the singular values, which are smaller.
_CLEAR = 1e3


class Parts(NamedTuple):
    """An arrow matrix, or one of its factors, as arrays.

    Parameters
    ----------
    blocks : list of ndarray, shape (n_blocks, k, k) for each size k
    border : ndarray, shape (n_local, n_border)
        Rows in the order of the blocks.
    corner : ndarray, shape (n_border, n_border)
    """

    blocks: list[Array]
    border: Array
    corner: Array


@stored("structure.arrow", content=("order", "sizes"), make="from_arrays")
@dataclass(frozen=True, eq=False)
class ArrowStructure:
    """Which coordinates are in the border, and the blocks of the others.

    Parameters
    ----------
    locals_ : ndarray of int, shape (n_local,)
        Local coordinates, ascending.
    border : ndarray of int, shape (n_border,)
        The others; lower triangles are those of this order.
    blocks : BlockStructure or None
        Of positions in ``locals_``; None where there are none.
    """

    locals_: NDArray[np.intp]
    border: NDArray[np.intp]
    blocks: BlockStructure | None

    @classmethod
    def of(cls, labels: ArrayLike) -> "ArrowStructure":
        """Return the structure with a block for each label, (n_dim,); negative ones mark the border."""
        labels = np.asarray(labels)
        inside = np.flatnonzero(labels >= 0)
        blocks = BlockStructure(labels[inside]) if len(inside) else None
        return cls(inside, np.flatnonzero(labels < 0), blocks)

    @classmethod
    def from_arrays(cls, order: ArrayLike, sizes: ArrayLike) -> "ArrowStructure":
        """Return the structure with these `order` and `sizes`, of any numeric type; the last few are kept.

        Raises
        ------
        ValueError
            If ``order`` is no permutation, or ``sizes`` are not positive or add up to more than its length.
        """
        return _structure(np.asarray(order).astype(np.intp).tobytes(), np.asarray(sizes).astype(np.intp).tobytes())

    def labels(self) -> NDArray[np.intp]:
        """Return the block of each coordinate, (n_dim,); the border is one block, too."""
        result = np.zeros(self.n_dim, dtype=np.intp)
        if self.blocks is not None:
            result[self.locals_] = 1 + self.blocks.labels
        return result

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return len(self.locals_) + len(self.border)

    @property
    def n_local(self) -> int:
        """Number of local coordinates."""
        return len(self.locals_)

    @property
    def n_border(self) -> int:
        """Number of coordinates in the border."""
        return len(self.border)

    @functools.cached_property
    def order(self) -> NDArray[np.intp]:
        """Coordinates, (n_dim,): block after block, then the border."""
        local = self.locals_ if self.blocks is None else self.locals_[self.blocks.order]
        return np.concatenate([local, self.border])

    @functools.cached_property
    def place(self) -> NDArray[np.intp]:
        """Of each coordinate: where it is in `order`."""
        return np.argsort(self.order)

    @property
    def sizes(self) -> NDArray[np.intp]:
        """Of the blocks, ascending."""
        return np.empty(0, dtype=np.intp) if self.blocks is None else self.blocks.sizes

    @property
    def _n_in_blocks(self) -> int:
        return 0 if self.blocks is None else self.blocks.n_entries

    @property
    def n_entries(self) -> int:
        """Length of a packed matrix."""
        return self._n_in_blocks + self.n_local * self.n_border + self.n_border**2

    @property
    def n_lower(self) -> int:
        """Entries in the lower triangle."""
        blocks = (self._n_in_blocks + self.n_local) // 2
        return blocks + self.n_local * self.n_border + self.n_border * (self.n_border + 1) // 2

    # --- packing --------------------------------------------------------------------------------------------------

    def unpack(self, packed: Array) -> Parts:
        """Return the parts of a packed matrix, as views."""
        n, g = self.n_local, self.n_border
        start = self._n_in_blocks
        blocks = [] if self.blocks is None else self.blocks.unpack(packed[:start])
        border = packed[start : start + n * g].reshape(n, g)
        return Parts(blocks, border, packed[start + n * g :].reshape(g, g))

    def pack(self, parts: Parts) -> Array:
        """Return the packed matrix with these parts: the inverse of `unpack`."""
        return np.concatenate([*(b.ravel() for b in parts.blocks), parts.border.ravel(), parts.corner.ravel()])

    @functools.cached_property
    def diagonal(self) -> NDArray[np.intp]:
        """Of each coordinate: the place of its diagonal entry in a packed matrix."""
        result = np.empty(self.n_dim, dtype=np.intp)
        if self.blocks is not None:
            result[self.locals_] = self.blocks.diagonal
        start = self._n_in_blocks + self.n_local * self.n_border
        result[self.border] = start + np.arange(self.n_border) * (self.n_border + 1)
        return result

    @functools.cached_property
    def in_border(self) -> slice:
        """Entries of a packed matrix that stand for two of a symmetric one."""
        return slice(self._n_in_blocks, self._n_in_blocks + self.n_local * self.n_border)

    @functools.cached_property
    def columns(self) -> NDArray[np.intp]:
        """Of each entry of a packed lower-triangular matrix: the coordinate of its column."""
        inside = [] if self.blocks is None else [self.locals_[self.blocks.columns]]
        beside = np.repeat(self.order[: self.n_local], self.n_border)
        return np.concatenate([*inside, beside, np.tile(self.border, self.n_border)])

    @functools.cached_property
    def pattern(self) -> Pattern:
        """Entries of a symmetric matrix with this structure."""
        n_local, places = self.n_local, np.arange(self.n_dim)
        rows, cols = [], []
        for stack in () if self.blocks is None else self.blocks.stacks:
            lines = places[stack.where].reshape(stack.n_blocks, stack.size)
            i, j = np.tril_indices(stack.size)
            rows.append(lines[:, i].ravel())
            cols.append(lines[:, j].ravel())
        rows.append(np.repeat(places[n_local:], places[n_local:] + 1))
        cols.append(np.concatenate([np.empty(0, dtype=np.intp), *(places[: i + 1] for i in places[n_local:])]))
        i, j = self.order[np.concatenate(rows)], self.order[np.concatenate(cols)]
        codes = np.sort(np.maximum(i, j) * self.n_dim + np.minimum(i, j))
        return Pattern(codes // self.n_dim, codes % self.n_dim, self.n_dim)

    def in_blocks(self, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return where entries are in the packed blocks; rows and columns are places of local coordinates in `order`.

        Raises
        ------
        ValueError
            If one is between two blocks.
        """
        sizes = np.repeat(self.sizes, self.sizes)
        firsts = np.repeat(np.cumsum(self.sizes) - self.sizes, self.sizes)
        starts = np.repeat(np.cumsum(self.sizes**2) - self.sizes**2, self.sizes)
        if not np.array_equal(firsts[rows], firsts[cols]):
            raise ValueError("The pattern has an entry between two blocks of the structure.")
        places: NDArray[np.intp] = starts[rows] + (rows - firsts[rows]) * sizes[rows] + (cols - firsts[rows])
        return places

    @functools.cached_property
    def _maps(self) -> dict[int, tuple[Pattern, NDArray[np.intp], NDArray[np.intp]]]:
        return {}

    def from_values(self, pattern: Pattern, values: Array) -> Array:
        """Return the packed symmetric matrix with these values in the entries of a pattern.

        Raises
        ------
        ValueError
            If the pattern has an entry between two blocks.
        """
        known = self._maps.get(id(pattern))
        if known is None or known[0] is not pattern:
            self._maps.clear()
            known = self._maps[id(pattern)] = (pattern, *self._places(pattern))
        packed = np.zeros(self.n_entries)
        packed[known[1]] = values[known[2]]
        return packed

    def _places(self, pattern: Pattern) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return places in a packed matrix, and for each the entry of the pattern that belongs there."""
        n, g, start = self.n_local, self.n_border, self._n_in_blocks
        later, earlier = self.place[pattern.rows], self.place[pattern.cols]
        later, earlier = np.maximum(later, earlier), np.minimum(later, earlier)
        entry = np.arange(pattern.n_entries)
        inside, corner = later < n, earlier >= n
        beside = ~inside & ~corner
        places, sources = [], []
        for i, j in ((later[inside], earlier[inside]), (earlier[inside], later[inside])):
            places.append(self.in_blocks(i, j))
            sources.append(entry[inside])
        places.append(start + earlier[beside] * g + (later[beside] - n))
        sources.append(entry[beside])
        a, b = later[corner] - n, earlier[corner] - n
        for i, j in ((a, b), (b, a)):
            places.append(start + n * g + i * g + j)
            sources.append(entry[corner])
        return np.concatenate(places), np.concatenate(sources)

    def split(self, vectors: Array) -> tuple[Array, Array]:
        """Return the parts of vectors, (..., n_dim), as columns: (n_local, n_vectors), (n_border, n_vectors)."""
        columns = vectors.reshape(-1, self.n_dim).T[self.order]
        return columns[: self.n_local], columns[self.n_local :]

    def join(self, local: Array, border: Array, lead: tuple[int, ...] = ()) -> Array:
        """Return the vectors, (*lead, n_dim), with these parts: the inverse of `split`."""
        result = np.empty((local.shape[1], self.n_dim))
        result[:, self.order] = np.concatenate([local, border]).T
        return result.reshape(*lead, self.n_dim)

    def stacked(self, local: Array) -> list[Array]:
        """Return rows of local coordinates, (n_local, m), by size of block: (n_blocks, k, m) each, as views."""
        if self.blocks is None:
            return []
        return [local[s.where].reshape(s.n_blocks, s.size, local.shape[1]) for s in self.blocks.stacks]

    def dense(self, packed: Array, *, triangular: bool = False) -> Array:
        """Return a packed matrix as (n_dim, n_dim): symmetric, or lower triangular in the order of `order`."""
        parts, n = self.unpack(packed), self.n_local
        ordered = np.zeros((self.n_dim, self.n_dim))
        if self.blocks is not None:
            for stack, block in zip(self.blocks.stacks, parts.blocks, strict=True):
                at = np.arange(stack.where.start, stack.where.stop).reshape(stack.n_blocks, stack.size)
                ordered[at[:, :, None], at[:, None, :]] = block
        ordered[n:, :n] = parts.border.T
        if not triangular:
            ordered[:n, n:] = parts.border
        ordered[n:, n:] = parts.corner
        if triangular:
            return ordered
        result = np.empty_like(ordered)
        result[np.ix_(self.order, self.order)] = ordered
        return result


# --- algebra: each function of parts, batched over the blocks ------------------------------------------------------


def rows_of(structure: ArrowStructure, operation: str, blocks: list[Array], rows: Array) -> Array:
    """Return blocks times rows of local coordinates, (n_local, m), or the solution of a triangular system with them.

    Parameters
    ----------
    structure : ArrowStructure
    operation : {"times", "transposed times", "solve", "transposed solve"}
    blocks : list of ndarray
        Lower triangular where they are to be solved with.
    rows : ndarray, shape (n_local, m)
    """
    if not rows.size:
        return rows.copy()
    parts = [
        _OPERATIONS[operation](b, r).reshape(-1, rows.shape[1])
        for b, r in zip(blocks, structure.stacked(rows), strict=True)
    ]
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _times(a: Array, b: Array) -> Array:
    # A stack of numbers: the product of stacks of 1 x 1 matrices takes ten times as long.
    return a * b if a.shape[1] == 1 else a @ b


_OPERATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "times": _times,
    "transposed times": lambda a, b: _times(stacks.transposed(a), b),
    "solve": stacks.solve_lower,
    "transposed solve": lambda a, b: stacks.solve_upper(stacks.transposed(a), b),
}


def cholesky(structure: ArrowStructure, matrix: Parts) -> Parts | None:
    """Return the lower factor L of a symmetric matrix, L L^T, or None where that is not positive definite.

    Nor is a relative precision, of sums with 1, that cancels to rounding: in a block, in the border, or across the two.
    """
    blocks, least, terms = [], 1.0, [linalg.relative_terms(stacks.diagonal(block)) for block in matrix.blocks]
    for block, size in zip(matrix.blocks, terms, strict=True):
        factor = stacks.cholesky(block, size)
        if factor is None:
            return None
        blocks.append(factor)
        least = min(least, float(np.min(stacks.diagonal(factor) / np.sqrt(size))))
    border, size = rows_of(structure, "solve", blocks, matrix.border), linalg.relative_terms(np.diagonal(matrix.corner))
    corner = linalg.cholesky(matrix.corner - border.T @ border, size)
    if corner is None:
        return None
    least *= float(np.min(np.diagonal(corner) / np.sqrt(size), initial=1.0))
    if blocks and least < _CLEAR * linalg.LEAST_PIVOT:
        # Of the inverse of L, in units of the terms, what its border has: no column may exceed an inverse pivot.
        across = rows_of(structure, "transposed solve", blocks, solve_corner(corner, border.T).T)
        if np.max(np.sqrt(np.concatenate(terms, axis=None)) * np.abs(across).sum(axis=1)) >= 1.0 / linalg.LEAST_PIVOT:
            return None
    return Parts(blocks, border, corner)


def product(structure: ArrowStructure, left: Parts, right: Parts) -> Parts:
    """Return the product of two lower-triangular matrices."""
    blocks = [_times(a, b) for a, b in zip(left.blocks, right.blocks, strict=True)]
    border = rows_of(structure, "transposed times", right.blocks, left.border) + right.border @ left.corner.T
    return Parts(blocks, border, left.corner @ right.corner)


def quotient(structure: ArrowStructure, left: Parts, right: Parts) -> Parts:
    """Return left^-1 right for two lower-triangular matrices."""
    blocks = [np.tril(stacks.solve_lower(a, b)) for a, b in zip(left.blocks, right.blocks, strict=True)]
    beside = right.border - rows_of(structure, "transposed times", blocks, left.border)
    corner = np.tril(solve_corner(left.corner, right.corner))
    return Parts(blocks, solve_corner(left.corner, beside.T).T, corner)


def gram(structure: ArrowStructure, factor: Parts) -> Parts:
    """Return T T^T for a lower-triangular T."""
    blocks = [_times(t, stacks.transposed(t)) for t in factor.blocks]
    border = rows_of(structure, "times", factor.blocks, factor.border)
    return Parts(blocks, border, factor.border.T @ factor.border + factor.corner @ factor.corner.T)


def congruence(structure: ArrowStructure, factor: Parts, matrix: Parts) -> Parts:
    """Return T^-1 P T^-T for a lower-triangular T and a symmetric P."""
    blocks = [_between(t, p) for t, p in zip(factor.blocks, matrix.blocks, strict=True)]
    beside = rows_of(structure, "solve", factor.blocks, matrix.border)
    turned = rows_of(structure, "times", blocks, factor.border)
    crossed = factor.border.T @ (beside - 0.5 * turned)
    corner = solve_corner(factor.corner, matrix.corner - crossed - crossed.T)
    corner = linalg.symmetrise(solve_corner(factor.corner, corner.T))
    return Parts(blocks, solve_corner(factor.corner, (beside - turned).T).T, corner)


def solve_corner(corner: Array, rhs: Array, *, transpose: bool = False) -> Array:
    """Solve with a lower-triangular corner, which may be empty."""
    return linalg.solve_lower(corner, rhs, transpose=transpose) if len(corner) else rhs


def _between(factors: Array, matrices: Array) -> Array:
    """Return T^-1 P T^-T for each block."""
    half = stacks.solve_lower(factors, matrices)
    return stacks.symmetrise(stacks.solve_lower(factors, np.ascontiguousarray(stacks.transposed(half))))


@functools.lru_cache(maxsize=8)
def _structure(order_bytes: bytes, sizes_bytes: bytes) -> ArrowStructure:
    order, sizes = (np.frombuffer(b, dtype=np.intp) for b in (order_bytes, sizes_bytes))
    n_dim, n_local = len(order), int(sizes.sum())
    if not np.array_equal(np.sort(order), np.arange(n_dim)):
        raise ValueError(f"The order of {n_dim} coordinates should be a permutation of 0..{n_dim - 1}; got {order}.")
    if sizes.min(initial=1) < 1 or n_local > n_dim:
        raise ValueError(f"The sizes of blocks should be positive and add up to {n_dim} at most; got {sizes}.")
    labels = np.full(n_dim, -1, dtype=np.intp)
    labels[order[:n_local]] = np.repeat(np.arange(len(sizes)), sizes)
    return ArrowStructure.of(labels)
