"""Programs: rows as straight lines of scalar operations, with derivatives, evaluated on arrays."""

import math

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from numpy.lib.mixins import NDArrayOperatorsMixin
from scipy import special

from pymc_ngvi.core import scalars
from pymc_ngvi.core.messages import Refused
from pymc_ngvi.core.types import AnyArray

# --- straight lines of scalar operations: values that can be compared, kept, differentiated, and evaluated ---


@dataclass(frozen=True)
class Call:
    """An operation on values by number."""

    #: In `pymc_ngvi.rows.programs.OPERATIONS`.
    name: str
    read: tuple[int, ...]


@dataclass(frozen=True)
class RowProgram:
    """A function of rows. Values are numbered: first the inputs, then constants, then what calls make, in order.

    Programs of the same function, whatever graphs they were read from, are mostly equal.
    """

    n_inputs: int
    #: Inputs that are booleans.
    conditions: tuple[int, ...]
    constants: tuple[float, ...]
    calls: tuple[Call, ...]
    outputs: tuple[int, ...]

    @property
    def used(self) -> list[int]:
        """The inputs that something hangs on."""
        read = {k for call in self.calls for k in call.read} | set(self.outputs)
        return [k for k in range(self.n_inputs) if k in read]


#: A `pymc_ngvi.rows.programs.Written`: arithmetic on it, and ``to``, write operations.
type Value = Any
type Slopes = Callable[..., Sequence[Any]]
type Tangent = Callable[..., Any]


class Operation(NamedTuple):
    """A scalar operation."""

    #: Of arrays that broadcast.
    function: Callable[..., AnyArray]
    #: From the result and the arguments to the derivatives by these; None for one by which there is none.
    slopes: Slopes | None = None
    #: From the result, the arguments and their derivatives (None where these are 0) to that of the result: in the
    #: place of ``slopes`` where it takes less.
    tangent: Tangent | None = None
    #: Whether the function takes ``out``, which may be an argument, for floats.
    writes: bool = True
    #: Whether it returns booleans.
    is_condition: bool = False
    #: Whether it is piecewise constant.
    is_step: bool = False


# --- functions of arrays ---


def _sigmoid(x: AnyArray, out: AnyArray | None = None) -> AnyArray:
    """Compute the logistic function in half of the time of SciPy's."""
    result = np.asarray(np.negative(x, out=out))
    np.exp(result, out=result)
    result += 1.0
    return np.asarray(np.divide(1.0, result, out=result))


def _log_add_exp(x: AnyArray, y: AnyArray) -> AnyArray:
    """Compute log(exp(x) + exp(y)), in a third of the time of NumPy's; it may be -inf."""
    apart = np.asarray(np.abs(np.subtract(x, y)))
    np.negative(apart, out=apart)
    np.exp(apart, out=apart)
    np.log1p(apart, out=apart)
    larger = np.maximum(x, y)
    return np.where(np.isinf(larger), larger, larger + apart)


# --- how derivatives of arguments become those of results ---


def _div(y: Value, args: Sequence[Value], d: Sequence[Any]) -> Any:
    if d[1] is None:
        return d[0] / args[1]
    of_divisor = y * d[1]
    return (-of_divisor if d[0] is None else d[0] - of_divisor) / args[1]


def _clip(y: Value, args: Sequence[Value], d: Sequence[Any]) -> Any:
    x, low, high = args
    return x.to("lt", low).to("switch", d[1], x.to("gt", high).to("switch", d[2], d[0]))


# --- incomplete beta and gamma functions ---


def _gamma_density(k: Value, x: Value) -> Any:
    return ((k - 1.0) * x.to("log") - x - k.to("gammaln")).to("exp")


def _beta_density(a: Value, b: Value, x: Value) -> Any:
    of_x = (a - 1.0) * x.to("log") + (b - 1.0) * (-x).to("log1p")
    return (of_x - a.to("gammaln") - b.to("gammaln") + (a + b).to("gammaln")).to("exp")


