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
# # When nothing else helps: moved draws beside NUTS
#
# Some posteriors are not Gaussian, and the model has no groups or latent Gaussian variables that could be integrated
# out. Then draws of the Gaussian fit are moved: many chains begin at it, and run Hamiltonian Monte Carlo until they
# have forgotten where they began. The fit takes the place of the warm-up. Below are a logistic regression with more
# coefficients than events, a posterior with two modes, and a model for which moved draws are refused. Each is put
# beside NUTS, or beside the exact answer.

# %%
import logging
import time

import arviz as az
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm

from scipy import stats

import pymc_ngvi

logging.getLogger("pymc").setLevel(logging.ERROR)  # neither progress nor divergences: these are counted below
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## Few events
#
# Which of 400 patients bleed during treatment? There are 28 laboratory values, which are standardised, and 12 drugs
# that a patient may take or not. Twenty patients had a bleeding: half an event for each coefficient. The data are
# simulated.

# %%
rng = np.random.default_rng(1)
n, n_labs, n_drugs, n_events = 400, 28, 12, 20
lab = rng.normal(size=(n, n_labs))
lab[:, 1] = 0.8 * lab[:, 0] + 0.6 * lab[:, 1]
drug = rng.random((n, n_drugs)) < np.linspace(0.12, 0.4, n_drugs)
score = lab[:, :5] @ [1.2, -1.0, 0.8, 0.6, -0.6] + drug[:, [1, 5, 8]] @ [-1.5, 1.5, 1.0] + rng.logistic(size=n)
bleeding = score > np.sort(score)[-n_events - 1]

names = {"lab": [f"lab {i}" for i in range(1, n_labs + 1)], "drug": [f"drug {c}" for c in "ABCDEFGHIJKL"]}
counts = pd.DataFrame({"patients": drug.sum(axis=0), "bleedings": drug[bleeding].sum(axis=0)}, index=names["drug"])
counts.transpose()

# %% [markdown]
# None of the patients with drug B had a bleeding. The likelihood alone sets no lower bound to its coefficient; the
# prior does. Patients with a bleeding are few, so we also ask for the risk of three of them, and for the number of
# bleedings that is expected in 100 of the patients.

# %%
asked = np.flatnonzero(bleeding)[:3]
with pm.Model(coords={**names, "patient": asked}) as model:
    level = pm.Normal("level", 0, 5)
    slope = pm.Normal("slope", 0, 2.5, dims="lab")
    effect = pm.Normal("effect", 0, 5, dims="drug")
    logit = level + pm.math.dot(lab, slope) + pm.math.dot(drug, effect)
    risk = pm.math.sigmoid(logit)
    pm.Deterministic("risk", risk[asked], dims="patient")
    pm.Deterministic("expected", risk[:100].sum())
    pm.Bernoulli("bleeding", logit_p=logit, observed=bleeding)

start = time.perf_counter()
with model:
    moved = pm.fit(method="ngvi", random_seed=1, progressbar=False)
seconds = {"moved": time.perf_counter() - start}
print(moved.record.posterior)

# %% [markdown]
# No option was given. The plan shows why draws were moved: the Gaussian fit came first and took a moment, no other
# posterior can be had for this model, and the chains were expected to take a few seconds.

# %%
print(moved.plan)

# %% [markdown]
# The Gaussian alone would have been found unreliable. Its importance weights and short trajectories from its draws
# show that it is too narrow.

# %%
with model:
    gaussian = pm.fit(method="ngvi", posterior="gaussian", random_seed=1, progressbar=False)
found = gaussian.diagnose(random_seed=2)
print(f"reliable: {found.reliable}\n")
print("\n\n".join(found.reasons))

# %% [markdown]
# ## The conditions
#
# The chains have arrived if all of these hold. Each figure is that of the worst of all coordinates, log p, the
# Deterministics and the linear predictors.
# `diverging` is the share of trajectories that diverge. `height` and `peak size` are about narrow peaks: how far, in
# nats, log p on the way was above that of all draws, and the effective sample size of being where log p is highest.


# %%
def table_of(conditions):
    """Return what was measured, and its limit."""
    rows = {c.name: {"figure": c.figure, "": ">=" if c.at_least else "<=", "limit": c.limit} for c in conditions}
    return pd.DataFrame.from_dict(rows, orient="index").round(3)


table_of(moved.checks.conditions)

# %% [markdown]
# ## The chains
#
# `chains()` returns them as `pm.sample` would, for ArviZ. They are many and short: sixteen begin at each of eight
# points, two to three standard deviations from the mean. Plain R-hat is too strict for chains as short as these. The
# question is whether chains still differ by where they began. So we put the sixteen chains of each point end to end,
# and look at the ranks of their draws among all draws.

