"""Rules for operations of linear algebra, on the last axes: whatever axes are before them is a batch.

Each is solved for the derivatives that are not known yet: those of A X = B, of A = L L', and of log |A|.
"""

from collections.abc import Callable
from functools import singledispatch

import numpy as np

from pytensor.graph.op import Op
from pytensor.tensor.linalg.constructors import BlockDiagonal
from pytensor.tensor.linalg.decomposition.cholesky import Cholesky
from pytensor.tensor.linalg.inverse import MatrixInverse
from pytensor.tensor.linalg.solvers.general import Solve
from pytensor.tensor.linalg.solvers.psd import CholeskySolve
from pytensor.tensor.linalg.solvers.triangular import SolveTriangular
from pytensor.tensor.linalg.summary import Det, SLogDet
from pytensor.tensor.math import Dot

from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.jets.arrays import NoJet, Space
from pymc_ngvi.density.jets.elementwise import Rule


@singledispatch
def of_matrices(op: Op) -> Rule:
    """Return the rule of an operation on matrices.

    Raises
    ------
    NoJet
        Where there is none.
    """
    raise NoJet(f"{op} has no rule")


#: Operations that have one.
OPERATIONS = (BlockDiagonal, Cholesky, CholeskySolve, Det, MatrixInverse, SLogDet, Solve, SolveTriangular)


def _crossed(space: Space, x: AnyArray, y: AnyArray) -> AnyArray:
    """Return what the first derivatives of two matrices add to the second ones of their product."""
    i, j = space.pairs
    x1, y1 = x[1 : 1 + space.n_dim], y[1 : 1 + space.n_dim]
    both: AnyArray = np.matmul(x1[i], y1[j])
    both += np.matmul(x1[j], y1[i])
    return both


@of_matrices.register(Dot)
def _product(op: Dot) -> Rule:
    def rule(space: Space, x: AnyArray, y: AnyArray) -> AnyArray:
        if len(x) == 1 or len(y) == 1:
            return np.matmul(x, y)
        out: AnyArray = np.matmul(x, y[:1])
        out[1:] += np.matmul(x[:1], y[1:])
        if space.order == 2:
            space.seconds(out)[:] += _crossed(space, x, y)
        return out

    return rule


def _or_nan(function: Callable[..., AnyArray], *arrays: AnyArray) -> AnyArray:
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


def _solution(space: Space, a: AnyArray, b: AnyArray) -> AnyArray:
    """Return X of A X = B."""
    value = _or_nan(np.linalg.solve, a[:1], b[:1])
    if len(a) == len(b) == 1:
        return value
    inverse, n = _or_nan(np.linalg.inv, a[:1]), space.n_dim
    rest = b[1:] if len(a) == 1 else (b[1:] if len(b) > 1 else 0.0) - np.matmul(a[1:], value)
    out = np.empty((space.n_terms, *value.shape[1:]))
    out[:1] = value
    out[1 : 1 + n] = np.matmul(inverse, rest[:n])
    if space.order == 2:
        seconds = rest[n:] if len(a) == 1 else rest[n:] - _crossed(space, a, out)
        space.seconds(out)[:] = np.matmul(inverse, seconds)
    return out


def _lower_factor(space: Space, a: AnyArray) -> AnyArray:
    """Return L of A = L L'; only the lower triangle of A is read."""
    a = np.tril(a) + np.tril(a, -1).mT
    factor = _or_nan(np.linalg.cholesky, a[:1])
    if len(a) == 1:
        return factor
    inverse, n = _or_nan(np.linalg.inv, factor), space.n_dim
    half = np.tril(np.ones(a.shape[-2:])) - 0.5 * np.eye(a.shape[-1])

    def derivatives(of_product: AnyArray) -> AnyArray:
        return np.matmul(factor, half * (inverse @ of_product @ inverse.mT))

    out = np.empty((space.n_terms, *factor.shape[1:]))
    out[:1] = factor
    out[1 : 1 + n] = derivatives(a[1 : 1 + n])
    if space.order == 2:
        space.seconds(out)[:] = derivatives(space.seconds(a) - _crossed(space, out, out.mT))
    return out