def _beta_by(by: str) -> Slopes:
    def slopes(y: Value, a: Value, b: Value, x: Value) -> tuple[Any, Any, Any]:
        by_parameters = [a.to("betainc_" + "".join(sorted(by + p)), b, x) for p in "ab"]
        of_sum = (a + b).to("psi")
        return (
            *by_parameters,
            _beta_density(a, b, x)
            * {"a": x.to("log") - a.to("psi") + of_sum, "b": (-x).to("log1p") - b.to("psi") + of_sum}[by],
        )

    return slopes


_ROOT_PI, _LOG_2, _LOG_10 = math.sqrt(math.pi), math.log(2.0), math.log(10.0)


def _condition(function: Callable[..., AnyArray]) -> Operation:
    return Operation(function, writes=False, is_condition=True, is_step=True)


def _step(function: Callable[..., AnyArray]) -> Operation:
    return Operation(function, is_step=True)


#: Operations by name.
OPERATIONS: dict[str, Operation] = {
    # arithmetic
    "add": Operation(np.add, lambda y, a, b: [1.0, 1.0]),
    "sub": Operation(np.subtract, lambda y, a, b: [1.0, -1.0]),
    "mul": Operation(np.multiply, lambda y, a, b: [b, a]),
    "div": Operation(np.divide, tangent=_div),
    "neg": Operation(np.negative, lambda y, x: [-1.0]),
    "sqr": Operation(np.square, lambda y, x: [2.0 * x]),
    "sqrt": Operation(np.sqrt, lambda y, x: [0.5 / y]),
    # In this order: the square of a large y may overflow where d is small.
    "reciprocal": Operation(np.reciprocal, tangent=lambda y, args, d: -(d[0] * y * y)),
    "abs": Operation(np.abs, lambda y, x: [x.to("sign")]),
    "pow": Operation(np.power, lambda y, x, p: [p * x.to("pow", p - 1.0), y * x.to("log")]),
    "mod": Operation(np.mod, lambda y, x, by: [1.0, -(x / by).to("floor")]),
    # exponentials and logarithms
    "exp": Operation(np.exp, lambda y, x: [y]),
    "exp2": Operation(np.exp2, lambda y, x: [_LOG_2 * y]),
    "expm1": Operation(np.expm1, lambda y, x: [x.to("exp")]),
    "log": Operation(np.log, lambda y, x: [1.0 / x]),
    "log2": Operation(np.log2, lambda y, x: [1.0 / (_LOG_2 * x)]),
    "log10": Operation(np.log10, lambda y, x: [1.0 / (_LOG_10 * x)]),
    "log1p": Operation(np.log1p, lambda y, x: [1.0 / (1.0 + x)]),
    "log1mexp": Operation(scalars.log1mexp, lambda y, x: [-1.0 / (-x).to("expm1")], writes=False),
    "softplus": Operation(scalars.softplus, lambda y, x: [x.to("sigmoid")]),
    "sigmoid": Operation(_sigmoid, lambda y, x: [y * (-x).to("sigmoid")]),
    "logaddexp": Operation(
        _log_add_exp, lambda y, a, b: [(a - b).to("sigmoid"), (b - a).to("sigmoid")], writes=False
    ),
    # trigonometric and hyperbolic functions
    "sin": Operation(np.sin, lambda y, x: [x.to("cos")]),
    "cos": Operation(np.cos, lambda y, x: [-x.to("sin")]),
    "tan": Operation(np.tan, lambda y, x: [1.0 + y.to("sqr")]),
    "arcsin": Operation(np.arcsin, lambda y, x: [1.0 / (1.0 - x.to("sqr")).to("sqrt")]),
    "arccos": Operation(np.arccos, lambda y, x: [-1.0 / (1.0 - x.to("sqr")).to("sqrt")]),
    "arctan": Operation(np.arctan, lambda y, x: [1.0 / (1.0 + x.to("sqr"))]),
    "arctan2": Operation(
        np.arctan2, lambda y, a, b: [b / (a.to("sqr") + b.to("sqr")), -a / (a.to("sqr") + b.to("sqr"))]
    ),
    "sinh": Operation(np.sinh, lambda y, x: [x.to("cosh")]),
    "cosh": Operation(np.cosh, lambda y, x: [x.to("sinh")]),
    "tanh": Operation(np.tanh, lambda y, x: [1.0 - y.to("sqr")]),
    "arcsinh": Operation(np.arcsinh, lambda y, x: [1.0 / (1.0 + x.to("sqr")).to("sqrt")]),
    "arccosh": Operation(np.arccosh, lambda y, x: [1.0 / (x.to("sqr") - 1.0).to("sqrt")]),
    "arctanh": Operation(np.arctanh, lambda y, x: [1.0 / (1.0 - x.to("sqr"))]),
    # gamma and error functions, and Bessel's
    "gamma": Operation(special.gamma, lambda y, x: [y * x.to("psi")]),
    "gammaln": Operation(special.gammaln, lambda y, x: [x.to("psi")]),
    "psi": Operation(special.psi, lambda y, x: [x.to("trigamma")]),
    "trigamma": Operation(scalars.trigamma, lambda y, x: [x.to("polygamma 2")], writes=False),
    "polygamma 2": Operation(lambda x: np.asarray(special.polygamma(2, x)), writes=False),
    "erf": Operation(special.erf, lambda y, x: [2.0 / _ROOT_PI * (-x.to("sqr")).to("exp")]),
    "erfc": Operation(special.erfc, lambda y, x: [-2.0 / _ROOT_PI * (-x.to("sqr")).to("exp")]),
    "erfcx": Operation(special.erfcx, lambda y, x: [2.0 * x * y - 2.0 / _ROOT_PI]),
    "erfinv": Operation(special.erfinv, lambda y, x: [0.5 * _ROOT_PI * y.to("sqr").to("exp")]),
    "erfcinv": Operation(special.erfcinv, lambda y, x: [-0.5 * _ROOT_PI * y.to("sqr").to("exp")]),
    "owens_t": Operation(
        special.owens_t,
        lambda y, h, a: [
            -0.5 / math.sqrt(2.0 * math.pi) * (-0.5 * h.to("sqr")).to("exp") * (a * h / math.sqrt(2.0)).to("erf"),
            (-0.5 * h.to("sqr") * (1.0 + a.to("sqr"))).to("exp") / (2.0 * math.pi * (1.0 + a.to("sqr"))),
        ],
    ),
    "i0": Operation(special.i0, lambda y, x: [x.to("i1")]),
    "i1": Operation(special.i1, lambda y, x: [0.5 * (x.to("i0") + (x * 0.0 + 2.0).to("iv", x))]),
    "iv": Operation(
        special.iv, lambda y, v, x: [None, 0.5 * ((v - 1.0).to("iv", x) + (v + 1.0).to("iv", x))]
    ),
    "j0": Operation(special.j0, lambda y, x: [-x.to("j1")]),
    "j1": Operation(special.j1, lambda y, x: [0.5 * (x.to("j0") - (x * 0.0 + 2.0).to("jv", x))]),
    "jv": Operation(
        special.jv, lambda y, v, x: [None, 0.5 * ((v - 1.0).to("jv", x) - (v + 1.0).to("jv", x))]
    ),
    "ive": Operation(
        special.ive,
        lambda y, v, x: [None, 0.5 * ((v - 1.0).to("ive", x) + (v + 1.0).to("ive", x)) - x.to("sign") * y],
    ),
    "kve": Operation(
        special.kve, lambda y, v, x: [None, y - 0.5 * ((v - 1.0).to("kve", x) + (v + 1.0).to("kve", x))]
    ),
    # incomplete beta and gamma functions
    "gammainc": Operation(
        special.gammainc, lambda y, k, x: [k.to("gammainc_k", x), _gamma_density(k, x)]
    ),
    "gammaincc": Operation(
        special.gammaincc, lambda y, k, x: [-k.to("gammainc_k", x), -_gamma_density(k, x)]
    ),
    "gammainc_k": Operation(
        scalars.gammainc_k,
        lambda y, k, x: [k.to("gammainc_kk", x), _gamma_density(k, x) * (x.to("log") - k.to("psi"))],
        writes=False,
    ),
    "gammainc_kk": Operation(scalars.gammainc_kk, writes=False),
    "betainc": Operation(
        special.betainc,
        lambda y, a, b, x: [a.to("betainc_a", b, x), a.to("betainc_b", b, x), _beta_density(a, b, x)],
    ),
    "betainc_a": Operation(scalars.betainc_a, _beta_by("a"), writes=False),
    "betainc_b": Operation(scalars.betainc_b, _beta_by("b"), writes=False),
    "betainc_aa": Operation(scalars.betainc_aa, writes=False),
    "betainc_ab": Operation(scalars.betainc_ab, writes=False),
    "betainc_bb": Operation(scalars.betainc_bb, writes=False),
    # choices
    "switch": Operation(np.where, tangent=lambda y, args, d: args[0].to("switch", d[1], d[2]), writes=False),
    "maximum": Operation(np.maximum, tangent=lambda y, args, d: args[0].to("ge", args[1]).to("switch", d[0], d[1])),
    "minimum": Operation(np.minimum, tangent=lambda y, args, d: args[0].to("le", args[1]).to("switch", d[0], d[1])),
    "clip": Operation(scalars.clip, tangent=_clip, writes=False),
    # conditions, and what is piecewise constant
    "lt": _condition(np.less),
    "gt": _condition(np.greater),
    "le": _condition(np.less_equal),
    "ge": _condition(np.greater_equal),
    "eq": _condition(np.equal),
    "ne": _condition(np.not_equal),
    "isnan": _condition(np.isnan),
    "isinf": _condition(np.isinf),
    "and": _condition(np.logical_and),
    "or": _condition(np.logical_or),
    "xor": _condition(np.logical_xor),
    "not": _condition(np.logical_not),
    "sign": _step(np.sign),
    "ceil": _step(np.ceil),
    "floor": _step(np.floor),
    "trunc": _step(np.trunc),
    "rint": _step(np.rint),
    "floor_divide": _step(np.floor_divide),
    "round away": Operation(scalars.round_half_away_from_zero, writes=False, is_step=True),
    "float": Operation(lambda x: np.asarray(x, dtype=np.float64), writes=False, is_step=True),
}  # fmt: skip


