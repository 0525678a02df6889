"""Writes programs: equal operations once, trivial ones not at all, stable forms for what loses digits; derivatives."""

import math

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from pymc_ngvi.core.refusal import Reason, RefusedFor
from pymc_ngvi.rows.programs.operations import OPERATIONS, Call, RowProgram


class CannotFollow(RefusedFor):
    """An operation is not known, or has no derivative."""

    reason = Reason.NO_RULE


@dataclass(frozen=True, eq=False)
class Written:
    """A value of a program that is being written; arithmetic on it writes more."""

    writer: "Writer"
    at: int

    def to(self, name: str, *others: "Written | float | None") -> "Written":
        """Return an operation on this value, and on others; None stands for 0."""
        return self.writer.call(name, self, *[0.0 if other is None else other for other in others])

    def __add__(self, other: "Written | float") -> "Written":
        return self.to("add", other)

    def __radd__(self, other: float) -> "Written":
        return self.writer.constant(other) + self

    def __sub__(self, other: "Written | float") -> "Written":
        return self.to("sub", other)

    def __rsub__(self, other: float) -> "Written":
        return self.writer.constant(other) - self

    def __mul__(self, other: "Written | float") -> "Written":
        return self.to("mul", other)

    def __rmul__(self, other: float) -> "Written":
        return self.writer.constant(other) * self

    def __truediv__(self, other: "Written | float") -> "Written":
        return self.to("div", other)

    def __rtruediv__(self, other: float) -> "Written":
        return self.writer.constant(other) / self

    def __neg__(self) -> "Written":
        return self.to("neg")


type _Key = tuple[str, tuple[int, ...]] | tuple[str, bytes] | tuple[str, str, int]


