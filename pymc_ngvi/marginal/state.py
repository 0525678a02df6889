"""The exact posterior as a distribution of flat vectors: a weighted pool of globals, local coordinates given them."""

import functools
import uuid
import weakref

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.effects import N_CANDIDATES, SplitNormal, candidates, draw_effects, weights_of
from pymc_ngvi.marginal.files import InFiles
from pymc_ngvi.marginal.fitting import Sampled
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.log_marginal import LogMarginal
from pymc_ngvi.marginal.nodes import ladder
from pymc_ngvi.marginal.on_model import FittedDensity
from pymc_ngvi.marginal.quadrature import integrate
from pymc_ngvi.marginal.sampling import Pool, Sequences, evenly_picked, picked
from pymc_ngvi.marginal.surrogate import Surrogate, fit_surrogate, n_needed
from pymc_ngvi.marginal.verdict import Checks

#: Numbers held at once while moments are computed.
_HELD = 2**22
#: Draws on which the candidates of local coordinates are judged; at which the reference is compared with the rule in
#: use, and with more nodes.
_N_JUDGED, _N_REFERENCE, _N_COMPARED = 64, 256, 16
#: Total variation distance between weights of candidates by a surrogate and by the model: of a coordinate, in the mean.
_MOST_APART, _MOST_APART_IN_MEAN = 0.02, 0.005
_KNOWN: "weakref.WeakValueDictionary[int, ExactState]" = weakref.WeakValueDictionary()


