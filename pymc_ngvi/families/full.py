"""Gaussian with a dense covariance, held by the Cholesky factor of the covariance or of the precision."""

from dataclasses import dataclass, field
from typing import ClassVar, Self

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.family import ALL_GAUSSIAN, GAUSS_NEWTON, NO_IVON, FamilyOptions, ModelForm, Traits
from pymc_ngvi.families.gaussian import GaussianFamily, Unstructured
from pymc_ngvi.families.lowrank import LowRankState
from pymc_ngvi.families.matrices.dense import Dense


@stored("gaussian.full", content=("location", "factor"))
@dataclass(frozen=True, eq=False)
class FullState(Unstructured[Dense]):
    """N(mean, C C^T) with a lower-triangular C.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_dim, n_dim)
        C, lower triangular, positive diagonal. The precision is C^-T C^-1; it is never formed.
    """

    structure: Dense = field(default=Dense(), repr=False)

    form = Dense
    factor_name = "cholesky_factor"
    exact_metric = True

    @property
    def root(self) -> Array:
        """The factor of the covariance."""
        return self.factor


@stored("gaussian.full_precision", content=("location", "factor"))
@dataclass(frozen=True, eq=False)
class FullPrecisionState(Unstructured[Dense]):
    """N(mean, (T T^T)^-1) with a lower-triangular T; the whitener is T^-T.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_dim, n_dim)
        T, lower triangular, positive diagonal.
    """

    structure: Dense = field(default=Dense(), repr=False)

    form = Dense
    factor_sign = -1
    factor_name = "precision_cholesky_factor"
    exact_metric = True


@dataclass(frozen=True)
class FullFamily(GaussianFamily[FullState | FullPrecisionState]):
    """All Gaussians.

    Parameters
    ----------
    state : type
        By the factor of the covariance, or of the precision.
    """

    state: type[FullState] | type[FullPrecisionState] = FullState
    structure: Dense = FullState.structure

    traits: ClassVar = Traits(
        name="full",
        also_called="fullrank fullrankadvi mvn mvnormal multivariatenormal gaussian normal dense laplace unstructured",
        states=(FullState, FullPrecisionState, LowRankState),
        goes_with=(*ALL_GAUSSIAN, GAUSS_NEWTON),
        refuses=(NO_IVON,),
        factors=("covariance", "precision"),
    )

    @classmethod
    def of(cls, model: ModelForm, options: FamilyOptions) -> Self:
        """Return the family with the factor that the options ask for."""
        return cls(FullPrecisionState if options.factor == "precision" else FullState)
