"""Compilation modes: the quick mode, the compiled ones, and the choice between them.

The quick mode runs the graph by Python thunks on NumPy: nothing is compiled, so that it is ready in tenths of a
second. It keeps every stabilising rewrite of the default mode and leaves out what only helps generated code
(fusion, in-place operation, C-only Ops).
"""

import functools

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import pymc as pm
import pytensor

from pymc.pytensorf import resolve_backend_compile_kwargs
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.rewriting.basic import dfs_rewriter
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.link.vm import VMLinker
from pytensor.tensor.elemwise import Elemwise
from pytensor.xtensor.type import XTensorType

from pymc_ngvi.graphs import large, rewrites
from pymc_ngvi.graphs.scatter import add_by_group

Backend = Literal["auto", "quick", "numba", "c", "jax"]
BACKENDS: tuple[str, ...] = get_args(Backend)
#: Those that PyTensor compiles for.
_COMPILED = ("numba", "c", "jax", "given mode")

#: Rewrites that only serve generated code, or that write into their inputs.
_EXCLUDED = ("fusion", "inplace", "cxx_only", "BlasOpt", "scan_make_inplace", *rewrites.EXCLUDED)


@functools.cache
def quick_mode(*, is_large: bool = False) -> Mode:
    """Return the mode that runs graphs by Python thunks on NumPy.

    Parameters
    ----------
    is_large : bool, default False
        Apply few rewrites, as for graphs with thousands of nodes.

    Returns
    -------
    pytensor.compile.mode.Mode
        Stabilised like the default mode; compiles nothing, inner graphs (Scan, OpFromGraph) included.
    """
    include = large.FEW if is_large else ("fast_run", *rewrites.INCLUDED)
    # After specialisation (2) and the Python-only rewrites (49.1), when no other rewrite makes new Elemwise.
    query = RewriteDatabaseQuery(include=["py_only", *include], exclude=list(_EXCLUDED)).register(
        (dfs_rewriter(rewrites.expand_composite, add_by_group), 59.0),
        (dfs_rewriter(rewrites.split_many_operands, rewrites.vectorise_elemwise), 60.0),
    )
    return Mode(VMLinker(use_cloop=False, c_thunks=False), query)


def compile_options(
    backend: str, compile_kwargs: Mapping[str, object] | None, *, is_large: bool = False
) -> dict[str, Any]:
    """Translate a backend's name and the user's ``compile_kwargs`` into options of ``pytensor.function``.

    Parameters
    ----------
    backend : {"quick", "numba", "c", "jax"}
        Already decided: not "auto". Others, which evaluate rows alone, are taken as "quick".
    compile_kwargs : dict or None
        The user's; a ``mode`` in it wins over "quick" (the caller refuses it beside another backend).
    is_large : bool, default False
        As of `quick_mode`.

    Returns
    -------
    dict
        With a ``mode``.
    """
    if compile_kwargs and "mode" in compile_kwargs:
        return dict(compile_kwargs)
    if backend not in _COMPILED:
        return {**(compile_kwargs or {}), "mode": quick_mode(is_large=is_large)}
    options: dict[str, Any] = resolve_backend_compile_kwargs(backend, compile_kwargs)
    return options


def compile_flags(backend: str) -> AbstractContextManager[None]:
    """Return the context in which functions are compiled for a backend."""
    if backend not in _COMPILED:
        return without_c()
    context: AbstractContextManager[None] = pytensor.config.change_flags(floatX="float64")
    return context


def without_c(model: pm.Model | None = None) -> AbstractContextManager[None]:
    """Return a context in which PyTensor compiles no C code.

    It would for inner graphs (Scan, log-sum-exp) even where the outer graph runs on Python thunks, and PyMC does so for
    initial points: 30 seconds for a mixture model. Nor does it note, for each node, the lines of code that made it: a
    quarter of the time that derivatives take.

    Parameters
    ----------
    model : pymc.Model, optional
        Whose random variables are evaluated, or replaced by their log densities: those of `pymc.dims` can be lowered
        only under the ``floatX`` that they were made under.
    """
    dtypes = {rv.type.dtype for rv in model.basic_RVs if isinstance(rv.type, XTensorType)} if model is not None else ()
    floats = "float32" if "float32" in dtypes else "float64"
    context: AbstractContextManager[None] = pytensor.config.change_flags(cxx="", floatX=floats, traceback__limit=0)
    return context


def python_loops(nodes: Iterable[Apply]) -> list[Apply]:
    """Return the Elemwise nodes that run element by element in Python in the quick mode, inner graphs included.

    Parameters
    ----------
    nodes : iterable of Apply
        Of a graph before or after rewriting.

    Returns
    -------
    list of Apply
    """
    found = []
    for node in nodes:
        if isinstance(node.op, Elemwise):
            if not rewrites.runs_on_numpy(node.op.scalar_op, len(node.inputs)):
                found.append(node)
        elif isinstance(node.op, HasInnerGraph):
            found.extend(python_loops(node.op.fgraph.apply_nodes))
    return found
