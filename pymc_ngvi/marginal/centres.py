"""Where quadrature nodes are put: conditional means and Cholesky factors of the local coordinates given the globals.

The factor L of a tree has a row for each coordinate, with entries in the columns of its path only: b = m + L z gives a
coordinate its mean, plus multiples of the standardised coordinates above it, plus one of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.forest import Forest

#: Standardised variances that a correction of the factor trusts, at least and at most; and means, at most. Beyond, the
#: nodes see one flank, or all of the mass is at one of them: a parabola tells more.
_LEAST, _MOST, _FARTHEST = 0.04, 25.0, 1.5


@dataclass(frozen=True, eq=False)
class Centres:
    """Conditional means and Cholesky factors for some draws of the globals.

    Parameters
    ----------
    mean : ndarray, shape (n, n_local)
    factor : ndarray, shape (n, n_local, n_levels)
        Row c: entries in the columns of the path of c; the last of them is positive, what is beyond is 0.
    """

    mean: Array
    factor: Array

    def __len__(self) -> int:
        """Return the number of draws."""
        return len(self.mean)

    def __getitem__(self, rows: NDArray[np.integer] | NDArray[np.bool_] | slice) -> "Centres":
        """Return those of some draws."""
        return Centres(self.mean[rows], self.factor[rows])

    def replaced(self, rows: NDArray[np.integer] | NDArray[np.bool_], new: "Centres") -> "Centres":
        """Return a copy with those of some draws replaced."""
        mean, factor = self.mean.copy(), self.factor.copy()
        mean[rows], factor[rows] = new.mean, new.factor
        return Centres(mean, factor)

    @staticmethod
    def joined(parts: Sequence["Centres"]) -> "Centres":
        """Return those of several sets of draws, one after the other."""
        return Centres(np.concatenate([p.mean for p in parts]), np.concatenate([p.factor for p in parts]))

    def at(self, nodes: Array) -> Array:
        """Return m + L z, (n, n_nodes, n_local), for the same nodes z, (n_nodes, n_levels), in all trees."""
        result: Array = self.mean[:, None] + np.einsum("ncd,jd->njc", self.factor, nodes)
        return result

    def at_own(self, z: Array, forest: Forest) -> Array:
        """Return m + L z, (n, k, n_local), for standardised coordinates z, (n, k, n_local)."""
        result = self.mean[:, None] + 0.0 * z
        for level in range(forest.n_levels):
            result += self.factor[:, None, :, level] * z[:, :, forest.path[:, level]]
        return result

    def own(self, forest: Forest) -> Array:
        """Return the entries of the diagonal, (n, n_local)."""
        return np.take_along_axis(self.factor, forest.level[None, :, None], axis=2)[:, :, 0]

    def variance(self) -> Array:
        """Return the conditional variances, (n, n_local)."""
        result: Array = np.sum(self.factor**2, axis=2)
        return result


@dataclass(frozen=True, eq=False)
class Shape:
    """Moments of the standardised coordinates z under the conditional density, where m = 0 and L L^T = I are asked for.

    Parameters
    ----------
    mean : ndarray, shape (n, n_local)
    cov : ndarray, shape (n, n_local, n_levels, n_levels)
        Of the path of each coordinate; the identity beyond its end.
    skew : ndarray, shape (n, n_local)
        Third standardised cumulant.
    peak, width : ndarray, shape (n, n_local)
        Where a parabola through the largest value and its neighbours has its top, given the coordinates above, and the
        standard deviation of the Gaussian that it is the logarithm of.
    """

    mean: Array
    cov: Array
    skew: Array
    peak: Array
    width: Array

    def distance(self) -> tuple[Array, Array, Array]:
        """Return the largest |mean|, the least and the largest variance in any direction of a path, (n,) each."""
        if self.cov.shape[-1] == 1:
            variance: Array = self.cov[..., 0, 0]
        else:
            values = np.linalg.eigvalsh(np.where(np.isfinite(self.cov), self.cov, 0.0))
            variance = np.asarray(values).reshape(len(self.mean), -1)
        return np.abs(self.mean).max(axis=1), variance.min(axis=1), variance.max(axis=1)


def corrected(centres: Centres, shape: Shape, forest: Forest) -> Centres:
    """Return m + L E[z] and L chol(cov z) [1]_; where nodes are far off, the top and width of a parabola instead.

    References
    ----------
    .. [1] J. C. Naylor and A. F. M. Smith (1982). Applications of a method for the efficient computation of posterior
       distributions. Journal of the Royal Statistical Society C 31(3). https://doi.org/10.2307/2347995
    """
    own = np.take_along_axis(np.diagonal(shape.cov, axis1=2, axis2=3), forest.level[None, :, None], axis=2)[:, :, 0]
    far = (own < _LEAST) | (own > _MOST) | (np.abs(shape.mean) > _FARTHEST)
    mean = centres.at_own(np.where(far, shape.peak, shape.mean)[:, None], forest)[:, 0]
    if forest.n_levels == 1:
        scale = np.where(far, shape.width, np.sqrt(np.clip(own, _LEAST, _MOST)))
        return Centres(mean, centres.factor * scale[:, :, None])
    values, vectors = np.linalg.eigh(shape.cov)
    values = np.clip(values, _LEAST, _MOST)
    roots = np.linalg.cholesky((vectors * values[..., None, :]) @ np.swapaxes(vectors, -1, -2))
    factor = np.zeros_like(centres.factor)
    for level, at in enumerate(forest.at_level):
        # The last row of L_path chol(cov_path): beyond the end of a path, the covariance is the identity.
        path = forest.path[at, : level + 1]
        rows = np.zeros((len(mean), len(at), level + 1))
        rows[:, :, level] = shape.width[:, at]
        rows = np.where(far[:, at, None], rows, roots[:, at, level, : level + 1])
        # A coordinate is a sum over its path of entries of L times standardised ones, which are corrected in turn.
        for above in range(level):
            inner = roots[:, path[:, above], above, : above + 1]
            inner = np.where(far[:, path[:, above], None], _diagonal(shape.width[:, path[:, above]], above), inner)
            factor[:, at, : above + 1] += centres.factor[:, at, above, None] * inner
        factor[:, at, : level + 1] += centres.factor[:, at, level, None] * rows
    return Centres(mean, factor)


def _diagonal(widths: Array, level: int) -> Array:
    """Return rows that are 0 but for their last entry, (n, n_places, level + 1)."""
    result = np.zeros((*widths.shape, level + 1))
    result[:, :, level] = widths
    return result
