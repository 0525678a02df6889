r"""Euclidean gradient in the mean and a Cholesky factor [1]_ [2]_ (algorithms 1a and 2a of [2]_): for comparison.

For a factor of the covariance the gradient of the ELBO is :math:`E_q[\nabla h]` in the mean and
:math:`\mathrm{tril}(E[\nabla h\, z^T])` in C, :math:`h = \log p - \log q`; for a factor T of the precision it is
:math:`-\mathrm{tril}(T^{-T} E[z v^T])` in T, :math:`v = T^{-1} \nabla h`. Both are the lower triangle of the factor's
inverse transpose times I - A, but for the sign.

References
----------
.. [1] M. Titsias and M. Lazaro-Gredilla (2014). Doubly stochastic variational Bayes for non-conjugate inference. ICML.
   https://proceedings.mlr.press/v32/titsias14.html
.. [2] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational approximation.
   https://doi.org/10.48550/arXiv.2109.00375
"""

from pymc_ngvi.core.types import GaussianState, Moments, Parameters
from pymc_ngvi.updates.line import step_along


def euclidean_direction(state: GaussianState, moments: Moments) -> Parameters:
    """Return the gradient of the ELBO in the coordinates of mean and Cholesky factor."""
    return Parameters(
        state.dewhiten(moments.grad), state.factor_sign * state.inverse_transpose_times(moments.error(state))
    )


def euclidean[S: GaussianState](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
    """Take one step of gradient ascent."""
    return step_along(euclidean_direction, state, moments, step_size)
