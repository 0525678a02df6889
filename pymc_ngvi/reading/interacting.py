"""What a function of rows tells of its second derivatives before any is made: which are not 0, and that they exist."""

import itertools

import pytensor.scalar as ps

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.scalar.math import GammaLn, Sigmoid, Softplus
from pytensor.tensor.elemwise import Elemwise

from pymc_ngvi.reading.terms import Rows

type Slots = frozenset[Variable]
type Pairs = frozenset[tuple[Variable, Variable]]

_NONE: Slots = frozenset()
#: Linear in all inputs together; piecewise constant; and others with second derivatives.
_LINEAR = (ps.Add, ps.Sub, ps.Neg, ps.Identity, ps.Cast)
_STEPS = (ps.LogicalComparison, ps.FixedLogicalComparison, ps.AND, ps.OR, ps.Sign)
_SMOOTH = (
    ps.Mul, ps.TrueDiv, ps.Exp, ps.Expm1, ps.Log, ps.Log1p, ps.Sqr, ps.Sqrt, ps.Pow, ps.Reciprocal, ps.Abs, ps.Switch,
    ps.Tanh, ps.Sin, ps.Cos, ps.ScalarMaximum, ps.ScalarMinimum, Sigmoid, Softplus, GammaLn,
)  # fmt: skip


def is_smooth(rows: Rows) -> bool:
    """Tell whether a row is made of common operations alone, all of which have second derivatives."""
    return all(
        isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, (*_LINEAR, *_STEPS, *_SMOOTH))
        for node in toposort([rows.value])
    )


def interacting(rows: Rows) -> list[tuple[int, int]]:
    """Return the pairs of predictors by which a row can have a second derivative other than 0.

    Parameters
    ----------
    rows : Rows

    Returns
    -------
    list of (int, int)
        Numbers of two predictors of a row, the first not before the second.
    """
    number = {slot: i for i, slot in enumerate(rows.slots)}
    depends: dict[Variable, Slots] = {slot: frozenset([slot]) for slot in rows.slots}
    pairs: dict[Variable, Pairs] = {}
    for node in toposort([rows.value]):
        made = _pairs(node, depends, pairs)
        for out in node.outputs:
            depends[out] = frozenset().union(*(depends.get(i, _NONE) for i in node.inputs))
            pairs[out] = made
    found = {(number[a], number[b]) for a, b in pairs.get(rows.value, frozenset())}
    return sorted((max(pair), min(pair)) for pair in {(max(pair), min(pair)) for pair in found})


def _pairs(node: Apply, depends: dict[Variable, Slots], pairs: dict[Variable, Pairs]) -> Pairs:
    """Return the pairs that interact in the output of a node."""
    inputs = [i for i in node.inputs if not isinstance(i, Constant)]
    before: Pairs = frozenset().union(*(pairs.get(i, frozenset()) for i in inputs))
    scalar_op = node.op.scalar_op if isinstance(node.op, Elemwise) else None
    if isinstance(scalar_op, _LINEAR):
        return before
    if isinstance(scalar_op, _STEPS):
        return frozenset()
    if isinstance(scalar_op, ps.Switch) and not depends.get(node.inputs[0], _NONE):
        return before
    if isinstance(scalar_op, ps.Mul):
        across = itertools.combinations([depends.get(i, _NONE) for i in inputs], 2)
        return before.union(*(itertools.product(a, b) for a, b in across))
    if isinstance(scalar_op, ps.TrueDiv) and not depends.get(node.inputs[1], _NONE):
        return before
    everything: Slots = frozenset().union(*(depends.get(i, _NONE) for i in inputs))
    return frozenset(itertools.product(everything, everything))
