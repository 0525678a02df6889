"""Make the figures of docs/benchmarks.md: ``python docs/img/benchmarks.py`` from the root of the clone.

Each is drawn from tables in ``tests/benchmarks/results``, in seconds. With names behind it (``seconds groups``), these
alone.
"""

import json
import sys

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd

from drawing import STYLE, save
from matplotlib import pyplot

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results"
FOLDER = Path(__file__).parent / "benchmarks"
#: Twice the width of a page.
DPI = 180
OURS, GAUSSIAN, OTHER, GREY = "#0b5fa5", "#6baed6", "#d95f02", "0.45"
#: Methods of `compare.csv`, from the top down.
METHODS = {
    "ngvi": "pymc_ngvi",
    "ngvi_gaussian": 'posterior="gaussian"',
    "nutpie": "NUTS (nutpie)",
    "advi": "ADVI",
    "fullrank_advi": "full-rank ADVI",
    "dadvi": "DADVI",
    "laplace": "Laplace",
    "pathfinder": "Pathfinder",
}
MODELS = {
    "heart": "logistic regression\n19 coefficients, 270 rows",
    "german": "logistic regression\n49 coefficients, 1,000 rows",
    "epilepsy": "Poisson GLMM\n126 unknowns, 236 rows",
}


def read(name):
    """Return a table of results."""
    return pd.read_csv(RESULTS / f"{name}.csv")


def panels(n, height, **options):
    """Return a figure of a row of panels."""
    figure, axes = pyplot.subplots(1, n, figsize=(8.0, height), layout="constrained", **options)
    return figure, np.atleast_1d(axes)


def by_method(columns, labels, **axis):
    """Return a figure of two columns of a table for each method, joined by a line, on three models, and its axes."""
    figure, axes = panels(3, 2.9, sharey=True, sharex=True)
    for ax, (model, title) in zip(axes, MODELS.items(), strict=True):
        for i, method in enumerate(METHODS):
            values = [column[model, method] for column in columns]
            colour = OURS if method.startswith("ngvi") else GREY
            ax.plot(values, [i, i], color=colour, linewidth=1)
            for value, (label, marker, face) in zip(values, labels, strict=True):
                ax.plot(value, i, marker, color=colour, markerfacecolor=face or colour, label=label)
        ax.set_title(title, size=9)
        ax.set(xscale="log", **axis)
    axes[0].set(yticks=range(len(METHODS)), yticklabels=METHODS.values(), ylim=(len(METHODS) - 0.5, -0.5))
    handles, texts = axes[0].get_legend_handles_labels()
    figure.legend(handles[4:6], texts[4:6], loc="outside lower center", ncols=2)
    return figure, axes


def seconds():
    """Draw seconds of eight methods on three models."""
    table = read("compare").set_index(["cache", "model", "method"]).seconds
    labels = [("first fit, nothing compiled", "o", None), ("again, in a new process", "o", "white")]
    figure, axes = by_method(
        [table["cold"], table["warm"]], labels,
        xlim=(0.4, 130), xticks=[1, 10, 100], xticklabels=["1", "10", "100"], xlabel="seconds",
    )  # fmt: skip
    for ax, model in zip(axes, MODELS, strict=True):
        for i, method in enumerate(METHODS):
            cold = table["cold", model, method]
            ax.annotate(
                f"{cold:.{int(cold < 10)}f}", (cold, i), (6, 0), textcoords="offset points", va="center", size=8
            )
    save(figure, FOLDER / "seconds.png", DPI)


def errors():
    """Draw errors of means and standard deviations of the same fits."""
    table = read("compare").query("cache == 'warm'").set_index(["model", "method"])
    labels = [("means, in posterior standard deviations", "o", None), ("standard deviations, relative", "s", "white")]
    figure, _ = by_method(
        [table.em, table.es], labels,
        xlim=(0.004, 3), xticks=[0.01, 0.1, 1], xticklabels=["0.01", "0.1", "1"], xlabel="error",
    )  # fmt: skip
    save(figure, FOLDER / "errors.png", DPI)


def groups():
    """Draw seconds by the number of groups, and errors beside glmmTMB."""
    figure, (left, right) = panels(2, 3.0, gridspec_kw={"width_ratios": [1.0, 1.15]})
    scaling = read("scaling").query("model == 'intercepts' and cache == 'cold'").set_index("size").seconds
    scaling.plot(ax=left, style="o--", color=GAUSSIAN, label='posterior="gaussian"')
    beside = pd.concat([read("glmmtmb"), read("glmmtmb_exact")])
    ours = read("glmmtmb_exact").set_index("n_groups").ours_cold
    ours.plot(ax=left, style="o-", color=OURS, label="default: exact")
    theirs = beside.groupby("n_groups").theirs_seconds.min()
    theirs.plot(ax=left, style="s-", color=OTHER, label="glmmTMB")
    left.set(xscale="log", yscale="log", xlabel="groups", ylabel="seconds", yticks=[1, 10, 100])
    left.set_yticklabels(["1", "10", "100"])
    left.legend(loc="upper left")
    rows = []
    for _, row in read("glmmtmb_exact").iterrows():
        mean, sd, own, other = (
            np.array(row[name].split(";"), dtype=float)
            for name in ("exact_mean", "exact_sd", "ours_mean", "theirs_mean")
        )
        rows += [(row.n_groups, abs(own - mean) / sd, abs(other - mean) / sd)]
    for i, (_, own, other) in enumerate(rows):
        right.plot(own, np.full(own.shape, i - 0.12), "o", color=OURS, alpha=0.7, label="default: exact")
        right.plot(other, np.full(own.shape, i + 0.12), "s", color=OTHER, alpha=0.7, label="glmmTMB")
    right.set(xscale="log", xlabel="error of a mean, in standard deviations", ylim=(2.5, -0.5))
    right.set_xlim(5e-5, 5)
    right.set(yticks=range(3), yticklabels=[f"{n:,} groups" for n, *_ in rows], xticks=[0.001, 0.01, 0.1, 1])
    right.set_xticklabels(["0.001", "0.01", "0.1", "1"])
    save(figure, FOLDER / "groups.png", DPI)


