"""The filter over measured gaps: predictions that simulated steps bear out, combination by precision, surprises."""

import numpy as np
import pytest

from matrix import two_seeds

from pymc_ngvi.families import DiagonalState
from pymc_ngvi.methods.estimators import moments_at_draws
from pymc_ngvi.methods.schedule import Belief

N_DIM, N_REPLICATES = 30, 8


def noisy_moments(error, noise, rng):
    """Return the observed gradient and moments at whitened distance ``error`` from a Gaussian optimum.

    Gradients of the replicates have standard deviation ``noise`` in each coordinate; the curvature is exact.
    """
    grads = -error + noise * rng.standard_normal((N_REPLICATES, N_DIM))
    state = DiagonalState(np.zeros(N_DIM), np.ones(N_DIM))
    moments = moments_at_draws(state, grads, np.ones((N_REPLICATES, N_DIM)))
    return moments.grad, moments


def simulate_steps(error, rho, rng):
    """Return the gaps that 2,000 steps from one state leave, less what was predicted."""
    gap, difference = 0.5 * error @ error, []
    for _ in range(2_000):
        observed, moments = noisy_moments(error, 0.4, rng)
        after = error + rho * observed
        difference.append(0.5 * after @ after - Belief(gap, 0.0).after_step(rho, moments.floor).mean)
    return np.mean(difference), np.std(difference) / np.sqrt(len(difference))


@two_seeds
@pytest.mark.parametrize(("rho", "size"), [(1.0, 0.0), (0.5, 0.0), (0.1, 0.0), (1.0, 0.1)])
def test_prediction_is_what_a_step_leaves(seed, rho, size):
    """At the optimum a step of any size leaves rho^2 times its noise, and so does a full step from anywhere."""
    rng = np.random.default_rng(seed)
    mean, se = simulate_steps(size * rng.standard_normal(N_DIM), rho, rng)
    assert abs(mean) < 5 * se


@two_seeds
@pytest.mark.parametrize("rho", [0.5, 0.1])
def test_prediction_from_a_gap_is_cautious(seed, rho):
    """It leaves (1 - rho)^2 of the gap where the metric is exact; (1 - rho) is predicted."""
    rng = np.random.default_rng(seed)
    error = 0.2 * rng.standard_normal(N_DIM)
    mean, se = simulate_steps(error, rho, rng)
    assert abs(mean + rho * (1 - rho) * 0.5 * error @ error) < 5 * se


@two_seeds
@pytest.mark.parametrize(("size", "least"), [(0.0, 0.8), (0.1, 0.8), (0.2, 0.4)])
def test_standard_deviation_of_a_measurement(seed, size, least):
    """Root mean square of the errors of 2,000 measurements, in units of the standard deviation claimed: about 1.

    Less, which is cautious, where the gap exceeds the noise floor: ``floor_sd`` is of the state at the optimum.
    """
    rng = np.random.default_rng(seed)
    error = size * rng.standard_normal(N_DIM)
    beliefs = [Belief.of(noisy_moments(error, 0.4, rng)[1]) for _ in range(2_000)]
    means, sds = np.array([(b.mean, b.sd) for b in beliefs]).T
    gap = 0.5 * error @ error
    assert abs(means.mean() - gap) < 5 * means.std() / np.sqrt(len(means))
    assert least < np.sqrt(np.mean((means - gap) ** 2) / np.mean(sds**2)) < 1.25
