"""Compare this package with its rivals: time to posterior draws, cold and warm, and accuracy.

Every cell, one method on one data set, runs in a process of its own: first with an empty compile
cache, then again with the cache that the first run left. A run can be stopped and resumed: cells
that are in the results file already are not run again. From a checkout that is not installed, set
``PYTHONPATH`` to its root.

Examples
--------
::

    python compare.py --data DATA --references REFERENCES --out results.csv --table results.md
    python compare.py ... --models heart --methods ngvi advi
    python compare.py ... --rerun ngvi
    python compare.py --out results.csv --table results.md --table-only
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

from collections.abc import Sequence
from pathlib import Path

import measure

from environment import describe_environment
from records import Records, Row
from rivals import OURS, RUNNERS, check_installed

MODELS = ("heart", "german", "epilepsy")
CACHES = ("cold", "warm")
OTHER_LIMITS = {"preparing": 120.0, "measuring": 300.0, "done": 10.0}  # seconds
POLL_SECONDS = 0.1

CELL = ("run_id", "model", "method", "cache")
FIELDS = (
    *CELL,
    "status",
    "note",
    "seconds",
    "wall_seconds",
    "process_seconds",
    "import_seconds",
    "model_seconds",
    "compile_seconds",
    "em",
    "es",
    "worst_name",
    "worst_error",
    "how",
    "elbo",
    "elbo_se",
    "n_gradients",
    "n_hessians",
    "n_hvps",
    "n_iterations",
    "converged",
    "fit_status",
    "gap",
    "seed",
    "load",
    "date",
    "environment",
)

CAPTION = """\
Seconds are those of the whole call: compiling, fitting and 2,000 posterior draws on the constrained
scale (for nutpie its own 4,000), without the imports and without building the model. Cold: with an
empty compile cache; warm: the same again in a new process. "x ours" divides by the seconds of
`ngvi` with the same kind of cache. em is the root mean square over unconstrained coordinates of the
error of the mean in reference standard deviations, es that of the relative error of the standard
deviation; a method that is judged by S draws adds about S^-1/2 to em and (2 S)^-1/2 to es (in
quadrature). The worst coordinate is the one with the largest error of the mean. The ELBO is
estimated on 20,000 fresh draws where the method has a Gaussian in the unconstrained space.
"Products" are Hessian-vector products. The quality is that of the warm run; the seed is the same.
"""

COLUMNS = (
    "method",
    "cold, s",
    "warm, s",
    "cold, x ours",
    "warm, x ours",
    "process to draws, cold, s",
    "em",
    "es",
    "worst coordinate",
    "moments from",
    "ELBO",
    "gradients",
    "Hessians",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cells that are missing and write the table."""
    options = _parse_options(arguments)
    records = Records(options.out, FIELDS)
    if options.rerun:  # nothing is dropped that could not be run again
        measure.check_inputs(options.data, options.references, options.models)
        check_installed(options.rerun)
        count = records.drop(lambda row: row["run_id"] == options.run_id and row["method"] in options.rerun)
        print(f"dropped {count} rows of {', '.join(options.rerun)}")
    if not options.table_only:
        run_missing(records, options)
    if options.table:
        rows = [row for row in records.read() if row["run_id"] == options.run_id]
        options.table.write_text(write_table(rows, options.models))


def run_missing(records: Records, options: argparse.Namespace) -> None:
    """Run every pair of cells of which at least one is not in the results."""
    done = {tuple(row[name] for name in CELL) for row in records.read()}
    missing = [
        (model, method)
        for model in options.models
        for method in options.methods
        if any((options.run_id, model, method, cache) not in done for cache in CACHES)
    ]
    if missing:
        measure.check_inputs(options.data, options.references, options.models)
        check_installed({method for _, method in missing})
    for model, method in missing:
        # A warm run needs the cache of its own cold run, so the two come and go together.
        key = (options.run_id, model, method)
        records.drop(lambda row, key=key: (row["run_id"], row["model"], row["method"]) == key)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for cache in CACHES:
                row = run_cell(model, method, cache, Path(folder), options)
                records.append(row)
                print(f"{model} {method} {cache}: {row['status']} {row.get('seconds', '')}")


