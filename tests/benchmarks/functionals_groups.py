"""Multilevel models of ``functionals.py``."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from functionals_parts import differences, effects, fitted, groups
from scipy.special import expit


def intercepts_logistic(*, swapped: bool = False) -> pm.Model:
    """Return 0 and 1 in 20 groups."""
    rng = np.random.default_rng(11)
    g = groups(20, 140, rng)
    x = rng.normal(size=len(g))
    y = rng.binomial(1, expit(-0.5 + 0.8 * x + rng.normal(0, 1.0, 20)[g]))
    with pm.Model() as model:
        b, s = pm.Normal("b", 0, 3, shape=2), pm.HalfNormal("s", 1)
        u = effects("u", s, 20, centred=False, swapped=swapped)
        _of_groups(b[0] + u)
        p = fitted(b[0] + b[1] * x + u[g], pm.math.sigmoid)
        pm.Bernoulli("y", p, observed=y)
    return model


def intercepts_poisson(*, swapped: bool = False) -> pm.Model:
    """Return counts of about 4 in 20 groups."""
    rng = np.random.default_rng(12)
    g = groups(20, 120, rng)
    x = rng.normal(size=len(g))
    y = rng.poisson(np.exp(1.3 + 0.3 * x + rng.normal(0, 0.6, 20)[g]))
    with pm.Model() as model:
        b, s = pm.Normal("b", 0, 3, shape=2), pm.HalfNormal("s", 1)
        u = effects("u", s, 20, centred=False, swapped=swapped)
        _of_groups(b[0] + u)
        pm.Poisson("y", fitted(b[0] + b[1] * x + u[g], pt.exp), observed=y)
    return model


def intercepts_negative_binomial(*, swapped: bool = False) -> pm.Model:
    """Return overdispersed counts with an exposure in 16 groups."""
    rng = np.random.default_rng(13)
    g = groups(16, 110, rng)
    x, exposure = rng.normal(size=len(g)), rng.uniform(0.5, 8.0, len(g))
    mean = exposure * np.exp(0.5 + 0.4 * x + rng.normal(0, 0.5, 16)[g])
    y = rng.negative_binomial(2.0, 2.0 / (2.0 + mean))
    with pm.Model() as model:
        b, s, alpha = pm.Normal("b", 0, 3, shape=2), pm.HalfNormal("s", 1), pm.Exponential("alpha", 0.5)
        u = effects("u", s, 16, centred=True, swapped=swapped)
        _of_groups(b[0] + u)
        mu = fitted(np.log(exposure) + b[0] + b[1] * x + u[g], pt.exp)
        pm.NegativeBinomial("y", mu=mu, alpha=alpha, observed=y)
    return model


def slopes(*, centred: bool, swapped: bool = False) -> pm.Model:
    """Return counts in 18 groups, each with an intercept and a slope that are correlated."""
    rng = np.random.default_rng(14)
    g = groups(18, 130, rng)
    x = rng.normal(size=len(g))
    own = rng.normal(size=(18, 2)) @ np.array([[0.6, 0.0], [0.15, 0.3]]).T
    y = rng.poisson(np.exp(1.5 + own[g, 0] + (0.3 + own[g, 1]) * x))
    with pm.Model() as model:
        b = pm.Normal("b", 0, 3, shape=2)
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.HalfNormal.dist(1, size=2))
        if centred == swapped:
            u = pm.Deterministic("u", pm.Normal("z_u", shape=(18, 2)) @ chol.T)
        else:
            u = pm.MvNormal("u", np.zeros(2), chol=chol, shape=(18, 2))
            if swapped:
                pm.Deterministic("z_u", pt.linalg.solve_triangular(chol, u.T, lower=True).T)
        pm.Deterministic("own", b + u)
        pm.Deterministic("own_steps", differences(u))
        pm.Poisson("y", fitted(b[0] + u[g, 0] + (b[1] + u[g, 1]) * x, pt.exp), observed=y)
    return model


def nested_groups(*, swapped: bool = False) -> pm.Model:
    """Return counts in 24 broods of 12 places, with an effect of each of 72 rows."""
    rng = np.random.default_rng(15)
    place = groups(12, 24, rng)
    brood = groups(24, 72, rng)
    x = rng.normal(size=len(brood))
    of_places, of_broods, of_rows = (rng.normal(0, sd, n) for sd, n in ((0.9, 12), (0.6, 24), (0.4, 72)))
    y = rng.poisson(np.exp(1.5 + 0.4 * x + of_places[place[brood]] + of_broods[brood] + of_rows))
    with pm.Model() as model:
        b, s = pm.Normal("b", 0, 3, shape=2), pm.HalfNormal("s", 1, shape=3)
        u = effects("u_place", s[0], 12, centred=False, swapped=swapped)
        v = effects("u_brood", s[1], 24, centred=False, swapped=swapped)
        w = effects("u_row", s[2], 72, centred=False, swapped=swapped)
        _of_groups(b[0] + u[place] + v)
        pm.Poisson("y", fitted(b[0] + b[1] * x + u[place[brood]] + v[brood] + w, pt.exp), observed=y)
    return model


def crossed(*, centred: bool, level: float, swapped: bool = False) -> pm.Model:
    """Return counts with crossed effects; ``level`` is the log of a typical one."""
    rng = np.random.default_rng(1)
    i, k, x = rng.integers(12, size=200), rng.integers(15, size=200), rng.normal(size=200)
    y = rng.poisson(np.exp(level + 0.3 * x + rng.normal(0, 1.0, 12)[i] + rng.normal(0, 0.5, 15)[k]))
    with pm.Model() as model:
        b, s = pm.Normal("b", 0, 5, shape=2), pm.HalfNormal("s", 1, shape=2)
        u = effects("u", s[0], 12, centred=centred, swapped=swapped)
        v = effects("v", s[1], 15, centred=centred, swapped=swapped)
        _of_groups(b[0] + u)
        pm.Poisson("y", fitted(b[0] + b[1] * x + u[i] + v[k], pt.exp), observed=y)
    return model


def _of_groups(own: pt.TensorVariable) -> None:
    """Name the predictors of groups, and their differences."""
    pm.Deterministic("own", own)
    pm.Deterministic("own_steps", differences(own))
