"""The graphs of a model on one flat float64 vector: log density, gradient, Hessian-vector products, outputs."""

import contextlib

from collections.abc import Iterator
from copy import copy

import pymc as pm
import pytensor.tensor as pt

from pytensor.compile.builders import OpFromGraph
from pytensor.gradient import DisconnectedType
from pytensor.graph import (
    Apply,
    Constant,
    FunctionGraph,
    Type,
    Variable,
    graph_replace,
    rewrite_graph,
    vectorize_graph,
)
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.graph.traversal import ancestors, toposort
from pytensor.graph.utils import MethodNotDefined
from pytensor.scalar import Cast
from pytensor.tensor.basic import MakeVector
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.rewriting.shape import local_Shape_i_ground, local_shape_to_shape_i, local_track_shape_i
from pytensor.xtensor.type import XTensorType, as_xtensor

from pymc_ngvi.graphs import loops, odes, programs, rewrites
from pymc_ngvi.graphs.layout import Layout
from pymc_ngvi.graphs.layout import Variable as Place
from pymc_ngvi.graphs.loops import vectorised
from pymc_ngvi.graphs.rewrites import copy_of, rewritten
from pymc_ngvi.graphs.rewrites import inline_inner_graphs as inline_inner_graphs  # part of what this module offers

#: What needs first derivatives only.
_INSTEAD_OF_HESSIANS = "estimator='stein' or pm.sample"

_SHAPES = dfs_rewriter(local_shape_to_shape_i, local_track_shape_i, local_Shape_i_ground)


class MissingDerivativeError(ValueError):
    """The log density of the model has no first, or no second, derivative."""


def on_flat_vector(model: pm.Model, layout: Layout, outputs: list[Variable], theta: Variable) -> list[Variable]:
    """Return ``outputs``, functions of the value variables, as functions of the flat vector, in float64."""
    outputs = programs.with_derivatives(odes.with_solutions(outputs))
    values = {value.name: value for value in model.value_vars}
    replacements = {values[v.value_name]: _piece(theta, v, values[v.value_name].type) for v in layout.variables}
    if any(isinstance(var.type, XTensorType) for var in ancestors([*outputs, *replacements])):
        # The static shape of a value variable may be unknown; ours is known, and any such type fits.
        plain = [_values(out) for out in graph_replace(outputs, replacements, strict=False)]
        outputs, replacements = list(rewrite_graph(plain, clone=False, include=("lower_xtensor",))), {}
    if any(
        getattr(var.type, "dtype", "") in ("float32", "float16")
        for node in toposort(outputs)
        for var in (*node.inputs, *node.outputs)
    ):
        return _in_float64(outputs, replacements)
    return list(graph_replace(outputs, replacements, strict=False)) if replacements else outputs


def _piece(theta: Variable, place: Place, wanted: Type) -> Variable:
    """Return what stands for a value variable, of the type ``wanted``, in the flat vector."""
    piece = theta[place.where].reshape(place.shape)
    if not isinstance(wanted, XTensorType):
        return piece
    return as_xtensor(pt.cast(piece, wanted.dtype), dims=wanted.dims)  # rewrites of such types keep to the precision


def _values(var: Variable) -> Variable:
    return var.values if isinstance(var.type, XTensorType) else var


def _in_float64(outputs: list[Variable], replacements: dict[Variable, Variable]) -> list[Variable]:
    """Rebuild a graph that computes in lower precision so that it computes in float64 throughout."""
    done: dict[Variable, Variable] = dict(replacements)

    def widen(var: Variable) -> Variable:
        if var in done:
            return done[var]
        if getattr(var.type, "dtype", "") not in ("float32", "float16"):
            return var
        wide = (
            pt.constant(var.data.astype("float64")) if isinstance(var, Constant) else pt.cast(_values(var), "float64")
        )
        return as_xtensor(wide, dims=var.type.dims) if isinstance(var.type, XTensorType) else wide

    outputs = inline_inner_graphs(outputs)  # which take inputs of one type only
    for node in toposort(outputs):
        if all(out in done for out in node.outputs):
            continue
        inputs = [widen(i) for i in node.inputs]
        is_cast = isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, Cast)
        if is_cast and node.outputs[0].type.dtype in ("float32", "float16"):
            done[node.outputs[0]] = pt.cast(inputs[0], "float64")
            continue
        names = [getattr(node.op, name, None) for name in ("dtype", "acc_dtype")]
        if isinstance(node.op, CAReduce | MakeVector) and not {"float32", "float16"}.isdisjoint(names):
            wide = copy(node.op)
            for name in ("dtype", "acc_dtype"):
                if getattr(wide, name, None) in ("float32", "float16"):
                    setattr(wide, name, "float64")
            new = wide.make_node(*inputs)
        else:
            new = node.clone_with_new_inputs(inputs, strict=False)
        done.update(zip(node.outputs, new.outputs, strict=True))
    return [done.get(out, out) for out in outputs]


