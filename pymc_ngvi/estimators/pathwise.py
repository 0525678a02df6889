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

from pymc_ngvi.core.types import BaseDraws, Density, Evaluation, GaussianState, Moments
from pymc_ngvi.estimators.draws import AtDraws
from pymc_ngvi.estimators.path import from_gradients


class Pathwise(AtDraws):
    """Draws are differentiated through the Cholesky factor; the target is not evaluated again."""

    def moments(
        self, target: Density, state: GaussianState, base: BaseDraws, evaluation: Evaluation, *, stl: bool = True
    ) -> Moments:
        """Estimate whitened gradient and curvature from gradients alone."""
        return from_gradients(state.outer, state, base, evaluation, stl=stl)
