"""Wu and Gardner (2024): what their theorem 1 and lemma 3 say of stochastic natural gradients, and where it ends.

A linear regression with noise N(0, 1) on batches of rows: with one antithetic pair of draws expectations are exact, and
the batches are the only noise.
"""

import functools

import numpy as np
import pymc as pm
import pytest

from matrix import make_rule, path, state_of
from targets import Quadratic

from pymc_ngvi import LogDensity
from pymc_ngvi.core.draws import plain_draws
from pymc_ngvi.fitting.options import choose
from pymc_ngvi.methods.decay import moment_average
from pymc_ngvi.methods.estimators import ESTIMATORS


class Batches(Quadratic):
    """Linear regression with prior N(0, prior_var) on the rows that ``rows_of(seed, number)`` names, scaled to all."""

    has_minibatch = True

    def __init__(self, x, y, prior_var, rows_of=None):
        self.x, self.y, self.prior_var, self.rows_of = x, y, prior_var, rows_of
        self.take(np.arange(len(y)))

    def take(self, rows):
        x, scale = self.x[rows], len(self.y) / len(rows)
        precision = np.eye(x.shape[1]) / self.prior_var + scale * x.T @ x
        super().__init__(np.linalg.solve(precision, scale * x.T @ self.y[rows]), precision)

    def take_batch(self, seed, number):
        self.take(self.rows_of(seed, number))

    def divergence(self, q):
        self.take(np.arange(len(self.y)))
        return q.divergence(state_of("full", self.mean, np.linalg.inv(self.precision)))


def decay(target, seed=1):
    return make_rule(target, choose(family="full", step="decay"), seed=seed, n_draws=2)


def steps_with_each_row(target, rule, state):
    """Return the next states with batches of one row, and V: the mean over these of <g_i - g, w - w_i> / step size.

    g is the gradient of minus the log likelihood in the expectation parameters w: natural parameters.
    """
    found, n = [], len(target.y)
    for rows in (np.arange(n), *np.arange(n)[:, None]):
        target.rows_of = lambda seed, number, rows=rows: rows
        after = rule.step(state)
        mean = after.iterate.mean()
        second = after.iterate.cov() + np.outer(mean, mean)
        found.append((after, target.precision @ target.mean, target.precision, mean, second))
    (_, h, p, m, s), *single = found
    terms = [np.trace((p_i - p) @ (s - s_i)) / 2 - (h_i - h) @ (m - m_i) for _, h_i, p_i, m_i, s_i in single]
    return [after for after, *_ in single], np.mean(terms) / found[0][0].step_size


def lemma_3(target):
    """Return the bound of V that lemma 3 has, for batches of one row and noise of variance 1."""
    n, nu = len(target.y), max(1.0, target.prior_var)
    firsts, seconds = target.y[:, None] * target.x, np.einsum("ni,nj->nij", target.x, target.x)
    s1 = np.sum((firsts - firsts.mean(axis=0)) ** 2) / n
    s2 = np.sum((seconds - seconds.mean(axis=0)) ** 2) / n
    b = n * np.linalg.norm(firsts, axis=1).max()
    return n**2 * (nu * s1 + nu**2 * s2 / 2 + 2 * nu**2 * b * np.sqrt(s1 * s2) + nu**3 * b**2 * s2)


