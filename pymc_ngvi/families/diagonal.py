"""Gaussian with independent coordinates."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from pymc_ngvi.core.linalg import ROUNDING, keeps_its_sign, relative_terms
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, MeanHessian, Outer
from pymc_ngvi.families.family import NO_OTHER_FACTOR, OF_COVARIANCE, Family, FamilyOptions, ModelForm, Product, Traits
from pymc_ngvi.families.gaussian import Gaussian
from pymc_ngvi.families.lower import LOG_2PI


@stored("gaussian.diagonal")
@dataclass(frozen=True)
class DiagonalState(Gaussian):
    """N(mean, diag(scale^2)); a curvature is the diagonal of A, (n_dim,), a factor the scales.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    scale : ndarray, shape (n_dim,)
        Standard deviations, positive.
    """

    scale: Array

    globals_ = None
    exact_metric = False
    factor_sign = 1

    @classmethod
    def from_scale(cls, location: Array, scale: Array) -> Self:
        """Return the state with standard deviations ``scale``, (n_dim,)."""
        return cls(np.array(location, dtype=np.float64), np.array(scale, dtype=np.float64))

    @staticmethod
    def memory_bytes(n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own."""
        return 64 * 8 * n_dim

    @property
    def n_params(self) -> int:
        """Numbers in mean and scales."""
        return 2 * self.n_dim

    @property
    def factor_values(self) -> Array:
        """The scales, (n_dim,)."""
        return self.scale

    def params(self) -> dict[str, Array]:
        """Return the arrays that define the state."""
        return {"mean": self.location, "sd": self.scale}

    @classmethod
    def from_params(cls, params: dict[str, Array]) -> Self:
        """Make a state of its arrays."""
        return cls(params["mean"], params["sd"])

    def draws(self, base: Array) -> Array:
        """Map standard normals, (n_draws, n_dim), to draws."""
        result: Array = self.location + base * self.scale
        return result

    def log_density(self, theta: Array) -> Array:
        """Return log q at the rows of ``theta``."""
        z = (theta - self.location) / self.scale
        result: Array = -0.5 * np.sum(z * z, axis=-1) - np.sum(np.log(np.abs(self.scale))) - 0.5 * self.n_dim * LOG_2PI
        return result

    def sd(self) -> Array:
        """Return a copy of the standard deviations."""
        return self.scale.copy()

    def cov(self) -> Array:
        """Return the covariance."""
        return np.diag(self.scale**2)

    def entropy(self) -> float:
        """Return -E_q[log q]."""
        return float(np.sum(np.log(np.abs(self.scale)))) + 0.5 * self.n_dim * (LOG_2PI + 1.0)

    def whiten(self, grad: Array) -> Array:
        """Return each gradient times the standard deviations."""
        result: Array = grad * self.scale
        return result

    def unwhiten(self, step: Array) -> Array:
        """Return a whitened step times the standard deviations."""
        result: Array = step * self.scale
        return result

    def dewhiten(self, grad: Array) -> Array:
        """Return a whitened gradient divided by the standard deviations."""
        result: Array = grad / self.scale
        return result

    def divergence(self, other: "DiagonalState") -> float:
        """Return KL(self || other), nats; inf beyond what numbers can hold."""
        with np.errstate(over="ignore", invalid="ignore"):
            ratio = self.scale / other.scale
            square = ((self.location - other.location) / other.scale) ** 2
            value = float(np.sum(0.5 * (ratio**2 + square - 1.0) - np.log(ratio)))
        return value if np.isfinite(value) else np.inf

    def precision_product(self, vectors: Array) -> Array:
        """Return the precision times each vector, (n_vectors, n_dim)."""
        result: Array = vectors / self.scale**2
        return result

    def whitened_precision(self, other: "DiagonalState") -> Array:
        """Return the diagonal of C^T S C for the precision S of another state, (n_dim,)."""
        result: Array = (self.scale / other.scale) ** 2
        return result

    def curvature(self, hessian: MeanHessian) -> Array:
        """Return the diagonal of A, (n_dim,), with H the mean Hessian."""
        result: Array = -hessian.diagonal() * self.scale**2
        return result

    def curvature_diagonal(self, curvature: Array) -> Array:
        """Return the diagonal of A."""
        return curvature

    def add_to_diagonal(self, curvature: Array, value: float) -> Array:
        """Return the diagonal of A + value * I."""
        result: Array = curvature + value
        return result

    def flat(self, curvature: Array) -> Array:
        """Return a vector whose inner products are those of the matrices."""
        return curvature

    def unflat(self, vector: Array) -> Array:
        """Return the curvature of a vector: the inverse of `flat`."""
        return vector

    def squared(self, curvature: Array) -> Array:
        """Return the diagonal squared."""
        result: Array = curvature * curvature
        return result

    def outer_mean(self, outer: Outer) -> Array:
        """Return the diagonal of the mean of outer products."""
        result: Array = np.einsum("bi,bi->i", outer.left, outer.right) / len(outer.left) + outer.diagonal
        return result

    def outer_diagonal(self, outer: Outer) -> Array:
        """Return the diagonal of `outer_mean`, which is all of it."""
        return self.outer_mean(outer)

    def divided(self, matrix: Array, grad: Array) -> tuple[Self, Array] | None:
        """Return the state of variances scale^2 / matrix, and scale grad / matrix; None where not positive."""
        if not np.isfinite(matrix).all() or np.any(matrix <= ROUNDING * relative_terms(matrix)):
            return None
        scale = self.scale / np.sqrt(matrix)
        if not ((scale > 0.0) & np.isfinite(scale)).all():  # beyond what numbers can hold
            return None
        return type(self)(self.location, scale), self.scale * grad / matrix

    def divided_by_function(
        self, curvature: Array, function: Callable[[Array], Array], grad: Array
    ) -> tuple[Self, Array] | None:
        """As `divided`, by a positive function of the curvature; None where not finite."""
        if not np.isfinite(curvature).all():
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            return self.divided(function(curvature), grad)

    def half_product(self, error: Array | Outer) -> Array:
        """Return the scales times half of I - A."""
        diagonal = self.outer_mean(error) if isinstance(error, Outer) else error
        result: Array = 0.5 * self.scale * diagonal
        return result

    def inverse_product(self, error: Array | Outer) -> Array:
        """Return I - A divided by the scales."""
        diagonal = self.outer_mean(error) if isinstance(error, Outer) else error
        result: Array = diagonal / self.scale
        return result

    def scaled_columns(self, scale: Array) -> Array:
        """Return the scales multiplied."""
        result: Array = self.scale * scale
        return result

    def plus(self, location_step: Array, factor_step: Array, *, signed: bool = False) -> Self | None:
        """Add to mean and scales; None where a scale would not stay positive (if signed: not 0)."""
        location, scale = self.location + location_step, self.scale + factor_step
        if not keeps_its_sign(self.scale, factor_step, signed=signed):
            return None
        if not (np.isfinite(scale).all() and np.isfinite(location).all()):
            return None
        return type(self)(location, scale)

    def unsigned(self) -> Self:
        """Return the same Gaussian with positive scales."""
        return self if (self.scale > 0.0).all() else type(self)(self.location, np.abs(self.scale))

    def merged(self, other: Self, weight: float) -> Self:
        """Return the Gaussian with the first two moments, coordinate by coordinate, of a mixture with another."""
        apart = other.location - self.location
        variance = (1.0 - weight) * self.scale**2 + weight * other.scale**2 + weight * (1.0 - weight) * apart**2
        return type(self)(self.location + weight * apart, np.sqrt(variance))


@dataclass(frozen=True)
class DiagonalFamily(Family):
    """The Gaussians with independent coordinates."""

    traits: ClassVar = Traits(
        name="diagonal",
        also_called="meanfield mf mfvi advi factorised factorized diag independent",
        states=(DiagonalState,),
        goes_with=(*OF_COVARIANCE, Product(("natural",), ("gauss_newton",), ("constant", "decay", "proximal"))),
        refuses=(NO_OTHER_FACTOR,),
        has_all_correlations=False,
    )

    @classmethod
    def of(cls, model: ModelForm, options: FamilyOptions) -> Self:
        """Return the family, the same for every model."""
        return cls()

    def from_scale(self, location: Array, scale: Array) -> DiagonalState:
        """Return the state with standard deviations ``scale``, (n_dim,)."""
        return DiagonalState.from_scale(location, scale)

    def memory_bytes(self, n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own."""
        return DiagonalState.memory_bytes(n_dim)
