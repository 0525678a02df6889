"""Rows and whole fits on JAX, on processors and on a GPU, beside NumPy, on simulated data.

Everything runs in processes of its own, those bound to one core side by side. One evaluates the rows of a model at
arrays of many sizes: values, with gradients, and second derivatives. Another simulates data, fits once (cold: the
model, what is compiled, and the import of JAX count) and once more (warm): in processor seconds, and by the clock.
From a checkout that is not installed, set ``PYTHONPATH`` to its root. The largest case takes about 5 GB.

Examples
--------
::

    python jax_rows.py
    python jax_rows.py --engines numpy-1 gpu --csv results.csv
"""

import argparse
import csv
import datetime
import math
import os
import resource
import shutil
import subprocess
import tempfile
import time

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pymc as pm

from environment import describe_environment
from isolated import report, run_process, script
from jax_rows_models import MODELS, ROWS
from pages import measured_on, table, write_between_marks

PAGE = Path(__file__).parent / "results" / "jax.md"
#: Values at a time; those of the table.
SIZES = tuple(2**p for p in range(10, 23, 2))
#: Draws that rows are evaluated at together, and the seconds for which each size is evaluated again and again.
DRAWS, SECONDS = 8, 0.2
WHAT = ("value", "gradient", "second derivatives")
FIELDS = (
    "part", "model", "engine", "what", "size", "first", "seconds", "there", "cold", "cold_clock", "warm", "warm_clock",
    "in_rows", "values", "calls", "iterations", "memory", "device_memory", "apart", "status", "note",
)  # fmt: skip
_LIMIT = 400.0


@dataclass(frozen=True)
class EngineOn:
    """An engine on a device.

    Parameters
    ----------
    name : str
    backend : str
    platform : str
        JAX's.
    is_on_one : bool
        Whether it is bound to one core.
    """

    name: str
    backend: str
    platform: str = "cpu"
    is_on_one: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """What is set for its processes."""
        threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"} if self.is_on_one else {}
        return {"JAX_PLATFORMS": self.platform} | threads


ENGINES = {
    "numpy-1": EngineOn("NumPy, one core", "quick", is_on_one=True),
    "numpy": EngineOn("NumPy", "quick"),
    "jax-1": EngineOn("JAX, one core", "jax", is_on_one=True),
    "jax": EngineOn("JAX, processors", "jax"),
    "gpu": EngineOn("JAX, GPU", "jax", platform="cuda"),
}


