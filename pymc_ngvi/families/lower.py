"""What Gaussians with a dense lower-triangular factor share, whether of the covariance or of the precision."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from pymc_ngvi.core.linalg import all_finite, diagonal, half_triangle, keeps_its_sign, solve_lower, strict_triangle
from pymc_ngvi.core.types import Array, Outer
from pymc_ngvi.families.gaussian import Gaussian

LOG_2PI = float(np.log(2 * np.pi))
#: Of a Gaussian in place of two.
SINGULAR = "The covariance of the two together is nearly singular."
#: Dimensions for each outer product, beyond which adding them one by one is quicker than a matrix product.
SUFFIX_SUMS = 40


@dataclass(frozen=True)
class LowerState(Gaussian):
    """A mean and a lower-triangular factor; a curvature is a symmetric (n_dim, n_dim) array.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_dim, n_dim)
        Lower triangular, positive diagonal.
    """

    factor: Array

    globals_ = None
    exact_metric = True

    @staticmethod
    def memory_bytes(n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak: about 56 dense matrices.

        The curvature of each of eight replicates, the noise of each, and up to twelve vectors of secant pairs.
        """
        return 56 * 8 * n_dim * n_dim

    @property
    def n_params(self) -> int:
        """Numbers in the mean and in the lower triangle."""
        return self.n_dim + self.n_dim * (self.n_dim + 1) // 2

    @property
    def factor_values(self) -> Array:
        """The factor, (n_dim, n_dim)."""
        return self.factor

    def curvature_diagonal(self, curvature: Array) -> Array:
        """Return the diagonal of A."""
        return np.diagonal(curvature)

    def add_to_diagonal(self, curvature: Array, value: float) -> Array:
        """Return A + value * I."""
        result = curvature.copy()
        diagonal(result)[:] += value
        return result

    def flat(self, curvature: Array) -> Array:
        """Return a vector whose inner products are those of the matrices."""
        return curvature.ravel()

    def unflat(self, vector: Array) -> Array:
        """Return the curvature of a vector: the inverse of `flat`."""
        return vector.reshape(self.n_dim, self.n_dim)

    def squared(self, curvature: Array) -> Array:
        """Return A A."""
        result: Array = curvature @ curvature
        return result

    def outer_mean(self, outer: Outer) -> Array:
        """Return the symmetric matrix whose lower triangle is that of ``outer``."""
        product = outer.left.T @ (outer.right / len(outer.left))
        lower = strict_triangle(product)
        result: Array = lower + lower.T
        diagonal(result)[:] = np.diagonal(product) + outer.diagonal
        return result

    def half_product(self, error: Array | Outer) -> Array:
        """Return the factor times the lower triangle of I - A with a halved diagonal.

        One outer product takes no more than O(n_dim^2): the sums over the columns from j on are suffix sums.
        """
        if not isinstance(error, Outer):
            return np.asarray(self.factor @ half_triangle(error))
        n_outer = len(error.left)
        right = error.right / n_outer
        if self.n_dim <= SUFFIX_SUMS * n_outer:
            product = self.factor @ half_triangle(error.left.T @ right)
        else:
            product = self._suffix_products(error.left[0], right[0])
            for left, r in zip(error.left[1:], right[1:], strict=True):
                product += self._suffix_products(left, r)
        return product + 0.5 * error.diagonal * self.factor if error.diagonal else product

    def _suffix_products(self, left: Array, right: Array) -> Array:
        """Return the factor times the lower triangle of left right^T with a halved diagonal.

        Sums of zeros leave zeros above the diagonal.
        """
        terms = self.factor * left
        sums = np.empty_like(terms)
        np.cumsum(terms[:, ::-1], axis=1, out=sums[:, ::-1])
        terms *= 0.5
        sums -= terms
        sums *= right
        return sums

    def inverse_product(self, error: Array | Outer) -> Array:
        """Return the lower triangle of the factor's inverse transpose times I - A."""
        if not isinstance(error, Outer):
            return np.tril(solve_lower(self.factor, error, transpose=True))
        left = solve_lower(self.factor, error.left.T, transpose=True)
        result = strict_triangle(left @ (error.right / len(error.left)))
        within = np.einsum("ib,bi->i", left, error.right) / len(error.left)
        diagonal(result)[:] = within + error.diagonal / np.diagonal(self.factor)
        return result

    def scaled_columns(self, scale: Array) -> Array:
        """Return the factor with each column multiplied."""
        result: Array = self.factor * scale
        return result

    def plus(self, location_step: Array, factor_step: Array, *, signed: bool = False) -> Self | None:
        """Add to mean and factor; None where a diagonal entry of it would not stay positive (if signed: not 0)."""
        location, factor = self.location + location_step, self.factor + factor_step
        valid = keeps_its_sign(np.diagonal(self.factor), np.diagonal(factor_step), signed=signed)
        valid = valid and all_finite(location, factor)
        return type(self)(location, factor) if valid else None

    def unsigned(self) -> Self:
        """Return the same Gaussian with a factor of positive diagonal."""
        entries = np.diagonal(self.factor)
        return self if (entries > 0.0).all() else type(self)(self.location, self.factor * np.sign(entries))

    def _log_det(self) -> float:
        """Return the log determinant of the factor."""
        return float(np.sum(np.log(np.abs(np.diagonal(self.factor)))))
