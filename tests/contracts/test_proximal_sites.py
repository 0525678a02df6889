"""The step rule `proximal` beside PG-SVI as printed by Khan et al. (2016), with a site for each row, and its rates."""

import itertools

import numpy as np
import pytest

from scipy.special import expit, log_expit
from targets import NumpyTarget

from pymc_ngvi.core.types import Expectation, MatrixHessian, RowRules
from pymc_ngvi.families import FullState
from pymc_ngvi.methods import UPDATES, Proximal
from pymc_ngvi.methods.estimators import ESTIMATORS

BETA, BATCH, N, D = 0.4, 4, 24, 3
RNG = np.random.default_rng(3)
X = np.column_stack([np.ones(N), RNG.normal(size=(N, D - 1))])
SIGN = np.where(RNG.random(N) < expit(X @ [0.5, -1.0, 1.5]), 1.0, -1.0)
PRIOR = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, -0.3], [0.0, -0.3, 1.5]])
NODES = np.linspace(-9.0, 9.0, 181)
WEIGHTS = np.exp(-0.5 * NODES**2) / np.exp(-0.5 * NODES**2).sum()


def slopes(rows, mean, variance):
    """Return E log p, E of its slope in the predictor, and minus that of its curvature, for some rows."""
    eta = SIGN[rows, None] * (mean[:, None] + np.sqrt(variance)[:, None] * NODES)
    return log_expit(eta) @ WEIGHTS, SIGN[rows] * (expit(-eta) @ WEIGHTS), (expit(eta) * expit(-eta)) @ WEIGHTS


def batch_of(seed, number):
    n_batches = N // BATCH
    order = np.random.default_rng([seed, number // n_batches]).permutation(N)
    start = number % n_batches * BATCH
    return order[start : start + BATCH]


class Batches(NumpyTarget):
    """Logistic regression on minibatches, with exact expectations."""

    has_minibatch, n_batches = True, N // BATCH

    def __init__(self, rows_of):
        super().__init__(D)
        self.rows, self.rows_of = np.arange(N), rows_of

    def take_batch(self, seed, number):
        self.rows = self.rows_of(seed, number)

    def expected(self, q, rules=None, *, adapt=False, least=-np.inf):
        rows, mean, cov = self.rows, q.mean(), q.cov()
        x, scale, inverse = X[rows], N / len(rows), np.linalg.inv(PRIOR)
        value, alpha, gamma = slopes(rows, x @ mean, np.einsum("ij,jk,ik->i", x, cov, x))
        grad = scale * x.T @ alpha - inverse @ mean
        hessian = MatrixHessian(-scale * x.T @ (gamma[:, None] * x) - inverse)
        total = scale * value.sum() - 0.5 * mean @ inverse @ mean - 0.5 * np.trace(inverse @ cov)
        none = RowRules(np.zeros(len(rows), dtype=np.int16), np.zeros(len(rows), dtype=np.float32))
        return Expectation(total, 0.0, grad, hessian, none)

    def directions(self, rows):
        return X[self.rows][rows]

    def rows_cover(self, draw):
        return True


def iterates(n_steps, seed=5, beta=BETA, rows_of=batch_of):
    """Return the states of the package's rule, from the prior on."""
    rule = Proximal(Batches(rows_of), UPDATES["natural"], ESTIMATORS["quadrature"], seed=seed, step_size=beta)
    state = rule.init(FullState(np.zeros(D), np.linalg.cholesky(PRIOR)))
    for _ in range(n_steps):
        state = rule.step(state)
        yield state.q


def printed(n_steps, seed=5):
    """Return mean and covariance of all predictors by equation 19 of the paper, from sites alone.

    K is the prior covariance of the predictors, gamma_k one number for each row, and A_k = K + diag(gamma_k)^-1.
    """
    k, r, scale = X @ PRIOR @ X.T, 1.0 / (1.0 + BETA), N / BATCH
    gammas, mean, cov = np.zeros(N), np.zeros(N), k
    for number in range(n_steps):
        rows = batch_of(seed, number)
        _, alpha, gamma = slopes(rows, mean[rows], cov[rows, rows])
        gammas *= r
        gammas[rows] += (1.0 - r) * scale * gamma
        root = np.sqrt(gammas)  # K A^-1 = K s (I + s K s)^-1 s, whatever is zero in s = gammas^1/2
        gain = k @ (root[:, None] * np.linalg.solve(np.eye(N) + root[:, None] * k * root, np.diag(root)))
        step = mean - scale * k[:, rows] @ alpha
        mean, cov = mean - (1.0 - r) * (step - gain @ step), k - gain @ k
        yield mean, cov


def test_proximal_steps_are_those_of_the_paper_with_a_site_for_each_row():
    """As printed, and so the natural step of size beta / (1 + beta): to rounding, batch by batch."""
    compared = zip(iterates(60), printed(60), strict=True)
    for q, (mean, cov) in compared:
        np.testing.assert_allclose(X @ q.mean(), mean, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(X @ q.cov() @ X.T, cov, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", [0.05, 0.4, 2.0])
def test_without_noise_the_squared_steps_sum_to_no_more_than_what_was_to_be_gained(beta):
    """So that the smallest falls as 1/t: divergences over beta are the squares of the paper's theorem 1."""
    states = [FullState(np.zeros(D), np.linalg.cholesky(PRIOR)), *iterates(60, 5, beta, lambda *_: np.arange(N))]
    steps = np.array([(q.divergence(p) + p.divergence(q)) / beta for p, q in itertools.pairwise(states)])
    elbos = [Batches(batch_of).expected(q).value + q.entropy() for q in states]
    assert 0.2 * (elbos[-1] - elbos[0]) < steps.sum() < elbos[-1] - elbos[0]


@pytest.mark.parametrize("seed", [1, 2])
def test_what_noise_leaves_of_the_squared_steps_is_as_one_by_the_size_of_the_batch(seed):
    """Theorem 2 of the paper: beside what falls as 1/t, a term in sigma^2 / M stays as long as beta does."""
    left = []
    for size in (2, 8):
        states = iterates(600, seed, 0.1, lambda *at, n=size: np.random.default_rng(at).integers(N, size=n))
        left.append(np.mean([q.divergence(p) for p, q in itertools.pairwise([*states][100:])]))
    assert 3.0 < left[0] / left[1] < 5.5
