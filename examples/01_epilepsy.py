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
# # Does the drug work, and for whom?
#
# 59 people with epilepsy were given progabide or a placebo, and their seizures were counted in four periods of two
# weeks (Thall and Vail, 1990). Did the drug reduce seizures? And did it help those with few seizures as much as those
# with many?
#
# The answer comes from a Poisson regression in which each patient has an intercept and a slope of their own: 126
# parameters, 118 of them random effects. One option of `pm.fit` gives its posterior in seconds. At the end it stands
# beside a long run of NUTS, and beside a Gaussian approximation, which is not enough here.

# %%
from pathlib import Path

import arviz_plots as azp
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm

import pymc_ngvi  # noqa: F401  (makes pm.fit know the method "ngvi")

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
# The effect of the drug may depend on how many seizures a patient had in the eight weeks before, so there is an
# interaction. Nothing is particular to variational inference. The random effects are written in the non-centred form,
# `b = z * sd`, as one would for NUTS.

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

# %%
with model:
    approx = pm.fit(method="ngvi", random_seed=1, progressbar=False)

print(approx.summary())

# %% [markdown]
# The first line is the verdict: exact, up to Monte Carlo error. It is given only where all checks of the posterior have
# been passed. The draws can be used like those of `pm.sample`.
#
# ## The answer
#
# For a patient with a given baseline, the drug multiplies the rate of seizures by exp(treatment + interaction × log
# baseline).

# %%
posterior = approx.sample(8_000, random_seed=2)


def flat_draws(tree):
    """Return draws of the eight global parameters, chains one after the other."""
    return np.concatenate([np.concatenate(tree["posterior"][name].to_numpy()) for name in ("beta", "sd")], axis=1)


draws = flat_draws(posterior)
baseline = np.geomspace(6, 100, 60)
ratio = np.exp(draws[:, [2]] + draws[:, [3]] * np.log(baseline / 4))

fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
for lower, shade in [(0.05, 0.2), (0.25, 0.35)]:
    ax.fill_between(baseline, *np.quantile(ratio, [lower, 1 - lower], axis=0), color="C0", alpha=shade, linewidth=0)
ax.plot(baseline, np.median(ratio, axis=0), color="C0")
ax.axhline(1, color="0.4", linewidth=1)
ax.set(xscale="log", yscale="log", xlabel="seizures in the eight weeks before", ylabel="rate with drug / placebo")
ax.set_xticks([8, 22, 60], ["8", "22", "60"])
ax.set_yticks([0.4, 0.6, 0.8, 1, 1.5], ["0.4", "0.6", "0.8", "1", "1.5"])
ax.minorticks_off()
_ = ax.set_title("Effect of the drug: median, 50 % and 90 % intervals")

# %%
quartiles = np.array([8, 22, 60])  # about the quartiles of what the patients had
effect = np.exp(draws[:, [2]] + draws[:, [3]] * np.log(quartiles / 4))
summary = pd.DataFrame(
    {
        "rate ratio, median": np.median(effect, axis=0),
        "5 %": np.quantile(effect, 0.05, axis=0),
        "95 %": np.quantile(effect, 0.95, axis=0),
        "P(fewer seizures)": (effect < 1).mean(axis=0),
    },
    index=pd.Index(quartiles, name="baseline"),
)
summary.round(2)

# %% [markdown]
# **Probably for patients with few seizures; for those with many, the data do not tell.** With 8 seizures before, the
# drug is likely to halve the rate. With 60, it may as well raise it.
#
# ## Does the model fit?
#
# Counts that the model would predict, beside those that were observed:

# %%
few = approx.sample(500, random_seed=4)
with model:
    pm.sample_posterior_predictive(few, extend_inferencedata=True, random_seed=5, progressbar=False)
_ = azp.plot_ppc_rootogram(few, backend="matplotlib", figure_kwargs={"figsize": (8, 3.2)})

# %% [markdown]
# Dots are the data. Most are within their bands; zeros are more frequent than the model expects, and ones less.
#
# ## Is the posterior right?
#
# `data/epilepsy_nuts.csv` has moments and quantiles of 40,000 draws of NUTS from the same model
# (`data/epilepsy_nuts.py` makes it; its effective sample sizes are 740 or more). Errors are in standard deviations of
# the posterior. `approx.gaussian` is the best Gaussian for all 126 parameters.

# %%
nuts = pd.read_csv(DATA / "epilepsy_nuts.csv")


def compare(draws):
    """Return errors of means, and ratios of standard deviations, by parameter."""
    error = (draws.mean(axis=0) - nuts["mean"].to_numpy()) / nuts["sd"].to_numpy()
    ratio = draws.std(axis=0) / nuts["sd"].to_numpy()
    return np.column_stack([error, ratio])


gaussian_draws = flat_draws(approx.gaussian.sample(8_000, random_seed=2))
exact, gaussian = compare(draws), compare(gaussian_draws)
columns = pd.MultiIndex.from_product([["exact", "Gaussian"], ["error of mean / sd", "sd / sd of NUTS"]])
pd.DataFrame(np.hstack([exact, gaussian]), nuts["variable"] + ": " + nuts["label"], columns).round(2)

# %% [markdown]
# The exact posterior and NUTS agree within the errors of both. The Gaussian agrees for the six effects. For the two
# standard deviations among patients it has nearly the right means, but is too narrow, and by a lot. No other Gaussian
# does better: where a standard deviation is small, the effects `z` that the data ask for are large, so the posterior is
# curved, and a Gaussian cannot follow a curve. Its verdict says so:

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
# In the two panels on the right, the dashed line of the Gaussian is too steep; the exact posterior lies on NUTS.
#
# ## Checks
#
# What the text above says, as assertions.

# %%
assert approx.is_exact
assert abs(summary["rate ratio, median"].loc[8] - 0.5) < 0.05
assert summary["P(fewer seizures)"].loc[8] > 0.9 > summary["P(fewer seizures)"].loc[60]
replicated = few["posterior_predictive"]["seizures"].to_numpy()
for count, sign in [(0, 1), (1, -1)]:
    assert sign * ((table["seizures"] == count).mean() - (replicated == count).mean()) > 0.02
# Four times the Monte Carlo errors of NUTS (0.037 sd of a mean, 0.026 of a standard deviation) and of draws (0.015).
assert np.abs(exact[:, 0]).max() < 0.16
assert np.abs(exact[:, 1] - 1).max() < 0.13
# The Gaussian: effects as good, for standard deviations half to two thirds of the width.
assert np.abs(gaussian[:6, 0]).max() < 0.2
assert np.abs(gaussian[:6, 1] - 1).max() < 0.15
assert (gaussian[6:, 1] < 0.8).all()
assert approx.diagnose().reliable
assert not approx.gaussian.diagnose().reliable

# %% [markdown]
# ## What to read next
#
# - `03_bambi`: the same model as a formula, and predictions for new patients.
# - `04_thousands_of_groups`: the same machinery with 1,500 groups.
# - `06_bad_fits`: how to notice a bad fit without NUTS at hand.
# - `docs/posteriors.md`: which posterior a model gets, and what is checked.
#
# P. F. Thall and S. C. Vail (1990). Some covariance models for longitudinal count data with overdispersion. Biometrics
# 46. <https://doi.org/10.2307/2532086>
