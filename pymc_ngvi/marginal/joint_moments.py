"""Moments of globals and local coordinates together, from a weighted pool of globals."""

from collections.abc import Iterator

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.conditionals import HELD
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.log_marginal import LogMarginal


def local_moments(
    forest: Forest, g: Array, weights: Array, quadrature: LogMarginal | None, mean_of_globals: Array
) -> tuple[Array, Array]:
    """Return the means and the standard deviations of local coordinates, (n_local,) each.

    Parameters
    ----------
    forest : Forest
    g : ndarray, shape (n, n_globals)
    weights : ndarray, shape (n,)
        They add up to 1.
    quadrature : LogMarginal or None
        Knows the local coordinates; None where there are none.
    mean_of_globals : ndarray, shape (n_globals,)
    """
    mean, square = np.zeros(forest.n_local), np.zeros(forest.n_local)
    if quadrature is not None:
        # About a first guess, so that squares do not cancel.
        guess = quadrature.predicted(mean_of_globals[None]).mean[0]
        for rows, centres in _conditionals(forest, g, quadrature):
            apart = centres.mean - guess
            mean += weights[rows] @ apart
            square += weights[rows] @ (centres.variance() + apart**2)
        square -= mean**2
        mean += guess
    return mean, np.sqrt(square)


def joint_covariance(
    forest: Forest, g: Array, weights: Array, quadrature: LogMarginal | None, mean: Array, index: NDArray[np.intp]
) -> Array:
    """Return the covariance of some coordinates, (len(index), len(index)), about the mean of all of them."""
    place = np.full(forest.n_dim, -1, dtype=np.intp)
    place[forest.locals_] = np.arange(forest.n_local)
    local, of_globals = place[index] >= 0, np.searchsorted(forest.globals_, index[place[index] < 0])
    at, among = place[index][local], np.flatnonzero(local)
    same = (forest.path[at][:, None] == forest.path[at][None]) & _within(forest, at)
    result = np.zeros((len(index), len(index)))
    for rows, centres in _conditionals(forest, g, quadrature):
        points = np.empty((len(g[rows]), len(index)))
        points[:, ~local] = g[rows][:, of_globals]
        points[:, local] = centres.mean[:, at]
        for level in range(forest.n_levels if len(at) else 0):
            i, j = np.nonzero(same[..., level])
            f = centres.factor[:, :, level]
            result[among[i], among[j]] += weights[rows] @ (f[:, at[i]] * f[:, at[j]])
        points -= mean[index]
        result += (weights[rows, None] * points).T @ points
    return result


def _conditionals(forest: Forest, g: Array, quadrature: LogMarginal | None) -> Iterator[tuple[slice, Centres]]:
    """Yield rows of the pool, few at a time, with the conditional moments of the local coordinates."""
    size = max(1, HELD // (max(forest.n_local, 1) * (1 + forest.n_levels)))
    for start in range(0, len(g), size):
        rows = slice(start, start + size)
        if quadrature is not None:
            yield rows, quadrature.centres(g[rows])
        else:
            n = len(g[rows])
            yield rows, Centres(np.empty((n, 0)), np.empty((n, 0, 0)))


def _within(forest: Forest, at: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Tell which levels are on the paths of both of two coordinates, (n, n, n_levels)."""
    on_path = np.arange(forest.n_levels) <= forest.level[at][:, None]
    result: NDArray[np.bool_] = on_path[:, None] & on_path[None]
    return result
