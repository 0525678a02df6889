"""Families: the structure of q. One file and one row each."""

from pymc_ngvi.families.block import BlockFamily, BlockState, BlockStructure
from pymc_ngvi.families.diagonal import DiagonalState
from pymc_ngvi.families.full import FullState
from pymc_ngvi.families.full_precision import FullPrecisionState

FAMILIES: dict[str, type] = {"full": FullState, "diagonal": DiagonalState, "block": BlockState}

__all__ = [
    "FAMILIES",
    "BlockFamily",
    "BlockState",
    "BlockStructure",
    "DiagonalState",
    "FullPrecisionState",
    "FullState",
]
