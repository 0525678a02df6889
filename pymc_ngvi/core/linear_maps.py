"""Simple linear maps, of which the factor of a covariance is a product: what graphs are built of, and nothing else."""

from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.values import Array


class Scaled(NamedTuple):
    """Multiplication by a diagonal.

    Parameters
    ----------
    scale : ndarray, shape (n_dim,)
    """

    scale: Array


class DenseTriangle(NamedTuple):
    """A lower-triangular matrix T or, inverted, T^-T.

    Parameters
    ----------
    matrix : ndarray, shape (n_dim, n_dim)
        What is above the diagonal is 0.
    inverted : bool
    """

    matrix: Array
    inverted: bool


class SparseTriangle(NamedTuple):
    """The same of a matrix that is sparse, and lower triangular in some order of the coordinates.

    Parameters
    ----------
    order : ndarray of int, shape (n_dim,)
        The coordinates.
    starts : ndarray of int, shape (n_dim + 1,)
        Where the entries of each column begin, in that order.
    rows : ndarray of int, shape (n_entries,)
        Coordinates; the first of each column is that of the diagonal.
    entries : ndarray, shape (n_entries,)
    inverted : bool
    """

    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    rows: NDArray[np.int64]
    entries: Array
    inverted: bool

    @classmethod
    def of(
        cls,
        order: NDArray[np.integer],
        rows: NDArray[np.integer],
        cols: NDArray[np.integer],
        entries: Array,
        *,
        inverted: bool,
    ) -> "SparseTriangle":
        """Return the map of entries in any sequence; rows and columns are places in the order."""
        sequence = np.lexsort((rows, cols))
        coordinates = np.asarray(order, dtype=np.int64)
        starts = np.append(0, np.cumsum(np.bincount(cols, minlength=len(order)))).astype(np.int64)
        return cls(coordinates, starts, coordinates[rows[sequence]], np.ascontiguousarray(entries[sequence]), inverted)


class Stretched(NamedTuple):
    """The identity and a part of low rank, I + Q K Q^T.

    Parameters
    ----------
    axes : ndarray, shape (n_dim, k)
        Q.
    core : ndarray, shape (k, k)
        K.
    """

    axes: Array
    core: Array


#: One step of a product of maps.
type LinearMap = Scaled | DenseTriangle | SparseTriangle | Stretched
