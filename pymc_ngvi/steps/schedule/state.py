"""What one iteration hands to the next, in every schedule."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array, BaseDraws, FittedState
from pymc_ngvi.steps.schedule.belief import UNKNOWN, Belief, Nats


class Evaluated(Protocol):
    """log p at the draws of a state, as far as the schedule asks."""

    @property
    def elbo(self) -> float:
        """ELBO on these draws; -inf where none is finite."""

    @property
    def n_dropped(self) -> int:
        """Draws at which log p or its gradient is not finite."""

    @property
    def lost(self) -> float:
        """Part of q that they stand for."""


@dataclass(frozen=True)
class ScheduleState:
    """What one iteration hands to the next."""

    q: FittedState
    #: Sets of draws used so far; names the random stream of the current one.
    level: int
    base: BaseDraws
    #: At the draws of ``q``.
    evaluation: Evaluated
    #: There.
    moments: Nats
    #: ``base`` had no part in reaching ``q``.
    fresh: bool = True
    #: The last one accepted.
    step_size: float = 1.0
    #: Draws behind ``q``, while steps are averaged; 0 while a fixed set is being solved.
    n_pooled: int = 0
    #: Of the gap of ``q``; measured on fresh draws only.
    belief: Belief = UNKNOWN
    #: Sets of fresh draws tried at the largest size.
    rounds: int = 0
    #: Accepted steps on the current set.
    n_steps: int = 0
    #: ELBO on the current set before its last step, or an earlier one if that was higher.
    best: float = -np.inf
    #: Accepted steps in a row that gained nothing.
    idle: int = 0
    #: The last search found no acceptable step.
    stalled: bool = False
    #: Of a stalled state: none of the steps that were tried has a finite ELBO.
    blind: bool = False
    #: Draws left out so far because log p or its gradient was not finite.
    n_dropped: int = 0

    @property
    def elbo(self) -> float:
        """ELBO on the current draws."""
        return self.evaluation.elbo

    @property
    def gap(self) -> float:
        """Estimated nats of ELBO still to be gained; on fresh draws, corrected for their noise.

        At least the sampling error of the draws behind the state: a fit stops where a measurement is low.
        """
        if not np.isfinite(self.moments.floor):  # a single replicate tells nothing of its noise
            return float("inf")
        if not self.fresh:
            return self.moments.gap
        sampling_error = self.moments.floor * self.n_draws / self.n_pooled if self.n_pooled else 0.0
        return max(self.belief.mean, sampling_error)

    @property
    def n_draws(self) -> int:
        """Draws in use."""
        return self.base.n_draws

    @property
    def growing(self) -> NDArray[np.intp]:
        """Coordinates whose standard deviations grow without end: none that this schedule looks for."""
        return np.empty(0, dtype=np.intp)


class Step[Q, E](NamedTuple):
    """A step on a fixed set that was accepted."""

    #: Where it led.
    q: Q
    #: There.
    evaluation: E
    size: float
    #: The natural gradient that was followed, for a rule that learns from it; shape (n_params,), or None.
    direction: Array | None = None
