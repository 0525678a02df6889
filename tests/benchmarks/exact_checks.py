"""What an exact posterior tells beside its moments, measured in other ways.

Three parts: ``evidence``, log p(y) by bridge sampling [1]_ from draws of NUTS; ``left_out``, groups left out by fits
without them; ``tails``, outer quantiles of the effects of groups without a single success, by long runs of NUTS.

References
----------
.. [1] X.-L. Meng and W. H. Wong (1996). Simulating ratios of normalizing constants via a simple identity. Statistica
   Sinica 6(4).
.. [2] S. Frühwirth-Schnatter (2004). Estimating marginal likelihoods for mixture and Markov switching models using
   bridge sampling techniques. Econometrics Journal 7(1). https://doi.org/10.1111/j.1368-423X.2004.00125.x
"""

import argparse

from collections.abc import Callable
from typing import Any

import exact_models
import numpy as np
import pymc as pm

from exact_cells import Clock, fitted
from measure import Array, Estimate, Gaussian, load_models, log_density_of, unconstrain
from models_glmm import random_intercept_logistic, simulate_logistic
from scipy.special import logsumexp

#: Columns of the results, after those that say what was measured.
FIELDS = (
    "n_dim", "ours", "ours_se", "other", "other_se", "khat", "n", "apart", "expected", "worst", "ours_cpu", "other_cpu",
    "note",
)  # fmt: skip
N_CHAINS = 4
#: Draws of each chain.
N_BRIDGE, N_LONG = 5_000, 10_000
#: Groups of the simulated regression; groups that are left out, of the least predictive densities and of all.
N_GROUPS, N_WORST, N_LEFT_OUT = 40, 3, 6
#: Fits, and draws of each, that quantiles are taken from; parts of a chain of NUTS that tell its error.
N_FITS, N_DRAWS, N_PARTS = 5, 4_000, 2
PROBABILITIES = (0.01, 0.99)

SCHOOLS, SIMULATED, EPILEPSY, TOENAIL = (
    "eight schools, non-centred", f"simulated logistic, {N_GROUPS} groups of 10", "epilepsy", "toenail",
)  # fmt: skip
#: Models that need no data; models of each part.
OWN = (SCHOOLS, SIMULATED)
PARTS: dict[str, tuple[str, ...]] = {
    "evidence": (SCHOOLS, SIMULATED, EPILEPSY),
    "left_out": (EPILEPSY,),
    "tails": (TOENAIL,),
}


