r"""Step rule `adam`: Adam [1]_ in the coordinates of mean and Cholesky factor.

References
----------
.. [1] D. P. Kingma and J. Ba (2015). Adam: a method for stochastic optimization. ICLR.
   https://doi.org/10.48550/arXiv.1412.6980
"""

from typing import ClassVar, NamedTuple

import numpy as np

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Moments, Parameters
from pymc_ngvi.steps.stochastic.base import Advance, Stochastic, StochasticState
from pymc_ngvi.steps.stochastic.coordinates import Coordinates, zeros_like

_RATE, _RATE_PRECISION = 0.001, 0.01
_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8


@stored("adam.memory")
class _Memory(NamedTuple):
    """Exponential averages of the direction and of its square, for the mean and for the factor."""

    first: Parameters
    second: Parameters


class Adam(Coordinates[_Memory]):
    """Adam along the direction of the update; options as for `Stochastic`.

    ``step_size`` is .001 by default, but .01 for a factor of the precision, with entries like 1 / standard deviation.
    """

    takes: ClassVar[frozenset[str]] = Stochastic.takes | {"step_decay"}

    def _follow(
        self, state: StochasticState[_Memory], direction: Parameters, moments: Moments
    ) -> Advance[_Memory] | None:
        first, second = state.memory or [zeros_like(state.iterate)] * 2
        memory = _Memory(
            Parameters(*(_averaged(*pair, _BETA_1) for pair in zip(first, direction, strict=True))),
            Parameters(*(_averaged(m, d * d, _BETA_2) for m, d in zip(second, direction, strict=True))),
        )
        first_rate = self._step_size or (_RATE if state.iterate.factor_sign > 0 else _RATE_PRECISION)
        rate = self._decayed(first_rate, state.t - 1)
        root = np.sqrt(1.0 - _BETA_2**state.t)
        scale = rate * root / (1.0 - _BETA_1**state.t)
        steps = [_ratio(*pair, root * _EPSILON, scale) for pair in zip(*memory, strict=True)]
        return self._moved(state.iterate, *steps, step_size=rate, memory=memory)


def _averaged(old: Array, new: Array, beta: float) -> Array:
    """Return beta old + (1 - beta) new, with one array made."""
    result: Array = old - new
    result *= beta
    result += new
    return result


def _ratio(first: Array, second: Array, epsilon: float, scale: float) -> Array:
    """Return scale first / (sqrt(second) + epsilon), with one array made."""
    result: Array = np.sqrt(second)
    result += epsilon
    np.divide(first, result, out=result)
    result *= scale
    return result
