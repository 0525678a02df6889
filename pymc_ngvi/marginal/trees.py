"""Exact posteriors: globals as weighted draws, and trees of local coordinates given these."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from scipy.special import ndtri, stdtrit

from pymc_ngvi.core.draws import END
from pymc_ngvi.core.importance import khat_error
from pymc_ngvi.core.messages import percent
from pymc_ngvi.core.sizes import AT_ONCE, HELD, N_SHOWN, SLIGHT
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Indices
from pymc_ngvi.core.verdict import Condition, PoolVerdict, beyond_reach, few_draws, heavy_tail
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.marginal.integral import N_COMPARED, NothingInside, TreeIntegral, TreePairs
from pymc_ngvi.marginal.on_model import FittedDensity
from pymc_ngvi.marginal.pooled import (
    LEAST_TAIL,
    N_PARTS,
    Pool,
    PoolState,
    by_neighbours,
    evenly_picked,
    has_light_tail,
    picked,
    tail_size,
)
from pymc_ngvi.marginal.pooled import MOST_KHAT as MOST_KHAT
from pymc_ngvi.marginal.proposals import Proposal
from pymc_ngvi.marginal.quadrature import (
    MOST_PLAIN,
    Centres,
    Forest,
    SomeBlocks,
    TermsOfBlocks,
    integrate,
    references,
    upwards,
)
from pymc_ngvi.marginal.sampler import GOOD, MOST, MOST_MOVED, Ratios, size_asked

# --- whether draws of the globals and of the local coordinates can be called exact ---
#
# Every condition, with its figure.

#: Relative error of a standard deviation at most, and of log m of an approximate posterior, an sd in nats.
MOST_ERROR = 0.15
#: Part of the weight where there is no integral: three sds out, it moves an sd by 2 %; error of a mean of effects, in
#: sds, and of an sd, as a part, and the part of the mass of some effects that may be at another mode.
MOST_LOST, MOST_SHORT = 0.005, 0.03


@stored("exact.checks")
@dataclass(frozen=True)
class Checks(PoolVerdict):
    """What was measured of an exact posterior.

    Parameters
    ----------
    khat : float
        Of the weights of the globals.
    effective_size : float
        Of these weights, in draws.
    n_draws, n_globals, n_local : int
        Of the pool; coordinates.
    n_nodes : int
        Of the reference rule in each local coordinate; 0 where there are none.
    rule_error : float
        Change of log m that the next larger rule brings, an sd over the globals in nats.
    lost : float
        Part of the weight on draws whose quadrature nodes were not about the right centres, going by draws near them.
    elsewhere : float
        Largest part of the mass of a tree that is at another mode than its quadrature nodes, given the globals.
    effects : float
        Largest error of a mean of a local coordinate, in sds, or of an sd, as a part, that few candidates bring.
    sd_error : float
        Largest relative error of a standard deviation of the globals, from the weights.
    tail : float
        Effective size of the draws beyond a 5 or 95 % limit, the least of any of the globals.
    missed : float
        By how much draws from farther out move a mean or a standard deviation of the globals, in its errors; 0 where
        it is by less than 0.05 standard deviations, or 5 %.
    beyond : float
        Part of a variance of the globals that is farther out than all draws.
    found, open, cure, is_tested, n_fits, lacking, n_modes
        As of `Verdict`.
    """

    khat: float
    effective_size: float
    n_draws: int
    n_globals: int
    n_local: int
    n_nodes: int = 0
    rule_error: float = 0.0
    lost: float = 0.0
    elsewhere: float = 0.0
    effects: float = 0.0
    sd_error: float = 0.0
    tail: float = float("inf")
    missed: float = 0.0
    beyond: float = 0.0

    @property
    def own(self) -> list[Condition]:
        """All that is asked of it."""
        khat = f"{self.khat:.2f} +- {khat_error(self.khat, self.n_draws):.2f}"
        is_light = has_light_tail(self.khat, self.n_draws)
        size, least_size = self.effective_size, size_asked(self.n_globals)
        return [
            Condition("k-hat", self.khat, MOST_KHAT,
                f"k-hat of the weights of the global parameters is {khat}, above {MOST_KHAT}", is_excused=is_light),
            *few_draws("effective size", size, least_size, "the effective size of the draws"),
            Condition("efficiency", self.efficiency, GOOD,
                f"only {percent(self.efficiency)} of the draws are effective: the proposal is far from the "
                "posterior, and weights don't show what it misses", at_least=True),
            Condition("sd", self.sd_error, MOST_ERROR,
                f"a standard deviation of the global parameters is known to within {percent(self.sd_error)} only, from "
                "the weights of a thin tail"),
            Condition("tail", self.tail, LEAST_TAIL * min(size, N_SHOWN),
                f"a limit of the global parameters rests on an effective size of {self.tail:.0f} draws beyond it, "
                f"below {LEAST_TAIL * min(size, N_SHOWN):.0f}", at_least=True),
            Condition("missed", self.missed, MOST_MOVED,
                "draws far out have enough weight to change means or standard deviations of the global parameters: "
                "a part of the posterior was missed"),
            heavy_tail(self.beyond),
            Condition("rule", self.rule_error, SLIGHT,
                f"the quadrature has not settled with {self.n_nodes} nodes (log marginal density changes by "
                f"{self.rule_error:.2f} nats with more)"),
            Condition("lost", self.lost, MOST_LOST,
                f"{percent(self.lost, ".1f")} of the draws have quadrature nodes in the wrong place"),
            Condition("modes", self.elsewhere, MOST_SHORT,
                f"given the global parameters, a group effect has {percent(self.elsewhere)} of its mass at another "
                "mode, where there are no quadrature nodes"),
            Condition("effects", self.effects, MOST_SHORT,
                "a mean or a standard deviation of a group effect, or of a sum of group effects, is wrong by "
                f"{percent(self.effects)}"),
        ]  # fmt: skip

    @property
    def details(self) -> str:
        """Effective size, and modes."""
        modes = "one mode" if self.n_modes == 1 else f"{self.n_modes} modes"
        return f" (effective sample size {self.effective_size:,.0f}); {modes} found"


# --- draws of the local coordinates given the globals, exact up to the number of candidates ---
#
# In each coordinate there are a few candidates, at evenly spaced quantiles of a proposal, all moved by one random
# shift. The conditional density at all of them gives weights, from the roots of the trees down; one is chosen by
# weight. The candidates with their weights are a quadrature rule, whatever the shift, and over shifts their positions
# have the density that is asked for: what is left of the proposal is the error of that rule, which falls fast with
# their number.

#: Candidates in each coordinate at least, of trees of many levels and of one; products of them over the levels at most.
_FEWEST, _OF_ONE, _MOST_PRODUCTS = 3, 5, 400
#: Degrees of freedom of proposals. Of normals, a part q of whose draws is far out, k candidates draw k q there at most:
#: sds of a t with 3 degrees of freedom come out 17 % short with 5 candidates, here 3 %; of a normal 0.1 and 0.5 %.
_DF = 4.0
#: Skewness of a split normal with scales 1 -+ d/2, over d, about 0; largest d.
_SKEWNESS, _MOST_APART = 0.8, 1.2
_ROOT = float(np.sqrt(2.0 / np.pi))
_LOG_2PI = float(np.log(2.0 * np.pi))


class SplitNormal(NamedTuple):
    """Two halves of normal densities, or of t densities for proposals, with one mode; mean 0, variance 1."""

    #: The last two are standard deviations of the normals; shape (n_local,).
    mode: Array
    left: Array
    right: Array

    @classmethod
    def of_skewness(cls, skewness: Array) -> "SplitNormal":
        """Return the one with about this skewness, (n_local,)."""
        apart = np.clip(skewness / _SKEWNESS, -_MOST_APART, _MOST_APART)
        middle = np.sqrt(0.25 * apart**2 + 1.0 - (1.0 - _ROOT**2) * apart**2)
        return cls(-_ROOT * apart, middle - 0.5 * apart, middle + 0.5 * apart)

    def quantile(self, u: Array, df: float = np.inf) -> Array:
        """Return quantiles, for u (..., n_local), of halves with so many degrees of freedom."""
        total = self.left + self.right
        share = self.left / total
        below = u < share
        # Each half is half a density about the mode; its quantiles are those of that one, from the mode outwards.
        inner = np.where(below, 0.5 * u * total / self.left, 1.0 - 0.5 * (1.0 - u) * total / self.right)
        far = ndtri(inner) if np.isinf(df) else stdtrit(df, inner)
        return self.mode + np.where(below, self.left, self.right) * far

    def log_density(self, z: Array) -> Array:
        """Return the log density, (..., n_local)."""
        apart = z - self.mode
        squares = (apart / np.where(apart < 0.0, self.left, self.right)) ** 2
        return -0.5 * squares - np.log(0.5 * (self.left + self.right)) - 0.5 * _LOG_2PI

    def candidates(self, u: Array) -> tuple[Array, Array]:
        """Return quantiles of halves with heavier tails, for u (..., n_local), and log densities but for a constant."""
        z = self.quantile(u, _DF)
        apart = z - self.mode
        squares = (apart / np.where(apart < 0.0, self.left, self.right)) ** 2
        return z, -0.5 * (_DF + 1.0) * np.log1p(squares / _DF)


def draw_effects(
    terms: TermsOfBlocks,
    forest: Forest,
    g: Array,
    centres: Centres,
    skewness: Array,
    shifts: Array,
    choices: Array,
    of_draw: Indices,
    k: int,
) -> Array:
    """Draw local coordinates, (n, n_local), from ``k`` candidates."""
    plan = terms.plan(forest, len(g), k**forest.n_levels)
    local = np.empty((len(of_draw), forest.n_local))
    for start in range(0, len(g), plan.size):
        rows = slice(start, min(start + plan.size, len(g)))
        first, last = np.searchsorted(of_draw, [rows.start, rows.stop])
        number = of_draw[first:last] - start
        for part in plan.parts:
            near = centres[rows].of(part.places, part.forest.n_levels)
            z, _, tables = weights_of(part, g[rows], near, skewness[part.places], shifts[rows, part.places], k)
            chosen = _chosen(part.forest, tables, z, choices[first:last, part.places], number)
            local[first:last, part.places] = near[number].at_own(chosen[:, None], part.forest)[:, 0]
    return local


def numbers_of_candidates(n_levels: int) -> list[int]:
    """Return how many candidates are tried, the fewest first: the last number checks the one before."""
    numbers = [max(_OF_ONE + 1 - n_levels, _FEWEST)]
    while len(numbers) < 2 or numbers[-1] ** n_levels <= _MOST_PRODUCTS:
        numbers.append(2 * numbers[-1] - 1)
    return numbers


def moments_of_draws(
    terms: TermsOfBlocks, forest: Forest, g: Array, centres: Centres, skewness: Array, shifts: Array, k: int
) -> tuple[Array, Array]:
    """Return means and standard deviations, (n_local,), that draws from ``k`` candidates have, over some globals."""
    plan = terms.plan(forest, len(g), k**forest.n_levels)
    first, second = np.zeros((2, forest.n_local))
    origin = centres.mean.mean(axis=0)
    for start in range(0, len(g), plan.size):
        rows = slice(start, start + plan.size)
        for part in plan.parts:
            own, near = part.forest, centres[rows].of(part.places, part.forest.n_levels)
            _, local, tables = weights_of(part, g[rows], near, skewness[part.places], shifts[rows, part.places], k)
            places = np.arange(forest.n_local)[part.places]
            above: Array = np.ones((len(local), 1, own.n_local))  # weights of products, those of parents for children
            for level, at in enumerate(own.at_level):
                if level:
                    above = above[:, :, own.parent[at]]
                joint = (tables[level] * above[:, :, None, : len(at)]).reshape(len(local), -1, len(at))
                apart = local[:, :: k ** (own.n_levels - 1 - level), at] - origin[places[at]]
                first[places[at]] += (joint * apart).sum(axis=(0, 1))
                second[places[at]] += (joint * apart**2).sum(axis=(0, 1))
                above = np.zeros((len(local), joint.shape[1], own.n_local))
                above[:, :, at] = joint
    mean = first / len(g)
    return origin + mean, np.sqrt(np.maximum(second / len(g) - mean**2, 0.0))


def _spaced(k: int, shifts: Array) -> Array:
    """Return ``k`` evenly spaced probabilities for each of some shifts, (n, k, n_local) from (n, n_local)."""
    return np.clip((np.arange(k)[:, None] + shifts[:, None]) / k, END, 1.0 - END)


@cache
def _shifts_of_normal(k: int) -> tuple[Array, Array]:
    """Return shifts of ``k`` candidates, and their distribution function in proportion to the weight of a normal there.

    Weights are relative to their sum, which depends on the shift. If all shifts were as likely, standard deviations of
    normals would come out 0.5 % short with 5 candidates, and sums over 10,000 effects half an sd off.
    """
    shifts, normal = np.linspace(0.0, 1.0, 257), SplitNormal.of_skewness(np.zeros(1))
    z, log_density = normal.candidates(_spaced(k, shifts[:, None]))
    weight = np.exp(normal.log_density(z) - log_density).sum(axis=(1, 2))
    total = np.cumsum(np.append(0.0, weight[1:] + weight[:-1]))
    return shifts, total / total[-1]


def weights_of(
    part: SomeBlocks, g: Array, centres: Centres, skewness: Array, shifts: Array, k: int
) -> tuple[Array, Array, list[Array]]:
    """Return candidates, (n, k, n_local), their products, and weights given those above, (n, k^level, k, n_places)."""
    grid, total = _shifts_of_normal(k)
    z, log_density = SplitNormal.of_skewness(skewness).candidates(_spaced(k, np.interp(shifts, total, grid)))
    local = centres.at_own(_products(z, part.forest), part.forest)
    _, values = part.terms(g, local)
    values = np.where(np.isfinite(values), values, -np.inf)
    with np.errstate(all="ignore"):
        tables, messages = upwards(part.forest, k, values, -log_density)
        weights = [np.exp(table - message[:, :, None]) for table, message in zip(tables, messages, strict=True)]
    # Below candidates that are impossible all are as good as each other: none of them is chosen.
    return z, local, [np.where(np.isfinite(w), w, 1.0 / k) for w in weights]


def _chosen(forest: Forest, tables: list[Array], z: Array, choices: Array, of_draw: Indices) -> Array:
    """Choose standardised coordinates, (n_draws, n_local)."""
    n, k, n_local = z.shape
    one_each = np.array_equal(of_draw, np.arange(n))
    chosen = np.empty((len(of_draw), n_local))
    picked = np.zeros((len(of_draw), n_local), dtype=np.intp)  # the product of digits from the root down
    for level, at in enumerate(forest.at_level):
        table = tables[level]  # (n, k^level, k, n_places), weights that add up to 1 over candidates
        table, candidates = (a if one_each else a[of_draw] for a in (table, z[:, :, at]))
        if level:
            above = picked[:, forest.parent[at]]
            weights = np.take_along_axis(table, above[:, None, None], axis=1)[:, 0]
        else:
            above, weights = picked[:, at], table[:, 0]
        # The first candidate whose cumulative weight exceeds the uniform number.
        digit, total = np.zeros((len(of_draw), len(at)), dtype=np.intp), np.zeros((len(of_draw), len(at)))
        for i in range(k - 1):
            total += weights[:, i]
            digit += choices[:, at] > total
        chosen[:, at] = np.take_along_axis(candidates, digit[:, None], axis=1)[:, 0]
        picked[:, at] = above * k + digit
    return chosen


def _products(z: Array, forest: Forest) -> Array:
    """Return the candidates of each coordinate in all products over the levels, (n, k ** n_levels, n_local)."""
    if forest.n_levels == 1:
        return z
    # The candidate of each level in each product of them.
    digits = np.indices([z.shape[1]] * forest.n_levels).reshape(forest.n_levels, -1)
    result = np.empty((len(z), digits.shape[1], z.shape[2]))
    for digit, at in zip(digits, forest.at_level, strict=True):
        result[:, :, at] = z[:, digit][:, :, at]
    return result


# --- the posterior ---

#: Draws of the globals on which candidates are judged.
_N_JUDGED = 64
#: Draws of a larger pool over those that are wanted: a part is from farther out.
_MORE = 1.25
#: What files keep.
_KEPT = ("pool", "pairs", "proposal", "ratios", "seed", "efficiency")


def pool_of(g: Array, log_marginal: Array, log_density: Array) -> Pool:
    """Return a pool, of draws that are in an order in which neighbours are near each other."""
    return Pool(g, log_marginal, log_density, np.arange(len(g)) % N_PARTS)


@stored("exact.state")
@dataclass(frozen=True, eq=False)
class IntegratedTrees(PoolState):
    """What is left given globals: independent trees of local coordinates, or nothing."""

    #: Draws of the globals, and integrals at these; None where nothing is integrated.
    pool: Pool
    pairs: TreePairs | None
    #: Of more draws, and their seed.
    proposal: Proposal
    ratios: Ratios
    seed: int
    #: Effective part of the draws of that proposal; by how much draws from farther out move moments, in their errors;
    #: part of the weight where there is no integral; part of the mass of a tree that is at another mode.
    efficiency: float
    moved: float
    lost: float
    elsewhere: float
    forest: Forest
    #: Integrates local coordinates; None where there are none.
    quadrature: TreeIntegral | None
    #: What all of these evaluate.
    density: FittedDensity
    gaussian: Any
    others: tuple[Any, ...] = ()

    kind = "exact"
    n_parts = 2

    @cached_property
    def globals_(self) -> Indices:  # type: ignore[override]
        """Coordinates that are in the pool."""
        return self.forest.globals_

    @cached_property
    def locals_(self) -> Indices:  # type: ignore[override]
        """The others."""
        return self.forest.locals_

    # --- files ---

    def content(self) -> dict[str, Any]:
        """Return what a file keeps; also moments and checks, which take evaluations of the model."""
        return {
            **{name: getattr(self, name) for name in ("forest", "gaussian", "others", *_KEPT)},
            "rule": None if self.quadrature is None else self.quadrature.rule,
            "log_p": self.density.log_p_at_point(),
            "moments": (self.mean(), self.sd()),
            "checks": self.checks,
        }

    @classmethod
    def of_content(cls, content: dict[str, Any], density: ModelDensity) -> Self:
        """Return the posterior on a model."""
        for name, kind in {"forest": Forest, "pool": Pool, "proposal": Proposal, "checks": Checks}.items():
            if not isinstance(content[name], kind):
                raise ValueError(f"what the exact posterior has as {name!r} is something else")
        forest, pool, gaussian, pairs = (content[name] for name in ("forest", "pool", "gaussian", "pairs"))
        moments: tuple[Array, Array] = tuple(content["moments"])
        if {density.n_dim, gaussian.n_dim, *(len(m) for m in moments)} != {forest.n_dim}:
            raise ValueError("the exact posterior is of another dimension")
        pool.check(forest.n_globals)
        fitted = FittedDensity(density, forest, gaussian.mean(), content["log_p"])
        quadrature = None
        if forest.n_local:
            if not isinstance(pairs, TreePairs) or pairs.skew.shape != (len(pool.g), forest.n_local):
                raise ValueError("the integrals of the exact posterior do not go with its forest")
            quadrature = TreeIntegral(fitted, forest, lambda g: pairs.centres[: len(g)])
            quadrature.rule = content["rule"]
            quadrature.begin_from(pairs)
        checks, kept = content["checks"], {name: content[name] for name in _KEPT}
        state = cls(
            **kept, moved=checks.missed, lost=checks.lost, elsewhere=checks.elsewhere,
            forest=forest, quadrature=quadrature, density=fitted, gaussian=gaussian, others=tuple(content["others"]),
        )  # fmt: skip
        vars(state).update(_moments=moments, checks=checks)
        return state

    # --- weights ---

    def enlarged(self, wanted: float) -> Pool:
        """Return new draws of the proposal, of the effective size ``wanted``, as far as the budget goes."""
        from scipy.spatial import cKDTree

        most = min(MOST, 2 * AT_ONCE // max(self.forest.n_local, 1))  # of many groups, less than a fit takes
        n = int(min(np.ceil(_MORE * wanted / self.efficiency), max(most, len(self.pool.g))))
        if n <= len(self.pool.g):
            return self.pool
        y = self.proposal.draws(n, np.random.default_rng([self.seed, n]))
        y = y[by_neighbours(y / y.std(axis=0))]
        g = self.ratios.inverse(y)
        if self.quadrature is None:
            log_m = NothingInside(self.density.logp).log_m(g)
        else:
            points = self.quadrature.at(g)
            log_m = points.log_estimate
            if points.centres.factor.size <= HELD and self.pairs is not None:  # draws of effects need them again
                known = np.concatenate([self.pool.g, g])
                self._known[:] = [cKDTree(known), known, Centres.joined([self.pairs.centres, points.centres])]
        return pool_of(g, log_m, self.proposal.log_density(y) + self.ratios.log_slope(g))

    def correction(self) -> tuple[float, float]:
        """Return what the nodes in use miss of log m everywhere, and its standard error.

        Rules are chosen for what changes with the globals: of a constant, they know nothing.
        """
        quadrature = self.quadrature
        if quadrature is None:
            return 0.0, 0.0
        assert self.pairs is not None
        rows, rules = evenly_picked(self.weights, N_COMPARED, 0.5), references(self.forest.n_levels)
        more = [one for one in rules if one.n_nodes > quadrature.rule.n_nodes] or rules[-1:]
        rule, some = more[:2][-1].sure, self.pairs[rows]
        many = integrate(quadrature.terms, self.forest, rule, some.g, some.centres, moments=False).log_marginal
        apart = many - self.pool.log_marginal[rows]
        return float(np.mean(apart)), float(np.std(apart, ddof=1) / np.sqrt(N_COMPARED))

    @cached_property
    def checks(self) -> Checks:  # type: ignore[override]
        """What was measured."""
        measured, beyond = dict[str, Any](), 0.0
        if (quadrature := self.quadrature) is None and self.forest.n_globals <= MOST_PLAIN:
            rows = evenly_picked(self.weights, len(self.weights), 0.5)
            beyond = beyond_reach(self.density.logp, self.pool.g[rows])
        if quadrature is not None:
            measured = {
                "n_nodes": quadrature.rule.n_nodes,
                "rule_error": quadrature.rule_error,
                "lost": self.lost,
                "elsewhere": self.elsewhere,
                "effects": self._candidates[1],
            }
        return Checks(
            self.khat,
            self.effective_size,
            len(self.weights),
            self.forest.n_globals,
            self.forest.n_local,
            **measured,
            sd_error=float(self.sd_errors.max(initial=0.0)),
            tail=tail_size(self.pool.g, self.weights),
            missed=self.moved,
            beyond=beyond,
            n_modes=1 + len(self.others),
        )

    # --- draws and moments ---

    @cached_property
    def skew(self) -> Array:
        """Skewness of the local coordinates given globals, in the mean over these, (n_local,)."""
        assert self.pairs is not None
        return self.weights @ self.pairs.skew

    def centres(self, g: Array) -> Centres:
        """Return means and factors of the local coordinates given globals, (n, n_globals), of the pool or others."""
        assert self.quadrature is not None
        tree, known, centres = self._known
        rows = tree.query(g)[1]
        result, others = centres[rows], np.flatnonzero((known[rows] != g).any(axis=1))
        if not len(others):
            return result
        every = np.ones((len(others), self.forest.n_local), dtype=bool)
        return result.replaced(others, self.quadrature.at(g[others]).centres, every)

    @cached_property
    def _known(self) -> list[Any]:
        """Globals at which centres are known: those of the pool, and of the last larger one."""
        from scipy.spatial import cKDTree

        assert self.pairs is not None
        return [cKDTree(self.pool.g), self.pool.g, self.pairs.centres]

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle: not what is known of larger pools."""
        return {name: value for name, value in vars(self).items() if name != "_known"}

    def pick(self, pool: Pool, order: Indices, uniform: list[Array]) -> tuple[Indices, Array]:
        """Return rows of the pool, and local coordinates from their conditionals."""
        weights = self.weights if pool is self.pool else pool.weights()[0]
        rows = order[picked(weights[order], uniform[0])]
        return rows, self._locals(pool.g, rows, uniform[1:])

    def all_of(self, pool: Pool, rng: np.random.Generator) -> tuple[Indices, Array, Array]:
        """Return the pool, with a draw of the local coordinates at each."""
        rows = np.flatnonzero(np.isfinite(pool.log_ratio))
        uniform = list(rng.random((2, len(rows), self.forest.n_local)))
        return rows, self._locals(pool.g, rows, uniform), pool.log_ratio[rows]

    def _locals(self, g: Array, rows: Indices, uniform: Sequence[Array]) -> Array:
        """Return local coordinates for some rows of globals, (n, n_local), from uniform numbers of that shape."""
        quadrature, forest = self.quadrature, self.forest
        if quadrature is None or not uniform:  # only globals are read
            return np.broadcast_to(self._moments[0][self.locals_], (len(rows), forest.n_local))
        result = np.empty((len(rows), forest.n_local))
        shifts, choices = uniform
        order = np.argsort(rows, kind="stable")
        points, first, of_draw = np.unique(rows[order], return_index=True, return_inverse=True)
        # Few points at a time: their centres take as much memory as the draws.
        size = max(1, AT_ONCE // (forest.n_local * (1 + forest.n_levels)))
        for start in range(0, len(points), size):
            part = points[start : start + size]
            low, high = np.searchsorted(of_draw, [start, start + len(part)])
            of_part, of_points = order[low:high], order[first[start : start + len(part)]]
            common = (quadrature.terms, forest, g[part], self.centres(g[part]), self.skew)
            number = of_draw[low:high] - start
            result[of_part] = draw_effects(*common, shifts[of_points], choices[of_part], number, self._candidates[0])
        return result

    @cached_property
    def _candidates(self) -> tuple[int, float]:
        """The fewest candidates with which means and sds are those with twice as many, and by how much these differ.

        Small errors of the same sign add up over many effects: their sums are compared, too.
        """
        assert self.pairs is not None
        assert self.quadrature is not None
        rng, forest = np.random.default_rng(self.seed), self.forest
        some = self.pairs[evenly_picked(self.weights, _N_JUDGED, rng.random())]
        # Evenly spaced in each coordinate: what depends on the shift cancels.
        order = rng.permuted(np.tile(np.arange(_N_JUDGED)[:, None], forest.n_local), axis=0)
        shifts = (order + rng.random(order.shape)) / _N_JUDGED
        at = (self.quadrature.terms, forest, some.g, some.centres, self.skew, shifts)
        k, *others = numbers_of_candidates(forest.n_levels)
        mean, sd = moments_of_draws(*at, k)
        for i, more in enumerate(others):
            (last, of_last), (mean, sd) = (mean, sd), moments_of_draws(*at, more)
            errors = np.stack([(mean - last) / sd, of_last / sd - 1.0])
            sums = [errors[:, at].sum(axis=1) / np.sqrt(len(at)) for at in forest.at_level]  # in sds of the sums
            error = max(float(np.abs(of).max()) for of in (errors, *sums))
            if error < MOST_SHORT or i == len(others) - 1:
                break
            k = more
        return k, error

    def moments_of_others(self, mean: Array) -> tuple[Array, Array]:
        """Return means and standard deviations of local coordinates, by quadrature at the draws of the pool."""
        if self.pairs is None:
            return np.empty(0), np.empty(0)
        centres = self.pairs.centres
        of_locals = self.weights @ centres.mean
        return of_locals, np.sqrt(self.weights @ (centres.variance() + (centres.mean - of_locals) ** 2))

    def cov_block(self, index: Indices) -> Array:
        """Return the covariance of some coordinates, about the mean of all of them."""
        forest, weights = self.forest, self.weights
        place = np.full(forest.n_dim, -1, dtype=np.intp)
        place[forest.locals_] = np.arange(forest.n_local)
        local = place[index] >= 0
        at, among = place[index][local], np.flatnonzero(local)
        points = np.empty((len(weights), len(index)))
        points[:, ~local] = self.pool.g[:, np.searchsorted(forest.globals_, index[~local])]
        result = np.zeros((len(index), len(index)))
        if self.pairs is not None:
            points[:, local] = self.pairs.centres.mean[:, at]
            on_path = np.arange(forest.n_levels) <= forest.level[at][:, None]
            same = (forest.path[at][:, None] == forest.path[at][None]) & on_path[:, None] & on_path[None]
            for level in range(forest.n_levels):
                i, j = np.nonzero(same[..., level])
                factor = self.pairs.centres.factor[:, :, level]
                result[among[i], among[j]] += weights @ (factor[:, at[i]] * factor[:, at[j]])
        points -= self.mean()[index]
        return result + (weights[:, None] * points).T @ points
