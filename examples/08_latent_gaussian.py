# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Latent Gaussian models: a map, a Gaussian process, a latent path
#
# Risks of neighbouring areas, a surface over a plane, a volatility that moves from day to day: each is many latent
# variables that are Gaussian once a few hyperparameters are known. The hyperparameters are sampled, and for each of
# their values the latent variables get a Gaussian of their own. Nothing has to be declared for this. Below, each of the
# three is put beside a run of NUTS.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm

from matplotlib.collections import PolyCollection
from scipy.spatial import Voronoi
from scipy.special import expit

import pymc_ngvi  # noqa: F401  (makes pm.fit know the method "ngvi")

plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# `data/latent_nuts.csv` has moments and quantiles of the same three posteriors by NUTS (`data/latent_nuts.py` makes
# it), and the effective sample size of each.

# %%
nuts = pd.read_csv(Path("data") / "latent_nuts.csv")


def beside_nuts(name, approx, variables, latent, *, gaussian=True):
    """Return a table of hyperparameters, and the errors of latent variables in standard deviations of NUTS.

    gaussian : bool, default True
        Whether to put the Gaussian fit of everything beside them, which is made for it.
    """
    theirs = nuts[nuts["model"] == name].set_index("variable")
    draws = approx.sample(8_000, random_seed=2).posterior
    table = pd.DataFrame(
        {
            "mean": [float(draws[v].mean()) for v in variables],
            "NUTS mean": theirs.loc[variables, "mean"].to_numpy(),
            "sd": [float(draws[v].std()) for v in variables],
            "NUTS sd": theirs.loc[variables, "sd"].to_numpy(),
            "NUTS ESS": theirs.loc[variables, "ess"].round().astype(int).to_numpy(),
        },
        index=variables,
    )
    if gaussian:
        alone = approx.gaussian.sample(8_000, random_seed=2).posterior
        table.insert(4, "Gaussian sd", [float(alone[v].std()) for v in variables])
    mean, sd = (theirs.loc[latent, column].to_numpy() for column in ("mean", "sd"))
    own = draws[latent].to_numpy().reshape(-1, len(mean))
    off = np.sqrt(np.mean(((own.mean(axis=0) - mean) / sd) ** 2)), np.sqrt(np.mean((own.std(axis=0) / sd - 1) ** 2))
    return table, off


# %% [markdown]
# ## Disease mapping
#
# Counts of a disease in 120 areas of a map, with the counts that would be expected by age and sex. Relative risks have
# a part that neighbours share and a part of each area's own: the model of Besag, York and Mollié in the form of Riebler
# and others (2016), BYM2. `sd` is the standard deviation of log risks, `share` the part of the variance that is
# spatial.

# %%
# The model.
rng = np.random.default_rng(4)
n_areas = 120
centres = rng.uniform(size=(n_areas, 2))
# Mirror images beyond the four sides make all cells end at the sides.
images = [centres * flip + shift for flip, shift in [((-1, 1), 0), ((1, -1), 0), ((-1, 1), (2, 0)), ((1, -1), (0, 2))]]
cells = Voronoi(np.concatenate([centres, *images]))
borders = cells.ridge_points[(cells.ridge_points < n_areas).all(axis=1)]
neighbours = np.zeros((n_areas, n_areas))
neighbours[borders[:, 0], borders[:, 1]] = neighbours[borders[:, 1], borders[:, 0]] = 1

inverse = np.linalg.pinv(np.diag(neighbours.sum(axis=1)) - neighbours, rcond=1e-9, hermitian=True)
typical = np.exp(np.log(np.diag(inverse)).mean())  # variance of the spatial part of a typical area
values, vectors = np.linalg.eigh(inverse)
spatial = vectors @ (np.sqrt(np.maximum(values, 0)) * rng.normal(size=n_areas)) / np.sqrt(typical)
truth = 0.5 * (np.sqrt(0.7) * spatial + np.sqrt(0.3) * rng.normal(size=n_areas))
expected = rng.uniform(3, 30, n_areas)
cases = rng.poisson(expected * np.exp(truth))

with pm.Model(coords={"area": np.arange(n_areas)}) as areas:
    level = pm.Normal("level", 0, 1)
    sd = pm.HalfNormal("sd", 1)
    share = pm.Beta("share", 1, 1)
    shared = pm.ICAR("shared", W=neighbours, dims="area")
    own = pm.Normal("own", 0, 1, dims="area")
    mixed = pm.math.sqrt(share / typical) * shared + pm.math.sqrt(1 - share) * own
    log_risk = pm.Deterministic("log_risk", level + sd * mixed, dims="area")
    pm.Poisson("cases", expected * pm.math.exp(log_risk), observed=cases, dims="area")

