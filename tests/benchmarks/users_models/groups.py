"""Models with effects of groups: by Bambi, and as they are written by hand."""

import warnings

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt

from pymc_ngvi.graphs.bambi import ATTRIBUTE, BambiParameters


def _rng(seed):
    return np.random.default_rng([32, seed])


def _expit(x):
    return 1.0 / (1.0 + np.exp(-x))


def _by_bambi(formula, data, family="gaussian", **kwargs):
    """Return the PyMC model that Bambi builds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Bambi's dependencies
        import bambi

        model = bambi.Model(formula, data, family=family, **kwargs)
        model.build()
    setattr(model.backend.model, ATTRIBUTE, BambiParameters())  # references are of the parameters of the PyMC model
    return model.backend.model


def _panel(seed, n_groups=25, per_group=8, sd=0.8, sd_slope=0.4):
    rng = _rng(seed)
    group = np.repeat(np.arange(n_groups), per_group)
    x = rng.normal(size=len(group))
    eta = 0.5 + 0.6 * x + rng.normal(0.0, sd, n_groups)[group] + rng.normal(0.0, sd_slope, n_groups)[group] * x
    return rng, group, x, eta


def bambi_intercepts():
    rng, group, x, eta = _panel(1, sd_slope=0.0)
    y = 50.0 + 12.0 * eta + rng.normal(0.0, 10.0, len(eta))
    return _by_bambi("y ~ x + (1 | g)", pd.DataFrame({"y": y, "x": 30.0 + 5.0 * x, "g": group.astype(str)}))


def bambi_slopes():
    rng, group, x, eta = _panel(2)
    y = eta + rng.normal(0.0, 0.7, len(eta))
    return _by_bambi("y ~ x + (x | g)", pd.DataFrame({"y": y, "x": x, "g": group.astype(str)}))


def bambi_bernoulli():
    rng, group, x, eta = _panel(3, n_groups=40, sd=1.2, sd_slope=0.0)
    data = pd.DataFrame({"y": rng.binomial(1, _expit(eta)), "x": x, "g": group.astype(str)})
    return _by_bambi("y ~ x + (1 | g)", data, "bernoulli")


def bambi_poisson_crossed():
    rng, group, x, eta = _panel(4, n_groups=20, per_group=15, sd=0.5, sd_slope=0.0)
    item = np.tile(np.arange(15), 20)
    mean = np.exp(eta + rng.normal(0.0, 0.4, 15)[item])
    data = pd.DataFrame({"y": rng.poisson(mean), "x": x, "g": group.astype(str), "h": item.astype(str)})
    return _by_bambi("y ~ x + (1 | g) + (1 | h)", data, "poisson")


def bambi_negative_binomial():
    rng, group, x, eta = _panel(5, sd=0.5, sd_slope=0.0)
    y = rng.poisson(np.exp(eta) * rng.gamma(2.0, 0.5, len(eta)))
    return _by_bambi("y ~ x + (1 | g)", pd.DataFrame({"y": y, "x": x, "g": group.astype(str)}), "negativebinomial")


def bambi_nested():
    rng = _rng(6)
    school = np.repeat(np.arange(10), 24)
    room = np.repeat(np.arange(40), 6)
    y = 3.0 + rng.normal(0.0, 1.0, 10)[school] + rng.normal(0.0, 0.6, 40)[room] + rng.normal(0.0, 1.2, 240)
    data = pd.DataFrame({"y": y, "school": school.astype(str), "room": room.astype(str)})
    return _by_bambi("y ~ 1 + (1 | school) + (1 | school:room)", data)


def bambi_not_noncentred():
    rng, group, x, eta = _panel(7, n_groups=15, per_group=40, sd_slope=0.0)
    y = eta + rng.normal(0.0, 0.5, len(eta))
    data = pd.DataFrame({"y": y, "x": x, "g": group.astype(str)})
    return _by_bambi("y ~ x + (1 | g)", data, noncentered=False)


def eight_schools_centred():
    effects, errors = [28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], [15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0.0, 5.0), pm.HalfCauchy("tau", 5.0)
        theta = pm.Normal("theta", mu, tau, shape=8)
        pm.Normal("y", theta, np.array(errors), observed=np.array(effects))
    return model


def eight_schools_noncentred():
    effects, errors = [28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], [15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0.0, 5.0), pm.HalfCauchy("tau", 5.0)
        z = pm.Normal("z", shape=8)
        pm.Normal("y", mu + tau * z, np.array(errors), observed=np.array(effects))
    return model


def radon():
    """Many small groups with a predictor of the group."""
    rng = _rng(8)
    sizes = rng.integers(1, 20, 60)
    group = np.repeat(np.arange(60), sizes)
    u, floor = rng.normal(size=60), rng.binomial(1, 0.2, len(group))
    y = 1.4 - 0.7 * floor + (0.6 * u + rng.normal(0.0, 0.3, 60))[group] + rng.normal(0.0, 0.75, len(group))
    with pm.Model() as model:
        gamma, beta = pm.Normal("gamma", 0.0, 5.0, shape=2), pm.Normal("beta", 0.0, 5.0)
        tau, sigma = pm.Exponential("tau", 1.0), pm.Exponential("sigma", 1.0)
        alpha = pm.Normal("alpha", gamma[0] + gamma[1] * u, tau, shape=60)
        pm.Normal("y", alpha[group] + beta * floor, sigma, observed=y)
    return model


def lkj_slopes():
    rng, group, x, eta = _panel(9, n_groups=30, per_group=10)
    with pm.Model() as model:
        beta, sigma = pm.Normal("beta", 0.0, 3.0, shape=2), pm.Exponential("sigma", 1.0)
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=pm.Exponential.dist(1.0, shape=2))
        z = pm.Normal("z", shape=(30, 2))
        b = pm.Deterministic("b", z @ chol.T)
        mu = beta[0] + b[group, 0] + (beta[1] + b[group, 1]) * x
        pm.Normal("y", mu, sigma, observed=eta + rng.normal(0.0, 0.8, len(eta)))
    return model


def _studies():
    """Return effects and their standard errors."""
    rng = _rng(10)
    se = rng.uniform(0.1, 0.5, 20)
    return 0.3 + rng.normal(0.0, 0.2, 20) + rng.normal(0.0, se), se


def meta_analysis():
    y, se = _studies()
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0.0, 1.0), pm.HalfNormal("tau", 0.5)
        theta = pm.Normal("theta", mu, tau, shape=20)
        pm.Normal("y", theta, se, observed=y)
    return model


def meta_analysis_noncentred():
    """The same, as NUTS samples it: centred, it misses half of the variance of log tau."""
    y, se = _studies()
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0.0, 1.0), pm.HalfNormal("tau", 0.5)
        z = pm.Normal("z", shape=20)
        pm.Normal("y", mu + tau * z, se, observed=y)
    return model


def rasch():
    rng = _rng(11)
    ability, difficulty = rng.normal(0.0, 1.0, 60), rng.normal(0.0, 1.0, 12)
    y = rng.binomial(1, _expit(ability[:, None] - difficulty))
    with pm.Model() as model:
        sd = pm.HalfNormal("sd", 2.0)
        theta, b = pm.Normal("theta", 0.0, sd, shape=60), pm.Normal("b", 0.0, 2.0, shape=12)
        pm.Bernoulli("y", logit_p=theta[:, None] - b, observed=y)
    return model


def two_parameter_items():
    rng = _rng(12)
    ability, slope, difficulty = rng.normal(size=80), rng.lognormal(0.0, 0.3, 10), rng.normal(size=10)
    y = rng.binomial(1, _expit(slope * (ability[:, None] - difficulty)))
    with pm.Model() as model:
        theta = pm.Normal("theta", 0.0, 1.0, shape=80)
        a, b = pm.LogNormal("a", 0.0, 0.5, shape=10), pm.Normal("b", 0.0, 2.0, shape=10)
        pm.Bernoulli("y", logit_p=a * (theta[:, None] - b), observed=y)
    return model


def growth_curves():
    """A logistic curve with an asymptote for each plant."""
    rng = _rng(13)
    time = np.tile(np.linspace(0.0, 10.0, 8), 12)
    plant = np.repeat(np.arange(12), 8)
    y = (20.0 * np.exp(rng.normal(0.0, 0.2, 12)))[plant] * _expit((time - 4.0) / 1.5) + rng.normal(0.0, 0.8, 96)
    with pm.Model() as model:
        top, sd = pm.Normal("top", 3.0, 1.0), pm.HalfNormal("sd", 0.5)
        z = pm.Normal("z", shape=12)
        middle, rate = pm.Normal("middle", 5.0, 3.0), pm.LogNormal("rate", 0.0, 0.5)
        sigma = pm.HalfNormal("sigma", 3.0)
        mu = pt.exp(top + sd * z)[plant] * pm.math.sigmoid((time - middle) / rate)
        pm.Normal("y", mu, sigma, observed=y)
    return model


def centred_many_zeros():
    """Binary outcomes, few in each group, centred."""
    rng = _rng(14)
    group = np.repeat(np.arange(80), 4)
    y = rng.binomial(1, _expit(-2.0 + rng.normal(0.0, 1.5, 80)[group]))
    with pm.Model() as model:
        mu, sd = pm.Normal("mu", 0.0, 3.0), pm.HalfNormal("sd", 2.0)
        b = pm.Normal("b", 0.0, sd, shape=80)
        pm.Bernoulli("y", logit_p=mu + b[group], observed=y)
    return model


MODELS = {
    f.__name__: f
    for f in (
        bambi_intercepts, bambi_slopes, bambi_bernoulli, bambi_poisson_crossed, bambi_negative_binomial, bambi_nested,
        bambi_not_noncentred, eight_schools_centred, eight_schools_noncentred, radon, lkj_slopes, meta_analysis, rasch,
        two_parameter_items, growth_curves, centred_many_zeros,
    )
}  # fmt: skip
