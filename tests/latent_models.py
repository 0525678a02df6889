"""Latent Gaussian models, small, for tests."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt


def level(n=30, seed=1):
    """A random walk seen with noise: log m has a closed form."""
    rng = np.random.default_rng(seed)
    y = np.cumsum(0.5 * rng.normal(size=n)) + rng.normal(size=n)
    with pm.Model() as model:
        step, noise = pm.HalfNormal("step", 1.0), pm.HalfNormal("noise", 2.0)
        x = pm.GaussianRandomWalk("x", sigma=step, init_dist=pm.Normal.dist(0.0, 3.0), shape=n)
        pm.Normal("y", x, noise, observed=y)
    return model


def process(n=25, seed=2):
    """A Gaussian process with an unknown kernel, binary data."""
    rng = np.random.default_rng(seed)
    x = np.sort(rng.uniform(0.0, 10.0, n))
    y = rng.binomial(1, 1.0 / (1.0 + np.exp(-2.0 * np.sin(x))))
    with pm.Model() as model:
        length, size = pm.InverseGamma("length", 3.0, 3.0), pm.HalfNormal("size", 3.0)
        gp = pm.gp.Latent(cov_func=size**2 * pm.gp.cov.Matern52(1, length))
        f = gp.prior("f", X=x[:, None])
        pm.Bernoulli("y", logit_p=f, observed=y)
    return model


def counts(n=24, seed=3):
    """Counts about an autoregression, with an intercept."""
    rng = np.random.default_rng(seed)
    h = np.zeros(n)
    for t in range(1, n):
        h[t] = 0.7 * h[t - 1] + 0.5 * rng.normal()
    with pm.Model() as model:
        a, rho, s = pm.Normal("a", 0.0, 2.0), pm.Uniform("rho", -1.0, 1.0), pm.HalfNormal("s", 1.0)
        x = pm.AR("x", rho=rho, sigma=s, init_dist=pm.Normal.dist(0.0, s / pt.sqrt(1.0 - rho**2)), shape=n)
        pm.Poisson("y", pt.exp(a + x), observed=rng.poisson(np.exp(1.0 + h)))
    return model


def one_effect():
    """One latent variable: log m by quadrature in one dimension."""
    with pm.Model() as model:
        s = pm.HalfNormal("s", 1.0)
        b = pm.Normal("b", 0.0, s, shape=1)
        pm.Poisson("y", pt.exp(b[0] + np.zeros(3)), observed=[0, 1, 4])
    return model


def regression():
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 1.0, shape=3)
        pm.Poisson("y", pt.exp(np.eye(3) @ beta), observed=[1, 2, 3])
    return model


def grouped(n_groups=8, per_group=4):
    """Counts in a few small groups."""
    rng = np.random.default_rng(1)
    group = np.repeat(np.arange(n_groups), per_group)
    counts = rng.poisson(np.exp(0.5 + rng.normal(0, 0.7, n_groups)[group]))
    with pm.Model() as model:
        level, sd = pm.Normal("level", 0, 2), pm.HalfNormal("sd", 1)
        effect = pm.Normal("effect", 0, sd, shape=n_groups)
        pm.Poisson("y", pm.math.exp(level + effect[group]), observed=counts)
    return model


def shifted(n_groups=6, per_group=4):
    """Counts whose level hangs on a scale: predictors have offsets that do."""
    group = np.repeat(np.arange(n_groups), per_group)
    with pm.Model() as model:
        sd = pm.HalfNormal("sd", 1.0)
        effect = pm.Normal("effect", 0, 1, shape=n_groups)
        pm.Poisson("y", pm.math.exp(0.7 * sd + sd * effect[group]), observed=(np.arange(len(group)) * 7) % 5)
    return model
