"""Log p and its gradient at points: by rows where these are all of it, as the compiled functions have them."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from pymc_ngvi import LogDensity
from pymc_ngvi.density.expectations import Expectations

X = np.random.default_rng(0).normal(size=(30, 2))
GROUP = np.arange(30) % 6


def grouped():
    with pm.Model() as model:
        sd, z, beta = pm.HalfNormal("sd", 1.0), pm.Normal("z", shape=6), pm.Normal("beta", shape=2)
        pm.Bernoulli("y", logit_p=sd * z[GROUP] + X @ beta, observed=GROUP % 2)
    return model


def checked():
    """The shape of a negative binomial is an exponential, which may be 0: all of its rows are -inf then."""
    with pm.Model() as model:
        beta, alpha = pm.Normal("beta", shape=2), pm.Exponential("alpha", 1.0)
        pm.NegativeBinomial("y", mu=pt.exp(X @ beta), alpha=alpha, observed=GROUP)
    return model


def points_of(density, n=40):
    away = np.repeat([0.1, 0.3, 1.0, 3.0], n // 4)[:, None] * np.random.default_rng(1).standard_normal(
        (n, density.n_dim)
    )
    return density.initial_point() + away


def test_log_p_is_minus_infinity_where_a_condition_fails():
    density = LogDensity(checked())
    assert density.rows.leaves_out_conditions
    theta = points_of(density)
    [alpha] = (v for v in density.layout.variables if v.name == "alpha")
    theta[::2, alpha.where] = -800.0  # its exponential is 0
    for logp in (density.logp(theta), density.logp_grad(theta)[0]):
        assert np.isneginf(logp[::2]).all()
        assert np.isfinite(logp[1::2]).all()


def test_rows_that_are_not_log_p_are_given_up(monkeypatch):
    density = LogDensity(grouped())
    theta = points_of(density)
    expected, slope = density._evaluations._batch("logp_grad", theta)
    right = Expectations.at
    monkeypatch.setattr(Expectations, "at", lambda self, points: right(self, points) + 1e-3 * np.abs(points[:, 0]))
    np.testing.assert_array_equal(density.logp(theta), expected)
    assert density.rows is None
    np.testing.assert_array_equal(density.logp_grad(theta)[1], slope)