def coverage():
    """Draw how often 95 % intervals hold the truth, beside glmmTMB and lme4, and calibration of scales."""
    figure, (left, right) = panels(2, 3.2, gridspec_kw={"width_ratios": [1.0, 1.25]})
    table = read("calibration_exact")
    levels = np.linspace(0.02, 0.98, 49)
    for posterior, colour, label in (("exact", OURS, "default: exact"), ("gaussian", GAUSSIAN, 'posterior="gaussian"')):
        ranks = np.array([json.loads(row)[2] for row in table[posterior]])
        inside = np.abs(ranks / 999 - 0.5)[:, None] <= levels / 2
        left.plot(100 * levels, 100 * inside.mean(axis=0), color=colour, label=label)
    spread = 2 * np.sqrt(levels * (1 - levels) / len(table))
    left.fill_between(100 * levels, 100 * (levels - spread), 100 * (levels + spread), color="0.85", label="two s.e.")
    left.set(xlabel="nominal coverage, %", ylabel="coverage, %", title="sd of 30 group effects")
    left.legend(loc="upper left")
    shown = read("simulated_glmms")
    covered = {}
    for _, row in shown.iterrows():
        truth = [0.1, 0.3, -0.2, 0.1, 0.8]
        low, high = (np.array([float(x) for x in str(row[name]).split(";")[:5]]) for name in ("low", "high"))
        if len(low) == 5:
            covered.setdefault((row.design, row.method), []).append((low <= truth) & (truth <= high))
    designs = list(dict.fromkeys(shown.design))
    for j, (method, colour, marker) in enumerate((("ours", OURS, "o"), ("glmmTMB", OTHER, "s"), ("lme4", GREY, "^"))):
        for i, design in enumerate(designs):
            each = np.array(covered[design, method], dtype=float)
            at = i + 0.22 * (j - 1)
            label = None if i else {"ours": "pymc_ngvi"}.get(method, method)
            right.plot(100 * each[:, :4].mean(), at, marker, color=colour, label=label)
            if method != "lme4" or "slopes" not in design:
                right.plot(100 * each[:, 4].mean(), at, marker, color=colour, markerfacecolor="white")
    right.axvline(95, color="0.7", linewidth=1, zorder=0)
    right.set(yticks=range(len(designs)), yticklabels=designs, ylim=(len(designs) - 0.5, -0.5))
    right.set(xlabel="coverage of 95 % intervals, %", title="filled: coefficients; hollow: sd of intercepts")
    right.legend(loc="lower left")
    save(figure, FOLDER / "coverage.png", DPI)


def inla():
    """Draw errors of means beside those that are in print for R-INLA."""
    table = read("inla")
    table = table[~table.example.str.startswith("Musa, AR")]
    names = list(dict.fromkeys(table.example))
    figure, (ax,) = panels(1, 4.0)
    for shift, column, colour, marker, label in (
        (-0.15, "mean", OURS, "o", "pymc_ngvi"),
        (0.15, "published_mean", OTHER, "s", "R-INLA, in print"),
    ):
        error = abs(table[column] - table.reference_mean) / table.reference_sd
        ax.plot(error, table.example.map(names.index) + shift, marker, color=colour, alpha=0.7, label=label)
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5), xlim=(-0.005, None))
    ax.set_xlabel("error of each parameter's mean beside NUTS, in standard deviations")
    ax.legend()
    save(figure, FOLDER / "inla.png", DPI)


def models():
    """Draw errors and seconds of models as users write them."""
    table = read("users").dropna(subset=["em", "es"])
    table["kind"] = table.kind.where(table.kind != "structured", "mixtures, missing data, factors")
    figure, (ax,) = panels(1, 3.4)
    for i, (kind, some) in enumerate(table.groupby("kind", sort=False)):
        ax.plot(some.fit_seconds, some[["em", "es"]].max(axis=1), "osDv^"[i % 5], color=f"C{i}", alpha=0.75, label=kind)
    ax.axhline(0.3, color="0.7", linewidth=1, linestyle=":")
    ax.set(xscale="log", yscale="log", xticks=[0.2, 0.5, 1, 2, 5, 10], yticks=[0.01, 0.03, 0.1, 0.3])
    ax.set(xticklabels=["0.2", "0.5", "1", "2", "5", "10"], yticklabels=["0.01", "0.03", "0.1", "0.3"])
    ax.minorticks_off()
    ax.set(xlabel="processor seconds of a first fit", ylabel="larger error, of means or sds", ylim=(0.004, 0.4))
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=5, columnspacing=0.8)
    save(figure, FOLDER / "models.png", DPI)


FIGURES = {draw.__name__: draw for draw in (seconds, errors, groups, coverage, inla, models)}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    with pyplot.rc_context(STYLE | {"lines.markersize": 5}):
        for name in sys.argv[1:] or FIGURES:
            FIGURES[name]()
