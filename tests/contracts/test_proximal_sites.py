"""The step rule `proximal` beside PG-SVI as printed by Khan et al. (2016), with a site for each row."""

import numpy as np

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

    def __init__(self):
        super().__init__(D)
        self.rows = np.arange(BATCH)

    def take_batch(self, seed, number):
        self.rows = batch_of(seed, number)

    def expected(self, q, rules=None, *, adapt=False, least=-np.inf):
        rows, mean, cov = self.rows, q.mean(), q.cov()
        x, scale, inverse = X[rows], N / BATCH, np.linalg.inv(PRIOR)
        value, alpha, gamma = slopes(rows, x @ mean, np.einsum("ij,jk,ik->i", x, cov, x))
        grad = scale * x.T @ alpha - inverse @ mean
        hessian = MatrixHessian(-scale * x.T @ (gamma[:, None] * x) - inverse)
        total = scale * value.sum() - 0.5 * mean @ inverse @ mean - 0.5 * np.trace(inverse @ cov)
        none = RowRules(np.zeros(BATCH, dtype=np.int16), np.zeros(BATCH, dtype=np.float32))
        return Expectation(total, 0.0, grad, hessian, none)

    def directions(self, rows):
        return X[self.rows][rows]

    def rows_cover(self, draw):
        return True


def iterates(n_steps, seed=5):
    """Return the states of the package's rule, from the prior on."""
    rule = Proximal(Batches(), UPDATES["natural"], ESTIMATORS["quadrature"], seed=seed, step_size=BETA)
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
