"""Draws of latent variables from farther out: in which directions, with what density, and what they are for."""

import numpy as np
import pymc as pm
import pytest

from latent_models import process
from scipy import integrate, stats

from pymc_ngvi import LogDensity
from pymc_ngvi.density.hyperparameters import latent_rows
from pymc_ngvi.nested.conditional import ConditionalFits
from pymc_ngvi.nested.defence import Defence, n_far_of
from pymc_ngvi.nested.log_marginal import LatentMarginal
from pymc_ngvi.nested.pairs import WeightedPairs
from pymc_ngvi.rows.seen import ManyRules, ManySeen

#: Prior standard deviation of a level of which there is one count, 0: its density is nearly that of the prior below.
SD = 4.0


def rare():
    """One level for each of three counts of 0; a shape that is a hyperparameter."""
    with pm.Model() as model:
        alpha = pm.Gamma("alpha", 4.0, 2.0)
        level = pm.Normal("level", 0.0, SD, shape=3)
        pm.NegativeBinomial("y", mu=pm.math.exp(level), alpha=alpha, observed=np.zeros(3, dtype=int))
    return model


def fitted(make):
    given = latent_rows(LogDensity(make()))
    fit = ConditionalFits(given).fit(np.zeros(len(given.outside)), ())
    return given, fit


class Known:
    """Begins fits where one is known."""

    def __init__(self, known):
        covariances = [c[None] for c in known.seen.covariances]
        self._seen = ManySeen(known.seen.mean[None], covariances)
        self._rules = ManyRules(known.rules.level[None], known.rules.sd[None])

    def of(self, g):
        return self._seen, self._seen, self._rules


def log_p(x):
    """Return the log density of one level, up to a constant, where alpha is 1."""
    return -np.logaddexp(0.0, x) - 0.5 * (x / SD) ** 2


def test_directions_are_those_in_which_the_posterior_has_the_heavier_tail():
    given, fit = fitted(rare)
    defence = Defence.of(given, fit)
    sides = given.rows.linear_map.plain.rows(defence.predictors)
    assert (defence.signs[:, None] * sides <= 0.0).all()  # down: upwards a count of 0 cuts the prior off
    of_levels = defence.probabilities @ np.abs(sides)
    np.testing.assert_allclose(of_levels, of_levels.mean(), rtol=1e-6)  # all three are alike
    assert defence.probabilities.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_density_of_draws_is_the_one_that_is_said(seed):
    """Weights q / q' bring back the moments of q."""
    given, fit = fitted(process)
    n, rng = 160_000, np.random.default_rng(seed)
    n_rows = given.rows.n_rows
    of_rows = np.array([0, n_rows - 1])  # of many, one more or less would hardly count
    defence = Defence(of_rows, np.where(of_rows % 2, 1.0, -1.0), np.full(len(of_rows), 1.0 / len(of_rows)))
    base = rng.standard_normal((n, given.n_dim))
    moved, log_mixed = defence.moved(given, fit, base, defence.picked(1, n, rng)[0])
    n_far = n_far_of(n)
    np.testing.assert_array_equal(moved[:-n_far], base[:-n_far])
    weights = np.exp(-log_mixed)
    assert np.mean(weights) == pytest.approx(1.0, abs=5.0 * np.std(weights) / np.sqrt(n))
    se = 5.0 / np.sqrt(n)
    np.testing.assert_allclose(weights @ moved / n, 0.0, atol=se)
    np.testing.assert_allclose(weights @ moved**2 / n, 1.0, atol=3.0 * se)
    assert np.abs(moved[-n_far:] - base[-n_far:]).max() > 1.0


