"""Latent Gaussian models whose hyperparameters are unknown, of ``posteriors.py`` and others; all are simulated."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from measure import Array
from scipy.interpolate import BSpline
from scipy.spatial import Delaunay

#: Volume of the Nile at Aswan, 1871 to 1970, in 10^8 cubic metres.
NILE = np.array([
    1120, 1160, 963, 1210, 1160, 1160, 813, 1230, 1370, 1140, 995, 935, 1110, 994, 1020, 960, 1180, 799, 958, 1140,
    1100, 1210, 1150, 1250, 1260, 1220, 1030, 1100, 774, 840, 874, 694, 940, 833, 701, 916, 692, 1020, 1050, 969,
    831, 726, 456, 824, 702, 1120, 1100, 832, 764, 821, 768, 845, 864, 862, 698, 845, 744, 796, 1040, 759,
    781, 865, 845, 944, 984, 897, 822, 1010, 771, 676, 649, 846, 812, 742, 801, 1040, 860, 874, 848, 890,
    744, 749, 838, 1050, 918, 986, 797, 923, 975, 815, 1020, 906, 901, 1170, 912, 746, 919, 718, 714, 740,
], dtype=float)  # fmt: skip
#: Counts of posteriordb's gp_pois_regr.
COUNTS = np.array([40, 37, 29, 12, 4, 3, 9, 19, 77, 82, 33])


# --- Gaussian processes -----------------------------------------------------------------------------------------------


def gp_bernoulli(n: int = 70) -> pm.Model:
    """Return a classification by a Gaussian process with a free length scale and amplitude."""
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0, 10, n))
    y = rng.binomial(1, 1.0 / (1.0 + np.exp(-2.0 * np.sin(x))))
    with pm.Model() as model:
        ell, eta = pm.InverseGamma("ell", 3, 3), pm.HalfNormal("eta", 3)
        f = pm.gp.Latent(cov_func=eta**2 * pm.gp.cov.Matern52(1, ell)).prior("f", X=x[:, None])
        pm.Bernoulli("y", logit_p=f, observed=y)
    return model


def gp_poisson() -> pm.Model:
    """Return posteriordb's Poisson regression by a Gaussian process."""
    x = np.arange(-10.0, 11.0, 2.0)
    with pm.Model() as model:
        rho, alpha = pm.Gamma("rho", 25, 4), pm.HalfNormal("alpha", 2)
        f = pm.gp.Latent(cov_func=alpha**2 * pm.gp.cov.ExpQuad(1, rho)).prior("f", X=x[:, None], jitter=1e-10)
        pm.Poisson("k", pt.exp(f), observed=COUNTS)
    return model


def hsgp(n: int = 150) -> pm.Model:
    """Return counts with a Gaussian process by its basis functions."""
    rng = np.random.default_rng(3)
    x = np.sort(rng.uniform(0, 10, n))
    y = rng.poisson(np.exp(1.0 + np.sin(x)))
    with pm.Model() as model:
        level = pm.Normal("level", 0, 2)
        ell, eta = pm.InverseGamma("ell", 3, 4), pm.HalfNormal("eta", 2)
        gp = pm.gp.HSGP(m=[25], c=1.5, cov_func=eta**2 * pm.gp.cov.Matern52(1, ell))
        f = gp.prior("f", X=x[:, None])
        pm.Poisson("y", pt.exp(level + f), observed=y)
    return model


def mvnormal(n: int = 60) -> pm.Model:
    """Return proportions at places on a line whose logits are an MvNormal with an exponential kernel."""
    rng = np.random.default_rng(4)
    x = np.sort(rng.uniform(0, 10, n))
    apart = np.abs(x[:, None] - x)
    f = np.linalg.cholesky(0.8 * np.exp(-apart / 2.0) + 1e-9 * np.eye(n)) @ rng.normal(size=n)
    y = rng.binomial(20, 1.0 / (1.0 + np.exp(0.5 - f)))
    with pm.Model() as model:
        level, sd, reach = pm.Normal("level", 0, 2), pm.HalfNormal("sd", 2), pm.InverseGamma("reach", 3, 4)
        cov = sd**2 * pt.exp(-apart / reach) + 1e-6 * np.eye(n)
        f = pm.MvNormal("f", np.zeros(n), cov=cov)
        pm.Binomial("y", 20, logit_p=level + f, observed=y)
    return model


