"""The mode of a smooth function of few numbers, and its curvature: many values cost little more than one.

A quasi-Newton method [1]_, whose gradients are differences of values that are evaluated together, and which looks at
steps of several lengths at a time.

References
----------
.. [1] J. Nocedal and S. J. Wright (2006). Numerical optimization, chapter 6. https://doi.org/10.1007/978-0-387-40065-5
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.types import Array

#: Steps at most, and for each coordinate; nats that a step must promise.
_MOST, _MOST_OF_EACH, _LEFT = 25, 3, 0.02
#: Lengths of steps that are looked at together, in that of Newton's; farthest move of a coordinate, in its scale.
_LENGTHS, _FARTHEST = (2.0, 1.0, 0.5, 0.2, 0.05), 5.0
#: Differences for gradients, in scales; least and largest scale; curvature over a scale that is flat.
_APART, _LEAST, _LARGEST, _FLAT = 0.25, 1e-3, 2.0, 0.1
#: Where two coordinates are moved together, in scales.
_TOGETHER = 0.7

type Function = Callable[[Array], Array]


class LatentMode(NamedTuple):
    """A mode.

    Parameters
    ----------
    at : ndarray, shape (p,)
    cov : ndarray, shape (p, p)
        Inverse of minus the second derivatives, by differences.
    """

    at: Array
    cov: Array


def find_mode(function: Function, start: Array, scale: Array) -> LatentMode | None:
    """Go up; None where the function is not finite at the start.

    Parameters
    ----------
    function : callable
        From points, (n, p), to values, (n,).
    start : ndarray, shape (p,)
    scale : ndarray, shape (p,)
        Standard deviations, roughly.
    """
    at, value = np.array(start), float(function(start[None])[0])
    if not np.isfinite(value):
        return None
    scale = np.clip(scale, _LEAST, _LARGEST)
    slope, bend = _derivatives(function, at, value, _APART * scale)
    inverse = np.diag(1.0 / np.maximum(bend, (_FLAT / scale) ** 2))
    for _ in range(_MOST + _MOST_OF_EACH * len(at)):
        direction = inverse @ slope
        if 0.5 * slope @ direction < _LEFT:
            break
        limit = np.max(np.abs(direction) / (_FARTHEST * np.maximum(np.sqrt(np.diag(inverse)), scale)))
        steps = np.outer(_LENGTHS, direction / max(1.0, limit))
        values = function(at + steps)
        best = int(np.argmax(np.where(np.isfinite(values), values, -np.inf)))
        if not values[best] > value:
            if scale.max() <= _LEAST:
                break
            scale = np.maximum(0.3 * scale, _LEAST)  # differences may have been too wide
            slope, bend = _derivatives(function, at, value, _APART * scale)
            inverse = np.diag(1.0 / np.maximum(bend, (_FLAT / scale) ** 2))
            continue
        at, value, before = at + steps[best], float(values[best]), slope
        slope, bend = _derivatives(function, at, value, _APART * scale)
        inverse = _updated(inverse, steps[best], before - slope)
        scale = np.clip(1.0 / np.sqrt(np.maximum(bend, 1.0 / _LARGEST**2)), _LEAST, _LARGEST)
    return _with_curvature(function, at, value, scale)


def _derivatives(function: Function, at: Array, value: float, apart: Array) -> tuple[Array, Array]:
    """Return the gradient, and minus the second derivatives by single coordinates, by differences."""
    ends = _finite(function(_around(at, apart)), value).reshape(-1, 2)
    return (ends[:, 1] - ends[:, 0]) / (2.0 * apart), (2.0 * value - ends.sum(axis=1)) / apart**2


def _finite(values: Array, value: float) -> Array:
    """Return values with numbers far below another one in the place of those that are none."""
    found = values[np.isfinite(values)]
    return np.where(np.isfinite(values), values, min(value, *found, value) - 10.0)


def _updated(inverse: Array, step: Array, change: Array) -> Array:
    """Return the inverse of minus the second derivatives after a step on which the gradient fell by ``change``."""
    along = float(step @ change)
    if not along > 1e-10 * np.linalg.norm(step) * np.linalg.norm(change):
        return inverse
    left = np.eye(len(step)) - np.outer(step, change) / along
    return left @ inverse @ left.T + np.outer(step, step) / along


def _with_curvature(function: Function, at: Array, value: float, scale: Array) -> LatentMode:
    """Look around the best point, at single coordinates and at pairs."""
    p = len(at)
    i, j = np.tril_indices(p, -1)
    pairs = np.tile(at, (len(i), 1))
    for k in (i, j):
        pairs[np.arange(len(i)), k] += _TOGETHER * scale[k]
    found = _finite(function(np.concatenate([_around(at, scale), pairs])), value)
    ends, mixed = found[: 2 * p].reshape(-1, 2), found[2 * p :]
    slope, fall = 0.5 * (ends[:, 1] - ends[:, 0]), np.maximum(2.0 * value - ends.sum(axis=1), _FLAT)
    straight = value + _TOGETHER * (slope[i] + slope[j]) - 0.5 * _TOGETHER**2 * (fall[i] + fall[j])
    across = np.eye(p)
    across[i, j] = across[j, i] = (straight - mixed) / _TOGETHER**2 / np.sqrt(fall[i] * fall[j])
    values, vectors = np.linalg.eigh(across)
    inverse = (vectors / np.maximum(values, 0.05)) @ vectors.T
    size = scale / np.sqrt(fall)
    cov = size[:, None] * inverse * size
    top = at + cov @ (slope / scale)
    is_higher = function(top[None])[0] > value
    return LatentMode(top if is_higher else at, cov)


def _around(at: Array, scale: Array) -> Array:
    """Return the points a scale away, below and above, coordinate by coordinate, (2 p, p)."""
    return np.array([at + sign * direction for direction in np.diag(scale) for sign in (-1.0, 1.0)])
