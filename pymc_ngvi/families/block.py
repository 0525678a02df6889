"""Gaussian with a block-diagonal covariance [1]_ (the q of its algorithm 1c).

Blocks are independent of each other; each has a dense covariance, held by its Cholesky factor.

References
----------
.. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational approximation.
   https://doi.org/10.48550/arXiv.2109.00375
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from pymc_ngvi.core.linalg import relative_terms
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, MeanHessian, Outer
from pymc_ngvi.families import stacks
from pymc_ngvi.families.block_structure import BlockStructure
from pymc_ngvi.families.family import (
    NO_GAUSS_NEWTON,
    NO_OTHER_FACTOR,
    OF_COVARIANCE,
    Family,
    FamilyOptions,
    ModelForm,
    Traits,
)
from pymc_ngvi.families.lower import LOG_2PI, SINGULAR, SUFFIX_SUMS
from pymc_ngvi.families.packed import PackedState, memory_bytes

__all__ = ["BlockFamily", "BlockState", "BlockStructure"]

#: Numbers in the directions that one call of the target gets, about.
_DIRECTIONS = 4_000_000


@stored("gaussian.block")
@dataclass(frozen=True)
class BlockState(PackedState):
    """N(mean, C C^T) with a block-diagonal C; a curvature is packed as C is, its blocks symmetric.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_entries,)
        The blocks of C, lower triangular with a positive diagonal, packed as ``structure`` says.
    structure : BlockStructure
    """

    structure: BlockStructure

    globals_ = None
    exact_metric = False
    factor_sign = 1

    @property
    def n_params(self) -> int:
        """Numbers in the mean and in the lower triangles of the blocks."""
        return self.n_dim + (self.structure.n_entries + self.n_dim) // 2

    def params(self) -> dict[str, Array]:
        """Return the arrays that define the state; the last two are ints."""
        return {
            "mean": self.location,
            "cholesky_blocks": self.factor,
            "block_order": self.structure.order,  # type: ignore[dict-item]
            "block_sizes": self.structure.sizes,  # type: ignore[dict-item]
        }

    @classmethod
    def from_params(cls, params: dict[str, Array]) -> Self:
        """Make a state of its arrays.

        Raises
        ------
        ValueError
            If the blocks are no partition of the coordinates.
        """
        structure = BlockStructure.from_arrays(params["block_order"], params["block_sizes"])
        return cls(params["mean"], params["cholesky_blocks"], structure)

    # --- the distribution ---

    def draws(self, base: Array) -> Array:
        """Map standard normals, (n_draws, n_dim), to draws."""
        result: Array = self.location + self.unwhiten(base)
        return result

    def log_density(self, theta: Array) -> Array:
        """Return log q at the rows of ``theta``."""
        z = self._on_vectors(stacks.solve_lower, theta - self.location)
        result: Array = -0.5 * np.sum(z * z, axis=-1) - self._log_det() - 0.5 * self.n_dim * LOG_2PI
        return result

    def sd(self) -> Array:
        """Return the standard deviations."""
        return self.structure.join([np.sqrt(np.sum(c * c, axis=2)) for c in self._blocks()])

    def cov(self) -> Array:
        """Return the covariance, dense."""
        return self.structure.dense(self._on_blocks(lambda c: c @ stacks.transposed(c), self.factor))

    # --- between the space of theta and the whitened one ---

    def whiten(self, grad: Array) -> Array:
        """Return C^T times each gradient."""
        return self._on_vectors(lambda c, v: stacks.transposed(c) @ v, grad)

    def unwhiten(self, step: Array) -> Array:
        """Return C times a whitened step."""
        return self._on_vectors(np.matmul, step)

    def dewhiten(self, grad: Array) -> Array:
        """Return C^-T times a whitened gradient."""
        return self._on_vectors(lambda c, v: stacks.solve_upper(stacks.transposed(c), v), grad)

    # --- curvatures ---

    def curvature(self, hessian: MeanHessian) -> Array:
        """Return the diagonal blocks of A = -C^T H C, with H the mean Hessian."""
        # Of a direction that lies in one block, only what its product has in that block is kept.
        lines = self._on_blocks(stacks.transposed, self.factor)
        products = np.empty_like(lines)
        structure = self.structure
        step = max(1, _DIRECTIONS // self.n_dim)
        for start in range(0, self.n_dim, step):
            stop = min(start + step, self.n_dim)
            part = slice(*np.searchsorted(structure.lines, (start, stop)))
            at = (structure.lines[part] - start, structure.columns[part])
            directions = np.zeros((stop - start, self.n_dim))
            directions[at] = lines[part]
            products[part] = hessian.products(directions)[at]
        with np.errstate(invalid="ignore"):  # inf times the zeros of the factor: the caller sees what is not finite
            return self._on_blocks(lambda p, c: stacks.symmetrise(-(p @ c)), products, self.factor)

    def flat(self, curvature: Array) -> Array:
        """Return a vector whose inner products are those of the matrices."""
        return curvature

    def unflat(self, vector: Array) -> Array:
        """Return the curvature of a vector: the inverse of `flat`."""
        return vector

    def squared(self, curvature: Array) -> Array:
        """Return A A."""
        return self._on_blocks(lambda a: a @ a, curvature)

    def outer_mean(self, outer: Outer) -> Array:
        """Return the symmetric blocks with the lower triangles of ``outer``."""
        n_outer = len(outer.left)
        blocks = [stacks.mirrored(left @ stacks.transposed(right)) / n_outer for left, right in self._pairs(outer)]
        return self.add_to_diagonal(self.structure.pack(blocks), outer.diagonal)

    # --- steps ---

    def divided(self, matrix: Array, grad: Array) -> tuple[Self, Array] | None:
        """Return the state of covariance C M^-1 C^T, and C M^-1 grad; None where M is not positive definite."""
        uppers = []
        for m in self.structure.unpack(matrix):
            upper = stacks.reverse_cholesky(m, relative_terms(stacks.diagonal(m)))
            if upper is None:
                return None
            uppers.append(upper)
        return self._divided(uppers, grad)

    def divided_by_function(
        self, curvature: Array, function: Callable[[Array], Array], grad: Array
    ) -> tuple[Self, Array] | None:
        """As `divided`, by a positive function of the eigenvalues of ``curvature``.

        None where that is not finite, or where values are so far apart that rounding hides the small ones.
        """
        if not np.isfinite(curvature).all():
            return None
        uppers = []
        for a in self.structure.unpack(curvature):
            eigenvalues, vectors = np.linalg.eigh(a)
            with np.errstate(all="ignore"):
                values = function(eigenvalues)
            if not (np.isfinite(values) & (values > 0.0)).all():
                return None
            upper = stacks.reverse_cholesky_of_product(vectors * np.sqrt(values)[:, None, :])
            if upper is None:
                return None
            uppers.append(upper)
        return self._divided(uppers, grad)

    def half_product(self, error: Array | Outer) -> Array:
        """Return the factor times the lower triangle of I - A with a halved diagonal."""
        if not isinstance(error, Outer):
            return self._on_blocks(lambda c, e: c @ stacks.half_triangle(e), self.factor, error)
        pairs = zip(self._blocks(), self._pairs(error), strict=True)
        blocks = [_half_product_of_outer(c, left, right) for c, (left, right) in pairs]
        return self.structure.pack(blocks) + 0.5 * error.diagonal * self.factor

    def inverse_product(self, error: Array | Outer) -> Array:
        """Return the lower triangle of the factor's inverse transpose times I - A."""
        if not isinstance(error, Outer):
            return self._on_blocks(
                lambda c, e: np.tril(stacks.solve_upper(stacks.transposed(c), e)), self.factor, error
            )
        blocks = []
        for c, (left, right) in zip(self._blocks(), self._pairs(error), strict=True):
            solved = stacks.solve_upper(stacks.transposed(c), left)
            blocks.append(np.tril(solved @ stacks.transposed(right)) / len(error.left))
        result = self.structure.pack(blocks)
        diagonal = self.structure.diagonal
        result[diagonal] += error.diagonal / self.factor[diagonal]
        return result

    def merged(self, other: Self, weight: float) -> Self:
        """Return the Gaussian with the first two moments, block by block, of a mixture with another.

        Raises
        ------
        LinAlgError
            Where the covariance of a block is singular to rounding.
        """
        apart = other.location - self.location
        between = np.sqrt(weight * (1.0 - weight)) * apart
        blocks = []
        for c, d, b in zip(self._blocks(), other._blocks(), self.structure.split(between), strict=True):
            roots = np.concatenate([np.sqrt(1.0 - weight) * c, np.sqrt(weight) * d, b], axis=2)
            factors = stacks.cholesky(roots @ stacks.transposed(roots))
            if factors is None:  # nearly singular: triangularise the roots themselves
                factors = stacks.cholesky_of_product(roots)
            if factors is None:
                raise np.linalg.LinAlgError(SINGULAR)
            blocks.append(factors)
        return replace(self, location=self.location + weight * apart, factor=self.structure.pack(blocks))

    # --- pieces ---

    def _blocks(self) -> list[Array]:
        return self.structure.unpack(self.factor)

    def _pairs(self, outer: Outer) -> list[tuple[Array, Array]]:
        """Return the two sides of outer products as columns, for each size of block."""
        return list(zip(self.structure.split(outer.left), self.structure.split(outer.right), strict=True))

    def _on_blocks(self, operation: Callable[..., Array], *packed: Array) -> Array:
        """Apply an operation on stacks to packed matrices."""
        unpacked = [self.structure.unpack(p) for p in packed]
        return self.structure.pack([operation(*blocks) for blocks in zip(*unpacked, strict=True)])

    def _on_vectors(self, operation: Callable[[Array, Array], Array], vectors: Array) -> Array:
        """Apply an operation on the stacks of the factor and their columns to vectors, (..., n_dim)."""
        parts = zip(self._blocks(), self.structure.split(vectors), strict=True)
        return self.structure.join([operation(c, v) for c, v in parts], vectors.shape[:-1])

    def _divided(self, uppers: list[Array], grad: Array) -> tuple[Self, Array] | None:
        # C' = C U^-T stays lower triangular; C' C'^T = C M^-1 C^T, for M = U U^T.
        factors, displacements = [], []
        for upper, c, g in zip(uppers, self._blocks(), self.structure.split(grad), strict=True):
            factor = np.tril(stacks.transposed(stacks.solve_upper(upper, stacks.transposed(c))))
            factors.append(factor)
            displacements.append(factor @ stacks.solve_upper(upper, g))
        packed = self.structure.pack(factors)
        entries = packed[self.structure.diagonal]
        if not ((entries > 0.0) & np.isfinite(entries)).all():  # beyond what numbers can hold
            return None
        return replace(self, factor=packed), self.structure.join(displacements)


