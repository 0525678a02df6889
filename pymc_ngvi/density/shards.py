"""The log density of a model whose data are in shards: the prior here, the likelihood where its rows are."""

import contextlib
import functools
import hashlib
import math
import os
import threading
import time
import uuid
import weakref
import zlib

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import cloudpickle
import numpy as np
import pymc as pm

from pytensor.graph import Variable, ancestors
from rich.progress import Task
from threadpoolctl import threadpool_limits

from pymc_ngvi.core.messages import RowsGivenUp, logger, shortened
from pymc_ngvi.core.pattern import Pattern, is_dense
from pymc_ngvi.core.progress import task
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import (
    AnyArray,
    Array,
    Expectation,
    Later,
    MatrixHessian,
    MeanHessian,
    PatternHessian,
    RowRules,
    Spread,
)
from pymc_ngvi.density.info import initial_point_function, terms_by_variable
from pymc_ngvi.density.logdensity import LogDensity, Sum
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.graph import MissingDerivativeError
from pymc_ngvi.graphs.layout import Layout
from pymc_ngvi.graphs.rewrites import stored_value
from pymc_ngvi.reading.predictors import ROUNDING, Factor, factors_of, logp_of
from pymc_ngvi.reading.roles import n_axes
from pymc_ngvi.rows.linear_map import entries_of
from pymc_ngvi.rows.row_hessian import Patterns

# --- what can go wrong with shards; each error says which shard, and what to do ---


class ShardError(RuntimeError):
    """A shard can't be used: its model could not be made or evaluated, or is not that of the others.

    Parameters
    ----------
    message : str
    key : hashable
        Of the shard.

    Attributes
    ----------
    approx : NGVIApproximation or None
        What the fit had come to, if it had begun.
    """

    def __init__(self, message: str, key: Hashable) -> None:
        super().__init__(message)
        self.key = key
        self.approx: object = None

    def __reduce__(self) -> tuple[type, tuple[str, Hashable]]:
        """Return what to pickle: errors cross processes."""
        return type(self), (str(self), self.key)


