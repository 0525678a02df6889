"""One model fitted to many data sets: each fit in a row of a table, and any one of them again."""

import contextlib
import inspect
import itertools
import logging
import multiprocessing
import os
import signal
import threading
import time
import warnings

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import cloudpickle
import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pymc as pm
import xarray as xr

from numpy.typing import ArrayLike

from pymc_ngvi.core.messages import checked_names, listed, logger, percent, shortened, warn
from pymc_ngvi.core.progress import task
from pymc_ngvi.core.sizes import MANY, N_PREDICTED, Seed, check_draws, seed_of
from pymc_ngvi.core.status import ConvergenceWarning, DivergedError, NotExactError, StartError
from pymc_ngvi.core.types import AnyArray, Array
from pymc_ngvi.core.verdict import Word
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.density.info import DataSnapshot, Simulated, data_in, quoted, simulate, with_data_for, without_casts
from pymc_ngvi.density.shards import BrokenExecutorError, Cluster, Lost, client_of
from pymc_ngvi.fitting.options import joined_parameters, sign, split_options
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.fitting.threads import ONE_THREAD, SharedContext
from pymc_ngvi.inference import NGVI
from pymc_ngvi.results.approximation import NGVIApproximation
from pymc_ngvi.results.distributions import constrained_dataset, element_names
from pymc_ngvi.results.persistence import digest_of, write
from pymc_ngvi.results.predictions import array_like, lengths_by_dim, not_settable, plain_array

if TYPE_CHECKING:
    from distributed import Client

# --- the data of one fit: checked, and put into the model ---

#: The data of one fit: arrays by the name of a ``pm.Data``, of an observed variable, or of a dim, which takes labels.
type Entry = Mapping[str, ArrayLike]


#: What is fitted: data, or what was simulated, whose values are ranked among draws.
type Case = Entry | Simulated


@dataclass(frozen=True)
class Slots:
    """Where the data of a fit go in a model."""

    #: The one that is fitted: that of the user, or a copy in which observed values can be changed.
    model: pm.Model
    #: Names in ``model`` by the names that entries have.
    names: dict[str, str]
    #: Those among the names of entries that are dims of the model.
    dims: frozenset[str]

    @classmethod
    def of(cls, model: pm.Model, entry: Entry) -> "Slots":
        """Return the places for entries that have the names of the first one."""
        _check_is_dict(entry)
        data = data_in(model).keys()
        observed = {rv.name: model.rvs_to_values[rv] for rv in model.observed_RVs}
        if not data and not observed:
            raise ValueError("The model has neither pm.Data nor observed variables: there are no data to change.")
        dims = frozenset(name for name in entry if name in model.coords and name not in data | observed.keys())
        names, constant = {}, []
        for name in entry:
            if name in dims:
                continue
            if name in data:
                names[name] = name
            elif name in observed and (of_data := without_casts(observed[name]).name) in data:
                names[name] = of_data
            elif name in observed and hasattr(observed[name], "data"):
                constant.append(name)
            else:
                kind = "neither a pm.Data nor an observed variable whose values are all there"
                raise ValueError(not_settable(model, name, list(dict.fromkeys([*data, *observed])), "data", kind))
        if not names and not constant:
            raise ValueError("The first dict of data names no data: give arrays for pm.Data or observed variables.")
        if constant:
            model, made = with_data_for(model, constant)
            names |= made
        twice = [name for name in names.values() if list(names.values()).count(name) > 1]
        if twice:
            both = ", ".join(repr(k) for k, v in names.items() if v == twice[0])
            raise ValueError(f"{both} are the same data of the model: give one of them.")
        return cls(model, names, dims)

    def checked(self, entry: Entry) -> dict[str, AnyArray]:
        """Return the arrays of an entry by their names in the model, and the labels of dims."""
        _check_is_dict(entry)
        expected = {*self.names, *self.dims}
        if set(entry) != expected:
            lacks, more = sorted(expected - set(entry)), sorted(map(str, set(entry) - expected))
            parts = [f"lacks {quoted(lacks)}"] * bool(lacks)
            parts += [f"has {quoted(more)}, which the first has not"] * bool(more)
            names = quoted(sorted(expected))
            raise ValueError(f"The dict {' and '.join(parts)}: all dicts need the same names, {names}.")
        arrays = {inner: self._array(name, entry[name]) for name, inner in self.names.items()}
        arrays |= {name: plain_array(name, entry[name]) for name in self.dims}
        given: list[tuple[str, str | None, int]] = [(name, name, len(arrays[name])) for name in self.dims]
        for name, inner in self.names.items():
            dims = self.model.named_vars_to_dims.get(inner) or ()
            given += [(name, dim, n) for dim, n in zip(dims, arrays[inner].shape, strict=False)]
        lengths_by_dim(given)  # those that agree PyMC checks itself
        return arrays

    def _array(self, name: str, values: ArrayLike) -> AnyArray:
        var = self.model[self.names[name]]
        array = array_like(var, name, values)
        for rv in self.model.observed_RVs:
            fixed = zip(array.shape, rv.type.shape, strict=False)
            if without_casts(self.model.rvs_to_values[rv]) is var and any(k not in (None, n) for n, k in fixed):
                raise ValueError(
                    f"{name!r} has shape {array.shape}; its shape is fixed in the model, {rv.type.shape}. Give its "
                    "values as pm.Data where the model is made, for shapes that differ."
                )
        return array

    def put(self, arrays: Mapping[str, AnyArray]) -> None:
        """Give the model the data of an entry."""
        coords = {dim: arrays[dim].tolist() for dim in self.dims}
        for dim, labels in coords.items():
            if hasattr(self.model.dim_lengths[dim], "set_value"):
                self.model.set_dim(dim, len(labels), labels)
            elif list(self.model.coords[dim] or ()) != labels:
                raise ValueError(f"The length and labels of dim {dim!r} are fixed in the model: leave {dim!r} out.")
        pm.set_data({name: arrays[name] for name in self.names.values()}, model=self.model, coords=coords)


