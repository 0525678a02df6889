r"""Step rule `snngm`: stochastic normalised natural gradient ascent with momentum [1]_.

The natural gradient in the coordinates of mean and Cholesky factor, divided by its norm, enters an exponential average
(:math:`\beta = .9`, corrected for its start at 0), and the step has the fixed length :math:`\alpha = .001 \sqrt{p}` for
p parameters. The norm is Euclidean for factors of the covariance, and that of the Fisher metric for factors of the
precision. The paper's theorem 3 does not hold for stochastic gradients: its proof needs that no noisy direction goes
against the gradient.

References
----------
.. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational approximation.
   https://doi.org/10.48550/arXiv.2109.00375
"""

from typing import ClassVar

import numpy as np

from pymc_ngvi.core.types import Array, GaussianState, Moments, Outer, Parameters
from pymc_ngvi.steps.stochastic.base import Advance, StochasticState
from pymc_ngvi.steps.stochastic.coordinates import Coordinates, zeros_like

_MOMENTUM = 0.9
#: Step length for each square root of a parameter.
_LENGTH = 0.001


class SNNGM(Coordinates[Parameters]):
    """Normalised natural gradients with momentum; options as for `Stochastic`.

    ``step_size`` is the length alpha of a step, by default .001 times the square root of the number of parameters.
    """

    default_path_draws: ClassVar[int | None] = 1

    def _follow(
        self, state: StochasticState[Parameters], direction: Parameters, moments: Moments
    ) -> Advance[Parameters] | None:
        iterate = state.iterate
        if iterate.factor_sign < 0:
            norm = _riemannian_norm(iterate, moments)
        else:
            norm = float(np.sqrt(sum(np.vdot(part, part) for part in direction)))
        if not np.isfinite(norm):
            return None
        part = (1.0 - _MOMENTUM) / norm if norm > 0.0 else 0.0  # at the very optimum, path gradients are 0
        before = state.memory or zeros_like(iterate)
        momentum = Parameters(*(_averaged(m, d, part) for m, d in zip(before, direction, strict=True)))
        length = self._step_size or _LENGTH * np.sqrt(iterate.n_params)
        scale = length / (1.0 - _MOMENTUM**state.t)
        return self._moved(
            iterate, scale * momentum.location, scale * momentum.factor, step_size=length, memory=momentum
        )


def _averaged(momentum: Array, direction: Array, part: float) -> Array:
    result: Array = direction * part
    result += _MOMENTUM * momentum
    return result


def _riemannian_norm(state: GaussianState, moments: Moments) -> float:
    """Return the length of the natural gradient in the Fisher metric: its square is twice the gap it predicts."""
    error = moments.error(state)
    whole = state.factor.ndim == 2  # a packed one leaves entries out
    if whole and isinstance(error, Outer) and len(error.left) == 1 and not error.diagonal:
        right = error.right[0] ** 2
        before = np.cumsum(right) - 0.5 * right
        squares = float((error.left[0] ** 2) @ before)
    else:
        flat = state.flat(state.curvature_error(moments.curvature))
        squares = 0.5 * float(np.vdot(flat, flat))
    return float(np.sqrt(np.vdot(moments.grad, moments.grad) + squares))
