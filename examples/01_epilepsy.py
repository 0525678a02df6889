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
# # A GLMM against NUTS
#
# 59 people with epilepsy were given progabide or a placebo, and their seizures were counted in four periods of two
# weeks (Thall and Vail, 1990). Did the drug help? The usual model is a Poisson regression in which each patient has an
# intercept and a slope of their own: 126 parameters, 118 of them random effects.
#
# This notebook fits it by one option, puts the answer beside that of a long run of NUTS, and shows what a Gaussian
# alone would have said, and why it is not enough.

# %%
import logging

from pathlib import Path

import arviz_plots as azp
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm

import pymc_ngvi  # noqa: F401  (makes pm.fit know the method "ngvi")

logging.getLogger("pymc").setLevel(logging.WARNING)
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False})
DATA = Path("data")
table = pd.read_csv(DATA / "epilepsy.csv")

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharex=True, sharey=True, layout="constrained")
for ax, treated, arm in zip(axes, [0, 1], ["placebo", "progabide"], strict=True):
    for _, rows in table[table["trt"] == treated].groupby("subject"):
        ax.plot(rows["visit"], rows["seizures"], color="0.6", linewidth=0.8)
    median = table[table["trt"] == treated].groupby("visit")["seizures"].median()
    ax.plot(median.index, median, color="C3", linewidth=2.5, label="median")
    ax.set(title=arm, xlabel="period of two weeks", xticks=[1, 2, 3, 4], yscale="symlog")
axes[0].set_ylabel("seizures (symmetric log scale)")
_ = axes[0].legend(frameon=False, loc="upper left")

# %% [markdown]
# Patients differ much more than the arms do, and each has a level that lasts: this is what random intercepts are for.
#
# ## The model
#
# Nothing in it is particular to variational inference. The random effects are written in the non-centred form, `b = z *
# sd`, as one would for NUTS.

# %%
log_age = np.log(table["age"].to_numpy(dtype=float))
log_base, treated, visit = (table[c].to_numpy(dtype=float) for c in ("log_base4", "trt", "visit_code"))
design = np.column_stack([np.ones(len(table)), log_base, treated, log_base * treated, log_age - log_age.mean(), visit])
patient, patients = pd.factorize(table["subject"], sort=True)
coords = {
    "effect": ["intercept", "log baseline", "treatment", "baseline x treatment", "log age", "visit"],
    "term": ["intercept", "visit"],
    "patient": patients,
}

with pm.Model(coords=coords) as model:
    beta = pm.Normal("beta", 0, 10, dims="effect")
    sd = pm.HalfNormal("sd", 1, dims="term")
    z = pm.Normal("z", 0, 1, dims=("patient", "term"))
    b = pm.Deterministic("b", z * sd, dims=("patient", "term"))
    log_rate = design @ beta + b[patient, 0] + b[patient, 1] * visit
    pm.Poisson("seizures", pm.math.exp(log_rate), observed=table["seizures"].to_numpy())

# %% [markdown]
# ## The fit
#
# One option: `method="ngvi"`. There is no learning rate to choose and no number of iterations.

# %%
with model:
    approx = pm.fit(method="ngvi", random_seed=1, progressbar=False)

print(f"{approx.n_iterations} fits, ELBO {approx.elbo}")
print(approx.record.posterior)
print(approx.plan)

# %% [markdown]
# Given the two standard deviations, effects and coefficients are nearly Gaussian, which was expected from the graph of
# the model. So the standard deviations were sampled, at each of their values a Gaussian of all else was fitted, and
# both were weighted together. The plan has what else there was to choose from: the effects of each patient can be
# integrated out as well, 59 integrals in two dimensions.

# %%
print(approx.structure)

# %% [markdown]
# "Exact up to simulation error" is said only where all checks of the weights have been passed; `docs/exact.md` lists
# them. Otherwise another posterior would be tried, and the result might be the Gaussian of everything, with the reason.
# That Gaussian is made when it is asked for: `approx.gaussian`.

# %%
_ = approx.gaussian.plot_fit(tol=0.05)

# %% [markdown]
# ## Beside NUTS
#
# `data/epilepsy_nuts.csv` has moments and quantiles of 40,000 draws of NUTS from the same model
# (`data/epilepsy_nuts.py` makes it; its effective sample sizes are 740 or more). Errors are in standard deviations of
# the posterior.

# %%
nuts = pd.read_csv(DATA / "epilepsy_nuts.csv")


def flat_draws(approximation):
    """Return 8,000 draws of the eight global parameters, in the order of the table."""
    posterior = approximation.sample(8_000, random_seed=2, log_p=False)["posterior"]
    return np.concatenate([posterior[name].to_numpy()[0] for name in ("beta", "sd")], axis=1)


def compare(draws):
    """Return errors of means, and ratios of standard deviations, by parameter."""
    error = (draws.mean(axis=0) - nuts["mean"].to_numpy()) / nuts["sd"].to_numpy()
    ratio = draws.std(axis=0) / nuts["sd"].to_numpy()
    return np.column_stack([error, ratio])


draws, gaussian_draws = flat_draws(approx), flat_draws(approx.gaussian)
exact, gaussian = compare(draws), compare(gaussian_draws)
columns = pd.MultiIndex.from_product([["exact", "Gaussian"], ["error of mean / sd", "sd / sd of NUTS"]])
pd.DataFrame(np.hstack([exact, gaussian]), nuts["variable"] + ": " + nuts["label"], columns).round(2)

