"""The pattern of a Hessian that is a sum over rows: the coordinates that meet in a row."""

from collections.abc import Iterable, Sequence

import numpy as np

from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.refusal import TooDenseError
from pymc_ngvi.core.sparsity.dependence_sets import Dependence, Ints, Pairs
from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.expectation import RowFunction

# --- derivatives of rows, added up by predictor ---


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


#: Entries that are held, at most.
_MOST_ENTRIES = 40_000_000


def pattern_of(predictors: Dependence, pairs: Iterable[tuple[Ints, Ints]]) -> Pattern:
    """Return where X^T M X can differ from 0."""
    index = predictors.index.ravel()
    found = Pairs(predictors.sets.shape[1])
    for rows, cols in pairs:
        used = np.ones(len(rows), dtype=bool)
        first = Dependence(predictors.sets, index[rows])
        if np.array_equal(rows, cols):
            found.add_within(first, used)
        else:
            found.add_across(first, Dependence(predictors.sets, index[cols]), used)
    return found.pattern(_MOST_ENTRIES)


def pattern_of_rows(functions: Iterable[RowFunction], predictors: Dependence) -> Pattern | None:
    """Return where the Hessian of a sum over rows can differ from 0; None where these entries are too many to hold."""
    pairs = [(f.index[:, a], f.index[:, b]) for f in functions for a, b in np.argwhere(np.tril(f.interacts))]
    try:
        return pattern_of(predictors, pairs)
    except TooDenseError:
        return None
