"""The protocols that the parts fulfil, and the names of the values that travel between them.

Conventions, stated once. ``theta`` is the flat unconstrained vector, (n_dim,). ``log p`` is the unnormalised log
density of the model there, Jacobian terms included. ELBO = E_q[log p - log q], to be maximised; a loss is -ELBO.
A state is *whitened* by a matrix C with covariance C C^T: the whitened gradient is C^T E_q[grad log p], the whitened
curvature A = -C^T E_q[hess log p] C. At the optimum they are 0 and the identity.
"""

import functools

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.batch import Batch
from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.status import Elbo, Status
from pymc_ngvi.core.stored import stored

# --- the values that travel between the parts ---

Array = NDArray[np.float64]
#: Places in arrays, and which elements count.
Indices = NDArray[np.intp]
Bools = NDArray[np.bool_]
#: Of any type.
AnyArray = NDArray[Any]
#: Of two axes.
Matrix = AnyArray | sparse.sparray


@stored("moments.outer")
class Outer(NamedTuple):
    """A curvature error as a mean of outer products: cheaper than a matrix where they are few.

    In the lower triangle, I - A is ``diagonal`` times the identity plus the mean of ``left_b right_b^T``.
    """

    #: shape (n_outer, n_dim).
    left: Array
    right: Array
    diagonal: float


@stored("draws.base")
@dataclass(frozen=True)
class BaseDraws:
    """Standard normals in independent randomised replicates, each closed under z -> -z where antithetic."""

    #: Replicate after replicate; shape (n_draws, n_dim).
    z: Array
    #: Divides n_draws.
    n_replicates: int
    #: Each replicate is a half and its negative; otherwise all draws are independent.
    antithetic: bool = True

    @property
    def n_draws(self) -> int:
        """Number of draws, all replicates together."""
        return len(self.z)

    def replicates(self) -> list[slice]:
        """Return the rows of each replicate."""
        size = self.n_draws // self.n_replicates
        return [slice(r * size, (r + 1) * size) for r in range(self.n_replicates)]

    def pairs(self) -> Indices:
        """Return the rows of each pair z, -z: (n_draws / 2, 2); of each draw alone, (n_draws, 1), if not antithetic."""
        if not self.antithetic:
            return np.arange(self.n_draws)[:, None]
        rows = np.arange(self.n_draws).reshape(self.n_replicates, 2, -1)
        return np.stack([rows[:, 0].ravel(), rows[:, 1].ravel()], axis=1)


@stored("draws.evaluation")
@dataclass(frozen=True)
class Evaluation:
    """log p and its gradient at the draws of one state."""

    #: shape (n_draws, n_dim).
    theta: Array
    #: shape (n_draws,).
    logp: Array
    #: shape (n_draws, n_dim).
    grad: Array
    #: Draws at which both are finite; the others take no part in any mean; shape (n_draws,).
    finite: Bools
    #: Mean of log p over the finite draws plus the entropy; -inf where no draw is finite.
    elbo: float

    @property
    def n_dropped(self) -> int:
        """Draws at which log p or its gradient is not finite."""
        return int((~self.finite).sum())

    @property
    def lost(self) -> float:
        """Part of the draws that they are."""
        return float(np.mean(~self.finite))


@stored("draws.assessment")
class Assessment(NamedTuple):
    """A state on draws that had no part in reaching it."""

    #: shape (n_draws, n_dim).
    theta: Array
    #: shape (n_draws,).
    logp: Array
    #: Rows that depend on each other: those of an antithetic pair, or those evaluated on one minibatch; shape
    #: (n_units, ...).
    units: Indices
    #: Nats of ELBO still to be gained, at least 0; NaN where unknown.
    gap: float
    #: Standard deviation of its error.
    gap_sd: float
    #: What a fit that seems to have converged is in truth.
    against: Status | None = None
    #: The gap is known to be within the tolerance: a fit that has not converged by its own account has.
    certified: bool = False
    #: Where it is known without draws.
    elbo: Elbo | None = None


# --- protocols of a log density that is fitted, and of its mean Hessian ---