class BrokenExecutorError(RuntimeError):
    """The executor that evaluates shards, or the cluster that makes fits, can't be used any more.

    Parameters
    ----------
    message : str

    Attributes
    ----------
    approx : NGVIApproximation or None
        What the fit had come to, if it had begun: ``approx.refine(executor=...)`` goes on.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.approx: object = None


# --- a cluster of Dask: what its workers have done, as it comes in, and whether there are any ---

#: Seconds between looks at the workers while results are waited for; seconds that there may be none.
_LOOK, _PATIENCE = 5.0, 300.0


class Lost(NamedTuple):
    """A task that went with its worker, or with several, one after another."""

    n_workers: int


class Cluster:
    """The workers behind a client, whatever they do.

    Errors say what they evaluate, and how that goes on: after the client was closed, and after all workers have gone.
    """

    def __init__(self, client: Any, of: str, if_closed: str, if_gone: str) -> None:
        self.client, self._of, self._if_closed, self._if_gone = client, of, if_closed, if_gone
        self._were_seen, self._is_warned, self._none_since = False, False, float("nan")

    def completed(self, waiting: Mapping[int, Any]) -> Iterator[tuple[int, Any]]:
        """Yield numbers and futures as they are done, until all are."""
        from distributed import as_completed

        left = {future.key: (number, future) for number, future in waiting.items()}
        while left:
            self.look()
            completed = as_completed([future for _, future in left.values()], raise_errors=False, timeout=_LOOK)
            with contextlib.suppress(TimeoutError):
                for future in completed:
                    number, _ = left.pop(future.key)
                    yield number, future
            self.check()

    def value(self, future: Any) -> Any:
        """Return what has come of a task; `Lost` where it went with its worker."""
        from distributed import KilledWorker
        from distributed.client import FutureCancelledError

        try:
            return future.result()
        except KilledWorker as error:  # Dask has tried several before it gives up
            self.check()
            return Lost(error.allowed_failures + 1)
        except FutureCancelledError:
            self.check()
            return Lost(1)

    def check(self) -> None:
        """Raise BrokenExecutorError where the client is closed."""
        if self.client.status != "running":
            raise BrokenExecutorError(
                f"The Dask client that evaluates the {self._of} is {self.client.status}. {self._if_closed}"
            )

    def look(self) -> None:
        """Raise an error where all workers have gone, and none has come back for minutes.

        A cluster that is adaptive starts workers by itself, perhaps after hours in a queue, and one that has had none
        yet may be starting: there is a warning.
        """
        try:
            n_workers = self.n_workers()
        except OSError:  # the scheduler does not answer: if it never will, the client says so
            return
        if n_workers:
            self._were_seen, self._is_warned, self._none_since = True, False, float("nan")
            return
        now = time.monotonic()
        if not self._none_since <= now:  # NaN: the first look without workers
            self._none_since = now
        if now - self._none_since < _PATIENCE:
            return
        without = f"The Dask cluster has had no worker for {now - self._none_since:,.0f} s"
        adaptive = getattr(self.client.cluster, "_adaptive", None)  # which starts workers by need
        starts_some = adaptive is not None and getattr(adaptive, "state", "running") in ("starting", "running")
        if self._were_seen and not starts_some:
            raise BrokenExecutorError(
                f"{without}: those that evaluated the {self._of} have died or were closed, and none has come "
                f"back. {self._if_gone}"
            )
        if not self._is_warned:
            logger.warning("%s; the %s are waiting for one. Start some, or interrupt.", without, self._of)
            self._is_warned = True

    def n_workers(self) -> int:
        """Return how many workers there are now."""
        return len(self.client.nthreads())  # `scheduler_info` lists none while Dask renews it


def client_of(executor: object) -> Any:
    """Return the client of Dask behind an executor; None where it is no such thing."""
    if not type(executor).__module__.startswith("distributed."):
        return None
    client = getattr(executor, "_client", None) or executor  # that of `client.get_executor()`
    return client if hasattr(client, "get_executor") else None


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


#: Asks for a function of a shard, as `operator.methodcaller` does; what it returns has to be small.
type Request = Callable[["Shard"], object]
#: The same for all shards, or one for each.
type Requests = Request | Sequence[Request]


# --- what there is to know of the model of a shard: its variables, its prior, whether it has data of its own ---


def digest_of(term: Variable, free: Iterable[Variable]) -> str:
    """Return a digest of all data that a term reads, but for those of the prior of free variables."""
    digests = {hashlib.blake2b(np.ascontiguousarray(array).tobytes()).digest() for array in _arrays([term], free)}
    return hashlib.blake2b(b"".join(sorted(digests))).hexdigest()


def _arrays(of: Iterable[Variable], but: Iterable[Variable] = ()) -> Iterator[AnyArray]:
    for var in ancestors(list(of), list(but)):
        if isinstance(array := stored_value(var), np.ndarray):
            yield array


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
            return request(self)

    def of_model(self, function: Callable[..., object]) -> object:
        """Return a function of the key and the model."""
        return function(self.key, self._model)

    def of_likelihood(self, function: Callable[..., object], *arguments: object) -> object:
        """Return a function of the log likelihood, a `LogDensity`, and arguments."""
        return function(self._likelihood, *arguments)

    def facts(self, theta: Array) -> ModelFacts:
        """Return the facts of the model, with its prior at points, (n_points, n_dim)."""
        key, model = self.key, self._model
        with _LOCK:
            shapes = {rv: tuple(rv.shape.eval()) for rv in model.observed_RVs}
            if not any(map(math.prod, shapes.values())) and not model.potentials:
                raise ShardError(f"Shard {key!r} is empty: its model has no observed values. Leave its key out.", key)
            observations = {str(rv.name): math.prod(shape[: n_axes(rv, len(shape))]) for rv, shape in shapes.items()}
            observed, own = ({str(rv.name) for rv in rvs} for rvs in (model.observed_RVs, model.free_RVs))
            names = (name.removesuffix("_observed") for name in sorted(observed) if name.endswith("_observed"))
            lacking = tuple(name for name in names if f"{name}_unobserved" in own)
            free = model.free_RVs
            layout = Layout.from_model(model, model.initial_point(random_seed=0))
            signature = dict[str, VariableForm]()
            for v in layout.variables:
                dims = tuple(model.named_vars_to_dims.get(v.name) or ())
                coords = tuple(
                    (dim, tuple("nan" if x != x else x for x in model.coords.get(dim) or ())) for dim in dims
                )
                signature[v.value_name] = VariableForm(v.name, v.shape, dims, coords)
            deterministics = {str(term.name): digest_of(term, free) for term in model.deterministics}
            if layout.n_dim != theta.shape[1]:  # the caller compares signatures
                return ModelFacts(signature, observations, np.empty(0), {}, deterministics, lacking)
            factors = factors_of(model, [*free, *model.potentials])
            with without_c(model):
                terms = [
                    logp_of(part) for part in (factors[: len(free)], *([factor] for factor in factors[len(free) :]))
                ]
                function = model.compile_fn(terms, inputs=model.value_vars, mode="FAST_COMPILE", point_fn=True)
                values = [function(layout.unflatten(row)) for row in theta]
            prior, *others = np.array(values, dtype=np.float64).reshape(len(theta), -1).T
            potentials = {
                str(term.name): Potential(at_points, digest_of(term, free))
                for term, at_points in zip(model.potentials, others, strict=True)
            }
            return ModelFacts(signature, observations, prior, potentials, deterministics, lacking)

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

    def expected(
        self,
        q: Spread,
        name: str,
        references: Mapping[str, Spread | None],
        which: Sequence[str] | None,
        *,
        adapt: bool,
        is_dense: bool,
        n_rows: int,
    ) -> ShardExpectation | None:
        """Return the expectation under a Gaussian; None where rules are not kept, and not told how to be chosen.

        Rules are those that were chosen for one of the references, by its name; where none are given, they are chosen,
        and rows compared with the log likelihood at the mean. With ``adapt``, they are chosen anew where rows are
        wider than they were, or much narrower. ``name`` is that of q as a reference, and ``n_rows`` the number of rows
        of all shards and of the prior.
        """
        likelihood, rows = self._likelihood, self._likelihood.rows
        if rows is None:
            raise ShardError(f"The log likelihood of shard {self.key!r} is no sum over rows any more.", self.key)
        rows.n_rows_in_all = n_rows
        pattern, agrees, seen, rules = None if is_dense else self._pattern, True, rows.seen(q), None
        if is_new := which is None:
            location = q.location[None]
            agrees = rows.agrees(location, likelihood.by_rows.logp(location))
        else:
            reference = which[self._number]
            if reference not in self._rules:
                if (before := references[reference]) is None:
                    return None
                self._keep(reference, rows.under(before).rules)  # chosen again, they are the same
            self._rules.move_to_end(reference)
            rules = self._rules[reference]
            is_new = adapt and rows.are_stale(seen, rules)
        found = rows.under(seen, Patterns(pattern), None if is_new else rules)
        if is_new:
            self._keep(name, found.rules)
        hessian = _entries(found.hessian, pattern, likelihood.n_dim)
        return ShardExpectation(
            found.value, found.error, found.grad, hessian, zlib.crc32(found.rules.level.tobytes()), is_new, agrees
        )

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


# --- where shards are evaluated: in this process, or by any executor of `concurrent.futures` ---


#: The shards of this process, those used last at the end.
_SHARDS = OrderedDict[tuple[str, int], Shard]()


def kept(recipe: Recipe, number: int) -> Shard:
    """Return a shard of this process, made where it is not kept."""
    at = recipe.name, number
    with _LOCK:
        if at not in _SHARDS:
            _SHARDS[at] = Shard(recipe, number)
        _SHARDS.move_to_end(at)
        shard = _SHARDS[at]
        own = [other for other in list(_SHARDS) if other[0] == recipe.name]
        for other in own[: max(len(own) - (recipe.keep or len(own)), 0)]:
            del _SHARDS[other]
    return shard


def forget(name: str) -> None:
    """Forget the shards of a recipe, those of this process; it may be called while others are looked up.

    It takes no lock: the garbage collector may call it in a thread that compiles, for which one with the lock waits.
    """
    for at in [at for at in list(_SHARDS) if at[0] == name]:
        _SHARDS.pop(at, None)


def pickled(recipe: Recipe, requests: Requests) -> list[bytes]:
    """Return the request to each shard, pickled: once, where it is the same for all."""
    if isinstance(requests, Sequence):
        return [cloudpickle.dumps(request) for request in requests]
    return [cloudpickle.dumps(requests)] * len(recipe.keys)


def answer_of(recipe: Recipe, number: int, request: bytes) -> object:
    """Return what a shard answers to a pickled request, in whichever process this is."""
    hold_threads(recipe)
    return kept(recipe, number).answer(cloudpickle.loads(request))


_one_thread = functools.cache(functools.partial(threadpool_limits, 1, user_api="blas"))


def hold_threads(recipe: Recipe) -> None:
    """Keep linear algebra of another process than that which asks to one thread: the same bits whoever computes."""
    if os.getpid() != recipe.home:
        _one_thread()


#: Returns the answer of each shard, in the order of the keys.
type Engine = Callable[[Recipe, Requests, Task], list[object]]


def in_process(recipe: Recipe, requests: Requests, done: Task) -> list[object]:
    """Evaluate shards one after another, in this process."""
    result = []
    with threadpool_limits(1, user_api="blas"):
        each = requests if isinstance(requests, Sequence) else [requests] * len(recipe.keys)
        for number, request in enumerate(each):
            result.append(kept(recipe, number).answer(request))
            done.completed += 1
    return result


def by_executor(executor: Executor, recipe: Recipe, requests: Requests, done: Task) -> list[object]:
    """Evaluate shards by an executor: threads, processes, or anything with ``submit``."""
    futures: list[Future[object]] = []
    try:
        with threadpool_limits(1, user_api="blas"):
            for number, request in enumerate(pickled(recipe, requests)):
                futures.append(executor.submit(answer_of, recipe, number, request))
            for future in as_completed(futures):
                future.result()
                done.completed += 1
    except (BrokenExecutor, RuntimeError) as error:
        if isinstance(error, ShardError):
            raise
        raise BrokenExecutorError(
            f"The executor that evaluates the shards is broken: {type(error).__name__}: {error}. Make another "
            "one, and go on with it: approx.refine(executor=...) for a fit, shards.use(...) for all else."
        ) from error
    finally:
        for future in futures:
            future.cancel()
    return [future.result() for future in futures]


# --- shards on Dask: each lives on a worker, and is made again on another where that dies ---

#: Workers that may die in one evaluation of a shard, one after another.
_MOST_LOST = 10
#: Seconds to wait each time that a worker took no data.
_PAUSES = tuple(0.1 * 2.0**k for k in range(8))
#: Bytes from which on a request is no part of a task.
_LARGE = 500_000
_SAID = (
    "shards",
    "Make another one, and go on with it: approx.refine(executor=...) for a fit, shards.use(...) for all else.",
    "Start some, and go on: approx.refine() for a fit; the call again for all else. With another cluster: "
    "approx.refine(executor=...), shards.use(...).",
)


class OnDask:
    """Evaluates shards on the workers of a cluster.

    The shards are results of tasks, so that Dask makes those of a lost worker again.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        #: Of the recipe asked for last.
        self._shards: tuple[str, list[Any]] = ("", [])
        self._cluster = Cluster(client, *_SAID)

    def __call__(self, recipe: Recipe, requests: Requests, done: Task) -> list[object]:
        """Return the answer of each shard, in the order of the keys."""
        self._cluster.check()
        asked, shards = pickled(recipe, requests), self._made(recipe)
        result: list[object] = [None] * len(shards)
        waiting, lost = self._all_asked(recipe, shards, asked, range(len(shards))), Counter[int]()
        try:
            while waiting:
                again = []
                for number, future in self._cluster.completed(waiting):
                    if isinstance(value := self._cluster.value(future), Lost):
                        again.append(number)
                        lost[number] += value.n_workers
                        continue
                    result[number] = value
                    del waiting[number]
                    done.completed = len(shards) - len(waiting)
                if again and max(lost.values()) > _MOST_LOST:
                    [(number, times)] = lost.most_common(1)
                    raise BrokenExecutorError(
                        f"Shard {recipe.keys[number]!r} was lost {times} times: its workers die, perhaps for "
                        "lack of memory. Make the shards smaller, or give workers more memory."
                    )
                for number in again:
                    shards[number] = self._shard(recipe, number, shards[number])
                if again:
                    waiting |= self._all_asked(recipe, shards, asked, again)
        finally:
            for future in waiting.values():
                future.cancel()
        return result

    def _made(self, recipe: Recipe) -> list[Any]:
        name, shards = self._shards
        before = shards if name == recipe.name else [None] * len(recipe.keys)
        # Those that could not be made in an earlier pass are made again.
        self._shards = recipe.name, [self._shard(recipe, number, shard) for number, shard in enumerate(before)]
        return self._shards[1]

    def _shard(self, recipe: Recipe, number: int, before: Any) -> Any:
        """Return a shard, which may be there: the same one, unless it is lost itself."""
        if before is not None and before.status not in ("error", "lost", "cancelled"):
            return before
        return self._client.submit(_make, recipe, number, pure=False)

    def _all_asked(
        self, recipe: Recipe, shards: list[Any], requests: list[bytes], numbers: Iterable[int]
    ) -> dict[int, Any]:
        """Send some shards their requests; large ones once for all, and apart from the tasks."""
        sent, futures = dict[int, Any](), {}
        numbers = list(numbers)
        held = self._client.who_has([shards[number] for number in numbers])
        for number in numbers:
            request = requests[number]
            if len(request) > _LARGE and id(request) not in sent:
                # Where it is lost with its worker, the evaluation is, too, and it is sent again.
                sent[id(request)] = self._scattered(request)
            shipped = sent.get(id(request), request)
            # A large request lies anywhere: go where the shard is, if there is such a place still.
            workers = list(held.get(shards[number].key, ()))
            where = {"workers": workers, "allow_other_workers": True} if workers else {}
            futures[number] = self._client.submit(_answer, recipe, shards[number], shipped, pure=False, **where)
        return futures

    def _scattered(self, request: bytes) -> Any:
        """Put a request on a worker: on another one, where Dask does not know yet that the first is dead."""
        for pause in _PAUSES:
            try:
                return self._client.scatter(_Held(request), hash=False)
            except OSError:  # of connections, or timeouts
                self._cluster.check()
                time.sleep(pause)
        raise BrokenExecutorError("No worker of the cluster takes data. Start some, or make another client.")


