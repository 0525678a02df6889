"""The step rule of IVON against the paper's algorithm, written out plainly, and what it comes to."""

import itertools

import numpy as np
import pytest

from matrix import make_rule, path
from targets import Quadratic, logistic

from pymc_ngvi.core.draws import BASE_DRAWS
from pymc_ngvi.families import DiagonalState
from pymc_ngvi.fitting.options import choose
from pymc_ngvi.methods import ivon

pytestmark = pytest.mark.usefixtures("_one_blas_thread")

CHOICE = choose(step="ivon")
two_seeds = pytest.mark.parametrize("seed", [1, 2], ids=["seed1", "seed2"])


def rates(t, step_size=0.1):
    """Return those of the mean and of the precision in iteration t, from 0."""
    return step_size / (1.0 + t / 100.0) ** 0.7, 3.0 / (30.0 + t)


def test_one_word_chooses_the_rest():
    assert (CHOICE.family, CHOICE.update, CHOICE.estimator) == ("diagonal", "natural_pd", "stein")
    assert choose(step="ivon", estimator="gauss_newton").update == "natural"


@two_seeds
def test_each_step_is_that_of_the_paper(seed, monkeypatch):
    """Algorithm 1, with the loss -log p / n, in which the prior is; ess = n, weight decay 0, one draw, no limits.

    Its h is the Hessian of the loss, such that 1 / (ess h) are variances; only the rates are ours.
    """
    monkeypatch.setattr(ivon, "FIRST_LENGTH", np.inf)
    n, n_dim = 60, 5
    target = logistic(n, n_dim)
    rng = np.random.default_rng(seed)
    q = DiagonalState.from_scale(0.1 * rng.standard_normal(n_dim), rng.uniform(0.1, 0.15, n_dim))
    rule = make_rule(target, CHOICE, seed=seed, n_draws=1, stl=False, step_size=0.05)
    beta_1, mean, h, momentum = 0.9, q.mean(), 1.0 / (n * q.sd() ** 2), np.zeros(n_dim)
    for t, state in enumerate(path(rule, q, 4)[1:]):
        learning_rate, one_less_beta_2 = rates(t, 0.05)
        noise = BASE_DRAWS["plain"](1, n_dim, np.random.default_rng([seed, t])).z[0] / np.sqrt(n * h)
        gradient = -target.logp_grad((mean + noise)[None])[1][0] / n
        hessian = noise * gradient * n * h
        momentum = beta_1 * momentum + (1.0 - beta_1) * gradient
        new = (1.0 - one_less_beta_2) * h + one_less_beta_2 * hessian
        h = new + 0.5 * one_less_beta_2**2 * (h - hessian) ** 2 / h
        mean = mean - learning_rate * momentum / (1.0 - beta_1 ** (t + 1)) / h
        np.testing.assert_allclose(state.iterate.mean(), mean, rtol=1e-10)
        np.testing.assert_allclose(state.iterate.sd() ** -2, n * h, rtol=1e-10)


@two_seeds
def test_with_squares_of_gradients_precisions_are_averages_of_these(seed):
    """VOGN's curvature, with the rates and the momentum of this rule."""
    target = logistic()
    q = DiagonalState.from_scale(np.full(5, 0.1), np.full(5, 0.4))
    rule = make_rule(target, choose(step="ivon", estimator="gauss_newton"), seed=seed, n_draws=4)
    precision = q.sd() ** -2
    states = path(rule, q, 4)
    for t, (before, after) in enumerate(itertools.pairwise(states)):
        z = BASE_DRAWS["antithetic"](4, 5, np.random.default_rng([seed, t])).z
        squares = -target.gauss_newton(before.iterate.mean() + z * before.iterate.sd()).diagonal()
        rate = rates(t)[1]
        precision = (1.0 - rate) * precision + rate * squares
        np.testing.assert_allclose(after.iterate.sd() ** -2, precision, rtol=1e-10)


