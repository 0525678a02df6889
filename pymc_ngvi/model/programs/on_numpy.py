"""Evaluates programs with NumPy: in parts that the cache holds, each operation into what no later one reads."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.model.programs.operations import OPERATIONS
from pymc_ngvi.model.programs.program import RowProgram

#: Values that are computed at a time.
_CACHED = 2**13

#: Which axes of an array have more than one element.
type _Axes = tuple[bool, ...]


class _Step(NamedTuple):
    """A function, the values that it reads and makes, and the one that it writes over; -1 for a new array."""

    function: object
    read: tuple[int, ...]
    make: int
    over: int


class OnNumPy:
    """A program as a function of arrays.

    Parameters
    ----------
    program : RowProgram
    """

    def __init__(self, program: RowProgram) -> None:
        self.program = program
        self._constants = [np.float64(number) for number in program.constants]
        self._n_calls = len(program.calls)
        self._steps: dict[tuple[_Axes, ...], list[_Step]] = {}

    def __call__(self, *inputs: AnyArray) -> list[AnyArray]:
        """Return the outputs at inputs that broadcast, all with as many axes: at most of the shape of these."""
        given = [x if x.dtype == np.float64 or x.dtype == np.bool_ else x.astype(np.float64) for x in inputs]
        shape = np.broadcast_shapes(*[x.shape for x in given])
        size = 1
        for length in shape:
            size *= length
        if not size:
            return [np.empty(shape) for _ in self.program.outputs]
        if size < 2 * _CACHED or not self._n_calls:
            return self._evaluated(given)
        return self._in_parts(given, shape, size)

    def _in_parts(self, inputs: list[AnyArray], shape: tuple[int, ...], size: int) -> list[AnyArray]:
        axis = next(a for a, length in enumerate(shape) if length > 1)
        n = shape[axis]
        step = max(1, n * _CACHED // size)
        before = (slice(None),) * axis
        outputs: list[AnyArray] = []
        for start in range(0, n, step):
            at = (*before, slice(start, start + step))
            part = self(*[x[at] if x.shape[axis] > 1 else x for x in inputs])
            outputs = outputs or [np.empty(shape) for _ in part]
            for whole, values in zip(outputs, part, strict=True):
                whole[at] = values
        return outputs

    def _evaluated(self, inputs: list[AnyArray]) -> list[AnyArray]:
        axes = tuple([tuple([length > 1 for length in x.shape]) for x in inputs])
        steps = self._steps.get(axes)
        if steps is None:
            steps = self._steps[axes] = self._planned(axes)
        values: list[AnyArray] = [*inputs, *self._constants, *[_NOTHING] * self._n_calls]
        for function, read, make, over in steps:
            if over < 0:
                values[make] = function(*[values[k] for k in read])
            else:
                values[make] = function(*[values[k] for k in read], out=values[over])
        return [values[k] for k in self.program.outputs]

    def _planned(self, axes: Sequence[_Axes]) -> list[_Step]:
        """Return what is done for inputs of some shapes."""
        program, ndim = self.program, len(axes[0])
        n_before = program.n_inputs + len(program.constants)
        of_value: list[_Axes] = [*axes, *[(False,) * ndim] * len(program.constants)]
        last = {k: at for at, call in enumerate(program.calls) for k in call.read}
        last |= dict.fromkeys(program.outputs, len(program.calls))
        free: dict[_Axes, list[int]] = {}
        steps = []
        for at, call in enumerate(program.calls):
            operation = OPERATIONS[call.name]
            here = tuple(map(any, zip(*[of_value[k] for k in call.read], strict=True)))
            of_value.append(here)
            for k in set(call.read):
                if k >= n_before and last[k] == at and not OPERATIONS[program.calls[k - n_before].name].is_condition:
                    free.setdefault(of_value[k], []).append(k)
            over = free[here].pop() if operation.writes and free.get(here) else -1
            steps.append(_Step(operation.function, call.read, n_before + at, over))
        return steps


_NOTHING: AnyArray = np.empty(0)