def measured(part: str, model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what is found of a model: rows with an ``item`` each."""
    return _MEASURES[part](model, options)


# --- the marginal likelihood ------------------------------------------------------------------------------------------


def of_evidence(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare log p(y) with that of bridge sampling."""
    model = _model(name, options)
    approx, cpu, _ = fitted(model, 1, {})
    value, se = approx.log_marginal_likelihood
    clock = Clock()
    draws = nuts(model, N_BRIDGE)
    bridge = bridge_sampled(log_density_of(model), draws, np.random.default_rng(1))
    found = {"n_dim": draws.shape[-1], "ours": value, "ours_se": se, "other": bridge.value, "other_se": bridge.se}
    return [{"item": "log p(y)", "n": draws.shape[0] * draws.shape[1], **found, "ours_cpu": cpu} | _seconds(clock)]


def bridge_sampled(log_p: Callable[[Array], Array], draws: Array, rng: np.random.Generator) -> Estimate:
    """Return the logarithm of the integral of exp(log p), from draws (chains, n, d) of NUTS.

    A Gaussian with the moments of one half of each chain is the proposal for the other half. Both ways round: the mean
    of two estimates.
    """
    halves = np.split(draws[:, : draws.shape[1] // 2 * 2], 2, axis=1)
    found = [_bridged(log_p, fitted_to, used, rng) for fitted_to, used in (halves, halves[::-1])]
    values, errors = zip(*found, strict=True)
    return Estimate(float(np.mean(values)), float(np.hypot(*errors)) / 2.0)


def _bridged(log_p: Callable[[Array], Array], fitted_to: Array, used: Array, rng: np.random.Generator) -> Estimate:
    d = used.shape[-1]
    flat = fitted_to.reshape(-1, d)
    q = Gaussian.from_covariance(flat.mean(axis=0), np.atleast_2d(np.cov(flat.T)))
    own, n = used.reshape(-1, d), used.shape[0] * used.shape[1]
    proposed = q.draw(n, int(rng.integers(2**31)))
    at_own, at_proposed = (log_p(theta) - q.log_density(theta) for theta in (own, proposed))
    value = float(np.median(at_own))
    for _ in range(1_000):  # as many draws of each: the optimal bridge is 1 / (p + q), p normalised
        above = logsumexp(at_proposed - np.logaddexp(at_proposed, value))
        below = logsumexp(-np.logaddexp(at_own, value))
        value, before = float(above - below), value
        if abs(value - before) < 1e-8:
            break
    return Estimate(value, _relative_error(at_own - value, at_proposed - value, used.shape[:2]))


def _relative_error(at_own: Array, at_proposed: Array, shape: tuple[int, int]) -> float:
    """Return the error of the estimate relative to it, section 3.2 of [2]_; draws of a chain depend on each other."""
    from arviz_stats import ess

    f = 1.0 / (1.0 + np.exp(-at_proposed))  # p / (p + q) at draws of q, and q / (p + q) at those of p
    g = 1.0 / (1.0 + np.exp(at_own))
    effective = float(ess(g.reshape(shape), method="mean"))
    return float(np.sqrt(np.var(f) / np.mean(f) ** 2 / len(f) + np.var(g) / np.mean(g) ** 2 / effective))


# --- groups left out --------------------------------------------------------------------------------------------------


def of_groups_left_out(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare predictive densities of some patients with differences of log p(y), with and without each.

    ``ours`` is a mean over fits, ``ours_se`` the error of one of them.
    """
    x, visit, subject, y = _epilepsy_data(options)
    model = _epilepsy(x, visit, subject, y)
    log_densities, khats, values, cpu = [], [], [], 0.0
    for seed in range(1, N_FITS + 1):
        approx = fitted(model, seed, {})[0]
        clock = Clock()
        left_out = approx.leave_out(groups=subject, random_seed=seed)
        cpu += clock.read()[0] / N_FITS
        log_densities.append(left_out.elpd_i.to_numpy())
        khats.append(left_out.pareto_k.to_numpy())
        values.append(approx.log_marginal_likelihood.value)
    log_density, spread = np.mean(log_densities, axis=0), np.std(log_densities, axis=0, ddof=1)
    with_all = Estimate.of(np.array(values))
    rows = []
    for group in _chosen(log_density):
        keep = subject != group
        other = subject[keep]
        refit, refit_cpu, _ = fitted(_epilepsy(x[keep], visit[keep], other - (other > group), y[keep]), 1, {})
        without = refit.log_marginal_likelihood
        found = {"ours": float(log_density[group]), "ours_se": float(spread[group]), "ours_cpu": cpu}
        found |= {"other": with_all.value - without.value, "other_se": float(np.hypot(with_all.se, without.se))}
        found |= {"khat": float(np.median(khats, axis=0)[group]), "n": N_FITS, "other_cpu": refit_cpu}
        rows.append({"item": f"patient {group + 1}", **found})
    return rows


def _chosen(log_density: Array) -> list[int]:
    """Return groups: those of the least densities, and some evenly among the others."""
    order = np.argsort(log_density)
    rest = np.linspace(N_WORST, len(order) - 1, N_LEFT_OUT - N_WORST + 1)[1:].astype(int)
    return [int(i) for i in (*order[:N_WORST], *order[rest])]


def _epilepsy_data(options: argparse.Namespace) -> tuple[Array, Array, Array, Array]:
    models = load_models(options.references)
    table, x, visit = models._epilepsy_design(options.data)
    return x, visit, models._idx(table["subject"])[0].astype(int), table["seizures"].to_numpy()


def _epilepsy(x: Array, visit: Array, subject: Array, y: Array) -> pm.Model:
    """Return the model of the references, of some of the patients."""
    with pm.Model() as model:
        beta, sd = pm.Normal("beta", 0.0, 10.0, shape=x.shape[1]), pm.HalfNormal("sd", 1.0, shape=2)
        effect = sd * pm.Normal("z", 0.0, 1.0, shape=(int(subject.max()) + 1, 2))
        pm.Poisson("y", pm.math.exp(x @ beta + effect[subject, 0] + effect[subject, 1] * visit), observed=y)
    return model


# --- tails of effects -------------------------------------------------------------------------------------------------


def of_tails(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare quantiles of the effects of patients without a success with those of long runs of NUTS."""
    model = _model(name, options)
    _, group, n_groups, y = load_models(options.references)._toenail_design(options.data)
    zero = np.bincount(group, weights=y, minlength=n_groups) == 0
    at, scale = _place(model, "z"), _place(model, "s_log__")
    clock = Clock()
    fits = [fitted(model, seed, {})[0].draw_flat(N_DRAWS, random_seed=seed) for seed in range(1, N_FITS + 1)]
    seconds = {"ours_cpu": clock.read()[0]}
    clock = Clock()
    chains = nuts(model, N_LONG)
    seconds |= _seconds(clock)
    parts = [part for chain in chains for part in np.array_split(chain, N_PARTS)]
    effects = {
        "z": lambda theta: theta[:, at][:, zero],
        "s z": lambda theta: np.exp(theta[:, scale]) * theta[:, at][:, zero],
    }
    rows = []
    for symbol, effect in effects.items():
        ours, theirs = [effect(t) for t in fits], [effect(t) for t in parts]
        for p in PROBABILITIES:
            rows.append(
                {"item": f"{symbol}, {p:.0%}", "n_dim": len(fits[0][0]), **compared(ours, theirs, p), **seconds}
            )
    return rows


def compared(ours: list[Array], theirs: list[Array], p: float) -> dict[str, Any]:
    """Return how far quantiles of independent sets of draws (n, groups) are apart, in standard deviations.

    ``ours`` and ``other``: the mean over groups, and its error. ``apart``: the root mean square over groups, with what
    it would be by Monte Carlo error alone (``expected``); ``worst``: the largest.
    """
    every = [np.concatenate(sets) for sets in (ours, theirs)]
    mean, sd = every[1].mean(axis=0), every[1].std(axis=0)
    pooled = [(np.quantile(draws, p, axis=0) - mean) / sd for draws in every]
    single = [np.array([(np.quantile(draws, p, axis=0) - mean) / sd for draws in sets]) for sets in (ours, theirs)]
    apart = pooled[0] - pooled[1]
    variance = sum(q.var(axis=0, ddof=1) / len(q) for q in single)
    found = {"apart": _rms(apart), "expected": float(np.sqrt(variance.mean()))}
    found |= {"worst": float(apart[np.argmax(np.abs(apart))]), "n": len(apart)}
    for name, values, sets in zip(("ours", "other"), pooled, single, strict=True):
        of_sets = sets.mean(axis=1)
        found |= {name: float(values.mean()), f"{name}_se": float(of_sets.std(ddof=1) / np.sqrt(len(of_sets)))}
    return found


# --- what they share --------------------------------------------------------------------------------------------------


def nuts(model: pm.Model, n: int) -> Array:
    """Return unconstrained draws of nutpie, (chains, n, d), one chain after another."""
    import nutpie

    compiled = nutpie.compile_pymc_model(model)
    trace = nutpie.sample(compiled, chains=N_CHAINS, tune=1_000, draws=n, cores=1, seed=1, progress_bar=False)
    flat = unconstrain(trace["posterior"], model)
    return flat.reshape(N_CHAINS, n, -1)


def _model(name: str, options: argparse.Namespace) -> pm.Model:
    if name == SCHOOLS:
        return exact_models.schools(False)
    if name == SIMULATED:
        return random_intercept_logistic(simulate_logistic(N_GROUPS, 1))
    model: pm.Model = getattr(load_models(options.references), name)(options.data)
    return model


def _place(model: pm.Model, name: str) -> slice:
    """Return where a value variable lies in flat vectors."""
    point, start = model.initial_point(), 0
    for value in model.value_vars:
        if value.name == name:
            return slice(start, start + point[name].size)
        start += point[value.name].size
    raise ValueError(f"The model has no {name}.")


def _seconds(clock: Clock) -> dict[str, float]:
    return {"other_cpu": clock.read()[0]}


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(values**2)))


_MEASURES: dict[str, Callable[[str, argparse.Namespace], list[dict[str, Any]]]] = {
    "evidence": of_evidence,
    "left_out": of_groups_left_out,
    "tails": of_tails,
}
