"""What one iteration of the step rule `adaptive` hands to the next."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import BaseDraws, Evaluation, Moments
from pymc_ngvi.steps.adaptive.belief import UNKNOWN, Belief
from pymc_ngvi.steps.adaptive.drift import Drift, Stride
from pymc_ngvi.steps.adaptive.growth import Growth
from pymc_ngvi.steps.adaptive.secant import Pair


@stored("adaptive.state")
@dataclass(frozen=True)
class AdaptiveState:
    """What one iteration hands to the next.

    Parameters
    ----------
    q : GaussianState
    level : int
        Sets of draws used so far; names the random stream of the current one.
    base : BaseDraws
    evaluation : Evaluation
        At the draws of ``q``.
    moments : Moments
        There.
    fresh : bool
        ``base`` had no part in reaching ``q``.
    step_size : float
        The last one accepted.
    next_step_size : float
        To be tried next on a fixed set.
    n_pooled : int
        Draws behind ``q``, while steps are averaged; 0 while a fixed set is being solved.
    pairs : tuple of Pair
        Recent steps, for the secant correction.
    n_learned : int
        Steps on fixed sets near the optimum that were looked at for it; `_N_LEARNED` if one showed there is no need.
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
        The last line search found no acceptable step.
    blind : bool
        Of a stalled state: none of the steps that were tried has a finite ELBO.
    n_dropped : int
        Draws left out so far because log p or its gradient was not finite.
    n_settling : int
        Steps of group effects alone that may follow, at the start.
    drift : Drift or None
        Of global parameters, over the fresh sets since the last large step.
    stride : Stride or None
        The last one of global parameters that drifted.
    growth : Growth
        Of standard deviations.
    n_recoveries : int
        Times that may follow in which lost scales are looked for.
    """

    q: Any
    level: int
    base: BaseDraws
    evaluation: Evaluation
    moments: Moments
    fresh: bool = True
    step_size: float = 1.0
    next_step_size: float = 1.0
    n_pooled: int = 0
    pairs: tuple[Pair, ...] = ()
    n_learned: int = 0
    belief: Belief = UNKNOWN
    rounds: int = 0
    n_steps: int = 0
    best: float = -np.inf
    idle: int = 0
    stalled: bool = False
    blind: bool = False
    n_dropped: int = 0
    n_settling: int = 0
    drift: Drift | None = None
    stride: Stride | None = None
    growth: Growth = field(default_factory=Growth)
    n_recoveries: int = 0

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
