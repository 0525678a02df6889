"""Dense linear algebra with guards: no explicit inverse anywhere."""

import functools
import os

import numpy as np

from numpy.typing import NDArray
from scipy import linalg as sla

Array = NDArray[np.float64]

#: Part of its terms that a difference must exceed to be more than what rounding leaves.
ROUNDING = 1e-13
#: Reciprocal condition of a Cholesky factor, below which its matrix counts as singular.
LEAST_RCOND = 1e-7


def symmetrise(matrix: Array) -> Array:
    """Return the symmetric part of a square matrix."""
    symmetric: Array = 0.5 * (matrix + matrix.T)
    return symmetric


def diagonal(matrix: Array) -> Array:
    """Return the diagonal of a square matrix as a view to write into."""
    view: Array = np.einsum("ii->i", matrix)
    return view


@functools.lru_cache(maxsize=4)
def _lower_weights(n: int, on_diagonal: float) -> Array:
    """Return 1 below the diagonal, a number on it, 0 above: making it anew takes longer than using it."""
    weights = np.tril(np.ones((n, n)), -1)
    np.fill_diagonal(weights, on_diagonal)
    weights.flags.writeable = False
    return weights


def half_triangle(matrix: Array) -> Array:
    """Return the lower triangle of a square matrix with its diagonal halved; all entries should be finite."""
    lower: Array = matrix * _lower_weights(len(matrix), 0.5)
    return lower


def strict_triangle(matrix: Array) -> Array:
    """Return what is below the diagonal of a square matrix; all entries should be finite."""
    lower: Array = matrix * _lower_weights(len(matrix), 0.0)
    return lower


def all_finite(*arrays: Array) -> bool:
    """Tell whether all entries are finite: a sum of squares is, but where it overflows."""
    with np.errstate(all="ignore"):
        return all(np.isfinite(np.vdot(a, a)) or bool(np.isfinite(a).all()) for a in arrays)


def cholesky(matrix: Array) -> Array | None:
    """Return the lower Cholesky factor, or None where the matrix is not (numerically) positive definite.

    Parameters
    ----------
    matrix : ndarray, shape (n, n)
        Symmetric.

    Returns
    -------
    ndarray, shape (n, n), or None
    """
    if not np.isfinite(matrix).all():
        return None
    try:
        factor: Array = np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return None
    # LAPACK accepts pivots of rounding size: the solves that follow would be noise. Coordinates on scales far apart do
    # no harm: the condition is that of the matrix scaled to a unit diagonal.
    scaled = factor / np.sqrt(np.diag(matrix))[:, None]
    return factor if not len(factor) or sla.lapack.dtrcon(scaled, uplo="L")[0] > LEAST_RCOND else None


def has_lost_pivots(pivots: Array, entries: Array) -> bool:
    """Tell whether a pivot is no more than what rounding leaves of a sum with 1, as relative precisions are.

    Parameters
    ----------
    pivots, entries : ndarray
        Squares of the diagonal of a factor, and the diagonal of its matrix.
    """
    return bool(np.any(pivots <= ROUNDING * np.maximum(1.0, np.abs(entries - 1.0))))


def reverse_cholesky(matrix: Array) -> Array | None:
    """Return the upper U with ``matrix = U U^T``, or None where the matrix is not positive definite."""
    factor = cholesky(matrix[::-1, ::-1])
    return None if factor is None else np.ascontiguousarray(factor[::-1, ::-1])


def reverse_cholesky_of_product(root: Array) -> Array:
    """Return the upper U with ``root root^T = U U^T`` for a square ``root`` of full rank, without the product."""
    upper: Array = sla.rq(root, mode="r", check_finite=False)
    return upper * np.where(np.diag(upper) < 0.0, -1.0, 1.0)


def solve_lower(factor: Array, rhs: Array, *, transpose: bool = False) -> Array:
    """Solve ``factor x = rhs``, or ``factor^T x = rhs``, for a lower-triangular factor.

    Raises
    ------
    numpy.linalg.LinAlgError
        Where an entry of the diagonal is 0.
    """
    return _solve_triangular(factor, rhs, lower=True, transpose=transpose)


def solve_upper(factor: Array, rhs: Array, *, transpose: bool = False) -> Array:
    """Solve ``factor x = rhs``, or ``factor^T x = rhs``, for an upper-triangular factor; raises as `solve_lower`."""
    return _solve_triangular(factor, rhs, lower=False, transpose=transpose)


def _solve_triangular(factor: Array, rhs: Array, *, lower: bool, transpose: bool) -> Array:
    # LAPACK itself: scipy.linalg.solve_triangular takes twice as long for a single right-hand side. It reads columns
    # first, so that a matrix in C order is taken for its transpose.
    if factor.flags.c_contiguous:
        factor, lower, transpose = factor.T, not lower, not transpose
    solution, info = sla.lapack.dtrtrs(factor, rhs, lower=lower, trans=transpose)
    if info:
        raise np.linalg.LinAlgError(f"Entry {info} on the diagonal of a triangular factor is 0.")
    result: Array = solution
    return result


def _machine_memory() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # not a POSIX system: let the allocation itself decide
        return float("inf")


def fits_in_memory(needed: int) -> bool:
    """Tell whether so many bytes leave this machine a fifth of its memory."""
    return needed <= 0.8 * _machine_memory()


def check_memory(needed: int, family: str, n_dim: int, families: list[str]) -> None:
    """Raise MemoryError before allocating what does not fit in this machine's memory.

    Parameters
    ----------
    needed : int
        Bytes.
    family, n_dim
        Of the approximation, for the message.
    families : list of str
        All there are.
    """
    if not fits_in_memory(needed):
        available = _machine_memory()
        others = ", ".join(repr(name) for name in families if name != family)
        raise MemoryError(
            f"A {family!r} approximation in {n_dim:,} dimensions needs about {needed / 2**30:,.1f} GiB, and this "
            f"machine has {available / 2**30:,.1f} GiB. Use another family ({others}): family='diagonal' needs a few "
            "vectors only, and ignores correlations."
        )
