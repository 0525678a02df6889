"""New rows beside the trees of an exact posterior, without the rows that it was fitted to.

Given the globals, the coordinates of a tree have means, covariances and skewness that the posterior has as functions of
the globals. With the log densities of new rows beside it, a tree is integrated again: the integral is the
predictive density of its new rows, by which the globals are weighted, and its moments are the new conditional ones.
Trees that no row depends on stay as they are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.refusal import Reason, RefusedFor
from pymc_ngvi.core.sizes import AT_ONCE, FIXED_SEED
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.draws import Draws
from pymc_ngvi.marginal.effects import SplitNormal
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.integral import N_COMPARED, TreeIntegral
from pymc_ngvi.marginal.nodes import references
from pymc_ngvi.marginal.parts import BatchPlan, TermsOfBlocks, sub_forest, whole
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.marginal.trees import IntegratedTrees

type Ints = NDArray[np.intp]
#: From unconstrained coordinates, (n, n_dim), to log densities of rows, (n, n_rows).
type RowLogp = Callable[[Array], Array]

#: Of the ladder of rules: an integral itself is wanted. Of 40 groups with few counts, 9 nodes are 0.01 nats off in all,
#: 13 to 27 less than 0.003.
_FINE = 7


class CoupledRows(RefusedFor):
    """A new row depends on coordinates of several trees."""

    reason = Reason.NOT_SPLIT


@dataclass(frozen=True, eq=False)
class WithNewRows:
    """What new rows make of draws."""

    #: Log predictive density of the new rows given the globals of each draw; -inf where it was not found; shape (n,).
    log_ratio: Array
    #: The draws, with the coordinates of trees moved to their new conditional moments; shape (n, n_dim).
    theta: Array
    #: How far the conditional mean of any coordinate has moved, at most, in standard deviations that it had; shape
    #: (n,).
    moved: Array
    #: Of any of these coordinates given the globals, at most, as far as it is known.
    skewness: float = 0.0


def draws_without_rows(state: PoolState, n: int, rng: np.random.Generator) -> Draws:
    """Return draws of an exact posterior, without the rows that it was fitted to.

    Local coordinates have the conditional moments that the posterior knows at its globals.
    """
    pool, trees = state.pool, _trees(state)
    forest, rows = trees.forest, np.flatnonzero(np.isfinite(pool.log_ratio))
    of_draws, theta = SplitNormal.of_skewness(trees.skew), np.empty((len(rows), forest.n_dim))
    theta[:, forest.globals_] = pool.g[rows]
    for part in _parts(len(rows), forest.n_local * forest.n_levels):
        g = pool.g[rows[part]]
        z = of_draws.standard_quantile(_evenly(len(g), forest.n_local, rng))
        theta[part, forest.locals_] = trees.centres(g).at_own(z[:, None], forest)[:, 0]
    return Draws(theta, pool.log_ratio[rows], rows, pool.part[rows])


def with_trees(state: object) -> PoolState | None:
    """Return a posterior whose trees were integrated out; None for any other."""
    if not isinstance(state, PoolState) or not isinstance(state.rest, IntegratedTrees):
        return None
    return state if state.rest.forest.n_local else None


def _trees(state: PoolState) -> IntegratedTrees:
    assert isinstance(state.rest, IntegratedTrees)
    return state.rest


def with_new_rows(theta: Array, state: PoolState, row_logp: RowLogp) -> WithNewRows:
    """Return what new rows make of draws of an exact posterior."""
    trees = _trees(state)
    return beside(theta, trees.centres, trees.forest, row_logp, trees.skew)


def integrated_again(theta: Array, state: PoolState, row_logp: RowLogp, *, has_rows: bool) -> Array:
    """Return the log predictive density of new rows at the globals of draws, (n,).

    From the rows of the fit as well, where they are there; else as if no coordinate were skewed.
    """
    trees, g = _trees(state), theta[:, state.globals_]
    if not has_rows:
        return beside(theta, trees.centres, trees.forest, row_logp, np.zeros_like(trees.skew)).log_ratio
    terms = _TermsOfRows.of(theta[len(theta) // 2], trees.centres, trees.forest, row_logp, trees.skew, trees.density)
    after, before = (TreeIntegral(of, trees.forest, trees.centres) for of in (terms, trees.density))
    rules = references(trees.forest.n_levels)
    after.rule = before.rule = rules[min(_FINE, len(rules) - 1)]
    log_ratio: Array = after.at(g).log_estimate - before.at(g).log_estimate
    return log_ratio


def skewness_of(state: PoolState) -> float:
    """Return the largest skewness of any local coordinate given the globals, as far as it is known."""
    return float(np.abs(_trees(state).skew).max(initial=0.0))


def beside(
    theta: Array, centres: Callable[[Array], Centres], forest: Forest, row_logp: RowLogp, skewness: Array
) -> WithNewRows:
    """Return what rows make of draws beside trees of which three moments are known."""
    g = theta[:, forest.globals_]
    middle = theta[len(theta) // 2]  # at the first draws, effects may be so narrow that no step changes log p
    terms = _TermsOfRows.of(middle, centres, forest, row_logp, skewness)
    trees = terms.trees
    if not trees.n_local:
        parts = [row_logp(theta[rows]).sum(axis=1) for rows in _parts(len(theta), terms.width)]
        return WithNewRows(np.concatenate(parts), theta, np.zeros(len(theta)))
    integral = TreeIntegral(terms, trees, terms.before)
    few = np.linspace(0, len(g) - 1, min(N_COMPARED, len(g))).astype(np.intp)
    integral.choose_rule(integral.at(g[few]))
    log_ratio, moved, result = np.empty(len(g)), np.empty(len(g)), theta.copy()
    for rows in _parts(len(g), forest.n_dim * forest.n_levels):
        points, before = integral.at(g[rows]), terms.before(g[rows])
        log_ratio[rows] = points.log_estimate
        z = standardised(theta[rows, trees.locals_], before, trees)
        result[rows, trees.locals_] = points.centres.at_own(z[:, None], trees)[:, 0]
        moved[rows] = np.abs(standardised(points.centres.mean, before, trees)).max(axis=1)
    return WithNewRows(log_ratio, result, moved, float(np.abs(skewness[terms.places]).max()))


@dataclass(frozen=True, eq=False)
class _TermsOfRows:
    """The trees that new rows depend on, as these were without them, and the rows, as `integrate` takes them."""

    trees: Forest
    #: Of their coordinates among all local ones.
    places: Ints
    #: The deepest coordinate that each row depends on; -1 for none; shape (n_rows,).
    owner: Ints
    row_logp: RowLogp
    #: Of all local coordinates.
    centres: Callable[[Array], Centres]
    #: Where coordinates are that no row depends on; shape (n_dim,).
    point: Array
    #: Of standardised coordinates.
    shape: SplitNormal
    #: The terms of the rows of the fit, of all local coordinates, in the place of moments.
    fitted: TermsOfBlocks | None = None

    @classmethod
    def of(
        cls, point: Array, centres: Callable[[Array], Centres], forest: Forest, row_logp: RowLogp, skewness: Array,
        fitted: TermsOfBlocks | None = None,
    ) -> "_TermsOfRows":  # fmt: skip
        step = np.sqrt(centres(point[None, forest.globals_]).variance()[0])
        owner = owners_of_rows(point, step, forest, row_logp)
        known = owner >= 0
        places = np.flatnonzero(np.isin(forest.block, forest.block[owner[known]]) | (fitted is not None))
        at = np.full(len(owner), -1, dtype=np.intp)
        at[known] = np.searchsorted(places, owner[known])
        shape = SplitNormal.of_skewness(skewness[places])
        return cls(sub_forest(forest, places), places, at, row_logp, centres, point, shape, fitted)

    @property
    def width(self) -> int:
        """Numbers that a draw takes."""
        return max(len(self.point), len(self.owner))

    def before(self, g: Array) -> Centres:
        """Return the conditional moments of the trees without the new rows."""
        return self.centres(g).of(self.places, self.trees.n_levels)

    def chunk(self, n_nodes: int) -> int:
        """Return how many draws to evaluate at once, at ``n_nodes`` nodes each."""
        return max(1, AT_ONCE // (n_nodes * self.width))

    def plan(self, forest: Forest, n_draws: int, n_nodes: int) -> BatchPlan:
        """Return how to evaluate the terms: all at once."""
        return whole(self, forest, n_nodes)

    def terms(self, g: Array, local: Array) -> tuple[Array, Array]:
        """Return the term of the globals, (n,), and those of local coordinates, (n, n_nodes, n_local)."""
        trees, owner, (n, n_nodes, n_local) = self.trees, self.owner, local.shape
        theta = np.tile(self.point, (n * n_nodes, 1))
        theta[:, trees.globals_] = np.repeat(g, n_nodes, axis=0)
        theta[:, trees.locals_] = local.reshape(-1, n_local)
        values = self.row_logp(theta)
        alone, there = np.flatnonzero(owner < 0), np.flatnonzero(owner >= 0)
        sums = sparse.csr_array((np.ones(len(there)), (owner[there], there)), shape=(n_local, len(owner)))
        of_globals, of_locals = values[::n_nodes, alone].sum(axis=1), (sums @ values.T).T.reshape(local.shape)
        if self.fitted is not None:
            first, second = self.fitted.terms(g, local)
            return of_globals + first, of_locals + second
        before = self.before(g)
        z = standardised(local, Centres(before.mean[:, None], before.factor[:, None]), trees)
        of_locals = of_locals + self.shape.standard_log_density(z) - np.log(before.own(trees))[:, None]
        return of_globals, of_locals


def standardised(local: Array, centres: Centres, forest: Forest) -> Array:
    """Return z with m + L z = b, (..., n_local), from local coordinates b."""
    z = np.empty(local.shape)
    for level, at in enumerate(forest.at_level):
        apart = local[..., at] - centres.mean[..., at]
        for above in range(level):
            apart -= centres.factor[..., at, above] * z[..., forest.path[at, above]]
        z[..., at] = apart / centres.factor[..., at, level]
    return z


def owners_of_rows(point: Array, step: Array, forest: Forest, row_logp: RowLogp) -> Ints:
    """Return the deepest local coordinate that each row depends on, (n_rows,), -1 for none.

    A row depends on at most one coordinate of each level. It is known by its number, whose digits are read from moves
    of half of the coordinates at a time.
    """
    step = step * np.random.default_rng(FIXED_SEED).uniform(0.3, 1.0, forest.n_local)
    same = row_logp(point[None])[0]
    owner = np.full(len(same), -1, dtype=np.intp)
    for at in forest.at_level:
        digits = (np.arange(len(at))[:, None] >> np.arange(max(len(at) - 1, 1).bit_length())) & 1
        moved = np.concatenate([digits == 1, digits == 0], axis=1)
        theta = np.tile(point, (moved.shape[1], 1))
        theta[:, forest.locals_[at]] += moved.T * step[at]
        changed = row_logp(theta) != same
        ones, zeros = np.split(changed, 2)
        depends = ones.any(axis=0) | zeros.any(axis=0)
        number = (ones.T @ (1 << np.arange(len(ones)))).astype(np.intp)
        if (ones[:, depends] == zeros[:, depends]).any() or (number[depends] >= len(at)).any():
            raise CoupledRows("a new row depends on several groups at once")
        found = at[number[depends]]
        above = owner[depends]
        if ((above >= 0) & (forest.path[found, forest.level[above]] != above)).any():
            raise CoupledRows("a new row depends on several groups at once")
        owner[depends] = found
    return owner


def _evenly(n: int, k: int, rng: np.random.Generator) -> Array:
    """Return uniform numbers, (n, k), of which each column has one in each of n equal steps."""
    steps = rng.permuted(np.tile(np.arange(n), (k, 1)), axis=1).T
    return (steps + rng.random((n, k))) / n


def _parts(n: int, width: int) -> Iterator[slice]:
    size = max(N_COMPARED, AT_ONCE // max(width, 1))
    return (slice(start, start + size) for start in range(0, n, size))
