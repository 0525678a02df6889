"""The benchmark of calibration: what it simulates, what it records of a fit, and its statistics."""

import json

import calibration
import numpy as np
import pymc as pm
import pytest

from scipy.special import expit, logsumexp
from scipy.stats import halfnorm, norm, poisson

from pymc_ngvi import LogDensity

PRIOR_SD, NOISE_SD, N = 2.0, 0.7, 5


def conjugate():
    with pm.Model() as model:
        theta = pm.Normal("theta", 1.0, PRIOR_SD, shape=2)
        pm.Normal("y", theta, NOISE_SD, observed=pm.Data("data", np.zeros((N, 2))))
    return model


@pytest.fixture(scope="module")
def exact():
    return calibration.Experiment(calibration.Setting("conjugate", conjugate, ("theta",)))


@pytest.fixture(scope="module")
def logistic():
    return calibration.Experiment(calibration.SETTINGS["logistic"])


# --- simulation and fits ----------------------------------------------------------------------------------------------


def test_data_come_from_the_model_with_the_parameters_beside_them(logistic):
    x = np.random.default_rng(1).normal(size=(100, 6))
    p = expit(logistic.truth["beta"] @ x.T)
    residual, variance = logistic.data - p, p * (1 - p)
    assert abs(residual.sum()) < 4 * np.sqrt(variance.sum())
    # Data of another draw of the parameters would not go along with these.
    assert abs((residual * (p - 0.5)).sum()) < 4 * np.sqrt((variance * (p - 0.5) ** 2).sum())
    n = logistic.truth["beta"].size
    assert n == 6 * calibration.MAX_DATASETS
    assert logistic.truth["beta"].std() == pytest.approx(1.5, rel=4 / np.sqrt(2 * n))


@pytest.mark.parametrize("name", [name for name in calibration.SETTINGS if name != "logistic"])
def test_the_models_of_groups_are_what_their_titles_say(name):
    rng = np.random.default_rng(6)
    y = rng.integers(0, 2, size=96)
    model = calibration.SETTINGS[name].build()
    with model:
        pm.set_data({"data": y})
    theta = rng.normal(size=(3, 15))
    x, group = np.random.default_rng(2).normal(size=96), np.arange(96) // 8
    intercept, slope, log_scale, effect = theta[:, [0]], theta[:, [1]], theta[:, [2]], theta[:, 3:]
    scale = np.exp(log_scale)
    own = effect * scale if name == "noncentred" else effect
    eta = intercept + slope * x + own[:, group]
    data = poisson.logpmf(y, np.exp(eta)) if name == "poisson" else y * eta - np.logaddexp(0, eta)
    prior = norm.logpdf(theta[:, :2]).sum(axis=1) + (halfnorm.logpdf(scale) + log_scale)[:, 0]
    prior += norm.logpdf(effect, 0, 1 if name == "noncentred" else scale).sum(axis=1)
    np.testing.assert_allclose(LogDensity(model).logp(theta), prior + data.sum(axis=1), rtol=1e-6)


@pytest.mark.parametrize("i", [0, 7])
def test_p_is_the_exact_probability_where_q_is_the_posterior(exact, i):
    row = exact.run(i)
    precision = 1 / PRIOR_SD**2 + N / NOISE_SD**2
    mean = (1.0 / PRIOR_SD**2 + exact.data[i].sum(axis=0) / NOISE_SD**2) / precision
    expected = norm.cdf((exact.truth["theta"][i] - mean) * np.sqrt(precision))
    error = 4 * np.sqrt(expected * (1 - expected) / calibration.DRAWS)
    assert row["status"] == "converged"
    assert np.all(np.abs(np.array(json.loads(row["p"])["theta"]) - expected) < error + 1e-3)
    assert row["khat"] < 0.2


def test_a_fit_with_the_log_density_of_another_data_set_is_the_one_of_its_own(logistic):
    logistic.fit(3)
    again = logistic.fit(5)
    model = calibration.SETTINGS["logistic"].build()
    with model:
        pm.set_data({"data": logistic.data[5]})
        alone = pm.fit(method="ngvi", posterior="gaussian", random_seed=5, progressbar=False)
    np.testing.assert_array_equal(again.mean_flat, alone.mean_flat)
    np.testing.assert_array_equal(again.sd_flat, alone.sd_flat)
    assert again.n_gradients == alone.n_gradients


