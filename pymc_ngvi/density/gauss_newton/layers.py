"""What is made of the gradients of all rows in one backward pass, where a check on single rows agrees."""

import logging

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.compile import Function
from pytensor.graph.basic import Variable
from pytensor.graph.replace import graph_replace

from pymc_ngvi.core.types import Array
from pymc_ngvi.density.gauss_newton.parts import NO_DERIVATIVE, GaussNewtonGraphs, size_of, weighted_gradient
from pymc_ngvi.density.gauss_newton.taps import NoLayers
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c

# --- whether the gradients of all rows, found in one backward pass, are those of single rows ---

#: Elements of log densities, and points, at which the squares by layers are checked.
_N_CHECKED, _N_POINTS = 6, 2
#: Relative error, and error relative to the largest entry, beyond which they are wrong.
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9


def agrees(parts: GaussNewtonGraphs, weights: list[Variable], total: Variable) -> bool:
    """Tell whether sums of squares are those of explicit gradients, at random points, of rows at random.

    Parameters
    ----------
    parts : GaussNewtonGraphs
    weights : list of pytensor variables
        Factors of the log densities of rows.
    total : pytensor vector
        The sums of squares, with these weights.
    """
    rng = np.random.default_rng(0)
    grad = weighted_gradient(parts.rows, weights, parts.theta)
    outputs = parts.graphs.simplify([total, grad, *parts.scales])
    function = parts.functions.compile_for_few([parts.theta, *weights], outputs)
    shapes = _shapes(parts)
    for _ in range(_N_POINTS):
        point = parts.start + 0.5 * rng.standard_normal(len(parts.start))
        with np.errstate(all="ignore"):
            if not _agrees_at(function, point, shapes, rng):
                return False
    return True


def _shapes(parts: GaussNewtonGraphs) -> list[tuple[int, ...]]:
    """Return the shapes of the log densities, for the data as they are now."""
    if all(size_of(row) is not None for row in parts.rows):
        return [row.type.shape for row in parts.rows]
    function = parts.functions.compile_for_few([parts.theta], [row.shape for row in parts.rows])
    return [tuple(int(n) for n in shape) for shape in function(parts.start)]


def _agrees_at(function: Function, point: Array, shapes: list[tuple[int, ...]], rng: np.random.Generator) -> bool:
    """Tell whether squares are those of explicit gradients of single rows, at one point."""
    n_each = [int(np.prod(shape)) for shape in shapes]
    ends = np.cumsum([0, *n_each])
    chosen = rng.choice(ends[-1], size=min(_N_CHECKED, ends[-1]), replace=False)
    factors = rng.uniform(0.5, 1.5, size=len(chosen))

    def at(which: NDArray[np.intp], values: Array) -> list[Array]:
        flat = np.zeros(ends[-1])
        flat[which] = values
        parts = zip(ends[:-1], ends[1:], shapes, strict=True)
        return [np.ascontiguousarray(flat[a:b].reshape(shape)) for a, b, shape in parts]

    total, _, *others = function(point, *at(chosen, factors))
    scales = np.repeat([float(s) for s in others], n_each)
    expected = np.zeros(len(point))
    for element, factor in zip(chosen, factors, strict=True):
        gradient = function(point, *at(np.array([element]), np.array([factor])))[1]
        expected += gradient**2 / scales[element]
    close = np.abs(total - expected) <= _RELATIVE * np.abs(expected) + _ABSOLUTE * expected.max(initial=0.0)
    return bool(np.all(np.isfinite(expected)) and np.all(close))


# --- what is made of the gradients of all rows in one backward pass, where a check on single rows agrees ---

logger = logging.getLogger("pymc.ngvi")


class ByLayers(NamedTuple):
    """A function of the flat vector.

    Parameters
    ----------
    found : pytensor variable
        At one draw.
    draws, batched : pytensor variables
        Draws, (n_draws, n_dim), and what is found at each, along the first axis.
    """

    found: Variable
    draws: Variable
    batched: Variable


def by_layers(
    parts: GaussNewtonGraphs,
    of_rows: Callable[[list[Variable]], Variable],
    squares_of: Callable[[Variable], Variable] = lambda found: found,
) -> ByLayers | None:
    """Return a function of the flat vector, as graphs, that has the gradients of all rows in one backward pass.

    Parameters
    ----------
    parts : GaussNewtonGraphs
    of_rows : callable
        From weights of the log densities of rows to the graph.
    squares_of : callable, optional
        From the graph to the sums of squared gradients, (n_dim,). Default: it has these.

    Returns
    -------
    ByLayers or None
        For weights 1. None where the graph of the model does not show that rows are apart, or single rows disagree.
    """
    if parts.graphs.shares_calls:  # recursions, whose steps are no layers
        return None
    weights = [row.type() for row in parts.rows]
    try:
        with without_c():
            found = of_rows(weights)
            if not agrees(parts, weights, squares_of(found)):
                logger.info("Gradients by layers are not those of single rows: they are found one by one.")
                return None
            ones = {w: pt.ones_like(row) for w, row in zip(weights, parts.rows, strict=True)}
            [found] = parts.graphs.simplify(list(graph_replace([found], ones, strict=False)))
            draws, [batched] = graph.over_draws([found], parts.theta)
    except (NoLayers, graph.MissingDerivativeError, *NO_DERIVATIVE) as error:
        logger.debug("No gradients by layers: %s", error)
        return None
    return ByLayers(found, draws, batched)
