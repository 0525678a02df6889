"""Entries of covariances and precisions that rows ask for, at many values of what their predictors hang on."""

import functools

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy import sparse
from scipy.linalg.blas import dtrmm

from pymc_ngvi.core.linalg import cholesky
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sizes import STREAMED
from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.expectation import row_slices
from pymc_ngvi.rows.linear_map import LinearMap, consecutive, paired_entries

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
    columns: NDArray[np.intp]
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

    def __getitem__(self, which: NDArray[np.intp]) -> "ManyMaps":
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

    def transposed_rows(self, index: NDArray[np.intp]) -> Array:
        """Return some rows of X_k as columns, (n, n_dim, n_rows)."""
        n, sparsity = len(self), self.sparsity
        result = np.zeros((n, sparsity.n_dim, len(index)))
        result[:, self.columns] = np.swapaxes(self.dense[:, index], 1, 2)
        for at, row in enumerate(index):
            here = slice(sparsity.starts[row], sparsity.starts[row + 1])
            result[:, sparsity.indices[here], at] = self.data[:, here]
        return self._without_sums(result)


#: Products of two entries of X that covariances may be sums of, at most, at one value.
_MOST_PRODUCTS = 20_000_000


class _Products(NamedTuple):
    """Covariances of pairs of predictors, as sums over entries of the covariance of x."""

    #: From entries to all pairs.
    sparsity: Sparsity
    #: Entries of X that are multiplied; shape (n_products,).
    first: Ints
    second: Ints


class _DenseRows(NamedTuple):
    """Rows of the dense columns of X: those that have many entries, and those that are one coordinate, or none."""

    #: shape (n_many,).
    many: NDArray[np.intp]
    #: Of these rows; shape (n or 1, n_many, n_dense).
    values: Array
    #: shape (n_single,).
    single: NDArray[np.intp]
    #: Where the entry of each other row is, and its square; shape (n or 1, n_single).
    column: NDArray[np.intp]
    square: Array

    @classmethod
    def of(cls, dense: Array) -> "_DenseRows":
        """Return those of dense columns, (n or 1, n_predictors, n_dense)."""
        has_many = (np.count_nonzero(dense, axis=2) > 1).any(axis=0)
        many, single = np.flatnonzero(has_many), np.flatnonzero(~has_many)
        others = dense[:, single]
        column = np.argmax(others != 0.0, axis=2)
        square = np.take_along_axis(others, column[:, :, None], axis=2)[:, :, 0] ** 2
        return cls(many, dense[:, consecutive(many)], single, column, square)

    def variances(self, covariance: Array) -> Array:
        """Return the variances of predictors, (n, n_predictors), from the covariances of the columns' coordinates."""
        n, p = len(covariance), covariance.shape[1]
        result: Array = np.empty((n, len(self.many) + len(self.single)))
        root = cholesky(covariance[0]) if n == 1 else None
        for rows in row_slices(len(self.many), max(1, STREAMED // (n * p))):
            values = self.values[:, rows]
            if root is not None:  # half of the work
                half = dtrmm(1.0, root, values[0].T, trans_a=1, lower=1)
                result[0, self.many[rows]] = np.einsum("ij,ij->j", half, half)
                continue
            left = np.matmul(values, covariance)
            result[:, self.many[rows]] = np.einsum("nrp,nrp->nr", left, np.broadcast_to(values, left.shape))
        each = np.arange(n)[:, None]
        result[:, self.single] = self.square * covariance[each, self.column, self.column]
        return result

    def gram(self, weights: Array) -> Array:
        """Return X^T W X among these columns, (n, n_dense, n_dense), of diagonal W, (n, n_predictors)."""
        of_many = weights[:, self.many, None]
        if (of_many >= 0.0).all():  # then it is a product with itself, which takes half as long
            root = np.sqrt(of_many) * self.values
            result: Array = np.matmul(np.swapaxes(root, 1, 2), root)
        else:
            result = np.matmul(np.swapaxes(self.values, 1, 2), of_many * self.values)
        each = np.arange(len(weights))[:, None]
        np.add.at(result, (each, self.column, self.column), weights[:, self.single] * self.square)
        return result


class Entries:
    """Entries of symmetric matrices by x that rows ask for: of its covariance, and of its precision."""

    def __init__(self, sparsity: Sparsity, columns: NDArray[np.intp], pairs: list[Ints]) -> None:
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
        sums = Sparsity(starts, np.searchsorted(every, codes), len(every))
        self._products = _Products(sums, *(np.concatenate([part[k] for part in parts]) for k in (1, 2)))
        self._ends = np.cumsum([0, *map(len, pairs)])
        self._is_plain = len(columns) > 0 and not len(used) and all((p[:, 0] == p[:, 1]).all() for p in pairs)
        self.is_off = self.rows != self.cols

    @property
    def pattern(self) -> Pattern:
        """The same as a pattern."""
        return Pattern(self.rows, self.cols, self.n_dim)

    def of(self, maps: ManyMaps) -> "EntriesAt":
        """Return what goes with some maps."""
        first, second = self._products.first, self._products.second
        values = maps.data[:, first] * maps.data[:, second]
        return EntriesAt(self, maps, self._products.sparsity.repeated(len(maps)).filled(values))


@dataclass(frozen=True, eq=False)
class EntriesAt:
    """The same with numbers: the sums of all maps as one block-diagonal matrix."""

    entries: Entries
    maps: ManyMaps
    sums: sparse.csr_array

    @functools.cached_property
    def _rows(self) -> _DenseRows:
        return _DenseRows.of(self.maps.dense)

    def covariances(self, values: Array) -> list[Array]:
        """Return the covariances of each list of pairs, (n, n_pairs), from entries of those of x, (n, n_entries)."""
        own, maps = self.entries, self.maps
        n = len(values)
        found = np.asarray(self.sums @ values.ravel()).reshape(n, -1)
        result = [found[:, a:b] for a, b in zip(own._ends[:-1], own._ends[1:], strict=True)]
        if not len(own._columns):
            return result
        among = values[:, own._among]
        if own._is_plain:
            variances = self._rows.variances(among)
            for total, pair in zip(result, own.pairs, strict=True):
                total += variances[:, consecutive(pair[:, 0])]
            return result
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
        if own._is_plain:
            result[:, own._among] = self._rows.gram(matrix.diagonal().reshape(n, -1))
        elif len(own._columns):
            p = len(own._columns)
            dense = np.broadcast_to(maps.dense, (n, *maps.dense.shape[1:]))
            product = np.asarray(matrix @ dense.reshape(-1, p)).reshape(n, -1, p)
            result[:, own._among] = np.matmul(np.swapaxes(maps.dense, 1, 2), product)
            if len(own._used):
                across = np.asarray(maps.blocks.T @ product.reshape(-1, p)).reshape(n, -1, p)
                result[:, own._between] = across[:, own._used].transpose(0, 2, 1)
        return result
