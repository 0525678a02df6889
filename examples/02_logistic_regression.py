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
# # Logistic regression, many times over
#
# The posterior of a logistic regression is close to Gaussian, and a natural-gradient fit takes a fraction of a second.
# It can then be done again: for each fold of a cross-validation, for other priors, for fewer predictors. This notebook
# does so with 270 patients of whom 120 have a heart disease (Statlog heart data). `posterior="gaussian"` stops at the
# Gaussian, also where an exact posterior could be had: how near it is will be seen.

# %%
import time

from pathlib import Path

import arviz as az
import arviz_plots as azp
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm

from scipy.special import expit

import pymc_ngvi  # noqa: F401  (makes pm.fit know the method "ngvi")

plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False})
table = pd.read_csv(Path("data") / "heart.csv")
names = [name for name in table.columns if name != "y"]
x, y = table[names].to_numpy(), table["y"].to_numpy()
print(f"{len(y)} patients, {y.sum()} with a heart disease, {len(names)} predictors")

# %% [markdown]
# Numbers (age, blood pressure, cholesterol, ...) are standardised; the other columns are indicators, such as
# `chest_pain_4`: asymptomatic, against the typical angina of `chest_pain_1`.


# %%
def logistic(x, y, names, scale=2.5):
    """Return the model: an intercept and a coefficient for each column, with normal priors."""
    with pm.Model(coords={"predictor": names}) as model:
        intercept = pm.Normal("intercept", 0, 5)
        beta = pm.Normal("beta", 0, scale, dims="predictor")
        pm.Bernoulli("disease", logit_p=intercept + x @ beta, observed=y)
    return model


def fit(model):
    """Return the fit of a model."""
    with model:
        return pm.fit(method="ngvi", posterior="gaussian", random_seed=1, progressbar=False)


model = logistic(x, y, names)
approx = fit(model)
print(approx.summary(random_seed=1))

# %% [markdown]
# Two numbers say whether this can be used. The *gap* is what another Gaussian could still gain: next to nothing.
# *k-hat* says how far the posterior is from a Gaussian: it is low enough for importance weights to correct the rest.
# `corrected` does: its result has the methods of a fit.

# %%
corrected = approx.corrected(40_000, random_seed=2)
print(corrected.checks)
shift = (corrected.mean_flat - approx.mean_flat) / corrected.sd_flat
print(f"largest change of a mean: {abs(shift).max():.2f} sd")
print(f"largest change of a standard deviation: {100 * abs(corrected.sd_flat / approx.sd_flat - 1).max():.0f} %")

# %%
posterior = approx.sample(4_000, random_seed=3)
order = np.argsort(posterior["posterior"]["beta"].mean(["chain", "draw"]).to_numpy())
azp.plot_forest(
    posterior["posterior"].to_dataset().isel(predictor=order),
    var_names="beta",
    combined=True,
    labels=["predictor"],
    backend="matplotlib",
    figure_kwargs={"figsize": (7, 5.5)},
)
_ = plt.gcf().axes[-1].axvline(0, color="0.6", linewidth=1, linestyle="--", zorder=0)

# %% [markdown]
# ## Is the model calibrated?
#
# Of the patients to whom it gives a probability of .8, are 80 % ill? The curve is the observed share as a function of
# the predicted one, by isotonic regression, with the band in which it would be if the model were right.

# %%
with model:
    pm.sample_posterior_predictive(posterior, extend_inferencedata=True, random_seed=4, progressbar=False)
_ = azp.plot_ppc_pava(posterior, backend="matplotlib", figure_kwargs={"figsize": (5, 4)})

# %% [markdown]
# ## Cross-validation without a shortcut
#
# PSIS-LOO estimates from one fit how well each patient would be predicted by the others. Its Pareto k-hats say for whom
# this is doubtful. With fits as quick as these the real thing is at hand: for the twelve most doubtful patients, leave
# the patient out, fit again, predict.

# %%
with model:
    pm.compute_log_likelihood(posterior, progressbar=False)
loo = az.loo(posterior, pointwise=True)


def predict(x, y, names, held_out, scale=2.5):
    """Return the log predictive densities of patients that are held out, by a fit to the others."""
    approx = fit(logistic(x[~held_out], y[~held_out], names, scale))
    draws = approx.draw_flat(4_000, random_seed=5)  # the model has no bounded variables: intercept, then beta
    p = expit(draws[:, :1] + draws[:, 1:] @ x[held_out].T)
    return np.log(np.where(y[held_out] == 1, p, 1 - p).mean(axis=0))