def test_the_result_is_an_average_that_forgets_early_iterates():
    """Iterate t of means and precisions has the weight t (t + 1) (t + 2) (t + 3)."""
    q = DiagonalState.from_scale(np.zeros(5), np.full(5, 0.3))
    states = path(make_rule(logistic(), CHOICE, seed=1), q, 12)[1:]
    t = np.arange(1.0, 13.0)
    weights = t * (t + 1) * (t + 2) * (t + 3)
    for part in (lambda q: q.mean(), lambda q: q.sd() ** -2):
        expected = np.average([part(state.iterate) for state in states], axis=0, weights=weights)
        np.testing.assert_allclose(part(states[-1].q), expected, rtol=1e-10)


def test_steps_are_limited_and_grow_where_the_elbo_goes_on_rising():
    """From a thousand standard deviations away: a tenth of one at first, and a tenth more each time."""
    target = Quadratic(np.array([1000.0, -1000.0, 0.0]), np.eye(3))
    q = DiagonalState.from_scale(np.zeros(3), np.ones(3))
    states = path(make_rule(target, CHOICE, seed=1), q, 20)
    moved = np.diff([state.iterate.mean() for state in states], axis=0)
    expected = 0.1 * 1.1 ** np.arange(20)
    np.testing.assert_allclose(moved[:, 0], expected, rtol=1e-10)
    np.testing.assert_allclose(moved[:, 1], -expected, rtol=1e-10)
    np.testing.assert_allclose(moved[:, 2], 0.0, atol=1e-10)


def test_steps_become_short_again_after_the_elbo_has_bent():
    """Past the optimum the gradient has turned round; the least limit is the first."""
    target = Quadratic(np.array([30.0]), np.eye(1))
    q = DiagonalState.from_scale(np.zeros(1), np.ones(1))
    states = path(make_rule(target, CHOICE, seed=1, step_size=1.0), q, 100)[1:]
    longest = [state.memory.longest for state in states]
    assert max(longest) > 1.0
    assert longest[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(("precision", "factor"), [(1e6, 2.5), (1e-15, 0.905)])
def test_a_precision_changes_by_a_limited_factor(precision, factor):
    """1 + s + s^2/2 with s = 1 at most; a flat log p has s = -.1, the rate."""
    q = DiagonalState.from_scale(np.zeros(2), np.ones(2))
    target = Quadratic(np.zeros(2), precision * np.eye(2))
    state = path(make_rule(target, CHOICE, seed=1, stl=False), q, 1)[-1]
    np.testing.assert_allclose(state.iterate.sd() ** -2, factor, rtol=1e-10)


@two_seeds
@pytest.mark.parametrize("sd", [1.0, 0.03], ids=["wide", "narrow"])
def test_it_recovers_a_gaussian_posterior(seed, sd):
    """The best diagonal Gaussian has the inverse diagonal of the precision for variances.

    In an antithetic pair, the curvature of coordinate i is 1 + z_i sum_j P_ij z_j / sqrt(P_ii P_jj) over the others,
    with the variance v_i; a rate rho leaves that of rho v_i / 2 over the pairs, and averaging leaves less.
    """
    rng, n_dim, n = np.random.default_rng(seed), 6, 1_500
    root = rng.standard_normal((n_dim, 4 * n_dim))
    precision = 25.0 * root @ root.T / (4 * n_dim)
    target = Quadratic(rng.standard_normal(n_dim), precision)
    q = DiagonalState.from_scale(np.zeros(n_dim), np.full(n_dim, sd))
    result = path(make_rule(target, CHOICE, seed=seed), q, n)[-1].q
    exact = np.diag(precision) ** -0.5
    whitened = exact[:, None] * precision * exact
    variance = (whitened**2).sum(axis=1) - 1.0
    se = 0.5 * np.sqrt(0.5 * rates(n)[1] * variance / 4)
    assert np.all(np.abs(result.sd() / exact - 1.0) < 4.0 * se)
    np.testing.assert_allclose((result.mean() - target.mean) / exact, 0.0, atol=0.05)


def test_a_batch_that_is_not_finite_moves_nothing():
    class Broken(Quadratic):
        def logp_grad(self, theta):
            logp, grad = super().logp_grad(theta)
            return logp, np.full_like(grad, np.inf)

    q = DiagonalState.from_scale(np.zeros(2), np.ones(2))
    state = path(make_rule(Broken(np.ones(2), np.eye(2)), CHOICE, seed=1), q, 3)[-1]
    assert state.iterate is q
    assert state.n_failed == 3
