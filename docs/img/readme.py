"""Make the first figure of README.md: ``python docs/img/readme.py`` from the root of the clone.

Left, the posterior of a standard deviation in the epilepsy GLMM, by NUTS, by this package and by ADVI, which takes a
minute. Right, seconds of ``tests/benchmarks/results/readme.csv``, a point for each data set.
"""

import textwrap

from pathlib import Path

import epilepsy
import numpy as np
import pandas as pd

from drawing import save
from matplotlib import pyplot
from scipy.stats import gaussian_kde

ROOT = Path(__file__).parents[2]
#: Colour, width and label.
LINES = {"nuts": ("0.65", 6.0, "NUTS"), "ngvi": ("#0b5fa5", 2.2, "pymc_ngvi"), "advi": ("#d95f02", 1.6, "ADVI")}


def densities(ax):
    """Draw the densities of the standard deviation of slopes."""
    table = pd.read_csv(ROOT / "examples" / "data" / "epilepsy_nuts.csv").query("variable == 'sd' and label == 'visit'")
    quantiles = table[[f"q{i:02d}" for i in range(1, 100)]].to_numpy(dtype=float)[0]
    draws = {"nuts": epilepsy.draws_of_nuts(quantiles)}
    for method in ("ngvi", "advi"):
        draws[method] = epilepsy.draws_of(method)["sd"].sel(term="visit").to_numpy().ravel()
    grid = np.linspace(0.25, 1.35, 400)
    for name, (colour, width, label) in LINES.items():
        ax.plot(grid, gaussian_kde(draws[name])(grid), color=colour, linewidth=width, label=label)
    ax.set(xlim=(grid[0], grid[-1]), ylim=(0, None), yticks=[], xlabel="standard deviation of slopes among patients")
    ax.set_title("Posterior: Poisson GLMM of 59 patients", fontsize=11)
    ax.legend(frameon=False, loc="upper right")


def seconds(ax):
    """Draw the seconds of first fits, and of NUTS."""
    rows = pd.read_csv(ROOT / "tests" / "benchmarks" / "results" / "readme.csv").query("cache == 'filled'")
    kinds = list(dict.fromkeys(rows["kind"]))[::-1]
    place = rows["kind"].map(kinds.index)
    nuts = rows["nuts_compile"] + 0.5 * rows["nuts_sample"]
    ax.plot(nuts, place - 0.14, "o", color="0.5", markerfacecolor="none", markersize=6, label="NUTS (nutpie)")
    ax.plot(rows["first"], place + 0.14, "o", color="#0b5fa5", markersize=6, alpha=0.8, label="pymc_ngvi")
    ax.set_yticks(range(len(kinds)), [textwrap.fill(kind, 24) for kind in kinds], fontsize=9)
    ax.set(xscale="log", xlabel="seconds, a first fit of each data set", ylim=(-0.6, len(kinds) - 0.4))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.grid(axis="x", color="0.9")
    ax.set_axisbelow(True)
    ax.set_title("Seconds, compilation included", fontsize=11)
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def main():
    """Draw both panels, and write them in few colours at twice the width of a page."""
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained", width_ratios=[1, 1.15])
    densities(axes[0])
    seconds(axes[1])
    for ax in axes:
        ax.spines[["left", "top", "right"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
    save(figure, Path(__file__).with_name("readme.png"), dpi=160)


if __name__ == "__main__":
    main()
