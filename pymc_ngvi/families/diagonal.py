"""Gaussian with independent coordinates."""

from dataclasses import dataclass, field
from typing import ClassVar, Self

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.family import (
    GAUSS_NEWTON,
    NO_OTHER_FACTOR,
    OF_COVARIANCE,
    FamilyOptions,
    ModelForm,
    Product,
    Traits,
)
from pymc_ngvi.families.gaussian import GaussianFamily, Unstructured
from pymc_ngvi.families.matrices.diagonal import Diagonal


@stored("gaussian.diagonal", content=("location", "scale"), make="from_scale")
@dataclass(frozen=True, eq=False)
class DiagonalState(Unstructured[Diagonal]):
    """N(mean, diag(scale^2)); a curvature is the diagonal of A, (n_dim,), a factor the scales.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_dim,)
        Standard deviations, positive.
    """

    structure: Diagonal = field(default=Diagonal(), repr=False)

    form = Diagonal
    factor_name = "sd"
    exact_metric = False

    @property
    def scale(self) -> Array:
        """The standard deviations, (n_dim,)."""
        return self.factor


@dataclass(frozen=True)
class DiagonalFamily(GaussianFamily[DiagonalState]):
    """The Gaussians with independent coordinates."""

    state: type[DiagonalState] = DiagonalState
    structure: Diagonal = DiagonalState.structure

    traits: ClassVar = Traits(
        name="diagonal",
        also_called="meanfield mf mfvi advi factorised factorized diag independent",
        states=(DiagonalState,),
        goes_with=(
            *OF_COVARIANCE,
            Product(("natural_pd",), ("stein",), ("ivon",)),
            GAUSS_NEWTON,
            Product(("natural",), ("gauss_newton",), ("ivon",)),
        ),
        refuses=(NO_OTHER_FACTOR,),
        has_all_correlations=False,
    )

    @classmethod
    def of(cls, model: ModelForm, options: FamilyOptions) -> Self:
        """Return the family, the same for every model."""
        return cls()
