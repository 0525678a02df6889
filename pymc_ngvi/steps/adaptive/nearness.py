"""How near a state is to the optimum: near enough to average steps, and for secants to serve."""

import numpy as np

from pymc_ngvi.core.types import Array, GaussianState, Moments
from pymc_ngvi.steps.adaptive.state import AdaptiveState
from pymc_ngvi.steps.schedule.base import NEAR_NATS

# --- whether single coordinates have come to rest, beside what is left in nats ---


def coordinatewise(q: GaussianState, moments: Moments) -> tuple[Array, Array]:
    """Return whitened gradient and diagonal curvature of the coordinates that are looked at one by one.

    Of a q that tells them from group effects, these are the global parameters: of thousands of effects, one is always
    far out by chance, and what they lack together is in the gap.
    """
    curvature = q.curvature_diagonal(moments.curvature)
    if q.globals_ is None:
        return moments.grad, curvature
    return moments.grad[q.globals_], curvature[q.globals_]


#: Whitened errors, and nats, below which the fit counts as near the optimum.
NEAR_ERROR, NEAR_NATS_PER_DIM = 0.6, 0.01
#: Nats, beyond one for each dimension, below which secants serve where the metric is not exact.
_TAME_NATS = 10.0
#: Nats per dimension below which they serve among thousands of group effects: there a global parameter takes tens of
#: plain steps, and each is dear.
_SECANT_NATS_PER_DIM = 0.05
#: Dimensions beyond which group effects are many; those from which every draw counts; and every Hessian.
MANY, THOUSANDS, TENS_OF_THOUSANDS = 100, 1_000, 20_000
#: Noise floors, among many group effects, down to which a set is worth solving: of the gap on a fixed set, most is what
#: its draws say of each group by chance. Standard errors, and whitened units, that count as 0 in a global parameter.
_MANY_FLOORS, _GLOBAL_SE, _LEAST_GLOBAL = 2.0, 1.0, 0.1


def is_near(q: GaussianState, moments: Moments, gap: float) -> bool:
    """Tell whether a state is near the optimum."""
    return gap < max(NEAR_NATS, NEAR_NATS_PER_DIM * float(q.n_dim)) and _are_small(q, moments)


def secants_serve(q: GaussianState, moments: Moments, gap: float) -> bool:
    """Tell whether a state is near enough to the optimum for secants: nearer where the metric is exact."""
    if not q.exact_metric:
        return gap < _TAME_NATS + float(q.n_dim)
    if has_effects(q, THOUSANDS) and gap < _SECANT_NATS_PER_DIM * float(q.n_dim):
        return True
    return is_near(q, moments, gap)


def has_effects(q: GaussianState, more_than: int) -> bool:
    """Tell whether a state has so many group effects, about, beside global parameters."""
    return q.globals_ is not None and bool(q.n_dim > more_than)


def is_solved_for_globals(q: GaussianState, moments: Moments, least: float) -> bool:
    """Tell whether a set of draws has little more to give of a model with many group effects.

    The noise of the effects would hide global parameters that are off by many standard deviations, for which a larger
    set is no better than this one, only dearer: they must be at rest on this set.
    """
    if moments.gap > max(moments.floor * _MANY_FLOORS, least):
        return False
    grad, se = np.abs(moments.grad[q.globals_]), moments.grad_se[q.globals_]
    return bool(np.all(grad <= np.maximum(_LEAST_GLOBAL, _GLOBAL_SE * se)))


def slack_among_effects(state: AdaptiveState, slack: float, tol: float) -> float:
    """Return the nats by which the ELBO may fall in a harmless step, where some coordinates are group effects."""
    if state.q.globals_ is not None and state.moments.gap < NEAR_NATS_PER_DIM * float(state.q.n_dim):
        # The noise in the scales of group effects, and that of the ELBO along them, are those of the same draws:
        # together they hide what a global parameter gains.
        return max(slack, min(2.0 * state.moments.floor, max(tol, NEAR_NATS)))
    return slack


def _are_small(q: GaussianState, moments: Moments) -> bool:
    """Tell whether whitened errors of means and scales are small."""
    grad, curvature = coordinatewise(q, moments)
    errors_of_scales = np.abs(curvature - 1.0)
    return bool(np.max(np.abs(grad), initial=0.0) < NEAR_ERROR and np.max(errors_of_scales, initial=0.0) < NEAR_ERROR)
