"""Engines evaluate rows: as programs, with NumPy or JAX; rows that no program can be, by functions of PyTensor."""

import functools
import math

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytensor.tensor as pt

from pytensor.compile import Function
from pytensor.graph import Variable, clone_replace

from pymc_ngvi.core.messages import NotApart
from pymc_ngvi.core.types import AnyArray, Array, Bools
from pymc_ngvi.graphs.backends import filled_up, in_float64, without_c
from pymc_ngvi.graphs.programs import program_of, read
from pymc_ngvi.ops import cost
from pymc_ngvi.reading.predictors import MOST_PREDICTORS, Compile, Rows, interacts, shared_first
from pymc_ngvi.rows.expectation import CACHED_VALUES, Compiled, RowFunction, SummedRowFunction, row_slices
from pymc_ngvi.rows.programs import (
    OPERATIONS,
    CannotFollow,
    OnNumPy,
    RowProgram,
    derived,
    rewritten,
    separated,
)
from pymc_ngvi.rows.row_hessian import RowDerivatives

#: Points at a time of a function that is more than arithmetic with numbers.
_POINTS_AT_A_TIME = 32


@dataclass(frozen=True)
class FewAtATime:
    """Evaluates what may take much memory at a point."""

    function: Function
    #: Numbers within it: finer rules of quadrature are for functions of few.
    n_evaluations: int

    def __call__(self, *predictors: Array) -> list[Array]:
        """Return values, (n_points, 1)."""
        slices = row_slices(len(predictors[0]), _POINTS_AT_A_TIME)
        return [np.concatenate([self.function(*[p[at] for p in predictors])[0] for at in slices])]


@dataclass(frozen=True)
class Flattened:
    """A function that PyTensor compiles, element by element, of arrays that broadcast."""

    function: Function

    def __call__(self, *inputs: Array) -> list[Array]:
        """Return values."""
        arrays = np.broadcast_arrays(*inputs)
        [values] = self.function(*[np.ascontiguousarray(x.reshape(1, -1)) for x in arrays])
        return [np.broadcast_to(values, (1, arrays[0].size)).reshape(arrays[0].shape)]


# --- evaluates programs with JAX, on whatever device it has; few values with NumPy ---

#: Values for which NumPy takes no longer than it takes to call a function of JAX; the same on a GPU, and values to ask
#: for at a time there: as many as make up for the call and for the copies there and back.
_FEW = 2**13
_FEW_ON_GPU, _AT_A_TIME_ON_GPU = 2**14, 2**20
#: Operations in which JAX has far fewer right digits than SciPy where they are small.
_LESS_EXACT = ("gammainc", "gammaincc", "betainc", "owens_t")


class OnJax:
    """A program as a function of arrays of NumPy.

    A new shape of the inputs is compiled anew: axes are filled up to powers of 2.
    """

    def __init__(self, program: RowProgram) -> None:
        import jax

        is_processor = jax.default_backend() == "cpu"
        self._few, self.at_a_time = (_FEW, CACHED_VALUES) if is_processor else (_FEW_ON_GPU, _AT_A_TIME_ON_GPU)
        functions = [_function(call.name) for call in program.calls]

        def traced(*inputs: Any) -> list[Any]:
            values = [*inputs, *map(np.float64, program.constants)]
            for function, call in zip(functions, program.calls, strict=True):
                values.append(function(*[values[k] for k in call.read]))
            return [values[k] for k in program.outputs]

        self._run, self._run_few = jax.jit(traced), OnNumPy(program)

    def __call__(self, *inputs: AnyArray) -> list[AnyArray]:
        """Return the outputs at inputs, floats or booleans, that broadcast, all with as many axes."""
        shape = np.broadcast_shapes(*[x.shape for x in inputs])
        if math.prod(shape) < self._few:
            return self._run_few(*inputs)
        with in_float64():
            outputs = self._run(*[filled_up(x, 2, x.ndim) for x in inputs])
        at = tuple(slice(n) for n in shape)
        return [np.asarray(out)[at[: out.ndim]] for out in outputs]


def _function(name: str) -> Callable[..., Any]:
    """Return what JAX has for an operation: mostly what bears the name of the function of NumPy or SciPy."""
    import jax.numpy as jnp

    from jax.scipy import special

    word = getattr(OPERATIONS[name].function, "__name__", "")
    found: Callable[..., Any] | None = _others().get(name) or getattr(jnp, word, None) or getattr(special, word, None)
    if found is None or name in _LESS_EXACT:
        raise CannotFollow(f"JAX has no {name} to full precision")
    return found


@functools.cache
def _others() -> dict[str, Callable[..., Any]]:
    """Return what goes by another name, or is put together."""
    import jax
    import jax.numpy as jnp

    from jax.scipy import special

    def log1mexp(x: Any) -> Any:
        is_far = x < -np.log(2.0)
        near_zero = jnp.log(-jnp.expm1(jnp.where(is_far, -1.0, x)))
        return jnp.where(is_far, jnp.log1p(-jnp.exp(jnp.minimum(x, 0.0))), near_zero)

    return {
        "softplus": jax.nn.softplus,
        "sigmoid": jax.nn.sigmoid,
        "logaddexp": jnp.logaddexp,
        "log1mexp": log1mexp,
        "clip": lambda x, low, high: jnp.where(x < low, low, jnp.where(x > high, high, x)),
        "psi": special.digamma,
        "trigamma": functools.partial(special.polygamma, 1),
        "polygamma 2": functools.partial(special.polygamma, 2),
        "round away": lambda x: jnp.trunc(x + jnp.copysign(0.5, x)),
        "float": lambda x: jnp.asarray(x, dtype=np.float64),
    }


