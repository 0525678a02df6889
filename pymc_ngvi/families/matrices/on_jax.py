"""Dense and diagonal factors of covariances, with the arithmetic of JAX: what a step that is jitted takes of them.

The same as `Dense` and `Diagonal`, thing by thing; see there. It is imported only where JAX is asked for.
"""

from typing import Any, Protocol

import jax.numpy as jnp

from jax.scipy.linalg import solve_triangular

from pymc_ngvi.core.types import Array
from pymc_ngvi.families.diagonal import DiagonalState
from pymc_ngvi.families.full import FullState

#: What JAX computes with: an array, or one that it will have.
type Traced = Any

#: Least singular value of a factor, relative to its terms, that is left to JAX: below it, NumPy decides.
_LEAST_PIVOT = 1e-6


class Form(Protocol):
    """How a factor C of a covariance, and curvatures, are held."""

    def spread(self, factor: Traced, rows: Traced) -> Traced:
        """Return X C for rows of X, (n, n_dim)."""

    def quadratic(self, left: Traced, weights: Traced, right: Traced) -> Traced:
        """Return X^T diag(weights) Y, or its diagonal."""

    def outer(self, left: Traced, right: Traced) -> Traced:
        """Return x y^T, or its diagonal."""

    def transposed(self, matrix: Traced) -> Traced:
        """Return the transpose."""

    def zeros(self, n_dim: int) -> Traced:
        """Return a matrix of zeros."""

    def whiten(self, factor: Traced, grad: Traced) -> Traced:
        """Return C^T times a gradient."""

    def curvature(self, factor: Traced, hessian: Traced) -> Traced:
        """Return -C^T H C."""

    def plus_diagonal(self, matrix: Traced, value: Traced) -> Traced:
        """Return A + value * I."""

    def flat(self, matrix: Traced) -> Traced:
        """Return a vector whose inner products are those of the matrices."""

    def unflat(self, vector: Traced) -> Traced:
        """Return the matrix of a vector: the inverse of `flat`."""

    def log_det(self, factor: Traced) -> Traced:
        """Return the log determinant of C."""

    def scaled(self, factor: Traced, matrix: Traced, grad: Traced) -> tuple[Traced, Traced, Traced]:
        """Return the factor of C M^-1 C^T, C M^-1 grad, and whether M is safely positive definite."""


class DenseOnJax:
    """Factors, and curvatures, (n_dim, n_dim)."""

    def spread(self, factor: Traced, rows: Traced) -> Traced:
        """Return X C for rows of X, (n, n_dim)."""
        return rows @ factor

    def quadratic(self, left: Traced, weights: Traced, right: Traced) -> Traced:
        """Return X^T diag(weights) Y."""
        return left.T @ (weights[:, None] * right)

    def outer(self, left: Traced, right: Traced) -> Traced:
        """Return x y^T."""
        return jnp.outer(left, right)

    def transposed(self, matrix: Traced) -> Traced:
        """Return the transpose."""
        return matrix.T

    def zeros(self, n_dim: int) -> Traced:
        """Return a matrix of zeros."""
        return jnp.zeros((n_dim, n_dim))

    def whiten(self, factor: Traced, grad: Traced) -> Traced:
        """Return C^T times a gradient."""
        return grad @ factor

    def curvature(self, factor: Traced, hessian: Traced) -> Traced:
        """Return -C^T H C."""
        product = factor.T @ hessian @ factor
        return -0.5 * (product + product.T)

    def plus_diagonal(self, matrix: Traced, value: Traced) -> Traced:
        """Return A + value * I."""
        return matrix + value * jnp.eye(len(matrix))

    def flat(self, matrix: Traced) -> Traced:
        """Return a vector whose inner products are those of the matrices."""
        return matrix.reshape(-1)

    def unflat(self, vector: Traced) -> Traced:
        """Return the matrix of a vector: the inverse of `flat`."""
        n_dim = round(vector.size**0.5)
        return vector.reshape(n_dim, n_dim)

    def log_det(self, factor: Traced) -> Traced:
        """Return the log determinant of C."""
        return jnp.sum(jnp.log(jnp.diagonal(factor)))

    def scaled(self, factor: Traced, matrix: Traced, grad: Traced) -> tuple[Traced, Traced, Traced]:
        """Return the factor of C M^-1 C^T, C M^-1 grad, and whether M is safely positive definite."""
        root = jnp.linalg.cholesky(matrix[::-1, ::-1], symmetrize_input=False)[::-1, ::-1].T  # M = L^T L
        new = solve_triangular(root, factor.T, trans=1, lower=True).T
        step = new @ solve_triangular(root, grad, trans=1, lower=True)
        terms = jnp.maximum(1.0, jnp.abs(jnp.diagonal(matrix) - 1.0))
        of_terms = root / jnp.sqrt(terms)
        inverse = solve_triangular(of_terms, jnp.eye(len(grad)), lower=True)
        norm, of_inverse = (jnp.abs(m).sum(axis=0).max() for m in (of_terms, inverse))
        safe = jnp.minimum(norm, 1.0) > _LEAST_PIVOT * norm * of_inverse
        return new, step, safe & (jnp.diagonal(new) > 0.0).all() & jnp.isfinite(new).all()


