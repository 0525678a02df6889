"""Many matrices of one sparse pattern as one: a block-diagonal matrix, whose blocks have the fronts of one of them.

Fronts of one size are handled together. Those of all blocks are of the same sizes: what is done to one matrix is done
to hundreds by the same calls.
"""

import functools

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.families.matrices.sparse.fronts import Fronts, FrontStack
from pymc_ngvi.families.matrices.sparse.order import Ints


@dataclass(frozen=True, eq=False)
class RepeatedFronts:
    """The fronts of a block-diagonal matrix with ``n`` blocks; see `AnyFronts`.

    Parameters
    ----------
    one : Fronts
        Of each block.
    n : int
    """

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
