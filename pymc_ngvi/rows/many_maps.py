"""Affine functions of one pattern at many values: products with all matrices, as with one block-diagonal matrix."""

import functools

from dataclasses import dataclass, replace

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.values import Array


@dataclass(frozen=True, eq=False)
class Sparsity:
    """Where a sparse matrix has entries, row by row."""

    #: shape (n_rows + 1,).
    starts: Ints
    #: shape (n_entries,).
    indices: Ints
    #: Number of columns.
    n_dim: int

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1

    def repeated(self, n: int) -> "Sparsity":
        """Return that of a block-diagonal matrix with so many blocks; the last one is remembered."""
        if n not in self._last:
            apart = np.arange(n)[:, None]
            starts = (self.starts[:-1] + len(self.indices) * apart).ravel()
            starts = np.append(starts, n * len(self.indices))
            indices = (self.indices + self.n_dim * apart).ravel()
            self._last.clear()
            self._last[n] = Sparsity(starts, indices, n * self.n_dim)
        return self._last[n]

    @functools.cached_property
    def _last(self) -> dict[int, "Sparsity"]:
        return {}

    def filled(self, values: Array) -> sparse.csr_array:
        """Return the matrix with these values, in any shape."""
        return sparse.csr_array((values.ravel(), self.indices, self.starts), shape=(self.n_rows, self.n_dim))


@dataclass(frozen=True, eq=False)
class ManyMaps:
    """Affine functions of one pattern, eta_k = offset_k + X_k x_k."""

    #: shape (n, n_predictors).
    offset: Array
    #: Columns of X that are dense; shape (n, n_predictors, n_dense), or (1, ...) where it is the same for all.
    dense: Array
    #: Which these are; shape (n_dense,).
    columns: NDArray[np.intp]
    #: Entries of the others; shape (n, n_entries).
    data: Array
    #: Where these are.
    sparsity: Sparsity

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.offset)

    def __getitem__(self, which: NDArray[np.intp]) -> "ManyMaps":
        """Return some of them."""
        dense = self.dense if len(self.dense) == 1 else self.dense[which]
        return replace(self, offset=self.offset[which], dense=dense, data=self.data[which])

    @functools.cached_property
    def blocks(self) -> sparse.csr_array:
        """The sparse parts of all X as one block-diagonal matrix."""
        return self.sparsity.repeated(len(self)).filled(self.data)

    def times(self, x: Array) -> Array:
        """Return X_k times columns, (n, n_predictors, m) from (n, n_dim, m)."""
        n, d, m = x.shape
        result: Array = np.matmul(self.dense, x[:, self.columns]) if len(self.columns) else np.zeros((n, 1, m))
        if self.data.shape[1]:
            result = result + np.asarray(self.blocks @ x.reshape(n * d, m)).reshape(n, -1, m)
        return np.broadcast_to(result, (n, self.offset.shape[1], m))

    def transposed_times(self, eta: Array) -> Array:
        """Return X_k^T times vectors, (n, n_dim) from (n, n_predictors)."""
        n = len(self)
        result = np.zeros((n, self.sparsity.n_dim))
        if self.data.shape[1]:
            result += np.asarray(self.blocks.T @ eta.ravel()).reshape(n, -1)
        if len(self.columns):
            result[:, self.columns] += np.matmul(eta[:, None], self.dense)[:, 0]
        return result

    def transposed_rows(self, index: NDArray[np.intp]) -> Array:
        """Return some rows of X_k as columns, (n, n_dim, n_rows)."""
        n, sparsity = len(self), self.sparsity
        result = np.zeros((n, sparsity.n_dim, len(index)))
        result[:, self.columns] = np.swapaxes(self.dense[:, index], 1, 2)
        for at, row in enumerate(index):
            here = slice(sparsity.starts[row], sparsity.starts[row + 1])
            result[:, sparsity.indices[here], at] = self.data[:, here]
        return result
