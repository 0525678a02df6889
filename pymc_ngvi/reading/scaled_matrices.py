"""Known matrices times an unknown number: what is made of them is what is made of the matrices, scaled.

A normal prior with the covariance ``s**2 * K`` factorises an unknown matrix, as it is written. The Cholesky factor is
that of K, times s: the prior is a sum over rows, each a function of s and of an element of a linear function.
"""

import functools

from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.elemwise import Elemwise

from pymc_ngvi.ops.elements import Rearranged
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.ops.registry import elements, operation
from pymc_ngvi.reading.affine import with_others


class _Scaled(NamedTuple):
    """A number, a variable whose axes have length 1, times a matrix; and whether that is known."""

    factor: Variable
    matrix: Variable
    is_known: bool


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
        found = _as_scaled(node, scaled, facts)
        if found is None:
            continue
        [out] = node.outputs
        if found.is_known:
            scaled[out] = found
        if not isinstance(node.op, Elemwise) and not isinstance(elements(node, facts), Rearranged):
            written[out] = found.factor * found.matrix
    return with_others(logp, written)


def _as_scaled(node: Apply, scaled: dict[Variable, _Scaled], facts: Facts) -> _Scaled | None:
    """Return what a node makes as a number times what it makes of matrices; None where no such number comes out."""
    rule, [out, *others] = operation(node.op).degrees, node.outputs
    is_elementwise = isinstance(node.op, Elemwise)
    if isinstance(rule, str) or others or (is_elementwise and out.type.ndim < 2):
        return None
    factors, matrices, unknown, has_matrix = [], list(node.inputs), False, False
    for k, (var, degree) in enumerate(zip(node.inputs, rule(node), strict=True)):
        if var in scaled:
            factor, matrices[k], _ = scaled[var]
        elif is_elementwise and not facts.is_known(var) and set(facts.shape(var)) <= {1}:
            factor, matrices[k] = var, pt.constant(np.ones((1,) * var.type.ndim))
        else:
            has_matrix, unknown = True, unknown or not facts.is_known(var)
            continue
        has_matrix = has_matrix or var in scaled
        if degree is None:
            return None
        factors.append(_power(_number(factor, out), degree))
    if not factors or not has_matrix or (is_elementwise and unknown):
        return None
    return _Scaled(functools.reduce(pt.mul, factors), node.op(*matrices), not unknown)


def _power(factor: Variable, degree: float) -> Variable:
    """Return a power of a positive number, in the shortest form."""
    if degree == 1.0:
        return factor
    return pt.sqrt(factor) if degree == 0.5 else 1.0 / factor if degree == -1.0 else factor**degree


def _number(factor: Variable, like: Variable) -> Variable:
    """Return a factor with as many axes as a variable."""
    return factor if factor.type.ndim == like.type.ndim else factor.reshape((1,) * like.type.ndim)
