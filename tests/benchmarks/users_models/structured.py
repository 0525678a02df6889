"""Mixtures, missing data, several outcomes, and models with features of PyMC of their own."""

import warnings

import numpy as np
import pymc as pm
import pymc.dims as pmd
import pytensor.tensor as pt

from pymc.exceptions import ImputationWarning


def _rng(seed):
    return np.random.default_rng([35, seed])


def normal_mixture():
    """Two well separated components, kept apart by their order."""
    rng = _rng(1)
    y = np.concatenate([rng.normal(-2.0, 0.7, 80), rng.normal(1.5, 1.0, 120)])
    ordered = pm.distributions.transforms.ordered
    with pm.Model() as model:
        w = pm.Dirichlet("w", np.ones(2))
        mu = pm.Normal("mu", 0.0, 5.0, shape=2, transform=ordered, initval=np.array([-1.0, 1.0]))
        sigma = pm.HalfNormal("sigma", 2.0, shape=2)
        pm.NormalMixture("y", w=w, mu=mu, sigma=sigma, observed=y)
    return model


def label_switching():
    """The same without an order: two modes by symmetry."""
    rng = _rng(2)
    y = np.concatenate([rng.normal(-2.0, 0.7, 60), rng.normal(1.5, 0.7, 60)])
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 5.0, shape=2, initval=np.array([-1.0, 1.0]))
        sigma = pm.HalfNormal("sigma", 2.0)
        pm.NormalMixture("y", w=np.array([0.5, 0.5]), mu=mu, sigma=sigma, observed=y)
    return model


def hidden_markov():
    """Two states, summed over by the forward algorithm."""
    rng = _rng(3)
    state = np.zeros(100, dtype=int)
    for t in range(1, 100):
        state[t] = state[t - 1] if rng.random() < 0.9 else 1 - state[t - 1]
    y = np.where(state == 0, -1.0, 2.0) + rng.normal(0.0, 0.8, 100)
    ordered = pm.distributions.transforms.ordered
    with pm.Model() as model:
        stay = pm.Beta("stay", 5.0, 2.0, shape=2)
        mu = pm.Normal("mu", 0.0, 3.0, shape=2, transform=ordered, initval=np.array([-0.5, 0.5]))
        sigma = pm.HalfNormal("sigma", 2.0)
        emit = pm.logp(pm.Normal.dist(mu, sigma), y[:, None])
        log_stay, log_leave = pt.log(stay), pt.log1p(-stay)
        a, b = emit[0, 0] + np.log(0.5), emit[0, 1] + np.log(0.5)
        for t in range(1, 100):
            a, b = (
                emit[t, 0] + pt.logaddexp(a + log_stay[0], b + log_leave[1]),
                emit[t, 1] + pt.logaddexp(a + log_leave[0], b + log_stay[1]),
            )
        pm.Potential("y", pt.logaddexp(a, b))
    return model


def imputed_predictor():
    """Missing values of a predictor."""
    rng = _rng(4)
    x = rng.normal(2.0, 1.0, 100)
    y = 1.0 + 0.8 * x + rng.normal(0.0, 0.6, 100)
    masked = np.ma.masked_array(x, rng.random(100) < 0.15)
    with pm.Model() as model, warnings.catch_warnings():
        warnings.simplefilter("ignore", ImputationWarning)
        mu, tau = pm.Normal("mu", 0.0, 5.0), pm.HalfNormal("tau", 3.0)
        seen = pm.Normal("x", mu, tau, observed=masked)
        beta, sigma = pm.Normal("beta", 0.0, 3.0, shape=2), pm.HalfNormal("sigma", 2.0)
        pm.Normal("y", beta[0] + beta[1] * seen, sigma, observed=y)
    return model


def measurement_error():
    rng = _rng(5)
    truth = rng.normal(0.0, 1.0, 60)
    seen = truth + rng.normal(0.0, 0.4, 60)
    y = 0.5 + 1.5 * truth + rng.normal(0.0, 0.5, 60)
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.5, shape=60)
        pm.Normal("seen", x, 0.4, observed=seen)
        beta, sigma = pm.Normal("beta", 0.0, 3.0, shape=2), pm.HalfNormal("sigma", 2.0)
        pm.Normal("y", beta[0] + beta[1] * x, sigma, observed=y)
    return model


def several_outcomes():
    """Three outcomes with an LKJ prior of their correlations."""
    rng = _rng(6)
    y = rng.multivariate_normal([0.0, 1.0, 2.0], [[1.0, 0.6, 0.2], [0.6, 2.0, -0.3], [0.2, -0.3, 1.5]], 120)
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 5.0, shape=3)
        chol, _, _ = pm.LKJCholeskyCov("chol", n=3, eta=2.0, sd_dist=pm.Exponential.dist(1.0, shape=3))
        pm.MvNormal("y", mu, chol=chol, observed=y)
    return model


