"""Moved posteriors: chains are moved in rounds, each longer than the one before, and are the draws in the end.

Between rounds, coordinates and the length of trajectories are chosen anew by the draws of the last one. Within a round,
once its step size is found, nothing changes. The last two rounds, which have most of the draws, are kept.
"""

import functools
import math

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from scipy.special import ndtri

from pymc_ngvi.core.climbs import MOST_STEPS
from pymc_ngvi.core.draws import N_REPLICATES
from pymc_ngvi.core.importance import UNKNOWN, Estimate
from pymc_ngvi.core.linalg import TINY
from pymc_ngvi.core.messages import percent
from pymc_ngvi.core.sizes import AT_ONCE, ENOUGH, FIXED_SEED, HELD, SLIGHT, TAIL
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Bools, GaussianState, HasGradient, Indices
from pymc_ngvi.core.verdict import Against, Condition, PoolVerdict, beyond_reach, few_draws, heavy_tail
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.marginal.pooled import N_PARTS, AllDrawn, Pool, PoolState, evenly_picked
from pymc_ngvi.moves.chains import (
    MOST_ERROR,
    Basins,
    ChainCoordinates,
    Climbs,
    Counted,
    ModeWeights,
    PhasePoints,
    Watch,
    are_apart,
    basins_among,
    log_mass,
    phase_points_at,
    trajectory,
)

# --- whether moved draws have arrived: every condition, with its figure ---

#: Nested R-hat at most.
MOST_RHAT = 1.01
#: Standard error of a 5 or 95 % limit at most, in sds: half as much again as of a normal with the least effective size.
MOST_LIMIT_ERROR = 0.16
#: Effective size of being where log p is highest, for each chain: they come and go, and none stays there.
LEAST_OF_PEAK = 5.0
#: Part of the trajectories that may diverge; ranges by which log p on the way may be above that at draws.
MOST_DIVERGING, MOST_HEIGHT = 0.001, 1.0
#: Part of the trajectories that may end in other modes than they begin in: of more, a part of a mode may be cut off.
MOST_OUTFLOW = 0.01


@stored("moved.checks")
@dataclass(frozen=True)
class MovedChecks(PoolVerdict):
    """What was measured of moved draws."""

    #: The largest nested R-hat of any quantity.
    rhat: float
    #: The largest change of a mean between the halves of the chains, in its standard errors; what it may be by
    #: chance.
    trend: float
    most_trend: float
    #: The least effective sizes; NaN where the other conditions do not hold, and they were not computed.
    bulk: float
    tail: float
    #: Coordinates, log p, and what else was looked at.
    n_quantities: int
    #: Draws of each chain; chains; points at which these began.
    n_draws: int
    n_chains: int
    n_starts: int
    #: Evaluated in all.
    n_gradients: int
    acceptance: float
    #: The quantity with the largest R-hat.
    slowest: str = ""
    #: Of these, with standard errors; empty of one mode, or where they are not known.
    mode_weights: tuple[float, ...] = ()
    weight_errors: tuple[float, ...] = ()
    #: Independent draws whose numbers at the modes would tell any mean as well as the weights do.
    weights_size: float = math.inf
    #: Part of the trajectories that would have left their mode.
    outflow: float = 0.0
    #: Draws whose log p is far below that of all others.
    n_far: int = 0
    #: Part of the trajectories that diverged.
    diverging: float = 0.0
    #: How far log p on the way was above that at all draws, in ranges of the highest tenth of these.
    height: float = 0.0
    #: Effective size of being among the highest draws by log p.
    peak: float = math.inf
    #: Standard error of the 5 or 95 % limit that is known least well, in sds.
    limit_error: float = 0.0
    #: Part of a variance that is farther out than all draws.
    beyond: float = 0.0

    @property
    def own(self) -> list[Condition]:
        """All that is asked of it."""
        said = f" ({self.in_modes})" if self.mode_weights else ""
        of_modes = [
            Condition("weights of modes", self.weights_size, ENOUGH,
                f"chains stay in {self.n_modes} modes, and the weights of the modes are unknown{said}", at_least=True),
            Condition("outflow", self.outflow, MOST_OUTFLOW,
                f"{percent(self.outflow, ".1f")} of the trajectories would have left their mode"),
        ]  # fmt: skip
        return [
            Condition("nested R-hat", self.rhat, MOST_RHAT,
                f"chains that began at different points differ: nested R-hat of {self.slowest} is {self.rhat:.3f}, "
                f"above {MOST_RHAT}"),
            Condition("trend", self.trend, self.most_trend,
                f"the chains still drift: a mean changes by {self.trend:.1f} standard errors between their halves"),
            Condition("far draws", self.n_far, 0,
                f"{self.n_far:,} draws have a log p far below that of all others: these chains have not arrived"),
            Condition("diverging", self.diverging, MOST_DIVERGING,
                f"{percent(self.diverging, ".1f")} of the trajectories diverge: where they do, draws may be missing"),
            Condition("height", self.height, MOST_HEIGHT,
                "chains meet points whose log p is far above that of all draws, and do not stay there: the "
                "posterior has a narrow peak"),
            *few_draws("bulk size", self.bulk, ENOUGH, "the bulk effective sample size"),
            *few_draws("tail size", self.tail, ENOUGH, "the tail effective sample size"),
            Condition("limits", self.limit_error, MOST_LIMIT_ERROR,
                f"a 5 or 95 % quantile is known to {self.limit_error:.2f} standard deviations only", Against.SIZE),
            heavy_tail(self.beyond),
            Condition("peak size", self.peak, self.least_peak,
                f"few chains reach where log p is highest: an effective sample size of {self.peak:,.0f} there, "
                f"below {self.least_peak:,.0f}", at_least=True),
            *(of_modes if self.n_modes > 1 else []),
        ]  # fmt: skip

    @property
    def least_peak(self) -> float:
        """Effective size of being where log p is highest, at least."""
        return max(ENOUGH, LEAST_OF_PEAK * self.n_chains)

    @property
    def in_modes(self) -> str:
        """The weights of the modes, with their standard errors."""
        both = zip(self.mode_weights, self.weight_errors, strict=True)
        return ", ".join(f"{weight:.3f} +- {error:.3f}" for weight, error in both)

    @property
    def is_settled(self) -> bool:
        """Whether chains neither differ nor drift, so that effective sizes mean something."""
        return all(c.holds for c in self.own[:5])

    @property
    def khat(self) -> float:  # type: ignore[override]  # there are no weights
        """-inf: all draws weigh the same."""
        return -math.inf

    @property
    def effective_size(self) -> float:  # type: ignore[override]
        """The least effective size, in draws."""
        return min(self.bulk, self.tail, self.weights_size)

    @property
    def efficiency(self) -> float:
        """Part of the draws that is effective."""
        return self.effective_size / (self.n_draws * self.n_chains)

    @property
    def failures(self) -> tuple[str, ...]:
        """What stands against relying on it: effective sizes are named where they are known."""
        vital = (c for c in self.conditions if c.against is Against.RELIABLE)
        return tuple(c.sentence for c in vital if not (c.holds or math.isnan(c.figure)))

    @property
    def figures(self) -> str:
        """How far they were moved, in a clause."""
        return (
            f"{self.n_chains} chains from {self.n_starts} points, {self.n_draws:,} draws each, "
            f"{self.n_gradients:,} gradients"
        )

    @property
    def details(self) -> str:
        """What was measured of the chains, and their modes."""
        modes = f"; {self.n_modes} modes found, with weights {self.in_modes}" if self.n_modes > 1 else ""
        size = f"effective sample size {self.effective_size:,.0f}, nested R-hat {self.rhat:.3f}"
        return f" ({size}){modes}"


