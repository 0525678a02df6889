"""Many hyperparameters: margins, draws that are annealed, and proposals that are learned from weights."""

import numpy as np
import pymc as pm
import pytest

from scipy import stats
from scipy.special import digamma, logsumexp, polygamma

from pymc_ngvi import LogDensity
from pymc_ngvi.density.hyperparameters import latent_rows
from pymc_ngvi.marginal.proposals import effective_size
from pymc_ngvi.nested.annealing import Annealing
from pymc_ngvi.nested.learning import Learned, _slopes
from pymc_ngvi.nested.margins import Margins, _lack
from pymc_ngvi.nested.mode import find_mode
from pymc_ngvi.nested.posterior import nested_posterior

N_SCALES, N_EACH, NOISE = 8, 5, 0.5


def some_margins(p=4):
    rng = np.random.default_rng(3)
    root = np.linalg.cholesky(0.6 * np.eye(p) + 0.4)
    return Margins(rng.normal(size=p), np.exp(rng.normal(size=p)), rng.normal(size=p), rng.uniform(0.5, 1.0, p),
                   rng.normal(size=p), root)  # fmt: skip


def test_margins_there_and_back():
    margins = some_margins()
    z = np.random.default_rng(0).normal(size=(200, 4))
    np.testing.assert_allclose(margins.forward(margins.inverse(z)), z, atol=1e-9)


def test_the_slope_of_margins_is_that_of_differences():
    margins = some_margins()
    for g in margins.inverse(np.random.default_rng(1).normal(size=(5, 4))):
        step = 1e-6
        ends = [margins.forward(g[None] + sign * step * np.eye(4)) for sign in (1.0, -1.0)]
        expected = np.linalg.slogdet((ends[0] - ends[1]) / (2.0 * step))[1]
        assert margins.log_slope(g[None])[0] == pytest.approx(expected, abs=1e-6)


def test_draws_have_the_density_that_they_say():
    """Weights of the draws of one set of margins for another, which is wider, have the mean 1."""
    margins = some_margins()
    wider = margins.widened(1.3, 0.9)
    g = wider.draws(40_000, np.random.default_rng(2))
    ratio = np.exp(margins.log_density(g) - wider.log_density(g))
    assert ratio.mean() == pytest.approx(1.0, abs=4.0 * ratio.std() / 200.0)


def test_the_gradient_by_which_margins_are_fitted():
    g, packed = np.random.default_rng(4).normal(size=(50, 3)), np.random.default_rng(5).normal(0.0, 0.3, 12)
    weights = np.full(50, 0.02)
    gradient = _lack(packed, g, weights, 50.0)[1]
    for i in range(12):
        ends = [_lack(packed + sign * 1e-6 * np.eye(12)[i], g, weights, 50.0)[0] for sign in (1.0, -1.0)]
        assert gradient[i] == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-6)


# --- logarithms of gammas, whose left tails fall at the rate of their shape ---

SHAPES = np.linspace(0.5, 3.0, 20)


def log_gammas(g):
    with np.errstate(over="ignore"):
        return (SHAPES * g - np.exp(g)).sum(axis=1)


@pytest.fixture(scope="module")
def annealed():
    mode = find_mode(log_gammas, np.zeros(20), np.full(20, 0.5))
    way = Annealing(log_gammas, mode, np.random.default_rng(0))
    way.go()
    return way, way.learned()


def test_annealed_draws_come_to_the_posterior(annealed):
    """One normal proposal about the mode has no weight to speak of; means are compared with digamma functions."""
    margins = annealed[1]
    g = margins.draws(4_000, np.random.default_rng(1))
    log_weights = log_gammas(g) - margins.log_density(g)
    assert effective_size(log_weights) > 800
    weights = np.exp(log_weights - logsumexp(log_weights))
    mean, sd = weights @ g, np.sqrt(polygamma(1, SHAPES))
    assert np.abs((mean - digamma(SHAPES)) / sd).max() < 4.5 / np.sqrt(effective_size(log_weights))
    assert np.abs(np.sqrt(weights @ (g - mean) ** 2) / sd - 1.0).max() < 0.25


def test_what_margins_leave_is_a_polynomial():
    """A product of two coordinates is in no margin: the proposal with it is nearer, and is used only then."""

    def density(g):
        return log_gammas(g) - 0.5 * np.tanh(g[:, 0]) * g[:, 18] - 0.5 * g[:, 19] ** 2

    rng = np.random.default_rng(6)
    margins = Margins.of_gaussian(digamma(SHAPES), np.diag(1.3 * polygamma(1, SHAPES)))
    points = margins.draws(4_000, rng)
    guess = Learned(margins, points, density(points)).guess(2_000, rng)
    g = guess.draws(2_000, 0.5)
    plain = margins.draws(2_000, rng)
    better = effective_size(density(g) - guess.log_density(g))
    assert better > 2.0 * effective_size(density(plain) - margins.log_density(plain))
    assert _slopes(margins, points, margins.log_density(points) + rng.normal(size=len(points))) is None
    assert _slopes(margins, points[:500], density(points[:500])) is None  # too few


# --- a model ---


@pytest.fixture(scope="module")
def scales():
    rng = np.random.default_rng(7)
    true = np.linspace(0.1, 2.0, N_SCALES)
    y = rng.normal(0.0, true[:, None], (N_SCALES, N_EACH)) + rng.normal(0.0, NOISE, (N_SCALES, N_EACH))
    with pm.Model() as model:
        s = pm.HalfNormal("s", 1.0, shape=N_SCALES)
        z = pm.Normal("z", 0.0, 1.0, shape=(N_SCALES, N_EACH))
        pm.Normal("y", s[:, None] * z, NOISE, observed=y)
    return model, y


def test_a_vector_of_scales_is_outside_where_little_else_is(scales):
    given = latent_rows(LogDensity(scales[0]))
    assert len(given.outside) == N_SCALES
    assert given.is_quadratic


def test_eight_scales_are_exact(scales):
    """Each is compared with an integral of one dimension: effects have a closed form, and scales are independent."""
    model, y = scales
    state = nested_posterior(LogDensity(model), None, 1)
    assert state.checks.is_reliable
    assert state.checks.effective_size > 400
    grid = np.linspace(-9.0, 3.0, 4_001)
    log_p = stats.halfnorm.logpdf(np.exp(grid)) + grid
    log_p = log_p + stats.norm.logpdf(y[:, :, None], 0.0, np.sqrt(np.exp(2.0 * grid) + NOISE**2)).sum(axis=1)
    part = np.exp(log_p - logsumexp(log_p, axis=1, keepdims=True))
    mean = part @ grid
    sd = np.sqrt(np.einsum("jk,jk->j", part, (grid - mean[:, None]) ** 2))
    error = 4.0 / np.sqrt(state.checks.effective_size)
    ours = state.mean()[state.globals_], state.sd()[state.globals_]
    assert (np.abs(ours[0] - mean) < error * sd).all()
    assert (np.abs(ours[1] / sd - 1.0) < 1.5 * error).all()
    evidence = (logsumexp(log_p, axis=1) + np.log(grid[1] - grid[0])).sum()
    value, se = state.log_normaliser()
    assert value == pytest.approx(evidence, abs=4.0 * se + 0.02)
