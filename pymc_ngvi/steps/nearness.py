"""How near a state is to the optimum: near enough to average steps, and for secants to serve."""

from typing import Any

import numpy as np

from pymc_ngvi.steps.tolerance import judged
from pymc_ngvi.types import Moments

#: Whitened errors, and nats, below which the fit counts as near the optimum.
NEAR_ERROR, NEAR_NATS, NEAR_NATS_PER_DIM = 0.6, 0.5, 0.01
#: Nats, beyond one for each dimension, below which secants serve where the metric is not exact.
_TAME_NATS = 10.0


def is_near(q: Any, moments: Moments, gap: float) -> bool:
    """Tell whether a state is near the optimum."""
    return gap < max(NEAR_NATS, NEAR_NATS_PER_DIM * float(q.n_dim)) and _are_small(q, moments)


def secants_serve(q: Any, moments: Moments, gap: float) -> bool:
    """Tell whether a state is near enough to the optimum for secants: nearer where the metric is exact."""
    if not q.exact_metric:
        return gap < _TAME_NATS + float(q.n_dim)
    return is_near(q, moments, gap)


def has_effects(q: Any, more_than: int) -> bool:
    """Tell whether a state has so many group effects, about, beside global parameters."""
    return q.globals_ is not None and bool(q.n_dim > more_than)


def _are_small(q: Any, moments: Moments) -> bool:
    """Tell whether whitened errors of means and scales are small."""
    grad, curvature = judged(q, moments)
    errors_of_scales = np.abs(curvature - 1.0)
    return bool(np.max(np.abs(grad), initial=0.0) < NEAR_ERROR and np.max(errors_of_scales, initial=0.0) < NEAR_ERROR)
