"""Models of which it is known that log p has one mode: sums of rows, each a concave function of linear predictors.

Regressions with log-concave likelihoods (Normal with a given standard deviation, Poisson, Binomial and Bernoulli, Gamma
and negative binomial with a given shape, each with its usual link) and log-concave priors, and the same with Gaussian
effects at given scales. That a row is concave follows from its operations by the rules of disciplined convex
programming [1]_: sums of concave functions, and concave functions of affine ones. No scale that is a parameter is
among them.

References
----------
.. [1] M. Grant, S. Boyd and Y. Ye (2006). Disciplined convex programming. Global optimization, Springer.
   https://doi.org/10.1007/0-387-30528-9_7
"""

import math

from collections.abc import Sequence
from enum import IntFlag
from typing import NamedTuple

import numpy as np
import pytensor.scalar as ps

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.scalar.math import Sigmoid, Softplus
from pytensor.tensor.elemwise import DimShuffle, Elemwise

from pymc_ngvi.core.types import AnyArray, Array, Indices
from pymc_ngvi.density.logdensity import ModelDensity
from pymc_ngvi.reading.predictors import Rows


class _Convexity(IntFlag):
    """What is known of a function of the predictors of a row: affine ones are both."""

    NONE, CONVEX, CONCAVE = 0, 1, 2
    AFFINE = CONVEX | CONCAVE

    def times(self, low: float, high: float) -> "_Convexity":
        """Return that of the function times numbers within bounds."""
        if self is _Convexity.AFFINE or low >= 0.0:
            return self
        return _Convexity((self & 1) << 1 | (self & 2) >> 1) if high <= 0.0 else _Convexity.NONE


class _Bounded(NamedTuple):
    """A curve, and bounds of the values."""

    curve: _Convexity
    low: float = -math.inf
    high: float = math.inf

    @property
    def is_number(self) -> bool:
        return self.low == self.high


_UNKNOWN = _Bounded(_Convexity.NONE)
#: Functions that increase, with their curves, and bounds of their values; exp is positive.
_INCREASING: dict[type, _Bounded] = {
    ps.Exp: _Bounded(_Convexity.CONVEX, math.ulp(0.0)),
    ps.Expm1: _Bounded(_Convexity.CONVEX, -1.0),
    Softplus: _Bounded(_Convexity.CONVEX, 0.0),
    ps.Log: _Bounded(_Convexity.CONCAVE),
    ps.Log1p: _Bounded(_Convexity.CONCAVE),
    Sigmoid: _Bounded(_Convexity.NONE, 0.0, 1.0),
}


def has_one_mode(density: ModelDensity) -> bool:
    """Tell whether log p is known to be concave, so that it has one mode."""
    rows = density.rows
    return rows is not None and all(_is_concave(kind, kind.slots) for kind in rows.terms.rows)


def rows_not_concave(density: ModelDensity) -> Array:
    """Return how many rows each coordinate is in that are not known to be concave in it, the others being given.

    Shape (n_dim,); ones where log p is not known by rows.
    """
    rows = density.rows
    if rows is None or rows.terms.rest:
        return np.ones(density.n_dim)
    linear, result = rows.linear_map.plain, np.zeros(density.n_dim)
    for kind in rows.terms.rows:
        for slot, index in zip(kind.slots, kind.index.T, strict=True):
            if not _is_concave(kind, [slot]):
                result += (linear.rest[index] != 0.0).sum(axis=0)
                result[linear.columns] += (linear.dense[index] != 0.0).sum(axis=0)
    return result


def concave_given(density: ModelDensity, most: int) -> Indices | None:
    """Return few coordinates given which log p is known to be concave in all others; None where there are none."""
    outside = np.flatnonzero(rows_not_concave(density))
    rows = density.rows
    if rows is None or rows.terms.rest or not 0 < len(outside) <= min(most, density.n_dim - 1):
        return None
    linear = rows.linear_map.plain
    inside = np.setdiff1d(np.arange(density.n_dim), outside)
    dense = linear.dense[:, ~np.isin(linear.columns, outside)]
    varies = (dense != 0.0).any(axis=1) | (np.asarray(abs(linear.rest[:, inside]).sum(axis=1)).ravel() > 0.0)
    for kind in rows.terms.rows:
        if not _is_concave(
            kind, [slot for slot, of in zip(kind.slots, varies[kind.index].any(axis=0), strict=True) if of]
        ):
            return None
    return outside


