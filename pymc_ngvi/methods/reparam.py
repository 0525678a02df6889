"""Reparametrised variational Bayes for hierarchical models: local coordinates relative to their conditional modes.

And the log density of a model in the space of its rows, which is another reparametrisation.
"""

import functools

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import linalg
from pymc_ngvi.core.draws import MAX_SOBOL_DIM, normals_at, sobol_points
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sizes import CACHED
from pymc_ngvi.core.types import (
    AnyArray,
    Array,
    CountedElsewhere,
    Expectation,
    GaussianState,
    Later,
    MatrixHessian,
    MeanHessian,
    OfAllData,
    PatternHessian,
    RowRules,
    Spread,
)
from pymc_ngvi.density import LogDensity
from pymc_ngvi.density.conditional import GuideFunctions, quadratic_guide
from pymc_ngvi.density.expectations import SeenFromRows
from pymc_ngvi.families.gaussian import LowRankState, Partition
from pymc_ngvi.reading.affine import logp_of
from pymc_ngvi.rows.expectation import row_slices

__all__ = ["Conditional", "ReparametrisedDensity", "reparametrised"]

# --- vectors and matrices of the local coordinates of many draws, block by block ---

#: Part of a diagonal entry that its pivot must exceed, or the matrix counts as singular.
_LEAST_PIVOT = 1e-13
#: Part of the largest eigenvalue that the others are raised to where a matrix is not positive definite.
_LEAST_EIGENVALUE = 1e-3

#: Matrices of all blocks of all draws: for each size k, (n_draws, n_blocks, k, k).
Matrices = list[Array]


class Blocks:
    """The local coordinates of a partition, in the order of its blocks."""

    def __init__(self, structure: Partition) -> None:
        self.structure = structure
        self.border = structure.border
        self.coordinates = structure.order[: structure.n_local]
        self._stacks = structure.stacks
        sizes = structure.sizes
        self.n_blocks = len(sizes)
        self.starts = np.cumsum(sizes) - sizes
        self.block_of = np.repeat(np.arange(self.n_blocks), sizes)
        self.width = int(sizes.max())
        member = np.arange(structure.n_local) - self.starts[self.block_of]
        self.directions = np.zeros((self.width, structure.n_dim))
        self.directions[member, self.coordinates] = 1.0

    def sums(self, local: Array) -> Array:
        """Return the sum over each block, (n_draws, n_blocks)."""
        return local if self.width == 1 else np.add.reduceat(local, self.starts, axis=1)

    def matrices(self, products: Array) -> Matrices:
        """Return the symmetric blocks of matrices from their products with `directions`, (n_draws, width, n_dim)."""
        local = products[:, :, self.coordinates]
        n_draws, result = len(products), []
        for s in self._stacks:
            rows = local[:, : s.size, s.where].reshape(n_draws, s.size, s.n_blocks, s.size)
            matrix = rows.swapaxes(1, 2)
            result.append(matrix.copy() if s.size == 1 else 0.5 * (matrix + matrix.mT))
        return result

    def by_size(self, local: Array) -> list[Array]:
        """Return vectors of local coordinates, (n_draws, n_local), as (n_draws, n_blocks, k) for each size k."""
        return [local[:, s.where].reshape(len(local), s.n_blocks, s.size) for s in self._stacks]

    def joined(self, parts: list[AnyArray]) -> AnyArray:
        """Return the vectors, or values of blocks, (n_draws, n_blocks), with these parts: the inverse of `by_size`."""
        flat = [p.reshape(len(p), -1) for p in parts]
        return flat[0] if len(flat) == 1 else np.concatenate(flat, axis=1)

    def halves(self, left: Array, right: Array) -> Matrices:
        """Return half of the identity plus the symmetric matrices with the lower triangles of ``left right^T``."""
        result = []
        for a, b in zip(self.by_size(left), self.by_size(right), strict=True):
            lower = np.tril(a[..., :, None] * b[..., None, :])
            lower += np.tril(lower, -1).mT + np.eye(a.shape[-1])
            result.append(0.5 * lower)
        return result

    def columns(self, matrices: Matrices) -> Array:
        """Return the k-th columns of all blocks as vectors, (n_draws * width, n_dim), 0 in the global coordinates."""
        n_draws = len(matrices[0])
        result = np.zeros((n_draws, self.width, self.structure.n_dim))
        for s, matrix in zip(self._stacks, matrices, strict=True):
            at = self.coordinates[s.where]
            result[:, : s.size, at] = np.moveaxis(matrix, -1, 1).reshape(n_draws, s.size, -1)
        return result.reshape(n_draws * self.width, -1)


