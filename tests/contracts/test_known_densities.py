"""One sampler of the outside, which knows nothing of what is inside: known densities, in 1 to 40 dimensions."""

import time

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from scipy.special import gammaln, logsumexp

from pymc_ngvi.marginal.adaptation import Hopeless
from pymc_ngvi.marginal.sampler import Pairs, Sampler
from pymc_ngvi.marginal.sampling import relative_sd_errors

SEEDS = [1, 2, 3]
#: Of the logarithm of a half-normal number.
LOG_HALF_NORMAL = (-0.5 * (np.euler_gamma + np.log(2.0)), np.pi / np.sqrt(8.0))


class Known(NamedTuple):
    """A log density, its integral, means and standard deviations."""

    log_density: Any
    mean: Any
    sd: Any
    log_total: float = np.nan


@dataclass
class Double:
    """An inside of nothing but log weights, which vary given the outside, and are not to be had everywhere."""

    log_density: Any
    variance: float = 0.0
    #: Part of all values at which there is no fit.
    fails: float = 0.0
    seconds: float = 0.0
    n_values: int = 0

    def log_m(self, g):
        self.n_values += len(g)
        time.sleep(self.seconds * len(g))
        value = np.asarray(self.log_density(g), dtype=float)
        return np.where(np.modf(np.abs(1e4 * np.sin(1e3 * g[:, 0])))[0] < self.fails, -np.inf, value)

    def pairs(self, g, n_draws, rng):
        half = np.sqrt(self.variance) * rng.standard_normal((len(g), n_draws // 2))
        noise = np.concatenate([half, -half], axis=1) - 0.5 * self.variance
        log_m = self.log_m(g)
        return Pairs(log_m[:, None] + noise, noise, log_m)


def sample(known, seed, scale=0.5, start=None, **options):
    inside = Double(known.log_density, **options)
    p = len(known.mean)
    sampler = Sampler(inside, np.zeros(p) if start is None else np.array(start), np.full(p, scale), seed)
    return sampler.run(), inside


def agrees(known, found, slack=0.03):
    """Assert that moments and the integral are right, up to four of the errors that so many draws have."""
    weights = found.weights
    error, of_sd = 4.0 / np.sqrt(found.effective_size), 4.0 * relative_sd_errors(found.g, weights)
    mean = weights @ found.g
    sd = np.sqrt(weights @ (found.g - mean) ** 2)
    assert (np.abs(mean - known.mean) < (slack + error) * np.array(known.sd)).all(), mean
    assert (np.abs(sd / known.sd - 1.0) < slack + of_sd).all(), sd
    if np.isfinite(known.log_total):
        total = logsumexp(found.log_marginal - found.log_density) - np.log(len(found.g))
        assert abs(total - known.log_total) < slack + error


def gaussian(p):
    rng = np.random.default_rng(p)
    root = rng.normal(size=(p, p)) / np.sqrt(p) + np.eye(p)
    mean, cov = rng.normal(size=p), root @ root.T
    inverse = np.linalg.inv(cov)
    log_total = 0.5 * (p * np.log(2.0 * np.pi) + np.linalg.slogdet(cov)[1])
    return Known(
        lambda g: -0.5 * np.einsum("ni,ij,nj->n", g - mean, inverse, g - mean), mean, np.sqrt(np.diag(cov)), log_total
    )


def log_scales(p):
    """Logarithms of half-normal scales: densities fall like e^t on the left."""
    mean, sd = LOG_HALF_NORMAL
    log_total = 0.5 * p * np.log(np.pi / 2.0)
    return Known(lambda g: (g - 0.5 * np.exp(2.0 * g)).sum(axis=1), np.full(p, mean), np.full(p, sd), log_total)


def funnel(sd=1.0, p=3):
    """Effects whose logarithm of a scale is the first coordinate."""

    def log_density(g):
        return (
            -0.5 * (g[:, 0] / sd) ** 2 - 0.5 * (g[:, 1:] ** 2).sum(axis=1) * np.exp(-g[:, 0]) - 0.5 * (p - 1) * g[:, 0]
        )

    log_total = 0.5 * p * np.log(2.0 * np.pi) + np.log(sd)
    return Known(log_density, np.zeros(p), np.r_[sd, np.full(p - 1, np.exp(0.25 * sd**2))], log_total)


def by_grid(log_density, *axes):
    points = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(len(axes), -1).T
    values = log_density(points)
    total = logsumexp(values)
    weights = np.exp(values - total)
    mean = weights @ points
    volume = float(np.sum([np.log(axis[1] - axis[0]) for axis in axes]))
    return Known(log_density, mean, np.sqrt(weights @ (points - mean) ** 2), float(total + volume))


def ridge():
    """A product of a scale and a loading is known, neither of both."""

    def log_density(g):
        return -0.5 * ((np.exp(g[:, 0]) * g[:, 1] - 1.0) / 0.3) ** 2 - 0.5 * (g**2).sum(axis=1)

    return by_grid(log_density, np.linspace(-6.0, 6.0, 601), np.linspace(-6.0, 6.0, 601))


def two_modes(p):
    means, sds, shares = np.array([-2.0, 3.0]), np.array([1.0, 0.7]), np.array([0.7, 0.3])

    def log_density(g):
        first = np.log(shares) - np.log(sds) - 0.5 * ((g[:, :1] - means) / sds) ** 2
        return logsumexp(first, axis=1) - 0.5 * (g[:, 1:] ** 2).sum(axis=1)

    mean = shares @ means
    sd = np.sqrt(shares @ (sds**2 + means**2) - mean**2)
    return Known(log_density, np.r_[mean, np.zeros(p - 1)], np.r_[sd, np.ones(p - 1)], 0.5 * p * np.log(2.0 * np.pi))


def student(p, df=5.0):
    log_total = gammaln(0.5 * df) + 0.5 * p * np.log(df * np.pi) - gammaln(0.5 * (df + p))
    sd = np.sqrt(df / (df - 2.0))
    return Known(lambda g: -0.5 * (df + p) * np.log1p((g**2).sum(axis=1) / df), np.zeros(p), np.full(p, sd), log_total)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [1, 2, 4, 10, 20, 40])
def test_gaussians(p, seed):
    found, _ = sample(known := gaussian(p), seed)
    agrees(known, found)
    assert found.khat < 0.5
    assert found.is_reliable


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [1, 2, 4, 10, 20, 40])
def test_scales_near_0(p, seed):
    found, _ = sample(known := log_scales(p), seed)
    assert found.is_reliable
    agrees(known, found)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "known",
    [funnel(), ridge(), two_modes(1), two_modes(2), student(1), student(3)],
    ids=["funnel", "ridge", "two modes, 1", "two modes, 2", "t, 1", "t, 3"],
)
def test_densities_that_are_no_gaussians(known, seed):
    found, _ = sample(known, seed)
    assert found.is_reliable
    agrees(known, found)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_effect_without_data(seed):
    """One coordinate is well known, another one has its prior."""
    mean, sd = LOG_HALF_NORMAL
    known = Known(
        lambda g: -0.5 * ((g[:, 0] - 4.0) / 0.05) ** 2 + g[:, 1] - 0.5 * np.exp(2.0 * g[:, 1]),
        np.array([4.0, mean]),
        np.array([0.05, sd]),
    )
    found, _ = sample(known, seed)
    assert found.is_reliable
    agrees(known, found)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("variance", [0.2, 0.8])