# --- evaluates programs with NumPy: in parts that the cache holds, each operation into what no later one reads ---

#: Values that are computed at a time, and shapes of inputs for which steps are kept.
_CACHED, _MOST_SHAPES = 2**13, 1_000
#: In the place of what is not made yet.
_NOTHING: AnyArray = np.empty(0)

#: Which axes of an array have more than one element.
type _Axes = tuple[bool, ...]


#: A function, the values that it reads and makes, and the one that it writes over; -1 for a new array.
type _Step = tuple[Callable[..., AnyArray], tuple[int, ...], int, int]


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
            steps.append((operation.function, call.read, n_before + at, over))
        return steps, [of_value[k] for k in program.outputs]


# --- the writer of programs ---


class CannotFollow(Refused):
    """An operation is not known, or has no derivative."""


@dataclass(frozen=True, eq=False)
class Written(NDArrayOperatorsMixin):
    """A value of a program that is being written; arithmetic on it writes more."""

    writer: "Writer"
    #: Its place among all values.
    at: int
    #: Of the operation that makes it; "input" and "constant" are none.
    name: str
    #: What that is an operation on.
    args: "tuple[Written, ...]"
    #: The number that it always is; None where there is none.
    number: float | None
    is_condition: bool

    def to(self, name: str, *others: "Written | float | None") -> "Written":
        """Return an operation on this value, and on others; None stands for 0."""
        return self.writer.call(name, self, *[0.0 if other is None else other for other in others])

    def __array_ufunc__(self, function: np.ufunc, method: str, *args: "Written | float") -> "Written":
        return self.writer.call(_BY_FUNCTION[function], *args)


