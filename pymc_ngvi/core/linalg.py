"""Dense linear algebra with guards, of one matrix or of a stack of them, (n, k, k).

No explicit inverse anywhere, but for the condition of small matrices of a stack.
"""

import functools
import os

from collections.abc import Callable
from typing import Any

import numpy as np

from numpy.typing import ArrayLike, NDArray
from scipy import linalg as sla

Array = NDArray[np.float64]

#: Bytes.
GIB = 2**30
#: In the place of 0 where something is divided by it.
TINY = 1e-300
#: Part of its terms that a difference must exceed to be more than what rounding leaves.
ROUNDING = 1e-13
#: Relative size of what may be rounding after many operations.
SMALL = 1e-6
#: As much for a Cholesky factor, whose square is such a difference: below it, its matrix counts as singular.
LEAST_PIVOT = ROUNDING**0.5


def symmetrise(matrix: Array) -> Array:
    """Return the symmetric part of a square matrix."""
    return 0.5 * (matrix + matrix.mT)


def diagonal(matrix: Array) -> Array:
    """Return the diagonal of a square matrix as a view to write into."""
    return np.einsum("...ii->...i", matrix)


@functools.lru_cache(maxsize=4)
def _lower_weights(n: int, on_diagonal: float) -> Array:
    """Return 1 below the diagonal, a number on it, 0 above: making it anew takes longer than using it."""
    weights = np.tril(np.ones((n, n)), -1)
    np.fill_diagonal(weights, on_diagonal)
    weights.flags.writeable = False
    return weights


def lower_triangle(matrix: Array, on_diagonal: float = 1.0) -> Array:
    """Return the lower triangle of a square matrix, its diagonal multiplied; all entries should be finite."""
    return matrix * _lower_weights(matrix.shape[-1], on_diagonal)


def all_finite(*arrays: Array) -> bool:
    """Tell whether all entries are finite: a sum of squares is, but where it overflows."""
    with np.errstate(all="ignore"):
        return all(np.isfinite(np.vdot(a, a)) or bool(np.isfinite(a).all()) for a in arrays)


def logsumexp(values: ArrayLike, axis: int | None = None, *, keepdims: bool = False) -> Any:
    """Return the logarithm of a sum of exponentials; of small arrays, in a tenth of the time of SciPy's function."""
    values = np.asarray(values)
    largest = values.max(axis=axis, keepdims=True)
    shift = np.where(np.isfinite(largest), largest, 0.0)
    with np.errstate(divide="ignore", over="ignore"):
        total = np.log(np.exp(values - shift).sum(axis=axis, keepdims=True)) + shift
    return total if keepdims else np.squeeze(total, axis=axis)[()]


def relative_terms(entries: Array) -> Array:
    """Return the size of the larger term of sums with 1, as the diagonals of relative precisions are."""
    return np.maximum(1.0, np.abs(entries - 1.0))


def cholesky(matrix: Array, terms: Array | None = None) -> Array | None:
    """Return the lower Cholesky factor, or None where the matrix is not (numerically) positive definite.

    A matrix that is a sum, such as (1 - rho) I + rho A, may cancel: then what rounding leaves has the size of the
    terms, and whether LAPACK finds it positive depends on the order in which a processor adds.
    """
    if not np.isfinite(matrix).all():
        return None
    try:
        factor: Array = np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return None
    # LAPACK accepts pivots of rounding size: the solves that follow would be noise. Coordinates on scales far apart do
    # no harm: the condition is that of the matrix in units of its terms.
    scaled = factor / np.sqrt(diagonal(matrix) if terms is None else terms)[..., None]
    return factor if _exceeds(scaled, LEAST_PIVOT) else None


def _exceeds(lower: Array, least: float) -> bool:
    """Tell whether the least singular values of lower-triangular matrices, as `least_singular_value`, are larger."""
    if lower.ndim == 2 or len(lower) == 1:
        return least_singular_value(lower.reshape(lower.shape[-2:])) > least
    # What is on the diagonal bounds them from above; and a factor with a 0 there can not be solved with.
    above = bool((diagonal(lower) > least).all())
    if lower.shape[-1] == 1 or not above:
        return above
    # There is no estimate of many: the norm of the inverse itself, which takes as long as the factors did.
    with np.errstate(all="ignore"):
        inverse = solve_lower(lower, np.broadcast_to(np.eye(lower.shape[-1]), lower.shape))
        norm = np.maximum(np.abs(lower).sum(axis=1).max(axis=1), 1.0)
        return bool((norm * np.abs(inverse).sum(axis=1).max(axis=1) < 1.0 / least).all())


