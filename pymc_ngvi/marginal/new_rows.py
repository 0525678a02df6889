"""New rows beside the trees of an exact posterior, without the rows that it was fitted to.

Given the globals, what is known of the coordinates of a tree is nearly a Gaussian, whose moments the posterior has as
functions of the globals. With the log densities of new rows beside it, a tree is integrated again: the integral is the
predictive density of its new rows, by which the globals are weighted, and its moments are the new conditional ones.
Trees that no row depends on stay as they are.
"""

import itertools

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.refusal import Reason, RefusedFor
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.confirmed import confirmed
from pymc_ngvi.marginal.effects import SplitNormal
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.joint import JointDraws
from pymc_ngvi.marginal.log_marginal import TOLERANCE, LogMarginal
from pymc_ngvi.marginal.nodes import PathRule, references
from pymc_ngvi.marginal.parts import SomeBlocks, sub_forest
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.marginal.proposals import effective_size
from pymc_ngvi.marginal.trees import IntegratedTrees

type Ints = NDArray[np.intp]
#: From unconstrained coordinates, (n, n_dim), to log densities of rows, (n, n_rows).
type RowLogp = Callable[[Array], Array]

#: Numbers held at once; draws on which rules are compared.
_AT_ONCE, _N_COMPARED = 2**21, 16
_LOG_2PI = float(np.log(2.0 * np.pi))
#: Of the steps by which it is found out which rows depend on what.
_SEED = 20_261_128


class CoupledRows(RefusedFor):
    """A new row depends on coordinates of several trees."""

    reason = Reason.NOT_SPLIT


@dataclass(frozen=True, eq=False)
class WithNewRows:
    """What new rows make of draws.

    Parameters
    ----------
    log_ratio : ndarray, shape (n,)
        Log predictive density of the new rows given the globals of each draw; -inf where it was not found.
    theta : ndarray, shape (n, n_dim)
        The draws, with the coordinates of trees moved to their new conditional moments.
    moved : float
        How far the conditional mean of any coordinate has moved, at most, in standard deviations that it had.
    """

    log_ratio: Array
    theta: Array
    moved: float = 0.0


def draws_without_rows(state: PoolState, n: int, rng: np.random.Generator) -> JointDraws:
    """Return draws of an exact posterior, without the rows that it was fitted to.

    Globals are those of the pool: as many of its sequences as are worth ``n`` independent draws, as far as there are.
    Local coordinates have the conditional moments that the posterior knows as functions of the globals.
    """
    pool, quadrature, forest = state.pool, *_quadrature(state)
    last, log_ratio = int(pool.scrambling.max()), pool.log_ratio
    sizes = (effective_size(log_ratio[pool.scrambling <= i]) for i in range(last))
    enough = next((i for i, size in enumerate(sizes) if i and size >= n), last)
    rows = np.flatnonzero((pool.scrambling <= enough) & np.isfinite(log_ratio))
    assert quadrature.skew is not None
    of_draws, theta = SplitNormal.of_skewness(quadrature.skew), np.empty((len(rows), forest.n_dim))
    theta[:, forest.globals_] = pool.g[rows]
    for part in _parts(len(rows), forest.n_local * forest.n_levels):
        g = pool.g[rows[part]]
        z = of_draws.standard_quantile(_evenly(len(g), forest.n_local, rng))
        theta[part, forest.locals_] = quadrature.predicted(g).at_own(z[:, None], forest)[:, 0]
    return JointDraws(theta, log_ratio[rows], rows, pool.scrambling[rows])


def centres_of(state: PoolState) -> tuple[Callable[[Array], Centres], Forest]:
    """Return the conditional moments of local coordinates as a function of the globals, and the trees."""
    quadrature, forest = _quadrature(state)
    return quadrature.predicted, forest


def with_trees(state: object) -> PoolState | None:
    """Return a posterior whose trees were integrated out; None for any other."""
    if not isinstance(state, PoolState) or not isinstance(state.rest, IntegratedTrees):
        return None
    return None if state.rest.quadrature is None else state


def _quadrature(state: PoolState) -> tuple[LogMarginal, Forest]:
    rest = state.rest
    assert isinstance(rest, IntegratedTrees)
    assert rest.quadrature is not None
    return rest.quadrature, rest.forest


def with_new_rows(theta: Array, centres: Callable[[Array], Centres], forest: Forest, row_logp: RowLogp) -> WithNewRows:
    """Return what new rows make of draws of a posterior.

    Parameters
    ----------
    theta : ndarray, shape (n, n_dim)
    centres : callable
        From globals, (n, n_globals), to the conditional moments of all local coordinates.
    forest : Forest
    row_logp : callable
        Log densities of the new rows.

    Raises
    ------
    CoupledRows
        If a row depends on coordinates that are not on one path.
    """
    of_trees = _Trees.of(theta[0], centres(theta[:1, forest.globals_]), forest, row_logp)
    log_ratio, result, moved = np.empty(len(theta)), theta.copy(), 0.0
    begun = None
    for rows in _parts(len(theta), max(forest.n_dim * forest.n_levels, of_trees.n_rows)):
        part = theta[rows]
        if not of_trees.trees.n_local:
            log_ratio[rows] = row_logp(part).sum(axis=1)
            continue
        before = centres(part[:, forest.globals_]).of(of_trees.places, of_trees.trees.n_levels)
        begun = begun or of_trees.begun(part, before)
        one = of_trees.integrated(part, before, *begun)
        log_ratio[rows], result[rows], moved = one.log_ratio, one.theta, max(moved, one.moved)
    return WithNewRows(log_ratio, result, moved)


