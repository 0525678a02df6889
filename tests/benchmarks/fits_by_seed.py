"""Fits of models from many seeds: a row for each, and what tables say of them."""

import argparse
import datetime
import warnings

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

from environment import describe_environment
from pages import measured_on, table, write_between_marks
from records import Records, Row

from pymc_ngvi import fit_ngvi

RESULTS = Path(__file__).parent / "results"
#: Values of a row; ``start`` is empty where a fit began where it does by itself.
FIELDS = ("model", "start", "seed", "status", "elbo", "n_gradients", "n_hessians", "date", "environment")


def parser_of(description: str | None, models: Iterable[str], name: str, n_seeds: int) -> argparse.ArgumentParser:
    """Return the parser of the options that scripts have in common."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seeds", type=int, default=n_seeds, help="run the seeds 1 to this; 0: only the table")
    parser.add_argument("--models", nargs="+", choices=list(models), default=list(models), metavar="MODEL")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.csv")
    parser.add_argument("--table", type=Path, default=RESULTS / f"{name}.md", help="page with marks, or a new file")
    return parser


def run_missing(
    records: Records,
    name: str,
    model: pm.Model,
    seeds: Iterable[int],
    start: Callable[[int], Any] | None = None,
    n: int = 10_000,
) -> None:
    """Fit a Gaussian to a model from each seed that has no row yet, from its own start or from one made of the seed."""
    kind = "" if start is None else "dispersed"
    done = {(row["model"], row["start"], row["seed"]) for row in records.read()}
    for seed in seeds:
        if (name, kind, str(seed)) in done:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the status is in the row
            approx = fit_ngvi(
                n,
                model=model,
                posterior="gaussian",
                random_seed=seed,
                start=None if start is None else start(seed),
                progressbar=False,
            )
        row = {"model": name, "start": kind, "seed": seed, "status": str(approx.status), "elbo": approx.elbo.value}
        row |= {"n_gradients": approx.n_gradients, "n_hessians": approx.n_hessians}
        row |= {"date": datetime.datetime.now().isoformat(timespec="seconds"), "environment": describe_environment()}
        records.append(row)
        print(name, kind, seed, row["status"], f"{row['elbo']:.3f}", flush=True)


def write_page(page: Path, header: Sequence[str], rows: Sequence[Row], cells: Callable[..., Any], script: str) -> None:
    """Write the table of all models that have rows; ``cells`` makes a line from the name and the rows of a model."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    lines = table(header, [cells(name, [row for row in rows if row["model"] == name]) for name in names])
    write_between_marks(page, "\n".join([*measured_on(rows), *lines]) + "\n", script)


def ended(rows: Sequence[Row]) -> str:
    """Return how fits ended, as text."""
    counts = Counter(row["status"] for row in rows)
    return ", ".join(f"{status}: {n}" for status, n in counts.most_common()) or "-"


def mean(rows: Sequence[Row], column: str) -> str:
    """Return the mean of a column, as text."""
    return f"{np.mean([float(row[column]) for row in rows]):,.0f}"
