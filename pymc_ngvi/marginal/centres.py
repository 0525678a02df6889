"""Where quadrature nodes are put: conditional means and Cholesky factors of the local coordinates given the globals.

The factor L of a tree has a row for each coordinate, with entries in the columns of its path only: b = m + L z gives a
coordinate its mean, plus multiples of the standardised coordinates above it, plus one of its own.
"""

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.batch import Batch
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.forest import Forest

#: Standardised variances that a correction of the factor trusts, at least and at most; and means, at most. Beyond, the
#: nodes see one flank, or all of the mass is at one of them: a parabola tells more.
LEAST, _FARTHEST = 0.04, 1.5
_MOST = 1.0 / LEAST


@stored("exact.centres")
@dataclass(frozen=True, eq=False)
class Centres(Batch):
    """Conditional means and Cholesky factors for some draws of the globals."""

    #: shape (n, n_local).
    mean: Array
    #: Row c: entries in the columns of the path of c; the last of them is positive, what is beyond is 0; shape (n,
    #: n_local, n_levels).
    factor: Array

    def __len__(self) -> int:
        """Return the number of draws."""
        return len(self.mean)

    @classmethod
    def empty(cls, n: int, forest: Forest) -> "Centres":
        """Return centres to be put in, with factors of 0; in memory, draws are neighbours."""
        factor = np.zeros((forest.n_levels, forest.n_local, n))
        return cls(np.empty((forest.n_local, n)).T, factor.transpose(2, 1, 0))

    def put(self, rows: slice, places: NDArray[np.intp] | slice, other: "Centres") -> None:
        """Put those of some trees at some draws in their place."""
        self.mean[rows, places] = other.mean
        self.factor[rows, places, : other.factor.shape[2]] = other.factor

    def replaced(self, rows: NDArray[np.integer], new: "Centres", places: NDArray[np.bool_]) -> "Centres":
        """Return a copy with some of those of some draws replaced: where ``places``, (n_rows, n_local), says so."""
        mean, factor = self.mean.copy(), self.factor.copy()
        mean[rows] = np.where(places, new.mean, mean[rows])
        factor[rows] = np.where(places[..., None], new.factor, factor[rows])
        return Centres(mean, factor)

    def of(self, places: NDArray[np.intp] | slice, n_levels: int) -> "Centres":
        """Return those of some trees, with paths of at most ``n_levels`` coordinates."""
        return Centres(self.mean[:, places], self.factor[:, places, :n_levels])

    def at(self, nodes: Array) -> Array:
        """Return m + L z, (n, n_nodes, n_local), for the same nodes z, (n_nodes, n_levels), in all trees.

        In memory, draws are neighbours.
        """
        result = np.repeat(self.mean.T[:, None], len(nodes), axis=1)
        for factor, z in zip(np.moveaxis(self.factor, 2, 0), nodes.T, strict=True):
            result += factor.T[:, None] * z[:, None]
        return result.transpose(2, 1, 0)

    def at_own(self, z: Array, forest: Forest) -> Array:
        """Return m + L z, (n, k, n_local), for standardised coordinates z, (n, k, n_local)."""
        if forest.n_levels == 1:
            return self.mean[:, None] + self.factor[:, None, :, 0] * z
        result = self.mean[:, None] + 0.0 * z
        for level in range(forest.n_levels):
            result += self.factor[:, None, :, level] * z[:, :, forest.path[:, level]]
        return result

    def own(self, forest: Forest) -> Array:
        """Return the entries of the diagonal, (n, n_local)."""
        if forest.n_levels == 1:
            return self.factor[:, :, 0]
        return np.take_along_axis(self.factor, forest.level[None, :, None], axis=2)[:, :, 0]

    def variance(self) -> Array:
        """Return the conditional variances, (n, n_local)."""
        return np.sum(self.factor**2, axis=2)