class _Held(NamedTuple):
    """A request that lies on a worker."""

    content: bytes


def _make(recipe: Recipe, number: int) -> Shard:
    hold_threads(recipe)
    return Shard(recipe, number)


def _answer(recipe: Recipe, shard: Shard, request: "bytes | _Held") -> object:
    hold_threads(recipe)
    return shard.answer(cloudpickle.loads(request.content if isinstance(request, _Held) else request))


# --- whether shards are parts of one model: the same variables, the same prior, data in each ---

_DIFFER = dict.fromkeys(("dims", "coordinates"), "differ")


def check_same(keys: Sequence[Hashable], facts: Sequence[ModelFacts]) -> None:
    """Compare each shard with the first."""
    first = facts[0]
    for key, of_shard in zip(keys, facts, strict=True):
        if of_shard.lacking and len(keys) > 1:
            raise ShardError(
                f"{of_shard.lacking[0]!r} lacks values in shard {key!r}. They are free variables, and those of shards "
                "have to be the same. Leave out the rows that lack them.",
                key,
            )
    for key, other in zip(keys[1:], facts[1:], strict=True):
        _check_variables(keys[0], first.signature, key, other.signature)
        if not _same(first.log_prior, other.log_prior):
            raise ShardError(
                f"The priors of shards {keys[0]!r} and {key!r} differ: at the same points, their log densities are "
                f"{_listed(first.log_prior)} and {_listed(other.log_prior)}. Priors that are scaled to the data, and "
                "predictors that are standardised, have to be so by the numbers of the whole data.",
                key,
            )
        if first.potentials.keys() != other.potentials.keys():
            raise ShardError(f"Shards {keys[0]!r} and {key!r} have other potentials.", key)


