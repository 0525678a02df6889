"""Tables and figures of ``khan_gp.py``."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd

from pages import measured_on, table
from records import Row

mpl.use("Agg")
import matplotlib.pyplot as plt

#: Passes in the tables, and nats above the optimum at which a run of figure 1 has arrived.
SHOWN, ARRIVED = (1, 2, 4, 9), (10.0, 1.0)
NUMBERS = ("step_size", "pass", "loss", "log_loss", "sites_loss", "sites_log_loss", "seconds")
#: Methods in the order of tables and colours.
METHODS = ("PG-SVI", "SGD", "Adagrad", "RMSprop", "Adadelta", "Adam")
#: Lines of variants of a method.
LINES = {"": "-", ", logs": "--", ", as in the code": ":"}


def frame_of(rows: Sequence[Row]) -> pd.DataFrame:
    """Return rows as a table with numbers."""
    frame = pd.DataFrame(rows)
    for name in NUMBERS:
        frame[name] = pd.to_numeric(frame[name])
    return frame


def _optimum(frame: pd.DataFrame, data: str) -> pd.Series:
    return frame[(frame["data"] == data) & (frame["method"] == "optimum")].iloc[0]


def _methods(part: pd.DataFrame) -> list[str]:
    """Return the methods of figure 2 that a table has, variant by variant."""
    found = set(part["method"])
    return [method + variant for variant in LINES for method in METHODS if method + variant in found]


def _at(values: pd.Series, number: int, form: str) -> str:
    """Return a value after some passes: where the run has ended, or diverged, there is none."""
    found = values.get(number)
    return "" if found is None else ("diverged" if not np.isfinite(found) else format(found, form))


def optimum_table(frame: pd.DataFrame) -> list[str]:
    """Return what a default fit reaches."""
    lines = []
    for data in frame["data"].unique():
        best = _optimum(frame, data)
        drawn = frame[(frame["data"] == data) & (frame["method"] == "optimum, by draws")]["log_loss"]
        start = frame[(frame["data"] == data) & (frame["method"] == "start")]["loss"].iloc[0]
        values = [f"{start:,.2f}", f"{best['loss']:.4f}", f"{best['log_loss']:.4f}"]
        lines.append([data, *values, f"{drawn.iloc[0]:.4f}" if len(drawn) else "", f"{best['seconds']:.1f}"])
    header = ["data", "-ELBO at the start", "-ELBO", "test log2 loss", "by 20,000 draws", "processor seconds"]
    return table(header, lines)


def pass_table(frame: pd.DataFrame, data: str) -> list[str]:
    """Return nats above the optimum, and test log2 loss, by pass."""
    part = frame[(frame["data"] == data) & (frame["figure"] == "2")]
    best, lines = _optimum(frame, data), []
    for method in _methods(part):
        run = part[part["method"] == method].set_index("pass")
        last = int(run.index.max())
        above, loss = run["loss"] - best["loss"], run["log_loss"]
        by_pass = [_at(above, n, ".3g") for n in (*SHOWN, last)] + [_at(loss, n, ".3f") for n in (9, last)]
        sited = [] if method == "PG-SVI" else run["sites_loss"] - best["loss"]
        sites = _at(sited, last, ".3g") if len(sited) and np.isfinite(sited[last]) else ""
        lines.append([method, f"{run['step_size'].iloc[0]:.3g}", *by_pass, sites, last])
    header = ["method", "step size", *(f"{n} pass{'es' if n > 1 else ''}" for n in SHOWN), "last"]
    return table([*header, "log2 loss, 9 passes", "log2 loss, last", "last, with V of sites", "last pass"], lines)


def step_table(frame: pd.DataFrame) -> list[str]:
    """Return for which step sizes methods arrive, and how soon."""
    lines = []
    for distance in ARRIVED:
        for method, runs in frame[frame["figure"] == "1"].groupby("method", sort=False):
            best = _optimum(frame, runs["data"].iloc[0])["loss"]
            there, sizes = _arrived(runs, best + distance), runs["step_size"]
            tried = f"{sizes.min():g} - {sizes.max():g}"
            if len(there):
                found = [f"{there.index.min():g} - {there.index.max():g}", there.min(), f"{there.idxmin():g}"]
            else:
                nearest = runs.sort_values("loss").iloc[0]
                left = f"none; {nearest['loss'] - best:.3g} nats left after {nearest['pass']:,}"
                found = [left, "", f"{nearest['step_size']:g}"]
            lines.append([method, f"{distance:g}", tried, *found])
    return table(["method", "within, nats", "step sizes tried", "that arrive", "fewest passes", "at step size"], lines)


def _arrived(runs: pd.DataFrame, limit: float) -> pd.Series:
    """Return passes until -ELBO is below a limit, by step size, of runs that get there."""
    return runs[runs["loss"] < limit].groupby("step_size")["pass"].min()


def tables(rows: Sequence[Row]) -> str:
    """Return all tables."""
    frame = frame_of(rows)
    lines = [*measured_on(rows), "### The optimum", "", *optimum_table(frame), "", "### By pass", ""]
    lines += ["Nats above the optimum, and test log2 loss where it says so, with the step sizes of the paper.", ""]
    for data in frame["data"].unique():
        lines += [f"{data}:", "", *pass_table(frame, data), ""]
    return "\n".join([*lines, "### By step size, on Sonar", "", *step_table(frame)]) + "\n"


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draw both figures."""
    frame = frame_of(rows)
    draw_passes(frame, out / "khan2016.png")
    draw_steps(frame, out / "khan2016_steps.png")


