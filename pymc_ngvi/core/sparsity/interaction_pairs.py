"""Pairs of coordinates that interact, collected as products of sets and written out once."""

from dataclasses import dataclass, field

import numpy as np

from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.refusal import TooDenseError
from pymc_ngvi.core.sparsity.dependence_sets import (
    Bools,
    Dependence,
    check_entries,
    distinct_rows,
    pairs_of,
)

#: Pairs, repetitions counted, that are formed at a time, and in all: about twenty seconds' work.
_PAIRS_AT_A_TIME = 20_000_000
_MAX_PAIRS = 300_000_000
#: Largest sets of which others may be parts.
_MAX_COVERS = 32


@dataclass
class Pairs:
    """Sets whose coordinates all interact with one another, and pairs of sets that interact across."""

    n_dim: int
    _within: dict[int, tuple[sparse.csr_array, Bools]] = field(default_factory=dict)
    _across: list[tuple[sparse.csr_array, sparse.csr_array]] = field(default_factory=list)

    def add_within(self, part: Dependence, used: Bools) -> None:
        """Let all coordinates of each used element interact."""
        if id(part.sets) not in self._within:
            self._within[id(part.sets)] = (part.sets, np.zeros(part.sets.shape[0], dtype=bool))
        self._within[id(part.sets)][1][part.index[used]] = True

    def add_across(self, a: Dependence, b: Dependence, used: Bools) -> None:
        """Let the coordinates of each element of ``a`` interact with those of the same element of ``b``."""
        a, b = _aligned(a, used.ndim), _aligned(b, used.ndim)
        shapes = list(zip(a.index.shape, b.index.shape, used.shape, strict=True))
        one_a = tuple(axis for axis, (length, _, full) in enumerate(shapes) if length == 1 != full)
        one_b = tuple(axis for axis, (_, length, full) in enumerate(shapes) if length == 1 != full)
        if used.all() or not (one_a and one_b):
            # A factor that is the same all along an axis meets the union of the other over it.
            a = a.kept(used.any(axis=one_a, keepdims=True)).reduced(one_b, keepdims=True)
            b = b.kept(used.any(axis=one_b, keepdims=True)).reduced(one_a, keepdims=True)
        else:
            a, b = a.kept(used), b.kept(used)
        ia, ib, _ = pairs_of(a.index.ravel(), b.index.ravel())
        keep = (np.diff(a.sets.indptr)[ia] > 0) & (np.diff(b.sets.indptr)[ib] > 0)
        if keep.any():
            for part, chosen in ((a, ia[keep]), (b, ib[keep])):
                check_entries(int(np.diff(part.sets.indptr)[chosen].sum(dtype=np.int64)))
            self._across.append((a.sets[ia[keep]], b.sets[ib[keep]]))

    def pattern(self, max_entries: int) -> Pattern:
        """Return the pattern of all that interact."""
        left, right = self._factors()
        reach = np.diff(left.indptr).astype(np.int64) * np.diff(right.indptr)
        if reach.max(initial=0) > 2 * max_entries or reach.sum() > _MAX_PAIRS:
            raise TooDenseError
        return _lower_product(left, right, max_entries)

    def _factors(self) -> tuple[sparse.csr_array, sparse.csr_array]:
        """Return two matrices L and R such that the pairs are where L^T R is not 0, in either triangle."""
        diagonal = sparse.eye_array(self.n_dim, dtype=bool, format="csr")
        sets = sparse.vstack([diagonal, *(s[used] for s, used in self._within.values())], "csr")
        sets = distinct_rows(sets)
        kept = []
        for _ in range(_MAX_COVERS):
            lengths = np.diff(sets.indptr).astype(np.int64)
            if (lengths**2).sum() <= _PAIRS_AT_A_TIME:
                break
            largest = sets[[lengths.argmax()]]
            kept.append(largest)
            inside = np.zeros(sets.shape[1], dtype=np.int64)
            inside[largest.indices] = 1
            sets = sets[sets @ inside < lengths]
        within = sparse.vstack([*kept, sets], format="csr")
        if not self._across:
            return within, within
        across = distinct_rows(sparse.hstack([sparse.vstack(side) for side in zip(*self._across, strict=True)], "csr"))
        left, right = across[:, : self.n_dim], across[:, self.n_dim :]
        return (
            sparse.vstack([within, left, right], format="csr"),
            sparse.vstack([within, right, left], format="csr"),
        )


def _aligned(part: Dependence, ndim: int) -> Dependence:
    """Put axes of length 1 before those of an array."""
    shape = part.index.shape
    return Dependence(part.sets, part.index.reshape((1,) * (ndim - len(shape)) + shape))


def _lower_product(left: sparse.csr_array, right: sparse.csr_array, max_entries: int) -> Pattern:
    """Return where the lower triangle of ``left.T @ right`` is not 0, some rows of it at a time."""
    n_dim = left.shape[1]
    by_row = left.T.tocsr()
    lengths = np.diff(right.indptr).astype(np.int64)
    work = np.concatenate([[0], np.cumsum(lengths[by_row.indices])])[by_row.indptr]
    codes, total, start = [], 0, 0
    while start < n_dim:
        stop = max(start + 1, int(np.searchsorted(work, work[start] + _PAIRS_AT_A_TIME, side="right")) - 1)
        block = (by_row[start:stop] @ right[:, :stop]).tocsr()
        i = np.repeat(np.arange(start, stop), np.diff(block.indptr))
        below = block.indices <= i
        made = i[below] * n_dim + block.indices[below]
        made.sort()
        codes.append(made)
        total += len(made)
        if total > max_entries:
            raise TooDenseError
        start = stop
    rows, cols = np.divmod(np.concatenate(codes), n_dim)
    return Pattern(rows, cols, n_dim)
