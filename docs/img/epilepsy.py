"""Make the first figure of README.md and of the site: ``python docs/img/epilepsy.py`` from the root of the clone.

The posterior of the two scales of the epilepsy GLMM by NUTS, by this package with and without its exact step, and by
ADVI. Quantiles of NUTS are in ``examples/data``; seconds are those of a cold start in
``tests/benchmarks/results/compare.csv``. ADVI takes a minute.
"""

import functools
import runpy

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pymc as pm

from matplotlib import pyplot
from scipy.special import ndtri
from scipy.stats import gaussian_kde

import pymc_ngvi  # noqa: F401  (makes pm.fit know the method "ngvi")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
epilepsy = runpy.run_path(str(ROOT / "examples" / "epilepsy.py"))
#: Methods, as they are called in `compare.csv` and in the figure, and their lines: colour, width, style.
METHODS = {
    "nutpie": ("NUTS (nutpie)", ("0.65", 5.0, "-")),
    "ngvi": ("pymc_ngvi", ("C0", 2.0, "-")),
    "ngvi_gaussian": ('pymc_ngvi, posterior="gaussian"', ("C0", 1.4, "--")),
    "advi": ("ADVI", ("C1", 1.4, "-")),
}
#: Options of `pm.fit`.
OPTIONS = {
    "ngvi": {"method": "ngvi"},
    "ngvi_gaussian": {"method": "ngvi", "posterior": "gaussian"},
    "advi": {"method": "advi", "n": 30_000},
}
TITLES = {"intercept": "intercepts of patients", "visit": "slopes of patients over visits"}
#: Degree of the polynomial through the quantiles of NUTS.
DEGREE = 5


@functools.cache
def draws_of(method):
    """Return draws of the posterior by a method of ``pm.fit``, fitted once for all pictures."""
    model = epilepsy["build_model"](pd.read_csv(ROOT / "examples" / "data" / "epilepsy.csv"))
    approx = pm.fit(model=model, random_seed=1, progressbar=False, **OPTIONS[method])
    return approx.sample(8_000, random_seed=2).posterior


def draws_of_nuts(quantiles):
    """Return 8,000 numbers with these percentiles: their logarithm as a smooth function of that of a normal density."""
    z = ndtri(np.arange(1, 100) / 100)
    smooth = np.polynomial.Polynomial.fit(z, np.log(quantiles), DEGREE)
    return np.exp(smooth(ndtri((np.arange(8_000) + 0.5) / 8_000)))


def main():
    """Draw, with the fits of all methods."""
    table = pd.read_csv(ROOT / "examples" / "data" / "epilepsy_nuts.csv")
    table = table[table.variable == "sd"].set_index("label")
    percentiles = table[[f"q{i:02d}" for i in range(1, 100)]]
    scales = {}
    for term in table.index:
        scales[term] = {"nutpie": draws_of_nuts(percentiles.loc[term].to_numpy(dtype=float))}
        for method in OPTIONS:
            scales[term][method] = draws_of(method)["sd"].sel(term=term).to_numpy().ravel()
    save(draw(scales))


def draw(scales):
    """Return the figure: for each term, densities by method; seconds in the legend."""
    compare = pd.read_csv(ROOT / "tests" / "benchmarks" / "results" / "compare.csv")
    cold = compare[(compare.model == "epilepsy") & (compare.cache == "cold")].set_index("method").seconds
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.9), layout="constrained")
    for ax, (term, by_method) in zip(axes, scales.items(), strict=True):
        low, high = np.quantile(by_method["nutpie"], [0.0002, 0.9995])
        grid = np.linspace(low - 0.05 * (high - low), high, 400)
        heights = {method: gaussian_kde(values)(grid) for method, values in by_method.items()}
        for method, (label, (colour, width, style)) in METHODS.items():
            label = f"{label}: {cold[method]:.{int(cold[method] < 10)}f} s"
            ax.plot(grid, heights[method], color=colour, linewidth=width, linestyle=style, label=label)
        ax.set(title=TITLES[term], xlabel="standard deviation (log seizure rate)", yticks=[])
        ax.set(xlim=(grid[0], grid[-1]), ylim=(0.0, None))
        ax.spines[["left", "top", "right"]].set_visible(False)
    axes[0].set_ylabel("posterior density")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        title="Seconds from a cold start, 2,000 draws included",
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.suptitle("Standard deviations in a Poisson GLMM: seizures of 59 patients", fontsize=12)
    return figure


def save(figure):
    """Write the figure."""
    figure.savefig(HERE / "epilepsy.png", dpi=110)


if __name__ == "__main__":
    main()
