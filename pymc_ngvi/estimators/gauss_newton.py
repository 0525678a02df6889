r"""Gauss-Newton estimator: squares of per-observation gradients in place of the likelihood's Hessian [1]_.

With the diagonal family and the natural-parameter update this is variational online Gauss-Newton (VOGN):
:math:`-E_q[\mathrm{diag} \nabla^2 \log p]` is replaced by :math:`E_q[\sum_i (\nabla \log p(y_i | \theta))^2]` (the
sum of squares, not the square of the sum) plus the exact curvature of the prior. Never negative for the likelihood;
biased where the model is misspecified: the fixed point is not the best q, but near it for many observations.

References
----------
.. [1] M. E. Khan and D. Nielsen (2018). Fast yet simple natural-gradient descent for variational inference in
   complex models. ISITA. https://doi.org/10.23919/ISITA.2018.8664326
"""

from pymc_ngvi.core.types import Array, BaseDraws, Density, Evaluation, GaussianState, GaussNewtonTarget, Moments
from pymc_ngvi.estimators.draws import AtDraws
from pymc_ngvi.estimators.summary import by_replicate


class GaussNewton(AtDraws):
    """Gradients at the draws, and squares of the gradients of single observations there; for diagonal families."""

    uses_hessians = True

    def moments(
        self, target: Density, state: GaussianState, base: BaseDraws, evaluation: Evaluation, *, stl: bool = True
    ) -> Moments:
        """Estimate the whitened gradient, and the diagonal of the curvature.

        Raises
        ------
        ValueError
            If the target is no `GaussNewtonTarget`.
        """
        if not isinstance(target, GaussNewtonTarget):
            raise ValueError("gauss_newton squares the gradients of single observations: this target has none.")

        def curvatures(draws: list[Array]) -> list[Array]:
            # The diagonal of C^T G C for a diagonal C.
            return [state.whiten(state.whiten(target.mean_gauss_newton_diagonal(theta))) for theta in draws]

        return by_replicate(curvatures, state, base, evaluation, stl=stl)
