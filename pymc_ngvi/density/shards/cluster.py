"""A cluster of Dask: what its workers have done, as it comes in, and whether there are any."""

import logging
import time

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pymc_ngvi.density.shards.errors import BrokenExecutorError

#: Seconds between looks at the workers while results are waited for; seconds that there may be none.
_LOOK, _PATIENCE = 5.0, 300.0

logger = logging.getLogger("pymc.ngvi")


class Lost(NamedTuple):
    """A task that went with its worker, or with several, one after another."""

    n_workers: int


class Advice(NamedTuple):
    """What errors say of the work, and how it goes on."""

    #: What is evaluated.
    of: str
    #: After the client was closed.
    if_closed: str
    #: After all workers have gone.
    if_gone: str


class Cluster:
    """The workers behind a client, whatever they do."""

    def __init__(self, client: Any, advice: Advice) -> None:
        self.client = client
        self._advice = advice
        self._were_seen, self._is_warned, self._none_since = False, False, float("nan")

    def completed(self, waiting: Mapping[int, Any]) -> Iterator[tuple[int, Any]]:
        """Yield numbers and futures as they are done, until all are."""
        from distributed import as_completed

        left = {future.key: (number, future) for number, future in waiting.items()}
        while left:
            self.look()
            completed = as_completed([future for _, future in left.values()], raise_errors=False, timeout=_LOOK)
            while (future := _next(completed)) is not None:
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
                f"The Dask client that evaluates the {self._advice.of} is {self.client.status}. "
                f"{self._advice.if_closed}"
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
                f"{without}: those that evaluated the {self._advice.of} have died or were closed, and none has come "
                f"back. {self._advice.if_gone}"
            )
        if not self._is_warned:
            logger.warning("%s; the %s are waiting for one. Start some, or interrupt.", without, self._advice.of)
            self._is_warned = True

    def n_workers(self) -> int:
        """Return how many workers there are now."""
        return len(self.client.nthreads())  # `scheduler_info` lists none while Dask renews it


def _next(completed: Any) -> Any:
    """Return the next future that is done; None where all are, or after the time that was given."""
    try:
        return next(completed, None)
    except TimeoutError:
        return None


def client_of(executor: object) -> Any:
    """Return the client of Dask behind an executor; None where it is no such thing."""
    if not type(executor).__module__.startswith("distributed."):
        return None
    client = getattr(executor, "_client", None) or executor  # that of `client.get_executor()`
    return client if hasattr(client, "get_executor") else None
