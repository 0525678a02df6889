"""Linear algebra on stacks of square matrices of one size: a few batched calls whatever the number of matrices.

A stack is (n_blocks, k, k), its right-hand sides (n_blocks, k, n_columns). Loops go over the halvings of k, never over
the matrices. A single matrix is handed to LAPACK as it is.
"""

import numpy as np

from pymc_ngvi import linalg
from pymc_ngvi.types import Array


def transposed(stack: Array) -> Array:
    """Return the transpose of each matrix, as a view."""
    return stack.swapaxes(1, 2)


def flipped(stack: Array) -> Array:
    """Return each matrix with rows and columns in reverse: lower triangles become upper ones."""
    return np.ascontiguousarray(stack[:, ::-1, ::-1])


def diagonal(stack: Array) -> Array:
    """Return the diagonal of each matrix, (n_blocks, k), as a view."""
    return np.diagonal(stack, axis1=1, axis2=2)


def symmetrise(stack: Array) -> Array:
    """Return the symmetric part of each matrix."""
    symmetric: Array = 0.5 * (stack + transposed(stack))
    return symmetric


def mirrored(stack: Array) -> Array:
    """Return the symmetric matrices with the lower triangles of a stack."""
    result: Array = np.tril(stack) + transposed(np.tril(stack, -1))
    return result


def half_triangle(stack: Array) -> Array:
    """Return each lower triangle with its diagonal halved."""
    result: Array = 0.5 * (np.tril(stack) + np.tril(stack, -1))
    return result


def solve_lower(factors: Array, rhs: Array) -> Array:
    """Solve ``factor x = rhs`` for a stack of lower-triangular factors, by halves."""
    n_blocks, size = factors.shape[:2]
    if size == 1:
        result: Array = rhs / factors
        return result
    if n_blocks == 1:
        return linalg.solve_lower(factors[0], rhs[0])[None]
    half = size // 2
    top = solve_lower(factors[:, :half, :half], rhs[:, :half])
    bottom = solve_lower(factors[:, half:, half:], rhs[:, half:] - factors[:, half:, :half] @ top)
    return np.concatenate([top, bottom], axis=1)


def solve_upper(factors: Array, rhs: Array) -> Array:
    """Solve ``factor x = rhs`` for a stack of upper-triangular factors."""
    if len(factors) == 1:
        return linalg.solve_upper(factors[0], rhs[0])[None]
    return solve_lower(flipped(factors), np.ascontiguousarray(rhs[:, ::-1]))[:, ::-1]


def cholesky(stack: Array) -> Array | None:
    """Return the lower Cholesky factors, or None where any matrix is not (numerically) positive definite.

    Parameters
    ----------
    stack : ndarray, shape (n_blocks, k, k)
        Symmetric.

    Returns
    -------
    ndarray, shape (n_blocks, k, k), or None
    """
    if len(stack) == 1:
        factor = linalg.cholesky(stack[0])
        return None if factor is None else factor[None]
    if not np.isfinite(stack).all():
        return None
    try:
        factors: Array = np.linalg.cholesky(stack)
    except np.linalg.LinAlgError:
        return None
    return factors if _well_conditioned(factors / np.sqrt(diagonal(stack))[:, :, None]) else None


def reverse_cholesky(stack: Array) -> Array | None:
    """Return the upper U with ``matrix = U U^T``, or None where any matrix is not positive definite."""
    factors = cholesky(flipped(stack))
    return None if factors is None else flipped(factors)


def cholesky_of_product(roots: Array) -> Array:
    """Return the lower L with ``root root^T = L L^T`` for roots (n_blocks, k, n) of rank k, without the product."""
    lower: Array = transposed(np.linalg.qr(transposed(roots), mode="r"))
    return np.ascontiguousarray(lower * np.where(diagonal(lower) < 0.0, -1.0, 1.0)[:, None, :])


def reverse_cholesky_of_product(roots: Array) -> Array:
    """Return the upper U with ``root root^T = U U^T`` for square roots of full rank, without the product."""
    return flipped(cholesky_of_product(flipped(roots)))


def _well_conditioned(factors: Array) -> bool:
    """Tell whether no lower-triangular factor, of a matrix with a unit diagonal, is all but singular."""
    if factors.shape[1] == 1:
        return True
    # There is no batched estimate: the norm of the inverse itself, which takes as long as the factors did.
    identity = np.broadcast_to(np.eye(factors.shape[1]), factors.shape)
    with np.errstate(all="ignore"):
        inverse = solve_lower(factors, identity)
        condition = np.abs(factors).sum(axis=1).max(axis=1) * np.abs(inverse).sum(axis=1).max(axis=1)
    return bool((condition < 1.0 / linalg.LEAST_RCOND).all())
