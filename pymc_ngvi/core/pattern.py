"""Which entries of a symmetric matrix can differ from 0."""

import functools

from dataclasses import dataclass
from typing import Any

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

#: Share of entries beyond which a matrix counts as dense, whatever it takes to evaluate these; dimensions below which
#: every one does.
DENSE, SMALLEST = 0.75, 10


@dataclass(frozen=True, eq=False)
class Pattern:
    """The lower triangle of a sparse symmetric matrix, the whole diagonal included.

    Notes
    -----
    *Values* of a matrix with this pattern are an array, (n_entries,), in the same order.
    """

    #: ``rows >= cols``, sorted by row, then by column, without repetition; shape (n_entries,).
    rows: NDArray[np.intp]
    cols: NDArray[np.intp]
    n_dim: int

    @classmethod
    def of(cls, matrix: NDArray[Any] | sparse.sparray) -> "Pattern":
        """Return the pattern of a matrix, dense or sparse: an entry counts where either triangle has it."""
        full = sparse.coo_array(matrix)
        n_dim = full.shape[0]
        keep = full.data != 0
        i, j, diagonal = full.row[keep].astype(np.int64), full.col[keep].astype(np.int64), np.arange(n_dim)
        # One sort of whole numbers: faster than a sort by two keys, or than NumPy's table of unique ones.
        codes = np.sort(np.concatenate([np.maximum(i, j) * n_dim + np.minimum(i, j), diagonal * (n_dim + 1)]))
        codes = codes[np.diff(codes, prepend=-1) > 0]
        return cls(codes // n_dim, codes % n_dim, n_dim)

    @property
    def n_entries(self) -> int:
        """Entries in the lower triangle, the diagonal included."""
        return len(self.rows)

    @property
    def is_full(self) -> bool:
        """Whether most entries can differ from 0."""
        return self.n_entries > DENSE * self.n_dim * (self.n_dim + 1) / 2

    def equals(self, other: "Pattern") -> bool:
        """Tell whether another one has the same entries."""
        return bool(
            self.n_dim == other.n_dim
            and np.array_equal(self.rows, other.rows)
            and np.array_equal(self.cols, other.cols)
        )

    @functools.cached_property
    def off_diagonal(self) -> NDArray[np.bool_]:
        """Which entries are below the diagonal."""
        return self.rows != self.cols

    @functools.cached_property
    def matrix(self) -> sparse.csr_array:
        """Both triangles, as a sparse matrix of True."""
        return self.symmetric(np.ones(self.n_entries, dtype=bool))

    def symmetric(self, values: NDArray[Any]) -> sparse.csr_array:
        """Return the symmetric matrix with these values in its lower triangle."""
        below = self.off_diagonal
        rows = np.concatenate([self.rows, self.cols[below]])
        cols = np.concatenate([self.cols, self.rows[below]])
        both = np.concatenate([values, values[below]]), (rows, cols)
        return sparse.coo_array(both, shape=(self.n_dim, self.n_dim)).tocsr()


@dataclass(frozen=True, eq=False)
class SummedPattern:
    """Where a symmetric matrix can differ from 0 that is sparse but for sums t = A theta over many coordinates."""

    #: Of the matrix by theta and t together, (n_dim + n_sums).
    pattern: Pattern
    #: A; shape (n_sums, n_dim).
    weights: NDArray[np.float64]

    @property
    def n_dim(self) -> int:
        """Number of coordinates, without the sums."""
        return int(self.weights.shape[1])

    @property
    def n_pairs(self) -> int:
        """Pairs of coordinates that are in one of the sums together, repetitions counted."""
        return int((np.count_nonzero(self.weights, axis=1).astype(np.int64) ** 2).sum())

    @functools.cached_property
    def among(self) -> Pattern:
        """The part that is by theta alone."""
        inner = self.pattern.rows < self.n_dim
        return Pattern(self.pattern.rows[inner], self.pattern.cols[inner], self.n_dim)


def is_dense(pattern: Pattern | None) -> bool:
    """Tell whether a matrix counts as dense; None where its entries are too many to hold."""
    return pattern is None or pattern.n_dim < SMALLEST or pattern.is_full
