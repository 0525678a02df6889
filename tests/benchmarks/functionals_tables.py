"""The tables of ``functionals.py``, as Markdown."""

from collections.abc import Sequence

import numpy as np

from functionals_models import MAY_FAIL, MODELS
from pages import measured_on, significant, table
from records import Row

#: Columns that are printed as they are measured.
SHOWN = (
    "status", "kind", "verdict", "worst_mean", "worst_mean_at", "worst_sd", "worst_sd_at", "worst_limit", "beyond",
    "coordinate_mean", "coordinate_sd", "cold", "note",
)  # fmt: skip
#: What can come of a fit.
RIGHT, WRONG, DOUBTED, ALARM = "right", "false assurance", "doubted", "false alarm"
_ERRORS = """\
All fits are calls of `pm.fit(method="ngvi")` without options, each in a new process with an empty compile folder;
4,000 draws are compared with the reference. Reliable: how many seeds `approx.diagnose()` calls so. Errors of means and
of 89 % limits are in posterior standard deviations, those of standard deviations relative; each is the largest of all
functionals and seeds. Beyond: the largest error of a functional's mean or standard deviation, as a multiple of what is
tolerated: 0.15, or three standard errors of both sets of draws where these are more. Where the reference has a kurtosis
above 50 (rates exp(eta) of hardly known eta), 4,000 draws tell no standard deviation, whoever makes them: NUTS with
another seed is off by factors. Of these, the shares of draws beyond each limit of the reference are compared, as normal
quantiles. Of coordinates, unconstrained, the same errors. Seconds: of the processor, the median of fits, compiling
included. A *false assurance* is "reliable" with an error of more than once what is tolerated, a *false alarm* "not
reliable" with none; *doubted*: wrong, and said so. A star: models that may fail, if they say so.
"""
_SIZES = """\
How many functionals and coordinates each model has, and the least effective sample size of their means in the
reference; "exact" is an integral over the hyperparameters.
"""


def outcome(row: Row) -> str:
    """Return what came of a fit."""
    if not row["beyond"] or not row["reliable"]:
        return "failed"
    is_right = float(row["beyond"]) <= 1.0
    if row["reliable"] == "1":
        return RIGHT if is_right else WRONG
    return ALARM if is_right else DOUBTED


def totals(rows: Sequence[Row]) -> str:
    """Return how many fits had each outcome, as a sentence."""
    found = [outcome(row) for row in rows]
    names = {name: found.count(name) for name in (RIGHT, WRONG, DOUBTED, ALARM, "failed") if name in found}
    n_models = len({row["model"] for row in rows})
    return f"{n_models} models, {len(rows)} fits: {', '.join(f'{n} {name}' for name, n in names.items())}."


def write_tables(rows: Sequence[Row], sizes: dict[str, tuple[int, float]]) -> str:
    """Return all tables; ``sizes``: number of functionals and coordinates of a reference, and its least size."""
    if not rows:
        return "No results.\n"
    header = ["model", "posterior", "reliable", "mean", "sd", "limits", "beyond", "outcome"]
    header += ["coordinates: mean", "sd", "seconds"]
    names = [name for name in MODELS if any(row["model"] == name for row in rows)]
    body = [_cells(name, [row for row in rows if row["model"] == name]) for name in names]
    known = [[name, n, "exact" if np.isinf(size) else f"{size:,.0f}"] for name, (n, size) in sizes.items()]
    lines = [*measured_on(rows), "### Errors", "", _ERRORS, totals(rows), "", *table(header, body), ""]
    lines += ["### References", "", _SIZES, *table(["model", "functionals and coordinates", "ESS"], known), ""]
    return "\n".join(lines)


def _cells(name: str, rows: Sequence[Row]) -> list[object]:
    kinds = sorted({row["kind"] or row["status"] for row in rows})
    reliable = f"{sum(row['reliable'] == '1' for row in rows)} of {len(rows)}"
    outcomes = [outcome(row) for row in rows]
    what = ", ".join(
        f"{outcomes.count(o)} {o}" if len(set(outcomes)) > 1 else o for o in dict.fromkeys(sorted(outcomes))
    )
    seconds = significant([float(row["cold_cpu"]) for row in rows if row["cold_cpu"]])
    return [
        f"{name}*" if name in MAY_FAIL else name, ", ".join(kinds), reliable, _worst(rows, "worst_mean", "+.2f"),
        _worst(rows, "worst_sd", "+.2f"), _worst(rows, "worst_limit", ".2f", at=False),
        _worst(rows, "beyond", ".2f", at=False), what, _worst(rows, "coordinate_mean", "+.2f"),
        _worst(rows, "coordinate_sd", "+.2f"), seconds,
    ]  # fmt: skip


def _worst(rows: Sequence[Row], column: str, form: str, *, at: bool = True) -> str:
    """Return the largest value of some seeds, and where it is."""
    known = [row for row in rows if row[column]]
    if not known:
        return "-"
    row = max(known, key=lambda row: abs(float(row[column])))
    value = format(float(row[column]), form)
    return f"{value} `{row[f'{column}_at']}`" if at else value
