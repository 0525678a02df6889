"""Products of matrices, and solutions of linear systems."""

import functools
import math

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.basic import Apply, Variable
from pytensor.sparse.math import Dot as SparseDot
from pytensor.sparse.math import StructuredDot
from pytensor.tensor.linalg.decomposition.cholesky import Cholesky
from pytensor.tensor.linalg.solvers.core import SolveBase
from pytensor.tensor.linalg.solvers.general import Solve
from pytensor.tensor.linalg.solvers.triangular import SolveTriangular
from pytensor.tensor.math import Dot
from scipy import sparse

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.values import Matrix
from pymc_ngvi.ops.elements import FromWays, core_op
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.ops.lifting import MOST_REDUCED, CannotLift, Lifting
from pymc_ngvi.ops.record import OF_MANY, Extra, OpRecord, largest
from pymc_ngvi.ops.ways import ByMatrix, Over


def _known_operand(node: Apply, facts: Facts) -> tuple[int, Matrix] | None:
    """Return which operand of a matrix product, if one, is a known matrix, the same for a whole batch; and the matrix.

    Returns
    -------
    place, matrix : 0 or 1, and an array of two axes, sparse or dense
    """
    for place, var in enumerate(node.inputs):
        if facts.is_known(var):
            value = facts.value(var)
            if sparse.issparse(value):
                return place, value
            if math.prod(value.shape[:-2]) == 1 and value.ndim >= 2:
                return place, value.reshape(value.shape[-2:])
    return None


def _product(node: Apply, facts: Facts) -> FromWays:
    """Take a @ b as a sum over k of products a[i, k] b[k, j]."""
    a, b = node.inputs
    known = _known_operand(node, facts)
    if known is not None:
        place, matrix = known
        var = b if place == 0 else a
        return FromWays(node, facts, [(var, ByMatrix(facts, var, matrix, from_left=place == 0))], [var])
    ways = [(a, Over(facts, a, (-1,), keepdims=True)), (b, Over(facts, b, (-2,), keepdims=True))]
    return FromWays(node, facts, ways, [a, b], [(a, b)], is_inner=True)


def _sparse_product(node: Apply, facts: Facts) -> FromWays | None:
    is_known = _known_operand(node, facts) is not None and all(i.type.ndim == 2 for i in node.inputs)
    return _product(node, facts) if is_known else None


def _solution(node: Apply, facts: Facts) -> FromWays | None:
    """Take the solution as linear in the right-hand side: a column depends on that column, and on all of the matrix."""
    a, b = node.inputs
    is_column = core_op(node.op).b_ndim == 1
    known = _known_operand(node, facts)
    if known is not None and known[0] == 0:
        return FromWays(
            node, facts, [(b, ByMatrix(facts, b, known[1], True, is_inverse=True, is_column=is_column))], [b]
        )
    if facts.is_active(a):
        whole = Over(facts, a, (-2, -1), keepdims=True), Over(facts, b, (-2,), keepdims=True)
        return None if is_column else FromWays(node, facts, list(zip((a, b), whole, strict=True)))
    return FromWays(node, facts, [(b, Over(facts, b, (-1 if is_column else -2,), keepdims=True))], [b])


def _lifted(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
    """Return the elements of a product of two matrices, or vectors, as sums."""
    shapes = [lift.facts.shape(i) for i in node.inputs]
    if not isinstance(node.op, Dot) or max(map(len, shapes)) > 2:
        raise CannotLift("it has a product of unknown arrays")
    (n, inner), (_, p) = (shapes[0] if len(shapes[0]) == 2 else (1, *shapes[0])), (*shapes[1], 1)[:2]
    if not 0 < inner <= MOST_REDUCED:
        raise CannotLift(f"it has a product of unknown matrices over {inner} elements")
    row, col = np.unravel_index(index, (n, p))
    parts = []
    for at in range(inner):
        left, right = lift.of(node.inputs[0], row * inner + at), lift.of(node.inputs[1], at * p + col)
        parts.append(left * right)
    return functools.reduce(pt.add, parts)


def _solution_degrees(node: Apply) -> list[float | None]:
    return [-1.0, 1.0] if isinstance(core_op(node.op), Solve | SolveTriangular) else [None, None]


def _read(node: Apply, unknown: int) -> Extra:
    return Extra(read=largest(node.inputs, unknown) if isinstance(node.op, Dot) else 0)


OPERATIONS: dict[type, OpRecord] = {
    Dot: OpRecord(
        _product, _lifted, lambda node: [1.0, 1.0], "multiplies rows by what they share", _read, by_batch=True
    ),
    **dict.fromkeys((SparseDot, StructuredDot), OpRecord(_sparse_product, OF_MANY, "is of a matrix that is known")),
    SolveBase: OpRecord(_solution, OF_MANY, _solution_degrees, by_batch=True),
    Cholesky: OpRecord("makes each element of all those of a matrix", OF_MANY, lambda node: [0.5], by_batch=True),
}
