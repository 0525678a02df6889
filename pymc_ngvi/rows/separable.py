"""Functions of rows from their values: whether they are concave or quadratic, and numbers as combinations of few."""

import numpy as np

from pymc_ngvi.core.types import Array, Bools
from pymc_ngvi.rows.expectation import RowFunction

#: Points on a line: a parabola has no third differences there.
_ON_LINE = np.arange(-2.0, 3.0)
_STRAIGHT = 1e-7
#: Points at which functions are compared with chords.
FAR = np.linspace(-12.0, 12.0, 49)


def is_quadratic(rows: RowFunction) -> bool:
    """Tell whether functions of rows are polynomials of the second degree, at most."""
    rng = np.random.default_rng(0)
    shape = rows.index.shape
    about, along = rng.standard_normal(shape), rng.standard_normal(shape)
    points = [about[:, a] + _ON_LINE[:, None] * along[:, a] for a in range(shape[1])]
    with np.errstate(all="ignore"):
        values: Array = rows.values(points, slice(None))
        bends, size = np.abs(np.diff(values, 3, axis=0)), np.abs(values).max(axis=0)
        return bool((bends <= _STRAIGHT * (1.0 + size)).all())


def is_concave(rows: RowFunction, about: Array) -> bool:
    """Tell whether functions of rows of one predictor are concave, near and far from where these are, (n_rows, 1)."""
    return rows.k == 1 and all(bool(are_concave(rows, 0, about, size * FAR).all()) for size in (0.1, 1.0))


def are_concave(rows: RowFunction, slot: int, about: Array, along: Array) -> Bools:
    """Tell which functions of rows are concave in one of their predictors on lines, (n_rows,)."""
    points = [np.broadcast_to(about[:, a], (len(along), len(about))).copy() for a in range(rows.k)]
    points[slot] += along[:, None]
    with np.errstate(all="ignore"):
        values = rows.values(points, slice(None))
        bends = np.diff(values, 2, axis=0)
        size = 1.0 + np.abs(values[:-2]) + np.abs(values[2:])
        # Where values are not finite, the function is out of its range.
        bent = (bends > _STRAIGHT * size) & np.isfinite(size)
    return ~bent.any(axis=0)


# --- first and second derivatives of rows that are polynomials of the second degree, from values ---


def derivatives_of(rows: RowFunction, eta: Array) -> tuple[Array, Array]:
    """Return the gradient, (n_rows, k), and the second derivatives by pairs of slots, (n_rows, n_pairs).

    Differences of a polynomial of the second degree are exact whatever the step; that of least rounding is as long as
    the function is wide, and reaches as far as its top.
    """
    slope, second = _differences(rows, eta, np.ones_like(eta))
    a, b = np.tril_indices(rows.k)
    bend = -second[:, a == b]
    with np.errstate(all="ignore"):
        step = np.where(bend > 0.0, 1.0 / np.sqrt(bend) + np.abs(slope) / bend, 1.0)
    return _differences(rows, eta, np.where(np.isfinite(step), step, 1.0))


def _differences(rows: RowFunction, eta: Array, step: Array) -> tuple[Array, Array]:
    k = rows.k
    a, b = np.tril_indices(k)
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
