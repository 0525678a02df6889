r"""Gaussians whose precision is sparse but for a few sums over many coordinates, as of effects that sum to zero.

With :math:`t = A \theta` the precision is :math:`P + W A + A^T W^T`, P sparse. Hessians of log densities that are
sparse in theta and t together are of this form, and so are averages of them: natural steps never leave it. Everything
comes from the factor of P and from solutions by it, a few for each sum.
"""

from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.filled import OfSparsePrecision
from pymc_ngvi.families.matrices.sparse.summed import SummedStructure
from pymc_ngvi.families.matrices.sparse.sums import SummedCholesky


@stored("gaussian.summed")
@dataclass(frozen=True, eq=False)
class SummedState(OfSparsePrecision[SummedStructure]):
    """N(mean, (F F^T)^-1); the whitener is F^-T. It takes natural steps from exact expectations only.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray
        F, held as ``structure`` says.
    structure : SummedStructure
    """

    form = SummedStructure
    factor_sign = -1
    factor_name = "precision_cholesky_sums"
    exact_metric = True

    def add_to_diagonal(self, curvature: Array, value: float) -> Array:
        """Return A + value * I."""
        return curvature + value * self._cholesky.unit

    def inner(self, first: Array, second: Array) -> float:
        """Return the inner product of two curvatures, or of two natural gradients."""
        n = len(first) - len(self._cholesky.unit)
        with np.errstate(invalid="ignore", over="ignore"):
            return float(first[:n] @ second[:n]) + self._cholesky.inner(first[n:], second[n:])

    def _scaled(self, matrix: Array) -> Array | None:
        structure = self.structure
        precision = structure.unwhitened_sum(self.factor, matrix)
        factor = SummedCholesky.of(structure.fronts, structure.sums, precision, self._cholesky.pinned.squares())
        return None if factor is None else structure.numbers(factor)

    def _log_det(self) -> float:
        return -self._cholesky.log_det()

    @property
    def _cholesky(self) -> SummedCholesky:
        return self.structure.summed(self.factor)

    curvature_diagonal = OfSparsePrecision._refuse
