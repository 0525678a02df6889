"""Differential equations (`pm.ode.DifferentialEquation`): one integration for all draws, with exact derivatives.

PyMC solves the equations of each draw by itself, with their first derivatives. It ignores what second derivatives go
through these, so that Hessians of its graph are wrong. Here, the solutions at all draws are one system, with their
first and second derivatives with respect to initial states and parameters where these are asked for.
"""

import functools
import warnings

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import pytensor.tensor as pt

from pymc.ode import DifferentialEquation
from pytensor.gradient import DisconnectedType, jacobian
from pytensor.graph import Apply, Op, Variable, graph_replace, rewrite_graph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter

from pymc_ngvi.core.types import Array
from pymc_ngvi.graphs.backends import quickly
from pymc_ngvi.graphs.loops import vectorised
from pymc_ngvi.graphs.private import vectorize_node
from pymc_ngvi.graphs.programs import read
from pymc_ngvi.graphs.rewrites import copy_of, has_op, rewritten
from pymc_ngvi.rows.programs import CannotFollow, OnNumPy, derivatives

#: Derivatives of a solution: those of Hessians.
_HIGHEST_ORDER = 2
#: A function of states with parameters, (n_draws, n), and t: f and its derivatives, with an axis more each.
type Slopes = Callable[[Array, float], list[Array]]


@dataclass(frozen=True)
class Equations:
    """The right-hand side f(y, t, p) of dy/dt, symbolic: dy/dt is a list or a vector."""

    function: Callable[..., Any]
    times: tuple[float, ...]
    #: The time of the initial state.
    start: float
    n_states: int
    n_parameters: int

    def sizes(self, order: int) -> list[int]:
        """Return the lengths of a solution at one time and of each of its derivatives."""
        return [self.n_states * (self.n_states + self.n_parameters) ** k for k in range(order + 1)]


@functools.lru_cache
def slopes_of(equations: Equations, order: int) -> Slopes:
    """Return f and its derivatives, all that is not 0 in one program; of a function with arrays, by PyTensor."""
    n = equations.n_states + equations.n_parameters
    numbers, t = [pt.scalar(dtype="float64") for _ in range(n)], pt.scalar("t", dtype="float64")
    both = pt.stack(numbers)
    given = equations.function(both[: equations.n_states], t, both[equations.n_states :])
    listed = given if isinstance(given, list | tuple) else [pt.atleast_1d(given)[i] for i in range(equations.n_states)]
    fgraph = copy_of([pt.as_tensor(g).astype("float64") for g in listed])
    f = rewrite_graph(fgraph, include=("canonicalize", "stabilize"), exclude=("inplace",)).outputs
    try:
        writer, values = read([*numbers, t], f)
        parts = derivatives(writer, values, n, order)
    except CannotFollow:
        return _by_pytensor(numbers, t, pt.stack(f), order)
    evaluate, every = OnNumPy(writer.written(list(parts.values()))).run, slice(None)
    places: Any = [(len(axes), [(every, i, *at) for at in set(permutations(axes))]) for i, *axes in parts]

    def slopes(both: Array, t: float) -> list[Array]:
        result = [np.zeros((len(both), equations.n_states, *[n] * k)) for k in range(order + 1)]
        values = evaluate(*np.ascontiguousarray(both.T), np.array([t]))
        for (k, of_order), value in zip(places, values, strict=True):
            for at in of_order:
                result[k][at] = value
        return result

    return slopes


def _by_pytensor(numbers: list[Variable], t: Variable, f: Variable, order: int) -> Slopes:
    points = pt.matrix("points", dtype="float64", shape=(None, len(numbers)))
    point = pt.vector("point", dtype="float64", shape=(len(numbers),))
    parts = list(graph_replace([f], {number: point[i] for i, number in enumerate(numbers)}, strict=False))
    for _ in range(order):
        flat = jacobian(parts[-1].ravel(), point, disconnected_inputs="ignore", vectorize=True)
        parts.append(flat.reshape((*parts[-1].type.shape, len(numbers))))
    function = quickly([points, t], vectorised(parts, {point: points}))

    def slopes(both: Array, t: float) -> list[Array]:
        found = function(both, t)
        shapes = ((len(both), *part.type.shape) for part in parts)
        return [np.broadcast_to(value, shape) for value, shape in zip(found, shapes, strict=True)]

    return slopes


