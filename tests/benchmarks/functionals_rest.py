"""Regressions, survival, marketing and items of ``functionals.py``."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from functionals_parts import differences, effects, fitted, groups
from scipy.special import expit


def negative_binomial() -> pm.Model:
    """Return a regression of 17 coefficients on 60 overdispersed counts."""
    rng = np.random.default_rng(16)
    x = rng.normal(size=(60, 17))
    mean = np.exp(0.2 + 0.5 * x[:, 0])
    y = rng.negative_binomial(0.4, 0.4 / (0.4 + mean))
    with pm.Model() as model:
        a, b, k = pm.Normal("a", 0, 3), pm.Normal("b", 0, 1, shape=17), pm.HalfCauchy("k", 2)
        pm.NegativeBinomial("y", mu=fitted(a + pt.dot(x, b), pt.exp), alpha=k, observed=y)
    return model


def survival(*, swapped: bool = False) -> pm.Model:
    """Return Weibull times of 90 patients of 10 hospitals, of which a third are censored."""
    rng = np.random.default_rng(41)
    g = groups(10, 90, rng)
    x = rng.normal(size=(90, 3))
    scale = np.exp(1.0 + x @ [0.5, -0.3, 0.0] + rng.normal(0, 0.4, 10)[g])
    times, end = scale * rng.weibull(1.4, 90), 4.0
    with pm.Model() as model:
        a, b = pm.Normal("a", 0, 2), pm.Normal("b", 0, 1, shape=3)
        alpha, s = pm.LogNormal("alpha", 0, 0.5), pm.HalfNormal("s", 1)
        u = effects("u", s, 10, centred=False, swapped=swapped)
        own = pm.Deterministic("own", a + u)
        pm.Deterministic("own_steps", differences(own))
        scale = fitted(a + pt.dot(x, b) + u[g], pt.exp)
        pm.Deterministic("median", scale * pt.log(2.0) ** (1.0 / alpha))
        pm.Deterministic("alive", pt.exp(-((2.0 / scale) ** alpha)))
        time = pm.Weibull.dist(alpha=alpha, beta=scale)
        pm.Censored("t", time, lower=None, upper=end, observed=np.minimum(times, end))
    return model


def marketing() -> pm.Model:
    """Return 80 weeks of sales: two channels with a carry-over and a saturation, a trend and a season."""
    rng, n, n_lags = np.random.default_rng(42), 80, 8
    week = np.arange(n)
    spend = rng.gamma(1.0, 1.0, (2, n)) * (rng.uniform(size=(2, n)) < 0.6)
    spend /= spend.max(axis=1, keepdims=True)
    lagged = np.stack([np.stack([np.concatenate([np.zeros(k), c[: n - k]]) for k in range(n_lags)]) for c in spend])
    season = np.stack([np.sin(2 * np.pi * week / 52), np.cos(2 * np.pi * week / 52)])

    def contribution(weights, lam, beta):
        carried = [(w[:, None] * lagged[c]).sum(axis=0) / w.sum() for c, w in enumerate(weights)]
        return [beta[c] * (1 - np.exp(-lam[c] * carried[c])) for c in range(2)]

    true = contribution([0.5 ** np.arange(n_lags), 0.2 ** np.arange(n_lags)], [3.0, 2.0], [1.2, 0.8])
    y = 3.0 + 0.5 * week / n + 0.3 * season[0] + true[0] + true[1] + rng.normal(0, 0.15, n)
    with pm.Model() as model:
        a, trend, wave = pm.Normal("a", 3, 2), pm.Normal("trend", 0, 1), pm.Normal("wave", 0, 0.5, shape=2)
        keep, lam = pm.Beta("keep", 2, 2, shape=2), pm.Gamma("lam", 3, 1, shape=2)
        beta, noise = pm.HalfNormal("beta", 2, shape=2), pm.HalfNormal("noise", 0.5)
        weights = keep[:, None] ** np.arange(n_lags)
        carried = (weights[:, :, None] * lagged).sum(axis=1) / weights.sum(axis=1)[:, None]
        own = pm.Deterministic("channel", beta[:, None] * (1 - pt.exp(-lam[:, None] * carried)))
        totals = pm.Deterministic("channel_total", own.sum(axis=1))
        pm.Deterministic("share", totals / totals.sum())
        pm.Deterministic("channel_steps", differences(totals))
        mu = fitted(a + trend * week / n + pt.dot(wave, season) + own.sum(axis=0))
        pm.Normal("y", mu, noise, observed=y)
    return model


def ordinal(*, swapped: bool = False) -> pm.Model:
    """Return answers on a scale of five in 12 groups."""
    rng = np.random.default_rng(43)
    g = groups(12, 120, rng)
    x = rng.normal(size=(120, 2))
    latent = x @ [0.8, -0.5] + rng.normal(0, 0.7, 12)[g] + rng.logistic(size=120)
    y = np.digitize(latent, [-2.0, -0.7, 0.6, 1.8])
    with pm.Model() as model:
        b, s = pm.Normal("b", 0, 1, shape=2), pm.HalfNormal("s", 1)
        u = effects("u", s, 12, centred=False, swapped=swapped)
        order = pm.distributions.transforms.ordered
        cuts = pm.Normal("cuts", 0, 3, shape=4, transform=order, initval=[-2.0, -0.7, 0.7, 2.0])
        eta = fitted(pt.dot(x, b) + u[g])
        above = pm.math.sigmoid(eta[:, None] - cuts)  # P(y > k)
        score = pm.Deterministic("score", above.sum(axis=1))
        pm.Deterministic("total_score", score.sum())
        pm.Deterministic("top", above[:, -1].sum())
        pm.Deterministic("own_steps", differences(u))
        pm.OrderedLogistic("y", cutpoints=cuts, eta=eta, compute_p=False, observed=y)
    return model


def measurement_error() -> pm.Model:
    """Return counts that depend on a quantity that was measured twice, with error."""
    rng = np.random.default_rng(44)
    true = rng.normal(1.0, 0.8, 40)
    measured = true[:, None] + rng.normal(0, 0.5, (40, 2))
    y = rng.poisson(np.exp(0.5 + 0.6 * true))
    with pm.Model() as model:
        a, b = pm.Normal("a", 0, 2), pm.Normal("b", 0, 1)
        centre, spread, error = pm.Normal("centre", 0, 2), pm.HalfNormal("spread", 1), pm.HalfNormal("error", 1)
        x = pm.Normal("x", centre, spread, shape=40)
        pm.Deterministic("share", spread**2 / (spread**2 + error**2))
        pm.Deterministic("x_steps", differences(x))
        pm.Normal("measured", x[:, None], error, observed=measured)
        pm.Poisson("y", fitted(a + b * x, pt.exp), observed=y)
    return model


def two_parameters() -> pm.Model:
    """Return answers of 30 persons to 8 items with a difficulty and a discrimination each."""
    rng = np.random.default_rng(45)
    ability, hard, steep = rng.normal(size=30), rng.normal(0, 1, 8), rng.lognormal(0.2, 0.3, 8)
    y = rng.binomial(1, expit(steep * (ability[:, None] - hard)))
    with pm.Model() as model:
        theta = pm.Normal("theta", 0, 1, shape=30)
        b, a = pm.Normal("b", 0, 1.5, shape=8), pm.LogNormal("a", 0, 0.5, shape=8)
        p = fitted((a * (theta[:, None] - b)).ravel(), pm.math.sigmoid).reshape((30, 8))
        score = pm.Deterministic("score", p.sum(axis=1))
        pm.Deterministic("score_steps", differences(score))
        pm.Deterministic("item", p.mean(axis=0))
        pm.Deterministic("ability_steps", differences(theta))
        pm.Bernoulli("y", p, observed=y)
    return model
