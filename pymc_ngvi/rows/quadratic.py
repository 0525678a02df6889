"""Whether functions of rows are polynomials of the second degree or concave, by their values at points on lines."""

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.rows.expectation import RowFunction

#: Points on a line: a parabola has no third differences there.
_ON_LINE = np.arange(-2.0, 3.0)
_ROUNDING = 1e-7
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
        return bool((bends <= _ROUNDING * (1.0 + size)).all())


def is_concave(rows: RowFunction, about: Array) -> bool:
    """Tell whether functions of rows of one predictor are concave, near and far from where these are, (n_rows, 1)."""
    return rows.k == 1 and all(bool(are_concave(rows, 0, about, size * FAR).all()) for size in (0.1, 1.0))


def are_concave(rows: RowFunction, slot: int, about: Array, along: Array) -> NDArray[np.bool_]:
    """Tell which functions of rows are concave in one of their predictors on lines, (n_rows,)."""
    points = [np.broadcast_to(about[:, a], (len(along), len(about))).copy() for a in range(rows.k)]
    points[slot] += along[:, None]
    with np.errstate(all="ignore"):
        values = rows.values(points, slice(None))
        bends = np.diff(values, 2, axis=0)
        size = 1.0 + np.abs(values[:-2]) + np.abs(values[2:])
        # Where values are not finite, the function is out of its range.
        bent = (bends > _ROUNDING * size) & np.isfinite(size)
    return ~bent.any(axis=0)
