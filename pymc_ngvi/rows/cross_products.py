"""X^T M X for X and M that are combinations of fixed matrices, whatever the weights of these: all products, once."""

from collections.abc import Sequence

import numpy as np

from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.values import Array

#: Part of the entries of a matrix from which on a product with it is that of a dense one.
_DENSE = 0.25


class CrossProducts:
    """The entries of X^T M X, where X = sum_k a_k X_k and M = sum_m b_m M_m."""

    def __init__(self, designs: Sequence[sparse.csr_array], weights: Sequence[sparse.csr_array]) -> None:
        d, factors, found = designs[0].shape[1], list[tuple[int, int, int]](), list[sparse.csr_array]()
        for m, weight in enumerate(weights):
            for j, second in enumerate(designs):
                product = sparse.csr_array(weight @ second)
                for i, first in enumerate(designs[: j + 1]):
                    gram = _product(first, product)
                    gram = sparse.csr_array(sparse.tril(gram if i == j else gram + gram.T))
                    gram.eliminate_zeros()
                    if gram.nnz:
                        factors.append((m, i, j))
                        found.append(gram)
        places = [np.repeat(np.arange(d), np.diff(g.indptr)) * d + g.indices for g in found]
        every = np.unique(np.concatenate([*places, np.arange(d) * (d + 1)]))
        self.pattern = Pattern(every // d, every % d, d)
        rows = np.concatenate([np.searchsorted(every, at) for at in places])
        cols = np.repeat(np.arange(len(found)), [g.nnz for g in found])
        data = np.concatenate([g.data for g in found])
        self._sums = sparse.csr_array((data, (rows, cols)), shape=(len(every), len(found)))
        self._factors = np.array(factors).T

    def __call__(self, of_designs: Array, of_weights: Array) -> Array:
        """Return the entries, (n, n_entries), from a, (n, n_designs), and b, (n, n_weights)."""
        m, i, j = self._factors
        products = of_weights[:, m] * of_designs[:, i] * of_designs[:, j]
        return np.ascontiguousarray((self._sums @ products.T).T)


def _product(first: sparse.csr_array, second: sparse.csr_array) -> sparse.csr_array:
    """Return the product of the transpose of one matrix with another one."""
    if min(first.nnz, second.nnz) > _DENSE * first.shape[0] * first.shape[1]:
        return sparse.csr_array(first.toarray().T @ second.toarray())
    return sparse.csr_array(first.T @ second)
