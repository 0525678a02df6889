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
# # Neural networks
#
# A Bayesian neural network in plain PyMC, fitted with squares of gradients (VOGN): what the fit says of itself, what
# weights can't tell, predictive probabilities with their uncertainty beside NUTS, calibration on rows that were held
# out, minibatches, and predictions for new rows.

# %%
import logging
import textwrap
import warnings

from pathlib import Path

import arviz_plots as azp
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr

import pymc_ngvi

logging.getLogger("pymc").setLevel(logging.WARNING)
warnings.simplefilter("ignore", pymc_ngvi.ConvergenceWarning)  # what they say is printed below
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## Data
#
# Two half moons with noise: 1,000 rows for the fit and 1,000 to test it.


# %%
# The data.
def moons(n, rng):
    """Return points of two half moons, (n, 2), and which moon each is of."""
    label, angle = rng.integers(0, 2, n), rng.uniform(0, np.pi, n)
    first = np.where(label == 1, np.cos(angle), 1 - np.cos(angle)) - 0.5
    second = np.where(label == 1, np.sin(angle), 0.5 - np.sin(angle)) - 0.25
    return np.column_stack([first, second]) + rng.normal(0, 0.3, (n, 2)), label


rng = np.random.default_rng(1)
x_train, y_train = moons(1_000, rng)
x_test, y_test = moons(1_000, rng)
side = np.linspace(-3, 3, 31)
grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)

# %% [markdown]
# ## The network
#
# Eight tanh units with normal priors. It is a function, so that it can be used again: on all rows, on minibatches, on
# new rows. `shape=p.shape` gives predictions as many rows as the data have then.

# %%
# The model.
COORDS = {"input": ["first", "second"], "unit": range(8)}


def network(x, y, **options):
    """Add a network to the model."""
    w1 = pm.Normal("w1", 0, 1, dims=("input", "unit"))
    b1 = pm.Normal("b1", 0, 1, dims="unit")
    w2 = pm.Normal("w2", 0, 1, dims="unit")
    b2 = pm.Normal("b2", 0, 1)
    hidden = pm.math.tanh(x @ w1 + b1)
    p = pm.Deterministic("p", pm.math.sigmoid(hidden @ w2 + b2))
    pm.Bernoulli("y", p=p, observed=y, shape=p.shape, **options)


with pm.Model(coords=COORDS) as model:
    network(pm.Data("x", x_train), y_train)

# %% [markdown]
# ### Prior predictive
#
# Four networks of the prior, as maps of the probability of the first moon, and all probabilities of 500 of them on the
# grid. The prior allows boundaries of many shapes, few of them sharp.


# %%
def predict(draws, x, of=model):
    """Return the probabilities of each draw at the rows of x, (n_draws, n_rows)."""
    with of:
        pm.set_data({"x": x})
        made = pm.sample_posterior_predictive(draws, var_names=["p"], predictions=True, progressbar=False)
        pm.set_data({"x": x_train})
    return made.predictions["p"].to_numpy().reshape(-1, len(x))


def show(ax, values, title, **options):
    """Draw values on the grid."""
    drawn = ax.contourf(side, side, values.reshape(31, 31), **options)
    ax.set(title=title, aspect="equal", xticks=[-2, 0, 2], yticks=[-2, 0, 2])
    return drawn


with model:
    prior = pm.sample_prior_predictive(500, var_names=["w1", "b1", "w2", "b2"], random_seed=1)
of_prior = predict(xr.DataTree.from_dict({"posterior": prior["prior"].to_dataset()}), grid)
PROBABILITY = {"cmap": "RdBu_r", "levels": np.linspace(0, 1, 11)}
fig, axes = plt.subplots(1, 5, figsize=(12, 2.5), layout="constrained")
for k in range(4):
    drawn = show(axes[k], of_prior[k], f"prior draw {k + 1}", **PROBABILITY)
fig.colorbar(drawn, ax=axes[3], shrink=0.8, ticks=[0, 0.5, 1])
axes[4].hist(of_prior.ravel(), bins=30, density=True, color="0.6")
_ = axes[4].set(title="all 500 draws", xlabel="probability", yticks=[])

# %% [markdown]
# ## The fit
#
# One word beside the method. The default family is `"diagonal"`, which serves networks of any size; with some hundred
# weights, `"full"` can be had, too. Weights start at random, another way with each `random_seed`.

# %%
options = {"method": "ngvi", "estimator": "gauss_newton", "progressbar": False}
with model:
    diagonal = pm.fit(random_seed=1, **options)
    fits = [pm.fit(family="full", random_seed=seed, **options) for seed in (1, 2)]
for name, fit in zip(["diagonal", "full", "full, seed 2"], [diagonal, *fits], strict=True):
    print(f"{name}: {fit.status} after {fit.n_iterations} iterations, ELBO {fit.elbo}")

