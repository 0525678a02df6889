"""Step rule `sgd`: stochastic gradient ascent in the coordinates of mean and Cholesky factor, for comparison."""

from typing import ClassVar

import numpy as np

from pymc_ngvi.core.types import GaussianState, Moments, Parameters
from pymc_ngvi.steps.stochastic.base import Advance, Stochastic, StochasticState
from pymc_ngvi.steps.stochastic.coordinates import Coordinates

#: Length of the first step, in the smallest standard deviation, where no step size is given.
_FIRST_LENGTH = 0.1


class SGD(Coordinates[float]):
    """Plain gradient steps; options as for `Stochastic`.

    ``step_size`` is in the units of the coordinates; by default the first step is as long as a tenth of the
    smallest standard deviation, or less where the gradient is small.
    With ``step_decay`` kappa it is divided by (1 + t)^kappa.
    """

    takes: ClassVar[frozenset[str]] = Stochastic.takes | {"step_decay"}

    def _follow(self, state: StochasticState[float], direction: Parameters, moments: Moments) -> Advance[float] | None:
        iterate = state.iterate
        first = state.memory or self._step_size or self._first_rate(iterate, direction)
        rate = self._decayed(first, state.t - 1)
        return self._moved(iterate, rate * direction.location, rate * direction.factor, step_size=rate, memory=first)

    def _first_rate(self, iterate: GaussianState, direction: Parameters) -> float:
        sd = iterate.sd()
        # Near an optimum with these standard deviations, the ELBO bends by 1/sd^2 along the mean and a factor of the
        # covariance, by sd^2 along a factor of the precision: a longer step would overshoot.
        stable = sd.min() ** 2 if iterate.factor_sign > 0 else min(sd.min() ** 2, 1.0 / sd.max() ** 2)
        longest = max(float(np.sqrt(np.vdot(part, part))) for part in direction)
        return float(min(0.5 * stable, _FIRST_LENGTH * sd.min() / max(longest, np.finfo(float).tiny)))
