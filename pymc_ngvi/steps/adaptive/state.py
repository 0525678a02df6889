"""What one iteration of the step rule `adaptive` hands to the next."""

from dataclasses import dataclass, field

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Evaluation, GaussianState, Moments
from pymc_ngvi.steps.adaptive.global_gradient import GlobalGradient, Stride
from pymc_ngvi.steps.adaptive.growth import Growth
from pymc_ngvi.steps.adaptive.secant import Pair
from pymc_ngvi.steps.schedule.state import ScheduleState


@stored("adaptive.state")
@dataclass(frozen=True)
class AdaptiveState(ScheduleState):
    """What one iteration hands to the next: what every schedule does, and what follows."""

    q: GaussianState
    evaluation: Evaluation
    moments: Moments
    #: To be tried next on a fixed set.
    next_step_size: float = 1.0
    #: Recent steps, for the secant correction.
    pairs: tuple[Pair, ...] = ()
    #: Steps on fixed sets near the optimum that were looked at for it; `_N_LEARNED` if one showed there is no need.
    n_learned: int = 0
    #: Steps of group effects alone that may follow, at the start.
    n_settling: int = 0
    #: Of global parameters, over the fresh sets since the last large step.
    drift: GlobalGradient | None = None
    #: The last one of global parameters that drifted.
    stride: Stride | None = None
    #: Of standard deviations.
    growth: Growth = field(default_factory=Growth)
    #: Times that may follow in which lost scales are looked for.
    n_recoveries: int = 0

    @property
    def growing(self) -> NDArray[np.intp]:
        """Coordinates whose standard deviations grow without end, those that grew most first."""
        return self.growth.coordinates()
