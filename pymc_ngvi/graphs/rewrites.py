"""Rewrites of PyTensor graphs: those that let Elemwise run on NumPy, and stable forms that PyTensor misses."""

import functools
import itertools

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt

from pytensor import scalar as ps
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import optdb
from pytensor.compile.rewriting import inline_ofg_node
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph import Apply, Constant, FunctionGraph, RewriteDatabaseQuery, Variable, clone
from pytensor.graph.rewriting.basic import GraphRewriter, PatternNodeRewriter, dfs_rewriter, node_rewriter
from pytensor.graph.traversal import toposort, walk
from pytensor.scalar.math import Erf, Erfc, Log1mexp, Sigmoid, Softplus, TriGamma
from pytensor.sparse import Dot, SparseTensorType, StructuredDot
from pytensor.tensor.basic import get_underlying_scalar_constant_value
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.exceptions import NotScalarConstantError
from pytensor.tensor.linalg import SolveTriangular
from pytensor.tensor.linalg.solvers.core import SolveBase
from pytensor.tensor.math import All
from pytensor.tensor.rewriting.basic import local_useless_switch
from pytensor.tensor.rewriting.linalg.solvers import batched_vector_b_solve_to_matrix_b_solve
from pytensor.tensor.subtensor import Subtensor

from pymc_ngvi.graphs.private import vectorize_node


@node_rewriter([OpFromGraph])  # type: ignore[untyped-decorator]
def _inline(fgraph: FunctionGraph, node: Apply) -> list[Variable]:
    return list(inline_ofg_node(node))


def copy_of(outputs: list[Variable]) -> FunctionGraph:
    """Return a graph to rewrite, with the same inputs.

    Graphs of a model share their nodes. Without a copy, the rounding of a gradient would depend on whether its
    derivatives were made before it was compiled.
    """
    copies = clone([], outputs, copy_inputs=False)[1]  # of outputs that are inputs, too
    own = [old if old.owner is None else new for old, new in zip(outputs, copies, strict=True)]
    return FunctionGraph(outputs=own, clone=False, copy_inputs=False)


def rewritten(outputs: list[Variable], *rewriters: GraphRewriter) -> list[Variable]:
    """Return a copy of a graph to which rewrites were applied, one after the other."""
    fgraph = copy_of(outputs)
    for rewriter in rewriters:
        rewriter.rewrite(fgraph)
    return list(fgraph.outputs)


@functools.cache
def named(include: tuple[str, ...], exclude: tuple[str, ...]) -> GraphRewriter:
    """Return PyTensor's rewrites by their names, made once: what they apply to is looked up at their first use."""
    return optdb.query(RewriteDatabaseQuery(include=include, exclude=exclude))


def stored_value(var: Variable) -> Any:
    """Return what a constant or shared variable holds, which may be no array; None for any other variable."""
    if isinstance(var, SharedVariable):
        return var.get_value(borrow=True)
    return var.data if isinstance(var, Constant) else None


def has_op(outputs: list[Variable], kind: type) -> bool:
    """Tell whether a graph has operations of a kind."""
    return any(isinstance(node.op, kind) for node in toposort(outputs))


def dependent(outputs: list[Variable], on: Variable) -> set[Variable]:
    """Return a variable, and all of a graph that depends on it."""
    found = {on}
    for node in toposort(outputs):
        if not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


def behind(outputs: Sequence[Variable], inputs_of: Callable[[Variable], Sequence[Variable]]) -> Iterator[Variable]:
    """Go from variables to those that they are made of; ``inputs_of`` tells through which of the inputs of each."""
    return walk(outputs, lambda var: None if var.owner is None else list(inputs_of(var)))


def inline_inner_graphs(outputs: list[Variable]) -> list[Variable]:
    """Replace every node that wraps a graph of its own (log-sum-exp, softmax, ...) by that graph.

    Last thing before vectorising, after all derivatives, which those nodes define in a stable way: a wrapped graph
    would be run draw by draw, and compiled by itself.
    """
    fgraph = copy_of(outputs)
    while any(isinstance(node.op, OpFromGraph) for node in fgraph.apply_nodes):
        dfs_rewriter(_inline).rewrite(fgraph)
    return list(fgraph.outputs)


