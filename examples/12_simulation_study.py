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
# # A simulation study: how many clinics does a trial need?
#
# A treatment is to be given in half of the clinics that take part. Patients of a clinic are alike, so what counts is
# the number of clinics more than that of patients. A simulation study tells what a design can show: simulate data,
# fit the model, look at the intervals, many times. `pymc_ngvi.fit_many` reads the model once and fits it to all data
# sets; `pymc_ngvi.calibrate` asks whether its intervals can be believed; `approx.leave_out` compares models on the
# data that the trial has in the end.

# %%
import logging
import time

import arviz as az
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm

import pymc_ngvi

logging.getLogger("pymc").setLevel(logging.ERROR)
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## The model
#
# Each clinic has a level of its own; the treatment adds the same to the log odds of recovery in all treated clinics.
# The prior of the effect is sceptical: centred at 0, with most of it between odds ratios of 1/4 and 4.


# %%
def trial(n_clinics, n_patients):
    """Return the model of a trial; its data are to be simulated."""
    clinic = np.repeat(np.arange(n_clinics), n_patients)
    treated = (clinic % 2).astype(float)
    with pm.Model(coords={"clinic": np.arange(n_clinics)}) as model:
        level = pm.Normal("level", 0, 1.5)
        effect = pm.Normal("effect", 0, 0.7)
        sd = pm.HalfNormal("sd", 0.7)
        u = pm.Normal("u", 0, sd, dims="clinic")
        chance = pm.math.sigmoid(level + effect * treated + u[clinic])
        pm.Deterministic("risk difference", pm.math.sigmoid(level + effect) - pm.math.sigmoid(level))
        pm.Bernoulli("recovered", p=chance, observed=np.zeros(len(clinic), dtype=int))
    return model, clinic, treated


def simulated(clinic, treated, rng, level=-0.4, effect=0.8, sd=0.5):
    """Return data of a trial with these true values."""
    u = rng.normal(0, sd, size=clinic.max() + 1)
    return rng.binomial(1, 1 / (1 + np.exp(-(level + effect * treated + u[clinic]))))


# %% [markdown]
# ## Three designs with 480 patients each
#
# Twelve clinics of 40 patients, 24 of 20, 48 of 10; for each of them, 60 trials with a true effect of .8, an odds ratio
# of 2.2.

# %%
TRUE, N_TRIALS = {"level": -0.4, "effect": 0.8, "sd": 0.5}, 60
designs = {(12, 40): None, (24, 20): None, (48, 10): None}
for design in designs:
    model, clinic, treated = trial(*design)
    rng = np.random.default_rng(design[0])
    start = time.perf_counter()
    data = [{"recovered": simulated(clinic, treated, rng)} for _ in range(N_TRIALS)]
    designs[design] = pymc_ngvi.fit_many(model, data, prob=0.95, random_seed=1, progressbar=False)
    print(design, designs[design], f"{(time.perf_counter() - start) / N_TRIALS:.2f} s each")

# %% [markdown]
# The table is an xarray Dataset over `fit`. Power is how often the 95 % interval of the effect lies above 0; coverage
# is how often it holds the truth. Both are shares of 60 trials, with a standard error of .03 to .06.


# %%
def shares(many):
    """Return power, coverage and the width of intervals of the effect."""
    effect = many.dataset["effect"]
    lower, upper = effect.sel(statistic="lower"), effect.sel(statistic="upper")
    return {
        "power": float((lower > 0).mean()),
        "coverage": float(((lower < TRUE["effect"]) & (upper > TRUE["effect"])).mean()),
        "mean of means": float(effect.sel(statistic="mean").mean()),
        "width": float((upper - lower).mean()),
        "reliable": int((many.dataset["verdict"].isin(["exact", "reliable"])).sum()),
    }


pd.DataFrame({f"{n} clinics of {k}": shares(many) for (n, k), many in designs.items()}).transpose().round(2)

