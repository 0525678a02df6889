"""Log p as rows of the latent variables, hyperparameters being given."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from latent_models import counts, level, process, regression

from pymc_ngvi import LogDensity
from pymc_ngvi.density.hyperparameters import latent_rows
from pymc_ngvi.density.rows_given import NotRows, RowsGiven


def names_of(density, index):
    return [density.layout.label(int(i)) for i in index]


@pytest.mark.parametrize("make", [level, process, counts])
def test_rows_are_log_p_at_all_hyperparameters(make):
    """Those that were given first have no part in it: the matrix of the predictors follows."""
    density = LogDensity(make())
    given, rng = latent_rows(density), np.random.default_rng(1)
    start = density.initial_point()
    for _ in range(3):
        theta = start + 0.3 * rng.standard_normal((4, density.n_dim))
        theta[:, given.outside] = theta[0, given.outside]
        assert given.give(theta[0, given.outside])
        np.testing.assert_allclose(given.rows.at(theta[:, given.inside]), density.logp(theta), rtol=1e-9)


def test_what_is_given():
    """Scales, correlations and parameters of kernels; intercepts and coefficients stay."""
    for make, expected in (
        (level, ["step_log__", "noise_log__"]),
        (process, ["length_log__", "size_log__"]),
        (counts, ["rho_interval__", "s_log__"]),
    ):
        density = LogDensity(make())
        assert names_of(density, latent_rows(density).outside) == expected


def test_a_parameter_without_a_transform_is_given_where_rows_read_it_beside_a_predictor():
    with pm.Model() as model:
        log_s = pm.Normal("log_s", 0.0, 1.0)
        s = pm.HalfNormal("s", 1.0)
        x = pm.Normal("x", 0.0, pt.exp(log_s), shape=8)
        pm.Normal("y", x, s, observed=np.arange(8.0))
    density = LogDensity(model)
    assert names_of(density, latent_rows(density).outside) == ["log_s", "s_log__"]


def test_models_without_hyperparameters_say_so():
    with pytest.raises(NotRows, match="no scale, correlation or other transformed parameter"):
        latent_rows(LogDensity(regression()))


def test_what_is_no_row_is_refused_with_a_reason():
    """Given its scale, the elements of a covariance that is unknown in many ways stay."""
    with pm.Model() as model:
        s = pm.HalfNormal("s", 1.0)
        x = pm.Normal("x", 0.0, s, shape=12)
        pm.Potential("coupled", -pt.log1p(pt.exp((x[:, None] * x).sum())) * pt.sum(x**2) ** 0.5)
        pm.Normal("y", x, 1.0, observed=np.ones(12))
    with pytest.raises(NotRows):
        latent_rows(LogDensity(model))


def test_other_data_are_taken():
    """What was found of a model serves the next fit, with the data as they are then."""
    with pm.Model() as model:
        y = pm.Data("y_data", np.ones(6))
        s = pm.HalfNormal("s", 1.0)
        x = pm.Normal("x", 0.0, s, shape=6)
        pm.Normal("y", x, 1.0, observed=y)
    density = LogDensity(model)
    given = latent_rows(density)
    assert given.give(np.zeros(1))
    before = given.rows.at(np.ones((1, 6)))
    with model:
        pm.set_data({"y_data": np.full(6, 3.0)})
    assert given.give(np.zeros(1))
    theta = np.concatenate([np.zeros((1, 1)), np.ones((1, 6))], axis=1)
    after = given.rows.at(np.ones((1, 6)))
    np.testing.assert_allclose(after, density.logp(theta), rtol=1e-9)
    assert abs(after[0] - before[0]) > 1.0


def of_a_sum(n=220):
    """Levels, and their sum with weights that are unknown but for a hyperparameter."""
    with pm.Model() as model:
        s = pm.HalfNormal("s", 1.0)
        x = pm.Normal("x", 0.0, s, shape=n)
        pm.Normal("y", x, 1.0, observed=np.linspace(-1.0, 1.0, n))
        pm.Poisson("k", pt.exp(0.1 * (x * pt.exp(-s * np.arange(n) / n)).sum()), observed=2)
    return model


def test_sums_over_many_coordinates_follow_what_is_given():
    density = LogDensity(of_a_sum())
    given, rng = latent_rows(density), np.random.default_rng(1)
    weights = []
    for value in (-0.5, 0.4):
        assert given.give(np.array([value]))
        theta = 0.3 * rng.standard_normal((3, density.n_dim))
        theta[:, given.outside] = value
        np.testing.assert_allclose(given.rows.at(theta[:, given.inside]), density.logp(theta), rtol=1e-9)
        weights.append(given.rows.joint.linear_map.weights)
        plain, vectors = given.rows.linear_map.plain, rng.standard_normal((2, given.n_dim))
        np.testing.assert_allclose(plain.times(vectors), given.rows.linear_map.times(vectors), rtol=1e-9, atol=1e-12)
    assert np.abs(weights[1] - weights[0]).max() > 0.01


def test_log_p_at_all_coordinates_leaves_what_is_given():
    density = LogDensity(process())
    given, rng = latent_rows(density), np.random.default_rng(2)
    start = density.initial_point()
    assert given.give(start[given.outside])
    inside = start[None, given.inside]
    before = given.logp(inside)
    theta = start + 0.3 * rng.standard_normal((4, density.n_dim))
    np.testing.assert_allclose(given.logp_of_all(theta), density.logp(theta), rtol=1e-9)
    np.testing.assert_array_equal(given.logp(inside), before)


def test_a_scale_at_which_log_p_has_no_digits_is_refused():
    """Squares over 1e-19 add up to 1e23, whose rounding is millions of nats: what is constant would be that."""
    with pm.Model() as model:
        sd = pm.HalfNormal("sd")
        path = pm.GaussianRandomWalk("path", 0.3, init_dist=pm.Normal.dist(), shape=50)
        pm.Normal("y", path, sd, observed=np.random.default_rng(1).standard_normal(50).cumsum())
    density = LogDensity(model)
    [place] = [v.where for v in density.layout.variables if v.name == "sd"]
    given = RowsGiven(density, np.arange(density.n_dim)[place])
    assert given.give(np.array([-3.0]))
    assert not given.give(np.array([-21.8]))
