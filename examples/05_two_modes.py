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
# # A posterior with two modes
#
# Three receivers stand nearly in a line and measure their distance from a transmitter. Where is it? A point and its
# mirror image beyond the line have all but the same distances, so there are two answers, each of them curved like the
# circles that it comes from. A Gaussian can't say this; a mixture of Gaussians, `family="mixture"`, can. There are only
# two parameters, so that the exact posterior is at hand to compare with.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pymc as pm

from scipy import stats
from scipy.special import logsumexp

import pymc_ngvi  # noqa: F401  (makes pm.fit know the method "ngvi")

plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False})

receivers = np.array([[0.0, 0.0], [1.0, 0.1], [2.0, -0.05]])
transmitter = np.array([2.5, 2.2])
noise = 0.3
rng = np.random.default_rng(0)
measured = np.hypot(*(transmitter - receivers).T) + noise * rng.normal(size=3)
print(measured.round(2))

# %%
with pm.Model(coords={"axis": ["east", "north"]}) as model:
    position = pm.Normal("position", 0, 5, dims="axis")
    distance = pm.math.sqrt(((position - receivers) ** 2).sum(axis=1))
    pm.Normal("measured", distance, noise, observed=measured)

# %% [markdown]
# The exact posterior on a grid, and the log evidence, by summing over it.

# %%
east, north = np.linspace(-3, 6, 451), np.linspace(-5, 5, 501)
grid = np.stack(np.meshgrid(east, north, indexing="ij"), axis=-1)
log_p = stats.norm.logpdf(grid, 0, 5).sum(axis=-1)
for receiver, value in zip(receivers, measured, strict=True):
    log_p += stats.norm.logpdf(value, np.hypot(*np.moveaxis(grid - receiver, -1, 0)), noise)
cell = (east[1] - east[0]) * (north[1] - north[0])
log_evidence = logsumexp(log_p) + np.log(cell)
exact = np.exp(log_p - log_evidence)
share_north = exact[:, north > 0].sum() * cell
print(f"log evidence {log_evidence:.3f}; P(north of the line) = {share_north:.3f}")

# %% [markdown]
# ## One Gaussian
#
# The ELBO is at most the log evidence; what is missing is the Kullback-Leibler divergence from q to the posterior.

# %%
with model:
    gaussian = pm.fit(method="ngvi", posterior="gaussian", random_seed=1, progressbar=False)

print(f"{gaussian.status}: ELBO {gaussian.elbo}")
print(f"KL(q || posterior) = {log_evidence - gaussian.elbo.value:.2f} nats")
print(f"Pareto k-hat: {gaussian.khat(random_seed=2):.2f}")

# %% [markdown]
# The fit has converged, to the larger one of the two answers. k-hat does not object to a missing mode: it looks at
# draws of q, and none of them goes there. But other modes were looked for after the fit, and `diagnose()` names the
# one that q misses.

# %%
diagnosis = gaussian.diagnose(thorough=True, random_seed=3)
print(f"reliable: {diagnosis.reliable}\n")
print("\n\n".join(diagnosis.reasons))

# %% [markdown]
# ## A mixture
#
# Modes are looked for from dispersed points, and components are added for as long as each gains more than `tol` nats.
# The default of .05 would stop at three; here we want more.

# %%
with model:
    mixture = pm.fit(method="ngvi", family="mixture", tol=0.005, random_seed=1, progressbar=False)

print(f"{mixture.status}: ELBO {mixture.elbo}")
print(f"KL(q || posterior) = {log_evidence - mixture.elbo.value:.2f} nats")
print(mixture.worth(random_seed=2))

# %%
fig, axes = plt.subplots(1, 3, figsize=(11, 4.2), sharex=True, sharey=True, layout="constrained")
at_grid = grid.reshape(-1, 2)
densities = [exact, *(np.exp(a.log_q(at_grid)).reshape(exact.shape) for a in (gaussian, mixture))]
levels = exact.max() * np.array([0.01, 0.05, 0.2, 0.5, 0.8])
for ax, density, title in zip(axes, densities, ["exact posterior", "one Gaussian", "mixture"], strict=True):
    ax.contourf(east, north, density.T, [*levels, 10 * exact.max()], cmap="Blues", vmin=0, vmax=exact.max())
    ax.contour(east, north, exact.T, levels[1:2], colors="0.5", linewidths=0.8, linestyles="--")
    ax.plot(*receivers.T, "k^", markersize=6, label="receivers")
    ax.plot(*transmitter, "r*", markersize=10, label="transmitter")
    ax.set(title=title, xlabel="east (km)", xlim=(-1.5, 5), ylim=(-4, 4))
