"""The terms of log p by parts: some blocks at a time, at many draws of the globals, so that all stays in cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import prices
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.split import RowTerms
from pymc_ngvi.marginal.forest import Forest

type Integers = NDArray[np.intp]

#: Values of rows in a temporary; draws at a time, and draws times nodes.
_CACHED, _MOST_DRAWS, _MOST_POINTS = 2**18, 256, 2**12
#: Draws at a time where all terms are asked for, at least, and numbers that are held then.
_FEWEST_DRAWS, _HELD = 32, 2**21


@dataclass(frozen=True, eq=False)
class SomeBlocks:
    """Some of the blocks."""

    #: Of these alone, with all globals.
    forest: Forest
    #: Where their coordinates are among all local ones.
    places: Integers | slice
    #: Which they are.
    blocks: slice
    #: From globals, (n, p), and their local coordinates, (n, n_nodes, n_places), to the term of the globals, (n,),
    #: and theirs, (n, n_nodes, n_places). The first is 0 in all parts but one.
    terms: Callable[[Array, Array], tuple[Array, Array]]


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """How the terms are evaluated."""

    #: Draws at a time.
    size: int
    parts: list[SomeBlocks]


class TermsOfBlocks(Protocol):
    """The terms of log p; see `pymc_ngvi.marginal.on_model.FittedDensity`."""

    def chunk(self, n_nodes: int) -> int:
        """Return how many draws to evaluate at once."""

    def terms(self, g: Array, local: Array) -> tuple[Array, Array]:
        """Return the term of the globals and those of local coordinates."""

    def plan(self, forest: Forest, n_draws: int, n_nodes: int) -> BatchPlan:
        """Return how to evaluate them by parts."""


def whole(terms: TermsOfBlocks, forest: Forest, n_nodes: int) -> BatchPlan:
    """Return the plan of a single part."""
    return BatchPlan(terms.chunk(n_nodes), [SomeBlocks(forest, slice(None), slice(None), terms.terms)])


class TermsByRows:
    """Plans for terms that are made of rows."""

    def __init__(self, terms: RowTerms, forest: Forest) -> None:
        self._terms, self._forest = terms, forest
        self._plans: dict[int, list[SomeBlocks]] = {}
        self._order = np.argsort(forest.block, kind="stable")
        self._starts = np.searchsorted(forest.block[self._order], np.arange(forest.n_blocks + 1))

    def chunk(self, n_nodes: int) -> int:
        """Return how many draws to evaluate at once, at ``n_nodes`` nodes each."""
        return max(_FEWEST_DRAWS, _HELD // (n_nodes * self._forest.n_local))

    def terms(self, g: Array, local: Array) -> tuple[Array, Array]:
        """Return the term of the globals, (n,), and those of local coordinates, (n, n_nodes, n_local)."""
        n, n_nodes, n_local = local.shape
        of_globals, of_locals = np.zeros(n), np.empty((n_local, n_nodes, n)).transpose(2, 1, 0)
        plan = self.plan(n, n_nodes)
        for start in range(0, n, plan.size):
            rows = slice(start, start + plan.size)
            for part in plan.parts:
                first, second = part.terms(g[rows], local[rows, :, part.places])
                of_globals[rows] += first
                of_locals[rows, :, part.places] = second
        return of_globals, of_locals

    def plan(self, n_draws: int, n_nodes: int) -> BatchPlan:
        """Return how to evaluate terms at so many draws, and nodes each."""
        size = min(n_draws, _MOST_DRAWS, max(1, _MOST_POINTS // n_nodes))
        n_rows = max(1, _CACHED // (max(size, 1) * n_nodes)).bit_length()
        if n_rows not in self._plans:
            self._plans[n_rows] = self._parts(2 ** (n_rows - 1))
        return BatchPlan(size, self._plans[n_rows])

    def _parts(self, n_rows: int) -> list[SomeBlocks]:
        """Return parts of about so many rows."""
        label = (np.cumsum(self._terms.n_rows) - 1) // n_rows
        starts = np.flatnonzero(np.diff(label, prepend=-1))
        return [self._part(int(a), int(b)) for a, b in zip(starts, [*starts[1:], len(label)], strict=True)]

    def _part(self, first: int, last: int) -> SomeBlocks:
        places = np.sort(self._order[self._starts[first] : self._starts[last]])
        of_blocks = self._terms.of_blocks(first, last, places).terms
        of_globals = self._terms.of_globals if first == 0 else lambda g: np.zeros(len(g))
        forest = sub_forest(self._forest, places)
        at = slice(int(places[0]), int(places[-1]) + 1) if places[-1] - places[0] == len(places) - 1 else places
        each = prices.of_node(int(self._terms.n_rows[first:last].sum()), (last - first) / len(self._terms.n_rows))

        def terms(g: Array, local: Array) -> tuple[Array, Array]:
            prices.count(len(g) * local.shape[1] * each)
            return of_globals(g), of_blocks(g, local)

        return SomeBlocks(forest, at, slice(first, last), terms)


def sub_forest(forest: Forest, places: Integers) -> Forest:
    """Return the forest of some whole trees."""
    parent = forest.parent[places]
    inner = np.where(parent < 0, -1, np.searchsorted(places, parent))
    return Forest(forest.globals_, forest.locals_[places], inner, forest.level[places])
