"""Quantiles of densities that are known at points of a grid, many at a time."""

import numpy as np

from scipy.special import ndtri

from pymc_ngvi.core.values import Array

_ROOT_2PI = float(np.sqrt(2.0 * np.pi))


def quantiles(normals: Array, points: Array, density: Array, areas: Array) -> Array:
    """Return where distributions have the probabilities that some numbers have under a standard normal.

    Cubics between the points have the right values and slopes there. Probabilities are added up from either end, so
    that both tails keep their digits. Beyond the points, quantiles stay at the first and last of these.

    Parameters
    ----------
    normals : ndarray, shape (n_normals,)
    points, density : ndarray, shape (n_points, ...)
        Ascending, and the densities there, but for a constant.
    areas : ndarray, shape (n_points + 1, ...)
        Integrals of these: below the first point, from each to the next one, and above the last.

    Returns
    -------
    ndarray, shape (n_normals, ...)
    """
    below, above = np.cumsum(areas, axis=0), np.cumsum(areas[::-1], axis=0)[::-1]
    total = below[-1]
    below, above = below[:-1], above[1:]
    score = ndtri(np.minimum(below, above) / total)
    score = np.where(below < above, score, -score)
    slope = np.exp(-0.5 * score**2) * (total / _ROOT_2PI) / density
    points = np.broadcast_to(points, score.shape)
    return np.array([_at(normal, score, points, slope) for normal in normals])


def _at(wanted: float, x: Array, y: Array, slope: Array) -> Array:
    """Return y at a value of x, ascending along the first axis, by cubics from values and slopes at both ends."""
    left = np.clip((x < wanted).sum(axis=0) - 1, 0, len(x) - 2)[None]
    (x_left, x_right), (y_left, y_right), (first, last) = (
        (np.take_along_axis(values, left, axis=0)[0], np.take_along_axis(values, left + 1, axis=0)[0])
        for values in (x, y, slope)
    )
    width = x_right - x_left
    part = np.clip((wanted - x_left) / width, 0.0, 1.0)
    rest = 1.0 - part
    ends = (1.0 + 2.0 * part) * rest**2 * y_left + (1.0 + 2.0 * rest) * part**2 * y_right
    return ends + part * rest * width * (rest * first - part * last)