#: Names of the operations that NumPy's arithmetic stands for.
_BY_FUNCTION = {operation.function: name for name, operation in OPERATIONS.items()}


class Writer:
    """What has been written of a program."""

    def __init__(self, n_inputs: int, conditions: Sequence[int] = ()) -> None:
        self._made: dict[object, Written] = {}
        self._tangents: dict[int, dict[int, Written | None]] = {}
        self.inputs = [self._value("input", k, is_condition=k in conditions) for k in range(n_inputs)]

    def _value(
        self, name: str, key: object, args: Sequence[Written] = (), number: float | None = None, *, is_condition: bool
    ) -> Written:
        """Return a value, which is made once."""
        if (name, key) not in self._made:
            self._made[name, key] = Written(self, len(self._made), name, tuple(args), number, is_condition)
        return self._made[name, key]

    def constant(self, number: float) -> Written:
        """Return a number."""
        return self._value("constant", np.float64(number).tobytes(), (), float(number), is_condition=False)

    def call(self, name: str, *args: Written | float) -> Written:
        """Return an operation on values."""
        operation = OPERATIONS[name]
        given = [arg if isinstance(arg, Written) else self.constant(arg) for arg in args]
        if not operation.is_condition and name != "float":
            is_kept = [not arg.is_condition or (name == "switch" and not k) for k, arg in enumerate(given)]
            given = [arg if kept else self.call("float", arg) for arg, kept in zip(given, is_kept, strict=True)]
        numbers = [arg.number for arg in given]
        if all(number is not None for number in numbers):
            with np.errstate(all="ignore"):
                return self.constant(float(operation.function(*[np.float64(number) for number in numbers])))
        # What is simpler, or keeps more digits.
        simple = _simpler(self, name, given)
        if simple is not None:
            return simple
        read = [arg.at for arg in given]
        key = tuple(sorted(read) if name in ("add", "mul") else read)
        return self._value(name, key, given, is_condition=operation.is_condition)

    def inputs_of(self, value: Written) -> set[int]:
        """Return the inputs that a value is a function of."""
        return {part.at for part in self._needed([value]) if part.name == "input"}

    def written(self, outputs: Sequence[Written]) -> RowProgram:
        """Return the program of some values."""
        needed = self._needed(outputs)
        constants = [value for value in needed if value.name == "constant"]
        calls = [value for value in needed if value.name not in ("input", "constant")]
        place = {value.at: at for at, value in enumerate([*self.inputs, *constants, *calls])}
        return RowProgram(
            len(self.inputs),
            tuple(value.at for value in self.inputs if value.is_condition),
            tuple(value.number for value in constants if value.number is not None),
            tuple(Call(value.name, tuple(place[arg.at] for arg in value.args)) for value in calls),
            tuple(place[out.at] for out in outputs),
        )

    def _needed(self, outputs: Sequence[Written]) -> list[Written]:
        """Return what outputs are made of, in the order in which it was written."""
        found, stack = {out.at: out for out in outputs}, list(outputs)
        while stack:
            new = {arg.at: arg for arg in stack.pop().args if arg.at not in found}
            found |= new
            stack += new.values()
        return [found[at] for at in sorted(found)]

    # --- derivatives ---

    def slope(self, value: Written, by: Written) -> Written | None:
        """Return the derivative of a value by an input; None where it is 0 everywhere."""
        known = self._tangents.setdefault(by.at, {by.at: self.constant(1.0)})
        for part in self._needed([value]):
            if part.at not in known:
                known[part.at] = self._tangent(part, [known[arg.at] for arg in part.args])
        return known[value.at]

    def _tangent(self, value: Written, slopes: list[Written | None]) -> Written | None:
        if all(slope is None for slope in slopes) or OPERATIONS[value.name].is_step:
            return None
        operation = OPERATIONS[value.name]
        result: Any = None
        if operation.tangent is not None:
            result = operation.tangent(value, value.args, slopes)
        elif operation.slopes is not None:
            for of_arg, slope in zip(operation.slopes(value, *value.args), slopes, strict=True):
                if slope is not None and of_arg is None:
                    raise CannotFollow(f"{value.name} has no derivative by one of its arguments")
                if slope is not None:
                    result = slope * of_arg if result is None else result + slope * of_arg
        else:
            raise CannotFollow(f"{value.name} has no derivative")
        result = result if isinstance(result, Written) else self.constant(result)
        return None if result.number == 0.0 else result


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


