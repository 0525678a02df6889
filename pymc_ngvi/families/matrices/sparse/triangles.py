"""Stacks of lower-triangular matrices: solutions and congruences, by LAPACK for a single one."""

import functools

import numpy as np

from scipy.linalg import lapack

from pymc_ngvi.core import linalg
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.matrices import stacks as dense

#: Calls of LAPACK that take as long as those of NumPy for one row.
_CALLS = 8


class Triangles:
    """Lower-triangular matrices T.

    A single one may be large: LAPACK takes it as it is. Of others, the inverses are multiplied with: among many, calls
    would take longer than the work.

    Parameters
    ----------
    factors : ndarray, shape (n, k, k)
        What is above the diagonal is 0.
    once : bool
        Whether there will be one solution only, for which few inverses are not worth their while.
    """

    def __init__(self, factors: Array, *, once: bool = False) -> None:
        self._is_single = len(factors) == 1 and factors.shape[1] > 1
        self._one_by_one = self._is_single or (once and _are_few(factors))
        self.factors = np.ascontiguousarray(factors) if self._one_by_one else factors

    @functools.cached_property
    def _inverse(self) -> Array:
        return _inverse(self.factors)

    def solve(self, rhs: Array, *, transposed: bool = False) -> Array:
        """Return T^-1, or T^-T, times matrices."""
        if self.factors.shape[1] == 1:
            return rhs / self.factors
        if self._one_by_one:
            return np.array(
                [linalg.solve_lower(a, b, transpose=transposed) for a, b in zip(self.factors, rhs, strict=True)]
            )
        return (dense.transposed(self._inverse) if transposed else self._inverse) @ rhs

    def inverse_gram(self) -> Array:
        """Return T^-T T^-1."""
        if self._is_single:
            # LAPACK reads columns first: T^T is upper triangular there.
            upper, _ = lapack.dpotri(self.factors[0].T, lower=0)
            return _from_upper(upper)
        return dense.transposed(self._inverse) @ self._inverse

    def within(self, matrices: Array) -> Array:
        """Return T^-1 M T^-T for the lower triangles of symmetric matrices."""
        if self._is_single:
            result, _ = lapack.dsygst(matrices[0].T, self.factors[0].T, itype=1, lower=0)
            return _from_upper(result)
        return self.solve(dense.transposed(self.solve(dense.mirrored(matrices))))

    def around(self, matrices: Array) -> Array:
        """Return T M T^T for the lower triangles of symmetric matrices."""
        if self._is_single:
            # In reverse T is upper triangular; LAPACK has U M U^T, for the upper triangle of M.
            upper, whole = self.factors[0][::-1, ::-1], matrices[0][::-1, ::-1]
            result, _ = lapack.dsygst(np.asfortranarray(whole), np.asfortranarray(upper), itype=2, lower=0)
            return _from_upper(result[::-1, ::-1].T)
        return self.factors @ dense.mirrored(matrices) @ dense.transposed(self.factors)


def _from_upper(matrix: Array) -> Array:
    """Return the symmetric matrix with this upper triangle, as a stack of one."""
    whole = np.triu(matrix)
    whole += np.triu(matrix, 1).T
    return np.ascontiguousarray(whole)[None]


def _are_few(factors: Array) -> bool:
    """Tell whether a call for each matrix takes no longer than a few for each of its rows."""
    n, k = factors.shape[:2]
    return bool(k > 1 and n <= _CALLS * k)


def _inverse(factors: Array) -> Array:
    """Return the inverses of lower-triangular factors, by halves, or one by one."""
    size = factors.shape[1]
    if size == 1:
        return 1.0 / factors
    if _are_few(factors):  # LAPACK reads columns first
        return np.array([lapack.dtrtri(factor.T, lower=0)[0].T for factor in np.ascontiguousarray(factors)])
    half = size // 2
    result = np.zeros_like(factors)
    first, last = _inverse(factors[:, :half, :half]), _inverse(factors[:, half:, half:])
    result[:, :half, :half], result[:, half:, half:] = first, last
    np.matmul(last @ factors[:, half:, :half], first, out=result[:, half:, :half])
    np.negative(result[:, half:, :half], out=result[:, half:, :half])
    return result
