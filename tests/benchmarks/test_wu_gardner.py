"""The experiments of Wu and Gardner: what is measured is what it is called."""

import numpy as np
import pytest
import wu_gardner_figure1 as figure1

from iterations import iterates
from logistic_regression import Logistic
from scipy import stats
from scipy.integrate import quad

from pymc_ngvi.density import LogDensity
from pymc_ngvi.families import FullState

RNG = np.random.default_rng(1)
X = np.column_stack([np.ones(40), RNG.standard_normal((40, 2))])
Q = FullState(np.array([0.3, -0.8, 0.5]), np.array([[0.9, 0.0, 0.0], [0.2, 0.4, 0.0], [-0.3, 0.1, 0.7]]))


@pytest.fixture(scope="module")
def linear():
    return figure1.Linear(X, X @ [1.0, 0.5, -0.5] + RNG.standard_normal(40))


def test_divergence_and_loss_of_a_linear_regression(linear):
    cov = np.linalg.inv(linear.precision)
    posterior = FullState(linear.mean, np.linalg.cholesky(cov))
    assert linear.divergence(Q) == pytest.approx(Q.divergence(posterior), rel=1e-10)
    assert linear.divergence(posterior) == pytest.approx(0.0, abs=1e-10)
    assert linear.loss(posterior) == pytest.approx(0.0, abs=1e-12)
    loss = -stats.norm.logpdf(linear.y, X @ Q.mean(), np.sqrt(1.0 + np.diag(X @ Q.cov() @ X.T))).mean()
    best = -stats.norm.logpdf(linear.y, X @ linear.mean, np.sqrt(1.0 + np.diag(X @ cov @ X.T))).mean()
    assert linear.loss(Q) == pytest.approx(loss - best, rel=1e-10)


def test_the_rate_of_gradient_descent(linear, monkeypatch):
    """Without a minibatch's noise: batches of all rows, in order."""
    monkeypatch.setattr(figure1, "BATCH", 40)
    density = LogDensity(linear.model())
    density.take_batch = lambda seed, number: density.minibatches.rows[0].set_value(np.arange(40))
    rule = figure1.rule_of("SGD", density, 1)
    *_, (_, before), (_, after) = iterates(rule, FullState(np.zeros(3), np.eye(3)), 3)
    grad = X.T @ (linear.y - X @ before.q.mean()) - before.q.mean()
    np.testing.assert_allclose(after.q.mean() - before.q.mean(), grad / (1e5 + 2), rtol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_the_loss_of_a_logistic_regression(scale):
    data = Logistic("", scale * X, (RNG.random(40) < 0.5).astype(float), 1.5)
    expected = stats.multivariate_normal(Q.mean(), Q.cov()).entropy()
    expected += sum(
        stats.norm.logpdf(m, 0.0, 1.5) - 0.5 * v / 1.5**2 for m, v in zip(Q.mean(), Q.sd() ** 2, strict=True)
    )
    for x, y in zip(data.design, data.y, strict=True):
        mean, sd, sign = x @ Q.mean(), np.sqrt(x @ Q.cov() @ x), 2.0 * y - 1.0
        bend = -mean / sd if abs(mean) < 9.0 * sd else 0.0
        expected -= quad(
            lambda z, m=mean, s=sd, sign=sign: np.logaddexp(0.0, -sign * (m + s * z)) * stats.norm.pdf(z),
            -10.0,
            10.0,
            points=[bend],
            limit=200,
        )[0]
    # Forty rows: beyond sds of 10, the rule has errors that can be seen.
    assert data.loss(Q) == pytest.approx(-expected, abs=1e-9 if scale == 1.0 else 5e-4)
