"""Expectations of rows of one kind under one Gaussian, by rules that are given or chosen."""

from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.sizes import AT_ONCE, CACHED
from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.expectation import (
    Index,
    Levels,
    RowFunction,
    by_code,
    derivatives,
    merged,
    one_finer,
    roots,
    row_slices,
    unpacked,
)

# --- the choice of a rule of quadrature for each row: as fine as it takes, in each of its directions ---


#: Nodes of a rule, at most, where finer ones have not settled it.
_MOST_NODES = 10_000
#: Level of a rule that reaches five standard deviations: coarser ones would not see a bend out there.
_FAR = 3
#: Part that counts of an error in a derivative, in units of standard deviations: it moves the optimum, and costs what
#: its square does.
_OF_DERIVATIVES = 0.1
#: Relative rounding of an expectation.
_ROUNDING = 1e-13


class ChosenRules(NamedTuple):
    """Rules of rows, and what they give."""

    #: shape (n_rows,).
    codes: Levels
    #: See `RowFunction.whitened`; shape (1 + k + k (k + 1) / 2, n_rows).
    whitened: Array
    #: Nats by which expectations may be wrong, as far as finer rules tell; infinite where they are not finite; shape
    #: (n_rows,).
    error: Array


def chosen(
    function: RowFunction, mean: Array, root: Array, rows: Index, codes: Levels, whitened: Array, tolerance: float
) -> ChosenRules:
    """Choose the rules of rows, from given ones on.

    Where the expectation differs too much from that by the next finer rule in one of the directions, that one is taken.
    """
    search = _RuleSearch(function, mean, root, rows, codes, whitened)
    left = np.arange(len(codes))
    for block in range(len(function.blocks)):
        search.compare(block, left)
    while len(left):
        worst = search.to_refine(left, tolerance)
        for block in range(len(function.blocks)):
            at = left[worst == block]
            search.refine(block, at)
            search.compare(block, at)
        left = left[worst >= 0]
    codes = merged(search.codes, len(function.blocks), function.n_nodes)
    other = np.flatnonzero(codes != search.codes)
    search.whitened[:, other] = function.whitened(mean[other], root[other], codes[other], rows[other])
    return ChosenRules(codes, search.whitened, search.apart.sum(axis=0))


class _RuleSearch:
    """The state of a choice; each block of directions of each row has a finer rule, tried, or none."""

    def __init__(
        self, function: RowFunction, mean: Array, root: Array, rows: Index, codes: Levels, whitened: Array
    ) -> None:
        self._function, self._mean, self._root, self._rows = function, mean, root, rows
        self.codes, self.whitened = codes.copy(), whitened.copy()
        shape = len(function.blocks), len(codes)
        self.apart = np.full(shape, np.inf)
        self._finer, self._of_finer = np.empty((shape[0], *whitened.shape)), np.full(shape, -1, dtype=np.int16)
        self._can_refine = np.zeros(shape, dtype=bool)

    def compare(self, block: int, at: Index) -> None:
        """Try a finer rule in a block of directions; where there is none, what is known of the error stays."""
        for code, part in by_code(self.codes[at]):
            where, finer = at[part], self._finer_than(code, block, len(at[part]))
            self._can_refine[block, where] = finer is not None
            if finer is not None:
                new = where[self._of_finer[block, where] != finer]
                self._finer[block][:, new], self._of_finer[block, new] = self._by_rule(finer, new), finer
                self.apart[block, where] = self._apart(self._finer[block][:, where], self.whitened[:, where])

    def to_refine(self, at: Index, tolerance: float) -> Index:
        """Return the block of each row in which the error is largest; -1 where it may stay, or has to."""
        apart = np.where(self._can_refine[:, at], self.apart[:, at], 0.0)
        worst = apart.argmax(axis=0)
        # Finer rules reach farther: what is not finite stays so.
        hopeless = ~np.isfinite(self.whitened[:, at]).all(axis=0)
        allowed = tolerance + _ROUNDING * np.abs(self.whitened[0, at])
        enough = (apart.max(axis=0) <= allowed / len(apart)) | (self.apart[:, at].sum(axis=0) <= allowed)
        return np.where(enough | hopeless, -1, worst)

    def refine(self, block: int, at: Index) -> None:
        """Take the next finer rule in a block of directions."""
        for code, part in by_code(self.codes[at]):
            where, finer = at[part], self._finer_than(code, block, len(at[part]))
            self.codes[where] = code = code + one_finer(block)
            self.whitened[:, where] = self._finer[block][:, where] if code == finer else self._by_rule(code, where)

    def _finer_than(self, code: int, block: int, n_rows: int) -> int | None:
        """Return the rule that one is compared with: the next, but one that reaches as far as bends may count."""
        n_nodes, n_levels = self._function.n_nodes, self._function.n_levels
        level = unpacked(code, len(n_levels))[block]
        if level + 1 >= n_levels[block]:
            return None
        far = min(_FAR, n_levels[block] - 1) if self._function.blocks[block] == 1 else 0
        finer = code + one_finer(block) * max(1, far - level)
        few = n_nodes(finer) <= _MOST_NODES or len(n_levels) == 1
        return (
            finer
            if few and (level < far or n_nodes(finer) * n_rows * self._function.n_evaluations <= AT_ONCE)
            else None
        )

    def _by_rule(self, code: int, at: Index) -> Array:
        codes = np.full(len(at), code, dtype=np.int16)
        return self._function.whitened(self._mean[at], self._root[at], codes, self._rows[at])

    def _apart(self, new: Array, old: Array) -> Array:
        with np.errstate(invalid="ignore"):
            apart = np.abs(new - old)[: self._function.n_moments]
            apart[1:] *= _OF_DERIVATIVES
        return np.where(np.isfinite(apart).all(axis=0), apart.max(axis=0), np.inf)


#: Times wider than it was for which a predictor needs another look at its rule, and part of its width for which it may
#: do with a coarser one; with these, those are looked at that will need it soon.
_WIDER, _NARROWER, _SOON_WIDER, _SOON_NARROWER = 1.25, 0.5, 1.1, 0.7

#: Whitened third and fourth derivatives, relative to the value, that are rounding.
_STRAIGHT = 1e-9


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
        for part in (at[here] for here in row_slices(len(at), CACHED)):
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
