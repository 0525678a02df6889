"""The local coordinates given the globals under a Gaussian: linear means and factors, from a sparse precision."""

from dataclasses import dataclass

import numpy as np

from scipy import sparse

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.centres import Centres
from pymc_ngvi.marginal.forest import Forest

#: Part of a diagonal entry of the precision that has to be left when what is below has been eliminated.
_LEAST_PIVOT = 1e-8


@dataclass(frozen=True, eq=False)
class LinearCentres:
    """Centres of a Gaussian given its globals: a linear mean, one factor.

    Parameters
    ----------
    mean : ndarray, shape (n_local,)
        At ``centre``.
    slope : ndarray, shape (n_local, n_globals)
    factor : ndarray, shape (n_local, n_levels)
    centre : ndarray, shape (n_globals,)
    """

    mean: Array
    slope: Array
    factor: Array
    centre: Array

    def __call__(self, g: Array) -> Centres:
        """Return the centres given globals, (n, n_globals)."""
        mean = self.mean + (g - self.centre) @ self.slope.T
        return Centres(mean, np.broadcast_to(self.factor, (len(g), *self.factor.shape)))


def linear_centres(forest: Forest, precision: sparse.csr_array, mean: Array) -> LinearCentres:
    """Return the conditional distribution of the local coordinates given the globals.

    Parameters
    ----------
    forest : Forest
    precision : csr_array, shape (n_dim, n_dim)
        Of the Gaussian. Where eliminating what is below leaves a coordinate without positive precision, its own entry
        is taken.
    mean : ndarray, shape (n_dim,)
    """
    local = precision[forest.locals_]
    factor = _factor(forest, local[:, forest.locals_].tocsr())
    beside = np.asarray(local[:, forest.globals_].todense())
    # E[b | g] = m - C P_lg (g - m_g) with C = L L^T.
    matrix = _as_matrix(forest, factor)
    slope = -np.asarray(matrix @ (matrix.T @ beside))
    return LinearCentres(mean[forest.locals_], slope, factor, mean[forest.globals_])


def _factor(forest: Forest, precision: sparse.csr_array) -> Array:
    """Return L, (n_local, n_levels), with L L^T the inverse of the precision of the local coordinates.

    Coordinates are eliminated from the leaves to the roots; what a coordinate adds to the precision of those above it
    stays on its path.
    """
    n, depth = forest.n_local, forest.n_levels
    row = np.zeros((n, depth))  # of the precision, in the columns of the path
    for level in range(depth):
        row[:, level] = np.asarray(precision[np.arange(n), forest.path[:, level]]).ravel()
    below = np.zeros((n, depth, depth))  # what descendants have added, on the path of each coordinate
    own, scale = np.empty(n), np.abs(row[np.arange(n), forest.level])
    for level in reversed(range(depth)):
        at = forest.at_level[level]
        entries = row[at, : level + 1] + below[at, level, : level + 1]
        pivot = entries[:, level]
        good = pivot > _LEAST_PIVOT * scale[at]
        own[at] = np.where(good, pivot, np.where(scale[at] > 0.0, scale[at], 1.0))
        row[at, :level] = np.where(good[:, None], entries[:, :level], 0.0)
        if level:
            left = row[at, :level]
            added = below[at, :level, :level] - left[:, :, None] * left[:, None] / own[at, None, None]
            parents, sums = forest.to_parents(added, level, axis=0)
            below[parents, :level, :level] += sums
    factor = np.zeros((n, depth))
    for level, at in enumerate(forest.at_level):
        factor[at, level] = 1.0 / np.sqrt(own[at])
        for above in range(level):
            weight = -row[at, above] / own[at]
            factor[at, :level] += weight[:, None] * factor[forest.path[at, above], :level]
    return factor


def _as_matrix(forest: Forest, factor: Array) -> sparse.csr_array:
    """Return the factor as a sparse matrix, (n_local, n_local)."""
    on_path = np.arange(forest.n_levels) <= forest.level[:, None]
    rows = np.broadcast_to(np.arange(forest.n_local)[:, None], on_path.shape)[on_path]
    shape = (forest.n_local, forest.n_local)
    return sparse.csr_array((factor[on_path], (rows, forest.path[on_path])), shape=shape)
