"""Differential equations (`pm.ode.DifferentialEquation`): one integration for all draws, with exact derivatives.

PyMC solves the equations of each draw by itself, with their first derivatives. It ignores what second derivatives go
through these, so that Hessians of its graph are wrong. Here, the solutions at all draws are one system, with their
first and second derivatives with respect to initial states and parameters where these are asked for.
"""

import contextlib
import contextvars
import functools
import warnings

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from numpy.typing import NDArray
from pymc.ode import DifferentialEquation
from pytensor.compile import Function
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.replace import _vectorize_node
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.values import Array
from pymc_ngvi.graphs.backends import quick_mode, without_c
from pymc_ngvi.graphs.calls import Calls, NoNumPyFunction
from pymc_ngvi.graphs.inner import copy_of
from pymc_ngvi.graphs.loops import vectorised

# --- differential equations of many draws at once by an explicit method, each draw with steps of its own ---
# A draw that needs small steps does not slow down the others, and one whose solution ends spoils none. Equations that
# are stiff are left to others.
#
# References
# ----------
# .. [1] E. Hairer, S. P. Norsett and G. Wanner (1993). Solving ordinary differential equations I, section II.10
#    (DOP853). https://doi.org/10.1007/978-3-540-78862-1

#: Relative and absolute error of a step: as of LSODA.
_TOLERANCE = 1.49e-8
#: Steps of a draw at most: in all, and more for each time.
_MOST_STEPS_OF_DRAW, _PER_TIME = 400, 4
#: Safety of step sizes, and by how much they change at most.
_SAFETY, _LEAST, _MOST = 0.9, 0.2, 6.0
#: First step, as a part of the time to the first output.
_FIRST = 0.1

#: From states, (n, m), times, (n,), and which draws they are of, (n,), to slopes, (n, m).
type Slope = Callable[[Array, Array, NDArray[np.intp]], Array]


