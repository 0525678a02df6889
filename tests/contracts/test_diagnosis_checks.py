"""The checks behind a diagnosis: draws that are moved towards the posterior, and weights by coordinate."""

import numpy as np
import pymc as pm
import pytest

from gaussian import MEANS, SDS, SEEDS, gaussian_model
from matrix import fit
from numpy.testing import assert_allclose
from scipy import stats

from pymc_ngvi import LogDensity, NGVIApproximation
from pymc_ngvi.core.psis import weigh
from pymc_ngvi.families import DiagonalState, FullState, MixtureState
from pymc_ngvi.families.student_t import StudentTState
from pymc_ngvi.results.diagnosis.moment_drift import critical, drift_of
from pymc_ngvi.results.diagnosis.moves import move
from pymc_ngvi.results.diagnosis.weights import coordinate_khats
from pymc_ngvi.results.distributions.variational import distribution_of

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
    moved = move(density, distribution_of(q).plan(density), base, rng, **{"n_trajectories": 4, **options})
    return moved, drift_of(moved, q.mean(), q.sd(), (q.log_density(moved.start), q.log_density(moved.control)))


def assert_none(estimates, expected=0.0):
    assert np.all(np.abs(estimates.value - expected) < critical(len(estimates.value)) * estimates.se + 1e-9)


# --- draws that are moved ---


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_nothing_drifts_where_q_is_the_posterior(kind, seed, gaussian):
    model, q = chain()
    density = LogDensity(model) if kind == "full" else gaussian
    q = q if kind == "full" else DiagonalState(MEANS, SDS)
    moved, drift = moved_from(density, q, seed)
    for estimates in (drift.mean, drift.sd, drift.skewness):
        assert_none(estimates)
    assert abs(drift.log_p.value) < 4.0 * drift.log_p.se
    # Controls take most of the noise: independent draws would have .06 and .04.
    assert drift.mean.se.max() < 0.03
    assert drift.sd.se.max() < 0.03
    assert moved.acceptance > 0.8
    # They have forgotten where they began.
    correlation = [np.corrcoef(x, y)[0, 1] for x, y in zip(moved.start.T, moved.end.T, strict=True)]
    assert np.abs(correlation).max() < 0.3


@pytest.mark.parametrize("seed", SEEDS)
def test_drift_is_the_error_where_that_is_known(seed, gaussian):
    shift, scale = np.array([0.0, 0.8, 0.0, -0.4]), np.array([0.6, 1.0, 1.3, 1.0])
    _, drift = moved_from(gaussian, DiagonalState(MEANS + shift * SDS, scale * SDS), seed)
    assert_none(drift.mean, -shift / scale)
    assert_none(drift.sd, 1.0 / scale - 1.0)
    assert drift.mean.beyond(0.3).tolist() == [1, 3]
    assert drift.sd.beyond(0.15).tolist() == [0, 2]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_drift_of_log_p_is_that_of_the_scale(seed, gaussian):
    """E_p[log p] - E_q[log p] = -d/2 (1 - s^2) where q has s times the standard deviations."""
    _, drift = moved_from(gaussian, DiagonalState(MEANS, 0.5 * SDS), seed, n_trajectories=8)
    assert abs(drift.log_p.value + 0.5 * 4 * 0.75) < 4.0 * drift.log_p.se
    assert 0.02 < drift.log_p.se < 0.2


def mixture_density(q):
    with pm.Model() as model:
        pm.NormalMixture("x", q.weights, mu=q.means[:, 0], sigma=q.sds[:, 0])
    return LogDensity(model)


def t_density():
    with pm.Model() as model:
        pm.StudentT("x", 8.0, mu=1.0, sigma=2.0)
    return LogDensity(model)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["mixture", "student_t"])
def test_nothing_drifts_where_a_posterior_that_is_not_gaussian_is_q(kind, seed):
    """Trajectories are refused where they should be: otherwise moments would move."""
    two = [FullState(np.array([m]), np.array([[s]])) for m, s in ((-1.5, 0.2), (1.5, 1.5))]
    q = MixtureState.of(two, np.log([0.3, 0.7]))
    if kind == "student_t":
        q = StudentTState(FullState(np.array([1.0]), np.array([[2.0]])), np.log(4.0))
    density = mixture_density(q) if kind == "mixture" else t_density()
    _, drift = moved_from(density, q, seed, n_draws=4_000, n_trajectories=8)
    for estimates in (drift.mean, drift.sd, drift.skewness):
        assert_none(estimates)
        assert estimates.se[0] < 0.2
    assert abs(drift.log_p.value) < 4.0 * drift.log_p.se


