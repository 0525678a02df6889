"""Models in shards for the tests, importable by worker processes."""

import numpy as np
import pymc as pm

N_SHARDS, N_ROWS, N_DIM = 4, 600, 5


def data(n=N_ROWS, seed=1):
    rng = np.random.default_rng(seed)
    X = np.column_stack([np.ones(n), rng.normal(size=(n, N_DIM - 1))])
    beta = np.linspace(-0.5, 0.8, N_DIM)
    return X, rng.binomial(1, 1.0 / (1.0 + np.exp(-X @ beta))), rng.normal(X @ beta, 0.7), rng.integers(0, 40, n)


def rows_of(key):
    return slice(key * N_ROWS // N_SHARDS, (key + 1) * N_ROWS // N_SHARDS)


def logistic(rows=slice(None)):
    X, y, _, _ = (part[rows] for part in data())
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=N_DIM)
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return model


def normal(rows=slice(None)):
    """An unknown scale, and a potential that is part of the prior."""
    X, _, z, _ = (part[rows] for part in data())
    with pm.Model(coords={"predictor": list("abcde")}) as model:
        beta = pm.Normal("beta", 0.0, 2.0, dims="predictor")
        sigma = pm.HalfNormal("sigma", 2.0)
        pm.Potential("soft", -0.5 * beta.sum() ** 2)
        pm.Normal("z", X @ beta, sigma, observed=z)
    return model


def grouped(rows=slice(None)):
    """Effects of groups that are in several shards."""
    X, y, _, group = (part[rows] for part in data())
    with pm.Model() as model:
        beta, sd = pm.Normal("beta", 0.0, 2.0, shape=N_DIM), pm.HalfNormal("sd", 1.0)
        b = pm.Normal("b", 0.0, sd, shape=40)
        pm.Bernoulli("y", logit_p=X @ beta + b[group], observed=y)
    return model


def of_rows(make):
    """Return what builds the shards of a model."""
    return lambda key: make(rows_of(key))
