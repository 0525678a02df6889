r"""Natural gradient in the mean and the Cholesky factor of the precision [1]_ (its algorithm 2b).

With :math:`\Sigma^{-1} = T T^T` and moments whitened by :math:`T^{-T}`: :math:`\mu' = \mu + \rho T^{-T} \tilde g` and
:math:`T' = T + \rho T \,\mathrm{tril}_{1/2}(A - I)`. With gradients only, the lower triangle of I - A is that of
:math:`E[z v^T]`, :math:`v = T^{-1} \nabla(\log p - \log q)`.

References
----------
.. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational approximation.
   https://doi.org/10.48550/arXiv.2109.00375
"""

from pymc_ngvi.core.types import GaussianState, Moments
from pymc_ngvi.updates.cholesky import cholesky


def cholesky_precision[S: GaussianState](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
    """Take one natural-gradient step in the mean and the Cholesky factor of the precision."""
    return cholesky(state, moments, step_size, correct)
