"""Exact posteriors: globals as weighted draws, and trees of local coordinates given these."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.sizes import AT_ONCE, HELD
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.core.verdict import beyond_reach
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.effects import draw_effects, moments_of_draws, numbers_of_candidates
from pymc_ngvi.marginal.forest import MOST_PLAIN, Forest
from pymc_ngvi.marginal.integral import N_COMPARED, NothingInside, TreeIntegral, TreePairs
from pymc_ngvi.marginal.nodes import references
from pymc_ngvi.marginal.on_model import FittedDensity
from pymc_ngvi.marginal.pooled import GivenGlobals, PoolState
from pymc_ngvi.marginal.proposals import Proposal
from pymc_ngvi.marginal.quadrature import integrate
from pymc_ngvi.marginal.ratios import Ratios
from pymc_ngvi.marginal.sampler import MOST
from pymc_ngvi.marginal.sampling import N_PARTS, Pool, by_neighbours, evenly_picked, picked, tail_size
from pymc_ngvi.marginal.verdict import MOST_SHORT, Checks

#: Draws of the globals on which candidates are judged.
_N_JUDGED = 64
#: Largest skewness of candidates.
_MOST_SKEW = 1.5
#: Draws of a larger pool over those that are wanted: a part is from farther out.
_MORE = 1.25
#: What files keep.
_KEPT = ("pool", "pairs", "proposal", "ratios", "seed", "efficiency")


def pool_of(g: Array, log_marginal: Array, log_density: Array) -> Pool:
    """Return a pool, of draws that are in an order in which neighbours are near each other."""
    return Pool(g, log_marginal, log_density, np.arange(len(g)) % N_PARTS)


@stored("exact.state")
@dataclass(frozen=True, eq=False)
class IntegratedTrees(GivenGlobals):
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

    kind = "exact"
    n_parts = 2

    def with_pool(self, gaussian: Any, others: tuple[Any, ...] = ()) -> PoolState:
        """Return the posterior."""
        return PoolState(self.pool, self, self.forest.globals_, self.forest.locals_, gaussian, others=others)

    # --- files ---

    def content(self, state: PoolState) -> dict[str, Any]:
        """Return what a file keeps; also moments and checks, which take evaluations of the model."""
        return {
            **{name: getattr(self, name) for name in ("forest", *_KEPT)},
            "rule": None if self.quadrature is None else self.quadrature.rule,
            "log_p": self.density.log_p_at_point(),
            "moments": (state.mean(), state.sd()),
            "checks": state.checks,
        }

    @classmethod
    def of_content(cls, content: dict[str, Any], density: ModelDensity) -> PoolState:
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
        rest = cls(
            **kept, moved=checks.missed, lost=checks.lost, elsewhere=checks.elsewhere,
            forest=forest, quadrature=quadrature, density=fitted,
        )  # fmt: skip
        state = rest.with_pool(gaussian, tuple(content["others"]))
        vars(state).update(_moments=moments, checks=checks)
        return state

    # --- weights ---

    def enlarged(self, pool: Pool, wanted: float) -> Pool:
        """Return new draws of the proposal, of the effective size ``wanted``, as far as the budget goes."""
        from scipy.spatial import cKDTree

        n = int(min(np.ceil(_MORE * wanted / self.efficiency), max(MOST, len(pool.g))))
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

    def correction(self, state: PoolState) -> tuple[float, float]:
        """Return what the nodes in use miss of log m everywhere, and its standard error.

        Rules are chosen for what changes with the globals: of a constant, they know nothing.
        """
        quadrature = self.quadrature
        if quadrature is None:
            return 0.0, 0.0
        assert self.pairs is not None
        rows, rules = evenly_picked(state.weights, N_COMPARED, 0.5), references(self.forest.n_levels)
        more = [one for one in rules if one.n_nodes > quadrature.rule.n_nodes] or rules[-1:]
        rule, some = more[:2][-1].sure, self.pairs[rows]
        many = integrate(quadrature.terms, self.forest, rule, some.g, some.centres, moments=False).log_marginal
        apart = many - state.pool.log_marginal[rows]
        return float(np.mean(apart)), float(np.std(apart, ddof=1) / np.sqrt(N_COMPARED))

    def verdict(self, state: PoolState) -> Checks:
        """Return what was measured."""
        measured: dict[str, Any] = {}
        if (quadrature := self.quadrature) is not None:
            measured = {
                "n_nodes": quadrature.rule.n_nodes,
                "rule_error": quadrature.rule_error,
                "lost": self.lost,
                "elsewhere": self.elsewhere,
                "effects": self._candidates[1],
            }
        return Checks(
            state.khat,
            state.effective_size,
            len(state.weights),
            self.forest.n_globals,
            self.forest.n_local,
            **measured,
            sd_error=float(state.sd_errors.max(initial=0.0)),
            tail=tail_size(state.pool.g, state.weights),
            missed=self.moved,
            beyond=self._beyond(state),
            n_modes=1 + len(state.others),
        )

    def _beyond(self, state: PoolState) -> float:
        """Return the part of a variance that is farther out than all draws, where nothing is integrated."""
        if self.quadrature is not None or self.forest.n_globals > MOST_PLAIN:
            return 0.0
        rows = evenly_picked(state.weights, len(state.weights), 0.5)
        return beyond_reach(self.density.logp, state.pool.g[rows])

    # --- draws and moments ---

    @cached_property
    def _weights(self) -> Array:
        return self.pool.weights()[0]

    @cached_property
    def skew(self) -> Array:
        """Skewness of the local coordinates given globals, in the mean over these, (n_local,)."""
        assert self.pairs is not None
        return np.clip(self._weights @ self.pairs.skew, -_MOST_SKEW, _MOST_SKEW)

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

    def draw(
        self, state: PoolState, pool: Pool, order: NDArray[np.intp], uniform: list[Array]
    ) -> tuple[NDArray[np.intp], Array]:
        """Return rows of the pool, and local coordinates from their conditionals."""
        weights = state.weights if pool is state.pool else pool.weights()[0]
        rows = order[picked(weights[order], uniform[0])]
        return rows, self._locals(pool.g, rows, uniform[1:])

    def joint(self, state: PoolState, pool: Pool, rng: np.random.Generator) -> tuple[NDArray[np.intp], Array, Array]:
        """Return the pool, with a draw of the local coordinates at each."""
        rows = np.flatnonzero(np.isfinite(pool.log_ratio))
        uniform = list(rng.random((2, len(rows), self.forest.n_local)))
        return rows, self._locals(pool.g, rows, uniform), pool.log_ratio[rows]

    def _locals(self, g: Array, rows: NDArray[np.intp], uniform: Sequence[Array]) -> Array:
        """Return local coordinates for some rows of globals, (n, n_local), from uniform numbers of that shape."""
        quadrature, forest = self.quadrature, self.forest
        result = np.empty((len(rows), forest.n_local))
        if quadrature is None:
            return result
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
        """The fewest candidates with which means and sds are those with twice as many, and by how much these differ."""
        assert self.pairs is not None
        assert self.quadrature is not None
        rng, forest = np.random.default_rng(self.seed), self.forest
        some = self.pairs[evenly_picked(self._weights, _N_JUDGED, rng.random())]
        # Evenly spaced in each coordinate: what depends on the shift cancels.
        order = rng.permuted(np.tile(np.arange(_N_JUDGED)[:, None], forest.n_local), axis=0)
        shifts = (order + rng.random(order.shape)) / _N_JUDGED
        at = (self.quadrature.terms, forest, some.g, some.centres, self.skew, shifts)
        k, *others = numbers_of_candidates(forest.n_levels)
        mean, sd = moments_of_draws(*at, k)
        for i, more in enumerate(others):
            (last, of_last), (mean, sd) = (mean, sd), moments_of_draws(*at, more)
            error = float(np.maximum(np.abs(mean - last) / sd, np.abs(of_last / sd - 1.0)).max())
            if error < MOST_SHORT or i == len(others) - 1:
                break
            k = more
        return k, error

    def moments(self, state: PoolState, mean: Array) -> tuple[Array, Array]:
        """Return means and standard deviations of local coordinates, by quadrature at the draws of the pool."""
        if self.pairs is None:
            return np.empty(0), np.empty(0)
        centres = self.pairs.centres
        of_locals = self._weights @ centres.mean
        return of_locals, np.sqrt(self._weights @ (centres.variance() + (centres.mean - of_locals) ** 2))

    def cov_block(self, state: PoolState, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates, about the mean of all of them."""
        forest, weights = self.forest, self._weights
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
        points -= state.mean()[index]
        return result + (weights[:, None] * points).T @ points
