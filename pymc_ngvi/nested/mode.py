"""The mode of a smooth function of few numbers and its curvature there, by differences over standard deviations."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.types import Array

#: Iterations at most; halvings of a step; nats that a step must promise; farthest step, and largest change of a scale
#: in one iteration, in units of scales.
_MOST, _HALVINGS, _LEFT, _FARTHEST, _CHANGE = 15, 5, 0.1, 3.0, 3.0
#: Curvature over a scale below which a direction counts as flat; nats by which the function falls at a scale.
_FLAT, _FALL = 0.1, 0.5
#: Where two coordinates are moved together, in scales.
_TOGETHER = 0.7


class Mode(NamedTuple):
    """A mode.

    Parameters
    ----------
    at : ndarray, shape (p,)
    cov : ndarray, shape (p, p)
        Inverse of minus the second derivatives, by differences.
    """

    at: Array
    cov: Array


def find_mode(function: Callable[[Array], float], start: Array, scale: Array) -> Mode | None:
    """Go up by Newton's method; None where the function is not finite at the start.

    Parameters
    ----------
    function : callable
    start : ndarray, shape (p,)
    scale : ndarray, shape (p,)
        Standard deviations, roughly.
    """
    at, scale, value = start, scale.copy(), function(start)
    if not np.isfinite(value):
        return None
    p = len(start)
    across: Array | None = None
    for _ in range(_MOST):
        ends = _ends(function, at, scale)
        slope, fall = 0.5 * (ends[1] - ends[0]), 2.0 * value - ends[0] - ends[1]
        if across is None and np.max(np.abs(slope) / np.maximum(np.abs(fall), _FLAT)) < _FARTHEST:
            across = _correlations(function, at, scale, value, ends)
        curvature = _positive(fall, across if across is not None else np.eye(p))
        step = np.linalg.solve(curvature, slope)
        step *= min(1.0, _FARTHEST / np.abs(step).max(initial=1e-300))
        promised = float(slope @ step) * 0.5
        best = max(range(2 * p), key=lambda i: ends.ravel()[i])
        moved = _moved(function, at, value, scale * step) if promised > _LEFT else None
        if moved is None and ends.max() > value + _LEFT:  # a neighbour is higher
            side, i = divmod(best, p)
            there = at.copy()
            there[i] += (2 * side - 1) * scale[i]
            moved = there, float(ends.max())
        wider = np.sqrt(2.0 * _FALL / np.maximum(fall, _FLAT))
        is_near = bool((np.abs(np.log(wider)) < np.log(2.0)).all())
        if moved is None and is_near and across is not None:
            break
        scale = scale * np.clip(wider, 1.0 / _CHANGE, _CHANGE)
        if moved is not None:
            at, value = moved
    ends = _ends(function, at, scale)
    fall = 2.0 * value - ends[0] - ends[1]
    across = _correlations(function, at, scale, value, ends)
    inverse = np.linalg.inv(_positive(fall, across))
    return Mode(at, scale[:, None] * inverse * scale)


def _ends(function: Callable[[Array], float], at: Array, scale: Array) -> Array:
    """Return the values a scale away on both sides of each coordinate, (2, p)."""
    result = np.empty((2, len(at)))
    for i in range(len(at)):
        for side in (0, 1):
            there = at.copy()
            there[i] += (2 * side - 1) * scale[i]
            value = function(there)
            result[side, i] = value
    lowest = np.min(result[np.isfinite(result)], initial=0.0)
    return np.where(np.isfinite(result), result, lowest - 10.0)


def _correlations(function: Callable[[Array], float], at: Array, scale: Array, value: float, ends: Array) -> Array:
    """Return mixed second differences over the geometric means of the two others, (p, p)."""
    p = len(at)
    result = np.eye(p)
    slope, fall = 0.5 * (ends[1] - ends[0]), 2.0 * value - ends[0] - ends[1]
    size = np.sqrt(np.maximum(np.abs(fall), _FLAT))
    for i in range(p):
        for j in range(i):
            there = at.copy()
            there[[i, j]] += _TOGETHER * scale[[i, j]]
            found = function(there)
            if not np.isfinite(found):
                continue
            straight = value + _TOGETHER * (slope[i] + slope[j]) - 0.5 * _TOGETHER**2 * (fall[i] + fall[j])
            mixed = (straight - found) / _TOGETHER**2
            result[i, j] = result[j, i] = mixed / (size[i] * size[j])
    return result


def _positive(fall: Array, across: Array) -> Array:
    """Return the matrix of second differences, made positive definite."""
    size = np.sqrt(np.maximum(np.abs(fall), _FLAT))
    values, vectors = np.linalg.eigh(across)
    result: Array = size[:, None] * ((vectors * np.maximum(np.abs(values), 0.05)) @ vectors.T) * size
    return result


def _moved(function: Callable[[Array], float], at: Array, value: float, step: Array) -> tuple[Array, float] | None:
    """Return the first point along a step, halved as often as it takes, where the function is higher."""
    for n in range(_HALVINGS):
        there = at + 0.5**n * step
        found = function(there)
        if found > value:
            return there, found
    return None
