"""Time series, fields, Gaussian processes."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt


def _rng(seed):
    return np.random.default_rng([34, seed])


def local_level():
    """A level that wanders, raw data in the thousands, wide priors of both scales."""
    rng = _rng(1)
    level = 2_000.0 + np.cumsum(rng.normal(0.0, 60.0, 80))
    with pm.Model() as model:
        move, sigma = pm.HalfNormal("move", 100.0), pm.HalfNormal("sigma", 300.0)
        x = pm.GaussianRandomWalk("x", sigma=move, init_dist=pm.Normal.dist(2_000.0, 500.0), steps=79)
        pm.Normal("y", x, sigma, observed=level + rng.normal(0.0, 150.0, 80))
    return model


def autoregression():
    rng = _rng(2)
    y = np.zeros(120)
    for t in range(2, 120):
        y[t] = 0.6 * y[t - 1] - 0.3 * y[t - 2] + rng.normal(0.0, 1.0)
    with pm.Model() as model:
        rho, sigma = pm.Normal("rho", 0.0, 0.5, shape=2), pm.HalfNormal("sigma", 2.0)
        pm.AR("y", rho, sigma=sigma, init_dist=pm.Normal.dist(0.0, 2.0, shape=2), observed=y)
    return model


def seasonal():
    rng = _rng(3)
    t = np.arange(96)
    month = t % 12
    y = 100.0 + 0.3 * t + 10.0 * np.sin(2.0 * np.pi * t / 12.0) + rng.normal(0.0, 4.0, 96)
    with pm.Model() as model:
        level, slope = pm.Normal("level", 100.0, 50.0), pm.Normal("slope", 0.0, 2.0)
        scale, sigma = pm.HalfNormal("scale", 20.0), pm.HalfNormal("sigma", 20.0)
        effect = pm.ZeroSumNormal("effect", sigma=scale, shape=12)
        pm.Normal("y", level + slope * t + effect[month], sigma, observed=y)
    return model


def stochastic_volatility():
    rng = _rng(4)
    h = np.cumsum(rng.normal(0.0, 0.15, 150))
    with pm.Model() as model:
        s = pm.Exponential("s", 10.0)
        x = pm.GaussianRandomWalk("x", sigma=s, init_dist=pm.Normal.dist(0.0, 1.0), steps=149)
        nu = pm.Exponential("nu", 0.1)
        pm.StudentT("y", nu=nu + 2.0, sigma=pt.exp(x), observed=np.exp(h) * rng.standard_t(8, 150))
    return model


def holt():
    """Level and slope by recursion, unrolled."""
    rng = _rng(5)
    y = 10.0 + 0.5 * np.arange(30) + rng.normal(0.0, 1.5, 30)
    with pm.Model() as model:
        alpha, beta = pm.Beta("alpha", 2.0, 2.0), pm.Beta("beta", 2.0, 2.0)
        level, slope = pm.Normal("level0", 10.0, 5.0), pm.Normal("slope0", 0.0, 2.0)
        sigma, means = pm.HalfNormal("sigma", 5.0), []
        for value in y:
            mean = level + slope
            means.append(mean)
            new = mean + alpha * (value - mean)
            slope = slope + beta * (new - level - slope)
            level = new
        pm.Normal("y", pt.stack(means), sigma, observed=y)
    return model


def changepoint():
    """A step smoothed by a logistic function."""
    rng = _rng(6)
    t = np.arange(60.0)
    y = np.where(t < 25, 3.0, 6.0) + rng.normal(0.0, 1.0, 60)
    with pm.Model() as model:
        mean, when = pm.Normal("mean", 0.0, 10.0, shape=2), pm.Uniform("when", 5.0, 55.0)
        sigma = pm.HalfNormal("sigma", 3.0)
        part = pm.math.sigmoid((t - when) / 1.5)
        pm.Normal("y", mean[0] + (mean[1] - mean[0]) * part, sigma, observed=y)
    return model


def _grid(n):
    index = np.arange(n * n).reshape(n, n)
    edges = [(index[:, :-1], index[:, 1:]), (index[:-1], index[1:])]
    adjacency = np.zeros((n * n, n * n))
    for a, b in edges:
        adjacency[a.ravel(), b.ravel()] = adjacency[b.ravel(), a.ravel()] = 1.0
    return adjacency


def intrinsic_car():
    """Counts on a grid of 49 regions."""
    rng = _rng(7)
    field = np.add.outer(np.linspace(-0.6, 0.6, 7), np.linspace(-0.3, 0.3, 7)).ravel()
    expected = rng.uniform(5.0, 20.0, 49)
    with pm.Model() as model:
        beta, tau = pm.Normal("beta", 0.0, 2.0), pm.HalfNormal("tau", 1.0)
        phi = pm.ICAR("phi", W=_grid(7))
        pm.Poisson("y", expected * pt.exp(beta + tau * phi), observed=rng.poisson(expected * np.exp(field)))
    return model


def proper_car():
    rng = _rng(8)
    field = np.add.outer(np.linspace(-0.6, 0.6, 6), np.linspace(-0.3, 0.3, 6)).ravel()
    with pm.Model() as model:
        beta, tau, alpha = pm.Normal("beta", 0.0, 2.0), pm.Gamma("tau", 2.0, 1.0), pm.Beta("alpha", 2.0, 2.0)
        phi = pm.CAR("phi", mu=np.zeros(36), W=_grid(6), alpha=alpha, tau=tau)
        pm.Poisson("y", pt.exp(beta + phi), observed=rng.poisson(np.exp(1.5 + field)))
    return model


def latent_process():
    """Binary outcomes over a Gaussian process."""
    rng = _rng(9)
    x = np.sort(rng.uniform(0.0, 10.0, 50))[:, None]
    y = rng.binomial(1, 1.0 / (1.0 + np.exp(-2.0 * np.sin(x[:, 0]))))
    with pm.Model() as model:
        length, eta = pm.InverseGamma("length", 5.0, 5.0), pm.HalfNormal("eta", 2.0)
        process = pm.gp.Latent(cov_func=eta**2 * pm.gp.cov.Matern52(1, length))
        f = process.prior("f", X=x)
        pm.Bernoulli("y", logit_p=f, observed=y)
    return model


def marginal_process():
    rng = _rng(10)
    x = np.sort(rng.uniform(0.0, 10.0, 60))[:, None]
    y = 3.0 * np.sin(x[:, 0]) + rng.normal(0.0, 0.5, 60)
    with pm.Model() as model:
        length, eta = pm.InverseGamma("length", 5.0, 5.0), pm.HalfNormal("eta", 5.0)
        sigma = pm.HalfNormal("sigma", 2.0)
        process = pm.gp.Marginal(cov_func=eta**2 * pm.gp.cov.ExpQuad(1, length))
        process.marginal_likelihood("y", X=x, y=y, sigma=sigma)
    return model


def basis_process():
    """A Hilbert-space approximation."""
    rng = _rng(11)
    x = np.linspace(0.0, 10.0, 150)[:, None]
    y = rng.poisson(np.exp(1.0 + np.sin(x[:, 0])))
    with pm.Model() as model:
        length, eta = pm.InverseGamma("length", 5.0, 5.0), pm.HalfNormal("eta", 2.0)
        process = pm.gp.HSGP(m=[20], c=1.5, cov_func=eta**2 * pm.gp.cov.ExpQuad(1, length))
        f = process.prior("f", X=x)
        pm.Poisson("y", pt.exp(pm.Normal("alpha", 0.0, 2.0) + f), observed=y)
    return model


def spline():
    """Twenty hat functions with a random walk of their heights."""
    rng = _rng(12)
    x = np.sort(rng.uniform(0.0, 1.0, 150))
    knots = np.linspace(0.0, 1.0, 20)
    basis = np.maximum(0.0, 1.0 - np.abs(x[:, None] - knots) * 19.0)
    y = np.sin(6.0 * x) + rng.normal(0.0, 0.3, 150)
    with pm.Model() as model:
        move, sigma = pm.HalfNormal("move", 1.0), pm.HalfNormal("sigma", 1.0)
        w = pm.GaussianRandomWalk("w", sigma=move, init_dist=pm.Normal.dist(0.0, 2.0), steps=19)
        pm.Normal("y", basis @ w, sigma, observed=y)
    return model


MODELS = {
    f.__name__: f
    for f in (
        local_level, autoregression, seasonal, stochastic_volatility, holt, changepoint, intrinsic_car, proper_car,
        latent_process, marginal_process, basis_process, spline,
    )
}  # fmt: skip
