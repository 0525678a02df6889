"""Predictive densities of rows that are left out of groups, which are integrated again without them.

Given the globals, groups are independent: without some rows of a group, its integral is another one, and the ratio of
the two is the predictive density of these rows given the others. So draws of the globals alone are weighted, of which
each row says little.
"""

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.bridge import Side
from pymc_ngvi.core.parts import DataParts, passes, rows_of_set
from pymc_ngvi.core.refusal import NotApart
from pymc_ngvi.core.sizes import AT_ONCE, FIXED_SEED, N_SHOWN
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.observed_rows import MaskedDensity
from pymc_ngvi.marginal.integral import TreeIntegral
from pymc_ngvi.marginal.nodes import PathRule, references
from pymc_ngvi.marginal.on_model import FittedDensity
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.marginal.quadrature import by_root
from pymc_ngvi.marginal.trees import IntegratedTrees

#: Draws of the globals, at least and at most; values of rows in all, beyond which there are fewer than may be.
_FEWEST_DRAWS, _MOST_DRAWS, _MOST_VALUES = 500, N_SHOWN, 2**30
#: Of the fewest draws, those that may be beyond these values: more passes than that take longer than all other draws.
_TOO_FEW = 20
#: Of the ladder of rules: integrals themselves are wanted, not how they change with the globals. The next one moves
#: densities of rows of a random intercept and slope by 0.001 nats at most.
_RULE = 3

Ints = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Predictives:
    """Log densities, at draws, of what is left out and of what is predicted."""

    #: Of the draws, with all data; shape (n_draws,).
    log_weights: Array
    #: Of each part given the rest: by as much a draw is less likely without it; shape (n_draws, n_parts).
    log_out: Array
    #: Of each score, without its part; shape (n_draws, n_scores).
    log_scored: Array
    #: Independent draws that each is worth.
    worth: float = 1.0

    def side(self, score: int) -> Side:
        """Return densities of a score at draws."""
        known = np.isfinite(self.log_weights) & ~np.isnan(self.log_scored[:, score])
        return Side(self.log_scored[known, score], self.log_weights[known], self.worth)


