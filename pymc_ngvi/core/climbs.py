"""Climbs of a log density from many points at once, and which of the points that they lead to are apart."""

import math

from collections.abc import Callable

import numpy as np

from pymc_ngvi.core.linalg import TINY
from pymc_ngvi.core.types import Array, HasGradient

#: Steps of a climb at most, the nats below which a step counts as the last, and times that the next may be as long.
MOST_STEPS, _LAST_GAIN, _MOST_CHANGE = 150, 1e-2, 10.0
#: Nats that a log density falls between two modes, and points at which that is looked at.
VALLEY, _N_BETWEEN = 1.0, 17


def ascend(
    density: HasGradient, points: Array, n_steps: int = MOST_STEPS, longest: float = math.inf
) -> tuple[Array, Array]:
    """Climb log p from many points at once, each with Barzilai-Borwein steps of its own."""
    x = points.copy()
    logp, grad = density.logp_grad(x)
    active = np.isfinite(logp) & np.isfinite(grad).all(axis=1)
    logp = np.where(active, logp, -np.inf)
    step = 1.0 / np.maximum(np.linalg.norm(np.where(active[:, None], grad, 1.0), axis=1), TINY)
    for i in range(n_steps):
        rows = np.flatnonzero(active)
        if not len(rows):
            break
        if math.isfinite(longest):
            step[rows] = np.minimum(step[rows], longest / np.maximum(np.linalg.norm(grad[rows], axis=1), TINY))
        new = x[rows] + step[rows, None] * grad[rows]
        new_logp, new_grad = density.logp_grad(new)
        with np.errstate(invalid="ignore"):
            better = (new_logp >= logp[rows]) & np.isfinite(new_grad).all(axis=1) & np.isfinite(new_logp)
        gain = new_logp - logp[rows]
        # Barzilai and Borwein's steps, long and short in turn, from the last move and the fall of the gradient.
        moved, fall = new - x[rows], grad[rows] - new_grad
        with np.errstate(all="ignore"):
            product = np.sum(moved * fall, axis=1)
            size = np.sum(moved**2, axis=1) / product if i % 2 else product / np.sum(fall**2, axis=1)
        proposed = np.where((product > 0.0) & np.isfinite(size), size, 4.0 * step[rows])
        up, down = rows[better], rows[~better]
        step[up] = np.clip(proposed[better], step[up] / _MOST_CHANGE, _MOST_CHANGE * step[up])
        step[down] *= 0.25
        x[up], logp[up], grad[up] = new[better], new_logp[better], new_grad[better]
        active[rows[better & (gain < _LAST_GAIN)] if i > 5 else rows[:0]] = False
    return x, logp


def tops(
    logp: Callable[[Array], Array], points: Array, heights: Array, most: int, first: int | None = None
) -> list[int]:
    """Return the highest ones of points between which there is no valley, one of which may be given.

    A climb need not have got to its end for that, nor is there a scale on which ends are near.
    """
    left, found = np.flatnonzero(np.isfinite(heights)), list[int]()
    part = np.linspace(0.0, 1.0, _N_BETWEEN)[:, None, None]
    while len(left) and len(found) < most:
        top = int(left[np.argmax(heights[left])]) if found or first is None else first
        found.append(top)
        # The lowest value on the straight way from each of the points that are left to this one.
        ways = (1.0 - part) * points[left] + part * points[top]
        with np.errstate(all="ignore"):
            lowest = (
                np.nan_to_num(logp(ways.reshape(-1, points.shape[1])), nan=-np.inf).reshape(_N_BETWEEN, -1).min(axis=0)
            )
        left = left[(lowest < np.minimum(heights[left], heights[top]) - VALLEY) & (left != top)]
    return found