# %% [markdown]
# The ELBO tells fits of one model apart: the higher, the nearer q is to the posterior. What weights have to do with
# each other is worth several nats here. Take the best one of a few starts. What does it say of itself?

# %%
other, approx = sorted(fits, key=lambda fit: fit.elbo.value)
diagnosis = approx.diagnose(draws=2_000, random_seed=1)
print(f"Reliable: {diagnosis.reliable}")
for reason in diagnosis.reasons:
    print(textwrap.fill(f"- {reason}", 100, subsequent_indent="  "))

# %% [markdown]
# That is about means and standard deviations of *weights*. Two of the reasons say why there is little to be had from
# these: units can be exchanged, and change their signs together, and the network is the same.
#
# ## What weights can't tell
#
# Each unit of the first layer is a point in the plane below, larger the larger its weight in the second. Fits from
# other starts have other units in other places, and similar predictions: a table of posterior means of weights would be
# one of many tables. Units that are drawn small have nearly their prior: the fit has switched them off.

# %%
draws, of_other = approx.sample(1_000, random_seed=2), other.sample(1_000, random_seed=2)
p_test, p_other = predict(draws, x_test), predict(of_other, x_test)
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
for fit, colour, name in [(approx, "C0", "the best fit"), (other, "C1", "the other")]:
    means = fit.mean_data
    left.scatter(*means["w1"], s=10 + 60 * np.abs(means["w2"]), color=colour, alpha=0.7, label=name)
left.axhline(0, color="0.8", linewidth=1, zorder=0)
left.axvline(0, color="0.8", linewidth=1, zorder=0)
left.set(title="posterior means of the units", xlabel="weight of the first input", ylabel="of the second")
left.set_ylim(-2.7, 3.1)
left.legend(frameon=False, loc="upper center", ncols=2)
right.plot([0, 1], [0, 1], color="0.7", linewidth=1)
right.plot(p_test.mean(axis=0), p_other.mean(axis=0), ".", color="C0", markersize=3)
right.set(title="probabilities of the test rows", xlabel="the best fit", ylabel="the other", aspect="equal")
between = np.abs(p_test.mean(axis=0) - p_other.mean(axis=0))
print(f"predictive probabilities differ by {between.max():.3f} at most")

# %% [markdown]
# The same of one network, exactly: reverse the order of its units, and change the signs of the first four.

# %%
flip = np.repeat([-1, 1], 4)
posterior = draws["posterior"].to_dataset().drop_vars("p")
same = posterior.assign(
    {name: (posterior[name].dims, posterior[name].to_numpy()[..., ::-1] * flip) for name in ("w1", "b1", "w2")}
)
p_same = predict(xr.DataTree.from_dict({"posterior": same}), x_test)
print(f"the same networks in other words: probabilities differ by {np.abs(p_same - p_test).max():.1e}")

# %% [markdown]
# ## Decision boundary, beside NUTS
#
# `data/networks_nuts.csv` has predictive means and standard deviations of probabilities by NUTS, at the test rows and
# on the grid (`data/networks_nuts.py` makes it).

# %%
nuts = pd.read_csv(Path("data") / "networks_nuts.csv").set_index("at")
of_diagonal = diagonal.sample(1_000, random_seed=2)
rows = [(name, predict(of, grid)) for name, of in [("full", draws), ("diagonal", of_diagonal)]]
rows = [(name, p.mean(axis=0), p.std(axis=0)) for name, p in rows]
rows += [("NUTS", nuts.loc["grid", "mean"].to_numpy(), nuts.loc["grid", "sd"].to_numpy())]
fig, axes = plt.subplots(2, 3, figsize=(9, 5.4), layout="constrained")
for (name, mean, sd), (above, below) in zip(rows, axes.T, strict=True):
    drawn = show(above, mean, f"{name}: probability", **PROBABILITY)
    above.contour(side, side, mean.reshape(31, 31), [0.5], colors="k")
    spread = show(below, sd, f"{name}: its sd", cmap="viridis", levels=np.linspace(0, 0.4, 9))
axes[0, 0].plot(*x_train.T, ".", color="k", alpha=0.3, markersize=2, markeredgewidth=0)
fig.colorbar(drawn, ax=axes[0], shrink=0.75, ticks=[0, 0.5, 1])
_ = fig.colorbar(spread, ax=axes[1], shrink=0.75, ticks=[0, 0.2, 0.4])

# %% [markdown]
# Two lines through these maps, one among the data and one where there are none, with bands of one standard deviation:

# %%
fig, axes = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True, layout="constrained")
for ax, second, title in [(axes[0], 0.0, "among the data"), (axes[1], -2.4, "below all data")]:
    line = np.isclose(grid[:, 1], second)
    for (name, mean, sd), colour in zip(rows, ["C0", "C1", "0.3"], strict=True):
        ax.plot(side, mean[line], color=colour, label=name)
        ax.fill_between(side, mean[line] - sd[line], mean[line] + sd[line], color=colour, alpha=0.2, linewidth=0)
    ax.set(title=f"{title}: second input {second:g}", xlabel="first input", ylim=(-0.05, 1.05))