def _check_is_dict(entry: object) -> None:
    if not isinstance(entry, Mapping):
        raise ValueError(f"Each of the data should be a dict of arrays by name; got {shortened(entry)}.")


#: Name of the log density of parameters and data, which is ranked beside the variables.
LOG_DENSITY = "log_density"


def _ranks(
    truth: Simulated, draws: Mapping[str, AnyArray], theta: Array, density: ModelDensity, rng: np.random.Generator
) -> dict[str, AnyArray]:
    """Return how many draws of variables, and of log p(theta, y), are below the truth: the latter sees more errors.

    Where some are equal to it, a random part of these count.
    """
    logp = density.logp(np.vstack([density.layout.flatten(truth.unconstrained)[None], theta]))
    pairs = {name: (values, truth.values[name]) for name, values in draws.items()} | {LOG_DENSITY: (logp[1:], logp[0])}
    result = {}
    for name, (values, true) in pairs.items():
        below, equal = (values < true).sum(axis=0), (values == true).sum(axis=0)
        result[name] = np.asarray(below + rng.integers(0, equal + 1))
    return result


#: The first fits, which start as a fit alone does, and look for other modes.
N_PILOTS = 3
#: Of the others, one in so many looks for them.
_EACH_SEARCHED = 20

type Search = Literal["first", "each"]


@dataclass
class Row:
    """What is kept of one fit."""

    index: int
    seed: int
    #: Of the data.
    digest: str = ""
    #: Means, standard deviations and limits, (statistic, ...), of each variable.
    statistics: xr.Dataset | None = None
    #: How many draws of each are below the value that the data were simulated with.
    ranks: xr.Dataset | None = None
    #: What is said of the fit, by name.
    about: dict[str, Any] = field(default_factory=dict)
    #: Why there is none; empty where there is.
    error: str = ""
    #: Whether a search for other modes was left out.
    left_out: bool = False


class Asked(NamedTuple):
    """What is the same for all fits."""

    slots: Slots
    #: Options of `NGVI` and of `NGVI.fit`.
    of_constructor: dict[str, Any]
    of_fit: dict[str, Any]
    #: From which the seeds of all fits follow.
    entropy: int
    #: From which means, standard deviations and limits are taken.
    draws: int
    #: Of the intervals.
    prob: float
    #: Variables that are kept; None for all.
    names: frozenset[str] | None
    #: Whether to judge each fit by `NGVIApproximation.diagnose`.
    judge: bool
    search: Search
    #: Where draws are written.
    folder: Path | None

    def seed(self, index: int) -> int:
        """Return the seed of a fit, which depends on its place alone."""
        return seed_of(np.random.SeedSequence(self.entropy, spawn_key=(index,)))


class Fitter:
    """Fits entries."""

    def __init__(self, asked: Asked, pilot: NGVIApproximation | None = None) -> None:
        self.asked, self.pilot = asked, pilot
        self._inference = NGVI(asked.slots.model, **asked.of_constructor)
        self.may_leave_search = asked.search == "first" and asked.of_constructor.get("start") is None

    def row(self, index: int, case: Case) -> Row:
        """Fit a case, and return what is kept of it, also where it fails; KeyboardInterrupt passes."""
        row = Row(index, self.asked.seed(index))
        began, arrays, truth = time.perf_counter(), {}, case if isinstance(case, Simulated) else None
        try:
            arrays = self.asked.slots.checked(case.observed if isinstance(case, Simulated) else case)
            row.digest = digest_of(arrays)
            with ONE_THREAD:
                approx = self.approx(index, arrays)
                record = approx.record
                if index < N_PILOTS and record is not None:
                    self.may_leave_search &= not approx._has_other_modes
                    if self.pilot is None and record.converged:
                        self.pilot = approx  # that others may start from
                self._summarise(row, approx, truth)
        except Exception as error:  # whatever it is: the other fits go on
            row.error = _in_short(error, arrays)
        row.about["seconds"] = time.perf_counter() - began
        return row

    def approx(self, index: int, arrays: Mapping[str, AnyArray]) -> NGVIApproximation:
        """Fit an entry; the model has its data from then on."""
        self.asked.slots.put(arrays)
        inference = self._inference
        inference._pilot = self.pilot if index >= N_PILOTS and self.may_leave_search else None
        inference._is_searched = index % _EACH_SEARCHED == 0
        with _QUIETLY, ONE_THREAD:
            inference.configure(random_seed=self.asked.seed(index))
            approx = inference.fit(progressbar=False, **self.asked.of_fit)
        approx._record_of("fit_many").refuse_interrupted()
        return approx

    def _summarise(self, row: Row, approx: NGVIApproximation, truth: Simulated | None) -> None:
        asked, record = self.asked, approx._record_of("fit_many")
        rng = np.random.default_rng([MANY, row.seed])
        record.refuse_diverged()
        theta = approx._posterior.distribution.draw_matched(asked.draws, rng)
        values = Constrainer.of(approx.density, names=asked.names)(theta, random_seed=seed_of(rng))
        unconstrained = {v.value_name for v in approx.layout.variables} - {v.name for v in approx.layout.variables}
        known = {name: 1.0 * draws for name, draws in values.items() if name not in unconstrained}  # or truth values
        levels = 0.5 + np.array([-0.5, 0.5]) * asked.prob
        statistics = {
            name: np.stack([draws.mean(axis=0), draws.std(axis=0), *np.quantile(draws, levels, axis=0)])
            for name, draws in known.items()
        }
        row.statistics = constrained_dataset(approx.model, statistics, ("statistic",))
        if truth is not None:
            values = approx.layout.bambi.uncentred({name: value[None] for name, value in truth.values.items()})
            truth = replace(truth, values={name: value[0] for name, value in values.items()})
            row.ranks = constrained_dataset(approx.model, _ranks(truth, known, theta, approx.density, rng))
        row.about |= _about(approx, record, judge=asked.judge)
        pilot = self._inference._pilot
        row.left_out = pilot is not None and pilot._record_of("fit_many").searched and not record.searched
        if asked.folder is not None:
            # As a whole or not at all.
            write(approx.sample(asked.draws, random_seed=row.seed), asked.folder / f"fit_{row.index:06d}.nc")


