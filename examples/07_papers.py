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
# # The updates of the papers, side by side
#
# Natural gradients for Gaussian approximations have been proposed in several forms. All of them move a Gaussian q
# towards the same optimum; they differ in the coordinates of a step (`update`), in how the expectations in it are
# estimated (`estimator`), and in how far it goes (`step`). Here they are run on one regression and one hierarchical
# model, and the ELBO is drawn against what it cost: gradients, and seconds.
#
# | | update | estimator | step |
# |---|---|---|---|
# | this package's default | `natural` | `quadrature`: exact expectations | `linesearch` |
# | Khan and Nielsen (2018), VON | `natural` | `price` | `constant` |
# | Lin et al. (2020) | `natural_pd` | `price` | `constant` |
# | Kumar et al. (2025) | `sqrt` | `price` | `constant` |
# | Khan et al. (2016) | `natural` | `price` | `proximal` |
# | Wu and Gardner (2024) | `natural` | `pathwise`: gradients alone | `decay` |
# | Tan (2025) | `cholesky` | `pathwise`: gradients alone | `snngm` |
# | ordinary gradients, Titsias and Lázaro-Gredilla (2014) | `euclidean` | `pathwise` | `adam` |

# %%
import logging
import time
import warnings

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm

from matplotlib import ticker

import pymc_ngvi

logging.getLogger("pymc").setLevel(logging.WARNING)
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False})
DATA = Path("data")

# %% [markdown]
# ## How it is measured
#
# A callback estimates the ELBO after iterations 1, 2, 3, 4, 6, 8, ..., always with the same 2,000 base draws, and its
# own time is not counted. Seconds begin with the call of `pm.fit`: they contain compilation, and whatever else the
# machine did. A fit may end by its own rule or after `n` iterations, and the warning that goes with the latter is
# switched off.


# %%
class Trace:
    """Callback that records what a fit has cost, and its ELBO on fixed base draws."""

    def __init__(self, n_dim):
        self.base = np.random.default_rng(0).standard_normal((2_000, n_dim))
        self.rows, self.next, self.aside, self.start = [], 1, 0.0, time.perf_counter()

    def __call__(self, approx, losses, i):
        """Record every iteration at first, then ever fewer of them."""
        if i >= self.next:
            self.record(approx)
            self.next = max(i + 1, round(1.3 * i))

    def record(self, approx):
        """Add a row."""
        began = time.perf_counter()
        theta = approx.q.draws(self.base)
        elbo = np.mean(approx.log_p(theta) - approx.log_q(theta))
        density = approx.density
        self.rows.append((density.n_gradients, density.n_hessians, began - self.start - self.aside, elbo))
        self.aside += time.perf_counter() - began

    def table(self):
        """Return what was recorded."""
        return pd.DataFrame(self.rows, columns=["gradients", "Hessians", "seconds", "ELBO"])


def run(model, methods):
    """Return traces and outcomes of fits, by name."""
    traces, outcomes = {}, {}
    for name, options in methods.items():
        trace = Trace(sum(v.size for v in model.initial_point().values()))
        with model, warnings.catch_warnings():
            warnings.simplefilter("ignore", pymc_ngvi.ConvergenceWarning)
            options = {"posterior": "gaussian", "random_seed": 1, "progressbar": False, **options}
            approx = pm.fit(method="ngvi", callbacks=[trace], **options)
        trace.record(approx)
        traces[name], outcomes[name] = trace.table(), approx
    return traces, outcomes