class Solution(Op):
    """The solution at all times, (n_times, n_states), and its derivatives.

    Inputs are the initial state and the parameters, each with the same leading axes, or none, for draws. Each order of
    derivatives, up to `order`, adds an axis, of initial states and parameters together.
    """

    __props__ = ("equations", "order")

    def __init__(self, equations: Equations, order: int) -> None:
        self.equations, self.order = equations, order

    def make_node(self, y0: Variable, p: Variable) -> Apply:
        """Return the node."""
        inputs = [pt.as_tensor(i).astype("float64") for i in (y0, p)]
        n_batch = max(i.type.ndim for i in inputs) - 1
        inputs = [pt.shape_padleft(i, n_batch + 1 - i.type.ndim) for i in inputs]
        eq = self.equations
        core = (len(eq.times), eq.n_states)
        more = (eq.n_states + eq.n_parameters,)
        outputs = [pt.tensor(dtype="float64", shape=(None,) * n_batch + core + more * k) for k in range(self.order + 1)]
        return Apply(self, inputs, outputs)

    def infer_shape(self, node: Apply, shapes: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return the shapes of the outputs."""
        batch = pt.broadcast_shape(*(shape[:-1] for shape in shapes), arrays_are_shapes=True)
        n = len(batch)
        return [(*batch, *out.type.shape[n:]) for out in node.outputs]

    def pullback(self, inputs: list[Variable], outputs: list[Variable], slopes: list[Variable]) -> list[Variable]:
        """Return the derivatives with respect to initial state and parameters."""
        connected = [k for k, slope in enumerate(slopes) if not isinstance(slope.type, DisconnectedType)]
        order = max(connected, default=0) + 1
        if order > _HIGHEST_ORDER or inputs[0].type.ndim > 1:
            raise NotImplementedError("Solutions of differential equations have two derivatives.")
        solved = Solution(self.equations, max(order, self.order))(*inputs, return_list=True)
        total = pt.add(
            pt.constant(0.0),
            *[pt.tensordot(slopes[k], solved[k + 1], axes=slopes[k].type.ndim) for k in connected],
        )
        n = self.equations.n_states
        return [total[:n], total[n:]]

    def perform(self, node: Apply, inputs: list[Array], storage: list[list[Array | None]]) -> None:
        """Solve the equations of all draws."""
        eq = self.equations
        batch = np.broadcast_shapes(*(i.shape[:-1] for i in inputs))
        both = np.concatenate([np.broadcast_to(i, (*batch, i.shape[-1])) for i in inputs], axis=-1)
        solution = _solve(eq, self.order, both.reshape(-1, both.shape[-1]))
        parts = np.split(solution, np.cumsum(eq.sizes(self.order))[:-1], axis=-1)
        for k, (cell, part) in enumerate(zip(storage, parts, strict=True)):
            shape = (*batch, len(eq.times), eq.n_states, *[both.shape[-1]] * k)
            cell[0] = np.ascontiguousarray(part).reshape(shape)


vectorize_node.register(Solution, lambda op, node, *inputs: op.make_node(*inputs))


def _solve(equations: Equations, order: int, both: Array) -> Array:
    """Return solutions and derivatives, flat, (n_draws, n_times, n); NaN where there is none.

    The equations of all draws are one system. Draws whose equations can't be solved spoil the others of a call:
    all are solved again, in halves, of which one has those that change fastest at the start.
    """
    solution = _integrate(equations, order, both) if np.isfinite(both).all() else None
    if solution is not None:
        return solution
    if len(both) <= 1:
        return np.full((len(both), len(equations.times), sum(equations.sizes(order))), np.nan)
    slopes = slopes_of(equations, 0)(both, equations.start)[0]
    order_of_speed = np.argsort(np.abs(slopes).max(axis=1), kind="stable")
    parts = [_solve(equations, order, both[half]) for half in np.array_split(order_of_speed, 2)]
    return np.concatenate(parts)[np.argsort(order_of_speed)]


def _integrate(equations: Equations, order: int, both: Array) -> Array | None:
    """Integrate the equations of all draws as one system; None where that fails."""
    from scipy.integrate import ODEintWarning, odeint  # 0.2 s to import

    slopes = slopes_of(equations, order)
    start = np.zeros((len(both), sum(equations.sizes(order))))
    start[:, : equations.n_states] = both[:, : equations.n_states]
    if order > 0:  # the identity by initial states
        start[:, equations.n_states :][:, : equations.sizes(1)[1]] = np.eye(equations.n_states, both.shape[1]).ravel()
    with warnings.catch_warnings(action="ignore", category=ODEintWarning), np.errstate(all="ignore"):
        # The norm of its errors is the largest of all. Equations of one draw do not depend on those of others.
        path, report = odeint(
            lambda state, t: _slopes_of_all(equations, order, slopes, both, state.reshape(start.shape), t).ravel(),
            start.ravel(),
            np.array([equations.start, *equations.times], dtype=float),
            ml=start.shape[1] - 1,
            mu=start.shape[1] - 1,
            full_output=True,
        )
    if "successful" not in report["message"] or not np.isfinite(path).all():
        return None
    return np.moveaxis(path[1:].reshape(-1, *start.shape), 0, 1)


def _slopes_of_all(equations: Equations, order: int, slopes: Slopes, both: Array, state: Array, t: float) -> Array:
    """Return the derivatives by time of states, and of their derivatives, flat, (n_draws, ...)."""
    n_states, n = equations.n_states, both.shape[1]
    parts = np.split(state, np.cumsum(equations.sizes(order))[:-1], axis=1)
    f = slopes(np.concatenate([parts[0], both[:, n_states:]], axis=1), t)
    result = [f[0]]
    if order > 0:
        # Derivatives of states and parameters by initial states and parameters.
        inner = np.zeros((len(both), n, n))
        inner[:, :n_states] = parts[1].reshape(-1, n_states, n)
        inner[:, np.arange(n_states, n), np.arange(n_states, n)] = 1.0
        result.append(f[1] @ inner)
    if order > 1:
        curved = inner[:, None].swapaxes(-1, -2) @ f[2] @ inner[:, None]
        second = parts[2].reshape(-1, n_states, n * n)
        result.append((f[1][:, :, :n_states] @ second).reshape(curved.shape) + curved)
    return np.concatenate([part.reshape(len(both), -1) for part in result], axis=1)


@node_rewriter([DifferentialEquation])  # type: ignore[untyped-decorator]
def _with_derivatives(fgraph: object, node: Apply) -> list[Variable] | None:
    """Put ours in the place of PyMC's solution."""
    op = node.op
    if any(out.type.dtype != "float64" for out in node.outputs):
        return None
    equations = Equations(op.func, tuple(map(float, op.times)), float(op.t0), op.n_states, op.n_theta)
    return list(Solution(equations, 1)(*node.inputs, return_list=True))


_solutions = dfs_rewriter(_with_derivatives)


def with_solutions(outputs: list[Variable]) -> list[Variable]:
    """Replace PyMC's solutions of differential equations by those that have two derivatives."""
    return rewritten(outputs, _solutions) if has_op(outputs, DifferentialEquation) else outputs


def solved_once(outputs: list[Variable]) -> list[Variable]:
    """Let all that needs a solution, or derivatives of it, take them from one integration."""
    if not has_op(outputs, Solution):
        return outputs
    fgraph = copy_of(outputs)
    groups: dict[tuple[object, ...], list[Apply]] = {}
    for node in fgraph.toposort():
        if isinstance(node.op, Solution):
            groups.setdefault((node.op.equations, *node.inputs), []).append(node)
    for nodes in groups.values():
        used = [k for node in nodes for k, out in enumerate(node.outputs) if fgraph.clients[out]]
        whole = Solution(nodes[0].op.equations, max(used))(*nodes[0].inputs, return_list=True)
        for node in nodes:
            fgraph.replace_all(
                [(out, whole[k]) for k, out in enumerate(node.outputs) if fgraph.clients[out]], import_missing=True
            )
    return list(fgraph.outputs)
