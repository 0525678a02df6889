"""What a structure of matrices can do: the operations that all Gaussians are written with."""

from collections.abc import Callable
from typing import Any, Protocol, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array, MeanHessian
from pymc_ngvi.core.values import AnyArray

LOG_2PI = float(np.log(2 * np.pi))
#: Columns for each outer product, beyond which adding these one by one is quicker than a matrix product.
SUFFIX_SUMS = 40


class Structure(Protocol):
    """Matrices with zeros in the same places, each held as one array.

    A *factor* is lower triangular with a diagonal that is not 0, maybe in another order of the coordinates; with the
    others of its structure it is closed under products and inverses. A *curvature* is symmetric, and can differ from 0
    where a factor or its transpose can. Vectors are rows: (..., n_dim).
    """

    #: Of each entry: the coordinate of its column, as an index into (n_dim,) that broadcasts.
    columns: Any

    # --- form ---

    def n_lower(self, n_dim: int) -> int:
        """Return the number of entries of a factor."""

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak."""

    def on_diagonal(self, matrix: Array) -> Any:
        """Return where the raveled array has the diagonal, in the order of the coordinates."""

    def from_diagonal(self, entries: Array) -> Array:
        """Return a diagonal matrix."""

    def dense(self, curvature: Array) -> Array:
        """Return a symmetric matrix as (n_dim, n_dim)."""

    def flat(self, curvature: Array) -> Array:
        """Return a vector whose inner products are those of the matrices."""
        return curvature

    def unflat(self, vector: Array) -> Array:
        """Return the curvature of a vector: the inverse of `flat`."""
        return vector

    def arrays(self) -> dict[str, AnyArray]:
        """Return what files keep of the structure beside its matrices, by name."""
        return {}

    @classmethod
    def of_arrays(cls, arrays: dict[str, AnyArray]) -> Self:
        """Return the structure of these arrays, which may have others among them."""
        return cls()

    # --- factors and vectors ---

    def times(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the factor, or its transpose, times each vector."""

    def solve(self, factor: Array, vectors: Array, *, transposed: bool = False) -> Array:
        """Return the inverse of the factor, or of its transpose, times each vector."""

    def squares(self, factor: Array, sign: int, vectors: Array) -> Array:
        """Return v^T P v for the precision P of each vector, where the factor is of the covariance, or of P."""
        half = self.solve(factor, vectors) if sign > 0 else self.times(factor, vectors, transposed=True)
        return np.sum(half * half, axis=-1)

    # --- factors ---

    def product(self, left: Array, right: Array) -> Array:
        """Return the product of two factors."""

    def left_quotient(self, left: Array, right: Array) -> Array:
        """Return the inverse of the first factor times the second one."""

    def right_quotient(self, left: Array, right: Array) -> Array:
        """Return the first factor times the inverse of the second one."""

    def gram(self, factor: Array, *, transposed: bool = False) -> Array:
        """Return F F^T, or F^T F."""

    def sd(self, factor: Array, sign: int) -> Array:
        """Return the standard deviations for a factor of the covariance, or, for sign -1, of the precision."""

    def covariances(self, factor: Array, sign: int, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
        """Return entries of F F^T, (n,), or, for sign -1, of its inverse."""

    def merged(self, factors: tuple[Array, Array], apart: Array, weight: float, sign: int) -> Array | None:
        """Return the factor for the first two moments, as far as these are held, of a mixture of two Gaussians.

        Parameters
        ----------
        factors : tuple of ndarray
            Of both covariances, or, for sign -1, precisions.
        apart : ndarray, shape (n_dim,)
            The second mean minus the first one.
        weight : float
            Of the second one.
        sign : {1, -1}

        Returns
        -------
        ndarray or None
            None where that covariance is singular to rounding.
        """

    # --- curvatures ---

    def curvature(self, factor: Array, sign: int, hessian: MeanHessian) -> Array:
        """Return -C^T H C with the mean Hessian H and C = F, or, for sign -1, C = F^-T."""

    def squared(self, curvature: Array) -> Array:
        """Return A A; not every structure is closed under it."""
        raise NotImplementedError

    def cholesky(self, curvature: Array, *, reverse: bool) -> Array | None:
        """Return the factor L with A = L L^T, in reverse L^T L; None where A is not positive definite.

        Its diagonal counts as sums with 1, as those of relative precisions are: see `linalg.relative_terms`.
        """

    def cholesky_of_function(self, curvature: Array, function: Callable[[Array], Array]) -> Array | None:
        """Return L with f(A) = L^T L for a positive function of the eigenvalues; None where there is none."""
        return None

    def half(self, curvature: Array) -> Array:
        """Return the lower triangle with a halved diagonal."""

    def lower_solve(self, factor: Array, curvature: Array) -> Array:
        """Return the entries that a factor has of F^-T A."""

    # --- outer products, (n_outer, n_dim) on each side ---

    def outer(self, left: Array, right: Array) -> Array:
        """Return the mean of left_b right_b^T, in the form of a curvature that is not symmetric."""

    def lower(self, outer: Array) -> Array:
        """Return the entries of a factor."""

    def mirrored(self, outer: Array) -> Array:
        """Return the curvature that has these in its lower triangle."""

    def times_lower_half(self, factor: Array, left: Array, right: Array) -> Array:
        """Return the factor times the lower triangle of the mean of left_b right_b^T with a halved diagonal."""
        return self.product(factor, self.half(self.outer(left, right)))