@node_rewriter([Blockwise])  # type: ignore[untyped-decorator]
def _inline_batched(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    if not isinstance(node.op.core_op, OpFromGraph):
        return None
    inner = node.op.core_op.fgraph
    entries = [i.type() for i in inner.inputs]
    outputs = inner.bind(dict(zip(inner.inputs, entries, strict=True)))
    return list(vectorize_graph(outputs, dict(zip(entries, node.inputs, strict=True))))


def simplify(outputs: list[Variable], *, check_bounds: bool = True, is_large: bool = False) -> list[Variable]:
    """Canonicalise and stabilise a graph.

    Differentiating and vectorising the simplified graph rather than the raw one makes the next graphs several times
    smaller, and so the whole compilation (epilepsy GLMM: 8.5 s to 1.1 s). Shapes become constants, which vectorising
    relies on. In large graphs, sums of sums are left as they are.
    """
    parameter_checks = "local_check_parameter_to_ninf_switch" if check_bounds else "local_remove_check_parameter"
    include = ("canonicalize", "stabilize", "ShapeOpt", parameter_checks, *rewrites.INCLUDED)
    exclude = ("inplace", *rewrites.EXCLUDED, *(loops.FLATTENING if is_large else ()))
    fgraph = copy_of(outputs)
    rewrites.wide_indices.rewrite(fgraph)
    rewrites.stable.rewrite(fgraph)
    rewrites.shorter.rewrite(fgraph)
    for _ in range(2):
        rewrites.named(include, exclude).rewrite(fgraph)
        rewrites.stable.rewrite(fgraph)
        if not rewrites.solve_at_once(fgraph):
            break
    if is_large:
        loops.short_derivatives.rewrite(fgraph)
    return list(fgraph.outputs)


def simplify_little(outputs: list[Variable]) -> list[Variable]:
    """Take out of a large graph what a derivative has made in vain, but for what takes long."""
    return rewritten(outputs, rewrites.named(("ShapeOpt", *loops.FEW), ("inplace",)))


def gradient(logp: Variable, theta: Variable) -> Variable:
    """Return the gradient of ``logp``; raise MissingDerivativeError naming the Op that has none."""
    return _differentiate(logp, theta, [], "gradient", "first")


def hessian_product(grad: Variable, theta: Variable, direction: Variable) -> Variable:
    """Return the Hessian of log p times ``direction``, from the graph of its gradient."""
    product = _differentiate((grad * direction).sum(), theta, [direction], "Hessian-vector product", "second")
    return rewritten([product], dfs_rewriter(_inline_batched))[0]


def row_derivatives(rows: list[Variable], theta: Variable, direction: Variable) -> list[Variable]:
    """Return the derivatives of vectors or arrays, ``rows``, along ``direction``: J u by two reverse passes.

    J^T w is linear in w, and the gradient of (J^T w) . u with respect to w is J u, whatever w. Ops need no forward
    derivative for it, and it vectorises over directions like a Hessian-vector product.
    """
    weights = [row.type() for row in rows]
    total = pt.add(pt.constant(0.0), *[(w * row).sum() for w, row in zip(weights, rows, strict=True)])
    [backward] = simplify([gradient(total, theta)])
    along = (backward * direction).sum()
    results = [_differentiate(along, w, [direction], "derivative by rows", "second") for w in weights]
    # Nothing of them is left, but for shapes.
    return list(graph_replace(results, {w: pt.ones_like(r) for w, r in zip(weights, rows, strict=True)}, strict=False))


def slopes(cost: Variable, variables: list[Variable], order: str) -> list[Variable | None]:
    """Return the derivatives of a scalar, first or second ones of log p; None by what it does not depend on."""
    with _named("gradient" if order == "first" else "Hessian", order):
        result: list[Variable | None] = pt.grad(
            cost, variables, disconnected_inputs="ignore", return_disconnected="none"
        )
    return result


def _differentiate(cost: Variable, theta: Variable, constants: list[Variable], what: str, order: str) -> Variable:
    with _named(what, order):
        result = pt.grad(cost, theta, consider_constant=constants, disconnected_inputs="ignore")
    if isinstance(result.type, DisconnectedType):  # a log density that does not depend on theta
        return pt.zeros_like(theta)
    return result


@contextlib.contextmanager
def _named(what: str, order: str) -> Iterator[None]:
    """Turn the errors of an operation without a derivative into one that says what can't be formed."""
    try:
        yield
    except (NotImplementedError, MethodNotDefined, TypeError, AttributeError) as error:
        raise MissingDerivativeError(
            f"The {what} of this model's log density can't be formed: {error}. An operation in the model has no "
            f"{order} derivative in PyTensor; rewrite that term with differentiable functions, or use "
            f"{'pm.sample' if order == 'first' else _INSTEAD_OF_HESSIANS}."
        ) from error


def over_draws(outputs: list[Variable], theta: Variable) -> tuple[Variable, list[Variable]]:
    """Vectorise functions of one flat vector over draws."""
    matrix = pt.matrix("draws", dtype="float64", shape=(None, theta.type.shape[0]))
    batched = vectorised(odes.solved_once(outputs), {theta: matrix})
    # What does not depend on theta comes back without the axis.
    return matrix, [
        b if b.type.ndim == o.type.ndim + 1 else pt.broadcast_to(b, (matrix.shape[0], *b.shape))
        for b, o in zip(batched, outputs, strict=True)
    ]


def over_draws_and_directions(
    product: Variable, theta: Variable, direction: Variable
) -> tuple[Variable, Variable, Variable]:
    """Vectorise a function of theta and of a direction over both: (n_draws, n_directions, n_dim).

    What depends on theta alone has no axis of directions, and is computed once for each draw.
    """
    directions, along = over_draws([product], direction)
    [along] = list(rewrite_graph(copy_of(along), custom_rewrite=_SHAPES, include=("ShapeOpt",)).outputs)
    draws, [batched] = over_draws([along], theta)
    return draws, directions, batched
