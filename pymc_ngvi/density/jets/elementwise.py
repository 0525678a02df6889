"""Rules for operations element by element."""

from collections.abc import Callable
from functools import reduce

import numpy as np
import pytensor.scalar as ps

from pytensor.graph.basic import Apply

from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.jets.arrays import JetKind, NoJet, Space
from pymc_ngvi.density.jets.scalars import JetOperation, ScalarFunctions

#: Arguments by which an operation is differentiated at most: there are derivatives by all pairs.
_MOST_JETS = 8

#: From the points and jets of the inputs to jets of the output, or of each output.
type Rule = Callable[..., AnyArray | list[AnyArray]]


def elementwise(node: Apply, kinds: list[JetKind]) -> "Rule | JetOperation":
    """Return the rule of an operation, or what it has to be made of."""
    op, dtypes = node.op, tuple(i.type.dtype for i in node.inputs)
    scalar_op = op.scalar_op
    if len(node.outputs) > 1:
        raise NoJet(f"{op} has several outputs")
    is_real = node.outputs[0].type.dtype.startswith("float")
    jets = [k for k, kind in enumerate(kinds) if kind is JetKind.JET and is_real]
    if not jets:
        return JetOperation(scalar_op, dtypes, ())
    if isinstance(scalar_op, ps.Switch):
        return _switch if kinds[0] is not JetKind.JET else _no_rule(op)
    if isinstance(scalar_op, ps.ScalarMaximum) and len(kinds) == 2:
        return lambda space, x, y: _switch(space, _is_at_least(x[:1], y[:1]), x, y)
    if isinstance(scalar_op, ps.ScalarMinimum) and len(kinds) == 2:
        return lambda space, x, y: _switch(space, _is_at_least(-x[:1], -y[:1]), x, y)
    if isinstance(scalar_op, ps.Add):
        return _add
    if isinstance(scalar_op, ps.Sub):
        return _on_all_terms(np.subtract) if len(jets) == 2 else lambda space, x, y: _add(space, x, -y)
    if isinstance(scalar_op, ps.Neg):
        return _on_all_terms(np.negative)
    if isinstance(scalar_op, ps.Mul) and len(jets) == 1 and len(kinds) == 2:
        return _on_all_terms(np.multiply)
    if isinstance(scalar_op, ps.TrueDiv) and jets == [0]:
        return _on_all_terms(np.true_divide)
    if len(jets) > _MOST_JETS:
        raise NoJet(f"{op} has {len(jets)} arguments that have derivatives")
    return JetOperation(scalar_op, dtypes, tuple(jets))


def _no_rule(op: object) -> Rule:
    raise NoJet(f"{op} has no rule for these arguments")


def _is_at_least(x: AnyArray, y: AnyArray) -> AnyArray:
    return (x >= y) | np.isnan(x)


def _on_all_terms(function: Callable[..., AnyArray]) -> Rule:
    """Return the rule of a function that is linear in its jets."""
    return lambda space, *x: function(*x)


def _add(space: Space, *terms: AnyArray) -> AnyArray:
    """Add up jets, and what has no derivatives."""
    jets, rest = ([x for x in terms if (len(x) == space.n_terms) is is_jet] for is_jet in (True, False))
    out = reduce(np.add, jets)
    if not rest:
        return out
    more = reduce(np.add, rest)
    shape = np.broadcast_shapes(out.shape[1:], more.shape[1:])
    out = np.broadcast_to(out, (len(out), *shape)).copy() if out.shape[1:] != shape or len(jets) == 1 else out
    out[0] += more[0]
    return out


def _switch(space: Space, condition: AnyArray, x: AnyArray, y: AnyArray) -> AnyArray:
    if len(x) == len(y):
        return np.where(condition, x, y)
    n = max(len(x), len(y))
    parts = [part if len(part) == n else np.concatenate([part, np.zeros((n - 1, *part.shape[1:]))]) for part in (x, y)]
    return np.where(condition, *parts)


class Elementwise:
    """The rule of a function of some jets, by its derivatives.

    Parameters
    ----------
    by : tuple of int
        The inputs that are jets.
    functions : ScalarFunctions
    """

    def __init__(self, by: tuple[int, ...], functions: ScalarFunctions) -> None:
        self._functions, n = functions, len(by)
        self._slopes = [(1 + a, k) for a, k in enumerate(by) if functions.constants[1 + a] != 0.0]
        pairs = [(by[a], by[b]) for a in range(n) for b in range(a + 1)]
        self._curves = [(1 + n + c, *pair) for c, pair in enumerate(pairs) if functions.constants[1 + n + c] != 0.0]

    def __call__(self, space: Space, *inputs: AnyArray) -> AnyArray:
        """Return the jets of the output."""
        values = [x[0] for x in inputs]
        if not self._slopes or not space.order:
            return space.lifted(np.asarray(self._functions.value(values))[None])
        found = self._functions(values)
        value = np.asarray(found[0])
        out = np.empty((space.n_terms, *value.shape))
        out[0], rest = value, out[1:]
        for at, (c, k) in enumerate(self._slopes):
            if at:
                rest += found[c] * inputs[k][1:]
            else:
                np.multiply(found[c], inputs[k][1:], out=rest)
        if space.order == 2:
            second = space.seconds(out)
            for c, k, m in self._curves:
                second += found[c] * space.products(inputs[k], inputs[m])
        return out
