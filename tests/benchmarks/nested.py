"""Nested posteriors of latent Gaussian models: seconds, accuracy, and log m(g) by three methods.

Each measurement runs in a process of its own with an empty compile folder; seconds are processor seconds of the first
fit, without imports and building the model. References are made by ``--make`` and kept in ``--moments``. A run can be
stopped and resumed: what is in the results file already is not measured again. From a checkout that is not installed,
set ``PYTHONPATH`` to its root. Set ``OPENBLAS_NUM_THREADS=1`` to compare processor seconds.

Examples
--------
::

    python nested.py --data DATA --moments REFERENCES --make
    python nested.py --data DATA --moments REFERENCES
    python nested.py --models Nile CAR --out few.csv --table few.md
    python nested.py --tables
"""

import argparse
import datetime
import tempfile

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nested_models
import nested_tables
import numpy as np

from environment import describe_environment
from isolated import report, run_process, script
from measure import coordinate_names
from pages import write_between_marks
from records import Records
from timed_fit import timed_fit

FIT, LOG_M, MAKE = "fit", "log m", ("NUTS", "integral")
KEY = ("part", "model", "seed")
FIELDS = (
    *KEY, "status", "posterior", "n_latent", "n_hyper", "cold", "cold_cpu", "compile_seconds", "memory", "n_fits",
    "claimed", "verdict", "em_hyper", "es_hyper", "em_latent", "es_latent", "nuts_em_hyper", "nuts_es_hyper",
    "nuts_em_latent", "nuts_es_latent", "ess", "accurate", "worst", "elbo_mean",
    "elbo_sd", "corrected_mean", "corrected_sd", "laplace_mean", "laplace_sd", "error", "khat", "load", "note", "date",
    "environment",
)  # fmt: skip
#: Models whose log m is looked at closely, and values of their hyperparameters.
CLOSELY = (
    "InstEval, logistic", "gp.Latent, Bernoulli", "gp.Latent, Poisson", "volatility, walk of 500", "volatility, AR(1)",
    "AR(1), Poisson", "BYM2, 100 regions", "CAR",
)  # fmt: skip
N_VALUES = 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing and write the tables; or, as a process of such a run, one of the measurements."""
    options = _parse_options(arguments)
    if options.cell:
        run_cell(*options.cell, options)
        return
    records = Records(options.out, FIELDS)
    if options.make:
        for name in options.models:
            print(name, _make(name, options), flush=True)
        return
    if not options.tables:
        done = {tuple(row[name] for name in KEY) for row in records.read()}
        for cell in cells(options):
            if tuple(map(str, cell)) not in done:
                row = dict(zip(KEY, cell, strict=True)) | {"status": "ok"} | _measured(cell, options)
                when = datetime.datetime.now().isoformat(timespec="seconds")
                records.append({**row, "date": when, "environment": describe_environment()})
                print(*cell, *(f"{n} {row[n]}" for n in nested_tables.SHOWN if n in row), flush=True)
    order = [*nested_models.SIMULATED, *nested_models.CROSSED]
    rows = sorted(records.read(), key=lambda row: order.index(row["model"]))
    write_between_marks(options.table, nested_tables.write_tables(rows), Path(__file__).name)


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Return what is to be measured: part, model and seed."""
    for part, names in ((FIT, options.models), (LOG_M, [name for name in CLOSELY if name in options.models])):
        if part in options.parts:
            yield from ((part, name, options.seed) for name in names)


def run_cell(part: str, name: str, seed: str, options: argparse.Namespace) -> None:
    """Do one measurement and report what was found as JSON."""
    model = nested_models.model_of(name, options.data)
    if part in MAKE:
        _make_one(part, name, model, options)
        return
    if part == LOG_M:
        _report_log_m(model, int(seed))
        return
    approx, columns = timed_fit(model, {"posterior": "nested"} if name in nested_models.CROSSED else {}, int(seed))
    shown = {n: columns[n] for n in ("status", "compile_seconds", "memory", "load") if n in columns}
    report(**shown, cold=columns.get("seconds"), cold_cpu=columns.get("cpu_seconds"))
    if approx is None:
        return
    report(**_kind(approx))
    report(**_errors(name, approx, options))


def _make_one(kind: str, name: str, model: Any, options: argparse.Namespace) -> None:
    """Make one reference of a model."""
    import nested_references

    if kind == nested_references.NUTS:
        made = nested_references.by_nuts(model, nested_models.for_nuts(name, options.data))
    else:
        made = nested_references.by_integral(model, is_gaussian=name in nested_models.CONJUGATE)
    made.write(nested_references.file_of(options.moments, name, kind))