# --- chains -----------------------------------------------------------------------------------------------------------


def volatility_walk(n: int, *, centred: bool = True) -> pm.Model:
    """Return returns with a t distribution whose log scale is a random walk."""
    rng = np.random.default_rng(0)
    h = np.cumsum(rng.normal(0, 0.1, n))
    y = np.exp(h - h.mean()) * rng.standard_t(8, n) * 0.01
    with pm.Model() as model:
        step = pm.Exponential("step_size", 10)
        if centred:
            first = pm.Normal.dist(0, 10)
            volatility = pm.GaussianRandomWalk("volatility", sigma=step, init_dist=first, shape=n)
        else:
            first, z = pm.Normal("first", 0, 10, initval=-4.5), pm.Normal("z", shape=n - 1)
            walk = pt.concatenate([pt.zeros(1), pt.cumsum(z)])
            volatility = pm.Deterministic("volatility", first + step * walk)
        pm.StudentT("r", nu=pm.Exponential("nu", 0.1), mu=0, sigma=pt.exp(volatility), observed=y)
    return model


def _autoregression(name: str, rho: pt.TensorVariable, sigma: pt.TensorVariable, n: int, *, centred: bool) -> object:
    if centred:
        first = pm.Normal.dist(0, sigma / pt.sqrt(1 - rho**2))
        return pm.AR(name, rho=rho, sigma=sigma, init_dist=first, shape=n)
    first = pm.Normal.dist(0, 1 / pt.sqrt(1 - rho**2))
    return pm.Deterministic(name, sigma * pm.AR(f"z_{name}", rho=rho, sigma=1, init_dist=first, shape=n))


def volatility_ar(n: int = 500, *, centred: bool = True) -> pm.Model:
    """Return normal returns whose log variance is an AR(1), as Kim, Shephard and Chib's."""
    rng = np.random.default_rng(0)
    h = np.zeros(n)
    h[0] = rng.normal(0, 0.2 / np.sqrt(1 - 0.95**2))
    for t in range(1, n):
        h[t] = 0.95 * h[t - 1] + rng.normal(0, 0.2)
    y = np.exp((h - 1) / 2) * rng.normal(size=n)
    with pm.Model() as model:
        mu, phi, sigma = pm.Normal("mu", 0, 5), pm.Beta("phi", 20, 1.5), pm.HalfNormal("sigma", 0.5)
        h = _autoregression("h", phi, sigma, n, centred=centred)
        pm.Normal("y", 0, pt.exp((mu + h) / 2), observed=y)
    return model


def nile() -> pm.Model:
    """Return the local level of the Nile."""
    with pm.Model() as model:
        s_level, s_obs = pm.HalfNormal("s_level", 100), pm.HalfNormal("s_obs", 200)
        first = pm.Normal.dist(1000, 500)
        level = pm.GaussianRandomWalk("level", sigma=s_level, init_dist=first, shape=len(NILE))
        pm.Normal("y", level, s_obs, observed=NILE)
    return model


def ar_poisson(n: int = 200, *, centred: bool = True) -> pm.Model:
    """Return counts whose log rate is an AR(1)."""
    rng = np.random.default_rng(0)
    h = np.zeros(n)
    for t in range(1, n):
        h[t] = 0.8 * h[t - 1] + rng.normal(0, 0.4)
    y = rng.poisson(np.exp(1 + h))
    with pm.Model() as model:
        level, rho, sigma = pm.Normal("level", 0, 2), pm.Uniform("rho", -1, 1), pm.HalfNormal("sigma", 1)
        h = _autoregression("h", rho, sigma, n, centred=centred)
        pm.Poisson("y", pt.exp(level + h), observed=y)
    return model


