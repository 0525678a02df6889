"""Modes of the local coordinates given the global ones: Newton's method on all blocks of all draws at once.

Only the gradient and the Hessian of the whole guide are seen, not its value for one block. A block accepts a step by
the slope along it: where that is still positive, or negative but smaller than before, the step did not go too far. In a
tail, where curvatures have the wrong sign, slopes are small and tell nothing: a step beyond a mode must not end there.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.reparam.blockwise import Blocks, Matrices, Scales, scales_of

#: Evaluations of a draw, after which it counts as lost.
MAX_EVALUATIONS = 100
#: Length of the whitened gradient of a block at which its mode is found; and at which it is if it shrinks no more.
_TOLERANCE, _ROUNDING = 1e-11, 1e-7
#: Part of the slope at the beginning of a step that a slope downwards at its end may have.
_OVERSHOOT = 0.9


class Guide(Protocol):
    """Derivatives of a guide; see `pymc_ngvi.density.conditional.GuideFunctions`."""

    def slopes(self, theta: Array, directions: Array) -> tuple[Array, Array]:
        """Return gradients, and Hessians times local directions, in the local coordinates."""

    def through(self, theta: Array, directions: Array) -> Array:
        """Return Hessians times local directions, in all coordinates."""

    def third(self, theta: Array, left: Array, right: Array) -> Array:
        """Return gradients of ``left^T hess right``."""


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


def find_modes(guide: Guide, blocks: Blocks, theta: Array) -> Modes:
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


def _evaluate(guide: Guide, blocks: Blocks, theta: Array) -> tuple[Array, Matrices]:
    """Return the local gradient, (n_draws, n_local), and the blocks of minus the Hessian."""
    n_draws, width = len(theta), blocks.width
    points = theta if width == 1 else np.repeat(theta, width, axis=0)
    directions = np.tile(blocks.directions, (n_draws, 1))
    gradient, products = guide.slopes(points, directions)
    return gradient[::width, blocks.coordinates], blocks.matrices(-products.reshape(n_draws, width, theta.shape[1]))


def _advance(guide: Guide, blocks: Blocks, theta: Array, search: _ModeSearch, active: NDArray[np.intp]) -> None:
    """Try a step in all blocks of the active draws, and keep it in those where it did not go too far."""
    step, fraction = search.step[active], search.fraction[active]
    trial = theta[active]
    trial[:, blocks.coordinates] = moved = search.local[active] + fraction[:, blocks.block_of] * step
    slope, precisions = _evaluate(guide, blocks, trial)
    with np.errstate(all="ignore"):
        before, after = blocks.sums(search.slope[active] * step), blocks.sums(slope * step)
        finite = np.isfinite(after) & _finite(blocks, precisions)
        _, definite = scales_of(blocks, precisions, raised=False)
        kept = finite & (after >= np.where(definite, -_OVERSHOOT * before, 0.0))
        shrunk = np.where(finite, before / (before - after), 0.0)
    search.fraction[active] = np.where(kept, 1.0, fraction * np.clip(shrunk, 0.1, 0.5))
    keep = kept[:, blocks.block_of]
    search.local[active] = np.where(keep, moved, search.local[active])
    search.slope[active] = np.where(keep, slope, search.slope[active])
    for old, new, part in zip(search.precisions, precisions, blocks.split_blocks(kept), strict=True):
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


def _finite(blocks: Blocks, matrices: Matrices) -> NDArray[np.bool_]:
    return blocks.of_blocks([np.isfinite(m).all(axis=(2, 3)) for m in matrices])
