r"""Gaussians whose precision has a sparse pattern of any shape: chains, maps, crossed effects.

q holds the Cholesky factor T of the precision S, with what elimination fills in. On matrices of that pattern the Fisher
metric, :math:`\mathrm{tr}(V E V E)` with V the covariance, is a sum of squares of as many numbers as T has [1]_. Those
of minus the Hessian are the whitened curvature: it is the identity where that is S.

References
----------
.. [1] M. S. Andersen, J. Dahl and L. Vandenberghe (2013). Logarithmic barriers for sparse matrix cones. Optimization
   Methods and Software 28(3). https://doi.org/10.1080/10556788.2012.684353
"""

from dataclasses import dataclass
from typing import Any, Never, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.gaussian import Gaussian
from pymc_ngvi.families.matrices.sparse.cholesky import SparseCholesky
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure


class OfSparsePrecision[S: FilledStructure](Gaussian[S]):
    """A Gaussian whose steps multiply its sparse precision, of which a factor is found anew."""

    @property
    def _cholesky(self) -> Any:
        """The factor of the precision."""
        raise NotImplementedError

    def _scaled(self, matrix: Array) -> Array | None:
        """Return the factor of a whitened precision M, in numbers; None where M is not positive definite."""
        raise NotImplementedError

    def precision_scaled_by(self, matrix: Array, grad: Array) -> tuple[Self, Array] | None:
        """Return the state of a whitened precision M, and C M^-1 C^T C^-T times the gradient.

        None where M is not positive definite.
        """
        factor = self._scaled(matrix) if np.isfinite(matrix).all() else None
        if factor is None:
            return None
        new = type(self)(self.location, factor, self.structure)
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

    def _refuse(self, *args: object, **kwargs: object) -> Never:
        self.structure.refuse()

    merged = scaled_columns = times_lower_half = inverse_transpose_times = outer_mean = squared = _refuse


@stored("gaussian.filled")
@dataclass(frozen=True, eq=False)
class FilledState(OfSparsePrecision[FilledStructure]):
    """N(mean, (T T^T)^-1) with a sparse lower-triangular T in an order of elimination; the whitener is T^-T.

    It takes natural steps from Hessians only.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray
        T, with a positive diagonal, held as ``structure`` says.
    structure : FilledStructure
    """

    form = FilledStructure
    factor_sign = -1
    factor_name = "precision_cholesky_panels"
    exact_metric = True

    @property
    def globals_(self) -> NDArray[np.intp]:
        """Coordinates that touch a large part of the others."""
        return self.structure.globals_

    def without_globals(self, grad: Array, curvature: Array) -> tuple[Array, Array]:
        """Return whitened gradient and curvature of a step that leaves global coordinates alone, to first order."""
        grad, curvature = grad.copy(), np.where(self.structure.of_globals, 0.0, curvature)
        grad[self.globals_] = 0.0
        curvature[self.structure.fronts.diagonal[self.globals_]] = 1.0
        return grad, curvature

    def _scaled(self, matrix: Array) -> Array | None:
        unwhitened = self.structure.unwhitened(self.factor, matrix)
        factor = SparseCholesky.of(self.structure.fronts, unwhitened, self._cholesky.squares())
        return None if factor is None else self.structure.remember(factor).panels

    @property
    def _cholesky(self) -> SparseCholesky:
        return self.structure.factor(self.factor)
