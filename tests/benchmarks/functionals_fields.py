"""Gaussian processes and maps of ``functionals.py``."""

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt

from functionals_parts import differences, fitted
from nested_models import COUNTS, neighbours
from scipy.special import expit

from pymc_ngvi.graphs.bambi import ATTRIBUTE, BambiParameters


def places(n: int, seed: int) -> tuple[np.ndarray, np.random.Generator]:
    """Return places on a line, and the generator of what is seen there."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.uniform(0, 10, n)), rng


def plane() -> np.ndarray:
    """Return places on a plane."""
    return np.random.default_rng(33).uniform(0, 6, (50, 2))


def exposure(rng: np.random.Generator) -> np.ndarray:
    """Return exposures, the first that is drawn after the places."""
    return rng.uniform(1.0, 100.0, 40)


def _latent(name: str, x: np.ndarray, *, centred: bool = False, scale: float = 2.0, beta: float = 5.0) -> object:
    """Return a Gaussian process with a free length scale and amplitude at the rows of ``x``."""
    ell, eta = pm.InverseGamma(f"ell_{name}", 5, beta), pm.HalfNormal(f"eta_{name}", scale)
    gp = pm.gp.Latent(cov_func=eta**2 * pm.gp.cov.Matern52(x.shape[1], ell))
    return gp.prior(name, X=x, reparameterize=not centred)


def gp_poisson(n: int = 40, *, centred: bool = False) -> pm.Model:
    """Return counts of about 20 with a Gaussian process."""
    x, rng = places(n, 3)
    y = rng.poisson(np.exp(3 + np.sin(x)))
    with pm.Model() as model:
        level = pm.Normal("level", 0, 5)
        f = _latent("f", x[:, None], centred=centred)
        pm.Poisson("y", fitted(level + f, pt.exp), observed=y)
    return model


def gp_pois_regr() -> pm.Model:
    """Return posteriordb's Poisson regression, its process by the Cholesky factor of its covariance."""
    x = np.arange(-10.0, 11.0, 2.0)
    with pm.Model() as model:
        rho, alpha = pm.Gamma("rho", 25, 4), pm.HalfNormal("alpha", 2)
        f_tilde = pm.Normal("f_tilde", shape=len(x))
        cov = alpha**2 * pt.exp(-0.5 * ((x[:, None] - x) / rho) ** 2) + 1e-10 * np.eye(len(x))
        pm.Poisson("k", fitted(pt.linalg.cholesky(cov) @ f_tilde, pt.exp), observed=COUNTS)
    return model


def gp_bernoulli() -> pm.Model:
    """Return 0 and 1 with a Gaussian process."""
    x, rng = places(60, 31)
    y = rng.binomial(1, expit(0.5 + 1.5 * np.sin(x)))
    with pm.Model() as model:
        level = pm.Normal("level", 0, 2)
        pm.Bernoulli("y", fitted(level + _latent("f", x[:, None]), pm.math.sigmoid), observed=y)
    return model


def gp_binomial() -> pm.Model:
    """Return proportions of 200 with a Gaussian process."""
    x, rng = places(40, 32)
    y = rng.binomial(200, expit(-0.5 + np.sin(x)))
    with pm.Model() as model:
        level = pm.Normal("level", 0, 2)
        pm.Binomial("y", 200, fitted(level + _latent("f", x[:, None]), pm.math.sigmoid), observed=y)
    return model


def gp_plane() -> pm.Model:
    """Return counts with a Gaussian process on a plane."""
    x, rng = plane(), np.random.default_rng(330)
    y = rng.poisson(np.exp(1.5 + np.sin(x[:, 0]) * np.cos(x[:, 1])))
    with pm.Model() as model:
        level = pm.Normal("level", 0, 3)
        pm.Poisson("y", fitted(level + _latent("f", x), pt.exp), observed=y)
    return model


def gp_offset() -> pm.Model:
    """Return counts with a Gaussian process and an exposure."""
    x, rng = places(40, 34)
    exposed = exposure(rng)
    y = rng.poisson(exposed * np.exp(-0.5 + 0.7 * np.sin(x)))
    with pm.Model() as model:
        log_rate = pm.Normal("level", 0, 3) + _latent("f", x[:, None])
        pm.Deterministic("rate", pt.exp(log_rate))
        pm.Poisson("y", fitted(np.log(exposed) + log_rate, pt.exp), observed=y)
    return model


def gp_additive() -> pm.Model:
    """Return the sum of a slow and a quick Gaussian process, with noise."""
    x, rng = places(40, 35)
    y = 2.0 + 0.15 * (x - 5) ** 2 / 2 + 0.6 * np.sin(3 * x) + rng.normal(0, 0.3, 40)
    with pm.Model() as model:
        level, noise = pm.Normal("level", 0, 5), pm.HalfNormal("noise", 1)
        slow = _latent("slow", x[:, None], scale=3.0, beta=25.0)
        quick = _latent("quick", x[:, None], scale=1.0, beta=3.0)
        pm.Normal("y", fitted(level + slow + quick), noise, observed=y)
    return model


