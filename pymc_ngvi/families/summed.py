r"""Gaussians whose precision is sparse but for a few sums over many coordinates, as of effects that sum to zero.

With :math:`t = A \theta` the precision is :math:`P + W A + A^T W^T`, P sparse. Hessians of log densities that are
sparse in theta and t together are of this form, and so are averages of them: natural steps never leave it. Everything
comes from the factor of P and from solutions by it, a few for each sum.
"""

from dataclasses import dataclass
from typing import Never, Self

import numpy as np

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.gaussian import Gaussian
from pymc_ngvi.families.matrices.sparse.summed import SummedStructure
from pymc_ngvi.families.matrices.sparse.sums import SummedCholesky


@stored("gaussian.summed")
@dataclass(frozen=True, eq=False)
class SummedState(Gaussian[SummedStructure]):
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

    def precision_scaled_by(self, matrix: Array, grad: Array) -> tuple[Self, Array] | None:
        """Return the state of a whitened precision M, and C M^-1 C^T C^-T times the gradient.

        None where M is not positive definite.
        """
        if not np.isfinite(matrix).all():
            return None
        structure, old = self.structure, self._cholesky
        precision = structure.unwhitened_sum(self.factor, matrix)
        factor = SummedCholesky.of(structure.fronts, structure.sums, precision, old.pinned.squares())
        if factor is None:
            return None
        new = type(self)(self.location, structure.numbers(factor), structure)
        return new, new.unwhiten(new.whiten(self.dewhiten(grad)))

    def divergence(self, other: Self) -> float:
        """Return KL(self || other), nats; inf beyond what numbers can hold."""
        with np.errstate(over="ignore", invalid="ignore"):
            apart = self.structure.squares(other.factor, -1, (self.location - other.location)[None])
            value = 0.5 * (self._cholesky.product_trace(other._cholesky.matrix) + float(apart[0]) - self.n_dim)
            value += other._log_det() - self._log_det()
        return value if np.isfinite(value) else np.inf

    def whitened_precision(self, other: Self) -> Array:
        """Return the precision of another state, whitened."""
        return self._cholesky.whitened(other._cholesky.matrix)

    def _log_det(self) -> float:
        return -self._cholesky.log_det()

    @property
    def _cholesky(self) -> SummedCholesky:
        return self.structure.summed(self.factor)

    def _refuse(self, *args: object, **kwargs: object) -> Never:
        raise NotImplementedError("a sparse precision with sums goes with natural steps by exact expectations only")

    merged = scaled_columns = times_lower_half = inverse_transpose_times = outer_mean = squared = _refuse
    curvature_diagonal = _refuse
