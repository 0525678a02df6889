"""Dense matrices, (n_dim, n_dim)."""

import math

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import linalg
from pymc_ngvi.core.types import Array, MeanHessian
from pymc_ngvi.families.matrices import stacks
from pymc_ngvi.families.matrices.structure import SUFFIX_SUMS, Structure


@dataclass(frozen=True)
class Dense(Structure):
    """All matrices."""

    columns = slice(None)

    def n_lower(self, n_dim: int) -> int:
        """Return the number of entries of a factor."""
        return n_dim * (n_dim + 1) // 2

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak: about 56 matrices.

        The curvature of each of eight replicates, the noise of each, and up to twelve vectors of secant pairs.
        """
        return 56 * 8 * n_dim * n_dim

    def on_diagonal(self, matrix: Array) -> slice:
        """Return where the raveled array has the diagonal."""
        return slice(None, None, len(matrix) + 1)

    def from_diagonal(self, entries: Array) -> Array:
        """Return a diagonal matrix."""
        return np.diag(entries)

    def dense(self, curvature: Array) -> Array:
        """Return the matrix itself."""
        return curvature

    def flat(self, curvature: Array) -> Array:
        """Return a vector whose inner products are those of the matrices."""
        return curvature.reshape(-1)

    def unflat(self, vector: Array) -> Array:
        """Return the curvature of a vector: the inverse of `flat`."""
        return vector.reshape(math.isqrt(vector.size), -1)

    # --- factors and vectors ---

    def times(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the factor, or its transpose, times each vector."""
        return vectors @ (factor if transposed else factor.T)

    def solve(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the inverse of the factor, or of its transpose, times each vector, (n_dim,) or (n_vectors, n_dim)."""
        return linalg.solve_lower(factor, vectors.T, transpose=transposed).T

    # --- factors ---

    def product(self, left: Array, right: Array) -> Array:
        """Return the product of two factors."""
        return left @ right

    def left_quotient(self, left: Array, right: Array) -> Array:
        """Return the inverse of the first factor times the second one."""
        return linalg.solve_lower(left, right)

    def right_quotient(self, left: Array, right: Array) -> Array:
        """Return the first factor times the inverse of the second one."""
        return linalg.solve_lower(right, left.T, transpose=True).T

    def gram(self, factor: Array, *, transposed: bool = False) -> Array:
        """Return F F^T, or F^T F."""
        return factor.T @ factor if transposed else factor @ factor.T

    def sd(self, factor: Array, sign: int) -> Array:
        """Return the standard deviations for a factor of the covariance, or, for sign -1, of the precision."""
        root = factor if sign > 0 else linalg.solve_lower(factor, np.eye(len(factor))).T
        return np.sqrt(np.einsum("ij,ij->i", root, root))

    def covariances(self, factor: Array, sign: int, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
        """Return entries of F F^T, (n,), or, for sign -1, of its inverse."""
        if not len(rows):
            return np.empty(0)
        if rows is cols or np.array_equal(rows, cols):
            return self.sd(factor, sign)[rows] ** 2
        root = factor if sign > 0 else linalg.solve_lower(factor, np.eye(len(factor))).T
        return (root @ root.T)[rows, cols]

    def merged(self, factors: tuple[Array, Array], apart: Array, weight: float, sign: int) -> Array | None:
        """Return the factor for the first two moments of a mixture of two Gaussians: of the covariance only."""
        assert sign > 0
        factor = stacks.merged(factors[0][None], factors[1][None], apart[None, :, None], weight)
        return None if factor is None else factor[0]

    # --- curvatures ---

    def curvature(self, factor: Array, sign: int, hessian: MeanHessian) -> Array:
        """Return -C^T H C with the mean Hessian H and C = F, or, for sign -1, C = F^-T."""
        with np.errstate(invalid="ignore", over="ignore"):  # a Hessian that is not finite: the update will see
            if sign > 0:
                return linalg.symmetrise(-(hessian.products(np.ascontiguousarray(factor.T)) @ factor))
            half = linalg.solve_lower(factor, hessian.products(np.eye(len(factor))).T)
            return linalg.symmetrise(-linalg.solve_lower(factor, half.T))

    def squared(self, curvature: Array) -> Array:
        """Return A A."""
        return curvature @ curvature

    def cholesky(self, curvature: Array, *, reverse: bool) -> Array | None:
        """Return the factor L with A = L L^T, in reverse L^T L; None where A is not positive definite."""
        terms = linalg.relative_terms(np.diagonal(curvature))
        if not reverse:
            return linalg.cholesky(curvature, terms)
        upper = linalg.reverse_cholesky(curvature, terms)
        return None if upper is None else upper.T

    def cholesky_of_function(self, curvature: Array, function: Callable[[Array], Array]) -> Array | None:
        """Return L with f(A) = L^T L for a positive function of the eigenvalues; None as `stacks` says."""
        upper = stacks.reverse_cholesky_of_function(curvature[None], function)
        return None if upper is None else upper[0].T

    def half(self, curvature: Array) -> Array:
        """Return the lower triangle with a halved diagonal."""
        return linalg.half_triangle(curvature)

    def lower_solve(self, factor: Array, curvature: Array) -> Array:
        """Return the lower triangle of F^-T A."""
        return np.tril(linalg.solve_lower(factor, curvature, transpose=True))

    # --- outer products ---

    def outer(self, left: Array, right: Array) -> Array:
        """Return the mean of left_b right_b^T."""
        return left.T @ (right / len(left))

    def lower(self, outer: Array) -> Array:
        """Return the lower triangle."""
        return linalg.lower_triangle(outer)

    def mirrored(self, outer: Array) -> Array:
        """Return the symmetric matrix that has these in its lower triangle."""
        below = linalg.strict_triangle(outer)
        result: Array = below + below.T
        linalg.diagonal(result)[:] = np.diagonal(outer)
        return result

    def times_lower_half(self, factor: Array, left: Array, right: Array) -> Array:
        """Return the factor times a lower triangle with a halved diagonal: few outer products take O(n_dim^2)."""
        if len(factor) <= SUFFIX_SUMS * len(left):
            return super().times_lower_half(factor, left, right)
        (product,) = stacks.suffix_products(factor[None], left.T[None], right.T[None])
        return np.asarray(product)