class Writer:
    """What has been written of a program."""

    def __init__(self, n_inputs: int, conditions: Sequence[int] = ()) -> None:
        self._n_inputs = n_inputs
        self._names: list[str] = ["input"] * n_inputs
        self._read: list[tuple[int, ...]] = [()] * n_inputs
        self._numbers: list[float | None] = [None] * n_inputs
        self._is_condition = [k in conditions for k in range(n_inputs)]
        self._made: dict[object, int] = {}
        self._tangents: dict[int, dict[int, Written | None]] = {}
        self.inputs = [Written(self, k) for k in range(n_inputs)]

    def constant(self, number: float) -> Written:
        """Return a number."""
        number = float(number)
        key = "constant", np.float64(number).tobytes()
        if key not in self._made:
            self._made[key] = self._new("constant", (), number, is_condition=False)
        return Written(self, self._made[key])

    def _new(self, name: str, read: tuple[int, ...], number: float | None, *, is_condition: bool) -> int:
        self._names.append(name)
        self._read.append(read)
        self._numbers.append(number)
        self._is_condition.append(is_condition)
        return len(self._names) - 1

    def number(self, value: Written) -> float | None:
        """Return the number that a value always is; None where there is none."""
        return self._numbers[value.at]

    def call(self, name: str, *args: Written | float) -> Written:
        """Return an operation on values."""
        operation = OPERATIONS[name]
        given = [arg if isinstance(arg, Written) else self.constant(arg) for arg in args]
        if not operation.is_condition and name != "float":
            is_kept = [not self._is_condition[arg.at] or (name == "switch" and not k) for k, arg in enumerate(given)]
            given = [arg if kept else self.call("float", arg) for arg, kept in zip(given, is_kept, strict=True)]
        numbers = [self.number(arg) for arg in given]
        if all(number is not None for number in numbers):
            with np.errstate(all="ignore"):
                return self.constant(float(operation.function(*[np.float64(number) for number in numbers])))
        # What is simpler, or keeps more digits.
        simple = _simpler(self, name, given)
        if simple is not None:
            return simple
        read = tuple(arg.at for arg in given)
        key = name, tuple(sorted(read)) if name in ("add", "mul") else read
        if key not in self._made:
            self._made[key] = self._new(name, read, None, is_condition=operation.is_condition)
        return Written(self, self._made[key])

    def parts(self, value: Written, name: str) -> list[Written] | None:
        """Return the arguments of a value that an operation made; None where another one did."""
        return self.arguments(value) if self._names[value.at] == name else None

    def arguments(self, value: Written) -> list[Written]:
        """Return what a value is made of, one step back."""
        return [Written(self, k) for k in self._read[value.at]]

    def name_of(self, value: Written) -> str:
        """Return the name of the operation that makes a value; "input" and "constant" are none."""
        return self._names[value.at]

    def inputs_of(self, value: Written) -> set[int]:
        """Return the inputs that a value is a function of."""
        return {k for k in self._needed([value.at]) if k < self._n_inputs}

    def written(self, outputs: Sequence[Written]) -> RowProgram:
        """Return the program of some values."""
        needed = self._needed([out.at for out in outputs])
        constants = [k for k in needed if self._names[k] == "constant"]
        calls = [k for k in needed if self._names[k] not in ("input", "constant")]
        order = [*range(self._n_inputs), *constants, *calls]
        place = {k: at for at, k in enumerate(order)}
        return RowProgram(
            self._n_inputs,
            tuple(k for k in range(self._n_inputs) if self._is_condition[k]),
            tuple(number for k in constants if (number := self._numbers[k]) is not None),
            tuple(Call(self._names[k], tuple(place[i] for i in self._read[k])) for k in calls),
            tuple(place[out.at] for out in outputs),
        )

    def _needed(self, outputs: Sequence[int]) -> list[int]:
        """Return what outputs are made of, in the order in which it was written."""
        found, stack = set(outputs), list(outputs)
        while stack:
            new = [k for k in self._read[stack.pop()] if k not in found]
            found.update(new)
            stack += new
        return sorted(found)

    # --- derivatives ---

    def slope(self, value: Written, by: Written) -> Written | None:
        """Return the derivative of a value by an input; None where it is 0 everywhere."""
        known = self._tangents.setdefault(by.at, {by.at: self.constant(1.0)})
        for k in self._needed([value.at]):
            if k not in known:
                known[k] = self._tangent(k, [known[i] for i in self._read[k]])
        return known[value.at]

    def _tangent(self, at: int, slopes: list[Written | None]) -> Written | None:
        name = self._names[at]
        if all(slope is None for slope in slopes) or OPERATIONS[name].is_step:
            return None
        operation, value = OPERATIONS[name], Written(self, at)
        args = [Written(self, k) for k in self._read[at]]
        if operation.tangent is not None:
            result = operation.tangent(value, args, slopes)
        elif operation.slopes is not None:
            result = self._by_chain_rule(name, operation.slopes(value, *args), slopes)
        else:
            raise CannotFollow(f"{name} has no derivative")
        result = result if isinstance(result, Written) else self.constant(result)
        return None if self.number(result) == 0.0 else result

    def _by_chain_rule(self, name: str, local: Sequence[Any], slopes: list[Written | None]) -> Written:
        total: Written | None = None
        for of_arg, slope in zip(local, slopes, strict=True):
            if slope is None:
                continue
            if of_arg is None:
                raise CannotFollow(f"{name} has no derivative by one of its arguments")
            total = slope * of_arg if total is None else total + slope * of_arg
        assert total is not None
        return total


# --- simpler forms, and forms that keep more digits ---

#: A name stands for any value, one that begins with # for a number; else a number, or an operation with its arguments.
type Form = str | float | tuple[Any, ...]

