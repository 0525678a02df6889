"""What is asked of a shard, and what it answers: small things that can be pickled."""

import math

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.target import Spread
from pymc_ngvi.core.types import Array


class VariableForm(NamedTuple):
    """What a free variable is.

    Parameters
    ----------
    variable : str
        Its name.
    shape : tuple of int
        Of its unconstrained value.
    dims : tuple
    coordinates : tuple
        The values along each dim.
    """

    variable: str
    shape: tuple[int, ...]
    dims: tuple[str | None, ...]
    coordinates: tuple[object, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


#: Free variables by the names of their unconstrained values, in order.
type Signature = Mapping[str, VariableForm]


class Potential(NamedTuple):
    """A potential of a shard's model.

    Parameters
    ----------
    values : ndarray, shape (n_points,)
    data : str
        A digest of the arrays that it reads.
    """

    values: Array
    data: str


class Common(NamedTuple):
    """What is the same in all shards.

    Parameters
    ----------
    potentials : tuple of str
        Those of the prior.
    deterministics : frozenset of str
        Those that are no functions of a shard's own data.
    observations : dict
        Number of observations of all shards by observed variable.
    """

    potentials: tuple[str, ...]
    deterministics: frozenset[str]
    observations: dict[str, int]


class ModelFacts(NamedTuple):
    """What a shard says of its model.

    Parameters
    ----------
    signature : mapping
        Of its free variables.
    observations : dict
        Number of observations by observed variable.
    log_prior : ndarray, shape (n_points,)
        At the points of the request.
    potentials : dict
        The model's potentials there, by name.
    deterministics : dict
        Digests of the data that Deterministics read, by name.
    lacking : tuple of str
        Observed variables that lack values, which are free variables instead.
    """

    signature: Signature
    observations: dict[str, int]
    log_prior: Array
    potentials: dict[str, Potential]
    deterministics: dict[str, str]
    lacking: tuple[str, ...]


class Outline(NamedTuple):
    """What a shard says of its log likelihood.

    Parameters
    ----------
    n_rows, n_directions : int or None
        Rows, and directions in which their functions vary at most; None where it is no sum over rows.
    why_not : str
        Why it is none.
    pattern : Pattern or None
        Entries of the Hessian that can differ from 0; None where they are too many.
    derivative_error : str
        Names the operation that has no second derivative, if there is one.
    gradient_seconds : float
        Estimated time of the gradient at one point.
    leaves_out_conditions : bool
        Whether it is -inf under conditions that rows know nothing of.
    """

    n_rows: int | None
    n_directions: int | None
    why_not: str
    pattern: Pattern | None
    derivative_error: str
    gradient_seconds: float
    leaves_out_conditions: bool


class ShardExpectation(NamedTuple):
    """The expectation of the log likelihood of a shard under a Gaussian.

    Parameters
    ----------
    value, error : float
        As of `Expectation`.
    grad : ndarray, shape (n_dim,)
    hessian : ndarray
        The values of the shard's pattern, or the matrix, (n_dim, n_dim).
    rules : int
        A number that tells rules of quadrature apart.
    is_new : bool
        Whether rules were chosen for this Gaussian.
    agrees : bool
        Whether the rows add up to the log likelihood, where that was looked at.
    """

    value: float
    error: float
    grad: Array
    hessian: Array
    rules: int
    is_new: bool
    agrees: bool


@stored("shard_reference")
@dataclass(frozen=True)
class Reference:
    """What rules of quadrature are chosen for.

    Parameters
    ----------
    q : GaussianState, int or None
        Or the code of all rules; None where only the name is sent.
    name : str
        No other has it.
    """

    q: Spread | int | None
    name: str

    @property
    def named(self) -> "Reference":
        """The name alone, where the rest is large."""
        return self if isinstance(self.q, int) else Reference(None, self.name)


@dataclass(frozen=True)
class Expect:
    """Ask for the expectation under a Gaussian.

    Parameters
    ----------
    q : GaussianState
    name : str
        Of q as a reference for rules.
    references : tuple of Reference
        Those for which rules were chosen before.
    which : ndarray of int, shape (n_shards,), or None
        That of each shard; None: rules are chosen, and rows compared with the log likelihood at the mean.
    adapt : bool
        Whether to choose new rules where rows are wider than they were, or much narrower.
    is_dense : bool
        Whether the Hessian is to be a matrix.
    n_rows : int
        Rows of all shards and of the prior.
    """

    q: Spread
    name: str
    references: tuple[Reference, ...]
    which: NDArray[np.intp] | None
    adapt: bool
    is_dense: bool
    n_rows: int


@dataclass(frozen=True)
class Evaluate:
    """Ask for something at points.

    Parameters
    ----------
    what : {"logp", "logp_grad", "mean_hessian", "covers"}
    theta : ndarray, shape (n_points, n_dim)
    is_dense : bool
        Whether a Hessian is to be a matrix.
    """

    what: str
    theta: Array
    is_dense: bool = True


@dataclass(frozen=True)
class Look:
    """Ask for the facts of a model, at points (n_points, n_dim)."""

    theta: Array


@dataclass(frozen=True)
class Open:
    """Ask for the outline of the log likelihood."""


@dataclass(frozen=True)
class Apply:
    """Ask for a function of the model.

    Parameters
    ----------
    function : callable
        Of the key and the model; what it returns has to be small.
    """

    function: Callable[..., object]


@dataclass(frozen=True)
class ApplyToLikelihood:
    """Ask for a function of the log likelihood.

    Parameters
    ----------
    function : callable
        Of the log likelihood, a `LogDensity`, and the arguments.
    arguments : tuple
    """

    function: Callable[..., object]
    arguments: tuple[object, ...]


type Request = Expect | Evaluate | Look | Open | Apply | ApplyToLikelihood
#: The same for all shards, or one for each.
type Requests = Request | Sequence[Request]
