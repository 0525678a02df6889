"""Counts, categories, survival."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt


def _rng(seed):
    return np.random.default_rng([33, seed])


def _expit(x):
    return 1.0 / (1.0 + np.exp(-x))


def weibull_censored():
    rng = _rng(1)
    x = rng.normal(size=150)
    time = np.exp(1.0 - 0.5 * x) * rng.weibull(1.5, 150)
    end = 5.0
    with pm.Model() as model:
        beta, shape = pm.Normal("beta", 0.0, 3.0, shape=2), pm.HalfNormal("shape", 3.0)
        law = pm.Weibull.dist(alpha=shape, beta=pt.exp(beta[0] + beta[1] * x))
        pm.Censored("y", law, lower=None, upper=end, observed=np.minimum(time, end))
    return model


def frailty():
    """Piecewise exponential times with a gamma-like frailty of each centre."""
    rng = _rng(2)
    centre = np.repeat(np.arange(20), 10)
    x = rng.normal(size=200)
    rate = np.exp(-1.0 + 0.5 * x + rng.normal(0.0, 0.5, 20)[centre])
    time = rng.exponential(1.0 / rate)
    exposure = np.diff(np.minimum.outer(time, np.array([0.0, 1.0, 3.0, 8.0])), axis=1)
    event = (time[:, None] > np.array([0.0, 1.0, 3.0])) & (time[:, None] <= np.array([1.0, 3.0, 8.0]))
    seen = exposure > 0.0
    row, piece = np.nonzero(seen)
    with pm.Model() as model:
        base, beta = pm.Normal("base", 0.0, 3.0, shape=3), pm.Normal("beta", 0.0, 2.0)
        sd = pm.HalfNormal("sd", 1.0)
        b = pm.Normal("b", 0.0, sd, shape=20)
        log_rate = base[piece] + beta * x[row] + b[centre[row]]
        pm.Poisson("y", exposure[seen] * pt.exp(log_rate), observed=event[seen].astype(int))
    return model


def zero_inflated():
    rng = _rng(3)
    x = rng.normal(size=300)
    y = rng.poisson(np.exp(0.7 + 0.5 * x)) * rng.binomial(1, 0.7, 300)
    with pm.Model() as model:
        beta, psi = pm.Normal("beta", 0.0, 3.0, shape=2), pm.Beta("psi", 1.0, 1.0)
        pm.ZeroInflatedPoisson("y", psi=psi, mu=pt.exp(beta[0] + beta[1] * x), observed=y)
    return model


def negative_binomial():
    rng = _rng(4)
    x = rng.normal(size=(200, 3))
    mean = np.exp(1.0 + x @ np.array([0.3, -0.2, 0.0]))
    with pm.Model() as model:
        beta, alpha = pm.Normal("beta", 0.0, 3.0, shape=4), pm.Exponential("alpha", 0.5)
        y = rng.poisson(mean * rng.gamma(1.5, 1.0 / 1.5, 200))
        pm.NegativeBinomial("y", mu=pt.exp(beta[0] + x @ beta[1:]), alpha=alpha, observed=y)
    return model


def hurdle():
    rng = _rng(5)
    y = rng.gamma(2.0, 1.5, 200) * rng.binomial(1, 0.6, 200)
    with pm.Model() as model:
        psi = pm.Beta("psi", 1.0, 1.0)
        alpha, beta = pm.HalfNormal("alpha", 5.0), pm.HalfNormal("beta", 5.0)
        pm.HurdleGamma("y", psi=psi, alpha=alpha, beta=beta, observed=y)
    return model


def categorical():
    rng = _rng(6)
    x = rng.normal(size=(200, 2))
    eta = x @ np.array([[0.0, 1.0, -0.5], [0.0, -0.5, 0.8]]) + np.array([0.0, 0.3, -0.2])
    y = np.array([rng.choice(3, p=np.exp(e) / np.exp(e).sum()) for e in eta])
    with pm.Model() as model:
        alpha, beta = pm.Normal("alpha", 0.0, 3.0, shape=2), pm.Normal("beta", 0.0, 3.0, shape=(2, 2))
        free = alpha + x @ beta
        logits = pt.concatenate([pt.zeros((200, 1)), free], axis=1)
        pm.Categorical("y", logit_p=logits, observed=y)
    return model


def dirichlet_multinomial():
    rng = _rng(7)
    p = rng.dirichlet([8.0, 4.0, 2.0, 1.0], 15)
    y = np.array([rng.multinomial(40, row) for row in p])
    with pm.Model() as model:
        share, concentration = pm.Dirichlet("share", np.ones(4)), pm.LogNormal("concentration", 2.0, 1.0)
        pm.DirichletMultinomial("y", n=40, a=share * concentration, observed=y)
    return model


def beta_binomial():
    rng = _rng(8)
    n = rng.integers(5, 40, 30)
    y = rng.binomial(n, rng.beta(4.0, 8.0, 30))
    with pm.Model() as model:
        mu, kappa = pm.Beta("mu", 1.0, 1.0), pm.HalfNormal("kappa", 30.0)
        p = pm.Beta("p", mu * kappa, (1.0 - mu) * kappa, shape=30)
        pm.Binomial("y", n=n, p=p, observed=y)
    return model


def occupancy():
    """Sites are occupied or not; visits miss the species."""
    rng = _rng(9)
    x = rng.normal(size=80)
    z = rng.binomial(1, _expit(0.3 + 0.8 * x))
    y = rng.binomial(5, 0.35 * z)
    with pm.Model() as model:
        beta, detect = pm.Normal("beta", 0.0, 2.0, shape=2), pm.Beta("detect", 1.0, 1.0)
        psi = pm.math.sigmoid(beta[0] + beta[1] * x)
        log_seen = pm.logp(pm.Binomial.dist(n=5, p=detect), y)
        occupied = pt.log(psi) + log_seen
        empty = pt.log1p(-psi)
        pm.Potential("y", pt.where(y > 0, occupied, pt.logaddexp(occupied, empty)).sum())
    return model


def capture_recapture():
    """Survival and recapture of marked animals, by occasion of release."""
    rng = _rng(10)
    phi, p, n = 0.7, 0.5, 60
    first = np.zeros(6, dtype=int)
    for _ in range(n):
        seen = 6 - 1
        alive = True
        for t in range(5):
            alive = alive and rng.random() < phi
            if alive and rng.random() < p:
                seen = t
                break
        first[seen] += 1
    with pm.Model() as model:
        survive, capture = pm.Beta("survive", 1.0, 1.0), pm.Beta("capture", 1.0, 1.0)
        t = np.arange(5)
        cells = survive * capture * (survive * (1.0 - capture)) ** t
        pm.Multinomial("y", n=n, p=pt.concatenate([cells, [1.0 - cells.sum()]]), observed=first)
    return model


def dose_response():
    rng = _rng(11)
    dose = np.repeat([0.1, 0.3, 1.0, 3.0, 10.0, 30.0], 6)
    y = 5.0 + 90.0 / (1.0 + (2.0 / dose) ** 1.3) + rng.normal(0.0, 5.0, 36)
    with pm.Model() as model:
        low, high = pm.Normal("low", 0.0, 20.0), pm.Normal("high", 100.0, 30.0)
        log_half, hill = pm.Normal("log_half", 0.0, 2.0), pm.LogNormal("hill", 0.0, 0.5)
        sigma = pm.HalfNormal("sigma", 20.0)
        mu = low + (high - low) / (1.0 + pt.exp(hill * (log_half - np.log(dose))))
        pm.Normal("y", mu, sigma, observed=y)
    return model


def pharmacokinetics():
    """One compartment with absorption, closed form."""
    rng = _rng(12)
    t = np.array([0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 24.0])
    mean = 100.0 * 1.2 / (20.0 * (1.2 - 0.15)) * (np.exp(-0.15 * t) - np.exp(-1.2 * t))
    with pm.Model() as model:
        absorb, clear = pm.LogNormal("absorb", 0.0, 0.7), pm.LogNormal("clear", -2.0, 0.7)
        volume, sigma = pm.LogNormal("volume", 3.0, 0.7), pm.HalfNormal("sigma", 0.5)
        mu = 100.0 * absorb / (volume * (absorb - clear)) * (pt.exp(-clear * t) - pt.exp(-absorb * t))
        pm.LogNormal("y", pt.log(pt.abs(mu)), sigma, observed=mean * np.exp(0.1 * rng.normal(size=9)))
    return model


MODELS = {
    f.__name__: f
    for f in (
        weibull_censored, frailty, zero_inflated, negative_binomial, hurdle, categorical, dirichlet_multinomial,
        beta_binomial, occupancy, capture_recapture, dose_response, pharmacokinetics,
    )
}  # fmt: skip
