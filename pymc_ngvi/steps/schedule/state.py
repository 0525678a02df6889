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
    """What one iteration hands to the next.

    Parameters
    ----------
    q : FittedState
    level : int
        Sets of draws used so far; names the random stream of the current one.
    base : BaseDraws
    evaluation : Evaluated
        At the draws of ``q``.
    moments : Nats
        There.
    fresh : bool
        ``base`` had no part in reaching ``q``.
    step_size : float
        The last one accepted.
    n_pooled : int
        Draws behind ``q``, while steps are averaged; 0 while a fixed set is being solved.
    belief : Belief
        Of the gap of ``q``; measured on fresh draws only.
    rounds : int
        Sets of fresh draws tried at the largest size.
    n_steps : int
        Accepted steps on the current set.
    best : float
        ELBO on the current set before its last step, or an earlier one if that was higher.
    idle : int
        Accepted steps in a row that gained nothing.
    stalled : bool
        The last search found no acceptable step.
    blind : bool
        Of a stalled state: none of the steps that were tried has a finite ELBO.
    n_dropped : int
        Draws left out so far because log p or its gradient was not finite.
    """

    q: FittedState
    level: int
    base: BaseDraws
    evaluation: Evaluated
    moments: Nats
    fresh: bool = True
    step_size: float = 1.0
    n_pooled: int = 0
    belief: Belief = UNKNOWN
    rounds: int = 0
    n_steps: int = 0
    best: float = -np.inf
    idle: int = 0
    stalled: bool = False
    blind: bool = False
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
    """A step on a fixed set that was accepted.

    Parameters
    ----------
    q : FittedState
        Where it led.
    evaluation : Evaluated
        There.
    size : float
    direction : ndarray, shape (n_params,), or None
        The natural gradient that was followed, for a rule that learns from it.
    """

    q: Q
    evaluation: E
    size: float
    direction: Array | None = None
