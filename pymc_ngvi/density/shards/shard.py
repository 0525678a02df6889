"""One shard: a model of its own rows, made and evaluated where these are."""

import contextlib
import functools
import hashlib
import math
import threading

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import cloudpickle
import numpy as np
import pymc as pm

from numpy.typing import NDArray
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph import Constant, Variable, ancestors

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import AnyArray, Array, MeanHessian, RowRules, Spread
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.density.shards.errors import ShardError
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.reading.affine import Factor, factors_of, logp_of
from pymc_ngvi.reading.roles import n_axes
from pymc_ngvi.rows.row_hessian import Known

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

    #: None where only the name is sent.
    q: Spread | None
    #: No other has it.
    name: str


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
class Request:
    """Ask for a function of a shard."""

    #: Of the shard and the arguments; what it returns has to be small.
    function: Callable[..., object]
    arguments: tuple[object, ...] = ()


#: The same for all shards, or one for each.
type Requests = Request | Sequence[Request]


# --- what there is to know of the model of a shard: its variables, its prior, whether it has data of its own ---


def facts_of(key: Hashable, model: pm.Model, theta: Array) -> ModelFacts:
    """Return the facts of a shard's model, with its prior at points, (n_points, n_dim)."""
    shapes = {rv: tuple(rv.shape.eval()) for rv in model.observed_RVs}
    if not any(map(math.prod, shapes.values())) and not model.potentials:
        raise ShardError(f"Shard {key!r} is empty: its model has no observed values. Leave its key out.", key)
    observations = {str(rv.name): math.prod(shape[: n_axes(rv, len(shape))]) for rv, shape in shapes.items()}
    observed, own = ({str(rv.name) for rv in rvs} for rvs in (model.observed_RVs, model.free_RVs))
    names = (name.removesuffix("_observed") for name in sorted(observed) if name.endswith("_observed"))
    signature, lacking = signature_of(model), tuple(name for name in names if f"{name}_unobserved" in own)
    free = model.free_RVs
    deterministics = {str(term.name): digest_of(term, free) for term in model.deterministics}
    n_dim = sum(form.size for form in signature.values())
    if n_dim != theta.shape[1]:  # the caller compares signatures
        return ModelFacts(signature, observations, np.empty(0), {}, deterministics, lacking)
    factors = factors_of(model, [*free, *model.potentials])
    with without_c(model):
        terms = [logp_of(part) for part in (factors[: len(free)], *([factor] for factor in factors[len(free) :]))]
        function = model.compile_fn(terms, inputs=model.value_vars, mode="FAST_COMPILE", point_fn=True)
        values = [function(_point(signature, row)) for row in theta]
    prior, *others = np.array(values, dtype=np.float64).reshape(len(theta), -1).T
    potentials = {
        str(term.name): Potential(at_points, digest_of(term, free))
        for term, at_points in zip(model.potentials, others, strict=True)
    }
    return ModelFacts(signature, observations, prior, potentials, deterministics, lacking)


def signature_of(model: pm.Model) -> Signature:
    """Return the shape, transform, dims and coordinates of each free variable."""
    point = model.initial_point(random_seed=0)
    result = dict[str, VariableForm]()
    for value in model.value_vars:
        rv = model.values_to_rvs[value]
        dims = tuple(model.named_vars_to_dims.get(rv.name) or ())
        coords = tuple(
            (dim, tuple("nan" if value != value else value for value in model.coords.get(dim) or ())) for dim in dims
        )
        result[value.name] = VariableForm(rv.name, np.shape(point[value.name]), dims, coords)
    return result


def digest_of(term: Variable, free: Iterable[Variable]) -> str:
    """Return a digest of all data that a term reads, but for those of the prior of free variables."""
    digests = {hashlib.blake2b(np.ascontiguousarray(array).tobytes()).digest() for array in _arrays([term], free)}
    return hashlib.blake2b(b"".join(sorted(digests))).hexdigest()


def _arrays(of: Iterable[Variable], but: Iterable[Variable] = ()) -> Iterator[AnyArray]:
    for var in ancestors(list(of), list(but)):
        array = getattr(var, "data", None) if isinstance(var, Constant) else None
        array = var.get_value(borrow=True) if isinstance(var, SharedVariable) else array
        if isinstance(array, np.ndarray):
            yield array


def _point(signature: Signature, row: Array) -> dict[str, Array]:
    """Return values by name of a flat vector."""
    point, start = {}, 0
    for name, form in signature.items():
        point[name] = row[start : start + form.size].reshape(form.shape)
        start += form.size
    return point


# --- one shard: a model of its own rows, made and evaluated where these are ---

#: Sets of rules of quadrature that a shard keeps; others are chosen once more when they are asked for.
_N_RULES = 4
#: Models are made one at a time.
_LOCK = threading.RLock()
#: Shards of this process by the identity of their models.
_OF_MODELS: WeakValueDictionary[int, "Shard"] = WeakValueDictionary()