# --- rewrites of PyTensor graphs: those that let Elemwise run on NumPy, and stable forms that PyTensor misses ---

#: Arguments, inputs and outputs together, that PyTensor gives to a NumPy function.
_MAX_OPERANDS = 32
_MAX_TRACES = 8
#: Operations that are monotone in each argument, the others given, and do not reach their limits; how many of them
#: within each other are looked through.
_MONOTONE = (ps.Add, ps.Sub, ps.Mul, ps.Neg, ps.Exp, Sigmoid, Softplus, Erf, Erfc)
_DEEPEST = 9
_NARROW = frozenset({"int8", "int16", "int32", "uint8", "uint16", "uint32"})

#: Scalar Ops that PyTensor runs element by element in Python, and the NumPy function that does the same.
_UFUNCS: dict[type, tuple[str, int]] = {
    Softplus: ("pymc_ngvi.core.scalars.softplus", 1),
    Log1mexp: ("pymc_ngvi.core.scalars.log1mexp", 1),
    TriGamma: ("pymc_ngvi.core.scalars.trigamma", 1),
    ps.Clip: ("pymc_ngvi.core.scalars.clip", 3),
    ps.Second: ("pymc_ngvi.core.scalars.second", 2),
    ps.RoundHalfAwayFromZero: ("pymc_ngvi.core.scalars.round_half_away_from_zero", 1),
    ps.Identity: ("numpy.positive", 1),
}


