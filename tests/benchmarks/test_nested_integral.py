"""Tests of log m(g) by Laplace's method and importance sampling, and of moments by a lattice, in closed form."""

import numpy as np
import pymc as pm
import pytest

from nested_integral import integral
from nested_log_m import LogMarginals
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.stats import halfnorm, norm, poisson

Y = np.array([3.0, -1.0, 2.0, 0.5, -2.5, 4.0])
COUNTS = np.array([0, 3, 1, 7])
LOG_SCALE = 0.3


def gaussian() -> pm.Model:
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 2.0)
        pm.Normal("y", pm.Normal("x", 0.0, scale, shape=len(Y)), 1.0, observed=Y)
    return model


def counts() -> pm.Model:
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 2.0)
        pm.Poisson("y", pm.math.exp(pm.Normal("x", 0.0, scale, shape=len(COUNTS))), observed=COUNTS)
    return model


def log_prior(log_scale: float) -> float:
    return float(halfnorm.logpdf(np.exp(log_scale), scale=2.0) + log_scale)


def of_gaussian(log_scale: float) -> float:
    """Return log m of the first model."""
    return log_prior(log_scale) + float(norm.logpdf(Y, scale=np.sqrt(1.0 + np.exp(2.0 * log_scale))).sum())


def joint(x: float, y: int) -> float:
    return float(norm.logpdf(x, scale=np.exp(LOG_SCALE)) + poisson.logpmf(y, np.exp(x)))


def test_gaussian_likelihood_is_exact() -> None:
    found = LogMarginals(gaussian())
    g = np.array([LOG_SCALE])
    mode = found.laplace(g)
    found.check(g, mode)
    assert mode.log_m == pytest.approx(of_gaussian(LOG_SCALE), abs=1e-6)
    accurate = found.accurate(g, found.fit(g), 2**12, 1)
    assert accurate.log_m == pytest.approx(of_gaussian(LOG_SCALE), abs=1e-6)
    shrunk = 1.0 / (1.0 + np.exp(-2.0 * LOG_SCALE))
    error = np.sqrt(shrunk / 2**12)
    np.testing.assert_allclose(accurate.mean, shrunk * Y, atol=5.0 * error)
    np.testing.assert_allclose(accurate.variance, shrunk, rtol=5.0 * np.sqrt(2.0 / 2**12))


def test_counts_by_mode_and_by_importance() -> None:
    found = LogMarginals(counts())
    g = np.array([LOG_SCALE])
    modes = [minimize_scalar(lambda x, y=y: -joint(x, y)).x for y in COUNTS]
    curvatures = np.exp(modes) + np.exp(-2.0 * LOG_SCALE)
    laplace = sum(joint(x, y) for x, y in zip(modes, COUNTS, strict=True))
    laplace += 0.5 * np.log(2.0 * np.pi / curvatures).sum() + log_prior(LOG_SCALE)
    mode = found.laplace(g)
    assert mode.log_m == pytest.approx(laplace, abs=1e-5)
    exact = sum(np.log(quad(lambda x, y=y: np.exp(joint(x, y)), -15.0, 15.0)[0]) for y in COUNTS)
    accurate = found.accurate(g, found.fit(g), 2**17, 1)
    assert 0.0 < accurate.error < 0.002
    assert accurate.log_m == pytest.approx(exact + log_prior(LOG_SCALE), abs=5.0 * accurate.error)
    assert abs(laplace - exact - log_prior(LOG_SCALE)) > 5.0 * accurate.error


@pytest.mark.parametrize("is_gaussian", [True, False])
def test_moments_by_the_lattice(is_gaussian: bool) -> None:
    mean, sd, size = integral(LogMarginals(gaussian()), is_gaussian=is_gaussian)
    at = np.linspace(-12.0, 4.0, 4_001)
    w = np.exp(np.array([of_gaussian(g) for g in at]))
    w /= w.sum()
    expected = w @ at
    error = 0.0 if is_gaussian else 1.0 / np.sqrt(size[0])
    assert mean[0] == pytest.approx(expected, abs=5.0 * error + 2e-3)
    assert sd[0] == pytest.approx(np.sqrt(w @ (at - expected) ** 2), rel=5.0 * error + 5e-3)
    shrunk = w @ (1.0 / (1.0 + np.exp(-2.0 * at)))
    error = 0.0 if is_gaussian else np.max(1.0 / np.sqrt(size[1:]))
    np.testing.assert_allclose(mean[1:], shrunk * Y, atol=5.0 * error + 2e-3)
    assert np.isinf(size).all() == is_gaussian