def _about(approx: NGVIApproximation, record: FitRecord, *, judge: bool) -> dict[str, Any]:
    """Return what is said of a fit."""
    verdict = approx.diagnose().checks if judge else record.verdict
    about = {
        "verdict": verdict.word.value,
        "sentence": f"{verdict} {record.of_posterior}".rstrip(),
        "posterior": str(getattr(approx._state, "kind", "gaussian")),
        "status": str(record.status),
        "elbo": record.elbo.value,
        "elbo_se": record.elbo.se,
        "log_marginal_likelihood": np.nan,
        "log_marginal_likelihood_se": np.nan,
        "searched": record.searched,
        "other_modes": approx._has_other_modes,
    }
    if record.is_pool:
        with contextlib.suppress(ValueError):  # of priors without a constant
            found = approx.log_marginal_likelihood
            about |= {"log_marginal_likelihood": found.value, "log_marginal_likelihood_se": found.se}
    return about


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the log and warnings of single fits away: what they say is in their rows."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
            yield
    finally:
        logger.setLevel(level)


_QUIETLY = SharedContext(_quiet)


def _in_short(error: Exception, arrays: Mapping[str, AnyArray]) -> str:
    """Return an error in a line or two, with the shapes of the data where it may be these."""
    text = str(error).strip() or "no message"
    if not arrays or isinstance(error, StartError | DivergedError | NotExactError):
        return text
    first = text.splitlines()[0]
    shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
    return f"{type(error).__name__}: {first} (the data have shapes {shapes})"


# --- fits outside this process: what is sent there, and what is done where a process ends ---

#: Cases that are handed to each process at a time: what is waiting takes memory.
IN_HAND = 2

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
            return cls(cloudpickle.dumps((fitter.asked, fitter.pilot if fitter.may_leave_search else None)))
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
            loaded: Case | Exception = cloudpickle.loads(case)
            if isinstance(loaded, Exception):
                return failed(self._fitter, index, loaded)
            return self._fitter.row(index, loaded)


def failed(fitter: Fitter, index: int, why: str | Exception) -> Row:
    """Return the row of a case that was not fitted."""
    error = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
    return Row(index, fitter.asked.seed(index), error=error)


def _pickled(case: Case) -> bytes:
    """Return what to send: a case, or why it can't be."""
    content: bytes
    try:
        content = cloudpickle.dumps(case)
    except Exception as error:
        said = f"The data can't be sent to another process: {type(error).__name__}: {error}"
        content = cloudpickle.dumps(TypeError(said))
    return content


# --- fits on the workers of a Dask cluster ---


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
        # Spawned: a fork would take over locks of threads.
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(n_processes, spawn, initializer=_begin, initargs=(kit,))
        in_hand, futures = dict[int, bytes](), dict[Future[Row], int]()
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


#: The one of this process.
_KIT: list[Kit] = []


def _begin(kit: Kit) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process sees to it
    _KIT.append(kit)


def _row(index: int, case: bytes) -> Row:
    return _KIT[0].row(index, case)


# --- what is said of fits that were not searched for other modes, by those that were ---


def judge_unsearched(rows: Sequence[Row]) -> str:
    """Say of each fit whose search was left out what those found that were searched.

    Where these have found other modes, it is not reliable for want of knowing: its verdict is "not judged".
    """
    left_out = [row for row in rows if row.left_out and not row.error]
    searched = [row for row in rows if row.about.get("searched")]
    having = [row.index for row in searched if row.about["other_modes"]]
    part = f"{len(having):,} of {len(searched):,} fits"
    for row in left_out:
        if having:
            row.about["sentence"] += f" Not searched for other modes, which {part} have."
            if row.about["verdict"] != Word.NOT_RELIABLE:
                row.about["verdict"] = Word.NOT_JUDGED.value
        else:
            row.about["sentence"] += f" Not searched for other modes: {len(searched):,} fits were, which have none."
    if not (having and left_out):
        return ""
    return (
        f"{part} that were searched for other modes have some (fit {having[0]} is the first). The "
        f"{len(left_out):,} others were not searched, and are not judged: search='each' looks in all."
    )


# --- goes through the cases, one after the other, in processes or on Dask, and collects rows as they are done ---


class _Unreadable(Exception):
    """The iterable of data has raised an error."""


