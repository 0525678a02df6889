"""Log p as rows at many values of what is given, with effects that one row alone reads integrated out."""

from collections.abc import Sequence

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.values import Array
from pymc_ngvi.density.rows_over import RowsOver
from pymc_ngvi.rows.expectation import RowFunction
from pymc_ngvi.rows.many import ManyRows
from pymc_ngvi.rows.many_own import ManyRowsLeft, Narrowing
from pymc_ngvi.rows.own_effects import OwnEffects


class RowsLeftOver:
    """Rows of what is left at many values of what is given."""

    def __init__(self, whole: RowsOver, effects: OwnEffects, functions: Sequence[RowFunction]) -> None:
        self._whole = whole
        self._narrowing = Narrowing(effects, functions, whole.sparsity, whole.columns)
        self.entries = self._narrowing.entries

    @property
    def n_values(self) -> int:
        """Numbers of the predictors at one value."""
        return self._whole.n_values

    def at(self, values: Array) -> tuple[ManyRows, NDArray[np.bool_]]:
        """Return rows at some values, (n, n_outside), and at which of them they add up to log p."""
        rows, agrees = self._whole.at(values)
        if not agrees.any():
            return rows, agrees
        with np.errstate(all="ignore"):
            narrowed, is_right = self._narrowing.of(rows)
        return narrowed, agrees & is_right

    def logp(self, values: Array, theta: Array) -> Array:
        """Return log p, (n, m), at points (n, m, n_dim) for each of the values, (n, n_outside)."""
        rows, agrees = self.at(values)
        result = np.full(theta.shape[:2], -np.inf)
        if isinstance(rows, ManyRowsLeft):
            result[agrees] = rows.values(np.swapaxes(theta, 1, 2))[agrees]
        return result
