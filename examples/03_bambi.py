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
# # Models from formulas, with Bambi
#
# [Bambi](https://bambinos.github.io/bambi/) builds PyMC models from formulas. One option of its `fit` gives their
# posterior by this package, in Bambi's own parameters, and its functions go on from there. The data are those of
# `01_epilepsy`, and so is the model; here it takes one line.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import pymc_ngvi  # noqa: F401  (makes pm.fit know the method "ngvi")

try:
    import bambi as bmb
except ImportError:
    print("This notebook needs Bambi: pip install bambi")
    raise SystemExit(0) from None

plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False})
table = pd.read_csv(Path("data") / "epilepsy.csv").astype({"subject": str})
table["log_age"] = np.log(table["age"])
table[["subject", "seizures", "log_base4", "trt", "log_age", "visit_code"]].head(3)

# %% [markdown]
# Options go where they go in `pm.fit`, and none is needed.

# %%
formula = "seizures ~ log_base4 * trt + log_age + visit_code + (visit_code | subject)"
model = bmb.Model(formula, table, family="poisson")
approx = model.fit(inference_method="vi", method="ngvi", random_seed=1, progressbar=False)
print(approx.summary())

# %% [markdown]
# Inside the model, Bambi subtracts the means of the predictors. The intercept above is that of the formula all the
# same: the log rate where all predictors are zero, as after `model.fit()` by NUTS. So `predict` can take the draws as
# they are:

# %%
posterior = approx.sample(4_000, random_seed=3)
model.predict(posterior, kind="response_params")
print(f"mean of the predicted rates {float(posterior['posterior']['mu'].mean()):.2f}")
print(f"mean of the observed counts {table['seizures'].mean():.2f}")

# %% [markdown]
# ## Estimates
#
# The priors of the effects are Bambi's, which are chosen by the scale of the data, so that the estimates are close to
# those in `01_epilepsy` and not equal to them. NUTS is the long run that is described there.

# %%
nuts = pd.read_csv(Path("data") / "epilepsy_nuts.csv").set_index(["variable", "label"])
names = {
    "log_base4": ("beta", "log baseline"),
    "trt": ("beta", "treatment"),
    "log_base4:trt": ("beta", "baseline x treatment"),
    "log_age": ("beta", "log age"),
    "visit_code": ("beta", "visit"),
    "1|subject_sigma": ("sd", "intercept"),
    "visit_code|subject_sigma": ("sd", "visit"),
}
moments = pd.DataFrame(
    {
        "mean": [float(posterior["posterior"][name].mean()) for name in names],
        "sd": [float(posterior["posterior"][name].std()) for name in names],
        "NUTS mean": nuts.loc[list(names.values()), "mean"].to_numpy(),
        "NUTS sd": nuts.loc[list(names.values()), "sd"].to_numpy(),
    },
    index=list(names),
)
moments.round(2)

# %% [markdown]
# ## Predictions for new patients
#
# `predict` takes new data. With `include_group_specific=False` the random effects are left out: what a *typical*
# patient does. The mean over *all* patients is higher, since the mean of an exponential is above the exponential of the
# mean: for normal effects of variance v by the factor exp(v / 2), and v is $s_1^2 + s_2^2 t^2$ at visit code t.

# %%
baseline = np.geomspace(6, 150, 40)
new = pd.DataFrame(
    {
        "log_base4": np.tile(np.log(baseline / 4), 2),
        "trt": np.repeat([0, 1], len(baseline)),
        "log_age": table["log_age"].mean(),
        "visit_code": 0.0,
        "subject": "someone new",
    }
)
predicted = model.predict(posterior, data=new, include_group_specific=False, inplace=False)
rate = predicted["posterior"]["mu"].to_numpy().reshape(-1, 2, len(baseline))  # all chains
s1 = predicted["posterior"]["1|subject_sigma"].to_numpy().ravel()
overall = rate * np.exp(s1**2 / 2)[:, None, None]

fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True, sharey=True, layout="constrained")
for ax, values, title in zip(axes, [rate, overall], ["a typical patient", "the mean over patients"], strict=True):
    for arm, (colour, label) in enumerate([("C0", "placebo"), ("C3", "progabide")]):
        low, middle, high = np.quantile(values[:, arm], [0.05, 0.5, 0.95], axis=0)
        ax.plot(baseline, middle, color=colour, label=label)
        ax.fill_between(baseline, low, high, color=colour, alpha=0.2, linewidth=0)
    ax.set(title=title, xlabel="seizures in the eight weeks before", xscale="log", yscale="log")
    ax.set_xticks([10, 30, 100], ["10", "30", "100"])
    ax.set_yticks([1, 3, 10, 30], ["1", "3", "10", "30"])
    ax.minorticks_off()
axes[0].set_ylabel("seizures in two weeks")
_ = axes[0].legend(frameon=False)
ratio = overall.mean() / rate.mean()
print(f"mean over patients / typical patient: {ratio:.2f}")

# %% [markdown]
# Bands are 90 % intervals. Where the drug helps is as in `01_epilepsy`: with few seizures before.
#
# ## Checks
#
# What the text above says, as assertions.

# %%
assert approx.is_exact
fitted = float(posterior["posterior"]["mu"].mean())
assert abs(fitted / table["seizures"].mean() - 1) < 0.05
# Bambi's priors are weak, but not those of the reference.
assert ((moments["mean"] - moments["NUTS mean"]).abs() < 0.5 * moments["NUTS sd"]).all()
assert (moments["sd"] / moments["NUTS sd"]).between(0.75, 1.2).all()
assert 1.1 < ratio < 1.3

# %% [markdown]
# ## What to read next
#
# - `01_epilepsy`: the same model in PyMC, and how its fit compares with NUTS.
# - `04_thousands_of_groups`: more groups.
# - `docs/choosing.md`: the options that `model.fit` hands on.