def workers_of(n_jobs: object, client: object) -> int | Cluster:
    """Return where fits are made: in so many processes, or on a cluster."""
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, int) or (n_jobs < 1 and n_jobs != -1):
        raise ValueError(f"n_jobs should be the number of processes, at least 1, or -1 for all cores; got {n_jobs!r}.")
    if client is None:
        all_cores = n_jobs == -1 and hasattr(os, "sched_getaffinity")
        return len(os.sched_getaffinity(0)) if all_cores else max(n_jobs, 1)
    if n_jobs != 1:
        raise ValueError("Give n_jobs, processes of this machine, or client, the workers of Dask, not both.")
    found = client_of(client)
    if found is None or found.asynchronous:
        what = shortened(client) if found is None else "one that is asynchronous"
        raise TypeError(
            f"client should be a distributed.Client; got {what}. For the address of a scheduler, or a cluster, give "
            "Client(address). Processes of this machine are started by n_jobs."
        )
    cluster = Cluster(found, "fits", "Make another one, with Client(cluster).", "Start some, and call again.")
    cluster.check()
    cluster.look()  # whether it has workers now
    return cluster


def fitted_rows(
    fitter: Fitter, cases: Iterable[Case], place: int | Cluster, total: int | None, progressbar: bool
) -> list[Row]:
    """Fit all cases; the model has its own data back at the end.

    Those that are done are returned after an interrupt from the keyboard, where the data can't be read on, and where a
    cluster is gone. There are warnings of this, of what failed, and of other modes that were found in some.
    """
    rows, failed = list[Row](), 0
    with DataSnapshot(fitter.asked.slots.model).restored():
        try:
            with task("Fits", total, enabled=progressbar) as fits:
                for row in _fits(fitter, _read(cases), place):
                    rows.append(row)
                    failed += bool(row.error)
                    fits.completed, fits.description = len(rows), f"Fits ({failed:,} failed)" if failed else "Fits"
        except KeyboardInterrupt:
            if not rows:
                raise
            warn(f"Interrupted from the keyboard: {_kept(rows, total)}")
        except (_Unreadable, BrokenExecutorError) as error:
            if not rows:
                raise error.__cause__ or error from None
            warn(f"{error} {_kept(rows, total)}")
    if without := [row for row in rows if row.error]:
        which = listed(sorted(row.index for row in without))
        reason = f"The reason of fit {without[0].index}: {without[0].error}"
        if len(without) == len(rows):
            raise ValueError(f"All {len(rows):,} fits failed. {reason}")
        warn(f"{len(without):,} of {len(rows):,} fits failed ({which}): the table has each reason as `error`. {reason}")
    if of_modes := judge_unsearched(rows):
        warn(of_modes)
    return rows


def _kept(rows: Sequence[Row], total: int | None) -> str:
    return f"{len(rows):,}{'' if total is None else f' of {total:,}'} fits were done, which are kept."


def _read(cases: Iterable[Case]) -> Iterator[tuple[int, Case]]:
    try:
        yield from enumerate(cases)
    except Exception as error:
        raise _Unreadable(f"The data can't be read on: {type(error).__name__}: {error}.") from error


def _fits(fitter: Fitter, cases: Iterator[tuple[int, Case]], place: int | Cluster) -> Iterator[Row]:
    """Yield what is kept of each fit, as they are done: of the first ones, and of the others that start from these."""
    yield from itertools.starmap(fitter.row, itertools.islice(cases, N_PILOTS))
    if place == 1:
        yield from itertools.starmap(fitter.row, cases)
        return
    run = on_dask(fitter, place) if isinstance(place, Cluster) else in_processes(fitter, place)
    left = ((index, _pickled(case)) for index, case in cases)
    # A process that ends takes no other fit with it: cases that were lost are fitted again, one at a time.
    while lost := (yield from run(left, False)):
        for index, case in lost:
            if (yield from run(iter([(index, case)]), True)):
                yield failed(fitter, index, "The process ended during this fit, which may be for want of memory.")


# --- what comes of many fits: a table by fit, and any one of them again ---

#: What is said of each fit, and what stands where there is none.
_ABOUT: dict[str, Any] = {
    "verdict": "",
    "sentence": "",
    "posterior": "",
    "status": "",
    "elbo": np.nan,
    "elbo_se": np.nan,
    "log_marginal_likelihood": np.nan,
    "log_marginal_likelihood_se": np.nan,
    "searched": False,
    "other_modes": False,
    "seconds": np.nan,
}