def gp_hierarchical() -> pm.Model:
    """Return counts of four groups: a curve in common, and one of each group with the same length scale."""
    x, rng = places(15, 36)
    own = np.array([[0.5], [-0.5], [0.3], [0.0]]) * np.sin(1.5 * x + np.arange(4)[:, None])
    y = rng.poisson(np.exp(2.0 + np.sin(x) + own))
    with pm.Model() as model:
        level = pm.Normal("level", 0, 3)
        common = _latent("f", x[:, None])
        ell, eta = pm.InverseGamma("ell_own", 5, 5), pm.HalfNormal("eta_own", 1)
        gp = pm.gp.Latent(cov_func=eta**2 * pm.gp.cov.Matern52(1, ell))
        curves = pt.stack([gp.prior(f"f{j}", X=x[:, None]) for j in range(4)])
        pm.Deterministic("mean_curve", pt.exp(level + common))
        pm.Poisson("y", fitted((level + common + curves).ravel(), pt.exp), observed=y.ravel())
    return model


def hsgp() -> pm.Model:
    """Return counts with a Gaussian process by its basis functions."""
    x, rng = places(80, 37)
    y = rng.poisson(np.exp(1.0 + np.sin(x)))
    with pm.Model() as model:
        level = pm.Normal("level", 0, 2)
        ell, amplitude = pm.InverseGamma("ell", 3, 4), pm.HalfNormal("amplitude", 2)
        gp = pm.gp.HSGP(m=[20], c=1.5, cov_func=amplitude**2 * pm.gp.cov.Matern52(1, ell))
        pm.Poisson("y", fitted(level + gp.prior("f", X=x[:, None]), pt.exp), observed=y)
    return model


def bambi_hsgp() -> pm.Model:
    """Return Bambi's model of counts with a Gaussian process."""
    import bambi

    x, rng = places(80, 38)
    data = pd.DataFrame({"x": x, "z": rng.normal(size=80)})
    data["y"] = rng.poisson(np.exp(1.5 + 0.3 * data["z"] + np.cos(x)))
    made = bambi.Model("y ~ 1 + z + hsgp(x, m=15, c=1.5)", data, family="poisson")
    made.set_alias({"hsgp(x, m=15, c=1.5)": "f"})  # nutpie does not read names with commas
    made.build()
    model = made.backend.model
    setattr(model, ATTRIBUTE, BambiParameters())  # the reference is of the parameters of the PyMC model
    with model:
        mu = model["mu"]  # Bambi's own
        eta = pm.Deterministic("eta", pt.log(mu))
        pm.Deterministic("average", eta.mean())
        pm.Deterministic("total", mu.sum())
        pm.Deterministic("steps", differences(mu))
    return model


def bym2() -> pm.Model:
    """Return counts with a structured and an unstructured effect of 50 regions."""
    n = 50
    adjacent, rng = neighbours(n), np.random.default_rng(39)
    precision = np.diag(adjacent.sum(axis=1)) - adjacent
    covariance = np.linalg.inv(precision + 1.0 / n) - 1.0 / n
    scale = np.exp(np.mean(np.log(np.diag(covariance))))
    effect = np.linalg.cholesky(covariance + 1e-9 * np.eye(n)) @ rng.normal(size=n) / np.sqrt(scale)
    x, expected = rng.normal(size=n), rng.uniform(5, 50, n)
    both = np.sqrt(0.7) * effect + np.sqrt(0.3) * rng.normal(size=n)
    y = rng.poisson(expected * np.exp(0.1 + 0.3 * x + 0.5 * both))
    with pm.Model() as model:
        b, sigma, rho = pm.Normal("b", 0, 1, shape=2), pm.HalfNormal("sigma", 1), pm.Beta("rho", 1, 1)
        theta, phi = pm.Normal("theta", 0, 1, shape=n), pm.ICAR("phi", W=adjacent)
        mixed = pm.Deterministic("mixed", sigma * (pt.sqrt(1 - rho) * theta + pt.sqrt(rho / scale) * phi))
        _regions(pt.exp(b[0] + b[1] * x + mixed), adjacent)
        pm.Poisson("y", fitted(np.log(expected) + b[0] + b[1] * x + mixed, pt.exp), observed=y)
    return model


def car() -> pm.Model:
    """Return counts in 50 regions with a proper conditional autoregression."""
    n = 50
    adjacent, rng = neighbours(n), np.random.default_rng(40)
    precision = np.diag(adjacent.sum(axis=1)) - 0.95 * adjacent
    y = rng.poisson(np.exp(2 + np.linalg.cholesky(np.linalg.inv(precision)) @ rng.normal(size=n)))
    with pm.Model() as model:
        level, tau, alpha = pm.Normal("level", 0, 2), pm.Gamma("tau", 2, 2), pm.Beta("alpha", 1, 1)
        phi = pm.CAR("phi", mu=np.zeros(n), tau=tau, alpha=alpha, W=adjacent)
        _regions(level + phi, adjacent)
        pm.Poisson("y", fitted(level + phi, pt.exp), observed=y)
    return model


def _regions(values: pt.TensorVariable, adjacent: np.ndarray) -> None:
    """Name values of regions, and the differences of forty pairs of neighbours."""
    one, other = np.argwhere(np.triu(adjacent))[:40].T
    pm.Deterministic("region", values)
    pm.Deterministic("region_steps", values[one] - values[other])
