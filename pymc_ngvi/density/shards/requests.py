"""What is asked of a shard, and what it answers: small things that can be pickled."""

import math
import os
import uuid

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cloudpickle
import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.target import Spread
from pymc_ngvi.core.types import Array

# --- how shards are made, in whichever process ---


@dataclass(frozen=True)
class Recipe:
    """How shards are made."""

    #: The function that makes the model of a key, pickled.
    build: bytes
    keys: tuple[Hashable, ...]
    #: Shards that a process keeps, at most.
    keep: int | None
    #: No other has it.
    name: str
    #: The process that asks.
    home: int
    #: Potentials that are left out.
    without: tuple[str, ...] = ()

    @classmethod
    def of(cls, build: Callable[..., object], keys: Sequence[Hashable], keep: int | None) -> "Recipe":
        """Return a new one."""
        try:
            pickled = cloudpickle.dumps(build)
        except Exception as error:
            raise TypeError(
                f"build={build!r} can't be sent to other processes ({type(error).__name__}: {error}): let it open what "
                "it needs by itself."
            ) from error
        return cls(pickled, tuple(keys), keep, uuid.uuid4().hex, os.getpid())

    @property
    def is_home(self) -> bool:
        """Whether this is the process that asks."""
        return os.getpid() == self.home


class VariableForm(NamedTuple):
    """What a free variable is."""

    #: Its name.
    variable: str
    #: Of its unconstrained value.
    shape: tuple[int, ...]
    dims: tuple[str | None, ...]
    #: The values along each dim.
    coordinates: tuple[object, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


#: Free variables by the names of their unconstrained values, in order.
type Signature = Mapping[str, VariableForm]


class Potential(NamedTuple):
    """A potential of a shard's model."""

    #: shape (n_points,).
    values: Array
    #: A digest of the arrays that it reads.
    data: str


class Common(NamedTuple):
    """What is the same in all shards."""

    #: Those of the prior.
    potentials: tuple[str, ...]
    #: Those that are no functions of a shard's own data.
    deterministics: frozenset[str]
    #: Number of observations of all shards by observed variable.
    observations: dict[str, int]


class ModelFacts(NamedTuple):
    """What a shard says of its model."""

    #: Of its free variables.
    signature: Signature
    #: Number of observations by observed variable.
    observations: dict[str, int]
    #: At the points of the request; shape (n_points,).
    log_prior: Array
    #: The model's potentials there, by name.
    potentials: dict[str, Potential]
    #: Digests of the data that Deterministics read, by name.
    deterministics: dict[str, str]
    #: Observed variables that lack values, which are free variables instead.
    lacking: tuple[str, ...]


class Outline(NamedTuple):
    """What a shard says of its log likelihood."""

    #: Rows, and directions in which their functions vary at most; None where it is no sum over rows.
    n_rows: int | None
    n_directions: int | None
    #: Why it is none.
    why_not: str
    #: Entries of the Hessian that can differ from 0; None where they are too many.
    pattern: Pattern | None
    #: Names the operation that has no second derivative, if there is one.
    derivative_error: str
    #: Estimated time of the gradient at one point.
    gradient_seconds: float
    #: Whether it is -inf under conditions that rows know nothing of.
    leaves_out_conditions: bool


class ShardExpectation(NamedTuple):
    """The expectation of the log likelihood of a shard under a Gaussian."""

    #: As of `Expectation`.
    value: float
    error: float
    #: shape (n_dim,).
    grad: Array
    #: The values of the shard's pattern, or the matrix, (n_dim, n_dim).
    hessian: Array
    #: A number that tells rules of quadrature apart.
    rules: int
    #: Whether rules were chosen for this Gaussian.
    is_new: bool
    #: Whether the rows add up to the log likelihood, where that was looked at.
    agrees: bool


@stored("shard_reference")
@dataclass(frozen=True)
class Reference:
    """What rules of quadrature are chosen for."""

    #: Or the code of all rules; None where only the name is sent.
    q: Spread | int | None
    #: No other has it.
    name: str

    @property
    def named(self) -> "Reference":
        """The name alone, where the rest is large."""
        return self if isinstance(self.q, int) else Reference(None, self.name)


@dataclass(frozen=True)
class Expect:
    """Ask for the expectation under a Gaussian."""

    q: Spread
    #: Of q as a reference for rules.
    name: str
    #: Those for which rules were chosen before.
    references: tuple[Reference, ...]
    #: That of each shard; None: rules are chosen, and rows compared with the log likelihood at the mean; shape
    #: (n_shards,), or None.
    which: NDArray[np.intp] | None
    #: Whether to choose new rules where rows are wider than they were, or much narrower.
    adapt: bool
    #: Whether the Hessian is to be a matrix.
    is_dense: bool
    #: Rows of all shards and of the prior.
    n_rows: int


@dataclass(frozen=True)
class Evaluate:
    """Ask for something at points."""

    what: str
    #: shape (n_points, n_dim).
    theta: Array
    #: Whether a Hessian is to be a matrix.
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
    """Ask for a function of the model."""

    #: Of the key and the model; what it returns has to be small.
    function: Callable[..., object]


@dataclass(frozen=True)
class ApplyToLikelihood:
    """Ask for a function of the log likelihood."""

    #: Of the log likelihood, a `LogDensity`, and the arguments.
    function: Callable[..., object]
    arguments: tuple[object, ...]


type Request = Expect | Evaluate | Look | Open | Apply | ApplyToLikelihood
#: The same for all shards, or one for each.
type Requests = Request | Sequence[Request]
