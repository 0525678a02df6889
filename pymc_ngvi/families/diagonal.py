"""Gaussian with independent coordinates."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from pymc_ngvi.types import Array, TargetDensity

LOG_2PI = float(np.log(2 * np.pi))


@dataclass(frozen=True)
class DiagonalState:
    """N(mean, diag(scale^2)).

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
        Mean, unconstrained.
    scale : ndarray, shape (n_dim,)
        Standard deviations, positive.
    """

    location: Array
    scale: Array

    n_uniform = 0
    exact_metric = False

    @classmethod
    def from_scale(cls, location: Array, scale: Array) -> Self:
        """Return the state with standard deviations ``scale``, (n_dim,)."""
        return cls(np.array(location, dtype=np.float64), np.array(scale, dtype=np.float64))

    @staticmethod
    def memory_bytes(n_dim: int) -> int:
        """Return the memory that a fit takes beyond the model's own."""
        return 64 * 8 * n_dim

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return len(self.location)

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
        result: Array = -0.5 * np.sum(z * z, axis=-1) - np.sum(np.log(self.scale)) - 0.5 * self.n_dim * LOG_2PI
        return result

    def mean(self) -> Array:
        """Return a copy of the mean."""
        return self.location.copy()

    def sd(self) -> Array:
        """Return a copy of the standard deviations."""
        return self.scale.copy()

    def cov(self) -> Array:
        """Return the covariance."""
        return np.diag(self.scale**2)

    def entropy(self) -> float:
        """Return -E_q[log q]."""
        return float(np.sum(np.log(self.scale))) + 0.5 * self.n_dim * (LOG_2PI + 1.0)

    def whiten(self, grad: Array) -> Array:
        """Return each gradient times the standard deviations."""
        result: Array = grad * self.scale
        return result

    def curvature(self, target: TargetDensity, theta: Array) -> Array:
        """Return the diagonal of A, (n_dim,), with H the mean Hessian at ``theta``."""
        result: Array = -target.mean_hessian_diagonal(theta) * self.scale**2
        return result

    def curvature_error(self, curvature: Array) -> Array:
        """Return the diagonal of A - I."""
        result: Array = curvature - 1.0
        return result