# --- a posterior that is the draws of chains: all coordinates in the pool, draws in one mode weigh the same ---


@stored("moved.state")
@dataclass(frozen=True, eq=False)
class MovedDraws(AllDrawn):
    """Draws of chains."""

    #: Those in the same mode are together, as many in each; shape (n_draws, n_chains, n_dim).
    x: Array
    #: shape (n_draws, n_chains).
    logp: Array
    #: Which has the weights of the modes.
    checks: MovedChecks
    gaussian: Any
    others: tuple[Any, ...] = ()
    #: Log marginal likelihood; NaN where it is not known yet.
    mass: Estimate = UNKNOWN
    #: Which tells it, when it is asked for.
    density: ModelDensity | None = None

    kind = "moved"

    @functools.cached_property
    def pool(self) -> Pool:  # type: ignore[override]
        """All draws."""
        n, n_chains, d = self.x.shape
        of_start = np.arange(n_chains) // (n_chains // self.checks.n_starts)
        logp = self.logp.ravel()
        return Pool(self.x.reshape(-1, d), logp, logp, np.tile(of_start, n))

    @property
    def of_chains(self) -> Array:
        """Weights of the chains, which add up to 1, (n_chains,)."""
        n_chains, modes = self.x.shape[1], self.checks.mode_weights or (1.0,)
        return np.repeat(modes, n_chains // len(modes)) * len(modes) / n_chains

    @property
    def modes(self) -> Indices:
        """Which mode each chain is in, (n_chains,)."""
        return np.repeat(np.arange(self.checks.n_modes), self.x.shape[1] // self.checks.n_modes)

    def draw(self, n: int, rng: np.random.Generator, *, in_chains: bool = True, read: Indices | None = None) -> Array:
        """Return ``n`` draws of equal weight, in random order or one chain after the other, as they were moved."""
        chains = np.argsort(np.arange(self.x.shape[1]) % N_PARTS, kind="stable")  # each part has chains of all modes
        rows = evenly_picked(np.repeat(self.of_chains[chains], len(self.x)), n, rng.random())
        return self.x.swapaxes(0, 1)[chains].reshape(-1, self.n_dim)[rows if in_chains else rng.permutation(rows)]

    # --- files ---

    def content(self) -> dict[str, Any]:
        """Return what a file keeps."""
        kept = {name: getattr(self, name) for name in ("gaussian", "others", "x", "logp", "checks")}
        return {**kept, "mass": tuple(self.mass)}

    @classmethod
    def of_content(cls, content: dict[str, Any], density: ModelDensity) -> Self:
        """Return the posterior on a model."""
        x, logp, checks, gaussian = (content[name] for name in ("x", "logp", "checks", "gaussian"))
        if not isinstance(checks, MovedChecks):
            raise ValueError("what the moved posterior has as 'checks' is something else")
        if x.ndim != 3 or x.shape[2] != density.n_dim or gaussian.n_dim != density.n_dim:
            raise ValueError("the moved posterior is of another dimension")
        if logp.shape != x.shape[:2] or x.shape[1] % checks.n_starts or not np.isfinite(x).all():
            raise ValueError("the draws of the moved posterior do not go together")
        if checks.n_modes > 1 and (len(checks.mode_weights) != checks.n_modes or checks.n_starts % checks.n_modes):
            raise ValueError("the modes of the moved posterior do not go together")
        return cls(x, logp, checks, gaussian, tuple(content["others"]), Estimate(*content["mass"]), density)

    # --- weights ---

    @functools.cached_property
    def _smoothed(self) -> tuple[Array, float]:
        # The weights of the modes, shared by all draws in each; there is no k-hat.
        return np.tile(self.of_chains, len(self.x)) / len(self.x), self.checks.khat

    @functools.cached_property
    def log_normaliser(self) -> tuple[float, float]:
        """The log mass, which the pool does not tell, and its error; NaN where no Gaussian is near enough."""
        mass = self.mass
        if np.isnan(mass.value) and self.density is not None:
            coordinates, rng = ChainCoordinates.of(self.gaussian), np.random.default_rng(FIXED_SEED)
            mass = log_mass(
                self.density.logp, coordinates, self.x, self.logp, self.checks.n_starts, self.checks.effective_size, rng
            )
        return (mass if mass.se <= MOST_ERROR else UNKNOWN)[:2]

    @functools.cached_property
    def in_modes(self) -> list[PoolState]:
        """The posterior of each mode, with the Gaussian of its draws; empty where there is one mode."""
        n_modes, coordinates = self.checks.n_modes, ChainCoordinates.of(self.gaussian)
        if n_modes == 1:
            return []
        alone = replace(
            self.checks,
            n_chains=self.checks.n_chains // n_modes,
            n_starts=self.checks.n_starts // n_modes,
            n_modes=1,
            mode_weights=(),
            weight_errors=(),
            weights_size=np.inf,
        )
        return [
            type(self)(x, logp, alone, coordinates.refitted(x.reshape(-1, x.shape[2]), alone.effective_size))
            for x, logp in zip(*(np.split(array, n_modes, axis=1) for array in (self.x, self.logp)), strict=True)
        ]


# --- many chains at once: trajectories of a length and a step size that all of them tell ---
# Step sizes go by the acceptance of all chains. Where some of the trajectories diverge, there may be a place, such as
# the neck of a funnel, into which steps that are right elsewhere do not lead; chains that have never been there show
# nothing of it. Then fewer trajectories are to be refused [2]_. In each iteration, a part of the chains takes smaller
# steps: those get out of places where the usual ones are refused.
#
# Trajectories have the length after which the slowest coordinates have got farthest for each gradient, as all chains
# together tell along one long trajectory; [1]_ does so by the distance from the centre, which tails and many quick
# coordinates drown here.
#
# References
# ----------
# .. [1] M. D. Hoffman, A. Radul and P. Sountsov (2021). An adaptive-MCMC scheme for setting trajectory lengths in
#    Hamiltonian Monte Carlo. AISTATS. https://proceedings.mlr.press/v130/hoffman21a.html
# .. [2] M. Betancourt and M. Girolami (2015). Hamiltonian Monte Carlo for hierarchical models. In Current Trends in
#    Bayesian Methodology with Applications. https://doi.org/10.48550/arXiv.1312.0906

#: First length of trajectories: a quarter of a period. First step size, times the fourth root of the dimension.
_QUARTER, _FIRST_STEP = 0.5 * math.pi, 0.5
#: Refusals that are aimed at; part that is left of these where too many trajectories diverge, and the fewest.
_REFUSED, _FEWER, _FEWEST = 0.2, 0.25, 0.01
#: By how much lengths differ from the usual one, as a part.
_JITTER = 0.4
#: Part of the chains that take smaller steps in an iteration, and how often these are halved at most.
_PART, _HALVED = 0.25, 4
#: Part of the coordinates by which the length is chosen, the slowest; standard deviations beyond which none is farther.
_SLOWEST, _FAR = 0.1, 3.0
#: Steps of a trajectory at most; of the one by which the length is chosen, at least.
_MOST_STEPS, _FEWEST_SEEN = 200, 4
#: Gain of the logarithm of the step size for an error of the acceptance of 1.
_GAIN = 0.4
#: By how many times what is aimed at more are refused, at most, as counts for the step size.
_WORST = 4.0


class Stretch(NamedTuple):
    """Draws of all chains in successive iterations, (n_draws, n_chains, n_dim), and log p, (n_draws, n_chains)."""

    x: Array
    logp: Array


class Chains:
    """Chains in motion."""

    def __init__(
        self,
        target: HasGradient,
        coordinates: ChainCoordinates,
        x: Array,
        rng: np.random.Generator,
        inside: Callable[[Array], Bools] | None = None,
    ) -> None:
        self._target, self._rng, self._inside = target, rng, inside
        self.coordinates = coordinates
        self.step, self.length = _FIRST_STEP * x.shape[1] ** -0.25, _QUARTER
        self.acceptance, self.outflow, self._n_left = math.nan, 0.0, 0
        self.refused, self.diverging = _REFUSED, 0.0
        self._points = phase_points_at(target, coordinates, x)

    @property
    def n_chains(self) -> int:
        """Number of chains."""
        return len(self._points.x)

    @property
    def size(self) -> int:
        """Numbers that say where they all are."""
        return self._points.x.size

    @property
    def n_steps(self) -> int:
        """Steps of a trajectory, in the mean."""
        return int(np.clip(math.ceil(self.length / self.step), 1, _MOST_STEPS))

    def run(self, n: int, *, n_adapting: int = 0, every: int = 1) -> Stretch:
        """Return draws of ``n`` iterations: some of those after the first, in which the step size is adapted."""
        shape = ((n - n_adapting) // every, *self._points.x.shape)
        self._n_left, is_first = 0, math.isnan(self.acceptance)
        kept, accepted, diverging = Stretch(np.empty(shape), np.empty(shape[:2])), np.zeros(n), np.zeros(n)
        for i in range(n):
            accepted[i], diverging[i] = self._iterate()
            if i < n_adapting:
                # relative to what is aimed at: as quick for one refusal in a hundred as for one in five
                error = 1.0 - (1.0 - accepted[i]) / self.refused
                self.step *= math.exp(_GAIN * _REFUSED * max(error, -_WORST))
            elif (i - n_adapting) % every == every - 1:
                at = (i - n_adapting) // every
                kept.x[at], kept.logp[at] = self._points.x, self._points.logp
        self.diverging = float(diverging[n_adapting:].mean())
        if self.diverging > MOST_DIVERGING and not is_first:
            self.refused = max(_FEWER * self.refused, _FEWEST)
        self.acceptance = float(accepted[n_adapting:].mean())
        self.outflow = self._n_left / (n * shape[1])
        return kept

    def _iterate(self) -> tuple[float, float]:
        """Move all chains; return the acceptance of those with the usual step size, and the part that diverges."""
        n, rng = len(self._points.x), self._rng
        length = self.length * (1.0 + _JITTER * (2.0 * rng.random() - 1.0))
        n_steps = int(np.clip(math.ceil(length / self.step), 1, _MOST_STEPS))
        usual = rng.random(n) >= _PART
        size = self.step * np.where(usual, 1.0, 0.5 ** rng.integers(1, _HALVED, n, endpoint=True))
        probability, diverged = self._move(n_steps, size[:, None])
        counted = usual if usual.any() else ~usual
        return float(probability[counted].mean()), float(diverged[counted].mean())

    def _move(self, n_steps: int, size: float | Array, watch: Watch | None = None) -> tuple[Array, Bools]:
        momenta = self._rng.standard_normal(self._points.x.shape)
        before = self._points
        self._points, probability, diverged = trajectory(
            self._target, self.coordinates, before, momenta, n_steps, size, self._rng, watch
        )
        if self._inside is not None:  # points that have left the region go back to where they were
            now = self._points
            moved = np.flatnonzero((now.x != before.x).any(axis=1))
            left = moved[~self._inside(now.x[moved])]
            now.x[left], now.logp[left], now.slope[left] = before.x[left], before.logp[left], before.slope[left]
            self._n_left += len(left)
        return probability, diverged

    def join(self, stuck: Indices, n_starts: int) -> None:
        """Let chains that do not move go on from where others are that began at the same point, if these do."""
        each, rows = self.n_chains // n_starts, np.arange(self.n_chains)
        for chain in stuck.tolist():
            first = chain - chain % each
            others = np.setdiff1d(np.arange(first, first + each), stuck)
            if len(others):
                rows[chain] = self._rng.choice(others)
        if len(stuck):
            self._points = self._points[rows]

    def refit(self, draws: Array, size: float) -> None:
        """Take coordinates found of draws, (n_draws, n_dim), worth so many, and choose the length of trajectories."""
        self.coordinates = self.coordinates.refitted(draws, size)
        self._points = phase_points_at(self._target, self.coordinates, self._points.x)
        n_steps = int(np.clip(math.ceil(2.0 * self.length / self.step), _FEWEST_SEEN, _MOST_STEPS // 2))
        # How far coordinates, and their distances from the centre, get along a trajectory: the square of the distance
        # from the start is 0 there, and 1, in twice the variance, where that is forgotten.
        first = _places(self.coordinates, self._points)
        twice, of_step = 2.0 * first.var(axis=0) + np.finfo(np.float64).tiny, np.zeros((n_steps, first.shape[1]))

        def watch(i: int, points: PhasePoints, probability: Array) -> None:
            squares = (_places(self.coordinates, points) - first) ** 2
            of_step[i] = probability @ squares / (len(squares) * twice)

        self._move(n_steps, self.step, watch)
        slowest = np.sort(np.minimum(of_step, 1.0), axis=1)[:, : max(1, round(_SLOWEST * first.shape[1]))]
        # The steps in which the slowest get farthest, for each gradient.
        self.length = (int(np.argmax(slowest.mean(axis=1) / np.arange(1, n_steps + 1))) + 1) * self.step


def _places(coordinates: ChainCoordinates, points: PhasePoints) -> Array:
    """Return coordinates, and their distances from the centre, of which far ones count as less far."""
    with np.errstate(over="ignore", invalid="ignore"):
        w = np.clip(np.nan_to_num(coordinates.w(points.x)), -_FAR, _FAR)
    return np.concatenate([w, np.abs(w)], axis=1)


# --- where superchains begin: far out from the fits, where log p is finite ---

#: Standard deviations of starts, from and to, in those of a fit; part that is left of these for each further try, and
#: tries.
_SPREAD, _NEARER, _TRIES = (2.0, _FAR), 0.85, 24


def starts_of(
    target: HasGradient,
    fits: Sequence[GaussianState | ChainCoordinates],
    n: int,
    rng: np.random.Generator,
    inside: Callable[[Array], Bools] | None = None,
) -> Array | None:
    """Return points far out from fits, which take turns, (n, n_dim); None where log p is finite at too few."""
    x = np.full((n, fits[0].n_dim), np.nan)
    missing, spread = np.arange(n), np.linspace(*_SPREAD, n)
    for _ in range(_TRIES):
        z = spread[missing, None] * rng.standard_normal((len(missing), x.shape[1]))
        drawn = np.array([fits[i % len(fits)].draws(z[None, at])[0] for at, i in enumerate(missing.tolist())])
        usable = np.isfinite(drawn).all(axis=1)
        drawn[~usable] = fits[0].mean()
        logp, grad = target.logp_grad(drawn)
        usable &= np.isfinite(logp) & np.isfinite(grad).all(axis=1)
        if inside is not None:
            usable[usable] = inside(drawn[usable])
        x[missing[usable]] = drawn[usable]
        missing, spread = missing[~usable], spread * _NEARER
        if not len(missing):
            return x
    return None


# --- whether chains have arrived: chains that began at one point do not differ more than others, nor drift ---
# The chains of a superchain begin at one point. Chains that have not forgotten it are alike within their superchain,
# and differ between superchains: where that is not much more than chance, they have forgotten it [1]_. Chains that
# never move pass any comparison of chains that began apart, as draws of the same distribution; they do not pass this
# one.
#
# All is judged by normal scores of ranks, of each quantity and of its distance from its median: means exist, and
# spreads are judged as well as places. Ranks take little notice of a few draws that are very far out, but means do:
# no draw may have a log p that is far below that of all others, as that of a chain is which has not left where it
# began.
#
# References
# ----------
# .. [1] C. C. Margossian, M. D. Hoffman, P. Sountsov, L. Riou-Durand, A. Vehtari and A. Gelman (2024). Nested R-hat:
#    assessing the convergence of Markov chain Monte Carlo when running many short chains. Bayesian Analysis.
#    https://doi.org/10.1214/24-BA1453

#: Error of the first kind of all tests of changes of a mean between halves that are more than slight.
_LEVEL = 0.01
#: How far below the median log p may be, in distances of a low quantile from it: tails of log p are exponential.
_FARTHEST = 10.0
#: Part of the draws whose log p tells what is high; the largest part that is looked at for chains that stay in a peak.
_HIGHEST, _PEAK = 0.1, 0.01
#: Quantities whose effective sizes are computed: those that mix most slowly.
_MOST_SIZES = 32
#: Draws of a chain that an effective size takes.
_FEWEST_DRAWS = 4
#: The tails whose effective sizes count.
_TAILS = (TAIL, 1.0 - TAIL)


class Mixing(NamedTuple):
    """What is measured of draws of chains, for each quantity, (n_quantities,); NaN of what is constant, or NaN."""

    #: Nested R-hat, the larger one of places and spreads.
    rhat: Array
    #: Change between the halves of the chains, in its standard errors.
    trend: Array
    #: Correlation of successive draws, the larger one of places and spreads.
    memory: Array


def nested_rhat(values: Array, n_starts: int) -> Array:
    """Return nested R-hat, (n_quantities,)."""
    n, n_chains, k = values.shape
    chains = values.mean(axis=0).reshape(n_starts, n_chains // n_starts, k)
    within = values.var(axis=0, ddof=1).mean(axis=0) if n > 1 else 0.0
    between = chains.mean(axis=1).var(axis=0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        rhat: Array = np.sqrt(1.0 + between / (chains.var(axis=1, ddof=1).mean(axis=0) + within))
    return rhat


def worth_of(values: Array, n_starts: int) -> float:
    """Return how many independent draws chains are worth, roughly: two of each superchain at least.

    Means of superchains differ by as much as means of so many draws do, in the median of quantities.
    """
    rhat = nested_rhat(values, n_starts)
    square = float(np.median(rhat[np.isfinite(rhat)] ** 2 - 1.0)) if np.isfinite(rhat).any() else np.inf
    return float(np.clip(n_starts / max(square, TINY), 2.0 * n_starts, values.shape[0] * values.shape[1]))


def mixing_of(values: Array, n_starts: int) -> Mixing:
    """Return what is measured of the quantities of chains, (n_draws, n_chains, n_quantities)."""
    n, n_chains, k = values.shape
    each = max(1, AT_ONCE // (n * n_chains))
    parts = [_of_columns(values[:, :, i : i + each], n_starts) for i in range(0, k, each)]
    return Mixing(*(np.concatenate(of_all) for of_all in zip(*parts, strict=True)))


def _of_columns(values: Array, n_starts: int) -> Mixing:
    from scipy.stats import rankdata  # 0.4 s to import

    shape = values.shape
    with np.errstate(invalid="ignore"):
        ranks = rankdata(values.reshape(-1, shape[2]).T, axis=1).T.reshape(shape)
        n = shape[0] * shape[1]
        # Normal scores of quantities, and of their distances from the median, by the ranks of the first.
        both = ndtri((ranks - 0.5) / n), ndtri(np.maximum(np.abs(2.0 * ranks - n - 1.0), 0.5) / n)
        measured = [(nested_rhat(scores, n_starts), _trend(scores), _memory(scores)) for scores in both]
    rhat, trend, memory = (np.maximum(a, b) for a, b in zip(*measured, strict=True))
    varies = np.ptp(ranks, axis=(0, 1)) > 0.0  # False for NaN
    return Mixing(*(np.where(varies, of, np.nan) for of in (rhat, trend, memory)))


def _trend(scores: Array) -> Array:
    """Return by how much means change from one half of the chains to the other, in standard errors; 0 for little."""
    half = len(scores) // 2
    if not half:
        return np.zeros(scores.shape[2])
    changes = scores[-half:].mean(axis=0) - scores[:half].mean(axis=0)
    mean, error = changes.mean(axis=0), changes.std(axis=0, ddof=1) / np.sqrt(len(changes))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.abs(mean) > SLIGHT, np.abs(mean) / error, 0.0)


def _memory(scores: Array) -> Array:
    """Return the correlation of successive draws."""
    apart = scores - scores.mean(axis=(0, 1))
    variance = (apart**2).mean(axis=(0, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        result: Array = (apart[1:] * apart[:-1]).mean(axis=(0, 1)) / variance
    return result


def is_far(logp: Array) -> Bools:
    """Tell which draws, (n_draws, n_chains), have a log p so low that they can be none of the posterior."""
    low, middle = np.quantile(logp, [TAIL, 0.5])
    return logp < middle - _FARTHEST * (middle - low)


def peak_size(logp: Array) -> float:
    """Return the effective size of being among the highest draws by log p: small where few chains stay in a peak.

    That is the least one of a hundredth, and of a half and a quarter of it: a peak that is seldom entered hides among
    others.
    """
    from arviz_stats.base import array_stats

    if len(logp) < _FEWEST_DRAWS or not np.ptp(logp):
        return math.inf
    shown = np.ascontiguousarray(logp[:, :, None])
    sizes = [
        array_stats.ess(shown, chain_axis=1, draw_axis=0, method="quantile", prob=1.0 - part)
        for part in (_PEAK, 0.5 * _PEAK, 0.5**2 * _PEAK)
    ]
    return float(np.min(sizes))


def height_above(logp: Array, highest: float) -> float:
    """Return how far log p at points on the way was above that at all draws, in ranges of the highest tenth of these.

    Where chains have arrived, points on their way are distributed as draws are, but for errors of the steps. There are
    a few for each draw: if log p has an upper tail as that of an exponential, the highest one of these is beyond a
    whole range with a chance of about one in a hundred. It is far beyond where chains pass by a narrow peak, into
    which no trajectory leads. A range is one nat at least.
    """
    top = float(logp.max())
    return (highest - top) / max(top - float(np.quantile(logp, 1.0 - _HIGHEST)), 1.0)


def most_trend(n_quantities: int) -> float:
    """Return the standard errors that a change of so many quantities may have by chance."""
    return float(-ndtri(_LEVEL / (4.0 * max(n_quantities, 1))))  # two sides, places and spreads


class Sizes(NamedTuple):
    """The least effective sizes, and the largest standard error of a 5 or 95 % limit, in sds."""

    bulk: float
    tail: float
    limit_error: float


def effective_sizes(values: Array, memory: Array) -> Sizes:
    """Return what is known of those quantities that mix most slowly."""
    from arviz_stats.base import array_stats  # which takes a while to import

    known = np.flatnonzero(np.isfinite(memory))
    slowest = known[np.argsort(-memory[known], kind="stable")[:_MOST_SIZES]]
    if not len(slowest):
        return Sizes(math.inf, math.inf, 0.0)
    if len(values) < _FEWEST_DRAWS:
        return Sizes(0.0, 0.0, math.inf)
    shown = np.ascontiguousarray(values[:, :, slowest])
    bulk = array_stats.ess(shown, chain_axis=1, draw_axis=0, method="bulk")
    tail = array_stats.ess(shown, chain_axis=1, draw_axis=0, method="tail", prob=_TAILS)
    errors = []
    for x, size in zip(shown.reshape(-1, len(slowest)).T, np.atleast_1d(tail), strict=True):
        # Of a share, and so of the limit: where the density is low, a limit is known less well than that of a normal.
        shares = np.add.outer(np.sqrt(np.prod(_TAILS) / size) * np.array([-1.0, 1.0]), _TAILS)
        errors.append(0.5 * np.diff(np.quantile(x, np.clip(shares, 0.0, 1.0)), axis=0).max() / x.std())
    return Sizes(float(np.min(bulk)), float(np.min(tail)), float(np.max(errors)))


# Chains are moved in rounds, each longer than the one before, until they have arrived or there are no more gradients.

#: Points at which superchains begin.
N_STARTS = N_REPLICATES
#: Iterations of the first round; growth of rounds; rounds before draws are judged.
_FIRST, _GROWTH, _UNJUDGED = 16, 1.5, 2
#: Part of a round in which the step size is adapted, of the first one and of others.
_FIRST_ADAPTING, _ADAPTING = 0.5, 0.25
#: Part of the trajectories that may end in other basins, in the first round.
_FIRST_OUTFLOW = 0.05
#: Draws of which further quantities are computed.
_MOST_COMPUTED = 2**13

#: Quantities that are no coordinates, (n_draws, n_quantities), of draws.
type Quantities = Callable[[Array], Array]


class MovedChains(NamedTuple):
    """Where chains have come to: the draws that are kept, what was measured of them, and the log mass of all.

    The mass is NaN of chains in one mode: it is not needed there.
    """

    draws: Stretch
    checks: MovedChecks
    mass: Estimate = UNKNOWN


def moved_until_arrived(
    target: HasGradient,
    fits: Sequence[GaussianState],
    n_chains: int,
    rng: np.random.Generator,
    *,
    quantities: Quantities | None = None,
    label: Callable[[int], str] = str,
    may_go_on: Callable[[int], bool] = lambda n_gradients: True,
    may_need: Callable[[int, float], bool] = lambda n_next, n_needed: True,
) -> MovedChains | None:
    """Move chains until they have arrived.

    ``may_go_on`` is told the gradients with those of the next round; ``may_need``, those of the next round alone, and
    how many are expected to be needed in all.

    Where they stay in several basins of log p, as many chains again begin in each, and do not leave it. The masses of
    the basins tell how much these weigh.
    """
    starts = starts_of(target, fits, N_STARTS, rng)
    if starts is None:
        return None
    x, counted = np.repeat(starts, n_chains // N_STARTS, axis=0), Counted(target)
    joint = Chains(counted, ChainCoordinates.of(fits[0]), x, rng)
    moving = _Moving(counted, [joint])
    may_part, n_modes = True, 1
    while True:
        moving.advance()
        # In the first round, chains begin far out.
        if moving.outflow > (MOST_OUTFLOW if moving.n_done > 1 else _FIRST_OUTFLOW):
            # These are no basins: some chains of each go on together.
            x = moving.rounds[-1].x[-1, :: len(moving.chains)]
            moving, may_part, n_modes = _Moving(counted, [Chains(counted, joint.coordinates, x, rng)]), False, 1
            continue
        ended = _ended(moving, counted, quantities, label, rng) if moving.n_done > _UNJUDGED else None
        n_needed = counted.n * moving.times_to_arrive(None if ended is None else ended.checks.rhat)
        goes_on = may_need(moving.n_next, n_needed) and may_go_on(counted.n + moving.n_next)
        if ended is not None or not goes_on:
            ended = ended or _ended(moving, counted, quantities, label, rng)
            is_apart = may_part and any(are_apart(part.x) for part in moving.parts(moving.rounds[-1]))
            # Climbs begin at all chains, in the first and in the last iteration of a round.
            if is_apart and may_go_on(counted.n + 2 * MOST_STEPS * moving.rounds[-1].x.shape[1]):
                basins = basins_among(Climbs(counted, joint.coordinates, joint.step), moving.rounds[-1].x)
                n_modes = 1 if basins is None else len(basins)
                if basins is not None and n_modes > len(moving.chains):
                    parts = _parted(counted, basins, n_chains, rng)
                    if parts is not None and may_go_on(counted.n + parts.n_next):
                        moving = parts
                        continue
            if n_modes > len(moving.chains):
                ended = ended._replace(checks=replace(ended.checks, n_modes=n_modes, weights_size=0.0))
            if ended.checks.tells_limits or not goes_on:
                return ended
        moving.refit()  # trajectories may be longer than those of the last round
        if ended is not None and not may_go_on(counted.n + moving.n_next):
            return ended


class _Moving:
    """Chains that are moved in rounds: all of them together, or those of each basin on their own."""

    def __init__(self, counted: Counted, chains: list[Chains], basins: Basins | None = None) -> None:
        self._counted, self.chains, self.basins = counted, chains, basins
        self.rounds: list[Stretch] = []
        #: The highest log p on the way, in the rounds that are kept.
        self.highest: list[float] = []
        self._n, self.n_done = _FIRST, 0

    @property
    def n_next(self) -> int:
        """Gradients of the next round."""
        return self._n * sum(chains.n_chains * chains.n_steps for chains in self.chains)

    def times_to_arrive(self, rhat: float | None) -> float:
        """Return how many times the gradients so far chains are expected to take in all, by nested R-hat.

        The variance between superchains falls as one over the number of draws: so, from the second round on, or the
        first one of chains in basins, it told the gradients within a factor of 3 where they arrived, up to 20 times
        their price (some ten models), but along a ridge that the fit did not know, where the next rounds take few; and
        a thousand times as many as there were in a horseshoe in which they did not.
        """
        if self.basins is None and self.n_done == 1:
            return 1.0
        if rhat is None:
            parts = self.parts(self.rounds[-1])
            of_parts = [mixing_of(np.concatenate([part.x, part.logp[:, :, None]], axis=2), N_STARTS) for part in parts]
            rhat = max(float(np.nanmax(mixing.rhat, initial=1.0)) for mixing in of_parts)
        return max((rhat**2 - 1.0) / (MOST_RHAT**2 - 1.0), 1.0)

    @property
    def outflow(self) -> float:
        """Part of the trajectories of the last round that would have left their basin, of the worst one."""
        return max(chains.outflow for chains in self.chains)

    def advance(self) -> None:
        """Move all chains by another round."""
        n, size = self._n, sum(chains.size for chains in self.chains)
        n_adapting = min(int((_ADAPTING if self.n_done else _FIRST_ADAPTING) * n), _FIRST)
        every = -(-2 * n * size // HELD)
        self._counted.highest = -math.inf
        of_basins = [chains.run(n, n_adapting=n_adapting, every=every) for chains in self.chains]
        self._n, self.n_done = int(_GROWTH * n), self.n_done + 1
        joined = Stretch(*(np.concatenate(arrays, axis=1) for arrays in zip(*of_basins, strict=True)))
        # The last two rounds have most of the draws; the last, where two can't be held.
        self.rounds = [*self.rounds[-1:], joined]
        if sum(of.x.size for of in self.rounds) > HELD:
            self.rounds = [joined]
        self.highest = [*self.highest, self._counted.highest][-len(self.rounds) :]

    def parts(self, draws: Stretch) -> list[Stretch]:
        """Return the draws of each basin."""
        both = (np.split(array, len(self.chains), axis=1) for array in draws)
        return [Stretch(*arrays) for arrays in zip(*both, strict=True)]

    def refit(self) -> None:
        """Find coordinates and lengths by the last round, in which no chain should have stayed far from all others."""
        for chains, last in zip(self.chains, self.parts(self.rounds[-1]), strict=True):
            chains.join(np.flatnonzero(is_far(last.logp).all(axis=0) & (np.ptp(last.logp, axis=0) == 0.0)), N_STARTS)
            chains.refit(last.x.reshape(-1, last.x.shape[2]), worth_of(last.x, N_STARTS))


def _parted(target: Counted, basins: Basins, n_chains: int, rng: np.random.Generator) -> _Moving | None:
    """Return chains that begin in each basin; None where log p is not finite in one of them."""
    chains = []
    for number, about in enumerate(basins.about):
        inside = functools.partial(basins.inside, number)
        starts = starts_of(target, [about], N_STARTS, rng, inside)
        if starts is None:
            return None
        chains.append(Chains(target, about, np.repeat(starts, n_chains // N_STARTS, axis=0), rng, inside))
    return _Moving(target, chains, basins)


def _ended(
    moving: _Moving,
    counted: Counted,
    quantities: Quantities | None,
    label: Callable[[int], str],
    rng: np.random.Generator,
) -> MovedChains:
    """Judge draws; the weights of basins, where nothing else is missing."""
    draws = Stretch(*(np.concatenate(arrays) for arrays in zip(*moving.rounds, strict=True)))
    parts = moving.parts(draws)
    height = height_above(draws.logp, max(moving.highest))
    judged = [
        replace(_judged(part, chains, quantities, label), height=height)
        for part, chains in zip(parts, moving.chains, strict=True)
    ]
    for number, (part, checks) in enumerate(zip(parts, judged, strict=True)):
        if checks.tells_limits:
            log_p = functools.partial(_log_p_inside, counted, moving.basins, number)
            judged[number] = replace(checks, beyond=beyond_reach(log_p, part.x.reshape(-1, part.x.shape[2])))
    if moving.basins is None:
        return MovedChains(draws, replace(judged[0], n_gradients=counted.n))
    joined = _joined(judged, counted.n, moving.outflow)
    if not all(checks.tells_limits for checks in judged):
        return MovedChains(draws, joined)
    masses = [
        log_mass(functools.partial(_log_p_inside, counted, moving.basins, number), chains.coordinates, *part, N_STARTS,
                 min(checks.bulk, checks.tail), rng)
        for number, (part, chains, checks) in enumerate(zip(parts, moving.chains, judged, strict=True))
    ]  # fmt: skip
    found = ModeWeights.of(masses)
    if not found.size:
        return MovedChains(draws, joined)
    checks = replace(
        joined,
        mode_weights=tuple(found.weights.tolist()),
        weight_errors=tuple(found.errors.tolist()),
        weights_size=found.size,
        n_gradients=counted.n,
    )
    return MovedChains(draws, checks, found.total)


def _log_p_inside(target: HasGradient, basins: Basins | None, number: int, x: Array) -> Array:
    """Return log p at points; -inf outside of a basin, where there are some."""
    logp = target.logp_grad(x)[0]
    if basins is None:
        return logp
    within = np.flatnonzero(np.isfinite(logp))
    result = np.full(len(x), -np.inf)
    within = within[basins.inside(number, x[within])]
    result[within] = logp[within]
    return result


def _joined(judged: list[MovedChecks], n_gradients: int, outflow: float) -> MovedChecks:
    """Return what was measured of all basins: the worst of each, and that nothing is known of weights."""
    worst = max(judged, key=lambda checks: checks.rhat)
    drifting = max(judged, key=lambda checks: checks.trend / checks.most_trend)
    bulk, tail = np.min([(checks.bulk, checks.tail) for checks in judged], axis=0).tolist()
    return replace(
        worst,
        trend=drifting.trend,
        most_trend=drifting.most_trend,
        bulk=bulk,
        tail=tail,
        limit_error=max(checks.limit_error for checks in judged),
        beyond=max(checks.beyond for checks in judged),
        n_chains=sum(checks.n_chains for checks in judged),
        n_starts=sum(checks.n_starts for checks in judged),
        n_gradients=n_gradients,
        acceptance=float(np.mean([checks.acceptance for checks in judged])),
        n_modes=len(judged),
        n_far=sum(checks.n_far for checks in judged),
        weights_size=0.0,
        outflow=outflow,
        diverging=max(checks.diverging for checks in judged),
        peak=min(checks.peak for checks in judged),
    )


def _judged(draws: Stretch, chains: Chains, quantities: Quantities | None, label: Callable[[int], str]) -> MovedChecks:
    """Judge draws of one basin; further quantities, and effective sizes, where nothing else is missing."""
    values = np.concatenate([draws.x, draws.logp[:, :, None]], axis=2)
    mixing = mixing_of(values, N_STARTS)
    checks = _checks(draws, mixing, chains, label)
    if not checks.is_settled:
        return checks
    sizes = effective_sizes(values, mixing.memory)
    if quantities is not None and min(sizes.bulk, sizes.tail) >= ENOUGH:
        n, n_chains, d = draws.x.shape
        some = draws.x[:: -(-n * n_chains // _MOST_COMPUTED)]
        further = quantities(some.reshape(-1, d)).reshape(len(some), n_chains, -1)
        of_further = mixing_of(further, N_STARTS)
        mixing = Mixing(*(np.concatenate(both) for both in zip(mixing, of_further, strict=True)))
        bulk, tail, limit_error = effective_sizes(further, of_further.memory)
        sizes = Sizes(min(sizes.bulk, bulk), min(sizes.tail, tail), max(sizes.limit_error, limit_error))
    return replace(_checks(draws, mixing, chains, label, sizes), peak=peak_size(draws.logp))


def _checks(
    draws: Stretch,
    mixing: Mixing,
    chains: Chains,
    label: Callable[[int], str],
    sizes: Sizes | None = None,
) -> MovedChecks:
    known = np.isfinite(mixing.memory)
    rhat = np.where(known, mixing.rhat, 1.0)
    n = int(known.sum())
    return MovedChecks(
        rhat=float(rhat.max()) if n else math.inf,
        trend=float(mixing.trend[known].max()) if n else math.inf,
        most_trend=most_trend(n),
        **(sizes or Sizes(math.nan, math.nan, math.nan))._asdict(),
        n_quantities=n,
        n_draws=len(draws.x),
        n_chains=draws.x.shape[1],
        n_starts=N_STARTS,
        n_gradients=0,  # known to those who count
        acceptance=chains.acceptance,
        n_far=int(is_far(draws.logp).sum()),
        diverging=chains.diverging,
        slowest=label(int(rhat.argmax())),
    )
