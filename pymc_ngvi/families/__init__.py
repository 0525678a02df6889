"""Families: the structure of q. One file and one row each."""

from pymc_ngvi.families.diagonal import DiagonalState
from pymc_ngvi.families.full import FullState

FAMILIES: dict[str, type] = {"full": FullState, "diagonal": DiagonalState}

__all__ = ["FAMILIES", "DiagonalState", "FullState"]