#: What is written in the place of an operation, the first that fits. Terms and factors may stand in either order.
_SIMPLER: list[tuple[tuple[Any, ...], Form]] = [
    (("add", 0.0, "x"), "x"),
    (("add", "x", ("neg", "y")), ("sub", "x", "y")),
    (("sub", "x", 0.0), "x"),
    (("sub", 0.0, "x"), ("neg", "x")),
    (("sub", "x", ("neg", "y")), ("add", "x", "y")),
    (("sub", 1.0, ("sigmoid", "x")), ("sigmoid", ("neg", "x"))),
    (("mul", 0.0, "x"), 0.0),
    (("mul", 1.0, "x"), "x"),
    (("mul", -1.0, "x"), ("neg", "x")),
    (("mul", "#a", ("neg", "x")), ("mul", ("neg", "#a"), "x")),
    (("mul", "#a", ("mul", "#b", "x")), ("mul", ("mul", "#a", "#b"), "x")),
    (("mul", "x", "x"), ("sqr", "x")),
    (("mul", "x", ("neg", "y")), ("neg", ("mul", "x", "y"))),
    (("div", 0.0, "x"), 0.0),
    (("div", "x", 1.0), "x"),
    (("div", "x", "#power of 2"), ("mul", "x", ("div", 1.0, "#power of 2"))),  # nothing is rounded
    (("div", 1.0, "x"), ("reciprocal", "x")),
    (("neg", ("neg", "x")), "x"),
    (("neg", ("sub", "x", "y")), ("sub", "y", "x")),
    (("pow", "x", 0.0), 1.0),
    (("pow", "x", 1.0), "x"),
    (("pow", "x", 0.5), ("sqrt", "x")),
    (("pow", "x", 2.0), ("sqr", "x")),
    # Derivatives of reciprocals do not overflow where their product with what is inside does not.
    (("pow", "x", -1.0), ("reciprocal", "x")),
    (("pow", "x", "#below 0"), ("reciprocal", ("pow", "x", ("neg", "#below 0")))),
    (("switch", 0.0, "x", "y"), "y"),
    (("switch", "#not 0", "x", "y"), "x"),
    (("switch", "condition", "x", "x"), "x"),
    # A sign that is chosen is a factor.
    (("switch", "condition", ("neg", "x"), "x"), ("mul", "x", ("switch", "condition", -1.0, 1.0))),
    (("switch", "condition", "x", ("neg", "x")), ("mul", "x", ("switch", "condition", 1.0, -1.0))),
    (("log", ("exp", "x")), "x"),
    (("log", ("sigmoid", "x")), ("neg", ("softplus", ("neg", "x")))),
    (("log", ("sub", 1.0, "x")), ("log1p", ("neg", "x"))),
    (("log1p", ("exp", "x")), ("softplus", "x")),
    (("log1p", ("neg", ("sigmoid", "x"))), ("neg", ("softplus", "x"))),
    (("log1p", ("neg", ("exp", "x"))), ("log1mexp", "x")),
    (("log1mexp", ("log1mexp", "x")), ("switch", ("le", "x", 0.0), "x", math.nan)),
]  # fmt: skip
#: Which numbers some names are for.
_OF_A_KIND: dict[str, Callable[[float], bool]] = {
    "#power of 2": lambda number: math.frexp(number)[0] == 0.5,
    "#below 0": lambda number: number < 0.0,
}


def _by_operation() -> dict[str, list[tuple[list[tuple[Form, ...]], Form]]]:
    """Return the arguments that fit, in any order that counts for the same, and what is written, by operation."""
    result: dict[str, list[tuple[list[tuple[Form, ...]], Form]]] = {}
    for (name, *args), form in _SIMPLER:
        orders = [tuple(args), tuple(args[::-1])] if name in ("add", "mul") else [tuple(args)]
        result.setdefault(name, []).append((orders, form))
    return result


_SIMPLER_BY_NAME = _by_operation()


def _simpler(writer: Writer, name: str, args: Sequence[Written]) -> Written | None:
    """Return what is written in the place of an operation; None where that is the operation itself."""
    for orders, form in _SIMPLER_BY_NAME.get(name, ()):
        for wanted in orders:
            values: dict[str, Written] = {}
            if all(_fits(writer, one, arg, values) for one, arg in zip(wanted, args, strict=True)):
                return _written(writer, form, values)
    return None


def _fits(writer: Writer, form: Form, value: Written, values: dict[str, Written]) -> bool:
    """Tell whether a value is of a form, and note what names stand for."""
    if isinstance(form, tuple):
        args = writer.parts(value, form[0]) or []
        orders = (args, args[::-1]) if form[0] == "mul" else (args,)
        return bool(args) and any(
            all(_fits(writer, one, arg, values) for one, arg in zip(form[1:], order, strict=True)) for order in orders
        )
    number = writer.number(value)
    if not isinstance(form, str):
        return number == form
    if form[0] == "#" and (number is None or not _OF_A_KIND.get(form, bool)(number)):
        return False
    return values.setdefault(form, value).at == value.at


