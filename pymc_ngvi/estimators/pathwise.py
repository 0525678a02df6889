r"""Reparametrisation through the Cholesky factor: what automatic differentiation of one draw gives [1]_ [2]_.

The gradient in the factor is the *lower triangle* of :math:`E[w z^T]`, :math:`w = C^T \nabla(\log p - \log q)` (for a
factor of the precision: of :math:`E[z v^T]`); mirrored at the diagonal it is an unbiased estimate of I - A. It differs
from Stein's estimator in that each off-diagonal entry rests on one of its two products instead of their mean.

References
----------
.. [1] K. Wu and J. R. Gardner (2024). Understanding stochastic natural gradient variational inference. ICML.
   https://doi.org/10.48550/arXiv.2406.01870
.. [2] M. Titsias and M. Lazaro-Gredilla (2014). Doubly stochastic variational Bayes for non-conjugate inference. ICML.
   https://proceedings.mlr.press/v32/titsias14.html
"""

from pymc_ngvi.core.types import BaseDraws, Evaluation, GaussianState, Moments, Target
from pymc_ngvi.estimators.path import from_gradients


def pathwise(
    target: Target, state: GaussianState, base: BaseDraws, evaluation: Evaluation, *, stl: bool = True
) -> Moments:
    """Estimate whitened gradient and curvature by differentiating draws through the Cholesky factor.

    Parameters
    ----------
    target : Target
        Not evaluated again.
    state : GaussianState
    base : BaseDraws
        The draws of ``evaluation``.
    evaluation : Evaluation
        At the draws of ``state``; draws that are not finite are left out.
    stl : bool, default True
        Sticking the landing: no noise at all at q = p.

    Returns
    -------
    Moments
    """
    return from_gradients(state.outer, state, base, evaluation, stl=stl)