# %%
chains = moved.chains()
print(dict(chains.posterior.sizes))


def of_drug_b(values):
    """Return the effect of drug B."""
    return values["effect"].sel(drug="drug B")


def by_start(values):
    """Return one long chain for each of the eight points."""
    return values.transpose("chain", "draw").to_numpy().reshape(8, -1)


joined = {
    "effect of drug B": by_start(of_drug_b(chains.posterior)),
    "slope of lab 3": by_start(chains.posterior["slope"].sel(lab="lab 3")),
}
fig, axes = plt.subplots(2, 8, figsize=(11, 3.6), sharex=True, sharey=True, layout="constrained")
for row, (name, values) in zip(axes, joined.items(), strict=True):
    ranks = stats.rankdata(values).reshape(values.shape) / values.size
    for i, (ax, own) in enumerate(zip(row, ranks, strict=True), 1):
        ax.hist(own, bins=np.linspace(0, 1, 11), weights=np.full(own.size, 10 / own.size), color="C0", alpha=0.6)
        ax.axhline(1, color="0.3", linewidth=1)
        if name == "effect of drug B":
            ax.set_title(f"start {i}")
    row[0].set_ylabel(name)
_ = fig.supxlabel("rank / number of draws")

# %% [markdown]
# If the start is forgotten, ranks are uniform, and all bars have the height 1 but for noise. So it is.
#
# ## Beside NUTS
#
# A short run of PyMC's NUTS: two chains of 500 draws each, after 500 draws of tuning.

# %%
start = time.perf_counter()
with model:
    nuts = pm.sample(
        500, tune=500, chains=2, cores=1, nuts_sampler="pymc", discard_tuned_samples=False,
        random_seed=1, progressbar=False, quiet=True,
    )  # fmt: skip
seconds["NUTS"] = time.perf_counter() - start

variables = ["level", "slope", "effect"]


def smallest_ess(tree):
    """Return the smallest bulk effective sample size of all coefficients."""
    sizes = az.ess(tree, var_names=variables, method="bulk")
    return min(float(sizes[name].min()) for name in variables)


gradients = {
    "moved": moved.checks.n_gradients,
    "NUTS": int(nuts.warmup_sample_stats["n_steps"].sum() + nuts.sample_stats["n_steps"].sum()),
}
price = pd.DataFrame(
    {
        "seconds": seconds,
        "gradients": gradients,
        "smallest ESS": {"moved": smallest_ess(chains), "NUTS": smallest_ess(nuts)},
    }
)
price["ESS for 1,000 gradients"] = 1_000 * price["smallest ESS"] / price["gradients"]
price["ESS for a second"] = price["smallest ESS"] / price["seconds"]
price.round(1)

# %% [markdown]
# Gradients include those of tuning, and those of rounds of moved draws that were not kept. The Gaussian fit before
# the chains took fifteen expectations or so, which are not counted. Seconds are those of the machine that ran the
# notebook, with compilation. The message above has a smaller effective sample size, since it is that of the worst
# quantity of all that are judged. nutpie has faster gradients than PyMC's NUTS: ten models beside it are in
# `tests/benchmarks/results/moved.md`.
#
# Do they agree? For all 41 coefficients, the largest difference of a mean from that of the moved draws, in standard
# deviations, and the average ratio of standard deviations.

# %%
by_gaussian = gaussian.sample(4_000, random_seed=3)
draws = {"Gaussian": by_gaussian.posterior, "moved": chains.posterior, "NUTS": nuts.posterior}


def coefficients(posterior):
    """Return mean and standard deviation of each coefficient."""
    flat = [
        posterior[name].to_numpy().reshape(posterior.sizes["chain"] * posterior.sizes["draw"], -1) for name in variables
    ]
    return np.hstack(flat).mean(axis=0), np.hstack(flat).std(axis=0)


moments = {name: coefficients(posterior) for name, posterior in draws.items()}
mean, sd = moments["moved"]
pd.DataFrame(
    {
        name: {"largest difference of a mean": np.abs((m - mean) / sd).max(), "average ratio of sd": (s / sd).mean()}
        for name, (m, s) in moments.items()
    }
).T.round(2)

# %% [markdown]
# NUTS differs by its Monte Carlo error. The Gaussian has the right means, but its standard deviations are 8 % too
# small on average, and it is not skewed:

