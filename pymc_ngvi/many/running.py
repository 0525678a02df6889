"""Fits outside this process: what is sent there, and what is done where a process ends."""

import itertools
import multiprocessing
import os
import signal
import threading
import warnings

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import cloudpickle
import numpy as np

from pymc.progress_bar import default_progress_theme
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

from pymc_ngvi.core.messages import OURS, shortened
from pymc_ngvi.core.types import AnyArray
from pymc_ngvi.density.shards.cluster import Advice, Cluster, Lost, client_of
from pymc_ngvi.density.shards.errors import BrokenExecutorError
from pymc_ngvi.fitting.progress import console_for
from pymc_ngvi.many.fitting import N_PILOTS, Case, Fitter, Row

#: Cases that are handed to each process at a time: what is waiting takes memory.
IN_HAND = 2
#: Said of a fit whose process has ended twice, alone the second time.
_DIED = "The process ended during this fit, which may be for want of memory."

type Numbered = tuple[int, Case]
#: The place of a case, and the case, pickled.
type Sent = tuple[int, bytes]
type Rows = Generator[Row, None, list[Sent]]
#: Fits cases, all or one at a time; yields rows, and returns the cases that were lost with their process.
type Run = Callable[[Iterator[Sent], bool], Rows]


class Kit:
    """What a process fits with: made when the first case comes, and kept for the others."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._fitter: Fitter | None = None
        self._lock = threading.Lock()  # a model has the data of one fit at a time

    @classmethod
    def of(cls, fitter: Fitter) -> "Kit":
        """Return that of a fitter after its first fits; raise TypeError for a model that can't be pickled."""
        try:
            return cls(cloudpickle.dumps((fitter.asked, fitter.pilot)))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise TypeError(f"The model can't be sent to other processes: {why}. Fit it in this one.") from error

    def __reduce__(self) -> tuple[type["Kit"], tuple[bytes]]:
        return Kit, (self.content,)

    def row(self, index: int, case: bytes) -> Row:
        """Fit a case that was pickled."""
        with self._lock:
            if self._fitter is None:
                self._fitter = Fitter(*cloudpickle.loads(self.content))
            loaded: Case | str = cloudpickle.loads(case)
            return failed(self._fitter, index, loaded) if isinstance(loaded, str) else self._fitter.row(index, loaded)


def fit_elsewhere(fitter: Fitter, cases: Iterator[Numbered], run: Run) -> Iterator[Row]:
    """Fit cases in other processes; rows come in the order in which they are done.

    A process that ends takes no other fit with it: cases that were lost are fitted again, one at a time.
    """
    left = ((index, _pickled(case)) for index, case in cases)
    while lost := (yield from run(left, False)):
        for index, case in lost:
            if (yield from run(iter([(index, case)]), True)):
                yield failed(fitter, index, _DIED)


def failed(fitter: Fitter, index: int, why: str | Exception) -> Row:
    """Return the row of a case that was not fitted."""
    text = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
    return Row(index, fitter.asked.seed(index), error=text)


def _pickled(case: Case) -> bytes:
    """Return what to send: a case, or why it can't be."""
    content: bytes
    try:
        content = cloudpickle.dumps(case)
    except Exception as error:
        content = cloudpickle.dumps(f"The data can't be sent to another process: {type(error).__name__}: {error}")
    return content


# --- fits on the workers of a Dask cluster ---

_ADVICE = Advice("fits", "Make another one, with Client(cluster).", "Start some, and call again.")


def cluster_of(client: object) -> Cluster:
    """Return the cluster behind a client."""
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
    client, content, kit = cluster.client, Kit.of(fitter).content, None

    def run(cases: Iterator[Sent], is_alone: bool) -> Rows:
        """Return the cases that went with their workers; those in hand are waited for, and no others begun, then."""
        nonlocal kit
        in_hand: dict[int, tuple[Any, bytes]] = {}
        lost: list[Sent] = []
        try:
            while True:
                n_in_hand = 1 if is_alone else IN_HAND * _n_workers(cluster)
                for index, case in itertools.islice(cases, 0 if lost else max(n_in_hand - len(in_hand), 0)):
                    # Sent again where the cluster has forgotten it, as after a restart.
                    if kit is None or kit.status in ("error", "lost", "cancelled"):
                        kit = _submitted(client, Kit, content)
                    in_hand[index] = _submitted(client, Kit.row, kit, index, case), case
                if not in_hand:
                    return lost
                index, future = next(cluster.completed({index: future for index, (future, _) in in_hand.items()}))
                try:
                    row: Row | Lost = cluster.value(future)
                except Exception as error:
                    cluster.check()
                    row = failed(fitter, index, error)
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


