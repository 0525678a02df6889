"""The values that travel between the parts, and the protocols that the parts fulfil.

Conventions, stated once. ``theta`` is the flat unconstrained vector, (n_dim,). ``log p`` is the unnormalised log
density of the model there, Jacobian terms included. ELBO = E_q[log p - log q], to be maximised; a loss is -ELBO.
A state is *whitened* by a matrix C with covariance C C^T: the whitened gradient is C^T E_q[grad log p], the whitened
curvature A = -C^T E_q[hess log p] C. At the optimum they are 0 and the identity.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from numpy.typing import NDArray

Array = NDArray[np.float64]


class TargetDensity(Protocol):
    """What the loop needs of a model: a log density on the flat unconstrained vector."""

    n_dim: int
    n_gradients: int
    n_hessians: int

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p, (n_draws,), and its gradient, (n_draws, n_dim)."""
        ...

    def mean_hessian_products(self, theta: Array, directions: Array) -> Array:
        """Return the mean over draws of hess log p times each direction, (n_directions, n_dim)."""
        ...

    def mean_hessian_diagonal(self, theta: Array) -> Array:
        """Return the mean over draws of the diagonal of hess log p, (n_dim,)."""
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
    """A Gaussian q that can whiten: what estimators and updates work with."""

    @property
    def exact_metric(self) -> bool:
        """Whether the Fisher information is the curvature of the ELBO at the optimum for every Gaussian target."""
        ...

    def entropy(self) -> float:
        """Return -E_q[log q]."""
        ...

    def whiten(self, grad: Array) -> Array:
        """Return C^T times each gradient, (..., n_dim)."""
        ...

    def curvature(self, target: TargetDensity, theta: Array) -> Array:
        """Return the whitened curvature A of the mean Hessian of ``target`` at the rows of ``theta``."""
        ...

    def curvature_error(self, curvature: Array) -> Array:
        """Return A - identity, in the form that this family stores."""
        ...


@dataclass(frozen=True)
class BaseDraws:
    """Standard normals in independent randomised replicates, each closed under z -> -z.

    Parameters
    ----------
    z : ndarray, shape (n_draws, n_dim)
        Replicate after replicate.
    n_replicates : int
        Divides n_draws.
    """

    z: Array
    n_replicates: int

    @property
    def n_draws(self) -> int:
        """Number of draws, all replicates together."""
        return len(self.z)

    def replicates(self) -> list[slice]:
        """Return the rows of each replicate."""
        size = self.n_draws // self.n_replicates
        return [slice(r * size, (r + 1) * size) for r in range(self.n_replicates)]

    def pairs(self) -> NDArray[np.intp]:
        """Return the rows of each pair z, -z: (n_draws / 2, 2)."""
        half = self.n_draws // self.n_replicates // 2
        first = np.concatenate([np.arange(rows.start, rows.start + half) for rows in self.replicates()])
        return np.stack([first, first + half], axis=1)


@dataclass(frozen=True)
class Evaluation:
    """log p and its gradient at the draws of one state.

    Parameters
    ----------
    theta : ndarray, shape (n_draws, n_dim)
    logp : ndarray, shape (n_draws,)
    grad : ndarray, shape (n_draws, n_dim)
    finite : ndarray of bool, shape (n_draws,)
        Draws at which both are finite; the others take no part in any mean.
    elbo : float
        Mean of log p over the finite draws plus the entropy; -inf where no draw is finite.
    """

    theta: Array
    logp: Array
    grad: Array
    finite: NDArray[np.bool_]
    elbo: float


@dataclass(frozen=True)
class Moments:
    """Whitened expectations under one state, with their Monte Carlo error.

    Parameters
    ----------
    grad : ndarray, shape (n_dim,)
        C^T E_q[grad log p].
    curvature : ndarray
        A, in the form of the family: (n_dim, n_dim) dense, (n_dim,) diagonal.
    grad_se, curvature_se : ndarray, shape (n_dim,)
        Monte Carlo standard errors of the gradient and of the diagonal of A.
    gap : float
        Nats of ELBO still to be gained, uncorrected: 1/2 |grad|^2 + 1/4 |A - I|^2.
    floor : float
        What ``gap`` would be on average, by Monte Carlo noise alone, at the optimum.
    floor_sd : float
        Standard deviation of ``gap - floor`` there.
    replicates : ndarray, shape (n_replicates, n_params), or None
        Natural gradient of each replicate, kept by families for which it is a few vectors.
    """

    grad: Array
    curvature: Array
    grad_se: Array
    curvature_se: Array
    gap: float
    floor: float
    floor_sd: float
    replicates: Array | None = None


class Estimator(Protocol):
    """Estimates the moments of a state from an evaluation at its draws."""

    def __call__(self, target: TargetDensity, state: Any, base: BaseDraws, evaluation: Evaluation) -> Moments:
        """Return the whitened moments."""
        ...


#: (state, moments, step_size, allow_correction) -> proposed state, or None where the step is not valid.
Update = Callable[[Any, Moments, float, bool], Any]

Callback = Callable[[Any, Array, int], None]
Callbacks = Sequence[Callback]
