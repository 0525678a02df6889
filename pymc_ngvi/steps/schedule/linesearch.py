"""Back-tracking: shorten a step until it is good enough."""

from collections.abc import Callable
from enum import Enum

import numpy as np

from pymc_ngvi.steps.schedule.state import Evaluated, Step

#: Steps evaluated along one direction; each at least this part of the one before, and at most half of it.
MAX_TRIALS, LEAST_PART = 8, 0.25
#: Steps proposed along one direction, those included that lead to no state, and those that are hopeless.
MAX_PROPOSED, _PROPOSED_PER_TRIAL = 30, 4
#: Nats, and multiples of the rise that was promised, by which the ELBO falls at a step that is hopeless.
HOPELESS, TIMES = 1e3, 10.0


class Failure(Enum):
    """Why a search found no step."""

    #: Steps were tried and fell short, or none leads to a valid state.
    NOT_ACCEPTED = "not accepted"
    #: Steps were tried, and at none is the ELBO finite.
    NOT_FINITE = "not finite"


def search[Q, E: Evaluated](
    propose: Callable[[float], Q | None],
    evaluate: Callable[[Q], E],
    accepts: Callable[[E], bool],
    *,
    elbo: float,
    slope: float,
    first: float,
    most_trials: int = MAX_TRIALS,
) -> Step[Q, E] | Failure:
    """Find a step that is accepted.

    Notes
    -----
    Far from the optimum a scale can be sent to where log p is -1e16 or not finite. Such hopeless trials say nothing of
    the direction, and do not count among those after which it is given up.
    """
    rho, trials, elbos = first, 0, []
    for _ in range(min(MAX_PROPOSED, _PROPOSED_PER_TRIAL * most_trials)):
        q = propose(rho)
        if q is None:
            rho *= 0.5
            continue
        evaluation = evaluate(q)
        if accepts(evaluation):
            return Step(q, evaluation, rho)
        elbos.append(evaluation.elbo)
        gained = evaluation.elbo - elbo
        trials += not _is_hopeless(rho * slope, gained)
        if trials == most_trials:
            break
        rho *= _shorter(rho * slope, gained)
    return Failure.NOT_FINITE if elbos and not np.isfinite(elbos).any() else Failure.NOT_ACCEPTED


def _is_hopeless(slope: float, gained: float) -> bool:
    """Tell whether a trial ended nowhere near where it began."""
    return not np.isfinite(gained) or -gained > max(HOPELESS, TIMES * slope)


def _shorter(slope: float, gained: float) -> float:
    """Return the part of a step to try next: the top of the parabola of slope ``slope`` through ``gained``, or near."""
    top = 0.5 * slope / (slope - gained) if np.isfinite(gained) and slope > gained else 0.5
    return float(np.clip(top, LEAST_PART, 0.5))