@stored("exact.state")
@dataclass(frozen=True, eq=False)
class ExactState(InFiles):
    """The posterior of a model whose local coordinates can be integrated.

    Parameters
    ----------
    forest : Forest
    sampled : Sampled
        Globals as weighted draws.
    sequences : Sequences
        Make more of them.
    quadrature : LogMarginal or None
        Gives local coordinates; None where there are none.
    gaussian : GaussianState
        The fit that it began from.
    density : FittedDensity
        What all of these evaluate.
    number : int
        Stands for it among the shared variables of a graph; the same when it is pickled.
    """

    forest: Forest
    sampled: Sampled
    sequences: Sequences
    quadrature: LogMarginal | None
    gaussian: Any
    density: FittedDensity
    number: int = field(default_factory=lambda: uuid.uuid4().int >> 66)

    def __post_init__(self) -> None:
        _KNOWN[self.number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes it again: the one of that number, where it is there still."""
        return _restored, (self.number, {k: v for k, v in self.__dict__.items() if k not in ("_last", "_surrogate")})

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return self.forest.n_dim

    @property
    def n_uniform(self) -> int:
        """Uniform numbers behind a draw: one for the globals, two for each local coordinate."""
        return 1 + 2 * self.forest.n_local

    def params(self) -> dict[str, Array]:
        """Return what stands for the state among the shared variables of a graph: its number, and the pool."""
        return {
            "exact": np.array([self.number]),
            "globals": self.pool.g,
            "log_weights": self.log_weights,
        }

    @classmethod
    def from_params(cls, params: dict[str, Array]) -> "ExactState":
        """Return the state with these parameters.

        Raises
        ------
        ValueError
            If it is not in memory any more.
        """
        known = _KNOWN.get(int(params["exact"][0]))
        if known is None:
            raise ValueError(
                "No exact posterior has this number: arrays alone don't tell it. Keep, or pickle, the approximation "
                "that they come from."
            )
        return known

    # --- the globals ---

    @property
    def pool(self) -> Pool:
        """The weighted draws of the globals."""
        return self.sampled.pool

    @functools.cached_property
    def _smoothed(self) -> tuple[Array, float]:
        return self.pool.weights()

    @property
    def weights(self) -> Array:
        """Smoothed weights of the pool, (n,); they add up to 1."""
        return self._smoothed[0]

    @property
    def log_weights(self) -> Array:
        """Their logarithms."""
        with np.errstate(divide="ignore"):
            return np.log(self.weights)

    @property
    def khat(self) -> float:
        """Pareto k-hat of the weights."""
        return self._smoothed[1]

    @property
    def effective_size(self) -> float:
        """Effective number of draws of the globals."""
        return _effective(self.weights)

    def log_normaliser(self) -> tuple[float, float]:
        """Return the logarithm of the integral of exp(log p), and its standard error."""
        value, se = self.pool.log_normaliser()
        left, of_left = self._left_by_nodes
        return value + left, float(np.hypot(se, of_left))

    @functools.cached_property
    def _left_by_nodes(self) -> tuple[float, float]:
        """What the nodes in use miss of log m everywhere, and its standard error.

        Rules are chosen for what changes with the globals: of a constant, neither the reference nor the base rule
        knows.
        """
        quadrature = self.quadrature
        if quadrature is None:
            return 0.0, 0.0
        n = _N_COMPARED if quadrature.base is None else _N_REFERENCE
        rows = evenly_picked(self.weights, n, 0.5)
        points = quadrature.reference(self.pool.g[rows])
        apart = np.exp(points.log_marginal - self.pool.log_marginal[rows])[~points.lost]
        some = points[np.arange(0, n, n // _N_COMPARED)]
        few, many = (
            integrate(quadrature.terms, self.forest, rule, some.g, some.centres, moments=False).log_marginal
            for rule in (quadrature.rule, ladder(self.forest.n_levels)[-1])
        )
        value = float(np.log(apart.mean()) + np.mean(many - few))
        return value, float(np.hypot(_error(apart) / apart.mean(), _error(many - few)))

    def for_draws(self, n: int) -> Pool:
        """Return a pool whose effective size is ``n``, as far as the budget goes; the last one is kept."""
        if n <= self.effective_size:
            return self.pool
        if self._last.get("n") != n:
            pool = self.sequences.enlarged(self.pool, self.sampled.proposal, n)
            self._last.update(n=n, pool=pool)
        result: Pool = self._last["pool"]
        return result

    @functools.cached_property
    def _last(self) -> dict[str, Any]:
        return {}

    def effective_size_for(self, n: int) -> float:
        """Return the effective size of the pool that ``n`` draws are taken from."""
        pool = self.for_draws(n)
        return self.effective_size if pool is self.pool else _effective(pool.weights()[0])

    # --- draws ---

    def draws(self, base: Array) -> Array:
        """Map base draws to draws: normals, which have no part, and behind them the uniforms."""
        uniform = base[:, self.n_dim :]
        rows = picked(self.weights, uniform[:, 0])
        n_local = self.forest.n_local
        return self._joined(self.pool, rows, uniform[:, 1 : 1 + n_local], uniform[:, 1 + n_local :])

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """Return ``n`` draws of equal weight; the pool they are taken from is made larger for many."""
        pool = self.for_draws(n)
        weights = self.weights if pool is self.pool else pool.weights()[0]
        # Evenly by weight: as few repetitions as can be.
        rows = picked(weights, rng.permutation((np.arange(n) + rng.random()) / n))
        shifts, choices = rng.random((n, self.forest.n_local)), rng.random((n, self.forest.n_local))
        return self._joined(pool, rows, shifts, choices)

    def _joined(self, pool: Pool, rows: NDArray[np.intp], shifts: Array, choices: Array) -> Array:
        """Return flat vectors: the globals of some rows of the pool, with local coordinates drawn."""
        theta = np.empty((len(rows), self.n_dim))
        theta[:, self.forest.globals_] = pool.g[rows]
        if self.quadrature is not None:
            theta[:, self.forest.locals_] = self._local(pool.g, rows, shifts, choices)
        return theta

    def _local(self, g: Array, rows: NDArray[np.intp], shifts: Array, choices: Array) -> Array:
        quadrature = self.quadrature
        assert quadrature is not None
        assert quadrature.skew is not None
        order = np.argsort(rows, kind="stable")
        points, first, of_draw = np.unique(rows[order], return_index=True, return_inverse=True)
        result = np.empty((len(rows), self.forest.n_local))
        # Few points at a time: their centres take as much memory as the draws.
        size = max(1, _HELD // (self.forest.n_local * (1 + self.forest.n_levels)))
        for start in range(0, len(points), size):
            part = points[start : start + size]
            low, high = np.searchsorted(of_draw, [start, start + len(part)])
            of_part = order[low:high]
            result[of_part] = draw_effects(
                quadrature.terms,
                self.forest,
                g[part],
                quadrature.centres(g[part]),
                quadrature.skew,
                shifts[order[first[start : start + len(part)]]],
                choices[of_part],
                of_draw[low:high] - start,
                self._surrogate,
            ).local
        return result

    @functools.cached_property
    def _surrogate(self) -> Surrogate | None:
        """Stands for conditional densities where it gives candidates the weights that the model does."""
        quadrature, forest = self.quadrature, self.forest
        assert quadrature is not None
        assert quadrature.whitening is not None
        assert quadrature.skew is not None
        n = n_needed(quadrature.whitening)
        if quadrature.base is None or forest.n_levels > 1 or n is None:
            return None
        proposal = SplitNormal.of_skewness(quadrature.skew)
        g = self._evenly(n, 0.5)
        surrogate = fit_surrogate(
            quadrature.terms, forest, quadrature.whitening, g, quadrature.centres(g), *proposal.range
        )
        if surrogate is None:
            return None
        apart = self._distance(surrogate, proposal)
        return surrogate if apart.max() < _MOST_APART and apart.mean() < _MOST_APART_IN_MEAN else None

    def _distance(self, surrogate: Surrogate, proposal: SplitNormal) -> Array:
        """Return how far weights of candidates are from those of the model, (n_local,), at other globals."""
        quadrature, forest = self.quadrature, self.forest
        assert quadrature is not None
        g = self._evenly(_N_JUDGED, 0.25)
        shifts = np.random.default_rng(self.sequences.seed).random((len(g), forest.n_local))
        z, total = candidates(proposal, N_CANDIDATES[1], shifts, surrogate), np.zeros(forest.n_local)
        size = quadrature.terms.chunk(z.shape[1])
        for start in range(0, len(g), size):
            at, near = g[start : start + size], z[start : start + size]
            common = (quadrature.terms, forest, at, quadrature.centres(at), near, proposal)
            [exact], [approximate] = weights_of(*common), weights_of(*common, surrogate)
            total += np.abs(exact - approximate).sum(axis=(0, 1, 2))
        return 0.5 * total / len(g)

    def _evenly(self, n: int, at: float) -> Array:
        """Return globals of the pool, as evenly by weight as can be, (at most n, n_globals)."""
        return self.pool.g[np.unique(evenly_picked(self.weights, n, at))]

    # --- moments ---

    def mean(self) -> Array:
        """Return the mean, (n_dim,)."""
        return self._moments[0].copy()

    def sd(self) -> Array:
        """Return the standard deviations, (n_dim,)."""
        return self._moments[1].copy()

    @functools.cached_property
    def _moments(self) -> tuple[Array, Array]:
        mean, square = np.zeros(self.n_dim), np.zeros(self.n_dim)
        w, g, at = self.weights, self.pool.g, self.forest.globals_
        mean[at] = w @ g
        square[at] = w @ (g - mean[at]) ** 2
        if self.quadrature is not None:
            local = self.forest.locals_
            # About a first guess, so that squares do not cancel.
            guess = self.quadrature.predicted(mean[at][None]).mean[0]
            for weights, centres in self._conditionals():
                apart = centres.mean - guess
                mean[local] += weights @ apart
                square[local] += weights @ (centres.variance() + apart**2)
            square[local] -= mean[local] ** 2
            mean[local] += guess
        return mean, np.sqrt(square)

    def cov(self) -> Array:
        """Return the covariance, (n_dim, n_dim)."""
        return self.cov_block(np.arange(self.n_dim))

    def cov_block(self, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates, (len(index), len(index))."""
        index = np.asarray(index)
        forest = self.forest
        place = np.full(self.n_dim, -1, dtype=np.intp)
        place[forest.locals_] = np.arange(forest.n_local)
        local, rank = place[index] >= 0, place[index]
        of_globals = np.searchsorted(forest.globals_, index[~local])
        mean = self._moments[0][index]
        result = np.zeros((len(index), len(index)))
        for start, (weights, centres) in self._numbered_conditionals():
            points = np.empty((len(weights), len(index)))
            points[:, ~local] = self.pool.g[start : start + len(weights)][:, of_globals]
            if local.any():
                at = rank[local]
                points[:, local] = centres.mean[:, at]
                same = (forest.path[at][:, None] == forest.path[at][None]) & _within(forest, at)
                rows = np.flatnonzero(local)
                for level in range(forest.n_levels):
                    i, j = np.nonzero(same[..., level])
                    f = centres.factor[:, :, level]
                    result[rows[i], rows[j]] += weights @ (f[:, at[i]] * f[:, at[j]])
            points -= mean
            result += (weights[:, None] * points).T @ points
        return result

    def _numbered_conditionals(self) -> Any:
        start = 0
        for weights, centres in self._conditionals():
            yield start, (weights, centres)
            start += len(weights)

    def _conditionals(self) -> Any:
        """Yield weights and conditional moments of the local coordinates, few draws at a time."""
        n_local, n_levels = max(self.forest.n_local, 1), self.forest.n_levels
        size = max(1, _HELD // (n_local * (1 + n_levels)))
        for start in range(0, len(self.weights), size):
            g = self.pool.g[start : start + size]
            if self.quadrature is None:
                centres = Centres(np.empty((len(g), 0)), np.empty((len(g), 0, 0)))
            else:
                centres = self.quadrature.centres(g)
            yield self.weights[start : start + size], centres

    # --- what is known of it ---

    @functools.cached_property
    def checks(self) -> Checks:
        """What was measured of it."""
        quadrature = self.quadrature
        common = (self.khat, self.effective_size, len(self.weights), self.forest.n_globals, self.forest.n_local)
        if quadrature is None:
            return Checks(*common)
        return Checks(
            *common,
            n_nodes=quadrature.rule.n_nodes,
            rule_error=quadrature.rule_error,
            difference=self.sampled.difference,
            lost=self.pool.part_lost(self.weights),
            candidates=self._candidates(),
        )

    def _candidates(self) -> float:
        """Return the least effective part of the candidates of a local coordinate."""
        quadrature = self.quadrature
        assert quadrature is not None
        assert quadrature.skew is not None
        rng = np.random.default_rng(self.sequences.seed)
        rows = np.unique(evenly_picked(self.weights, _N_JUDGED, rng.random()))
        g = self.pool.g[rows]
        shape = (len(rows), self.forest.n_local)
        drawn = draw_effects(
            quadrature.terms,
            self.forest,
            g,
            quadrature.centres(g),
            quadrature.skew,
            rng.random(shape),
            rng.random(shape),
            np.arange(len(rows)),
        )
        return float(drawn.efficiency.min())

    def __copy__(self) -> Self:
        """Return itself: nothing of it changes."""
        return self


def _restored(number: int, parts: dict[str, Any]) -> ExactState:
    known = _KNOWN.get(number)
    if known is not None:
        return known
    state = ExactState.__new__(ExactState)
    vars(state).update(parts)
    state.__post_init__()
    return state


def _effective(weights: Array) -> float:
    return float(1.0 / np.sum(weights**2))


def _error(values: Array) -> float:
    """Return the standard error of a mean of independent values."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def _within(forest: Forest, at: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Tell which levels are on the paths of both of two coordinates, (n, n, n_levels)."""
    on_path = np.arange(forest.n_levels) <= forest.level[at][:, None]
    result: NDArray[np.bool_] = on_path[:, None] & on_path[None]
    return result
