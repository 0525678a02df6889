"""Whether the gradients of all rows, found in one backward pass, are those of single rows."""

import numpy as np

from numpy.typing import NDArray
from pytensor.compile import Function
from pytensor.graph.basic import Variable

from pymc_ngvi.core.types import Array
from pymc_ngvi.density.gauss_newton.parts import GaussNewtonGraphs, size_of, weighted_gradient

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
