"""What comes after a fit: rows and groups left out, an update and predictions, against integrals, by likelihood.

Each fit in a process of its own, by the default. A run can be stopped and resumed: what is in the CSV file is not
measured again. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python tests/benchmarks/reports.py
    python tests/benchmarks/reports.py --models Poisson MvNormal --seeds 7 --out few.csv --page few.md
"""

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import argparse
import datetime
import logging
import time
import warnings

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

from environment import describe_environment
from functionals import kind_of
from measure import Array
from pages import column_of, measured_on, table, write_between_marks
from records import Records, Row
from reports_models import LABELS, LIKELIHOODS, NEW_GROUPS, PREDICTED, Known, Problem

import pymc_ngvi  # noqa: F401

RESULTS = Path(__file__).parent / "results"
KEY = ("model", "seed")
#: What is reported of cross-validation: the largest difference in nats, the largest as a multiple of its standard
#: error, how many have a k-hat that is too large, and seconds.
OF_PARTS = [f"{part}_{what}" for part in ("rows", "groups") for what in ("off", "errors", "not_relied_on", "seconds")]
FIELDS = (
    *KEY, "posterior", "reliable", "fit_seconds", *OF_PARTS,
    "update_off", "update_errors", "update_moments", "update_reliable", "update_seconds",
    "predict_off", "predict_seconds", "wrong", "date", "environment",
)  # fmt: skip
#: Nats, of a row, a group and all new rows together, that a density may be off; and standard errors of both together.
#: Nats that are no matter whatever the errors say; standard deviations of a moment beside the errors of draws.
OF_ROW, OF_GROUP, N_ERRORS, NO_MATTER, OF_MOMENT = 0.05, 0.1, 4.0, 0.01, 0.03
N_DRAWS = 8_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing and write the table."""
    options = _parse_options(arguments)
    records = Records(options.out, FIELDS)
    done = {tuple(row[name] for name in KEY) for row in records.read()}
    for seed in options.seeds:
        for name in options.models:
            if (name, str(seed)) in done:
                continue
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # with memory of its own
                row = {"model": name, "seed": seed, **pool.submit(measured, name, seed).result()}
            date = datetime.datetime.now().isoformat(timespec="seconds")
            records.append({**row, "date": date, "environment": describe_environment()})
            print({key: value for key, value in row.items() if value}, flush=True)
    write_between_marks(options.page, write_tables(records.read()), Path(__file__).name)


def measured(name: str, seed: int) -> dict[str, Any]:
    """Return the columns of one fit."""
    logging.getLogger("pymc.ngvi").setLevel(logging.ERROR)
    problem = Problem(name, seed)
    start = time.process_time()
    with problem.model():
        approx = pm.fit(method="ngvi", random_seed=seed, progressbar=False)
    found = {"posterior": kind_of(approx), "reliable": int(approx.checks.is_reliable)}
    found["fit_seconds"] = time.process_time() - start
    return found | compared(approx, problem, problem.known())


def compared(approx: Any, problem: Problem, known: Known) -> dict[str, Any]:
    """Return the columns of what comes after a fit, and ``wrong``: what is, in words."""
    found, wrong = {}, list[str]()
    reports = {
        "rows": lambda: _parts("rows", approx, known.rows, OF_ROW),
        "groups": lambda: _parts("groups", approx, known.groups, OF_GROUP, groups="group"),
        "update": lambda: _update(approx, problem, known),
        "predict": lambda: _predict(approx, problem, known),
    }
    for what, report in reports.items():
        start = time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                columns, said = report()
            found |= columns
            wrong += said
        except Exception as error:  # one that fails is wrong, and the others count
            wrong.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
        found[f"{what}_seconds"] = time.process_time() - start
    return {**found, "wrong": "; ".join(wrong)}


def _parts(
    what: str, approx: Any, known: tuple[Array, Array], most: float, **asked: Any
) -> tuple[dict[str, Any], list[str]]:
    made = approx.leave_out(random_seed=1, **asked)
    off, se = np.asarray(made.elpd_i) - known[0], np.hypot(np.asarray(made["mcse_i"]), known[1])
    relied_on = np.asarray(made.pareto_k) <= made.good_k
    errors = np.abs(off) / se
    is_wrong = relied_on & is_off(off, se, most)
    wrong = [f"{what} {i}: {off[i]:+.3f} +- {se[i]:.3f}" for i in np.flatnonzero(is_wrong)]
    return {
        f"{what}_off": float(np.abs(off[relied_on]).max()),
        f"{what}_errors": float(errors[relied_on].max()),
        f"{what}_not_relied_on": int((~relied_on).sum()),
    }, wrong


def is_off(off: Array, se: Array, most: float) -> Array:
    """Tell which densities are off."""
    off = np.abs(off)
    result: Array = (off > most) | ((off > N_ERRORS * se) & (off > NO_MATTER))
    return result


def _update(approx: Any, problem: Problem, known: Known) -> tuple[dict[str, Any], list[str]]:
    made = approx.update(problem.new_rows(), random_seed=1)
    if not made.checks.is_reliable:
        return {"update_reliable": 0}, []
    density = made.log_predictive_density
    off, se = density.value - known.new_rows[0], np.hypot(density.se, known.new_rows[1])
    draws = made.sample(N_DRAWS, random_seed=2)["posterior"]
    size = min(float(draws.attrs["effective_sample_size"]), N_DRAWS)
    of_groups = [draws["u"].sel(group=[*LABELS, "another"][k]) for k in np.unique(NEW_GROUPS)]
    values = np.stack([np.asarray(v).ravel() for v in (draws["b"], np.log(draws["tau"]), *of_groups)], axis=1)
    of_moments = moments_off(values, size, known.updated)
    wrong = [f"update: {off:+.3f} +- {se:.3f}"] if is_off(off, se, OF_GROUP) else []
    wrong += [f"moments of the update: {of_moments:.1f} times what is tolerated"] if of_moments > 1.0 else []
    columns = {"off": float(abs(off)), "errors": float(abs(off) / se), "moments": of_moments, "reliable": 1}
    return {f"update_{key}": value for key, value in columns.items()}, wrong


def moments_off(values: Array, size: float, known: tuple[Array, Array]) -> float:
    """Return how far means and sds of draws are off, at most, as a multiple of what is tolerated."""
    (mean, sd), (of_mean, of_sd) = known
    centred = values - values.mean(axis=0)
    kurtosis = np.mean(centred**4, axis=0) / np.mean(centred**2, axis=0) ** 2
    errors = np.hypot(sd / np.sqrt(size), of_mean), np.hypot(sd * np.sqrt((kurtosis - 1.0) / (4.0 * size)), of_sd)
    off = values.mean(axis=0) - mean, values.std(axis=0) - sd
    return max(float(np.max(np.abs(o) / (N_ERRORS * e + OF_MOMENT * sd))) for o, e in zip(off, errors, strict=True))


def _predict(approx: Any, problem: Problem, known: Known) -> tuple[dict[str, Any], list[str]]:
    of_groups, x = PREDICTED
    index = [[*LABELS, "another"][k] for k in of_groups]
    tree = approx.predict({"index": index, "x": x}, groups="new", draws=N_DRAWS, var_names=["eta", "y"], random_seed=1)[
        "predictions"
    ]
    size = min(float(approx.sample(N_DRAWS)["posterior"].attrs.get("effective_sample_size", N_DRAWS)), N_DRAWS)
    off = moments_off(np.concatenate(tree["eta"].to_numpy()), size, known.predictors)
    y = np.concatenate(tree["y"].to_numpy())
    y = y if y.ndim == 2 else y[..., 0]
    found = np.mean(y[..., None] <= problem.thresholds, axis=0)
    right, of_right = known.shares
    sd = np.sqrt(right * (1.0 - right))
    tolerated = N_ERRORS * np.hypot(sd / np.sqrt(size), of_right) + OF_MOMENT * sd
    off = max(off, float(np.max(np.abs(found - right) / (tolerated + 1e-9))))
    return {"predict_off": off}, [f"predictions: {off:.1f} times what is tolerated"] if off > 1.0 else []


# --- the page ---

HEAD = [
    "likelihood", "posterior", "rows: off by", "errors", "groups: off by", "errors", "update: off by", "errors",
    "moments", "predictions", "not relied on",
]  # fmt: skip


def write_tables(rows: Sequence[Row]) -> str:
    """Return the tables: a line for each likelihood, the worst of its seeds."""
    lines = []
    for name in LIKELIHOODS:
        of_name = [row for row in rows if row["model"] == name]
        if not of_name:
            continue
        column = column_of(of_name)
        kinds = ", ".join(sorted({row["posterior"] for row in of_name}))
        cells = [_worst(column(key), form) for key, form in zip(
            ("rows_off", "rows_errors", "groups_off", "groups_errors", "update_off", "update_errors", "update_moments",
             "predict_off"), (".3f", ".1f") * 3 + (".2f", ".2f"), strict=True)]  # fmt: skip
        n_out = int(column("rows_not_relied_on").sum() + column("groups_not_relied_on").sum())
        n_updates = int((column("update_reliable") == 0).sum())
        said = ", ".join([f"{n_out} parts"] * bool(n_out) + [f"{n_updates} updates"] * bool(n_updates))
        lines.append([name, kinds, *cells, said])
    wrong = [f"- {row['model']}, seed {row['seed']}: {row['wrong']}" for row in rows if row["wrong"]]
    seconds = [np.median(column_of(rows)(f"{what}_seconds")) for what in ("fit", "rows", "groups", "update", "predict")]
    said = "Processor seconds, medians: fit {:.1f}, rows {:.1f}, groups {:.1f}, update {:.1f}, predictions {:.1f}."
    total = f"{len(rows)} fits, {len(wrong)} with something wrong{':' if wrong else '.'}"
    return "\n".join([*measured_on(rows), *table(HEAD, lines), "", total, "", *wrong, "", said.format(*seconds)])


def _worst(values: np.ndarray, form: str) -> str:
    return format(values.max(), form) if len(values) else "-"


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=LIKELIHOODS, default=list(LIKELIHOODS), metavar="MODEL")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS / "reports.csv")
    parser.add_argument("--page", type=Path, default=RESULTS / "reports.md", help="page with marks, or a new file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
