"""Local coordinates relative to their conditional mode and curvature, given the global ones [1]_.

``theta = (theta_G, b)`` has global coordinates, the border of an arrow structure, and local ones in blocks. A guide
``f(theta)`` gives the conditional mode ``lam(theta_G) = argmax_b f`` and ``L(theta_G)``, the lower Cholesky factor of
``(-f_bb)^-1`` there. In ``phi = (theta_G, b~)`` with ``b = lam + L b~``, local coordinates are all but independent of
the global ones, and all but standard normal.

References
----------
.. [1] L. S. L. Tan (2021). Use of model reparametrization to improve variational Bayes. Journal of the Royal
   Statistical Society, Series B, 83. https://doi.org/10.1111/rssb.12399
"""

import functools

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pymc_ngvi.core.types import Array
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.reparam.blockwise import Blocks
from pymc_ngvi.reparam.modes import Guide, Modes, find_modes

#: Draws for which modes are sought at once: what is held of each is a few vectors and matrices of all blocks.
_CHUNK_ELEMENTS = 2**17
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
    guide : Guide
        Derivatives of the guide, such as `pymc_ngvi.density.conditional.GuideFunctions`.
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
    learned = ("_given",)

    def __init__(self, guide: Guide, structure: ArrowStructure, centre: Array) -> None:
        self.guide = guide
        self.structure = structure
        self.blocks = Blocks(structure)
        self._given = np.array(centre, dtype=np.float64)

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return self.structure.n_dim

    @property
    def centre(self) -> Array:
        """Where searches begin, (n_dim,)."""
        return self._given

    def recentre(self, point: Array) -> None:
        """Let searches begin at the modes given the global part of ``point``, (n_dim,), where these are found.

        Where the guide has one mode for each block, results stay what they are, to rounding.
        """
        modes = self.modes(np.asarray(point, dtype=np.float64)[None])
        if modes.found[0]:
            self._given = modes.theta[0]
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
        theta = np.where(usable[:, None], points, self._given)
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
        size = max(1, _CHUNK_ELEMENTS // (self.n_dim * self.blocks.width))
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
        return find_modes(self.guide, self.blocks, self._given[None])

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
