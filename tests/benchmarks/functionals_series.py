"""Time series and splines of ``functionals.py``."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from functionals_parts import autoregression, differences, fitted, walk
from scipy.interpolate import BSpline

#: Prior standard deviation of the first value of the local level.
FIRST_SD = 50.0


def level_data(noise: float, n: int = 50) -> np.ndarray:
    """Return a walk with noise."""
    rng = np.random.default_rng(7)
    return 20.0 + np.cumsum(rng.normal(0, 0.3, n)) + rng.normal(0, noise, n)


def local_level(*, noise: float) -> pm.Model:
    """Return a walk, by its standardised steps, that is seen with noise."""
    y = level_data(noise)
    with pm.Model() as model:
        s, e = pm.HalfNormal("s", 1), pm.HalfNormal("e", 1)
        first, z = pm.Normal("first", 0, FIRST_SD), pm.Normal("z", shape=len(y))
        pm.Normal("y", fitted(first + s * pt.cumsum(z)), e, observed=y)
    return model


def walk_poisson(*, swapped: bool = False) -> pm.Model:
    """Return counts whose log rate is a random walk."""
    rng = np.random.default_rng(21)
    y = rng.poisson(np.exp(1.5 + np.cumsum(rng.normal(0, 0.2, 60))))
    with pm.Model() as model:
        x = walk("x", pm.HalfNormal("s", 0.5), 3.0, len(y), swapped=swapped)
        pm.Poisson("y", fitted(x, pt.exp), observed=y)
    return model


def spline(*, swapped: bool = False) -> pm.Model:
    """Return a curve by cubic B-splines whose coefficients are a random walk."""
    rng = np.random.default_rng(22)
    x, n_basis = np.sort(rng.uniform(0, 1, 90)), 16
    y = np.sin(8 * x) + 0.5 * x + 0.3 * rng.normal(size=len(x))
    knots = np.concatenate([np.zeros(3), np.linspace(0, 1, n_basis - 2), np.ones(3)])
    basis = BSpline.design_matrix(x, knots, 3).toarray()
    with pm.Model() as model:
        s, noise = pm.HalfNormal("s", 1), pm.HalfNormal("noise", 1)
        w = walk("w", s, 3.0, n_basis, swapped=swapped)
        pm.Normal("y", fitted(pt.dot(basis, w)), noise, observed=y)
    return model


def trend_and_season() -> pm.Model:
    """Return seven years of months: a local level, an effect of each month of the year, and noise."""
    rng = np.random.default_rng(23)
    month = np.arange(84) % 12
    level = 10.0 + np.cumsum(rng.normal(0.03, 0.15, 84))
    y = level + np.cos(2 * np.pi * month / 12) + rng.normal(0, 0.5, 84)
    with pm.Model() as model:
        s, s_season, e = pm.HalfNormal("s", 0.5), pm.HalfNormal("s_season", 1), pm.HalfNormal("e", 1)
        first, slope, z = pm.Normal("first", 10, 5), pm.Normal("slope", 0, 0.5), pm.Normal("z", shape=84)
        trend = pm.Deterministic("trend", first + slope * np.arange(84) + s * pt.cumsum(z))
        season = pm.Deterministic("season", s_season * pm.ZeroSumNormal("z_season", shape=12))
        mu = fitted(trend + season[month])
        pm.Deterministic("last_year", mu[-12:].sum())
        pm.Deterministic("trend_steps", differences(trend))
        pm.Deterministic("gain", trend[-12:].mean() - trend[:12].mean())
        pm.Normal("y", mu, e, observed=y)
    return model


def volatility(*, tails: bool, stationary: bool, swapped: bool = False) -> pm.Model:
    """Return returns whose log variance is a walk or an AR(1), normal or with the tails of a t distribution."""
    rng, n = np.random.default_rng(24), 120
    h = np.zeros(n)
    for t in range(1, n):
        h[t] = (0.93 if stationary else 1.0) * h[t - 1] + rng.normal(0, 0.3)
    y = np.exp(h / 2) * (rng.standard_t(6, n) if tails else rng.normal(size=n))
    with pm.Model() as model:
        s = pm.HalfNormal("s", 0.5)
        if stationary:
            level, rho = pm.Normal("level", 0, 2), pm.Beta("rho", 20, 1.5)
            eta = level + autoregression("h", rho, s, n, swapped=swapped)
        else:
            eta = walk("h", s, 3.0, n, swapped=swapped)
        sd = fitted(eta, lambda x: pt.exp(x / 2))
        if tails:
            pm.StudentT("y", nu=pm.Gamma("nu", 2, 0.1), mu=0, sigma=sd, observed=y)
        else:
            pm.Normal("y", 0, sd, observed=y)
    return model