class DiagonalOnJax:
    """Standard deviations, and diagonals of curvatures, (n_dim,)."""

    def spread(self, factor: Traced, rows: Traced) -> Traced:
        """Return X C for rows of X, (n, n_dim)."""
        return rows * factor

    def quadratic(self, left: Traced, weights: Traced, right: Traced) -> Traced:
        """Return the diagonal of X^T diag(weights) Y."""
        return weights @ (left * right)

    def outer(self, left: Traced, right: Traced) -> Traced:
        """Return the diagonal of x y^T."""
        return left * right

    def transposed(self, matrix: Traced) -> Traced:
        """Return the diagonal itself."""
        return matrix

    def zeros(self, n_dim: int) -> Traced:
        """Return a diagonal of zeros."""
        return jnp.zeros(n_dim)

    def whiten(self, factor: Traced, grad: Traced) -> Traced:
        """Return C^T times a gradient."""
        return grad * factor

    def curvature(self, factor: Traced, hessian: Traced) -> Traced:
        """Return -C^T H C."""
        return -hessian * factor**2

    def plus_diagonal(self, matrix: Traced, value: Traced) -> Traced:
        """Return A + value * I."""
        return matrix + value

    def flat(self, matrix: Traced) -> Traced:
        """Return the diagonal."""
        return matrix

    def unflat(self, vector: Traced) -> Traced:
        """Return the diagonal."""
        return vector

    def log_det(self, factor: Traced) -> Traced:
        """Return the log determinant of C."""
        return jnp.sum(jnp.log(factor))

    def scaled(self, factor: Traced, matrix: Traced, grad: Traced) -> tuple[Traced, Traced, Traced]:
        """Return the factor of C M^-1 C^T, C M^-1 grad, and whether M is safely positive definite."""
        terms = jnp.maximum(1.0, jnp.abs(matrix - 1.0))
        root = jnp.sqrt(matrix)
        new = factor / root
        safe = (matrix > _LEAST_PIVOT**2 * terms).all() & (new > 0.0).all() & jnp.isfinite(new).all()
        return new, new * (grad / root), safe


#: One of each, so that what they are part of is compiled once.
DENSE, DIAGONAL = DenseOnJax(), DiagonalOnJax()


def form_of(q: object) -> Form | None:
    """Return how a Gaussian holds the factor of its covariance; None for others."""
    if isinstance(q, FullState):
        return DENSE
    return DIAGONAL if isinstance(q, DiagonalState) else None


def factor_of(q: object) -> Array:
    """Return that factor."""
    assert isinstance(q, FullState | DiagonalState)
    return q.factor