def run_cell(model: str, method: str, cache: str, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Run one cell in a new process and return its row.

    Parameters
    ----------
    model, method, cache : str
        The cell.
    folder : Path
        Holds all compile caches. Empty for a cold run.
    options : argparse.Namespace
        Options of the command line.
    """
    row = {
        "run_id": options.run_id,
        "model": model,
        "method": method,
        "cache": cache,
        "seed": options.seed,
        "load": os.getloadavg()[0],
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "environment": describe_environment(),
    }
    report = folder / f"report_{cache}.json"
    command = [sys.executable, str(Path(__file__).with_name("cell.py"))]
    command += ["--model", model, "--method", method, "--seed", str(options.seed)]
    command += ["--data", str(options.data), "--references", str(options.references)]
    command += ["--report", str(report), "--launched", str(time.time())]
    if cache == "warm":  # measuring compiles, too: it must not fill the cache of the warm run
        command.append("--measure")
    start = time.perf_counter()
    with (folder / f"output_{cache}.txt").open("w+") as output:
        process = subprocess.Popen(
            command,
            env=cache_environment(folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            overrun = watch(process, report, options.limit)
        finally:
            _end_group(process)
        output.seek(0)
        last_output = (output.read().strip().splitlines() or [""])[-1]
    found = _read_report(report)
    stage = found.pop("stage", "preparing")
    row |= found
    row["process_seconds"] = time.perf_counter() - start
    if stage != "done":
        _note_unfinished(row, stage, overrun, process.returncode, last_output)
    return row


def cache_environment(folder: Path) -> dict[str, str]:
    """Return the environment that keeps everything compiled, by whatever library, in ``folder``.

    PyTensor keeps C modules and its Numba functions below ``base_compiledir``, read at import.
    Other functions compiled by Numba go to ``NUMBA_CACHE_DIR``, and JAX has a cache of its own.
    """
    flags = [os.environ.get("PYTENSOR_FLAGS"), f"base_compiledir={folder / 'pytensor'}"]
    folders = {
        "NUMBA_CACHE_DIR": folder / "numba",
        "JAX_COMPILATION_CACHE_DIR": folder / "jax",
        "XDG_CACHE_HOME": folder / "cache",
        "TMPDIR": folder / "tmp",
    }
    for path in folders.values():
        path.mkdir(exist_ok=True)
    return {
        **os.environ,
        "PYTENSOR_FLAGS": ",".join(filter(None, flags)),
        **{name: str(path) for name, path in folders.items()},
    }


def watch(process: subprocess.Popen, report: Path, limit: float) -> bool:
    """Wait for the end of a process; return whether it outstayed the limit of a stage."""
    limits = {"fitting": limit, **OTHER_LIMITS}
    stage, entered = "preparing", time.perf_counter()
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        current = _read_report(report).get("stage", "preparing")
        if current != stage:
            stage, entered = current, time.perf_counter()
        if time.perf_counter() - entered > limits[stage]:
            return True
    return False


def write_table(rows: Sequence[Row], models: Sequence[str]) -> str:
    """Return the results as Markdown, one table per data set."""
    if not rows:
        return "No results.\n"
    dates = sorted(row["date"][:10] for row in rows)
    period = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    lines = ["# Comparison with other methods", "", f"Measured {period} on:", ""]
    lines += [f"- {environment}" for environment in sorted({row["environment"] for row in rows})]
    lines += ["", CAPTION]
    for model in models:
        cells = {(row["method"], row["cache"]): row for row in rows if row["model"] == model}
        methods = [name for name in RUNNERS if (name, "cold") in cells or (name, "warm") in cells]
        if methods:
            lines += [f"## {model}", "", _line(COLUMNS), "|---" * len(COLUMNS) + "|"]
            lines += [_table_row(method, cells) for method in methods]
            lines.append("")
    return "\n".join(lines)


def _table_row(method: str, cells: dict[tuple[str, str], Row]) -> str:
    cold, warm = (cells.get((method, cache), {}) for cache in CACHES)
    worst = "-"
    if warm.get("worst_name"):
        worst = f"`{warm['worst_name']}` {float(warm['worst_error']):+.3f}"
    elbo = "-"
    if warm.get("elbo"):
        form = ".3f" if abs(float(warm["elbo"])) < 1e6 else ".0e"
        elbo = f"{float(warm['elbo']):{form}} ± {float(warm['elbo_se']):{form}}"
    hvps = warm.get("n_hvps") or cold.get("n_hvps")
    hessians = f"{int(hvps):,} products" if hvps else _count(warm, cold, "n_hessians")
    texts = [
        f"`{method}`",
        *(_seconds(row) for row in (cold, warm)),
        *(_ratio(cells.get((method, cache)), cells.get((OURS, cache))) for cache in CACHES),
        _number(cold.get("wall_seconds"), ".1f"),
        _number(warm.get("em"), ".3f"),
        _number(warm.get("es"), ".3f"),
        worst,
        warm.get("how") or warm.get("note") or "-",
        elbo,
        _count(warm, cold, "n_gradients"),
        hessians,
    ]
    return _line(texts)


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "/") for text in texts) + " |"


def _seconds(row: Row) -> str:
    return _number(row.get("seconds"), ".2f") if row.get("seconds") else row.get("status", "-")


def _ratio(row: Row | None, ours: Row | None) -> str:
    if not (row and ours and row["seconds"] and ours["seconds"]):
        return "-"
    return f"{float(row['seconds']) / float(ours['seconds']):.1f}"


def _number(text: str | None, form: str) -> str:
    return format(float(text), form) if text else "-"


def _count(warm: Row, cold: Row, name: str) -> str:
    return _number(warm.get(name) or cold.get(name), ",.0f")


def _read_report(report: Path) -> dict[str, object]:
    return json.loads(report.read_text()) if report.exists() else {}


def _note_unfinished(row: dict[str, object], stage: str, overrun: bool, code: int, last_output: str) -> None:
    """Say in the row of a killed or crashed process how it ended."""
    end = "timeout" if overrun else f"error: exit code {code}, {last_output}"
    if stage == "measuring":
        row["note"] = f"not measured: {end}"
    else:
        row["status"] = end if stage == "fitting" else f"{end} (while preparing)"


def _end_group(process: subprocess.Popen) -> None:
    """Kill a process that still runs, with the workers that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--references", type=Path, help="folder of models.py and NUTS moments")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--methods", nargs="+", choices=RUNNERS, default=list(RUNNERS))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for fit and draws")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-id", default="1", help="name of a set of results within the file")
    parser.add_argument("--out", type=Path, default=Path("results.csv"))
    parser.add_argument("--rerun", nargs="+", choices=RUNNERS, help="drop a method's rows first")
    parser.add_argument("--table", type=Path, help="Markdown file to write")
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
