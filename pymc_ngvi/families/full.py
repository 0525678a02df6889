"""Gaussian with a dense covariance, held by the Cholesky factor of the covariance."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from pymc_ngvi.core.linalg import (
    cholesky,
    cholesky_of_product,
    relative_terms,
    reverse_cholesky,
    reverse_cholesky_of_product,
    solve_lower,
    solve_upper,
    symmetrise,
)
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, MeanHessian
from pymc_ngvi.families.family import ALL_GAUSSIAN, NO_GAUSS_NEWTON, Family, FamilyOptions, ModelForm, Traits
from pymc_ngvi.families.full_precision import FullPrecisionState
from pymc_ngvi.families.lower import LOG_2PI, SINGULAR, LowerState


@stored("gaussian.full")
@dataclass(frozen=True)
class FullState(LowerState):
    """N(mean, C C^T) with a lower-triangular C.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_dim, n_dim)
        C, lower triangular, positive diagonal. The precision is C^-T C^-1; it is never formed.
    """

    factor_sign = 1

    @classmethod
    def from_scale(cls, location: Array, scale: Array) -> Self:
        """Return the state with uncorrelated coordinates of standard deviations ``scale``, (n_dim,)."""
        return cls(np.array(location, dtype=np.float64), np.diag(np.asarray(scale, dtype=np.float64)))

    def params(self) -> dict[str, Array]:
        """Return the arrays that define the state."""
        return {"mean": self.location, "cholesky_factor": self.factor}

    @classmethod
    def from_params(cls, params: dict[str, Array]) -> Self:
        """Make a state of its arrays."""
        return cls(params["mean"], params["cholesky_factor"])

    def draws(self, base: Array) -> Array:
        """Map standard normals, (n_draws, n_dim), to draws."""
        result: Array = self.location + base @ self.factor.T
        return result

    def log_density(self, theta: Array) -> Array:
        """Return log q at the rows of ``theta``."""
        z = solve_lower(self.factor, (theta - self.location).T)
        result: Array = -0.5 * np.sum(z * z, axis=0) - self._log_det() - 0.5 * self.n_dim * LOG_2PI
        return result

    def sd(self) -> Array:
        """Return the standard deviations."""
        result: Array = np.sqrt(np.einsum("ij,ij->i", self.factor, self.factor))
        return result

    def cov(self) -> Array:
        """Return the covariance."""
        result: Array = self.factor @ self.factor.T
        return result

    def entropy(self) -> float:
        """Return -E_q[log q]."""
        return self._log_det() + 0.5 * self.n_dim * (LOG_2PI + 1.0)

    def whiten(self, grad: Array) -> Array:
        """Return C^T times each gradient."""
        result: Array = grad @ self.factor
        return result

    def unwhiten(self, step: Array) -> Array:
        """Return C times a whitened step."""
        result: Array = self.factor @ step
        return result

    def dewhiten(self, grad: Array) -> Array:
        """Return C^-T times a whitened gradient."""
        return solve_lower(self.factor, grad, transpose=True)

    def divergence(self, other: "FullState") -> float:
        """Return KL(self || other), nats; inf beyond what numbers can hold."""
        apart = (self.location - other.location)[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            relative = solve_lower(other.factor, np.concatenate([self.factor, apart], axis=1))
            value = 0.5 * (float(np.sum(relative**2)) - self.n_dim) + other._log_det() - self._log_det()
        return value if np.isfinite(value) else np.inf

    def precision_product(self, vectors: Array) -> Array:
        """Return the precision times each vector, (n_vectors, n_dim)."""
        half = solve_lower(self.factor, np.ascontiguousarray(vectors.T))
        result: Array = solve_lower(self.factor, half, transpose=True).T
        return result

    def whitened_precision(self, other: "FullState") -> Array:
        """Return C^T S C for the precision S of another state."""
        root = solve_lower(other.factor, self.factor)
        return symmetrise(root.T @ root)

    def curvature(self, hessian: MeanHessian) -> Array:
        """Return A = -C^T H C, symmetric, with H the mean Hessian."""
        products = hessian.products(np.ascontiguousarray(self.factor.T))
        with np.errstate(invalid="ignore", over="ignore"):  # a Hessian that is not finite: the update will see
            return symmetrise(-(products @ self.factor))

    def divided(self, matrix: Array, grad: Array) -> tuple[Self, Array] | None:
        """Return the state of covariance C M^-1 C^T, and C M^-1 grad; None where M is not positive definite."""
        upper = reverse_cholesky(matrix, relative_terms(np.diagonal(matrix)))
        return None if upper is None else self._divided(upper, grad)

    def divided_by_function(
        self, curvature: Array, function: Callable[[Array], Array], grad: Array
    ) -> tuple[Self, Array] | None:
        """As `divided`, by a positive function of the eigenvalues of ``curvature``.

        None where that is not finite, or where values are so far apart that rounding hides the small ones.
        """
        if not np.isfinite(curvature).all():
            return None
        eigenvalues, vectors = np.linalg.eigh(curvature)
        with np.errstate(over="ignore", invalid="ignore"):
            values = function(eigenvalues)
        if not (np.isfinite(values) & (values > 0.0)).all():
            return None
        upper = reverse_cholesky_of_product(vectors * np.sqrt(values))
        return None if upper is None else self._divided(upper, grad)

    def merged(self, other: Self, weight: float) -> Self:
        """Return the Gaussian with the first two moments of a mixture of this one and another.

        Raises
        ------
        LinAlgError
            Where the covariance is singular to rounding.
        """
        apart = other.location - self.location
        roots = [np.sqrt(1.0 - weight) * self.factor, np.sqrt(weight) * other.factor]
        cov = roots[0] @ roots[0].T + roots[1] @ roots[1].T + weight * (1.0 - weight) * np.outer(apart, apart)
        factor = cholesky(cov)
        if factor is None:  # nearly singular: triangularise the roots themselves
            stacked = np.column_stack([*roots, np.sqrt(weight * (1.0 - weight)) * apart])
            factor = cholesky_of_product(stacked)
        if factor is None:
            raise np.linalg.LinAlgError(SINGULAR)
        return type(self)(self.location + weight * apart, factor)

    def _divided(self, upper: Array, grad: Array) -> tuple[Self, Array] | None:
        # C' = C U^-T stays lower triangular; C' C'^T = C M^-1 C^T, for M = U U^T.
        factor = np.tril(solve_upper(upper, self.factor.T).T)
        entries = np.diagonal(factor)
        if not ((entries > 0.0) & np.isfinite(entries)).all():  # beyond what numbers can hold
            return None
        return type(self)(self.location, factor), factor @ solve_upper(upper, grad)


@dataclass(frozen=True)
class FullFamily(Family):
    """All Gaussians.

    Parameters
    ----------
    state : type
        By the factor of the covariance, or of the precision.
    """

    state: type[FullState] | type[FullPrecisionState] = FullState

    traits: ClassVar = Traits(
        name="full",
        also_called="fullrank fullrankadvi mvn mvnormal multivariatenormal gaussian normal dense laplace unstructured",
        states=(FullState, FullPrecisionState),
        goes_with=ALL_GAUSSIAN,
        refuses=(NO_GAUSS_NEWTON,),
        factors=("covariance", "precision"),
    )

    @classmethod
    def of(cls, model: ModelForm, options: FamilyOptions) -> Self:
        """Return the family with the factor that the options ask for."""
        return cls(FullPrecisionState if options.factor == "precision" else FullState)

    def from_scale(self, location: Array, scale: Array) -> FullState | FullPrecisionState:
        """Return the state with uncorrelated coordinates of standard deviations ``scale``, (n_dim,)."""
        return self.state.from_scale(location, scale)

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own: about 56 dense matrices."""
        return self.state.memory_bytes(n_dim)
