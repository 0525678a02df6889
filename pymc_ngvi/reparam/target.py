"""The log density of a model in the coordinates of a `Conditional`, as a target of a fit."""

import functools

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sizes import CACHED
from pymc_ngvi.core.target import OfAllData
from pymc_ngvi.core.types import Array, MeanHessian
from pymc_ngvi.density import LogDensity
from pymc_ngvi.density.conditional import GuideFunctions, quadratic_guide
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.reading.factors import logp_of
from pymc_ngvi.reparam.modes import Blocks, Matrices, Modes, find_modes

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


#: Global coordinates up to which the way of the modes with each is found, for better starts.
_MOST_SLOPES = 64
#: Way that it takes.
_DIFFERENCE = 1e-4
#: Conditional standard deviations that a start may be away from the mode at the centre.
_FARTHEST = 4.0


class Conditional:
    """The transform between ``phi`` and ``theta``, both (n_draws, n_dim) with the same layout of coordinates.

    Draws at which no mode is found give NaN.

    Parameters
    ----------
    guide : GuideFunctions
        Derivatives of the guide.
    structure : ArrowStructure
        Blocks of local coordinates, between which the Hessian of the guide has no entry.
    centre : ndarray, shape (n_dim,)
        Where the search for modes begins.

    Raises
    ------
    ValueError
        If there are no local coordinates.

    Examples
    --------
    >>> import numpy as np
    >>> import pymc as pm
    >>> from pymc_ngvi.families.matrices.arrow import ArrowStructure
    >>> from pymc_ngvi.density import LogDensity
    >>> from pymc_ngvi.density.conditional import GuideFunctions
    >>> from pymc_ngvi.reparam import Conditional
    >>> with pm.Model() as model:
    ...     mu = pm.Normal("mu")
    ...     b = pm.Normal("b", mu, 0.5, shape=2)
    >>> density = LogDensity(model)
    >>> structure = ArrowStructure.of([-1, 0, 1])
    >>> transform = Conditional(GuideFunctions(density, structure), structure, density.initial_point())
    >>> theta, log_det = transform.forward(np.array([[1.0, 0.0, 2.0]]))
    >>> theta
    array([[1., 1., 2.]])
    """

    #: What files keep: the bits of the next evaluation depend on it.
    learned = ("centre",)

    def __init__(self, guide: GuideFunctions, structure: ArrowStructure, centre: Array) -> None:
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
        size = max(1, CACHED // (self.n_dim * self.blocks.width))
        points = np.asarray(points, dtype=np.float64)
        if not len(points):
            return points.copy(), np.empty(0)
        parts = [function(points[i : i + size]) for i in range(0, len(points), size)]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

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
        both = np.repeat(self._centre.theta, 2 * len(border), axis=0)
        index = np.arange(len(border))
        both[2 * index, border] += _DIFFERENCE
        both[2 * index + 1, border] -= _DIFFERENCE
        gradient, _ = self.guide.slopes(both, np.zeros_like(both))
        at = np.zeros(len(border), dtype=np.intp)
        mixed = (gradient[::2] - gradient[1::2])[:, self.blocks.coordinates] / (2.0 * _DIFFERENCE)
        slopes = self._centre.scales.rows(at).transposed_times(mixed)
        return slopes if np.isfinite(slopes).all() else None


# --- central differences of gradients: step sizes that suit the scale, and the entries of an arrow-shaped Hessian ---

#: Half of the distance of a difference, in units of the scale: the errors of its terms beyond the first, about its
#: square over six, and of rounding, are then both about 1e-9.
_RELATIVE = 1e-4
#: Limits of a scale.
_LEAST, _MOST = 1e-8, 1e3


def arrow_pattern(structure: ArrowStructure) -> tuple[Pattern, Callable[[Matrices, Array], Array]]:
    """Return the pattern of arrow matrices, and what finds their values."""
    pattern = structure.pattern
    place = np.full(structure.n_dim, -1, dtype=np.intp)
    place[structure.border] = np.arange(structure.n_border)
    below, beside = place[pattern.rows], place[pattern.cols]
    both, inside = (below >= 0) & (beside >= 0), (below < 0) & (beside < 0)
    from_row, from_col = below >= 0, (beside >= 0) & (below < 0)
    local = structure.place

    def values(blocks: Matrices, columns: Array) -> Array:
        result = np.empty(pattern.n_entries)
        result[from_row] = columns[below[from_row], pattern.cols[from_row]]
        result[from_col] = columns[beside[from_col], pattern.rows[from_col]]
        result[both] = 0.5 * (result[both] + columns[beside[both], pattern.rows[both]])
        result[inside] = np.concatenate([b.ravel() for b in blocks])[within]
        return result

    within = structure.in_blocks(local[pattern.rows[inside]], local[pattern.cols[inside]])
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

    Raises
    ------
    ValueError
        If the model reads ``pm.Minibatch`` data.

    Examples
    --------
    >>> import numpy as np
    >>> import pymc as pm
    >>> from pymc_ngvi.families.matrices.arrow import ArrowStructure
    >>> from pymc_ngvi.density import LogDensity
    >>> from pymc_ngvi.density.conditional import GuideFunctions
    >>> from pymc_ngvi.reparam import Conditional, ReparametrisedDensity
    >>> with pm.Model() as model:
    ...     mu = pm.Normal("mu")
    ...     b = pm.Normal("b", mu, 0.5, shape=2)
    >>> density = LogDensity(model)
    >>> structure = ArrowStructure.of([-1, 0, 1])
    >>> transform = Conditional(GuideFunctions(density, structure), structure, density.initial_point())
    >>> target = ReparametrisedDensity(density, transform)
    >>> target.logp_grad(np.array([[1.0, 3.0, 2.0]]))[1]
    array([[-1., -3., -2.]])
    """

    has_hessian = True  # it needs more than second derivatives
    #: What files keep: the bits of the next evaluation depend on it.
    learned = ("transform", "_scales", "_knows_scales", "_usual_evaluations")

    def __init__(self, density: LogDensity, transform: Conditional) -> None:
        if density.has_minibatch:
            raise ValueError(
                "The model reads pm.Minibatch data; a reparametrisation needs conditional modes given all of the data. "
                "Pass the data as they are, or fit without reparam."
            )
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

    def initial_point(self) -> Array:
        """Return phi of the model's initial point, (n_dim,)."""
        return self.transform.inverse(self.density.initial_point()[None])[0][0]

    # --- evaluation ---

    def logp(self, phi: Array) -> Array:
        """Return log p alone, (n_draws,), at phi, (n_draws, n_dim)."""
        theta, log_det = self.transform.forward(phi)
        found = np.isfinite(log_det)
        values = self.density.logp(np.where(found[:, None], theta, self.density.initial_point()))
        return np.where(found, values + log_det, -np.inf)

    def logp_grad(self, phi: Array) -> tuple[Array, Array]:
        """Return log p, (n_draws,), and its gradient, (n_draws, n_dim).

        At draws whose modes are not found, log p is -inf and the gradient NaN.
        """
        self.n_gradients += len(phi)
        logp, grad, n_evaluations = np.empty(len(phi)), np.empty(phi.shape), 0
        for rows in self._batches(len(phi)):
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

    def _batches(self, n_draws: int) -> list[slice]:
        size = max(1, CACHED // (self.n_dim * self.transform.blocks.width))
        return [slice(i, min(i + size, n_draws)) for i in range(0, n_draws, size)]

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
        return _ReparametrisedHessian(self, phi)

    def hessian_values(self, phi: Array) -> Array:
        """Return the mean over draws of the Hessian in the entries of ``pattern``, (n_entries,)."""
        self.n_hessians += len(phi)
        if not self._knows_scales:  # before the first differences that count
            self._learn_scales(self._differences(phi[:1], self.transform.modes(phi[:1]))[1])
        blocks: list[Matrices] = []
        columns: list[Array] = []
        curvatures = []
        for rows in self._batches(len(phi)):
            modes = self.transform.modes(phi[rows])
            blocks.append(self._local_blocks(phi[rows], modes))
            column, curvature = self._differences(phi[rows], modes)
            columns.append(column)
            curvatures.append(curvature)
        self._learn_scales(np.concatenate(curvatures))
        sums = [np.sum(parts, axis=0) / len(phi) for parts in zip(*blocks, strict=True)]
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


@dataclass(frozen=True)
class _ReparametrisedHessian(MeanHessian):
    density: ReparametrisedDensity
    phi: Array

    @property
    def pattern(self) -> Pattern:
        """The blocks of local coordinates, and all entries that have to do with global ones."""
        return self.density.pattern

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        return directions @ self.pattern.symmetric(self.values())

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return self.values()[~self.pattern.off_diagonal]

    def values(self) -> Array:
        """Return the entries of ``pattern``, (n_entries,)."""
        return self.density.hessian_values(self.phi)


# --- from a model and a word to the reparametrised density ---


def reparametrised(density: LogDensity, structure: ArrowStructure, reparam: str) -> ReparametrisedDensity:
    """Return the log density of a model with its local coordinates relative to their conditional modes.

    Parameters
    ----------
    density : LogDensity
    structure : ArrowStructure
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
