"""Gaussian with a dense covariance."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from pymc_ngvi.linalg import solve_lower, symmetrise
from pymc_ngvi.types import Array, TargetDensity

LOG_2PI = float(np.log(2 * np.pi))


@dataclass(frozen=True)
class FullState:
    """N(mean, C C^T) with a lower-triangular C.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    factor : ndarray, shape (n_dim, n_dim)
        C, lower triangular, positive diagonal. The precision is C^-T C^-1; it is never formed.
    """

    location: Array
    factor: Array

    n_uniform = 0
    exact_metric = True

    @classmethod
    def from_scale(cls, location: Array, scale: Array) -> Self:
        """Return the state with uncorrelated coordinates of standard deviations ``scale``, (n_dim,)."""
        return cls(np.array(location, dtype=np.float64), np.diag(np.asarray(scale, dtype=np.float64)))

    @staticmethod
    def memory_bytes(n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own, at its peak: about 56 dense matrices.

        The curvature of each of eight replicates, the noise of each, and up to twelve vectors of secant pairs.
        """
        return 56 * 8 * n_dim * n_dim

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return len(self.location)

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

    def mean(self) -> Array:
        """Return a copy of the mean."""
        return self.location.copy()

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

    def curvature(self, target: TargetDensity, theta: Array) -> Array:
        """Return A = -C^T H C, symmetric, with H the mean Hessian at ``theta``."""
        products = target.mean_hessian_products(theta, np.ascontiguousarray(self.factor.T))
        return symmetrise(-(products @ self.factor))

    def curvature_error(self, curvature: Array) -> Array:
        """Return A - I."""
        result: Array = curvature - np.eye(self.n_dim)
        return result

    def _log_det(self) -> float:
        return float(np.sum(np.log(np.diag(self.factor))))
