"""The values that travel between the parts, and the protocols that the parts fulfil.

Conventions, stated once. ``theta`` is the flat unconstrained vector, (n_dim,). ``log p`` is the unnormalised log
density of the model there, Jacobian terms included. ELBO = E_q[log p - log q], to be maximised; a loss is -ELBO.
A state is *whitened* by a matrix C with covariance C C^T: the whitened gradient is C^T E_q[grad log p], the whitened
curvature A = -C^T E_q[hess log p] C. At the optimum they are 0 and the identity.
"""

import functools

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.linalg import all_finite
from pymc_ngvi.status import Status

Array = NDArray[np.float64]


class TargetDensity(Protocol):
    """What the loop needs of a model: a log density on the flat unconstrained vector."""

    n_dim: int
    n_gradients: int
    n_hessians: int

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

    def mean_gauss_newton_diagonal(self, theta: Array) -> Array:
        """Return the mean over draws of the Gauss-Newton diagonal, an estimate of -diag hess log p, (n_dim,)."""
        ...

    def next_batch(self, rng: np.random.Generator) -> None:
        """Go to the next minibatch of the data; nothing where there is none."""
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


class Outer(NamedTuple):
    """A curvature error as a mean of outer products: cheaper than a matrix where they are few.

    In the lower triangle, I - A is ``diagonal`` times the identity plus the mean of ``left_b right_b^T``.

    Parameters
    ----------
    left, right : ndarray, shape (n_outer, n_dim)
    diagonal : float
    """

    left: Array
    right: Array
    diagonal: float


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

    def squared(self, curvature: Array) -> Array:
        """Return the matrix product of a curvature with itself."""
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


@dataclass(frozen=True)
class BaseDraws:
    """Standard normals in independent randomised replicates, each closed under z -> -z where antithetic.

    Parameters
    ----------
    z : ndarray, shape (n_draws, n_dim)
        Replicate after replicate.
    n_replicates : int
        Divides n_draws.
    antithetic : bool
        Each replicate is a half and its negative; otherwise all draws are independent.
    """

    z: Array
    n_replicates: int
    antithetic: bool = True

    @property
    def n_draws(self) -> int:
        """Number of draws, all replicates together."""
        return len(self.z)

    def replicates(self) -> list[slice]:
        """Return the rows of each replicate."""
        size = self.n_draws // self.n_replicates
        return [slice(r * size, (r + 1) * size) for r in range(self.n_replicates)]

    def pairs(self) -> NDArray[np.intp]:
        """Return the rows of each pair z, -z: (n_draws / 2, 2); of each draw alone, (n_draws, 1), if not antithetic."""
        if not self.antithetic:
            return np.arange(self.n_draws)[:, None]
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

    def is_finite(self) -> bool:
        """Tell whether gradient and curvature are."""
        return all_finite(self.grad, self.curvature)

    def error(self, state: GaussianState) -> Array | Outer:
        """Return I - A, as outer products where it is a mean of few."""
        return -state.curvature_error(self.curvature)

    def error_diagonal(self, state: GaussianState) -> Array:
        """Return the diagonal of I - A, (n_dim,)."""
        return 1.0 - state.curvature_diagonal(self.curvature)


class PathMoments(Moments):
    """Whitened expectations from gradients alone, without errors: the curvature is formed only where it is asked for.

    Parameters
    ----------
    state : GaussianState
    grad : ndarray, shape (n_dim,)
    outer : Outer
        I - A.
    """

    def __init__(self, state: GaussianState, grad: Array, outer: Outer) -> None:
        unknown = np.full(len(grad), np.inf)
        values = {"grad": grad, "grad_se": unknown, "curvature_se": unknown, "replicates": None}
        self.__dict__.update(values, gap=np.nan, floor=np.inf, floor_sd=np.inf, outer=outer, _state=state)

    outer: Outer
    _state: GaussianState

    @functools.cached_property
    def curvature(self) -> Array:
        """A, in the form of the family."""
        return self._state.add_to_diagonal(-self._state.outer_mean(self.outer), 1.0)

    def is_finite(self) -> bool:
        """Tell whether gradient and outer products are."""
        return all_finite(self.grad, self.outer.left, self.outer.right)

    def error(self, state: GaussianState) -> Array | Outer:
        """Return I - A as outer products."""
        return self.outer

    def error_diagonal(self, state: GaussianState) -> Array:
        """Return the diagonal of I - A, (n_dim,)."""
        return state.outer_diagonal(self.outer)


class Assessment(NamedTuple):
    """A state on draws that had no part in reaching it.

    Parameters
    ----------
    theta : ndarray, shape (n_draws, n_dim)
    logp : ndarray, shape (n_draws,)
    units : ndarray of int, shape (n_units, ...)
        Rows that depend on each other: those of an antithetic pair, or those evaluated on one minibatch.
    gap : float
        Nats of ELBO still to be gained, at least 0; NaN where nothing tells.
    gap_sd : float
        Standard deviation of its error.
    against : Status or None
        What a fit that seems to have converged is in truth.
    """

    theta: Array
    logp: Array
    units: NDArray[np.intp]
    gap: float
    gap_sd: float
    against: Status | None = None


class Estimator(Protocol):
    """Estimates the moments of a state from an evaluation at its draws."""

    def __call__(
        self, target: TargetDensity, state: Any, base: BaseDraws, evaluation: Evaluation, *, stl: bool = True
    ) -> Moments:
        """Return the whitened moments; ``stl``: with gradients of log p - log q instead of log p."""
        ...


class Parameters(NamedTuple):
    """A direction, or any other quantity, in the coordinates of mean and factor.

    Parameters
    ----------
    location : ndarray, shape (n_dim,)
    factor : ndarray
        In the form of the family's factor.
    """

    location: Array
    factor: Array


class Update(Protocol):
    """A parametrisation, and the map from a state to the next one."""

    def __call__(self, state: Any, moments: Moments, step_size: float, correct: bool) -> Any:
        """Return the proposed state.

        Parameters
        ----------
        state : GaussianState
            Not modified.
        moments : Moments
            Whitened by ``state``.
        step_size : float
        correct : bool
            Where the step would lose positive definiteness, and the update knows of a correction: apply it.

        Returns
        -------
        GaussianState or None
            None where no valid state results.
        """
        ...


class Direction(Protocol):
    """Gradient, or natural gradient, of the ELBO in the coordinates of mean and factor: for rules that move these."""

    def __call__(self, state: Any, moments: Moments) -> Parameters:
        """Return the direction at a state."""
        ...


Callback = Callable[[Any, Array, int], None]
Callbacks = Sequence[Callback]
