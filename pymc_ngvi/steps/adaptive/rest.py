"""Whether single coordinates have come to rest, beside what is left in nats."""

from pymc_ngvi.core.types import Array, GaussianState, Moments


def coordinatewise(q: GaussianState, moments: Moments) -> tuple[Array, Array]:
    """Return whitened gradient and diagonal curvature of the coordinates that are looked at one by one.

    Of a q that tells them from group effects, these are the global parameters: of thousands of effects, one is always
    far out by chance, and what they lack together is in the gap.
    """
    curvature = q.curvature_diagonal(moments.curvature)
    if q.globals_ is None:
        return moments.grad, curvature
    return moments.grad[q.globals_], curvature[q.globals_]
