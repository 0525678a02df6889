"""The mode of a smooth function of few numbers, and its curvature, without derivatives: many values cost little more
than one.

A quadratic is fitted to what is known near the best point, with as little change of its second derivatives as the
values allow [1]_; the next points are its maxima within a region in which it has proved right, a smaller and a larger one.

References
----------
.. [1] M. J. D. Powell (2006). The NEWUOA software for unconstrained optimization without derivatives. Large-Scale
   Nonlinear Optimization. https://doi.org/10.1007/0-387-30065-1_16
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.types import Array

#: Evaluations on the way at most, and for each coordinate; nats that a step must promise.
_MOST, _MOST_OF_EACH, _LEFT = 30, 10, 0.1
#: Nats below the best over which values count e times less, and distances, in scales, beyond which they do not.
_SOFT, _FARTHEST = 4.0, 8.0
#: Radii of regions that are looked at together, in the one that has proved right.
_RADII = (0.4, 1.0, 2.5)
#: First, least and largest radius of the region, in scales; parts of a promised gain that make it smaller, and larger.
_RADIUS, _LEAST, _LARGEST, _POOR, _GOOD = 2.0, 0.25, 4.0, 0.25, 0.7
#: Weight of a change of second derivatives; largest change of a scale at a time; curvature over a scale that is flat.
_STIFF, _CHANGE, _FLAT = 1e-3, 2.0, 0.1
#: Where two coordinates are moved together, in scales; what stands for a value that is not finite, below the lowest.
_TOGETHER, _BELOW = 0.7, 10.0


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


class _Quadratic(NamedTuple):
    """Slope, (p,), and minus the second derivatives, (p, p), in units of scales, about the best point."""

    slope: Array
    curvature: Array


class _Known:
    """Points, and values there."""

    def __init__(self, function: Callable[[Array], Array]) -> None:
        self._function = function
        self.points: list[Array] = []
        self.values: list[float] = []

    def evaluate(self, points: Array) -> Array:
        """Return values at points, (n, p)."""
        values = self._function(points)
        lowest = min([*self.values, *values[np.isfinite(values)]], default=0.0) - _BELOW
        values = np.where(np.isfinite(values), values, lowest)
        self.points += list(points)
        self.values += values.tolist()
        return values

    @property
    def best(self) -> int:
        """The number of the highest."""
        return int(np.argmax(self.values))

    def quadratic(self, scale: Array, before: Array) -> _Quadratic:
        """Fit to the neighbours of the best point, near to second derivatives ``before``."""
        best = self.best
        u = (np.array(self.points) - self.points[best]) / scale
        below = np.array(self.values) - self.values[best]
        weights = np.where(np.abs(u).max(axis=1) <= _FARTHEST, np.exp(below / _SOFT), 0.0)
        p = u.shape[1]
        i, j = np.triu_indices(p)
        terms = np.where(i == j, -0.5, -1.0) * u[:, i] * u[:, j]
        left = below - terms @ before[i, j]
        design = np.concatenate([u, terms], axis=1)
        ridge = np.concatenate([np.full(p, 1e-8), np.full(len(i), _STIFF)])
        gram = (design.T * weights) @ design + np.diag(ridge)
        found = np.linalg.solve(gram, (design.T * weights) @ left)
        curvature = np.zeros((p, p))
        curvature[i, j] = curvature[j, i] = before[i, j] + found[p:]
        return _Quadratic(found[:p], curvature)


def find_mode(function: Callable[[Array], Array], start: Array, scale: Array) -> LatentMode | None:
    """Go up; None where the function is not finite at the start.

    Parameters
    ----------
    function : callable
        From points, (n, p), to values, (n,).
    start : ndarray, shape (p,)
    scale : ndarray, shape (p,)
        Standard deviations, roughly.
    """
    p, known, scale = len(start), _Known(function), np.array(scale)
    if not np.isfinite(function(start[None])[0]):
        return None
    known.evaluate(np.array([start, *_around(start, scale)]))
    radius, curvature = _RADIUS, np.eye(p)
    for _ in range(_MOST + _MOST_OF_EACH * p):
        model = known.quadratic(scale, curvature)
        step, promised = _step(model, radius)
        if promised < _LEFT:
            break
        before, at = known.values[known.best], known.points[known.best]
        steps = [_step(model, min(factor * radius, _LARGEST)) for factor in _RADII]
        gains = known.evaluate(np.array([at + scale * step for step, _ in steps])) - before
        part = gains[1] / promised
        best = int(np.argmax(gains))
        if gains[best] <= 0.0 or (part < _POOR and best == 0):
            radius = max(0.5 * radius, _LEAST)
        elif best == len(steps) - 1 or part > _GOOD:
            radius = min(2.0 * radius, _LARGEST)
        size = np.sqrt(np.maximum(np.diagonal(model.curvature), _FLAT))
        change = np.clip(1.0 / size, 1.0 / _CHANGE, _CHANGE)
        curvature, scale = model.curvature * np.outer(change, change), scale * change
    return _with_curvature(known, scale)


def _with_curvature(known: _Known, scale: Array) -> LatentMode:
    """Look around the best point, at single coordinates and at pairs."""
    at, value = known.points[known.best], known.values[known.best]
    p = len(at)
    i, j = np.tril_indices(p, -1)
    pairs = np.tile(at, (len(i), 1))
    for k in (i, j):
        pairs[np.arange(len(i)), k] += _TOGETHER * scale[k]
    found = known.evaluate(np.concatenate([_around(at, scale), pairs]))
    ends, mixed = found[: 2 * p].reshape(-1, 2), found[2 * p :]
    slope, fall = 0.5 * (ends[:, 1] - ends[:, 0]), np.maximum(2.0 * value - ends.sum(axis=1), _FLAT)
    straight = value + _TOGETHER * (slope[i] + slope[j]) - 0.5 * _TOGETHER**2 * (fall[i] + fall[j])
    across = np.eye(p)
    across[i, j] = across[j, i] = (straight - mixed) / _TOGETHER**2 / np.sqrt(fall[i] * fall[j])
    values, vectors = np.linalg.eigh(across)
    inverse = (vectors / np.maximum(values, 0.05)) @ vectors.T
    size = scale / np.sqrt(fall)
    cov = size[:, None] * inverse * size
    known.evaluate((at + cov @ (slope / scale))[None])  # which is the top, if that is near
    return LatentMode(known.points[known.best], cov)


def _around(at: Array, scale: Array) -> Array:
    """Return the points a scale away, below and above, coordinate by coordinate, (2 p, p)."""
    return np.array([at + sign * direction for direction in np.diag(scale) for sign in (-1.0, 1.0)])


def _step(model: _Quadratic, radius: float) -> tuple[Array, float]:
    """Return the highest point of a quadratic in a ball, and its height."""
    values, vectors = np.linalg.eigh(model.curvature)
    slope = vectors.T @ model.slope
    shift = max(0.0, 1e-3 - float(values[0]))
    while np.linalg.norm(slope / (values + shift)) > radius:
        shift = 1.3 * shift + 1e-2
    inner = slope / (values + shift)
    return vectors @ inner, float(slope @ inner - 0.5 * inner @ (values * inner))
