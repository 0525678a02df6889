"""Make the pictures of docs/plots.md: ``python docs/img/make.py`` from the root of the clone."""

import io
import runpy

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pymc as pm

from matplotlib import pyplot
from PIL import Image

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
    main()