# %%
with areas:
    of_map = pm.fit(method="ngvi", random_seed=1, progressbar=False)

print(of_map.record.posterior)

# %%
table, map_off = beside_nuts("areas", of_map, ["level", "sd", "share"], "log_risk")
print(f"log risks: means are off by {map_off[0]:.3f} sd, sds by {100 * map_off[1]:.1f} % (root mean squares)")
map_table = table
table.round(3)

# %%
risks = np.concatenate(of_map.sample(2_000, random_seed=3).posterior["log_risk"].to_numpy())
polygons = [cells.vertices[cells.regions[cells.point_region[i]]] for i in range(n_areas)]
fig, axes = plt.subplots(1, 4, figsize=(11, 2.9), layout="constrained")
top = np.abs(np.log(np.maximum(cases, 0.5) / expected)).max()
panels = [
    ("log of cases / expected", np.log(np.maximum(cases, 0.5) / expected), "RdBu_r", (-top, top)),
    ("log risk, posterior mean", risks.mean(axis=0), "RdBu_r", (-top, top)),
    ("log risk, truth", truth, "RdBu_r", (-top, top)),
    ("probability of a risk above 1", (risks > 0).mean(axis=0), "PuOr_r", (0, 1)),
]
for ax, (title, colour, cmap, limits) in zip(axes, panels, strict=True):
    drawn = PolyCollection(polygons, array=colour, cmap=cmap, clim=limits, edgecolors="white", linewidths=0.5)
    ax.add_collection(drawn)
    ax.set(title=title, xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=[], yticks=[])
    for side in ax.spines.values():
        side.set_visible(False)
    if ax in axes[2:]:
        fig.colorbar(drawn, ax=ax, shrink=0.7)

# %% [markdown]
# The first three maps have the same colours. Raw ratios of areas with few expected cases are extreme; the posterior
# means are pulled towards those of the neighbours.
#
# ## Classification by a Gaussian process
#
# 80 points in a plane, in two classes. Neither the length over which the surface changes nor its size is known. With an
# unknown kernel, log p is no sum over rows until the hyperparameters are given, so there is no Gaussian fit of
# everything before: `approx.gaussian` is made when it is asked for.

# %%
# The model.
rng = np.random.default_rng(2)
points = rng.uniform(-2, 2, (80, 2))
red = rng.binomial(1, expit(3 * np.cos(1.92 * np.hypot(*points.T))))

with pm.Model() as classes:
    length = pm.InverseGamma("length", 3, 3)
    size = pm.HalfNormal("size", 3)
    process = pm.gp.Latent(cov_func=size**2 * pm.gp.cov.Matern52(2, ls=length))
    surface = process.prior("surface", X=points)
    pm.Bernoulli("red", logit_p=surface, observed=red)

# %%
with classes:
    of_classes = pm.fit(method="ngvi", random_seed=1, progressbar=False)

print(of_classes.record.posterior)

# %%
classes_table, classes_off = beside_nuts("classes", of_classes, ["length", "size"], "surface", gaussian=False)
print(f"surface: means are off by {classes_off[0]:.3f} sd, sds by {100 * classes_off[1]:.1f} % (root mean squares)")
classes_table.round(3)

# %% [markdown]
# Standard deviations of the surface are less near to those of NUTS than those of the map: each point has one binary
# observation, and the Monte Carlo error of NUTS is about 2 % here.
#
# Predictions at new points are made as after NUTS: the conditional of the process, and draws of it given those of the
# fit.

# %%
side = np.linspace(-2, 2, 19)
grid = np.stack(np.meshgrid(side, side, indexing="ij"), axis=-1).reshape(-1, 2)
draws = of_classes.sample(100, random_seed=3)
with classes:
    process.conditional("at_grid", grid, jitter=1e-5)
    predicted = pm.sample_posterior_predictive(draws, var_names=["at_grid"], random_seed=4, progressbar=False)
probability = expit(predicted.posterior_predictive["at_grid"].to_numpy()).mean(axis=(0, 1)).reshape(len(side), -1)

fig, ax = plt.subplots(figsize=(5.6, 4.6), layout="constrained")
filled = ax.contourf(side, side, probability.T, np.linspace(0, 1, 11), cmap="RdBu_r")
ax.contour(side, side, probability.T, [0.5], colors="k", linewidths=1.8)
true = 3 * np.cos(1.92 * np.hypot(*grid.T)).reshape(len(side), -1)
ax.contour(side, side, true.T, [0], colors="k", linewidths=1, linestyles="--")
for label, colour in [(0, "C0"), (1, "C3")]:
    ax.plot(*points[red == label].T, "o", color=colour, markeredgecolor="white", markersize=6)
