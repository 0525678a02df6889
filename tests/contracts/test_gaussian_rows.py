"""Gaussian rows in closed form: the same log p and log m as by rows, whatever the units, the scales and the data."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from latent_models import counts, level, shifted
from scipy import stats

from pymc_ngvi import LogDensity
from pymc_ngvi.density.gaussian_over import gaussian_over
from pymc_ngvi.density.rows_given import latent_rows
from pymc_ngvi.nested.inside import LatentMarginal
from pymc_ngvi.nested.posterior import GaussianMarginal


def _slopes(n_groups=9, per_group=7, seed=1):
    rng = np.random.default_rng(seed)
    group, x = np.repeat(np.arange(n_groups), per_group), rng.normal(size=n_groups * per_group)
    y = 1.0 + 0.6 * rng.normal(size=n_groups)[group] + (0.5 + 0.4 * rng.normal(size=n_groups)[group]) * x
    return group, x, y + 0.7 * rng.normal(size=len(x))


def not_centred(shift=0.0, unit=1.0):
    """An intercept and a slope of each group, independent; y in other units, far from 0."""
    group, x, y = _slopes()
    with pm.Model() as model:
        beta = pm.Normal("beta", [shift, 0.0], 1e3 * unit, shape=2)
        s = pm.HalfNormal("s", unit, shape=2)
        z, noise = pm.Normal("z", 0.0, 1.0, shape=(9, 2)), pm.HalfNormal("noise", 2.0 * unit)
        mean = beta[0] + s[0] * z[group, 0] + (beta[1] + s[1] * z[group, 1]) * x
        pm.Normal("y", mean, noise, observed=shift + unit * y)
    return model


def centred():
    group, x, y = _slopes()
    with pm.Model() as model:
        s, noise = pm.HalfNormal("s", 1.0), pm.HalfNormal("noise", 2.0)
        b, slope = pm.Normal("b", 0.0, s, shape=9), pm.Normal("slope", 0.0, 3.0)
        pm.Normal("y", b[group] + slope * x, noise, observed=y)
    return model


def correlated():
    """Design weights are combinations of several functions of the hyperparameters, which differ from row to row."""
    group, x, y = _slopes()
    with pm.Model() as model:
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.HalfNormal.dist(1.0, size=2))
        own = pm.Normal("z", 0.0, 1.0, shape=(9, 2)) @ chol.T
        noise = pm.HalfNormal("noise", 2.0)
        pm.Normal("y", own[group, 0] + own[group, 1] * x, noise, observed=y)
    return model


def two_noises():
    """Two residual standard deviations, by row, with known precisions beside them."""
    group, x, y = _slopes()
    with pm.Model() as model:
        s, noise = pm.HalfNormal("s", 1.0), pm.HalfNormal("noise", 2.0, shape=2)
        z, slope = pm.Normal("z", 0.0, 1.0, shape=9), pm.Normal("slope", 0.0, 3.0)
        sd = noise[(x > 0.0).astype(int)] * np.linspace(0.5, 1.5, len(x))
        pm.Normal("y", s * z[group] + slope * x, sd, observed=y)
    return model


def decaying():
    """Design weights that are no combinations of few functions: each row has one of its own."""
    times = np.linspace(0.0, 12.0, 40)
    y = 2.0 * np.exp(-0.5 * times) + np.sin(3.0 * times) * 0.1
    with pm.Model() as model:
        rate, noise = pm.HalfNormal("rate", 2.0), pm.HalfNormal("noise", 1.0)
        a, b = pm.Normal("a", 0.0, 3.0, shape=3), pm.Normal("b", 0.0, 3.0)
        pm.Normal("y", (a[0] + a[1] + a[2]) * pt.exp(-rate * times) + b, noise, observed=y)
    return model


def autoregression():
    """Rows with more than one predictor, one of them times a hyperparameter."""
    y = np.random.default_rng(4).normal(size=30).cumsum() * 0.3
    with pm.Model() as model:
        rho, s, noise = pm.Uniform("rho", -1.0, 1.0), pm.HalfNormal("s", 1.0), pm.HalfNormal("noise", 1.0)
        x = pm.AR("x", rho=rho, sigma=s, init_dist=pm.Normal.dist(0.0, 2.0), shape=30)
        pm.Normal("y", x, noise, observed=y)
    return model


def given_of(model):
    density = LogDensity(model)
    return density, latent_rows(density)


CLOSED = [not_centred, centred, correlated, two_noises, level, autoregression]


@pytest.mark.parametrize("make", CLOSED)
def test_log_m_is_that_of_rows(make):
    density, given = given_of(make())
    start = density.initial_point()[given.outside]
    over = gaussian_over(given)
    assert over is not None
    points = start + 0.6 * np.random.default_rng(1).standard_normal((6, len(start)))
    by_rows = LatentMarginal(given, 1)
    by_rows(start[None])
    np.testing.assert_allclose(GaussianMarginal(over)(points), by_rows(points), rtol=1e-9, atol=1e-6)
    [alone] = GaussianMarginal(over)(points[:1])  # as one of many, and by itself
    assert alone == pytest.approx(GaussianMarginal(over)(points)[0], abs=1e-8)


def test_log_m_is_the_integral():
    """By the density of y with all effects integrated out."""
    group, x, y = _slopes()
    density, given = given_of(not_centred())
    labels = [density.layout.label(int(i)) for i in given.outside]
    assert labels == ["s_log__[0]", "s_log__[1]", "noise_log__"]
    for g in ([-0.5, -1.0, -0.3], [0.4, 0.1, 0.2], [-30.0, -0.5, 0.0]):
        s, noise = np.exp(g[:2]), np.exp(g[2])
        same = group[:, None] == group
        cov = 1e6 * (1.0 + np.outer(x, x)) + s[0] ** 2 * same + s[1] ** 2 * same * np.outer(x, x)
        expected = stats.multivariate_normal(np.zeros(len(y)), cov + noise**2 * np.eye(len(y))).logpdf(y)
        expected += stats.halfnorm(scale=1.0).logpdf(s).sum() + stats.halfnorm(scale=2.0).logpdf(noise) + np.sum(g)
        [found] = GaussianMarginal(gaussian_over(given))(np.array([g]))
        assert found == pytest.approx(expected, abs=1e-5)


def test_units_do_not_matter():
    """y at 1e8 standard deviations from 0: squares of it have no digit left of what varies."""
    points = np.random.default_rng(2).standard_normal((8, 3)) * 0.8 - 0.3
    _, plain = given_of(not_centred())
    expected = GaussianMarginal(gaussian_over(plain))(points)
    for shift, unit in ((1e8, 1.0), (-3e11, 1e3)):
        _, given = given_of(not_centred(shift, unit))
        over = gaussian_over(given)
        assert over is not None
        moved = points + np.log(unit)
        found = GaussianMarginal(over)(moved)
        # Densities by unit: of all rows, and of three scales by their logarithms.
        found = found + len(_slopes()[2]) * np.log(unit)
        np.testing.assert_allclose(found, expected, atol=2e-4)


def test_a_scale_of_0_is_harmless():
    _, given = given_of(not_centred())
    marginal = GaussianMarginal(gaussian_over(given))
    found = marginal(np.array([[-20.0, -0.5, 0.0], [-300.0, -0.5, 0.0], [-800.0, -0.5, 0.0]]))
    prior = np.array([-20.0, -300.0, -800.0])  # of a log scale; the density of the scale is flat at 0
    np.testing.assert_allclose(found[:2] - prior[:2], found[0] - prior[0], atol=1e-6)
    assert found[2] - prior[2] == pytest.approx(found[0] - prior[0], abs=1e-6)
    of_centred = GaussianMarginal(gaussian_over(given_of(centred())[1]))
    assert not np.isfinite(of_centred(np.array([[-800.0, 0.0]]))).any()  # no density, and no warning


def test_what_is_no_combination_of_few_functions_is_left_to_rows():
    _, given = given_of(decaying())
    assert given.is_quadratic
    assert gaussian_over(given) is None


@pytest.mark.parametrize("make", [counts, shifted])
def test_what_is_not_gaussian_is_left_to_rows(make):
    assert gaussian_over(given_of(make())[1]) is None


def with_data(y, x):
    with pm.Model() as model:
        observed, of_x = pm.Data("of_y", y), pm.Data("of_x", x)
        s, noise = pm.HalfNormal("s", 1.0), pm.HalfNormal("noise", 2.0)
        z, b = pm.Normal("z", 0.0, 1.0, shape=4), pm.Normal("b", 0.0, 3.0)
        pm.Normal("y", s * z[np.arange(12) % 4] + b * of_x, noise, observed=observed)
    return model


def test_other_data_are_taken():
    rng = np.random.default_rng(5)
    first, second = rng.normal(size=(2, 12)), rng.normal(size=(2, 12)) + 3.0
    points = 0.3 * rng.standard_normal((3, 2))
    model = with_data(*first)
    _, given = given_of(model)
    before = GaussianMarginal(gaussian_over(given))(points)
    assert gaussian_over(given) is gaussian_over(given)  # as long as data are the same
    with model:
        pm.set_data({"of_y": second[0]})
    given.bind()
    after_y = GaussianMarginal(gaussian_over(given))(points)
    with model:
        pm.set_data({"of_x": second[1]})
    given.bind()
    after_both = GaussianMarginal(gaussian_over(given))(points)
    for found, data in ((before, first), (after_y, (second[0], first[1])), (after_both, second)):
        _, anew = given_of(with_data(*data))
        np.testing.assert_allclose(found, GaussianMarginal(gaussian_over(anew))(points), atol=1e-7)
    assert np.abs(after_y - before).min() > 0.5
