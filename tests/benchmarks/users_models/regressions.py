"""Regressions without groups, most of them on raw scales."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt


def _rng(seed):
    return np.random.default_rng([31, seed])


def _expit(x):
    return 1.0 / (1.0 + np.exp(-x))


def earnings_on_height():
    """Yearly earnings on height in centimetres and age: raw scales, flat-ish priors."""
    rng = _rng(1)
    height, age = rng.normal(170.0, 9.0, 300), rng.uniform(20.0, 65.0, 300)
    y = -60_000.0 + 450.0 * height + 180.0 * age + rng.normal(0.0, 11_000.0, 300)
    with pm.Model() as model:
        alpha = pm.Normal("alpha", 0.0, 1e5)
        beta = pm.Normal("beta", 0.0, 1e4, shape=2)
        sigma = pm.HalfCauchy("sigma", 5_000.0)
        pm.Normal("y", alpha + beta[0] * height + beta[1] * age, sigma, observed=y)
    return model


def children_flat():
    """A test score on the score of the mother; flat coefficients."""
    rng = _rng(2)
    x = rng.normal(100.0, 15.0, 400)
    y = 26.0 + 0.6 * x + rng.normal(0.0, 18.0, 400)
    with pm.Model() as model:
        beta = pm.Flat("beta", shape=2)
        sigma = pm.HalfCauchy("sigma", 2.5)
        pm.Normal("y", beta[0] + beta[1] * x, sigma, observed=y)
    return model


def house_prices():
    """Log prices on five predictors of very different scales."""
    rng = _rng(3)
    area, rooms = rng.lognormal(4.6, 0.4, 250), rng.integers(1, 8, 250)
    year, distance = rng.integers(1900, 2020, 250), rng.gamma(2.0, 3_000.0, 250)
    design = np.column_stack([np.ones(250), area, rooms, year, distance])
    y = design @ np.array([4.0, 0.006, 0.05, 0.003, -3e-5]) + rng.normal(0.0, 0.25, 250)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 10.0, shape=5)
        sigma = pm.Exponential("sigma", 1.0)
        pm.Normal("y", design @ beta, sigma, observed=y)
    return model


def robust():
    """Student-t errors with free degrees of freedom."""
    rng = _rng(4)
    x = rng.normal(size=(150, 3))
    y = 1.0 + x @ np.array([0.5, -1.0, 0.0]) + 0.6 * rng.standard_t(3, 150)
    with pm.Model() as model:
        alpha, beta = pm.Normal("alpha", 0.0, 5.0), pm.Normal("beta", 0.0, 2.0, shape=3)
        sigma, nu = pm.HalfNormal("sigma", 2.0), pm.Gamma("nu", 2.0, 0.1)
        pm.StudentT("y", nu=nu, mu=alpha + x @ beta, sigma=sigma, observed=y)
    return model


def laplace_errors():
    """Median regression: a likelihood with kinks, which may be called not smooth."""
    rng = _rng(5)
    x = rng.normal(size=120)
    y = 0.5 + 1.2 * x + rng.laplace(0.0, 0.7, 120)
    with pm.Model() as model:
        beta, b = pm.Normal("beta", 0.0, 3.0, shape=2), pm.HalfNormal("b", 2.0)
        pm.Laplace("y", beta[0] + beta[1] * x, b, observed=y)
    return model


def logistic():
    rng = _rng(6)
    x = rng.normal(size=(200, 8))
    y = rng.binomial(1, _expit(-0.5 + x @ rng.normal(0.0, 0.7, 8)))
    with pm.Model() as model:
        alpha, beta = pm.Normal("alpha", 0.0, 5.0), pm.Normal("beta", 0.0, 2.5, shape=8)
        pm.Bernoulli("y", logit_p=alpha + x @ beta, observed=y)
    return model


def logistic_rare():
    """Nine events in 300 rows: skewed."""
    rng = _rng(7)
    x = rng.normal(size=(300, 2))
    y = np.zeros(300, dtype=int)
    y[np.argsort(-(x[:, 0] + rng.normal(0.0, 1.5, 300)))[:9]] = 1
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 5.0, shape=3)
        pm.Bernoulli("y", logit_p=beta[0] + x @ beta[1:], observed=y)
    return model


def poisson_two_parameters():
    rng = _rng(8)
    x = rng.normal(size=200)
    with pm.Model() as model:
        alpha, beta = pm.Normal("alpha", 0.0, 5.0), pm.Normal("beta", 0.0, 5.0)
        pm.Poisson("y", pt.exp(alpha + beta * x), observed=rng.poisson(np.exp(0.5 + 0.4 * x)))
    return model


def gamma_log_link():
    rng = _rng(9)
    x = rng.normal(size=(150, 2))
    mean = np.exp(1.0 + x @ np.array([0.4, -0.3]))
    with pm.Model() as model:
        beta, alpha = pm.Normal("beta", 0.0, 3.0, shape=3), pm.HalfNormal("alpha", 5.0)
        mu = pt.exp(beta[0] + x @ beta[1:])
        pm.Gamma("y", alpha=alpha, beta=alpha / mu, observed=rng.gamma(2.5, mean / 2.5))
    return model


def beta_regression():
    rng = _rng(10)
    x = rng.normal(size=120)
    p = _expit(0.3 + 0.8 * x)
    with pm.Model() as model:
        beta, phi = pm.Normal("beta", 0.0, 2.0, shape=2), pm.HalfNormal("phi", 50.0)
        mu = pm.math.sigmoid(beta[0] + beta[1] * x)
        pm.Beta("y", alpha=mu * phi, beta=(1.0 - mu) * phi, observed=rng.beta(15.0 * p, 15.0 * (1.0 - p)))
    return model


def ordered_logit():
    rng = _rng(11)
    x = rng.normal(size=(250, 2))
    y = np.digitize(x @ np.array([1.0, -0.5]) + rng.logistic(size=250), [-1.5, 0.0, 1.0])
    ordered = pm.distributions.transforms.ordered
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.0, shape=2)
        cut = pm.Normal("cut", 0.0, 3.0, shape=3, transform=ordered, initval=np.array([-1.0, 0.0, 1.0]))
        pm.OrderedLogistic("y", eta=x @ beta, cutpoints=cut, observed=y, compute_p=False)
    return model


def horseshoe():
    """Twenty coefficients of which three are not zero."""
    rng = _rng(12)
    x = rng.normal(size=(100, 20))
    y = x[:, :3] @ np.array([2.0, -1.5, 1.0]) + rng.normal(0.0, 1.0, 100)
    with pm.Model() as model:
        tau, local = pm.HalfCauchy("tau", 0.1), pm.HalfCauchy("local", 1.0, shape=20)
        z, sigma = pm.Normal("z", 0.0, 1.0, shape=20), pm.HalfNormal("sigma", 2.0)
        pm.Normal("y", x @ (z * local * tau), sigma, observed=y)
    return model


def ridge():
    """Forty correlated predictors with one scale for all coefficients."""
    rng = _rng(13)
    x = rng.normal(size=(120, 40)) + rng.normal(size=(120, 1))
    y = x @ rng.normal(0.0, 0.4, 40) + rng.normal(0.0, 1.0, 120)
    with pm.Model() as model:
        scale, sigma = pm.HalfNormal("scale", 1.0), pm.HalfNormal("sigma", 2.0)
        beta = pm.Normal("beta", 0.0, scale, shape=40)
        pm.Normal("y", x @ beta, sigma, observed=y)
    return model


def variance_function():
    """Log standard deviation linear in the predictor."""
    rng = _rng(14)
    x = rng.uniform(0.0, 10.0, 150)
    y = 3.0 + 2.0 * x + np.exp(-0.5 + 0.2 * x) * rng.normal(size=150)
    with pm.Model() as model:
        beta, gamma = pm.Normal("beta", 0.0, 10.0, shape=2), pm.Normal("gamma", 0.0, 3.0, shape=2)
        pm.Normal("y", beta[0] + beta[1] * x, pt.exp(gamma[0] + gamma[1] * x), observed=y)
    return model


def seven_points():
    rng = _rng(15)
    x = np.arange(7.0)
    y = 1.0 + 0.5 * x + rng.normal(0.0, 0.8, 7)
    with pm.Model() as model:
        beta, sigma = pm.Normal("beta", 0.0, 5.0, shape=2), pm.HalfNormal("sigma", 3.0)
        pm.Normal("y", beta[0] + beta[1] * x, sigma, observed=y)
    return model


def separated_flat():
    """Complete separation and flat priors: the posterior is improper."""
    x = np.linspace(-2.0, 2.0, 40)
    with pm.Model() as model:
        beta = pm.Flat("beta", shape=2)
        pm.Bernoulli("y", logit_p=beta[0] + beta[1] * x, observed=(x > 0.03).astype(int))
    return model


def separated_normal():
    """Complete separation and a wide prior: proper, skewed."""
    x = np.linspace(-2.0, 2.0, 40)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 10.0, shape=2)
        pm.Bernoulli("y", logit_p=beta[0] + beta[1] * x, observed=(x > 0.03).astype(int))
    return model


MODELS = {
    f.__name__: f
    for f in (
        earnings_on_height, children_flat, house_prices, robust, laplace_errors, logistic, logistic_rare,
        poisson_two_parameters, gamma_log_link, beta_regression, ordered_logit, horseshoe, ridge, variance_function,
        seven_points, separated_flat, separated_normal,
    )
}  # fmt: skip