def _is_common(name: str, keys: Sequence[Hashable], facts: Sequence[ModelFacts]) -> bool:
    """Tell whether a potential is the same in all shards."""
    first, *others = (of_shard.potentials[name] for of_shard in facts)
    if not all(_same(first.values, other.values) for other in others):
        return False
    for key, other in zip(keys[1:], others, strict=True):
        if other.data != first.data:
            raise ShardError(
                f"The potential {name!r} has the same values in all shards, but reads other data in {key!r} than in "
                f"{keys[0]!r}: it can't be told whether it is part of the prior, and counts once. If it is a "
                "likelihood, make it an observed variable, such as a pm.CustomDist.",
                key,
            )
    return True


def _check_variables(one: Hashable, first: Signature, key: Hashable, other: Signature) -> None:
    if list(first) != list(other):
        raise ShardError(
            f"Shard {one!r} has the free variables {', '.join(first)}, and shard {key!r} has {', '.join(other)}: give "
            "all shards the same variables, in the same order.",
            key,
        )
    for name, parts in first.items():
        for what, here, there in zip(parts._fields, parts, other[name], strict=True):
            if here != there:
                raise ShardError(
                    f"The {what} of {name!r} {_DIFFER.get(what, 'differs')} between the shards {one!r} "
                    f"({shortened(here)}) and {key!r} ({shortened(there)}). Where these follow from the data, such "
                    "as groups or levels of a factor, they have to be those of the whole data.",
                    key,
                )


