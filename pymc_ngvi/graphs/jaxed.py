"""Functions of JAX in float64, whatever the user's JAX is set to."""

import functools
import importlib.util
import itertools
import sys

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from pymc_ngvi.core.types import AnyArray
from pymc_ngvi.graphs.incomplete import ByParameters

#: Said where JAX is asked for and not there.
INSTALL = "backend='jax' needs JAX, which is not installed: pip install jax, or this package with its extra `jax`."


def check_installed() -> None:
    """Raise ImportError where there is no JAX, saying what to install."""
    known = sys.modules["jax"] if "jax" in sys.modules else importlib.util.find_spec("jax")
    if known is None:
        raise ImportError(INSTALL)


def in_float64() -> AbstractContextManager[Any]:
    """Return a context in which JAX computes in float64; outside it, nothing changes."""
    _dispatch()
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64(True)


class InFloat64:
    """A function that PyTensor compiles for JAX, called inside `in_float64`.

    It returns arrays of NumPy: outside that context, JAX would go on with its own in the user's precision.
    """

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        with in_float64():
            found = self._function(*args)
        return [np.asarray(value) for value in found] if isinstance(found, list) else np.asarray(found)

    def __getattr__(self, name: str) -> Any:
        """Return what the function has."""
        return getattr(self.__dict__["_function"], name)


def filled_up(x: AnyArray, base: int, n_axes: int) -> AnyArray:
    """Return an array whose first axes repeat their last element, up to powers of some number of elements.

    JAX compiles anew for each shape.
    """
    lengths = [next(k for p in itertools.count() if (k := base**p) >= n) for n in x.shape[:n_axes]]
    more = [(0, k - n) for k, n in zip(lengths, x.shape, strict=False)] + [(0, 0)] * (x.ndim - n_axes)
    return np.pad(x, more, mode="edge") if lengths != [*x.shape[:n_axes]] else x


@functools.cache
def _dispatch() -> None:
    """Import what PyTensor knows of JAX.

    At its first import, PyTensor sets all of JAX to float64. A setting that was there before, in a process that uses
    JAX already, is put back.
    """
    known = sys.modules.get("jax")
    before = known.config.jax_enable_x64 if known is not None else None
    from pytensor.link.jax.dispatch import jax_funcify

    if known is not None and known.config.jax_enable_x64 != before:
        known.config.update("jax_enable_x64", before)
    jax_funcify.register(ByParameters, _on_host)


def _on_host(op: ByParameters, **kwargs: Any) -> Callable[..., Any]:
    """Return derivatives of incomplete functions, which NumPy evaluates.

    Numbers go there and come back as their bits: a callback may run in a thread in which JAX is not set to float64.
    """
    import jax

    def on_bits(*bits: Any) -> AnyArray:
        values = [np.ascontiguousarray(part).view(np.float64)[..., 0] for part in bits]
        return np.ascontiguousarray(op.on_arrays(*values), dtype=np.float64)[..., None].view(np.int32)

    def evaluated(*inputs: Any) -> Any:
        inputs = jax.numpy.broadcast_arrays(*inputs)  # so that axes over which JAX maps come first in all of them
        bits = [jax.lax.bitcast_convert_type(part, np.int32) for part in inputs]
        result = jax.ShapeDtypeStruct(bits[0].shape, np.int32)
        found = jax.pure_callback(on_bits, result, *bits, vmap_method="broadcast_all")
        return jax.lax.bitcast_convert_type(found, np.float64)

    return evaluated
