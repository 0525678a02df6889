"""The choice of a rule of quadrature for each row: as fine as it takes, in each of its directions."""

from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.expectation import RowFunction
from pymc_ngvi.rows.levels import Index, Levels, by_code, merged, one_finer, only, unpacked

#: Values of a function that one expectation may take, and nodes of a rule, where finer ones have not settled it.
_MOST_VALUES, _MOST_NODES = 2**22, 10_000
#: Level of a rule that reaches five standard deviations: coarser ones would not see a bend out there.
_FAR = 3
#: Part that counts of an error in a derivative, in units of standard deviations: it moves the optimum, and costs what
#: its square does.
_OF_DERIVATIVES = 0.1
#: Relative rounding of an expectation.
_ROUNDING = 1e-13


class Choice(NamedTuple):
    """Rules of rows, and what they give.

    Parameters
    ----------
    codes : ndarray of int, shape (n_rows,)
    whitened : ndarray, shape (1 + k + k (k + 1) / 2, n_rows)
        See `RowFunction.whitened`.
    error : ndarray, shape (n_rows,)
        Nats by which expectations may be wrong, as far as finer rules tell; infinite where they are not finite.
    """

    codes: Levels
    whitened: Array
    error: Array


def chosen(
    function: RowFunction, mean: Array, root: Array, rows: Index, codes: Levels, whitened: Array, tolerance: float
) -> Choice:
    """Choose the rules of rows, from given ones on, for one block of directions after another.

    Where the expectation differs too much from that by the next finer rule, that one is taken: both by the coarsest
    rules in all other directions, as what one direction adds to the error hangs little on those.

    Parameters
    ----------
    function : RowFunction
    mean, root, rows, codes
        See `RowFunction.whitened`.
    whitened : ndarray
        By the given rules.
    tolerance : float
        Nats that the expectation of a row may be off by.
    """
    search = _Search(function, mean, root, rows, codes, whitened)
    n_blocks = len(function.blocks)
    allowed = tolerance + _ROUNDING * np.abs(whitened[0])
    error = np.zeros(len(codes))
    for block in range(n_blocks):
        # A block's share, and what those before it have left of theirs.
        with_left = allowed * (block + 1) / n_blocks - error
        error += search.settle(block, np.maximum(allowed / n_blocks, with_left))
    search.take(merged(search.codes, n_blocks, function.n_nodes))
    return Choice(search.codes, search.whitened, error)


class _Search:
    """The state of a choice: the rules of rows, and expectations by these or, in some rows, by others."""

    def __init__(
        self, function: RowFunction, mean: Array, root: Array, rows: Index, codes: Levels, whitened: Array
    ) -> None:
        self._function, self._mean, self._root, self._rows = function, mean, root, rows
        self.codes, self.whitened, self._by = codes.copy(), whitened.copy(), codes

    def take(self, codes: Levels) -> None:
        """Take rules, and expectations by them."""
        other = np.flatnonzero(codes != self._by)
        self.whitened[:, other] = self._by_rules(codes[other], other)
        self.codes = self._by = codes

    def settle(self, block: int, allowed: Array) -> Array:
        """Choose the levels of a block of directions; return by how much finer ones would differ, (n_rows,)."""
        one, own = one_finer(block), only(block)
        now = self.whitened.copy()
        other = np.flatnonzero(self._by != self.codes & own)
        now[:, other] = self._by_rules(self.codes[other] & own, other)
        finer, of_finer = np.empty_like(now), np.full(len(self.codes), -1, dtype=np.int16)
        left, error = np.arange(len(self.codes)), np.full(len(self.codes), np.inf)
        while len(left):
            rough = []
            for code, part in by_code(self.codes[left]):
                at = left[part]
                if (to := self._finer_than(code, block, len(at))) is None:
                    continue  # what is known of the error stays
                new = at[of_finer[at] != to & own]
                finer[:, new], of_finer[new] = self._by_rule(to & own, new), to & own
                error[at] = self._apart(finer[:, at], now[:, at])
                # Finer rules reach farther: what is not finite stays so.
                rough.append(at[(error[at] > allowed[at]) & np.isfinite(now[:, at]).all(axis=0)])
                self.codes[rough[-1]] = code + one
                is_known = code + one == to
                now[:, rough[-1]] = finer[:, rough[-1]] if is_known else self._by_rule((code + one) & own, rough[-1])
            left = np.concatenate(rough) if rough else left[:0]
        alone = self.codes & own == self.codes
        self.whitened[:, alone], self._by = now[:, alone], np.where(alone, self.codes, self._by)
        return error

    def _finer_than(self, code: int, block: int, n_rows: int) -> int | None:
        """Return the rule that one is compared with: the next, but one that reaches as far as bends may count."""
        n_nodes, n_levels = self._function.n_nodes, self._function.n_levels
        level = unpacked(code, len(n_levels))[block]
        if level + 1 >= n_levels[block]:
            return None
        far = min(_FAR, n_levels[block] - 1) if self._function.blocks[block] == 1 else 0
        finer = code + one_finer(block) * max(1, far - level)
        few = n_nodes(finer) <= _MOST_NODES or len(n_levels) == 1
        return finer if few and (level < far or n_nodes(finer) * n_rows <= _MOST_VALUES) else None

    def _by_rule(self, code: int, at: Index) -> Array:
        return self._by_rules(np.full(len(at), code, dtype=np.int16), at)

    def _by_rules(self, codes: Levels, at: Index) -> Array:
        return self._function.whitened(self._mean[at], self._root[at], codes, self._rows[at])

    def _apart(self, new: Array, old: Array) -> Array:
        with np.errstate(invalid="ignore"):
            apart = np.abs(new - old)[: self._function.n_moments]
            apart[1:] *= _OF_DERIVATIVES
        result: Array = np.where(np.isfinite(apart).all(axis=0), apart.max(axis=0), np.inf)
        return result
