"""Tables and the figure of ``topics.py``."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd

from pages import measured_on, table
from records import Row

mpl.use("Agg")
import matplotlib.pyplot as plt

#: Passes in the table, and passes that the figure marks, as the paper's does.
SHOWN, MARKED = (1, 2, 5, 10, 20), (2, 5)
#: Columns that are text.
TEXT = ("method", "set", "status", "date", "environment")


def frame_of(rows: Sequence[Row]) -> pd.DataFrame:
    """Return rows as a table with numbers."""
    frame = pd.DataFrame(rows)
    for name in frame.columns.difference(TEXT):
        frame[name] = pd.to_numeric(frame[name])
    return frame


def pass_table(frame: pd.DataFrame) -> list[str]:
    """Return mean scores over starts, by pass, with seconds and the largest standard deviation in Sigma."""
    last, lines = int(frame["pass"].max()), []
    for method, part in frame.groupby("method", sort=False):
        if np.isinf(part["score"]).any():
            ends = part.loc[np.isinf(part["score"]), "pass"]
            when = str(ends.min()) if ends.min() == ends.max() else f"{ends.min()} to {ends.max()}"
            lines.append([method, part["seed"].nunique(), f"diverges in pass {when}"])
            lines[-1] += [""] * (len(SHOWN) + 3)
            continue
        by_pass = part.groupby("pass")[["score", "seconds", "sd"]].mean()
        scores = [f"{by_pass['score'][number]:.4f}" for number in (*SHOWN, last)]
        seconds = [f"{by_pass['seconds'][number]:.1f}" for number in (5, last)]
        lines.append([method, part["seed"].nunique(), *scores, *seconds, f"{by_pass['sd'][last]:.1f}"])
    header = ["method", "starts", *(f"{n} pass{'es' * (n > 1)}" for n in (*SHOWN, last))]
    return table([*header, "seconds, 5 passes", f"seconds, {last} passes", "largest sd in Sigma"], lines)


def end_table(frame: pd.DataFrame) -> list[str]:
    """Return scores after the last pass by start, and those of the same topics with another q."""
    end, lines = frame[frame["pass"] == frame["pass"].max()], []
    seeds = sorted(end["seed"].unique())
    for method, part in end.groupby("method", sort=False):
        by_seed = part.set_index("seed")
        scores = [f"{by_seed['score'][seed]:.4f}" if seed in by_seed.index else "" for seed in seeds]
        lines.append([method, *scores, f"{part['by_laplace'].mean():.4f}", f"{part['by_gaussian'].mean():.4f}"])
    header = ["topics and q of", *(f"start {seed}" for seed in seeds)]
    return table([*header, "mean, with q of Laplace", "mean, with full Gaussian q"], lines)


def document_table(frame: pd.DataFrame) -> list[str]:
    """Return how far approximations are from importance sampling, over documents."""
    lines = []
    for (name, method), part in frame.groupby(["set", "method"], sort=False):
        own, reached = part["own"] - part["log_p"], part["elbo"] - part["log_p"]
        worse = part["score"] - part["true_score"]
        values = [f"{own.mean():+.2f} ({own.min():+.2f} to {own.max():+.2f})", f"{-reached.mean():.3f}"]
        values += [
            f"{-reached.min():.2f}",
            f"{_rms(part['em']):.3f}",
            f"{_rms(part['es']):.3f}",
            f"{worse.mean():+.4f}",
        ]
        lines.append([name, method, *values, f"{part['seconds'].iloc[0]:.1f}"])
    header = ["given", "q", "its log p(y) less the true one", "KL, mean", "KL, worst", "error of means"]
    return table([*header, "of sds", "score less the true one", "seconds"], lines)


def price_table(frame: pd.DataFrame) -> list[str]:
    """Return how far what the rivals maximise is from the ELBO of their q, in two parts."""
    lines = []
    for (name, method), part in frame.dropna(subset="assignments").groupby(["set", "method"], sort=False):
        parts = [f"{part[column].mean():.2f}" for column in ("assignments", "log_sum_exp")]
        lines.append([name, method, *parts, f"{abs(part['log_sum_exp']).max():.2f}"])
    return table(["given", "q", "assignments in q", "log-sum-exp", "log-sum-exp, worst"], lines)


def _rms(values: pd.Series) -> float:
    return float(np.sqrt((values**2).mean()))


def documents_text(frame: pd.DataFrame) -> str:
    """Return what importance sampling can tell, and the status of the package."""
    one = frame[frame["method"] == "Laplace"]
    status = frame[frame["method"] == "package"].groupby("set", sort=False)["status"].first()
    ours = frame[frame["method"] == "package"]
    return (
        f"{one['document'].nunique()} documents. Importance sampling: largest standard error of log p(y) "
        f"{one['log_p_error'].max():.4f}, largest Pareto k {one['k'].max():.2f}. Status of the package: "
        + ", ".join(f"{value} ({name})" for name, value in status.items())
        + f". It differs from the optimum with many draws by {_rms(ours['from_optimum']):.3f} sds in means and "
        f"{100 * _rms(ours['sd_from_optimum']):.1f} % in sds, root mean squares."
    )


def tables(rows: Sequence[Row], documents: Sequence[Row]) -> str:
    """Return all tables."""
    frame, fixed = frame_of(rows), frame_of(documents)
    lines = [*measured_on([*rows, *documents]), "### Learning topics", ""]
    lines += ["Minus the mean log probability of a held-out word, mean over starts:", "", *pass_table(frame), ""]
    lines += ["After the last pass:", "", *end_table(frame), "", "### Documents, with topics fixed", ""]
    lines += [documents_text(fixed), "", *document_table(fixed), ""]
    lines += ["What the ELBO of q has above what the rivals maximise, in nats, means over documents:", ""]
    lines += price_table(fixed)
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draw scores against seconds and passes, all starts, with marks at passes 2 and 5."""
    frame = frame_of(rows)
    frame = frame[np.isfinite(frame["score"])]
    figure, axes = plt.subplots(1, 2, figsize=(11, 5), sharey=True)
    whole = frame.groupby("method", sort=False).filter(lambda part: part["pass"].max() == frame["pass"].max())
    for number, (method, runs) in enumerate(whole.groupby("method", sort=False)):
        for axis, name in zip(axes, ("seconds", "pass"), strict=True):
            for seed, run in runs.groupby("seed"):
                label = method if seed == runs["seed"].min() else None
                style = {"color": f"C{number}", "lw": 1.6 if label else 0.7}
                axis.plot(run[name], run["score"], label=label, **style)
                marked = run[run["pass"].isin(MARKED)]
                axis.plot(marked[name], marked["score"], "o", ms=4, color=f"C{number}")
    axes[0].set(xscale="log", xlabel="processor seconds", ylabel="- mean log predictive of a word")
    ticks = [*SHOWN, int(frame["pass"].max())]
    axes[1].set(xscale="log", xlabel="passes")
    axes[1].set_xticks(ticks, labels=[str(tick) for tick in ticks], minor=False)
    axes[1].minorticks_off()
    axes[0].legend()
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)
