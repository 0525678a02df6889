"""Precisions of one sparse pattern, many at once, and their Cholesky factors."""

import functools

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import prices
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.matrices.sparse.cholesky import SparseCholesky
from pymc_ngvi.families.matrices.sparse.fronts import Fronts, FrontStack, fronts_of
from pymc_ngvi.families.matrices.sparse.order import Ints, Supernodes

# Many matrices of one sparse pattern as one: a block-diagonal matrix, whose blocks have the fronts of one of them.
# Fronts of one size are handled together. Those of all blocks are of the same sizes: what is done to one matrix is done
# to hundreds by the same calls.


@dataclass(frozen=True, eq=False)
class RepeatedFronts:
    """The fronts of a block-diagonal matrix with ``n`` blocks; see `AnyFronts`."""

    #: Of each block.
    one: Fronts
    n: int

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return self.n * self.one.n_dim

    @property
    def n_panels(self) -> int:
        """Numbers in all panels."""
        return self.n * self.one.n_panels

    @property
    def n_fronts(self) -> int:
        """Numbers in all fronts."""
        return self.n * self.one.n_fronts

    @functools.cached_property
    def place(self) -> Ints:
        """Places of the coordinates in the order of elimination: one block after the other."""
        return self._apart(self.one.place, self.one.n_dim).ravel()

    @functools.cached_property
    def order(self) -> Ints:
        """The coordinates in the order of elimination."""
        return self._apart(self.one.order, self.one.n_dim).ravel()

    @functools.cached_property
    def stacks(self) -> list[FrontStack]:
        """All fronts: those of all blocks in one stack."""
        return [self._stack(stack) for stack in self.one.stacks]

    def _stack(self, stack: FrontStack) -> FrontStack:
        number, k, m = stack.shape
        n, size = self.n, (k + m) ** 2
        own, beside = (self._moved(places) for places in (stack.own, stack.beside))
        filled = self._apart(stack.filled, number * size).ravel()
        to = self._of_fronts(stack.to).reshape(n * len(stack.to), -1)
        begin = n * stack.at, n * stack.panels
        return FrontStack(own, beside, *begin, filled, stack.lower, to, stack.n_alike, stack.is_leaf)

    def _moved(self, places: Ints) -> Ints:
        """Return places in all blocks, of the last one past the end where they are past that of one."""
        d = self.one.n_dim
        moved = self._apart(places, d)
        return np.where(places == d, self.n_dim, moved).reshape(self.n * len(places), -1)

    def _apart(self, index: Ints, step: int) -> Ints:
        """Return an index, of any shape, for each block, ``step`` apart."""
        return index + step * np.arange(self.n).reshape(-1, *[1] * index.ndim)

    def _of_fronts(self, at: Ints) -> Ints:
        """Return where numbers of fronts are among those of all blocks, with an axis of blocks in front."""
        sizes = [number * (k + m) ** 2 for number, k, m in (stack.shape for stack in self.one.stacks)]
        return self._within(at, [stack.at for stack in self.one.stacks], sizes)

    def of_panels(self, at: Ints) -> Ints:
        """Return where numbers of panels are among those of all blocks, with an axis of blocks in front."""
        sizes = [number * (k + m) * k for number, k, m in (stack.shape for stack in self.one.stacks)]
        return self._within(at, [stack.panels for stack in self.one.stacks], sizes)

    def _within(self, at: Ints, begin: list[int], sizes: list[int]) -> Ints:
        if not at.size:
            return np.empty((self.n, *at.shape), dtype=np.int64)
        order = np.argsort(begin, kind="stable")
        starts, lengths = np.array(begin)[order], np.array(sizes)[order]
        stack = np.searchsorted(starts, at, side="right") - 1
        blocks = np.arange(self.n).reshape(-1, *[1] * at.ndim)
        return self.n * starts[stack] + blocks * lengths[stack] + (at - starts[stack])

    @functools.cached_property
    def diagonal(self) -> Ints:
        """Where the panels have the diagonal, in the order of the coordinates."""
        return self.of_panels(self.one.diagonal).ravel()

    @functools.cached_property
    def used(self) -> NDArray[np.bool_]:
        """Which entries of the panels are in the lower triangle, and were not filled up."""
        parts = [np.tile(self.one.used[stack.of_panels], self.n) for stack in self.one.stacks]
        return np.concatenate(parts)

    def panels(self, at: Ints, values: Array) -> Array:
        """Return panels with values, (n, n_entries), at the places that one block has them."""
        result = np.zeros(self.n_panels)
        result[self.of_panels(at)] = values
        return result


