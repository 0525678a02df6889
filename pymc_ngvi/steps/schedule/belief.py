"""What is known of the gap of a state: a scalar Kalman filter over measurements on fresh draws.

Near the optimum, one set of draws measures the gap with an error that is as large as the gap itself, and a fit that
stops at a low measurement would report a gap that is too low. But most of what is left is the sampling error of the
draws behind the state, and that is known: a step of size rho from a gap G, on draws with noise floor R, leaves
rho^2 R of noise, and (1 - rho)^2 G of the gap where the Fisher information is the curvature. Along a flatter direction
it leaves more; (1 - rho) G is taken, so that a gap along one direction is not believed away.
"""

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from pymc_ngvi.core.stored import stored

#: Relative error of a predicted gap: steps are not exact, and the Fisher information is not quite the curvature.
_MODEL_ERROR = 0.3
#: Standard deviations between prediction and measurement beyond which the prediction counts for nothing.
_SURPRISE = 3.0


class Nats(Protocol):
    """What is left to gain, as one set of draws has it."""

    @property
    def gap(self) -> float:
        """Half the squared length of the natural gradient."""

    @property
    def floor(self) -> float:
        """What noise alone would make it."""

    @property
    def floor_sd(self) -> float:
        """Standard deviation of the difference at the optimum."""


@stored("adaptive.belief")
@dataclass(frozen=True)
class Belief:
    """Estimate of the nats still to be gained by a state."""

    #: Not clipped: may be below 0 after a single measurement.
    mean: float = np.inf
    #: Standard deviation of the error of ``mean``; inf before any measurement.
    sd: float = np.inf

    @classmethod
    def of(cls, moments: Nats) -> Self:
        """Return what one set of fresh draws says by itself."""
        gap = moments.gap - moments.floor
        return cls(gap, _measurement_sd(moments, gap))

    def after_step(self, step_size: float, floor: float) -> Self:
        """Predict the gap after a step on draws with noise floor ``floor``, nats."""
        left = 1.0 - step_size
        mean = left * max(self.mean, 0.0) + step_size**2 * floor
        return type(self)(mean, float(np.hypot(left * self.sd, _MODEL_ERROR * mean)))

    def measured(self, moments: Nats) -> Self:
        """Combine a prediction with a measurement on fresh draws."""
        alone = self.of(moments)
        sd = _measurement_sd(moments, max(self.mean, 0.0)) if np.isfinite(self.sd) else np.inf
        if not np.isfinite(sd) or sd == 0.0 or abs(alone.mean - self.mean) > _SURPRISE * np.hypot(sd, self.sd):
            return alone
        gain = self.sd**2 / (self.sd**2 + sd**2)
        return type(self)(self.mean + gain * (alone.mean - self.mean), self.sd * float(np.sqrt(1.0 - gain)))

    @property
    def bound(self) -> float:
        """Mean plus two standard deviations."""
        return self.mean + 2.0 * self.sd


#: Before any measurement.
UNKNOWN = Belief()


def _measurement_sd(moments: Nats, gap: float) -> float:
    """Return the standard deviation of a corrected gap where the true one is ``gap``.

    Its variance is tr(Cov^2) / (2 S^2) + g^T Cov g / S. ``floor_sd`` is the root of the first term; the second is taken
    for a g that lies as the noise does.
    """
    if moments.floor <= 0.0:
        return moments.floor_sd
    return moments.floor_sd * float(np.sqrt(1.0 + 2.0 * max(gap, 0.0) / moments.floor))
