"""Models of ``posteriors.py`` that no structure helps with, and nutpie beside them; all are simulated."""

import time

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt

from pymc.distributions.transforms import ordered


def rare_events(n_predictors: int = 40, n_events: int = 30) -> pm.Model:
    """Return a logistic regression of 400 persons with more than one predictor for each event."""
    rng = np.random.default_rng(11)
    x = rng.normal(size=(400, n_predictors))
    x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    score = x[:, :5] @ [1.0, -1.0, 0.8, 0.5, -0.5] + rng.logistic(size=400)
    with pm.Model() as model:
        level, slope = pm.Normal("level", 0, 5), pm.Normal("slope", 0, 2.5, shape=n_predictors)
        eta = level + x @ slope
        pm.Deterministic("risk", pm.math.sigmoid(eta[:20]))
        pm.Bernoulli("y", logit_p=eta, observed=score > np.sort(score)[-n_events - 1])
    return model


def marketing_mix(n: int = 156, n_channels: int = 3, n_lags: int = 8) -> pm.Model:
    """Return three years of weekly sales: channels with a carry-over and a saturation, a trend and a season."""
    rng = np.random.default_rng(12)
    spend = rng.gamma(2.0, 0.5, (n, n_channels)) * (rng.random((n, n_channels)) < 0.7)
    lagged = np.stack([np.vstack([np.zeros((k, n_channels)), spend[: n - k]]) for k in range(n_lags)])
    year, lags = np.arange(n) / 52.0, np.arange(n_lags)[:, None]
    season = np.column_stack([f(2.0 * np.pi * k * year) for k in (1, 2) for f in (np.sin, np.cos)])
    true = np.array([0.3, 0.6, 0.5]) ** lags
    carried = (true[:, None] / true.sum(axis=0) * lagged).sum(axis=0)
    effect = (1.0 - np.exp(-np.array([1.0, 0.5, 2.0]) * carried)) @ [1.0, 0.7, 0.4]
    y = 2.0 + 0.3 * year + season @ [0.3, -0.2, 0.1, 0.1] + effect + 0.15 * rng.normal(size=n)
    with pm.Model() as model:
        level, trend, wave = pm.Normal("level", 0, 2), pm.Normal("trend", 0, 1), pm.Normal("wave", 0, 0.5, shape=4)
        keep, rate = pm.Beta("keep", 1, 3, shape=n_channels), pm.Gamma("rate", 3, 2, shape=n_channels)
        size, noise = pm.HalfNormal("size", 1, shape=n_channels), pm.HalfNormal("noise", 0.5)
        weights = keep**lags
        carried = (weights[:, None] / weights.sum(axis=0) * lagged).sum(axis=0)
        each = size * (1.0 - pt.exp(-rate * carried))
        total = pm.Deterministic("total", each.sum(axis=0))
        pm.Deterministic("share", total / total.sum())
        pm.Normal("y", level + trend * year + pt.dot(season, wave) + each.sum(axis=1), noise, observed=y)
    return model


def regularised_horseshoe(n_predictors: int = 100, n: int = 150) -> pm.Model:
    """Return a regression with a regularised horseshoe prior, five coefficients of which are not zero."""
    rng = np.random.default_rng(13)
    x = rng.normal(size=(n, n_predictors))
    y = x[:, :5] @ [2.0, -1.5, 1.0, 0.75, -0.5] + rng.normal(size=n)
    with pm.Model() as model:
        tau, local = pm.HalfCauchy("tau", 0.05), pm.HalfCauchy("local", 1.0, shape=n_predictors)
        slab = pm.InverseGamma("slab", 2.0, 8.0)
        scale = local * pt.sqrt(slab / (slab + tau**2 * local**2))
        beta = pm.Deterministic("beta", tau * scale * pm.Normal("z", 0.0, 1.0, shape=n_predictors))
        pm.Normal("y", pt.dot(x, beta), pm.HalfNormal("sigma", 2.0), observed=y)
    return model


def motorcycle(n: int = 100) -> pm.Model:
    """Return Gaussian processes for the mean of measurements and for the logarithm of their noise."""
    rng = np.random.default_rng(14)
    x = np.sort(rng.uniform(0.0, 10.0, n))
    noise = np.exp(-1.5 + 1.2 * np.exp(-0.5 * (x - 6.0) ** 2))
    y = np.sin(x) * np.exp(-0.1 * x) + noise * rng.normal(size=n)
    with pm.Model() as model:
        length, size = pm.InverseGamma("length", 5, 5, shape=2), pm.HalfNormal("size", 1, shape=2)
        mean, log_noise = (
            pm.gp.Latent(cov_func=size[i] ** 2 * pm.gp.cov.Matern52(1, length[i])).prior(name, X=x[:, None])
            for i, name in enumerate(("mean", "log_noise"))
        )
        pm.Deterministic("sd", pt.exp(log_noise[::10] + pm.Normal("level", -1.0, 1.0)))
        pm.Normal("y", mean, pt.exp(model["level"] + log_noise), observed=y)
    return model