def _log_determinant(space: Space, a: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Return the sign and the logarithm of |A|."""
    sign, value = np.linalg.slogdet(a[:1])
    if len(a) == 1:
        return sign, value
    relative = np.matmul(_or_nan(np.linalg.inv, a[:1]), a[1:])
    out = np.empty((space.n_terms, *value.shape[1:]))
    out[:1] = value
    out[1:] = np.trace(relative, axis1=-2, axis2=-1)
    if space.order == 2:
        i, j = space.pairs
        space.seconds(out)[:] -= (relative[i] * relative[j].mT).sum(axis=(-2, -1))
    return sign, out


@of_matrices.register
def _inverse(op: MatrixInverse) -> Rule:
    return lambda space, a: _solution(space, a, np.eye(a.shape[-1])[(None,) * (a.ndim - 2)])


def _of_columns(op: Solve | SolveTriangular | CholeskySolve, solution: Callable[..., AnyArray]) -> Rule:
    """Return the rule of a solution for a matrix of right-hand sides, or for one."""
    if op.b_ndim == 2:
        return solution
    return lambda space, a, b: solution(space, a, b[..., None])[..., 0]


def _by_factor(space: Space, factor: AnyArray, b: AnyArray) -> AnyArray:
    return _solution(space, factor.mT, _solution(space, factor, b))


@of_matrices.register
def _solve(op: Solve) -> Rule:
    if op.assume_a == "pos":
        is_lower = op.lower
        return _of_columns(op, lambda space, a, b: _by_factor(space, _lower_factor(space, a if is_lower else a.mT), b))
    return _of_columns(op, _solution)


@of_matrices.register
def _solve_triangular(op: SolveTriangular) -> Rule:
    triangle = np.tril if op.lower else np.triu

    def solution(space: Space, a: AnyArray, b: AnyArray) -> AnyArray:
        a = triangle(a)
        if op.unit_diagonal:
            a *= 1.0 - np.eye(a.shape[-1])
            a[:1] += np.eye(a.shape[-1])
        return _solution(space, a, b)

    return _of_columns(op, solution)


@of_matrices.register
def _cholesky_solve(op: CholeskySolve) -> Rule:
    is_lower = op.lower
    return _of_columns(op, lambda space, a, b: _by_factor(space, np.tril(a) if is_lower else np.triu(a).mT, b))


@of_matrices.register
def _cholesky(op: Cholesky) -> Rule:
    return _lower_factor if op.lower else lambda space, a: _lower_factor(space, a.mT).mT


@of_matrices.register
def _sign_and_log_determinant(op: SLogDet) -> Rule:
    return lambda space, a: list(_log_determinant(space, a))


@of_matrices.register
def _determinant(op: Det) -> Rule:
    def rule(space: Space, a: AnyArray) -> AnyArray:
        sign, out = _log_determinant(space, a)
        if space.order == 2 and len(out) > 1:
            space.seconds(out)[:] += space.products(out, out)
        value = sign * np.exp(out[:1])
        out[:1] = 1.0
        return value * out

    return rule


@of_matrices.register
def _block_diagonal(op: BlockDiagonal) -> Rule:
    def rule(space: Space, *blocks: AnyArray) -> AnyArray:
        n_rows, n_columns = (sum(block.shape[axis] for block in blocks) for axis in (-2, -1))
        lead = np.broadcast_shapes(*[block.shape[1:-2] for block in blocks])
        out = np.zeros((max(map(len, blocks)), *lead, n_rows, n_columns))
        row = column = 0
        for block in blocks:
            height, width = block.shape[-2:]
            out[: len(block), ..., row : row + height, column : column + width] = block
            row, column = row + height, column + width
        return out

    return rule
