"""Modes of a smooth function of few numbers, and its curvature: many values cost little more than one.

A quasi-Newton method [1]_, whose gradients are differences of values that are evaluated together, and which looks at
steps of several lengths at a time; and Newton's method from several points, where values cost little.

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

#: Steps of Newton's method, differences for it, the widest that a mode may be, and the longest step, in scales.
_N_NEWTON, _STEP, _WIDEST, _LONGEST = 5, 0.01, 4.0, 3.0

type Function = Callable[[Array], Array]


class LatentMode(NamedTuple):
    """A mode."""

    #: shape (p,).
    at: Array
    #: Inverse of minus the second derivatives, by differences; shape (p, p).
    cov: Array


def find_mode(function: Function, start: Array, scale: Array, cov: Array | None = None) -> LatentMode | None:
    """Go up, with a covariance as it may be at the mode; None where the function is not finite at the start."""
    at, value = np.array(start), float(function(start[None])[0])
    if not np.isfinite(value):
        return None
    climb = _Climb(function, at, value, np.clip(scale, _LEAST, _LARGEST))
    climb.inverse = climb.inverse if cov is None else cov
    climb.go_up(_MOST + _MOST_OF_EACH * len(at))
    return LatentMode(climb.at, climb.curvature())


class _Climb:
    """Where a search has come to."""

    def __init__(self, function: Function, at: Array, value: float, scale: Array) -> None:
        self._function, self.at, self.value, self.scale = function, at, value, scale
        self._look()
        self._rescale()
        self._forget()

    def _look(self) -> None:
        """Take the gradient, and minus the second derivatives by single coordinates, by differences."""
        apart = _APART * self.scale
        ends = _finite(self._function(_around(self.at, apart)), self.value).reshape(-1, 2)
        self._slope = (ends[:, 1] - ends[:, 0]) / (2.0 * apart)
        self._bend = (2.0 * self.value - ends.sum(axis=1)) / apart**2

    def _rescale(self) -> None:
        curved = np.maximum(self._bend, 1.0 / _LARGEST**2)
        self.scale = np.clip(1.0 / np.sqrt(curved), _LEAST, _LARGEST)

    def _forget(self) -> None:
        self.inverse = np.diag(1.0 / np.maximum(self._bend, (_FLAT / self.scale) ** 2))

    def go_up(self, most: int) -> None:
        """Take steps until they promise little."""
        for _ in range(most):
            direction = self.inverse @ self._slope
            if 0.5 * self._slope @ direction < _LEFT:
                return
            limit = np.max(np.abs(direction) / (_FARTHEST * np.maximum(np.sqrt(np.diag(self.inverse)), self.scale)))
            steps = np.outer(_LENGTHS, direction / max(1.0, limit))
            values = self._function(self.at + steps)
            best = int(np.argmax(np.where(np.isfinite(values), values, -np.inf)))
            if values[best] > self.value:
                before, self.at, self.value = self._slope, self.at + steps[best], float(values[best])
                self._look()
                self.inverse = _updated(self.inverse, steps[best], before - self._slope)
                self._rescale()
            elif self.scale.max() > _LEAST:  # differences may have been too wide
                self.scale = np.maximum(0.3 * self.scale, _LEAST)
                self._look()
                self._forget()
            else:
                return

    def curvature(self) -> Array:
        """Return the inverse of minus the second derivatives, by single coordinates and pairs."""
        at, value, scale, p = self.at, self.value, self.scale, len(self.at)
        i, j = np.tril_indices(p, -1)
        pairs = np.tile(at, (len(i), 1))
        for k in (i, j):
            pairs[np.arange(len(i)), k] += scale[k]
        found = _finite(self._function(np.concatenate([_around(at, scale), pairs])), value)
        ends, mixed = found[: 2 * p].reshape(-1, 2), found[2 * p :]
        fall = np.maximum(2.0 * value - ends.sum(axis=1), _FLAT)
        across = np.eye(p)  # 0 where the function is a sum of functions of one coordinate each
        across[i, j] = across[j, i] = (ends[i, 1] + ends[j, 1] - value - mixed) / np.sqrt(fall[i] * fall[j])
        values, vectors = np.linalg.eigh(across)
        inverse = (vectors / np.maximum(values, 0.01)) @ vectors.T
        size = scale / np.sqrt(fall)
        return size[:, None] * inverse * size


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


def _around(at: Array, scale: Array) -> Array:
    """Return the points a scale away, below and above, coordinate by coordinate, (2 p, p)."""
    return np.array([at + sign * direction for direction in np.diag(scale) for sign in (-1.0, 1.0)])


def modes_above(function: Function, points: Array, scale: Array) -> list[LatentMode]:
    """Return where damped steps of Newton's method from some points end, all at once."""
    n, p = points.shape
    centre, at, each = points[0], (points - points[0]) / scale, np.arange(n)

    def of(u: Array) -> Array:
        with np.errstate(all="ignore"):
            values = function(centre + scale * u)
        return np.where(np.isfinite(values), values, -np.inf)

    for _ in range(_N_NEWTON):
        here, gradient, hessian = _slopes(of, at)
        values, vectors = np.linalg.eigh(-hessian)
        along = np.einsum("nji,nj->ni", vectors, gradient) / np.maximum(np.abs(values), 1.0 / _WIDEST**2)
        step = np.einsum("nij,nj->ni", vectors, along)
        step *= np.minimum(1.0, _LONGEST / np.maximum(np.linalg.norm(step, axis=1), 1e-300))[:, None]
        tried = at[:, None] + np.array(_LENGTHS)[1:, None] * step[:, None]
        new = of(tried.reshape(-1, p)).reshape(n, -1)
        best = new.argmax(axis=1)
        rises = new[each, best] > here
        if not rises.any():
            break
        at = np.where(rises[:, None], tried[each, best], at)
    values, vectors = np.linalg.eigh(-_slopes(of, at)[2])
    roots = scale[:, None] * vectors / np.sqrt(np.maximum(values, 1.0 / _WIDEST**2))[:, None]
    return [LatentMode(centre + scale * u, root @ root.T) for u, root in zip(at, roots, strict=True)]


def _slopes(of: Function, at: Array) -> tuple[Array, Array, Array]:
    """Return values, gradients and Hessians by differences; 0 where these are not finite."""
    n, p = at.shape
    first, second = np.triu_indices(p, 1)
    steps = _STEP * np.eye(p)
    shifts = np.concatenate([np.zeros((1, p)), steps, -steps, steps[first] + steps[second]])
    values = of((at[:, None] + shifts).reshape(-1, p)).reshape(n, -1)
    here, up, down = values[:, 0], values[:, 1 : 1 + p], values[:, 1 + p : 1 + 2 * p]
    with np.errstate(invalid="ignore"):
        gradient = (up - down) / (2.0 * _STEP)
        hessian = np.zeros((n, p, p))
        hessian[:, range(p), range(p)] = (up - 2.0 * here[:, None] + down) / _STEP**2
        mixed = values[:, 1 + 2 * p :] - up[:, first] - up[:, second] + here[:, None]
    hessian[:, first, second] = hessian[:, second, first] = mixed / _STEP**2
    usable = np.isfinite(gradient).all(axis=1) & np.isfinite(hessian).all(axis=(1, 2))
    return here, np.where(usable[:, None], gradient, 0.0), np.where(usable[:, None, None], hessian, 0.0)
