r"""Gauss-Newton estimator: squares of per-observation gradients in place of the likelihood's Hessian [1]_.

With the natural-parameter update this is variational online Gauss-Newton (VON, and VOGN for a diagonal):
:math:`-E_q[\nabla^2 \log p]` is replaced by :math:`E_q[\sum_i g_i g_i^T]`, with :math:`g_i = \nabla \log p(y_i |
\theta)`, plus the exact curvature of the prior. For a diagonal these are sums of squares, not the square of the sum.
Never negative for the likelihood; biased where the model is misspecified: the fixed point is not the best q, but near
it for many observations.

References
----------
.. [1] M. E. Khan and D. Nielsen (2018). Fast yet simple natural-gradient descent for variational inference in
   complex models. ISITA. https://doi.org/10.23919/ISITA.2018.8664326
"""

from pymc_ngvi.core.types import Array, BaseDraws, Density, Evaluation, GaussianState, GaussNewtonTarget, Moments
from pymc_ngvi.estimators.draws import AtDraws
from pymc_ngvi.estimators.summary import by_replicate


class GaussNewton(AtDraws):
    """Gradients at the draws, and products of the gradients of single observations there."""

    uses_hessians = True

    def moments(
        self, target: Density, state: GaussianState, base: BaseDraws, evaluation: Evaluation, *, stl: bool = True
    ) -> Moments:
        """Estimate whitened gradient and curvature.

        Raises
        ------
        ValueError
            If the target is no `GaussNewtonTarget`.
        """
        if not isinstance(target, GaussNewtonTarget):
            raise ValueError("gauss_newton takes the gradients of single observations: this target has none.")

        def curvatures(draws: list[Array]) -> list[Array]:
            return [target.gauss_newton(theta).whitened(state) for theta in draws]

        return by_replicate(curvatures, state, base, evaluation, stl=stl)