class MeanHessian(Protocol):
    """The mean over draws of hess log p. Nothing is evaluated before something is asked of it."""

    @property
    def pattern(self) -> Pattern | None:
        """Entries that can differ from 0; None where the matrix counts as dense."""
        return None

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        raise ValueError("Of this Hessian nothing but whitened curvatures can be had.")

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        raise ValueError("Of this Hessian nothing but whitened curvatures can be had.")

    def values(self) -> Array:
        """Return the entries of ``pattern``, (n_entries,)."""
        raise ValueError("This Hessian counts as dense: it has no pattern.")

    @property
    def summed(self) -> SummedPattern | None:
        """Entries that can differ from 0 beside sums over many coordinates; None where there are no such sums."""
        return None

    def summed_values(self) -> Array:
        """Return the entries of ``summed``, by coordinates and sums, (n_entries,)."""
        raise ValueError("This Hessian is known by no sums over many coordinates.")

    def whitened(self, state: "GaussianState") -> Array:
        """Return the whitened curvature, as a state stores it.

        The state takes products, the diagonal or values, as its form needs them. A Hessian that has none of them at
        less than their full cost does it by itself.
        """
        return state.curvature(self)


class HasGradient(Protocol):
    """What can be climbed, and what trajectories go by."""

    def logp_grad(self, theta: Array, /) -> tuple[Array, Array]:
        """Return log p, (n_draws,), and its gradient, (n_draws, n_dim)."""


class Density(Protocol):
    """A log density on the flat unconstrained vector: what estimators evaluate, and steps on fixed draws need."""

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""

    @property
    def has_hessian(self) -> bool:
        """Whether log p has second derivatives that can be evaluated."""

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p, (n_draws,), and its gradient, (n_draws, n_dim)."""

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the mean of hess log p over draws, (n_draws, n_dim), to be evaluated."""


def mean_hessians(target: Density, draws: list[Array]) -> list[MeanHessian]:
    """Return the mean of hess log p over each set of draws, (n_draws, n_dim), together where that can be."""
    together: Callable[[list[Array]], list[MeanHessian]] | None = getattr(target, "mean_hessians", None)
    return [target.mean_hessian(theta) for theta in draws] if together is None else together(draws)


class Target(Density, Protocol):
    """What a fit needs of a model: its log density, which counts evaluations and may read minibatches."""

    n_gradients: int
    n_hessians: int

    @property
    def has_minibatch(self) -> bool:
        """Whether log p is that of a random part of the data, the same until `next_batch`."""

    def next_batch(self, rng: np.random.Generator) -> None:
        """Go to the next minibatch of the data; nothing where there is none."""

    def take_batch(self, seed: int, number: int) -> None:
        """Go to a minibatch of passes through the data in random orders; not called without `has_minibatch`."""

    @property
    def n_batches(self) -> int:
        """Minibatches in one pass; not called without `has_minibatch`."""


class OfAllData:
    """The part of a `Target` that is the same for all that read no minibatches."""

    has_minibatch = False
    n_batches = 1

    def next_batch(self, rng: np.random.Generator) -> None:
        """Do nothing: all of the data are read."""

    def take_batch(self, seed: int, number: int) -> None:
        """Do nothing: all of the data are read."""


class CountedElsewhere:
    """The part of a `Target` whose evaluations another one counts."""

    counter: Target

    @property
    def n_gradients(self) -> int:
        """Gradients, and expectations, so far."""
        return self.counter.n_gradients

    @n_gradients.setter
    def n_gradients(self, value: int) -> None:
        self.counter.n_gradients = value

    @property
    def n_hessians(self) -> int:
        """Hessians, and expectations, so far."""
        return self.counter.n_hessians

    @n_hessians.setter
    def n_hessians(self, value: int) -> None:
        self.counter.n_hessians = value


@stored("row_rules")
@dataclass(frozen=True)
class RowRules(Batch):
    """Which rule of quadrature the expectation of each row is taken by."""

    #: Codes of the levels in all directions; 0 is the coarsest rule; shape (n_rows,).
    level: NDArray[np.int16]
    #: The largest standard deviation of the predictors of each row under the q for which its rule was chosen; shape
    #: (n_rows,).
    sd: NDArray[np.float32]


@stored("row_bends")
@dataclass(frozen=True, eq=False)
class Bends:
    """How the expected derivatives of rows change with q, where each row is a function f of one predictor."""

    #: E[f''], E[f^(3)], E[f^(4)]; shape (n_rows,).
    second: Array
    third: Array
    fourth: Array
    #: Where the last two are more than rounding; shape (n_rows,).
    is_bent: Bools


class Expectation(NamedTuple):
    """What log p is on average under one q."""

    #: E[log p], nats; not finite where that does not exist, or can't be told.
    value: float
    #: Nats by which it may be wrong, as far as finer rules of quadrature tell; NaN where none was tried.
    error: float
    #: E[grad log p]; shape (n_dim,).
    grad: Array
    #: E[hess log p].
    hessian: MeanHessian
    #: What it was taken by.
    rules: RowRules
    #: None where some row is a function of several predictors.
    bends: Bends | None = None