@dataclass(frozen=True, eq=False)
class _Trees:
    """Trees that new rows depend on.

    Parameters
    ----------
    trees : Forest
    places : ndarray of int
        Of their coordinates among all local ones.
    owner : ndarray of int, shape (n_rows,)
        The deepest coordinate that each row depends on; -1 for none.
    row_logp : callable
    """

    trees: Forest
    places: Ints
    owner: Ints
    row_logp: RowLogp

    @classmethod
    def of(cls, point: Array, centres: Centres, forest: Forest, row_logp: RowLogp) -> "_Trees":
        owner = owners_of_rows(point, np.sqrt(centres.variance()[0]), forest, row_logp)
        known = owner >= 0
        places = np.flatnonzero(np.isin(forest.block, forest.block[owner[known]]))
        at = np.full(len(owner), -1, dtype=np.intp)
        at[known] = np.searchsorted(places, owner[known])
        return cls(sub_forest(forest, places), places, at, row_logp)

    @property
    def n_rows(self) -> int:
        return len(self.owner)

    def begun(self, theta: Array, before: Centres) -> "tuple[PathRule, _Moved]":
        """Return the smallest rule whose integrals are, but for a constant, those of the next one, and what rows do."""
        n = min(len(theta), _N_COMPARED)
        theta, before, rules = theta[:n], before[:n], references(self.trees.n_levels)
        of_first, centres = self.integrals(theta, before, before, rules[0])
        moved = _Moved.between(before, centres, self.trees)
        for rule, larger in itertools.pairwise(rules):
            of_larger, _ = self.integrals(theta, before, moved.from_(before, self.trees), larger)
            if np.std(of_larger - of_first) < TOLERANCE:
                return rule, moved
            of_first = of_larger
        return rules[-1], moved

    def integrated(self, theta: Array, before: Centres, rule: PathRule, moved: "_Moved") -> WithNewRows:
        """Return what new rows make of some draws, whose trees had the moments ``before``."""
        trees = self.trees
        log_ratio, after = self.integrals(theta, before, moved.from_(before, trees), rule)
        result = theta.copy()
        z = standardised(theta[:, trees.locals_], before, trees)
        result[:, trees.locals_] = after.at_own(z[:, None], trees)[:, 0]
        farthest = np.abs(standardised(after.mean, before, trees)).max(initial=0.0)
        return WithNewRows(log_ratio, result, float(farthest))

    def integrals(self, theta: Array, before: Centres, about: Centres, rule: PathRule) -> tuple[Array, Centres]:
        """Return log predictive densities, (n,), and the conditional moments with the new rows."""
        part = SomeBlocks(self.trees, slice(None), slice(None), _TermsOfRows(self, theta, before))
        number = np.arange(len(theta), dtype=np.float64)[:, None]
        size = max(1, _AT_ONCE // (max(theta.shape[1], self.n_rows) * len(rule.nodes)))
        larger = references(self.trees.n_levels)[-1]
        found = confirmed(part, rule, number, about, lambda turn: larger if turn else rule, size)
        bad = found.lost | ~np.isfinite(found.log_marginal)
        return np.where(bad, -np.inf, found.log_marginal), found.centres


@dataclass(frozen=True, eq=False)
class _Moved:
    """By how much rows move conditional means, in standard deviations, and by which factor they change these.

    It is nearly the same for all globals: good enough to put nodes there.
    """

    by: Array
    scale: Array

    @classmethod
    def between(cls, before: Centres, after: Centres, forest: Forest) -> "_Moved":
        by = np.median(standardised(after.mean, before, forest), axis=0)
        return cls(by, np.median(after.own(forest) / before.own(forest), axis=0))

    def from_(self, before: Centres, forest: Forest) -> Centres:
        z = np.broadcast_to(self.by, (len(before), 1, len(self.by)))
        return Centres(before.at_own(z, forest)[:, 0], before.factor * self.scale[:, None])


@dataclass(frozen=True, eq=False)
class _TermsOfRows:
    """Gaussians of trees, and new rows, as terms of coordinates; globals are given by the number of their draw."""

    of: _Trees
    theta: Array
    before: Centres

    def __call__(self, number: Array, local: Array) -> tuple[Array, Array]:
        """Return the term of the globals, (n,), and those of local coordinates, (n, n_nodes, n_local)."""
        rows, trees, owner = number[:, 0].astype(np.intp), self.of.trees, self.of.owner
        n_nodes, n_local = local.shape[1:]
        theta = np.repeat(self.theta[rows], n_nodes, axis=0)
        theta[:, trees.locals_] = local.reshape(-1, n_local)
        values = self.of.row_logp(theta)
        alone, there = np.flatnonzero(owner < 0), np.flatnonzero(owner >= 0)
        sums = sparse.csr_array((np.ones(len(there)), (owner[there], there)), shape=(n_local, len(owner)))
        before = self.before[rows]
        of_locals = (sums @ values.T).T.reshape(local.shape)
        z = standardised(local, Centres(before.mean[:, None], before.factor[:, None]), trees)
        of_locals = of_locals - 0.5 * (z**2 + _LOG_2PI) - np.log(before.own(trees))[:, None]
        return values[::n_nodes, alone].sum(axis=1), of_locals


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

    Parameters
    ----------
    point : ndarray, shape (n_dim,)
    step : ndarray, shape (n_local,)
        By which coordinates are moved.

    Raises
    ------
    CoupledRows
    """
    step = step * np.random.default_rng(_SEED).uniform(0.3, 1.0, forest.n_local)
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
    result: Array = (steps + rng.random((n, k))) / n
    return result


def _parts(n: int, width: int) -> Iterator[slice]:
    size = max(_N_COMPARED, _AT_ONCE // max(width, 1))
    return (slice(start, start + size) for start in range(0, n, size))