class ManyFits:
    """Summaries of many fits of a model; `fit_many` returns it.

    Attributes
    ----------
    dataset : xarray.Dataset
        Over the dimension ``fit``. Each variable of the model, Deterministics included, is there by its name, with the
        dimension ``statistic``: "mean", "sd", "lower", "upper". Of each fit there are ``verdict`` ("exact", "exact, few
        draws", "reliable", "not judged", "not reliable"), the ``sentence`` that says why, ``posterior`` ("exact",
        "nested", "moved", "gaussian"), ``status``, ``elbo`` and ``log_marginal_likelihood`` with standard errors
        (``_se``; NaN where there is none), ``searched`` (whether other modes were looked for), ``other_modes`` (whether
        some were found), ``seconds``, ``seed``, and ``error``: why it failed, empty where it did not. A variable of the
        model with one of these names puts ``fit_`` before it.
    """

    def __init__(self, rows: Sequence[Row], fitter: Fitter, data: Iterable[Entry], attrs: Mapping[str, Any]) -> None:
        rows = sorted(rows, key=lambda row: row.index)
        # Where sizes differ, NaN stands for what is not there.
        table = _joined(rows, lambda row: row.statistics).assign_coords(statistic=["mean", "sd", "lower", "upper"])
        about = {name: [row.about.get(name, none) for row in rows] for name, none in _ABOUT.items()}
        about |= {"seed": [np.uint64(row.seed) for row in rows], "error": [row.error for row in rows]}
        columns = {f"fit_{name}" if name in table else name: ("fit", of) for name, of in about.items()}
        self.dataset = table.assign(columns).assign_attrs(attrs)
        self._fitter, self._data = fitter, data
        self._digests = {row.index: row.digest for row in rows}

    def __len__(self) -> int:
        """Return the number of fits, also of those that failed."""
        return int(self.dataset.sizes["fit"])

    def __repr__(self) -> str:
        """Return how many fits there are, how many of them failed, and what is known of the others."""
        error, counts = self.about("error"), Counter(map(str, self.about("verdict")))
        counts.pop("", None)
        failed = int((error != "").sum())
        parts = [f"{n:,} {verdict}" for verdict, n in counts.items()] + [f"{failed:,} failed"] * bool(failed)
        return f"ManyFits({len(self):,} fits: {', '.join(parts)})"

    def about(self, name: str) -> AnyArray:
        """Return what is said of each fit, (fit,): a column of ``dataset``, whatever it is called there.

        Parameters
        ----------
        name : str
            Such as "verdict".

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model() as model:
        ...     mu = pm.Normal("mu", 0.0, 3.0)
        ...     _ = pm.Normal("y", mu, 1.0, observed=np.ones(5))
        >>> many = pymc_ngvi.fit_many(model, [{"y": np.zeros(5)}, {"y": np.ones(5)}], random_seed=1, progressbar=False)
        >>> many.about("error").tolist()
        ['', '']
        """
        return np.asarray(self.dataset[f"fit_{name}" if f"fit_{name}" in self.dataset else name])

    def approx(self, i: int, data: Entry | None = None) -> NGVIApproximation:
        """Return the approximation of one fit: it is fitted again, with the same seed, which gives the same bits.

        The model has the data of this fit from then on, as after ``pm.set_data``.

        Parameters
        ----------
        i : int
            Its place among the data, from 0.
        data : dict, optional
            Its data; needed where those of `fit_many` were an iterator, which can be read only once.

        Raises
        ------
        IndexError
            If there is no such fit.
        ValueError
            If its data are not there any more, or are not those of the fit; or as the fit did, if it failed.

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model() as model:
        ...     mu = pm.Normal("mu", 0.0, 3.0)
        ...     _ = pm.Normal("y", mu, 1.0, observed=np.ones(5))
        >>> many = pymc_ngvi.fit_many(model, [{"y": np.zeros(5)}, {"y": np.ones(5)}], random_seed=1, progressbar=False)
        >>> round(float(many.approx(1).mean_data["mu"]), 2)
        0.98
        """
        if i not in self._digests:
            raise IndexError(f"There is no fit {i!r}: they are numbered from 0 to {max(self._digests)}.")
        if data is None:
            if iter(self._data) is self._data:
                raise ValueError(f"The data were read from an iterator, which is at its end: give fit {i} its data=.")
            data = next(itertools.islice(self._data, i, None))
        arrays = self._fitter.asked.slots.checked(data)
        if digest_of(arrays) != self._digests[i]:
            raise ValueError(f"The data of fit {i} are not what they were: give those that it was made of, as data=.")
        return self._fitter.approx(i, arrays)


def _joined(rows: Sequence[Row], of: Callable[[Row], xr.Dataset | None]) -> xr.Dataset:
    """Return one table of what rows have; where labels or sizes differ, NaN stands for what is not there."""
    index, tables = zip(*[(row.index, found) for row in rows if (found := of(row)) is not None], strict=True)
    along = xr.Variable("fit", list(index))
    joined = xr.concat(tables, along, data_vars="all", coords="minimal", compat="override", join="outer")
    return joined.reindex(fit=[row.index for row in rows])


#: Of intervals, unless asked otherwise.
_PROB = 0.89
#: Options of a single fit that make no sense for many, and why.
_NOT_FOR_MANY = {
    "shards": "they are those of a model",
    "batches": "the data of a fit are one dict, in memory",
    "callbacks": "each fit is summarised when it is done",
    "progressbar_theme": "the progress is that of all fits",
}


