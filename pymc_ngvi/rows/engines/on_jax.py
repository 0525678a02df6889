"""Evaluates programs with JAX, on whatever device it has; few values with NumPy."""

import functools
import math

from collections.abc import Callable
from typing import Any

import numpy as np

from pymc_ngvi.core.types import AnyArray
from pymc_ngvi.graphs.jaxed import filled_up, in_float64
from pymc_ngvi.rows.programs.on_numpy import OnNumPy
from pymc_ngvi.rows.programs.operations import OPERATIONS, RowProgram
from pymc_ngvi.rows.programs.writer import CannotFollow

#: Values for which NumPy takes no longer than it takes to call a function of JAX, and values to ask for at a time: as
#: many as the cache of a processor holds, on a GPU as many as make up for the call and for the copies there and back.
_FEW, _AT_A_TIME = 2**13, 2**15
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
        self._few, self.at_a_time = (_FEW, _AT_A_TIME) if is_processor else (_FEW_ON_GPU, _AT_A_TIME_ON_GPU)
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
