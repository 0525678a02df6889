"""Modes of a smooth function of few numbers, and its curvature: many values cost little more than one.

A quasi-Newton method [1]_ from several points at once, whose gradients are differences of values that are evaluated
together, and which looks at steps of several lengths at a time.

References
----------
.. [1] J. Nocedal and S. J. Wright (2006). Numerical optimization, chapter 6. https://doi.org/10.1007/978-0-387-40065-5
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array

#: Steps at most, and for each coordinate; nats that a step must promise, and the first one of a point of a line.
_MOST, _MOST_OF_EACH, _LEFT, _HIGHER = 25, 3, 0.02, 0.5
#: Lengths of steps that are looked at together, in that of Newton's; farthest move of a coordinate, in its scale,
#: and the square root of how far all of them may lead.
_LENGTHS, _FARTHEST = np.array([2.0, 1.0, 0.5, 0.2, 0.05]), 5.0
#: Differences for gradients, in scales; least and largest scale; curvature over a scale that is flat.
_APART, _LEAST, _LARGEST, _FLAT = 0.25, 1e-3, 2.0, 0.1

type Function = Callable[[Array], Array]


class LatentMode(NamedTuple):
    """A mode."""

    #: shape (p,).
    at: Array
    #: Inverse of minus the second derivatives, by differences; shape (p, p).
    cov: Array


def find_modes(function: Function, starts: Array, scale: Array, cov: Array | None = None) -> list[LatentMode]:
    """Go up from some points, (k, p), without those where the function is not finite.

    A covariance may be given, as it is at the modes, about.
    """
    known = np.isfinite(values := function(starts))
    if not known.any():
        return []
    climbs, every = (
        Climbs(function, starts[known], values[known], np.clip(scale, _LEAST, _LARGEST)),
        np.arange(known.sum()),
    )
    climbs.inverse = climbs.inverse if cov is None else np.tile(cov, (len(every), 1, 1))
    climbs.go_up(_MOST + _MOST_OF_EACH * starts.shape[1], every)
    modes = [LatentMode(at, cov) for at, cov in zip(climbs.at, climbs.curvatures(every), strict=True)]
    # Far out, an integral may be of nothing any more, and go up without an end.
    is_near = (np.abs(climbs.at - starts[known]) < _FARTHEST**2 * np.clip(scale, _LEAST, _LARGEST)).all(axis=1)
    return [mode for mode, near in zip(modes, is_near, strict=True) if near] or modes


class Climbs:
    """Where searches have come to: each array has an axis of these, (k, ...)."""

    def __init__(self, function: Function, at: Array, value: Array, scale: Array) -> None:
        self._function, self.at, self.value = function, at.copy(), value.copy()
        self.scale = np.tile(scale, (len(at), 1))
        self._slope, self._bend = np.zeros_like(at), np.zeros_like(at)
        self.inverse, self.is_free = np.zeros((*at.shape, at.shape[1])), np.ones_like(at)
        every = np.arange(len(at))
        self._look(every)
        self._rescale(every)
        self._forget(every)

    def _look(self, rows: NDArray[np.intp]) -> None:
        """Take gradients, and minus the second derivatives by single coordinates, by differences."""
        apart = _APART * self.scale[rows]
        below, above = self._ends(rows, apart)
        self._slope[rows] = (above - below) / (2.0 * apart)
        self._bend[rows] = (2.0 * self.value[rows, None] - below - above) / apart**2

    def _ends(self, rows: NDArray[np.intp], apart: Array) -> tuple[Array, Array]:
        """Return values so far below and above, coordinate by coordinate, (n, p) each."""
        moves = np.concatenate([sign * apart[:, :, None] * np.eye(apart.shape[1]) for sign in (-1.0, 1.0)], axis=1)
        below, above = np.split(self._values(rows, moves), 2, axis=1)
        return below, above

    def _values(self, rows: NDArray[np.intp], moves: Array) -> Array:
        """Return values at moves from where some are, (n, m), with numbers far below another one for what is none."""
        n, m, p = moves.shape
        values = self._function((self.at[rows, None] + moves).reshape(-1, p)).reshape(n, m)
        values = np.where(np.isfinite(values), values, np.inf)
        lowest = np.minimum(values.min(axis=1), self.value[rows])[:, None]
        return np.where(np.isfinite(values), values, lowest - 10.0)

    def _rescale(self, rows: NDArray[np.intp]) -> None:
        self.scale[rows] = np.maximum(1.0 / np.sqrt(np.maximum(self._bend[rows], 1.0 / _LARGEST**2)), _LEAST)

    def _forget(self, rows: NDArray[np.intp]) -> None:
        variances = self.is_free / np.maximum(self._bend, (_FLAT / self.scale) ** 2)
        self.inverse[rows] = np.eye(self.at.shape[1]) * variances[rows, :, None]

    def newton_steps(self, rows: NDArray[np.intp]) -> tuple[Array, Array]:
        """Return steps to where the function would be highest if it were quadratic, and the nats that they promise."""
        steps = np.einsum("kij,kj->ki", self.inverse[rows], self._slope[rows])
        return steps, 0.5 * np.einsum("ki,ki->k", self._slope[rows], steps)

    def go_up(self, most: int, left: NDArray[np.intp]) -> None:
        """Take steps from where some are until they promise little."""
        for _ in range(most):
            direction, rise = self.newton_steps(left)
            left, direction = left[rise >= _LEFT], direction[rise >= _LEFT]
            if not len(left):
                return
            sd = np.sqrt(np.maximum(np.diagonal(self.inverse[left], axis1=1, axis2=2), 0.0))
            limit = (np.abs(direction) / (_FARTHEST * np.maximum(sd, self.scale[left]))).max(axis=1)
            steps = _LENGTHS[:, None] * (direction / np.maximum(1.0, limit)[:, None])[:, None]
            values = self._values(left, steps)
            each, best = np.arange(len(left)), values.argmax(axis=1)
            rises = values[each, best] > self.value[left]
            # Where nothing rises, differences may have been too wide.
            can_narrow = ~rises & (self.scale[left].max(axis=1) > _LEAST)
            up, narrow, step = left[rises], left[can_narrow], steps[each, best][rises]
            before = self._slope[up]
            self.at[up] += step
            self.value[up] = values[each, best][rises]
            self.scale[narrow] = np.maximum(0.3 * self.scale[narrow], _LEAST)
            left = left[rises | can_narrow]
            if not len(left):
                return
            self._look(left)
            self.inverse[up] = _updated(self.inverse[up], step, before - self._slope[up])
            self._rescale(up)
            self._forget(narrow)

    def curvatures(self, rows: NDArray[np.intp]) -> Array:
        """Return the inverses of minus the second derivatives, by single coordinates and pairs, (n, p, p)."""
        k, p = len(rows), self.at.shape[1]
        scale, value = self.scale[rows], self.value[rows, None]
        (i, j), of_each = np.tril_indices(p, -1), scale[:, :, None] * np.eye(p)
        below, above = self._ends(rows, scale)
        mixed = self._values(rows, of_each[:, i] + of_each[:, j]) if p > 1 else np.empty((k, 0))
        fall = np.maximum(2.0 * value - below - above, _FLAT)
        across = np.tile(np.eye(p), (k, 1, 1))  # 0 where the function is a sum of functions of one coordinate each
        apart = above[:, i] + above[:, j] - value - mixed
        across[:, i, j] = across[:, j, i] = apart / np.sqrt(fall[:, i] * fall[:, j])
        values, vectors = np.linalg.eigh(across)
        roots = (scale / np.sqrt(fall))[:, :, None] * vectors / np.sqrt(np.maximum(values, 0.01))[:, None]
        return roots @ np.swapaxes(roots, 1, 2)


def profiles(function: Function, points: Array, values: Array, cov: Array, least: Array) -> Climbs:
    """Go up from points of lines along each coordinate, (n p, p), in the other coordinates.

    Along straight lines, the others follow as in a Gaussian, and fall off where the effect of a coordinate has a limit.
    Points that do not come above ``least`` stay where they are, and those that have little to rise.
    """
    n = len(points) // len(cov)
    given = cov - cov.T[:, :, None] * cov.T[:, None] / np.diag(cov)[:, None, None]  # the others, given each coordinate
    with np.errstate(all="ignore"):
        climbs = Climbs(function, points, values, np.sqrt(np.diag(cov)))
        climbs.is_free, climbs.inverse = np.tile(1.0 - np.eye(len(cov)), (n, 1)), np.tile(given, (n, 1, 1))
        rise = climbs.newton_steps(np.arange(len(points)))[1]
        climbs.go_up(_MOST, np.flatnonzero((rise > _HIGHER) & (climbs.value + rise > least)))
    return climbs


def _updated(inverse: Array, step: Array, change: Array) -> Array:
    """Return inverses of minus the second derivatives after steps on which gradients fell by ``change``."""
    along = np.einsum("ki,ki->k", step, change)
    is_bent = along > 1e-10 * np.linalg.norm(step, axis=1) * np.linalg.norm(change, axis=1)
    safe = np.where(is_bent, along, 1.0)[:, None, None]
    left = np.eye(step.shape[1]) - step[:, :, None] * change[:, None] / safe
    new = left @ inverse @ np.swapaxes(left, 1, 2) + step[:, :, None] * step[:, None] / safe
    return np.where(is_bent[:, None, None], new, inverse)
