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
# # Thousands of groups
#
# A trial in 1,500 clinics: each has a level and a treatment effect of its own. The model has 3,005 parameters, and a
# dense covariance of q would have four and a half million entries. But clinics are independent given the global
# parameters, so that most entries of the precision are zero. This is found from the graph of the model, by itself.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np
import pymc as pm

from scipy.special import expit

import pymc_ngvi  # noqa: F401  (makes pm.fit know the method "ngvi")

plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False})

TRUTH = {"mu": np.array([-0.5, 0.8]), "slope": 0.6, "sd": np.array([0.9, 0.5]), "noise": 1.0}


def simulate(n_clinics, rng, least=6, most=30):
    """Return clinic, treatment, severity and outcome of each patient, and the clinics' own effects."""
    size = rng.integers(least, most + 1, n_clinics)
    clinic = np.repeat(np.arange(n_clinics), size)
    treated = rng.integers(0, 2, len(clinic))
    severity = rng.normal(size=len(clinic))
    effects = TRUTH["mu"] + TRUTH["sd"] * rng.normal(size=(n_clinics, 2))
    logit = effects[clinic, 0] + effects[clinic, 1] * treated + TRUTH["slope"] * severity
    return clinic, treated, severity, rng.random(len(clinic)) < expit(logit), effects


def build(clinic, treated, severity, outcome):
    """Return the model."""
    with pm.Model(coords={"term": ["level", "treatment"], "clinic": np.arange(clinic.max() + 1)}) as model:
        mu = pm.Normal("mu", 0, 2, dims="term")
        sd = pm.HalfNormal("sd", 1, dims="term")
        slope = pm.Normal("slope", 0, 2)
        effect = pm.Normal("effect", mu, sd, dims=("clinic", "term"))
        logit = effect[clinic, 0] + effect[clinic, 1] * treated + slope * severity
        pm.Bernoulli("recovered", logit_p=logit, observed=outcome.astype(int))
    return model


*data, effects = simulate(1_500, np.random.default_rng(1))
model = build(*data)
print(f"{len(effects):,} clinics, {len(data[0]):,} patients")

# %% [markdown]
# ## The fit
#
# Nothing tells the fit about clinics. `posterior="gaussian"` leaves out the exact step (`docs/exact.md`), which takes
# several times as long here; with so many clinics, the Gaussian is near.

# %%
start = time.perf_counter()
with model:
    approx = pm.fit(method="ngvi", posterior="gaussian", random_seed=1, progressbar=False)
seconds = time.perf_counter() - start
print(f"{approx.status} after {seconds:.1f} s: {approx.n_iterations} iterations, {approx.n_gradients:,} expectations")
print(f"ELBO {approx.elbo}, gap {approx.gap:.3f} nats")

# %% [markdown]
# What was found, in words and as a table.

# %%
print(approx.structure)
print(approx.structure.to_frame().to_string(index=False))

# %% [markdown]
# A clinic's two effects form a block. Why is there a block more than there are clinics? In one clinic nobody was
# treated, so that its treatment effect touches nothing but the global parameters. These are the border, which touches
# all blocks. Such a matrix is factored without fill-in, and a step costs in proportion to the number of clinics. The
# covariance of q, the inverse, is dense: all correlations are there, though never formed as a matrix. `cov_of` gives a
# part of it.

# %%
n_treated = np.bincount(data[0], weights=data[1])
print(f"clinics with no treated patient: {np.sum(n_treated == 0)}")
covariance = approx.cov_of(["mu", "sd"])
sds = np.sqrt(np.diag(covariance))
print("correlations of mu and log sd:")
print(np.round(covariance.to_numpy() / np.outer(sds, sds), 2))

# %% [markdown]
# ## Is it right?
#
# The data were simulated, so that the truth is known. First the global parameters.

# %%
posterior = approx.sample(2_000, chains=1, random_seed=2, log_p=False)["posterior"].sel(chain=0)
score = {}
for name in ("mu", "sd", "slope"):
    mean, spread = posterior[name].mean("draw").to_numpy(), posterior[name].std("draw").to_numpy()
    score[name] = (mean - TRUTH[name]) / spread
    print(f"{name:6} truth {np.array(TRUTH[name])}, estimate {mean.round(3)} +- {spread.round(3)}")

# %% [markdown]
# And the clinics: of 3,000 intervals, do 50 % and 90 % contain the truth? Estimates are pulled towards the mean of all
# clinics, those of small clinics the most.