def test_a_reparametrised_q_moves_in_the_coordinates_of_its_gaussian():
    rng = np.random.default_rng(5)
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0.0, 2.0), pm.HalfNormal("tau", 1.0)
        effect = pm.Normal("effect", mu, tau, shape=6)
        pm.Normal("y", effect, 0.5, observed=rng.normal(1.0, 1.0, size=(5, 6)))
    approx = fit(model, reparam="rvb2")
    assert distribution_of(approx.q).plan(approx.density).coupled
    diagnosis = approx.diagnose(draws=1_000, random_seed=1)
    assert diagnosis.reliable, diagnosis.reasons
    assert np.all(diagnosis.by_coordinate["mean_drift_se"] < 0.06)


def test_fewer_draws_are_moved_where_steps_are_small(gaussian):
    q = DiagonalState(MEANS, SDS)
    all_of_them, _ = moved_from(gaussian, q, 1)
    fewer, _ = moved_from(gaussian, q, 1, max_gradients=1_000)
    assert len(all_of_them.end) == 256
    assert 48 <= len(fewer.end) < 128
    assert fewer.n_gradients < 2_000


def test_draws_outside_the_support_are_left_out():
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 1.0, shape=2)
        pm.Potential("half", pm.math.switch(x[0] > 0.0, 0.0, -np.inf))
    moved, _ = moved_from(LogDensity(model), DiagonalState(np.zeros(2), np.ones(2)), 1)
    assert moved.n_lost + len(moved.end) == 256
    assert 90 < moved.n_lost < 166
    assert moved.end[:, 0].min() > 0.0


# --- weights ---


@pytest.mark.parametrize("seed", SEEDS)
def test_khats_by_coordinate_point_at_the_one_that_is_too_narrow(seed, gaussian):
    x = np.random.default_rng(seed).standard_normal((40_000, 4))
    khats = coordinate_khats(0.5 * (1.0 - 0.65**2) * x[:, 2] ** 2, x)
    assert np.argmax(khats) == 2
    assert khats[2] > np.delete(khats, 2).max() + 0.05
    approx = NGVIApproximation(gaussian, DiagonalState(MEANS, SDS * [1.0, 1.0, 0.5, 1.0]))
    assert np.argmax(approx.diagnose(random_seed=seed).by_coordinate["khat"]) == 2


def test_the_effective_sample_size_is_that_of_known_weights(rng):
    """For p = N(m, 1) and q = N(0, 1): E[w]^2 / E[w^2] = exp(-m^2)."""
    x = rng.standard_normal(100_000)
    _, weights = weigh(-0.5 * (x - 0.5) ** 2, -0.5 * x**2)
    assert_allclose(weights.effective / len(x), np.exp(-0.25), rtol=0.02)
    assert weigh(np.zeros(1_000), np.zeros(1_000))[1].effective == pytest.approx(1_000)


def test_the_elbo_of_a_shifted_gaussian_is_known(gaussian):
    """log p - log q = -m z - m^2/2 where q is shifted by m standard deviations."""
    q = DiagonalState(MEANS + 0.5 * SDS * [1.0, 0.0, 0.0, 0.0], SDS)
    elbo = NGVIApproximation(gaussian, q).diagnose(draws=10_000, random_seed=1).elbo
    assert_allclose(elbo.se, 0.5 / 100.0, rtol=0.05)
    assert abs(elbo.value + 0.125) < 4.0 * elbo.se


def test_weights_at_lost_draws_are_left_out_and_counted(rng):
    x = rng.standard_normal(1_000)
    log_p = np.where(x < -1.0, -np.inf, -0.5 * x**2)
    _, weights = weigh(log_p, -0.5 * x**2)
    assert weights.n_lost == np.sum(x < -1.0)
    assert weights.effective == pytest.approx(np.sum(x >= -1.0))


def test_khats_see_the_second_moment():
    """A coordinate on which weights do not depend has the k-hat of its own tails and of the weights."""
    x = stats.t(3).rvs(size=(20_000, 1), random_state=np.random.default_rng(1))
    of_square = coordinate_khats(np.zeros(len(x)), x)[0]
    assert 0.5 < of_square < 0.85  # of t^2 with 3 degrees of freedom: 2/3
