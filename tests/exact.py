"""Small models with an exact posterior, with groups of one coordinate, of two, and without groups; fits of them."""

import numpy as np
import pymc as pm

import pymc_ngvi

_RNG = np.random.default_rng(11)
GROUP = np.repeat(np.arange(8), 6)
X = _RNG.standard_normal(48)
COUNTS = _RNG.poisson(np.exp(0.5 + _RNG.normal(0.0, 0.6, 8)[GROUP]))
REAL = 0.5 + _RNG.standard_normal(8)[GROUP] + 0.7 * _RNG.standard_normal(8)[GROUP] * X + _RNG.standard_normal(48)
QUIET = {"progressbar": False, "backend": "quick"}


def one(sd=1.0):
    """Return a model with an effect in each group."""
    with pm.Model(coords={"group": [f"g{i}" for i in range(8)]}) as model:
        group = pm.Data("member", GROUP)
        mu = pm.Normal("mu", 0.0, sd)
        scale = pm.HalfNormal("scale", 1.0)
        b = pm.Normal("b", 0.0, scale, dims="group")
        pm.Deterministic("total", mu + b[0] - b[1])
        pm.Poisson("y", pm.math.exp(mu + b[group]), observed=COUNTS)
    return model


def two():
    """Return a model with an intercept and a slope in each group."""
    with pm.Model() as model:
        x = pm.Data("x", X)
        mu = pm.Normal("mu", 0.0, 2.0, shape=2)
        scale = pm.LogNormal("scale", 0.0, 0.5, shape=2)  # no tail: a base rule will do
        b = pm.Normal("b", mu, scale, shape=(8, 2))
        pm.Deterministic("total", b[0, 0] + b[0, 1])
        pm.StudentT("y", nu=4.0, mu=b[GROUP, 0] + b[GROUP, 1] * x, sigma=1.0, observed=REAL)
    return model


def plain():
    """Return a model of few coordinates, none of them local."""
    with pm.Model() as model:
        rate = pm.Gamma("rate", 2.0, 1.0)
        shape = pm.HalfNormal("shape", 2.0)
        pm.Deterministic("total", rate + shape)
        pm.NegativeBinomial("y", mu=rate, alpha=shape, observed=[0, 1, 0, 5, 2])
    return model


MODELS = {"one": one, "two": two, "plain": plain}


def fit(model, seed=1, **options):
    """Return a fit whose posterior is exact."""
    approx = pymc_ngvi.fit_ngvi(model=model, random_seed=seed, **QUIET, **options)
    assert approx.record.is_exact, approx.record.posterior
    return approx