# %%
panels = {
    "level": lambda posterior: posterior["level"],
    "effect of drug B": of_drug_b,
}
fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for ax, (name, of) in zip(axes, panels.items(), strict=True):
    values = {label: of(posterior).to_numpy().ravel() for label, posterior in draws.items()}
    bins = np.linspace(*np.quantile(values["moved"], [0.0005, 0.9995]), 31)
    ax.hist(values["moved"], bins, density=True, color="C0", alpha=0.4, label="moved")
    ax.hist(values["NUTS"], bins, density=True, histtype="step", color="0.2", label="NUTS")
    x = np.linspace(bins[0], bins[-1], 200)
    exact_sd = float(of(gaussian.std_data))
    ax.plot(x, stats.norm.pdf(x, float(of(gaussian.mean_data)), exact_sd), color="C3", label="Gaussian")
    ax.set(xlabel=name, yticks=[])
    ax.spines["left"].set_visible(False)
_ = axes[0].legend(frameon=False, loc="upper left")

# %% [markdown]
# Both have a longer tail to the left: no data say how far below zero the effect of drug B may be. What follows for
# functions of the coefficients? Medians, with intervals of 89 %:

# %%
functions = {
    "odds ratio of drug B": lambda posterior: np.exp(of_drug_b(posterior)),
    f"risk of patient {asked[0]}": lambda posterior: posterior["risk"].isel(patient=0),
    "bleedings expected among 100": lambda posterior: posterior["expected"],
    "odds at mean values, without drugs": lambda posterior: np.exp(posterior["level"]),
}
table = {
    name: {label: np.quantile(of(posterior), [0.5, 0.055, 0.945]) for label, posterior in draws.items()}
    for name, of in functions.items()
}
pd.DataFrame(
    {name: {label: "{:.2g} ({:.2g} to {:.2g})".format(*v) for label, v in row.items()} for name, row in table.items()}
).transpose()

# %% [markdown]
# The Gaussian is near for the risk of the patient and for the number of bleedings. Its lower limits of odds are too
# high, that of drug B several times.
#
# ## Two modes
#
# Sixteen measurements and a robust line through them: errors have a Student-t distribution with three degrees of
# freedom. But half of the measurements lie about one line, and half about another. The posterior has two modes. There
# are two coefficients, so that it can be computed on a grid.

# %%
rng = np.random.default_rng(0)
x = rng.uniform(-1, 1, 16)
y = np.where(np.arange(16) < 8, 0.7 + 1.5 * x, -0.7 - x) + 0.2 * rng.normal(size=16)
with pm.Model(coords={"term": ["intercept", "slope"]}) as lines:
    line = pm.Normal("line", 0, 2, dims="term")
    pm.StudentT("y", nu=3, mu=line[0] + line[1] * x, sigma=0.25, observed=y)

intercepts, slopes = np.linspace(-1.5, 1.5, 301), np.linspace(-3, 3, 301)
grid = np.stack(np.meshgrid(intercepts, slopes, indexing="ij"), axis=-1)
log_p = stats.norm.logpdf(grid, 0, 2).sum(axis=-1)
for xi, yi in zip(x, y, strict=True):
    log_p += stats.t.logpdf(yi, 3, grid[..., 0] + grid[..., 1] * xi, 0.25)
exact = np.exp(log_p - log_p.max())
exact /= exact.sum()
share = exact[intercepts > 0].sum()
print(f"P(intercept > 0) = {share:.3f}")

# %% [markdown]
# With so few parameters the default is an exact posterior by importance sampling. `posterior="moved"` asks for moved
# draws.

# %%
with lines:
    both = pm.fit(method="ngvi", posterior="moved", random_seed=1, progressbar=False)
print(both.record.posterior)

# %% [markdown]
# Chains do not cross from one mode to the other. Where this is noticed, as many chains again begin in each mode and
# stay there, and bridge sampling tells how much each mode weighs. Two more conditions go with it: the weights have to
# be known as well as from 400 independent draws, and hardly any trajectory may leave its mode.

# %%
table_of(both.checks.conditions[-2:])

# %%
# `sample` takes draws from the modes by their weights.
by_moved = both.sample(4_000, random_seed=2).posterior["line"]
ours = float((by_moved.sel(term="intercept") > 0).mean())
print(f"P(intercept > 0): grid {share:.3f}, moved {ours:.3f}, by the weights {both.checks.mode_weights[1]:.3f}")

with lines:
    other = pm.sample(
        500, tune=500, chains=2, cores=1, nuts_sampler="pymc", random_seed=1, progressbar=False, quiet=True
    )
