"""Data that are left out, and new rows: predictive densities from trees that are integrated again.

Given the globals, groups are independent: without some rows of a group, its integral is another one, and the ratio of
the two is the predictive density of these rows given the others. So draws of the globals alone are weighted, of which
each row says little.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from scipy import sparse

from pymc_ngvi.core.importance import Side
from pymc_ngvi.core.messages import NotApart, Refused
from pymc_ngvi.core.sizes import AT_ONCE, FIXED_SEED, N_SHOWN
from pymc_ngvi.core.types import Array, Indices
from pymc_ngvi.density.observed_rows import MaskedDensity
from pymc_ngvi.marginal.integral import N_COMPARED, TreeIntegral
from pymc_ngvi.marginal.on_model import FittedDensity
from pymc_ngvi.marginal.pooled import Draws
from pymc_ngvi.marginal.quadrature import (
    BatchPlan,
    Centres,
    Forest,
    PathRule,
    TermsOfBlocks,
    by_root,
    references,
    sub_forest,
    whole,
)
from pymc_ngvi.marginal.trees import IntegratedTrees, SplitNormal

# --- parts of the data that are left out, and what is predicted then ---


@dataclass(frozen=True, eq=False)
class DataParts:
    """Which rows are left out together, and which are predicted without them."""

    #: 1 where a row is left out; shape (n_parts, n_rows).
    out: sparse.csr_array
    #: 1 where a row is predicted, with others of the same score together; shape (n_scores, n_rows).
    scored: sparse.csr_array
    #: That is left out for each score; shape (n_scores,).
    part: Indices

    @property
    def are_whole(self) -> bool:
        """Whether all that is left out is predicted, in one score for each part."""
        same = self.out.shape == self.scored.shape and (self.part == np.arange(len(self.part))).all()
        return bool(same) and (self.out != self.scored).nnz == 0

    def only(self, part: int) -> "DataParts":
        """Return one of the parts, with its scores."""
        which = np.flatnonzero(self.part == part)
        return DataParts(self.out[[part]], self.scored[which], np.zeros(len(which), dtype=np.intp))

    @classmethod
    def of_labels(cls, label: Indices, n_labels: int) -> "DataParts":
        """Return one part for each label, predicted as a whole; ``label`` is that of each row."""
        n = len(label)
        out = sparse.csr_array((np.ones(n), (label, np.arange(n))), shape=(n_labels, n))
        return cls(out, out, np.arange(n_labels))

    @classmethod
    def of_folds(cls, fold: Indices, n_folds: int) -> "DataParts":
        """Return one part for each fold, each of whose rows is predicted."""
        return cls(cls.of_labels(fold, n_folds).out, sparse.eye_array(len(fold), format="csr"), fold)

    @classmethod
    def of_future(cls, rank: Indices, least: int, horizon: int) -> "DataParts":
        """Return one part for each origin: all rows of that rank or later are left out, the next ones predicted."""
        origins = np.arange(least, rank.max() + 2 - horizon)[:, None]
        out = sparse.csr_array((rank >= origins).astype(float))
        scored = sparse.csr_array(((rank >= origins) & (rank < origins + horizon)).astype(float))
        return cls(out, scored, np.arange(len(origins)))


def rows_of_set(sets: sparse.csr_array, i: int) -> Indices:
    """Return the rows of one of some sets of rows, (n_sets, n_rows)."""
    return sets.indices[sets.indptr[i] : sets.indptr[i + 1]].astype(np.intp)


def passes(blocks: list[Indices]) -> Indices:
    """Return numbers of sets such that no two with the same number have a block in common."""
    free: dict[int, int] = {}
    result = np.zeros(len(blocks), dtype=np.intp)
    for i, of_set in enumerate(blocks):
        result[i] = max((free.get(int(b), 0) for b in of_set), default=0)
        free.update(dict.fromkeys(map(int, of_set), int(result[i]) + 1))
    return result


# --- new rows beside the trees of an exact posterior, without the rows that it was fitted to ---
#
# Given the globals, the coordinates of a tree have means, covariances and skewness that the posterior has as
# functions of the globals. With the log densities of new rows beside it, a tree is integrated again: the integral is
# the predictive density of its new rows, by which the globals are weighted, and its moments are the new conditional
# ones. Trees that no row depends on stay as they are.

#: From unconstrained coordinates, (n, n_dim), to log densities of rows, (n, n_rows).
type RowLogp = Callable[[Array], Array]

#: Of the ladder of rules: an integral itself is wanted. Of 40 groups with few counts, 9 nodes are 0.01 nats off in all,
#: 13 to 27 less than 0.003.
_FINE = 7


class CoupledRows(Refused):
    """A new row depends on coordinates of several trees."""


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


def draws_without_rows(trees: IntegratedTrees, n: int, rng: np.random.Generator) -> Draws:
    """Return draws of an exact posterior, without the rows that it was fitted to.

    Local coordinates have the conditional moments that the posterior knows at its globals.
    """
    pool, forest, rows = trees.pool, trees.forest, np.flatnonzero(np.isfinite(trees.pool.log_ratio))
    of_draws, theta = SplitNormal.of_skewness(trees.skew), np.empty((len(rows), forest.n_dim))
    theta[:, forest.globals_] = pool.g[rows]
    for part in _parts(len(rows), forest.n_local * forest.n_levels):
        g = pool.g[rows[part]]
        z = of_draws.quantile(_evenly(len(g), forest.n_local, rng))
        theta[part, forest.locals_] = trees.centres(g).at_own(z[:, None], forest)[:, 0]
    return Draws(theta, pool.log_ratio[rows], rows, pool.part[rows])


def with_trees(state: object) -> IntegratedTrees | None:
    """Return a posterior whose trees were integrated out; None for any other."""
    return state if isinstance(state, IntegratedTrees) and state.forest.n_local else None


def integrated_again(theta: Array, trees: IntegratedTrees, row_logp: RowLogp, *, has_rows: bool) -> Array:
    """Return the log predictive density of new rows at the globals of draws, (n,).

    From the rows of the fit as well, where they are there; else as if no coordinate were skewed.
    """
    g = theta[:, trees.globals_]
    if not has_rows:
        return beside(theta, trees.centres, trees.forest, row_logp, np.zeros_like(trees.skew)).log_ratio
    terms = _TermsOfRows.of(theta, trees.centres, trees.forest, row_logp, trees.skew, trees.density)
    after, before = (TreeIntegral(of, trees.forest, trees.centres) for of in (terms, trees.density))
    rules = references(trees.forest.n_levels)
    after.rule = before.rule = rules[min(_FINE, len(rules) - 1)]
    log_ratio: Array = after.at(g).log_estimate - before.at(g).log_estimate
    return log_ratio


def beside(
    theta: Array, centres: Callable[[Array], Centres], forest: Forest, row_logp: RowLogp, skewness: Array
) -> WithNewRows:
    """Return what rows make of draws beside trees of which three moments are known."""
    g = theta[:, forest.globals_]
    terms = _TermsOfRows.of(theta, centres, forest, row_logp, skewness)
    trees = terms.trees
    if not trees.n_local:
        parts = [row_logp(theta[rows]).sum(axis=1) for rows in _parts(len(theta), terms.width)]
        return WithNewRows(np.concatenate(parts), theta, np.zeros(len(theta)))
    integral = TreeIntegral(terms, trees, terms.before)
    integral.choose_rule(integral.at(g[_few(len(g))]))
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
    places: Indices
    #: The deepest coordinate that each row depends on; -1 for none; shape (n_rows,).
    owner: Indices
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
        cls, theta: Array, centres: Callable[[Array], Centres], forest: Forest, row_logp: RowLogp, skewness: Array,
        fitted: TermsOfBlocks | None = None,
    ) -> "_TermsOfRows":  # fmt: skip
        few = theta[_few(len(theta))]
        steps = np.sqrt(centres(few[:, forest.globals_]).variance())
        point, owner = few[len(few) // 2], owners_of_rows(few, steps, forest, row_logp)
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

    def plan(self, forest: Forest, n_draws: int, n_nodes: int) -> BatchPlan:
        """Return how to evaluate the terms: all at once."""
        return whole(self, forest, max(1, AT_ONCE // (n_nodes * self.width)))

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
        of_locals = of_locals + self.shape.log_density(z) - np.log(before.own(trees))[:, None]
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


def owners_of_rows(points: Array, steps: Array, forest: Forest, row_logp: RowLogp) -> Indices:
    """Return the deepest local coordinate that each row depends on, (n_rows,), -1 for none.

    A row depends on at most one coordinate of each level. It is known by its number, whose digits are read from moves
    of half of the coordinates at a time. Where effects are narrow, or a row is sure, no step changes log p: one of
    several points, (n, n_dim), with steps of local coordinates, (n, n_local), does not tell.
    """
    steps = steps * np.random.default_rng(FIXED_SEED).uniform(0.3, 1.0, forest.n_local)
    same = row_logp(points)
    owner = np.full(same.shape[1], -1, dtype=np.intp)
    for at in forest.at_level:
        digits = (np.arange(len(at))[:, None] >> np.arange(max(len(at) - 1, 1).bit_length())) & 1
        moved = np.concatenate([digits == 1, digits == 0], axis=1)
        changed = np.zeros((moved.shape[1], len(owner)), dtype=bool)
        for point, step, before in zip(points, steps, same, strict=True):
            theta = np.tile(point, (moved.shape[1], 1))
            theta[:, forest.locals_[at]] += moved.T * step[at]
            changed |= (row_logp(theta) != before) & ~np.isnan(before)
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


def _few(n: int) -> Indices:
    """Return the numbers of some of ``n`` draws."""
    return np.linspace(0, n - 1, min(N_COMPARED, n)).astype(np.intp)


def _evenly(n: int, k: int, rng: np.random.Generator) -> Array:
    """Return uniform numbers, (n, k), of which each column has one in each of n equal steps."""
    steps = rng.permuted(np.tile(np.arange(n), (k, 1)), axis=1).T
    return (steps + rng.random((n, k))) / n


def _parts(n: int, width: int) -> Iterator[slice]:
    size = max(N_COMPARED, AT_ONCE // max(width, 1))
    return (slice(start, start + size) for start in range(0, n, size))


# --- rows that are left out of groups ---

#: Draws of the globals, at least and at most; values of rows in all, beyond which there are fewer than may be.
_FEWEST_DRAWS, _MOST_DRAWS, _MOST_VALUES = 500, N_SHOWN, 2**30
#: Of the fewest draws, those that may be beyond these values: more passes than that take longer than all other draws.
_TOO_FEW = 20
#: Of the ladder of rules: integrals themselves are wanted, not how they change with the globals. The next one moves
#: densities of rows of a random intercept and slope by 0.001 nats at most.
_RULE = 3


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

    def __init__(self, trees: IntegratedTrees, rule: PathRule, masked: MaskedDensity) -> None:
        self._masked, self._trees, self._forest = masked, trees, trees.forest
        rules = references(self._forest.n_levels)
        self._rule = max(rule, rules[min(_RULE, len(rules) // 2)], key=lambda one: one.n_nodes)
        forest, depends = trees.forest, masked.rows.dependence()[:, trees.forest.locals_]
        of_block = np.ones(forest.n_local), (np.arange(forest.n_local), forest.block)
        #: What each row depends on: blocks, of which a factor of the density alone may be one; (n_rows, n_blocks).
        self._blocks = sparse.csr_array(depends @ sparse.csr_array(of_block, shape=(forest.n_local, forest.n_blocks)))

    def predictives(self, parts: DataParts) -> Predictives:
        """Return the predictive densities."""
        trees, forest, blocks = self._trees, self._forest, self._blocks
        if parts.out.shape[0] == blocks.shape[0]:  # what all rows have, as a probability of zeros, would take as many
            blocks = sparse.csr_array(blocks * (blocks.count_nonzero(axis=0) < blocks.shape[0]))  # passes: it is drawn
            blocks.eliminate_zeros()
        work = _Work.of(parts, blocks)
        rows, local, _ = trees.all_of(trees.pool, np.random.default_rng(FIXED_SEED))
        some = self._picked(1 + len(work.by_pass) + len(work.scores_by_pass), len(rows))
        theta, n = np.empty((len(some), forest.n_dim)), len(some)
        theta[:, forest.globals_], theta[:, forest.locals_] = trees.pool.g[rows[some]], local[some]
        log_out, log_scored = np.empty((n, parts.out.shape[0])), np.empty((n, parts.scored.shape[0]))
        size = max(1, AT_ONCE // max(forest.n_local, self._blocks.shape[0], forest.n_blocks * (1 + len(work.by_pass))))
        for start in range(0, n, size):
            chunk = slice(start, min(start + size, n))
            self._chunk(parts, work, theta[chunk], log_out[chunk], log_scored[chunk])
        return Predictives(trees.log_weights[rows[some]], log_out, log_scored)

    def _picked(self, n_passes: int, n_pool: int) -> Indices:
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
            less = self._of_blocks(theta, np.concatenate([rows_of_set(parts.out, i) for i in sets]))
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

    def _of_blocks(self, theta: Array, out: Indices) -> Array:
        """Return the integrals of blocks without some rows over what is integrated at a place, (n, n_blocks)."""
        self._masked.leave_out(out)
        forest = self._forest
        terms = FittedDensity(self._masked.density, forest, self._trees.gaussian.mean())
        integral = TreeIntegral(terms, forest, self._trees.centres)
        integral.rule = self._rule
        g, local = theta[:, forest.globals_], theta[:, forest.locals_]
        return integral.by_block(g) - by_root(forest, terms.terms(g, local[:, None])[1][:, 0])


@dataclass(frozen=True, eq=False)
class _Work:
    """Blocks of parts and of scores, and which of these can be left out in one pass."""

    blocks: list[Indices]
    by_pass: list[Indices]
    blocks_of_score: list[Indices]
    scores_by_pass: list[Indices]

    @classmethod
    def of(cls, parts: DataParts, blocks: sparse.csr_array) -> "_Work":
        of_parts, of_scores = _in_each(parts.out, blocks), list[Indices]()
        if not parts.are_whole:
            of_scores = _in_each(parts.scored, blocks)
        return cls(of_parts, _by_number(passes(of_parts)), of_scores, _by_number(passes(of_scores)))

    def still_out(self, parts: DataParts, score: int, rows_of_block: sparse.csr_array) -> Indices:
        """Return the rows of the blocks of a score that are left out while it is predicted."""
        touched = [rows_of_set(rows_of_block, int(block)) for block in self.blocks_of_score[score]]
        out = np.intersect1d(
            rows_of_set(parts.out, int(parts.part[score])), np.concatenate([np.empty(0, np.intp), *touched])
        )
        return np.setdiff1d(out, rows_of_set(parts.scored, score))


def _in_each(sets: sparse.csr_array, blocks: sparse.csr_array) -> list[Indices]:
    """Return the blocks of each set of rows."""
    found = sparse.csr_array(sets @ blocks)
    found.sort_indices()
    return np.split(found.indices.astype(np.intp), found.indptr[1:-1])


def _by_number(numbers: Indices) -> list[Indices]:
    return [np.flatnonzero(numbers == k) for k in range(int(numbers.max(initial=-1)) + 1)]
