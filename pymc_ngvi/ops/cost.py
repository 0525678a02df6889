"""What a graph costs to evaluate, from its nodes and the sizes of the data alone: no clock."""

from dataclasses import dataclass, replace

import numpy as np

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import toposort

from pymc_ngvi.graphs.loops import MOST_DRAWS
from pymc_ngvi.graphs.rewrites import dependent, stored_value
from pymc_ngvi.ops.registry import Extra, largest, operation

# Measured on one core of a 2020s server, rounded: enough to tell seconds from minutes.
_SECONDS_PER_NODE = 5e-6  # one Python thunk
_SECONDS_PER_ELEMENT = 2e-9  # one NumPy pass
_SECONDS_PER_PYTHON_ELEMENT = 4e-7  # an Elemwise without a NumPy function
_SECONDS_PER_TAIL = 1e-6  # a derivative of an incomplete beta or gamma function
_SECONDS_PER_READ = 4.5e-10  # an element of a matrix that is multiplied
_SECONDS_PER_FUNCTION = 5e-9  # an exp, a log and the like, beside the pass
_JETS_PASSES = 4  # NumPy passes for a rule
_COMPILED_SPEEDUP, _SECONDS_PER_COMPILED_CALL = 2.0, 1e-5
_SECONDS_PER_SOLUTION, _SOLVED_AT_ONCE = 0.1, 256  # of differential equations, about as long for many draws


@dataclass(frozen=True)
class Cost:
    """Estimated cost of a graph."""

    #: One evaluation, by Python thunks on NumPy, the thunks' own time shared among ``batch`` evaluations.
    quick_seconds: float
    #: One evaluation, compiled.
    compiled_seconds: float
    #: Elements of the largest intermediate of one evaluation, of those that each evaluation has anew.
    widest: int


def estimate(outputs: list[Variable], batch: int = 16, passes: int = 1, *, along: Variable | None = None) -> Cost:
    """Estimate the cost of one evaluation of ``outputs`` from static shapes; unknown ones count as the data's."""
    nodes = list(toposort(outputs))
    unknown = max(data_sizes(nodes), default=1)
    sizes = [largest(node.outputs, unknown) for node in nodes]
    work = _work(nodes, unknown)
    anew = set(nodes) if along is None else {var.owner for var in dependent(outputs, along)}
    n_anew = sum(size for node, size in zip(nodes, sizes, strict=True) if node in anew)
    arithmetic = n_anew * _SECONDS_PER_ELEMENT + work.in_tails * _SECONDS_PER_TAIL
    return Cost(
        quick_seconds=arithmetic * passes
        + (len(nodes) + work.thunks) / batch * _SECONDS_PER_NODE
        + work.solutions * _SECONDS_PER_SOLUTION / max(batch, _SOLVED_AT_ONCE)
        + work.in_python * _SECONDS_PER_PYTHON_ELEMENT,
        compiled_seconds=arithmetic / _COMPILED_SPEEDUP + _SECONDS_PER_COMPILED_CALL,
        widest=max((size for node, size in zip(nodes, sizes, strict=True) if node in anew), default=1),
    )


def estimate_of_jets(outputs: list[Variable], n_dim: int) -> Cost:
    """Estimate the cost of one evaluation of ``outputs`` with first derivatives that are carried along."""
    cost = estimate(outputs, batch=MOST_DRAWS, passes=_JETS_PASSES * (1 + n_dim))
    return replace(cost, widest=cost.widest * (1 + n_dim))


def evaluation_seconds(
    outputs: list[Variable],
    *,
    batch: int = MOST_DRAWS,
    passes: int = 1,
    along: Variable | None = None,
    compiled: bool = False,
) -> float:
    """Return the time of one evaluation of ``outputs``, with what `estimate` leaves out: matrices, exp and so on."""
    nodes = list(toposort(outputs))
    cost, work = estimate(outputs, batch, passes, along=along), _work(nodes, max(data_sizes(nodes), default=1))
    more = work.read * _SECONDS_PER_READ + work.functions * _SECONDS_PER_FUNCTION
    return more + (cost.compiled_seconds if compiled else cost.quick_seconds)


def _work(nodes: list[Apply], unknown: int) -> Extra:
    """Return what nodes take beside a pass over their elements."""
    rules = [(node, rule) for node in nodes if not isinstance(rule := operation(node.op).work, str)]
    found = [rule(node, unknown) for node, rule in rules]
    return Extra(*map(sum, zip(*found, strict=True))) if found else Extra()


def data_sizes(nodes: list[Apply]) -> list[int]:
    """Return the numbers of elements of the constants and shared variables that a graph reads."""
    data = map(stored_value, {i for node in nodes for i in node.inputs if i.owner is None})
    return [int(x.size) for x in data if isinstance(x, np.ndarray | np.generic)]
