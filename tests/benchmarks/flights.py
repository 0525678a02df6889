"""Three million flights: a logistic regression on shards, beside one process, with workers that are killed.

Examples
--------
::

    python flights.py --data DATA
"""

import argparse
import contextlib
import functools
import os
import signal
import time

from pathlib import Path

import numpy as np
import pandas as pd
import pymc as pm

import pymc_ngvi

#: Row groups of the file, airports with an effect of their own, minutes from which on a flight is late.
N_SHARDS, N_AIRPORTS, LATE = 10, 40, 15


@functools.cache
def routes(data: Path) -> pd.DataFrame:
    """Return origin, destination and distance of each route."""
    return pd.read_csv(data / "flights_routes.csv").set_index("route")


def flights(data: Path, group: int) -> pd.DataFrame:
    """Return the flights of a row group."""
    import pyarrow.parquet as pq

    frame = pq.ParquetFile(data / "flights_3m.parquet").read_row_group(group).to_pandas()
    return frame.join(routes(data), on="route")


def design(data: Path, frame: pd.DataFrame) -> np.ndarray:
    """Return the predictors: time of day, distance, date, day of the week, the first airports of the file."""
    angle = frame["minute"].to_numpy() / 1440 * 2 * np.pi
    day = frame["day"].to_numpy()
    names = sorted(routes(data)["origin"].unique())[:N_AIRPORTS]
    columns = [
        np.ones(len(frame)),
        *(f(k * angle) for k in (1, 2) for f in (np.sin, np.cos)),
        np.log(frame["distance"].to_numpy(dtype=float) / 500),
        day / 100.0,
        *(day % 7 == k for k in range(1, 7)),
        *(frame["origin"].to_numpy() == name for name in names),
    ]
    return np.column_stack(columns).astype(float)


def logistic(X: np.ndarray, late: np.ndarray) -> pm.Model:
    """Return a logistic regression."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 1.0, shape=X.shape[1])
        pm.Bernoulli("late", logit_p=pm.math.dot(X, beta), observed=late)
    return model


def build(data: Path, group: int) -> pm.Model:
    """Return the model of a row group."""
    frame = flights(data, group)
    return logistic(design(data, frame), (frame["delay"] > LATE).to_numpy(dtype=int))


if __name__ == "__main__":
    from resource import RUSAGE_SELF, getrusage
    import sys
    from distributed import Client, LocalCluster
    data = Path("/work/shared/data")
    if sys.argv[1] == "one":
        frame = pd.concat([flights(data, k) for k in range(N_SHARDS)])
        model = logistic(design(data, frame), (frame["delay"] > LATE).to_numpy(dtype=int))
        del frame
        t = time.perf_counter(); approx = pm.fit(method="ngvi", model=model, posterior="gaussian", progressbar=False, random_seed=1); print("one", time.perf_counter() - t, time.process_time())
        np.savez("/tmp/one.npz", mean=approx.q.mean(), cov=approx.q.cov())
    elif sys.argv[1] == "serial":
        t = time.perf_counter(); shards = pymc_ngvi.Shards(functools.partial(build, data), range(N_SHARDS)); approx = pm.fit(method="ngvi", shards=shards, posterior="gaussian", progressbar=False, random_seed=1); print("serial", time.perf_counter() - t, shards.n_passes, approx.record.n_gradients)
        np.savez("/tmp/serial.npz", mean=approx.q.mean(), cov=approx.q.cov())
    else:
        kill = sys.argv[1] == "kill"
        with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster, Client(cluster) as client:
            shards = pymc_ngvi.Shards(functools.partial(build, data), range(N_SHARDS), client)
            def murder(approx, losses, i):
                print("iteration", i, time.perf_counter() - t, flush=True)
                if kill and i <= 5:
                    import threading
                    pid = cluster.workers[sorted(cluster.workers)[0]].pid
                    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
            t = time.perf_counter(); approx = pm.fit(method="ngvi", shards=shards, posterior="gaussian", callbacks=[murder], progressbar=False, random_seed=1); print("dask", time.perf_counter() - t, shards.n_passes, approx.record.n_gradients)
            np.savez(f"/tmp/dask{sys.argv[1]}.npz", mean=approx.q.mean(), cov=approx.q.cov())
    print("MB", getrusage(RUSAGE_SELF).ru_maxrss / 1e3)
