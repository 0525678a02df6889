"""Reparametrised variational Bayes for hierarchical models: local coordinates relative to their conditional modes.

And the log density of a model in the space of its rows, which is another reparametrisation.
"""

import functools

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from scipy import sparse

from pymc_ngvi.core import linalg
from pymc_ngvi.core.draws import MAX_SOBOL_DIM, normals_at, sobol_points
from pymc_ngvi.core.sizes import CACHED
from pymc_ngvi.core.types import (
    Array,
    Bools,
    CountedElsewhere,
    Expectation,
    GaussianState,
    Indices,
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
from pymc_ngvi.families.fronts import SparseCholesky
from pymc_ngvi.families.gaussian import LowRankState, Partition
from pymc_ngvi.families.sparse import SparseStructure, symmetric_times
from pymc_ngvi.reading.predictors import logp_of
from pymc_ngvi.rows.expectation import row_slices

__all__ = ["Conditional", "ReparametrisedDensity", "reparametrised"]

# --- matrices of the blocks of local coordinates of many draws, as panels of one sparse factor ---


class Blocks:
    """The local coordinates of a partition, and where panels have the entries of symmetric matrices of its blocks.

    They come against their order: of a precision V^T V with a lower-triangular V, elimination then finds V^T. The
    lower Cholesky factor L of the covariance is the inverse of V.
    """

    def __init__(self, structure: Partition) -> None:
        self.structure, self.border = structure, structure.border
        self.coordinates, sizes = structure.order[: len(structure.locals_)][::-1], structure.sizes[::-1]
        self.width, self.starts = int(sizes.max()), np.cumsum(sizes) - sizes
        self.block_of = np.repeat(np.arange(len(sizes)), sizes)
        self.fronts = SparseStructure.of_blocks(Partition(self.block_of))
        rows, cols = self.rows, self.cols = self.fronts.pattern.rows, self.fronts.pattern.cols
        self.places = self.fronts.places(rows, cols)
        #: Of each local coordinate, its number in its block; and a direction for each of these numbers.
        self.member = np.arange(len(self.block_of)) - self.starts[self.block_of]
        self.directions = np.zeros((self.width, structure.n_dim))
        self.directions[self.member, self.coordinates] = 1.0
        ends = np.append(rows, cols[rows != cols]), np.append(np.arange(len(rows)), np.flatnonzero(rows != cols))
        self._touches = sparse.csr_array((np.ones(len(ends[0])), ends), shape=(len(self.block_of), len(rows)))

    def sums(self, local: Array) -> Array:
        """Return the sum over each block, (n_draws, n_blocks)."""
        return local if self.width == 1 else np.add.reduceat(local, self.starts, axis=1)

    def all_of(self, local: Bools) -> Bools:
        """Tell of which blocks something holds throughout, (n_draws, n_blocks)."""
        return np.logical_and.reduceat(local, self.starts, axis=1)

    def panels(self, values: Array) -> Array:
        """Return matrices with these entries, (n_draws, n_entries)."""
        result = np.zeros((len(values), self.fronts.n_panels))
        result[:, self.places] = values
        return result

    def matrices(self, products: Array) -> Array:
        """Return the symmetric blocks of matrices from their products with `directions`, (n_draws, width, n_dim)."""
        local, member = products[:, :, self.coordinates], self.member
        return self.panels(0.5 * (local[:, member[self.cols], self.rows] + local[:, member[self.rows], self.cols]))

    def columns(self, local: Array) -> Array:
        """Return columns of all blocks, (n_draws, n_local, width), as vectors, (n_draws, width, n_dim)."""
        result = np.zeros((len(local), self.width, self.structure.n_dim))
        result[:, :, self.coordinates] = local.mT
        return result

    def row_sums(self, matrices: Array) -> Array:
        """Return the sums of absolute values in each row, (n_draws, n_local)."""
        return np.asarray((self._touches @ np.abs(matrices[:, self.places]).T).T)

    def where(self, which: Bools, matrices: Array, others: Array | float) -> Array:
        """Return matrices in some blocks, (n_draws, n_blocks), and others elsewhere."""
        return np.where(which[:, self.block_of[self.fronts.columns]], matrices, others)


def factors_of(blocks: Blocks, precisions: Array, *, raised: bool) -> tuple[SparseCholesky, Bools]:
    """Factor precisions; NaN in blocks that are not positive definite, or, if raised, a diagonal that is larger."""
    at = blocks.fronts.diagonal
    with np.errstate(all="ignore"):
        factor, _ = SparseCholesky.each(blocks.fronts, precisions)
        pivots, least = factor.panels[:, at], linalg.ROUNDING * np.abs(precisions[:, at])
        definite = blocks.all_of((pivots > 0.0) & (pivots**2 > least) & (pivots < np.inf))
    if not raised or definite.all():
        return SparseCholesky(blocks.fronts, blocks.where(definite, factor.panels, np.nan)), definite
    larger, sums = np.zeros_like(precisions), blocks.row_sums(precisions)
    # What is not finite is left to the caller, who sees it from the gradient.
    larger[:, at] = np.where(np.isfinite(sums) & (sums > 0.0), sums, 1.0)
    return factors_of(blocks, blocks.where(definite, precisions, larger), raised=False)[0], definite


def times(factor: SparseCholesky, local: Array) -> Array:
    """Return L times vectors, (n_draws, n_local)."""
    return factor.solve(local[:, :, None], transposed=True)[:, :, 0]


def transposed_times(factor: SparseCholesky, local: Array) -> Array:
    """Return L^T times vectors."""
    return factor.solve(local[:, :, None])[:, :, 0]


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
    #: Of minus the Hessian there.
    factor: SparseCholesky
    #: The draws for which all modes were found; shape (n_draws,).
    found: Bools
    #: Times that gradient and Hessian were evaluated, at all draws that were left.
    n_rounds: int

    @property
    def log_det(self) -> Array:
        """The log determinants of L, (n_draws,)."""
        return np.where(self.found, -self.factor.log_det(), np.nan)


@dataclass
class _ModeSearch:
    """Where the search is, for all draws; arrays are modified."""

    local: Array
    slope: Array  # gradient
    precisions: Array  # panels
    step: Array
    fraction: Array  # of the step to be tried, by block
    length: Array  # of the whitened gradient, by block
    found: Bools  # by block


def find_modes(guide: GuideFunctions, blocks: Blocks, theta: Array) -> Modes:
    """Return the modes of the guide in the local coordinates."""
    theta, n_rounds = theta.copy(), 1
    local, shape = theta[:, blocks.coordinates], (len(theta), len(blocks.starts))
    slope, precisions = _evaluate(guide, blocks, theta)
    search = _ModeSearch(
        local, slope, precisions, np.zeros_like(local), np.ones(shape), np.full(shape, np.inf), np.zeros(shape, bool)
    )
    _prepare(blocks, search, np.arange(len(theta)), np.zeros(shape, dtype=bool))
    while n_rounds < MAX_EVALUATIONS:
        active = np.flatnonzero(np.isfinite(search.length).all(axis=1) & ~search.found.all(axis=1))
        if not len(active):
            break
        n_rounds += 1
        _advance(guide, blocks, theta, search, active)
    theta[:, blocks.coordinates] = search.local
    factor, _ = factors_of(blocks, search.precisions, raised=False)
    return Modes(theta, factor, search.found.all(axis=1), n_rounds)


def _evaluate(guide: GuideFunctions, blocks: Blocks, theta: Array) -> tuple[Array, Array]:
    """Return the local gradient, (n_draws, n_local), and the blocks of minus the Hessian."""
    n_draws, width = len(theta), blocks.width
    points = theta if width == 1 else np.repeat(theta, width, axis=0)
    gradient, products = guide.slopes(points, np.tile(blocks.directions, (n_draws, 1)))
    return gradient[::width, blocks.coordinates], blocks.matrices(-products.reshape(n_draws, width, theta.shape[1]))


def _advance(guide: GuideFunctions, blocks: Blocks, theta: Array, search: _ModeSearch, active: Indices) -> None:
    """Try a step in all blocks of the active draws, and keep it in those where it did not go too far."""
    step, fraction = search.step[active], search.fraction[active]
    trial = theta[active]
    trial[:, blocks.coordinates] = moved = search.local[active] + fraction[:, blocks.block_of] * step
    slope, precisions = _evaluate(guide, blocks, trial)
    with np.errstate(all="ignore"):
        before, after = blocks.sums(search.slope[active] * step), blocks.sums(slope * step)
        finite = np.isfinite(after) & blocks.all_of(np.isfinite(blocks.row_sums(precisions)))
        _, definite = factors_of(blocks, precisions, raised=False)
        kept = finite & (after >= np.where(definite, -_OVERSHOOT * before, 0.0))
        shrunk = np.where(finite, before / (before - after), 0.0)
    search.fraction[active] = np.where(kept, 1.0, fraction * np.clip(shrunk, 0.1, 0.5))
    keep = kept[:, blocks.block_of]
    search.local[active] = np.where(keep, moved, search.local[active])
    search.slope[active] = np.where(keep, slope, search.slope[active])
    search.precisions[active] = blocks.where(kept, precisions, search.precisions[active])
    _prepare(blocks, search, active, ~kept)


def _prepare(blocks: Blocks, search: _ModeSearch, active: Indices, refused: Bools) -> None:
    """Find the next step of each block, and whether it needs none."""
    factor, definite = factors_of(blocks, search.precisions[active], raised=True)
    whitened = transposed_times(factor, search.slope[active])
    length = np.sqrt(blocks.sums(whitened**2))
    stuck = refused | (length > 0.5 * search.length[active])
    found = definite & ((length < _TOLERANCE) | ((length < _ROUNDING) & stuck))
    search.found[active] |= found
    search.length[active] = length
    search.step[active] = np.where(search.found[active][:, blocks.block_of], 0.0, times(factor, whitened))


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


#: Half of the distance of a difference, in standard deviations of the draws: the errors of its terms beyond the first,
#: about its square over six, and of rounding, are then both about 1e-9.
_RELATIVE = 1e-4


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

    def __init__(self, guide: GuideFunctions, structure: Partition, centre: Array) -> None:
        self.guide, self.structure, self.n_dim = guide, structure, structure.n_dim
        self.blocks = Blocks(structure)
        #: Where searches begin, (n_dim,).
        self.centre = np.array(centre, dtype=np.float64)

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
            Local coordinates to begin at, in the order of ``blocks.coordinates``. By default the modes at the centre,
            so that equal points have equal modes.

        Returns
        -------
        Modes
        """
        usable = np.isfinite(points[:, self.blocks.border]).all(axis=1)
        theta = np.where(usable[:, None], points, self.centre)
        theta[:, self.blocks.coordinates] = self._centre.theta[:, self.blocks.coordinates] if start is None else start
        modes = find_modes(self.guide, self.blocks, theta)
        return replace(modes, found=modes.found & usable)

    def at(self, modes: Modes, phi: Array) -> Array:
        """Return theta for phi, (n_draws, n_dim), whose modes are known."""
        local = self.blocks.coordinates
        theta = modes.theta.copy()
        theta[:, local] += times(modes.factor, phi[:, local])
        theta[~modes.found] = np.nan
        return theta

    def _forward(self, phi: Array) -> tuple[Array, Array]:
        modes = self.modes(phi)
        return self.at(modes, phi), modes.log_det

    def _inverse(self, theta: Array) -> tuple[Array, Array]:
        modes, local = self.modes(theta), self.blocks.coordinates
        phi = theta.copy()
        apart = theta[:, local] - modes.theta[:, local]
        phi[:, local] = modes.factor.times(apart[:, :, None], transposed=True)[:, :, 0]
        phi[~modes.found] = np.nan
        return phi, modes.log_det

    def _in_chunks(self, points: Array, function: Callable[[Array], tuple[Array, Array]]) -> tuple[Array, Array]:
        points = np.asarray(points, dtype=np.float64)
        result, log_det = np.empty(points.shape), np.empty(len(points))
        for rows in self.batches(len(points)):
            result[rows], log_det[rows] = function(points[rows])
        return result, log_det

    def batches(self, n_draws: int) -> Iterator[slice]:
        """Return the draws that are evaluated together."""
        return row_slices(n_draws, max(1, CACHED // (self.n_dim * self.blocks.width)))

    @functools.cached_property
    def _centre(self) -> Modes:
        """The modes at the centre; the last point that the search came to where it found none."""
        return find_modes(self.guide, self.blocks, self.centre[None])


# --- the log density of a model in the coordinates of a `Conditional`, as a target of a fit ---


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

    def __init__(self, density: LogDensity, transform: Conditional) -> None:
        self.density, self.n_dim = density, density.n_dim
        self.transform = transform
        self.n_gradients = self.n_hessians = 0
        guide, structure, blocks = transform.guide, transform.structure, transform.blocks
        exact = guide.is_exact and guide.density is density
        self._second = guide if exact else GuideFunctions(density, structure, third=False)
        # The entries of the Hessian among its products with the directions of blocks, and its rows at the border.
        self.pattern = structure.pattern
        line = np.full(self.n_dim, -1)
        line[blocks.coordinates], line[blocks.border] = blocks.member, blocks.width + np.arange(len(structure.border))
        rows, cols = self.pattern.rows, self.pattern.cols
        by_row = line[rows] >= blocks.width
        of_col = (line[cols] >= blocks.width) | ~by_row
        self._entries = (np.where(by_row, line[rows], line[cols]), np.where(by_row, cols, rows))
        self._again = (np.where(of_col, line[cols], line[rows]), np.where(of_col, rows, cols))

    # --- evaluation ---

    def logp_grad(self, phi: Array) -> tuple[Array, Array]:
        """Return log p, (n_draws,), and its gradient, (n_draws, n_dim).

        At draws whose modes are not found, log p is -inf and the gradient NaN.
        """
        self.n_gradients += len(phi)
        logp, grad = np.empty(len(phi)), np.empty(phi.shape)
        for rows in self.transform.batches(len(phi)):
            logp[rows], grad[rows] = self._logp_grad(phi[rows], self.transform.modes(phi[rows]))
        return logp, grad

    def _logp_grad(self, phi: Array, modes: Modes) -> tuple[Array, Array]:
        """Evaluate where the modes are known.

        The curvature has the adjoint M = -L S L^T, with S the symmetric part of the lower triangle that the local
        gradient and the log determinant give; the modes have that of b, and the derivative of <M, -f_bb> by them.
        """
        blocks, factor, guide = self.transform.blocks, modes.factor, self.transform.guide
        local, border = blocks.coordinates, blocks.border
        theta = self.transform.at(modes, phi)
        logp, grad = self.density.logp_grad(np.where(modes.found[:, None], theta, self.density.initial_point()))
        with np.errstate(invalid="ignore", over="ignore"):
            b_grad = grad[:, local]
            result = np.empty_like(grad)
            result[:, local] = whitened = transposed_times(factor, b_grad)
            b, rows, cols = phi[:, local], blocks.rows, blocks.cols  # the later coordinate of a pair is the column
            half = blocks.panels(0.5 * (whitened[:, cols] * b[:, rows] + (rows == cols)))
            products = symmetric_times(blocks.fronts, half, factor.solve(self._directions(len(phi))))
            adjoint = factor.solve(products, transposed=True)
            points = np.repeat(modes.theta, blocks.width, axis=0)
            lefts = np.tile(blocks.directions, (len(phi), 1))
            third = guide.third(points, lefts, blocks.columns(adjoint).reshape(len(points), -1))
            third = third.reshape(len(phi), blocks.width, -1).sum(axis=1)
            implicit = np.zeros_like(grad)
            implicit[:, local] = times(factor, transposed_times(factor, b_grad + third[:, local]))
            through = guide.through(modes.theta, implicit)
        result[:, border] = grad[:, border] + third[:, border] + through[:, border]
        result[~modes.found] = np.nan
        return np.where(modes.found, logp + modes.log_det, -np.inf), result

    def _directions(self, n_draws: int) -> Array:
        """Return a direction for each number in a block, (n_draws, n_local, width)."""
        blocks = self.transform.blocks
        directions = blocks.directions[:, blocks.coordinates].T
        return np.broadcast_to(directions, (n_draws, *directions.shape))

    # --- second derivatives ---

    def mean_hessian(self, phi: Array) -> MeanHessian:
        """Return the mean of the Hessian over draws."""
        return Later(self.pattern, lambda: PatternHessian(self.pattern, self.hessian_values(phi)))

    def hessian_values(self, phi: Array) -> Array:
        """Return the mean over draws of the Hessian in the entries of ``pattern``, (n_entries,)."""
        self.n_hessians += len(phi)
        spread = phi[:, self.transform.blocks.border].std(axis=0)
        lengths = _RELATIVE * np.where(np.isfinite(spread) & (spread > 0.0), spread, 1.0)
        total = np.zeros((self.transform.blocks.width + len(lengths), self.n_dim))
        for rows in self.transform.batches(len(phi)):
            modes = self.transform.modes(phi[rows])
            total += np.concatenate(
                [self._local_blocks(phi[rows], modes), self._differences(phi[rows], modes, lengths)]
            )
        return 0.5 * (total[self._entries] + total[self._again]) / len(phi)

    def _local_blocks(self, phi: Array, modes: Modes) -> Array:
        """Return the sum over draws of the blocks of the Hessian, L^T f_bb L, as columns, (width, n_dim)."""
        blocks, factor = self.transform.blocks, modes.factor
        theta = np.repeat(self.transform.at(modes, phi), blocks.width, axis=0)
        _, products = self._second.slopes(theta, np.tile(blocks.directions, (len(phi), 1)))
        with np.errstate(invalid="ignore", over="ignore"):
            matrices = blocks.matrices(products.reshape(len(phi), blocks.width, -1))
            right = factor.solve(self._directions(len(phi)), transposed=True)
            return blocks.columns(factor.solve(symmetric_times(blocks.fronts, matrices, right))).sum(axis=0)

    def _differences(self, phi: Array, modes: Modes, lengths: Array) -> Array:
        """Return the sum over draws of the rows of the Hessian at global coordinates, (n_border, n_dim)."""
        border, n_draws = self.transform.blocks.border, len(phi)
        rows, start = np.zeros((len(border), self.n_dim)), modes.theta[:, self.transform.blocks.coordinates]
        size = 2 * max(1, CACHED // (2 * self.n_dim * self.transform.blocks.width))
        for begin in range(0, 2 * len(border) * n_draws, size):
            index = np.arange(begin, min(begin + size, 2 * len(border) * n_draws))
            which, draw, sign = index // 2 // n_draws, index // 2 % n_draws, 1 - 2 * (index % 2)
            points = phi[draw]
            points[np.arange(len(index)), border[which]] += sign * lengths[which]
            # Not from where searches begin otherwise: both sides of a difference should be at the same mode.
            _, grad = self._logp_grad(points, self.transform.modes(points, start[draw]))
            np.add.at(rows, which, grad * (0.5 * sign / lengths[which])[:, None])
        return rows


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
    if not len(structure.locals_):
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

    def directions(self, rows: Indices) -> Array:
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

    n_uniform = 0

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return self.gaussian.n_dim

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

    def cov_block(self, index: Indices) -> Array:
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
    def _border(self) -> Indices:
        border: Indices = self.transform.structure.border
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