def marginal_of_log_scale(y, mean, sd):
    """Return the posterior mean and sd of log(scale) in the logistic GLMM, its other parameters integrated out.

    ``mean`` and ``sd`` of intercept and slope place their grid.
    """
    x = np.random.default_rng(2).normal(size=96)
    grids = [m + 2 * s * np.linspace(-3, 3, 13) for m, s in zip(mean, sd, strict=True)]
    intercept, slope = (g.ravel()[:, None] for g in np.meshgrid(*grids))
    z, log_scale = np.linspace(-4.5, 4.5, 21), np.linspace(-6, 1.6, 32)
    log_p = np.empty(len(log_scale))
    for k, value in enumerate(log_scale):
        of_groups = np.full((len(intercept), 12), -np.inf)
        for node in z:
            eta = intercept + slope * x + np.exp(value) * node
            likelihood = (y * eta - np.logaddexp(0, eta)).reshape(-1, 12, 8).sum(axis=2)
            of_groups = np.logaddexp(of_groups, likelihood + norm.logpdf(node))
        joint = of_groups.sum(axis=1) + (norm.logpdf(intercept) + norm.logpdf(slope))[:, 0]
        log_p[k] = logsumexp(joint) + halfnorm.logpdf(np.exp(value)) + value
    weight = np.exp(log_p - logsumexp(log_p))
    mean = weight @ log_scale
    return mean, np.sqrt(weight @ (log_scale - mean) ** 2)


def test_a_small_khat_does_not_say_that_the_scale_is_right_and_a_diagnosis_says_that_it_is_not():
    """As the page says; integration tells what the fit should have found."""
    experiment = calibration.Experiment(calibration.SETTINGS["noncentred"])
    approx = experiment.fit(77)
    where = {v.name: v.where for v in approx.layout.variables}
    at = [np.arange(approx.layout.n_dim)[where[name]][0] for name in ("intercept", "slope", "scale")]
    mean, sd = approx.mean_flat[at], approx.sd_flat[at]
    exact_mean, exact_sd = marginal_of_log_scale(experiment.data[77], mean[:2], sd[:2])
    assert approx.khat(random_seed=calibration.KHAT_SEED + 77) < 0.5
    assert abs(mean[2] - exact_mean) < 0.2 * exact_sd
    assert 0.5 < sd[2] / exact_sd < 0.7
    diagnosis = approx.diagnose(random_seed=1)
    assert not diagnosis.reliable
    assert any("scale" in reason for reason in diagnosis.reasons)


# --- statistics -------------------------------------------------------------------------------------------------------


def test_the_error_of_coverage_is_that_of_data_sets_where_their_elements_go_together():
    p = np.random.default_rng(1).random((500, 1))
    alone, together = calibration.coverage(p, 0.9), calibration.coverage(np.repeat(p, 6, axis=1), 0.9)
    assert alone.se == pytest.approx(np.sqrt(0.9 * 0.1 / 500), rel=0.15)
    assert together.se == pytest.approx(alone.se, rel=0.15)
    apart = calibration.coverage(np.random.default_rng(2).random((500, 6)), 0.9)
    assert apart.se == pytest.approx(alone.se / np.sqrt(6), rel=0.2)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_test_of_symmetry_keeps_its_level_where_elements_go_together(seed):
    rng = np.random.default_rng(seed)
    n_times = 200
    values = [calibration.symmetry_test(np.repeat(rng.random((60, 1)), 4, axis=1), 199) for _ in range(n_times)]
    assert np.mean(np.array(values) <= 0.1) == pytest.approx(0.1, abs=4 * np.sqrt(0.09 / n_times))
    assert np.mean(values) == pytest.approx(0.5, abs=4 * np.sqrt(1 / 12 / n_times) + 0.05)  # ties: a little above


def test_the_test_of_symmetry_sees_bias_and_not_width():
    rng = np.random.default_rng(4)
    z = rng.normal(size=(200, 1))
    assert calibration.symmetry_test(norm.cdf(z + 0.4)) < 0.001
    assert calibration.symmetry_test(norm.cdf(2 * z)) > 0.02


# --- pages ------------------------------------------------------------------------------------------------------------
