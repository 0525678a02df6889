"""Entries of covariances and precisions that rows ask for, at many values of what their predictors hang on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.covariances import consecutive, paired_entries
from pymc_ngvi.rows.many_maps import ManyMaps, Sparsity

#: Products of two entries of X that covariances may be sums of, at most, at one value.
_MOST_PRODUCTS = 20_000_000


class _Products(NamedTuple):
    """Covariances of pairs of predictors, as sums over entries of the covariance of x.

    Parameters
    ----------
    sparsity : Sparsity
        From entries to all pairs.
    first, second : ndarray of int, shape (n_products,)
        Entries of X that are multiplied.
    """

    sparsity: Sparsity
    first: Ints
    second: Ints


class Entries:
    """Entries of symmetric matrices by x that rows ask for: of its covariance, and of its precision.

    Parameters
    ----------
    sparsity : Sparsity
        Of X, but for its dense columns.
    columns : ndarray of int
        These.
    pairs : list of ndarray of int, shape (n_pairs, 2)
        Pairs of predictors that rows have, (i, j), each list of them for one pair of slots of one kind.

    Attributes
    ----------
    rows, cols : ndarray of int, shape (n_entries,)
        The lower triangle: all that are asked for, and the diagonal.

    Raises
    ------
    TooDenseError
    """

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
        """Return the entries of X^T M X, (n, n_entries).

        Parameters
        ----------
        weights : sequence of ndarray, shape (n, n_pairs)
            M at each list of pairs, (i, j); twice that where i is another slot of a row than j.
        matrix : scipy.sparse.csr_array
            M of all, as one block-diagonal matrix.
        """
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
