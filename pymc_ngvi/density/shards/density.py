"""The log density of a model whose data are in shards: the prior here, the likelihood where its rows are."""

import contextlib
import functools
import os
import threading
import time
import uuid
import weakref

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pymc as pm

from numpy.typing import NDArray
from pytensor.graph.basic import Variable
from threadpoolctl import threadpool_limits

from pymc_ngvi.core.messages import shortened
from pymc_ngvi.core.pattern import Pattern, is_dense
from pymc_ngvi.core.refusal import RowsGivenUp
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Expectation, Later, MatrixHessian, MeanHessian, PatternHessian, RowRules, Spread
from pymc_ngvi.density.info import ModelInfo, initial_point_function, terms_by_variable
from pymc_ngvi.density.logdensity import LogDensity, Sum
from pymc_ngvi.density.shards.cluster import Advice, Cluster, Lost, client_of
from pymc_ngvi.density.shards.errors import BrokenExecutorError, ShardError
from pymc_ngvi.density.shards.shard import (
    Expect,
    ModelFacts,
    Outline,
    Recipe,
    Reference,
    Request,
    Requests,
    Shard,
    ShardExpectation,
    Signature,
    made,
    of_likelihood,
)
from pymc_ngvi.graphs.graph import MissingDerivativeError
from pymc_ngvi.reading.affine import Factor, factors_of
from pymc_ngvi.reading.terms import ROUNDING

# --- where shards are evaluated: in this process, or by any executor of `concurrent.futures` ---


#: Is told how many shards are done.
type Done = Callable[[int], object]


#: The shards of this process, those used last at the end.
_SHARDS = OrderedDict[tuple[str, int], Shard]()
_LOCK = threading.RLock()


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


class InProcess:
    """Evaluates shards one after another, in this process."""

    name = "in this process"

    def answers(self, recipe: Recipe, requests: Requests, done: Done) -> list[object]:
        """Return the answer of each shard, in the order of the keys."""
        result = []
        with threadpool_limits(1, user_api="blas"):
            each = requests if isinstance(requests, Sequence) else [requests] * len(recipe.keys)
            for number, request in enumerate(each):
                result.append(kept(recipe, number).answer(request))
                done(number + 1)
        return result


class ByExecutor:
    """Evaluates shards by an executor: threads, processes, or anything with ``submit``."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.name = f"by {type(executor).__name__}"

    def answers(self, recipe: Recipe, requests: Requests, done: Done) -> list[object]:
        """Return the answer of each shard, in the order of the keys."""
        futures: list[Future[object]] = []
        try:
            with threadpool_limits(1, user_api="blas"):
                for number, request in enumerate(pickled(recipe, requests)):
                    futures.append(self._executor.submit(answer_of, recipe, number, request))
                for n, future in enumerate(as_completed(futures)):
                    future.result()
                    done(n + 1)
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
_ADVICE = Advice(
    "shards",
    "Make another one, and go on with it: approx.refine(executor=...) for a fit, shards.use(...) for all else.",
    "Start some, and go on: approx.refine() for a fit; the call again for all else. With another cluster: "
    "approx.refine(executor=...), shards.use(...).",
)


class OnDask:
    """Evaluates shards on the workers of a cluster.

    The shards are results of tasks, so that Dask makes those of a lost worker again.
    """

    name = "on Dask"

    def __init__(self, client: Any) -> None:
        self._client = client
        #: Of the recipe asked for last.
        self._shards: tuple[str, list[Any]] = ("", [])
        self._cluster = Cluster(client, _ADVICE)

    def answers(self, recipe: Recipe, requests: Requests, done: Done) -> list[object]:
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
                    done(len(shards) - len(waiting))
                if again and max(lost.values()) > _MOST_LOST:
                    [(number, times)] = lost.most_common(1)
                    raise BrokenExecutorError(
                        f"Shard {recipe.keys[number]!r} was lost {times} times: its workers die, perhaps for "
                        "lack of memory. Make the shards smaller, or give workers more memory."
                    )
                for number in again:
                    shards[number] = self._remade(recipe, number, shards[number])
                if again:
                    waiting |= self._all_asked(recipe, shards, asked, again)
        finally:
            for future in waiting.values():
                future.cancel()
        return result

    def _made(self, recipe: Recipe) -> list[Any]:
        name, shards = self._shards
        if name != recipe.name:
            shards = [self._task(recipe, number) for number in range(len(recipe.keys))]
            self._shards = recipe.name, shards
        for number, shard in enumerate(shards):  # those that could not be made in an earlier pass
            shards[number] = self._remade(recipe, number, shard)
        return shards

    def _task(self, recipe: Recipe, number: int) -> Any:
        return self._client.submit(_make, recipe, number, pure=False)

    def _remade(self, recipe: Recipe, number: int, shard: Any) -> Any:
        """Return a shard after an evaluation of it was lost: the same one, unless it is lost itself."""
        return self._task(recipe, number) if shard.status in ("error", "lost", "cancelled") else shard

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

#: Is told how many shards are done, and how many there are.
type Watch = Callable[[int, int], object]


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
        self._engine = engine_of(executor)
        self.n_passes = 0
        self._watch: Watch | None = None

    def __repr__(self) -> str:
        """Return the number of shards and where they are evaluated."""
        return f"<Shards: {len(self.keys)}, {self._engine.name}>"

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: an executor can't be."""
        return {**self.__dict__, "_engine": InProcess(), "_watch": None}

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
        self._engine = engine_of(executor)

    @contextlib.contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Tell how many shards are done, and of how many, whenever one is."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def ask(self, requests: Requests) -> list[Any]:
        """Return the answer of each shard, in the order of the keys: one pass through the data."""
        self.n_passes += 1
        return self._engine.answers(self._recipe, requests, self._done)

    def _done(self, n: int) -> None:
        if self._watch is not None:
            self._watch(n, len(self.keys))

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
        facts: list[ModelFacts] = self.ask(Request(Shard.facts, (theta,)))
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
        results = self.ask(Request(Shard.of_model, (function,)))
        self.n_passes = passes
        return iter(zip(self.keys, results, strict=True))