#: The arguments that fit, in any order that counts for the same, and what is written, by operation.
_SIMPLER_BY_NAME: dict[str, list[tuple[list[list[Form]], Form]]] = {}
for (_name, *_args), _form in _SIMPLER:
    _orders = [_args, _args[::-1]] if _name in ("add", "mul") else [_args]
    _SIMPLER_BY_NAME.setdefault(_name, []).append((_orders, _form))


def _simpler(writer: Writer, name: str, args: Sequence[Written]) -> Written | None:
    """Return what is written in the place of an operation; None where that is the operation itself."""
    for orders, form in _SIMPLER_BY_NAME.get(name, ()):
        for wanted in orders:
            values: dict[str, Written] = {}
            if all(_fits(one, arg, values) for one, arg in zip(wanted, args, strict=True)):
                return _written(writer, form, values)
    return None


def _fits(form: Form, value: Written, values: dict[str, Written]) -> bool:
    """Tell whether a value is of a form, and note what names stand for."""
    if isinstance(form, tuple):
        args = value.args if value.name == form[0] else ()
        orders = (args, args[::-1]) if form[0] == "mul" else (args,)
        return bool(args) and any(
            all(_fits(one, arg, values) for one, arg in zip(form[1:], order, strict=True)) for order in orders
        )
    if not isinstance(form, str):
        return value.number == form
    if form[0] == "#" and (value.number is None or not _OF_A_KIND.get(form, bool)(value.number)):
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


