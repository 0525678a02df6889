"""Nested posteriors from end to end: against a grid, as results, in files."""

import functools
import itertools

from dataclasses import replace
from typing import NamedTuple

import arviz as az
import cloudpickle
import numpy as np
import pymc as pm
import pytest

from latent_models import counts, level, process, regression
from scipy import stats
from scipy.special import logsumexp

import pymc_ngvi

from pymc_ngvi import LogDensity, fit_ngvi
from pymc_ngvi.core.messages import Reason, Unavailable
from pymc_ngvi.nested.inside import WeightedPairs
from pymc_ngvi.nested.posterior import nested_posterior

#: Values of hyperparameters where a test is not about how good a posterior is.
FEW = 320


@functools.cache
def fitted(make):
    # Few steps of a walk have an exact posterior, too.
    asked = {} if make is process else {"posterior": "nested"}
    return fit_ngvi(model=make(), random_seed=1, progressbar=False, **asked)


@functools.cache
def without_fit(make):
    """Return a nested posterior that no Gaussian fit came before."""
    return nested_posterior(LogDensity(make()), None, 1)


@pytest.fixture
def _of_few_values(monkeypatch):
    monkeypatch.setattr("pymc_ngvi.nested.posterior.n_values_of", lambda given: FEW)


class OfLevel(NamedTuple):
    """The posterior of `level`: logarithms of the hyperparameters, functions of the path, and log p(y)."""

    mean: np.ndarray
    sd: np.ndarray
    functions: np.ndarray
    mean_of_functions: np.ndarray
    sd_of_functions: np.ndarray
    evidence: float


@functools.cache
def level_on_grid(n=30):
    """Sum over a grid of hyperparameters, given which all is Gaussian; functions are the mean and differences."""
    model = level(n)
    y = model.rvs_to_values[model["y"]].data
    functions = np.concatenate([np.full((1, n), 1.0 / n), np.diff(np.eye(n), axis=0)])
    times = np.arange(n)
    walk = np.minimum(times[:, None], times).astype(float)
    axes = np.linspace(-9.0, 1.2, 60), np.linspace(-9.0, 0.8, 112)
    points, log_weights, means, variances = [], [], [], []
    for log_step, log_noise in itertools.product(*axes):
        step, noise = np.exp([log_step, log_noise])
        cov = 9.0 + step**2 * walk
        root = np.linalg.cholesky(cov + noise**2 * np.eye(n))
        z, gain = np.linalg.solve(root, y), np.linalg.solve(root, cov @ functions.T)
        log_prior = -0.5 * step**2 - 0.125 * noise**2 - np.log(np.pi) + log_step + log_noise
        log_weights.append(log_prior - 0.5 * z @ z - np.log(np.diag(root)).sum() - 0.5 * n * np.log(2.0 * np.pi))
        points.append([log_step, log_noise])
        means.append(gain.T @ z)
        variances.append(np.einsum("ij,jk,ik->i", functions, cov, functions) - (gain**2).sum(axis=0))
    total = logsumexp(log_weights)
    weights, points, means = np.exp(np.array(log_weights) - total), np.array(points), np.array(means)
    mean, of_functions = weights @ points, weights @ means
    return OfLevel(
        mean,
        np.sqrt(weights @ (points - mean) ** 2),
        functions,
        of_functions,
        np.sqrt(weights @ (variances + (means - of_functions) ** 2)),
        float(total + np.log(np.prod([axis[1] - axis[0] for axis in axes]))),
    )


def test_hyperparameters_are_those_of_a_grid():
    """A model whose log m is exact: steps of a walk may vanish, and so may the noise, which leaves thin tails."""
    mean, sd, *_, evidence = level_on_grid()
    for state in (without_fit(level), nested_posterior(LogDensity(level()), None, 2)):
        error = 2.0 / np.sqrt(state.effective_size)  # spread evenly, hyperparameters have a fraction of this error
        np.testing.assert_allclose((state.mean()[:2] - mean) / sd, 0.0, atol=error + 0.02)
        np.testing.assert_allclose(state.sd()[:2] / sd, 1.0, atol=error + 0.02)
        value, se = state.log_normaliser
        assert abs(value - evidence) < 4.0 * se + 0.02
        assert state.checks.is_exact
        assert state.checks.variance < 1e-6  # given the hyperparameters, all is Gaussian


@pytest.mark.parametrize("seed", [1, 8])
def test_a_thin_tail_along_a_ridge_is_found(seed):
    """Noise may be nearly 0 where steps are large: 1 % of the posterior, a third of the variance of its logarithm.

    Draws from farther out hit it once in a thousand, so that weights look equal without it.
    """
    mean, sd, *_ = level_on_grid(20)
    state = nested_posterior(LogDensity(level(20)), None, seed)
    error = 2.0 / np.sqrt(state.effective_size) + 0.02
    np.testing.assert_allclose((state.mean()[:2] - mean) / sd, 0.0, atol=error)
    np.testing.assert_allclose(state.sd()[:2] / sd, 1.0, atol=error)
    assert state.checks.is_exact
    assert state.khat < 0.5
    # Where it is thinnest, draws are there.
    assert (state.pool.g[:, 1] < mean[1] - 6.0 * sd[1]).sum() > 5


