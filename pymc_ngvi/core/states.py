"""Protocols of a log density, and of the approximations that are fitted to it; `types` has the conventions."""

from collections.abc import Callable
from typing import Any, Protocol, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.values import Array, Outer


class TargetDensity(Protocol):
    """What the loop needs of a model: a log density on the flat unconstrained vector."""

    n_gradients: int
    n_hessians: int

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        ...

    @property
    def has_hessian(self) -> bool:
        """Whether log p has second derivatives that can be evaluated."""
        ...

    @property
    def has_minibatch(self) -> bool:
        """Whether log p is that of a random part of the data, the same until `next_batch`."""
        ...

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p, (n_draws,), and its gradient, (n_draws, n_dim)."""
        ...

    def mean_hessian_products(self, theta: Array, directions: Array) -> Array:
        """Return the mean over draws of hess log p times each direction, (n_directions, n_dim)."""
        ...

    def mean_hessian_diagonal(self, theta: Array) -> Array:
        """Return the mean over draws of the diagonal of hess log p, (n_dim,)."""
        ...

    @property
    def pattern(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0; None where it counts as dense."""
        ...

    def mean_hessian_values(self, theta: Array) -> Array:
        """Return the mean over draws of hess log p in the entries of ``pattern``, (n_entries,)."""
        ...

    def mean_gauss_newton_diagonal(self, theta: Array) -> Array:
        """Return the mean over draws of the Gauss-Newton diagonal, an estimate of -diag hess log p, (n_dim,)."""
        ...

    def curvature(self, state: Any, theta: Array) -> Array:
        """Return the whitened curvature of the mean Hessian, as a state stores it: ``state.curvature(self, theta)``.

        Not so where the Hessian has no form that a state could ask for.
        """
        ...

    def next_batch(self, rng: np.random.Generator) -> None:
        """Go to the next minibatch of the data; nothing where there is none."""
        ...

    def take_batch(self, seed: int, number: int) -> None:
        """Go to a minibatch of passes through the data in random orders; not called without `has_minibatch`."""
        ...

    @property
    def n_batches(self) -> int:
        """Minibatches in one pass; not called without `has_minibatch`."""
        ...


class VariationalState(Protocol):
    """An approximation q: immutable, knows nothing of PyMC or of how it was fitted."""

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        ...

    @property
    def n_uniform(self) -> int:
        """Columns of uniforms that a draw needs beside ``n_dim`` standard normals (1 for a mixture)."""
        ...

    def params(self) -> dict[str, Array]:
        """Return the arrays that define the state, by name; ``from_params`` is the inverse."""
        ...

    @classmethod
    def from_params(cls, params: dict[str, Array]) -> Self:
        """Make a state of its arrays."""
        ...

    def draws(self, base: Array) -> Array:
        """Map base draws, (n_draws, n_dim + n_uniform), to draws of q, (n_draws, n_dim)."""
        ...

    def log_density(self, theta: Array) -> Array:
        """Return log q, (n_draws,), at points (n_draws, n_dim)."""
        ...

    def mean(self) -> Array:
        """Return the mean, (n_dim,)."""
        ...

    def sd(self) -> Array:
        """Return the standard deviations, (n_dim,)."""
        ...

    def cov(self) -> Array:
        """Return the covariance, (n_dim, n_dim)."""
        ...