def spline(n: int = 200, n_basis: int = 20) -> pm.Model:
    """Return a curve by cubic B-splines whose coefficients are a random walk."""
    rng = np.random.default_rng(5)
    x = np.sort(rng.uniform(0, 1, n))
    y = np.sin(8 * x) + 0.5 * x + 0.3 * rng.normal(size=n)
    knots = np.concatenate([np.zeros(3), np.linspace(0, 1, n_basis - 2), np.ones(3)])
    basis = BSpline.design_matrix(x, knots, 3).toarray()
    with pm.Model() as model:
        step, noise = pm.HalfNormal("step", 1), pm.HalfNormal("noise", 1)
        w = pm.GaussianRandomWalk("w", sigma=step, init_dist=pm.Normal.dist(0, 5), shape=n_basis)
        pm.Normal("y", pt.dot(basis, w), noise, observed=y)
    return model


# --- maps -------------------------------------------------------------------------------------------------------------


def neighbours(n: int) -> Array:
    """Return which regions of a random planar graph are neighbours, (n, n)."""
    corners = Delaunay(np.random.default_rng(0).uniform(size=(n, 2))).simplices
    adjacent = np.zeros((n, n))
    for a, b in ((0, 1), (1, 2), (0, 2)):
        adjacent[corners[:, a], corners[:, b]] = adjacent[corners[:, b], corners[:, a]] = 1
    return adjacent


def bym2(n: int) -> pm.Model:
    """Return counts with a structured and an unstructured effect of regions."""
    adjacent, rng = neighbours(n), np.random.default_rng(1)
    precision = np.diag(adjacent.sum(axis=1)) - adjacent
    covariance = np.linalg.inv(precision + 1.0 / n) - 1.0 / n
    scale = np.exp(np.mean(np.log(np.diag(covariance))))
    effect = np.linalg.cholesky(covariance + 1e-9 * np.eye(n)) @ rng.normal(size=n) / np.sqrt(scale)
    x, expected = rng.normal(size=n), rng.uniform(5, 50, n)
    both = np.sqrt(0.7) * effect + np.sqrt(0.3) * rng.normal(size=n)
    y = rng.poisson(expected * np.exp(0.1 + 0.3 * x + 0.5 * both))
    with pm.Model() as model:
        b0, b1 = pm.Normal("b0", 0, 1), pm.Normal("b1", 0, 1)
        theta, phi = pm.Normal("theta", 0, 1, shape=n), pm.ICAR("phi", W=adjacent)
        sigma, rho = pm.HalfNormal("sigma", 1), pm.Beta("rho", 0.5, 0.5)
        mixed = pt.sqrt(1 - rho) * theta + pt.sqrt(rho / scale) * phi
        pm.Poisson("y", pt.exp(np.log(expected) + b0 + b1 * x + sigma * mixed), observed=y)
    return model


def car(n: int = 100) -> pm.Model:
    """Return counts in regions with a proper conditional autoregression."""
    adjacent, rng = neighbours(n), np.random.default_rng(1)
    precision = np.diag(adjacent.sum(axis=1)) - 0.95 * adjacent
    y = rng.poisson(np.exp(2 + np.linalg.cholesky(np.linalg.inv(precision)) @ rng.normal(size=n)))
    with pm.Model() as model:
        b0, tau, alpha = pm.Normal("b0", 0, 2), pm.Gamma("tau", 2, 2), pm.Beta("alpha", 1, 1)
        phi = pm.CAR("phi", mu=np.zeros(n), tau=tau, alpha=alpha, W=adjacent)
        pm.Poisson("y", pt.exp(b0 + phi), observed=y)
    return model
