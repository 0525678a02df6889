"""Affine functions of theta as numbers: an offset, and a matrix of dense columns and sparse ones."""

import functools

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy import sparse
from scipy.linalg.blas import dtrmm

from pymc_ngvi.core.linalg import cholesky
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.refusal import TooDenseError
from pymc_ngvi.core.sizes import AT_ONCE, MOST_NUMBERS, STREAMED
from pymc_ngvi.core.sparsity.dependence_sets import Dependence, Ints
from pymc_ngvi.core.target import Spread
from pymc_ngvi.core.values import Array

#: Share of the rows from which on a column is kept as a dense one.
_DENSE = 0.2
#: Time of a product of two entries of a sparse matrix in that of one in a dense product.
_SLOWER = 200.0

#: From rows and columns, (n,) each, to entries of a covariance.
type Entries = Callable[[NDArray[np.intp], NDArray[np.intp]], Array]
#: Predictors eta = offset + X theta, however X is held.
type AffineMap = LinearMap | SummedMap


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
        result: Array = np.zeros((len(vectors), self.n_dim))
        if self.rest.nnz:
            result += (self._transposed @ vectors.T).T
        if len(self.columns):
            result[:, self.columns] += vectors @ self.dense
        return result

    @functools.cached_property
    def _transposed(self) -> sparse.csr_array:
        return self.rest.T.tocsr()

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
            for start in range(0, n, max(1, STREAMED // p)):
                rows = slice(start, start + max(1, STREAMED // p))
                if weights is not None and sign:  # a matrix times its transpose takes half of the work
                    half = np.sqrt(np.abs(weights[rows]))[:, None] * self.dense[rows]
                    total += sign * (half.T @ half)
                else:
                    total += self.dense[rows].T @ (matrix[rows] @ self.dense)
            result[np.ix_(self.columns, self.columns)] += total
            if self.rest.nnz:
                across = self._transposed @ product
                result[:, self.columns] += across
                result[self.columns] += across.T
        return result

    def quadratic_entries(self, matrix: sparse.csr_array, pattern: Pattern) -> Array:
        """Return the entries of X^T M X in a pattern, (n_entries,)."""
        result = entries_of(self._of_rest(matrix), pattern)
        if len(self.columns):
            product = matrix @ self.dense
            across = self._transposed @ product
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
        return sparse.csr_array(self._transposed @ (matrix @ self.rest))


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
        size = max(1, AT_ONCE // max(self.n_rows, 1))
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
    fits, work = n_dim * len(index) <= MOST_NUMBERS, float(n_dim) ** 2 * len(index)
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


# --- affine functions of theta that are sparse in theta and a few sums over many of its coordinates together ---


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


# --- covariances of linear predictors under a q of theta, of those only that are asked for ---


#: Products of two entries of X that covariances may be sums of, at most.
_MOST_PRODUCTS = 50_000_000


class PairCovariances:
    """Covariances of pairs of predictors, x_i^T V x_j."""

    def __init__(self, linear: LinearMap, pairs: list[Ints]) -> None:
        self._linear, self.pairs = linear, pairs
        rest = linear.rest
        rest.sort_indices()
        found = [_products(rest, pair) for pair in pairs]
        n_dim = rest.shape[1]
        codes = [np.maximum(a, b) * n_dim + np.minimum(a, b) for _, a, b, _ in found]
        entries = np.unique(np.concatenate([*codes, np.empty(0, dtype=np.int64)]))
        self._rows, self._cols = entries // n_dim, entries % n_dim
        self._used = np.unique(rest.indices) if len(linear.columns) else np.empty(0, dtype=np.intp)
        self._of_used = rest[:, self._used]
        # All in one product: of few rows, calls cost more than numbers.
        self._ends = np.cumsum([0, *map(len, pairs)])
        row = [part[0] + start for part, start in zip(found, self._ends[:-1], strict=True)]
        where = [np.concatenate([*part, np.empty(0, dtype=np.int64)]) for part in (row, codes)]
        value = np.concatenate([*(part[3] for part in found), np.empty(0)])
        where[1] = np.searchsorted(entries, where[1])
        self._sums = sparse.csr_array((value, tuple(where)), shape=(int(self._ends[-1]), len(entries)))

    def of(self, entries: Entries) -> list[Array]:
        """Return the covariances of each list of pairs, (n_pairs,)."""
        linear = self._linear
        values = entries(self._rows, self._cols)
        result = np.split(self._sums @ values, self._ends[1:-1])
        n_dense = len(linear.columns)
        if not n_dense:
            return result
        columns, used = linear.columns, self._used
        among = entries(np.repeat(columns, n_dense), np.tile(columns, n_dense)).reshape(n_dense, n_dense)
        if len(used):
            between = entries(np.repeat(columns, len(used)), np.tile(used, n_dense)).reshape(n_dense, -1)
            beside = self._of_used @ between.T
        root = None if len(used) else cholesky(among)
        for total, pair in zip(result, self.pairs, strict=True):
            for start in range(0, len(pair), max(1, STREAMED // n_dense)):
                part = slice(start, start + max(1, STREAMED // n_dense))
                i, j = pair[part].T
                same = i is j or np.array_equal(i, j)
                left = linear.dense[consecutive(i)]
                if same and root is not None:  # half of the work
                    half = dtrmm(1.0, root, left.T, trans_a=1, lower=1)
                    total[part] += np.einsum("ij,ij->j", half, half)
                    continue
                right = left if same else linear.dense[consecutive(j)]
                other = left @ among
                if len(used):
                    other = other + (2.0 if same else 1.0) * beside[consecutive(i)]
                total[part] += np.einsum("ij,ij->i", other, right)
                if len(used) and not same:
                    total[part] += np.einsum("ij,ij->i", left, beside[consecutive(j)])
        return result


def consecutive(index: Ints) -> slice | Ints:
    """Return a slice where an index is one: no copy is made then."""
    if len(index) and index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


def _products(rest: sparse.csr_array, pair: Ints) -> tuple[Ints, Ints, Ints, Array]:
    """Return number of the pair, two columns and the product of entries, for all pairs of entries of two rows."""
    n, at_i, at_j = paired_entries(rest.indptr.astype(np.int64), pair, _MOST_PRODUCTS)
    columns = rest.indices.astype(np.int64)
    number = np.repeat(np.arange(len(pair)), n)
    return number, columns[at_i], columns[at_j], rest.data[at_i] * rest.data[at_j]


def paired_entries(starts: Ints, pair: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Return, for pairs of rows of a sparse matrix, how many pairs of entries each has, and which entries these are."""
    i, j = pair.T
    lengths = np.diff(starts)
    n_i, n_j = lengths[i], lengths[j]
    n = n_i * n_j
    if n.sum() > most:
        raise TooDenseError
    number = np.repeat(np.arange(len(pair)), n)
    place = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
    per_row = np.maximum(np.repeat(n_j, n), 1)
    return n, starts[i][number] + place // per_row, starts[j][number] + place % per_row