# --- rows as programs: PyTensor's graphs are read, and not compiled ---


type _Plain = tuple[Compiled, Bools]


class Engine:
    """Reads rows as programs; functions of rows that have operations it does not know are left to PyTensor."""

    def __init__(self, evaluated: Callable[[RowProgram], Compiled], compile_: Compile) -> None:
        self._evaluated, self._compile = evaluated, compile_
        self._read: WeakKeyDictionary[Variable, dict[tuple[object, ...], RowProgram]] = WeakKeyDictionary()
        self._plainly: WeakKeyDictionary[Variable, dict[tuple[object, ...], _Plain]] = WeakKeyDictionary()
        #: Of rows along a sum: what `_along` returns of them, and the function, given the sum.
        self._sums: WeakKeyDictionary[Variable, tuple[RowProgram, list[int], RowProgram]] = WeakKeyDictionary()
        self._functions: dict[RowProgram, Compiled] = {}

    def row_function(self, rows: Rows) -> RowFunction:
        """Return the function of rows."""
        if rows.is_whole:
            function = self._compile([*rows.slots, *rows.data], [rows.value])
            whole = FewAtATime(function, cost.estimate([rows.value], batch=_POINTS_AT_A_TIME).widest)
            return RowFunction(whole, rows.index, list(rows.data.values()), interacts(rows))
        try:
            return self._plain(rows) if rows.sum_ is None else self._summed(rows)
        except CannotFollow as reason:
            if len(rows.slots) > MOST_PREDICTORS:  # it is compiled
                raise NotApart(str(reason)) from None
        inputs = {var: pt.matrix(dtype=var.type.dtype) for var in (*rows.slots, *rows.data)}
        with without_c():
            value = clone_replace([rows.value], inputs, rebuild_strict=False)
        function = Flattened(self._compile(list(inputs.values()), value))
        return RowFunction(function, rows.index, list(rows.data.values()), interacts(rows))

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
            of_sum = program_of([*others, rows.sum_, *given], [rows.value], [*others, *given])
            self._sums[rows.value] = *_along(rows), of_sum
        along, owners, of_sum = self._sums[rows.value]
        numbers, data = _data_of(rows)
        none: list[float | None] = [None] * len(others)
        beside = [a for a in of_sum.used if a < len(others)]
        function = self._function(self._value(rows, 0, numbers))
        of_others = self._function(_given(along, [*none, *numbers]))
        unused = [None if a in beside else 0.0 for a in range(len(others))]
        given_sum = self._function(_given(of_sum, [*unused, None, *numbers]))
        are_shared = len(rows.index) > 1 and bool((rows.index == rows.index[0])[:, : len(others)].all())
        return SummedRowFunction(
            function, rows.index, data, interacts(rows), rows.n_summed, of_others, owners, given_sum, beside,
            shares_u=are_shared,
        )  # fmt: skip

    def _function(self, program: RowProgram) -> Compiled:
        if program not in self._functions:
            try:
                self._functions[program] = self._evaluated(program)
            except CannotFollow:
                self._functions[program] = OnNumPy(program)
        return self._functions[program]

    def derivatives[D: RowDerivatives](self, rows: Rows, kind: type[D]) -> D | None:
        """Return derivatives of rows, with predictors that all share first.

        None where rows have an operation without one, or one that is not known here.
        """
        if rows.is_whole:
            return None
        rows, n_shared = shared_first(rows)
        numbers, data = _data_of(rows)
        try:
            program, by = derived(self._value(rows, n_shared, numbers), len(rows.slots), kind.order)
        except CannotFollow:
            return None
        return kind(self._function(program), rows.index, by, data, n_shared)


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
    found = [
        (k, one, other)
        for k, slot in enumerate(writer.inputs[n_others : len(rows.slots)])
        if (slope := writer.slope(total, slot)) is not None
        for one, other in separated(writer, slope, range(n_others))
    ]
    owners, ones, others = zip(*found, strict=True)
    zeros = [0.0 if n_others <= k < len(rows.slots) else None for k in range(len(writer.inputs))]
    writer, outputs = rewritten(writer.written([total, *ones, *others]), zeros)
    return writer.written(outputs), list(owners)


# --- engines by name ---

#: Engines by the ``backend`` that takes them: from how PyTensor compiles graphs, where that is needed. All that is no
#: row is PyTensor's: compiled for that backend or, where it knows none of this name, run as with "quick".
ENGINES: dict[str, Callable[[Compile], Engine]] = {
    **dict.fromkeys(("quick", "numba", "c"), functools.partial(Engine, OnNumPy)),
    "jax": functools.partial(Engine, OnJax),
}


def engine_for(backend: str, compile_: Compile) -> Engine:
    """Return the engine that a backend takes.

    Parameters
    ----------
    backend : str
    compile_ : callable
        How PyTensor compiles what is no program.

    Returns
    -------
    Engine

    Examples
    --------
    >>> from pymc_ngvi.graphs.backends import quickly
    >>> from pymc_ngvi.rows.engines import engine_for
    >>> type(engine_for("quick", quickly)).__name__
    'Engine'
    """
    return ENGINES.get(backend, ENGINES["quick"])(compile_)