def solved(slope: Slope, start: Array, begin: float, times: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Integrate equations.

    Parameters
    ----------
    slope : callable
    start : ndarray, shape (n_draws, n_states)
    begin : float
        The time of the start.
    times : ndarray, shape (n_times,)
        Ascending.

    Returns
    -------
    path : ndarray, shape (n_draws, n_times, n_states)
    done : ndarray of bool, shape (n_draws,)
        Of which draws it is the solution: others need more steps, or have none.
    """
    from scipy.integrate import DOP853  # .2 s to import

    n_draws, n_times = len(start), len(times)
    path = np.full((n_draws, n_times, start.shape[1]), np.nan)
    y, t, at = start.copy(), np.full(n_draws, begin), np.zeros(n_draws, dtype=np.intp)
    step = np.full(n_draws, _FIRST * max(float(times[0]) - begin, 1e-12))
    active = np.flatnonzero(np.isfinite(start).all(axis=1))
    first = np.full(start.shape, np.nan)
    with np.errstate(all="ignore"):
        first[active] = slope(start[active], t[active], active)
        for _ in range(_MOST_STEPS_OF_DRAW + _PER_TIME * n_times):
            if not len(active):
                break
            goal = times[at[active]]
            left = goal - t[active]
            hits = step[active] >= left * (1.0 - 1e-12)
            h = np.where(hits, left, step[active])
            new, last, error = _step(DOP853, slope, y[active], first[active], t[active], h, active)
            taken = error < 1.0  # not NaN
            factor = _SAFETY * np.where(error > 0.0, error, 1e-10) ** -0.125
            factor = np.clip(np.where(np.isfinite(factor), factor, _LEAST), _LEAST, _MOST)
            rows = active[taken]
            y[rows], first[rows], t[rows] = new[taken], last[taken], np.where(hits, goal, t[active] + h)[taken]
            # A step that was cut short to hit a time does not make the next one small.
            grown = np.where(taken & hits, np.maximum(h * factor, step[active]), h * factor)
            step[active] = grown
            there = active[taken & hits]
            path[there, at[there]] = y[there]
            at[there] += 1
            ended = (at[active] == n_times) | ~(step[active] > 1e-14 * np.maximum(np.abs(t[active]), 1e-12))
            active = active[~ended]
    return path, at == n_times


def _step(
    method: type, slope: Slope, y: Array, first: Array, t: Array, h: Array, which: NDArray[np.intp]
) -> tuple[Array, Array, Array]:
    """Return states after a step of each draw, slopes there, and errors in what they may be."""
    n_stages = method.n_stages  # type: ignore[attr-defined]
    a, b, c = method.A, method.B, method.C  # type: ignore[attr-defined]
    slopes = np.empty((n_stages + 1, *y.shape))
    slopes[0] = first
    flat = slopes.reshape(n_stages + 1, -1)
    for s in range(1, n_stages):
        moved = (a[s, :s] @ flat[:s]).reshape(y.shape)
        slopes[s] = slope(y + h[:, None] * moved, t + c[s] * h, which)
    new = y + h[:, None] * (b @ flat[:n_stages]).reshape(y.shape)
    slopes[n_stages] = slope(new, t + h, which)
    scale = _TOLERANCE * (1.0 + np.maximum(np.abs(y), np.abs(new)))
    fifth = (method.E5 @ flat).reshape(y.shape) / scale  # type: ignore[attr-defined]
    third = (method.E3 @ flat).reshape(y.shape) / scale  # type: ignore[attr-defined]
    of_five, of_three = (np.mean(e**2, axis=1) for e in (fifth, third))
    below = of_five + 0.01 * of_three
    error = np.abs(h) * of_five / np.sqrt(np.where(below > 0.0, below, 1.0))
    return new, slopes[n_stages], error


# --- differential equations (`pm.ode.DifferentialEquation`): one integration for all draws, with exact derivatives ---

#: Derivatives of a solution: those of Hessians.
_HIGHEST_ORDER = 2
#: Steps of the integration from one time to the next.
_MOST_STEPS = 5_000
#: Whether equations that take many steps count as having no solution.
_IN_FEW_STEPS = contextvars.ContextVar("in few steps", default=False)

#: From each state and parameter, and t, (n_draws,), to parts of the right-hand side and its derivatives.
type PartsOf = Callable[[Sequence[Array]], list[Array]]


class Equations:
    """The right-hand side f(y, t, p) of dy/dt, with its derivatives.

    Parameters
    ----------
    function : callable
        Symbolic: y, t and p to dy/dt, a list or a vector.
    times : tuple of float
    start : float
        The time of the initial state.
    n_states, n_parameters : int
    """

    def __init__(
        self, function: Callable[..., Any], times: tuple[float, ...], start: float, n_states: int, n_parameters: int
    ) -> None:
        self.function, self.times, self.start = function, times, start
        self.n_states, self.n_parameters = n_states, n_parameters
        self._compiled: dict[int, Slopes] = {}

    @property
    def _key(self) -> tuple[object, ...]:
        return self.function, self.times, self.start, self.n_states, self.n_parameters

    def __eq__(self, other: object) -> bool:
        """Compare what was given."""
        return isinstance(other, Equations) and self._key == other._key

    def __hash__(self) -> int:
        """Return that of what was given."""
        return hash(self._key)

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: functions are compiled again."""
        return {**self.__dict__, "_compiled": {}}

    def slopes(self, order: int) -> "Slopes":
        """Return the function for f and its derivatives up to an order."""
        if order not in self._compiled:
            with without_c():
                self._compiled[order] = self._compile(order)
        return self._compiled[order]

    def _compile(self, order: int) -> "Slopes":
        n = self.n_states + self.n_parameters
        numbers = [pt.scalar(dtype="float64") for _ in range(n)]
        t, times = pt.scalar("t", dtype="float64"), pt.vector("t", dtype="float64")
        both = pt.stack(numbers)
        given = self.function(both[: self.n_states], t, both[self.n_states :])
        listed = given if isinstance(given, list | tuple) else [pt.atleast_1d(given)[i] for i in range(self.n_states)]
        level = _simplified({(i,): pt.as_tensor(g).astype("float64") for i, g in enumerate(listed)})
        parts = dict(level)
        for _ in range(order):
            level = _simplified(_differentiated(level, numbers))
            parts.update(level)
        vectors = [pt.vector(dtype="float64") for _ in numbers]
        batched = vectorised(list(parts.values()), dict(zip([*numbers, t], [*vectors, times], strict=True)))
        function = pytensor.function([*vectors, times], batched, mode=quick_mode(), on_unused_input="ignore")
        shapes = [(self.n_states, *[n] * k) for k in range(order + 1)]
        return Slopes(_with_little_overhead(function), list(parts), shapes)


class Slopes:
    """Evaluates the right-hand side of equations and its derivatives, those parts that are not 0.

    Parameters
    ----------
    function : callable
        From a list of each state and parameter, (n_draws,), and t, to the parts.
    places : list of tuple
        Where each part is in f or a derivative; axes of derivatives in ascending order stand for all orders.
    shapes : list of tuple
        Of f and its derivatives.
    """

    def __init__(self, function: PartsOf, places: list[tuple[int, ...]], shapes: list[tuple[int, ...]]) -> None:
        self._function, self._shapes = function, shapes
        every: Any = slice(None)
        self._places = [(len(axes), [(every, i, *order) for order in set(permutations(axes))]) for i, *axes in places]

    def __call__(self, both: Array, t: Array | float) -> list[Array]:
        """Return f, (n_draws, n_states), and its derivatives, with an axis more each."""
        result = [np.zeros((len(both), *shape)) for shape in self._shapes]
        values = self._function(
            [*np.ascontiguousarray(both.T), np.broadcast_to(np.asarray(t, dtype=np.float64), len(both))]
        )
        for (order, places), value in zip(self._places, values, strict=True):
            for at in places:
                result[order][at] = value
        return result


def _with_little_overhead(function: Function) -> PartsOf:
    """Return a function by calls of NumPy alone, where there are such: thunks would take most of the time."""
    try:
        return Calls(function.maker.fgraph.inputs, function.maker.fgraph.outputs)
    except NoNumPyFunction:
        return lambda numbers: function(*numbers)


def _differentiated(level: dict[tuple[int, ...], Variable], numbers: list[Variable]) -> dict[tuple[int, ...], Variable]:
    """Return the derivatives of numbers by numbers, in ascending order."""
    result = {}
    for place, part in level.items():
        first = max(place[1:], default=0)
        slopes = pytensor.grad(part, numbers[first:], disconnected_inputs="ignore", return_disconnected="none")
        result.update({(*place, j): slope for j, slope in enumerate(slopes, start=first) if slope is not None})
    return result


def _simplified(level: dict[tuple[int, ...], Variable]) -> dict[tuple[int, ...], Variable]:
    """Return parts simplified, without those that are 0."""
    if not level:
        return level
    simple = rewrite_graph(copy_of(list(level.values())), include=("canonicalize", "stabilize"), exclude=("inplace",))
    return {
        place: part
        for place, part in zip(level, simple.outputs, strict=True)
        if not (isinstance(part, Constant) and not np.any(part.data))
    }


class Solution(Op):
    """The solution at all times, (n_times, n_states), and its derivatives.

    Inputs are the initial state and the parameters, each with the same leading axes, or none, for draws. Each order of
    derivatives adds an axis, of initial states and parameters together.

    Parameters
    ----------
    equations : Equations
    order : {0, 1, 2}
        Of the highest derivative.
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
        solved = _solve(eq, self.order, both.reshape(-1, both.shape[-1]))
        n = eq.n_states + eq.n_parameters
        start = 0
        for k, cell in enumerate(storage):
            size = eq.n_states * n**k
            part = solved[:, :, start : start + size]
            cell[0] = np.ascontiguousarray(part).reshape(*batch, len(eq.times), eq.n_states, *(n,) * k)
            start += size


@_vectorize_node.register(Solution)  # type: ignore[untyped-decorator]
def _vectorised_solution(op: Solution, node: Apply, *inputs: Variable) -> Apply:
    return op.make_node(*inputs)


@contextlib.contextmanager
def in_few_steps() -> Iterator[None]:
    """Solve no equations that take many steps: draws far from the data are not to take minutes."""
    token = _IN_FEW_STEPS.set(True)
    try:
        yield
    finally:
        _IN_FEW_STEPS.reset(token)


def _solve(equations: Equations, order: int, both: Array) -> Array:
    """Return solutions and derivatives, flat, (n_draws, n_times, n); NaN where there is none."""
    n_states = equations.n_states
    slopes = equations.slopes(order)
    stacked = functools.partial(_stacked, slopes, order, n_states)
    result, done = solved(
        lambda state, t, which: stacked(both[which, n_states:], state, t),
        _initial(both[:, :n_states], both.shape[1], order), equations.start, np.array(equations.times, dtype=float),
    )  # fmt: skip
    if not _IN_FEW_STEPS.get() and len(rest := np.flatnonzero(~done)):
        result[rest] = _solve_stiff(equations, order, both[rest])
    result[~np.isfinite(result).all(axis=(1, 2))] = np.nan
    return result


def _solve_stiff(equations: Equations, order: int, both: Array) -> Array:
    """Return the same by a method for stiff equations.

    Draws whose equations can't be solved spoil those that are solved with them: these are solved again, in halves.
    """
    solved = _integrate(equations, order, both) if np.isfinite(both).all() else None
    if solved is not None:
        return solved
    n = equations.n_states + equations.n_parameters
    if len(both) <= 1:
        size = equations.n_states * sum(n**k for k in range(order + 1))
        return np.full((len(both), len(equations.times), size), np.nan)
    return np.concatenate([_solve_stiff(equations, order, half) for half in np.array_split(both, 2)])


def _integrate(equations: Equations, order: int, both: Array) -> Array | None:
    """Integrate the equations of all draws as one system; None where that fails."""
    from scipy.integrate import ODEintWarning, odeint

    n_draws, n_states = len(both), equations.n_states
    start = _initial(both[:, :n_states], both.shape[1], order)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", ODEintWarning)
        # The norm of its errors is the largest of all. Equations of one draw do not depend on those of others.
        path, report = odeint(
            lambda state, t: _stacked(
                equations.slopes(order), order, n_states, both[:, n_states:], state.reshape(n_draws, -1), t
            ).ravel(),
            start.ravel(),
            np.array([equations.start, *equations.times], dtype=float),
            ml=start.shape[1] - 1,
            mu=start.shape[1] - 1,
            mxstep=_MOST_STEPS,
            full_output=True,
        )
    if "successful" not in report["message"] or not np.isfinite(path).all():
        return None
    return np.moveaxis(path[1:].reshape(-1, n_draws, start.shape[1]), 0, 1)


def _initial(y0: Array, n: int, order: int) -> Array:
    """Return initial states with their derivatives, flat, (n_draws, ...): the identity by initial states."""
    n_draws, n_states = y0.shape
    parts = [y0]
    if order > 0:
        parts.append(np.tile(np.eye(n_states, n).ravel(), (n_draws, 1)))
    if order > 1:
        parts.append(np.zeros((n_draws, n_states * n * n)))
    return np.concatenate(parts, axis=1)


def _stacked(slopes: Slopes, order: int, n_states: int, p: Array, state: Array, t: Array | float) -> Array:
    """Return the derivatives by time of all states, and of their derivatives, (n_draws, ...)."""
    n_draws = len(p)
    n = n_states + p.shape[1]
    found = slopes(np.concatenate([state[:, :n_states], p], axis=1), t)
    result = np.empty(state.shape)
    result[:, :n_states] = found[0]
    if order == 0:
        return result
    jacobian = found[1]
    # Derivatives of states and parameters by initial states and parameters.
    inner = np.zeros((n_draws, n, n))
    inner[:, :n_states] = state[:, n_states : n_states * (1 + n)].reshape(n_draws, n_states, n)
    inner[:, np.arange(n_states, n), np.arange(n_states, n)] = 1.0
    result[:, n_states : n_states * (1 + n)] = (jacobian @ inner).reshape(n_draws, -1)
    if order == 1:
        return result
    hessian = found[2]
    second = state[:, n_states * (1 + n) :].reshape(n_draws, n_states, n * n)
    curved = inner[:, None].swapaxes(-1, -2) @ hessian @ inner[:, None]
    result[:, n_states * (1 + n) :] = (jacobian[:, :, :n_states] @ second).reshape(n_draws, -1)
    result[:, n_states * (1 + n) :] += curved.reshape(n_draws, -1)
    return result


@node_rewriter([DifferentialEquation])  # type: ignore[untyped-decorator]
def _with_derivatives(fgraph: object, node: Apply) -> list[Variable] | None:
    """Put ours in the place of PyMC's solution."""
    op = node.op
    if any(out.type.dtype != "float64" for out in node.outputs):
        return None
    equations = Equations(op.func, tuple(map(float, op.times)), float(op.t0), op.n_states, op.n_theta)
    return list(Solution(equations, 1)(*node.inputs, return_list=True))


_solutions = dfs_rewriter(_with_derivatives)


def _is_of(var: Variable, kind: type[Op]) -> bool:
    return var.owner is not None and isinstance(var.owner.op, kind)


def has_equations(outputs: list[Variable]) -> bool:
    """Tell whether a graph has solutions of differential equations."""
    return any(_is_of(var, Solution) for var in ancestors(outputs))


def with_solutions(outputs: list[Variable]) -> list[Variable]:
    """Replace PyMC's solutions of differential equations by those that have two derivatives."""
    if not any(_is_of(var, DifferentialEquation) for var in ancestors(outputs)):
        return outputs
    fgraph = copy_of(outputs)
    _solutions.rewrite(fgraph)
    return list(fgraph.outputs)


def solved_once(outputs: list[Variable]) -> list[Variable]:
    """Let all that needs a solution, or derivatives of it, take them from one integration."""
    found = [var for var in ancestors(outputs) if _is_of(var, Solution)]
    if not found:
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