# %% [markdown]
# With the same number of patients, more clinics give narrower intervals, and more power. The means are below .8: that
# is the sceptical prior at work, more so where the data say less.

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 4), sharex=True, sharey=True)
for ax, ((n, k), many) in zip(axes, designs.items(), strict=True):
    effect = many.dataset["effect"]
    order = np.argsort(effect.sel(statistic="mean").values)
    lower, upper = (effect.sel(statistic=name).values[order] for name in ("lower", "upper"))
    above = lower > 0
    for shown, colour in ((above, "C0"), (~above, "0.7")):
        ax.hlines(np.flatnonzero(shown), lower[shown], upper[shown], color=colour)
    ax.axvline(0, color="0.4", lw=1)
    ax.axvline(TRUE["effect"], color="C1", lw=1)
    ax.set(title=f"{n} clinics of {k}", xlabel="effect, log odds", ylim=(-1, N_TRIALS))
axes[0].set_ylabel("trial, sorted by its mean")
figure.tight_layout()

# %% [markdown]
# Each line is the interval of a trial; blue ones lie above 0. The orange line is the truth.
#
# One trial that looks odd can be looked at alone: the same seed gives the same fit, to the bit.

# %%
many = designs[12, 40]
lowest = int(many.dataset["effect"].sel(statistic="mean").values.argmin())
approx = many.approx(lowest)
print(approx.summary(var_names=["effect", "sd", "risk difference"]))

# %% [markdown]
# ## Are the intervals calibrated?
#
# Coverage at one true value is not all that can be asked. `calibrate` draws the true values from the prior, and looks
# at the ranks of all of them, of the risk difference, and of the log density.

# %%
model, clinic, treated = trial(12, 10)
start = time.perf_counter()
calibration = pymc_ngvi.calibrate(
    model, 60, var_names=["level", "effect", "sd", "risk difference"], random_seed=3, progressbar=False
)
print(f"{time.perf_counter() - start:.0f} s")
print(calibration.sentence)
calibration.summary().round(2)

# %%
calibration.plot(figure_kwargs={"figsize": (11, 5)})
# %% [markdown]
# A curve is the distribution function of the ranks of a variable less that of uniform ranks. Nothing stands against
# these fits. The Gaussian fit alone, which is quicker, is not calibrated: the posterior of the standard deviation of
# clinics is skewed on the log scale, and with few clinics that is seen.

# %%
gaussian = pymc_ngvi.calibrate(
    model, 60, var_names=["level", "effect", "sd", "risk difference"], posterior="gaussian", random_seed=3,
    progressbar=False,
)  # fmt: skip
print(gaussian.sentence)

# %% [markdown]
# ## The trial
#
# In the end there is one data set. Is the treatment worth having in the model, for clinics that were not in the trial?
# `leave_out(groups="clinic")` predicts each clinic from all others. No fit is made again for that: the effects of the
# clinic that is left out are integrated anew for each draw of the other parameters.

# %%
model, clinic, treated = trial(24, 20)
y = simulated(clinic, treated, np.random.default_rng(8))
with pm.Model(coords={"clinic": np.arange(24)}) as without:
    level, sd = pm.Normal("level", 0, 1.5), pm.HalfNormal("sd", 0.7)
    u = pm.Normal("u", 0, sd, dims="clinic")
    pm.Bernoulli("recovered", logit_p=level + u[clinic], observed=y)

with_treatment = pymc_ngvi.fit_many(model, [{"recovered": y}], random_seed=1, progressbar=False).approx(0)
without_it = pymc_ngvi.fit_ngvi(without, random_seed=1, progressbar=False)
start = time.perf_counter()
left_out = {
    "treatment": with_treatment.leave_out(groups="clinic", random_seed=1),
    "no treatment": without_it.leave_out(groups="clinic", random_seed=1),
}
print(
    f"{time.perf_counter() - start:.1f} s, largest k-hat {max(float(e.pareto_k.max()) for e in left_out.values()):.2f}"
)
az.compare(left_out).round(2)

# %%
assert all((many.dataset["verdict"].isin(["exact", "reliable"])).all() for many in designs.values())
assert calibration.is_calibrated
assert not gaussian.is_calibrated

# %% [markdown]
# ## What to read next
#
# - `04_thousands_of_groups`: one fit of many groups, and how it is judged.
