"""What Gaussians with a dense lower-triangular factor share, whether of the covariance or of the precision."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from pymc_ngvi.linalg import half_triangle, solve_lower
from pymc_ngvi.types import Array, Outer

LOG_2PI = float(np.log(2 * np.pi))
#: Dimensions for each outer product, beyond which adding them one by one is quicker than a matrix product.
_SUFFIX_SUMS = 40


@dataclass(frozen=True)
class LowerState:
    """A mean and a lower-triangular factor; a curvature is a symmetric (n_dim, n_dim) array.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_dim, n_dim)
        Lower triangular, positive diagonal.
    """

    location: Array
    factor: Array

    n_uniform = 0
    exact_metric = True

    @staticmethod
    def memory_bytes(n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak: about 56 dense matrices.

        The curvature of each of eight replicates, the noise of each, and up to twelve vectors of secant pairs.
        """
        return 56 * 8 * n_dim * n_dim

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return len(self.location)

    @property
    def n_params(self) -> int:
        """Numbers in the mean and in the lower triangle."""
        return self.n_dim + self.n_dim * (self.n_dim + 1) // 2

    @property
    def factor_values(self) -> Array:
        """The factor, (n_dim, n_dim)."""
        return self.factor

    def mean(self) -> Array:
        """Return a copy of the mean."""
        return self.location.copy()

    def curvature_error(self, curvature: Array) -> Array:
        """Return A - I."""
        return self.add_to_diagonal(curvature, -1.0)

    def curvature_diagonal(self, curvature: Array) -> Array:
        """Return the diagonal of A."""
        return np.diagonal(curvature)

    def add_to_diagonal(self, curvature: Array, value: float) -> Array:
        """Return A + value * I."""
        result = curvature.copy()
        result[np.diag_indices_from(result)] += value
        return result

    def squared(self, curvature: Array) -> Array:
        """Return A A."""
        result: Array = curvature @ curvature
        return result

    def outer_mean(self, outer: Outer) -> Array:
        """Return the symmetric matrix whose lower triangle is that of ``outer``."""
        product = outer.left.T @ outer.right / len(outer.left)
        lower = np.tril(product, -1)
        result: Array = lower + lower.T
        result[np.diag_indices_from(result)] = np.diagonal(product) + outer.diagonal
        return result

    def half_product(self, error: Array | Outer) -> Array:
        """Return the factor times the lower triangle of I - A with a halved diagonal.

        One outer product takes no more than O(n_dim^2): the sums over the columns from j on are suffix sums.
        """
        if not isinstance(error, Outer):
            return np.asarray(self.factor @ half_triangle(error))
        n_outer = len(error.left)
        if self.n_dim <= _SUFFIX_SUMS * n_outer:
            product: Array = self.factor @ half_triangle(error.left.T @ error.right)
            return product / n_outer + 0.5 * error.diagonal * self.factor
        total = 0.5 * error.diagonal * self.factor
        for left, right in zip(error.left, error.right, strict=True):
            terms = self.factor * left
            sums = np.cumsum(terms[:, ::-1], axis=1)[:, ::-1] - 0.5 * terms
            total += sums * (right / n_outer)
        # Above the diagonal there is nothing but what rounding leaves of sums of zeros: nothing.
        return total

    def inverse_product(self, error: Array | Outer) -> Array:
        """Return the lower triangle of the factor's inverse transpose times I - A."""
        if not isinstance(error, Outer):
            return np.tril(solve_lower(self.factor, error, transpose=True))
        left = solve_lower(self.factor, error.left.T, transpose=True)
        result = np.tril(left @ error.right) / len(error.left)
        result[np.diag_indices_from(result)] += error.diagonal / np.diag(self.factor)
        return result

    def scaled_columns(self, scale: Array) -> Array:
        """Return the factor with each column multiplied."""
        result: Array = self.factor * scale
        return result

    def plus(self, location_step: Array, factor_step: Array, *, signed: bool = False) -> Self | None:
        """Add to mean and factor; None where a diagonal entry of it would not stay positive (if signed: not 0)."""
        location, factor = self.location + location_step, self.factor + factor_step
        diagonal = np.diagonal(factor)
        if not (np.abs(diagonal) if signed else diagonal > 0.0).all():
            return None
        if not (np.isfinite(factor).all() and np.isfinite(location).all()):
            return None
        return replace(self, location=location, factor=factor)

    def unsigned(self) -> Self:
        """Return the same Gaussian with a factor of positive diagonal."""
        diagonal = np.diagonal(self.factor)
        return self if (diagonal > 0.0).all() else replace(self, factor=self.factor * np.sign(diagonal))

    def _log_det(self) -> float:
        """Return the log determinant of the factor."""
        return float(np.sum(np.log(np.abs(np.diagonal(self.factor)))))