def _same(one: Array, other: Array) -> bool:
    return len(one) == len(other) and bool(np.allclose(one, other, rtol=ROUNDING, atol=ROUNDING, equal_nan=True))


def _listed(values: Array) -> str:
    return f"({', '.join(f'{value:.6g}' for value in values)})"


# --- `Shards`: a model whose data lie in several places, for `pm.fit` ---

#: Of shards that no executor evaluates.
_HERE = "in this process"


class Shards:
    """Data in parts, each with a model of its own rows: ``pm.fit(method="ngvi", shards=...)`` fits all together.

    Every shard has the same free variables and priors, and likelihoods of its own rows. The posterior is that of one
    model with all rows: priors count once. A potential counts once, too, where it is the same in all shards. Sums go
    through the shards in the order of the keys, and are the same to the last bit, whichever worker computes a part.
    Draws have the Deterministics that read the same data in all shards; `map` is for the others.

    Parameters
    ----------
    build : callable
        Returns the ``pm.Model`` of a key: a new one for each, with the same data whenever it is called. It is called
        where the shard is evaluated, and should read its data there. What follows from the data, such as the levels of
        a factor or the scale of a prior, has to be that of all data.
    keys : sequence of hashable
        One for each shard: a path, a number of a row group, ...
    executor : concurrent.futures.Executor or distributed.Client, optional
        Where shards are evaluated. Default: in this process, one after another. On Dask, shards of a worker that dies
        are made again on another, and the answer is the same to the last bit.
    keep : int, optional
        Shards that a process keeps in memory, at most; others are made again when they are needed. Default: all. Dask
        keeps what it was given.

    Raises
    ------
    ValueError
        Without keys, or for keys that occur twice.
    TypeError
        Where ``build`` can't be called or sent to other processes; for keys that are no sequence, or can't be hashed;
        for something that is no executor.

    Examples
    --------
    >>> import numpy as np
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> def build(year):
    ...     y = np.random.default_rng(year).normal(1.0, size=500)
    ...     with pm.Model() as model:
    ...         mu = pm.Normal("mu", 0.0, 10.0)
    ...         pm.Normal("y", mu, 1.0, observed=y)
    ...     return model
    >>> shards = pymc_ngvi.Shards(build, [2001, 2002, 2003])
    >>> approx = pm.fit(method="ngvi", shards=shards, progressbar=False)
    >>> round(float(approx.std_data["mu"]), 4)
    0.0258
    """

    def __init__(
        self,
        build: Callable[[Any], pm.Model],
        keys: Sequence[Hashable],
        executor: Executor | object | None = None,
        *,
        keep: int | None = None,
    ) -> None:
        if not callable(build):
            raise TypeError(f"build should be a function that returns the model of a key; got {build!r}.")
        if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
            raise TypeError(f"keys should be a sequence with a key for each shard; got {keys!r}.")
        keys = tuple(keys)
        for key in keys:
            try:
                hash(key)
            except TypeError:
                raise TypeError(f"The key {key!r} can't be hashed: take a string, number or tuple instead.") from None
        if not keys:
            raise ValueError("There are no shards: keys is empty.")
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"The key {twice!r} occurs {keys.count(twice)} times: its rows would count as often.")
        if keep is not None and (not isinstance(keep, int | np.integer) or keep < 1):
            raise ValueError(f"keep is a number of shards, at least 1; got {keep!r}.")
        try:
            sent = cloudpickle.dumps(build)
        except Exception as error:
            raise TypeError(
                f"build={build!r} can't be sent to other processes ({type(error).__name__}: {error}): let it open what "
                "it needs by itself."
            ) from error
        self._build, self._recipe = build, Recipe(sent, keys, keep, uuid.uuid4().hex, os.getpid())
        weakref.finalize(self, forget, self._recipe.name)
        self.use(executor)
        self.n_passes = 0

    def __repr__(self) -> str:
        """Return the number of shards and where they are evaluated."""
        return f"<Shards: {len(self.keys)}, {self._where}>"

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: an executor can't be."""
        return {**self.__dict__, "_where": _HERE, "_engine": in_process}

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """One for each shard."""
        return self._recipe.keys

    def model(self, key: Hashable) -> pm.Model:
        """Return the model of a shard, made in this process.

        Raises
        ------
        ShardError
            Where there is none.
        """
        return made(self._build, key)

    def use(self, executor: Executor | object | None) -> None:
        """Evaluate shards elsewhere from now on."""
        client = None if executor is None else client_of(executor)
        self._where: str
        self._engine: Engine
        if executor is None:
            self._where, self._engine = _HERE, in_process
        elif client is not None:
            self._where, self._engine = "on Dask", OnDask(client)
        elif isinstance(executor, Executor):
            self._where, self._engine = f"by {type(executor).__name__}", functools.partial(by_executor, executor)
        else:
            raise TypeError(
                f"executor should be a concurrent.futures.Executor or a distributed.Client; got {executor!r}. For a "
                "Dask cluster, give Client(cluster)."
            )

    def ask(self, requests: Requests) -> list[Any]:
        """Return the answer of each shard, in the order of the keys: one pass through the data."""
        self.n_passes += 1
        with task("Shards", len(self.keys)) as shards:
            return self._engine(self._recipe, requests, shards)

    def look(self, theta: Array) -> tuple[tuple[str, ...], frozenset[str], dict[str, int]]:
        """Check that shards are parts of one model, at points (n_points, n_dim).

        Returns
        -------
        tuple
            What they have in common: the potentials of the prior, the Deterministics that are no functions of a shard's
            own data, and the number of observations of all shards by observed variable.

        Raises
        ------
        ShardError
            Naming the shard that is not.
        """
        facts: list[ModelFacts] = self.ask(methodcaller("facts", theta))
        check_same(self.keys, facts)
        # Those that are the same in all shards are parts of the prior.
        names = facts[0].potentials if len(facts) > 1 else ()
        common = tuple(name for name in names if _is_common(name, self.keys, facts))
        if common != self._recipe.without:
            forget(self._recipe.name)
            self._recipe = replace(self._recipe, without=common, name=f"{self._recipe.name}-")
            weakref.finalize(self, forget, self._recipe.name)
        self.n_passes = 0
        observed = dict.fromkeys(name for fact in facts for name in fact.observations)
        observations = {name: sum(fact.observations.get(name, 0) for fact in facts) for name in observed}
        first, *others = (of_shard.deterministics.items() for of_shard in facts)
        return common, frozenset(name for name, _ in set(first).intersection(*others)), observations

    def map(self, function: Callable[[Hashable, pm.Model], Any]) -> Iterator[tuple[Hashable, Any]]:
        """Apply a function to each shard where it is.

        Parameters
        ----------
        function : callable
            Of the key and the model; what it returns is brought here, and should be small.

        Returns
        -------
        iterator of tuple
            Keys and results, in the order of the keys.

        Raises
        ------
        ShardError
            Where the function fails.

        Examples
        --------
        Root mean squared errors of the posterior predictive mean, shard by shard:

        >>> import numpy as np
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> def build(year):
        ...     y = np.random.default_rng(year).normal(1.0, size=500)
        ...     with pm.Model() as model:
        ...         mu = pm.Normal("mu", 0.0, 10.0)
        ...         pm.Normal("y", mu, 1.0, observed=y)
        ...     return model
        >>> shards = pymc_ngvi.Shards(build, [2001, 2002])
        >>> approx = pm.fit(method="ngvi", shards=shards, progressbar=False)
        >>> draws = approx.sample(200, random_seed=1)
        >>> def error(key, model):
        ...     predicted = pm.sample_posterior_predictive(draws, model=model, progressbar=False, random_seed=1)
        ...     mean = predicted.posterior_predictive["y"].mean(["chain", "draw"])
        ...     return float(np.sqrt(np.mean((mean - predicted.observed_data["y"]) ** 2)))
        >>> [(key, round(value, 1)) for key, value in shards.map(error)]
        [(2001, 1.0), (2002, 1.0)]
        """
        passes = self.n_passes
        results = self.ask(methodcaller("of_model", function))
        self.n_passes = passes
        return iter(zip(self.keys, results, strict=True))


