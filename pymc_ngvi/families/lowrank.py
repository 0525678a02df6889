"""Gaussian whose precision is low-rank plus diagonal: what the Gaussian of a fit in the space of rows is in theta."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Never, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.gaussian import Gaussian
from pymc_ngvi.families.matrices.diagonal import Diagonal


@stored("gaussian.lowrank", content=("location", "factor", "axes", "core"))
@dataclass(frozen=True, eq=False)
class LowRankState(Gaussian[Diagonal]):
    """N(mean, S^-1) with S = D^1/2 (I + P K P^T) D^1/2, whitened by D^-1/2 (I + P K P^T)^-1/2; no steps go here.

    Parameters
    ----------
    location, factor : ndarray, shape (n_dim,)
        Mean, unconstrained; D^1/2.
    axes, core : ndarray, shapes (n_dim, k), (k, k)
        P, whose columns are orthonormal; K, symmetric, of either sign.
    """

    structure: Diagonal = field(default=Diagonal(), init=False, repr=False)
    axes: Array
    core: Array

    exact_metric = True
    factor_sign, factor_name = -1, "root_of_diagonal"

    def params(self) -> dict[str, Array]:
        """Return mean, D^1/2, axes and core, by name."""
        return {**super().params(), "axes": self.axes, "core": self.core}

    @classmethod
    def of_arrays(cls, arrays: dict[str, Array]) -> Self:
        """Return the state of these arrays: the inverse of `params`."""
        return cls(arrays["mean"], arrays[cls.factor_name], arrays["axes"], arrays["core"])

    def from_params(self, params: dict[str, Array]) -> Self:
        """Return the state of other arrays."""
        return self.of_arrays(params)

    @cached_property
    def _roots(self) -> tuple[Array, Array]:
        """(I + K)^-1/2 and its inverse."""
        values, vectors = np.linalg.eigh(self.core)
        root, inverse = ((vectors * (1.0 + values) ** power) @ vectors.T for power in (-0.5, 0.5))
        return root, inverse

    def _stretched(self, vectors: Array, inverse: bool) -> Array:
        return vectors + (vectors @ self.axes) @ (self._roots[inverse] - np.eye(len(self.core))) @ self.axes.T

    def _whitener(self, vectors: Array, *, inverse: bool = False, transposed: bool = False) -> Array:
        if inverse == transposed:
            return super()._whitener(self._stretched(vectors, inverse), inverse=inverse)
        return self._stretched(super()._whitener(vectors, inverse=inverse), inverse)

    def _log_det(self) -> float:
        return float(np.linalg.slogdet(self._roots[0])[1] - np.sum(np.log(self.factor)))

    def log_density(self, theta: Array) -> Array:
        """Return log q at the rows of ``theta``."""
        z = self._stretched((theta - self.location) * self.factor, inverse=True)
        return 0.5 * self.n_dim - 0.5 * np.sum(z * z, axis=-1) - self.entropy()

    def sd(self) -> Array:
        """Return the standard deviations."""
        p, root = self.axes, self._roots[0]
        return np.sqrt(1.0 + np.sum((p @ (root @ root - np.eye(len(root)))) * p, axis=1)) / self.factor

    def covariances(self, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
        """Return entries of the covariance, (n,)."""
        p, root = self.axes, self._roots[0]
        within = np.einsum("nk,nk->n", (p @ (root @ root - np.eye(len(root))))[rows], p[cols])
        return np.asarray((within + (rows == cols)) / (self.factor[rows] * self.factor[cols]))

    def _refuse(self, *args: object, **kwargs: object) -> Never:
        raise NotImplementedError("a low-rank Gaussian is no diagonal one: this is not known of it")

    divergence = whitened_precision = outer_mean = squared = scaled_columns = _refuse
    curvature = add_to_diagonal = curvature_error = curvature_diagonal = flat = unflat = precision_scaled_by = _refuse
