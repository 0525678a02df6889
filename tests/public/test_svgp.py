"""Sparse Gaussian processes with fixed hyperparameters: one natural step is the posterior of Titsias (2009)."""

import warnings

import numpy as np
import pymc as pm
import pytest

from pymc_ngvi import ConvergenceWarning, fit_ngvi

NOISE = 0.3
RNG = np.random.default_rng(4)
X = RNG.uniform(0.0, 6.0, 150)
Y = np.sin(2.0 * X) + NOISE * RNG.normal(size=150)
INDUCING = np.linspace(0.0, 6.0, 12)


def kernel(a, b):
    """Return a squared exponential kernel."""
    return 1.5 * np.exp(-0.5 * (a[:, None] - b) ** 2 / 0.7**2)


K_UU, K_FU = kernel(INDUCING, INDUCING) + 1e-6 * np.eye(12), kernel(X, INDUCING)


def titsias():
    """Return mean and covariance of the inducing values, from the covariance of all responses."""
    inverse = np.linalg.inv(K_FU @ np.linalg.solve(K_UU, K_FU.T) + NOISE**2 * np.eye(len(Y)))
    return K_FU.T @ inverse @ Y, K_UU - K_FU.T @ inverse @ K_FU


def regression():
    """Return the regression on X = K_fu K_uu^-1."""
    with pm.Model() as model:
        u = pm.MvNormal("u", np.zeros(12), chol=np.linalg.cholesky(K_UU))
        pm.Normal("y", np.linalg.solve(K_UU, K_FU.T).T @ u, NOISE, observed=Y)
    return model


#: One step with nothing to choose, and all that the package does by default.
ONE_STEP = {"n": 1, "family": "full", "update": "natural", "estimator": "price", "step": "constant", "step_size": 1.0}


@pytest.mark.parametrize("options", [ONE_STEP, {}], ids=["one step", "default"])
def test_natural_steps_give_the_posterior(options):
    with warnings.catch_warnings():
        if options:
            warnings.simplefilter("ignore", ConvergenceWarning)  # that one iteration was asked for
        approx = fit_ngvi(
            model=regression(), posterior="gaussian", random_seed=1, backend="quick", progressbar=False, **options
        )
    mean, cov = titsias()
    sd = np.sqrt(np.diag(cov))
    np.testing.assert_allclose((approx.q.mean() - mean) / sd, 0.0, atol=1e-8)
    np.testing.assert_allclose((approx.q.cov() - cov) / np.outer(sd, sd), 0.0, atol=1e-8)
