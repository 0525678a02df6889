"""A step along a straight line in the coordinates of mean and factor."""

from pymc_ngvi.core.types import Direction, GaussianState, Moments


def step_along[S: GaussianState](direction: Direction, state: S, moments: Moments, step_size: float) -> S | None:
    """Return the state a step further; None where a moment is not finite, or the factor's diagonal not positive."""
    if not moments.is_finite():
        return None
    location, factor = direction(state, moments)
    return state.plus(step_size * location, step_size * factor)
