"""Local coordinates in trees, given a pool of globals: integrated by quadrature, and drawn from their conditionals."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.psis import smoothed
from pymc_ngvi.core.sizes import AT_ONCE, MOST_NUMBERS
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.core.verdict import beyond_reach
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.effects import draw_effects, moments_of_draws, numbers_of_candidates
from pymc_ngvi.marginal.forest import MOST_PLAIN, Forest
from pymc_ngvi.marginal.log_marginal import LogMarginal
from pymc_ngvi.marginal.nodes import ladder
from pymc_ngvi.marginal.on_model import FittedDensity
from pymc_ngvi.marginal.pooled import GivenGlobals, PoolState
from pymc_ngvi.marginal.quadrature import integrate
from pymc_ngvi.marginal.sampling import Plain, Pool, Sampled, Sequences, evenly_picked, picked, tail_size
from pymc_ngvi.marginal.verdict import MOST_SHORT, Checks

# --- draws of the local coordinates for globals of a pool ---

#: Numbers held at once.
HELD = AT_ONCE
#: Draws of the globals on which candidates are judged.
_N_JUDGED = 64


@dataclass(frozen=True, eq=False)
class Conditionals:
    """The local coordinates given the globals of a pool."""

    #: With centres that it has learned.
    quadrature: LogMarginal
    #: The pool, on which candidates are judged; shape (n, n_globals).
    g: Array
    #: Of the pool; they add up to 1; shape (n,).
    weights: Array
    seed: int

    @property
    def _skew(self) -> Array:
        assert self.quadrature.skew is not None
        return self.quadrature.skew

    def draw(self, g: Array, rows: NDArray[np.intp], shifts: Array, choices: Array) -> Array:
        """Return local coordinates for some rows of ``g``, (n, n_local), from uniform numbers of that shape."""
        quadrature, forest = self.quadrature, self.quadrature.forest
        order = np.argsort(rows, kind="stable")
        points, first, of_draw = np.unique(rows[order], return_index=True, return_inverse=True)
        result = np.empty((len(rows), forest.n_local))
        # Few points at a time: their centres take as much memory as the draws.
        size = max(1, HELD // (forest.n_local * (1 + forest.n_levels)))
        for start in range(0, len(points), size):
            part = points[start : start + size]
            low, high = np.searchsorted(of_draw, [start, start + len(part)])
            of_part, of_points = order[low:high], order[first[start : start + len(part)]]
            common = (quadrature.terms, forest, g[part], quadrature.centres(g[part]), self._skew)
            number = of_draw[low:high] - start
            result[of_part] = draw_effects(*common, shifts[of_points], choices[of_part], number, self.settled[0])
        return result

    @cached_property
    def settled(self) -> tuple[int, float]:
        """The fewest candidates with which means and sds are those with twice as many, and by how much these differ."""
        rng, forest = np.random.default_rng(self.seed), self.quadrature.forest
        g = self.g[evenly_picked(self.weights, _N_JUDGED, rng.random())]
        # Evenly spaced in each coordinate: what depends on the shift cancels.
        order = rng.permuted(np.tile(np.arange(len(g))[:, None], forest.n_local), axis=0)
        shifts = (order + rng.random(order.shape)) / len(g)
        at = (self.quadrature.terms, forest, g, self.quadrature.centres(g), self._skew, shifts)
        k, *others = numbers_of_candidates(forest.n_levels)
        mean, sd = moments_of_draws(*at, k)
        for i, more in enumerate(others):
            (last, of_last), (mean, sd) = (mean, sd), moments_of_draws(*at, more)
            error = float(np.maximum(np.abs(mean - last) / sd, np.abs(of_last / sd - 1.0)).max())
            if error < MOST_SHORT or i == len(others) - 1:
                break
            k = more
        return k, error


# Local coordinates in trees, given a pool of globals: integrated by quadrature, and drawn from their conditionals.

#: Draws at which the reference is compared with the rule in use, and with more nodes.
_N_REFERENCE, _N_COMPARED = 256, 16
#: Draws of the globals that are used at most.
_MOST_LEFT_OUT = 4_000


@stored("exact.state")
@dataclass(frozen=True, eq=False)
class IntegratedTrees(GivenGlobals):
    """What is left given globals: independent trees of local coordinates, or nothing."""

    #: Globals as weighted draws, and where they come from.
    sampled: Sampled
    #: Make more of them.
    sequences: Sequences
    forest: Forest
    #: Gives local coordinates; None where there are none.
    quadrature: LogMarginal | None
    #: What all of these evaluate.
    density: FittedDensity

    kind = "exact"
    n_parts = 2

    def with_pool(self, gaussian: Any, others: tuple[Any, ...] = ()) -> PoolState:
        """Return the posterior."""
        return PoolState(self.sampled.pool, self, self.forest.globals_, self.forest.locals_, gaussian, others=others)

    # --- files ---

    def content(self, state: PoolState) -> dict[str, Any]:
        """Return what a file keeps; also moments and checks, which take evaluations of the model."""
        return {
            "forest": self.forest,
            "sampled": self.sampled,
            "seed": self.sequences.seed,
            "quadrature": None if self.quadrature is None else self.quadrature.content(),
            "log_p": self.density.log_p_at_point(),
            "moments": (state.mean(), state.sd()),
            "checks": state.checks,
        }

    @classmethod
    def of_content(cls, content: dict[str, Any], density: ModelDensity) -> PoolState:
        """Return the posterior on a model."""
        for name, kind in {"forest": Forest, "sampled": Sampled, "checks": Checks}.items():
            if not isinstance(content[name], kind):
                raise ValueError(f"what the exact posterior has as {name!r} is something else")
        forest, sampled, gaussian = content["forest"], content["sampled"], content["gaussian"]
        moments: tuple[Array, Array] = tuple(content["moments"])
        if {density.n_dim, gaussian.n_dim, *(len(m) for m in moments)} != {forest.n_dim}:
            raise ValueError("the exact posterior is of another dimension")
        sampled.pool.check(forest.n_globals)
        fitted = FittedDensity(density, forest, gaussian.mean(), content["log_p"])
        quadrature = None
        if forest.n_local:
            quadrature = LogMarginal.of_content(content["quadrature"], fitted, forest, sampled.bend)
        sequences = Sequences(quadrature or Plain(fitted.logp), content["seed"])
        rest = cls(sampled, sequences, forest, quadrature, fitted)
        state = rest.with_pool(gaussian, tuple(content["others"]))
        vars(state).update(_moments=moments, checks=content["checks"])
        return state

    # --- weights ---

    def enlarged(self, pool: Pool, wanted: float) -> Pool:
        """Return a pool of the effective size ``wanted``, as far as the budget goes."""
        return self.sequences.enlarged(pool, self.sampled.proposal, wanted)

    def correction(self, state: PoolState) -> tuple[float, float]:
        """Return what the nodes in use miss of log m everywhere, and its standard error.

        Rules are chosen for what changes with the globals: of a constant, neither the reference nor the base rule
        knows.
        """
        quadrature = self.quadrature
        if quadrature is None:
            return 0.0, 0.0
        n = _N_COMPARED if quadrature.base is None else _N_REFERENCE
        rows = evenly_picked(state.weights, n, 0.5)
        points = quadrature.reference(state.pool.g[rows])
        apart = np.exp(points.log_marginal - state.pool.log_marginal[rows])[~points.lost]
        some = points[np.arange(0, n, n // _N_COMPARED)]
        few, many = (
            integrate(quadrature.terms, self.forest, rule, some.g, some.centres, moments=False).log_marginal
            for rule in (quadrature.rule, ladder(self.forest.n_levels)[-1])
        )
        value = float(np.log(apart.mean()) + np.mean(many - few))
        return value, float(np.hypot(_error(apart) / apart.mean(), _error(many - few)))

    def verdict(self, state: PoolState) -> Checks:
        """Return what was measured."""
        measured: dict[str, Any] = {}
        if (quadrature := self.quadrature) is not None:
            measured = {
                "n_nodes": quadrature.rule.n_nodes,
                "rule_error": quadrature.rule_error,
                "difference": self.sampled.difference,
                "lost": state.pool.part_lost(state.weights),
                "effects": self._conditionals(state).settled[1],
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
            missed=self.sampled.missed,
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

    def draw(
        self, state: PoolState, pool: Pool, order: NDArray[np.intp], uniform: list[Array]
    ) -> tuple[NDArray[np.intp], Array]:
        """Return rows of the pool, and local coordinates from their conditionals."""
        weights = state.weights if pool is state.pool else pool.weights()[0]
        rows = order[picked(weights[order], uniform[0])]
        if self.quadrature is None:
            return rows, np.empty((len(rows), 0))
        return rows, self._conditionals(state).draw(pool.g, rows, *uniform[1:])

    def joint(self, state: PoolState, pool: Pool, rng: np.random.Generator) -> tuple[NDArray[np.intp], Array, Array]:
        """Return the pool, with a draw of the local coordinates at each."""
        rows = np.flatnonzero(np.isfinite(pool.log_ratio))
        log_weights = pool.log_ratio[rows]
        if self.quadrature is None:
            return rows, np.empty((len(rows), 0)), log_weights
        shifts, choices = rng.random((2, len(rows), self.forest.n_local))
        return rows, self._conditionals(state).draw(pool.g, rows, shifts, choices), log_weights

    def _conditionals(self, state: PoolState) -> Conditionals:
        """Return what local coordinates are drawn from: made once, and kept with the last pool."""
        if "conditionals" not in state._last:
            assert self.quadrature is not None
            made = Conditionals(self.quadrature, state.pool.g, state.weights, self.sequences.seed)
            state._last["conditionals"] = made
        return state._last["conditionals"]

    def moments(self, state: PoolState, mean: Array) -> tuple[Array, Array]:
        """Return means and standard deviations of local coordinates, by quadrature at the draws of the pool."""
        of_locals, square = np.zeros(self.forest.n_local), np.zeros(self.forest.n_local)
        if self.quadrature is not None:
            # About a first guess, so that squares do not cancel.
            guess = self.quadrature.predicted(mean[None]).mean[0]
            for rows, centres in self._centres(state.pool.g):
                apart = centres.mean - guess
                of_locals += state.weights[rows] @ apart
                square += state.weights[rows] @ (centres.variance() + apart**2)
            square -= of_locals**2
            of_locals += guess
        return of_locals, np.sqrt(square)

    def cov_block(self, state: PoolState, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates, about the mean of all of them."""
        forest, g, weights, mean = self.forest, state.pool.g, state.weights, state.mean()
        place = np.full(forest.n_dim, -1, dtype=np.intp)
        place[forest.locals_] = np.arange(forest.n_local)
        local, of_globals = place[index] >= 0, np.searchsorted(forest.globals_, index[place[index] < 0])
        at, among = place[index][local], np.flatnonzero(local)
        on_path = np.arange(forest.n_levels) <= forest.level[at][:, None]
        same = (forest.path[at][:, None] == forest.path[at][None]) & on_path[:, None] & on_path[None]
        result = np.zeros((len(index), len(index)))
        for rows, centres in self._centres(g):
            points = np.empty((len(g[rows]), len(index)))
            points[:, ~local] = g[rows][:, of_globals]
            points[:, local] = centres.mean[:, at]
            for level in range(forest.n_levels if len(at) else 0):
                i, j = np.nonzero(same[..., level])
                f = centres.factor[:, :, level]
                result[among[i], among[j]] += weights[rows] @ (f[:, at[i]] * f[:, at[j]])
            points -= mean[index]
            result += (weights[rows, None] * points).T @ points
        return result

    def _centres(self, g: Array) -> Iterator[tuple[slice, Centres]]:
        """Yield rows of the pool, few at a time, with the conditional moments of the local coordinates."""
        size = max(1, HELD // (max(self.forest.n_local, 1) * (1 + self.forest.n_levels)))
        for start in range(0, len(g), size):
            rows = slice(start, start + size)
            if self.quadrature is not None:
                yield rows, self.quadrature.centres(g[rows])
            else:
                n = len(g[rows])
                yield rows, Centres(np.empty((n, 0)), np.empty((n, 0, 0)))


# --- groups left out ---


class LeftOut(NamedTuple):
    """Predictive densities of groups given all others."""

    #: shape (n_blocks,).
    log_density: Array
    #: Of the weights of the globals; above .7, a density can't be relied on; shape (n_blocks,).
    khat: Array
    #: The coordinate at the root of each block; shape (n_blocks,).
    roots: NDArray[np.intp]


def leave_groups_out(state: PoolState) -> LeftOut:
    """Return the predictive density of each group's data given those of all other groups [1]_.

    Given the globals, the integral of a block's terms is p(y_i | g), the density of a group's data. Over the globals,
    1 / p(y_i | y_-i) is the posterior mean of 1 / p(y_i | g): an importance sample from the posterior without that
    group.

    References
    ----------
    .. [1] A. Vehtari, T. Mononen, V. Tolvanen, T. Sivula, O. Winther (2016). Bayesian leave-one-out cross-validation
       approximations for Gaussian latent variable models. JMLR 17(103). https://jmlr.org/papers/v17/14-540.html
    """
    assert isinstance(state.rest, IntegratedTrees)
    forest, quadrature = state.rest.forest, state.rest.quadrature
    if quadrature is None:
        raise ValueError("The model has no groups that are independent given the others: none can be left out.")
    terms = quadrature.terms
    if isinstance(terms, FittedDensity):
        terms = terms.of_whole_groups()
    roots = forest.locals_[forest.at_level[0]]
    # The first ones, not those of most weight: without a group, others may have more.
    n = min(_MOST_LEFT_OUT, max(MOST_NUMBERS // len(roots), 1), len(state.pool.g))
    g, log_weights = state.pool.g[:n], state.log_weights[:n]
    of_blocks, size = np.empty((n, len(roots))), max(1, AT_ONCE // forest.n_local)
    for start in range(0, n, size):
        rows = slice(start, start + size)
        points = quadrature.reference(g[rows])
        integral = integrate(terms, forest, quadrature.rule, g[rows], points.centres, moments=False, by_block=True)
        assert integral.of_blocks is not None
        of_blocks[rows] = np.where(points.lost[:, None], np.nan, integral.of_blocks)
    log_density, khat = np.empty(len(roots)), np.empty(len(roots))
    for i, of_group in enumerate(of_blocks.T):
        # Draws that are nothing to the posterior are left out, and those whose centres were not found.
        known = np.isfinite(log_weights) & np.isfinite(of_group)
        smooth, khat[i] = smoothed(log_weights[known] - of_group[known])
        # E_{p(g | y_-i)} p(y_i | g) = sum of v p / sum of v with v = w / p.
        log_density[i] = logsumexp(smooth + of_group[known]) - logsumexp(smooth)
    return LeftOut(log_density, khat, roots)


def _error(values: Array) -> float:
    """Return the standard error of a mean of independent values."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))