ax.set(title="boundary: fitted (solid), true (dashed)", xlabel="$x_1$", ylabel="$x_2$", aspect="equal")
_ = fig.colorbar(filled, label="probability of red")

# %% [markdown]
# ## Stochastic volatility
#
# 400 daily returns, whose log variance is a random walk. How fast it moves, `step`, is the hyperparameter, and the one
# that a Gaussian of everything at once knows far too well.

# %%
# The model.
rng = np.random.default_rng(3)
log_variance = np.cumsum(rng.normal(0, 0.15, 400))
returns = np.exp(log_variance / 2) * rng.normal(size=400)

with pm.Model(coords={"day": np.arange(400)}) as volatility:
    step = pm.Exponential("step", 10)
    path = pm.GaussianRandomWalk("path", sigma=step, init_dist=pm.Normal.dist(0, 3), dims="day")
    pm.Normal("returns", 0, pm.math.exp(path / 2), observed=returns, dims="day")

# %%
with volatility:
    of_path = pm.fit(method="ngvi", random_seed=1, progressbar=False)

print(of_path.record.posterior)

# %%
table, path_off = beside_nuts("volatility", of_path, ["step"], "path")
print(f"path: means are off by {path_off[0]:.3f} sd, sds by {100 * path_off[1]:.1f} % (root mean squares)")
path_table = table
table.round(3)

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(12, 3.6), width_ratios=[2.2, 1], layout="constrained")
draws = of_path.sample(4_000, random_seed=5).posterior
low, middle, high = np.quantile(np.exp(np.concatenate(draws["path"].to_numpy()) / 2), [0.05, 0.5, 0.95], axis=0)
left.plot(np.abs(returns), ".", color="0.7", markersize=4, label="absolute returns")
left.fill_between(np.arange(400), low, high, color="C0", alpha=0.3, label="90 % interval")
left.plot(middle, color="C0", label="posterior median")
left.plot(np.exp(log_variance / 2), "k--", linewidth=1, label="truth")
left.set(xlabel="day", ylabel="volatility", yscale="log", ylim=(0.02, None))
left.legend(frameon=False, ncols=2, fontsize=8)
bins = np.linspace(0.05, 0.3, 41)
alone = of_path.gaussian.sample(4_000, random_seed=5).posterior
right.hist(draws["step"].to_numpy().ravel(), bins, density=True, color="C0", alpha=0.4, label="nested")
right.hist(alone["step"].to_numpy().ravel(), bins, density=True, histtype="step", color="C1", label="Gaussian alone")
by_nuts = nuts[nuts["model"].eq("volatility") & nuts["variable"].eq("step")].iloc[0]
levels = [f"q{level:02d}" for level in range(5, 100, 5)]
ends = by_nuts[levels].to_numpy(dtype=float)
right.plot((ends[1:] + ends[:-1]) / 2, 0.05 / np.diff(ends), "k.-", linewidth=1, label="NUTS")
right.set(xlabel="step", ylabel="density", ylim=(0, 25))
_ = right.legend(frameon=False, fontsize=8)

# %% [markdown]
# NUTS has trouble with `step`: the table has its effective sample size. The density of the Gaussian alone, cut off at
# the top, has a fraction of the width.
#
# ## Checks
#
# What the text above says, as assertions. Errors of means are allowed four Monte Carlo errors of NUTS and of 8,000
# draws, and .05 sd for the approximation.

# %%
for approx in (of_map, of_classes, of_path):
    assert approx.is_nested
    assert approx.checks.is_reliable
for table in (map_table, classes_table, path_table):
    error = np.sqrt(1 / table["NUTS ESS"] + 1 / 8_000)
    assert ((table["mean"] - table["NUTS mean"]).abs() < 4 * error * table["NUTS sd"] + 0.05 * table["NUTS sd"]).all()
for off in (map_off, classes_off, path_off):
    assert max(off) < 0.1
assert path_table.loc["step", "Gaussian sd"] < 0.4 * path_table.loc["step", "NUTS sd"]
assert np.corrcoef(risks.mean(axis=0), truth)[0, 1] > 0.8

# %% [markdown]
# ## What to read next
#
# - `docs/exact.md`: how it is done, what "approximate" means, and which models are recognised.
# - `docs/models/crossed.md`: crossed effects, larger maps, longer paths.
# - `01_epilepsy`: groups, whose posteriors are exact.
#
# A. Riebler, S. H. Sørbye, D. Simpson and H. Rue (2016). An intuitive Bayesian spatial model for disease mapping that
# accounts for scaling. Statistical Methods in Medical Research 25(4). <https://doi.org/10.1177/0962280216660421>
