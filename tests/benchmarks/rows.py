"""Exact expectations over rows: seconds, memory and accuracy, beside rivals in the same run.

Parts: ``logistic`` (many rows, beside a loop written in NumPy), ``references`` (three regressions, against long NUTS
runs), ``wide`` (118 and 785 columns), ``groups`` (random effects, beside draws and glmmTMB), ``rasch``, and ``kinks``
(against NUTS). Each measurement runs in a process of its own with an empty compile folder; the second fit in it is the
warm one. A run can be stopped and resumed: what is in the results file already is not measured again. From a checkout
that is not installed, set ``PYTHONPATH`` to its root. Set ``OPENBLAS_NUM_THREADS=1`` to compare processor seconds.

Examples
--------
::

    python rows.py --data DATA --references REFERENCES
    python rows.py --parts kinks --out kinks.csv --table kinks.md
    python rows.py --parts logistic --sizes 1000 10000 --out small.csv --table small.md
    python rows.py --tables
"""

import argparse
import datetime
import os
import tempfile
import time

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import rows_models
import rows_numpy
import rows_tables

from environment import describe_environment
from glmmtmb import R_SCRIPT, missing_package
from isolated import first_line, peak_memory, report, run_process, script
from measure import Array, Reference, coordinate_names, unconstrain
from pages import write_between_marks
from records import Records
from timed_fit import timed_fit

