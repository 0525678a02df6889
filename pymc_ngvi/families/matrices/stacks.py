"""Linear algebra on stacks of square matrices of one size: a few batched calls whatever the number of matrices.

A stack is (n_blocks, k, k), its right-hand sides (n_blocks, k, n_columns). Loops go over the halvings of k, never over
the matrices. A single matrix is handed to LAPACK as it is.
"""

from collections.abc import Callable

import numpy as np

from pymc_ngvi.core import linalg
from pymc_ngvi.core.types import Array


def transposed(stack: Array) -> Array:
    """Return the transpose of each matrix, as a view."""
    return stack.swapaxes(1, 2)


def flipped(stack: Array) -> Array:
    """Return each matrix with rows and columns in reverse: lower triangles become upper ones."""
    return np.ascontiguousarray(stack[:, ::-1, ::-1])


def diagonal(stack: Array) -> Array:
    """Return the diagonal of each matrix, (n_blocks, k), as a view."""
    return np.diagonal(stack, axis1=1, axis2=2)


def times(a: Array, b: Array) -> Array:
    """Return the products; for stacks of numbers, those of 1 x 1 matrices would take ten times as long."""
    return a * b if a.shape[1] == 1 else a @ b


def symmetrise(stack: Array) -> Array:
    """Return the symmetric part of each matrix."""
    return 0.5 * (stack + transposed(stack))


def mirrored(stack: Array) -> Array:
    """Return the symmetric matrices with the lower triangles of a stack."""
    return np.tril(stack) + transposed(np.tril(stack, -1))


def half_triangle(stack: Array) -> Array:
    """Return each lower triangle with its diagonal halved."""
    return 0.5 * (np.tril(stack) + np.tril(stack, -1))


def suffix_products(factors: Array, left: Array, right: Array) -> Array:
    """Return each factor times the lower triangle, with a halved diagonal, of a mean of outer products.

    One outer product takes no more than O(k^2) for a matrix of size k: sums over the columns from j on are suffix sums.
    """
    total = sums = np.empty_like(factors)
    for b in range(left.shape[2]):
        terms = factors * left[:, None, :, b]
        np.cumsum(terms[:, :, ::-1], axis=2, out=sums[:, :, ::-1])
        terms *= 0.5
        sums -= terms
        sums *= right[:, None, :, b] / left.shape[2]
        total, sums = (total + sums, sums) if b else (sums, np.empty_like(sums))
    return total


def solve_lower(factors: Array, rhs: Array) -> Array:
    """Solve ``factor x = rhs`` for a stack of lower-triangular factors, by halves."""
    n_blocks, size = factors.shape[:2]
    if size == 1:
        return rhs / factors
    if n_blocks == 1:
        return linalg.solve_lower(factors[0], rhs[0])[None]
    half = size // 2
    top = solve_lower(factors[:, :half, :half], rhs[:, :half])
    bottom = solve_lower(factors[:, half:, half:], rhs[:, half:] - factors[:, half:, :half] @ top)
    return np.concatenate([top, bottom], axis=1)


def inverse(factors: Array) -> Array:
    """Return the inverses of lower-triangular factors."""
    return solve_lower(factors, np.broadcast_to(np.eye(factors.shape[1]), factors.shape))


def solve_upper(factors: Array, rhs: Array) -> Array:
    """Solve ``factor x = rhs`` for a stack of upper-triangular factors."""
    if len(factors) == 1:
        return linalg.solve_upper(factors[0], rhs[0])[None]
    return solve_lower(flipped(factors), np.ascontiguousarray(rhs[:, ::-1]))[:, ::-1]


def cholesky(stack: Array, terms: Array | None = None) -> Array | None:
    """Return the lower Cholesky factors, or None where any matrix is not (numerically) positive definite."""
    if len(stack) == 1:
        factor = linalg.cholesky(stack[0], None if terms is None else terms[0])
        return None if factor is None else factor[None]
    if not np.isfinite(stack).all():
        return None
    try:
        factors: Array = np.linalg.cholesky(stack)
    except np.linalg.LinAlgError:
        return None
    scaled = factors / np.sqrt(diagonal(stack) if terms is None else terms)[:, :, None]
    return factors if _exceeds(scaled, linalg.LEAST_PIVOT) else None


def reverse_cholesky(stack: Array, terms: Array | None = None) -> Array | None:
    """Return the upper U with ``matrix = U U^T``, or None where any matrix is not positive definite."""
    factors = cholesky(flipped(stack), None if terms is None else terms[:, ::-1])
    return None if factors is None else flipped(factors)


def cholesky_of_product(roots: Array) -> Array | None:
    """Return the lower L with ``root root^T = L L^T`` for roots (n_blocks, k, n) of rank k, without the product.

    None where the rank of any is less but for what rounding leaves, in units of its rows.
    """
    if len(roots) == 1:
        factor = linalg.cholesky_of_product(roots[0])
        return None if factor is None else factor[None]
    lower: Array = transposed(np.linalg.qr(transposed(roots), mode="r"))
    lower = np.ascontiguousarray(lower * np.where(diagonal(lower) < 0.0, -1.0, 1.0)[:, None, :])
    with np.errstate(all="ignore"):  # a row of zeros: NaN, which is not smaller
        scaled = lower / np.abs(lower).max(axis=2, keepdims=True)
    return lower if _exceeds(scaled, linalg.ROUNDING) else None


def merged(first: Array, second: Array, apart: Array, weight: float) -> Array | None:
    """Return the factors of (1 - w) C C^T + w D D^T + w (1 - w) a a^T for columns ``apart``, (n_blocks, k, 1).

    None where any of these is singular to rounding.
    """
    between = np.sqrt(weight * (1.0 - weight)) * apart
    roots = np.concatenate([np.sqrt(1.0 - weight) * first, np.sqrt(weight) * second, between], axis=2)
    factors = cholesky(roots @ transposed(roots))
    return cholesky_of_product(roots) if factors is None else factors  # nearly singular: of the roots themselves


def reverse_cholesky_of_function(stack: Array, function: Callable[[Array], Array]) -> Array | None:
    """Return the upper U with ``f(matrix) = U U^T`` for a positive function of the eigenvalues of symmetric matrices.

    None where that is not finite, or where values are so far apart that rounding hides the small ones.
    """
    eigenvalues, vectors = np.linalg.eigh(stack)
    with np.errstate(all="ignore"):
        values = function(eigenvalues)
    if not (np.isfinite(values) & (values > 0.0)).all():
        return None
    roots = vectors * np.sqrt(values)[:, None, :]
    factors = cholesky_of_product(roots[:, ::-1])
    return None if factors is None else flipped(factors)


def _exceeds(factors: Array, least: float) -> bool:
    """Tell whether the least singular values of lower-triangular factors, as in `linalg`, are larger than a number."""
    # What is on the diagonal bounds them from above; and a factor with a 0 there can not be solved with.
    above = bool((diagonal(factors) > least).all())
    if factors.shape[1] == 1 or not above:
        return above
    # There is no batched estimate: the norm of the inverse itself, which takes as long as the factors did.
    with np.errstate(all="ignore"):
        norm = np.maximum(np.abs(factors).sum(axis=1).max(axis=1), 1.0)
        condition = norm * np.abs(inverse(factors)).sum(axis=1).max(axis=1)
    return bool((condition < 1.0 / least).all())
