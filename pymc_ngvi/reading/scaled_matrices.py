"""Known matrices times an unknown number: what is made of them is what is made of the matrices, scaled.

A normal prior with the covariance ``s**2 * K`` factorises an unknown matrix, as it is written. The Cholesky factor is
that of K, times s: the prior is a sum over rows, each a function of s and of an element of a linear function.
"""

import functools

from typing import NamedTuple

import pytensor.scalar as ps
import pytensor.tensor as pt

from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.linalg.decomposition.cholesky import Cholesky
from pytensor.tensor.linalg.solvers.general import Solve
from pytensor.tensor.linalg.solvers.triangular import SolveTriangular
from pytensor.tensor.math import Dot

from pymc_ngvi.reading.affine import varying_inputs, with_others
from pymc_ngvi.reading.dependence import core_op
from pymc_ngvi.reading.dependence_values import Facts


class _Scaled(NamedTuple):
    """A matrix: a number, a variable whose axes have length 1, times what is known."""

    factor: Variable
    matrix: Variable


def scales_outside(logp: Variable, facts: Facts) -> Variable:
    """Take unknown numbers out of factorisations, solutions and products of matrices that are known but for these.

    Parameters
    ----------
    logp : pytensor scalar
        Simplified.
    facts : Facts
        Of log p.
    """
    scaled: dict[Variable, _Scaled] = {}
    written: dict[Variable, Variable] = {}
    for node in facts.nodes:
        if len(node.outputs) != 1:
            continue
        [out] = node.outputs
        if (found := _as_scaled(node, scaled, facts)) is not None:
            scaled[out] = found
            if isinstance(core_op(node.op), Cholesky):
                written[out] = found.factor * found.matrix
        elif (result := _applied(node, scaled)) is not None:
            written[out] = result
    return with_others(logp, written)


def _as_scaled(node: Apply, scaled: dict[Variable, _Scaled], facts: Facts) -> _Scaled | None:
    """Return what a node makes as a known matrix times a number; None for other nodes."""
    op, [out] = core_op(node.op), node.outputs
    if out.type.ndim < 2:
        return None
    if isinstance(op, Elemwise):
        return _product(node, scaled, facts)
    if isinstance(op, DimShuffle) and node.inputs[0] in scaled:
        factor, matrix = scaled[node.inputs[0]]
        return _Scaled(_number(factor, out), node.op(matrix))
    if isinstance(op, Cholesky) and node.inputs[0] in scaled:
        factor, matrix = scaled[node.inputs[0]]
        return _Scaled(pt.sqrt(factor), node.op(matrix))
    return None


def _product(node: Apply, scaled: dict[Variable, _Scaled], facts: Facts) -> _Scaled | None:
    """Return a product of numbers with one matrix that is known, or known but for a number."""
    op, (first, *others) = node.op.scalar_op, node.inputs
    numbers = [i for i in varying_inputs(node, facts) if set(facts.shape(i)) <= {1}]
    matrices = [i for i in node.inputs if i not in numbers]
    unknown = [i for i in matrices if not facts.is_known(i)]
    if not isinstance(op, ps.Mul | ps.TrueDiv) or not matrices or not all(i in scaled for i in unknown):
        return None
    if len(unknown) > 1 or (isinstance(op, ps.TrueDiv) and (first in numbers or others[0] in unknown)):
        return None
    if not numbers and not unknown:
        return None
    factors = [1.0 / i if isinstance(op, ps.TrueDiv) else i for i in numbers]
    factors += [scaled[i].factor for i in unknown]
    inner = [scaled[i].matrix if i in unknown else i for i in matrices]
    if isinstance(op, ps.TrueDiv):
        inner = [inner[0] / other for other in inner[1:]] or inner
    return _Scaled(functools.reduce(pt.mul, factors), functools.reduce(pt.mul, inner))


def _applied(node: Apply, scaled: dict[Variable, _Scaled]) -> Variable | None:
    """Return the solution with a scaled matrix, or the product with one; None for other nodes."""
    op, [out] = core_op(node.op), node.outputs
    if isinstance(op, Solve | SolveTriangular) and node.inputs[0] in scaled:
        factor, matrix = scaled[node.inputs[0]]
        return node.op(matrix, node.inputs[1]) / _number(factor, out)
    if not isinstance(op, Dot) or not any(i in scaled for i in node.inputs):
        return None
    factors = [_number(scaled[i].factor, out) for i in node.inputs if i in scaled]
    product = node.op(*[scaled[i].matrix if i in scaled else i for i in node.inputs])
    return functools.reduce(pt.mul, factors, product)


def _number(factor: Variable, like: Variable) -> Variable:
    """Return a factor with as many axes as a variable."""
    return factor if factor.type.ndim == like.type.ndim else factor.reshape((1,) * like.type.ndim)
