"""Expectations of rows of one kind under one Gaussian, by rules that are given or chosen."""

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.choice import chosen
from pymc_ngvi.rows.expectation import RowFunction, derivatives, roots, row_slices
from pymc_ngvi.rows.levels import Levels

#: Times wider than it was for which a predictor needs another look at its rule, and part of its width for which it may
#: do with a coarser one; with these, those are looked at that will need it soon.
_WIDER, _NARROWER, _SOON_WIDER, _SOON_NARROWER = 1.25, 0.5, 1.1, 0.7

#: Whitened third and fourth derivatives, relative to the value, that are rounding.
_STRAIGHT = 1e-9
#: Rows whose rules are chosen at a time.
_AT_A_TIME = 2**17


class Taken:
    """Expectations of rows of one kind."""

    def __init__(
        self, rows: RowFunction, mean: Array, cov: Array, given: tuple[Levels, NDArray[np.float32]] | None
    ) -> None:
        self._rows, self._mean, self._root = rows, mean, roots(cov)
        self._sd = np.sqrt(cov.diagonal(axis1=1, axis2=2).max(axis=1)).astype(np.float32)
        nothing = np.zeros(len(mean), dtype=np.int16), np.zeros(len(mean), dtype=np.float32)
        self._is_new = given is None
        self.codes, self.sd = nothing if given is None else given
        self.error = np.nan
        self._whitened = rows.whitened(mean, self._root, self.codes, np.arange(len(mean)))

    @property
    def value(self) -> float:
        """The expectation of the sum of all rows."""
        return float(self.values.sum())

    @property
    def values(self) -> Array:
        """The expectation of each row, (n_rows,)."""
        return self._whitened[0]

    def choose(self, tolerance: float) -> None:
        """Choose the rules of rows that are wider than those they have were chosen for, or much narrower."""
        wider, narrower = self._changed()
        at = np.flatnonzero(wider | narrower)
        if not len(at):
            return
        self.codes, self.sd = np.where(narrower, 0, self.codes).astype(np.int16), self.sd.copy()
        coarser = np.flatnonzero(narrower)
        mean, root, error = self._mean, self._root, 0.0
        if len(coarser):
            self._whitened[:, coarser] = self._rows.whitened(mean[coarser], root[coarser], self.codes[coarser], coarser)
        for part in (at[here] for here in row_slices(len(at), _AT_A_TIME)):
            found = chosen(
                self._rows, mean[part], root[part], part, self.codes[part], self._whitened[:, part], tolerance
            )
            self.codes[part], self.sd[part], self._whitened[:, part] = found.codes, self._sd[part], found.whitened
            error += float(found.error.sum())
        if len(at) == len(self.codes):
            self.error = error

    def _changed(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which rows are wider, and which narrower, than those that their rules were chosen for."""
        if self._is_new:
            return np.ones(len(self.codes), dtype=bool), np.zeros(len(self.codes), dtype=bool)
        return changed(self.codes, self.sd, self._sd)

    def bends(self) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
        """Return E[f''], E[f^(3)], E[f^(4)] of rows with one predictor, and where the last two are not rounding."""
        second, third, fourth = self._whitened[2:]
        sd = self._root[:, 0, 0]
        per_sd = np.divide(1.0, sd, out=np.zeros_like(sd), where=sd > 0.0)
        is_bent = np.abs(third) + np.abs(fourth) > _STRAIGHT * (1.0 + np.abs(self._whitened[0]))
        return second * per_sd**2, third * per_sd**3, fourth * per_sd**4, is_bent

    def derivatives(self) -> tuple[Array, Array]:
        """Return E[grad f], (n_rows, k), and E[hess f], (n_rows, k, k)."""
        grad, hessian = derivatives(self._whitened, self._root)
        if not self._rows.interacts.all():  # quadrature is off by little, but not by nothing
            hessian[:, ~self._rows.interacts] = 0.0
        return grad, hessian


def changed(
    codes: Levels, before: NDArray[np.float32], now: NDArray[np.float32]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which rows are wider, and which narrower, than those that their rules were chosen for."""
    fine = codes > 0
    wider, narrower = now > _WIDER * before, fine & (now < _NARROWER * before)
    if wider.any() or narrower.any():
        wider, narrower = now > _SOON_WIDER * before, fine & (now < _SOON_NARROWER * before)
    return wider, narrower
