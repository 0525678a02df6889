"""Graphs as functions of JAX, in float64, whatever the user's JAX is set to."""

import functools
import importlib.util
import sys

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from pytensor.compile.mode import get_mode
from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph

from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.graphs.backends import without_c
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
        context: AbstractContextManager[Any] = jax.enable_x64(True)
        return context
    from jax.experimental import enable_x64

    old: AbstractContextManager[Any] = enable_x64(True)
    return old


class InFloat64:
    """A function that PyTensor compiles for JAX, called inside `in_float64`.

    It returns arrays of NumPy: outside that context, JAX would go on with its own in the user's precision.

    Parameters
    ----------
    function : pytensor function
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


def jaxed(inputs: Sequence[Variable], outputs: Sequence[Variable]) -> Callable[..., Any]:
    """Return a graph as a function that JAX can trace; to be called, and traced, inside `in_float64`.

    Returns
    -------
    callable
        From values of the inputs to a tuple of those of the outputs.

    Raises
    ------
    NotImplementedError
        Where an operation has no version in JAX.
    """
    funcify = _dispatch()
    with without_c(), in_float64():
        fgraph = FunctionGraph(list(inputs), list(outputs), clone=True)
        get_mode("JAX").optimizer.rewrite(fgraph)
        function: Callable[..., Any] = funcify(fgraph)
    return function


@functools.cache
def _dispatch() -> Callable[..., Any]:
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
    funcify: Callable[..., Any] = jax_funcify
    return funcify


def _on_host(op: ByParameters, **kwargs: Any) -> Callable[..., Any]:
    """Return derivatives of incomplete functions, which NumPy evaluates.

    Numbers go there and come back as their bits: a callback may run in a thread in which JAX is not set to float64.
    """
    import jax

    def on_bits(*bits: Any) -> AnyArray:
        values = [np.ascontiguousarray(part).view(np.float64)[..., 0] for part in bits]
        result: AnyArray = np.ascontiguousarray(op.on_arrays(*values), dtype=np.float64)[..., None].view(np.int32)
        return result

    def evaluated(*inputs: Any) -> Any:
        inputs = jax.numpy.broadcast_arrays(*inputs)  # so that axes over which JAX maps come first in all of them
        bits = [jax.lax.bitcast_convert_type(part, np.int32) for part in inputs]
        result = jax.ShapeDtypeStruct(bits[0].shape, np.int32)
        found = jax.pure_callback(on_bits, result, *bits, vmap_method="broadcast_all")
        return jax.lax.bitcast_convert_type(found, np.float64)

    return evaluated
