"""Modes of the local coordinates given the global ones: Newton's method on all blocks of all draws at once.

Only the gradient and the Hessian of the whole guide are seen, not its value for one block. A block accepts a step by
the slope along it: where that is still positive, or negative but smaller than before, the step did not go too far. In a
tail, where curvatures have the wrong sign, slopes are small and tell nothing: a step beyond a mode must not end there.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.conditional import GuideFunctions
from pymc_ngvi.families.matrices import stacks
from pymc_ngvi.families.matrices.arrow import ArrowStructure

# --- vectors and matrices of the local coordinates of many draws, block by block ---

#: Part of a diagonal entry that its pivot must exceed, or the matrix counts as singular.
_LEAST_PIVOT = 1e-13
#: Part of the largest eigenvalue that the others are raised to where a matrix is not positive definite.
_LEAST_EIGENVALUE = 1e-3

#: Matrices of all blocks of all draws: for each size k, (n_draws, n_blocks, k, k).
Matrices = list[Array]


class Blocks:
    """The local coordinates of an arrow structure, in the order of its blocks."""

    def __init__(self, structure: ArrowStructure) -> None:
        if not structure.n_local:
            raise ValueError(
                "A reparametrisation needs local coordinates, such as the effects of groups that are independent given "
                "the others; this model has none. Fit it without reparam."
            )
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
            matrix = rows.transpose(0, 2, 1, 3)
            result.append(matrix.copy() if s.size == 1 else 0.5 * (matrix + matrix.swapaxes(2, 3)))
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
            lower += np.tril(lower, -1).swapaxes(2, 3) + np.eye(a.shape[-1])
            result.append(0.5 * lower)
        return result

    def columns(self, matrices: Matrices) -> Array:
        """Return the k-th columns of all blocks as vectors, (n_draws * width, n_dim), 0 in the global coordinates."""
        n_draws = len(matrices[0])
        result = np.zeros((n_draws, self.width, self.structure.n_dim))
        for s, matrix in zip(self._stacks, matrices, strict=True):
            at = self.coordinates[s.where]
            result[:, : s.size, at] = matrix.transpose(0, 3, 1, 2).reshape(n_draws, s.size, -1)
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
        logs = [np.log(np.diagonal(v, axis1=2, axis2=3)).sum(axis=(1, 2)) for v in self.inverses]
        return -np.sum(logs, axis=0)

    def congruence(self, matrices: Matrices, *, transposed: bool = False) -> Matrices:
        """Return L S L^T, or L^T S L, of each block for symmetric matrices."""
        apply = _transposed_solve if transposed else _solve
        return [apply(v, apply(v, m).swapaxes(2, 3)) for v, m in zip(self.inverses, matrices, strict=True)]

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
        good = np.isfinite(factors).all(axis=(2, 3))
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


def _solve(inverses: Array, columns: Array) -> Array:
    if inverses.shape[-1] == 1:
        return columns / inverses
    return _flat(stacks.solve_lower, inverses, columns)


def _transposed_solve(inverses: Array, columns: Array) -> Array:
    if inverses.shape[-1] == 1:
        return columns / inverses
    return _flat(lambda a, b: stacks.solve_upper(stacks.transposed(a), b), inverses, columns)


def _flat(solve: Callable[[Array, Array], Array], inverses: Array, columns: Array) -> Array:
    """Solve with the blocks of all draws as one stack."""
    flat = [np.ascontiguousarray(a).reshape(-1, *a.shape[2:]) for a in (inverses, columns)]
    return solve(*flat).reshape(columns.shape)


# --- modes of the local coordinates given the global ones: Newton's method on all blocks of all draws at once ---

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
        finite = np.isfinite(after) & blocks.joined([np.isfinite(m).all(axis=(2, 3)) for m in precisions])
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