def fit_many(
    model: pm.Model,
    data: Iterable[Entry],
    *,
    n_jobs: int = 1,
    client: "Client | None" = None,
    random_seed: Seed = None,
    draws: int = N_PREDICTED,
    prob: float = _PROB,
    var_names: Sequence[str] | None = None,
    judge: bool = False,
    search: Search = "first",
    draws_to: str | Path | None = None,
    progressbar: bool = True,
    **options: Any,
) -> ManyFits:
    """Fit a model to many data sets, one after the other, in processes or on a Dask cluster.

    The model is read and compiled once. The first three fits are those that ``pm.fit(method="ngvi")`` makes. If these
    have found no other modes, the others begin from the first of them that converged: exact and nested posteriors from
    its posterior, without a Gaussian fit, with an effective size of 96 in one hyperparameter, up to 420 in four or
    more. One in twenty looks for other modes. Data sets of other sizes than that one start as a fit alone does.

    Parameters
    ----------
    model : pymc.Model
        It has its own data back at the end.
    data : iterable of dict
        Of each fit: arrays by the name of a ``pm.Data`` or of an observed variable. All dicts have the same names.
        Sizes may differ where the model allows it; for dims with labels, a dict then has these, too, by the name of the
        dim. Read once, as it is needed: a generator will do.
    n_jobs : int, default 1
        Processes; -1: as many as there are cores. The result is the same, to the bit. A script needs
        ``if __name__ == "__main__":`` around the call.
    client : distributed.Client, optional
        Of Dask: fits are made on its workers, in the place of processes. The result is the same, to the bit.
    random_seed : int, list of int, SeedSequence, Generator, RandomState or None
        Each fit has a seed of its own, which follows from this one and from its place.
    draws : int, default 1_000
        Behind means, standard deviations and limits.
    prob : float, default 0.89
        Of the intervals, which have equal tails.
    var_names : sequence of str, optional
        Free variables and Deterministics to keep. Default: all.
    judge : bool, default False
        Whether to judge each fit by ``approx.diagnose()``. Exact, nested and moved posteriors have a verdict without
        it; Gaussians are "not judged" then. It takes longer than a Gaussian fit.
    search : {"first", "each"}, default "first"
        Whether other modes are looked for in the first three fits, and, where these have none, in one in twenty of
        the others; or in each fit. The table says of each whether it was searched. If one of the twentieth has other
        modes, those that were not searched are "not judged", and there is a warning.
    draws_to : str or Path, optional
        Folder for draws, as `NGVIApproximation.sample` gives them, in 4 chains: ``fit_000000.nc`` and so on. Nothing
        else of a fit is kept but its summary.
    progressbar : bool, default True
    **options
        Those of `NGVI` and `NGVI.fit`, for all fits.

    Returns
    -------
    ManyFits
        Its ``dataset`` has a row for each fit. A fit that fails has its reason there as ``error``. After an interrupt
        from the keyboard, it has the fits that were done.

    Raises
    ------
    TypeError, ValueError
        Before any fit: for data that are no iterable of dicts, or empty; for names that the model does not have; for
        something that is no client; as `NGVI` for its options. At the end, if every fit has failed.
    BrokenExecutorError
        For a client that is closed, before any fit. Where its cluster is lost later, the fits that were done are kept,
        and a warning says so.

    Examples
    --------
    >>> import numpy as np
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model() as model:
    ...     mu = pm.Normal("mu", 0.0, 3.0)
    ...     _ = pm.Normal("y", mu, 1.0, observed=np.ones(5))
    >>> data = ({"y": np.full(5, mean)} for mean in (0.0, 1.0, 2.0, 3.0))
    >>> many = pymc_ngvi.fit_many(model, data, random_seed=1, progressbar=False)
    >>> many.dataset["mu"].sel(statistic="mean").round(1).values.tolist()
    [0.0, 1.0, 2.0, 2.9]
    """
    model, place = checked_model(model, "fit_many(model, data)"), workers_of(n_jobs, client)
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        what = "a dict, which is the data of one fit: write [data]" if isinstance(data, Mapping) else shortened(data)
        raise TypeError(f"data should be an iterable of dicts, one for each fit; got {what}.")
    entries, total = iter(data), len(data) if isinstance(data, Sized) else None
    first = next(entries, None)
    if first is None:
        raise ValueError("data is empty: give a dict of arrays for each fit.")
    slots, folder = Slots.of(model, first), None if draws_to is None else Path(draws_to).absolute()
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"draws_to should be a folder; {str(folder)!r} is a file.")
        folder.mkdir(parents=True, exist_ok=True)
    asked = asked_of(
        slots, options, random_seed, draws, var_names,
        prob=prob, judge=judge, search=search, folder=folder,
    )  # fmt: skip
    fitter, cases = Fitter(asked), itertools.chain([first], entries)
    rows = fitted_rows(fitter, cases, place, total, progressbar)
    return ManyFits(rows, fitter, data, {"prob": prob, "draws": draws})


def asked_of(
    slots: Slots, options: Mapping[str, Any], random_seed: Seed, draws: int, var_names: Sequence[str] | None, *,
    prob: float = _PROB, judge: bool = False, search: Search = "first", folder: Path | None = None,
) -> Asked:  # fmt: skip
    """Return what is the same for all fits, checked."""
    for name, why in _NOT_FOR_MANY.items():
        if options.get(name) is not None:
            raise TypeError(f"Many fits do not take {name}: {why}.")
    of_constructor, of_fit = split_options(
        {k: v for k, v in options.items() if k not in _NOT_FOR_MANY}, NGVI.__init__, NGVI.fit
    )
    if isinstance(prob, bool) or not isinstance(prob, int | float) or not 0.0 < prob < 1.0:
        raise ValueError(f"prob should be between 0 and 1; got {prob!r}.")
    if search not in ("first", "each"):
        raise ValueError(f"search should be 'first' or 'each'; got {search!r}.")
    valid = [v.name for v in (*slots.model.free_RVs, *slots.model.deterministics)]
    names = None if var_names is None else frozenset(checked_names(var_names, valid))
    return Asked(
        slots,
        of_constructor,
        of_fit,
        seed_of(random_seed),
        check_draws(draws),
        float(prob),
        names,
        judge,
        search,
        folder,
    )


def checked_model(model: object, call: str) -> pm.Model:
    """Return what was given as a model; raise TypeError where it is none."""
    if not isinstance(model, pm.Model):
        raise TypeError(f"{call.partition('(')[0]} takes a model first: {call}. Got {shortened(model)}.")
    return model


