"""Make the pictures of docs and of README.md: ``python docs/img/make.py`` from the root of the clone.

With names of pictures behind it (``khat structure``), these alone.
"""

import functools
import re
import sys

from pathlib import Path

import arviz_plots
import epilepsy
import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pymc as pm

from drawing import save

import pymc_ngvi  # noqa: F401  (makes pm.fit know the method "ngvi")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
build_model = epilepsy.epilepsy["build_model"]


@functools.cache
def fitted():
    """Return a Gaussian fit of the epilepsy GLMM, made once for all pictures: an exact posterior would lie on NUTS."""
    with build_model(pd.read_csv(ROOT / "examples" / "data" / "epilepsy.csv")):
        return pm.fit(method="ngvi", posterior="gaussian", random_seed=1, progressbar=False)


def fit():
    """Draw how the fit went."""
    save(fitted().plot_fit()[0].figure, HERE / "fit.png", 90, colours=128)


def khat():
    """Draw the importance weights."""
    save(fitted().plot_khat(random_seed=4).figure, HERE / "khat.png", 90, colours=128)


def comparison():
    """Draw the approximation beside NUTS that starts from it."""
    approx = fitted()
    nuts = pm.sample(tune=200, **approx.sampler_init(4, 2).kwargs(), random_seed=3, cores=1, progressbar=False)
    names = ["beta", "sd"]
    for kind in ("forest", "pair"):
        shown = names if kind != "pair" else ["beta[intercept]", "beta[treatment]", "sd[intercept]", "sd[visit]"]
        plot = approx.plot_comparison(nuts, shown, kind, random_seed=5)
        save(plot.viz["figure"].item(), HERE / f"comparison_{kind}.png", 90, colours=128)


def priors():
    """Draw the power scaling of eight schools."""
    effect, error = np.array([28.0, 8, -3, 7, -1, 1, 18, 12]), np.array([15.0, 10, 16, 11, 9, 11, 10, 18])
    with pm.Model():
        theta = pm.Normal("theta", pm.Normal("mu", 0, 5), pm.HalfCauchy("tau", 5), shape=8)
        pm.Normal("effect", theta, error, observed=effect)
        approx = pm.fit(method="ngvi", random_seed=1, progressbar=False)
    save(approx.plot_prior_sensitivity().viz["figure"].item(), HERE / "priors.png", 90, colours=128)


def contrasts():
    """Draw the forest of the page of contrasts, by its own code."""
    scope = {}
    for code in re.findall(r"```python\n(.*?)```", (HERE.parent / "predict.md").read_text("utf-8"), flags=re.DOTALL):
        if "difference" not in scope:
            exec(code, scope)
    plot = arviz_plots.plot_forest(scope["difference"], figure_kwargs={"figsize": (7, 3)})
    save(plot.viz["figure"].item(), HERE / "contrasts.png", 90, colours=128)


PICTURES = {f.__name__: f for f in (fit, khat, comparison, priors, contrasts)}
PICTURES["epilepsy"] = epilepsy.main


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
