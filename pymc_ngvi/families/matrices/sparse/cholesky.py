r"""The Cholesky factor of a sparse matrix, solutions, the inverse on its entries, and the metric of Gaussians.

A precision S = L L^T whose pattern is that of L + L^T has no entry that its factor would fill in. On such matrices,
:math:`\mathrm{tr}(S^{-1} E S^{-1} E)`, the Fisher metric of a Gaussian, is a sum of squares of as many numbers as L has
[1]_: with :math:`S_N = L_N L_N^T` what is left of a front's own block when its turn comes, B what is beside,
:math:`G = L_{BN} L_N^{-1}`, :math:`V = S^{-1}`, and E carried along as the elimination goes,

.. math:: \sum_N |L_N^{-1} E_N L_N^{-T}|^2 + 2 |R^T (E_B - G E_N) L_N^{-T}|^2, \qquad R R^T = V_{BB}.

References
----------
.. [1] M. S. Andersen, J. Dahl and L. Vandenberghe (2013). Logarithmic barriers for sparse matrix cones. Optimization
   Methods and Software 28(3). https://doi.org/10.1080/10556788.2012.684353
"""

import functools

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scipy.linalg import lapack
from threadpoolctl import ThreadpoolController

from pymc_ngvi.core import linalg
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.matrices import stacks as dense
from pymc_ngvi.families.matrices.sparse.fronts import AnyFronts, FrontStack
from pymc_ngvi.families.matrices.sparse.order import Ints

# --- stacks of lower-triangular matrices: solutions and congruences, by LAPACK for a single one ---

#: Calls of LAPACK that take as long as those of NumPy for one row.
_CALLS = 8