@dataclass(frozen=True)
class Scales:
    """L, the lower Cholesky factor of a covariance, of all blocks of all draws, held as V = L^-1.

    The precision is V^T V, so that V is found without the covariance.
    """

    blocks: Blocks
    #: V, lower triangular with a positive diagonal; shape (n_draws, n_blocks, k, k) for each size k.
    inverses: Matrices

    def times(self, local: Array) -> Array:
        """Return L times vectors, (n_draws, n_local)."""
        return self._applied(_solve, local)

    def transposed_times(self, local: Array) -> Array:
        """Return L^T times vectors."""
        return self._applied(_transposed_solve, local)

    def covariance_times(self, local: Array) -> Array:
        """Return L L^T times vectors."""
        return self.times(self.transposed_times(local))

    def solve(self, local: Array) -> Array:
        """Return L^-1 times vectors."""
        return self._applied(_product, local)

    def log_det(self) -> Array:
        """Return log det L of each draw, (n_draws,)."""
        logs = [np.log(np.diagonal(v, axis1=-2, axis2=-1)).sum(axis=(1, 2)) for v in self.inverses]
        return -np.sum(logs, axis=0)

    def congruence(self, matrices: Matrices, *, transposed: bool = False) -> Matrices:
        """Return L S L^T, or L^T S L, of each block for symmetric matrices."""
        apply = _transposed_solve if transposed else _solve
        return [apply(v, apply(v, m).mT) for v, m in zip(self.inverses, matrices, strict=True)]

    def rows(self, index: NDArray[np.intp]) -> "Scales":
        """Return those of some draws."""
        return Scales(self.blocks, [v[index] for v in self.inverses])

    def _applied(self, operation: Callable[[Array, Array], Array], local: Array) -> Array:
        parts = zip(self.inverses, self.blocks.by_size(local), strict=True)
        return self.blocks.joined([operation(v, x[..., None])[..., 0] for v, x in parts])


def scales_of(blocks: Blocks, precisions: Matrices, *, raised: bool) -> tuple[Scales, NDArray[np.bool_]]:
    """Factor the inverses of symmetric blocks."""
    inverses, definite = [], []
    for matrices in precisions:
        factors = _inverse_cholesky(matrices)
        good = np.isfinite(factors).all(axis=(-2, -1))
        if raised and not good.all():
            factors[~good] = _inverse_cholesky(_raised(matrices[~good]))
        inverses.append(factors)
        definite.append(good)
    return Scales(blocks, inverses), blocks.joined(definite)


def _inverse_cholesky(matrices: Array) -> Array:
    """Return the lower V with ``matrix = V^T V``, NaN where a matrix is not (numerically) positive definite."""
    flipped = matrices[..., ::-1, ::-1]
    factors = np.zeros(matrices.shape)
    for j in range(matrices.shape[-1]):  # a column of all matrices at a time: LAPACK would stop at the first bad one
        row = factors[..., j, :j]
        pivot = flipped[..., j, j] - np.sum(row**2, axis=-1)
        pivot = np.where(pivot > _LEAST_PIVOT * np.abs(flipped[..., j, j]), pivot, np.nan)
        factors[..., j, j] = np.sqrt(pivot)
        below = flipped[..., j + 1 :, j] - (factors[..., j + 1 :, :j] @ row[..., None])[..., 0]
        factors[..., j + 1 :, j] = below / factors[..., j, j, None]
    return np.ascontiguousarray(factors[..., ::-1, ::-1].swapaxes(-1, -2))


def _raised(matrices: Array) -> Array:
    """Return symmetric matrices with absolute eigenvalues, none much below the largest; the identity where not finite.

    The identity keeps what follows free of NaN; a caller sees what is not finite from the gradient.
    """
    finite = np.isfinite(matrices).all(axis=(1, 2))
    values, vectors = np.linalg.eigh(np.where(finite[:, None, None], matrices, np.eye(matrices.shape[-1])))
    values = np.abs(values)
    largest = values.max(axis=1, keepdims=True)
    values = np.maximum(values, np.where(largest > 0.0, _LEAST_EIGENVALUE * largest, 1.0))
    return (vectors * values[:, None, :]) @ vectors.swapaxes(1, 2)


def _product(inverses: Array, columns: Array) -> Array:
    # Of numbers, the product of stacks of matrices takes ten times as long.
    return inverses * columns if inverses.shape[-1] == 1 else inverses @ columns


def _solve(inverses: Array, columns: Array, *, transpose: bool = False) -> Array:
    """Solve with the blocks of all draws as one stack."""
    if inverses.shape[-1] == 1:
        return columns / inverses
    flat = [np.ascontiguousarray(a).reshape(-1, *a.shape[2:]) for a in (inverses, columns)]
    return linalg.solve_lower(*flat, transpose=transpose).reshape(columns.shape)


_transposed_solve = functools.partial(_solve, transpose=True)


# --- modes of the local coordinates given the global ones: Newton's method on all blocks of all draws at once ---
# Only the gradient and the Hessian of the whole guide are seen, not its value for one block. A block accepts a step by
# the slope along it: where that is still positive, or negative but smaller than before, the step did not go too far.
# In a tail, where curvatures have the wrong sign, slopes are small and tell nothing: a step beyond a mode must not end
# there.

#: Evaluations of a draw, after which it counts as lost.
MAX_EVALUATIONS = 100
#: Length of the whitened gradient of a block at which its mode is found; and at which it is if it shrinks no more.
_TOLERANCE, _ROUNDING = 1e-11, 1e-7
#: Part of the slope at the beginning of a step that a slope downwards at its end may have.
_OVERSHOOT = 0.9


@dataclass(frozen=True)
class Modes:
    """Modes of the local coordinates given the global ones of some draws."""

    #: The global coordinates, with the mode of the local ones; shape (n_draws, n_dim).
    theta: Array
    #: L, with L L^T the inverse of minus the Hessian there.
    scales: Scales
    #: The draws for which all modes were found; shape (n_draws,).
    found: NDArray[np.bool_]
    #: Draws at which gradient and Hessian were evaluated.
    n_evaluations: int


