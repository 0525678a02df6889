"""Gaussian with a sparse precision: blocks that are independent given a border of global coordinates [1]_.

The posterior precision of a hierarchical model is an arrow matrix: given the global parameters, groups are independent.
q holds the Cholesky factor of the precision, which has no more entries, with the border last. Crossed effects, chains
and maps are no such matrix; `filled` has the Gaussians for these.

References
----------
.. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational approximation.
   https://doi.org/10.48550/arXiv.2109.00375
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.family import NO_GAUSS_NEWTON, NO_IVON, OF_PRECISION, FamilyOptions, ModelForm, Refusal, Traits
from pymc_ngvi.families.filled import FilledState
from pymc_ngvi.families.gaussian import Gaussian, GaussianFamily
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.families.matrices.packing import Parts
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure
from pymc_ngvi.families.matrices.sparse.summed import SummedStructure
from pymc_ngvi.families.summed import SummedState


@stored("gaussian.sparse")
@dataclass(frozen=True, eq=False)
class SparseState(Gaussian[ArrowStructure]):
    """N(mean, (T T^T)^-1) with a lower-triangular arrow matrix T; the whitener is T^-T.

    A curvature is a symmetric arrow matrix, packed.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_entries,)
        T, with a positive diagonal, packed as ``structure`` says.
    structure : ArrowStructure
    """

    form = ArrowStructure
    factor_sign = -1
    factor_name = "precision_cholesky_blocks"
    exact_metric = True

    @property
    def globals_(self) -> NDArray[np.intp]:
        """Coordinates of the border."""
        return self.structure.border

    def without_globals(self, grad: Array, curvature: Array) -> tuple[Array, Array]:
        """Return whitened gradient and curvature for which a step leaves the coordinates of the border alone."""
        grad, parts = grad.copy(), self.structure.unpack(curvature)
        grad[self.structure.border] = 0.0
        corner = np.eye(self.structure.n_border)
        return grad, self.structure.pack(Parts(parts.blocks, np.zeros_like(parts.border), corner))


#: Updates, estimators and step rules that go with a precision with fill-in.
_WITH_FILL = (("natural",), ("quadrature", "price"), ("linesearch", "adaptive"))
#: And with sums beside it.
_WITH_SUMS = (("natural",), ("quadrature",), ("linesearch",))


def goes_with_fill(*given: str | None) -> bool:
    """Tell whether update, estimator and step rule go with fill-in, as far as they are given."""
    return all(name in (None, *known) for name, known in zip(given, _WITH_FILL, strict=True))


def goes_with_sums(*given: str | None) -> bool:
    """Tell the same of fill-in beside sums over many coordinates."""
    return all(name in (None, *known) for name, known in zip(given, _WITH_SUMS, strict=True))


@stored("family.sparse", content=("structure",))
@dataclass(frozen=True)
class SparseFamily(GaussianFamily[SparseState | FilledState | SummedState]):
    """The Gaussians whose precision is an arrow matrix of one structure, or has a sparse pattern of any shape.

    Parameters
    ----------
    structure : ArrowStructure, FilledStructure or SummedStructure
    """

    structure: ArrowStructure | FilledStructure

    @property
    def state(self) -> type[SparseState] | type[FilledState] | type[SummedState]:  # type: ignore[override]
        """The class of its states."""
        if isinstance(self.structure, SummedStructure):
            return SummedState
        return FilledState if isinstance(self.structure, FilledStructure) else SparseState

    traits: ClassVar = Traits(
        name="sparse",
        also_called="sparseprecision structured hierarchical",
        states=(SparseState, FilledState, SummedState),
        goes_with=OF_PRECISION,
        refuses=(
            NO_IVON,
            NO_GAUSS_NEWTON,
            Refusal(
                "update",
                ("cholesky", "sqrt"),
                "the covariance of a sparse precision is dense, and so is its factor: take update='cholesky_precision'",
            ),
            Refusal(
                "update",
                ("natural_pd",),
                "its correction squares a matrix, which fills it in: take update='natural', whose steps are shortened "
                "instead",
            ),
            Refusal(
                "step",
                ("decay",),
                "decay averages moments, and a mean of covariances has no sparse inverse: take step='constant' or "
                "'proximal'",
            ),
        ),
        factors=("precision",),
        from_structure=True,
    )

    @classmethod
    def of(cls, model: ModelForm, options: FamilyOptions) -> Self:
        """Return the family with the structure of the model's Hessian; raise ValueError if that counts as dense.

        With fill-in where that costs less than an arrow, and the steps are those that it goes with.
        """
        given = (options.update, options.estimator, options.step)
        may_fill = options.step is not None and goes_with_fill(*given)  # components of mixtures have no step rule
        structure = (model.filled(sums=goes_with_sums(*given)) if may_fill else None) or model.structure()
        if structure is None:
            raise ValueError(
                "A sparse precision saves work only where the Hessian of log p has zeros, and this one has too few: it "
                "counts as dense. Take family='full', 'block' or 'diagonal', or such components."
            )
        return cls(structure)
