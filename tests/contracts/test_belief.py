"""The filter over measured gaps: predictions that simulated steps bear out, combination by precision, surprises."""

from dataclasses import replace

import numpy as np
import pytest

from matrix import two_seeds

from pymc_ngvi.estimators.summary import moments_at_draws
from pymc_ngvi.families import DiagonalState
from pymc_ngvi.steps.schedule.belief import UNKNOWN, Belief

N_DIM, N_REPLICATES = 30, 8


def measurement(gap, floor, floor_sd):
    """Return moments with a raw gap such that the corrected one is ``gap``."""
    return replace(
        noisy_moments(np.zeros(N_DIM), 1.0, np.random.default_rng(1))[1],
        gap=gap + floor,
        floor=floor,
        floor_sd=floor_sd,
    )


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


def test_equal_errors_meet_in_the_middle():
    # At a gap of 0 the standard deviation of a measurement is floor_sd itself: the prediction decides it.
    both = Belief(0.0, 0.01).measured(measurement(0.01, 0.05, 0.01))
    np.testing.assert_allclose([both.mean, both.sd], [0.005, 0.01 / np.sqrt(2)])
    np.testing.assert_allclose(both.bound, 0.005 + 0.02 / np.sqrt(2))


def test_the_more_precise_counts_for_more():
    near_prediction = Belief(0.02, 0.001).measured(measurement(0.03, 0.05, 0.02))
    near_measurement = Belief(0.02, 0.1).measured(measurement(0.03, 0.05, 0.001))
    assert 0.02 < near_prediction.mean < 0.0205
    assert 0.0295 < near_measurement.mean < 0.03
    assert near_prediction.sd < 0.001


@pytest.mark.parametrize("measured", [0.5, -0.4], ids=["above", "below"])
def test_a_surprise_overrules_the_prediction(measured):
    moments = measurement(measured, 0.05, 0.01)
    assert Belief(0.02, 0.005).measured(moments) == Belief.of(moments)


def test_without_a_prediction_the_measurement_is_all():
    moments = measurement(0.03, 0.05, 0.01)
    assert UNKNOWN.measured(moments) == Belief.of(moments)
    assert UNKNOWN.bound == np.inf


def test_without_noise_the_measurement_is_all():
    assert Belief(0.02, 0.005).measured(measurement(0.001, 0.0, 0.0)) == Belief(0.001, 0.0)


def test_a_prediction_is_uncertain_by_its_model():
    """However well the gap before the step is known."""
    predicted = Belief(0.0, 0.0).after_step(1.0, 0.1)
    np.testing.assert_allclose([predicted.mean, predicted.sd], [0.1, 0.03])