class GaussianState(VariationalState, Protocol):
    """A Gaussian q that can whiten: what estimators and updates work with.

    Beside the mean it holds a *factor*: of the covariance (``factor_sign`` 1; the whitener C is the factor itself) or
    of the precision (-1; C is its inverse transpose). A curvature, and a factor, have each the form that the family
    stores: dense, the diagonal alone, or packed blocks.
    """

    location: Array
    factor_sign: int

    @property
    def exact_metric(self) -> bool:
        """Whether the Fisher information is the curvature of the ELBO at the optimum for every Gaussian target."""
        ...

    @property
    def globals_(self) -> NDArray[np.intp] | None:
        """Coordinates that are global parameters, judged apart from group effects; None where nothing tells."""
        ...

    @property
    def n_params(self) -> int:
        """Numbers that define the state: those of the mean and of the factor."""
        ...

    @property
    def factor_values(self) -> Array:
        """The factor, in the form of the family."""
        ...

    def entropy(self) -> float:
        """Return -E_q[log q]."""
        ...

    # --- between the space of theta and the whitened one ---

    def whiten(self, grad: Array) -> Array:
        """Return C^T times each gradient, (..., n_dim)."""
        ...

    def unwhiten(self, step: Array) -> Array:
        """Return C times a whitened step, (n_dim,)."""
        ...

    def dewhiten(self, grad: Array) -> Array:
        """Return C^-T times a whitened gradient, (n_dim,): the inverse of `whiten`."""
        ...

    # --- curvatures ---

    def curvature(self, target: TargetDensity, theta: Array) -> Array:
        """Return the whitened curvature A of the mean Hessian of ``target`` at the rows of ``theta``."""
        ...

    def curvature_error(self, curvature: Array) -> Array:
        """Return A - identity, in the form that this family stores."""
        ...

    def curvature_diagonal(self, curvature: Array) -> Array:
        """Return the diagonal of A, (n_dim,)."""
        ...

    def add_to_diagonal(self, curvature: Array, value: float) -> Array:
        """Return A + value * identity."""
        ...

    def flat(self, curvature: Array) -> Array:
        """Return a vector whose inner products are those of the matrices."""
        ...

    def unflat(self, vector: Array) -> Array:
        """Return the curvature of a vector: the inverse of `flat`."""
        ...

    def held(self, grad: Array, curvature: Array) -> tuple[Array, Array]:
        """Return gradient and curvature of a step without global parameters, in families that tell them apart."""
        ...

    def squared(self, curvature: Array) -> Array:
        """Return the matrix product of a curvature with itself, in families that are closed under it."""
        ...

    def outer(self, whitened: Array, z: Array) -> Outer:
        """Order whitened gradients and base draws, (n_draws, n_dim), so that the factor's triangle is the lower one."""
        ...

    def outer_mean(self, outer: Outer) -> Array:
        """Return the symmetric matrix with the lower triangle of ``outer``, in the form of a curvature."""
        ...

    def outer_diagonal(self, outer: Outer) -> Array:
        """Return the diagonal of that matrix, (n_dim,)."""
        ...

    # --- steps ---

    def divided(self, matrix: Array, grad: Array) -> tuple[Self, Array] | None:
        """Divide the covariance by a whitened precision.

        Returns
        -------
        state, displacement : the state of covariance C M^-1 C^T about the same mean, and C M^-1 grad
            None where M is not positive definite.
        """
        ...

    def divided_by_function(
        self, curvature: Array, function: Callable[[Array], Array], grad: Array
    ) -> tuple[Self, Array] | None:
        """As `divided`, by ``function`` of the eigenvalues of a curvature, positive; None where that is not finite."""
        ...

    def half_product(self, error: Array | Outer) -> Array:
        """Return the factor times the lower triangle of I - A with a halved diagonal, in the form of a factor."""
        ...

    def inverse_product(self, error: Array | Outer) -> Array:
        """Return the lower triangle of the factor's inverse transpose times I - A."""
        ...

    def scaled_columns(self, scale: Array) -> Array:
        """Return the factor with each column multiplied, (n_dim,)."""
        ...

    def plus(self, location_step: Array, factor_step: Array, *, signed: bool = False) -> Self | None:
        """Add to mean and factor.

        None where a diagonal entry of the factor would not stay positive, or, if ``signed``, would be 0: a factor with
        negative entries is one of the same Gaussian.
        """
        ...

    def unsigned(self) -> Self:
        """Return the same Gaussian with a factor of positive diagonal."""
        ...

    def merged(self, other: Self, weight: float) -> Self:
        """Return the state with the expectation parameters (1 - weight) of this one plus weight of the other's."""
        ...


class ComponentState(GaussianState, Protocol):
    """A Gaussian that can be a component of a mixture."""

    def from_scale(self, location: Array, scale: Array) -> Self:
        """Return a state of the same form with uncorrelated coordinates of standard deviations ``scale``, (n_dim,)."""
        ...

    def divergence(self, other: Self) -> float:
        """Return KL(self || other), nats; inf beyond what numbers can hold."""
        ...

    def precision_product(self, vectors: Array) -> Array:
        """Return the precision times each vector, (n_vectors, n_dim)."""
        ...

    def whitened_precision(self, other: Self) -> Array:
        """Return C^T S C for the precision S of another state, in the form of a curvature."""
        ...
