"""Central differences of gradients: step sizes that suit the scale, and the entries of an arrow-shaped Hessian."""

from collections.abc import Callable, Iterator

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.reparam.blockwise import Matrices

#: Half of the distance of a difference, in units of the scale: the errors of its terms beyond the first, about its
#: square over six, and of rounding, are then both about 1e-9.
_RELATIVE = 1e-4
#: Limits of a scale.
_LEAST, _MOST = 1e-8, 1e3


class DifferenceSteps:
    """How far to go in each coordinate: a part of its conditional standard deviation, 1 until that is known."""

    #: What files keep: the bits of the next difference depend on it.
    learned = ("scales", "known")

    def __init__(self, n_dim: int) -> None:
        self.scales = np.ones(n_dim)
        self.known = False

    def update(self, coordinates: NDArray[np.intp], curvatures: Array) -> None:
        """Learn from second derivatives at some draws, (n_draws, n_coordinates)."""
        finite = np.isfinite(curvatures)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            squares = np.where(finite, curvatures, 0.0) ** 2
            scales = (squares.sum(axis=0) / finite.sum(axis=0)) ** -0.25
        known = np.isfinite(scales) & finite.any(axis=0)
        self.scales[coordinates] = np.where(known, np.clip(scales, _LEAST, _MOST), self.scales[coordinates])
        self.known = True

    def along(self, directions: Array) -> Array:
        """Return the multiple of each direction, (n_directions, n_dim), to go either way; 1 of one that is 0."""
        longest = np.max(np.abs(directions) / self.scales, axis=1, initial=0.0)
        return np.where(longest > 0.0, _RELATIVE / np.where(longest > 0.0, longest, 1.0), 1.0)


def difference_rows(n_directions: int, n_draws: int, size: int) -> Iterator[tuple[NDArray[np.intp], ...]]:
    """Yield, in batches, the direction, the draw and the sign of each evaluation that central differences take."""
    total = 2 * n_directions * n_draws
    for start in range(0, total, size):
        index = np.arange(start, min(start + size, total))
        both, sign = index // 2, 1 - 2 * (index % 2)
        yield both // n_draws, both % n_draws, sign


def arrow_pattern(structure: ArrowStructure) -> tuple[Pattern, Callable[[Matrices, Array], Array]]:
    """Return the pattern of arrow matrices, and what finds their values.

    Returns
    -------
    pattern : Pattern
    values : callable
        Of the blocks, (n_blocks, k, k) for each size k, and of the columns of the border, (n_border, n_dim). Between
        two coordinates of the border it takes the mean of both derivatives.
    """
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