def test_weights_are_bounded_by_draws_from_farther_out():
    """What draws of q alone have as their largest weight, and with it the error of a tail, is several times as much."""
    given, _ = fitted(rare)
    marginal = LatentMarginal(given, seed=1)
    assert marginal.at(np.zeros((1, 1)))[0] is not None
    known = marginal.known[0]
    defence, none = marginal.defence(), Defence(np.empty(0, dtype=np.intp), np.empty(0), np.empty(0))
    rng = np.random.default_rng(3)
    base = rng.standard_normal((60_000, given.n_dim))
    found = []
    for which in (none, defence):
        marginal._starts, marginal._defence = Known(known), which
        found += marginal.drawn(known.g[None], base[None], np.random.default_rng(4), np.zeros(1, bool))
    largest = [np.exp(f.log_ratio.max()) / np.exp(f.log_ratio).mean() for f in found]
    assert largest[1] < 8.0 < 0.5 * largest[0]
    cut = -3.2 * SD
    of_tail = integrate.quad(lambda x: np.exp(log_p(x)), -np.inf, cut)[0]
    share = of_tail / integrate.quad(lambda x: np.exp(log_p(x)), -np.inf, np.inf)[0]
    weights = np.exp(found[1].log_ratio - found[1].log_ratio.max())
    weights /= weights.sum()
    inside = found[1].latents < cut
    shares = weights @ inside
    error = np.sqrt(weights**2 @ (inside - share) ** 2)
    np.testing.assert_allclose(shares, share, atol=4.0 * error.max())
    assert error.max() < 0.25 * share  # draws of q alone have next to none there


def pairs_of(log_ratio, log_mixed, n_far, rng):
    n, m = log_ratio.shape
    latents = rng.standard_normal((n, m, 2))
    flat = np.zeros(n)
    return WeightedPairs(
        np.arange(n, dtype=float)[:, None], flat, log_ratio, flat, flat, latents, np.zeros((n, 2)), np.ones((n, 2)),
        np.zeros((n, 1)), np.zeros(1), flat, np.zeros(n, dtype=bool), log_mixed, n_far,
    )  # fmt: skip


def test_draws_from_farther_out_do_not_count_as_uneven_weights(rng):
    n, m = 50, 16
    log_mixed = np.concatenate([np.zeros((n, m - 2)), np.full((n, 2), 6.0)], axis=1)
    pairs = pairs_of(-log_mixed, log_mixed, 2, rng)
    assert pairs.variance == 0.0
    assert pairs.is_joint
    np.testing.assert_allclose(pairs.of_pairs[:, :14].sum(), 1.0, atol=2.0 * np.exp(-6.0))


def test_draws_of_an_approximate_posterior_are_those_of_the_gaussians(rng):
    n, m = 50, 16
    own = 3.0 * rng.standard_normal((n, m))
    log_mixed = np.full((n, m), 0.5)
    pairs = pairs_of(own - log_mixed, log_mixed, 2, rng)
    assert not pairs.is_joint
    np.testing.assert_allclose(pairs.own_log_ratio, own[:, :14])
    np.testing.assert_allclose(pairs.of_pairs[:, :14], 1.0 / (14 * n))
    assert not pairs.of_pairs[:, 14:].any()
    mean, sd = pairs.moments()
    np.testing.assert_allclose(mean, 0.0, atol=1e-12)  # those of the Gaussians, without error
    np.testing.assert_allclose(sd, 1.0, atol=1e-12)


def test_tails_of_counts_are_those_of_the_integral():
    """Beyond 3.5 standard deviations of the Gaussian, in the posterior as users get it."""
    model = rare()
    with model:
        approx = pm.fit(method="ngvi", posterior="nested", random_seed=1, progressbar=False)
    assert approx.is_exact
    x = stats.norm.ppf((np.arange(4_000) + 0.5) / 4_000, scale=SD)
    alpha = stats.gamma(4.0, scale=0.5).ppf((np.arange(500) + 0.5) / 500)
    density = (alpha[:, None] / (alpha[:, None] + np.exp(x))) ** alpha[:, None]  # the prior is in the quantiles
    of_all = density.sum(axis=1) ** 3
    cut = np.quantile(approx.sample(4_000, random_seed=1)["posterior"]["level"], 0.001)
    share = of_all @ (density[:, x < cut].sum(axis=1) / density.sum(axis=1)) / of_all.sum()
    assert 0.5 < 0.001 / share < 2.0