# %%
low, quarter, median, three_quarters, high = np.quantile(
    posterior["effect"].to_numpy(), [0.05, 0.25, 0.5, 0.75, 0.95], axis=0
)
coverage_50 = ((quarter < effects) & (effects < three_quarters)).mean(axis=0)
coverage_90 = ((low < effects) & (effects < high)).mean(axis=0)
print(f"50 % intervals contain {coverage_50.round(3)}, 90 % intervals {coverage_90.round(3)}")

size = np.bincount(data[0])
fig, axes = plt.subplots(1, 2, figsize=(8.5, 3.8), layout="constrained")
for i, (ax, term) in enumerate(zip(axes, ["level", "treatment"], strict=True)):
    points = ax.scatter(effects[:, i], median[:, i], c=size, s=6, cmap="viridis", rasterized=True)
    ends = np.array([effects[:, i].min(), effects[:, i].max()])
    ax.plot(ends, ends, color="0.5", linewidth=1, label="equal")
    ax.axhline(TRUTH["mu"][i], color="C3", linewidth=1, linestyle="--", label="mean of all clinics")
    ax.set(title=f"{term} of each clinic", xlabel="truth (logit)", ylabel="posterior median (logit)")
axes[0].legend(frameon=False, loc="upper left")
_ = fig.colorbar(points, ax=axes, label="patients", shrink=0.8)

# %% [markdown]
# ## The same q as a dense fit
#
# The best dense Gaussian has the same zeros in its precision, so nothing is lost. With 40 clinics, larger ones now, a
# dense fit is still cheap, and gives the same. The tolerance is tighter than the default, as the ELBO is flat along the
# standard deviations of the clinics, and two fits may stop at different points of the plateau.

# %%
small = build(*simulate(40, np.random.default_rng(2), 100, 200)[:-1])
with small:
    sparse = pm.fit(method="ngvi", family="sparse", tol=0.01, random_seed=1, progressbar=False)
    dense = pm.fit(method="ngvi", family="full", tol=0.01, random_seed=1, progressbar=False)
print(f"sparse: ELBO {sparse.elbo}, dense: ELBO {dense.elbo}")
distance = np.abs(sparse.mean_flat - dense.mean_flat) / dense.sd_flat
print(f"largest difference of a mean: {distance.max():.2f} sd; of an sd: ", end="")
print(f"{np.abs(sparse.sd_flat / dense.sd_flat - 1).max():.1%}")

# %% [markdown]
# ## How cost grows
#
# The fit takes no draws: it goes by exact expectations of log p, and each costs in proportion to the number of clinics.
# How many of them a fit takes varies from one data set to the next, by how flat the ELBO is along the two standard
# deviations, and does not grow with the clinics. Seconds are those of the machine that ran the notebook, whatever else
# it did; expectations are the same anywhere.

# %%
sizes, fits, taken = [100, 300, 900], [], []
for n in sizes:
    other = build(*simulate(n, np.random.default_rng(3))[:-1])
    start = time.perf_counter()
    with other:
        fits.append(pm.fit(method="ngvi", posterior="gaussian", random_seed=1, progressbar=False))
    taken.append(time.perf_counter() - start)
sizes, fits, taken = [*sizes, 1_500], [*fits, approx], [*taken, seconds]

fig, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
axes[0].plot(sizes, taken, marker="o")
axes[0].set(xlabel="clinics", ylabel="seconds from the call", xlim=0, ylim=0)
axes[1].plot(sizes, [f.n_gradients for f in fits], marker="o")
_ = axes[1].set(xlabel="clinics", ylabel="expectations", xlim=0, ylim=0)

# %% [markdown]
# ## Checks
#
# What the text above says, as assertions.

# %%
assert approx.converged
assert approx.structure.n_global == 5
assert approx.structure.n_blocks == 1_500 + np.sum(n_treated == 0) == 1_501
# Five scores of a z-test, and shares of 1,500 intervals, whose standard errors are .013 and .008. The Gaussian is
# surer of scales than it should be.
assert max(np.abs(s).max() for s in score.values()) < 4
assert np.abs(coverage_50 - 0.5).max() < 0.06
assert np.abs(coverage_90 - 0.9).max() < 0.04
# Each is within about .01 nats of the optimum, which is .1 to .2 sd along a single coordinate.
assert abs(sparse.elbo.value - dense.elbo.value) < 0.1
assert distance.max() < 0.3
assert max(f.n_gradients for f in fits) < 10 * min(f.n_gradients for f in fits)

# %% [markdown]
# ## What to read next
#
# - `06_bad_fits`: what to do where scales are small, and effects hardly known.
# - `docs/families.md`: the algebra, and models that are cut into blocks.
# - `tests/benchmarks/results/scaling.md`: up to 100,000 groups.
#
# L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational approximation.
# <https://doi.org/10.48550/arXiv.2109.00375>
