"""Many fits on a Dask cluster: the bits of fits here, one entry for a worker that dies, nothing lost with a cluster."""

import contextlib
import importlib
import os
import pickle
import re
import sys
import threading
import time

import cloudpickle
import numpy as np
import pymc as pm
import pytest
import xarray as xr

import pymc_ngvi

from pymc_ngvi.density import shards as of_cluster

fitting = importlib.import_module("pymc_ngvi.many")  # a function has its name

pytest.importorskip("distributed")

N_FITS = 7
QUIET = {"random_seed": 3, "progressbar": False}


def normal():
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mu", 0.0, 3.0), 1.0, observed=np.ones(5))
    return model


def data_sets():
    return [{"y": np.full(5, float(k))} for k in range(N_FITS)]


def with_groups():
    group = np.repeat(np.arange(4), 5)
    with pm.Model(coords={"group": list("abcd")}) as model:
        y = pm.Data("y_data", np.ones(20, dtype=int))
        mu, sd = pm.Normal("mu", 0.0, 2.0), pm.HalfNormal("sd", 1.0)
        u = pm.Normal("u", mu, sd, dims="group")
        pm.Bernoulli("y", logit_p=u[group], observed=y)
    return model


def drawn(folder, index):
    """Return the draws of a fit."""
    with xr.open_dataset(folder / f"fit_{index:06d}.nc", group="posterior") as found:
        return found.load()


def without_seconds(many):
    return many.dataset.drop_vars("seconds")


@pytest.fixture(scope="module")
def here():
    return pymc_ngvi.fit_many(normal(), data_sets(), **QUIET)


@contextlib.contextmanager
def workers_here(n):
    """Give a client of workers in this process, with two threads each."""
    from distributed import Client, LocalCluster

    options = {"n_workers": n, "threads_per_worker": 2, "processes": False, "dashboard_address": None}
    with LocalCluster(**options, silence_logs=50) as cluster, Client(cluster, timeout=180) as client:
        yield client


@pytest.fixture
def two_workers():
    with workers_here(2) as client:
        yield client


def test_the_bits_are_those_of_fits_here(cluster, tmp_path):
    rng = np.random.default_rng(1)
    data = [{"y_data": rng.binomial(1, 0.3 + 0.05 * k, 20)} for k in range(N_FITS)]
    here, there = (
        pymc_ngvi.fit_many(with_groups(), data, client=client, draws_to=tmp_path / str(k), **QUIET)
        for k, client in enumerate((None, cluster))
    )
    assert set(there.dataset.posterior.values) == {"exact"}
    xr.testing.assert_identical(without_seconds(there), without_seconds(here))
    for index in range(N_FITS):
        one, other = (drawn(tmp_path / str(k), index) for k in range(2))
        xr.testing.assert_equal(one, other)
    assert there.approx(5).elbo.value == float(here.dataset.elbo[5])


def test_what_all_fits_need_is_sent_once(here, two_workers, monkeypatch):
    sent = []
    submitted = fitting._submitted
    monkeypatch.setattr(fitting, "_submitted", lambda *args: sent.append(args[1:]) or submitted(*args))
    pymc_ngvi.fit_many(normal(), data_sets(), client=two_workers, **QUIET)
    kits = [args for function, *args in sent if function is fitting.Kit]
    cases = [args for function, *args in sent if function is not fitting.Kit]
    assert len(kits) == 1
    assert len(cases) == N_FITS - fitting.N_PILOTS
    assert max(len(case) for _, _, case in cases) < len(kits[0][0]) / 10


def test_calibration_takes_a_client(two_workers):
    options = {"n": 20, "draws": 99, **QUIET}
    here, there = (pymc_ngvi.calibrate(normal(), client=client, **options) for client in (None, two_workers))
    xr.testing.assert_identical(here.pit, there.pit)


class Unsendable:
    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return self.values

    def __reduce__(self):
        raise TypeError("this can't be pickled")


class Unreadable:
    def __reduce__(self):
        return no_array, ()


def no_array():
    raise OSError("no such file")


