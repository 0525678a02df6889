"""Fits by rows on JAX, beside NumPy: logistic regressions on simulated data, each in a process of its own.

A process simulates the data, fits once (cold: the model, what is compiled, and the import of JAX count) and once more
(warm): in processor seconds, and by the clock, which others on the machine slow down. It is bound to one core. From a
checkout that is not installed, set ``PYTHONPATH`` to its root. The largest case takes about 5 GB.

Examples
--------
::

    python jax_rows.py
"""

import argparse
import datetime
import os
import resource
import tempfile
import time

from pathlib import Path

import numpy as np

from environment import describe_environment
from isolated import report, run_process, script
from pages import measured_on, table, write_between_marks

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "jax.md"
#: Rows, coordinates, family.
CASES = ((10_000, 20, "full"), (10_000, 20, "diagonal"), (100_000, 50, "full"), (1_000_000, 100, "full"))
BACKENDS = ("quick", "jax")
HEADER = (
    "rows x coordinates", "family", "backend", "cold", "cold, clock", "warm", "warm, clock", "iterations",
    "peak memory, GB", "difference of means, sd",
)  # fmt: skip
_LIMIT = 900.0


def simulated(n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a design matrix and labels, the same for the same sizes."""
    rng = np.random.default_rng(20)
    x = rng.standard_normal((n, d))
    beta = rng.standard_normal(d) / np.sqrt(d)
    return x, (rng.random(n) < 1.0 / (1.0 + np.exp(-x @ beta))).astype(np.int8)


def measure(n: int, d: int, family: str, backend: str, file: Path) -> None:
    """Fit twice, and report."""
    import pymc as pm

    from pymc_ngvi import NGVI

    x, y = simulated(n, d)
    start, processor = time.perf_counter(), time.process_time()
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 1.0, shape=d)
        pm.Bernoulli("y", logit_p=x @ beta, observed=y)
    inference = NGVI(model=model, family=family, random_seed=1)
    approx = inference.fit(backend=backend, progressbar=False)
    report(
        seconds=time.process_time() - processor,
        clock=time.perf_counter() - start,
        compile_seconds=approx.compile_seconds,
    )
    start, processor = time.perf_counter(), time.process_time()
    approx = inference.fit(backend=backend, progressbar=False)
    report(
        warm=time.process_time() - processor,
        warm_clock=time.perf_counter() - start,
        iterations=approx.n_iterations,
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        elbo=approx.elbo.value,
    )
    np.savez(file, mean=approx.q.mean(), sd=approx.q.sd())


def measured(n: int, d: int, family: str, backend: str, folder: Path) -> dict[str, object]:
    """Run a process, and return what it reported."""
    name = folder / f"{n}-{d}-{family}-{backend}"
    command = script(__file__, "--rows", n, "--coordinates", d, "--family", family, "--backend", backend)
    command += ["--out", f"{name}.npz"]
    return run_process(["taskset", "-c", str(min(os.sched_getaffinity(0))), *command], name, _LIMIT)


def line(case: tuple[int, int, str], backend: str, found: dict[str, object], apart: str) -> list[str]:
    """Return a line of the table."""
    n, d, family = case
    numbers = [f"{found[name]:.2f}" if name in found else "-" for name in ("seconds", "clock", "warm", "warm_clock")]
    iterations, memory = found.get("iterations", found.get("status", "-")), found.get("memory")
    of_memory = f"{memory:.2f}" if isinstance(memory, float) else "-"
    return [f"{n:,} x {d}", family, f"`{backend}`", *numbers, str(iterations), of_memory, apart]


def run(folder: Path, cases: tuple[tuple[int, int, str], ...]) -> list[list[str]]:
    """Measure all cases, one after the other."""
    lines = []
    for case in cases:
        for backend in BACKENDS:
            found = measured(*case, backend, folder)
            apart = "-"
            names = [folder / f"{case[0]}-{case[1]}-{case[2]}-{b}.npz" for b in ("quick", backend)]
            if backend != "quick" and all(name.exists() for name in names):
                first, second = (np.load(name) for name in names)
                apart = f"{np.abs((second['mean'] - first['mean']) / first['sd']).max():.0e}"
            lines.append(line(case, backend, found, apart))
            print(" | ".join(lines[-1]), found.get("compile_seconds"), found.get("note", ""), flush=True)
    return lines


def main() -> None:
    """Measure one fit, or all of them, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int)
    parser.add_argument("--coordinates", type=int)
    parser.add_argument("--family")
    parser.add_argument("--backend")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--largest", type=int, default=max(n for n, _, _ in CASES), help="leave out cases of more rows")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    if args.rows:
        measure(args.rows, args.coordinates, args.family, args.backend, args.out)
        return
    date = datetime.datetime.now().isoformat()
    with tempfile.TemporaryDirectory() as folder:
        lines = run(Path(folder), tuple(case for case in CASES if case[0] <= args.largest))
    about = measured_on([{"date": date, "environment": describe_environment()}])
    write_between_marks(args.page, "\n".join([*about, *table(HEADER, lines), ""]), "jax_rows.py")


if __name__ == "__main__":
    main()
