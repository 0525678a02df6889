"""What errors in expected derivatives mean for a Gaussian."""

from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.steps.incremental.sites import as_hessian


def gap_by_newton(q: GaussianState, grad: Array, hessian: Array) -> float:
    """Return the nats to be gained where expected derivatives, the Hessian packed, are off by so much."""
    whitened = q.whiten(grad[None])[0]
    error = q.flat(q.curvature(as_hessian(hessian, q.n_dim)))
    return 0.5 * float(whitened @ whitened) + 0.25 * q.inner(error, error)


def moves(q: GaussianState, grads: Array) -> Array:
    """Return how far errors in gradients, (n, n_dim), move means, in standard deviations."""
    result: Array = q.covariance_times(grads) / q.sd()
    return result