def _kind(approx: Any) -> dict[str, object]:
    """Return what the posterior is, and what it says of itself."""
    record = approx.record
    if record.is_nested:
        checks = approx.checks
        return {
            "posterior": "nested",
            "n_latent": checks.n_local,
            "n_hyper": checks.n_globals,
            "n_fits": checks.n_fits,
            "claimed": checks.error,
            "verdict": "reliable" if checks.is_reliable else "; ".join(checks.failures),
        }
    n_hyper = int(hyperparameters(approx.model).sum())
    return {
        "posterior": "exact" if record.is_exact else "Gaussian",
        "n_latent": approx.layout.n_dim - n_hyper,
        "n_hyper": n_hyper,
        "verdict": "exact" if record.is_exact else record.posterior,
    }


def _errors(name: str, approx: Any, options: argparse.Namespace) -> dict[str, object]:
    """Return errors of means and standard deviations against an integral: ours, and those of NUTS."""
    import nested_references

    found: dict[str, object] = {}
    if options.moments is None:
        return found
    files = [nested_references.file_of(options.moments, name, kind) for kind in MAKE]
    nuts, integral = (nested_references.Moments.read(file) if file.exists() else None for file in files)
    if integral is None:
        return found
    names, where = coordinate_names(approx.model), hyperparameters(approx.model)
    for prefix, other in (("", (names, approx.mean_flat, approx.sd_flat)), ("nuts_", nuts)):
        if other is None:
            continue
        if list(other[0]) != integral.names:
            raise ValueError(f"the integral of {name} has other coordinates")
        of_mean, of_sd = (other[1] - integral.mean) / integral.sd, other[2] / integral.sd - 1.0
        for kind, index in (("hyper", where), ("latent", ~where)):
            for letter, error in (("em", of_mean), ("es", of_sd)):
                found[f"{prefix}{letter}_{kind}"] = float(np.sqrt(np.mean(error[index] ** 2)))
        if not prefix:
            worst = [f"{names[i]} {of_mean[i]:+.3f} {of_sd[i]:+.3f}" for i in np.flatnonzero(where)]
            found["worst"] = "; ".join(worst)
    if nuts is not None:
        found["ess"] = float(np.min(nuts.size[where]))
    return {**found, "accurate": float(np.min(integral.size))}


def hyperparameters(model: Any) -> np.ndarray:
    """Tell which coordinates have a transform: scales, correlations and shapes, (d,)."""
    point = model.initial_point()
    kinds = [
        np.full(np.size(point[value.name]), model.rvs_to_transforms[model.values_to_rvs[value]] is not None)
        for value in model.value_vars
    ]
    return np.concatenate(kinds)


def _report_log_m(model: Any, seed: int) -> None:
    from nested_log_m import compared

    found = compared(model, N_VALUES, seed)
    for name in ("elbo", "corrected", "laplace"):
        error = getattr(found, name) - found.accurate
        report(**{f"{name}_mean": float(error.mean()), f"{name}_sd": float(error.std(ddof=1))})
    report(error=float(found.error.max()), khat=float(found.khat.max()))


def _measured(cell: tuple[str, str, int], options: argparse.Namespace) -> dict[str, object]:
    if cell[1] in nested_models.CROSSED and not _has_ratings(options.data):
        return {"status": "skipped: no insteval.csv.gz in the folder of the data sets"}
    given = {name: getattr(options, name) for name in ("data", "moments")}
    folders = [word for name, folder in given.items() if folder for word in (f"--{name}", folder)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = script(__file__, *folders, "--cell", *cell)
        return run_process(command, Path(folder) / "compiled", options.limit)


def _has_ratings(data: Path | None) -> bool:
    return data is not None and (data / "insteval.csv.gz").exists()


def _make(name: str, options: argparse.Namespace) -> dict[str, object]:
    """Make the references of a model that are missing."""
    import nested_references

    result: dict[str, object] = {}
    for kind, left_out in zip(MAKE, (nested_models.NOT_SAMPLED, nested_models.TIMED), strict=True):
        if name in left_out:
            continue
        there = nested_references.file_of(options.moments, name, kind).exists()
        result[kind] = "there" if there else _measured((kind, name, options.seed), options).get("status", "made")
    return result


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    docs = Path(__file__).parents[2] / "docs" / "benchmarks"
    every = [*nested_models.SIMULATED, *nested_models.CROSSED]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, help="folder of the data sets; without it, simulated models only")
    parser.add_argument("--moments", type=Path, help="folder of the references; without it, no errors")
    parser.add_argument("--make", action="store_true", help="make references that are missing, and nothing else")
    parser.add_argument("--parts", nargs="+", choices=(FIT, LOG_M), default=(FIT, LOG_M))
    parser.add_argument("--models", nargs="+", choices=every, default=every, metavar="MODEL")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one process")
    parser.add_argument("--tables", action="store_true", help="measure nothing, write the tables")
    parser.add_argument("--out", type=Path, default=docs / "nested.csv")
    parser.add_argument("--table", type=Path, default=docs / "nested.md", help="page with marks, or a new file")
    parser.add_argument("--cell", nargs=3, metavar=("PART", "MODEL", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.make and options.moments is None:
        raise SystemExit("Give --moments, the folder that keeps the references.")
    return options


if __name__ == "__main__":
    main()
