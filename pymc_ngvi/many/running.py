"""Goes through entries, one after the other or in processes, and hands out rows as they are done."""

import itertools
import multiprocessing
import os
import signal

from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

import cloudpickle

from pymc_ngvi.many.entries import Entry
from pymc_ngvi.many.fitting import Fitter, Row

#: Entries that are handed to each process at a time: what is waiting takes memory.
_IN_HAND = 2
#: Said of a fit whose process has ended twice, alone the second time.
_DIED = "The process ended during this fit, which may be for want of memory."

type Numbered = tuple[int, Entry]
type _Rows = Generator[Row, None, list[Numbered]]


def count_of(n_jobs: object) -> int:
    """Return the number of processes; raise ValueError for what is none."""
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, int) or (n_jobs < 1 and n_jobs != -1):
        raise ValueError(f"n_jobs should be the number of processes, at least 1, or -1 for all cores; got {n_jobs!r}.")
    return len(os.sched_getaffinity(0)) if n_jobs == -1 and hasattr(os, "sched_getaffinity") else max(n_jobs, 1)


def one_by_one(fitter: Fitter, entries: Iterable[Numbered]) -> Iterator[Row]:
    """Fit entries in this process."""
    for index, entry in entries:
        yield fitter.row(index, entry)


def in_processes(fitter: Fitter, entries: Iterator[Numbered], n_jobs: int) -> Iterator[Row]:
    """Fit entries in other processes; rows come in the order in which they are done.

    A process that ends takes no other fit with it: those in hand are done again, one at a time.
    """
    content = cloudpickle.dumps((fitter.asked, fitter.pilot))
    while in_hand := (yield from _until_broken(content, entries, n_jobs, n_jobs * _IN_HAND)):
        for index, entry in in_hand:
            if (yield from _until_broken(content, iter([(index, entry)]), 1, 1)):
                yield Row(index, fitter.asked.seed(index), error=_DIED)


def _until_broken(content: bytes, entries: Iterator[Numbered], n_jobs: int, n_in_hand: int) -> _Rows:
    """Yield rows; return the entries in hand when a process ended, none where all are done."""
    context = multiprocessing.get_context("spawn")  # a fork would take over locks of threads
    pool = ProcessPoolExecutor(n_jobs, context, initializer=_begin, initargs=(content,))
    in_hand: dict[int, Entry] = {}
    futures: set[Future[Row]] = set()
    try:
        while True:
            for index, entry in itertools.islice(entries, n_in_hand - len(in_hand)):
                in_hand[index] = entry
                futures.add(pool.submit(_row, index, entry))
            if not in_hand:
                return []
            done, futures = wait(futures, return_when=FIRST_COMPLETED)
            for future in done:
                row = future.result()
                del in_hand[row.index]
                yield row
    except BrokenProcessPool:
        return list(in_hand.items())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# --- in a process ---


class _Here:
    """What a process has to fit with; made when the first entry comes."""

    content: bytes = b""
    fitter: Fitter | None = None


def _begin(content: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process sees to it
    _Here.content = content


def _row(index: int, entry: Entry) -> Row:
    if _Here.fitter is None:
        _Here.fitter = Fitter(*cloudpickle.loads(_Here.content))
    return _Here.fitter.row(index, entry)
