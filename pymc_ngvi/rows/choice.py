"""The choice of a rule of quadrature for each row: as fine as it takes, in each of its directions."""

from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.expectation import RowFunction
from pymc_ngvi.rows.levels import Index, Levels, by_code, merged, one_finer, unpacked

#: Values of a function that one expectation may take, and nodes of a rule, where finer ones have not settled it.
_MOST_VALUES, _MOST_NODES = 2**22, 10_000
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
            if few and (level < far or n_nodes(finer) * n_rows * self._function.n_evaluations <= _MOST_VALUES)
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