PARTS = ("logistic", "references", "wide", "groups", "rasch", "kinks")
REGRESSIONS, GROUPED, INTERCEPTS = ("german", "heart", "icu"), ("hers", "toenail", "epilepsy"), "intercepts"
#: Ways to fit, with the options of ours.
OURS: dict[str, dict[str, Any]] = {
    "gaussian": {"posterior": "gaussian"},
    "gaussian, draws": {"posterior": "gaussian", "estimator": "price"},
    "posterior": {"posterior": "exact"},
    "posterior, draws": {"posterior": "exact", "estimator": "price"},
}
NUMPY, GLMMTMB, NUTS = "numpy", "glmmTMB", "nutpie"
KEY = ("part", "model", "method", "seed")
FIELDS = (
    *KEY, "status", "chosen", "is_exact", "n_dim", "n_rows", "elbo", "elbo_se", "gap", "n_iterations", "evaluations",
    "cold", "cold_cpu", "compile_seconds", "warm", "warm_cpu", "data_mib", "memory_before", "memory", "em", "es",
    "load", "note", "date", "environment",
)  # fmt: skip
N_NUTS, NUTS_SEED = 5_000, 7


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing and write the tables; or, as a process of such a run, one of the measurements."""
    options = _parse_options(arguments)
    if options.cell:
        run_cell(*options.cell, options)
        return
    records = Records(options.out, FIELDS)
    if not options.tables:
        done = {tuple(row[name] for name in KEY) for row in records.read()}
        for cell in cells(options):
            if tuple(map(str, cell)) not in done:
                row = dict(zip(KEY, cell, strict=True)) | {"status": "ok"} | measured(cell, options)
                when = datetime.datetime.now().isoformat(timespec="seconds")
                records.append({**row, "date": when, "environment": describe_environment()})
                print(*cell, row["status"], *(f"{n} {row[n]:.2f}" for n in ("cold", "warm") if n in row), flush=True)
    write_between_marks(options.table, rows_tables.write_tables(records.read()), Path(__file__).name)


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str, str, int]]:
    """Return what is to be measured: part, model, method and seed."""
    draws = ("gaussian", "gaussian, draws")
    wanted: dict[str, list[tuple[str, tuple[str, ...]]]] = {
        "logistic": [(str(n), (NUMPY, "gaussian")) for n in options.sizes],
        "references": [(name, ("gaussian",)) for name in REGRESSIONS],
        "wide": [(name, (NUMPY, *draws)) for name in rows_models.DESIGNS],
        "groups": [(name, (GLMMTMB, *OURS)) for name in (INTERCEPTS, *GROUPED)],
        "rasch": [("rasch", draws)],
        "kinks": [(name, (NUTS, *draws)) for name in rows_models.KINKS],
    }
    for part in options.parts:
        for model, methods in wanted[part]:
            if not options.models or model in options.models:
                seeds = range(1, options.seeds + 1) if part == "references" else (1,)
                yield from ((part, model, method, seed) for method in methods for seed in seeds)


def measured(cell: tuple[str, str, str, int], options: argparse.Namespace) -> dict[str, object]:
    """Run a measurement in a process of its own."""
    _, model, method, _ = cell
    if method == GLMMTMB:
        return _by_glmmtmb(model, options)
    sizes = ["--groups", options.groups, "--persons", options.persons, "--items", options.items]
    given = {name: getattr(options, name) for name in ("data", "references", "moments")}
    folders = [word for name, folder in given.items() if folder for word in (f"--{name}", folder)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = script(__file__, *sizes, *folders, "--cell", *cell)
        return run_process(command, Path(folder) / "compiled", options.limit)


def run_cell(part: str, name: str, method: str, seed: str, options: argparse.Namespace) -> None:
    """Fit twice and report what was found as JSON."""
    if method == NUMPY:
        _by_numpy(design_of(name, options))
        return
    if method == NUTS:
        _by_nuts(name, rows_models.KINKS[name](), options)
        return
    model = model_of(part, name, options)
    data = sum(v.nbytes for v in _arrays(model)) / 2**20
    approx, cold = timed_fit(model, OURS[method], int(seed))
    report(
        **{n: cold[n] for n in ("status", "chosen", "n_dim", "n_iterations", "gap", "compile_seconds") if n in cold},
        **{n: cold[n] for n in ("memory_before", "memory", "load") if n in cold},
        data_mib=data,
    )
    if approx is None:
        return
    report(cold=cold["seconds"], cold_cpu=cold["cpu_seconds"], is_exact=approx.is_exact)
    report(elbo=approx.elbo.value, elbo_se=approx.elbo.se, evaluations=min(cold["n_gradients"], cold["n_hessians"]))
    report(**_errors(part, name, approx, options))
    again, warm = timed_fit(model, OURS[method], int(seed) + 100)
    if again is not None:
        report(warm=warm["seconds"], warm_cpu=warm["cpu_seconds"])


def design_of(name: str, options: argparse.Namespace) -> rows_models.Design:
    """Return the data of a logistic regression: simulated, of so many rows, or real."""
    return rows_models.simulated(int(name)) if name.isdigit() else rows_models.DESIGNS[name](options.data)


def model_of(part: str, name: str, options: argparse.Namespace) -> pm.Model:
    """Return a model by its part and name."""
    if part in ("logistic", "wide"):
        return rows_models.logistic(design_of(name, options))
    if part == "kinks":
        return rows_models.KINKS[name]()
    if part == "rasch":
        return rows_models.rasch(options.persons, options.items)
    if name == INTERCEPTS:
        return rows_models.random_intercepts(rows_models.intercepts(options.groups))
    return rows_models.reference(name, options.references, options.data)


def _arrays(model: pm.Model) -> list[Array]:
    from pytensor.graph.basic import Constant
    from pytensor.graph.traversal import ancestors

    return [v.data for v in ancestors([model.logp()]) if isinstance(v, Constant) and np.ndim(v.data)]


def _errors(part: str, name: str, approx: Any, options: argparse.Namespace) -> dict[str, object]:
    """Return errors of means and standard deviations against NUTS, where there is a reference."""
    folder = options.moments if part == "kinks" else options.references
    file = None if folder is None else folder / f"{name.replace(' ', '_').replace(',', '')}.npz"
    if part in ("logistic", "wide", "rasch") or file is None or not file.exists():
        return {}
    names = coordinate_names(approx.model)
    errors = Reference.read(file).errors(names, approx.mean_flat, approx.sd_flat)
    return {"em": errors.em, "es": errors.es}


# --- rivals -----------------------------------------------------------------------------------------------------------


def _by_numpy(design: rows_models.Design) -> None:
    report(n_dim=design.x.shape[1], n_rows=len(design.x), memory_before=peak_memory(), load=os.getloadavg()[0])
    for which in ("cold", "warm"):
        start, cpu = time.perf_counter(), time.process_time()
        found = rows_numpy.fit(design)
        report(**{which: time.perf_counter() - start, f"{which}_cpu": time.process_time() - cpu})
    report(elbo=found.elbo, evaluations=found.n_evaluations, memory=peak_memory(), data_mib=design.x.nbytes / 2**20)


def _by_nuts(name: str, model: pm.Model, options: argparse.Namespace) -> None:
    """Draw by NUTS, and keep the moments as the reference of the fits that follow."""
    import nutpie

    start, cpu = time.perf_counter(), time.process_time()
    compiled = nutpie.compile_pymc_model(model)
    tree = nutpie.sample(compiled, draws=N_NUTS, tune=1_000, chains=4, cores=1, seed=NUTS_SEED, progress_bar=False)
    report(cold=time.perf_counter() - start, cold_cpu=time.process_time() - cpu)
    draws = unconstrain(tree["posterior"], model)
    moments = {"uncon_mean": draws.mean(axis=0), "uncon_sd": draws.std(axis=0)}
    file = options.moments / f"{name.replace(' ', '_').replace(',', '')}.npz"
    np.savez(file, uncon_names=coordinate_names(model), **moments)
    report(n_dim=draws.shape[1], note=f"{len(draws):,} draws")


def _by_glmmtmb(name: str, options: argparse.Namespace) -> dict[str, object]:
    if reason := missing_package():
        return {"status": f"skipped: {reason}"}
    try:
        data, family, random = rows_models.grouped(name, options.groups, options.data)
    except (OSError, TypeError) as error:
        return {"status": f"skipped: {first_line(error)}"}
    names = [f"x{i}" for i in range(1, data.x.shape[1])]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "data.csv"
        pd.DataFrame(data.x[:, 1:], columns=names).assign(g=data.group, y=data.y).to_csv(file, index=False)
        command = ["Rscript", "--vanilla", str(R_SCRIPT), str(file), family, random]
        found = run_process(command, Path(folder) / "theirs", options.limit)
    if "seconds" not in found:
        return {"status": f"glmmTMB: {found.get('status', 'no output')}"}
    status = "ok" if found["converged"] else "not converged"
    times = {"cold": found["seconds"], "cold_cpu": found["seconds_processor"], "memory": found["peak_mib"]}
    return {**times, "status": status, "n_rows": len(data.y), "note": found["version"]}


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    folder = Path(__file__).parent / "results"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--references", type=Path, help="folder of models.py and the NUTS moments")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", help="only these")
    parser.add_argument("--sizes", nargs="*", type=int, default=(100_000, 1_000_000), help="rows of the regressions")
    parser.add_argument("--groups", type=int, default=10_000, help="of the simulated random intercepts")
    parser.add_argument("--persons", type=int, default=5_000, help="of the Rasch model")
    parser.add_argument("--items", type=int, default=50, help="of the Rasch model")
    parser.add_argument("--seeds", type=int, default=5, help="of the references: 1 to this")
    parser.add_argument("--limit", type=float, default=1_800.0, help="seconds for one process")
    parser.add_argument("--moments", type=Path, help="folder that keeps moments of NUTS; default: beside --out")
    parser.add_argument("--tables", action="store_true", help="measure nothing, write the tables")
    parser.add_argument("--out", type=Path, default=folder / "rows.csv")
    parser.add_argument("--table", type=Path, default=folder / "rows.md", help="page with marks, or a new file")
    parser.add_argument("--cell", nargs=4, metavar=("PART", "MODEL", "METHOD", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.cell and not options.tables:
        options.moments = options.moments or Path(tempfile.mkdtemp(prefix="moments"))
        if {"references", "wide", "groups"} & set(options.parts) and None in (options.data, options.references):
            raise SystemExit("Give --data and --references, the folders of the data sets and of models.py.")
    return options


if __name__ == "__main__":
    main()
