"""Plain models: ten regressions with few events, and narrow peaks beside broad ones, against values of NumPy alone.

    PYTHONPATH=tests python tests/benchmarks/plain_models.py regressions [NAME ...] | peaks

A row for each model and seed: the verdict, the largest errors of means, sds and limits (in standard deviations, and sds
as ratios), those in their combined Monte Carlo errors, and processor seconds. Six seeds of the cases of effects and of
walks: `python tests/battery/table.py heavy_groups walk_exact_narrow --seeds 1 2 3 4 5 6`.
"""

import itertools
import sys
import time
import warnings

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt

from battery.test_kinds import climb, hamiltonian
from scipy import special

import pymc_ngvi  # noqa: F401  (makes pm.fit know the method)

#: Likelihood, rows, coefficients, events.
REGRESSIONS = (
    "logit_20000_26_25", "logit_5000_40_60", "logit_100000_40_60", "logit_2000_20_12", "probit_20000_25_25",
    "cloglog_20000_25_20", "cloglog_5000_18_10", "poisson_5000_30_40", "poisson_20000_16_15", "nb_5000_30_40",
)  # fmt: skip


def regression(name):
    """Return a model, its rows in NumPy, covariates, sds of the prior, and where a climb to the mode begins."""
    kind, (n, p, events) = name.split("_")[0], map(int, name.split("_")[1:])
    rng = np.random.default_rng(sum(map(ord, name)))
    x = np.column_stack([np.ones(n), rng.normal(size=(n, p - 1))])
    x[:, 2], x[:, 3] = 0.8 * x[:, 1] + 0.6 * x[:, 2], 0.5 * np.exp(x[:, 3])
    score = x[:, 1:5] @ [1.0, -1.0, 0.3, 0.5]
    if kind in ("poisson", "nb"):
        rate = np.exp(score) * events / np.exp(score).sum()
        y = rng.poisson(rate * (rng.gamma(2.0, 0.5, n) if kind == "nb" else 1.0))
    else:
        noise = {"logit": rng.logistic, "probit": rng.normal, "cloglog": rng.gumbel}[kind]
        score = score + noise(size=n)
        y = (score > np.sort(score)[-events - 1]).astype(int)
    sd = np.r_[10.0, np.full(p - 1, 2.0)]
    with pm.Model() as model:
        eta = pt.dot(x, pm.Normal("b", 0, sd, shape=p))
        {
            "logit": lambda: pm.Bernoulli("y", logit_p=eta, observed=y),
            "probit": lambda: pm.Bernoulli("y", pm.math.invprobit(eta), observed=y),
            "cloglog": lambda: pm.Bernoulli("y", 1 - pm.math.exp(-pm.math.exp(eta)), observed=y),
            "poisson": lambda: pm.Poisson("y", pm.math.exp(eta), observed=y),
            "nb": lambda: pm.NegativeBinomial("y", mu=pm.math.exp(eta), alpha=2.0, observed=y),
        }[kind]()
    rows = {
        "logit": lambda e: y * e - np.logaddexp(0, e),
        "probit": lambda e: special.log_ndtr(np.where(y, e, -e)),
        "cloglog": lambda e: np.where(y, np.log(-np.expm1(-np.exp(np.maximum(e, -700)))), -np.exp(e)),
        "poisson": lambda e: y * e - np.exp(e),
        "nb": lambda e: y * e - (y + 2.0) * np.log(2.0 + np.exp(e)),
    }[kind]
    start = np.r_[{"probit": special.ndtri}.get(kind, np.log)(y.mean()), np.zeros(p - 1)]
    return model, rows, x, sd, start


def reference(rows, x, sd, start, h=1e-3):
    """Return mean, sd and limits, and the effective size of the draws that they come from: Hamiltonian Monte Carlo."""

    def log_p(b):
        low, value, high = (rows(b @ x.T + step) for step in (-h, 0, h))
        return value.sum(1) - 0.5 * ((b / sd) ** 2).sum(1), (high - low) @ x / (2 * h) - b / sd**2

    def hessian(b):
        return (x.T * (rows(x @ b + h) - 2 * rows(x @ b) + rows(x @ b - h)) / h**2) @ x - np.diag(sd**-2)

    mode = climb(lambda b: log_p(b)[0], lambda b: log_p(b[None])[1][0], hessian, start)
    draws = hamiltonian(log_p, mode, np.linalg.inv(-hessian(mode)), n_chains=16)
    size = min(float(az.ess(one.reshape(-1, 16).T)) for one in draws.T)
    return (draws.mean(0), draws.std(0), *np.quantile(draws, (0.05, 0.95), axis=0)), size


def peaks():
    """Return models by name, with means and sds: shares of mass in narrow peaks of several widths and places."""
    for share, width, d in itertools.product((0.2, 0.4, 0.6), (0.1, 0.2), (3, 5, 8)):
        shift = np.r_[0.8, -0.5, np.zeros(d - 2)]
        with pm.Model() as model:
            x = pm.Flat("x", shape=d)
            narrow = -0.5 * (((x - shift) / width) ** 2).sum() - d * np.log(width)
            pm.Potential("p", pt.logaddexp(np.log(1 - share) - 0.5 * (x**2).sum(), np.log(share) + narrow))
        mean = share * shift
        yield f"{share:g} in {width:g}, {d}", model, mean, np.sqrt(share * (width**2 + shift**2) + 1 - share - mean**2)


def row(name, seed, model, size, mean, sd, *limits):
    """Print what a fit comes to."""
    clock = time.process_time()
    with warnings.catch_warnings(), model:
        warnings.simplefilter("ignore")
        approx = pm.fit(method="ngvi", random_seed=seed, progressbar=False)
    took, [variable] = time.process_time() - clock, model.free_RVs
    x = approx.sample(8_000, random_seed=seed).posterior[variable.name].to_numpy().reshape(8_000, -1)
    error = np.sqrt(1 / size + 1 / min(8_000, getattr(approx.checks, "effective_size", 8_000)))
    off = np.abs((x.mean(0) - mean) / sd).max(), np.abs(np.log(x.std(0) / sd)).max()
    ends = [np.abs((np.quantile(x, p, axis=0) - q) / sd).max() for p, q in zip((0.05, 0.95), limits, strict=False)]
    shown = " ".join(f"{v:.3f} ({v / error / k:.1f})" for v, k in zip((*off, *ends), (1, 0.7, 2.1, 2.1), strict=False))
    kind = approx.record.posterior[:40]
    print(f"{name:22s} {seed} {kind}, {approx.diagnose(random_seed=1).verdict}: {shown}; {took:.1f} s", flush=True)


def main(which, *names):
    """Print a table."""
    if which == "peaks":
        for (name, model, mean, sd), seed in itertools.product(peaks(), (1, 2, 3)):
            row(name, seed, model, np.inf, mean, sd)
        return
    for name in names or REGRESSIONS:
        model, *parts = regression(name)
        known, size = reference(*parts)
        for seed in (1, 2, 3):
            row(name, seed, model, size, *known)


if __name__ == "__main__":
    main(*sys.argv[1:])
