"""How many draws the next set of the step rule `adaptive` has: a power of 2."""

import numpy as np

from pymc_ngvi.steps.adaptive.certificate import FEW_DRAWS
from pymc_ngvi.steps.adaptive.nearness import MANY, NEAR_NATS, THOUSANDS, has_effects, is_near
from pymc_ngvi.steps.adaptive.state import AdaptiveState

#: Growth of a set that is too small: where the metric is not exact, a small set misleads for longer.
_GROWTH, _GROWTH_INEXACT = 2, 4
#: Part of the tolerance that the standard deviation of a measured gap may have, for the certificate.
_CERTAIN = 0.4


def draws_to_average(state: AdaptiveState, n_pooled: int, tolerance: float, most: int) -> int:
    """Return the size of the set that follows an averaged step.

    Parameters
    ----------
    state : AdaptiveState
        Before the step.
    n_pooled : int
        Draws behind the state after it.
    tolerance : float
        Nats that may be left.
    most : int
    """
    q = state.q
    n_sds = 1.0 if q.exact_metric else 2.0
    needed = state.n_draws * n_sds * state.moments.floor_sd / (_CERTAIN * tolerance)
    restless = has_effects(q, THOUSANDS) and not (state.drift and state.drift.is_settled())
    n_draws = min(n_pooled, max(needed, state.n_draws if restless else FEW_DRAWS), most)
    # Among many group effects noise falls faster than the number of draws: the larger set is the cheaper one.
    power = np.ceil(np.log2(n_draws)) if has_effects(q, MANY) else np.floor(np.log2(n_draws))
    return int(min(2**power, most))


def draws_to_solve(state: AdaptiveState, tolerance: float, most: int) -> int:
    """Return the size of the set that follows one that is solved, or as far solved as it can be.

    Parameters
    ----------
    state : AdaptiveState
        At the end of the set.
    tolerance : float
        Nats that may be left where the posterior is near-Gaussian.
    most : int
    """
    near = is_near(state.q, state.moments, state.moments.gap) and not state.stalled
    too_noisy = state.moments.floor > max(NEAR_NATS, 4.0 * tolerance)
    grows = state.n_draws < FEW_DRAWS or not near or too_noisy
    growth = _GROWTH if state.q.exact_metric else _GROWTH_INEXACT
    return min(state.n_draws * growth, most) if grows else state.n_draws