above = (other.posterior["line"].sel(term="intercept") > 0).mean("draw")
print(f"NUTS: {above.values}, R-hat {float(az.rhat(other)['line'].max()):.2f}")

# %%
fig, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
axes[0].plot(x, y, "o", color="0.2", markersize=4)
ends = np.array([-1.05, 1.05])
flat = by_moved.transpose("chain", "draw", "term").to_numpy().reshape(-1, 2)
for b in flat[::40]:
    axes[0].plot(ends, b[0] + b[1] * ends, color="C1" if b[0] > 0 else "C0", linewidth=0.5, alpha=0.4)
axes[0].set(xlabel="x", ylabel="y", title="100 moved draws")
for ax, points, title in [
    (axes[1], flat[:1_000], "1,000 moved draws"),
    (axes[2], other.posterior["line"].to_numpy().reshape(-1, 2), "1,000 draws of NUTS"),
]:
    ax.contour(intercepts, slopes, exact.T, exact.max() * np.array([0.02, 0.1, 0.3, 0.7]), colors="0.4", linewidths=0.8)
    ax.scatter(*points.T, s=3, c=np.where(points[:, 0] > 0, "C1", "C0"), alpha=0.4, rasterized=True)
    ax.set(xlabel="intercept", xlim=(-1.5, 1.5), ylim=(-2.5, 3), title=title)
_ = axes[1].set_ylabel("slope")

# %% [markdown]
# Contours are those of the grid. Both chains of NUTS went to the smaller mode, and R-hat can't tell, because they
# agree. Moved draws are not safe from this either: a mode is missed if neither the fit, nor its search for other
# modes, nor a chain has come across it.
#
# ## A refusal
#
# The eight schools (Rubin, 1981) in the centred form. Where tau is small, the effects of the schools have little
# room, and the posterior has a narrow neck. By default the effects are integrated out, and the result is exact: see
# `06_bad_fits`. Here we ask for moved draws, to see what happens in models where this can't be done. `max_seconds`
# limits the (estimated) time.

