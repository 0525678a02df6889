"""Compilation modes: the quick mode, the compiled ones, JAX in float64, and the choice between them."""

import functools
import importlib.util
import itertools
import sys

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import Any, Literal, get_args

import numpy as np
import pymc as pm
import pytensor

from pymc.distributions.transforms import ZeroSumTransform
from pymc.pytensorf import resolve_backend_compile_kwargs
from pytensor.compile.mode import Mode
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph import Apply, Constant, RewriteDatabaseQuery, Variable
from pytensor.graph.op import HasInnerGraph, HasMultipleInnerGraph
from pytensor.graph.rewriting.basic import dfs_rewriter
from pytensor.graph.traversal import toposort
from pytensor.link.vm import VMLinker
from pytensor.tensor.elemwise import Elemwise
from pytensor.xtensor.basic import XOp
from pytensor.xtensor.type import XTensorType

from pymc_ngvi.core.memory import no_collections
from pymc_ngvi.core.types import AnyArray
from pymc_ngvi.graphs import loops, rewrites
from pymc_ngvi.graphs.private import NoPythonCOp, NoPythonOp
from pymc_ngvi.graphs.programs import ByParameters

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


# --- compilation modes: the quick mode, the compiled ones, and the choice between them ---

Backend = Literal["auto", "quick", "numba", "c", "jax"]
BACKENDS: tuple[str, ...] = get_args(Backend)
#: Those whose graphs are compiled as a whole, rows among them; and all that PyTensor compiles for.
WITH_ROWS = ("numba", "c", "given mode")
COMPILED = (*WITH_ROWS, "jax")

#: Rewrites that only serve generated code, or that write into their inputs.
_EXCLUDED = ("fusion", "inplace", "cxx_only", "BlasOpt", "scan_make_inplace", *rewrites.EXCLUDED)


_for_numpy = dfs_rewriter(rewrites.split_many_operands, rewrites.vectorise_elemwise)


@functools.cache
def quick_mode(*, is_large: bool = False) -> Mode:
    """Return the mode that runs graphs by Python thunks on NumPy."""
    include = loops.FEW if is_large else ("fast_run", *rewrites.INCLUDED)
    # After specialisation (2) and the Python-only rewrites (49.1), when no other rewrite makes new Elemwise.
    query = RewriteDatabaseQuery(include=["py_only", *include], exclude=list(_EXCLUDED)).register(
        (dfs_rewriter(rewrites.expand_composite), 59.0),
        (_for_numpy, 60.0),
    )
    return Mode(VMLinker(use_cloop=False, c_thunks=False), query)


def quickly(inputs: list[Variable], outputs: Variable | list[Variable]) -> Callable[..., Any]:
    """Return a function that is called a few times; it is compiled only where it can't be run node by node."""
    with without_c():
        every = rewrites.inline_inner_graphs(outputs if isinstance(outputs, list) else [outputs])
        if not is_plain(every):
            return pytensor.function(inputs, outputs, mode=quick_mode(), on_unused_input="ignore")
        run = Interpreted(inputs, every)
    return run if isinstance(outputs, list) else lambda *given: run(*given)[0]


def is_plain(outputs: list[Variable]) -> bool:
    """Tell whether nodes can be run one by one: no graphs of their own, dimensions with names, or unused branches."""
    kinds = (HasMultipleInnerGraph, XOp, NoPythonOp, NoPythonCOp)
    return not any(isinstance(getattr(node.op, "core_op", node.op), kinds) for node in toposort(outputs))