def derived(program: RowProgram, n_first: int, order: int) -> tuple[RowProgram, list[tuple[int, ...]]]:
    """Return derivatives of the only output by the first inputs that are not 0 everywhere, and by which.

    First ones come after the value; second ones alone.
    """
    writer, values = rewritten(program)
    every = derivatives(writer, values, n_first, order)
    found = {by[1:]: d for by, d in every.items() if order == 1 or len(by) > order}
    return writer.written(list(found.values())), [by for by in found if by]


# --- values as sums of products: of functions of some inputs, and of functions of the others ---


#: Products, at most.
_MOST = 6

#: A function of some inputs, and one of the others.
type Product = tuple[Written, Written]


def separated(writer: Writer, value: Written, first: Collection[int]) -> list[Product]:
    """Return products that add up to a value, of functions of the first inputs and of the others.

    The value itself, times 1, where there are none.
    """
    found = _separated(writer, value, set(first))
    if found is None:
        return [(value, writer.constant(1.0))]
    merged: dict[int, Product] = {}
    for one, other in found:
        before = merged.get(other.at)
        merged[other.at] = (one if before is None else before[0] + one, other)
    return list(merged.values())


def _separated(writer: Writer, value: Written, first: set[int]) -> list[Product] | None:
    inputs = writer.inputs_of(value)
    if not inputs & first:
        return [(writer.constant(1.0), value)]
    if inputs <= first:
        return [(value, writer.constant(1.0))]
    name, parts = value.name, [_separated(writer, arg, first) for arg in value.args]
    if name not in ("add", "sub", "neg", "mul", "div") or any(part is None for part in parts):
        return None
    found = [part for part in parts if part is not None]
    if name in ("neg", "sub"):
        found[-1] = [(-one, other) for one, other in found[-1]]
    if name in ("neg", "sub", "add"):
        return [product for part in found for product in part]
    if name == "mul":
        pairs = list(product(*found))
        return [(a[0] * b[0], a[1] * b[1]) for a, b in pairs] if len(pairs) <= _MOST else None
    if len(found[1]) > 1:
        return None
    [(by, by_other)] = found[1]
    return [(one / by, other / by_other) for one, other in found[0]]