# %%
score = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
error = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools(*, centred):
    """Return the usual model in one of its forms."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 5)
        tau = pm.HalfCauchy("tau", 5)
        if centred:
            theta = pm.Normal("theta", mu, tau, shape=8)
        else:
            theta = pm.Deterministic("theta", mu + tau * pm.Normal("z", 0, 1, shape=8))
        pm.Normal("y", theta, error, observed=score)
    return model


with schools(centred=True):
    try:
        pm.fit(method="ngvi", posterior="moved", max_seconds=5, random_seed=1, progressbar=False)
    except pymc_ngvi.NotExactError as refused:
        message, kept = str(refused), refused.approx
print(message)

# %% [markdown]
# The message names the condition that failed. Some trajectories diverge, as they do in NUTS: steps that suit the wide
# part are too long for the neck, and draws there may be missing. R-hat alone would have passed these chains. The
# error has the Gaussian fit, as `approx`. Where nothing was asked for, there is no error: the Gaussian is returned,
# and the plan and the verdict have the reason.
#
# What can be done?
#
# - Write the model in another form. This helps most.
# - Run NUTS. `sampler_init()` gives it starts and a mass matrix from the Gaussian, so that 100 to 200 draws of tuning
#   do. The posterior is that of the model. But where the Gaussian is far off, so is the mass matrix, and a neck stays
#   a neck. So look at divergences, R-hat and effective sample sizes.
#
# Here are both forms with both samplers. Given tau, all else is Gaussian, so that the density of log tau can be
# computed.

# %%
with schools(centred=False):
    again = pm.fit(method="ngvi", posterior="moved", random_seed=1, progressbar=False)
print(again.record.posterior)

log_tau = np.linspace(-5, 5, 1_001)
variance = error**2 + np.exp(2 * log_tau)[:, None]
precision = (1 / variance).sum(axis=1) + 1 / 25
log_density = (
    -0.5 * np.log(2 * np.pi * variance).sum(axis=1)
    - 0.5 * np.log(25 * precision)
    - 0.5 * ((score**2 / variance).sum(axis=1) - (score / variance).sum(axis=1) ** 2 / precision)
    + stats.halfcauchy.logpdf(np.exp(log_tau), scale=5)
    + log_tau
)
density = np.exp(log_density - log_density.max())
density /= density.sum() * (log_tau[1] - log_tau[0])


def share_of_small(tau):
    """Return the probability that tau is below 1."""
    return {"P(tau < 1)": f"{(tau < 1).mean():.3f}"}


small = density[log_tau < 0].sum() * (log_tau[1] - log_tau[0])
tau = {
    "Gaussian, centred": kept.sample(4_000, random_seed=2).posterior["tau"].to_numpy(),
    "moved, non-centred": again.sample(4_000, random_seed=2).posterior["tau"].to_numpy(),
}
rows = {"quadrature": {"P(tau < 1)": f"{small:.3f}"}} | {name: share_of_small(values) for name, values in tau.items()}
for name, approx in [("NUTS, centred", kept), ("NUTS, non-centred", again.gaussian)]:
    init = approx.sampler_init(chains=2, random_seed=2)
    tree = pm.sample(1_000, tune=200, **init.kwargs(), cores=1, random_seed=3, progressbar=False, quiet=True)
    tau[name] = tree.posterior["tau"].to_numpy()
    rows[name] = share_of_small(tau[name]) | {
        "divergences": f"{int(tree.sample_stats['diverging'].sum())}",
        "R-hat of tau": f"{float(az.rhat(tree)['tau']):.2f}",
        "ESS of tau": f"{float(az.ess(tree)['tau']):,.0f}",
    }
pd.DataFrame.from_dict(rows, orient="index").fillna("")
# %%
fig, axes = plt.subplots(1, 4, figsize=(11, 2.8), sharex=True, sharey=True, layout="constrained")
for ax, (name, values) in zip(axes, tau.items(), strict=True):
    ax.hist(np.log(values.ravel()), np.linspace(-5, 5, 41), density=True, color="C0", alpha=0.4, label="draws")
    ax.plot(log_tau, density, color="0.2", label="quadrature")
    ax.set(title=name, xlabel="log tau", xlim=(-4.5, 4.5), yticks=[])
    ax.spines["left"].set_visible(False)
_ = axes[0].legend(frameon=False, loc="upper left")

# %% [markdown]
# In the centred form, NUTS hardly gets into the neck. The warnings are few: some divergences, and a small effective
# sample size. In the non-centred form both samplers agree with quadrature.
#
# ## In short
#
# - Moved draws come by themselves where nothing else can be relied on. `approx.plan` says why, and at what price.
# - `approx.checks.conditions` has what was asked of the chains, `approx.chains()` has the chains.
# - Separate modes have weights with standard errors. Modes that nothing has come across are missed.
# - If chains have not arrived, the result is not returned. Another form of the model helps most; NUTS can start from
#   the fit.
#
# ## Checks
#
# What the text above says, as assertions.

# %%
assert moved.is_exact
assert moved.checks.n_starts == 8
assert not found.reliable
assert price.loc["moved", "ESS for 1,000 gradients"] > 2 * price.loc["NUTS", "ESS for 1,000 gradients"]
# Five standard errors of a mean of NUTS, of 41.
assert (np.abs(moments["NUTS"][0] - mean) / sd).max() < 5 / np.sqrt(price.loc["NUTS", "smallest ESS"])
assert (moments["Gaussian"][1] / sd).mean() < 0.96
assert float(of_drug_b(gaussian.std_data)) < 0.9 * float(of_drug_b(chains.posterior).std())
assert both.checks.n_modes == 2
assert abs(both.checks.mode_weights[1] - share) < 0.01
assert abs(ours - share) < 0.03
assert abs(float(above.mean()) - share) > 0.1
assert "diverge" in message
assert again.is_exact
assert abs((tau["moved, non-centred"] < 1).mean() - small) < 0.04
assert abs((tau["NUTS, non-centred"] < 1).mean() - small) < 0.1
assert (tau["NUTS, centred"] < 1).mean() < small - 0.05

# %% [markdown]
# ## What to read next
#
# - `docs/moved.md`: how draws are moved, what the checks mean, and what this can't do.
# - `tests/benchmarks/results/moved.md`: effective sample sizes for each gradient, beside nutpie.
# - `docs/samplers.md`: starts for NUTS and nutpie, and a mass matrix.
# - `05_two_modes`: two modes by a mixture of Gaussians.
# - `06_bad_fits`: other repairs, and the eight schools by quadrature.
#
# C. C. Margossian, M. D. Hoffman, P. Sountsov, L. Riou-Durand, A. Vehtari and A. Gelman (2024). Nested R-hat:
# assessing the convergence of Markov chain Monte Carlo when running many short chains. Bayesian Analysis.
# <https://doi.org/10.1214/24-BA1453>
#
# D. B. Rubin (1981). Estimation in parallel randomized experiments. Journal of Educational Statistics 6.
# <https://doi.org/10.3102/10769986006004377>