def or_nan(function: Callable[..., Array], *arrays: Array) -> Array:
    """Return a function of many matrices; NaN for those for which it fails."""
    try:
        return function(*arrays)
    except np.linalg.LinAlgError:
        batch = np.broadcast_shapes(*[x.shape[:-2] for x in arrays])
        arrays = tuple(np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in arrays)
        out = np.full(arrays[-1].shape, np.nan)
        for at in np.ndindex(*batch):
            try:
                out[at] = function(*[x[at] for x in arrays])
            except np.linalg.LinAlgError:
                continue
        return out


def cholesky_of_each(matrices: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Return the lower factors of matrices, (..., n, n), and which have one; numbers of the others mean nothing."""
    factors = or_nan(np.linalg.cholesky, matrices)
    found = np.isfinite(factors).all(axis=(-2, -1))
    return np.where(found[..., None, None], factors, np.eye(matrices.shape[-1])), found


def least_singular_value(lower: Array) -> float:
    """Estimate the least singular value of a lower-triangular matrix, in units of its norm where that exceeds 1.

    In the norm of sums of columns, which differs from the spectral one by the root of the order at most.
    """
    if not len(lower):
        return np.inf
    return float(sla.lapack.dtrcon(lower, uplo="L")[0]) * min(float(np.abs(lower).sum(axis=0).max()), 1.0)


def reverse_cholesky(matrix: Array, terms: Array | None = None) -> Array | None:
    """Return the upper U with ``matrix = U U^T``, or None where the matrix is not positive definite, as `cholesky`."""
    factor = cholesky(matrix[..., ::-1, ::-1], None if terms is None else terms[..., ::-1])
    return None if factor is None else np.ascontiguousarray(factor[..., ::-1, ::-1])


def cholesky_of_product(root: Array) -> Array | None:
    """Return the lower L with ``root root^T = L L^T`` for a ``root``, (n, m), of rank n, without the product.

    None where the rank is less but for what rounding leaves, in units of the rows.
    """
    lower: Array = np.linalg.qr(root.mT, mode="r").mT
    lower = lower * np.where(diagonal(lower) < 0.0, -1.0, 1.0)[..., None, :]
    with np.errstate(all="ignore"):  # a row of zeros: NaN, which is not larger
        scaled = lower / np.abs(lower).max(axis=-1, keepdims=True)
    return lower if _exceeds(scaled, ROUNDING) else None


def solve_lower(factor: Array, rhs: Array, *, transpose: bool = False) -> Array:
    """Solve ``factor x = rhs``, or ``factor^T x = rhs``, for a lower-triangular factor.

    Those of a stack take a few calls for each halving of their size, whatever their number.
    """
    if factor.ndim == 2:
        return _solve_triangular(factor, rhs, transpose=transpose)
    size = factor.shape[-1]
    if size == 1:
        return rhs / factor
    if len(factor) == 1:
        return _solve_triangular(factor[0], rhs[0], transpose=transpose)[None]
    top, bottom = slice(None, size // 2), slice(size // 2, None)
    between = factor[:, bottom, top]
    first, last, beside = (bottom, top, between.mT) if transpose else (top, bottom, between)
    x = solve_lower(factor[:, first, first], rhs[:, first], transpose=transpose)
    y = solve_lower(factor[:, last, last], rhs[:, last] - beside @ x, transpose=transpose)
    return np.concatenate([y, x] if transpose else [x, y], axis=1)


def _solve_triangular(factor: Array, rhs: Array, *, transpose: bool) -> Array:
    # LAPACK itself: scipy.linalg.solve_triangular takes twice as long for a single right-hand side. It reads columns
    # first, so that a matrix in C order is taken for its transpose.
    lower = not factor.flags.c_contiguous
    if not lower:
        factor, transpose = factor.T, not transpose
    solution, info = sla.lapack.dtrtrs(factor, rhs, lower=lower, trans=transpose)
    if info:
        raise np.linalg.LinAlgError(f"Entry {info} on the diagonal of a triangular factor is 0.")
    return solution


def _machine_memory() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # not a POSIX system: let the allocation itself decide
        return float("inf")


def fits_in_memory(needed: int) -> bool:
    """Tell whether so many bytes leave this machine a fifth of its memory."""
    return needed <= 0.8 * _machine_memory()


def check_memory(needed: int, family: str, n_dim: int, families: list[str]) -> None:
    """Raise MemoryError before allocating what does not fit in this machine's memory."""
    if not fits_in_memory(needed):
        available = _machine_memory()
        others = ", ".join(repr(name) for name in families if name != family)
        raise MemoryError(
            f"A {family!r} approximation in {n_dim:,} dimensions needs about {needed / GIB:,.1f} GiB, and this "
            f"machine has {available / GIB:,.1f} GiB. Use another family ({others}): family='diagonal' needs a few "
            "vectors only, and ignores correlations."
        )
