"""Goes through the cases, one after the other or in processes, and collects rows as they are done."""

import itertools
import multiprocessing
import os
import signal
import warnings

from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

import cloudpickle

from pymc_ngvi.core.messages import OURS
from pymc_ngvi.many.entries import Case
from pymc_ngvi.many.fitting import N_PILOTS, Fitter, Interrupted, Row
from pymc_ngvi.many.progress import shown
from pymc_ngvi.many.searches import judge_unsearched

#: Fits that a warning names, at most.
_MOST_NAMED = 5
#: Cases that are handed to each process at a time: what is waiting takes memory.
_IN_HAND = 2
#: Said of a fit whose process has ended twice, alone the second time.
_DIED = "The process ended during this fit, which may be for want of memory."

type Numbered = tuple[int, Case]
type _Rows = Generator[Row, None, list[Numbered]]


def count_of(n_jobs: object) -> int:
    """Return the number of processes; raise ValueError for what is none."""
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, int) or (n_jobs < 1 and n_jobs != -1):
        raise ValueError(f"n_jobs should be the number of processes, at least 1, or -1 for all cores; got {n_jobs!r}.")
    return len(os.sched_getaffinity(0)) if n_jobs == -1 and hasattr(os, "sched_getaffinity") else max(n_jobs, 1)


def fitted_rows(fitter: Fitter, cases: Iterable[Case], n_jobs: int, total: int | None, progressbar: bool) -> list[Row]:
    """Fit all cases; the model has its own data back at the end.

    After an interrupt from the keyboard, those are returned that are done. There are warnings of what failed, and of
    other modes that were found in some.

    Raises
    ------
    KeyboardInterrupt
        Where none is done.
    ValueError
        Where all have failed.
    """
    rows: list[Row] = []
    with fitter.asked.slots.left_as_it_was():
        try:
            for row in shown(_fits(fitter, enumerate(cases), n_jobs), total, progressbar):
                rows.append(row)
        except (KeyboardInterrupt, Interrupted):
            if not rows:
                raise KeyboardInterrupt from None
            of = "" if total is None else f" of {total:,}"
            _warn(f"Interrupted from the keyboard: {len(rows):,}{of} fits were done, which are kept.")
    _report_failures(rows)
    if of_modes := judge_unsearched(rows):
        _warn(of_modes)
    return rows


def _fits(fitter: Fitter, cases: Iterator[Numbered], n_jobs: int) -> Iterator[Row]:
    """Yield what is kept of each fit, as they are done: of the first ones, and of the others that start from these."""
    yield from _one_by_one(fitter, itertools.islice(cases, N_PILOTS))
    fitter.settle()
    yield from _one_by_one(fitter, cases) if n_jobs == 1 else _in_processes(fitter, cases, n_jobs)


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


def _in_processes(fitter: Fitter, cases: Iterator[Numbered], n_jobs: int) -> Iterator[Row]:
    """Fit cases in other processes; rows come in the order in which they are done.

    A process that ends takes no other fit with it: those in hand are done again, one at a time.
    """
    content = cloudpickle.dumps((fitter.asked, fitter.pilot))
    while in_hand := (yield from _until_broken(content, cases, n_jobs, n_jobs * _IN_HAND)):
        for index, case in in_hand:
            if (yield from _until_broken(content, iter([(index, case)]), 1, 1)):
                yield Row(index, fitter.asked.seed(index), error=_DIED)


def _until_broken(content: bytes, cases: Iterator[Numbered], n_jobs: int, n_in_hand: int) -> _Rows:
    """Yield rows; return the cases in hand when a process ended, none where all are done."""
    context = multiprocessing.get_context("spawn")  # a fork would take over locks of threads
    pool = ProcessPoolExecutor(n_jobs, context, initializer=_begin, initargs=(content,))
    in_hand: dict[int, Case] = {}
    futures: set[Future[Row]] = set()
    try:
        while True:
            for index, case in itertools.islice(cases, n_in_hand - len(in_hand)):
                in_hand[index] = case
                futures.add(pool.submit(_row, index, case))
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
    """What a process has to fit with; made when the first case comes."""

    content: bytes = b""
    fitter: Fitter | None = None


def _begin(content: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process sees to it
    _Here.content = content


def _row(index: int, case: Case) -> Row:
    if _Here.fitter is None:
        _Here.fitter = Fitter(*cloudpickle.loads(_Here.content))
    return _Here.fitter.row(index, case)
