"""Data in shards: three million flights and 100,000 groups, beside one model, with workers that are killed.

Each row is measured in a process of its own with an empty compile folder.

Examples
--------
::

    python shards.py --data DATA
    python shards.py --data DATA --cells "flights, one model" "flights, Dask" --table few.md
"""

import argparse
import contextlib
import functools
import os
import signal
import tempfile
import threading
import time

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm

from environment import today_and_here
from isolated import peak_memory, report, run_process, script
from pages import measured_on, table, write_between_marks

#: Row groups of the file of flights, airports with an effect of their own, and minutes from which on a flight is late.
N_SHARDS, N_AIRPORTS, LATE = 10, 40, 15
#: Groups that are divided among as many shards, and rows of each.
N_GROUPS, PER_GROUP = 100_000, 10
#: Iterations after which a worker is killed, and seconds later, in the middle of the next one.
KILLED, LATER = 5, 0.3


def flights(data: Path, group: int) -> pd.DataFrame:
    """Return the flights of a row group, with what is known of their routes."""
    import pyarrow.parquet as pq

    frame = pq.ParquetFile(data / "flights_3m.parquet").read_row_group(group).to_pandas()
    routes = pd.read_csv(data / "flights_routes.csv").set_index("route")
    routes["airport"] = pd.factorize(routes["origin"], sort=True)[0]
    return frame.join(routes[["airport", "distance"]], on="route")


def predictors(frame: pd.DataFrame) -> np.ndarray:
    """Return time of day, distance, date, day of the week and the first airports, (n, 53)."""
    angle, day = frame["minute"].to_numpy() / 1440 * 2 * np.pi, frame["day"].to_numpy()
    airport = frame["airport"].to_numpy()
    columns = [
        np.ones(len(frame)),
        *(f(k * angle) for k in (1, 2) for f in (np.sin, np.cos)),
        np.log(frame["distance"].to_numpy(dtype=float) / 500),
        day / 100.0,
        *(day % 7 == k for k in range(1, 7)),
        *(airport == k for k in range(N_AIRPORTS)),
    ]
    return np.column_stack(columns).astype(float)


def of_flights(data: Path, groups: Sequence[int]) -> pm.Model:
    """Return a logistic regression of late flights, those of some row groups."""
    frame = pd.concat([flights(data, group) for group in groups])
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 1.0, shape=5 + 2 + 6 + N_AIRPORTS)
        eta = pm.math.dot(predictors(frame), beta)
        pm.Bernoulli("late", logit_p=eta, observed=(frame["delay"] > LATE).to_numpy(dtype=int))
    return model