def _is_concave(rows: Rows, slots: Sequence[Variable]) -> bool:
    """Tell whether each of some rows is a concave function of some of its predictors, the others being given."""
    known: dict[Variable, _Bounded] = {slot: _Bounded(_Convexity.AFFINE) for slot in rows.slots}
    known |= {var: _of_numbers(value) for var, value in rows.data.items()}
    varies = set(slots)
    for node in toposort([rows.value]):
        known |= {i: _of_numbers(i.data) for i in node.inputs if isinstance(i, Constant)}
        inputs = [known.get(i, _UNKNOWN) for i in node.inputs]
        found = _UNKNOWN
        if isinstance(node.op, DimShuffle):
            found = inputs[0]
        elif (inner := _inside_log_exp(node)) is not None:
            found = known.get(inner, _UNKNOWN)
        elif isinstance(node.op, Elemwise):
            found = _of_operation(node.op.scalar_op, inputs, [i in varies for i in node.inputs])
        for out in node.outputs:
            varies |= {out} if varies.intersection(node.inputs) else set()
            known[out] = found if out in varies else found._replace(curve=_Convexity.AFFINE)
    return bool(known.get(rows.value, _UNKNOWN).curve & _Convexity.CONCAVE)


def _inside_log_exp(node: Apply) -> Variable | None:
    """Return x where a node is log(exp(x)), as the log of a rate with a log link is."""
    inner = node.inputs[0].owner
    both = [n.op.scalar_op for n in (node, inner) if n is not None and isinstance(n.op, Elemwise)]
    if len(both) == 2 and isinstance(both[0], ps.Log) and isinstance(both[1], ps.Exp):
        return inner.inputs[0]
    return None


def _of_numbers(values: AnyArray) -> _Bounded:
    numbers = np.asarray(values, dtype=np.float64)
    if not numbers.size or np.isnan(numbers).any():
        return _Bounded(_Convexity.AFFINE)
    return _Bounded(_Convexity.AFFINE, float(numbers.min()), float(numbers.max()))


def _of_operation(op: ps.ScalarOp, inputs: Sequence[_Bounded], vary: Sequence[bool]) -> _Bounded:
    """Return what is known of the result of an operation."""
    one = inputs[0]
    if isinstance(op, ps.Identity | ps.Cast):
        return one
    if isinstance(op, ps.Neg):
        return _scaled(one, _Bounded(_Convexity.AFFINE, -1.0, -1.0))
    if isinstance(op, ps.Add):
        curve, low, high = one.curve, sum(i.low for i in inputs), sum(i.high for i in inputs)
        for other in inputs[1:]:
            curve &= other.curve
        return _Bounded(curve, low, high)
    if isinstance(op, ps.Sub):
        return _of_operation(ps.add, [one, _scaled(inputs[1], _Bounded(_Convexity.AFFINE, -1.0, -1.0))], vary)
    if isinstance(op, ps.Mul):
        return _product(inputs, vary)
    if isinstance(op, ps.TrueDiv):
        other = inputs[1]
        if vary[1] or other.low <= 0.0 <= other.high:
            return _UNKNOWN
        return _scaled(one, _Bounded(_Convexity.AFFINE, *sorted((1.0 / other.low, 1.0 / other.high))))
    if isinstance(op, ps.Switch):
        if one.is_number:
            return inputs[1 if one.low else 2]
        curve = inputs[1].curve & inputs[2].curve if not vary[0] else _Convexity.NONE
        return _Bounded(curve, min(i.low for i in inputs[1:]), max(i.high for i in inputs[1:]))
    square = isinstance(op, ps.Sqr) or (isinstance(op, ps.Pow) and inputs[1].is_number and inputs[1].low == 2.0)
    if square or isinstance(op, ps.Abs):
        convex = one.curve is _Convexity.AFFINE
        largest = max(abs(one.low), abs(one.high))
        return _Bounded(_Convexity.CONVEX if convex else _Convexity.NONE, 0.0, largest**2 if square else largest)
    if type(op) in _INCREASING:
        found = _INCREASING[type(op)]
        return found._replace(curve=found.curve & one.curve)
    if isinstance(op, ps.AND):
        return _Bounded(_Convexity.NONE, min(i.low for i in inputs), min(i.high for i in inputs))
    if isinstance(op, ps.LogicalComparison):  # which bounds may settle: no value is infinite
        other, low, high = inputs[1], 0.0, 1.0
        if isinstance(op, ps.EQ) and other.is_number:
            high = float(one.low <= other.low <= one.high and not math.isinf(other.low))
        elif isinstance(op, ps.GT | ps.GE):
            low = float(one.low > other.high or (isinstance(op, ps.GE) and one.low >= other.high))
        return _Bounded(_Convexity.NONE, low, high)
    return _UNKNOWN


def _scaled(one: _Bounded, by: _Bounded) -> _Bounded:
    """Return what is known of a function times numbers."""
    ends = [a * b if a and b else 0.0 for a in (one.low, one.high) for b in (by.low, by.high)]
    return _Bounded(one.curve.times(by.low, by.high), min(ends), max(ends))


def _product(inputs: Sequence[_Bounded], vary: Sequence[bool]) -> _Bounded:
    """Return what is known of a product: of one that varies with numbers."""
    result = _Bounded(_Convexity.AFFINE, 1.0, 1.0)
    for factor, varies in zip(inputs, vary, strict=True):
        if not varies:
            result = _scaled(result, factor)
    moving = [factor for factor, varies in zip(inputs, vary, strict=True) if varies]
    if not moving:
        return result
    return _scaled(moving[0], result) if len(moving) == 1 else _UNKNOWN
