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
from typing import Any, ClassVar, Never, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.family import NO_GAUSS_NEWTON, NO_IVON, OF_PRECISION, FamilyOptions, ModelForm, Refusal, Traits
from pymc_ngvi.families.gaussian import Gaussian, GaussianFamily
from pymc_ngvi.families.matrices.arrow import ArrowStructure, Parts
from pymc_ngvi.families.matrices.sparse.cholesky import SparseCholesky
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure, SummedCholesky, SummedStructure

# --- gaussians whose precision has a sparse pattern of any shape: chains, maps, crossed effects ---
#
# q holds the Cholesky factor T of the precision S, with what elimination fills in. On matrices of that pattern the
# Fisher metric, :math:`\mathrm{tr}(V E V E)` with V the covariance, is a sum of squares of as many numbers as T has
# [1]_. Those of minus the Hessian are the whitened curvature: it is the identity where that is S.
#
# References
# ----------
# .. [1] M. S. Andersen, J. Dahl and L. Vandenberghe (2013). Logarithmic barriers for sparse matrix cones. Optimization
#    Methods and Software 28(3). https://doi.org/10.1080/10556788.2012.684353


class OfSparsePrecision[S: FilledStructure](Gaussian[S]):
    """A Gaussian whose steps multiply its sparse precision, of which a factor is found anew."""

    @property
    def _cholesky(self) -> Any:
        """The factor of the precision."""
        raise NotImplementedError

    def _scaled(self, matrix: Array) -> Array | None:
        """Return the factor of a whitened precision M, in numbers; None where M is not positive definite."""
        raise NotImplementedError

    def precision_scaled_by(self, matrix: Array, grad: Array) -> tuple[Self, Array] | None:
        """Return the state of a whitened precision M, and C M^-1 C^T C^-T times the gradient.

        None where M is not positive definite.
        """
        factor = self._scaled(matrix) if np.isfinite(matrix).all() else None
        if factor is None:
            return None
        new = type(self)(self.location, factor, self.structure)
        return new, new.unwhiten(new.whiten(self.dewhiten(grad)))

    def divergence(self, other: Self) -> float:
        """Return KL(self || other), nats; inf beyond what numbers can hold."""
        with np.errstate(over="ignore", invalid="ignore"):
            apart = self.structure.squares(other.factor, -1, (self.location - other.location)[None])
            value = 0.5 * (self._cholesky.product_trace(other._cholesky.matrix) + float(apart[0]) - self.n_dim)
            value += other._log_det() - self._log_det()
        return value if np.isfinite(value) else np.inf

    def whitened_precision(self, other: Self) -> Array:
        """Return the precision of another state, whitened."""
        return self._cholesky.whitened(other._cholesky.matrix)

    def _refuse(self, *args: object, **kwargs: object) -> Never:
        self.structure.refuse()

    merged = scaled_columns = times_lower_half = inverse_transpose_times = outer_mean = squared = _refuse


@stored("gaussian.filled")
@dataclass(frozen=True, eq=False)
class FilledState(OfSparsePrecision[FilledStructure]):
    """N(mean, (T T^T)^-1) with a sparse lower-triangular T in an order of elimination; the whitener is T^-T.

    It takes natural steps from Hessians only.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray
        T, with a positive diagonal, held as ``structure`` says.
    structure : FilledStructure
    """

    form = FilledStructure
    factor_sign = -1
    factor_name = "precision_cholesky_panels"
    exact_metric = True

    @property
    def globals_(self) -> NDArray[np.intp]:
        """Coordinates that touch a large part of the others."""
        return self.structure.globals_

    def without_globals(self, grad: Array, curvature: Array) -> tuple[Array, Array]:
        """Return whitened gradient and curvature of a step that leaves global coordinates alone, to first order."""
        grad, curvature = grad.copy(), np.where(self.structure.of_globals, 0.0, curvature)
        grad[self.globals_] = 0.0
        curvature[self.structure.fronts.diagonal[self.globals_]] = 1.0
        return grad, curvature

    def _scaled(self, matrix: Array) -> Array | None:
        unwhitened, fronts = self.structure.unwhitened(self.factor, matrix), self.structure.fronts
        factor = SparseCholesky.of(fronts, unwhitened, self._cholesky.matrix[fronts.diagonal])
        return None if factor is None else self.structure.remember(factor).panels

    @property
    def _cholesky(self) -> SparseCholesky:
        return self.structure.factor(self.factor)


# --- Gaussians whose precision is sparse but for a few sums over many coordinates, as of effects that sum to zero ---
#
# With :math:`t = A \theta` the precision is :math:`P + W A + A^T W^T`, P sparse. Hessians of log densities that are
# sparse in theta and t together are of this form, and so are averages of them: natural steps never leave it. Everything
# comes from the factor of P and from solutions by it, a few for each sum.


@stored("gaussian.summed")
@dataclass(frozen=True, eq=False)
class SummedState(OfSparsePrecision[SummedStructure]):
    """N(mean, (F F^T)^-1); the whitener is F^-T. It takes natural steps from exact expectations only.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray
        F, held as ``structure`` says.
    structure : SummedStructure
    """

    form = SummedStructure
    factor_sign = -1
    factor_name = "precision_cholesky_sums"
    exact_metric = True

    def add_to_diagonal(self, curvature: Array, value: float) -> Array:
        """Return A + value * I."""
        return curvature + value * self._cholesky.unit

    def inner(self, first: Array, second: Array) -> float:
        """Return the inner product of two curvatures, or of two natural gradients."""
        n = len(first) - len(self._cholesky.unit)
        with np.errstate(invalid="ignore", over="ignore"):
            return float(first[:n] @ second[:n]) + self._cholesky.inner(first[n:], second[n:])

    def _scaled(self, matrix: Array) -> Array | None:
        structure = self.structure
        precision = structure.unwhitened_sum(self.factor, matrix)
        terms = self._cholesky.pinned.matrix[structure.fronts.diagonal]
        factor = SummedCholesky.of(structure.fronts, structure.sums, precision, terms)
        return None if factor is None else structure.numbers(factor)

    def _log_det(self) -> float:
        return -self._cholesky.log_det()

    @property
    def _cholesky(self) -> SummedCholesky:
        return self.structure.summed(self.factor)

    curvature_diagonal = OfSparsePrecision._refuse


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
