"""Rows by functions that PyTensor compiles of their graphs: by Numba, by C, or by its virtual machine."""

import math

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pytensor
import pytensor.tensor as pt

from pytensor.compile import Function
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace

from pymc_ngvi.core.types import Array
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.ops import cost
from pymc_ngvi.reading.affine import CompileAll, CompiledOnce
from pymc_ngvi.reading.terms import Rows, interacts, of_sum, shared_first
from pymc_ngvi.rows.expectation import RowFunction, SummedRowFunction, row_slices
from pymc_ngvi.rows.row_hessian import FirstDerivatives, SecondDerivatives

# --- what an engine does: it evaluates rows ---


class Engine(Protocol):
    """Evaluates rows, and their derivatives."""

    def row_function(self, rows: Rows) -> RowFunction:
        """Return the function of rows."""

    def first_derivatives(self, rows: Rows) -> FirstDerivatives | None:
        """Return rows with their derivatives by predictors; None where the gradient of log p is to be compiled."""

    def second_derivatives(self, rows: Rows) -> SecondDerivatives:
        """Return the second derivatives of rows by their predictors, those alone that are not 0 everywhere."""


#: Points at a time of a function that is more than arithmetic with numbers.
_AT_A_TIME = 32
#: Axes of the arrays that functions are compiled for.
_TWO = 2


class PyTensorEngine:
    """Compiles the graphs of rows, those of equal rows once."""

    def __init__(self, compile_: CompileAll) -> None:
        self._compile = CompiledOnce(compile_)

    def row_function(self, rows: Rows) -> RowFunction:
        """Return the function of rows."""
        data = list(rows.data.values())
        if rows.is_whole:
            function = self._compile([*rows.slots, *rows.data], [rows.value])
            whole = FewAtATime(function, cost.estimate([rows.value], batch=_AT_A_TIME).widest)
            return RowFunction(whole, rows.index, data, interacts(rows))
        if rows.sum_ is not None:
            return self._summed(rows)
        rows, n_shared = shared_first(rows)
        shared = [pt.matrix(slot.name, dtype="float64", shape=(None, 1)) for slot in rows.slots[:n_shared]]
        with without_c():
            [value] = clone_replace(
                [rows.value], dict(zip(rows.slots[:n_shared], shared, strict=True)), rebuild_strict=False
            )
        function = self._on_two_axes([*shared, *rows.slots[n_shared:], *rows.data], value)
        return RowFunction(function, rows.index, data, interacts(rows), n_shared=n_shared)

    def _summed(self, rows: Rows) -> RowFunction:
        assert rows.sum_ is not None
        given = list(rows.data)
        function = self._on_two_axes([*rows.slots, *given], rows.value)
        with without_c():
            summed = rows.slots[-rows.n_summed :]
            zeros = {slot: pt.zeros((1, 1)) for slot in summed}
            outputs = [rows.sum_, *pytensor.grad(rows.sum_.sum(), summed)]
            path = clone_replace(outputs, zeros, rebuild_strict=False)
            beside, inputs, value = of_sum(rows, rows.sum_)
        path += [pt.ones((1, 1)) for _ in path[1:]]
        along = self._compile([*rows.slots[: -rows.n_summed], *given], path)
        given_sum = self._on_two_axes([*inputs, *given], value)
        data, owners = list(rows.data.values()), list(range(rows.n_summed))
        return SummedRowFunction(
            function, rows.index, data, interacts(rows), rows.n_summed, along, owners, given_sum, beside
        )  # fmt: skip

    def _on_two_axes(self, inputs: list[Variable], value: Variable) -> "OnTwoAxes":
        return OnTwoAxes(self._compile(inputs, [value]), tuple(var.type.broadcastable[1] for var in inputs))

    def first_derivatives(self, rows: Rows) -> FirstDerivatives | None:
        """Return None: where functions are compiled, one for all of log p does."""

    def second_derivatives(self, rows: Rows) -> SecondDerivatives:
        """Return the second derivatives of rows, compiled."""
        pairs, graphs = [], []
        with without_c():
            [value] = graph.with_branches([rows.value])
            for a, slope in enumerate(graph.slopes(value.sum(), rows.slots, "first")):
                if slope is None:
                    continue
                for b, second in enumerate(graph.slopes(slope.sum(), rows.slots[: a + 1], "second")):
                    if second is not None:
                        pairs.append((a, b))
                        graphs.append(second)
        function = self._compile([*rows.slots, *rows.data], graphs)
        return SecondDerivatives(function, rows.index, pairs, list(rows.data.values()))


@dataclass(frozen=True)
class OnTwoAxes:
    """A function that is compiled for arrays (n_points, n_rows), of arrays with three axes, too."""

    function: Function
    #: Which inputs have one column.
    one_column: tuple[bool, ...]

    def __call__(self, *inputs: Array) -> Sequence[Array]:
        """Return values, of three axes with those of all rows last."""
        if inputs[0].ndim == _TWO:
            return self.function(*inputs)
        shape = np.broadcast_shapes(*[x.shape for x in inputs])
        flat = [
            x.reshape(len(x), 1) if is_one else np.broadcast_to(x, (len(x), *shape[1:])).reshape(len(x), -1)
            for x, is_one in zip(inputs, self.one_column, strict=True)
        ]
        return [np.broadcast_to(v, (shape[0], shape[1] * shape[2])).reshape(shape) for v in self.function(*flat)]

    def rows_first(self, *inputs: Array) -> Sequence[Array]:
        """Return values of arrays (n_rows, ...) with three axes."""
        shape = np.broadcast_shapes(*[x.shape for x in inputs])
        flat = [
            np.broadcast_to(x[:n], (n, *shape[1:])).reshape(n, -1).T
            for x, n in zip(inputs, [1 if is_one else shape[0] for is_one in self.one_column], strict=True)
        ]
        return [np.broadcast_to(v.T, (shape[0], math.prod(shape[1:]))).reshape(shape) for v in self.function(*flat)]


@dataclass(frozen=True)
class FewAtATime:
    """Evaluates what may take much memory at a point."""

    function: Function
    #: Numbers within it: finer rules of quadrature are for functions of few.
    n_evaluations: int

    def __call__(self, *predictors: Array) -> list[Array]:
        """Return values, (n_points, 1)."""
        slices = row_slices(len(predictors[0]), _AT_A_TIME)
        return [np.concatenate([self.function(*[p[at] for p in predictors])[0] for at in slices])]