axes[0].set_ylabel("probability")
axes[0].legend(frameon=False)
sds = {}
for name, of in [("full", draws), ("diagonal", of_diagonal)]:
    sds[name] = predict(of, x_test).std(axis=0).mean() / nuts.loc["test", "sd"].mean()
    print(f"{name}: mean sd of the probabilities of test rows over that of NUTS {sds[name]:.2f}")
far = np.flatnonzero(np.isclose(grid, [-2.0, -2.4]).all(axis=1))[0]
for name, mean, sd in rows:
    print(f"{name} at (-2, -2.4), below all data: probability {mean[far]:.2f}, sd {sd[far]:.2f}")

# %% [markdown]
# Among the data, probabilities are right and their standard deviations half as large again. Where there are none, the
# dense covariance is nearer to NUTS, though q is about one way to arrange the units. With independent weights, q is too
# sure of where the boundary goes.
#
# ## Calibration on rows that were held out
#
# Of the test rows with a probability near .8, are 80 % of the first moon? ArviZ draws the curve, and its band, from
# labels that are drawn at the test rows.


# %%
with model:
    pm.set_data({"x": x_test})
    held_out = pm.sample_posterior_predictive(draws, var_names=["y"], random_seed=3, progressbar=False)
    pm.set_data({"x": x_train})
held_out["observed_data"] = xr.DataTree(xr.Dataset({"y": ("y_dim_0", y_test)}))
_ = azp.plot_ppc_pava(held_out, backend="matplotlib", figure_kwargs={"figsize": (5, 4)})

# %% [markdown]
# The curve (CEP: of the rows with such a prediction, the share that is of the first moon) stays within the band that it
# would have if the predictions were right.

# %% [markdown]
# ## Minibatches
#
# The same function, with batches of 128 rows and `total_size`. Draws of this fit have no `p`: it would be that of one
# batch. For predictions they go to a model with the same names, here the one from above.

# %%
with pm.Model(coords=COORDS):
    x, y = pm.Minibatch(x_train, y_train.astype(float), batch_size=128)
    network(x, y, total_size=len(y_train))
    in_batches = pm.fit(family="full", random_seed=1, **options)
print(f"{in_batches.status} after {in_batches.n_iterations} iterations")

# %% [markdown]
# ## All of them
#
# Losses on the test rows, in nats, and how far the probabilities are from those of NUTS.

# %%
p_batches = predict(in_batches.sample(1_000, random_seed=2), x_test)
means = {
    "diagonal": predict(of_diagonal, x_test).mean(axis=0),
    "full": p_test.mean(axis=0),
    "full, the other start": p_other.mean(axis=0),
    "full, minibatches": p_batches.mean(axis=0),
    "NUTS": nuts.loc["test", "mean"].to_numpy(),
}
table = pd.DataFrame(
    {
        "off, rms": {name: np.sqrt(np.mean((p - means["NUTS"]) ** 2)) for name, p in means.items()},
        "off, most": {name: np.abs(p - means["NUTS"]).max() for name, p in means.items()},
        "log loss": {name: -np.mean(np.log(np.where(y_test == 1, p, 1 - p))) for name, p in means.items()},
        "accuracy": {name: np.mean((p > 0.5) == y_test) for name, p in means.items()},
    }
)
table.round(3)

# %% [markdown]
# ## A new point
#
# One row or a thousand, it is the same call: one point among the data, and one far from all.

# %%
p_new = predict(draws, np.array([[0.5, 0.0], [-2.0, -2.4]]))
for p in p_new.T:
    print(f"probability {p.mean():.2f}, sd {p.std():.2f}")

# %% [markdown]
# ## Checks
#
# What the text above says, as assertions.

# %%
assert approx.elbo.value > diagonal.elbo.value + 3
assert not diagnosis.reliable
assert sum("equal modes" in reason for reason in diagnosis.reasons) == 2
assert np.abs(p_same - p_test).max() < 1e-12
assert table.loc["full", "off, rms"] < 0.02
assert table.loc["full", "log loss"] < table.loc["NUTS", "log loss"] + 0.01
assert table["accuracy"].between(0.9, 0.94).all()
assert min(sds.values()) > 1
assert rows[1][2][far] < 0.8 * rows[0][2][far]  # diagonal, full
assert list(in_batches.sample(1).posterior.data_vars) == ["w1", "b1", "w2", "b2"]

# %% [markdown]
# ## What to read next
#
# - `docs/models/networks.md`: how to write a network, what goes by layers, options.
# - `docs/experiments/khan.md`: the experiment of the paper, on two data sets.
# - `05_two_modes`: posteriors with more than one mode.