def test_weights_given_the_outside(variance, seed):
    """Log m is known by the draws of the inside, and pairs are weighted together."""
    found, _ = sample(known := log_scales(3), seed, variance=variance)
    assert found.is_reliable
    agrees(known, found)
    assert found.variance == pytest.approx(variance, rel=0.2)
    # Draws at a value follow from those of a round before it, so that more of them make up for weights that vary.
    noise = np.expm1(variance) / found.pairs.log_ratio.shape[1]
    assert noise < 0.15


@pytest.mark.parametrize("seed", SEEDS)
def test_fits_that_fail_alone(seed):
    """Values without a fit count as nothing, and are counted."""
    found, _ = sample(known := gaussian(3), seed, fails=0.03)
    agrees(known._replace(log_total=np.nan), found)
    assert found.lost == pytest.approx(0.03, abs=0.02)
    assert np.isfinite(found.log_marginal).all()


def test_a_dear_inside():
    """It takes as many values as its seconds allow, and few hundred in any case."""
    known = gaussian(3)
    inside = Double(known.log_density, seconds=0.002)
    found = Sampler(inside, np.zeros(3), np.full(3, 0.5), 1, most=250).run()
    agrees(known, found)
    assert inside.n_values < 450


@pytest.mark.parametrize("seed", SEEDS)
def test_an_improper_direction_is_refused(seed):
    """One coordinate has no end."""
    known = Known(lambda g: -0.5 * g[:, 0] ** 2 - 0.0 * g[:, 1], np.zeros(2), np.ones(2))
    with pytest.raises(Hopeless, match="improper"):
        sample(known, seed)


def test_nowhere_finite_is_refused():
    known = Known(lambda g: np.full(len(g), -np.inf), np.zeros(2), np.ones(2))
    with pytest.raises(Hopeless):
        sample(known, 1)


def test_the_same_seed_gives_the_same_bits():
    first, again = (sample(ridge(), 5, variance=0.3)[0] for _ in range(2))
    np.testing.assert_array_equal(first.g, again.g)
    np.testing.assert_array_equal(first.weights, again.weights)