@dataclass
class _ModeSearch:
    """Where the search is, for all draws; arrays are modified."""

    local: Array
    slope: Array  # gradient
    precisions: Matrices
    step: Array
    fraction: Array  # of the step to be tried, by block
    length: Array  # of the whitened gradient, by block
    found: NDArray[np.bool_]  # by block


def find_modes(guide: GuideFunctions, blocks: Blocks, theta: Array) -> Modes:
    """Return the modes of the guide in the local coordinates."""
    theta = theta.copy()
    n_draws = len(theta)
    local = theta[:, blocks.coordinates]
    slope, precisions = _evaluate(guide, blocks, theta)
    shape = (n_draws, blocks.n_blocks)
    search = _ModeSearch(
        local, slope, precisions, np.zeros_like(local), np.ones(shape), np.full(shape, np.inf), np.zeros(shape, bool)
    )
    _prepare(blocks, search, np.arange(n_draws), np.zeros(shape, dtype=bool))
    n_evaluations = n_draws
    for _ in range(MAX_EVALUATIONS):
        usable = np.isfinite(search.length).all(axis=1)
        active = np.flatnonzero(usable & ~search.found.all(axis=1))
        if not len(active):
            break
        n_evaluations += len(active)
        _advance(guide, blocks, theta, search, active)
    found = search.found.all(axis=1)
    theta[:, blocks.coordinates] = search.local
    scales, _ = scales_of(blocks, search.precisions, raised=False)
    return Modes(theta, scales, found, n_evaluations)


def _evaluate(guide: GuideFunctions, blocks: Blocks, theta: Array) -> tuple[Array, Matrices]:
    """Return the local gradient, (n_draws, n_local), and the blocks of minus the Hessian."""
    n_draws, width = len(theta), blocks.width
    points = theta if width == 1 else np.repeat(theta, width, axis=0)
    directions = np.tile(blocks.directions, (n_draws, 1))
    gradient, products = guide.slopes(points, directions)
    return gradient[::width, blocks.coordinates], blocks.matrices(-products.reshape(n_draws, width, theta.shape[1]))


def _advance(
    guide: GuideFunctions, blocks: Blocks, theta: Array, search: _ModeSearch, active: NDArray[np.intp]
) -> None:
    """Try a step in all blocks of the active draws, and keep it in those where it did not go too far."""
    step, fraction = search.step[active], search.fraction[active]
    trial = theta[active]
    trial[:, blocks.coordinates] = moved = search.local[active] + fraction[:, blocks.block_of] * step
    slope, precisions = _evaluate(guide, blocks, trial)
    with np.errstate(all="ignore"):
        before, after = blocks.sums(search.slope[active] * step), blocks.sums(slope * step)
        finite = np.isfinite(after) & blocks.joined([np.isfinite(m).all(axis=(-2, -1)) for m in precisions])
        _, definite = scales_of(blocks, precisions, raised=False)
        kept = finite & (after >= np.where(definite, -_OVERSHOOT * before, 0.0))
        shrunk = np.where(finite, before / (before - after), 0.0)
    search.fraction[active] = np.where(kept, 1.0, fraction * np.clip(shrunk, 0.1, 0.5))
    keep = kept[:, blocks.block_of]
    search.local[active] = np.where(keep, moved, search.local[active])
    search.slope[active] = np.where(keep, slope, search.slope[active])
    of_sizes = np.split(kept, np.cumsum([p.shape[1] for p in precisions])[:-1], axis=1)
    for old, new, part in zip(search.precisions, precisions, of_sizes, strict=True):
        old[active] = np.where(part[..., None, None], new, old[active])
    _prepare(blocks, search, active, ~kept)


def _prepare(blocks: Blocks, search: _ModeSearch, active: NDArray[np.intp], refused: NDArray[np.bool_]) -> None:
    """Find the next step of each block, and whether it needs none."""
    scales, definite = scales_of(blocks, [p[active] for p in search.precisions], raised=True)
    whitened = scales.transposed_times(search.slope[active])
    length = np.sqrt(blocks.sums(whitened**2))
    stuck = refused | (length > 0.5 * search.length[active])
    found = definite & ((length < _TOLERANCE) | ((length < _ROUNDING) & stuck))
    search.found[active] |= found
    search.length[active] = length
    search.step[active] = np.where(search.found[active][:, blocks.block_of], 0.0, scales.times(whitened))


# --- local coordinates relative to their conditional mode and curvature, given the global ones [1]_ ---
#
# ``theta = (theta_G, b)`` has global coordinates, the border of an arrow structure, and local ones in blocks. A guide
# ``f(theta)`` gives the conditional mode ``lam(theta_G) = argmax_b f`` and ``L(theta_G)``, the lower Cholesky factor of
# ``(-f_bb)^-1`` there. In ``phi = (theta_G, b~)`` with ``b = lam + L b~``, local coordinates are all but independent of
# the global ones, and all but standard normal.
#
# References
# ----------
# .. [1] L. S. L. Tan (2021). Use of model reparametrization to improve variational Bayes. Journal of the Royal
#    Statistical Society, Series B, 83. https://doi.org/10.1111/rssb.12399


#: Half of the distance of a difference, in units of the scale: the errors of its terms beyond the first, about its
#: square over six, and of rounding, are then both about 1e-9.
_RELATIVE = 1e-4
#: Global coordinates up to which the way of the modes with each is found, for better starts.
_MOST_SLOPES = 64
#: Conditional standard deviations that a start may be away from the mode at the centre.
_FARTHEST = 4.0


