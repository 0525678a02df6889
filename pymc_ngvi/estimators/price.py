r"""Price's estimator: exact Hessians of log p at the draws [1]_.

E_q[grad log p] and E_q[hess log p] by their means over draws (the theorems of Bonnet and of Price turn them into
gradients with respect to the mean and half the covariance). No Monte Carlo error at all in the curvature of a quadratic
log p; none in its gradient with antithetic draws.

References
----------
.. [1] M. Opper and C. Archambeau (2009). The variational Gaussian approximation revisited. Neural Computation 21(3).
   https://doi.org/10.1162/neco.2008.08-07-592
"""

from pymc_ngvi.core.types import Array, BaseDraws, Density, Evaluation, GaussianState, Moments, mean_hessians
from pymc_ngvi.estimators.draws import AtDraws
from pymc_ngvi.estimators.summary import by_replicate


class Price(AtDraws):
    """Gradients at the draws, and Hessians in the form that the family stores."""

    uses_hessians = True

    def moments(
        self, target: Density, state: GaussianState, base: BaseDraws, evaluation: Evaluation, *, stl: bool = True
    ) -> Moments:
        """Estimate whitened gradient and curvature with the mean Hessian at the draws.

        Antithetic draws make no difference between the two values of ``stl``, but where a draw was left out.
        """

        def curvatures(draws: list[Array]) -> list[Array]:
            return [hessian.whitened(state) for hessian in mean_hessians(target, draws)]

        return by_replicate(curvatures, state, base, evaluation, stl=stl)
