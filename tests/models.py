"""Small PyMC models for the tests of the model layer: each makes a fresh model, with data from a fixed seed.

Constants are not representable in float32: PyTensor holds those that are (2.0) in single precision, and PyMC's own
log densities then lose half of the digits that the tests compare.
"""

import numpy as np
import pymc as pm
import pytensor.tensor as pt

N_OBS = 7


def _design(n_columns=2):
    return np.random.default_rng(20).normal(size=(N_OBS, n_columns))


def bernoulli_logit():
    x, y = _design(), np.array([0, 1, 1, 0, 1, 0, 1])
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 0.6, 3.1)
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        pm.Bernoulli("y", logit_p=intercept + x @ slope, observed=y)
    return model


def poisson_log_link():
    x, y = _design(), np.array([0, 3, 1, 0, 12, 2, 5])
    with pm.Model() as model:
        intercept = pm.Normal("intercept", 1.1, 2.1)
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        pm.Poisson("y", mu=pt.exp(intercept + x @ slope), observed=y)
    return model


def negative_binomial():
    x, y = _design(), np.array([0, 3, 1, 0, 40, 2, 5])
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        alpha = pm.Gamma("alpha", 2.1, 0.6)
        pm.NegativeBinomial("y", mu=pt.exp(x @ slope), alpha=alpha, observed=y)
    return model


def beta_precision():
    x, y = _design(), np.array([0.02, 0.3, 0.51, 0.6, 0.9, 0.99, 0.4])
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        precision = pm.HalfNormal("precision", 5.1)
        mean = pm.math.sigmoid(x @ slope)
        pm.Beta("y", alpha=mean * precision, beta=(1.0 - mean) * precision, observed=y)
    return model


def beta_prior():
    with pm.Model() as model:
        p = pm.Beta("p", 2.1, 3.6)
        pm.Binomial("y", n=9, p=p, observed=4)
    return model


def gamma_log_link():
    x, y = _design(), np.array([0.01, 0.7, 1.3, 2.2, 9.1, 0.4, 5.6])
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        shape = pm.Gamma("shape", 2.1, 1.1)
        pm.Gamma("y", alpha=shape, beta=shape / pt.exp(x @ slope), observed=y)
    return model


def student_t():
    x, y = _design(), np.array([0.1, -0.7, 1.3, 2.2, -40.1, 0.4, 5.6])
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        sigma = pm.HalfNormal("sigma", 2.1)
        nu = pm.Gamma("nu", 2.1, 0.1)
        pm.StudentT("y", nu=nu, mu=x @ slope, sigma=sigma, observed=y)
    return model


def ordered_logistic():
    x, y = _design(1)[:, 0], np.array([0, 3, 1, 2, 2, 1, 0])
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.1, 2.1)
        cut = pm.Normal(
            "cut", 0.1, 3.1, shape=3, transform=pm.distributions.transforms.ordered, initval=np.array([-1.1, 0.1, 1.2])
        )
        pm.OrderedLogistic("y", eta=x * slope, cutpoints=cut, observed=y, compute_p=False)
    return model


def categorical_softmax():
    x, y = _design(), np.array([0, 2, 1, 2, 2, 1, 0])
    with pm.Model() as model:
        weights = pm.Normal("weights", 0.1, 2.1, shape=(2, 3))
        pm.Categorical("y", logit_p=x @ weights, observed=y)
    return model


#: Likelihoods whose log density over- or underflows when it is written down naively.
STABILITY = {
    "bernoulli": bernoulli_logit,
    "poisson": poisson_log_link,
    "negative_binomial": negative_binomial,
    "beta": beta_precision,
    "beta_prior": beta_prior,
    "gamma": gamma_log_link,
    "student_t": student_t,
    "ordered": ordered_logistic,
    "categorical": categorical_softmax,
}
