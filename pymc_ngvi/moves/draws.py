"""A posterior that is the draws of chains: all coordinates are in the pool, and draws in one mode weigh the same."""

import math

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.bridge import Estimate
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.core.verdict import Against, Condition, PoolVerdict, few_draws, heavy_tail
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.marginal.sampling import Pool
from pymc_ngvi.marginal.weighted import AllDrawn
from pymc_ngvi.moves.chains import MOST_ERROR, UNKNOWN, ChainCoordinates, log_mass

# --- whether moved draws have arrived: every condition, with its figure ---

#: Nested R-hat at most; effective sizes at least.
MOST_RHAT, LEAST_SIZE = 1.01, 400.0
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
        return [*self._of_chains, *(self._of_modes if self.n_modes > 1 else [])]

    @property
    def _of_chains(self) -> list[Condition]:
        return [
            Condition("nested R-hat", self.rhat, MOST_RHAT,
                f"chains that began at different points differ: nested R-hat of {self.slowest} is {self.rhat:.3f}, "
                f"above {MOST_RHAT}"),
            Condition("trend", self.trend, self.most_trend,
                f"the chains still drift: a mean changes by {self.trend:.1f} standard errors between their halves"),
            Condition("far draws", self.n_far, 0,
                f"{self.n_far:,} draws have a log p far below that of all others: chains that are still on their way"),
            Condition("diverging", self.diverging, MOST_DIVERGING,
                f"{100 * self.diverging:.1f} % of the trajectories diverge: where they do, draws may be missing"),
            Condition("height", self.height, MOST_HEIGHT,
                "chains pass by points whose log p is far above that of all draws, and are refused there: the "
                "posterior has a narrow peak"),
            *few_draws("bulk size", self.bulk, LEAST_SIZE, "the bulk effective sample size"),
            *few_draws("tail size", self.tail, LEAST_SIZE, "the tail effective sample size"),
            Condition("limits", self.limit_error, MOST_LIMIT_ERROR,
                f"a 5 or 95 % limit is known to {self.limit_error:.2f} standard deviations only", Against.SIZE),
            heavy_tail(self.beyond),
            Condition("peak size", self.peak, self.least_peak,
                f"few chains are where log p is highest, and stay there: an effective sample size of {self.peak:,.0f}, "
                f"below {self.least_peak:,.0f}", at_least=True),
        ]  # fmt: skip

    @property
    def least_peak(self) -> float:
        """Effective size of being where log p is highest, at least."""
        return max(LEAST_SIZE, LEAST_OF_PEAK * self.n_chains)

    @property
    def _of_modes(self) -> list[Condition]:
        said = f" ({self.in_modes})" if self.mode_weights else ""
        return [
            Condition("weights of modes", self.weights_size, LEAST_SIZE,
                f"chains stay in {self.n_modes} modes, and the weights of the modes are unknown{said}", at_least=True),
            Condition("outflow", self.outflow, MOST_OUTFLOW,
                f"{100 * self.outflow:.1f} % of the trajectories would have left their mode"),
        ]  # fmt: skip

    @property
    def in_modes(self) -> str:
        """The weights of the modes, with their standard errors."""
        both = zip(self.mode_weights, self.weight_errors, strict=True)
        return ", ".join(f"{weight:.3f} +- {error:.3f}" for weight, error in both)

    @property
    def is_settled(self) -> bool:
        """Whether chains neither differ nor drift, so that effective sizes mean something."""
        return all(c.holds for c in self._of_chains[:5])

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
    def made(self) -> str:
        """How it was sampled."""
        return f"Sampled from the fit ({self.figures})."

    @property
    def details(self) -> str:
        """What was measured of the chains, and their modes."""
        modes = f" in {self.n_modes} modes, of weights {self.in_modes}" if self.n_modes > 1 else ""
        return (
            f" (nested R-hat {self.rhat:.3f}, effective sample size {self.effective_size:,.0f}, 5 and 95 % limits "
            f"known to {self.limit_error:.2f} standard deviations){modes}"
        )


# --- a posterior that is the draws of chains: all coordinates in the pool, draws in one mode weigh the same ---

