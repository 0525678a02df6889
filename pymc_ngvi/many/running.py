"""Goes through the cases, one after the other, in processes or on Dask, and collects rows as they are done."""

import itertools
import os
import warnings

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pymc_ngvi.core.messages import OURS
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.shards.cluster import Cluster
from pymc_ngvi.density.shards.errors import BrokenExecutorError
from pymc_ngvi.many.elsewhere import Numbered, fit_elsewhere
from pymc_ngvi.many.entries import Case
from pymc_ngvi.many.fitting import N_PILOTS, Fitter, Row
from pymc_ngvi.many.on_dask import cluster_of, on_dask
from pymc_ngvi.many.processes import in_processes
from pymc_ngvi.many.progress import shown
from pymc_ngvi.many.searches import judge_unsearched

#: Fits that a warning names, at most.
_MOST_NAMED = 5

#: Where fits are made: in so many processes, or on a cluster.
type Place = int | Cluster


class _Unreadable(Exception):
    """The iterable of data has raised an error."""


def workers_of(n_jobs: object, client: object) -> Place:
    """Return where fits are made.

    Raises
    ------
    TypeError, ValueError
        For what is no number of processes, or no client, or for both.
    BrokenExecutorError
        For a client that is closed.
    """
    n = _count_of(n_jobs)
    if client is None:
        return n
    if n != 1:
        raise ValueError("Give n_jobs, processes of this machine, or client, the workers of Dask, not both.")
    return cluster_of(client)


def _count_of(n_jobs: object) -> int:
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, int) or (n_jobs < 1 and n_jobs != -1):
        raise ValueError(f"n_jobs should be the number of processes, at least 1, or -1 for all cores; got {n_jobs!r}.")
    return len(os.sched_getaffinity(0)) if n_jobs == -1 and hasattr(os, "sched_getaffinity") else max(n_jobs, 1)


def fitted_rows(fitter: Fitter, cases: Iterable[Case], place: Place, total: int | None, progressbar: bool) -> list[Row]:
    """Fit all cases; the model has its own data back at the end.

    Those that are done are returned after an interrupt from the keyboard, where the data can't be read on, and where a
    cluster is gone. There are warnings of this, of what failed, and of other modes that were found in some.

    Raises
    ------
    KeyboardInterrupt, BrokenExecutorError, Exception
        Where none is done; the last one is that of the data.
    ValueError
        Where all have failed.
    """
    rows: list[Row] = []
    labels: dict[str, AnyArray] = {}
    with fitter.asked.slots.left_as_it_was():
        try:
            for row in shown(_fits(fitter, _read(cases), place), total, progressbar):
                rows.append(row)
                _share(labels, row)
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


def _share(labels: dict[str, AnyArray], row: Row) -> None:
    """Let a row have the labels of rows before it, where they are equal: each has its own until then."""
    for dim, own in row.labels.items():
        if np.array_equal(before := labels.setdefault(dim, own), own):
            row.labels[dim] = before


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