@node_rewriter([Elemwise])  # type: ignore[untyped-decorator]
def vectorise_elemwise(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Give an Elemwise that has no NumPy function one, so that it does not run element by element."""
    op = node.op
    spec = _UFUNCS.get(type(op.scalar_op))
    if op.nfunc_spec is not None or spec is None:
        return None
    name, n_inputs = spec
    # Elemwise copies `nfunc_spec` when it is made: a new one is needed. The scalar Op stays the same.
    return list(Elemwise(op.scalar_op, nfunc_spec=(name, n_inputs, 1))(*node.inputs, return_list=True))


@node_rewriter([Elemwise])  # type: ignore[untyped-decorator]
def expand_composite(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Replace an Elemwise over several scalar Ops (PyTensor makes them of integer powers) by one Elemwise for each."""
    scalar_op = node.op.scalar_op
    if not isinstance(scalar_op, ps.Composite):
        return None
    inner = scalar_op.fgraph
    values = dict(zip(inner.inputs, node.inputs, strict=True))
    for scalar_node in inner.toposort():
        inputs = [pt.as_tensor(i.data) if isinstance(i, Constant) else values[i] for i in scalar_node.inputs]
        outputs = Elemwise(scalar_node.op)(*inputs, return_list=True)
        values.update(zip(scalar_node.outputs, outputs, strict=True))
    return [values[out] for out in inner.outputs]


@node_rewriter([Elemwise])  # type: ignore[untyped-decorator]
def split_many_operands(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Add or multiply at most 31 arguments at a time, from left to right as before."""
    inputs = list(node.inputs)
    if not isinstance(node.op.scalar_op, ps.Add | ps.Mul) or len(inputs) < _MAX_OPERANDS:
        return None
    result, rest = inputs[0], inputs[1:]
    while rest:
        now, rest = rest[: _MAX_OPERANDS - 2], rest[_MAX_OPERANDS - 2 :]
        result = node.op(result, *now)
    return [result]


def runs_on_numpy(scalar_op: ps.ScalarOp, n_inputs: int) -> bool:
    """Tell whether an Elemwise over a scalar Op is run by NumPy functions once these rewrites are applied."""
    if isinstance(scalar_op, ps.Composite):
        return all(runs_on_numpy(node.op, len(node.inputs)) for node in scalar_op.fgraph.apply_nodes)
    # PyTensor casts by `astype`, and folds the binary functions that add and multiply.
    if isinstance(scalar_op, ps.Cast | ps.Add | ps.Mul) or type(scalar_op) in _UFUNCS:
        return True
    spec = getattr(scalar_op, "nfunc_spec", None)  # a loop, as in a derivative of betainc, has none
    return spec is not None and spec[1] == n_inputs


def _constant(value: float) -> dict[str, object]:
    """Return a pattern that matches a constant."""
    return {"pattern": f"constant {value}", "constraint": lambda variable: _equals(variable, value)}


#: PyTensor has the first two, but one only before canonicalisation, which turns neg into a product, and the other only
#: for a sigmoid that is used once. Left alone, the derivatives are 0 / 0 and 0 for x > 37. Of a complementary log-log
#: link, the last one leaves -exp(x) of what is -inf for x > 3.6 otherwise.
stable = dfs_rewriter(
    PatternNodeRewriter(
        (pt.log1p, (pt.mul, _constant(-1), (pt.sigmoid, "x"))),
        (pt.neg, (pt.softplus, "x")),
        allow_multiple_clients=True,
        name="log1p_minus_sigmoid",
    ),
    PatternNodeRewriter(
        (pt.sub, _constant(1), (pt.sigmoid, "x")),
        (pt.sigmoid, (pt.neg, "x")),
        allow_multiple_clients=True,
        name="one_minus_sigmoid",
    ),
    PatternNodeRewriter(
        (pt.log1p, (pt.neg, (pt.sub, _constant(1), "x"))),
        (pt.log, "x"),
        allow_multiple_clients=True,
        name="log1p_minus_one_minus",
    ),
)


@node_rewriter([All])  # type: ignore[untyped-decorator]
def _true_by_construction(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Drop the check of a parameter that can't fail: exp(x) >= 0, 0 <= 1 - exp(-exp(x)) <= 1; NaN makes log p NaN."""
    comparison = node.inputs[0].owner
    if node.outputs[0].ndim or comparison is None or not isinstance(comparison.op, Elemwise):
        return None
    kind, (below, above) = type(comparison.op.scalar_op), comparison.inputs[:2]
    if kind in (ps.GE, ps.GT):
        below, above = above, below
    elif kind not in (ps.LE, ps.LT):
        return None
    highest, lowest = _limits(below)[1], _limits(above)[0]
    may_touch = kind in (ps.GE, ps.LE) or (kind is ps.GT and _is_of(above, ps.Exp, Sigmoid, Softplus))
    holds = highest <= lowest if may_touch else highest < lowest
    return [pt.constant(np.array(True))] if holds else None


def _limits(var: Variable, depth: int = _DEEPEST) -> tuple[float, float]:
    """Return limits of the elements of a variable: of a monotone function, its values at limits of what it is of."""
    node, unknown = var.owner, (-np.inf, np.inf)
    if isinstance(var, Constant) and np.size(var.data):
        return float(np.min(var.data)), float(np.max(var.data))
    if node is None or not depth:
        return unknown
    if isinstance(node.op, DimShuffle):
        return _limits(node.inputs[0], depth - 1)
    if not _is_of(var, *_MONOTONE) or len(node.inputs) > 2:
        return unknown
    each = [_limits(x, depth - 1) for x in node.inputs]
    with np.errstate(all="ignore"):
        ends = [float(node.op.scalar_op.impl(*at)) for at in itertools.product(*each)]
    return unknown if np.isnan(ends).any() else (min(ends), max(ends))


def _is_of(variable: Variable, *scalar_ops: type) -> bool:
    node = variable.owner
    return node is not None and isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, scalar_ops)


def _equals(variable: Variable, value: float) -> bool:
    try:
        return bool(get_underlying_scalar_constant_value(variable) == value)
    except NotScalarConstantError:
        return False


#: Takes away what need not be evaluated.
shorter = dfs_rewriter(_true_by_construction)


@node_rewriter([Subtensor])  # type: ignore[untyped-decorator]
def _wide_indices(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    x, *indices = node.inputs
    if not any(i.type.dtype in _NARROW for i in indices):
        return None
    return [node.op(x, *[_wide(i) if i.type.dtype in _NARROW else i for i in indices])]


def _wide(index: Variable) -> Variable:
    """Return a scalar index as an int64."""
    if isinstance(index, Constant):
        return ps.constant(int(index.data), dtype="int64")
    return pt.scalar_from_tensor(pt.cast(pt.tensor_from_scalar(index), "int64"))


#: PyTensor merges x[a:b][i] into one slice by arithmetic in the type of i, which overflows: constants such as the 0 of
#: `walk[0]` are of type int8, and x may be longer than 127.
wide_indices = dfs_rewriter(_wide_indices)

#: Unknowns of a triangular system that is solved element by element: pairs of effects or of outcomes. Rows of three
#: outcomes vary in nine directions, more than are read, and a fit of 120 of them took 5.1 s in the place of 3.5 s.
_FEW_UNKNOWNS = 2


@node_rewriter([Blockwise])  # type: ignore[untyped-decorator]
def _eliminate(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Solve small triangular systems by arithmetic of their elements, which tells what each element depends on."""
    op = node.op.core_op
    if not isinstance(op, SolveTriangular) or not _solves_one_by_one(node):
        return None
    a, b = node.inputs
    n = a.type.shape[-1]
    if n is None or n > _FEW_UNKNOWNS:
        return None
    x: dict[int, Variable] = {}
    for i in range(n) if op.lower else reversed(range(n)):
        rest = b[..., i] - sum(a[..., i, j] * x[j] for j in x)
        x[i] = rest if op.unit_diagonal else rest / a[..., i, i]
    return [pt.stack([x[i] for i in range(n)], axis=-1)]


_solve = dfs_rewriter(_eliminate, batched_vector_b_solve_to_matrix_b_solve)


def solve_at_once(fgraph: FunctionGraph) -> bool:
    """Solve with one matrix for many vectors at once, by elements or as columns; tell whether there was such a node.

    PyTensor makes columns of them, too, but too late: once the matrix has an axis of draws, each vector of each draw is
    solved for by a call of its own.
    """
    found = any(_solves_one_by_one(node) for node in fgraph.apply_nodes)
    if found:
        _solve.rewrite(fgraph)
    return found


def _solves_one_by_one(node: Apply) -> bool:
    """Tell whether a node solves with one matrix for several vectors, one after the other."""
    if not isinstance(node.op, Blockwise) or not isinstance(node.op.core_op, SolveBase) or node.op.core_op.b_ndim != 1:
        return False
    a, b = node.inputs
    return b.type.ndim > 1 and all(a.type.broadcastable[:-2])


@node_rewriter([pt.switch])  # type: ignore[untyped-decorator]
def useless_switch(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Do what PyTensor's ``local_useless_switch`` does, without its leak.

    For each ``switch(condition, 0, 0)``, that rewrite makes the list of places where the constant 0 was created three
    times as long, and the constant is shared by all graphs of the process: after a few models, they fill the memory.
    """
    result: list[Variable] | None = local_useless_switch.transform(fgraph, node)
    for variable in result or ():
        if len(getattr(variable.tag, "trace", None) or ()) > _MAX_TRACES:
            variable.tag.trace = variable.tag.trace[:_MAX_TRACES]
    return result


#: Tags to include and names to exclude, of a query, for `useless_switch`; without the tag it is not used.
INCLUDED, EXCLUDED = ("pymc_ngvi_useless_switch",), ("local_useless_switch",)
if INCLUDED[0] not in optdb["canonicalize"]._names:
    optdb["canonicalize"].register(INCLUDED[0], useless_switch, use_db_name_as_tag=False)


# --- products with sparse matrices, for all draws at once ---
#
# PyTensor vectorises no sparse operation. A product is linear in its dense operand: draws are further columns, or rows.


@vectorize_node.register(Dot)  # type: ignore[untyped-decorator]
@vectorize_node.register(StructuredDot)  # type: ignore[untyped-decorator]
def _product_of_draws(op: Dot | StructuredDot, node: Apply, left: Variable, right: Variable) -> list[Variable]:
    if isinstance(left.type, SparseTensorType) == isinstance(right.type, SparseTensorType):
        raise NotImplementedError("batches of products of two sparse matrices")
    if isinstance(right.type, SparseTensorType):
        rows = left.reshape((-1, left.shape[-1]))
        product = op(rows, right)
        return [product.reshape((*(left.shape[i] for i in range(left.type.ndim - 1)), product.shape[-1]))]
    n_batch = right.type.ndim - 2
    first = pt.moveaxis(right, n_batch, 0)  # (n, ..., k)
    product = op(left, first.reshape((first.shape[0], -1)))
    shaped = product.reshape((product.shape[0], *(first.shape[i] for i in range(1, first.type.ndim))))
    return [pt.moveaxis(shaped, 0, n_batch)]
