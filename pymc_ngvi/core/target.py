"""Protocols of a log density that is fitted, and of its mean Hessian; `types` has the conventions."""

import functools

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.batch import Batch
from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.values import Array, Outer


class Whitener(Protocol):
    """The part of a Gaussian state that whitens the Hessian of a log density."""

    def whiten(self, grad: Array) -> Array:
        """Return C^T times each gradient, (..., n_dim)."""

    def curvature(self, hessian: "MeanHessian") -> Array:
        """Return the whitened curvature A = -C^T H C, in the form of the family."""

    def add_to_diagonal(self, curvature: Array, value: float) -> Array:
        """Return A + value * identity."""

    def outer_mean(self, outer: Outer) -> Array:
        """Return the symmetric matrix with the lower triangle of ``outer``, in the form of a curvature."""


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

    def whitened(self, state: Whitener) -> Array:
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


@runtime_checkable
class ManyHessians(Protocol):
    """A log density that evaluates Hessians at several sets of draws together."""

    def mean_hessians(self, draws: list[Array]) -> list[MeanHessian]:
        """Return the mean of hess log p over each set of draws."""


def mean_hessians(target: Density, draws: list[Array]) -> list[MeanHessian]:
    """Return the mean of hess log p over each set of draws, (n_draws, n_dim), to be evaluated."""
    if isinstance(target, ManyHessians):
        return target.mean_hessians(draws)
    return [target.mean_hessian(theta) for theta in draws]


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


@runtime_checkable
class GaussNewtonTarget(Protocol):
    """What a target has beside, if it knows the gradients of single observations."""

    def gauss_newton(self, theta: Array) -> MeanHessian:
        """Return the mean over draws of the Gauss-Newton matrix, an estimate of hess log p, to be evaluated."""


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
    is_bent: NDArray[np.bool_]


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


@runtime_checkable
class RowsTarget(Protocol):
    """What a target has beside, if it is a sum over rows, each a function of a few affine functions of theta."""

    def expected(
        self, q: "Spread", rules: RowRules | None = None, *, adapt: bool = False, least: float = -np.inf
    ) -> Expectation:
        """Return the expectation under a Gaussian."""

    def rows_cover(self, draw: Callable[[], Array]) -> bool:
        """Tell whether rows are all of log p at draws, some of which may be outside its support."""


class BentRowsTarget(RowsTarget, Protocol):
    """What it has beside, if its expectations tell of `Bends`."""

    def directions(self, rows: NDArray[np.intp]) -> Array:
        """Return the slopes of the only predictor of each of some rows, (n, n_dim)."""


class Spread(Protocol):
    """The part of a Gaussian state that says how affine functions of theta are distributed."""

    @property
    def location(self) -> Array:
        """The mean, (n_dim,)."""

    def covariances(self, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
        """Return entries of the covariance, (n,)."""

    def covariance_times(self, vectors: Array) -> Array:
        """Return the covariance times each vector, (n_vectors, n_dim)."""


@runtime_checkable
class Rooted(Protocol):
    """A Gaussian with a dense factor of its covariance."""

    @property
    def root(self) -> Array:
        """C with the covariance C C^T, lower triangular, (n_dim, n_dim)."""


@runtime_checkable
class Independent(Protocol):
    """A Gaussian with independent coordinates."""

    @property
    def scale(self) -> Array:
        """The standard deviations, (n_dim,)."""


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
        if self.pattern is None:
            return super().values()
        return self.matrix[self.pattern.rows, self.pattern.cols]


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

    evaluate: Callable[[Whitener], Array]

    def whitened(self, state: Whitener) -> Array:
        """Return the whitened curvature, as a state stores it."""
        return self.evaluate(state)
