r"""Coordinates that the data see through fewer predictors than there are coordinates.

Where coefficients have fixed normal priors and rows are fewer than they, the likelihood tells of the space of the rows
of X only; perpendicular to it, in units of the prior, the posterior is the prior. A Gaussian of the coordinates in that
space has the steps of one of all coordinates, in fewer dimensions: the split of Khan et al. [1]_, X X^T in the place of
the covariance of a Gaussian process, for every model whose rows are found.

References
----------
.. [1] M. E. Khan, R. Babanezhad, W. Lin, M. Schmidt and M. Sugiyama (2016). Faster stochastic variational inference
   using proximal-gradient methods with general divergence functions. UAI. https://doi.org/10.48550/arXiv.1511.00146
"""

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy import linalg, sparse

from pymc_ngvi.core.sizes import MOST_NUMBERS
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.rows.linear_map import LinearMap

#: Coordinates from which on it pays, and the part of them that may be left.
_LEAST, _PART = 100, 0.5
#: Part of the largest direction below which one counts as none.
_RANK = 1e-10
#: Points at which a row is looked at, and how near a parabola it has to be there.
_POINTS, _ROUNDING = np.array([0.0, 1.0, -1.0, 2.5, -7.0]), 1e-9


@dataclass(frozen=True, eq=False)
class RowSpace:
    """Coordinates z of a model: those ``kept``, and some in the place of those ``normal``.

    Those with normal priors are mean + sd * (basis z + what is perpendicular), which q has as the prior has it.
    """

    #: Coordinates of theta; shape (n_kept,), (n_normal,).
    kept: NDArray[np.intp]
    normal: NDArray[np.intp]
    #: Of the priors; shape (n_normal,).
    mean: Array
    sd: Array
    #: Orthonormal columns; shape (n_normal, n_basis).
    basis: Array

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return len(self.kept) + int(self.basis.shape[1])

    @property
    def constant(self) -> float:
        """What has to be added to log p where nothing is perpendicular: that integrated out, in units of the priors."""
        n_out = len(self.normal) - self.basis.shape[1]
        return float(np.sum(np.log(self.sd)) + 0.5 * n_out * np.log(2.0 * np.pi))

    def to_theta(self, z: Array) -> Array:
        """Return theta, (n, n_theta), at points, (n, n_dim), with nothing perpendicular."""
        theta = np.empty((len(z), len(self.kept) + len(self.normal)))
        theta[:, self.kept] = z[:, : len(self.kept)]
        theta[:, self.normal] = self.mean + self.sd * (z[:, len(self.kept) :] @ self.basis.T)
        return theta

    def of_theta(self, theta: Array) -> Array:
        """Return the coordinates of one point, (n_dim,)."""
        inside = ((theta[self.normal] - self.mean) / self.sd) @ self.basis
        return np.concatenate([theta[self.kept], inside])

    def sd_of(self, sd: Array) -> Array:
        """Return standard deviations, (n_dim,), where coordinates of theta are independent with those given."""
        inside = np.sqrt((sd[self.normal] / self.sd) ** 2 @ self.basis**2)
        return np.concatenate([sd[self.kept], inside])

    def axes(self) -> Array:
        """Return the directions of z in theta, in units of the priors, (n_theta, n_dim): orthonormal."""
        result = np.zeros((len(self.kept) + len(self.normal), self.n_dim))
        result[self.kept, np.arange(len(self.kept))] = 1.0
        result[self.normal, len(self.kept) :] = self.basis
        return result

    def scale(self) -> Array:
        """Return the units of the priors, (n_theta,); 1 for coordinates that are kept."""
        result = np.ones(len(self.kept) + len(self.normal))
        result[self.normal] = self.sd
        return result


@dataclass(frozen=True, eq=False)
class SeenFromRows:
    """Log p by rows, in the coordinates of a `RowSpace`."""

    space: RowSpace
    #: All rows but the normal priors, with all constants: those of the priors, and of what is perpendicular.
    rows: Expectations