doubtful = np.argsort(loo.pareto_k.to_numpy())[-12:]
start = time.perf_counter()
exact = np.array([predict(x, y, names, np.arange(len(y)) == i)[0] for i in doubtful])
seconds = time.perf_counter() - start
estimated = loo.elpd_i.to_numpy()[doubtful]
print(f"log predictive density {loo.elpd:.1f} +- {loo.se:.1f}; that of the share of the ill alone ", end="")
print(f"{len(y) * (y.mean() * np.log(y.mean()) + (1 - y.mean()) * np.log(1 - y.mean())):.1f}")
print(f"largest Pareto k-hat of a patient: {float(loo.pareto_k.max()):.2f}; twelve fits took {seconds:.1f} s")
print(f"largest difference {np.abs(exact - estimated).max():.2f}, in sum {exact.sum() - estimated.sum():+.2f} nats")

fig, ax = plt.subplots(figsize=(4.2, 3.8), layout="constrained")
ends = [min(exact.min(), estimated.min()) - 0.2, 0.1]
ax.plot(ends, ends, color="0.7", linewidth=1)
ax.plot(exact, estimated, "o", color="C0")
_ = ax.set(xlabel="log predictive density, patient left out", ylabel="by PSIS-LOO", aspect="equal")

# %% [markdown]
# They agree.
#
# ## Does the prior matter?
#
# Five priors of the coefficients, from tight to next to flat, each judged on five folds: the same for all priors.


# %%
def five_folds(x, y, names, scale=2.5):
    """Return the log predictive density of each patient, by a fit to the other four fifths."""
    fold = np.random.default_rng(1).permutation(len(y)) % 5
    density = np.empty(len(y))
    for k in range(5):
        density[fold == k] = predict(x, y, names, fold == k, scale)
    return density


scales = [0.1, 0.3, 1.0, 2.5, 10.0]
folds = {scale: five_folds(x, y, names, scale) for scale in scales}
rows = [(folds[scale].sum(), fit(logistic(x, y, names, scale)).elbo.value) for scale in scales]
by_scale = pd.DataFrame(rows, index=pd.Index(scales, name="prior sd"), columns=["five-fold log density", "ELBO"])

fig, ax = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
ax.semilogx(scales, by_scale["five-fold log density"], marker="o", label="five-fold log predictive density")
ax.semilogx(scales, by_scale["ELBO"], marker="s", linestyle="--", label="ELBO, a bound of the log evidence")
ax.set(xlabel="prior standard deviation of a coefficient", ylabel="nats", xticks=scales, xticklabels=scales)
_ = ax.legend(frameon=False)
print(by_scale.round(1))

# %% [markdown]
# A prior of about .3 to 1 predicts best. One ten times as wide predicts worse, by some nats; the ELBO, which also
# charges for prior mass that the data do not use, punishes it far more. The two are not measures of the same.
#
# ## Which tests are worth it?
#
# Counting vessels takes fluoroscopy, and `thal` a thallium scan. What is lost without them?

# %%
cheap = [i for i, name in enumerate(names) if not name.startswith(("vessels", "thal"))]
without = five_folds(x[:, cheap], y, [names[i] for i in cheap])
loss = folds[2.5] - without
print(
    f"the two tests are worth {loss.sum():.1f} +- {loss.std(ddof=1) * np.sqrt(len(y)):.1f} nats over {len(y)} patients"
)

# %% [markdown]
# ## Checks
#
# What the text above says, as assertions.

# %%
assert approx.converged
assert approx.khat(random_seed=1) < 0.7
# The posterior is close to the Gaussian; Monte Carlo errors of the weighted moments are .02.
assert float(abs(shift).max()) < 0.2
# PSIS with Pareto k-hats below .7 has errors of some hundredths; in one of the twelve it may be more.
assert np.abs(exact - estimated).max() < 0.4
assert abs(exact.sum() - estimated.sum()) < 0.6
assert (loo.pareto_k < 0.7).all()
assert by_scale["five-fold log density"].idxmax() in (0.3, 1.0)
lost = by_scale.loc[1.0] - by_scale.loc[10.0]
assert 5 < lost["five-fold log density"] < 20
assert lost["ELBO"] > 1.5 * lost["five-fold log density"]
assert loss.sum() > loss.std(ddof=1) * np.sqrt(len(y))

# %% [markdown]
# ## What to read next
#
# - `03_bambi`: the same from a formula.
# - `07_papers`: this regression fitted by the updates of several papers.
# - `docs/corrections.md`: importance weights, and when they can't help.
#
# A. Vehtari, A. Gelman and J. Gabry (2017). Practical Bayesian model evaluation using leave-one-out cross-validation
# and WAIC. Statistics and Computing 27. <https://doi.org/10.1007/s11222-016-9696-4>
#
# Statlog (Heart). UCI Machine Learning Repository. <https://doi.org/10.24432/C57303>
