"""Covariances of linear predictors under a q of theta, of those only that are asked for."""

import numpy as np

from scipy import sparse
from scipy.linalg.blas import dtrmm

from pymc_ngvi.core.linalg import cholesky
from pymc_ngvi.core.refusal import TooDenseError
from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.linear_map import Entries, LinearMap

#: Products of two entries of X that covariances may be sums of, at most; numbers of predictors at a time.
_MOST_PRODUCTS, _AT_A_TIME = 50_000_000, 2**20


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
            for start in range(0, len(pair), max(1, _AT_A_TIME // n_dense)):
                part = slice(start, start + max(1, _AT_A_TIME // n_dense))
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