def evaluate(name: str, backend: str, most: int) -> None:
    """Evaluate the rows of a model, at arrays of all sizes, and report each as it is done.

    Parameters
    ----------
    name : str
        Of the model.
    backend : str
    most : int
        Values at a time.
    """
    from pymc_ngvi.rows import engines

    engines._FEW = engines._FEW_ON_GPU = 0  # it leaves few values to NumPy
    for size in (n for n in SIZES if n <= most):
        for what, (by_numpy, function, inputs) in functions_of(ROWS[name](size // DRAWS), backend).items():
            start = time.perf_counter()
            values = function(*inputs)
            first = time.perf_counter() - start
            seconds = least(lambda f=function, x=inputs: f(*x))
            there = on_device(function, inputs) if backend == "jax" else math.nan
            pairs = list(zip(values, by_numpy(*inputs), strict=True)) if backend == "jax" else []
            apart = max([float((np.abs(a - b) / np.maximum(1.0, np.abs(b))).max()) for a, b in pairs], default=0.0)
            found = {"size": size, "what": what, "first": first, "seconds": seconds, "there": there, "apart": apart}
            report(**{f"{what}:{size}": found})


def functions_of(model: pm.Model, backend: str) -> dict[str, tuple[Callable, Callable, list[np.ndarray]]]:
    """Return functions of the rows of the data, NumPy's and those of a backend, with inputs for several draws."""
    from pymc_ngvi.density import LogDensity
    from pymc_ngvi.graphs.backends import quickly
    from pymc_ngvi.rows.engines import engine_for
    from pymc_ngvi.rows.row_hessian import FirstDerivatives, SecondDerivatives

    density = LogDensity(model, "quick")
    kind = max(density.rows.terms.rows, key=lambda rows: len(rows.index))
    eta = 0.5 * np.random.default_rng(1).standard_normal((DRAWS, kind.index.max() + 1))
    made = [
        (
            engine.row_function(kind),
            *(engine.derivatives(kind, order) for order in (FirstDerivatives, SecondDerivatives)),
        )
        for engine in (engine_for("quick", quickly), engine_for(backend, quickly))
    ]
    result = {}
    for what, by_numpy, part in zip(WHAT, *made, strict=True):
        columns = [c[:1] if a < part.n_shared else c for a, c in enumerate(part.index.T)]
        inputs = [np.ascontiguousarray(eta[:, column]) for column in columns]
        result[what] = by_numpy.function, part.function, [*inputs, *part.data]
    return result


def least(call: Callable[[], object]) -> float:
    """Return the least seconds of a call, by the clock."""
    found, end = [], time.perf_counter() + SECONDS
    while len(found) < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def on_device(function: Callable, inputs: list[np.ndarray]) -> float:
    """Return the least seconds of what JAX does with arrays that are on its device, and stay there."""
    import jax

    from pymc_ngvi.graphs.backends import in_float64

    with in_float64():
        there = [jax.device_put(x) for x in inputs]
        return least(lambda: jax.block_until_ready(function._run(*there)))


def fit(name: str, backend: str, file: Path) -> None:
    """Fit twice, and report."""
    from pymc_ngvi import NGVI

    make, options = MODELS[name]
    build = make()
    with seconds_in_rows() as tally:
        start, processor = time.perf_counter(), time.process_time()
        inference = NGVI(model=build(), random_seed=1, **options)
        approx = inference.fit(backend=backend, progressbar=False)
        report(cold=time.process_time() - processor, cold_clock=time.perf_counter() - start)
        tally.update(in_rows=0.0, calls=0, values=0)
        start, processor = time.perf_counter(), time.process_time()
        approx = inference.fit(backend=backend, progressbar=False)
        report(warm=time.process_time() - processor, warm_clock=time.perf_counter() - start, **tally)
    report(
        iterations=approx.n_iterations,
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        device_memory=device_memory() if backend == "jax" else math.nan,
    )
    q = approx.q if hasattr(approx, "q") else approx.gaussian.q
    np.savez(file, mean=q.mean(), sd=q.sd())


@contextmanager
def seconds_in_rows() -> Iterator[dict[str, float]]:
    """Count seconds by the clock in which rows are evaluated, calls and values."""
    from pymc_ngvi.rows.engines import OnJax
    from pymc_ngvi.rows.programs import OnNumPy

    tally: dict[str, float] = {"in_rows": 0.0, "calls": 0, "values": 0}
    is_inside = False

    def counted(call: Callable) -> Callable:
        def now(self: object, *inputs: np.ndarray) -> list[np.ndarray]:
            nonlocal is_inside
            if is_inside:  # large arrays are done in parts, few values on JAX by NumPy
                return call(self, *inputs)
            is_inside, start = True, time.perf_counter()
            try:
                return call(self, *inputs)
            finally:
                is_inside = False
                tally["in_rows"] += time.perf_counter() - start
                tally["calls"] += 1
                tally["values"] += math.prod(np.broadcast_shapes(*[x.shape for x in inputs]))

        return now

    calls = {cls: cls.__call__ for cls in (OnJax, OnNumPy)}
    for cls, call in calls.items():
        cls.__call__ = counted(call)
    try:
        yield tally
    finally:
        for cls, call in calls.items():
            cls.__call__ = call


def device_memory() -> float:
    """Return the most memory of JAX's device that arrays took, in GB; NaN where it does not say."""
    import jax

    found = jax.local_devices()[0].memory_stats()
    return found["peak_bytes_in_use"] / 1e9 if found else math.nan


def describe_gpu() -> str:
    """Return the name of a GPU and its driver's version; nothing where there is none."""
    if not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().replace(", ", ", driver ")
        + "; "
    )


class Measurements:
    """What is measured, by part, model and engine, written as it comes.

    Parameters
    ----------
    folder : Path
    file : Path or None
        CSV.
    """

    def __init__(self, folder: Path, file: Path | None) -> None:
        self._folder, self._file = folder, file
        self.rows: list[dict[str, object]] = []

    def run(self, engines: Sequence[str], part: str, only: str) -> None:
        """Measure models with a part of a name, one after the other; those bound to one core side by side."""
        cases = [(name, key) for key in engines for name in (ROWS if part == "rows" else MODELS) if only in name]
        alone = [case for case in cases if ENGINES[case[1]].is_on_one]
        cores = sorted(os.sched_getaffinity(0))[::2]  # two in a row are often one
        with ThreadPoolExecutor(len(cores)) as pool:
            list(pool.map(lambda case: self._on_one(part, *case, cores), alone))
        for name, key in (case for case in cases if case not in alone):
            self._measured(part, name, key, [])

    def _on_one(self, part: str, name: str, key: str, free: list[int]) -> None:
        core = free.pop()
        self._measured(part, name, key, ["taskset", "-c", str(core)])
        free.append(core)

    def _measured(self, part: str, name: str, key: str, before: list[str]) -> None:
        engine, place = ENGINES[key], self._folder / f"{part}-{name}-{key}".replace(" ", "_")
        command = script(__file__, "--part", part, "--model", name, "--backend", engine.backend)
        command += ["--out", f"{place}.npz", "--most", str(SIZES[-1] if key != "jax-1" else 2**20)]
        settings = [f"{k}={v}" for k, v in engine.environment.items()]
        found = run_process([*before, "env", *settings, *command], place, _LIMIT)
        about = {"part": part, "model": name, "engine": engine.name}
        of_sizes = [v for v in found.values() if isinstance(v, dict)]
        self._note([about | v for v in of_sizes] if of_sizes else [about | found | self._apart(name, place)])
        print(part, name, engine.name, {k: v for k, v in found.items() if not isinstance(v, dict)}, flush=True)

    def _apart(self, name: str, place: Path) -> dict[str, object]:
        """Return by how many standard deviations means differ from those of NumPy."""
        files = [self._folder / f"fits-{name}-numpy-1.npz".replace(" ", "_"), Path(f"{place}.npz")]
        if not all(file.exists() for file in files):
            return {}
        first, second = (np.load(file) for file in files)
        return {"apart": float(np.abs((second["mean"] - first["mean"]) / first["sd"]).max())}

    def _note(self, rows: list[dict[str, object]]) -> None:
        self.rows += rows
        if self._file is None:
            return
        with self._file.open("w", newline="") as out:
            writer = csv.DictWriter(out, FIELDS, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self.rows)


def tables(rows: list[dict[str, object]]) -> list[str]:
    """Return the tables of the page."""
    return [*rows_table([row for row in rows if row["part"] == "rows"]), "", *fits_table(rows)]


def rows_table(rows: list[dict[str, object]]) -> list[str]:
    """Return milliseconds by size; of the GPU, also with arrays that are there."""
    lines: dict[tuple[object, ...], dict[object, str]] = {}
    for row in rows:
        if "size" not in row:
            continue
        key = row["model"], row["what"], row["engine"]
        lines.setdefault(key, {})[row["size"]] = _significant(1e3 * float(row["seconds"]))
        if row["engine"] == ENGINES["gpu"].name:
            there = lines.setdefault((*key[:2], "GPU, arrays there"), {})
            there[row["size"]] = _significant(1e3 * float(row["there"]))
    order = {what: k for k, what in enumerate(WHAT)}
    found = sorted(lines.items(), key=lambda item: (item[0][0], order[item[0][1]]))
    header = ["rows", "evaluated", "engine", *[f"{n:,}" for n in SIZES]]
    return table(header, [[*key, *[line.get(n, "-") for n in SIZES]] for key, line in found])


def fits_table(rows: list[dict[str, object]]) -> list[str]:
    """Return times of fits."""
    header = (
        "model", "engine", "cold, clock", "warm, clock", "of which rows", "warm", "iterations", "peak memory, GB",
        "on the GPU, GB", "difference of means, sd",
    )  # fmt: skip
    names = ("cold_clock", "warm_clock", "in_rows", "warm")
    lines = []
    for row in sorted((row for row in rows if row["part"] == "fits"), key=lambda row: list(MODELS).index(row["model"])):
        numbers = [_two(row.get(name)) for name in names]
        memory = [_two(row.get(name)) for name in ("memory", "device_memory")]
        apart = row.get("apart", math.nan)
        is_other = row["engine"] != ENGINES["numpy-1"].name and math.isfinite(apart)
        iterations = row.get("iterations", row.get("status", "-"))
        lines.append([row["model"], row["engine"], *numbers, iterations, *memory, f"{apart:.0e}" if is_other else "-"])
    return table(header, lines)


def _two(number: object) -> str:
    return f"{number:.2f}" if isinstance(number, float) and math.isfinite(number) else "-"


def _significant(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def main() -> None:
    """Measure one process's share, or everything, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("rows", "fits"), help="measure one model, in this process")
    parser.add_argument("--model")
    parser.add_argument("--backend")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--most", type=int, default=SIZES[-1])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--parts", nargs="+", default=["rows", "fits"], choices=("rows", "fits"))
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    if args.part == "rows":
        evaluate(args.model, args.backend, args.most)
        return
    if args.part == "fits":
        fit(args.model, args.backend, args.out)
        return
    date = datetime.datetime.now().isoformat()
    with tempfile.TemporaryDirectory() as folder:
        measurements = Measurements(Path(folder), args.csv)
        for part in args.parts:
            measurements.run(args.engines, part, args.only)
    about = measured_on([{"date": date, "environment": describe_gpu() + describe_environment()}])
    write_between_marks(args.page, "\n".join([*about, *tables(measurements.rows), ""]), "jax_rows.py")


if __name__ == "__main__":
    main()
