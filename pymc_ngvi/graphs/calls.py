"""Graphs of operations on arrays as calls of NumPy functions, one after the other: for many calls with little work."""

import importlib

from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np
import pytensor.scalar as ps

from pytensor.compile.ops import DeepCopyOp
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.tensor.elemwise import Elemwise

from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.graphs import rewrites


class NoNumPyFunction(Exception):
    """A graph has an operation that no NumPy function does; the message names it."""


class Calls:
    """A list of calls of NumPy functions: less than 1 microsecond each, where a thunk of PyTensor takes 5."""

    def __init__(self, inputs: Sequence[Variable], outputs: Sequence[Variable]) -> None:
        self._slots = {var: k for k, var in enumerate(inputs)}
        self._n_inputs, self._constants = len(inputs), dict[int, AnyArray]()
        self._calls: list[tuple[Callable[..., AnyArray], list[int], int]] = []
        for node in toposort(outputs):
            read = [self._slot(i) for i in node.inputs]
            self._calls.append((_numpy_function(node.op, len(read)), read, self._new(node.outputs[0])))
        self._outputs = [self._slot(out) for out in outputs]

    def _new(self, var: Variable) -> int:
        self._slots[var] = len(self._slots)
        return self._slots[var]

    def _slot(self, var: Variable) -> int:
        if var not in self._slots:
            if not isinstance(var, Constant):
                raise NoNumPyFunction(f"{var} is no argument")
            self._constants[self._new(var)] = np.asarray(var.data)
        return self._slots[var]

    def __call__(self, inputs: Sequence[AnyArray]) -> list[AnyArray]:
        """Return the outputs."""
        values: list[AnyArray] = [*inputs, *[np.empty(0)] * (len(self._slots) - self._n_inputs)]
        for slot, constant in self._constants.items():
            values[slot] = constant
        for function, read, out in self._calls:
            values[out] = function(*[values[k] for k in read])
        return [values[k] for k in self._outputs]


def _numpy_function(op: object, n_inputs: int) -> Callable[..., AnyArray]:
    if isinstance(op, DeepCopyOp):
        return np.array
    if not isinstance(op, Elemwise) or not rewrites.runs_on_numpy(op.scalar_op, n_inputs):
        raise NoNumPyFunction(f"{op} has no NumPy function")
    scalar_op = op.scalar_op
    if isinstance(scalar_op, ps.Cast):
        dtype = np.dtype(scalar_op.o_type.dtype)
        return lambda x: np.asarray(x).astype(dtype)
    function = _named((op.nfunc_spec or scalar_op.nfunc_spec)[0])
    if isinstance(scalar_op, ps.Add | ps.Mul) and n_inputs != 2:
        return lambda *x: reduce(function, x)
    return function


def _named(name: str) -> Callable[..., AnyArray]:
    """Return the function of a name such as "exp" or "scipy.special.expit"."""
    module, _, name = name.rpartition(".")
    return getattr(importlib.import_module(module or "numpy"), name)