def sign_with_options(function: Callable[..., Any], *without: str) -> None:
    """Give a function that fits many times the options of `NGVI` and of its `fit` in its signature."""
    own = list(inspect.signature(function).parameters.values())[:-1]
    left_out = (*_NOT_FOR_MANY, *without, "unknown")
    sign(function, [p for p in joined_parameters(own, NGVI.__init__, NGVI.fit) if p.name not in left_out])


sign_with_options(fit_many)


# --- whether the ranks of true values are uniform: by quantity, and in a sentence ---

#: Chance of calling fits not calibrated that are.
_LEVEL = 0.01
#: Central intervals whose coverage is looked at, by their per cent.
_INTERVALS = {"50": 0.5, "90": 0.9}
#: Standard errors by which ranks are said to lie to one side, or to be too wide.
_N_SE = 3.0
#: Standard deviation of a uniform distribution on (0, 1).
_UNIFORM_SD = 12.0**-0.5


class Calibration:
    """What simulation-based calibration has found; `calibrate` returns it.

    Attributes
    ----------
    pit : xarray.Dataset
        Over the dimension ``fit``: of each quantity, the part of its draws that is below the true value, between 0 and
        1; NaN where a fit failed. ``log_density`` is that of parameters and data.
    fits : ManyFits
        The fits, their verdicts and errors; ``fits.approx(i)`` makes one of them again.
    """

    def __init__(self, pit: xr.Dataset, fits: ManyFits) -> None:
        self.pit, self.fits = pit, fits

    @property
    def datatree(self) -> xr.DataTree:
        """The same for ArviZ: ``az.plot_ecdf_pit(calibration.datatree)``; fits that failed are left out."""
        done = self.pit.dropna("fit", how="all")
        return xr.DataTree.from_dict({"/prior_sbc": done.rename(fit="draw").expand_dims(chain=1)})

    def summary(self, *, only_reliable: bool = False) -> pd.DataFrame:
        """Return a row for each quantity.

        Parameters
        ----------
        only_reliable : bool, default False
            Whether to leave out those fits that are not said to be reliable. If fits are calibrated, those that are
            chosen by their data alone are, too.

        Returns
        -------
        pandas.DataFrame
            ``n``: fits. ``mean``: of the parts of draws that are below the true value, less a half, in its standard
            errors if they are uniform: above 0, fits lie too low. ``sd``: their standard deviation over that of a
            uniform distribution: above 1, fits are too narrow. ``coverage_50``, ``coverage_90``: part of the central
            intervals that hold the true value; their standard errors are ``sqrt(p (1 - p) / n)``. ``p_value``: of a
            test of uniformity, the POT-C of ArviZ.
        """
        done = self.pit.dropna("fit", how="all")
        if only_reliable:
            doubtful = [Word.NOT_JUDGED.value, Word.NOT_RELIABLE.value]
            reliable = self.fits.dataset.fit[~np.isin(self.fits.about("verdict"), doubtful)]
            done = done.sel(fit=done.fit.isin(reliable))
        if (n := done.sizes["fit"]) < 2:
            raise ValueError(f"{n} fits are left: too few to judge.")
        labels = [label for array in done.values() for label in element_names(array, 1)]
        columns = _measured(np.concatenate([array.values.reshape(n, -1) for array in done.values()], axis=1))
        return pd.DataFrame(columns, index=pd.Index(labels, name="quantity"))

    @property
    def is_calibrated(self) -> bool:
        """Whether no quantity stands against it: no P value below 0.01 over the number of quantities."""
        return not self._against()[0]

    @property
    def sentence(self) -> str:
        """The verdict in a few sentences, with its error."""
        against, table = self._against()
        n, total, k = int(table.n.max()), len(self.fits), len(table)
        few = f"{n:,} of {total:,} fits" if n < total else f"{n:,} fits"
        smallest = str(table.p_value.idxmin())
        coverage = ", ".join(
            f"{name} % intervals hold {percent(table[f'coverage_{name}'].mean(), '.1f')} of the true values"
            for name in _INTERVALS
        )
        *_, (widest, p) = _INTERVALS.items()
        error = percent(np.sqrt(p * (1.0 - p) / n), ".1f")
        of_all = f"{coverage} (of one quantity: {error} by chance, at {widest} %)."
        if unreliable := int((self.fits.about("verdict") == "not reliable").sum()):
            of_all += f" Fits that are not reliable: {unreliable:,}; summary(only_reliable=True) leaves them out."
        if not against:
            return (
                f"Calibrated, as far as {few} tell: ranks of {k:,} quantities are uniform (smallest P value "
                f"{table.p_value.min():.2g}, of {smallest}). {of_all}"
            )
        which = f"ranks of {len(against):,} of {k:,} quantities are not uniform: {listed(against, '{}')}"
        return f"Not calibrated, by {few}: {which}. {of_all}"

    def _against(self) -> tuple[list[str], pd.DataFrame]:
        table = self.summary()
        low = table[table.p_value < _LEVEL / len(table)].sort_values("p_value")
        return [f"{name} {_how(row)} (P = {row.p_value:.1g})" for name, row in low.iterrows()], table

    def plot(self, var_names: Sequence[str] | None = None, **options: Any) -> Any:
        """Draw the difference of the ranks' distribution function from that of uniform ones, by `plot_ecdf_pit`.

        Parameters
        ----------
        var_names : sequence of str, optional
            Default: all.
        **options
            Of ``arviz_plots.plot_ecdf_pit``.

        Returns
        -------
        arviz_plots.PlotCollection
        """
        from arviz_plots import plot_ecdf_pit

        return plot_ecdf_pit(self.datatree, var_names=var_names, **options)

    def __repr__(self) -> str:
        """Return the verdict."""
        return f"Calibration({self.sentence})"