# --- precisions of one sparse pattern ---

#: Part of the entries from which on a matrix is one front.
_DENSE = 0.5


class Precisions:
    """Sparse precisions of one pattern, and their factors."""

    def __init__(self, pattern: Pattern) -> None:
        d = pattern.n_dim
        is_dense = pattern.n_entries > _DENSE * d * (d + 1) / 2
        one = Supernodes(np.zeros(d, dtype=np.int64), np.zeros(1, dtype=np.int64))
        self.pattern, self.fronts = pattern, Fronts(pattern, one) if is_dense else fronts_of(pattern)
        self._places = self.fronts.places(pattern.rows, pattern.cols)
        self._diagonal = np.searchsorted(pattern.rows * d + pattern.cols, np.arange(d) * (d + 1))
        self._weights = np.where(pattern.off_diagonal, 2.0, 1.0)
        self._last_repeated = functools.lru_cache(maxsize=4)(self._repeated)  # of this one alone

    def _repeated(self, n: int) -> tuple[RepeatedFronts, NDArray[np.int64]]:
        """Return the fronts of so many, and where their panels have the entries, (n, n_entries)."""
        fronts = RepeatedFronts(self.fronts, n)
        return fronts, fronts.of_panels(self._places)

    def factored(self, precision: Array) -> tuple["Factors | None", NDArray[np.bool_]]:
        """Return the factors of those of some precisions, (n, n_entries), that have one, and which these are."""
        found = self._of(precision)
        if found is not None:
            return found, np.ones(len(precision), dtype=bool)
        there = self._have_factors(precision)
        return (self._of(precision[there]) if there.any() else None), there

    def _of(self, precision: Array) -> "Factors | None":
        fronts, at = self._last_repeated(len(precision))
        self.count(len(precision))
        panels = np.zeros(fronts.n_panels)
        panels[at] = precision
        cholesky = SparseCholesky.of(fronts, panels)
        return None if cholesky is None else Factors(self, cholesky, at, len(precision))

    def _have_factors(self, precision: Array) -> NDArray[np.bool_]:
        if self._of(precision) is not None:
            return np.ones(len(precision), dtype=bool)
        if len(precision) == 1:
            return np.zeros(1, dtype=bool)
        half = len(precision) // 2
        return np.concatenate([self._have_factors(precision[:half]), self._have_factors(precision[half:])])

    def count(self, n: int) -> None:
        """Count a pass through the factors of so many."""
        one = self.fronts
        prices.count(prices.of_fronts(n * one.n_products, n * one.n_fronts, len(one.stacks)))

    def trace(self, first: Array, second: Array) -> Array:
        """Return the traces of products of matrices, (n,), of which one has no other entries than these."""
        return np.einsum("ne,ne,e->n", first, second, self._weights)


@dataclass(frozen=True, eq=False)
class Factors:
    """Cholesky factors L_k of precisions."""

    of: Precisions
    #: Of all as one block-diagonal matrix.
    cholesky: SparseCholesky
    #: Where panels have the entries; shape (n, n_entries).
    at: NDArray[np.intp]
    n: int

    @functools.cached_property
    def log_det(self) -> Array:
        """Log determinants of the factors, (n,)."""
        diagonal = self.cholesky.panels[self.cholesky.fronts.diagonal].reshape(self.n, -1)
        return np.log(diagonal).sum(axis=1)

    @functools.cached_property
    def covariance(self) -> Array:
        """Entries of the covariances, (n, n_entries)."""
        self.of.count(self.n)
        return self.cholesky.inverse[self.at]

    @property
    def sd(self) -> Array:
        """Standard deviations, (n, n_dim)."""
        return np.sqrt(self.covariance[:, self.of._diagonal])

    @property
    def entropy(self) -> Array:
        """Of the Gaussians, (n,), nats."""
        return 0.5 * self.of.pattern.n_dim * (1.0 + np.log(2.0 * np.pi)) - self.log_det

    def solve(self, columns: Array, *, transposed: bool = False) -> Array:
        """Return L_k^-1, or L_k^-T, times columns, (n, n_dim, m)."""
        n, d, m = columns.shape
        return self.cholesky.solve(columns.reshape(n * d, m), transposed=transposed).reshape(n, d, m)

    def times_covariance(self, vectors: Array) -> Array:
        """Return the covariance times a vector for each, (n, n_dim)."""
        return self.solve(self.solve(vectors[:, :, None]), transposed=True)[:, :, 0]