@stored("shard_rules")
@dataclass(frozen=True)
class ShardRules(RowRules):
    """Which rules of quadrature expectations of shards are taken by.

    Shards choose theirs for a Gaussian, and choose them again where they have lost them: nothing grows with the data.
    """

    #: Of the prior's rows.
    prior: RowRules
    #: Gaussians for which shards have chosen, by names that no others have.
    references: Mapping[str, Spread]
    #: The name of that of each shard.
    which: tuple[str, ...]


class ShardedDensity(Sum):
    """Log density of a model whose data are in shards; see `ModelDensity`."""

    is_sharded = True

    def __init__(
        self, shards: Shards, backend: str = "auto", compile_kwargs: Mapping[str, object] | None = None
    ) -> None:
        self.shards = shards
        model = shards.model(shards.keys[0])
        point = initial_point_function(model)()
        start = Layout.from_model(model, point).flatten(point)
        steps = np.random.default_rng(0).uniform(-0.5, 0.5, (2, len(start)))
        self._common, self._derived, self.observations = shards.look(start + steps)
        super().__init__(LogDensity(model, backend, compile_kwargs, factors=self._factors_of))
        self._outlines: list[Outline] = shards.ask(methodcaller("outline"))

    def _factors_of(self, model: pm.Model) -> tuple[Factor, ...]:
        return factors_of(model, [*model.free_RVs, *(model[name] for name in self._common)])

    @property
    def deterministics(self) -> list[Variable]:
        """The Deterministics that are no functions of a shard's own data."""
        return [term for term in super().deterministics if term.name in self._derived]

    def terms(self, theta: Array) -> dict[str, float]:
        """Return the terms of log p by the names of their variables, and of shards, at a point (n_dim,)."""
        common = {str(rv.name) for rv in self.model.free_RVs} | set(self._common)
        point, found = self.layout.unflatten(theta), dict[str, float]()
        for key, terms in self.shards.map(lambda _, model: terms_by_variable(model, point)):
            found |= {name if name in common else f"{name} of shard {key!r}": value for name, value in terms.items()}
        return found

    # --- values and gradients ---

    @property
    def likelihood_seconds(self) -> float:
        """Estimated time of the likelihoods and their gradients at one point."""
        return sum(outline.gradient_seconds for outline in self._outlines)

    def each(self, function: Callable[[LogDensity, Array], Any], theta: Array) -> Sequence[Any]:
        """Evaluate a function of the likelihood of each shard at points, (n_draws, n_dim)."""
        return self.shards.ask(methodcaller("of_likelihood", function, theta))

    # --- by rows ---

    @property
    def n_directions(self) -> int | None:
        """Directions in which the functions of rows vary, at most."""
        own, parts = super().n_directions, [outline.n_directions for outline in self._outlines]
        known = [n for n in (own, *parts) if n is not None]
        return max(known) if len(known) > len(parts) else None

    @functools.cached_property
    def _n_rows_in_all(self) -> int:
        return (0 if (own := self.prior.rows) is None else own.n_rows) + sum(
            outline.n_rows or 0 for outline in self._outlines
        )

    def expected(
        self, q: Spread, rules: RowRules | None = None, *, adapt: bool = False, least: float = -np.inf
    ) -> Expectation:
        """Return the expectation of log p under a Gaussian; see `ModelDensity`."""
        given = rules if isinstance(rules, ShardRules) else None
        rows = self.prior.rows
        if rows is not None:
            rows.n_rows_in_all = self._n_rows_in_all
        own = self.prior.expected(q, None if given is None else given.prior, adapt=adapt)
        name = uuid.uuid4().hex
        references, which = ({}, None) if given is None else (given.references, given.which)
        ask = functools.partial(
            methodcaller, "expected", q, name, which=which, adapt=adapt, is_dense=self.pattern is None,
            n_rows=self._n_rows_in_all,
        )  # fmt: skip
        parts: list[ShardExpectation] = self.shards.ask(ask(references=dict.fromkeys(references)))
        if any(part is None for part in parts):  # a shard that was made again has no rules
            parts = self.shards.ask(ask(references=references))
        wrong = [key for key, part in zip(self.shards.keys, parts, strict=True) if not part.agrees]
        if wrong:
            self.by_rows.give_up(why := f"the rows of shard {wrong[0]!r} are not all of its log likelihood")
            raise RowsGivenUp(why)
        # Those that have chosen rules have them for this Gaussian, as all have where none were given.
        before = which or (name,) * len(parts)
        which = tuple(name if part.is_new else old for part, old in zip(parts, before, strict=True))
        return Expectation(
            own.value + sum(part.value for part in parts),
            own.error + sum(part.error for part in parts),
            sum((part.grad for part in parts), own.grad),
            self._sum_of_hessians(own.hessian, [part.hessian for part in parts]),
            ShardRules(
                np.concatenate([own.rules.level, [part.rules for part in parts]]),
                own.rules.sd,
                own.rules,
                {of: known for of, known in {**references, name: q}.items() if of in which},
                which,
            ),
        )

    def rows_cover(self, draw: Callable[[], Array]) -> bool:
        """Tell whether rows are all of log p at draws; see `RowsTarget`."""
        are_all = not any(outline.leaves_out_conditions for outline in self._outlines)
        return super().rows_cover(draw) and (
            are_all or all(self.each(lambda likelihood, theta: likelihood.rows_cover(lambda: theta), draw()))
        )

    # --- second derivatives ---

    @property
    def has_hessian(self) -> bool:
        """Whether every operation of the model has a second derivative."""
        return self.prior.has_hessian and self.hessian_error() is None

    def hessian_error(self) -> MissingDerivativeError | None:
        """Return the error that names the operation without a second derivative, if there is one."""
        error = next((outline.derivative_error for outline in self._outlines if outline.derivative_error), "")
        return MissingDerivativeError(error) if error else super().hessian_error()

    @functools.cached_property
    def structural_pattern(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0; None where they are too many."""
        patterns = [self.prior.structural_pattern, *(outline.pattern for outline in self._outlines)]
        known = [pattern for pattern in patterns if pattern is not None]
        if len(known) < len(patterns):
            return None
        return Pattern.of(sum((p.matrix.astype(np.float64) for p in known[1:]), known[0].matrix.astype(np.float64)))

    @functools.cached_property
    def pattern(self) -> Pattern | None:
        """The same; None where the Hessian counts as dense."""
        return None if is_dense(self.structural_pattern) else self.structural_pattern

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the mean of the Hessian over draws, (n_draws, n_dim), which evaluates what it is asked for."""

        def evaluated() -> MeanHessian:
            parts = self.shards.ask(methodcaller("mean_hessian", theta, self.pattern is None))
            return self._sum_of_hessians(self.prior.mean_hessian(theta), parts)

        return Later(self.pattern, evaluated)

    def _sum_of_hessians(self, own: MeanHessian, parts: list[Array]) -> MeanHessian:
        """Add the Hessians of shards, as they send them, to that of the prior."""
        pattern = self.pattern
        if pattern is None:
            return MatrixHessian(sum(parts, own.products(np.eye(self.n_dim))))
        patterns = [outline.pattern for outline in self._outlines if outline.pattern is not None]
        total = sum(of.symmetric(values) for of, values in zip(patterns, parts, strict=True))
        if own.pattern is not None:
            return PatternHessian(pattern, entries_of(own.pattern.symmetric(own.values()) + total, pattern))
        dense = own.products(np.eye(self.n_dim))[pattern.rows, pattern.cols]
        return PatternHessian(pattern, dense + entries_of(total, pattern))