def factors(n: int = 100, n_items: int = 8) -> pm.Model:
    """Return measurements with two common factors; loadings above the diagonal are 0, those on it positive."""
    rng = np.random.default_rng(15)
    true = np.tril(rng.normal(0.0, 0.7, (n_items, 2)))
    np.fill_diagonal(true, 1.0)
    y = rng.normal(size=(n, 2)) @ true.T + 0.6 * rng.normal(size=(n, n_items))
    with pm.Model() as model:
        diagonal, below = pm.HalfNormal("diagonal", 1, shape=2), pm.Normal("below", 0, 1, shape=2 * n_items - 3)
        rows, cols = np.tril_indices(n_items, -1, 2)
        loadings = pt.zeros((n_items, 2))[np.arange(2), np.arange(2)].set(diagonal)
        loadings = pm.Deterministic("loadings", loadings[rows, cols].set(below))
        noise = pm.HalfNormal("noise", 1, shape=n_items)
        scores = pm.Normal("scores", 0, 1, shape=(n, 2))
        pm.Deterministic("communality", (loadings**2).sum(axis=1) / ((loadings**2).sum(axis=1) + noise**2))
        pm.Normal("y", scores @ loadings.T, noise, observed=y)
    return model


def epidemic(n_days: int = 30, per_day: int = 4) -> pm.Model:
    """Return daily counts of an epidemic: susceptible, infected, recovered, by steps of a quarter of a day."""
    rng, n_people = np.random.default_rng(16), 1_000.0

    def step(s, i, beta, gamma):  # type: ignore[no-untyped-def]
        new = beta * s * i / (n_people * per_day)
        return s - new, i + new - gamma * i / per_day

    now, infected = (n_people - 3.0, 3.0), []
    for _ in range(n_days * per_day):
        now = step(*now, 0.8, 0.3)
        infected.append(now[1])
    y = rng.negative_binomial(10.0, 10.0 / (10.0 + np.array(infected[per_day - 1 :: per_day])))
    with pm.Model() as model:
        beta, gamma = pm.LogNormal("beta", -0.5, 0.5), pm.LogNormal("gamma", -1.0, 0.5)
        first, spread = pm.LogNormal("first", 1.0, 1.0), pm.HalfNormal("spread", 0.5)
        pm.Deterministic("reproduction", beta / gamma)
        _, curve = pytensor.scan(
            step, outputs_info=[n_people - first, first], non_sequences=[beta, gamma], n_steps=n_days * per_day,
            return_updates=False,
        )  # fmt: skip
        days = pm.Deterministic("days", curve[per_day - 1 :: per_day])
        pm.NegativeBinomial("y", mu=days, alpha=1.0 / spread**2, observed=y)
    return model


def dirichlet_process(n: int = 200, n_parts: int = 8) -> pm.Model:
    """Return a mixture of normals by broken sticks, whose places are in order."""
    rng = np.random.default_rng(17)
    part = rng.choice(3, n, p=[0.5, 0.3, 0.2])
    y = rng.normal(np.array([-3.0, 0.5, 3.0])[part], np.array([0.6, 0.5, 0.8])[part])
    at = np.linspace(-5.0, 5.0, 21)
    with pm.Model() as model:
        alpha = pm.Gamma("alpha", 2, 2)
        stick = pm.Beta("stick", 1.0, alpha, shape=n_parts - 1)
        left = pt.concatenate([[1.0], pt.cumprod(1.0 - stick)])
        weight = pm.Deterministic("weight", left * pt.concatenate([stick, [1.0]]))
        place = pm.Normal("place", 0, 3, shape=n_parts, transform=ordered, initval=np.linspace(-3.0, 3.0, n_parts))
        scale = pm.InverseGamma("scale", 3, 2, shape=n_parts)
        of_parts = pm.logp(pm.Normal.dist(place, scale), at[:, None]) + pt.log(weight)
        pm.Deterministic("density", pt.exp(pt.logsumexp(of_parts, axis=1)))
        pm.NormalMixture("y", weight, place, sigma=scale, observed=y)
    return model


def near_binomial(n: int = 40, n_predictors: int = 16) -> pm.Model:
    """Return a beta-binomial regression of data that are binomial: its precision is near its bound, infinity."""
    rng = np.random.default_rng(18)
    size, x = rng.integers(20, 60, n), rng.normal(size=(n, n_predictors))
    y = rng.binomial(size, 1.0 / (1.0 + np.exp(1.0 - 0.7 * x[:, 0])))
    with pm.Model() as model:
        level, slope = pm.Normal("level", 0, 2), pm.Normal("slope", 0, 1.5, shape=n_predictors)
        precision = pm.HalfCauchy("precision", 50.0)
        mean = pm.Deterministic("mean", pm.math.sigmoid(level + x @ slope))
        pm.BetaBinomial("y", alpha=mean * precision, beta=(1.0 - mean) * precision, n=size, observed=y)
    return model


def by_nutpie(model: pm.Model) -> dict[str, object]:
    """Sample with nutpie as it comes, on one core: seconds with compilation and, as warm, without."""
    import arviz_stats
    import nutpie

    start, cpu = time.perf_counter(), time.process_time()
    compiled = nutpie.compile_pymc_model(model)
    compiled_at = time.perf_counter(), time.process_time()
    tree = nutpie.sample(compiled, cores=1, seed=1, progress_bar=False)
    end = time.perf_counter(), time.process_time()
    sizes = arviz_stats.ess(tree.posterior.dataset[[v.name for v in model.free_RVs]], method="bulk")
    return {
        "seconds": end[0] - compiled_at[0], "cpu": end[1] - compiled_at[1],
        "first_seconds": end[0] - start, "first_cpu": end[1] - cpu,
        "size": float(min(float(sizes[name].min()) for name in sizes.data_vars)),
    }  # fmt: skip


#: By the names that are given.
UNSTRUCTURED = {
    build.__name__: build
    for build in (
        rare_events, marketing_mix, regularised_horseshoe, motorcycle, factors, epidemic, dirichlet_process,
        near_binomial,
    )
}  # fmt: skip
