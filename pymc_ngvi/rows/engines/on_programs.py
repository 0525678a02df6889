"""Rows as programs: PyTensor's graphs are read, and not compiled."""

from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from numpy.typing import NDArray
from pytensor.graph.basic import Variable

from pymc_ngvi.core.types import Array
from pymc_ngvi.graphs.programs import program_of, read
from pymc_ngvi.reading.affine import CompileAll
from pymc_ngvi.reading.terms import Rows, interacts, shared_first
from pymc_ngvi.rows.engines.on_pytensor import PyTensorEngine
from pymc_ngvi.rows.expectation import Compiled, RowFunction, SummedRowFunction
from pymc_ngvi.rows.programs.operations import RowProgram
from pymc_ngvi.rows.programs.writer import CannotFollow, Separation, firsts, rewritten, seconds
from pymc_ngvi.rows.row_hessian import FirstDerivatives, SecondDerivatives


class _Sum(NamedTuple):
    """What is read of rows along a sum."""

    #: The sum where all that it is a sum of is 0, and the products that its slopes in these are made of.
    along: RowProgram
    #: In which of these each product is the slope, or a part of it.
    owners: list[int]
    #: The function, given the sum.
    value: RowProgram


class ProgramEngine:
    """Reads rows as programs; rows that have operations it does not know are left to PyTensor."""

    def __init__(self, evaluated: Callable[[RowProgram], Compiled], compile_: CompileAll) -> None:
        self._evaluated, self._otherwise = evaluated, PyTensorEngine(compile_)
        self._read: WeakKeyDictionary[Variable, dict[tuple[object, ...], RowProgram]] = WeakKeyDictionary()
        self._plainly: WeakKeyDictionary[Variable, dict[tuple[object, ...], tuple[Compiled, NDArray[np.bool_]]]]
        self._plainly = WeakKeyDictionary()
        self._sums: WeakKeyDictionary[Variable, _Sum] = WeakKeyDictionary()
        self._functions: dict[RowProgram, Compiled] = {}

    def row_function(self, rows: Rows) -> RowFunction:
        """Return the function of rows."""
        if rows.is_whole:
            return self._otherwise.row_function(rows)
        try:
            return self._plain(rows) if rows.sum_ is None else self._summed(rows)
        except CannotFollow:
            return self._otherwise.row_function(rows)

    def _plain(self, rows: Rows) -> RowFunction:
        rows, n_shared = shared_first(rows)
        numbers, data = _data_of(rows)
        known, key = self._plainly.setdefault(rows.value, {}), (n_shared, *rows.slots, *numbers)
        if key not in known:
            known[key] = self._function(self._value(rows, n_shared, numbers)), interacts(rows)
        function, interacting = known[key]
        return RowFunction(function, rows.index, data, interacting, n_shared=n_shared)

    def _value(self, rows: Rows, n_shared: int, numbers: list[float | None]) -> RowProgram:
        """Return the program of rows, whose graph is read once for each order of their predictors."""
        known, key = self._read.setdefault(rows.value, {}), (n_shared, *rows.slots)
        if key not in known:
            early = [*rows.slots[:n_shared], *rows.data]
            known[key] = program_of([*rows.slots, *rows.data], [rows.value], early)
        return _given(known[key], [*[None] * len(rows.slots), *numbers])

    def _summed(self, rows: Rows) -> RowFunction:
        assert rows.sum_ is not None
        others, given = rows.slots[: -rows.n_summed], list(rows.data)
        if rows.value not in self._sums:
            value = program_of([*others, rows.sum_, *given], [rows.value], [*others, *given])
            self._sums[rows.value] = _Sum(*_along(rows), value)
        known = self._sums[rows.value]
        numbers, data = _data_of(rows)
        none: list[float | None] = [None] * len(others)
        beside = [a for a in known.value.used if a < len(others)]
        function = self._function(self._value(rows, 0, numbers))
        along = self._function(_given(known.along, [*none, *numbers]))
        unused = [None if a in beside else 0.0 for a in range(len(others))]
        given_sum = self._function(_given(known.value, [*unused, None, *numbers]))
        are_shared = len(rows.index) > 1 and bool((rows.index == rows.index[0])[:, : len(others)].all())
        return SummedRowFunction(
            function, rows.index, data, interacts(rows), rows.n_summed, along, known.owners, given_sum, beside,
            shares_u=are_shared,
        )  # fmt: skip

    def _function(self, program: RowProgram) -> Compiled:
        if program not in self._functions:
            self._functions[program] = self._evaluated(program)
        return self._functions[program]

    def first_derivatives(self, rows: Rows) -> FirstDerivatives | None:
        """Return rows with their derivatives; None where they have an operation without one, or one not known here."""
        try:
            rows, n_shared, value, data = self._taken(rows)
            program, by = firsts(value, len(rows.slots))
            function = self._function(program)
        except CannotFollow:
            return None
        return FirstDerivatives(function, rows.index, by, data, n_shared)

    def second_derivatives(self, rows: Rows) -> SecondDerivatives:
        """Return the second derivatives of rows."""
        try:
            rows, n_shared, value, data = self._taken(rows)
            program, pairs = seconds(value, len(rows.slots))
            function = self._function(program)
        except CannotFollow:
            return self._otherwise.second_derivatives(rows)
        return SecondDerivatives(function, rows.index, pairs, data, n_shared)

    def _taken(self, rows: Rows) -> tuple[Rows, int, RowProgram, list[Array]]:
        """Return rows with predictors that all share first, how many these are, their program and its data."""
        if rows.is_whole:
            raise CannotFollow("more than operations element by element")
        rows, n_shared = shared_first(rows)
        numbers, data = _data_of(rows)
        return rows, n_shared, self._value(rows, n_shared, numbers), data


def _given(program: RowProgram, numbers: Sequence[float | None]) -> RowProgram:
    """Return a program with numbers in the place of inputs."""
    writer, outputs = rewritten(program, numbers)
    return writer.written(outputs)


def _data_of(rows: Rows) -> tuple[list[float | None], list[Array]]:
    """Return which data are numbers in the program, and the others, as floats or booleans: one where all are equal."""
    numbers: list[float | None] = []
    data = []
    for var, values in rows.data.items():
        first = values[:, :1]
        is_one = values.shape[1] > 1 and bool((values == first).all())
        is_number = (is_one or values.shape[1] == 1) and var in rows.sources and rows.sources[var].is_weight
        numbers.append(float(first[0, 0]) if is_number else None)
        if not is_number:
            values = first if is_one else values
            data.append(values if values.dtype == np.bool_ else np.asarray(values, dtype=np.float64))
    return numbers, data


def _along(rows: Rows) -> tuple[RowProgram, list[int]]:
    """Return a program of the sum where all that it is a sum of is 0, and of products that make up its slopes in these.

    First the factors that are functions of the other predictors, then as many that are functions of data; and in what
    each of the products is the slope.
    """
    assert rows.sum_ is not None
    n_others = len(rows.slots) - rows.n_summed
    writer, [total] = read([*rows.slots, *rows.data], [rows.sum_], list(rows.data))
    separation = Separation(writer, range(n_others))
    found = [
        (k, one, other)
        for k, slot in enumerate(writer.inputs[n_others : len(rows.slots)])
        if (slope := writer.slope(total, slot)) is not None
        for one, other in separation.of(slope)
    ]
    owners, ones, others = zip(*found, strict=True)
    zeros = [0.0 if n_others <= k < len(rows.slots) else None for k in range(len(writer.inputs))]
    writer, outputs = rewritten(writer.written([total, *ones, *others]), zeros)
    return writer.written(outputs), list(owners)
