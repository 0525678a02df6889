"""Derivatives of rows, added up by predictor."""

from collections.abc import Sequence

import numpy as np

from scipy import sparse

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.values import Array


class Scatter:
    """Adds up gradients and Hessians of rows; where entries belong is found once."""

    def __init__(self, index: Sequence[Ints], n: int) -> None:
        self._n = n
        self._at = np.concatenate([kind.ravel() for kind in index])
        squares = [(kind[:, :, None] * n + kind[:, None, :]).ravel() for kind in index]
        entries, self._place = np.unique(np.concatenate(squares), return_inverse=True)
        self._columns = entries % n
        self._starts = np.searchsorted(entries, n * np.arange(n + 1))

    def __call__(self, grads: Sequence[Array], hessians: Sequence[Array]) -> tuple[Array, sparse.csr_array]:
        """Return the sums."""
        grad = np.bincount(self._at, np.concatenate([g.ravel() for g in grads]), minlength=self._n)
        values = np.concatenate([h.ravel() for h in hessians])
        sums = np.bincount(self._place, values, minlength=len(self._columns))
        return grad, sparse.csr_array((sums, self._columns, self._starts), shape=(self._n, self._n))