class Triangles:
    """Lower-triangular matrices T.

    A single one may be large: LAPACK takes it as it is. Of others, the inverses are multiplied with: among many, calls
    would take longer than the work.
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


# --- the factor ---

_ROOT_2 = float(np.sqrt(2.0))
#: Rows of a single front from which on copies that NumPy makes take long.
_LARGE = 100


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


def _one_thread[**P, T](operation: Callable[P, T]) -> Callable[P, T]:
    """Keep BLAS to one thread: fronts are small, and to wake others takes longer than the work."""

    @functools.wraps(operation)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        with _blas().limit(limits=1, user_api="blas"):
            return operation(*args, **kwargs)

    return alone


@dataclass(frozen=True, eq=False)
class SparseCholesky:
    """A factor L of a sparse matrix, in the order of elimination."""

    fronts: AnyFronts
    #: The columns of L, front by front; shape (n_panels,).
    panels: Array

    @classmethod
    @_one_thread
    def of(cls, fronts: AnyFronts, matrix: Array, terms: Array | None = None) -> "SparseCholesky | None":
        """Return the factor of a matrix; None where that is not positive definite."""
        if not np.isfinite(matrix).all():
            return None
        work = np.zeros(fronts.n_fronts)
        panels = np.empty(fronts.n_panels)
        owns = []
        for stack in fronts.stacks:
            _, k, m = stack.shape
            front = _shaped(stack, work[stack.of_fronts])
            columns = _shaped(stack, matrix[stack.of_panels]).copy()
            if not stack.is_leaf:
                columns += front[:, :, :k]
            _fill_up(stack, columns)
            own = _cholesky(columns[:, :k])
            if own is None:
                return None
            panel = _shaped(stack, panels[stack.of_panels])
            panel[:, :k] = own
            owns.append(Triangles(own))
            if m:
                beside = dense.transposed(owns[-1].solve(dense.transposed(columns[:, k:])))
                panel[:, k:] = beside
                together = _together(stack, beside)
                change = -together @ dense.transposed(together)
                if not stack.is_leaf:
                    change += _added_up(stack, front[:, k:, k:])
                _pass_on(stack, work, change)
        before, after = matrix[fronts.diagonal], panels[fronts.diagonal]
        before = before if terms is None else np.maximum(before, terms)
        if not (after > linalg.LEAST_PIVOT * np.sqrt(before)).all():
            return None
        factor = cls(fronts, panels)
        factor.__dict__.update(_own=owns, matrix=matrix)  # which are known by now
        return factor

    def log_det(self) -> float:
        """Return the log determinant of L."""
        return float(np.sum(np.log(self.panels[self.fronts.diagonal])))

    def squares(self) -> Array:
        """Return the diagonal of L L^T, (n_dim,)."""
        total = np.zeros(self.fronts.n_dim + 1)
        for stack in self.fronts.stacks:
            row_sums = np.einsum("nij,nij->ni", panel := self._panel(stack), panel)
            np.add.at(total, np.concatenate([stack.own, stack.beside], axis=1).ravel(), row_sums.ravel())
        return total[self.fronts.place]

    @functools.cached_property
    def _own(self) -> list[Triangles]:
        """Of each stack, what the panels have in rows of their own."""
        return [Triangles(self._panel(stack)[:, : stack.shape[1]]) for stack in self.fronts.stacks]

    @functools.cached_property
    def _slopes(self) -> list[Array]:
        """Of each stack, the rows of its panels beside, times the inverse of their own."""
        slopes = []
        for stack, own in zip(self.fronts.stacks, self._own, strict=True):
            beside = self._panel(stack)[:, stack.shape[1] :]
            slopes.append(dense.transposed(own.solve(dense.transposed(beside), transposed=True)))
        return slopes

    # --- vectors are columns, (n_dim, n_vectors), in the order of the coordinates ---

    @_one_thread
    def solve(self, vectors: Array, *, transposed: bool = False) -> Array:
        """Return L^-1, or L^-T, times vectors."""
        x = self._ordered(vectors)
        both = list(zip(self.fronts.stacks, self._own, strict=True))
        for stack, own in reversed(both) if transposed else both:
            beside = self._panel(stack)[:, stack.shape[1] :]
            if transposed:
                there = x[stack.own] - dense.transposed(beside) @ x[stack.beside] if stack.shape[2] else x[stack.own]
                x[stack.own] = own.solve(there, transposed=True)
            else:
                here = own.solve(x[stack.own])
                x[stack.own] = here
                if stack.shape[2]:
                    shape = len(here) // stack.n_alike, stack.n_alike * stack.shape[1], here.shape[2]
                    change = _together(stack, beside) @ here.reshape(shape)
                    np.subtract.at(x, stack.beside[:: stack.n_alike], change)
            x[-1] = 0.0
        return x[self.fronts.place]

    @_one_thread
    def times(self, vectors: Array, *, transposed: bool = False) -> Array:
        """Return L, or L^T, times vectors."""
        x = self._ordered(vectors)
        result = np.zeros_like(x)
        for stack in self.fronts.stacks:
            k, m = stack.shape[1:]
            panel = self._panel(stack)
            own, beside = panel[:, :k], panel[:, k:]
            here = x[stack.own]
            if transposed:
                total = dense.transposed(own) @ here
                result[stack.own] = total + dense.transposed(beside) @ x[stack.beside] if m else total
            else:
                result[stack.own] += own @ here
                if m:
                    np.add.at(result, stack.beside, beside @ here)
        return result[self.fronts.place]

    def _ordered(self, vectors: Array) -> Array:
        """Return the vectors in the order of elimination, and zeros for what was filled up."""
        x = np.zeros((len(vectors) + 1, vectors.shape[1]))
        x[:-1] = vectors[self.fronts.order]
        return x

    def _panel(self, stack: FrontStack) -> Array:
        return _shaped(stack, self.panels[stack.of_panels])

    # --- matrices in the form of panels ---

    @functools.cached_property
    @_one_thread
    def matrix(self) -> Array:
        """The lower triangle of L L^T."""
        work = np.zeros(self.fronts.n_fronts)
        result = np.empty_like(self.panels)
        for stack in self.fronts.stacks:
            _, k, m = stack.shape
            front, panel = _shaped(stack, work[stack.of_fronts]), self._panel(stack)
            front += panel @ dense.transposed(panel)
            _shaped(stack, result[stack.of_panels])[:] = front[:, :, :k]
            if m:
                _pass_on(stack, work, _added_up(stack, front[:, k:, k:]))
        return _lower(self.fronts, result)

    @functools.cached_property
    @_one_thread
    def _inverse(self) -> tuple[Array, Array]:
        """The inverse of L L^T: in panels, and on fronts that others change."""
        work, panels = np.empty(self.fronts.n_fronts), np.empty_like(self.panels)
        for stack, own, slope in reversed(list(zip(self.fronts.stacks, self._own, self._slopes, strict=True))):
            k, m = stack.shape[1:]
            panel = _shaped(stack, panels[stack.of_panels])
            panel[:, :k] = own.inverse_gram()
            if m:
                among = _gathered(stack, work)
                shape = slope.shape
                together = slope.reshape(len(among), -1, m, k).swapaxes(1, 2).reshape(len(among), m, -1)
                between = -(among @ together).reshape(len(among), m, -1, k).swapaxes(1, 2).reshape(shape)
                panel[:, k:] = between
                panel[:, :k] -= dense.transposed(slope) @ between
            if not stack.is_leaf:
                front = _shaped(stack, work[stack.of_fronts])
                front[:, :, :k] = panel
                if m:
                    front[:, k:, k:] = np.repeat(among, stack.n_alike, axis=0)
                    front[:, :k, k:] = dense.transposed(between)
        return _lower(self.fronts, panels), work

    @property
    def inverse(self) -> Array:
        """The inverse of L L^T where the lower triangle can differ from 0."""
        return self._inverse[0]

    def product_trace(self, matrix: Array) -> float:
        """Return the trace of the inverse times a symmetric matrix, as panels."""
        at = self.fronts.diagonal
        return float(2.0 * (self.inverse @ matrix) - self.inverse[at] @ matrix[at])

    @functools.cached_property
    @_one_thread
    def _roots(self) -> list[Triangles]:
        """Of each stack, the roots of the inverse beside."""
        return [self._root(stack) for stack in self.fronts.stacks]

    def _root(self, stack: FrontStack) -> Triangles:
        n, _, m = stack.shape
        if not m:
            return Triangles(np.empty((n, 0, 0)), once=True)
        among = np.repeat(_gathered(stack, self._inverse[1]), stack.n_alike, axis=0)
        of, row = np.nonzero(stack.beside == self.fronts.n_dim)
        among[of, row], among[of, :, row] = 0.0, 0.0
        among[of, row, row] = 1.0
        root = _cholesky(among)
        if root is None:
            raise np.linalg.LinAlgError("The precision is singular to rounding.")
        return Triangles(root, once=True)

    @_one_thread
    def whitened(self, matrix: Array) -> Array:
        """Return a vector whose inner products are tr(V E V F), V the inverse, for symmetric matrices as panels."""
        work = np.zeros(self.fronts.n_fronts)
        result = np.empty_like(matrix)
        for stack, own, slope, root in zip(self.fronts.stacks, self._own, self._slopes, self._roots, strict=True):
            _, k, m = stack.shape
            front = _shaped(stack, work[stack.of_fronts])
            front[:, :, :k] += _shaped(stack, matrix[stack.of_panels])
            out = _shaped(stack, result[stack.of_panels])
            out[:, :k] = own.within(front[:, :k, :k])
            out[:, :k] *= _weights(k, _ROOT_2)
            if m:
                beside, mine = front[:, k:, :k], dense.mirrored(front[:, :k, :k])
                apart = beside - slope @ mine
                out[:, k:] = _ROOT_2 * dense.transposed(
                    own.solve(dense.transposed(dense.transposed(root.factors) @ apart))
                )
                crossed = slope @ dense.transposed(beside)
                change = crossed + apart @ dense.transposed(slope)
                _pass_on(stack, work, _added_up(stack, front[:, k:, k:] - change))
        return result

    @_one_thread
    def unwhitened(self, vector: Array) -> Array:
        """Return the matrix of a vector: the inverse of `whitened`."""
        work = np.zeros(self.fronts.n_fronts)
        result = np.empty_like(vector)
        for stack, own, slope, root in zip(self.fronts.stacks, self._own, self._slopes, self._roots, strict=True):
            _, k, m = stack.shape
            front = _shaped(stack, work[stack.of_fronts])
            given, out = _shaped(stack, vector[stack.of_panels]), _shaped(stack, result[stack.of_panels])
            mine = own.around(given[:, :k] * _weights(k, 1.0 / _ROOT_2))
            np.subtract(mine, front[:, :k, :k], out=out[:, :k])
            out[:, :k] *= _weights(k, 1.0)
            if m:
                apart = root.solve(given[:, k:] / _ROOT_2, transposed=True) @ dense.transposed(own.factors)
                beside = apart + slope @ mine
                out[:, k:] = beside - front[:, k:, :k]
                change = slope @ dense.transposed(beside) + apart @ dense.transposed(slope)
                _pass_on(stack, work, _added_up(stack, front[:, k:, k:] - change))
        return result


def _weights(k: int, below: float) -> Array:
    """Return 1 on the diagonal, a number below it, 0 above."""
    weights = np.tri(k, k, -1) * below
    np.fill_diagonal(weights, 1.0)
    return weights


def _shaped(stack: FrontStack, numbers: Array) -> Array:
    """Return fronts or panels of a stack, as a view."""
    n, k, m = stack.shape
    return numbers.reshape(n, k + m, -1)


def _places(stack: FrontStack) -> tuple[Ints, Ints]:
    """Return the places, in the order of elimination, of the row and the column of each entry of panels."""
    both = np.concatenate([stack.own, stack.beside], axis=1)
    shape = (*both.shape, stack.shape[1])
    rows, cols = np.broadcast_to(both[:, :, None], shape), np.broadcast_to(stack.own[:, None], shape)
    return rows.ravel(), cols.ravel()


def _lower(fronts: AnyFronts, panels: Array) -> Array:
    """Return panels, in place, with zeros above the diagonal and in what was filled up."""
    panels *= fronts.used
    return panels


def _fill_up(stack: FrontStack, columns: Array) -> None:
    """Give filled-up columns the diagonal of an identity, in place."""
    _, k, m = stack.shape
    of, rest = np.divmod(stack.filled, (k + m) ** 2)
    col = rest // (k + m + 1)
    columns[of, col, col] = 1.0


def _together(stack: FrontStack, beside: Array) -> Array:
    """Return the rows beside of fronts that are alike there as one matrix of all of their columns."""
    if stack.n_alike == 1:
        return beside
    n, k, m = stack.shape
    return beside.reshape(n // stack.n_alike, -1, m, k).swapaxes(1, 2).reshape(n // stack.n_alike, m, -1)


def _added_up(stack: FrontStack, change: Array) -> Array:
    """Return the sums of what fronts that are alike change beside them."""
    if stack.n_alike == 1:
        return change
    return np.add.reduce(change.reshape(-1, stack.n_alike, *change.shape[1:]), axis=1)


def _pass_on(stack: FrontStack, work: Array, change: Array) -> None:
    """Add what is beside to the fronts of the parents."""
    m = stack.shape[2]
    i, j = stack.lower
    np.add.at(work, stack.to.ravel(), change.reshape(-1, m * m).take(i * m + j, axis=1).ravel())


def _gathered(stack: FrontStack, work: Array) -> Array:
    """Return what the fronts of the parents have beside, of fronts that are alike there once."""
    m = stack.shape[2]
    i, j = stack.lower
    entries = work.take(stack.to)
    result = np.empty((len(entries), m * m))
    result[:, i * m + j] = entries
    result[:, j * m + i] = entries
    return result.reshape(-1, m, m)


def _cholesky(matrices: Array) -> Array | None:
    if len(matrices) == 1 and len(matrices[0]) > _LARGE:
        # LAPACK reads columns first: what is lower for us is upper there.
        upper, failed = lapack.dpotrf(np.ascontiguousarray(matrices[0]).T, lower=0, clean=1)
        return None if failed else upper.T[None]
    try:
        factors: Array = np.linalg.cholesky(matrices)
    except np.linalg.LinAlgError:
        return None
    return factors
