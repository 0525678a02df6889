"""Evaluates programs with NumPy: in parts that the cache holds, each operation into what no later one reads."""

import math

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pymc_ngvi.core.types import AnyArray
from pymc_ngvi.rows.programs.operations import OPERATIONS, RowProgram

#: Values that are computed at a time, and shapes of inputs for which steps are kept.
_CACHED, _MOST_SHAPES = 2**13, 1_000
#: In the place of what is not made yet.
_NOTHING: AnyArray = np.empty(0)

#: Which axes of an array have more than one element.
type _Axes = tuple[bool, ...]


class _Step(NamedTuple):
    """A function, the values that it reads and makes, and the one that it writes over; -1 for a new array."""

    function: Callable[..., AnyArray]
    read: tuple[int, ...]
    make: int
    over: int


class _InParts(NamedTuple):
    """The shape that inputs have together, too large for one go, and those of the outputs."""

    shape: tuple[int, ...]
    of_outputs: list[tuple[int, ...]]


class OnNumPy:
    """A program as a function of arrays."""

    def __init__(self, program: RowProgram) -> None:
        self.program = program
        self._rest: list[Any] = [*map(np.float64, program.constants), *[_NOTHING] * len(program.calls)]
        self._plans: dict[tuple[_Axes, ...], tuple[list[_Step], list[_Axes]]] = {}
        self._steps: dict[tuple[tuple[int, ...], ...], list[_Step] | _InParts] = {}

    def __call__(self, *inputs: AnyArray) -> list[AnyArray]:
        """Return the outputs at inputs, floats or booleans, that broadcast, all with as many axes.

        They have the shape that the inputs have together, or one that broadcasts to that.
        """
        with np.errstate(all="ignore"):  # densities overflow far from the mode: the caller sees it
            return self.run(*inputs)

    def run(self, *inputs: AnyArray) -> list[AnyArray]:
        """Return the outputs, where the caller ignores overflow, once for many programs: that takes a microsecond."""
        shapes = tuple([x.shape for x in inputs])
        steps = self._steps.get(shapes)
        if steps is None:
            steps = self._made_for(shapes)
        if isinstance(steps, _InParts):
            return self._in_parts(list(inputs), steps)
        values: list[AnyArray] = [*inputs, *self._rest]
        for function, read, make, over in steps:
            if over < 0:
                values[make] = function(*[values[k] for k in read])
            else:
                values[make] = function(*[values[k] for k in read], out=values[over])
        return [values[k] for k in self.program.outputs]

    def _made_for(self, shapes: tuple[tuple[int, ...], ...]) -> "list[_Step] | _InParts":
        """Return what is done for inputs of some shapes."""
        if len(self._steps) > _MOST_SHAPES:
            self._steps.clear()
        shape = np.broadcast_shapes(*shapes)
        size = math.prod(shape)
        is_large = size >= 2 * _CACHED and bool(self.program.calls)
        axes = tuple(tuple(length > 1 for length in shape) for shape in shapes)
        if axes not in self._plans:
            self._plans[axes] = self._planned(axes)
        steps, of_outputs = self._plans[axes]
        if is_large or not size:
            whole = [tuple(n if here else 1 for n, here in zip(shape, out, strict=True)) for out in of_outputs]
            self._steps[shapes] = _InParts(shape, whole if size else [shape] * len(whole))
        else:
            self._steps[shapes] = steps
        return self._steps[shapes]

    def _in_parts(self, inputs: list[AnyArray], parts: _InParts) -> list[AnyArray]:
        shape, size = parts.shape, math.prod(parts.shape)
        outputs: list[AnyArray] = [np.empty(whole) for whole in parts.of_outputs]
        if not size:
            return outputs
        axis = int(np.argmax(shape))
        n = shape[axis]
        step = max(1, n * _CACHED // size)
        before = (slice(None),) * axis
        for start in range(0, n, step):
            at = (*before, slice(start, start + step))
            part = self.run(*[x[at] if x.shape[axis] > 1 else x for x in inputs])
            for whole, values in zip(outputs, part, strict=True):
                whole[at if whole.shape[axis] > 1 else ...] = values
        return outputs

    def _planned(self, axes: Sequence[_Axes]) -> tuple[list[_Step], list[_Axes]]:
        """Return what is done for inputs of some shapes, and which axes outputs have."""
        program = self.program
        ndim = len(axes[0]) if axes else 0
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
        return steps, [of_value[k] for k in program.outputs]
