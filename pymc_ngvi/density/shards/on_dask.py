"""Shards on Dask: each lives on a worker, and is made again on another where that dies."""

import time

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import cloudpickle

from pymc_ngvi.density.shards.cluster import Advice, Cluster, Lost
from pymc_ngvi.density.shards.engines import Done, hold_threads, pickled
from pymc_ngvi.density.shards.errors import BrokenExecutorError
from pymc_ngvi.density.shards.recipe import Recipe
from pymc_ngvi.density.shards.requests import Requests
from pymc_ngvi.density.shards.shard import Shard

#: Workers that may die in one evaluation of a shard, one after another.
_MOST_LOST = 10
#: Seconds to wait each time that a worker took no data.
_PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0)
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

    Parameters
    ----------
    client : distributed.Client
    """

    name = "on Dask"

    def __init__(self, client: Any) -> None:
        self._client = client
        self._shards: dict[str, list[Any]] = {}
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

    def close(self, recipe: Recipe) -> None:
        """Forget the shards."""
        self._shards.pop(recipe.name, None)

    def _made(self, recipe: Recipe) -> list[Any]:
        if recipe.name not in self._shards:
            self._shards[recipe.name] = [self._task(recipe, number) for number in range(len(recipe.keys))]
        shards = self._shards[recipe.name]
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
