"""Scales of crossed effects, nested posteriors beside lme4 and glmmTMB: all ratings of lme4's InstEval.

Each fit runs in a process of its own with an empty compile folder; seconds are those of the first fit, without imports
and building the model. What is in the results file already is not measured again. From a checkout that is not
installed, set ``PYTHONPATH`` to its root. Set ``OPENBLAS_NUM_THREADS=1`` to compare processor seconds.

Examples
--------
::

    python crossed.py --data DATA
    python crossed.py --data DATA --only glmmTMB ours
"""

import argparse
import datetime
import tempfile

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from environment import describe_environment
from isolated import report, run_process, script
from pages import measured_on, table, write_between_marks
from records import Records, Row
from sparse_models import crossed, ratings
from timed_fit import timed_fit

R_SCRIPT = Path(__file__).with_name("crossed.R")
#: Ways to fit each response: those of R by the names that `crossed.R` knows, and ours by options.
THEIRS = {"normal": ("lmer",), "binary": ("glmer0", "glmer", "glmmTMB")}
OURS: dict[str, dict[str, object]] = {
    "ours": {}, "ours, nested": {"posterior": "nested"}, "ours, Gaussian": {"posterior": "gaussian"}
}  # fmt: skip
SHOWN = {"glmer": "lme4, glmer", "glmer0": "lme4, glmer, nAGQ = 0", "lmer": "lme4, lmer", "ours": "ours, no option"}
SCALES = ("sd_s", "sd_d", "noise")
KEY = ("response", "method")
FIELDS = (
    *KEY, "status", "seconds", "cpu", "posterior", "intercept", "sd_s", "sd_d", "noise", "error_intercept",
    "error_sd_s", "error_sd_d", "error_noise", "n_fits", "claimed", "load", "note", "date", "environment",
)  # fmt: skip
N_DRAWS, SEED = 4_000, 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing and write the table; or, as a process of such a run, fit once."""
    options = _parse_options(arguments)
    if options.cell:
        _fit(*options.cell, options.data)
        return
    records = Records(options.out, FIELDS)
    done = {tuple(row[name] for name in KEY) for row in records.read()}
    for response, method in _cells():
        if (response, method) in done or not _is_asked(response, method, options):
            continue
        found = _measured(response, method, options)
        when = datetime.datetime.now().isoformat(timespec="seconds")
        row = {"response": response, "method": method, "status": "ok", **found}
        records.append({**row, "date": when, "environment": describe_environment()})
        print(response, method, *(f"{n} {row[n]}" for n in FIELDS[2:10] if n in row), flush=True)
    rows = records.read()
    if rows:
        lines = [*measured_on(rows), *_table(rows), ""]
        write_between_marks(options.table, "\n".join(lines), Path(__file__).name)


def _cells() -> Iterator[tuple[str, str]]:
    for response, methods in THEIRS.items():
        yield from ((response, method) for method in (*methods, *OURS))


def _is_asked(response: str, method: str, options: argparse.Namespace) -> bool:
    return bool(options.data and response in options.responses and (not options.only or method in options.only))


def _measured(response: str, method: str, options: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        compiled = Path(folder) / "compiled"
        if method in OURS:
            command = script(__file__, "--data", options.data, "--cell", response, method)
            return run_process(command, compiled, options.limit)
        file = Path(folder) / "ratings.csv"
        ratings(options.data, binary=response == "binary").to_csv(file, index=False)
        found = run_process(["Rscript", "--vanilla", str(R_SCRIPT), str(file), method], compiled, options.limit)
    return {**found, "cpu": found.pop("processor_seconds", None)}


def _fit(response: str, method: str, data: Path) -> None:
    """Fit with this package and report posterior means and standard deviations."""
    binary = response == "binary"
    approx, columns = timed_fit(crossed(ratings(data, binary=binary), binary=binary), OURS[method], SEED)
    report(status=columns["status"], seconds=columns.get("seconds"), cpu=columns.get("cpu_seconds"))
    report(load=columns.get("load"))
    if approx is None:
        return
    report(posterior=approx.record.posterior)
    if approx.is_nested:
        report(n_fits=approx.checks.n_fits, claimed=approx.checks.error)
    names = {"intercept": "level", **{name: name for name in SCALES if name != "noise" or not binary}}
    draws = approx.sample(N_DRAWS, var_names=list(names.values()), random_seed=SEED).posterior
    for ours, variable in names.items():
        report(**{ours: float(draws[variable].mean()), f"error_{ours}": float(draws[variable].std())})


def _table(rows: Sequence[Row]) -> list[str]:
    order = {cell: place for place, cell in enumerate(_cells())}
    header = [
        "response",
        "fit",
        "posterior",
        "seconds",
        "intercept",
        "sd of students",
        "sd of lecturers",
        "noise",
        "error claimed",
    ]
    body = []
    for row in sorted(rows, key=lambda row: order[row["response"], row["method"]]):
        values = [_value(row, name) for name in ("intercept", *SCALES)]
        if row["response"] == "binary":
            values[-1] = "-"
        claimed = f"{float(row['claimed']):.2f}" if row["claimed"] else "-"
        seconds = f"{float(row['cpu']):,.0f}" if row["cpu"] else row["status"]
        kind = "-" if row["method"] not in OURS else "nested" if row["claimed"] else "Gaussian"
        body.append([row["response"], SHOWN.get(row["method"], row["method"]), kind, seconds, *values, claimed])
    return table(header, body)


def _value(row: Row, name: str) -> str:
    error = float(row[f"error_{name}"] or np.nan)
    if not row[name]:
        return "-"
    return f"{float(row[name]):.3f}" + (f" ± {error:.4f}" if np.isfinite(error) else "")


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    docs = Path(__file__).parents[2] / "docs/benchmarks"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the data sets; without it, only the table is written")
    parser.add_argument("--only", nargs="+", choices=[*OURS, *THEIRS["normal"], *THEIRS["binary"]], metavar="METHOD")
    parser.add_argument("--responses", nargs="+", choices=list(THEIRS), default=list(THEIRS))
    parser.add_argument("--limit", type=float, default=1_500.0, help="seconds for one process")
    parser.add_argument("--out", type=Path, default=docs / "crossed.csv")
    parser.add_argument("--table", type=Path, default=docs / "crossed.md", help="page with marks, or a new file")
    parser.add_argument("--cell", nargs=2, metavar=("RESPONSE", "METHOD"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
