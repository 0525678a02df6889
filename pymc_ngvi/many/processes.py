"""Fits in processes of this machine."""

import itertools
import multiprocessing
import signal

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from pymc_ngvi.many.elsewhere import IN_HAND, Kit, Rows, Run, Sent, failed
from pymc_ngvi.many.fitting import Fitter, Row


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
                    row = _row_of(future, fitter, futures.pop(future))
                    del in_hand[row.index]
                    yield row
        except BrokenProcessPool:
            return list(in_hand.items())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    return run


def _row_of(future: Future[Row], fitter: Fitter, index: int) -> Row:
    try:
        return future.result()
    except BrokenProcessPool:
        raise
    except Exception as error:
        return failed(fitter, index, error)


# --- in a process ---


class _Here:
    kit: Kit


def _begin(kit: Kit) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process sees to it
    _Here.kit = kit


def _row(index: int, case: bytes) -> Row:
    return _Here.kit.row(index, case)
