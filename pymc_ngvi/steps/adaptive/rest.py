"""Whether single coordinates have come to rest, beside what is left in nats."""

import numpy as np

from pymc_ngvi.core.types import Array, GaussianState, Moments
from pymc_ngvi.steps.adaptive.certificate import MAX_CURVATURE_ERROR
from pymc_ngvi.steps.adaptive.global_gradient import MAX_ERROR
from pymc_ngvi.steps.adaptive.state import AdaptiveState


def coordinatewise(q: GaussianState, moments: Moments) -> tuple[Array, Array]:
    """Return whitened gradient and diagonal curvature of the coordinates that are looked at one by one.

    Of a q that tells them from group effects, these are the global parameters: of thousands of effects, one is always
    far out by chance, and what they lack together is in the gap.
    """
    curvature = q.curvature_diagonal(moments.curvature)
    if q.globals_ is None:
        return moments.grad, curvature
    return moments.grad[q.globals_], curvature[q.globals_]


def no_coordinate_is_off(state: AdaptiveState) -> bool:
    """Tell whether no coordinate has an error of mean or scale that is large by itself, beyond its noise.

    Global parameters must have come to rest, too, as far as all draws tell since the last large step.
    """
    m, index = state.moments, state.q.globals_
    grad, curvature = coordinatewise(state.q, m)
    grad_se, curvature_se = (m.grad_se, m.curvature_se) if index is None else (m.grad_se[index], m.curvature_se[index])
    error, curvature_error = np.abs(grad) - 2.0 * grad_se, np.abs(curvature - 1.0) - 2.0 * curvature_se
    if index is not None and (state.drift is None or not state.drift.is_settled()):
        return False
    mean_met = np.max(error, initial=0.0) <= MAX_ERROR
    return bool(mean_met and np.max(curvature_error, initial=0.0) <= MAX_CURVATURE_ERROR)
