"""What rows see of Gaussians: means and covariances of their predictors."""

from dataclasses import dataclass

import numpy as np

from scipy import sparse
from scipy.linalg.blas import dsyrk, dtrmm
from scipy.linalg.lapack import dlauum

from pymc_ngvi.core.batch import Batch
from pymc_ngvi.core.linalg import symmetrise
from pymc_ngvi.core.sizes import HELD, STREAMED
from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.target import Rooted, Spread
from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.linear_map import LinearMap

# --- predictors that all depend on all coordinates, under a Gaussian whose covariance has a dense factor C: X C ---


#: Rows of X for each column, at most: where there are more, there is less to gain, and X C is large.
_MOST_ROWS = 4


class Roots:
    """Y = X C: covariances of predictors are products of its rows, and whitened curvatures are Y^T M Y."""

    def __init__(self, linear: LinearMap, root: Array) -> None:
        self._root = root
        single = np.count_nonzero(linear.dense, axis=1) <= 1  # predictors that are coordinates
        self._single, self._many = np.flatnonzero(single), np.flatnonzero(~single)
        of_single = linear.dense[single]
        self._column = np.argmax(of_single != 0.0, axis=1)
        self._factor = of_single[np.arange(len(of_single)), self._column]
        self._rows = np.empty(linear.dense.shape)
        self._rows[single] = self._factor[:, None] * root[self._column]
        if len(self._many):
            self._rows[self._many] = dtrmm(1.0, root.T, linear.dense[self._many].T, side=0, lower=0).T

    @classmethod
    def of(cls, linear: LinearMap, q: Spread) -> "Roots | None":
        """Return those of a Gaussian; None where something else costs less."""
        if not isinstance(q, Rooted) or linear.weights is not None:
            return None
        n_rows, n_dim = linear.dense.shape[0], linear.n_dim
        if len(linear.columns) < n_dim or n_rows > min(_MOST_ROWS * n_dim, HELD // n_dim):
            return None
        return cls(linear, q.root)

    def is_of(self, q: object) -> bool:
        """Tell whether a Gaussian has this factor."""
        return isinstance(q, Rooted) and q.root is self._root

    def covariances(self, pairs: list[Ints]) -> list[Array]:
        """Return the covariances of each list of pairs of predictors, (n_pairs, 2)."""
        at_once, result = max(1, STREAMED // self._rows.shape[1]), []
        variances = np.einsum("ij,ij->i", self._rows, self._rows)
        for pair in pairs:
            i, j = pair.T
            if np.array_equal(i, j):
                result.append(variances[i])
                continue
            parts = [slice(start, start + at_once) for start in range(0, len(pair), at_once)]
            products = [np.einsum("ij,ij->i", self._rows[i[part]], self._rows[j[part]]) for part in parts]
            result.append(np.concatenate([*products, np.empty(0)]))
        return result

    def curvature(self, matrix: sparse.csr_array) -> Array:
        """Return -Y^T M Y, (n_dim, n_dim), for a symmetric sparse matrix M."""
        weights = -matrix.diagonal()
        beside = matrix.indices != np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
        if matrix.data[beside].any():
            return -symmetrise(self._rows.T @ (matrix @ self._rows))
        if not np.isfinite(weights).all():
            return np.full(self._root.shape, np.nan)
        result = np.zeros(self._root.shape)
        of_coordinates = np.bincount(
            self._column, self._factor**2 * weights[self._single], minlength=self._root.shape[0]
        )
        for sign in (1.0, -1.0):
            if (keep := sign * weights[self._many] > 0.0).any():
                half = np.sqrt(sign * weights[self._many][keep])[:, None] * self._rows[self._many[keep]]
                result += sign * _mirrored(dsyrk(1.0, half.T))
            if (keep := sign * of_coordinates > 0.0).any():
                scaled = np.sqrt(np.where(keep, sign * of_coordinates, 0.0))[:, None] * self._root
                # LAPACK reads columns first: C^T is an upper triangle U, and U U^T takes a third of a product.
                result += sign * _mirrored(dlauum(scaled.T, lower=0)[0])
        return result


def _mirrored(upper: Array) -> Array:
    """Return the symmetric matrix with this upper triangle; what is below it does not count."""
    result: Array = np.triu(upper)
    result += np.triu(upper, 1).T
    return result


@dataclass(frozen=True, eq=False)
class Seen(Batch):
    """What rows see of a Gaussian."""

    #: shape (n_predictors,).
    mean: Array
    #: Of all pairs of predictors that a row has: an array, (n_rows,), for each pair of each kind of rows.
    covariances: list[Array]
