"""The protocols that the parts fulfil, and the names of the values that travel between them.

Conventions, stated once. ``theta`` is the flat unconstrained vector, (n_dim,). ``log p`` is the unnormalised log
density of the model there, Jacobian terms included. ELBO = E_q[log p - log q], to be maximised; a loss is -ELBO.
A state is *whitened* by a matrix C with covariance C C^T: the whitened gradient is C^T E_q[grad log p], the whitened
curvature A = -C^T E_q[hess log p] C. At the optimum they are 0 and the identity.
"""

import functools

from collections.abc import Callable
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import all_finite
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.target import (
    Bends,
    BentRowsTarget,
    Density,
    Expectation,
    GaussNewtonTarget,
    HasGradient,
    MatrixHessian,
    MeanHessian,
    RowRules,
    RowsTarget,
    Spread,
    Target,
    Whitener,
    mean_hessians,
)
from pymc_ngvi.core.values import AnyArray, Array, Assessment, BaseDraws, Evaluation, Outer, Parameters

# --- protocols of approximations; `types` has the conventions ---


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


# --- whitened expectations under a state; `types` has the conventions ---


@stored("moments")
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


# --- the protocols that the parts fulfil, and the names of the values that travel between them ---

__all__ = [
    "Array",
    "Assessment",
    "BaseDraws",
    "Bends",
    "BentRowsTarget",
    "Density",
    "Direction",
    "Evaluation",
    "Expectation",
    "FittedState",
    "GaussNewtonTarget",
    "GaussianState",
    "HasGradient",
    "MatrixHessian",
    "MeanHessian",
    "Moments",
    "Outer",
    "Parameters",
    "PathMoments",
    "RowRules",
    "RowsTarget",
    "Rule",
    "RuleState",
    "Spread",
    "StepRule",
    "Target",
    "Update",
    "VariationalState",
    "Whitener",
    "mean_hessians",
]


#: A parametrisation, and the map from a state to the next one: from a state, moments that are whitened by it, the step
#: size, and whether a correction is to be applied where the step would lose positive definiteness, and the update knows
#: of one. None where no valid state results.
type Update = Callable[[GaussianState, Moments, float, bool], GaussianState | None]
#: Gradient, or natural gradient, of the ELBO in the coordinates of mean and factor: for rules that move these.
type Direction = Callable[[GaussianState, Moments], Parameters]


class RuleState(Protocol):
    """What one iteration of a step rule hands to the next: as much of it as is read by others."""

    @property
    def q(self) -> VariationalState:
        """The approximation if the fit ended here."""

    @property
    def elbo(self) -> float:
        """ELBO on the current draws."""

    @property
    def gap(self) -> float:
        """Nats of ELBO still to be gained, estimated; NaN where unknown."""

    @property
    def n_draws(self) -> int:
        """Draws in use."""

    @property
    def step_size(self) -> float:
        """The last step size."""

    @property
    def n_dropped(self) -> int:
        """Draws left out so far because log p or its gradient was not finite."""


class StepRule[Q, S: RuleState](Protocol):
    """How far to go, and when to stop: moves an approximation Q, and hands a `RuleState` S to itself.

    Parameters
    ----------
    target : Target
    update, estimator : callable
        Rows of the registries.
    direction : callable, optional
        Of the update, for rules that move the coordinates of mean and factor.
    seed : int
        Of the base draws, and of minibatches.
    tol : float
        Nats of ELBO that a converged fit may lack.
    stl : bool
        Sticking the landing.
    **options
        Those that it takes.
    """

    #: Options that the rule takes, for the messages that refuse others.
    takes: ClassVar[frozenset[str]]
    #: Whether the first start with a finite ELBO will do, so that others need not be tried.
    takes_any_start: ClassVar[bool] = False

    def first_evaluation(self, q: Q) -> Evaluation:
        """Evaluate a starting state on the draws that serve to compare such states."""

    def init(self, q: Q) -> S:
        """Return the state before the first iteration."""

    def step(self, state: S) -> S:
        """Return the state after one more iteration; the given one is not modified."""

    def terminate(self, state: S) -> Status | None:
        """Return why to stop, or None to go on."""

    def assess(self, state: S) -> Assessment:
        """Evaluate a state on draws that had no part in reaching it."""

    def conclude(self, status: Status, assessment: Assessment) -> Status:
        """Return the status in the light of what was measured at the end: by default, what spoke against it."""
        return assessment.against or status if status is Status.CONVERGED else status

    def reopen(self, state: S) -> S:
        """Return a state in which a fit that ended may try again."""


#: Any of them: only the options of a fit tell which rule goes with which approximation.
type Rule = StepRule[Any, Any]