# %% [markdown]
# The exact posterior and NUTS agree within the errors of both. The Gaussian agrees for the six effects. For the two
# standard deviations among patients it has nearly the right means, but their spread is too small, and by a lot. That is
# no failure of the fit: the gap says that another Gaussian can gain less than .05 nats. Where a scale is small, the
# effects `z` that the data ask for are large: the posterior is curved, and a Gaussian can't follow a curve. What it
# says of itself:

# %%
print(f"Reliable? exact: {approx.diagnose().reliable}, Gaussian: {approx.gaussian.diagnose().reliable}")
print(approx.gaussian.diagnose().reasons[0])

# %%
levels = np.arange(1, 100) / 100
quantiles = nuts[[f"q{100 * level:02.0f}" for level in levels]].to_numpy()
fig, axes = plt.subplots(1, 3, figsize=(10, 3.6), layout="constrained", width_ratios=[1.5, 1, 1])
place = np.arange(6)[::-1]
for shift, found, colour, label in [
    (0.2, quantiles[:6], "0.6", "NUTS"),
    (0.0, np.quantile(draws, levels, axis=0).T[:6], "C0", "exact"),
    (-0.2, np.quantile(gaussian_draws, levels, axis=0).T[:6], "C1", "Gaussian"),
]:
    axes[0].hlines(place + shift, found[:, 4], found[:, 94], color=colour, linewidth=1.2)
    axes[0].hlines(place + shift, found[:, 24], found[:, 74], color=colour, linewidth=3.5, label=label)
axes[0].axvline(0, color="0.8", linewidth=1, zorder=0)
axes[0].set_yticks(place, coords["effect"])
axes[0].set(title="Effects: 50 % and 90 % intervals", xlabel="log seizure rate")
for ax, i, term in zip(axes[1:], [6, 7], coords["term"], strict=True):
    ax.plot(quantiles[i], levels, color="0.7", linewidth=5)
    ax.plot(np.quantile(draws[:, i], levels), levels, color="C0")
    ax.plot(np.quantile(gaussian_draws[:, i], levels), levels, color="C1", linestyle="--")
    ax.set(title=f"sd of patients' {term}", xlabel="sd (log rate)")
axes[1].set_ylabel("cumulative probability")
_ = fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)

# %% [markdown]
# In the two panels on the right, the steep dashed line is the Gaussian, sure of the scales beyond what the data say;
# the exact posterior lies on NUTS.
#
# ## Does the model fit?
#
# Draws go wherever those of `pm.sample` go. Here, the counts that the model would predict.

# %%
posterior = approx.sample(500, random_seed=4)
with model:
    pm.sample_posterior_predictive(posterior, extend_inferencedata=True, random_seed=5, progressbar=False)
_ = azp.plot_ppc_rootogram(posterior, backend="matplotlib", figure_kwargs={"figsize": (8, 3.2)})

# %% [markdown]
# Dots are the data. Most are within their bands; zeros are more frequent than the model expects, and ones less.
#
# ## Did the drug help?
#
# At a given baseline, the drug multiplies the rate of seizures by exp(treatment + interaction × log baseline).

# %%
baseline = np.array([8, 22, 60])  # seizures in eight weeks: about the quartiles of what the patients had
effect = np.exp(draws[:, [2]] + draws[:, [3]] * np.log(baseline / 4))
summary = pd.DataFrame(
    {
        "rate ratio, median": np.median(effect, axis=0),
        "5 %": np.quantile(effect, 0.05, axis=0),
        "95 %": np.quantile(effect, 0.95, axis=0),
        "P(fewer seizures)": (effect < 1).mean(axis=0),
    },
    index=pd.Index(baseline, name="baseline"),
)
summary.round(2)

# %% [markdown]
# A likely benefit for patients with few seizures, and none that the data can show for those with many.
#
# ## Checks
#
# What the text above says, as assertions.

# %%
assert approx.is_exact
# Four times the Monte Carlo errors of NUTS (.037 sd of a mean, .026 of a standard deviation) and of the draws (.015).
assert np.abs(exact[:, 0]).max() < 0.16
assert np.abs(exact[:, 1] - 1).max() < 0.13
# The Gaussian: effects as good, for scales of half to two thirds of the width.
assert np.abs(gaussian[:6, 0]).max() < 0.2
assert np.abs(gaussian[:6, 1] - 1).max() < 0.15
assert (gaussian[6:, 1] < 0.8).all()
assert approx.diagnose().reliable
assert not approx.gaussian.diagnose().reliable
replicated = posterior["posterior_predictive"]["seizures"].to_numpy()
for count, sign in [(0, 1), (1, -1)]:
    assert sign * ((table["seizures"] == count).mean() - (replicated == count).mean()) > 0.02
assert summary["P(fewer seizures)"].loc[8] > 0.9 > summary["P(fewer seizures)"].loc[60]

# %% [markdown]
# ## What to read next
#
# - `04_thousands_of_groups`: the same machinery with 1,500 groups.
# - `06_bad_fits`: how to notice a bad fit without NUTS at hand.
# - `docs/exact.md`: how the exact step works, what it checks, and what is out of its reach.
#
# P. F. Thall and S. C. Vail (1990). Some covariance models for longitudinal count data with overdispersion. Biometrics
# 46. <https://doi.org/10.2307/2532086>
#
# J. C. Naylor and A. F. M. Smith (1982). Applications of a method for the efficient computation of posterior
# distributions. JRSS C 31. <https://doi.org/10.2307/2347995>
