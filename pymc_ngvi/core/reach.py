"""How much of a variance is farther out than any draw: integrals along lines through draws."""

from collections.abc import Callable

import numpy as np

from pymc_ngvi.core.types import Array

#: Lines of each kind; coordinates along which they go, those in which draws are farthest out; distances on these, in
#: that of a draw, or in standard deviations.
_N_LINES, _FARTHEST, _DISTANCES = 16, 2, 2.0 ** np.arange(-4, 14)


def beyond_reach(log_p: Callable[[Array], Array], x: Array) -> float:
    """Return the part of the variance of draws, (n, d), that is farther out than any of them, the largest of several.

    Lines go through draws from their mean, and along coordinates in which some are far out. Along each, the second
    moment is an integral of exp(log p): where tails are so heavy that there is no standard deviation, nearly all of it
    is beyond what draws reach, wherever these have stopped.
    """
    mean, sd = x.mean(axis=0), x.std(axis=0)
    z = (x - mean) / sd
    some, farthest = z[:: -(-len(z) // _N_LINES)], np.abs(z).max(axis=0)
    ways = [(some, z.shape[1], float(np.linalg.norm(z, axis=1).max()))]
    for at in np.argsort(farthest)[-_FARTHEST:]:
        way = np.zeros_like(some)
        way[:, at] = np.sign(some[:, at])
        ways.append((way, 1, float(farthest[at])))
    return max(_beyond(log_p, mean, sd, some, *way) for way in ways)


def _beyond(
    log_p: Callable[[Array], Array], mean: Array, sd: Array, some: Array, way: Array, n_dim: int, reach: float
) -> float:
    start = some - way * np.sum(some * way, axis=1, keepdims=True) / np.sum(way**2, axis=1, keepdims=True)
    points = start[:, None] + _DISTANCES[:, None] * way[:, None]
    with np.errstate(all="ignore"):
        values = log_p((mean + sd * points).reshape(-1, len(mean))).reshape(points.shape[:2])
        values[~np.isfinite(values)] = -np.inf
        lengths = _DISTANCES * np.linalg.norm(way, axis=1, keepdims=True)
        # What rises farther out is another mode, or rounding, and no tail.
        is_tail = ~((np.diff(values, axis=1) > 0.0) & (lengths[:, 1:] > reach)).any(axis=1)
    log_m = values[is_tail] + n_dim * np.log(_DISTANCES)
    m = np.exp(log_m - log_m.max(axis=1, keepdims=True))
    squares = lengths[is_tail] ** 2 * m / m.sum(axis=1, keepdims=True)
    return float(squares[lengths[is_tail] > reach].sum() / squares.sum()) if is_tail.any() else 0.0