def test_failures_are_entries_with_their_reason(here, two_workers):
    data = data_sets()
    data[3] = {"y": np.ones((5, 1))}
    data[4] = {"y": Unsendable(data[4]["y"])}
    data[5] = {"y": Unreadable()}
    with pytest.warns(UserWarning, match="3 of 7 fits failed"):
        found = pymc_ngvi.fit_many(normal(), data, client=two_workers, **QUIET).dataset
    for k, why in [
        (3, "has 2 axes"),
        (4, "can't be sent to another process: .*this can't be"),
        (5, "OSError: no such"),
    ]:
        assert re.search(why, str(found.error.values[k])), found.error.values[k]
    xr.testing.assert_identical(found.drop_vars("seconds").sel(fit=[2, 6]), without_seconds(here).sel(fit=[2, 6]))


def test_models_that_can_not_be_sent_are_named():
    kit = fitting.Kit(b"123")
    assert pickle.loads(pickle.dumps(kit)).content == b"123"
    fitter = type("Some", (), {"asked": threading.Lock(), "pilot": None, "may_leave_search": True})()
    with pytest.raises(TypeError, match=r"The model can't be sent to other processes: .*lock"):
        fitting.Kit.of(fitter)


class EndsItsWorker:
    """Data that end a worker that reads them."""

    def __init__(self, home):
        self.home = home

    def __array__(self, dtype=None, copy=None):
        if os.getpid() != self.home:
            os._exit(1)
        return np.ones(5)


def test_a_worker_that_dies_takes_no_other_fit_with_it(here, cluster, monkeypatch):
    monkeypatch.setattr(cluster.cluster.scheduler, "allowed_failures", 0)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import the tests
    data = data_sets()
    data[4] = {"y": EndsItsWorker(os.getpid())}
    try:
        with pytest.warns(UserWarning, match=r"1 of 7 fits failed \(4\): .* The process ended during this fit"):
            found = pymc_ngvi.fit_many(normal(), data, client=cluster, **QUIET)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    xr.testing.assert_identical(without_seconds(found).drop_sel(fit=4).mu, without_seconds(here).drop_sel(fit=4).mu)
    assert found.dataset.error.values.astype(bool).tolist() == [k == 4 for k in range(N_FITS)]


class Waits:
    """Data that are there once a file is."""

    def __init__(self, gate):
        self.gate = gate

    def __array__(self, dtype=None, copy=None):
        until = time.monotonic() + 60.0
        while not self.gate.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return np.ones(5)


def test_an_interrupt_cancels_what_is_in_hand(two_workers, monkeypatch, tmp_path):
    futures, submitted = [], fitting._submitted
    monkeypatch.setattr(fitting, "_submitted", lambda *args: futures.append(submitted(*args)) or futures[-1])

    def interrupted():
        yield from data_sets()[:3]
        yield from [{"y": Waits(tmp_path / "gate")}] * 3
        raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="Interrupted from the keyboard: 3 fits were done, which are kept"):
        found = pymc_ngvi.fit_many(normal(), interrupted(), client=two_workers, **QUIET)
    (tmp_path / "gate").touch()
    assert len(found) == 3
    assert [future.status for future in futures[1:]] == ["cancelled"] * 3


def test_a_cluster_that_is_gone_loses_no_fit_that_was_done(here, two_workers, monkeypatch):
    monkeypatch.setattr(of_cluster, "_LOOK", 0.1)
    monkeypatch.setattr(of_cluster, "_PATIENCE", 0.2)

    def source():
        for k, entry in enumerate(data_sets()):
            if k == 3:
                two_workers.cluster.scale(0)
            yield entry

    with pytest.warns(UserWarning, match="no worker for .* Start some, and call again. 3 fits were done, which"):
        found = pymc_ngvi.fit_many(normal(), source(), client=two_workers, **QUIET)
    xr.testing.assert_identical(found.dataset.mu, here.dataset.mu[:3])


def test_bad_clients_are_refused_before_any_fit(two_workers, monkeypatch):
    def refused(error, message, **options):
        with pytest.raises(error, match=message):
            pymc_ngvi.fit_many(normal(), data_sets(), **options, **QUIET)

    monkeypatch.setattr(fitting.Fitter, "row", None)
    refused(TypeError, "client should be a distributed.Client; got 'tcp://.*give Client.address.", client="tcp://a:1")
    refused(TypeError, "client should be a distributed.Client; got .*LocalCluster", client=two_workers.cluster)
    refused(ValueError, "Give n_jobs, processes of this machine, or client", client=two_workers, n_jobs=2)
    two_workers.close()
    refused(pymc_ngvi.BrokenExecutorError, "evaluates the fits is closed. Make another one", client=two_workers)
