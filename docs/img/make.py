"""Make the pictures of docs/plots.md and docs/index.md: ``python docs/img/make.py`` from the root of the clone.

With names of pictures behind it (``landing``), these alone.
"""

import io
import runpy
import sys

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pymc as pm

from matplotlib import pyplot
from PIL import Image
from scipy.stats import gaussian_kde

import pymc_ngvi  # noqa: F401  (makes pm.fit know the method "ngvi")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
build_model = runpy.run_path(str(ROOT / "examples" / "epilepsy.py"))["build_model"]


def two_modes():
    """Return a model whose posterior has two modes."""
    with pm.Model() as model:
        location = pm.Normal("location", 0.0, 3.0, shape=2)
        scale = pm.HalfNormal("scale", 1.0)
        data = np.concatenate([np.random.default_rng(1).normal(at, 0.5, 40) for at in (-1.0, 1.0)])
        pm.NormalMixture("y", w=[0.5, 0.5], mu=location, sigma=scale, observed=data)
    return model


def save(figure, name):
    """Write a figure as a small file, of 128 colours."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=90)
    Image.open(buffer).convert("RGB").quantize(128).save(HERE / f"{name}.png", optimize=True)
    pyplot.close("all")


def landing():
    """Draw marginal posteriors of the epilepsy GLMM by NUTS, by this package and by mean-field ADVI."""
    with build_model(pd.read_csv(ROOT / "examples" / "data" / "epilepsy.csv")):
        ours = pm.fit(method="ngvi", reparam="rvb2", random_seed=1, progressbar=False)
        nuts = pm.sample(1_000, tune=500, chains=4, random_seed=3, cores=1, progressbar=False)
        advi = pm.fit(30_000, method="advi", random_seed=1, progressbar=False).sample(4_000, random_seed=2)
    shown = [("beta", "treatment", "effect of the treatment"), ("beta", "visit", "effect of the visit")]
    shown += [("sd", "intercept", "sd of the intercepts"), ("sd", "visit", "sd of the slopes")]
    drawn = {"NUTS": nuts, "ngvi": ours.sample(4_000, random_seed=2, log_p=False), "ADVI": advi}
    styles = {"NUTS": ("0.25", 4.0, 0.5), "ngvi": ("C0", 1.8, 1.0), "ADVI": ("C1", 1.8, 1.0)}
    figure, axes = pyplot.subplots(1, 4, figsize=(9.5, 2.6), layout="constrained")
    for ax, (variable, entry, title) in zip(axes, shown, strict=True):
        for name, tree in drawn.items():
            array = tree.posterior[variable]
            [dim] = [d for d in array.dims if d not in ("chain", "draw")]
            values = array.sel({dim: entry}).values.ravel()
            low, high = np.quantile(values, [0.001, 0.999])
            grid = np.linspace(low, high, 200)
            color, width, alpha = styles[name]
            ax.plot(grid, gaussian_kde(values)(grid), color=color, lw=width, alpha=alpha, label=name)
        ax.set(title=title, yticks=[])
        ax.spines[["left", "top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    save(figure, "landing")


def main():
    """Fit the epilepsy GLMM and a mixture, and draw."""
    with build_model(pd.read_csv(ROOT / "examples" / "data" / "epilepsy.csv")):
        approx = pm.fit(method="ngvi", random_seed=1, progressbar=False)
        nuts = pm.sample(tune=200, **approx.sampler_init(4, 2).kwargs(), random_seed=3, cores=1, progressbar=False)
    save(approx.plot_fit()[0].figure, "fit")
    save(approx.plot_khat(random_seed=4).figure, "khat")
    names = ["beta", "sd"]
    for kind in ("forest", "dist", "pair"):
        shown = names if kind != "pair" else ["beta[intercept]", "beta[treatment]", "sd[intercept]", "sd[visit]"]
        plot = approx.plot_comparison(nuts, shown, kind, random_seed=5)
        save(plot.viz["figure"].item(), f"comparison_{kind}")
    save(approx.plot_structure().figure, "structure")
    with two_modes():
        mixture = pm.fit(method="ngvi", family="mixture", random_seed=1, progressbar=False)
    save(mixture.plot_components(["location"], random_seed=6)[0, 0].figure, "components")


if __name__ == "__main__":
    if "landing" in sys.argv[1:]:
        landing()
    else:
        main()
        landing()