def _submitted(client: Any, function: Callable[..., object], *args: object) -> Any:
    with warnings.catch_warnings():
        # That they are sent with a task is meant: they are there again where a worker has died.
        warnings.filterwarnings("ignore", "Sending large graph", UserWarning)
        return client.submit(function, *args, pure=False)


# --- fits in processes of this machine ---


def in_processes(fitter: Fitter, n_jobs: int) -> Run:
    """Return what fits in so many processes."""
    kit = Kit.of(fitter)

    def run(cases: Iterator[Sent], is_alone: bool) -> Rows:
        """Return the cases in hand when a process ended, none where all are done."""
        n_processes, n_in_hand = (1, 1) if is_alone else (n_jobs, n_jobs * IN_HAND)
        context = multiprocessing.get_context("spawn")  # a fork would take over locks of threads
        pool = ProcessPoolExecutor(n_processes, context, initializer=_begin, initargs=(kit,))
        in_hand: dict[int, bytes] = {}
        futures: dict[Future[Row], int] = {}
        try:
            while True:
                for index, case in itertools.islice(cases, n_in_hand - len(in_hand)):
                    in_hand[index] = case
                    futures[pool.submit(_row, index, case)] = index
                if not in_hand:
                    return []
                for future in wait(futures, return_when=FIRST_COMPLETED).done:
                    index = futures.pop(future)
                    try:
                        row = future.result()
                    except BrokenProcessPool:
                        raise
                    except Exception as error:
                        row = failed(fitter, index, error)
                    del in_hand[row.index]
                    yield row
        except BrokenProcessPool:
            return list(in_hand.items())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    return run


# --- in a process ---


class _Here:
    kit: Kit


def _begin(kit: Kit) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process sees to it
    _Here.kit = kit


def _row(index: int, case: bytes) -> Row:
    return _Here.kit.row(index, case)


# --- the progress of many fits: how many are done, how many failed, and the time that is left ---


def shown(rows: Iterable[Row], total: int | None, enabled: bool) -> Iterator[Row]:
    """Hand rows on, and show how many there were."""
    columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}")]
    columns += [BarColumn(), TimeElapsedColumn(), TextColumn("left:"), Remaining()] if total else [TimeElapsedColumn()]
    console, in_text = console_for(default_progress_theme)
    with Progress(*columns, console=console, disable=not enabled or in_text) as progress:
        task, failed = progress.add_task(_words(0, total, 0), total=total), 0
        for done, row in enumerate(rows, 1):
            failed += bool(row.error)
            progress.update(task, completed=done, description=_words(done, total, failed))
            yield row


def _words(done: int, total: int | None, failed: int) -> str:
    of = "" if total is None else f" of {total:,}"
    return f"{done:,}{of} fits" + (f", {failed:,} failed" if failed else "")


# --- what is said of fits that were not searched for other modes, by those that were ---


def judge_unsearched(rows: Sequence[Row]) -> str:
    """Say of each fit whose search was left out what those found that were searched.

    Where these have found other modes, it is not reliable for want of knowing: its verdict is "not judged".
    """
    left_out = [row for row in rows if row.left_out and not row.error]
    searched = [row for row in rows if row.about.get("searched")]
    having = [row.index for row in searched if row.about["other_modes"]]
    for row in left_out:
        if having:
            row.about["sentence"] += f" Not searched for other modes, which {_part(having, searched)} have."
            if row.about["verdict"] == "reliable":
                row.about["verdict"] = "not judged"
        else:
            row.about["sentence"] += f" Not searched for other modes: {len(searched):,} fits were, which have none."
    if not (having and left_out):
        return ""
    return (
        f"{_part(having, searched)} that were searched for other modes have some (fit {having[0]} is the first). The "
        f"{len(left_out):,} others were not searched, and are not judged: search='each' looks in all."
    )


