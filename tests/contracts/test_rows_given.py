"""Log p as rows of the latent variables, hyperparameters being given."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from latent_models import counts, level, process, regression

from pymc_ngvi import LogDensity
from pymc_ngvi.core.messages import Refused
from pymc_ngvi.density.rows_given import RowsGiven, latent_rows


def names_of(density, index):
    return [density.layout.label(int(i)) for i in index]


def check_rows(density, given, n, scale=0.3, rtol=1e-9):
    """Compare rows with log p of the model, at ``n`` values of the hyperparameters, and four points at each."""
    theta = density.initial_point() + scale * np.random.default_rng(n).standard_normal((n, 4, density.n_dim))
    theta[:, :, given.outside] = theta[:, :1, given.outside]
    rows, agrees = given.at(theta[:, 0, given.outside])
    assert agrees.all()
    found = rows.values(np.swapaxes(theta[:, :, given.inside], 1, 2))
    np.testing.assert_allclose(found, density.logp(theta.reshape(-1, density.n_dim)).reshape(n, 4), rtol=rtol)
    return rows


@pytest.mark.parametrize("n", [1, 5, 64])
@pytest.mark.parametrize("make", [level, process, counts])
def test_rows_are_log_p_at_all_hyperparameters(make, n):
    """Those that were given first have no part in it: the matrix of the predictors follows."""
    density = LogDensity(make())
    check_rows(density, latent_rows(density), n)


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
    with pytest.raises(Refused, match="no scale, correlation or other transformed parameter"):
        latent_rows(LogDensity(regression()))


def test_what_is_no_row_is_refused_with_a_reason():
    """Given its scale, the elements of a covariance that is unknown in many ways stay."""
    with pm.Model() as model:
        s = pm.HalfNormal("s", 1.0)
        x = pm.Normal("x", 0.0, s, shape=12)
        pm.Potential("coupled", -pt.log1p(pt.exp((x[:, None] * x).sum())) * pt.sum(x**2) ** 0.5)
        pm.Normal("y", x, 1.0, observed=np.ones(12))
    with pytest.raises(Refused):
        latent_rows(LogDensity(model))


def test_other_data_are_taken():
    """What was found of a model serves the next fit, with the data as they are then."""
    with pm.Model() as model:
        y = pm.Data("y_data", np.ones(6))
        s = pm.HalfNormal("s", 1.0)
        x = pm.Normal("x", 0.0, s, shape=6)
        pm.Normal("y", x, 1.0, observed=y)
    density = LogDensity(model)
    given, theta = latent_rows(density), np.concatenate([np.zeros(1), np.ones(6)])[None]
    before = check_rows(density, given, 5).values(np.ones((5, 6, 1)))
    with model:
        pm.set_data({"y_data": np.full(6, 3.0)})
    assert latent_rows(density) is given
    [[after]] = given.at(np.zeros((1, 1)))[0].values(np.ones((1, 6, 1)))
    assert after == pytest.approx(density.logp(theta)[0], rel=1e-9)
    assert np.abs(after - before).min() > 1.0


def of_a_sum(n=220, *, follows=True):
    """Levels, and their sum, with weights that are unknown but for a hyperparameter, or without."""
    with pm.Model() as model:
        s = pm.HalfNormal("s", 1.0)
        x = pm.Normal("x", 0.0, s, shape=n)
        pm.Normal("y", x, 1.0, observed=np.linspace(-1.0, 1.0, n))
        weights = pt.exp(-s * np.arange(n) / n) if follows else np.ones(n)
        pm.Poisson("k", pt.exp(0.1 * (x * weights).sum()), observed=2)
    return model


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("follows", [True, False])
def test_sums_over_many_coordinates(follows, n):
    """They are summed up beside a sparse precision, as long as their weights do not hang on what is given."""
    density = LogDensity(of_a_sum(follows=follows))
    given = latent_rows(density)
    rows = check_rows(density, given, n, scale=0.1)
    assert (given.precisions.sums is None) == follows
    step, rng = 1e-3, np.random.default_rng(3)
    x, along = 0.1 * rng.standard_normal((2, n, given.n_dim, 1))
    plus, at, minus = (rows.values(x + k * step * along)[:, 0] for k in (1.0, 0.0, -1.0))
    narrow, _ = given.precisions.factored(given.precisions.independent(np.full((n, given.n_dim), 1e8)))
    expected = rows.expected(rows.seen(x[:, :, 0], narrow.covariance))
    slope = np.einsum("nd,nd->n", rows.maps.transposed_times(expected.slope), along[:, :, 0])
    np.testing.assert_allclose(slope, (plus - minus) / (2.0 * step), rtol=1e-5)
    factors, _ = given.precisions.factored(expected.precision)
    whitened = factors.times_covariance(along[:, :, 0])[:, :, None]  # the precision maps it back
    plus, at, minus = (rows.values(x + k * whitened)[:, 0] for k in (step, 0.0, -step))
    curvature = np.einsum("nd,nd->n", whitened[:, :, 0], along[:, :, 0])
    np.testing.assert_allclose(-(plus - 2.0 * at + minus) / step**2, curvature, rtol=1e-4)


def test_a_scale_at_which_log_p_has_no_digits_is_refused():
    """Squares over 1e-19 add up to 1e23, whose rounding is millions of nats: what is constant would be that."""
    with pm.Model() as model:
        sd = pm.HalfNormal("sd")
        path = pm.GaussianRandomWalk("path", 0.3, init_dist=pm.Normal.dist(), shape=50)
        pm.Normal("y", path, sd, observed=np.random.default_rng(1).standard_normal(50).cumsum())
    density = LogDensity(model)
    [place] = [v.where for v in density.layout.variables if v.name == "sd"]
    given = RowsGiven(density, np.arange(density.n_dim)[place])
    np.testing.assert_array_equal(given.at(np.array([[-3.0], [-21.8]]))[1], [True, False])
