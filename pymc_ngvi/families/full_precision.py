"""Gaussian with a dense covariance, held by the Cholesky factor of the precision."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from pymc_ngvi.core.linalg import all_finite, cholesky, relative_terms, solve_lower, symmetrise
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, MeanHessian, Outer
from pymc_ngvi.families.lower import LOG_2PI, LowerState


@stored("gaussian.full_precision")
@dataclass(frozen=True)
class FullPrecisionState(LowerState):
    """N(mean, (T T^T)^-1) with a lower-triangular T; the whitener is T^-T.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_dim, n_dim)
        T, lower triangular, positive diagonal.
    """

    factor_sign = -1

    @classmethod
    def from_scale(cls, location: Array, scale: Array) -> Self:
        """Return the state with uncorrelated coordinates of standard deviations ``scale``, (n_dim,)."""
        return cls(np.array(location, dtype=np.float64), np.diag(1.0 / np.asarray(scale, dtype=np.float64)))

    def params(self) -> dict[str, Array]:
        """Return the arrays that define the state."""
        return {"mean": self.location, "precision_cholesky_factor": self.factor}

    @classmethod
    def from_params(cls, params: dict[str, Array]) -> Self:
        """Make a state of its arrays."""
        return cls(params["mean"], params["precision_cholesky_factor"])

    def draws(self, base: Array) -> Array:
        """Map standard normals, (n_draws, n_dim), to draws."""
        result: Array = self.location + solve_lower(self.factor, base.T, transpose=True).T
        return result

    def log_density(self, theta: Array) -> Array:
        """Return log q at the rows of ``theta``."""
        z = (theta - self.location) @ self.factor
        result: Array = -0.5 * np.sum(z * z, axis=-1) + self._log_det() - 0.5 * self.n_dim * LOG_2PI
        return result

    def sd(self) -> Array:
        """Return the standard deviations."""
        root = solve_lower(self.factor, np.eye(self.n_dim))
        result: Array = np.sqrt(np.einsum("ij,ij->j", root, root))
        return result

    def cov(self) -> Array:
        """Return the covariance."""
        root = solve_lower(self.factor, np.eye(self.n_dim))
        result: Array = root.T @ root
        return result

    def entropy(self) -> float:
        """Return -E_q[log q]."""
        return -self._log_det() + 0.5 * self.n_dim * (LOG_2PI + 1.0)

    def whiten(self, grad: Array) -> Array:
        """Return T^-1 times each gradient."""
        return solve_lower(self.factor, grad.T).T

    def unwhiten(self, step: Array) -> Array:
        """Return T^-T times a whitened step."""
        return solve_lower(self.factor, step, transpose=True)

    def dewhiten(self, grad: Array) -> Array:
        """Return T times a whitened gradient."""
        result: Array = self.factor @ grad
        return result

    def curvature(self, hessian: MeanHessian) -> Array:
        """Return A = -T^-1 H T^-T, symmetric, with H the mean Hessian."""
        half = solve_lower(self.factor, hessian.products(np.eye(self.n_dim)).T)
        return symmetrise(-solve_lower(self.factor, half.T))

    def divided(self, matrix: Array, grad: Array) -> tuple[Self, Array] | None:
        """Return the state of precision T M T^T, and T^-T M^-1 grad; None where M is not positive definite."""
        lower = cholesky(matrix, relative_terms(np.diagonal(matrix)))
        if lower is None:
            return None
        with np.errstate(over="ignore", invalid="ignore"):  # beyond what numbers can hold: no state then
            factor = np.tril(self.factor @ lower)
        if not ((np.diagonal(factor) > 0.0).all() and all_finite(factor)):
            return None
        new = type(self)(self.location, factor)
        return new, new.unwhiten(solve_lower(lower, grad))

    def outer(self, whitened: Array, z: Array) -> Outer:
        """Order whitened gradients and base draws: the lower triangle is that of E[z w^T]."""
        return Outer(z, whitened, 0.0)
