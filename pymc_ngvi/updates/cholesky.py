r"""Natural gradient in the mean and the Cholesky factor of the covariance [1]_ (its algorithms 1b and 1c).

With :math:`\Sigma = C C^T` and whitened moments :math:`\tilde g = C^T E_q[\nabla \log p]`, A:
:math:`\mu' = \mu + \rho C \tilde g` and :math:`C' = C + \rho C \,\mathrm{tril}_{1/2}(I - A)`, the lower triangle with a
halved diagonal. With gradients only, the lower triangle of I - A is that of :math:`E[w z^T]`,
:math:`w = C^T \nabla(\log p - \log q)`, which costs O(d^2) a draw: algorithm 1b. Algorithm 1c is the same for a
block-diagonal C.

References
----------
.. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational approximation.
   https://doi.org/10.48550/arXiv.2109.00375
"""

from pymc_ngvi.core.types import GaussianState, Moments, Parameters
from pymc_ngvi.updates.line import step_along


def natural_direction(state: GaussianState, moments: Moments) -> Parameters:
    """Return the natural gradient of the ELBO in the coordinates of mean and Cholesky factor."""
    # A precision factor shrinks where the covariance grows.
    return Parameters(state.unwhiten(moments.grad), state.factor_sign * state.times_lower_half(moments.error(state)))


def cholesky[S: GaussianState](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
    """Take one natural-gradient step in the mean and the Cholesky factor."""
    return step_along(natural_direction, state, moments, step_size)
