"""Bias and coverage of the default beside glmmTMB and lme4, on simulated generalised linear mixed models.

Six of the 24 designs of Li and Signorelli (2026) [1]_. Ours is the default fit; lme4 has adaptive quadrature of 25
nodes where there are intercepts alone, and Laplace's approximation, as glmmTMB, where there are slopes. Rows are
appended as they come, one for each data set and method, the designs in turn: a run can be stopped and resumed, and what
there is gives a table. One process works at a time. From a checkout that is not installed, set ``PYTHONPATH`` to its
root. Needs R with glmmTMB and lme4 (Debian and Ubuntu: ``apt-get install r-cran-glmmtmb``).

References
----------
.. [1] X. Li, M. Signorelli (2026). A comparison of R packages for estimating generalized linear mixed models.
   https://doi.org/10.48550/arXiv.2606.15933

Examples
--------
::

    python simulated_glmms.py
    python simulated_glmms.py --sets 5 --out few.csv --table few.md
    python simulated_glmms.py --table-only
"""

import argparse
import csv
import logging
import os
import subprocess
import tempfile
import time

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pymc as pm
import simulated_glmms_tables as tables

from environment import today_and_here
from functionals import kind_of
from isolated import first_line
from pages import write_between_marks
from records import Records
from simulated_glmms_models import DESIGNS, Design, model_of, simulate

RESULTS = Path(__file__).parent / "results"
R_SCRIPT = Path(__file__).with_suffix(".R")
OURS, THEIRS = "ours", ("glmmTMB", "lme4")
FIELDS = (
    "design", "set", "method", "status", "seconds", "cpu", "interval_cpu", "estimates", "low", "high", "version",
    "date", "environment",
)  # fmt: skip
N_DRAWS, SEED = 4_000, 1
#: Bounds of intervals of 95 %.
LEVELS = (0.025, 0.975)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, and write the tables."""
    options = _parse_options(arguments)
    logging.getLogger("pymc.ngvi").setLevel(logging.ERROR)
    records = Records(options.out, FIELDS)
    if not options.table_only:
        run_missing(records, options)
    write_between_marks(options.table, tables.write(records.read()), Path(__file__).name)


def run_missing(records: Records, options: argparse.Namespace) -> None:
    """Measure what the results do not have, a batch of data sets of each design in turn."""
    done = {(row["design"], int(row["set"]), row["method"]) for row in records.read()}
    where = today_and_here()
    for start in range(0, options.sets, options.batch):
        for name in options.designs:
            numbers = range(start, min(start + options.batch, options.sets))
            missing = {method: [n for n in numbers if (name, n, method) not in done] for method in (OURS, *THEIRS)}
            of_r = sorted({n for method in THEIRS for n in missing[method]})
            rows = _theirs(DESIGNS[name], of_r) if of_r else []
            for row in rows:
                if int(str(row["set"])) in missing[str(row["method"])]:
                    if not where:  # once for each run: it is the same in all its rows
                        row.pop("version")
                    records.append({"design": name, **row, **where})
                    where = {}
            for number in missing[OURS]:
                records.append({"design": name, "set": number, "method": OURS, **_ours(DESIGNS[name], number), **where})
                where = {}
            if of_r or missing[OURS]:
                print(f"{name}: data sets up to {numbers[-1] + 1}", flush=True)


def _ours(design: Design, number: int) -> dict[str, object]:
    """Fit a data set by the default, and return the columns."""
    import pymc_ngvi  # noqa: F401  (makes pm.fit know the method)

    model = model_of(design, simulate(design, number))
    start, cpu = time.perf_counter(), time.process_time()
    try:
        with model:
            approx = pm.fit(method="ngvi", random_seed=SEED, progressbar=False)
        posterior = approx.sample(N_DRAWS, chains=1, random_seed=SEED)["posterior"]
    except Exception as error:
        return {"status": f"error: {first_line(error)}"}
    columns = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    draws = np.concatenate([np.atleast_2d(posterior[v].to_numpy()[0].T) for v in design.reported])
    low, high = np.quantile(draws, LEVELS, axis=1)
    return {
        "status": kind_of(approx), **columns, "estimates": _joined(draws.mean(axis=1)), "low": _joined(low),
        "high": _joined(high),
    }  # fmt: skip


def _theirs(design: Design, numbers: Sequence[int]) -> list[dict[str, object]]:
    """Fit data sets in R, and return the columns of each fit."""
    frame = pd.concat([simulate(design, number).assign(set=number) for number in numbers])
    with tempfile.TemporaryDirectory() as folder:
        data, found = Path(folder) / "data.csv", Path(folder) / "found.csv"
        frame.to_csv(data, index=False)
        effects = "slopes" if design.slopes else "intercepts"
        subprocess.run(
            ["Rscript", "--vanilla", str(R_SCRIPT), str(data), str(found), design.family, effects],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        with found.open(newline="") as file:
            return [
                {name: "" if value == "NA" else value for name, value in row.items()} for row in csv.DictReader(file)
            ]


def _joined(values: np.ndarray) -> str:
    return ";".join(f"{value:.5g}" for value in values)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--designs", nargs="+", choices=DESIGNS, default=list(DESIGNS), metavar="DESIGN")
    parser.add_argument("--sets", type=int, default=200, help="data sets of each design")
    parser.add_argument("--batch", type=int, default=5, help="data sets of a design before the next one has its turn")
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "simulated_glmms.csv")
    parser.add_argument(
        "--table", type=Path, default=RESULTS / "simulated_glmms.md", help="page with marks, or a new file"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
