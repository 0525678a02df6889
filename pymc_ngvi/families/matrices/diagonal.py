"""Diagonal matrices, each held as its diagonal, (n_dim,)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import ROUNDING, relative_terms
from pymc_ngvi.core.types import Array, MeanHessian
from pymc_ngvi.families.matrices.structure import Structure


@dataclass(frozen=True)
class Diagonal(Structure):
    """Diagonal matrices: every operation is that on numbers, coordinate by coordinate."""

    columns = slice(None)

    def n_lower(self, n_dim: int) -> int:
        """Return the number of entries of a factor."""
        return n_dim

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak."""
        return 64 * 8 * n_dim

    def on_diagonal(self, matrix: Array) -> slice:
        """Return where the array has the diagonal: everywhere."""
        return slice(None)

    def from_diagonal(self, entries: Array) -> Array:
        """Return the diagonal."""
        return entries

    def dense(self, curvature: Array) -> Array:
        """Return the matrix as (n_dim, n_dim)."""
        return np.diag(curvature)

    def times(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the matrix times each vector."""
        return vectors * factor

    def solve(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the inverse times each vector."""
        return vectors / factor

    def product(self, left: Array, right: Array) -> Array:
        """Return the product."""
        return left * right

    def left_quotient(self, left: Array, right: Array) -> Array:
        """Return the inverse of the first one times the second one."""
        return right / left

    def right_quotient(self, left: Array, right: Array) -> Array:
        """Return the first one times the inverse of the second one."""
        return left / right

    def gram(self, factor: Array, *, transposed: bool = False) -> Array:
        """Return the square."""
        return factor**2

    def sd(self, factor: Array, sign: int) -> Array:
        """Return the sizes of the entries, or, for sign -1, their inverses."""
        return np.abs(factor) ** sign

    def covariances(self, factor: Array, sign: int, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
        """Return entries of the square, or, for sign -1, of its inverse, (n,)."""
        return np.where(rows == cols, factor[rows] ** (2 * sign), 0.0)

    def merged(self, factors: tuple[Array, Array], apart: Array, weight: float, sign: int) -> Array:
        """Return the factor for the first two moments of a mixture of two Gaussians, coordinate by coordinate."""
        first, second = (factor ** (2 * sign) for factor in factors)
        variance = (1.0 - weight) * first + weight * second + weight * (1.0 - weight) * apart**2
        return np.sqrt(variance) ** sign

    def curvature(self, factor: Array, sign: int, hessian: MeanHessian) -> Array:
        """Return the diagonal of -C^T H C."""
        return -hessian.diagonal() * factor ** (2 * sign)

    def squared(self, curvature: Array) -> Array:
        """Return the square."""
        return curvature * curvature

    def cholesky(self, curvature: Array, *, reverse: bool) -> Array | None:
        """Return the square root; None where an entry is not positive, and more than what rounding leaves."""
        if not np.isfinite(curvature).all() or np.any(curvature <= ROUNDING * relative_terms(curvature)):
            return None
        return np.sqrt(curvature)

    def cholesky_of_function(self, curvature: Array, function: Callable[[Array], Array]) -> Array | None:
        """Return the square root of a positive function; None where that is not finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self.cholesky(function(curvature), reverse=True)

    def half(self, curvature: Array) -> Array:
        """Return half of the diagonal."""
        return 0.5 * curvature

    def lower_solve(self, factor: Array, curvature: Array) -> Array:
        """Return the inverse of the factor times the curvature."""
        return curvature / factor

    def outer(self, left: Array, right: Array) -> Array:
        """Return the diagonal of the mean of left_b right_b^T."""
        return np.einsum("bi,bi->i", left, right) / len(left)

    def lower(self, outer: Array) -> Array:
        """Return the diagonal."""
        return outer

    def mirrored(self, outer: Array) -> Array:
        """Return the diagonal."""
        return outer