def _measured(pit: Array) -> dict[str, Array]:
    """Return the figures of quantities, (k,) each, by PIT values, (n, k)."""
    from arviz_stats.base import array_stats

    n, k = pit.shape
    shift = (pit.mean(axis=0) - 0.5) / (_UNIFORM_SD / np.sqrt(n))
    inside = {f"coverage_{name}": (np.abs(pit - 0.5) < p / 2.0).mean(axis=0) for name, p in _INTERVALS.items()}
    p_value = np.array([float(array_stats.uniformity_test(pit[:, j])[0]) for j in range(k)])
    return {"n": np.full(k, n), "mean": shift, "sd": pit.std(axis=0) / _UNIFORM_SD, **inside, "p_value": p_value}


def _how(row: pd.Series) -> str:
    """Say in what way ranks are not uniform."""
    spread_error = np.sqrt(0.2 / row.n)  # of the standard deviation of n uniform numbers, over its expectation
    ways = []
    if abs(row["mean"]) > _N_SE:
        ways.append(f"lies too {'low' if row['mean'] > 0.0 else 'high'}")
    if abs(row.sd - 1.0) > _N_SE * spread_error:
        ways.append(f"is too {'narrow' if row.sd > 1.0 else 'wide'}")
    return " and ".join(ways) or "has another shape"


#: Data sets at least: with fewer, no test of uniformity tells anything.
_FEWEST = 20


def calibrate(
    model: pm.Model,
    n: int = 200,
    *,
    n_jobs: int = 1,
    client: "Client | None" = None,
    random_seed: Seed = None,
    draws: int = 999,
    var_names: Sequence[str] | None = None,
    search: Search = "first",
    progressbar: bool = True,
    **options: Any,
) -> Calibration:
    """Check by simulation whether the fits of a model are calibrated.

    Parameters are drawn from the prior, data from the model given these, and the model is fitted to the data. If the
    fits are the posteriors, the rank of each true value among draws of its fit is uniform [1]_. This is looked at for
    each variable and Deterministic, and for the log density of parameters and data, which sees what no variable shows
    alone [2]_.

    Parameters
    ----------
    model : pymc.Model
        With proper priors, and without ``pm.Potential``. It has its own data back at the end.
    n : int, default 200
        Data sets.
    n_jobs : int, default 1
        Processes; -1: as many as there are cores. The result is the same, to the bit. A script needs
        ``if __name__ == "__main__":`` around the call.
    client : distributed.Client, optional
        Of Dask: fits are made on its workers, in the place of processes. The result is the same, to the bit.
    random_seed : int, list of int, SeedSequence, Generator, RandomState or None
    draws : int, default 999
        Of each fit, among which true values are ranked.
    var_names : sequence of str, optional
        Free variables and Deterministics to rank. Default: all.
    search : {"first", "each"}, default "first"
        In which fits other modes are looked for; see `fit_many`.
    progressbar : bool, default True
    **options
        Those of `NGVI` and `NGVI.fit`, for all fits.

    Returns
    -------
    Calibration

    Raises
    ------
    TypeError, ValueError
        Before any fit: for a model that can't be simulated from, names that it does not have, too few data sets; as
        `NGVI` for its options. At the end, if every fit has failed.

    References
    ----------
    .. [1] S. Talts, M. Betancourt, D. Simpson, A. Vehtari, A. Gelman (2018). Validating Bayesian inference algorithms
           with simulation-based calibration. https://doi.org/10.48550/arXiv.1804.06788
    .. [2] M. Modrák et al. (2023). Simulation-based calibration checking for Bayesian computation: the choice of test
           quantities shapes sensitivity. Bayesian Analysis. https://doi.org/10.1214/23-BA1404

    Examples
    --------
    >>> import numpy as np
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model() as model:
    ...     mu = pm.Normal("mu", 0.0, 3.0)
    ...     _ = pm.Normal("y", mu, 1.0, observed=np.ones(5))
    >>> calibration = pymc_ngvi.calibrate(model, 50, random_seed=1, progressbar=False)
    >>> calibration.is_calibrated
    True
    """
    model = checked_model(model, "calibrate(model)")
    place = workers_of(n_jobs, client)
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < _FEWEST:
        raise ValueError(f"n should be the number of data sets, at least {_FEWEST}; got {n!r}.")
    if LOG_DENSITY in model.named_vars:
        raise ValueError(f"The model has a variable {LOG_DENSITY!r}, a name that ranks need: give it another one.")
    entropy = seed_of(random_seed)
    simulated = simulate(model, int(n), seed_of(np.random.SeedSequence(entropy, spawn_key=(0,))))
    slots = Slots.of(model, simulated[0].observed)
    asked = asked_of(
        slots, options, seed_of(np.random.SeedSequence(entropy, spawn_key=(1,))), draws, var_names, search=search
    )
    fitter = Fitter(asked)
    rows = fitted_rows(fitter, simulated, place, int(n), progressbar)
    fits = ManyFits(rows, fitter, [one.observed for one in simulated], {"draws": draws})
    ranks = _joined(sorted(rows, key=lambda row: row.index), lambda row: row.ranks)
    return Calibration((ranks + 0.5) / (draws + 1), fits)


sign_with_options(calibrate, "judge", "score")
