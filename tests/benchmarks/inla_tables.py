"""The tables of ``inla.py``, as Markdown."""

from collections.abc import Sequence

import numpy as np

from inla_models import EXAMPLES
from pages import measured_on, significant, table
from records import Row


def write_tables(rows: Sequence[Row]) -> str:
    """Return a table of the examples, and one of their parameters."""
    if not rows:
        return "No results.\n"
    names = [name for name in EXAMPLES if any(row["example"] == name for row in rows)]
    lines = [*measured_on(rows), "### Examples", ""]
    header = ["example", "effects", "posterior", "verdict", "seconds", "NUTS", "ours: mean", "sd", "R-INLA: mean", "sd"]
    lines += table(header, [_example(name, [row for row in rows if row["example"] == name]) for name in names])
    lines += ["", "### Parameters", ""]
    header = ["example", "parameter", "R-INLA", "ours", "reference", "by", "ESS"]
    lines += table(header, [_parameter(row) for name in names for row in rows if row["example"] == name])
    return "\n".join(lines) + "\n"


def _example(name: str, rows: Sequence[Row]) -> list[object]:
    first = rows[0]
    seconds = [significant([float(first[key])]) if first[key] else "-" for key in ("seconds", "reference_seconds")]
    start = [name, EXAMPLES[name].effects, first["posterior"] or first["status"], first["verdict"] or "-", *seconds]
    return [*start, *_worst(rows, ("mean", "sd")), *_worst(rows, ("published_mean", "published_sd"))]


def _worst(rows: Sequence[Row], columns: tuple[str, str]) -> list[str]:
    """Return the largest error of a mean, in standard deviations, and of a standard deviation, relative."""
    if not all(row[key] for row in rows for key in (*columns, "reference_mean", "reference_sd")):
        return ["-", "-"]
    values = np.array([[float(row[key]) for key in (*columns, "reference_mean", "reference_sd")] for row in rows])
    mean, sd, true_mean, true_sd = values.T
    return [f"{np.abs((mean - true_mean) / true_sd).max():.2f}", f"{np.abs(sd / true_sd - 1.0).max():.2f}"]


def _parameter(row: Row) -> list[object]:
    shown = [
        f"{float(row[mean]):.3f} ± {float(row[sd]):.3f}" if row[mean] else "-"
        for mean, sd in (("mean", "sd"), ("reference_mean", "reference_sd"))
    ]
    ess = float(row["ess"]) if row["ess"] else np.nan
    published = f"{row['published_mean']} ± {row['published_sd']}" if row["published_mean"] else "-"
    known = "exact" if np.isinf(ess) else f"{ess:,.0f}" if np.isfinite(ess) else "-"
    return [row["example"], f"`{row['parameter']}`", published, *shown, row["by"] or "-", known]
