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
# One word beside the method, and a random start: PyMC starts all weights at 0, where no unit differs from another.


# %%
def random_start(seed):
    """Return starting means of weights."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=model[name].shape.eval()) for name in ("w1", "b1", "w2")}


options = {"method": "ngvi", "estimator": "gauss_newton", "random_seed": 1, "progressbar": False}
with model:
    decay = pm.fit(step="decay", start=random_start(1), **options)
    fits = [pm.fit(step="proximal", start=random_start(seed), **options) for seed in (1, 2, 3)]
for name, fit in zip(["decay", "proximal", "start 2", "start 3"], [decay, *fits], strict=True):
    print(f"{name}: {fit.status} after {fit.n_iterations} iterations, ELBO {fit.elbo}")

# %% [markdown]
# The ELBO tells fits of one model apart: the higher, the nearer q is to the posterior. Steps that decay average over
# all iterations, those on the way included, which costs some nats here. Take the best one of a few starts. What does it
# say of itself?

# %%
other, *_, approx = sorted(fits, key=lambda fit: fit.elbo.value)
diagnosis = approx.diagnose(draws=2_000, random_seed=1)
print(f"Reliable: {diagnosis.reliable}")
for reason in diagnosis.reasons:
    print(textwrap.fill(f"- {reason}", 100, subsequent_indent="  "))

# %% [markdown]
# That is about means and standard deviations of *weights*. Two of the reasons say why there is little to be
# had from these: units can be exchanged, and change their signs together, and the network is the same. The gap is
# estimated with the same squares of gradients, and is an overestimate where these are larger than second derivatives:
# no start, and no other step rule that we tried, gave an ELBO that is more than 3 nats higher.
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
for fit, colour, name in [(approx, "C0", "the best fit"), (other, "C1", "the last of the three")]:
    means = fit.mean_data
    left.scatter(*means["w1"], s=10 + 60 * np.abs(means["w2"]), color=colour, alpha=0.7, label=name)
left.axhline(0, color="0.8", linewidth=1, zorder=0)
left.axvline(0, color="0.8", linewidth=1, zorder=0)
left.set(title="posterior means of the units", xlabel="weight of the first input", ylabel="of the second")
left.set_ylim(-2.7, 3.1)
left.legend(frameon=False, loc="upper center", ncols=2)
right.plot([0, 1], [0, 1], color="0.7", linewidth=1)
right.plot(p_test.mean(axis=0), p_other.mean(axis=0), ".", color="C0", markersize=3)
right.set(title="probabilities of the test rows", xlabel="the best fit", ylabel="the last of the three", aspect="equal")
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
p_grid = predict(draws, grid)
fig, axes = plt.subplots(1, 4, figsize=(12, 3.1), layout="constrained")
rows = [("fit", p_grid.mean(axis=0), p_grid.std(axis=0))]
rows += [("NUTS", nuts.loc["grid", "mean"].to_numpy(), nuts.loc["grid", "sd"].to_numpy())]
for k, (name, mean, sd) in enumerate(rows):
    drawn = show(axes[k], mean, f"{name}: probability", **PROBABILITY)
    axes[k].contour(side, side, mean.reshape(31, 31), [0.5], colors="k")
    spread = show(axes[2 + k], sd, f"{name}: its sd", cmap="viridis", levels=np.linspace(0, 0.4, 9))
axes[0].plot(*x_train.T, ".", color="k", alpha=0.3, markersize=2, markeredgewidth=0)
fig.colorbar(drawn, ax=axes[1], shrink=0.75, ticks=[0, 0.5, 1])
_ = fig.colorbar(spread, ax=axes[3], shrink=0.75, ticks=[0, 0.2, 0.4])

# %% [markdown]
# Two lines through these maps, one among the data and one where there are none, with bands of one standard deviation:

# %%
fig, axes = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True, layout="constrained")
for ax, second, title in [(axes[0], 0.0, "among the data"), (axes[1], -2.4, "below all data")]:
    line = np.isclose(grid[:, 1], second)
    for (name, mean, sd), colour in zip(rows, ["C0", "0.3"], strict=True):
        ax.plot(side, mean[line], color=colour, label=name)
        ax.fill_between(side, mean[line] - sd[line], mean[line] + sd[line], color=colour, alpha=0.2, linewidth=0)
    ax.set(title=f"{title}: second input {second:g}", xlabel="first input", ylim=(-0.05, 1.05))
axes[0].set_ylabel("probability")
axes[0].legend(frameon=False)
sd_test = p_test.std(axis=0) / nuts.loc["test", "sd"].to_numpy()
print(f"sd of the fit over that of NUTS: {np.median(sd_test):.2f} at the test rows (median)")
far = np.flatnonzero(np.isclose(grid, [-2.0, -2.4]).all(axis=1))[0]
for name, mean, sd in rows:
    print(f"{name} at (-2, -2.4), below all data: probability {mean[far]:.2f}, sd {sd[far]:.2f}")

# %% [markdown]
# Among the data, probabilities are right and their standard deviations too large: q has independent weights, and what
# the posterior knows of their combinations is lost. Where there are no data, q is too sure of where the boundary goes:
# it is about one way to arrange the units, and does not see what others say there.

# %% [markdown]
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
    in_batches = pm.fit(step="proximal", start=random_start(1), **options)
print(f"{in_batches.status} after {in_batches.n_iterations} iterations")
p_batches = predict(in_batches.sample(1_000, random_seed=2), x_test)

# %% [markdown]
# ## All of them
#
# Losses on the test rows, in nats, and how far the probabilities are from those of NUTS.

# %%
table = {}
for name, p in {
    "decay": predict(decay.sample(1_000, random_seed=2), x_test),
    "proximal, best start": p_test,
    "proximal, last of three": p_other,
    "proximal, minibatches": p_batches,
}.items():
    off = p.mean(axis=0) - nuts.loc["test", "mean"].to_numpy()
    table[name] = {"mean": p.mean(axis=0), "off, rms": np.sqrt(np.mean(off**2)), "off, most": np.abs(off).max()}
table["NUTS"] = {"mean": nuts.loc["test", "mean"].to_numpy(), "off, rms": 0.0, "off, most": 0.0}
for row in table.values():
    p = row.pop("mean")
    row["log loss"] = -np.mean(np.log(np.where(y_test == 1, p, 1 - p)))
    row["accuracy"] = np.mean((p > 0.5) == y_test)
table = pd.DataFrame(table).T
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
best, of_nuts = table.loc["proximal, best start"], table.loc["NUTS"]
assert approx.elbo.value > decay.elbo.value
assert not diagnosis.reliable
assert sum("equal modes" in reason for reason in diagnosis.reasons) == 2
assert np.abs(p_same - p_test).max() < 1e-12
assert best["off, rms"] < 0.05
assert best["log loss"] < of_nuts["log loss"] + 0.02
assert table["accuracy"].between(0.9, 0.94).all()
assert np.median(sd_test) > 1
assert rows[0][2][far] < rows[1][2][far]
assert list(in_batches.sample(1).posterior.data_vars) == ["w1", "b1", "w2", "b2"]

# %% [markdown]
# ## What to read next
#
# - `docs/models/networks.md`: how to write a network, what goes by layers, options.
# - `docs/experiments/vogn.md`: the experiment of the paper, on two data sets.
# - `05_two_modes`: posteriors with more than one mode.