class Interpreted:
    """A graph that is run node by node: to compile it takes as long as tens of calls."""

    def __init__(self, inputs: Sequence[Variable], outputs: list[Variable]) -> None:
        graph = rewrites.copy_of(outputs)
        _for_numpy.rewrite(graph)
        self._inputs, self._outputs, self._nodes = inputs, graph.outputs, list[Apply]()
        self._known = {var: var.data for var in graph.variables if isinstance(var, Constant)}
        for node in graph.toposort():
            node.op.prepare_node(node, None, None, "py")
            if self._known.keys() >= {*node.inputs}:
                made = performed(node, [self._known[var] for var in node.inputs])
                self._known.update((var, value) for var, [value] in zip(node.outputs, made, strict=True))
            else:
                self._nodes.append(node)
        last = {var: node for node in self._nodes for var in node.inputs}
        read = last.keys() | {*self._outputs}
        self._known = {var: value for var, value in self._known.items() if var in read}
        self._shared = [var for var in read if isinstance(var, SharedVariable)]
        #: Of each node, what no later one reads.
        self._done = [[var for var in {*node.inputs} - {*self._outputs} if last[var] is node] for node in self._nodes]

    def __call__(self, *given: Any) -> list[Any]:
        """Return the values of the outputs."""
        values = self._known | {var: var.get_value(borrow=True) for var in self._shared}
        values |= {var: var.type.filter(x, allow_downcast=True) for var, x in zip(self._inputs, given, strict=True)}
        for node, done in zip(self._nodes, self._done, strict=True):
            for var, [value] in zip(node.outputs, performed(node, [values[i] for i in node.inputs]), strict=True):
                values[var] = value
            for var in done:
                del values[var]
        return [copy(values[var]) for var in self._outputs]


def performed(node: Apply, inputs: list[Any]) -> list[list[Any]]:
    """Return what a node makes of values of its inputs, each output in a list of its own."""
    storage: list[list[Any]] = [[None] for _ in node.outputs]
    node.op.perform(node, inputs, storage)
    return storage


def compile_options(
    backend: str, compile_kwargs: Mapping[str, object] | None, *, is_large: bool = False
) -> dict[str, Any]:
    """Translate a backend's name and the user's ``compile_kwargs`` into options of ``pytensor.function``."""
    if compile_kwargs and "mode" in compile_kwargs:
        return dict(compile_kwargs)
    if backend not in COMPILED:
        return {**(compile_kwargs or {}), "mode": quick_mode(is_large=is_large)}
    return resolve_backend_compile_kwargs(backend, compile_kwargs)


def compile_flags(backend: str) -> AbstractContextManager[None]:
    """Return the context in which functions are compiled for a backend."""
    if backend not in COMPILED:
        return without_c()
    return pytensor.config.change_flags(floatX="float64")


@contextmanager
def without_c(model: pm.Model | None = None) -> Iterator[None]:
    """Return a context in which graphs are made: PyTensor compiles no C code, and no garbage is looked for.

    It would for inner graphs (Scan, log-sum-exp) even where the outer graph runs on Python thunks, and PyMC does so for
    initial points: 30 seconds for a mixture model. Nor does it note, for each node, the lines of code that made it: a
    quarter of the time that derivatives take.

    Parameters
    ----------
    model : pymc.Model, optional
        Whose random variables are evaluated, or replaced by their log densities: those of `pymc.dims` and those that
        sum to zero keep their type only under the ``floatX`` that they were made under.
    """
    transforms = {} if model is None else {rv: model.rvs_to_transforms.get(rv) for rv in model.basic_RVs}
    kept = (rv for rv, of in transforms.items() if isinstance(rv.type, XTensorType) or isinstance(of, ZeroSumTransform))
    floats = "float32" if any(rv.type.dtype == "float32" for rv in kept) else "float64"
    with no_collections(), pytensor.config.change_flags(cxx="", floatX=floats, traceback__limit=0):
        yield


def python_loops(nodes: Iterable[Apply]) -> list[Apply]:
    """Return the Elemwise nodes that run element by element in Python in the quick mode, inner graphs included."""
    found = []
    for node in nodes:
        if isinstance(node.op, Elemwise):
            if not rewrites.runs_on_numpy(node.op.scalar_op, len(node.inputs)):
                found.append(node)
        elif isinstance(node.op, HasInnerGraph):
            found.extend(python_loops(node.op.fgraph.apply_nodes))
    return found