@dataclass(frozen=True, eq=False)
class Shape:
    """Moments of the standardised coordinates z under the conditional density; m = 0 and L L^T = I are asked for."""

    #: shape (n, n_local).
    mean: Array
    #: Of the path of each coordinate; the identity beyond its end; shape (n, n_local, n_levels, n_levels).
    cov: Array
    #: Third standardised cumulant; shape (n, n_local).
    skew: Array
    #: Where a parabola through the largest value and its neighbours has its top, given the coordinates above, and the
    #: standard deviation of the Gaussian that it is the logarithm of; 0 and 1 where nodes are not far off; shape (n,
    #: n_local).
    peak: Array
    width: Array

    @classmethod
    def empty(cls, n: int, forest: Forest) -> "Shape":
        """Return what is asked for, at ``n`` draws; in memory, draws are neighbours."""
        shape, depth = (forest.n_local, n), forest.n_levels
        cov = np.zeros((depth, depth, *shape))
        cov[range(depth), range(depth)] = 1.0
        mean, skew, peak = (np.zeros(shape).T for _ in range(3))
        return cls(mean, cov.transpose(3, 2, 0, 1), skew, peak, np.ones(shape).T)

    def put(self, rows: slice, places: NDArray[np.intp] | slice, other: "Shape") -> None:
        """Put the moments of some trees at some draws in their place."""
        depth = other.cov.shape[-1]
        self.cov[rows, places, :depth, :depth] = other.cov
        for name in ("mean", "skew", "peak", "width"):
            getattr(self, name)[rows, places] = getattr(other, name)

    def own(self, forest: Forest) -> Array:
        """Return the variance of each coordinate, (n, n_local)."""
        if forest.n_levels == 1:
            return self.cov[..., 0, 0]
        return np.take_along_axis(np.diagonal(self.cov, axis1=2, axis2=3), forest.level[None, :, None], axis=2)[..., 0]

    def variances(self) -> tuple[Array, Array]:
        """Return the least and the largest variance in any direction of the path of each coordinate, (n, n_local)."""
        cov = self.cov
        if cov.shape[-1] == 1:
            return cov[..., 0, 0], cov[..., 0, 0]
        if cov.shape[-1] == 2:
            middle, half = 0.5 * (cov[..., 0, 0] + cov[..., 1, 1]), 0.5 * (cov[..., 0, 0] - cov[..., 1, 1])
            radius: Array = np.sqrt(half**2 + cov[..., 0, 1] ** 2)
            return middle - radius, middle + radius
        values: Array = np.asarray(np.linalg.eigvalsh(np.where(np.isfinite(cov), cov, 0.0)), dtype=np.float64)
        return values[..., 0], values[..., -1]


def far_off(mean: Array, variance: Array) -> NDArray[np.bool_]:
    """Tell where the nodes see one flank, or all of the mass is at one of them."""
    return (variance < LEAST) | (variance > _MOST) | (np.abs(mean) > _FARTHEST)


def corrected_centres(centres: Centres, shape: Shape, forest: Forest) -> Centres:
    """Return m + L E[z] and L chol(cov z) [1]_; where nodes are far off, the top and width of a parabola instead.

    References
    ----------
    .. [1] J. C. Naylor and A. F. M. Smith (1982). Applications of a method for the efficient computation of posterior
       distributions. Journal of the Royal Statistical Society C 31(3). https://doi.org/10.2307/2347995
    """
    own = shape.own(forest)
    far = far_off(shape.mean, own)
    mean = centres.at_own(np.where(far, shape.peak, shape.mean)[:, None], forest)[:, 0]
    if forest.n_levels == 1:
        scale = np.where(far, shape.width, np.sqrt(np.clip(own, LEAST, _MOST)))
        return Centres(mean, centres.factor * scale[:, :, None])
    roots = np.linalg.cholesky(_clipped(shape.cov))
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


def _clipped(cov: Array) -> Array:
    """Return covariances, (..., depth, depth), whose variances in any direction are those that a correction trusts."""
    of_rows = np.abs(cov).sum(axis=-1)
    own = np.diagonal(cov, axis1=-2, axis2=-1)
    # By Gershgorin's theorem nearly all are as they should be, and eigenvalues take longest.
    doubtful = ~((2.0 * own - of_rows >= LEAST) & (of_rows <= _MOST)).all(axis=-1)
    if not doubtful.any():
        return cov
    values, vectors = np.linalg.eigh(cov[doubtful])
    values = np.clip(values, LEAST, _MOST)
    result = cov.copy()
    result[doubtful] = (vectors * values[..., None, :]) @ np.swapaxes(vectors, -1, -2)
    return result


def _diagonal(widths: Array, level: int) -> Array:
    """Return rows that are 0 but for their last entry, (n, n_places, level + 1)."""
    result = np.zeros((*widths.shape, level + 1))
    result[:, :, level] = widths
    return result
