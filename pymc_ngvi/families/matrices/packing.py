"""Which coordinates are in a border, and the blocks of the others; matrices of that form as vectors.

Coordinates are *local*, in blocks that touch each other in no entry, or in the *border*, which all blocks may touch and
which comes last. Blocks of one size are stacked, so that every operation is a batched one.

A packed matrix is a vector: the blocks, each in C order, stack after stack from the smallest size on; then the rows of
the local coordinates in the columns of the border, (n_local, n_border), which stand for both triangles of a symmetric
matrix and for the lower one of a triangular matrix; then the corner, (n_border, n_border).
"""

import functools

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from numpy.typing import ArrayLike, NDArray

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.types import Array


class Stack(NamedTuple):
    """All blocks of one size."""

    n_blocks: int
    size: int
    #: Its coordinates in `Packing.order`.
    where: slice
    #: Its entries in a packed matrix.
    entries: slice


class Parts(NamedTuple):
    """A packed matrix as arrays."""

    #: shape (n_blocks, k, k) for each size k.
    blocks: list[Array]
    #: Rows in the order of the blocks; shape (n_local, n_border).
    border: Array
    #: shape (n_border, n_border).
    corner: Array


@dataclass(frozen=True, eq=False)
class Packing:
    """A partition of the coordinates.

    Parameters
    ----------
    labels : ndarray of int, shape (n_dim,)
        Of each coordinate's block; -1 in the border.

    Raises
    ------
    ValueError
        If labels are not (n_dim,).
    """

    labels: NDArray[np.intp]

    def __post_init__(self) -> None:
        labels = np.array(self.labels, dtype=np.intp)
        if labels.ndim != 1:
            raise ValueError(f"Labels of blocks should be (n_dim,); got shape {labels.shape}.")
        object.__setattr__(self, "labels", _read_only(labels))

    @classmethod
    def from_arrays(cls, order: ArrayLike, sizes: ArrayLike) -> Self:
        """Return the structure with these `order` and `sizes`, of any numeric type.

        Raises
        ------
        ValueError
            If ``order`` is no permutation, or ``sizes`` are not positive or add up to more than its length.
        """
        order, sizes = np.asarray(order).astype(np.intp), np.asarray(sizes).astype(np.intp)
        n_dim, n_local = len(order), int(sizes.sum())
        if not np.array_equal(np.sort(order), np.arange(n_dim)):
            raise ValueError(
                f"The order of {n_dim} coordinates should be a permutation of 0..{n_dim - 1}; got {order}."
            )
        if sizes.min(initial=1) < 1 or n_local > n_dim:
            raise ValueError(f"The sizes of blocks should be positive and add up to {n_dim} at most; got {sizes}.")
        labels = np.full(n_dim, -1, dtype=np.intp)
        labels[order[:n_local]] = np.repeat(np.arange(len(sizes)), sizes)
        return cls(labels)

    # --- coordinates ---

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return len(self.labels)

    @functools.cached_property
    def locals_(self) -> NDArray[np.intp]:
        """Local coordinates, ascending."""
        return np.flatnonzero(self.labels >= 0)

    @functools.cached_property
    def border(self) -> NDArray[np.intp]:
        """The others; lower triangles are those of this order."""
        return np.flatnonzero(self.labels < 0)

    @functools.cached_property
    def n_local(self) -> int:
        """Number of local coordinates."""
        return len(self.locals_)

    @property
    def n_border(self) -> int:
        """Number of coordinates in the border."""
        return len(self.border)

    @functools.cached_property
    def sizes(self) -> NDArray[np.intp]:
        """Of the blocks, ascending."""
        return _read_only(np.sort(np.unique(self.labels[self.locals_], return_counts=True)[1]))

    @functools.cached_property
    def order(self) -> NDArray[np.intp]:
        """Coordinates, (n_dim,): blocks by size, then by first coordinate, ascending in each; then the border."""
        _, first, inverse, counts = np.unique(
            self.labels[self.locals_], return_index=True, return_inverse=True, return_counts=True
        )
        local = np.lexsort((self.locals_, first[inverse], counts[inverse]))
        return _read_only(np.concatenate([self.locals_[local], self.border]))

    @functools.cached_property
    def place(self) -> NDArray[np.intp]:
        """Of each coordinate: where it is in `order`."""
        return np.argsort(self.order)

    @functools.cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The blocks by size."""
        stacks, start, entry = [], 0, 0
        for size, n_blocks in zip(*(a.tolist() for a in np.unique(self.sizes, return_counts=True)), strict=True):
            stop, last = start + n_blocks * size, entry + n_blocks * size**2
            stacks.append(Stack(n_blocks, size, slice(start, stop), slice(entry, last)))
            start, entry = stop, last
        return tuple(stacks)

    # --- matrices ---

    @functools.cached_property
    def n_in_blocks(self) -> int:
        """Entries of the blocks."""
        return int(np.sum(self.sizes**2))

    @property
    def n_entries(self) -> int:
        """Length of a packed matrix."""
        return self.n_in_blocks + (self.n_local + self.n_border) * self.n_border

    def unpack(self, packed: Array) -> Parts:
        """Return the parts of a packed matrix, as views."""
        g, start = self.n_border, self.n_in_blocks
        blocks = [packed[s.entries].reshape(s.n_blocks, s.size, s.size) for s in self.stacks]
        stop = start + self.n_local * g
        return Parts(blocks, packed[start:stop].reshape(self.n_local, g), packed[stop:].reshape(g, g))

    def pack(self, parts: Parts) -> Array:
        """Return the packed matrix with these parts: the inverse of `unpack`."""
        return np.concatenate([*(b.ravel() for b in parts.blocks), parts.border.ravel(), parts.corner.ravel()])

    @functools.cached_property
    def _entries(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Of each entry of a packed lower-triangular matrix: the places in `order` of its row and its column."""
        local, rows, cols = np.arange(self.n_local), [], []
        last = np.arange(self.n_local, self.n_dim)
        for stack in self.stacks:
            lines = local[stack.where].reshape(stack.n_blocks, stack.size)
            rows.append(np.repeat(lines, stack.size))
            cols.append(np.repeat(lines[:, None, :], stack.size, axis=1).ravel())
        rows += [np.tile(last, self.n_local), np.repeat(last, self.n_border)]
        cols += [np.repeat(local, self.n_border), np.tile(last, self.n_border)]
        return np.concatenate(rows), np.concatenate(cols)

    @property
    def lines(self) -> NDArray[np.intp]:
        """Of each entry of a packed lower-triangular matrix: the place of its row in `order`."""
        return self._entries[0]

    @functools.cached_property
    def columns(self) -> NDArray[np.intp]:
        """Of each entry of a packed lower-triangular matrix: the coordinate of its column."""
        return self.order[self._entries[1]]

    @functools.cached_property
    def diagonal(self) -> NDArray[np.intp]:
        """Of each coordinate: the place of its diagonal entry in a packed matrix."""
        rows, cols = self._entries
        return np.flatnonzero(rows == cols)[self.place]

    @property
    def in_border(self) -> slice:
        """Entries of a packed matrix that stand for two of a symmetric one."""
        return slice(self.n_in_blocks, self.n_in_blocks + self.n_local * self.n_border)

    @functools.cached_property
    def pattern(self) -> Pattern:
        """Entries of a symmetric matrix with this structure."""
        rows, cols = self._entries
        i, j = self.order[rows[rows >= cols]], self.order[cols[rows >= cols]]
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
        if not np.array_equal(firsts[rows], firsts[cols]):
            raise ValueError("The pattern has an entry between two blocks of the structure.")
        return (np.cumsum(sizes) - sizes)[rows] + cols - firsts[rows]

    def from_values(self, pattern: Pattern, values: Array) -> Array:
        """Return the packed symmetric matrix with these values in the entries of a pattern.

        Raises
        ------
        ValueError
            If the pattern has an entry between two blocks.
        """
        places, sources = _places(self, pattern)
        packed = np.zeros(self.n_entries)
        packed[places] = values[sources]
        return packed

    def entries(self, packed: Array, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> tuple[Array, NDArray[np.bool_]]:
        """Return entries of a packed symmetric matrix, (n,), 0 between two blocks, and which are there."""
        n, g, start = self.n_local, self.n_border, self.n_in_blocks
        one, other = self.place[rows], self.place[cols]
        later, earlier = np.maximum(one, other), np.minimum(one, other)
        inside, corner = later < n, earlier >= n
        beside = ~inside & ~corner
        block = np.append(np.repeat(np.arange(len(self.sizes)), self.sizes), np.full(g, -1))
        apart = inside & (block[later] != block[earlier])
        inside &= ~apart
        result = np.zeros(len(rows))
        result[inside] = packed[self.in_blocks(later[inside], earlier[inside])]
        result[beside] = packed[start + earlier[beside] * g + (later[beside] - n)]
        result[corner] = packed[start + n * g + (later[corner] - n) * g + (earlier[corner] - n)]
        return result, apart

    def dense(self, packed: Array, *, triangular: bool = False) -> Array:
        """Return a packed matrix as (n_dim, n_dim): symmetric, or lower triangular in the order of `order`."""
        rows, cols = self._entries
        result = np.zeros((self.n_dim, self.n_dim))
        if triangular:
            result[rows, cols] = packed
            return result
        beside = self.in_border
        result[self.order[cols[beside]], self.order[rows[beside]]] = packed[beside]
        result[self.order[rows], self.order[cols]] = packed
        return result

    # --- vectors ---

    def split(self, vectors: Array) -> tuple[Array, Array]:
        """Return the parts of vectors, (..., n_dim), as columns: (n_local, n_vectors), (n_border, n_vectors)."""
        columns = vectors.reshape(-1, self.n_dim).T[self.order]
        return columns[: self.n_local], columns[self.n_local :]

    def join(self, local: Array, border: Array, lead: tuple[int, ...] = ()) -> Array:
        """Return the vectors, (*lead, n_dim), with these parts: the inverse of `split`."""
        result = np.empty((local.shape[1], self.n_dim))
        result[:, self.order] = (np.concatenate([local, border]) if self.n_border else local).T
        return result.reshape(*lead, self.n_dim)

    def stacked(self, local: Array) -> list[Array]:
        """Return rows of local coordinates, (n_local, m), by size of block: (n_blocks, k, m) each, as views."""
        return [local[s.where].reshape(s.n_blocks, s.size, local.shape[1]) for s in self.stacks]


def _read_only[A: NDArray[Any]](array: A) -> A:
    """Protect an array: one structure serves many states."""
    array.flags.writeable = False
    return array


@functools.lru_cache(maxsize=8)
def _places(packing: Packing, pattern: Pattern) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return places in a packed matrix, and for each the entry of the pattern that belongs there."""
    n, g, start = packing.n_local, packing.n_border, packing.n_in_blocks
    later, earlier = packing.place[pattern.rows], packing.place[pattern.cols]
    later, earlier = np.maximum(later, earlier), np.minimum(later, earlier)
    entry = np.arange(pattern.n_entries)
    inside, corner = later < n, earlier >= n
    beside = ~inside & ~corner
    i, j = later[inside], earlier[inside]
    a, b = later[corner] - n, earlier[corner] - n
    last = start + n * g
    places = [packing.in_blocks(i, j), packing.in_blocks(j, i), start + earlier[beside] * g + (later[beside] - n)]
    places += [last + a * g + b, last + b * g + a]
    sources = [entry[inside], entry[inside], entry[beside], entry[corner], entry[corner]]
    return np.concatenate(places), np.concatenate(sources)