def draw_passes(frame: pd.DataFrame, out: Path) -> None:
    """Draw nats above the optimum, and test log loss, against passes."""
    data = list(frame["data"].unique())
    figure, axes = plt.subplots(2, len(data), figsize=(4.2 * len(data), 7), squeeze=False, sharex="col")
    for column, name in zip(axes.T, data, strict=True):
        best = _optimum(frame, name)
        part = frame[(frame["data"] == name) & (frame["figure"] == "2") & np.isfinite(frame["loss"])]
        methods = _methods(part)
        plain = [method.split(",")[0] for method in methods]
        for method, own in zip(methods, plain, strict=True):
            run = part[part["method"] == method]
            style = {"color": f"C{METHODS.index(own)}", "ls": LINES[method.removeprefix(own)]}
            column[0].plot(run["pass"], run["loss"] - best["loss"], label=method, **style)
            column[1].plot(run["pass"], run["log_loss"], **style)
        column[1].axhline(best["log_loss"], color="k", lw=0.8)
        column[0].set(xscale="log", yscale="log", title=name, ylabel="-ELBO above the optimum, nats")
        column[1].set(xscale="log", xlabel="passes", ylabel="test log2 loss")
        for axis in column:
            axis.grid(alpha=0.3)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, fontsize=8)
    figure.tight_layout(rect=(0.0, 0.07, 1.0, 1.0))
    figure.savefig(out, dpi=130)
    plt.close(figure)


def draw_steps(frame: pd.DataFrame, out: Path) -> None:
    """Draw passes until a run has arrived against the step size; hollow where it ends or diverges before."""
    figure, axes = plt.subplots(1, len(ARRIVED), figsize=(10, 4.8), sharey=True)
    part = frame[frame["figure"] == "1"]
    best = _optimum(frame, part["data"].iloc[0])["loss"]
    for axis, distance in zip(axes, ARRIVED, strict=True):
        for number, (method, runs) in enumerate(part.groupby("method", sort=False)):
            there = _arrived(runs, best + distance)
            missed = runs.groupby("step_size")["pass"].max().drop(there.index)
            axis.plot(there.index, there, "o-", color=f"C{number}", label=method)
            axis.plot(missed.index, missed, "o", mfc="none", color=f"C{number}")
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="step size",
            ylabel=f"passes until within {distance:g} nat{'s' * (distance != 1.0)}",
        )
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8)
    figure.tight_layout(rect=(0.0, 0.07, 1.0, 1.0))
    figure.savefig(out, dpi=130)
    plt.close(figure)
