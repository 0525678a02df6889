"""Which coordinates are in blocks that are independent of each other given the others, and which are these."""

import functools

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.stored import stored


class Stack(NamedTuple):
    """All blocks of one size."""

    n_blocks: int
    size: int
    #: Its coordinates in `Partition.order`.
    where: slice


@stored("partition")
@dataclass(frozen=True, eq=False)
class Partition:
    """Coordinates are *local*, in blocks that touch each other nowhere, or in the *border*, which all blocks may touch.

    Parameters
    ----------
    labels : ndarray of int, shape (n_dim,)
        Of each coordinate's block; negative in the border.

    Raises
    ------
    ValueError
        If labels are not (n_dim,).
    """

    labels: NDArray[np.intp]

    def __post_init__(self) -> None:
        labels = np.maximum(np.asarray(self.labels).astype(np.intp), -1)
        if labels.ndim != 1:
            raise ValueError(f"Labels of blocks should be (n_dim,); got shape {labels.shape}.")
        object.__setattr__(self, "labels", _read_only(labels))

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

    @property
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
    def stacks(self) -> tuple[Stack, ...]:
        """The blocks by size."""
        sizes, counts = np.unique(self.sizes, return_counts=True)
        stop = np.cumsum(sizes * counts)
        rows = zip(counts.tolist(), sizes.tolist(), map(slice, stop - sizes * counts, stop), strict=True)
        return tuple(Stack(*row) for row in rows)

    def in_blocks(self, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return where entries inside blocks are in a list of these, in this order and each in C order."""
        size, place = np.repeat(self.sizes, self.sizes), np.argsort(self.order)
        first = np.repeat(np.cumsum(self.sizes) - self.sizes, self.sizes)
        return (np.cumsum(size) - size - first)[place[rows]] + place[cols]

    @functools.cached_property
    def pattern(self) -> Pattern:
        """Entries of a symmetric matrix with these blocks, and with a border that touches everything."""
        n, local, border = self.n_dim, self.locals_, self.border
        shape = n, int(self.labels.max(initial=-1)) + 1
        member = sparse.csr_array((np.ones(len(local)), (local, self.labels[local])), shape=shape)
        rows, cols = (member @ member.T).nonzero()
        rows, cols = np.append(rows, np.repeat(border, n)), np.append(cols, np.tile(np.arange(n), len(border)))
        return Pattern.of(sparse.coo_array((np.ones(len(rows)), (rows, cols)), shape=(n, n)))


def _read_only[A: NDArray[Any]](array: A) -> A:
    """Protect an array: one partition serves many states."""
    array.flags.writeable = False
    return array
