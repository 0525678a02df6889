"""log p of the model and of the data that were fitted, as a whole and in terms, whatever the model's data are now."""

from collections.abc import Sequence
from operator import methodcaller
from typing import Any

import numpy as np

from pymc_ngvi.core.linalg import SMALL
from pymc_ngvi.core.sizes import AT_ONCE
from pymc_ngvi.core.types import Array, Indices
from pymc_ngvi.density import LogDensity, ModelDensity
from pymc_ngvi.density.expectations import RowTerms
from pymc_ngvi.density.shards import ShardedDensity
from pymc_ngvi.marginal.quadrature import BatchPlan, Forest, TermsByRows, sub_forest, whole

# --- terms of log p whose rows are in shards: those of the prior here, those of the data where these are, added up ---

#: Numbers that are sent at a time.
_SENT = 2 * AT_ONCE


class TermsInShards:
    """The terms of log p; see `pymc_ngvi.marginal.quadrature.TermsOfBlocks`.

    Groups may have rows in several shards: what these say adds up.
    """

    def __init__(self, density: ShardedDensity, forest: Forest) -> None:
        rows = density.prior.rows
        assert rows is not None
        self._prior = TermsByRows(RowTerms(rows, forest), forest)
        self._shards, self._forest = density.shards, forest
        self._places: list[Indices] = self._shards.ask(methodcaller("of_likelihood", _places, forest))

    def plan(self, forest: Forest, n_draws: int, n_nodes: int) -> BatchPlan:
        """Return how to evaluate terms at so many draws, and nodes each: all shards at once."""
        return whole(self, forest, min(max(1, _SENT // (n_nodes * forest.n_local)), n_draws))

    def terms(self, g: Array, local: Array) -> tuple[Array, Array]:
        """Return the term of the globals, (n,), and those of local coordinates, (n, n_nodes, n_local)."""
        of_globals, of_locals = self._prior.terms(g, local)
        for places, (first, second) in zip(self._places, self._of_shards(g, local), strict=True):
            of_globals += first
            of_locals[:, :, places] += second
        return of_globals, of_locals

    def _of_shards(self, g: Array, local: Array) -> Sequence[tuple[Array, Array]]:
        own = [local[:, :, places] for places in self._places]
        answers = self._shards.ask([methodcaller("of_likelihood", _terms, None, g, part) for part in own])
        if any(answer is None for answer in answers):  # a shard that was made again knows no forest yet
            answers = self._shards.ask([methodcaller("of_likelihood", _terms, self._forest, g, part) for part in own])
        return answers


def _places(likelihood: LogDensity, forest: Forest) -> Indices:
    """Return the places of the local coordinates of a shard: all of each tree that its rows depend on."""
    rows = likelihood.rows
    assert rows is not None
    touched = np.zeros(forest.n_dim, dtype=bool)
    depends = rows.predictors.dependence
    touched[depends.sets[np.unique(depends.index)].indices] = True
    blocks = np.unique(forest.block[touched[forest.locals_]])
    return np.flatnonzero(np.isin(forest.block, blocks))


def _terms(likelihood: LogDensity, forest: Forest | None, g: Array, local: Array) -> tuple[Array, Array] | None:
    """Return the terms of a shard at its own local coordinates; None where it has to be told the forest."""
    if forest is None and "terms of shard" not in likelihood.functions.made:
        return None
    return likelihood.functions.once("terms of shard", lambda: _by_rows(likelihood, forest)).terms(g, local)


def _by_rows(likelihood: LogDensity, whole: Forest | None) -> TermsByRows:
    rows = likelihood.rows
    assert rows is not None
    assert whole is not None
    forest = sub_forest(whole, _places(likelihood, whole))
    return TermsByRows(RowTerms(rows, forest), forest)


# log p of the model and of the data that were fitted, as a whole and in terms, whatever the model's data are now.


class FittedDensity:
    """What an exact posterior evaluates of a model, for as long as it is there.

    Terms are compiled when they are first asked for: moments and draws of the globals of a loaded posterior need none.
    """

    def __init__(self, density: ModelDensity, forest: Forest, point: Array, log_p: float | None = None) -> None:
        self._density, self._forest, self._point = density, forest, point
        self._log_p, self._is_checked = log_p, log_p is None
        self._terms: TermsByRows | TermsInShards | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle: all but what is compiled."""
        return {**self.__dict__, "_terms": None}

    def log_p_at_point(self) -> float:
        """Return log p at the point."""
        if self._log_p is None:
            with self._density.data.restored():
                self._log_p = self._now()
        return self._log_p

    def logp(self, theta: Array) -> Array:
        """Return log p, (n,), at the rows of ``theta``."""
        with self._density.data.restored():
            self._check()
            return self._density.logp(theta)

    def terms(self, g: Array, local: Array) -> tuple[Array, Array]:
        """Return the term of the globals, (n,), and those of local coordinates, (n, n_nodes, n_local)."""
        split = self.split()
        with self._density.data.restored():
            return split.terms(g, local)

    def plan(self, forest: Forest, n_draws: int, n_nodes: int) -> BatchPlan:
        """Return how to evaluate the terms by parts."""
        return self.split().plan(forest, n_draws, n_nodes)

    def split(self) -> TermsByRows | TermsInShards:
        """Return the terms, those of rows."""
        if self._terms is None:
            with self._density.data.restored():
                self._check()
                self._terms = self._of_rows()
        return self._terms

    def _of_rows(self) -> TermsByRows | TermsInShards:
        density = self._density
        if isinstance(density, ShardedDensity):
            return TermsInShards(density, self._forest)
        rows = density.by_rows.found
        assert rows is not None
        with density.functions.timed():
            return TermsByRows(RowTerms(rows, self._forest), self._forest)

    def _check(self) -> None:
        """Raise ValueError where log p is not what it was: the model is another one."""
        if self._is_checked:
            return
        now, then = self._now(), self._log_p
        assert then is not None
        if not np.isclose(now, then, rtol=SMALL, atol=SMALL, equal_nan=True):
            raise ValueError(
                f"No draws can be made on this model: at the mean of the Gaussian fit its log p is {now:.8g}, and that "
                f"of the model which was fitted {then:.8g}. The priors, or data that are no pm.Data, differ: fit again."
            )
        self._is_checked = True

    def _now(self) -> float:
        return float(self._density.logp(self._point[None])[0])