def _written(writer: Writer, form: Form, values: dict[str, Written]) -> Written:
    """Write a form."""
    if isinstance(form, tuple):
        return writer.call(form[0], *[_written(writer, part, values) for part in form[1:]])
    return values[form] if isinstance(form, str) else writer.constant(form)


# --- programs made of programs: with numbers in the place of inputs, and of derivatives ---


def rewritten(program: RowProgram, numbers: Sequence[float | None] = ()) -> tuple[Writer, list[Written]]:
    """Write a program once more."""
    numbers = numbers or [None] * program.n_inputs
    kept = [k for k, number in enumerate(numbers) if number is None]
    writer = Writer(len(kept), [at for at, k in enumerate(kept) if k in program.conditions])
    inputs = iter(writer.inputs)
    values = [next(inputs) if number is None else writer.constant(number) for number in numbers]
    values += [writer.constant(number) for number in program.constants]
    for call in program.calls:
        values.append(writer.call(call.name, *[values[k] for k in call.read]))
    return writer, [values[k] for k in program.outputs]


def derivatives(writer: Writer, values: Sequence[Written], n_first: int, order: int) -> dict[tuple[int, ...], Written]:
    """Return values by their numbers, then their derivatives by the first inputs that are not 0 everywhere.

    A derivative has the number of the value, and the inputs, none greater than the one before.
    """
    level: dict[tuple[int, ...], Written] = {(k,): value for k, value in enumerate(values)}
    found = dict(level)
    for _ in range(order):
        level = {
            (*place, a): slope
            for place, value in level.items()
            for a in range(place[-1] + 1 if place[1:] else n_first)
            if (slope := writer.slope(value, writer.inputs[a])) is not None
        }
        found |= level
    return found


def firsts(program: RowProgram, n_first: int) -> tuple[RowProgram, list[int]]:
    """Return the only output with its derivatives by the first inputs that are not 0 everywhere, and by which."""
    writer, values = rewritten(program)
    found = derivatives(writer, values, n_first, 1)
    return writer.written(list(found.values())), [a for _, *by in found for a in by]


def seconds(program: RowProgram, n_first: int) -> tuple[RowProgram, list[tuple[int, int]]]:
    """Return the second derivatives of the only output by the first inputs."""
    writer, values = rewritten(program)
    found = {(at[1], at[2]): d for at, d in derivatives(writer, values, n_first, 2).items() if len(at) > 2}
    return writer.written(list(found.values())), list(found)


# --- values as sums of products: of functions of some inputs, and of functions of the others ---


#: Products, at most.
_MOST = 6

#: A function of some inputs, and one of the others.
type Product = tuple[Written, Written]


class Separation:
    """Writes values as sums of products."""

    def __init__(self, writer: Writer, first: Collection[int]) -> None:
        self._writer, self._first = writer, set(first)
        self._one = writer.constant(1.0)

    def of(self, value: Written) -> list[Product]:
        """Return products that add up to a value; the value itself, times 1, where there are none."""
        found = self._of(value)
        if found is None:
            return [(value, self._one)]
        merged: dict[int, Product] = {}
        for one, other in found:
            before = merged.get(other.at)
            merged[other.at] = (one if before is None else before[0] + one, other)
        return list(merged.values())

    def _of(self, value: Written) -> list[Product] | None:
        inputs = self._writer.inputs_of(value)
        if not inputs & self._first:
            return [(self._one, value)]
        if inputs <= self._first:
            return [(value, self._one)]
        name, args = self._writer.name_of(value), self._writer.arguments(value)
        parts = [self._of(arg) for arg in args]
        if name not in ("add", "sub", "neg", "mul", "div") or any(part is None for part in parts):
            return None
        found = [part for part in parts if part is not None]
        if name == "neg":
            return [(-one, other) for one, other in found[0]]
        if name == "add":
            return found[0] + found[1]
        if name == "sub":
            return found[0] + [(-one, other) for one, other in found[1]]
        if name == "mul":
            pairs = list(product(*found))
            return [(a[0] * b[0], a[1] * b[1]) for a, b in pairs] if len(pairs) <= _MOST else None
        if len(found[1]) > 1:
            return None
        [(by, by_other)] = found[1]
        return [(one / by, other / by_other) for one, other in found[0]]