#: Number of the random stream behind the log marginal likelihood.
_STREAM = 8_000_000


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
    #: Log marginal likelihood; NaN where it is not known yet.
    mass: Estimate = UNKNOWN
    #: Which tells it, when it is asked for.
    density: ModelDensity | None = None

    kind = "moved"

    def state(self, gaussian: Any, others: tuple[Any, ...] = ()) -> PoolState:
        """Return the posterior."""
        n, n_chains, d = self.x.shape
        of_start = np.arange(n_chains) // (n_chains // self.checks.n_starts)
        logp = self.logp.ravel()
        return self.with_pool(Pool(self.x.reshape(-1, d), logp, logp, np.tile(of_start, n)), gaussian, others)

    @property
    def of_chains(self) -> Array:
        """Weights of the chains, which add up to 1, (n_chains,)."""
        n_chains, modes = self.x.shape[1], self.checks.mode_weights or (1.0,)
        return np.repeat(modes, n_chains // len(modes)) * len(modes) / n_chains

    @property
    def modes(self) -> NDArray[np.intp]:
        """Which mode each chain is in, (n_chains,)."""
        return np.repeat(np.arange(self.checks.n_modes), self.x.shape[1] // self.checks.n_modes)

    # --- files ---

    def content(self, state: PoolState) -> dict[str, Any]:
        """Return what a file keeps."""
        return {"x": self.x, "log_p": self.logp, "checks": self.checks, "log_mass": tuple(self.mass)}

    @classmethod
    def of_content(cls, content: dict[str, Any], density: ModelDensity) -> PoolState:
        """Return the posterior on a model."""
        x, logp, checks, gaussian = (content[name] for name in ("x", "log_p", "checks", "gaussian"))
        if not isinstance(checks, MovedChecks):
            raise ValueError("what the moved posterior has as 'checks' is something else")
        if x.ndim != 3 or x.shape[2] != density.n_dim or gaussian.n_dim != density.n_dim:
            raise ValueError("the moved posterior is of another dimension")
        if logp.shape != x.shape[:2] or x.shape[1] % checks.n_starts or not np.isfinite(x).all():
            raise ValueError("the draws of the moved posterior do not go together")
        if checks.n_modes > 1 and (len(checks.mode_weights) != checks.n_modes or checks.n_starts % checks.n_modes):
            raise ValueError("the modes of the moved posterior do not go together")
        mass = Estimate(*content["log_mass"])
        return cls(x, logp, checks, mass, density).state(gaussian, tuple(content["others"]))

    # --- weights ---

    def weights(self, pool: Pool) -> tuple[Array, float]:
        """Return the weights of the modes, shared by all draws in each; there is no k-hat."""
        return np.tile(self.of_chains, len(self.x)) / len(self.x), self.checks.khat

    def size_of(self, weights: Array) -> float:
        """Return that of the chains, which are autocorrelated."""
        return self.checks.effective_size

    def log_normaliser(self, state: PoolState) -> tuple[float, float]:
        """Return the log mass, which the pool does not tell, and its error; NaN where no Gaussian is near enough."""
        mass = self.mass
        if np.isnan(mass.value) and self.density is not None:
            coordinates, rng = ChainCoordinates.of(state.gaussian), np.random.default_rng(_STREAM)
            mass = log_mass(
                self.density.logp, coordinates, self.x, self.logp, self.checks.n_starts, self.checks.effective_size, rng
            )
        return (mass if mass.se <= MOST_ERROR else UNKNOWN)[:2]

    def verdict(self, state: PoolState) -> MovedChecks:
        """Return what was measured."""
        return self.checks

    def in_modes(self, state: PoolState) -> list[PoolState]:
        """Return the posterior of each mode, with the Gaussian of its draws; empty where there is one mode."""
        n_modes, coordinates = self.checks.n_modes, ChainCoordinates.of(state.gaussian)
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
            type(self)(x, logp, alone).state(coordinates.refitted(x.reshape(-1, x.shape[2]), alone.effective_size))
            for x, logp in zip(*(np.split(array, n_modes, axis=1) for array in (self.x, self.logp)), strict=True)
        ]
