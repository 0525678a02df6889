"""The checks behind a diagnosis: draws that are moved towards the posterior, and weights by coordinate."""

import numpy as np
import pymc as pm
import pytest

from gaussian import MEANS, SDS, SEEDS, fit, gaussian_model

from pymc_ngvi import LogDensity
from pymc_ngvi.families import DiagonalState, FullState
from pymc_ngvi.results.diagnosis import critical, joint_drift_of, move, moved_drift_of
from pymc_ngvi.results.distributions import distribution_of

pytestmark = pytest.mark.usefixtures("_one_blas_thread")


@pytest.fixture(scope="module")
def gaussian():
    return LogDensity(gaussian_model())


def chain():
    """A Gaussian posterior with correlations, and its covariance."""
    with pm.Model() as model:
        a = pm.Normal("a", 1.0, 2.0)
        pm.Normal("b", a, 0.5, shape=3)
    cov = np.full((4, 4), 4.0) + np.diag([0.0, 0.25, 0.25, 0.25])
    return model, FullState(np.ones(4), np.linalg.cholesky(cov))


def moved_from(density, q, seed, n_draws=256, **options):
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((n_draws, q.n_dim))
    if q.n_uniform:
        base = np.concatenate([base, rng.random((n_draws, 1))], axis=1)
    how = {"n_trajectories": 4, "max_gradients": 10**9, **options}
    moved = move(density, distribution_of(q).plan(density), base, rng, **how)
    scores = (np.concatenate([moved.control, moved.end]) - q.mean()) / q.sd()
    return moved, moved_drift_of(moved, scores).measures, joint_drift_of(moved).mean


def assert_none(estimates, expected=0.0):
    assert np.all(np.abs(estimates.value - expected) < critical(len(estimates.value)) * estimates.se + 1e-9)


# --- draws that are moved ---


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_nothing_drifts_where_q_is_the_posterior(kind, seed, gaussian):
    model, q = chain()
    density = LogDensity(model) if kind == "full" else gaussian
    q = q if kind == "full" else DiagonalState(MEANS, SDS)
    moved, drift, log_p = moved_from(density, q, seed)
    for estimates in drift.values():
        assert_none(estimates)
    assert abs(log_p.value) < 4.0 * log_p.se
    # Controls take most of the noise: independent draws would have .06 and .04.
    assert drift["mean"].se.max() < 0.03
    assert drift["sd"].se.max() < 0.03
    assert moved.acceptance > 0.8
    # They have forgotten where they began.
    correlation = [np.corrcoef(x, y)[0, 1] for x, y in zip(moved.start.T, moved.end.T, strict=True)]
    assert np.abs(correlation).max() < 0.3


@pytest.mark.parametrize("seed", SEEDS)
def test_drift_is_the_error_where_that_is_known(seed, gaussian):
    shift, scale = np.array([0.0, 0.8, 0.0, -0.4]), np.array([0.6, 1.0, 1.3, 1.0])
    _, drift, _ = moved_from(gaussian, DiagonalState(MEANS + shift * SDS, scale * SDS), seed)
    assert_none(drift["mean"], -shift / scale)
    assert_none(drift["sd"], 1.0 / scale - 1.0)
    assert drift["mean"].beyond(0.3).tolist() == [1, 3]
    assert drift["sd"].beyond(0.15).tolist() == [0, 2]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_drift_of_log_p_is_that_of_the_scale(seed, gaussian):
    """E_p[log p] - E_q[log p] = -d/2 (1 - s^2) where q has s times the standard deviations."""
    *_, log_p = moved_from(gaussian, DiagonalState(MEANS, 0.5 * SDS), seed, n_trajectories=8)
    assert abs(log_p.value + 0.5 * 4 * 0.75) < 4.0 * log_p.se
    assert 0.02 < log_p.se < 0.2


def test_a_reparametrised_q_moves_in_the_coordinates_of_its_gaussian():
    rng = np.random.default_rng(5)
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0.0, 2.0), pm.HalfNormal("tau", 1.0)
        effect = pm.Normal("effect", mu, tau, shape=6)
        pm.Normal("y", effect, 0.5, observed=rng.normal(1.0, 1.0, size=(5, 6)))
    approx = fit(model, reparam="rvb2")
    assert distribution_of(approx.q).plan(approx.density).coupled
    diagnosis = approx.diagnose(draws=1_000, random_seed=1)
    of = diagnosis.by_coordinate
    # Of the effects, which are relative to their modes, moments are right; their scale has the one of a Gaussian.
    assert np.all(np.abs(of["sd_drift"][2:]) < 0.06 + 4.0 * of["sd_drift_se"][2:])
    assert np.all(np.abs(of["mean_drift"]) < 0.15 + 4.0 * of["mean_drift_se"])
    assert np.all(of["mean_drift_se"] < 0.06)


# --- weights ---
