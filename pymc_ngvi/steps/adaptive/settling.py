"""First steps of a hierarchical model: group effects alone, while the global parameters are held.

At the start, group effects are near 0 with a spread that has nothing to do with the data. Steps of all coordinates at
once would first fit the scale of the effects to that, and then creep along the plateau of effects that are all but 0,
for twenty iterations on a centred logistic model. Held at their wide start, global parameters let the effects find the
data.
"""

from dataclasses import replace

from pymc_ngvi.core.types import GaussianState, Moments

#: Steps at most, and nats a coordinate that one must gain to be followed by another.
MAX_SETTLING, LEAST_GAIN = 6, 0.01


def can_settle(q: GaussianState) -> bool:
    """Tell whether a state has both global parameters and others."""
    return q.globals_ is not None and 0 < len(q.globals_) < q.n_dim


def without_globals(q: GaussianState, moments: Moments) -> Moments:
    """Return moments whose step leaves the global parameters where they are."""
    grad, curvature = q.without_globals(moments.grad, moments.curvature)
    return replace(moments, grad=grad, curvature=curvature, replicates=None)
