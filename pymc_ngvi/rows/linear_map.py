"""Affine functions of theta as numbers: an offset, and a matrix of dense columns and sparse ones."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sparsity.dependence_sets import Dependence
from pymc_ngvi.core.target import Spread
from pymc_ngvi.core.values import Array

#: Share of the rows from which on a column is kept as a dense one.
_DENSE = 0.2
#: Time of a product of two entries of a sparse matrix in that of one in a dense product; entries of a dense matrix, at
#: most.
_SLOWER, _MOST_DENSE = 200.0, 2**27
#: Numbers of all predictors that are evaluated at once.
_MOST_ELEMENTS = 2**22
#: Numbers of dense columns that are multiplied at once.
_AT_A_TIME = 2**20

#: From rows and columns, (n,) each, to entries of a covariance.
type Entries = Callable[[NDArray[np.intp], NDArray[np.intp]], Array]


class AffineMap(Protocol):
    """Predictors eta = offset + X theta, however X is held."""

    @property
    def offset(self) -> Array: ...  # noqa: D102
    @property
    def n_dim(self) -> int: ...  # noqa: D102
    @property
    def plain(self) -> "LinearMap":
        """X as a matrix."""

    @property
    def joint(self) -> "LinearMap":
        """X as a matrix of theta and of sums over many coordinates, if there are any."""

    def covariances(self, q: Spread) -> Entries:
        """Return what gives entries of the covariance under q of what `joint` is a matrix of."""

    def __call__(self, theta: Array) -> Array: ...  # noqa: D102
    def times(self, vectors: Array) -> Array: ...  # noqa: D102
    def transposed_times(self, vectors: Array) -> Array: ...  # noqa: D102
    def quadratic_times(self, matrix: sparse.csr_array, vectors: Array) -> Array: ...  # noqa: D102
    def quadratic(self, matrix: sparse.csr_array) -> Array: ...  # noqa: D102
    def quadratic_entries(self, matrix: sparse.csr_array, pattern: Pattern) -> Array: ...  # noqa: D102
    def quadratic_diagonal(self, matrix: sparse.csr_array) -> Array: ...  # noqa: D102


@dataclass(frozen=True, eq=False)
class LinearMap:
    """Predictors eta = offset + X theta."""

    #: shape (n_rows,).
    offset: Array
    #: Columns of X that are dense; shape (n_rows, n_dense).
    dense: Array
    #: Which these are; shape (n_dense,).
    columns: NDArray[np.intp]
    #: All others; 0 in the dense ones; shape (n_rows, n_dim).
    rest: sparse.csr_array

    @classmethod
    def of(cls, evaluate: Callable[[Array], Array], dependence: Dependence, n_dim: int) -> "LinearMap":
        """Find the matrix of an affine function from its values."""
        return MatrixPlan.of(dependence, n_dim).matrix(evaluate)

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return int(self.rest.shape[1])

    @property
    def plain(self) -> "LinearMap":
        """Itself; see `AffineMap`."""
        return self

    joint = plain

    def covariances(self, q: Spread) -> Entries:
        """Return what gives entries of the covariance of theta under a Gaussian."""
        return q.covariances

    def __call__(self, theta: Array) -> Array:
        """Return the predictors, (n, n_rows), at points (n, n_dim)."""
        return self.offset + self.times(theta)

    def times(self, vectors: Array) -> Array:
        """Return X times each vector, (n, n_rows) from (n, n_dim)."""
        result: Array = vectors[:, self.columns] @ self.dense.T
        if self.rest.nnz:
            result += (self.rest @ vectors.T).T
        return result

    def transposed_times(self, vectors: Array) -> Array:
        """Return X^T times each vector, (n, n_dim) from (n, n_rows)."""
        result: Array = (
            np.ascontiguousarray((self.rest.T @ vectors.T).T)
            if self.rest.nnz
            else np.zeros((len(vectors), self.rest.shape[1]))
        )
        result[:, self.columns] += vectors @ self.dense
        return result

    def columns_used(self) -> NDArray[np.intp]:
        """Return the coordinates that some predictor depends on, ascending."""
        used = np.bincount(self.rest.indices, self.rest.data != 0.0, minlength=self.n_dim) > 0.0
        used[self.columns[(self.dense != 0.0).any(axis=0)]] = True
        return np.flatnonzero(used)

    def rows(self, index: NDArray[np.intp]) -> Array:
        """Return rows of X, dense, (n, n_dim)."""
        result: Array = self.rest[index].toarray()
        result[:, self.columns] += self.dense[index]
        return result

    def quadratic_times(self, matrix: sparse.csr_array, vectors: Array) -> Array:
        """Return X^T M X times each vector, (n, n_dim)."""
        return self.transposed_times((matrix @ self.times(vectors).T).T)

    def quadratic(self, matrix: sparse.csr_array) -> Array:
        """Return X^T M X, (n_dim, n_dim), for a symmetric sparse matrix M."""
        result: Array = self._of_rest(matrix).toarray() if self.rest.nnz else np.zeros((self.rest.shape[1],) * 2)
        if len(self.columns):
            product = matrix @ self.dense if self.rest.nnz else np.empty(0)
            n, p = self.dense.shape
            total = np.zeros((p, p))
            weights = (
                matrix.diagonal()
                if matrix.nnz <= n and not (matrix - sparse.diags_array(matrix.diagonal())).nnz
                else None
            )
            sign = 0.0 if weights is None else float(np.all(weights >= 0.0)) - float(np.all(weights <= 0.0))
            for start in range(0, n, max(1, _AT_A_TIME // p)):
                rows = slice(start, start + max(1, _AT_A_TIME // p))
                if weights is not None and sign:  # a matrix times its transpose takes half of the work
                    half = np.sqrt(np.abs(weights[rows]))[:, None] * self.dense[rows]
                    total += sign * (half.T @ half)
                else:
                    total += self.dense[rows].T @ (matrix[rows] @ self.dense)
            result[np.ix_(self.columns, self.columns)] += total
            if self.rest.nnz:
                across = self.rest.T @ product
                result[:, self.columns] += across
                result[self.columns] += across.T
        return result

    def quadratic_entries(self, matrix: sparse.csr_array, pattern: Pattern) -> Array:
        """Return the entries of X^T M X in a pattern, (n_entries,)."""
        result = entries_of(self._of_rest(matrix), pattern)
        if len(self.columns):
            product = matrix @ self.dense
            across = self.rest.T @ product
            across[self.columns] += self.dense.T @ product
            place = np.full(pattern.n_dim, -1, dtype=np.intp)
            place[self.columns] = np.arange(len(self.columns))
            of_col, of_row = place[pattern.cols], place[pattern.rows]
            # A dense column is 0 in the rest: an entry is of both, or of either.
            by_col, by_row = of_col >= 0, (of_col < 0) & (of_row >= 0)
            result[by_col] = across[pattern.rows[by_col], of_col[by_col]]
            result[by_row] = across[pattern.cols[by_row], of_row[by_row]]
        return result

    def quadratic_diagonal(self, matrix: sparse.csr_array) -> Array:
        """Return the diagonal of X^T M X, (n_dim,)."""
        product = sparse.csr_array(matrix @ self.rest)
        result = np.asarray(self.rest.multiply(product).sum(axis=0)).ravel()
        result[self.columns] += np.einsum("ij,ij->j", self.dense, matrix @ self.dense)
        return result

    def _of_rest(self, matrix: sparse.csr_array) -> sparse.csr_array:
        return sparse.csr_array(self.rest.T @ (matrix @ self.rest))


@dataclass(frozen=True, eq=False)
class MatrixPlan:
    """How to find the matrix of an affine function from its values, whatever these are."""

    n_rows: int
    #: Those to be held as dense ones.
    columns: NDArray[np.intp]
    #: Where to evaluate: sums of columns that no row has two of, then the dense ones; shape (n_directions, n_dim).
    directions: Array
    #: Entries of the others, and which of the directions each is read from; shape (n_entries,).
    rows: NDArray[np.intp]
    cols: NDArray[np.intp]
    colours: NDArray[np.intp]

    @classmethod
    def of(cls, dependence: Dependence, n_dim: int) -> "MatrixPlan":
        """Return the plan for rows that depend on some of ``n_dim`` coordinates."""
        index = dependence.index.ravel()
        sets = dependence.sets.astype(np.int64)
        share = (sets.T @ np.bincount(index, minlength=sets.shape[0])) / max(len(index), 1)
        is_dense = np.asarray(share > _DENSE) | _is_cheaper_dense(sets, index)
        columns = np.flatnonzero(is_dense)
        result = sparse.csr_array(sets, copy=True)
        result.data = np.where((~is_dense)[result.indices], result.data, 0)
        result.eliminate_zeros()
        few = result
        colours = _colours(few)
        n_colours = int(colours.max(initial=-1)) + 1
        directions = np.zeros((n_colours + len(columns), n_dim))
        coloured = np.flatnonzero(colours >= 0)
        directions[colours[coloured], coloured] = 1.0
        directions[n_colours + np.arange(len(columns)), columns] = 1.0
        entries = few[index].tocoo()
        return cls(len(index), columns, directions, entries.row, entries.col, colours[entries.col])

    def matrix(self, evaluate: Callable[[Array], Array]) -> LinearMap:
        """Return offset and matrix."""
        n_dim, n_colours = self.directions.shape[1], len(self.directions) - len(self.columns)
        size = max(1, _MOST_ELEMENTS // max(self.n_rows, 1))
        # What does not depend on theta, such as a Cholesky factor, is computed once in each evaluation.
        first_part = evaluate(np.concatenate([np.zeros((1, n_dim)), self.directions[:size]]))
        offset = first_part[0].copy()
        data = np.empty(len(self.rows))
        dense = np.empty((self.n_rows, len(self.columns)))  # filled part by part: X is there once, however large it is
        for start in range(0, len(self.directions), size):
            part = (evaluate(self.directions[start : start + size]) if start else first_part[1:]) - offset
            here = np.flatnonzero((self.colours >= start) & (self.colours < start + len(part)))
            data[here] = part[self.colours[here] - start, self.rows[here]]
            n_few = min(max(n_colours - start, 0), len(part))
            first = start + n_few - n_colours
            dense[:, first : first + len(part) - n_few] = part[n_few:].T
        rest = sparse.csr_array((data, (self.rows, self.cols)), shape=(self.n_rows, n_dim))
        return LinearMap(offset, dense, self.columns, rest)


def entries_of(matrix: sparse.csr_array, pattern: Pattern) -> Array:
    """Return the entries of a sparse matrix in a pattern, (n_entries,)."""
    matrix.sort_indices()
    n = pattern.n_dim
    there = np.repeat(np.arange(n), np.diff(matrix.indptr)) * n + matrix.indices
    wanted = pattern.rows.astype(np.int64) * n + pattern.cols
    at = np.minimum(np.searchsorted(there, wanted), max(len(there) - 1, 0))
    if not len(there):
        return np.zeros(len(wanted))
    return np.where(there[at] == wanted, matrix.data[at], 0.0)


def _is_cheaper_dense(sets: sparse.csr_array, index: NDArray[np.int64]) -> bool:
    """Tell whether sparse products would take longer than dense ones, entry by entry as they are."""
    n_entries = np.diff(sets.indptr).astype(np.float64)[index]
    n_dim = np.count_nonzero(np.bincount(sets.indices, minlength=sets.shape[1]))
    fits, work = n_dim * len(index) <= _MOST_DENSE, float(n_dim) ** 2 * len(index)
    return bool(fits and work < _SLOWER * np.sum(n_entries**2))


def _colours(sets: sparse.csr_array) -> NDArray[np.intp]:
    """Colour columns so that no row has two of one colour, greedily; -1 for columns without entries."""
    together = sparse.csr_array(sets.T @ sets)
    colours = np.full(sets.shape[1], -1, dtype=np.intp)
    used = np.asarray(sets.sum(axis=0)).ravel() > 0
    for column in np.flatnonzero(used):
        near = colours[together.indices[together.indptr[column] : together.indptr[column + 1]]]
        taken = np.zeros(len(near) + 1, dtype=bool)
        taken[near[(near >= 0) & (near <= len(near))]] = True
        colours[column] = int(np.argmin(taken))
    return colours