class RowsTarget(Protocol):
    """What a target has beside, if it is a sum over rows, each a function of a few affine functions of theta."""

    def expected(
        self, q: "Spread", rules: RowRules | None = None, *, adapt: bool = False, least: float = -np.inf
    ) -> Expectation:
        """Return the expectation under a Gaussian."""

    def rows_cover(self, draw: Callable[[], Array]) -> bool:
        """Tell whether rows are all of log p at draws, some of which may be outside its support."""

    def directions(self, rows: Indices) -> Array:
        """Return the slopes of the only predictor of each of some rows, (n, n_dim), where there are `Bends`."""


class Spread(Protocol):
    """The part of a Gaussian state that says how affine functions of theta are distributed."""

    @property
    def location(self) -> Array:
        """The mean, (n_dim,)."""

    def covariances(self, rows: Indices, cols: Indices) -> Array:
        """Return entries of the covariance, (n,)."""

    def covariance_times(self, vectors: Array) -> Array:
        """Return the covariance times each vector, (n_vectors, n_dim)."""


# --- mean Hessians whose entries are known, or will be ---


@dataclass(frozen=True)
class MatrixHessian(MeanHessian):
    """A Hessian that is known: a symmetric matrix."""

    #: shape (n_dim, n_dim).
    matrix: Array
    #: Entries that `values` returns.
    pattern: Pattern | None = None

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        return directions @ self.matrix

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return np.diagonal(self.matrix)

    def values(self) -> Array:
        """Return the entries of ``pattern``, (n_entries,)."""
        return super().values() if self.pattern is None else self.matrix[self.pattern.rows, self.pattern.cols]


class PatternHessian(MeanHessian):
    """A sparse Hessian that is known."""

    def __init__(self, pattern: Pattern, values: Array) -> None:
        self._pattern, self._values = pattern, values

    @property
    def pattern(self) -> Pattern:
        """Entries that can differ from 0."""
        return self._pattern

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        return (self._pattern.symmetric(self._values) @ directions.T).T

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return self._values[~self._pattern.off_diagonal]

    def values(self) -> Array:
        """Return the entries of the pattern, (n_entries,)."""
        return self._values


class Later(MeanHessian):
    """A Hessian that is evaluated when something is asked of it."""

    def __init__(self, pattern: Pattern | None, evaluate: Callable[[], MeanHessian]) -> None:
        self._pattern, self._evaluate = pattern, evaluate

    @functools.cached_property
    def _known(self) -> MeanHessian:
        return self._evaluate()

    @property
    def pattern(self) -> Pattern | None:
        """Entries that can differ from 0; None where the matrix counts as dense."""
        return self._pattern

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        return self._known.products(directions)

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return self._known.diagonal()

    def values(self) -> Array:
        """Return the entries of the pattern, (n_entries,)."""
        return self._known.values()


@dataclass(frozen=True)
class WhitenedHessian(MeanHessian):
    """A Hessian of which nothing but whitened curvatures is taken."""

    evaluate: Callable[["GaussianState"], Array]

    def whitened(self, state: "GaussianState") -> Array:
        """Return the whitened curvature, as a state stores it."""
        return self.evaluate(state)


# --- protocols of approximations ---


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


class GaussianState(VariationalState, Spread, Protocol):
    """A Gaussian q that can whiten, as what is asked of it beyond methods goes: see `families.gaussian.Gaussian`."""

    def whiten(self, grad: Array) -> Array:
        """Return C^T times each gradient, (..., n_dim)."""

    def curvature(self, hessian: MeanHessian) -> Array:
        """Return the whitened curvature A = -C^T H C, in the form of the family."""

    def add_to_diagonal(self, curvature: Array, value: float) -> Array:
        """Return A + value * identity."""

    def outer_mean(self, outer: Outer) -> Array:
        """Return the symmetric matrix with the lower triangle of ``outer``, in the form of a curvature."""

    def entropy(self) -> float:
        """Return -E_q[log q]."""

    def cov_block(self, index: Indices) -> Array:
        """Return the covariance of some coordinates, (len(index), len(index)), without that of the others."""

    def with_scale(self, location: Array, scale: Array) -> Self:
        """Return a state of the same form with uncorrelated coordinates of standard deviations ``scale``, (n_dim,)."""

    def precision_product(self, vectors: Array) -> Array:
        """Return the precision times each vector, (n_vectors, n_dim)."""


def base_draws_of(q: GaussianState, theta: Array) -> Array:
    """Return the base draws z, (n_points, n_dim), of points m + C z: the coordinates that q whitens."""
    return q.whiten(q.precision_product(theta - q.mean()))  # C^T (C C^T)^-1 = C^-1


# --- step rules ---


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