def factor_analysis():
    """One factor whose sign is not identified."""
    rng = _rng(7)
    f = rng.normal(size=80)
    y = f[:, None] * np.array([1.0, 0.8, -0.6, 0.5]) + rng.normal(0.0, 0.6, (80, 4))
    with pm.Model() as model:
        factor, load = pm.Normal("factor", shape=80), pm.Normal("load", 0.0, 1.5, shape=4, initval=np.ones(4))
        sigma = pm.HalfNormal("sigma", 1.5, shape=4)
        pm.Normal("y", factor[:, None] * load, sigma, observed=y)
    return model


def _regression_data():
    rng = _rng(8)
    x = rng.normal(size=(80, 3))
    return x, 0.5 + x @ np.array([1.0, -0.5, 0.2]) + rng.normal(0.0, 0.7, 80)


def dims_regression():
    x, y = _regression_data()
    with pm.Model(coords={"row": range(80), "column": ["a", "b", "c"]}) as model:
        design, outcome = pmd.Data("design", x, dims=("row", "column")), pmd.Data("outcome", y, dims="row")
        alpha, beta = pmd.Normal("alpha", 0.0, 3.0), pmd.Normal("beta", 0.0, 3.0, dims="column")
        sigma = pmd.HalfNormal("sigma", 2.0)
        pmd.Normal("y", alpha + design.dot(beta, dim="column"), sigma, dims="row", observed=outcome)
    return model


def plain_regression():
    """The model of `dims_regression` without named dimensions."""
    x, y = _regression_data()
    with pm.Model() as model:
        alpha, beta = pm.Normal("alpha", 0.0, 3.0), pm.Normal("beta", 0.0, 3.0, shape=3)
        pm.Normal("y", alpha + x @ beta, pm.HalfNormal("sigma", 2.0), observed=y)
    return model


def _group_data():
    rng = _rng(9)
    group = np.repeat(np.arange(25), 6)
    return group, 1.0 + rng.normal(0.0, 0.7, 25)[group] + rng.normal(0.0, 0.9, 150)


def dims_groups():
    group, y = _group_data()
    with pm.Model(coords={"row": range(150), "group": range(25)}) as model:
        index, outcome = pmd.Data("index", group, dims="row"), pmd.Data("outcome", y, dims="row")
        mu, tau, sigma = pmd.Normal("mu", 0.0, 3.0), pmd.HalfNormal("tau", 2.0), pmd.HalfNormal("sigma", 2.0)
        b = pmd.Normal("b", 0.0, tau, dims="group")
        pmd.Normal("y", mu + b.isel(group=index), sigma, dims="row", observed=outcome)
    return model


def plain_groups():
    """The model of `dims_groups` without named dimensions."""
    group, y = _group_data()
    with pm.Model() as model:
        mu, tau, sigma = pm.Normal("mu", 0.0, 3.0), pm.HalfNormal("tau", 2.0), pm.HalfNormal("sigma", 2.0)
        b = pm.Normal("b", 0.0, tau, shape=25)
        pm.Normal("y", mu + b[group], sigma, observed=y)
    return model


def minibatch(batch_size=100):
    """Linear regression on minibatches of 100 of 2,000 rows; None: on all of them."""
    rng = _rng(10)
    x = rng.normal(size=(2_000, 3))
    y = 1.0 + x @ np.array([0.5, -0.3, 2.0]) + rng.normal(0.0, 1.5, 2_000)
    with pm.Model() as model:
        batch_x, batch_y = (x, y) if batch_size is None else pm.Minibatch(x, y, batch_size=batch_size)
        alpha, beta = pm.Normal("alpha", 0.0, 5.0), pm.Normal("beta", 0.0, 5.0, shape=3)
        sigma = pm.HalfNormal("sigma", 5.0)
        total = None if batch_size is None else 2_000
        pm.Normal("y", alpha + batch_x @ beta, sigma, observed=batch_y, total_size=total)
    return model


def flat_alone():
    """No data: improper."""
    with pm.Model() as model:
        pm.Flat("x")
    return model


def custom_density():
    """A likelihood of the user's own, and data that can be changed."""
    rng = _rng(11)
    with pm.Model() as model:
        data = pm.Data("data", rng.gumbel(2.0, 1.5, 100))
        mu, beta = pm.Normal("mu", 0.0, 5.0), pm.HalfNormal("beta", 3.0)

        def logp(value, mu, beta):
            z = (value - mu) / beta
            return -z - pt.exp(-z) - pt.log(beta)

        pm.CustomDist("y", mu, beta, logp=logp, observed=data)
    return model


MODELS = {
    f.__name__: f
    for f in (
        normal_mixture, label_switching, hidden_markov, imputed_predictor, measurement_error, several_outcomes,
        factor_analysis, dims_regression, dims_groups, minibatch, flat_alone, custom_density,
    )
}  # fmt: skip
