"""Log p and its gradient at points: by rows where these are all of it, as the compiled functions have them."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from scipy import special

from pymc_ngvi import NGVI, LogDensity
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.reading.distribute import conditions_of

X = np.random.default_rng(0).normal(size=(30, 2))
GROUP = np.arange(30) % 6


def grouped():
    with pm.Model() as model:
        sd, z, beta = pm.HalfNormal("sd", 1.0), pm.Normal("z", shape=6), pm.Normal("beta", shape=2)
        pm.Bernoulli("y", logit_p=sd * z[GROUP] + X @ beta, observed=GROUP % 2)
    return model


def several_groups_in_a_row():
    """Rows that are functions of a sum, and a predictor that occurs in two rows of a kind."""
    with pm.Model() as model:
        sd, z, w = pm.HalfNormal("sd", shape=2), pm.Normal("z", shape=6), pm.Normal("w", shape=5)
        rate = pt.exp(sd[0] * z[GROUP] + sd[1] * w[np.arange(30) % 5] * X[:, 0])
        pm.Poisson("y", rate, observed=GROUP)
    return model


def checked():
    """The shape of a negative binomial is an exponential, which may be 0: all of its rows are -inf then."""
    with pm.Model() as model:
        beta, alpha = pm.Normal("beta", shape=2), pm.Exponential("alpha", 1.0)
        pm.NegativeBinomial("y", mu=pt.exp(X @ beta), alpha=alpha, observed=GROUP)
    return model


MODELS = [grouped, several_groups_in_a_row, checked]


def points_of(density, n=40):
    away = np.repeat([0.1, 0.3, 1.0, 3.0], n // 4)[:, None] * np.random.default_rng(1).standard_normal(
        (n, density.n_dim)
    )
    return density.initial_point() + away


@pytest.mark.parametrize("build", MODELS)
def test_rows_give_log_p_and_its_gradient(build):
    density = LogDensity(build())
    theta = points_of(density)
    logp, grad = density.logp_grad(theta)
    assert not density.functions.made.logp_grad.is_made
    expected, slope = density._evaluations._batch("logp_grad", theta)
    np.testing.assert_allclose(logp, expected, rtol=1e-11)
    finite = np.isfinite(expected)
    assert finite.sum() > 30
    np.testing.assert_allclose(grad[finite], slope[finite], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(density.logp(theta), expected, rtol=1e-11)


def test_log_p_is_minus_infinity_where_a_condition_fails():
    density = LogDensity(checked())
    assert density.rows.leaves_out_conditions
    theta = points_of(density)
    [alpha] = (v for v in density.layout.variables if v.name == "alpha")
    theta[::2, alpha.where] = -800.0  # its exponential is 0
    for logp in (density.logp(theta), density.logp_grad(theta)[0]):
        assert np.isneginf(logp[::2]).all()
        assert np.isfinite(logp[1::2]).all()


def test_conditions_are_those_of_all_of_log_p():
    x = pt.vector("x", shape=(3,))
    condition = pt.all(x > 0.0)
    part = pt.switch(condition, x**2, np.full(3, -np.inf))
    [found] = conditions_of(part.sum() + x.sum())
    assert found.owner.inputs == [condition]
    assert conditions_of(x.sum()) == []
    assert conditions_of(pt.logaddexp(part, x).sum()) is None  # -inf there is a part without mass


def test_rows_that_are_not_log_p_are_given_up(monkeypatch):
    density = LogDensity(grouped())
    theta = points_of(density)
    expected, slope = density._evaluations._batch("logp_grad", theta)
    right = Expectations.at
    monkeypatch.setattr(Expectations, "at", lambda self, points: right(self, points) + 1e-3 * np.abs(points[:, 0]))
    np.testing.assert_array_equal(density.logp(theta), expected)
    assert density.rows is None
    np.testing.assert_array_equal(density.logp_grad(theta)[1], slope)


def test_rows_of_new_data_give_log_p_of_these():
    with pm.Model() as model:
        y = pm.Data("y", np.arange(4.0))
        pm.Normal("y_", pm.Normal("mu"), 1.0, observed=y)
    density = LogDensity(model)
    theta = points_of(density, 4)
    before = density.logp_grad(theta)
    with model:
        pm.set_data({"y": np.arange(4.0) + 1.0})
    logp, grad = density.logp_grad(theta)
    np.testing.assert_allclose(grad - before[1], 4.0)
    np.testing.assert_allclose(logp, LogDensity(model).logp(theta))


def test_the_nested_posterior_is_not_looked_into_where_the_exact_one_comes_first():
    model = grouped()
    approx = NGVI(model, random_seed=1).fit(progressbar=False)
    assert approx.record.is_exact
    assert not approx.density.functions.made.latent_rows.is_made
    nested = NGVI(model, random_seed=1, posterior="nested").fit(progressbar=False)
    assert nested.density.functions.made.latent_rows.is_made


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_sums_of_exponentials(axis):
    values = 300.0 * np.random.default_rng(0).normal(size=(3, 5))
    values[0] = -np.inf
    for keepdims in (False, True):
        np.testing.assert_allclose(
            logsumexp(values, axis=axis, keepdims=keepdims),
            special.logsumexp(values, axis=axis, keepdims=keepdims),
            rtol=1e-14,
        )
    assert np.isnan(logsumexp([np.nan, 0.0]))
    assert logsumexp([np.inf, 1e6]) == np.inf
