"""Whether moved draws have arrived: every condition, with its figure."""

import math

from dataclasses import dataclass

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.verdict import Condition, Verdict, heavy_tail

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
class MovedChecks(Verdict):
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
    #: 0: there are no fits given globals, whose ELBOs lack something.
    n_fits: int = 0
    lacking: float = 0.0
    #: That chains do not cross: each has superchains of its own, which stay there.
    n_modes: int = 1
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
    def conditions(self) -> list[Condition]:
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
            self._of_size("bulk", self.bulk),
            self._of_size("tail", self.tail),
            Condition("limits", self.limit_error, MOST_LIMIT_ERROR,
                f"a 5 or 95 % limit is known to {self.limit_error:.2f} standard deviations only"),
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

    def _of_size(self, name: str, size: float) -> Condition:
        of = "unknown" if math.isnan(size) else f"{size:,.0f}"
        said = f"the {name} effective sample size is {of}, below {LEAST_SIZE:.0f}"
        return Condition(f"{name} size", size, LEAST_SIZE, said, at_least=True)

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
        return tuple(c.sentence for c in self.conditions if not (c.holds or math.isnan(c.figure)))

    @property
    def figures(self) -> str:
        """How far they were moved, in a clause."""
        return (
            f"{self.n_chains} chains from {self.n_starts} points, {self.n_draws:,} draws each, "
            f"{self.n_gradients:,} gradients"
        )

    @property
    def sentence(self) -> str:
        """The verdict in a sentence."""
        if self.is_exact:
            modes = f" in {self.n_modes} modes, of weights {self.in_modes}" if self.n_modes > 1 else ""
            return (
                f"Sampled from the fit ({self.figures}): the chains have arrived (nested R-hat {self.rhat:.3f}, "
                f"effective sample size {self.effective_size:,.0f}, 5 and 95 % limits known to {self.limit_error:.2f} "
                f"standard deviations){modes}."
            )
        return f"Sampled from the fit ({self.figures}), but not arrived: {'; '.join(self.failures)}."
