"""Beside glmmTMB, in the same run: random-intercept logistic regressions, real and simulated.

glmmTMB maximises a Laplace approximation of the likelihood; ours has priors, N(0, 10^2) on the coefficients and
HalfNormal(3) on the standard deviation, and is the Gaussian fit; with ``--posterior auto`` it is what users get, for
which ``--out`` should name another file. Both are compared with the posterior by quadrature. Each fit runs in a process
of its own, theirs and ours in turn. A run can be resumed: models that are in the results file already are not run
again. From a checkout that is not installed, set ``PYTHONPATH`` to its root. Needs R with glmmTMB (Debian and Ubuntu:
``apt-get install r-cran-glmmtmb``); without it, the rows say so.

Examples
--------
::

    python glmmtmb.py --data DATA
    python glmmtmb.py --models 100 1000 --rounds 1 --out small.csv --table small.md
    python glmmtmb.py --theirs-only --models 100 --out theirs.csv --table theirs.md
    python glmmtmb.py --table-only
"""

import argparse
import datetime
import shutil
import subprocess
import tempfile

from collections.abc import Sequence
from pathlib import Path

import models_glmm
import numpy as np
import pandas as pd

from environment import describe_environment
from isolated import report, run_process, script
from marginal import NODES, Marginal
from measure import Array
from pages import measured_on, significant, table, write_between_marks
from records import Records, Row
from timed_fit import moments_of, timed_fit

REAL = {"toenail": models_glmm.toenail_data, "hers": models_glmm.hers_data}
MODELS = (*REAL, "100", "1000", "10000", "100000")
DATA_SEED, FIT_SEED = 1, 1
N_NODES = {"toenail": 64, "hers": 64}  # their intercepts have larger standard deviations than the simulated ones
R_SCRIPT = Path(__file__).with_suffix(".R")
SECONDS = (
    "theirs_seconds", "theirs_cpu", "theirs_process", "theirs_library", "theirs_read", "ours_cold",
    "ours_cold_process", "ours_warm", "ours_warm_cpu", "ours_warm_process",
)  # fmt: skip
MOMENTS = ("names", "exact_mean", "exact_sd", "ours_mean", "ours_sd", "theirs_mean", "theirs_sd")
FIELDS = (
    "model", "n_groups", "n_observations", "status", "ours_status", "ours_chosen", "rounds", *SECONDS, "ours_memory",
    "theirs_memory", *MOMENTS, "version", "date", "environment",
)  # fmt: skip

CAPTION = """\
Ours is the Gaussian fit (`posterior="gaussian"`), or the default where the page says so.
Seconds are medians over rounds. "Fit": the call of `glmmTMB()`, with standard errors,
or of `pm.fit`, after everything has been loaded and the data read. "Process": the whole process, from
its start to its end, with loading R and glmmTMB, or Python and PyMC, reading (theirs) or building the model (ours).
"Processor": processor time of the fit. Cold: with an empty compile cache; warm: with the cache that the cold run has
left. Ratios are theirs over ours: above 1, ours is quicker.
"""
MOMENTS_CAPTION = """\
Means and standard deviations (theirs: estimates and standard errors) of coefficients and log standard deviation of the
intercepts. "Exact": the posterior, by quadrature over the intercepts. em is the root mean square error of the means in
exact standard deviations, es that of the relative error of the standard deviations. Theirs are no posterior moments:
the difference between a maximum and a mean is part of their em.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing and write the tables; or, as a process of such a run, one fit of ours."""
    options = _parse_options(arguments)
    if options.cell:
        run_cell(options)
        return
    records = Records(options.out, FIELDS)
    if not options.table_only:
        run_missing(records, options)
    write_between_marks(options.table, write_tables(records.read()), Path(__file__).name)


def run_missing(records: Records, options: argparse.Namespace) -> None:
    """Run the models that are not in the results; rows without a result of both, if both are asked for, come again."""
    records.drop(lambda row: row["status"] != "ok" or not (row["ours_warm"] or options.theirs_only))
    done = {row["model"] for row in records.read()}
    reason = missing_package()
    for model in options.models:
        if model in done:
            continue
        if model in REAL and (options.data is None or not options.data.is_dir()):
            raise SystemExit("Give --data, the folder that holds the data sets, or other --models.")
        row = {"status": f"skipped: {reason}"} if reason else measure_model(model, options)
        date = datetime.datetime.now().isoformat(timespec="seconds")
        records.append({"model": model, **row, "date": date, "environment": describe_environment()})
        print(
            f"{model}: {row['status']}", *(f"{n} {row[n]:.2f}" for n in SECONDS if row.get(n) is not None), flush=True
        )


