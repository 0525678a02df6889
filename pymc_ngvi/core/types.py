"""The protocols that the parts fulfil, and the names of the values that travel between them.

Conventions, stated once. ``theta`` is the flat unconstrained vector, (n_dim,). ``log p`` is the unnormalised log
density of the model there, Jacobian terms included. ELBO = E_q[log p - log q], to be maximised; a loss is -ELBO.
A state is *whitened* by a matrix C with covariance C C^T: the whitened gradient is C^T E_q[grad log p], the whitened
curvature A = -C^T E_q[hess log p] C. At the optimum they are 0 and the identity.
"""

import functools

from collections.abc import (
    Sequence,
)
from dataclasses import (
    dataclass,
)
from typing import (
    Any,
    ClassVar,
    Protocol,
)

import numpy as np

from numpy.typing import (
    NDArray,
)

from pymc_ngvi.core.hessians import (
    MatrixHessian,
)
from pymc_ngvi.core.linalg import (
    all_finite,
)
from pymc_ngvi.core.states import (
    FittedState,
    GaussianState,
    VariationalState,
)
from pymc_ngvi.core.status import (
    Status,
)
from pymc_ngvi.core.stored import (
    stored,
)
from pymc_ngvi.core.target import (
    Bends,
    BentRowsTarget,
    Density,
    Expectation,
    GaussNewtonTarget,
    HasGradient,
    MeanHessian,
    RowRules,
    RowsTarget,
    Spread,
    Target,
    Whitener,
    mean_hessians,
)
from pymc_ngvi.core.values import (
    Array,
    Assessment,
    BaseDraws,
    Evaluation,
    Outer,
    Parameters,
)

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
    "Estimator",
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


class Estimator(Protocol):
    """Evaluates states, and estimates their moments. An estimator knows how expectations under q are taken."""

    @property
    def uses_hessians(self) -> bool:
        """Whether moments take second derivatives of log p."""

    def evaluate(self, target: Density, state: VariationalState, base: BaseDraws) -> Evaluation:
        """Return log p, its gradient and the ELBO of a state."""

    def evaluate_each(self, target: Density, states: Sequence[VariationalState], base: BaseDraws) -> list[Evaluation]:
        """Return those of several states, all from the same base draws."""

    def moments(
        self, target: Density, state: GaussianState, base: BaseDraws, evaluation: Evaluation, *, stl: bool = True
    ) -> Moments:
        """Return the whitened moments of a `GaussianState`.

        Parameters
        ----------
        target : Density
        state : GaussianState
        base : BaseDraws
            The draws of ``evaluation``; the scatter between its replicates gives the Monte Carlo errors.
        evaluation : Evaluation
            Of ``state``; draws that are not finite are left out.
        stl : bool, default True
            Sticking the landing, the path derivative: gradients are those of log p - log q, which have no noise at
            q = p. Of log p alone otherwise.
        """

    def has_hessian(self, target: Density) -> bool:
        """Tell whether `hessian_at_mean` can be formed."""

    def hessian_at_mean(self, target: Density, state: GaussianState) -> MeanHessian:
        """Return the Hessian of log p at the mean of a state."""


class Update(Protocol):
    """A parametrisation, and the map from a state to the next one."""

    def __call__(self, state: GaussianState, moments: Moments, step_size: float, correct: bool) -> GaussianState | None:
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


class Direction(Protocol):
    """Gradient, or natural gradient, of the ELBO in the coordinates of mean and factor: for rules that move these."""

    def __call__(self, state: GaussianState, moments: Moments) -> Parameters:
        """Return the direction at a state."""


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

    @property
    def growing(self) -> NDArray[np.intp]:
        """Coordinates whose standard deviations grow without end, those that grew most first."""


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

    def __init__(
        self,
        target: Target,
        update: Update,
        estimator: Estimator,
        *,
        direction: Direction | None,
        seed: int,
        tol: float,
        stl: bool,
        **options: object,
    ) -> None: ...

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
