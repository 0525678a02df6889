"""Where shards are evaluated: in this process, or by any executor of `concurrent.futures`."""

import functools
import threading

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from typing import Protocol

import cloudpickle

from threadpoolctl import threadpool_limits

from pymc_ngvi.density.shards.errors import BrokenExecutorError, ShardError
from pymc_ngvi.density.shards.recipe import Recipe
from pymc_ngvi.density.shards.requests import Request, Requests
from pymc_ngvi.density.shards.shard import Shard

#: Is told how many shards are done.
type Done = Callable[[int], object]


class ShardRunner(Protocol):
    """Evaluates all shards."""

    name: str

    def answers(self, recipe: "Recipe", requests: Requests, done: Done) -> list[object]:
        """Return the answer of each shard to a request, or to its own, in the order of the keys."""

    def close(self, recipe: "Recipe") -> None:
        """Forget the shards."""


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
    """Forget the shards of a recipe, those of this process; it may be called while others are looked up."""
    with _LOCK:
        for at in [at for at in list(_SHARDS) if at[0] == name]:
            del _SHARDS[at]


def each(recipe: Recipe, requests: Requests) -> Sequence[Request]:
    """Return the request to each shard."""
    return requests if isinstance(requests, Sequence) else [requests] * len(recipe.keys)


def pickled(recipe: Recipe, requests: Requests) -> list[bytes]:
    """Return the request to each shard, pickled: once, where it is the same for all."""
    if isinstance(requests, Sequence):
        return [cloudpickle.dumps(request) for request in requests]
    return [cloudpickle.dumps(requests)] * len(recipe.keys)


def answer_of(recipe: Recipe, number: int, request: bytes) -> object:
    """Return what a shard answers to a pickled request, in whichever process this is."""
    hold_threads(recipe)
    return kept(recipe, number).answer(cloudpickle.loads(request))


@functools.cache
def _one_thread() -> object:
    return threadpool_limits(1, user_api="blas")


def hold_threads(recipe: Recipe) -> None:
    """Keep linear algebra of another process than that which asks to one thread: the same bits whoever computes."""
    if not recipe.is_home:
        _one_thread()


class InProcess:
    """Evaluates shards one after another, in this process."""

    name = "in this process"

    def answers(self, recipe: Recipe, requests: Requests, done: Done) -> list[object]:
        """Return the answer of each shard, in the order of the keys."""
        result = []
        with threadpool_limits(1, user_api="blas"):
            for number, request in enumerate(each(recipe, requests)):
                result.append(kept(recipe, number).answer(request))
                done(number + 1)
        return result

    def close(self, recipe: Recipe) -> None:
        """Forget the shards."""
        forget(recipe.name)


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

    def close(self, recipe: Recipe) -> None:
        """Forget the shards of this process: those of others go with these."""
        forget(recipe.name)