def missing_package() -> str | None:
    """Return what of R is missing; None where nothing is."""
    if shutil.which("Rscript") is None:
        return "Rscript is not installed"
    command = ["Rscript", "--vanilla", "-e", 'quit(status = !requireNamespace("glmmTMB", quietly = TRUE))']
    found = subprocess.run(command, capture_output=True, check=False).returncode == 0
    return None if found else "the R package glmmTMB is not installed"


def data_of(model: str, data: Path | None) -> models_glmm.Regression:
    """Return the data of a model: a real one by its name, a simulated one by its number of groups."""
    if model in REAL:
        return REAL[model](models_glmm.read(model, data))
    return models_glmm.simulate_logistic(int(model), DATA_SEED)


def measure_model(model: str, options: argparse.Namespace) -> dict[str, object]:
    """Run theirs and ours in turn, and return the row."""
    data = data_of(model, options.data)
    row: dict[str, object] = {"n_groups": data.n_groups, "n_observations": len(data.y), "rounds": options.rounds}
    theirs, ours = [], []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_csv(data, folder / "data.csv")
        for _ in range(options.rounds):
            command = ["Rscript", "--vanilla", str(R_SCRIPT), str(folder / "data.csv")]
            theirs.append(run_process(command, folder / "theirs", options.limit))
            cells = [] if options.theirs_only else range(1 if ours else 2)  # one cold, then warm
            folder_data = ["--data", options.data] if options.data else []
            ours += [
                run_process(
                    script(__file__, *folder_data, "--posterior", options.posterior, "--cell", model),
                    folder / "ours",
                    options.limit,
                )
                for _ in cells
            ]
            if "seconds" not in theirs[-1] or (ours and "seconds" not in ours[-1]):
                break
    row |= _their_columns(theirs)
    row |= _our_columns(ours) if ours else {"ours_status": "not run"}
    if row["status"] == "ok":
        exact = Marginal(data, N_NODES.get(model, NODES)).moments(np.array(_unjoined(row["theirs_mean"])))
        row |= {"exact_mean": _joined(exact.mean), "exact_sd": _joined(exact.sd)}
    return row


def write_csv(data: models_glmm.Regression, file: Path) -> None:
    """Write what the R script reads: predictors without the intercept, the group g and the response y."""
    names = [f"x{i}" for i in range(1, data.x.shape[1])]
    pd.DataFrame(data.x[:, 1:], columns=names).assign(g=data.group, y=data.y).to_csv(file, index=False)


def run_cell(options: argparse.Namespace) -> None:
    """Fit one model by ours and report the figures and moments as JSON."""
    approx, columns = timed_fit(
        models_glmm.random_intercept_logistic(data_of(options.cell, options.data)),
        {"posterior": options.posterior},
        FIT_SEED,
    )
    report(**columns)
    if approx is not None:
        mean, sd = moments_of(approx, ["beta", "s"])
        report(mean=mean.tolist(), sd=sd.tolist())


def _their_columns(runs: Sequence[dict]) -> dict[str, object]:
    last = runs[-1]
    if "seconds" not in last:
        return {"status": f"glmmTMB: {last.get('status', 'no output')}"}
    return {
        "status": "ok" if last["converged"] else "glmmTMB: not converged",
        "theirs_seconds": _median(run["seconds"] for run in runs),
        "theirs_cpu": _median(run["seconds_processor"] for run in runs),
        "theirs_process": _median(run["process_seconds"] for run in runs),
        "theirs_library": _median(run["seconds_library"] for run in runs),
        "theirs_read": _median(run["seconds_read"] for run in runs),
        "theirs_memory": last["peak_mib"],
        "names": ";".join([*last["names"], "log sd"]),
        "theirs_mean": _joined([*last["estimates"], last["log_sd"]]),
        "theirs_sd": _joined([*last["errors"], last["log_sd_error"]]),
        "version": last["version"],
    }


def _our_columns(runs: Sequence[dict]) -> dict[str, object]:
    last = runs[-1]
    if "seconds" not in last:
        return {"ours_status": last.get("status", "no output")}
    cold, warm = runs[0], runs[1:]
    return {
        "ours_status": last["status"],
        "ours_chosen": last["chosen"],
        "ours_cold": cold["seconds"],
        "ours_cold_process": cold["process_seconds"],
        "ours_warm": _median(run["seconds"] for run in warm),
        "ours_warm_cpu": _median(run["cpu_seconds"] for run in warm),
        "ours_warm_process": _median(run["process_seconds"] for run in warm),
        "ours_memory": last["memory"],
        "ours_mean": _joined(last["mean"]),
        "ours_sd": _joined(last["sd"]),
    }