class Conditional:
    """The transform between ``phi`` and ``theta``, both (n_draws, n_dim) with the same layout of coordinates.

    Draws at which no mode is found give NaN.

    Parameters
    ----------
    guide : GuideFunctions
        Derivatives of the guide.
    structure : Partition
        Blocks of local coordinates, one at least, between which the Hessian of the guide has no entry.
    centre : ndarray, shape (n_dim,)
        Where the search for modes begins.

    Examples
    --------
    >>> import numpy as np
    >>> import pymc as pm
    >>> from pymc_ngvi.families.gaussian import Partition
    >>> from pymc_ngvi.density import LogDensity
    >>> from pymc_ngvi.density.conditional import GuideFunctions
    >>> from pymc_ngvi.methods.reparam import Conditional
    >>> with pm.Model() as model:
    ...     mu = pm.Normal("mu")
    ...     b = pm.Normal("b", mu, 0.5, shape=2)
    >>> density = LogDensity(model)
    >>> structure = Partition([-1, 0, 1])
    >>> transform = Conditional(GuideFunctions(density, structure), structure, density.initial_point())
    >>> theta, log_det = transform.forward(np.array([[1.0, 0.0, 2.0]]))
    >>> theta
    array([[1., 1., 2.]])
    """

    #: What files keep: the bits of the next evaluation depend on it.
    learned = ("centre",)

    def __init__(self, guide: GuideFunctions, structure: Partition, centre: Array) -> None:
        self.guide = guide
        self.structure = structure
        self.blocks = Blocks(structure)
        #: Where searches begin, (n_dim,).
        self.centre = np.array(centre, dtype=np.float64)

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return self.structure.n_dim

    def recentre(self, point: Array) -> None:
        """Let searches begin at the modes given the global part of ``point``, (n_dim,), where these are found.

        Where the guide has one mode for each block, results stay what they are, to rounding.
        """
        modes = self.modes(np.asarray(point, dtype=np.float64)[None])
        if modes.found[0]:
            self.centre = modes.theta[0]
            for name in ("_centre", "_slopes"):
                self.__dict__.pop(name, None)

    def forward(self, phi: Array) -> tuple[Array, Array]:
        """Return theta, (n_draws, n_dim), and log det of the derivative, (n_draws,)."""
        return self._in_chunks(phi, self._forward)

    def inverse(self, theta: Array) -> tuple[Array, Array]:
        """Return phi, (n_draws, n_dim), and log det of the derivative of `forward` there, (n_draws,)."""
        return self._in_chunks(theta, self._inverse)

    def modes(self, points: Array, start: Array | None = None) -> Modes:
        """Return the conditional modes given the global coordinates of ``points``.

        Parameters
        ----------
        points : ndarray, shape (n_draws, n_dim)
            Local coordinates have no effect.
        start : ndarray, shape (n_draws, n_local), optional
            Local coordinates to begin at, in the order of ``structure.order``. By default they follow from the
            centre alone, so that equal points have equal modes.

        Returns
        -------
        Modes
        """
        usable = np.isfinite(points[:, self.blocks.border]).all(axis=1)
        theta = np.where(usable[:, None], points, self.centre)
        theta[:, self.blocks.coordinates] = self._starts(theta) if start is None else start
        modes = find_modes(self.guide, self.blocks, theta)
        return replace(modes, found=modes.found & usable)

    def at(self, modes: Modes, phi: Array) -> Array:
        """Return theta for phi, (n_draws, n_dim), whose modes are known."""
        local = self.blocks.coordinates
        theta = modes.theta.copy()
        theta[:, local] += modes.scales.times(phi[:, local])
        theta[~modes.found] = np.nan
        return theta

    def _forward(self, phi: Array) -> tuple[Array, Array]:
        modes = self.modes(phi)
        return self.at(modes, phi), np.where(modes.found, modes.scales.log_det(), np.nan)

    def _inverse(self, theta: Array) -> tuple[Array, Array]:
        modes, local = self.modes(theta), self.blocks.coordinates
        phi = theta.copy()
        phi[:, local] = modes.scales.solve(theta[:, local] - modes.theta[:, local])
        phi[~modes.found] = np.nan
        return phi, np.where(modes.found, modes.scales.log_det(), np.nan)

    def _in_chunks(self, points: Array, function: Callable[[Array], tuple[Array, Array]]) -> tuple[Array, Array]:
        points = np.asarray(points, dtype=np.float64)
        result, log_det = np.empty(points.shape), np.empty(len(points))
        for rows in self.batches(len(points)):
            result[rows], log_det[rows] = function(points[rows])
        return result, log_det

    def batches(self, n_draws: int) -> Iterator[slice]:
        """Return the draws that are evaluated together."""
        return row_slices(n_draws, max(1, CACHED // (self.n_dim * self.blocks.width)))

    def _starts(self, theta: Array) -> Array:
        """Return local coordinates to begin at, (n_draws, n_local): the modes at the centre, moved along their slopes.

        A slope says little about what is far away: it moves nothing farther than a few standard deviations.
        """
        n_draws, centre = len(theta), self._centre
        at_centre = np.repeat(centre.theta[:, self.blocks.coordinates], n_draws, axis=0)
        if self._slopes is None:
            return at_centre
        away = theta[:, self.blocks.border] - centre.theta[:, self.blocks.border]
        whitened = np.clip(away @ self._slopes, -_FARTHEST, _FARTHEST)
        return at_centre + centre.scales.rows(np.zeros(n_draws, dtype=np.intp)).times(whitened)

    @functools.cached_property
    def _centre(self) -> Modes:
        """The modes at the centre; the last point that the search came to where it found none."""
        return find_modes(self.guide, self.blocks, self.centre[None])

    @functools.cached_property
    def _slopes(self) -> Array | None:
        """Derivatives of the modes by the global coordinates at the centre, whitened, (n_border, n_local)."""
        border = self.blocks.border
        if not self._centre.found[0] or not 0 < len(border) <= _MOST_SLOPES:
            return None
        # Differences will do for a start.
        ends = self._centre.theta + _RELATIVE * np.concatenate([eye := np.eye(self.n_dim)[border], -eye])
        high, low = np.split(self.guide.slopes(ends, np.zeros_like(ends))[0][:, self.blocks.coordinates], 2)
        scales = self._centre.scales.rows(np.zeros(len(border), dtype=np.intp))
        slopes = scales.transposed_times((high - low) / (2.0 * _RELATIVE))
        return slopes if np.isfinite(slopes).all() else None


# --- central differences of gradients: step sizes that suit the scale, and the entries of an arrow-shaped Hessian ---

#: Limits of a scale.
_LEAST, _MOST = 1e-8, 1e3


def arrow_pattern(structure: Partition) -> tuple[Pattern, Callable[[Matrices, Array], Array]]:
    """Return the pattern of arrow matrices, and what finds their values."""
    pattern = structure.pattern
    place = np.full(structure.n_dim, -1, dtype=np.intp)
    place[structure.border] = np.arange(structure.n_border)
    below, beside = place[pattern.rows], place[pattern.cols]
    both, inside = (below >= 0) & (beside >= 0), (below < 0) & (beside < 0)
    from_row, from_col = below >= 0, (beside >= 0) & (below < 0)

    def values(blocks: Matrices, columns: Array) -> Array:
        result = np.empty(pattern.n_entries)
        result[from_row] = columns[below[from_row], pattern.cols[from_row]]
        result[from_col] = columns[beside[from_col], pattern.rows[from_col]]
        result[both] = 0.5 * (result[both] + columns[beside[both], pattern.rows[both]])
        result[inside] = np.concatenate([b.ravel() for b in blocks])[within]
        return result

    within = structure.in_blocks(pattern.rows[inside], pattern.cols[inside])
    return pattern, values


# --- the log density of a model in the coordinates of a `Conditional`, as a target of a fit ---

#: Evaluations for the modes of a draw, beyond which a closer centre pays.
_MANY_EVALUATIONS = 4.0
#: Standard deviations of the draws from which on the centre is far from their mean.
_FAR = 1.0


class ReparametrisedDensity(OfAllData):
    """Log density of a model on ``phi``: ``log p(theta(phi)) + log det``.

    Gradients are exact, by adjoints through the conditional modes and their curvature. Second derivatives between
    local coordinates are exact, too; those with global coordinates are central differences of gradients.

    Parameters
    ----------
    density : LogDensity
        That of the model, without minibatches.
    transform : Conditional

    Attributes
    ----------
    n_gradients, n_hessians : int
        Draws of phi at which the gradient, and the Hessian, were evaluated so far; ``density`` counts what that took.

    Examples
    --------
    >>> import numpy as np
    >>> import pymc as pm
    >>> from pymc_ngvi.families.gaussian import Partition
    >>> from pymc_ngvi.density import LogDensity
    >>> from pymc_ngvi.density.conditional import GuideFunctions
    >>> from pymc_ngvi.methods.reparam import Conditional, ReparametrisedDensity
    >>> with pm.Model() as model:
    ...     mu = pm.Normal("mu")
    ...     b = pm.Normal("b", mu, 0.5, shape=2)
    >>> density = LogDensity(model)
    >>> structure = Partition([-1, 0, 1])
    >>> transform = Conditional(GuideFunctions(density, structure), structure, density.initial_point())
    >>> target = ReparametrisedDensity(density, transform)
    >>> target.logp_grad(np.array([[1.0, 3.0, 2.0]]))[1]
    array([[-1., -3., -2.]])
    """

    has_hessian = True  # it needs more than second derivatives
    #: What files keep: the bits of the next evaluation depend on it.
    learned = ("transform", "_scales", "_knows_scales", "_usual_evaluations")

    def __init__(self, density: LogDensity, transform: Conditional) -> None:
        self.density, self.n_dim = density, density.n_dim
        self.transform = transform
        self.n_gradients = self.n_hessians = 0
        self.pattern, self._recover = arrow_pattern(transform.structure)
        # Of the global coordinates: conditional standard deviations, which say how far differences go.
        self._scales, self._knows_scales = np.ones(len(transform.blocks.border)), False
        guide = transform.guide
        exact = guide.is_exact and guide.density is density
        self._second = guide if exact else GuideFunctions(density, transform.structure, order=2)
        self._usual_evaluations = 0.0

    # --- evaluation ---

    def logp_grad(self, phi: Array) -> tuple[Array, Array]:
        """Return log p, (n_draws,), and its gradient, (n_draws, n_dim).

        At draws whose modes are not found, log p is -inf and the gradient NaN.
        """
        self.n_gradients += len(phi)
        logp, grad, n_evaluations = np.empty(len(phi)), np.empty(phi.shape), 0
        for rows in self.transform.batches(len(phi)):
            modes = self.transform.modes(phi[rows])
            logp[rows], grad[rows] = self._logp_grad(phi[rows], modes)
            n_evaluations += modes.n_evaluations
        per_draw = n_evaluations / max(len(phi), 1)
        finite = phi[np.isfinite(phi).all(axis=1)]
        longer = per_draw > self._usual_evaluations + 1.0
        if per_draw > _MANY_EVALUATIONS and len(phi) > 1 and (longer or self._is_far(finite)):
            if len(finite):
                self.transform.recentre(finite.mean(axis=0))
            self._usual_evaluations = np.inf  # the next call says
        elif np.isinf(self._usual_evaluations):
            self._usual_evaluations = per_draw
        return logp, grad

    def _logp_grad(self, phi: Array, modes: Modes) -> tuple[Array, Array]:
        """Evaluate where the modes are known.

        The curvature has the adjoint M = -L S L^T, with S the symmetric part of the lower triangle that the local
        gradient and the log determinant give; the modes have that of b, and the derivative of <M, -f_bb> by them.
        """
        blocks, scales, guide = self.transform.blocks, modes.scales, self.transform.guide
        local, border = blocks.coordinates, blocks.border
        theta = self.transform.at(modes, phi)
        logp, grad = self.density.logp_grad(np.where(modes.found[:, None], theta, self.density.initial_point()))
        with np.errstate(invalid="ignore", over="ignore"):
            b_grad = grad[:, local]
            result = np.empty_like(grad)
            result[:, local] = whitened = scales.transposed_times(b_grad)
            adjoint = scales.congruence(blocks.halves(whitened, phi[:, local]))
            points = np.repeat(modes.theta, blocks.width, axis=0)
            lefts = np.tile(blocks.directions, (len(phi), 1))
            third = guide.third(points, lefts, blocks.columns(adjoint))
            third = third.reshape(len(phi), blocks.width, -1).sum(axis=1)
            implicit = np.zeros_like(grad)
            implicit[:, local] = scales.covariance_times(b_grad + third[:, local])
            through = guide.through(modes.theta, implicit)
        result[:, border] = grad[:, border] + third[:, border] + through[:, border]
        result[~modes.found] = np.nan
        return np.where(modes.found, logp + scales.log_det(), -np.inf), result

    def _is_far(self, phi: Array) -> bool:
        """Tell whether the centre is far from draws: where a step that was too long has led, for instance."""
        border = self.transform.blocks.border
        if len(phi) < 2 or np.isinf(self._usual_evaluations):
            return False
        apart = np.abs(phi[:, border].mean(axis=0) - self.transform.centre[border])
        return bool((apart > _FAR * phi[:, border].std(axis=0)).any())

    # --- second derivatives ---

    def mean_hessian(self, phi: Array) -> MeanHessian:
        """Return the mean of the Hessian over draws."""
        return Later(self.pattern, lambda: PatternHessian(self.pattern, self.hessian_values(phi)))

    def hessian_values(self, phi: Array) -> Array:
        """Return the mean over draws of the Hessian in the entries of ``pattern``, (n_entries,)."""
        self.n_hessians += len(phi)
        if not self._knows_scales:  # before the first differences that count
            self._learn_scales(self._differences(phi[:1], self.transform.modes(phi[:1]))[1])
        parts = []
        for rows in self.transform.batches(len(phi)):
            modes = self.transform.modes(phi[rows])
            parts.append((self._local_blocks(phi[rows], modes), *self._differences(phi[rows], modes)))
        blocks, columns, curvatures = zip(*parts, strict=True)
        self._learn_scales(np.concatenate(curvatures))
        sums = [np.sum(of_size, axis=0) / len(phi) for of_size in zip(*blocks, strict=True)]
        return self._recover(sums, np.sum(columns, axis=0) / len(phi))

    def _learn_scales(self, curvatures: Array) -> None:
        """Learn scales of the global coordinates from second derivatives at some draws, (n_draws, n_border)."""
        finite = np.isfinite(curvatures)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            squares = np.where(finite, curvatures, 0.0) ** 2
            scales = (squares.sum(axis=0) / finite.sum(axis=0)) ** -0.25
        known = np.isfinite(scales) & finite.any(axis=0)
        self._scales = np.where(known, np.clip(scales, _LEAST, _MOST), self._scales)
        self._knows_scales = True

    def _local_blocks(self, phi: Array, modes: Modes) -> Matrices:
        """Return the sum over draws of the blocks of the Hessian, L^T f_bb L: (n_blocks, k, k) for each size k."""
        blocks = self.transform.blocks
        theta = np.repeat(self.transform.at(modes, phi), blocks.width, axis=0)
        _, products = self._second.slopes(theta, np.tile(blocks.directions, (len(phi), 1)))
        with np.errstate(invalid="ignore", over="ignore"):
            matrices = blocks.matrices(products.reshape(len(phi), blocks.width, -1))
            return [m.sum(axis=0) for m in modes.scales.congruence(matrices, transposed=True)]

    def _differences(self, phi: Array, modes: Modes) -> tuple[Array, Array]:
        """Return the sum over draws of the rows of the Hessian at global coordinates, and their curvatures by draw."""
        border, n_draws = self.transform.blocks.border, len(phi)
        lengths = _RELATIVE * self._scales
        rows, curvatures = np.zeros((len(border), self.n_dim)), np.zeros((n_draws, len(border)))
        start = modes.theta[:, self.transform.blocks.coordinates]
        size = 2 * max(1, CACHED // (2 * self.n_dim * self.transform.blocks.width))
        for begin in range(0, 2 * len(border) * n_draws, size):
            index = np.arange(begin, min(begin + size, 2 * len(border) * n_draws))
            which, draw, sign = index // 2 // n_draws, index // 2 % n_draws, 1 - 2 * (index % 2)
            points, at = phi[draw], (np.arange(len(index)), border[which])
            points[at] += sign * lengths[which]
            # Not from where searches begin otherwise: both sides of a difference should be at the same mode.
            _, grad = self._logp_grad(points, self.transform.modes(points, start[draw]))
            terms = grad * (0.5 * sign / lengths[which])[:, None]
            np.add.at(rows, which, terms)
            np.add.at(curvatures, (draw, which), terms[at])
        return rows, curvatures


# --- from a model and a word to the reparametrised density ---


def reparametrised(density: LogDensity, structure: Partition, reparam: str) -> ReparametrisedDensity:
    """Return the log density of a model with its local coordinates relative to their conditional modes.

    Parameters
    ----------
    density : LogDensity
    structure : Partition
        Of the Hessian of log p: which coordinates are local, and their blocks.
    reparam : {"rvb1", "rvb2", "noncentred"}
        The modes are those of a quadratic approximation from the data, of log p itself, or of the prior alone.

    Returns
    -------
    ReparametrisedDensity

    Raises
    ------
    ValueError
        If there are no local coordinates; if the model reads ``pm.Minibatch`` data; for "rvb1", if an observed variable
        is not Poisson, Bernoulli or Normal with its canonical link.
    MissingDerivativeError
        If an operation has no third derivative (a ValueError).
    """
    if density.has_minibatch:
        raise ValueError(
            f"The model reads pm.Minibatch data; reparam={reparam!r} needs conditional modes given all of the data. "
            "Pass the data as they are, or leave reparam out."
        )
    if not structure.n_local:
        raise ValueError(
            f"reparam={reparam!r} standardises local coordinates, such as the effects of groups that are independent "
            "given the others; the Hessian of this model shows none. Leave reparam out."
        )
    guide = None
    if reparam == "rvb1":
        guide = quadratic_guide(density, structure)
    elif reparam == "noncentred":
        guide = logp_of([factor for factor in density.graphs.factors if factor.role != "observed"])
    transform = Conditional(GuideFunctions(density, structure, guide), structure, density.initial_point())
    return ReparametrisedDensity(density, transform)


# --- the log density of a model in the space of its rows, and what a Gaussian there stands for ---


class RowSpaceDensity(OfAllData, CountedElsewhere):
    """Log density of a model in the coordinates of a `RowSpace`; all that is perpendicular integrated out."""

    has_hessian = True

    def __init__(self, density: LogDensity, seen: SeenFromRows) -> None:
        self.density = self.counter = density
        self.space, self._rows = seen.space, seen.rows
        self.n_dim = seen.space.n_dim

    def expected(
        self, q: Spread, rules: RowRules | None = None, *, adapt: bool = False, least: float = -np.inf
    ) -> Expectation:
        """Return the expectation under a Gaussian; see `LogDensity.expected`."""
        if rules is None:
            self.density.by_rows.check(self.space.to_theta(q.location[None])[0])
        self.density.count_expectation()
        inside = np.arange(len(self.space.kept), self.n_dim)
        mean = q.location[inside]
        prior = -0.5 * float(mean @ mean + q.covariances(inside, inside).sum())
        found = self._rows.under(q, rules=rules, adapt=adapt, least=least - prior)
        grad = found.grad.copy()
        grad[inside] -= mean

        def with_prior() -> MatrixHessian:
            hessian = np.array(found.hessian.products(np.eye(self.n_dim)))
            hessian[inside, inside] -= 1.0
            return MatrixHessian(hessian)

        return found._replace(value=found.value + prior, grad=grad, hessian=Later(None, with_prior))

    def directions(self, rows: NDArray[np.intp]) -> Array:
        """Return the slopes of the only predictor of each of some rows; see `RowsTarget`."""
        return self._rows.directions(rows)

    def rows_cover(self, draw: Callable[[], Array]) -> bool:
        """Tell whether rows are all of log p at draws; see `RowsTarget`."""
        return self.density.rows_cover(lambda: self.space.to_theta(draw()))

    def gaussian(self, q: GaussianState) -> LowRankState:
        """Return the Gaussian of theta that a Gaussian of these coordinates stands for."""
        half = q.whiten(np.eye(self.n_dim))
        root = linalg.cholesky(half @ half.T)
        assert root is not None
        inverse = linalg.solve_lower(root, np.eye(self.n_dim))
        core = inverse.T @ inverse - np.eye(self.n_dim)
        mean = self.space.to_theta(q.location[None])[0]
        return LowRankState(mean, 1.0 / self.space.scale(), self.space.axes(), core)


# --- a Gaussian seen through a transform of its coordinates: q of theta where the Gaussian is that of phi ---


#: Draws behind the moments, set by set, and their seed: fixed, so that moments do not change by themselves.
_N_SETS, _SET_SIZE, _SEED = 8, 512, 20_210_401


@dataclass(frozen=True, eq=False)
class PushforwardState:
    """The distribution of ``theta = transform(phi)`` for a Gaussian phi.

    The density is exact. Moments are those of 4,096 quasi-random draws with a fixed seed, adjusted by regression to
    the exact ones of the coordinates that the transform leaves as they are.
    """

    #: Of phi.
    gaussian: GaussianState
    #: An invertible map that leaves the border of its ``structure`` as it is: `forward` and `inverse` return vectors,
    #: and log determinants of the derivative of `forward`.
    transform: Any = field(repr=False)

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return self.gaussian.n_dim

    @property
    def n_uniform(self) -> int:
        """Columns of uniforms that a draw needs."""
        return self.gaussian.n_uniform

    def params(self) -> dict[str, Array]:
        """Return the arrays of the Gaussian."""
        return self.gaussian.params()

    def from_params(self, params: dict[str, Array]) -> Self:
        """Return the image of another Gaussian under the same transform."""
        return type(self)(self.gaussian.from_params(params), self.transform)

    # --- the distribution ---

    def draws(self, base: Array) -> Array:
        """Map standard normals, (n_draws, n_dim), to draws; NaN where the transform fails."""
        return self.transform.forward(self.gaussian.draws(base))[0]

    def log_density(self, theta: Array) -> Array:
        """Return log q at the rows of ``theta``; NaN where the transform fails."""
        phi, log_det = self.transform.inverse(theta)
        return self.gaussian.log_density(phi) - log_det

    def entropy(self) -> float:
        """Return -E_q[log q]: that of the Gaussian plus the mean log determinant over the draws behind moments."""
        return self.gaussian.entropy() + self._moments[2]

    def mean(self) -> Array:
        """Return the mean."""
        return self._moments[0].copy()

    def sd(self) -> Array:
        """Return the standard deviations."""
        return self._moments[1].copy()

    def cov(self) -> Array:
        """Return the covariance, dense."""
        return self.cov_block(np.arange(self.n_dim))

    def cov_block(self, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates, (len(index), len(index)); exact if the transform keeps them."""
        index = np.asarray(index)
        border = self._border
        if np.isin(index, border).all():
            return self.gaussian.cov_block(index)
        columns = [theta[:, np.concatenate([index, border])] for theta, _ in self._sets()]
        draws = np.concatenate(columns)
        draws = draws[np.isfinite(draws).all(axis=1)]
        draws -= draws.mean(axis=0)
        covariance = draws.T @ draws / len(draws)
        n = len(index)
        weights = _regression(covariance[:, n:], covariance[n:, n:])[:n]
        change = self.gaussian.cov_block(border) - covariance[n:, n:]
        return covariance[:n, :n] + linalg.symmetrise(weights @ change @ weights.T)

    # --- pieces ---

    @property
    def _border(self) -> NDArray[np.intp]:
        border: NDArray[np.intp] = self.transform.structure.border
        # More coordinates than draws tell apart: their sample moments are left as they are.
        return border if len(border) <= _SET_SIZE else border[:0]

    def _sets(self) -> Iterator[tuple[Array, Array]]:
        """Yield draws and log determinants, set by set: of one Sobol sequence and its negative."""
        rng = np.random.default_rng(_SEED)
        n_quasi = min(self.n_dim, MAX_SOBOL_DIM)
        for points in np.split(sobol_points(_N_SETS * _SET_SIZE // 2, n_quasi, rng), _N_SETS):
            z = rng.standard_normal((_SET_SIZE // 2, self.n_dim))
            z[:, :n_quasi] = normals_at(points)
            yield self.transform.forward(self.gaussian.draws(np.concatenate([z, -z])))

    @functools.cached_property
    def _moments(self) -> tuple[Array, Array, float]:
        """Mean, standard deviations, and mean log determinant."""
        border = self._border
        at, total, n_draws = self.gaussian.mean(), 0.0, 0
        at = self.transform.forward(at[None])[0][0]
        at = np.where(np.isfinite(at), at, 0.0)
        first, second, mixed = np.zeros(self.n_dim), np.zeros(self.n_dim), np.zeros((self.n_dim, len(border)))
        for theta, log_det in self._sets():
            keep = np.isfinite(theta).all(axis=1)
            away = theta[keep] - at
            first += away.sum(axis=0)
            second += np.sum(away**2, axis=0)
            mixed += away.T @ away[:, border]
            total, n_draws = total + log_det[keep].sum(), n_draws + len(away)
        shift = first / n_draws
        with_border = mixed / n_draws - np.outer(shift, shift[border])
        weights = _regression(with_border, with_border[border])
        change = self.gaussian.cov_block(border) - with_border[border]
        mean = at + shift
        mean += weights @ (self.gaussian.mean() - mean)[border]
        variance = second / n_draws - shift**2 + np.einsum("ij,jk,ik->i", weights, change, weights)
        return mean, np.sqrt(variance), total / n_draws


def _regression(covariances: Array, border: Array) -> Array:
    """Return the weights of a regression on the border, (n, n_border), from covariances with it."""
    factor = linalg.cholesky(linalg.symmetrise(border)) if len(border) else None
    if factor is None:
        return np.zeros_like(covariances)
    half = linalg.solve_lower(factor, np.ascontiguousarray(covariances.T))
    return linalg.solve_lower(factor, half, transpose=True).T
