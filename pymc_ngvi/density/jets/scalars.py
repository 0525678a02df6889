"""Derivatives of scalar operations: from PyTensor, as calls of NumPy functions on arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytensor.scalar as ps
import pytensor.tensor as pt

from pytensor.graph.basic import Constant, Variable
from pytensor.graph.rewriting.basic import dfs_rewriter
from pytensor.tensor.elemwise import Elemwise

from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.jets.arrays import NoJet
from pymc_ngvi.graphs import graph, rewrites
from pymc_ngvi.graphs.calls import Calls, NoNumPyFunction
from pymc_ngvi.graphs.inner import copy_of

_ON_NUMPY = dfs_rewriter(rewrites.expand_composite, rewrites.vectorise_elemwise)


@dataclass(frozen=True)
class JetOperation:
    """A scalar operation, and by which of its arguments it is differentiated."""

    scalar_op: ps.ScalarOp
    #: Of the arguments.
    dtypes: tuple[str, ...]
    by: tuple[int, ...]

    def outputs(self) -> tuple[list[Variable], list[Variable]]:
        """Return the arguments, and the graphs of the value, the derivatives, and those of each pair."""
        inputs = [pt.scalar(dtype=dtype) for dtype in self.dtypes]
        value = Elemwise(self.scalar_op)(*inputs)
        if not self.by:
            return inputs, [value]
        at = [inputs[k] for k in self.by]
        first = _derivatives(value, at, "first")
        second = [_derivatives(first[a], at[: a + 1], "second") for a in range(len(at))]
        return inputs, [value, *first, *[d for row in second for d in row]]


def _derivatives(value: Variable, at: list[Variable], order: str) -> list[Variable]:
    if value.type.dtype not in ("float32", "float64"):
        return [pt.constant(0.0) for _ in at]
    return [pt.constant(0.0) if d is None else d for d in graph.slopes(value, at, order)]


class ScalarFunctions:
    """Evaluates the value and the derivatives of an operation on arrays that broadcast."""

    def __init__(self, inputs: list[Variable], outputs: list[Variable]) -> None:
        self.constants = [_number(out) for out in outputs]
        try:
            self._value, self._all = Calls(inputs, outputs[:1]), Calls(inputs, outputs)
        except NoNumPyFunction as reason:
            raise NoJet(str(reason)) from None

    def value(self, inputs: Sequence[AnyArray]) -> AnyArray:
        """Return the value alone."""
        return self._value(inputs)[0]

    def __call__(self, inputs: Sequence[AnyArray]) -> list[AnyArray]:
        """Return the value, the derivatives, and the second derivatives."""
        return self._all(inputs)


def scalar_functions(operations: list[JetOperation]) -> dict[JetOperation, ScalarFunctions]:
    """Differentiate operations; they are simplified together, which takes less time."""
    made = {operation: operation.outputs() for operation in operations}
    outputs = [out for _, outputs in made.values() for out in outputs]
    fgraph = copy_of(graph.simplify(outputs) if outputs else [])
    _ON_NUMPY.rewrite(fgraph)
    rest = iter(fgraph.outputs)
    return {
        operation: ScalarFunctions(inputs, [next(rest) for _ in outputs])
        for operation, (inputs, outputs) in made.items()
    }


def _number(var: Variable) -> float | None:
    return float(var.data) if isinstance(var, Constant) else None
