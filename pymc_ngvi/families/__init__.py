"""Families: the structure of q. One row each; what goes with them is said in `family`."""

from typing import Literal

from pymc_ngvi.core.types import VariationalState
from pymc_ngvi.families.family import Family, Maker, Traits
from pymc_ngvi.families.gaussian import (
    BlockFamily,
    BlockState,
    BlockStructure,
    DiagonalFamily,
    DiagonalState,
    FullFamily,
    FullPrecisionState,
    FullState,
    Gaussian,
    LowRankState,
)
from pymc_ngvi.families.mixture import COMPONENTS, MixtureFamily, MixtureState, StudentTFamily, StudentTState
from pymc_ngvi.families.sparse import SparseFamily, SparseState, SummedState

FAMILIES: dict[str, type[Family[VariationalState]]] = {
    "full": FullFamily,
    "diagonal": DiagonalFamily,
    "block": BlockFamily,
    "sparse": SparseFamily,
    "mixture": MixtureFamily,
    "student_t": StudentTFamily,
}
#: The same names, and those of components, for signatures.
FamilyName = Literal["auto", "full", "diagonal", "block", "sparse", "mixture", "student_t"]
ComponentsName = Literal["full", "diagonal", "sparse"]
#: What the package takes, or advises, where the user named none: for all correlations, for none, for those that the
#: Hessian of the model shows, and for several modes.
DENSE, INDEPENDENT, STRUCTURED, SEVERAL_MODES = "full", "diagonal", "sparse", "mixture"


def traits_of(name: str) -> Traits:
    """Return the traits of a family; for a name that is not registered, those that most have."""
    return FAMILIES[name].traits if name in FAMILIES else Traits(name=name)


def name_of(state: object) -> str:
    """Return the name of the family of a state; for another class, the class as such a name."""
    for name, family in FAMILIES.items():
        if type(state) in family.traits.states:
            return name
    return type(state).__name__.removesuffix("State").lower()


__all__ = [
    "COMPONENTS",
    "DENSE",
    "FAMILIES",
    "INDEPENDENT",
    "SEVERAL_MODES",
    "STRUCTURED",
    "BlockFamily",
    "BlockState",
    "BlockStructure",
    "ComponentsName",
    "DiagonalFamily",
    "DiagonalState",
    "Family",
    "FamilyName",
    "FullFamily",
    "FullPrecisionState",
    "FullState",
    "Gaussian",
    "LowRankState",
    "Maker",
    "MixtureFamily",
    "MixtureState",
    "SparseFamily",
    "SparseState",
    "StudentTFamily",
    "StudentTState",
    "SummedState",
    "Traits",
    "name_of",
    "traits_of",
]
