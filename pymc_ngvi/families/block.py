"""Gaussian with a block-diagonal covariance [1]_ (the q of its algorithm 1c).

Blocks are independent of each other; each has a dense covariance, held by its Cholesky factor.

References
----------
.. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational approximation.
   https://doi.org/10.48550/arXiv.2109.00375
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from numpy.typing import ArrayLike

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, MeanHessian
from pymc_ngvi.families.family import (
    GAUSS_NEWTON,
    NO_IVON,
    NO_OTHER_FACTOR,
    OF_COVARIANCE,
    FamilyOptions,
    ModelForm,
    Traits,
)
from pymc_ngvi.families.gaussian import Gaussian, GaussianFamily
from pymc_ngvi.families.matrices import stacks
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.families.matrices.structure import SUFFIX_SUMS

# --- block-diagonal matrices: arrow matrices without a border ---

#: Numbers in the directions that one call of the target gets, about.
_DIRECTIONS = 4_000_000


@stored("structure.block", content=("order", "sizes"), make="from_arrays")
@dataclass(frozen=True, eq=False)
class BlockStructure(ArrowStructure):
    """A partition of the coordinates into blocks that are independent of each other.

    Parameters
    ----------
    labels : ndarray of int, shape (n_dim,)
        Of each coordinate's block.

    Raises
    ------
    ValueError
        If there are no labels, or not one for each coordinate.
    """

    def __post_init__(self) -> None:
        labels = np.asarray(self.labels)
        if labels.min(initial=0) < 0:  # the border is a block, too
            object.__setattr__(self, "labels", labels - labels.min())
        super().__post_init__()
        if not len(self.labels):
            raise ValueError("There should be labels of blocks for one coordinate at least; got none.")

    @classmethod
    def from_arrays(cls, order: ArrayLike, sizes: ArrayLike) -> Self:
        """Return the structure with these `order` and `sizes`, of any numeric type.

        Raises
        ------
        ValueError
            If ``order`` is no permutation, or ``sizes`` are not positive or don't add up to its length.
        """
        structure = super().from_arrays(order, sizes)
        if np.asarray(sizes).astype(np.intp).sum() != structure.n_dim:
            raise ValueError(f"The sizes of blocks should be positive and add up to {structure.n_dim}; got {sizes!r}.")
        return structure

    def curvature(self, factor: Array, sign: int, hessian: MeanHessian) -> Array:
        """Return the blocks of -C^T H C for the factor C of a covariance, with H the mean Hessian."""
        assert sign > 0
        # Of a direction that lies in one block, only what its product has in that block is kept.
        blocks = self.unpack(factor).blocks
        lines = self._blocks([stacks.transposed(c) for c in blocks])
        products = np.empty_like(lines)
        step = max(1, _DIRECTIONS // self.n_dim)
        for start in range(0, self.n_dim, step):
            stop = min(start + step, self.n_dim)
            part = slice(*np.searchsorted(self.lines, (start, stop)))
            at = (self.lines[part] - start, self.columns[part])
            directions = np.zeros((stop - start, self.n_dim))
            directions[at] = lines[part]
            products[part] = hessian.products(directions)[at]
        with np.errstate(invalid="ignore"):  # inf times the zeros of the factor: the caller sees what is not finite
            pairs = zip(self.unpack(products).blocks, blocks, strict=True)
            return self._blocks([stacks.symmetrise(-(p @ c)) for p, c in pairs])

    def times_lower_half(self, factor: Array, left: Array, right: Array) -> Array:
        """Return the factor times a halved lower triangle: few outer products take O(k^2) for a block of size k."""
        first, second = (self.stacked(self.split(side)[0]) for side in (left, right))
        blocks = []
        for c, a, b in zip(self.unpack(factor).blocks, first, second, strict=True):
            if a.shape[1] > SUFFIX_SUMS * len(left):
                blocks.append(stacks.suffix_products(c, a, b))
            else:
                blocks.append(c @ stacks.half_triangle(a @ stacks.transposed(b)) / len(left))
        return self._blocks(blocks)


# --- gaussian with a block-diagonal covariance [1]_ (the q of its algorithm 1c) ---

__all__ = ["BlockFamily", "BlockState", "BlockStructure"]


@stored("gaussian.block")
@dataclass(frozen=True, eq=False)
class BlockState(Gaussian[BlockStructure]):
    """N(mean, C C^T) with a block-diagonal C; a curvature is packed as C is, its blocks symmetric.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_entries,)
        The blocks of C, lower triangular with a positive diagonal, packed as ``structure`` says.
    structure : BlockStructure
    """

    form = BlockStructure
    factor_name = "cholesky_blocks"
    exact_metric = False


@stored("family.block", content=("structure",))
@dataclass(frozen=True)
class BlockFamily(GaussianFamily[BlockState]):
    """The Gaussians whose covariance has these blocks.

    Parameters
    ----------
    structure : BlockStructure
    """

    structure: BlockStructure
    state: type[BlockState] = BlockState

    traits: ClassVar = Traits(
        name="block",
        also_called="blockdiagonal blocks",
        states=(BlockState,),
        goes_with=(*OF_COVARIANCE, GAUSS_NEWTON),
        refuses=(NO_IVON, NO_OTHER_FACTOR),
        options=("blocks",),
        has_all_correlations=False,
    )

    @classmethod
    def of(cls, model: ModelForm, options: FamilyOptions) -> Self:
        """Return the family with the blocks that the options name."""
        return cls(BlockStructure(model.labels(options.blocks)))
