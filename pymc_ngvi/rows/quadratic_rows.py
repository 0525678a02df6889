"""First and second derivatives of rows that are polynomials of the second degree, from values."""

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.expectation import RowFunction


def derivatives_of(rows: RowFunction, eta: Array) -> tuple[Array, Array]:
    """Return the gradient, (n_rows, k), and the second derivatives by pairs of slots, (n_rows, n_pairs).

    Differences of a polynomial of the second degree are exact whatever the step; that of least rounding is as long as
    the function is wide, and reaches as far as its top.
    """
    slope, second = _differences(rows, eta, np.ones_like(eta))
    a, b = pairs_of_slots(rows.k)
    bend = -second[:, a == b]
    with np.errstate(all="ignore"):
        step = np.where(bend > 0.0, 1.0 / np.sqrt(bend) + np.abs(slope) / bend, 1.0)
    return _differences(rows, eta, np.where(np.isfinite(step), step, 1.0))


def pairs_of_slots(k: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return all pairs of slots, the first not before the second, in the order in which kinds of rows list them."""
    return np.tril_indices(k)


def _differences(rows: RowFunction, eta: Array, step: Array) -> tuple[Array, Array]:
    k = rows.k
    a, b = pairs_of_slots(k)
    moves = [np.zeros(k), *np.eye(k), *-np.eye(k)]
    moves += [np.eye(k)[i] + np.eye(k)[j] for i, j in zip(a, b, strict=True) if i != j]
    above, below = eta + step, eta - step
    step_up, step_down = (above - eta).T, (eta - below).T  # as they are where predictors are far larger than steps
    ends = np.stack([below, eta, above])
    points = [ends[1 + np.array(moves)[:, slot].astype(np.intp), :, slot] for slot in range(k)]
    with np.errstate(all="ignore"):
        values = rows.values(points, slice(None))
        middle, both = values[0], iter(values[1 + 2 * k :])
        up, down = values[1 : 1 + k] - middle, middle - values[1 + k : 1 + 2 * k]
        of_up, of_down, whole = up / step_up, down / step_down, step_up + step_down
        grad = (of_up * step_down + of_down * step_up) / whole
        second = [
            2.0 * (of_up[i] - of_down[i]) / whole[i]
            if i == j
            else (next(both) - middle - up[i] - up[j]) / (step_up[i] * step_up[j])
            for i, j in zip(a, b, strict=True)
        ]
    return grad.T, np.stack(second, axis=1)
