r"""Stein's estimator: the Hessian from gradients alone, symmetrised [1]_.

By Stein's identity :math:`E_q[\nabla^2 \log p] = E_q[\Sigma^{-1} (\theta - \mu) \nabla \log p^T]`, whitened
:math:`I - A = E[\mathrm{sym}(w z^T)]` with :math:`w = C^T \nabla(\log p - \log q)`. Unbiased with and without
symmetrising, which halves the variance of off-diagonal entries and keeps the precision symmetric.

References
----------
.. [1] W. Lin, M. E. Khan and M. Schmidt (2019). Stein's lemma for the reparameterization trick with exponential family
   mixtures. https://doi.org/10.48550/arXiv.1910.13398
"""

import numpy as np

from pymc_ngvi.core.types import Array, BaseDraws, Density, Evaluation, GaussianState, Moments, Outer
from pymc_ngvi.estimators.draws import AtDraws
from pymc_ngvi.estimators.path import from_gradients


class Stein(AtDraws):
    """Products of gradients and base draws, symmetrised; the target is not evaluated again."""

    def moments(
        self, target: Density, state: GaussianState, base: BaseDraws, evaluation: Evaluation, *, stl: bool = True
    ) -> Moments:
        """Estimate whitened gradient and curvature from gradients alone."""
        return from_gradients(_symmetric, state, base, evaluation, stl=stl)


def _symmetric(whitened: Array, z: Array) -> Outer:
    return Outer(np.concatenate([whitened, z]), np.concatenate([z, whitened]), 0.0)
