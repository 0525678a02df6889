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

FIT, LOG_M, MAKE = "fit", "log m", "reference"
KEY = ("part", "model", "seed")
FIELDS = (
    *KEY, "status", "posterior", "n_latent", "n_hyper", "cold", "cold_cpu", "compile_seconds", "memory", "n_fits",
    "claimed", "verdict", "em_hyper", "es_hyper", "em_latent", "es_latent", "ess", "ess_latent", "worst", "elbo_at",
    "elbo_sd", "corrected_at", "corrected_sd", "laplace_at", "laplace_sd", "error", "load", "note", "date",
    "environment",
)  # fmt: skip
#: Models whose log m is looked at closely, and values of their hyperparameters beside the mode.
CLOSELY = (
    "InstEval, logistic", "gp.Latent, Bernoulli", "gp.Latent, Poisson", "volatility, AR(1)", "AR(1), Poisson",
    "BYM2, 100 regions", "CAR",
)  # fmt: skip
N_VALUES = 16


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
    write_between_marks(options.table, nested_tables.write_tables(records.read()), Path(__file__).name)


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Return what is to be measured: part, model and seed."""
    for part, names in ((FIT, options.models), (LOG_M, [name for name in CLOSELY if name in options.models])):
        if part in options.parts:
            yield from ((part, name, options.seed) for name in names)


def run_cell(part: str, name: str, seed: str, options: argparse.Namespace) -> None:
    """Do one measurement and report what was found as JSON."""
    model = nested_models.model_of(name, options.data)
    if part == MAKE:
        import nested_references

        if name in nested_models.CONJUGATE:
            made = nested_references.by_integral(model)
        else:
            made = nested_references.by_nuts(model, nested_models.for_nuts(name, options.data))
        made.write(nested_references.file_of(options.moments, name))
        return
    if part == LOG_M:
        _report_log_m(model, int(seed))
        return
    approx, columns = timed_fit(model, {}, int(seed))
    shown = {n: columns[n] for n in ("status", "compile_seconds", "memory", "load") if n in columns}
    report(**shown, cold=columns.get("seconds"), cold_cpu=columns.get("cpu_seconds"))
    if approx is None:
        return
    report(**_kind(approx))
    report(**_errors(name, approx, options))


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
    """Return errors of means and standard deviations of hyperparameters and of latent variables."""
    from nested_references import Moments, file_of

    file = None if options.moments is None else file_of(options.moments, name)
    if file is None or not file.exists():
        return {}
    reference, names = Moments.read(file), coordinate_names(approx.model)
    if names != reference.names:
        raise ValueError(f"{file} has other coordinates")
    of_mean = (approx.mean_flat - reference.mean) / reference.sd
    of_sd = approx.sd_flat / reference.sd - 1.0
    where = hyperparameters(approx.model)
    found: dict[str, object] = {}
    for kind, index in (("hyper", where), ("latent", ~where)):
        found[f"em_{kind}"], found[f"es_{kind}"] = (float(np.sqrt(np.mean(e[index] ** 2))) for e in (of_mean, of_sd))
    worst = [f"{names[i]} {of_mean[i]:+.3f} {of_sd[i]:+.3f}" for i in np.flatnonzero(where)]
    sizes = {"ess": float(np.min(reference.size[where])), "ess_latent": float(np.min(reference.size[~where]))}
    return {**found, **sizes, "worst": "; ".join(worst)}


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
        report(**{f"{name}_at": float(error[0]), f"{name}_sd": float(error[1:].std(ddof=1))})
    report(error=float(found.error.max()))


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


def _make(name: str, options: argparse.Namespace) -> object:
    """Make the reference of a model, if there is none."""
    import nested_references

    if name in nested_models.TIMED:
        return "too large for a reference"
    if nested_references.file_of(options.moments, name).exists():
        return "there"
    found = _measured((MAKE, name, options.seed), options)
    return found.get("status", "made")


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
