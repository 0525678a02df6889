"""Affine functions of theta that are sparse in theta and a few sums over many of its coordinates together."""

import functools

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.target import Spread
from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.linear_map import Entries, LinearMap


@dataclass(frozen=True, eq=False)
class SummedMap:
    """Predictors eta = offset + S theta + T t with sums t = A theta: a `LinearMap` of theta, held by its parts."""

    #: That of theta and t, one after the other.
    joint: LinearMap
    #: A; shape (n_sums, n_dim).
    weights: Array

    @property
    def offset(self) -> Array:
        """What the predictors are where theta is 0, (n_rows,)."""
        return self.joint.offset

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return int(self.weights.shape[1])

    @functools.cached_property
    def plain(self) -> LinearMap:
        """The same as a matrix of theta alone."""
        n, joint = self.n_dim, self.joint
        whole = sparse.csc_array(joint.rest)
        of_sums, own = whole[:, n:].toarray(), joint.columns < n
        of_sums[:, joint.columns[~own] - n] += joint.dense[:, ~own]
        columns = joint.columns[own]
        others = sparse.csr_array(np.where(np.isin(np.arange(n), columns), 0.0, self.weights))
        rest = sparse.csr_array(whole[:, :n] + sparse.csr_array(of_sums) @ others)
        return LinearMap(joint.offset, joint.dense[:, own] + of_sums @ self.weights[:, columns], columns, rest)

    def __call__(self, theta: Array) -> Array:
        """Return the predictors, (n, n_rows), at points (n, n_dim)."""
        return self.offset + self.times(theta)

    def times(self, vectors: Array) -> Array:
        """Return X times each vector, (n, n_rows) from (n, n_dim)."""
        return self.joint.times(np.hstack([vectors, vectors @ self.weights.T]))

    def transposed_times(self, vectors: Array) -> Array:
        """Return X^T times each vector, (n, n_dim) from (n, n_rows)."""
        return self._of_joint(self.joint.transposed_times(vectors))

    def quadratic_times(self, matrix: sparse.csr_array, vectors: Array) -> Array:
        """Return X^T M X times each vector, (n, n_dim)."""
        return self.transposed_times((matrix @ self.times(vectors).T).T)

    def quadratic(self, matrix: sparse.csr_array) -> Array:
        """Return X^T M X, (n_dim, n_dim), for a symmetric sparse matrix M."""
        return self._of_joint(self._of_joint(self.joint.quadratic(matrix)).T)

    def quadratic_entries(self, matrix: sparse.csr_array, pattern: Pattern) -> Array:
        """Return the entries of X^T M X in a pattern, (n_entries,)."""
        return self.plain.quadratic_entries(matrix, pattern)

    def quadratic_diagonal(self, matrix: sparse.csr_array) -> Array:
        """Return the diagonal of X^T M X, (n_dim,)."""
        n, n_sums = self.n_dim, len(self.weights)
        unit = np.zeros((n_sums, n + n_sums))
        unit[np.arange(n_sums), n + np.arange(n_sums)] = 1.0
        of_sums = self.joint.quadratic_times(matrix, unit)
        beside = 2.0 * of_sums[:, :n] + of_sums[:, n:] @ self.weights
        return self.joint.quadratic_diagonal(matrix)[:n] + np.sum(self.weights * beside, axis=0)

    def covariances(self, q: Spread) -> Entries:
        """Return what gives entries of the covariance of theta and t under a Gaussian of theta."""
        n = self.n_dim
        of_sums = q.covariance_times(self.weights)
        among = of_sums @ self.weights.T

        def entries(rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
            high, low = np.maximum(rows, cols), np.minimum(rows, cols)
            inner, both = high < n, low >= n
            if inner.all():
                return q.covariances(rows, cols)
            across = ~inner & ~both
            result = np.empty(len(rows))
            result[inner] = q.covariances(rows[inner], cols[inner])
            result[across] = of_sums[high[across] - n, low[across]]
            result[both] = among[high[both] - n, low[both] - n]
            return result

        return entries

    def _of_joint(self, vectors: Array) -> Array:
        """Return derivatives by theta, (n, n_dim), from those by theta and t as if these were apart."""
        n = self.n_dim
        return vectors[:, :n] + vectors[:, n:] @ self.weights
