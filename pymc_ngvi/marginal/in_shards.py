"""Terms of log p whose rows are in shards: those of the prior here, those of the data where these are, added up."""

from collections.abc import Sequence

import numpy as np

from pymc_ngvi.core.types import Array
from pymc_ngvi.density.blocks import RowTerms
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.density.shards.density import ShardedDensity
from pymc_ngvi.density.shards.requests import ApplyToLikelihood
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.parts import BatchPlan, Integers, SomeBlocks, TermsByRows, sub_forest

#: Numbers that are sent at a time, and draws at least.
_SENT, _FEWEST = 2**23, 1


class TermsInShards:
    """The terms of log p; see `pymc_ngvi.marginal.parts.TermsOfBlocks`.

    Groups may have rows in several shards: what these say adds up.

    Parameters
    ----------
    density : ShardedDensity
        A sum over rows.
    forest : Forest

    Raises
    ------
    CannotSplit
        If a row of the prior depends on several blocks at once; ShardError, if one of a shard does.
    """

    def __init__(self, density: ShardedDensity, forest: Forest) -> None:
        rows = density.prior.rows
        assert rows is not None
        self._prior = TermsByRows(RowTerms(rows, forest), forest)
        self._shards, self._forest = density.shards, forest
        self._places: list[Integers] = self._shards.ask(ApplyToLikelihood(_places, (forest,)))

    def chunk(self, n_nodes: int) -> int:
        """Return how many draws to evaluate at once, at ``n_nodes`` nodes each."""
        return max(_FEWEST, _SENT // (n_nodes * self._forest.n_local))

    def plan(self, n_draws: int, n_nodes: int) -> BatchPlan:
        """Return how to evaluate terms at so many draws, and nodes each: all shards at once."""
        return BatchPlan(
            min(self.chunk(n_nodes), n_draws), [SomeBlocks(self._forest, slice(None), slice(None), self.terms)]
        )

    def terms(self, g: Array, local: Array) -> tuple[Array, Array]:
        """Return the term of the globals, (n,), and those of local coordinates, (n, n_nodes, n_local)."""
        of_globals, of_locals = self._prior.terms(g, local)
        for places, (first, second) in zip(self._places, self._of_shards(g, local), strict=True):
            of_globals += first
            of_locals[:, :, places] += second
        return of_globals, of_locals

    def _of_shards(self, g: Array, local: Array) -> Sequence[tuple[Array, Array]]:
        own = [local[:, :, places] for places in self._places]
        answers = self._shards.ask([ApplyToLikelihood(_terms, (None, g, part)) for part in own])
        if any(answer is None for answer in answers):  # a shard that was made again knows no forest yet
            answers = self._shards.ask([ApplyToLikelihood(_terms, (self._forest, g, part)) for part in own])
        return answers


def _places(likelihood: LogDensity, forest: Forest) -> Integers:
    """Return the places of the local coordinates of a shard: all of each tree that its rows depend on."""
    rows = likelihood.rows
    assert rows is not None
    touched = np.zeros(forest.n_dim, dtype=bool)
    touched[rows.linear_map.plain.columns_used()] = True
    blocks = np.unique(forest.block[touched[forest.locals_]])
    return np.flatnonzero(np.isin(forest.block, blocks))


def _terms(likelihood: LogDensity, forest: Forest | None, g: Array, local: Array) -> tuple[Array, Array] | None:
    """Return the terms of a shard at its own local coordinates; None where it has to be told the forest."""
    made = likelihood.functions.made.terms_of_shard
    if forest is None and not made.is_made:
        return None
    terms: TermsByRows = made.of(lambda: _by_rows(likelihood, forest))
    return terms.terms(g, local)


def _by_rows(likelihood: LogDensity, whole: Forest | None) -> TermsByRows:
    rows = likelihood.rows
    assert rows is not None
    assert whole is not None
    forest = sub_forest(whole, _places(likelihood, whole))
    return TermsByRows(RowTerms(rows, forest), forest)