class IntegratedAgain:
    """Integrals of groups with and without some rows, at globals of a pool."""

    def __init__(self, state: PoolState, trees: IntegratedTrees, rule: PathRule, masked: MaskedDensity) -> None:
        self._state, self._masked, self._trees, self._forest = state, masked, trees, trees.forest
        rules = references(self._forest.n_levels)
        self._rule = max(rule, rules[min(_RULE, len(rules) // 2)], key=lambda one: one.n_nodes)
        forest, depends = trees.forest, masked.rows.dependence()[:, trees.forest.locals_]
        of_block = np.ones(forest.n_local), (np.arange(forest.n_local), forest.block)
        #: What each row depends on: blocks, of which a factor of the density alone may be one; (n_rows, n_blocks).
        self._blocks = sparse.csr_array(depends @ sparse.csr_array(of_block, shape=(forest.n_local, forest.n_blocks)))

    def predictives(self, parts: DataParts) -> Predictives:
        """Return the predictive densities."""
        state, forest, blocks = self._state, self._forest, self._blocks
        if parts.out.shape[0] == blocks.shape[0]:  # what all rows have, as a probability of zeros, would take as many
            blocks = sparse.csr_array(blocks * (blocks.count_nonzero(axis=0) < blocks.shape[0]))  # passes: it is drawn
            blocks.eliminate_zeros()
        work = _Work.of(parts, blocks)
        rows, local, _ = self._trees.joint(state, state.pool, np.random.default_rng(FIXED_SEED))
        some = self._picked(1 + len(work.by_pass) + len(work.scores_by_pass), len(rows))
        theta, n = np.empty((len(some), forest.n_dim)), len(some)
        theta[:, forest.globals_], theta[:, forest.locals_] = state.pool.g[rows[some]], local[some]
        log_out, log_scored = np.empty((n, parts.out.shape[0])), np.empty((n, parts.scored.shape[0]))
        size = max(1, AT_ONCE // max(forest.n_local, self._blocks.shape[0], forest.n_blocks * (1 + len(work.by_pass))))
        for start in range(0, n, size):
            chunk = slice(start, min(start + size, n))
            self._chunk(parts, work, theta[chunk], log_out[chunk], log_scored[chunk])
        return Predictives(state.log_weights[rows[some]], log_out, log_scored)

    def _picked(self, n_passes: int, n_pool: int) -> Ints:
        """Return the rows of the pool that are used: all of them, as only together they are evenly spread, or a few."""
        values = n_passes * self._blocks.shape[0] * len(self._rule.nodes)
        if values > _MOST_VALUES // _TOO_FEW:
            raise NotApart(f"{n_passes:,} passes over {self._blocks.shape[0]:,} rows")
        n = int(np.clip(_MOST_VALUES // values, _FEWEST_DRAWS, _MOST_DRAWS))
        return np.sort(np.random.default_rng(FIXED_SEED).permutation(n_pool)[:n])

    def _chunk(self, parts: DataParts, work: "_Work", theta: Array, log_out: Array, log_scored: Array) -> None:
        """Fill in what some draws give.

        What rows have beside the integrals, being functions of globals alone, they have at any place of the others: so
        integrals are taken relative to their terms at a place, and the rows there are added.
        """
        rows = self._masked.rows(theta).T
        log_out[:], log_scored[:] = (parts.out @ rows).T, (parts.scored @ rows).T
        full = self._of_blocks(theta, np.empty(0, dtype=np.intp))
        kept: dict[int, Array] = {}
        for sets in work.by_pass:
            less = self._of_blocks(theta, np.concatenate([parts.rows_out(i) for i in sets]))
            for i in sets:
                blocks = work.blocks[i]
                kept[i] = less[:, blocks]
                log_out[:, i] += (full[:, blocks] - kept[i]).sum(axis=1)
        if parts.are_whole:
            log_scored[:] = log_out
            return
        rows_of_block = sparse.csr_array(self._blocks.T)
        for sets in work.scores_by_pass:
            some = self._of_blocks(theta, np.concatenate([work.still_out(parts, i, rows_of_block) for i in sets]))
            for i in sets:
                blocks, part = work.blocks_of_score[i], int(parts.part[i])
                without = kept[part][:, np.searchsorted(work.blocks[part], blocks)]
                log_scored[:, i] += (some[:, blocks] - without).sum(axis=1)

    def _of_blocks(self, theta: Array, out: Ints) -> Array:
        """Return the integrals of blocks without some rows over what is integrated at a place, (n, n_blocks)."""
        self._masked.leave_out(out)
        forest = self._forest
        terms = FittedDensity(self._masked.density, forest, self._state.gaussian.mean())
        integral = TreeIntegral(terms, forest, self._trees.centres)
        integral.rule = self._rule
        g, local = theta[:, forest.globals_], theta[:, forest.locals_]
        return integral.by_block(g) - by_root(forest, terms.terms(g, local[:, None])[1][:, 0])


@dataclass(frozen=True, eq=False)
class _Work:
    """Blocks of parts and of scores, and which of these can be left out in one pass."""

    blocks: list[Ints]
    by_pass: list[Ints]
    blocks_of_score: list[Ints]
    scores_by_pass: list[Ints]

    @classmethod
    def of(cls, parts: DataParts, blocks: sparse.csr_array) -> "_Work":
        of_parts, of_scores = _in_each(parts.out, blocks), list[Ints]()
        if not parts.are_whole:
            of_scores = _in_each(parts.scored, blocks)
        return cls(of_parts, _by_number(passes(of_parts)), of_scores, _by_number(passes(of_scores)))

    def still_out(self, parts: DataParts, score: int, rows_of_block: sparse.csr_array) -> Ints:
        """Return the rows of the blocks of a score that are left out while it is predicted."""
        touched = [rows_of_set(rows_of_block, int(block)) for block in self.blocks_of_score[score]]
        out = np.intersect1d(parts.rows_out(int(parts.part[score])), np.concatenate([np.empty(0, np.intp), *touched]))
        return np.setdiff1d(out, rows_of_set(parts.scored, score))


def _in_each(sets: sparse.csr_array, blocks: sparse.csr_array) -> list[Ints]:
    """Return the blocks of each set of rows."""
    found = sparse.csr_array(sets @ blocks)
    found.sort_indices()
    return np.split(found.indices.astype(np.intp), found.indptr[1:-1])


def _by_number(numbers: Ints) -> list[Ints]:
    return [np.flatnonzero(numbers == k) for k in range(int(numbers.max(initial=-1)) + 1)]
