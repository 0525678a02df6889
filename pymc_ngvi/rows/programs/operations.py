"""Scalar operations of programs, how derivatives follow from those of arguments, and what evaluates them on arrays."""

import math

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from scipy import special

from pymc_ngvi.core import tails, ufuncs
from pymc_ngvi.core.types import AnyArray

# --- straight lines of scalar operations: values that can be compared, kept, differentiated, and evaluated ---


@dataclass(frozen=True)
class Call:
    """An operation on values by number."""

    #: In `pymc_ngvi.rows.programs.operations.OPERATIONS`.
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


#: A `pymc_ngvi.rows.programs.writer.Written`: arithmetic on it, and ``to``, write operations.
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


def _sum_of(parts: Sequence[Any]) -> Any:
    first, *others = (p for p in parts if p is not None)
    return sum(others, start=first)


def _sub(y: Value, args: Sequence[Value], d: Sequence[Any]) -> Any:
    if d[1] is None:
        return d[0]
    return -d[1] if d[0] is None else d[0] - d[1]


def _mul(y: Value, args: Sequence[Value], d: Sequence[Any]) -> Any:
    return _sum_of([None if d[0] is None else d[0] * args[1], None if d[1] is None else args[0] * d[1]])


def _div(y: Value, args: Sequence[Value], d: Sequence[Any]) -> Any:
    above = [d[0], None if d[1] is None else -(y * d[1])]
    return _sum_of(above) / args[1]


def _clip(y: Value, args: Sequence[Value], d: Sequence[Any]) -> Any:
    x, low, high = args
    return x.to("lt", low).to("switch", d[1], x.to("gt", high).to("switch", d[2], d[0]))


def _pow(y: Value, x: Value, p: Value) -> tuple[Any, Any]:
    return p * x.to("pow", p - 1.0), y * x.to("log")


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
    "add": Operation(np.add, tangent=lambda y, args, d: _sum_of(d)),
    "sub": Operation(np.subtract, tangent=_sub),
    "mul": Operation(np.multiply, tangent=_mul),
    "div": Operation(np.divide, tangent=_div),
    "neg": Operation(np.negative, lambda y, x: [-1.0]),
    "sqr": Operation(np.square, lambda y, x: [2.0 * x]),
    "sqrt": Operation(np.sqrt, lambda y, x: [0.5 / y]),
    # In this order: the square of a large y may overflow where d is small.
    "reciprocal": Operation(np.reciprocal, tangent=lambda y, args, d: -(d[0] * y * y)),
    "abs": Operation(np.abs, lambda y, x: [x.to("sign")]),
    "pow": Operation(np.power, _pow),
    "mod": Operation(np.mod, lambda y, x, by: [1.0, -(x / by).to("floor")]),
    # exponentials and logarithms
    "exp": Operation(np.exp, lambda y, x: [y]),
    "exp2": Operation(np.exp2, lambda y, x: [_LOG_2 * y]),
    "expm1": Operation(np.expm1, lambda y, x: [x.to("exp")]),
    "log": Operation(np.log, lambda y, x: [1.0 / x]),
    "log2": Operation(np.log2, lambda y, x: [1.0 / (_LOG_2 * x)]),
    "log10": Operation(np.log10, lambda y, x: [1.0 / (_LOG_10 * x)]),
    "log1p": Operation(np.log1p, lambda y, x: [1.0 / (1.0 + x)]),
    "log1mexp": Operation(ufuncs.log1mexp, lambda y, x: [-1.0 / (-x).to("expm1")], writes=False),
    "softplus": Operation(ufuncs.softplus, lambda y, x: [x.to("sigmoid")]),
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
    "trigamma": Operation(ufuncs.trigamma, lambda y, x: [x.to("polygamma 2")], writes=False),
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
        tails.gammainc_k,
        lambda y, k, x: [k.to("gammainc_kk", x), _gamma_density(k, x) * (x.to("log") - k.to("psi"))],
        writes=False,
    ),
    "gammainc_kk": Operation(tails.gammainc_kk, writes=False),
    "betainc": Operation(
        special.betainc,
        lambda y, a, b, x: [a.to("betainc_a", b, x), a.to("betainc_b", b, x), _beta_density(a, b, x)],
    ),
    "betainc_a": Operation(tails.betainc_a, _beta_by("a"), writes=False),
    "betainc_b": Operation(tails.betainc_b, _beta_by("b"), writes=False),
    "betainc_aa": Operation(tails.betainc_aa, writes=False),
    "betainc_ab": Operation(tails.betainc_ab, writes=False),
    "betainc_bb": Operation(tails.betainc_bb, writes=False),
    # choices
    "switch": Operation(np.where, tangent=lambda y, args, d: args[0].to("switch", d[1], d[2]), writes=False),
    "maximum": Operation(np.maximum, tangent=lambda y, args, d: args[0].to("ge", args[1]).to("switch", d[0], d[1])),
    "minimum": Operation(np.minimum, tangent=lambda y, args, d: args[0].to("le", args[1]).to("switch", d[0], d[1])),
    "clip": Operation(ufuncs.clip, tangent=_clip, writes=False),
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
    "round away": Operation(ufuncs.round_half_away_from_zero, writes=False, is_step=True),
    "float": Operation(lambda x: np.asarray(x, dtype=np.float64), writes=False, is_step=True),
}  # fmt: skip


# --- evaluates programs with NumPy: in parts that the cache holds, each operation into what no later one reads ---

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