axes[0].set_ylabel("north (km)")
_ = axes[0].legend(frameon=False, loc="lower right", fontsize=8)

# %% [markdown]
# The dashed line is a contour of the exact posterior in all panels. A faint bridge joins its two arcs, with less than 1
# % of the mass; q has next to nothing there, which is what the line above says of its tails. Moments and probabilities
# hardly notice.
#
# ## What the components are
#
# `components` has their means and standard deviations, `weights` their weights. Each draw of
# `sample` has the number of its component.

# %%
print(mixture.components["position"].sel(moment="mean").to_series().unstack("axis").round(2))
print("weights:", mixture.weights.values.round(2))
tree = mixture.sample(2_000, chains=1, random_seed=3)
positions, component = tree["posterior"]["position"].values[0], tree["sample_stats"]["component"].values[0]
fig, ax = plt.subplots(figsize=(4.2, 4.2), layout="constrained")
ax.scatter(*positions.T, c=component, cmap="tab10", s=4)
_ = ax.set(xlabel="east (km)", ylabel="north (km)", title="draws, by component", aspect="equal")

# %% [markdown]
# Several components follow one arc. How probable is it that the transmitter is north of the line? Either from draws, or
# from the components: each draw belongs to them with some probability, its responsibilities, and those of the northern
# components add up.

# %%
draws = mixture.draw_flat(20_000, random_seed=4)
northern = mixture.components["position"].sel(moment="mean", axis="north") > 0
from_draws = (draws[:, 1] > 0).mean()
from_weights = float(mixture.weights[northern].sum())
shares = mixture.responsibilities(draws)[:, northern.values].sum("component").to_numpy()
print(f"exact {share_north:.3f}, from draws {from_draws:.3f}, from weights {from_weights:.3f}")
print(f"draws that belong to either side with more than 99 %: {np.mean(np.abs(shares - 0.5) > 0.49):.1%}")

# %% [markdown]
# The components also split posterior draws: `sample` puts the component of each draw in `sample_stats`. So the two
# answers can be told one by one, which means and standard deviations of the whole could not.

# %%
tree = mixture.sample(20_000, chains=1, random_seed=5)
place = tree["posterior"]["position"].sel(chain=0)
side = northern.values[tree["sample_stats"]["component"].sel(chain=0).to_numpy()]
for name, chosen in [("north", side), ("south", ~side)]:
    there = place[chosen]
    print(f"{name}: probability {chosen.mean():.2f}, at {there.mean('draw').values.round(2)}, ", end="")
    print(f"sd {there.std('draw').values.round(2)}")

# %% [markdown]
# ## Checks
#
# What the text above says, as assertions.

# %%
assert gaussian.converged
assert not diagnosis.reliable
assert mixture.converged
# One of two modes: at least the log of its share is lost.
assert log_evidence - gaussian.elbo.value > -np.log(max(share_north, 1 - share_north)) - 4 * gaussian.elbo.se
assert -4 * mixture.elbo.se < log_evidence - mixture.elbo.value < 0.15
assert abs(from_draws - share_north) < 0.05
assert abs(from_weights - share_north) < 0.05
assert mixture.worth(random_seed=2).significant
assert mixture.q.n_components > 3
assert exact[:, np.abs(north) < 0.5].sum() * cell < 0.01

# %% [markdown]
# ## What to read next
#
# - `06_bad_fits`: more on diagnoses, and other repairs.
# - `11_moved_draws`: chains in each of two modes, and what the modes weigh.
# - `docs/families.md`: formulas and options.
#
# O. Arenz, P. Dahlinger, Z. Ye, M. Volpp and G. Neumann (2023). A unified perspective on natural gradient variational
# inference with Gaussian mixture models. TMLR. <https://doi.org/10.48550/arXiv.2209.11533>