def write_tables(rows: Sequence[Row]) -> str:
    """Return the tables as Markdown: seconds, then moments for each model."""
    if not rows:
        return "No results.\n"
    lines = [*measured_on(rows), *(f"- {v}" for v in sorted({r["version"] for r in rows if r["version"]})), ""]
    lines += ["### Seconds", "", CAPTION, *_seconds_table(rows), "", "### Moments", "", MOMENTS_CAPTION]
    for row in rows:
        if row["exact_mean"]:
            lines += [f"#### {_title(row)}", "", *_moments_table(row), ""]
    return "\n".join(lines) + "\n"


def _seconds_table(rows: Sequence[Row]) -> list[str]:
    header = ["model", "groups", "glmmTMB: fit", "its process", "ours: fit, cold", "fit, warm", "process, cold"]
    header += ["process, warm", "ratio: fit, cold", "ratio: fit, warm", "ratio: processor, warm"]
    header += ["ratio: process, cold", "ratio: process, warm", "MiB: theirs", "MiB: ours", "ended"]
    compared = ("theirs_seconds", "theirs_process", "ours_cold", "ours_warm", "ours_cold_process", "ours_warm_process")
    pairs = [("theirs_seconds", "ours_cold"), ("theirs_seconds", "ours_warm")]
    pairs += [("theirs_cpu", "ours_warm_cpu")]
    pairs += [("theirs_process", "ours_cold_process"), ("theirs_process", "ours_warm_process")]
    body = []
    for row in rows:
        seconds = [significant([float(row[name])]) if row[name] else "-" for name in compared]
        ratios = [f"{float(row[a]) / float(row[b]):.2g}" if row[a] and row[b] else "-" for a, b in pairs]
        memory = [f"{float(row[name]):,.0f}" if row[name] else "-" for name in ("theirs_memory", "ours_memory")]
        ended = row["status"] if row["status"] != "ok" else row["ours_status"]
        body.append([_title(row), row["n_groups"], *seconds, *ratios, *memory, ended])
    return table(header, body)


def _moments_table(row: Row) -> list[str]:
    exact, theirs, ours = (
        [np.array(_unjoined(row[f"{who}_{moment}"])) for moment in ("mean", "sd")] if row[f"{who}_mean"] else None
        for who in ("exact", "theirs", "ours")
    )
    body: list[list[object]] = []
    for i, name in enumerate(row["names"].split(";")):
        cells = [f"{found[0][i]:.4f} ({found[1][i]:.4f})" if found else "-" for found in (exact, ours, theirs)]
        body.append([f"`{name}`", *cells])
    for label, of in (("em", _mean_error), ("es", _sd_error)):
        body.append([label, "", *(f"{of(found, exact):.3f}" if found else "-" for found in (ours, theirs))])
    return table(["parameter", "exact", "ours", "glmmTMB"], body)


def _mean_error(found: Sequence[Array], exact: Sequence[Array]) -> float:
    return float(np.sqrt(np.mean(((found[0] - exact[0]) / exact[1]) ** 2)))


def _sd_error(found: Sequence[Array], exact: Sequence[Array]) -> float:
    return float(np.sqrt(np.mean((found[1] / exact[1] - 1) ** 2)))


def _title(row: Row) -> str:
    return row["model"] if row["model"] in REAL else f"simulated, {int(row['model']):,} groups"


def _median(values: object) -> float:
    return float(np.median(list(values)))


def _joined(values: Sequence[float] | Array) -> str:
    return ";".join(f"{value:.8g}" for value in values)


def _unjoined(text: str) -> list[float]:
    return [float(part) for part in text.split(";")]


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    folder = Path(__file__).parent / "results"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--models", nargs="+", default=MODELS, help="names, or numbers of simulated groups")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--posterior", default="gaussian", choices=["gaussian", "auto"], help="of our fits")
    parser.add_argument("--limit", type=float, default=1_800.0, help="seconds for one process")
    parser.add_argument("--theirs-only", action="store_true", help="run glmmTMB alone")
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=folder / "glmmtmb.csv")
    parser.add_argument("--table", type=Path, default=folder / "glmmtmb.md", help="page with marks, or a new file")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
