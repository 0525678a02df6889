"""Affine functions of theta as numbers: an offset, and a matrix of dense columns and sparse ones."""

import functools

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.batch import Batch
from pymc_ngvi.core.messages import TooDenseError
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sizes import AT_ONCE, MOST_NUMBERS, STREAMED
from pymc_ngvi.core.sparsity import Dependence, Ints, slices
from pymc_ngvi.core.types import Array, Indices, Spread

#: Share of the rows from which on a column is kept as a dense one.
_DENSE = 0.2
#: Time of a product of two entries of a sparse matrix in that of one in a dense product.
_SLOWER = 200.0


@dataclass(frozen=True, eq=False)
class LinearMap:
    """Predictors eta = offset + X (theta, t), with sums t = A theta over many coordinates, if there are any."""

    #: shape (n_rows,).
    offset: Array
    #: Columns of X that are dense; shape (n_rows, n_dense).
    dense: Array
    #: Which these are; shape (n_dense,).
    columns: Indices
    #: All others; 0 in the dense ones; shape (n_rows, n_dim + n_sums).
    rest: sparse.csr_array
    #: A; shape (n_sums, n_dim); None where there are no sums.
    weights: Array | None = None

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return int(self.rest.shape[1]) if self.weights is None else int(self.weights.shape[1])

    @functools.cached_property
    def joint(self) -> "LinearMap":
        """The same as a function of theta and t as if these were apart."""
        return self if self.weights is None else replace(self, weights=None)

    @functools.cached_property
    def plain(self) -> "LinearMap":
        """The same as a matrix of theta alone."""
        if self.weights is None:
            return self
        n, own = self.n_dim, self.columns < self.n_dim
        whole = sparse.csc_array(self.rest)
        of_sums = whole[:, n:].toarray()
        of_sums[:, self.columns[~own] - n] += self.dense[:, ~own]
        columns = self.columns[own]
        others = sparse.csr_array(np.where(np.isin(np.arange(n), columns), 0.0, self.weights))
        rest = sparse.csr_array(whole[:, :n] + sparse.csr_array(of_sums) @ others)
        return LinearMap(self.offset, self.dense[:, own] + of_sums @ self.weights[:, columns], columns, rest)

    def covariances(self, q: Spread, rows: Ints, cols: Ints) -> Array:
        """Return entries of the covariance of theta and t under a Gaussian of theta, (n_entries,)."""
        n = self.n_dim
        high, low = np.maximum(rows, cols), np.minimum(rows, cols)
        inner, both = high < n, low >= n
        if self.weights is None or inner.all():
            return q.covariances(rows, cols)
        of_sums = q.covariance_times(self.weights)
        across = ~inner & ~both
        result = np.empty(len(rows))
        result[inner] = q.covariances(rows[inner], cols[inner])
        result[across] = of_sums[high[across] - n, low[across]]
        result[both] = (of_sums @ self.weights.T)[high[both] - n, low[both] - n]
        return result

    def _without_sums(self, slopes: Array) -> Array:
        """Return derivatives by theta, (n, n_dim), from those by theta and t as if these were apart."""
        n = self.n_dim
        return slopes if self.weights is None else np.asarray(slopes[:, :n] + slopes[:, n:] @ self.weights)

    def __call__(self, theta: Array) -> Array:
        """Return the predictors, (n, n_rows), at points (n, n_dim)."""
        return self.offset + self.times(theta)

    def times(self, vectors: Array) -> Array:
        """Return X times each vector, (n, n_rows) from (n, n_dim)."""
        if self.weights is not None:
            vectors = np.hstack([vectors, vectors @ self.weights.T])
        result: Array = vectors[:, self.columns] @ self.dense.T
        if self.rest.nnz:
            result += (self.rest @ vectors.T).T
        return result

    def transposed_times(self, vectors: Array) -> Array:
        """Return X^T times each vector, (n, n_dim) from (n, n_rows)."""
        result: Array = np.zeros((len(vectors), self.rest.shape[1]))
        if self.rest.nnz:
            result += (self._transposed @ vectors.T).T
        if len(self.columns):
            result[:, self.columns] += vectors @ self.dense
        return self._without_sums(result)

    @functools.cached_property
    def _transposed(self) -> sparse.csr_array:
        return self.rest.T.tocsr()

    def rows(self, index: Indices) -> Array:
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
            for rows in slices(n, max(1, STREAMED // p)):
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
        return self._without_sums(self._without_sums(result).T)

    def quadratic_entries(self, matrix: sparse.csr_array, pattern: Pattern) -> Array:
        """Return the entries of X^T M X in a pattern, (n_entries,)."""
        if self.weights is not None:
            return self.plain.quadratic_entries(matrix, pattern)
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
        if self.weights is None:
            return result
        n, n_joint = self.n_dim, len(result)
        of_sums = self.joint.quadratic_times(matrix, np.eye(n_joint)[n:])
        beside = 2.0 * of_sums[:, :n] + of_sums[:, n:] @ self.weights
        return np.asarray(result[:n] + np.sum(self.weights * beside, axis=0))

    def _of_rest(self, matrix: sparse.csr_array) -> sparse.csr_array:
        return sparse.csr_array(self._transposed @ (matrix @ self.rest))


@dataclass(frozen=True, eq=False)
class MatrixPlan:
    """How to find the matrix of an affine function from its values, whatever these are."""

    n_rows: int
    #: Those to be held as dense ones.
    columns: Indices
    #: Where to evaluate: sums of columns that no row has two of, then the dense ones; shape (n_directions, n_dim).
    directions: Array
    #: Entries of the others, and which of the directions each is read from; shape (n_entries,).
    rows: Indices
    cols: Indices
    colours: Indices

    @classmethod
    def of(cls, dependence: Dependence, n_dim: int) -> "MatrixPlan":
        """Return the plan for rows that depend on some of ``n_dim`` coordinates."""
        index = dependence.index.ravel()
        sets = dependence.sets.astype(np.int64)
        share = (sets.T @ np.bincount(index, minlength=sets.shape[0])) / max(len(index), 1)
        is_dense = np.asarray(share > _DENSE) | _is_cheaper_dense(sets, index)
        columns = np.flatnonzero(is_dense)
        few = sparse.csr_array(sets, copy=True)
        few.data = np.where((~is_dense)[few.indices], few.data, 0)
        few.eliminate_zeros()
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


def _colours(sets: sparse.csr_array) -> Indices:
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


def consecutive(index: Ints) -> slice | Ints:
    """Return a slice where an index is one: no copy is made then."""
    if len(index) and index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


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


# --- affine functions of one pattern at many values: products with all matrices, as with one block-diagonal matrix ---


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
    columns: Indices
    #: Entries of the others; shape (n, n_entries).
    data: Array
    #: Where these are.
    sparsity: Sparsity
    #: Of sums t = A x over many coordinates, whose columns of X come after those of x: A; shape (n_sums, n_dim).
    weights: Array | None = None

    @classmethod
    def of(cls, linear: LinearMap) -> "ManyMaps":
        """Return a single one."""
        rest = linear.rest
        rest.sort_indices()
        sparsity = Sparsity(rest.indptr.astype(np.int64), rest.indices.astype(np.int64), rest.shape[1])
        data, dense = rest.data[None], linear.dense[None]
        return cls(linear.offset[None], dense, linear.columns, data, sparsity, linear.weights)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.offset)

    def __getitem__(self, which: Indices) -> "ManyMaps":
        """Return some of them."""
        dense = self.dense if len(self.dense) == 1 else self.dense[which]
        return replace(self, offset=self.offset[which], dense=dense, data=self.data[which])

    @functools.cached_property
    def blocks(self) -> sparse.csr_array:
        """The sparse parts of all X as one block-diagonal matrix."""
        return self.sparsity.repeated(len(self)).filled(self.data)

    def _with_sums(self, x: Array) -> Array:
        """Return columns, (n, n_dim, m), with the sums of each after them."""
        return x if self.weights is None else np.concatenate([x, np.matmul(self.weights, x)], axis=1)

    def _without_sums(self, slopes: Array) -> Array:
        """Return derivatives by x, (n, n_dim, m), from those by x and its sums as if these were apart."""
        if self.weights is None:
            return slopes
        d = self.weights.shape[1]
        return np.asarray(slopes[:, :d] + np.matmul(self.weights.T, slopes[:, d:]))

    def times(self, x: Array) -> Array:
        """Return X_k times columns, (n, n_predictors, m) from (n, n_dim, m)."""
        x = self._with_sums(x)
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
        return self._without_sums(result[:, :, None])[:, :, 0]

    def transposed_rows(self, index: Indices) -> Array:
        """Return some rows of X_k as columns, (n, n_dim, n_rows)."""
        n, sparsity = len(self), self.sparsity
        result = np.zeros((n, sparsity.n_dim, len(index)))
        result[:, self.columns] = np.swapaxes(self.dense[:, index], 1, 2)
        for at, row in enumerate(index):
            here = slice(sparsity.starts[row], sparsity.starts[row + 1])
            result[:, sparsity.indices[here], at] = self.data[:, here]
        return self._without_sums(result)


# --- entries of covariances and precisions that rows ask for, at many values of what their predictors hang on ---

#: Products of two entries of X that covariances may be sums of, at most, at one value.
_MOST_PRODUCTS = 20_000_000


class Entries:
    """Entries of symmetric matrices by x that rows ask for: of its covariance, and of its precision."""

    def __init__(self, sparsity: Sparsity, columns: Indices, indices: Iterable[Ints]) -> None:
        # Of the predictors of rows, (n_rows, k) for each kind of these.
        pairs = [i[:, [a, b]] for i in indices for a in range(i.shape[1]) for b in range(a + 1)]
        self.n_dim, self._columns, self.pairs = sparsity.n_dim, columns, pairs
        d = self.n_dim
        used = np.unique(sparsity.indices) if len(columns) else np.empty(0, dtype=np.int64)
        parts = [paired_entries(sparsity.starts, pair, _MOST_PRODUCTS) for pair in pairs]
        columns_of = [(sparsity.indices[i], sparsity.indices[j]) for _, i, j in parts]
        codes = np.concatenate([np.maximum(a, b) * d + np.minimum(a, b) for a, b in columns_of])
        i, j = np.tril_indices(len(columns))
        among = np.maximum(columns[i], columns[j]) * d + np.minimum(columns[i], columns[j])
        between = np.maximum(columns[:, None], used) * d + np.minimum(columns[:, None], used)
        every = np.unique(np.concatenate([codes, among, between.ravel(), np.arange(d) * (d + 1)]))
        self.rows, self.cols = every // d, every % d
        self._used = used
        full = np.empty((len(columns),) * 2, dtype=np.int64)
        full[i, j] = full[j, i] = np.searchsorted(every, among)
        self._among, self._between = full, np.searchsorted(every, between)
        counts = np.concatenate([part[0] for part in parts])
        starts = np.concatenate([[0], np.cumsum(counts)])
        # Covariances of pairs are sums over entries of that of x, times products of these entries of X.
        self._sums = Sparsity(starts, np.searchsorted(every, codes), len(every))
        self._first, self._second = (np.concatenate([part[k] for part in parts]) for k in (1, 2))
        self._ends = np.cumsum([0, *map(len, pairs)])
        self.is_off = self.rows != self.cols

    @property
    def pattern(self) -> Pattern:
        """The same as a pattern."""
        return Pattern(self.rows, self.cols, self.n_dim)

    def of(self, maps: ManyMaps) -> "EntriesAt":
        """Return what goes with some maps."""
        values = maps.data[:, self._first] * maps.data[:, self._second]
        return EntriesAt(self, maps, self._sums.repeated(len(maps)).filled(values))


@dataclass(frozen=True, eq=False)
class EntriesAt:
    """The same with numbers: the sums of all maps as one block-diagonal matrix."""

    entries: Entries
    maps: ManyMaps
    sums: sparse.csr_array

    def covariances(self, values: Array) -> list[Array]:
        """Return the covariances of each list of pairs, (n, n_pairs), from entries of those of x, (n, n_entries)."""
        own, maps = self.entries, self.maps
        n = len(values)
        found = np.asarray(self.sums @ values.ravel()).reshape(n, -1)
        result = [found[:, a:b] for a, b in zip(own._ends[:-1], own._ends[1:], strict=True)]
        if not len(own._columns):
            return result
        among = values[:, own._among]
        left = np.matmul(maps.dense, among)  # (n, n_predictors, n_dense)
        beside = None
        if len(own._used):
            between = np.zeros((n, own.n_dim, len(own._columns)))
            between[:, own._used] = values[:, own._between].transpose(0, 2, 1)
            shape = (n * own.n_dim, -1)
            beside = np.asarray(maps.blocks @ between.reshape(shape)).reshape(n, -1, len(own._columns))
        for total, pair in zip(result, own.pairs, strict=True):
            i, j = (consecutive(side) for side in pair.T)
            of_i, of_j = maps.dense[:, i], maps.dense[:, j]
            total += np.einsum("nrp,nrp->nr", left[:, i], np.broadcast_to(of_j, left[:, i].shape))
            if beside is not None:
                total += np.einsum("nrp,nrp->nr", beside[:, i], np.broadcast_to(of_j, beside[:, i].shape))
                total += np.einsum("nrp,nrp->nr", beside[:, j], np.broadcast_to(of_i, beside[:, j].shape))
        return result

    def quadratic(self, weights: Sequence[Array], matrix: sparse.csr_array) -> Array:
        """Return the entries of X^T M X, (n, n_entries)."""
        own, maps = self.entries, self.maps
        n = len(maps)
        result = np.asarray(self.sums.T @ np.concatenate(weights, axis=1).ravel()).reshape(n, -1)
        result[:, own.is_off] *= 0.5
        if len(own._columns):
            p = len(own._columns)
            dense = np.broadcast_to(maps.dense, (n, *maps.dense.shape[1:]))
            product = np.asarray(matrix @ dense.reshape(-1, p)).reshape(n, -1, p)
            result[:, own._among] = np.matmul(np.swapaxes(maps.dense, 1, 2), product)
            if len(own._used):
                across = np.asarray(maps.blocks.T @ product.reshape(-1, p)).reshape(n, -1, p)
                result[:, own._between] = across[:, own._used].transpose(0, 2, 1)
        return result


# --- what rows see of Gaussians: means and covariances of their predictors ---


@dataclass(frozen=True, eq=False)
class Seen(Batch):
    """What rows see of a Gaussian."""

    #: shape (n_predictors,).
    mean: Array
    #: Of all pairs of predictors that a row has: an array, (n_rows,), for each pair of each kind of rows.
    covariances: list[Array]


def symmetric(parts: Iterator[Array], k: int) -> Array:
    """Return symmetric matrices, (n, k, k), of their next entries by rows of the lower triangle."""
    i, j = np.tril_indices(k)
    values = np.stack([next(parts).ravel() for _ in i], axis=1)
    result = np.empty((len(values), k, k))
    result[:, i, j] = result[:, j, i] = values
    return result