def seen_from_rows(rows: Expectations) -> SeenFromRows | None:
    """Return log p in the space of its rows; None where that has not far fewer dimensions."""
    linear = rows.linear_map.plain
    n_dim = linear.rest.shape[1]
    if n_dim < _LEAST:
        return None
    coordinates, at, mean, sd, value = _fixed_normals(rows)
    used = np.setdiff1d(np.flatnonzero(rows.times_used()), at)
    kept = np.setdiff1d(np.arange(n_dim), coordinates)
    if not len(used) or len(kept) + len(used) > _PART * n_dim or len(used) * n_dim > MOST_NUMBERS:
        return None
    matrix = linear.rows(used)
    q, r, _ = linalg.qr((matrix[:, coordinates] * sd).T, mode="economic", pivoting=True)
    size = np.abs(np.diagonal(r))
    basis = np.ascontiguousarray(q[:, : np.count_nonzero(size > _RANK * size.max(initial=0.0))])
    space = RowSpace(kept, coordinates, mean, sd, basis)
    if space.n_dim > _PART * n_dim:
        return None
    reduced = np.concatenate([matrix[:, kept], (matrix[:, coordinates] * sd) @ basis], axis=1)
    offset = linear.offset[used] + matrix[:, coordinates] @ mean
    nothing = sparse.csr_array((len(used), space.n_dim))
    inner = LinearMap(offset, np.ascontiguousarray(reduced), np.arange(space.n_dim), nothing)
    return SeenFromRows(space, rows.on(inner, used, value + space.constant))


def _fixed_normals(rows: Expectations) -> tuple[NDArray[np.intp], NDArray[np.intp], Array, Array, float]:
    """Return coordinates with fixed normal priors, the predictors that these are, mean, sd, and log p at the means."""
    linear = rows.linear_map.plain
    single, coordinate, factor = _single(linear)
    times = rows.times_used()
    parts = []
    for function in rows.functions:
        if function.k != 1:
            continue
        at = function.index[:, 0]
        inner = np.flatnonzero(single[at] & (times[at] == 1))
        if not len(inner):
            continue
        values = function.values([np.repeat(_POINTS[:, None], len(at), axis=1)], slice(None))[:, inner]
        top, curvature, height, is_normal = _parabola(values)
        here = at[inner[is_normal]]
        sd = 1.0 / (np.sqrt(-curvature[is_normal]) * np.abs(factor[here]))
        mean = (top[is_normal] - linear.offset[here]) / factor[here]
        parts.append((coordinate[here], here, mean, sd, height[is_normal]))
    if not parts:
        return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.intp), np.empty(0), np.empty(0), 0.0
    coordinates, at, mean, sd, height = (np.concatenate(part) for part in zip(*parts, strict=True))
    # A coordinate with two priors keeps both.
    _, place, counts = np.unique(coordinates, return_inverse=True, return_counts=True)
    one = np.flatnonzero(counts[place] == 1)
    one = one[np.argsort(coordinates[one])]
    return coordinates[one], at[one], mean[one], sd[one], float(height[one].sum())


def _parabola(values: Array) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
    """Return top, curvature and height of the parabolas through values, (5, n), and which of them are concave ones."""
    with np.errstate(all="ignore"):
        slope, curvature = 0.5 * (values[1] - values[2]), values[1] + values[2] - 2.0 * values[0]
        expected = values[0] + np.multiply.outer(_POINTS, slope) + 0.5 * np.multiply.outer(_POINTS**2, curvature)
        size = np.abs(values).max(axis=0)
        fits = np.abs(values - expected).max(axis=0) <= _ROUNDING * (1.0 + size)
        top = -slope / curvature
        return top, curvature, values[0] + 0.5 * slope * top, fits & (curvature < -_ROUNDING * (1.0 + size))


def _single(linear: LinearMap) -> tuple[NDArray[np.bool_], NDArray[np.intp], Array]:
    """Return which predictors have one coordinate only, which that is, and its factor."""
    rest = linear.rest
    n_entries = np.diff(rest.indptr) + np.count_nonzero(linear.dense, axis=1)
    single = n_entries == 1
    coordinate, factor = np.zeros(len(single), dtype=np.intp), np.ones(len(single))
    of_rest = np.flatnonzero(single & (np.diff(rest.indptr) == 1))
    coordinate[of_rest], factor[of_rest] = rest.indices[rest.indptr[of_rest]], rest.data[rest.indptr[of_rest]]
    of_dense = np.flatnonzero(single & (np.diff(rest.indptr) == 0))
    if len(of_dense):
        column = np.argmax(linear.dense[of_dense] != 0.0, axis=1)
        coordinate[of_dense], factor[of_dense] = linear.columns[column], linear.dense[of_dense, column]
    return single, coordinate, factor
