"""Families: the structure of q. One file and one row each."""

from pymc_ngvi.families.block import BlockFamily, BlockState, BlockStructure
from pymc_ngvi.families.diagonal import DiagonalState
from pymc_ngvi.families.full import FullState
from pymc_ngvi.families.full_precision import FullPrecisionState
from pymc_ngvi.families.mixture import MixtureFamily, MixtureState
from pymc_ngvi.families.sparse import SparseFamily, SparseState
from pymc_ngvi.families.student_t import StudentTState

FAMILIES: dict[str, type] = {
    "full": FullState,
    "diagonal": DiagonalState,
    "block": BlockState,
    "sparse": SparseState,
    "mixture": MixtureState,
    "student_t": StudentTState,
}

__all__ = [
    "FAMILIES",
    "BlockFamily",
    "BlockState",
    "BlockStructure",
    "DiagonalState",
    "FullPrecisionState",
    "FullState",
    "MixtureFamily",
    "MixtureState",
    "SparseFamily",
    "SparseState",
    "StudentTState",
]