def report(traces, outcomes, best):
    """Return a table: how near to the best ELBO, and at what cost."""
    rows = {
        name: {
            "nats below the best": best - trace["ELBO"].iloc[-1],
            "gradients": outcomes[name].n_gradients,
            "Hessians": outcomes[name].n_hessians,
            "iterations": outcomes[name].n_iterations,
            "seconds": trace["seconds"].iloc[-1],
            "ended": str(outcomes[name].status),
        }
        for name, trace in traces.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def draw(traces, best, title, top):
    """Draw how far the ELBO is below the best, against gradients and seconds."""
    fig, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for k, (name, trace) in enumerate(traces.items()):
        below = np.maximum(best - trace["ELBO"], 0.01)  # what 2,000 draws can resolve
        style = {"color": f"C{k}", "linestyle": ["-", "--", ":"][k % 3], "linewidth": 1.8, "label": name}
        axes[0].loglog(trace["gradients"], below, **style)
        axes[1].loglog(trace["seconds"], below, **style)
    axes[0].set(ylabel="nats below the best ELBO", xlabel="gradients", ylim=(0.008, top))
    axes[1].set(xlabel="seconds from the call, with compilation")
    axes[1].xaxis.set_major_locator(ticker.LogLocator(subs=(1, 3)))
    axes[1].xaxis.set_major_formatter("{x:g}")
    axes[1].xaxis.set_minor_locator(ticker.NullLocator())
    fig.suptitle(title)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)


# %% [markdown]
# ## A logistic regression
#
# The heart data of `02_logistic_regression`: 270 patients, 19 coefficients, a dense covariance.

# %%
table = pd.read_csv(DATA / "heart.csv")
x, y = table.drop(columns="y").to_numpy(), table["y"].to_numpy()
with pm.Model() as regression:
    intercept = pm.Normal("intercept", 0, 5)
    beta = pm.Normal("beta", 0, 2.5, shape=x.shape[1])
    pm.Bernoulli("disease", logit_p=intercept + x @ beta, observed=y)

methods = {
    "default": {},
    "natural, constant": {"step": "constant"},
    "natural_pd, constant": {"update": "natural_pd", "step": "constant"},
    "sqrt, constant": {"update": "sqrt", "step": "constant"},
    "natural, proximal": {"step": "proximal"},
    "natural, pathwise, decay": {"update": "natural", "estimator": "pathwise", "step": "decay", "n": 2_000},
    "cholesky, reparam, snngm": {"step": "snngm", "n": 10_000},
    "euclidean, reparam, adam": {"step": "adam", "n": 5_000},
}
traces, outcomes = run(regression, methods)
best = max(trace["ELBO"].iloc[-1] for trace in traces.values())
outcome = report(traces, outcomes, best)
outcome.round({"nats below the best": 2, "seconds": 1})

# %%
draw(traces, best, "Logistic regression, 19 coefficients", top=1e3)

# %% [markdown]
# The default takes no draws: each of its expectations counts as one gradient, and about ten are enough. With Hessians
# at draws, the other updates reach the optimum in a hundred iterations at most: on a posterior that is nearly
# Gaussian, a natural-gradient step is nearly a Newton step. How far to go (`step`) counts for more than in which
# coordinates (`update`). With gradients alone each iteration says less. Tan's normalised steps take several times as
# many gradients as Hessian methods do, ordinary gradients with Adam several times more. Wu and Gardner's decaying
# steps, which suit minibatches, have many draws to an iteration: few iterations, and the most gradients.
#
# ## A hierarchical model
#
# The seizure counts of `01_epilepsy`: 126 parameters, with the sparse precision that the model has (Tan's algorithm 2c
# is `cholesky_precision` with gradients alone).

# %%
table = pd.read_csv(DATA / "epilepsy.csv")
age = np.log(table["age"].to_numpy(dtype=float))
base, treated, visit = (table[c].to_numpy(dtype=float) for c in ("log_base4", "trt", "visit_code"))
design = np.column_stack([np.ones(len(table)), base, treated, base * treated, age - age.mean(), visit])
patient, patients = pd.factorize(table["subject"])
with pm.Model() as glmm:
    beta = pm.Normal("beta", 0, 10, shape=6)
    sd = pm.HalfNormal("sd", 1, shape=2)
    z = pm.Normal("z", 0, 1, shape=(len(patients), 2))
    b = (z * sd)[patient]
    pm.Poisson("seizures", pm.math.exp(design @ beta + b[:, 0] + b[:, 1] * visit), observed=table["seizures"])