@stored("family.block")
@dataclass(frozen=True)
class BlockFamily(Family):
    """The Gaussians whose covariance has these blocks.

    Parameters
    ----------
    structure : BlockStructure
    """

    structure: BlockStructure

    traits: ClassVar = Traits(
        name="block",
        also_called="blockdiagonal blocks",
        states=(BlockState,),
        goes_with=OF_COVARIANCE,
        refuses=(NO_GAUSS_NEWTON, NO_OTHER_FACTOR),
        options=("blocks",),
        has_all_correlations=False,
    )

    @classmethod
    def of(cls, model: ModelForm, options: FamilyOptions) -> Self:
        """Return the family with the blocks that the options name."""
        return cls(BlockStructure(model.labels(options.blocks)))

    def from_scale(self, location: Array, scale: Array) -> BlockState:
        """Return the state with uncorrelated coordinates of standard deviations ``scale``, (n_dim,)."""
        factor = np.zeros(self.structure.n_entries)
        factor[self.structure.diagonal] = scale
        return BlockState(np.array(location, dtype=np.float64), factor, self.structure)

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak: about 56 packed factors."""
        return memory_bytes(self.structure.n_entries, n_dim)


def _half_product_of_outer(factors: Array, left: Array, right: Array) -> Array:
    """Return factors times the lower triangles of mean outer products with a halved diagonal.

    One outer product takes no more than O(k^2) for a block of size k: sums over columns from j on are suffix sums.
    """
    size, n_outer = left.shape[1:]
    if size <= SUFFIX_SUMS * n_outer:
        product: Array = factors @ stacks.half_triangle(left @ stacks.transposed(right)) / n_outer
        return product
    total: Array = np.zeros_like(factors)
    for b in range(n_outer):
        terms = factors * left[:, None, :, b]
        sums = np.cumsum(terms[:, :, ::-1], axis=2)[:, :, ::-1] - 0.5 * terms
        total += sums * (right[:, None, :, b] / n_outer)
    return total