def engine_of(executor: Executor | object | None) -> InProcess | ByExecutor | OnDask:
    """Return what evaluates shards."""
    if executor is None:
        return InProcess()
    client = client_of(executor)
    if client is not None:
        return OnDask(client)
    if not isinstance(executor, Executor):
        raise TypeError(
            f"executor should be a concurrent.futures.Executor or a distributed.Client; got {executor!r}. For a Dask "
            "cluster, give Client(cluster)."
        )
    return ByExecutor(executor)


@stored("shard_rules")
@dataclass(frozen=True)
class ShardRules(RowRules):
    """Which rules of quadrature expectations of shards are taken by.

    Shards choose theirs for a Gaussian, and choose them again where they have lost them: nothing grows with the data.
    """

    #: Of the prior's rows.
    prior: RowRules
    #: Gaussians for which shards have chosen.
    references: tuple[Reference, ...]
    #: That of each shard; shape (n_shards,).
    which: NDArray[np.intp]


class ShardedDensity(Sum):
    """Log density of a model whose data are in shards; see `ModelDensity`."""

    is_sharded = True

    def __init__(
        self, shards: Shards, backend: str = "auto", compile_kwargs: Mapping[str, object] | None = None
    ) -> None:
        self.shards = shards
        model = shards.model(shards.keys[0])
        info = ModelInfo.of(model, initial_point_function(model)())
        steps = np.random.default_rng(0).uniform(-0.5, 0.5, (2, len(info.start)))
        self._common, self._derived, self.observations = shards.look(info.start + steps)
        super().__init__(LogDensity(model, backend, compile_kwargs, factors=self._factors_of))
        self._outlines: list[Outline] = shards.ask(Request(Shard.outline))

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
        return self.shards.ask(of_likelihood(function, theta))

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
        new = Reference(q, uuid.uuid4().hex)
        references, which = ((), None) if given is None else (given.references, given.which)
        names = tuple(Reference(None, reference.name) for reference in references)
        asked = Expect(q, new.name, names, which, adapt, self.pattern is None, self._n_rows_in_all)
        parts: list[ShardExpectation] = self.shards.ask(Request(Shard.expected, (asked,)))
        if any(part is None for part in parts):  # a shard that was made again has no rules
            parts = self.shards.ask(Request(Shard.expected, (replace(asked, references=references),)))
        wrong = [key for key, part in zip(self.shards.keys, parts, strict=True) if not part.agrees]
        if wrong:
            self.by_rows.give_up(why := f"the rows of shard {wrong[0]!r} are not all of its log likelihood")
            raise RowsGivenUp(why)
        # Those that have chosen rules have them for this Gaussian, as all have where none were given.
        which = np.where([part.is_new for part in parts], len(references), 0 if which is None else which)
        used, which = np.unique(which, return_inverse=True)
        return Expectation(
            own.value + sum(part.value for part in parts),
            own.error + sum(part.error for part in parts),
            sum((part.grad for part in parts), own.grad),
            self._sum_of_hessians(own.hessian, [part.hessian for part in parts]),
            ShardRules(
                np.concatenate([own.rules.level, [part.rules for part in parts]]),
                own.rules.sd,
                own.rules,
                tuple((*references, new)[at] for at in used),
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
            parts = self.shards.ask(Request(Shard.mean_hessian, (theta, self.pattern is None)))
            return self._sum_of_hessians(self.prior.mean_hessian(theta), parts)

        return Later(self.pattern, evaluated)

    def _sum_of_hessians(self, own: MeanHessian, parts: list[Array]) -> MeanHessian:
        """Add the Hessians of shards, as they send them, to that of the prior."""
        pattern = self.pattern
        if pattern is None:
            return MatrixHessian(sum(parts, own.products(np.eye(self.n_dim))))
        if own.pattern is None:
            result = own.products(np.eye(self.n_dim))[pattern.rows, pattern.cols]
        else:
            result = np.zeros(len(pattern.rows))
            result[self._places_of(own.pattern)] = own.values()
        for part, outline in zip(parts, self._outlines, strict=True):
            assert outline.pattern is not None
            result[self._places_of(outline.pattern)] += part
        return PatternHessian(pattern, result)

    def _places_of(self, pattern: Pattern) -> NDArray[np.intp]:
        """Return where the entries of a pattern are among those of all."""
        assert self.pattern is not None
        return np.searchsorted(
            self.pattern.rows * self.n_dim + self.pattern.cols, pattern.rows * pattern.n_dim + pattern.cols
        )