def _part(having: Sequence[int], searched: Sequence[Row]) -> str:
    return f"{len(having):,} of {len(searched):,} fits"


# --- goes through the cases, one after the other, in processes or on Dask, and collects rows as they are done ---

#: Fits that a warning names, at most.
_MOST_NAMED = 5

#: Where fits are made: in so many processes, or on a cluster.
type Place = int | Cluster


class _Unreadable(Exception):
    """The iterable of data has raised an error."""


def workers_of(n_jobs: object, client: object) -> Place:
    """Return where fits are made."""
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, int) or (n_jobs < 1 and n_jobs != -1):
        raise ValueError(f"n_jobs should be the number of processes, at least 1, or -1 for all cores; got {n_jobs!r}.")
    if client is None:
        all_cores = n_jobs == -1 and hasattr(os, "sched_getaffinity")
        return len(os.sched_getaffinity(0)) if all_cores else max(n_jobs, 1)
    if n_jobs != 1:
        raise ValueError("Give n_jobs, processes of this machine, or client, the workers of Dask, not both.")
    return cluster_of(client)


def fitted_rows(fitter: Fitter, cases: Iterable[Case], place: Place, total: int | None, progressbar: bool) -> list[Row]:
    """Fit all cases; the model has its own data back at the end.

    Those that are done are returned after an interrupt from the keyboard, where the data can't be read on, and where a
    cluster is gone. There are warnings of this, of what failed, and of other modes that were found in some.
    """
    rows: list[Row] = []
    labels: dict[str, AnyArray] = {}
    with fitter.asked.slots.left_as_it_was():
        try:
            for row in shown(_fits(fitter, _read(cases), place), total, progressbar):
                rows.append(row)
                for dim, own in row.labels.items():  # those of rows before it, where they are equal
                    if np.array_equal(before := labels.setdefault(dim, own), own):
                        row.labels[dim] = before
        except KeyboardInterrupt:
            if not rows:
                raise
            _warn(f"Interrupted from the keyboard: {_kept(rows, total)}")
        except (_Unreadable, BrokenExecutorError) as error:
            if not rows:
                raise error.__cause__ or error from None
            _warn(f"{error} {_kept(rows, total)}")
    _report_failures(rows)
    if of_modes := judge_unsearched(rows):
        _warn(of_modes)
    return rows


def _kept(rows: Sequence[Row], total: int | None) -> str:
    of = "" if total is None else f" of {total:,}"
    return f"{len(rows):,}{of} fits were done, which are kept."


def _read(cases: Iterable[Case]) -> Iterator[Numbered]:
    try:
        yield from enumerate(cases)
    except Exception as error:
        raise _Unreadable(f"The data can't be read on: {type(error).__name__}: {error}.") from error


def _fits(fitter: Fitter, cases: Iterator[Numbered], place: Place) -> Iterator[Row]:
    """Yield what is kept of each fit, as they are done: of the first ones, and of the others that start from these."""
    yield from _one_by_one(fitter, itertools.islice(cases, N_PILOTS))
    fitter.settle()
    if place == 1:
        yield from _one_by_one(fitter, cases)
    else:
        run = on_dask(fitter, place) if isinstance(place, Cluster) else in_processes(fitter, place)
        yield from fit_elsewhere(fitter, cases, run)


def _report_failures(rows: Sequence[Row]) -> None:
    """Warn of fits that failed; raise ValueError where all did."""
    failed = [row for row in rows if row.error]
    if not failed:
        return
    which = ", ".join(str(row.index) for row in sorted(failed, key=lambda row: row.index)[:_MOST_NAMED])
    which += ", ..." if len(failed) > _MOST_NAMED else ""
    reason = f"The reason of fit {failed[0].index}: {failed[0].error}"
    if len(failed) == len(rows):
        raise ValueError(f"All {len(rows):,} fits failed. {reason}")
    _warn(f"{len(failed):,} of {len(rows):,} fits failed ({which}): the table has each reason as `error`. {reason}")


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, skip_file_prefixes=OURS)


def _one_by_one(fitter: Fitter, cases: Iterable[Numbered]) -> Iterator[Row]:
    """Fit cases in this process."""
    for index, case in cases:
        yield fitter.row(index, case)
