"""Protocols of approximations; `types` has the conventions."""

from collections.abc import Callable
from dataclasses import Field
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.target import Whitener
from pymc_ngvi.core.values import AnyArray, Array, Outer


class VariationalState(Protocol):
    """An approximation q: immutable, knows nothing of PyMC or of how it was fitted."""

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""

    @property
    def n_uniform(self) -> int:
        """Columns of uniforms that a draw needs beside ``n_dim`` standard normals (1 for a mixture)."""

    def params(self) -> dict[str, Array]:
        """Return the arrays that define the state, by name; ``from_params`` is the inverse."""

    def from_params(self, params: dict[str, Array]) -> Self:
        """Return the state that has other arrays, and all else in common; it may be a class method."""

    def draws(self, base: Array) -> Array:
        """Map base draws, (n_draws, n_dim + n_uniform), to draws of q, (n_draws, n_dim)."""

    def log_density(self, theta: Array) -> Array:
        """Return log q, (n_draws,), at points (n_draws, n_dim)."""

    def mean(self) -> Array:
        """Return the mean, (n_dim,)."""

    def sd(self) -> Array:
        """Return the standard deviations, (n_dim,)."""

    def cov(self) -> Array:
        """Return the covariance, (n_dim, n_dim)."""


class FittedState(VariationalState, Protocol):
    """A q that step rules move, in the coordinates of a `Density`."""

    @property
    def globals_(self) -> NDArray[np.intp] | None:
        """Coordinates that are global parameters, judged apart from group effects; None where unknown."""

    def arrays(self) -> dict[str, AnyArray]:
        """Return what files keep, by name: the parameters, and what makes the form."""


class GaussianState(FittedState, Whitener, Protocol):
    """A Gaussian q that can whiten: what estimators and updates work with.

    Beside the mean it holds a *factor*: of the covariance (``factor_sign`` 1; the whitener C is the factor itself) or
    of the precision (-1; C is its inverse transpose). A curvature, and a factor, have each the form that the family
    stores: dense, the diagonal alone, or packed blocks.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def location(self) -> Array:
        """The mean, (n_dim,)."""

    @property
    def factor_sign(self) -> int:
        """1 for a factor of the covariance, -1 for one of the precision."""

    @property
    def exact_metric(self) -> bool:
        """Whether the Fisher information is the curvature of the ELBO at the optimum for every Gaussian target."""

    @property
    def n_params(self) -> int:
        """Numbers that define the state: those of the mean and of the factor."""

    @property
    def factor(self) -> Array:
        """The factor, in the form of the family."""

    def covariances(self, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
        """Return entries of the covariance, (n,)."""

    def covariance_times(self, vectors: Array) -> Array:
        """Return the covariance times each vector, (n_vectors, n_dim)."""

    def entropy(self) -> float:
        """Return -E_q[log q]."""

    def cov_block(self, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates, (len(index), len(index)), without that of the others."""

    # --- between the space of theta and the whitened one ---

    def unwhiten(self, step: Array) -> Array:
        """Return C times a whitened step, (n_dim,)."""

    def dewhiten(self, grad: Array) -> Array:
        """Return C^-T times a whitened gradient, (n_dim,): the inverse of `whiten`."""

    # --- curvatures ---

    def curvature_error(self, curvature: Array) -> Array:
        """Return A - identity, in the form that this family stores."""

    def curvature_diagonal(self, curvature: Array) -> Array:
        """Return the diagonal of A, (n_dim,)."""

    def flat(self, curvature: Array) -> Array:
        """Return a vector whose inner products are those of the matrices."""

    def unflat(self, vector: Array) -> Array:
        """Return the curvature of a vector: the inverse of `flat`."""

    def inner(self, first: Array, second: Array) -> float:
        """Return the inner product of two curvatures, as `flat` returns them, or of two natural gradients."""

    def without_globals(self, grad: Array, curvature: Array) -> tuple[Array, Array]:
        """Return gradient and curvature of a step without global parameters, in families that tell them apart."""

    def squared(self, curvature: Array) -> Array:
        """Return the matrix product of a curvature with itself, in families that are closed under it."""

    def outer(self, whitened: Array, z: Array) -> Outer:
        """Order whitened gradients and base draws, (n_draws, n_dim), so that the factor's triangle is the lower one."""

    def outer_diagonal(self, outer: Outer) -> Array:
        """Return the diagonal of that matrix, (n_dim,)."""

    # --- steps ---

    def precision_scaled_by(self, matrix: Array, grad: Array) -> tuple[Self, Array] | None:
        """Multiply the precision by a whitened matrix."""

    def precision_scaled_by_function(
        self, curvature: Array, function: Callable[[Array], Array], grad: Array
    ) -> tuple[Self, Array] | None:
        """As `precision_scaled_by`, by a positive function of the eigenvalues of a curvature.

        None where that is not finite, or where the form is not closed under it.
        """

    def times_lower_half(self, error: Array | Outer) -> Array:
        """Return the factor times the lower triangle of I - A with a halved diagonal, in the form of a factor."""

    def inverse_transpose_times(self, error: Array | Outer) -> Array:
        """Return the lower triangle of the factor's inverse transpose times I - A."""

    def scaled_columns(self, scale: Array) -> Array:
        """Return the factor with each column multiplied, (n_dim,)."""

    def plus(self, location_step: Array, factor_step: Array, *, signed: bool = False) -> Self | None:
        """Add to mean and factor.

        None where a diagonal entry of the factor would not stay positive, or, if ``signed``, would be 0: a factor with
        negative entries is one of the same Gaussian.
        """

    def unsigned(self) -> Self:
        """Return the same Gaussian with a factor of positive diagonal."""

    def merged(self, other: Self, weight: float) -> Self:
        """Return the state with the expectation parameters (1 - weight) of this one plus weight of the other's."""

    # --- beside others of the same form ---

    def with_scale(self, location: Array, scale: Array) -> Self:
        """Return a state of the same form with uncorrelated coordinates of standard deviations ``scale``, (n_dim,)."""

    def divergence(self, other: Self) -> float:
        """Return KL(self || other), nats; inf beyond what numbers can hold."""

    def precision_product(self, vectors: Array) -> Array:
        """Return the precision times each vector, (n_vectors, n_dim)."""

    def whitened_precision(self, other: Self) -> Array:
        """Return C^T S C for the precision S of another state."""


def base_draws_of(q: GaussianState, theta: Array) -> Array:
    """Return the base draws z, (n_points, n_dim), of points m + C z: the coordinates that q whitens."""
    return q.whiten(q.precision_product(theta - q.mean()))  # C^T (C C^T)^-1 = C^-1
