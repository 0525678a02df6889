r"""Gaussians with a sparse precision: of groups that are independent given global coordinates, chains, maps.

q holds the Cholesky factor T of the precision S, with what elimination fills in: nothing, where blocks are beside a
border of global coordinates that comes last. On matrices of that pattern the Fisher metric, :math:`\mathrm{tr}(V E V
E)` with V the covariance, is a sum of squares of as many numbers as T has [1]_. Those of minus the Hessian are the
whitened curvature: it is the identity where that is S.

References
----------
.. [1] M. S. Andersen, J. Dahl and L. Vandenberghe (2013). Logarithmic barriers for sparse matrix cones. Optimization
   Methods and Software 28(3). https://doi.org/10.1080/10556788.2012.684353
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.family import NO_GAUSS_NEWTON, NO_IVON, OF_PRECISION, Refusal, Traits
from pymc_ngvi.families.gaussian import Gaussian, GaussianFamily
from pymc_ngvi.families.matrices.sparse.structure import SparseStructure, SummedStructure


@stored("gaussian.sparse")
@dataclass(frozen=True, eq=False)
class SparseState(Gaussian[SparseStructure]):
    """N(mean, (T T^T)^-1) with a sparse lower-triangular T in an order of elimination; the whitener is T^-T.

    Steps multiply the precision, of which a factor is found anew. With blocks beside a border that all of them touch
    [1]_, there are steps in the factor, too.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray
        T, with a positive diagonal, held as ``structure`` says.
    structure : SparseStructure

    References
    ----------
    .. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational
       approximation. https://doi.org/10.48550/arXiv.2109.00375
    """

    form: ClassVar[Any] = SparseStructure
    factor_sign = -1
    factor_name = "precision_cholesky_panels"
    exact_metric = True

    @property
    def _cholesky(self) -> Any:
        """The factor of the precision."""
        return self.structure.cholesky_of(self.factor)

    def precision_scaled_by(self, matrix: Array, grad: Array) -> tuple[Self, Array] | None:
        """Return the state of a whitened precision M, and C M^-1 C^T C^-T times the gradient.

        None where M is not positive definite.
        """
        if self.structure.is_closed:
            return super().precision_scaled_by(matrix, grad)
        factor = self.structure.scaled(self.factor, matrix) if np.isfinite(matrix).all() else None
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


# --- Gaussians whose precision is sparse but for a few sums over many coordinates, as of effects that sum to zero ---
#
# With :math:`t = A \theta` the precision is :math:`P + W A + A^T W^T`, P sparse. Hessians of log densities that are
# sparse in theta and t together are of this form, and so are averages of them: natural steps never leave it. Everything
# comes from the factor of P and from solutions by it, a few for each sum.


@stored("gaussian.summed")
@dataclass(frozen=True, eq=False)
class SummedState(SparseState):
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
    factor_name = "precision_cholesky_sums"

    def unflat(self, vector: Array) -> Array:
        """Return the curvature of a vector, which it is."""
        return vector

    def add_to_diagonal(self, curvature: Array, value: float) -> Array:
        """Return A + value * I."""
        return curvature + value * self._cholesky.unit

    def inner(self, first: Array, second: Array) -> float:
        """Return the inner product of two curvatures, or of two natural gradients."""
        n = len(first) - len(self._cholesky.unit)
        with np.errstate(invalid="ignore", over="ignore"):
            return float(first[:n] @ second[:n]) + self._cholesky.inner(first[n:], second[n:])

    def _log_det(self) -> float:
        return -self._cholesky.log_det()


#: Updates, estimators and step rules that go with a precision with fill-in.
WITH_FILL = (("natural",), ("quadrature", "price"), ("linesearch", "adaptive"))
#: And with sums beside it.
WITH_SUMS = (("natural",), ("quadrature",), ("linesearch",))


def goes_with(known: Sequence[tuple[str, ...]], *given: str | None) -> bool:
    """Tell whether update, estimator and step rule are some of those that are known, as far as they are given."""
    return all(name in (None, *names) for name, names in zip(given, known, strict=True))


@stored("family.sparse", content=("structure",))
@dataclass(frozen=True)
class SparseFamily(GaussianFamily[SparseState]):
    """The Gaussians whose precision has a sparse pattern of any shape, maybe beside sums over many coordinates.

    Parameters
    ----------
    structure : SparseStructure
    """

    structure: SparseStructure

    @property
    def state(self) -> type[SparseState]:  # type: ignore[override]
        """The class of its states."""
        return SummedState if isinstance(self.structure, SummedStructure) else SparseState

    traits: ClassVar = Traits(
        name="sparse",
        also_called="sparseprecision structured hierarchical",
        states=(SparseState, SummedState),
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
    def of(cls, model: Any, options: Any) -> Self:
        """Return the family with the structure of the model's Hessian; raise ValueError if that counts as dense.

        With fill-in where that costs less than blocks beside a border, and the steps are those that it goes with.
        """
        given = (options.update, options.estimator, options.step)
        may_fill = options.step is not None and goes_with(WITH_FILL, *given)  # components of mixtures have no step rule
        structure = model.structure(fill=may_fill, sums=may_fill and goes_with(WITH_SUMS, *given))
        if structure is None:
            raise ValueError(
                "A sparse precision saves work only where the Hessian of log p has zeros, and this one has too few: it "
                "counts as dense. Take family='full', 'block' or 'diagonal', or such components."
            )
        return cls(structure)