class Shard:
    """A shard in the process that holds its data."""

    def __init__(self, recipe: Recipe, number: int) -> None:
        self._recipe, self._number, self.key = recipe, number, recipe.keys[number]
        self._rules = OrderedDict[str, RowRules]()
        # What is compiled is not for two threads at once: a request may come while one that was given up is under way.
        self._lock = threading.RLock()
        with _LOCK:
            self._model = made(lambda key: cloudpickle.loads(recipe.build)(key), self.key)
            other = _OF_MODELS.get(id(self._model))
            if other is not None and other.key != self.key:
                raise ShardError(
                    f"build returned the same model for the shards {other.key!r} and {self.key!r}: let it make a new "
                    "one for each key.",
                    self.key,
                )
            _OF_MODELS[id(self._model)] = self
        values = [value for value in self._model.rvs_to_values.values() if value is not None]
        found = {
            id(array): array.nbytes for array in _arrays([*self._model.basic_RVs, *self._model.potentials, *values])
        }
        self._n_bytes = sum(found.values())

    def __reduce__(self) -> tuple[type, tuple[Recipe, int]]:
        """Return what to pickle: elsewhere, a shard is made again."""
        return Shard, (self._recipe, self._number)

    def answer(self, request: Request) -> object:
        """Return what is asked for."""
        with self._lock, _naming(self.key):
            return request.function(self, *request.arguments)

    def of_model(self, function: Callable[..., object]) -> object:
        """Return a function of the key and the model."""
        return function(self.key, self._model)

    def of_likelihood(self, function: Callable[..., object], *arguments: object) -> object:
        """Return a function of the log likelihood, a `LogDensity`, and arguments."""
        return function(self._likelihood, *arguments)

    def facts(self, theta: Array) -> ModelFacts:
        """Return the facts of the model, with its prior at points, (n_points, n_dim)."""
        with _LOCK:
            return facts_of(self.key, self._model, theta)

    @functools.cached_property
    def _likelihood(self) -> LogDensity:
        return LogDensity(self._model, factors=self._factors_of)

    def _factors_of(self, model: pm.Model) -> tuple[Factor, ...]:
        """Return what a model says of its data: log p without the density of the free variables."""
        potentials = [term for term in model.potentials if term.name not in self._recipe.without]
        return factors_of(model, [*model.observed_RVs, *potentials])

    @functools.cached_property
    def _pattern(self) -> Pattern | None:
        likelihood = self._likelihood
        return likelihood.structural_pattern if likelihood.rows is not None else likelihood.pattern

    def outline(self) -> Outline:
        """Return what the log likelihood is."""
        with _LOCK:
            likelihood = self._likelihood
            if likelihood.has_minibatch:
                raise ShardError(
                    f"The model of shard {self.key!r} reads pm.Minibatch data: shards are evaluated whole. Give it "
                    "the data themselves, without total_size.",
                    self.key,
                )
            rows, error = likelihood.rows, likelihood.hessian_error()
            return Outline(
                None if rows is None else rows.n_rows,
                None if rows is None else rows.n_directions,
                self._pattern,
                "" if error is None else str(error),
                likelihood.gradient_seconds,
                rows is not None and rows.reading.leaves_out_conditions,
            )

    def expected(self, asked: Expect) -> ShardExpectation | None:
        """Return the expectation under a Gaussian; None where rules are not kept, and not told how to be chosen."""
        likelihood, rows = self._likelihood, self._likelihood.rows
        if rows is None:
            raise ShardError(f"The log likelihood of shard {self.key!r} is no sum over rows any more.", self.key)
        rows.n_rows_in_all = asked.n_rows
        pattern, agrees, q, seen = None if asked.is_dense else self._pattern, True, asked.q, rows.seen(asked.q)
        if is_new := asked.which is None:
            location = q.location[None]
            agrees = rows.agrees(location, likelihood.by_rows.logp(location))
            rules = None
        else:
            rules = self._rules_of(asked.references[asked.which[self._number]])
            if rules is None:
                return None
            is_new = asked.adapt and rows.are_stale(seen, rules)
        found = rows.under(q, Known(pattern), None if is_new else rules, seen=seen)
        if is_new:
            self._keep(asked.name, found.rules)
        hessian = _entries(found.hessian, pattern, likelihood.n_dim)
        return ShardExpectation(found.value, found.error, found.grad, hessian, _number(found.rules), is_new, agrees)

    def _rules_of(self, reference: Reference) -> RowRules | None:
        """Return the rules for a Gaussian, chosen again where they are not kept: they are the same."""
        if reference.name not in self._rules:
            if reference.q is None:
                return None
            rows = self._likelihood.rows
            assert rows is not None
            self._keep(reference.name, rows.under(reference.q).rules)
        self._rules.move_to_end(reference.name)
        return self._rules[reference.name]

    def _keep(self, name: str, rules: RowRules) -> None:
        self._rules[name] = rules
        while len(self._rules) > _N_RULES:
            self._rules.popitem(last=False)

    def mean_hessian(self, theta: Array, is_dense: bool) -> Array:
        """Return the mean Hessian over draws: the values of the pattern, or a matrix."""
        pattern = None if is_dense else self._pattern
        return _entries(self._likelihood.mean_hessian(theta), pattern, self._likelihood.n_dim)

    def __sizeof__(self) -> int:
        """Return the bytes of the data, so that a scheduler knows what it holds."""
        return object.__sizeof__(self) + self._n_bytes


def of_likelihood(function: Callable[..., object], *arguments: object) -> Request:
    """Return the request for a function of the log likelihood, a `LogDensity`, and arguments."""
    return Request(Shard.of_likelihood, (function, *arguments))


def made(build: Callable[[Any], object], key: Hashable) -> pm.Model:
    """Return the model of a key."""
    with _naming(key):
        model = build(key)
        if not isinstance(model, pm.Model):
            raise TypeError(f"build returned {model!r} instead of a pm.Model")
    return model


@contextlib.contextmanager
def _naming(key: Hashable) -> Iterator[None]:
    """Turn any error into one that names the shard."""
    try:
        yield
    except ShardError:
        raise
    except Exception as error:
        raise ShardError(f"Shard {key!r} can't be used: {type(error).__name__}: {error}", key) from error


def _entries(hessian: MeanHessian, pattern: Pattern | None, n_dim: int) -> Array:
    """Return the values of a pattern, or the matrix."""
    return hessian.products(np.eye(n_dim)) if pattern is None else hessian.values()


def _number(rules: RowRules) -> int:
    digest = hashlib.blake2b(rules.level.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
