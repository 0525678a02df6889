"""Which coordinates form a block, and the packed form of block-diagonal matrices.

Blocks of one size are stacked, so that every operation is a batched one. A block-diagonal matrix is packed to a vector:
the blocks, each in C order, stack after stack from the smallest size on.
"""

import functools

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from numpy.typing import ArrayLike, NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array


class Stack(NamedTuple):
    """All blocks of one size.

    Parameters
    ----------
    n_blocks, size : int
    where : slice
        Its coordinates in `BlockStructure.order`.
    entries : slice
        Its entries in a packed matrix.
    """

    n_blocks: int
    size: int
    where: slice
    entries: slice


@stored("structure.block", content=("order", "sizes"), make="from_arrays")
@dataclass(frozen=True, eq=False)
class BlockStructure:
    """A partition of the coordinates.

    Parameters
    ----------
    labels : ndarray of int, shape (n_dim,)
        Of each coordinate's block.

    Raises
    ------
    ValueError
        If there are no labels, or not one for each coordinate.
    """

    labels: NDArray[np.integer]

    def __post_init__(self) -> None:
        labels = np.array(self.labels)
        if labels.ndim != 1 or not len(labels):
            raise ValueError(f"Labels of blocks should be (n_dim,), one coordinate at least; got shape {labels.shape}.")
        object.__setattr__(self, "labels", _read_only(labels))

    @classmethod
    def from_arrays(cls, order: ArrayLike, sizes: ArrayLike) -> "BlockStructure":
        """Return the structure with this ``order`` and these ``sizes``, of any numeric type; the last few are kept.

        Raises
        ------
        ValueError
            If ``order`` is no permutation, or ``sizes`` are not positive or don't add up to its length.
        """
        return _structure(np.asarray(order).astype(np.intp).tobytes(), np.asarray(sizes).astype(np.intp).tobytes())

    @functools.cached_property
    def sizes(self) -> NDArray[np.intp]:
        """Of the blocks, (n_blocks,), in ascending order."""
        return _read_only(np.sort(np.unique(self.labels, return_counts=True)[1]))

    @functools.cached_property
    def order(self) -> NDArray[np.intp]:
        """Coordinates, (n_dim,), block after block: by size, then by first coordinate; ascending in each block."""
        _, first, inverse, counts = np.unique(self.labels, return_index=True, return_inverse=True, return_counts=True)
        return _read_only(np.lexsort((np.arange(self.n_dim), first[inverse], counts[inverse])))

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return len(self.labels)

    @functools.cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The blocks by size."""
        stacks, start, entry = [], 0, 0
        for size, n_blocks in zip(*(a.tolist() for a in np.unique(self.sizes, return_counts=True)), strict=True):
            stop, last = start + n_blocks * size, entry + n_blocks * size**2
            stacks.append(Stack(n_blocks, size, slice(start, stop), slice(entry, last)))
            start, entry = stop, last
        return tuple(stacks)

    @property
    def n_entries(self) -> int:
        """Length of a packed matrix."""
        return int(np.sum(self.sizes**2))

    @functools.cached_property
    def lines(self) -> NDArray[np.intp]:
        """Of each entry of a packed matrix: the place of its row's coordinate in ``order``, never decreasing."""
        return np.repeat(np.arange(self.n_dim), np.repeat(self.sizes, self.sizes))

    @functools.cached_property
    def columns(self) -> NDArray[np.intp]:
        """Of each entry of a packed matrix: the coordinate of its column."""
        parts = [
            np.broadcast_to(self.order[s.where].reshape(s.n_blocks, 1, s.size), (s.n_blocks, s.size, s.size)).ravel()
            for s in self.stacks
        ]
        return np.concatenate(parts)

    @functools.cached_property
    def diagonal(self) -> NDArray[np.intp]:
        """Of each coordinate: the place of its diagonal entry in a packed matrix."""
        result = np.empty(self.n_dim, dtype=np.intp)
        on_diagonal = np.flatnonzero(self.order[self.lines] == self.columns)
        result[self.columns[on_diagonal]] = on_diagonal
        return result

    def unpack(self, packed: Array) -> list[Array]:
        """Return the blocks of a packed matrix, (n_blocks, size, size) for each size, as views."""
        return [packed[s.entries].reshape(s.n_blocks, s.size, s.size) for s in self.stacks]

    def pack(self, blocks: list[Array]) -> Array:
        """Return the packed matrix with these blocks: the inverse of `unpack`."""
        return np.concatenate([b.ravel() for b in blocks])

    def split(self, vectors: Array) -> list[Array]:
        """Return the parts of vectors, (..., n_dim), as columns: (n_blocks, size, n_vectors) for each size."""
        columns = vectors.reshape(-1, self.n_dim).T[self.order]
        return [columns[s.where].reshape(s.n_blocks, s.size, -1) for s in self.stacks]

    def join(self, parts: list[Array], lead: tuple[int, ...] = ()) -> Array:
        """Return the vectors, (*lead, n_dim), with these parts: the inverse of `split`."""
        result = np.empty((int(np.prod(lead)), self.n_dim))
        result[:, self.order] = np.concatenate([p.reshape(p.shape[0] * p.shape[1], len(result)) for p in parts]).T
        return result.reshape(*lead, self.n_dim)

    def dense(self, packed: Array) -> Array:
        """Return a packed matrix as (n_dim, n_dim)."""
        result = np.zeros((self.n_dim, self.n_dim))
        result[self.order[self.lines], self.columns] = packed
        return result


@functools.lru_cache(maxsize=8)
def _structure(order_bytes: bytes, sizes_bytes: bytes) -> BlockStructure:
    order, sizes = (np.frombuffer(b, dtype=np.intp) for b in (order_bytes, sizes_bytes))
    n_dim = len(order)
    if not np.array_equal(np.sort(order), np.arange(n_dim)):
        raise ValueError(f"The order of {n_dim} coordinates should be a permutation of 0..{n_dim - 1}; got {order}.")
    if sizes.min(initial=1) < 1 or sizes.sum() != n_dim:
        raise ValueError(f"The sizes of blocks should be positive and add up to {n_dim}; got {sizes}.")
    labels = np.empty(n_dim, dtype=np.intp)
    labels[order] = np.repeat(np.arange(len(sizes)), sizes)
    return BlockStructure(labels)


def _read_only[A: NDArray](array: A) -> A:
    """Protect an array: one structure serves many states."""
    array.flags.writeable = False
    return array
