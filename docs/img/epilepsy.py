"""Make the first figure of README.md and of the site: ``python docs/img/epilepsy.py`` from the root of the clone.

The posterior of the epilepsy GLMM by NUTS, by this package and by ADVI. Quantiles of NUTS are in ``examples/data``;
seconds are those of a cold start in ``docs/benchmarks/compare.csv``. ADVI takes a minute.
"""

import runpy

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pymc as pm

from matplotlib import pyplot

import pymc_ngvi  # noqa: F401  (makes pm.fit know the method "ngvi")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
epilepsy = runpy.run_path(str(ROOT / "examples" / "epilepsy.py"))
#: Methods, as they are called in `compare.csv` and in the figure, and their colours.
METHODS = {"nutpie": ("NUTS (nutpie)", "0.35"), "ngvi": ("pymc_ngvi", "C0"), "advi": ("ADVI", "C1")}
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


def quantiles_of(posterior):
    """Return quantiles of the fixed effects and of the two scales, (8, 5)."""
    draws = [
        posterior[name].stack(sample=("chain", "draw")).transpose("sample", ...).to_numpy() for name in ("beta", "sd")
    ]
    return np.quantile(np.concatenate(draws, axis=1), LEVELS, axis=0).T


def main():
    """Fit twice and draw."""
    table = pd.read_csv(ROOT / "examples" / "data" / "epilepsy_nuts.csv")
    by_method = {"nutpie": table[[f"q{round(100 * level):02d}" for level in LEVELS]].to_numpy()}
    model = epilepsy["build_model"](pd.read_csv(ROOT / "examples" / "data" / "epilepsy.csv"))
    with model:
        for method, options in (("ngvi", {}), ("advi", {"n": 30_000})):
            approx = pm.fit(method=method, random_seed=1, progressbar=False, **options)
            by_method[method] = quantiles_of(approx.sample(4_000, random_seed=2).posterior)
    save(
        draw(
            by_method,
            [f"{row.label}" if row.variable == "beta" else f"sd of {row.label}" for row in table.itertuples()],
        )
    )


def draw(by_method, labels):
    """Return the figure: intervals on the left, seconds on the right."""
    compare = pd.read_csv(ROOT / "docs" / "benchmarks" / "compare.csv")
    cold = compare[(compare.model == "epilepsy") & (compare.cache == "cold")].groupby("method").seconds.median()
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 4.2), layout="constrained", gridspec_kw={"width_ratios": [2.2, 1]}
    )
    for i, (method, (_, colour)) in enumerate(METHODS.items()):
        q, place = by_method[method], np.arange(len(labels))[::-1] + 0.24 * (1 - i)
        left.hlines(place, q[:, 0], q[:, 4], color=colour, linewidth=1.3)
        left.hlines(place, q[:, 1], q[:, 3], color=colour, linewidth=4)
        left.plot(q[:, 2], place, "o", color="white", markeredgecolor=colour, markersize=4.5)
        right.barh(2 - i, cold[method], color=colour, height=0.4)
        right.text(cold[method] + 1.0, 2 - i, f"{cold[method]:.{int(cold[method] < 10)}f} s", va="center")
    left.axvline(0.0, color="0.8", linewidth=1, zorder=0)
    left.set_yticks(np.arange(len(labels))[::-1], labels)
    left.set(title="Posterior: median, 50 % and 90 % intervals", xlabel="Effect on the log seizure rate")
    right.set_yticks([2, 1, 0], [label for label, _ in METHODS.values()])
    right.set(
        title="Seconds from a cold start",
        xlim=(0, 1.25 * cold[list(METHODS)].max()),
        xlabel="compiling, fitting, 2,000 draws",
    )
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Seizures of 59 patients: Poisson GLMM with random intercepts and slopes", fontsize=12)
    return figure


def save(figure):
    """Write the figure."""
    figure.savefig(HERE / "epilepsy.png", dpi=110)


if __name__ == "__main__":
    main()