glmm_methods = {
    "default (sparse)": {},
    "default, dense": {"family": "full"},
    "cholesky_precision, price": {"family": "sparse", "update": "cholesky_precision"},
    "natural, proximal": {"family": "sparse", "step": "proximal", "n": 500},
    "2c of Tan, snngm": {"family": "sparse", "update": "cholesky_precision", "estimator": "pathwise", "n": 6_000},
    "euclidean, reparam, adam": {"family": "sparse", "step": "adam", "n": 4_000},
}
glmm_traces, glmm_outcomes = run(glmm, glmm_methods)
glmm_best = max(trace["ELBO"].iloc[-1] for trace in glmm_traces.values())
glmm_outcome = report(glmm_traces, glmm_outcomes, glmm_best)
glmm_outcome.round({"nats below the best": 2, "seconds": 1})

# %%
draw(glmm_traces, glmm_best, "Poisson GLMM, 126 parameters", top=1e4)

# %% [markdown]
# Sparse and dense fits take the same gradients, by theory and here; a sparse Hessian takes 10 products, a dense one
# 126. Tan's algorithm 2c comes to the same optimum from gradients alone, in thousands of iterations, and hovers about
# it at a distance that its step size sets. Ordinary gradients with their default step size do not get there: the stop
# rule sees no more rise while the ELBO is still far too low.
#
# One run of each with default options says what to expect, and not which paper is better: step sizes can be tuned, and
# the stochastic rules were made for data too large for Hessians of all of it. The experiments in `docs/experiments`
# repeat the settings of the papers.
#
# ## Checks
#
# What the text above says, as assertions.

# %%
exact = ["default", "natural, constant", "natural_pd, constant", "sqrt, constant"]
assert (outcome.loc[exact, "nats below the best"] < 0.1).all()
assert (outcome.loc[exact, "iterations"] < 200).all()
assert outcome.loc["default", "ended"] == "converged"


def gradients_to(traces, best, nats):
    """Return how many gradients each fit took to come within so many nats of the best; inf where it did not."""
    reached = {name: trace.loc[best - trace["ELBO"] < nats, "gradients"] for name, trace in traces.items()}
    return pd.Series({name: found.min() if len(found) else np.inf for name, found in reached.items()})


needed = gradients_to(traces, best, 1.0)
assert needed[exact].max() < needed["cholesky, reparam, snngm"] < needed["euclidean, reparam, adam"]
assert needed["natural, pathwise, decay"] > needed["euclidean, reparam, adam"]
assert outcome.loc["natural, pathwise, decay", "iterations"] < 1_000
assert glmm_outcome.loc["default (sparse)", "ended"] == "converged"
assert (glmm_outcome["nats below the best"].iloc[:3] < 0.3).all()
glmm_needed = gradients_to(glmm_traces, glmm_best, 3.0)
assert glmm_needed["default (sparse)"] < glmm_needed["2c of Tan, snngm"]
assert glmm_outcome.loc["2c of Tan, snngm", "nats below the best"] < 2
assert glmm_outcome.loc["euclidean, reparam, adam", "nats below the best"] > 100

# %% [markdown]
# ## What to read next
#
# - `docs/choosing.md`: all updates, estimators and step rules, and what goes with what.
# - `docs/experiments`: the papers' own experiments, repeated.
# - `docs/benchmarks.md`: the default beside other methods.
#
# K. Wu and J. R. Gardner (2024). Understanding stochastic natural gradient variational inference. ICML.
# <https://doi.org/10.48550/arXiv.2406.01870>
#
# M. E. Khan and D. Nielsen (2018). Fast yet simple natural-gradient descent for variational inference in complex
# models. ISITA. <https://doi.org/10.23919/ISITA.2018.8664326>
#
# L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational approximation.
# <https://doi.org/10.48550/arXiv.2109.00375>
#
# M. E. Khan, R. Babanezhad, W. Lin, M. Schmidt and M. Sugiyama (2016). Faster stochastic variational inference using
# proximal-gradient methods with general divergence functions. UAI. <https://doi.org/10.48550/arXiv.1511.00146>
