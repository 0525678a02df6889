"""Differential equations of many draws at once by an explicit method, each draw with steps of its own.

A draw that needs small steps does not slow down the others, and one whose solution ends spoils none. Equations that are
stiff are left to others.

References
----------
.. [1] E. Hairer, S. P. Norsett and G. Wanner (1993). Solving ordinary differential equations I, section II.10 (DOP853).
   https://doi.org/10.1007/978-3-540-78862-1
"""

from collections.abc import Callable

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.values import Array

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