def test_the_bound_of_theorem_1_as_its_proof_has_it_and_not_as_it_is_printed():
    """Two rows, one at a time: the mean over all sequences of them is exact. The page of `decay` has the figures."""
    target = Batches(np.array([[0.0], [1.0]]), np.zeros(2), 20.0)
    rule = decay(target)
    states, v, table = [rule.init(state_of("full", np.zeros(1), np.eye(1)))], 0.0, []
    for t in range(6):
        found = [steps_with_each_row(target, rule, state) for state in states]
        states, v = [state for after, _ in found for state in after], max(v, *(variance for _, variance in found))
        proof = 4 * v / ((t + 1) * (t + 2)) * sum((s + 1) / (s + 2) for s in range(t + 1))
        table.append([np.mean([target.divergence(state.q) for state in states]), v / (t + 2), proof])
    divergence, printed, proof = np.transpose(table)
    np.testing.assert_allclose(divergence, [4.2842, 2.7046, 1.7936, 0.9482, 0.7058, 0.5364], atol=5e-5)
    np.testing.assert_allclose(printed, [2.4390, 2.4096, 2.3810, 2.4390, 2.3256, 2.2989], atol=5e-5)
    assert (divergence < proof).all()
    assert v < lemma_3(target) == pytest.approx(200.0)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_bound_of_lemma_3_holds_and_is_far_away(seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((8, 2))
    target = Batches(x, x @ [1.0, -0.5] + rng.standard_normal(8), 2.0)
    rule = decay(target)
    state = rule.init(state_of("full", np.zeros(2), np.eye(2)))
    for _ in range(20):
        after, v = steps_with_each_row(target, rule, state)
        assert 0.0 < 1e3 * v < lemma_3(target)
        state = after[rng.integers(8)]


N, BATCH = 200, 20


def independent(seed, number):
    return np.random.default_rng([seed, number]).integers(N, size=BATCH)


def of_passes(seed, number):
    order = np.random.default_rng([seed, number // (N // BATCH)]).permutation(N)
    return order[number % (N // BATCH) * BATCH :][:BATCH]


@pytest.mark.parametrize("first", [1, 101], ids=["seeds1", "seeds2"])
def test_divergence_falls_as_1_by_t_on_independent_rows_and_faster_on_passes(first):
    """Of the average and of the last iterate, as in figure 1; over a pass, the noise of its batches cancels.

    T + 2 times it would be four times as large after 16 times the steps, did it fall as one by the root of T.
    """
    rng = np.random.default_rng(5)
    x = rng.standard_normal((N, 10))
    y = x @ rng.standard_normal(10) + rng.standard_normal(N)
    scaled = {}
    for rows_of, n_runs in ((independent, 4), (of_passes, 1)):
        target, found = Batches(x, y, 1.0, rows_of), []
        for seed in range(first, first + n_runs):
            states = path(decay(target, seed), state_of("full", np.zeros(10), np.eye(10)), 320)
            ends = [(t + 2, state) for t, state in enumerate(states) if t in (20, 320)]
            found.append([[t * target.divergence(q) for q in (state.q, state.iterate)] for t, state in ends])
        scaled[rows_of] = np.mean(found, axis=0)
    early, late = scaled[independent]
    assert ((early / 4 < late) & (late < 1.3 * early)).all()
    assert (scaled[of_passes][1] < late / 100).all()


def test_the_elbo_is_concave_in_expectation_parameters_where_the_model_is_conjugate_only():
    """Along variances from 0.2 to 0.3, with half of 512 = 32 / 0.25^2 trials a success: log-concave, and not concave.

    The average of expectation parameters is then worse than what it averages; with a Gaussian row, it is better.
    """
    low, high = (state_of("full", np.zeros(1), np.full((1, 1), variance)) for variance in (0.2, 0.3))
    middle = moment_average(low, high, 0.5)
    with pm.Model() as trials:
        pm.Binomial("y", 512, logit_p=pm.Normal("theta"), observed=256)
    with pm.Model() as conjugate:
        pm.Normal("y", pm.Normal("theta"), 1 / np.sqrt(128), observed=0.0)
    gain, no_draws = [], plain_draws(1, 1, np.random.default_rng(1))
    for model in (trials, conjugate):
        expected = functools.partial(ESTIMATORS["quadrature"].evaluate, LogDensity(model, "quick"), base=no_draws)
        gain.append(expected(middle).elbo - (expected(low).elbo + expected(high).elbo) / 2)
    nodes = np.linspace(-9, 9, 2_001)
    weights = np.exp(-(nodes**2) / 2) / np.exp(-(nodes**2) / 2).sum()
    softplus = [np.logaddexp(0.0, np.sqrt(v) * nodes) @ weights for v in (0.25, 0.2, 0.3)]
    entropy = np.log(0.25) / 2 - np.log(0.2 * 0.3) / 4
    of_trials = entropy - 512 * (softplus[0] - (softplus[1] + softplus[2]) / 2)
    np.testing.assert_allclose(gain, [of_trials, entropy], atol=1e-6)
    assert of_trials < 0.0 < entropy
