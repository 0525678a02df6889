"""Tables of ``simulated_glmms.py``."""

from collections.abc import Sequence

import numpy as np

from pages import measured_on, table
from records import Row
from simulated_glmms_models import COEFFICIENTS, DESIGNS, Design

METHODS = ("ours", "glmmTMB", "lme4")
CAPTION = """\
Means over data sets. Ours: posterior means, and central intervals of 95 % of draws; theirs: maximum-likelihood
estimates; Wald intervals for coefficients, and for standard deviations Wald on the log scale (glmmTMB) or profiles
(lme4, intercepts alone). Coverage is the share of data sets whose interval has the true value; a missing interval
counts as one that has not, an infinite one as one that has. Width: the median of the intervals' widths. All data sets
in which a fit gave estimates count, whether or not it says that it converged.
"""
SUMMARY_CAPTION = """\
Seconds are processor seconds: of the fit, ours with 4,000 draws, and, after a plus, of theirs for the intervals.
"Said": what ours is called, and whether theirs converged, on how many data sets. Coverage: means over coefficients, and
that of the standard deviation of the intercepts, of which 95 % are nominal; from {n_sets} data sets, its Monte Carlo
error is {error:.1f} points for one parameter.
"""


def write(rows: Sequence[Row]) -> str:
    """Return the tables as Markdown: all designs together, then each parameter of each."""
    if not rows:
        return "No results.\n"
    first = [row for row in rows if row["environment"]]
    lines = [
        *measured_on(first),
        *(f"- {version}" for version in sorted({r["version"] for r in rows if r["version"]})),
        "",
    ]
    designs = {name: _in_common([row for row in rows if row["design"] == name]) for name in DESIGNS}
    designs = {name: of_design for name, of_design in designs.items() if of_design}
    least = min(_n_sets(of_design, "ours") for of_design in designs.values())
    error = 100.0 * np.sqrt(0.95 * 0.05 / max(least, 1))
    lines += [SUMMARY_CAPTION.format(n_sets=least, error=error), *_summary(designs), "", CAPTION]
    for name, of_design in designs.items():
        lines += [f"### {name[0].upper()}{name[1:]}", "", *_of_design(DESIGNS[name], of_design), ""]
    return "\n".join(lines)


def figures(rows: Sequence[Row], design: Design) -> dict[str, np.ndarray]:
    """Return bias, root mean square error, coverage and width, (n_parameters,) each, of the fits of one method."""
    kept = [row for row in rows if row["estimates"]]
    estimates, low, high = (np.array([_numbers(row[name]) for row in kept]) for name in ("estimates", "low", "high"))
    truth = design.truth
    with np.errstate(invalid="ignore"):
        covers = (low <= truth) & (truth <= high)  # no interval, no cover
        width = np.where(np.isnan(low) | np.isnan(high), np.inf, high - low)
    return {
        "bias": estimates.mean(axis=0) - truth,
        "rmse": np.sqrt(np.mean((estimates - truth) ** 2, axis=0)),
        "coverage": covers.mean(axis=0),
        "width": np.median(width, axis=0),
        "missing": np.isnan(low).mean(axis=0),
    }


def _in_common(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of data sets that every method has been given."""
    given = [{row["set"] for row in rows if row["method"] == method} for method in METHODS]
    common = set.intersection(*(sets for sets in given if sets)) if rows else set()
    return [row for row in rows if row["set"] in common]


def _summary(designs: dict[str, list[Row]]) -> list[str]:
    header = [
        "design",
        "fit",
        "data sets",
        "said",
        "seconds",
        "coefficients: RMSE",
        "coverage",
        "sd: bias",
        "RMSE",
        "coverage",
    ]
    body: list[list[object]] = []
    for name, rows in designs.items():
        for method in METHODS:
            of_method = [row for row in rows if row["method"] == method]
            if not any(row["estimates"] for row in of_method):
                continue
            found, n = figures(of_method, DESIGNS[name]), len(COEFFICIENTS)
            body.append([
                name, _shown(method, DESIGNS[name]), len(of_method), _said(of_method), _seconds(of_method),
                f"{np.sqrt(np.mean(found['rmse'][:n] ** 2)):.3f}", f"{100 * found['coverage'][:n].mean():.1f}",
                f"{found['bias'][n]:+.3f}", f"{found['rmse'][n]:.3f}", _coverage(found, n),
            ])  # fmt: skip
    return table(header, body)


def _of_design(design: Design, rows: Sequence[Row]) -> list[str]:
    by_method = {method: [row for row in rows if row["method"] == method and row["estimates"]] for method in METHODS}
    found = {method: figures(kept, design) for method, kept in by_method.items() if kept}
    header = ["parameter", "true"]
    header += [
        f"{what}: {_shown(method, design)}" for what in ("bias", "RMSE", "coverage", "width") for method in found
    ]
    body = []
    for i, parameter in enumerate(design.parameters):
        cells: list[object] = [parameter, f"{design.truth[i]:g}"]
        cells += [f"{found[m]['bias'][i]:+.3f}" for m in found]
        cells += [f"{found[m]['rmse'][i]:.3f}" for m in found]
        cells += [_coverage(found[m], i) for m in found]
        cells += [f"{found[m]['width'][i]:.2f}" if np.isfinite(found[m]["width"][i]) else "-" for m in found]
        body.append(cells)
    return table(header, body)


def _coverage(found: dict[str, np.ndarray], i: int) -> str:
    return "-" if found["missing"][i] == 1.0 else f"{100 * found['coverage'][i]:.1f}"


def _shown(method: str, design: Design) -> str:
    return method if method != "lme4" else "lme4, Laplace" if design.slopes else "lme4, 25 nodes"


def _said(rows: Sequence[Row]) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    return ", ".join(f"{status} {n}" for status, n in sorted(counts.items(), key=lambda item: -item[1]))


def _seconds(rows: Sequence[Row]) -> str:
    fit, more = ([float(row[name]) for row in rows if row[name]] for name in ("cpu", "interval_cpu"))
    return f"{np.mean(fit):.2g}" + (f" + {np.mean(more):.2g}" if more else "")


def _n_sets(rows: Sequence[Row], method: str) -> int:
    return sum(row["method"] == method for row in rows)


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(";")]
