"""Fits on the workers of a Dask cluster."""

import itertools
import warnings

from collections.abc import Callable, Iterator
from typing import Any

from pymc_ngvi.core.messages import shortened
from pymc_ngvi.density.shards.cluster import Advice, Cluster, Lost, client_of
from pymc_ngvi.many.elsewhere import IN_HAND, Kit, Rows, Run, Sent, failed
from pymc_ngvi.many.fitting import Fitter, Row

_ADVICE = Advice("fits", "Make another one, with Client(cluster).", "Start some, and call again.")


def cluster_of(client: object) -> Cluster:
    """Return the cluster behind a client.

    Raises
    ------
    TypeError
        For anything but a client that waits for its results.
    BrokenExecutorError
        For one that is closed.
    """
    found = client_of(client)
    if found is None or found.asynchronous:
        what = shortened(client) if found is None else "one that is asynchronous"
        raise TypeError(
            f"client should be a distributed.Client; got {what}. For the address of a scheduler, or a cluster, give "
            "Client(address). Processes of this machine are started by n_jobs."
        )
    cluster = Cluster(found, _ADVICE)
    cluster.check()
    cluster.look()  # whether it has workers now
    return cluster


def on_dask(fitter: Fitter, cluster: Cluster) -> Run:
    """Return what fits on the workers of a cluster.

    What all fits need is the result of a task: it is sent once, workers get it from each other, and Dask makes it again
    where it was lost.
    """
    kits = _Kits(cluster.client, Kit.of(fitter).content)

    def run(cases: Iterator[Sent], is_alone: bool) -> Rows:
        """Return the cases that went with their workers; those in hand are waited for, and no others begun, then."""
        in_hand: dict[int, tuple[Any, bytes]] = {}
        lost: list[Sent] = []
        try:
            while True:
                n_in_hand = 1 if is_alone else IN_HAND * _n_workers(cluster)
                for index, case in itertools.islice(cases, 0 if lost else max(n_in_hand - len(in_hand), 0)):
                    in_hand[index] = _submitted(cluster.client, _row, kits.one(), index, case), case
                if not in_hand:
                    return lost
                index, future = next(cluster.completed({index: future for index, (future, _) in in_hand.items()}))
                row = _row_of(future, cluster, fitter, index)
                _, case = in_hand.pop(index)
                if isinstance(row, Lost):
                    lost.append((index, case))
                else:
                    yield row
        finally:
            for future, _ in in_hand.values():
                future.cancel()

    return run


def _n_workers(cluster: Cluster) -> int:
    """Return how many workers there are; at least one, for which cases wait."""
    try:
        return max(cluster.n_workers(), 1)
    except OSError:  # the scheduler is busy
        return 1


class _Kits:
    """What all fits need, on the cluster."""

    def __init__(self, client: Any, content: bytes) -> None:
        self._client, self._content = client, content
        self._kit: Any = None

    def one(self) -> Any:
        """Return it, sent again where the cluster has forgotten it, as after a restart."""
        if self._kit is None or self._kit.status in ("error", "lost", "cancelled"):
            self._kit = _submitted(self._client, Kit, self._content)
        return self._kit


def _submitted(client: Any, function: Callable[..., object], *args: object) -> Any:
    with warnings.catch_warnings():
        # That they are sent with a task is meant: they are there again where a worker has died.
        warnings.filterwarnings("ignore", "Sending large graph", UserWarning)
        return client.submit(function, *args, pure=False)


def _row_of(future: Any, cluster: Cluster, fitter: Fitter, index: int) -> Row | Lost:
    try:
        row: Row | Lost = cluster.value(future)
    except Exception as error:
        cluster.check()
        return failed(fitter, index, error)
    return row


def _row(kit: Kit, index: int, case: bytes) -> Row:
    """Fit a case, on a worker."""
    return kit.row(index, case)
