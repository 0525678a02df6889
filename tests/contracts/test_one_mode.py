"""Which models are known to have one mode, by the operations of their rows."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_ngvi import LogDensity
from pymc_ngvi.density.one_mode import has_one_mode

X = np.random.default_rng(1).normal(size=(12, 2))
COUNTS = np.arange(12) % 4


def predictor(prior=pm.Normal, **of_prior):
    return X @ prior("beta", **({"mu": 0.0, "sigma": 3.0} | of_prior), shape=2)


def poisson(**of_prior):
    pm.Poisson("y", pt.exp(predictor(**of_prior)), observed=COUNTS)


def bernoulli():
    pm.Bernoulli("y", logit_p=predictor(), observed=COUNTS > 1)


def binomial():
    pm.Binomial("y", 5, logit_p=predictor(), observed=COUNTS)


def normal():
    pm.Normal("y", predictor(), 0.7, observed=COUNTS + 0.1)


def laplace_prior():
    beta = pm.Laplace("beta", 0.0, 1.0, shape=2)
    pm.Poisson("y", pt.exp(X @ beta), observed=COUNTS)


def given_scale():
    """Gaussian effects whose scale is a number."""
    effects = pm.Normal("u", 0.0, 0.5, shape=4)
    pm.Poisson("y", pt.exp(predictor() + effects[COUNTS]), observed=COUNTS)


def unknown_noise():
    pm.Normal("y", predictor(), pm.HalfNormal("s", 1.0), observed=COUNTS + 0.1)


def unknown_scale():
    effects = pm.Normal("u", 0.0, pm.HalfNormal("s", 1.0), shape=4)
    pm.Poisson("y", pt.exp(predictor() + effects[COUNTS]), observed=COUNTS)


def student_t():
    pm.StudentT("y", nu=4.0, mu=predictor(), sigma=1.0, observed=COUNTS + 0.1)


def student_t_prior():
    beta = pm.StudentT("beta", nu=4.0, mu=0.0, sigma=1.0, shape=2)
    pm.Poisson("y", pt.exp(X @ beta), observed=COUNTS)


def squared():
    pm.Normal("y", pm.Normal("u", 0.0, 3.0) ** 2, 0.5, observed=COUNTS + 0.1)


def product():
    pm.Normal("y", pm.Normal("a", 0.0, 1.0) * pm.Normal("b", 0.0, 1.0), 0.5, observed=COUNTS + 0.1)


def mixture():
    mu = pm.Normal("mu", 0.0, 3.0, shape=2)
    parts = [pm.logp(pm.Normal.dist(mu[i], 1.0), COUNTS + 0.1) for i in range(2)]
    pm.Potential("y", pt.logaddexp(*parts).sum())


def convex_potential():
    x = pm.Normal("x", 0.0, 1.0)
    pm.Potential("p", 0.7 * x**2)


def known(write):
    with pm.Model() as model:
        write()
    return has_one_mode(LogDensity(model))


@pytest.mark.parametrize("write", [poisson, bernoulli, binomial, normal, laplace_prior, given_scale])
def test_concave_rows_have_one_mode(write):
    assert known(write)


@pytest.mark.parametrize(
    "write",
    [unknown_noise, unknown_scale, student_t, student_t_prior, squared, product, mixture, convex_potential],
)  # fmt: skip
def test_of_others_it_is_not_known(write):
    assert not known(write)