@pytest.mark.parametrize("make", [level, process, counts])
def test_what_users_get(make):
    approx = fitted(make)
    assert approx.is_nested
    assert approx.is_exact
    assert "Exact up to Monte Carlo error" in approx.summary().lines[-1]
    assert np.isfinite(approx.log_marginal_likelihood.value)
    draws = approx.sample(1_000, random_seed=1)
    assert draws.posterior["chain"].size * draws.posterior["draw"].size == 1_000
    size = draws.posterior.attrs["effective_global_draws"]
    assert size < draws.posterior.attrs["effective_sample_size"]
    least = min(float(ess.min()) for ess in az.ess(draws).data_vars.values())  # of hyperparameters, which repeat
    assert abs(least / size - 1.0) < 0.3
    sd = np.sqrt(np.diag(approx.cov_of([v.name for v in approx.layout.variables[:2]])))
    np.testing.assert_allclose(sd, approx.sd_flat[:2], rtol=1e-6)


@pytest.mark.parametrize("make", [level, process, counts])
def test_moments_are_those_of_draws(make):
    """Coordinates and sums of them: the pool is one."""
    approx = fitted(make)
    state = approx._state
    theta = state.draw(20_000, np.random.default_rng(2))
    theta = theta / approx.sd_flat
    some = np.arange(approx.mean_flat.size)[:: max(1, approx.mean_flat.size // 8)]
    # A pool of some thousand pairs: what its draws are off by is what moments correct. The squares of a draw and of its
    # negative are the same, so that half as many count.
    error = 4.0 / np.sqrt(0.5 * state.pairs.effective_size)
    np.testing.assert_allclose(theta.mean(axis=0), approx.mean_flat / approx.sd_flat, atol=error)
    np.testing.assert_allclose(theta.std(axis=0), 1.0, atol=error)
    cov = state.cov_block(some) / np.outer(approx.sd_flat[some], approx.sd_flat[some])
    np.testing.assert_allclose(np.corrcoef(theta[:, some].T), cov, atol=error)


def test_a_kernel_that_is_unknown_needs_no_fit_of_all_coordinates():
    approx = fitted(process)
    assert approx.record.family_reason == "it has the moments of the nested posterior"
    np.testing.assert_allclose(approx._begins_with.mean(), approx.mean_flat)
    np.testing.assert_allclose(approx._begins_with.sd(), approx.sd_flat, rtol=1e-6)


def test_callbacks_are_of_a_fit_of_all_coordinates():
    seen = []
    with pytest.warns(pymc_ngvi.ConvergenceWarning, match="iteration limit"):
        fit_ngvi(3, model=process(), random_seed=1, progressbar=False, callbacks=[lambda *args: seen.append(args[2])])
    assert seen == [1, 2, 3]


def test_asked_for():
    assert not fit_ngvi(model=counts(), posterior="gaussian", random_seed=1, progressbar=False).is_nested
    with pytest.raises(
        ValueError, match="This model has no nested posterior: no latent Gaussian model: it has no scale"
    ):
        fit_ngvi(model=regression(), posterior="nested", progressbar=False)
    with pytest.raises(ValueError, match="posterior='nested' begins from a Gaussian"):
        fit_ngvi(model=counts(), posterior="nested", family="mixture", progressbar=False)


@pytest.mark.parametrize("make", [level, process])
def test_files_and_pickles_give_the_same_bits(make, tmp_path):
    approx = fitted(make)
    model = approx.model
    approx.save(tmp_path / "approx.nc")
    again = pymc_ngvi.load(tmp_path / "approx.nc", model)
    for other in (again, cloudpickle.loads(cloudpickle.dumps(approx._state))):
        state = other._state if hasattr(other, "_state") else other
        np.testing.assert_array_equal(state.mean(), approx._state.mean())
        np.testing.assert_array_equal(state.sd(), approx._state.sd())
        draws = [s.draw(100, np.random.default_rng(1)) for s in (state, approx._state)]
        np.testing.assert_array_equal(*draws)
    assert again.is_nested
    assert again.checks == approx.checks
    np.testing.assert_array_equal(again._state.pairs.of_pairs, approx._state.pairs.of_pairs)


def _no_forest(density):
    raise Unavailable(Reason.NO_FOREST, "there are no blocks")


@pytest.mark.usefixtures("_no_last_resort")
def test_what_can_t_be_fitted_falls_back(monkeypatch):
    """The Gaussian is kept, with the reason."""
    monkeypatch.setattr("pymc_ngvi.marginal.sampler.find_modes", lambda *args: [])
    monkeypatch.setattr("pymc_ngvi.posteriors.kinds.forest_of", _no_forest)
    approx = fit_ngvi(model=counts(), random_seed=1, progressbar=False)
    assert not approx.is_nested
    assert approx.record.posterior == "Gaussian: there are no blocks."
    with pytest.raises(pymc_ngvi.NotExactError, match="No nested posterior: the latent variables can't be fitted"):
        fit_ngvi(model=counts(), posterior="nested", random_seed=1, progressbar=False)


@pytest.mark.usefixtures("_of_few_values", "_no_last_resort")
@pytest.mark.parametrize(("gaussian", "kept"), [(0.3, False), (0.01, True)])
def test_of_what_is_not_reliable_that_with_the_better_weights_comes_back(monkeypatch, gaussian, kept):
    """The weights of the nested posterior are made out to be poor; those of the Gaussian, better or worse still."""

    def poor(*args, **options):
        state = nested_posterior(*args, **options)
        checks = replace(state.checks, effective_size=0.03 * state.checks.n_values, khat=1.2)
        return replace(state, checks=checks)

    monkeypatch.setattr("pymc_ngvi.posteriors.kinds.forest_of", _no_forest)
    monkeypatch.setattr("pymc_ngvi.posteriors.kinds.nested_posterior", poor)
    monkeypatch.setattr("pymc_ngvi.results.choice.efficiency_of", lambda *args: gaussian)
    approx = fit_ngvi(model=level(), random_seed=1, progressbar=False)
    assert approx.record.is_nested is kept
    assert "k-hat of the weights of the hyperparameters is 1.20" in approx.record.posterior
    assert not approx.diagnose().reliable or not kept


# --- many scales, and thin tails ---

N_SCALES, N_EACH, NOISE = 8, 5, 0.5


@pytest.fixture(scope="module")
def scales():
    rng = np.random.default_rng(7)
    true = np.linspace(0.1, 2.0, N_SCALES)
    y = rng.normal(0.0, true[:, None], (N_SCALES, N_EACH)) + rng.normal(0.0, NOISE, (N_SCALES, N_EACH))
    with pm.Model() as model:
        s = pm.HalfNormal("s", 1.0, shape=N_SCALES)
        z = pm.Normal("z", 0.0, 1.0, shape=(N_SCALES, N_EACH))
        pm.Normal("y", s[:, None] * z, NOISE, observed=y)
    return model, y


def test_eight_scales_are_exact(scales):
    """Each is compared with an integral of one dimension: effects have a closed form, and scales are independent."""
    model, y = scales
    state = nested_posterior(LogDensity(model), None, 1)
    assert state.checks.is_reliable
    assert state.checks.effective_size > 400
    grid = np.linspace(-9.0, 3.0, 4_001)
    log_p = stats.halfnorm.logpdf(np.exp(grid)) + grid
    log_p = log_p + stats.norm.logpdf(y[:, :, None], 0.0, np.sqrt(np.exp(2.0 * grid) + NOISE**2)).sum(axis=1)
    part = np.exp(log_p - logsumexp(log_p, axis=1, keepdims=True))
    mean = part @ grid
    sd = np.sqrt(np.einsum("jk,jk->j", part, (grid - mean[:, None]) ** 2))
    error = 4.0 / np.sqrt(state.checks.effective_size)
    ours = state.mean()[state.globals_], state.sd()[state.globals_]
    assert (np.abs(ours[0] - mean) < error * sd).all()
    assert (np.abs(ours[1] / sd - 1.0) < 1.5 * error).all()
    evidence = (logsumexp(log_p, axis=1) + np.log(grid[1] - grid[0])).sum()
    value, se = state.log_normaliser
    assert value == pytest.approx(evidence, abs=4.0 * se + 0.02)


@pytest.mark.parametrize("seed", [1, 2])
def test_modes_weigh_what_they_do_whatever_their_draws(seed):
    """Of two normal modes with shares 0.3 and 0.7, one has five times as many draws as the other one."""
    rng, parts, sides = np.random.default_rng(seed), [], []
    for number, n in enumerate((5_000, 1_000)):
        g = rng.normal(10.0 * number, 1.0, (n, 1))
        log_q = stats.norm.logpdf(g[:, 0], 10.0 * number)
        log_m = log_q + np.log((0.3, 0.7)[number])
        of_pairs = log_m[:, None], log_m[:, None], log_m, log_m, np.zeros((n, 1, 1))
        parts.append(WeightedPairs(*of_pairs, g=g, log_density=log_q))
        sides.append(np.ones((n, 1), dtype=bool))
    pairs = WeightedPairs.of_modes(parts, sides)
    weights = np.exp(pairs.log_ratio[:, 0] - pairs.log_density)
    np.testing.assert_allclose(weights[pairs.g[:, 0] > 5.0].sum() / weights.sum(), 0.7, atol=1e-12)