def of_groups(data: Path | None, shards: Sequence[int]) -> pm.Model:
    """Return a logistic regression with an effect of each group; each group is in one shard."""
    rng = np.random.default_rng(0)
    effect, group = rng.normal(0.0, 0.8, N_GROUPS), np.repeat(np.arange(N_GROUPS), PER_GROUP)
    x = rng.normal(size=len(group))
    y = rng.binomial(1, 1.0 / (1.0 + np.exp(0.3 - 0.5 * x - effect[group])))
    keep = np.isin(group * N_SHARDS // N_GROUPS, shards)
    with pm.Model() as model:
        level, slope, sd = pm.Normal("level", 0.0, 2.0), pm.Normal("slope", 0.0, 2.0), pm.HalfNormal("sd", 1.0)
        b = pm.Normal("b", 0.0, sd, shape=N_GROUPS)
        pm.Bernoulli("y", logit_p=level + slope * x[keep] + b[group[keep]], observed=y[keep])
    return model


#: What is fitted, and as what.
MODELS: dict[str, tuple[Callable[[Path | None, Sequence[int]], pm.Model], str]] = {
    "flights": (of_flights, "gaussian"),
    "groups": (of_groups, "exact"),
}
#: A model, where it is evaluated, and how many shards there are of it.
CELLS: dict[str, tuple[str, str, int]] = {
    "flights, one model": ("flights", "one", N_SHARDS),
    "flights, one process": ("flights", "serial", N_SHARDS),
    "flights, two workers": ("flights", "dask", N_SHARDS),
    "flights, two workers, five killed": ("flights", "killed", N_SHARDS),
    **{f"flights, two workers, {n} shard{'s'[: n > 1]}": ("flights", "dask", n) for n in (1, 2, 5)},
    "groups, one model": ("groups", "one", N_SHARDS),
    "groups, one process": ("groups", "serial", N_SHARDS),
    "groups, two workers": ("groups", "dask", N_SHARDS),
}


def build(model: str, data: Path | None, key: int) -> pm.Model:
    """Return the model of a shard."""
    return MODELS[model][0](data, [key])


@contextlib.contextmanager
def two_workers() -> Iterator[Any]:
    """Start a cluster of two processes."""
    from distributed import Client, LocalCluster

    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        yield client


def fit(cell: str, data: Path | None, out: Path) -> None:
    """Fit a cell in this process, and report."""
    import pymc_ngvi

    name, where, n_shards = CELLS[cell]
    make, posterior = MODELS[name]
    options = {"posterior": posterior, "random_seed": 1, "progressbar": False}
    before = peak_memory() or np.nan
    with two_workers() if where in ("dask", "killed") else contextlib.nullcontext() as client:
        shards = None
        if where == "one":
            options["model"] = make(data, range(n_shards))
        else:
            shards = pymc_ngvi.Shards(functools.partial(build, name, data), range(n_shards), client)
            options["shards"] = shards
        if where == "killed":
            options["callbacks"] = [functools.partial(_kill, client)]
        start, cpu = time.perf_counter(), time.process_time()
        approx = pymc_ngvi.fit_ngvi(**options)
        report(seconds=time.perf_counter() - start, cpu=time.process_time() - cpu, peak=peak_memory(), imports=before)
    report(passes=approx.n_gradients if shards is None else shards.n_passes, status=str(approx.status))
    np.savez(out, mean=approx._state.mean(), sd=approx._state.sd(), elbo=approx.elbo.value)


def _kill(client: Any, approx: object, losses: object, n: int) -> None:
    """Kill one of the workers in the middle of the next iteration."""
    if n <= KILLED:
        pids = list(client.run(os.getpid).values())
        threading.Timer(LATER, os.kill, (pids[n % len(pids)], signal.SIGKILL)).start()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cells and write the table; or, as a process of such a run, fit one."""
    options = _parse_options(arguments)
    if options.cell:
        fit(options.cell, options.data, options.out)
        return
    cells = [cell for cell in options.cells if options.data or CELLS[cell][0] == "groups"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = {cell: _measured(cell, options, Path(folder)) for cell in cells}
    header = ["model", "shards", "seconds", "processor", "MiB", "before", "passes", "mean", "sd", "same bits", "ended"]
    lines = measured_on([today_and_here()])
    lines += [*table(header, [_row(cell, found) for cell in cells]), ""]
    write_between_marks(options.table, "\n".join(lines), Path(__file__).name)


def _measured(cell: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    out = folder / "result.npz"
    out.unlink(missing_ok=True)
    data = ["--data", options.data] if options.data else []
    command = script(__file__, *data, "--cell", cell, "--out", out)
    found = run_process(command, folder / f"compiled {cell}", options.limit)
    print(cell, *(f"{key} {found.get(key)}" for key in ("status", "seconds", "cpu", "passes", "note")), flush=True)
    return found | (dict(np.load(out)) if out.exists() else {})


def _row(cell: str, found: dict[str, dict[str, Any]]) -> list[str]:
    own, (name, where, n_shards) = found[cell], CELLS[cell]
    keys = ("seconds", "cpu", "peak", "imports", "passes")
    row = [cell, "-" if where == "one" else str(n_shards), *(_form(own.get(key)) for key in keys)]
    whole, serial = found.get(f"{name}, one model", {}), found.get(f"{name}, one process", {})
    is_whole = n_shards == N_SHARDS and "mean" in own
    if is_whole and "mean" in whole and whole is not own:
        row.append(f"{np.abs((own['mean'] - whole['mean']) / whole['sd']).max():.0e}")
        row.append(f"{np.abs(own['sd'] / whole['sd'] - 1.0).max():.0e}")
    else:
        row += ["-", "-"]
    same = is_whole and "mean" in serial and all(np.array_equal(own[k], serial[k]) for k in ("mean", "sd", "elbo"))
    row.append("yes" if same and serial is not own else "-" if not is_whole or where in ("one", "serial") else "no")
    return [*row, str(own.get("status", "-"))]


def _form(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return "-" if value is None else f"{value:,}"


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    page = Path(__file__).parent / "results/shards.md"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the data sets; without it, simulated groups only")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL")
    parser.add_argument("--limit", type=float, default=1_200.0, help="seconds for one process")
    parser.add_argument("--table", type=Path, default=page, help="page with marks, or a new file")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
