"""Gaussian with a block-diagonal covariance [1]_ (the q of its algorithm 1c).

Blocks are independent of each other; each has a dense covariance, held by its Cholesky factor.

References
----------
.. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational approximation.
   https://doi.org/10.48550/arXiv.2109.00375
"""

from dataclasses import dataclass
from typing import ClassVar, Self

from pymc_ngvi.core.stored import stored
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
from pymc_ngvi.families.matrices.blocks import BlockStructure

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
