"""Estimators of whitened gradient and curvature: exact where they should be, unbiased elsewhere, honest about noise."""

import functools

from dataclasses import replace

import numpy as np
import pytest

from matrix import COMBINATIONS, random_state, state_of, two_seeds, whitener
from targets import Quadratic, logistic, poisson, random_covariance, restrict

from pymc_ngvi.draws import sobol_draws
from pymc_ngvi.registry import AXES
from pymc_ngvi.types import Evaluation

#: Family and estimator of every allowed combination, each once.
PAIRS = tuple(dict.fromkeys((choice.family, choice.estimator) for choice in COMBINATIONS))
each_pair = pytest.mark.parametrize(("family", "estimator"), PAIRS, ids=["-".join(pair) for pair in PAIRS])


def evaluate(target, state, base, keep=None):
    """Evaluate a target at the draws of a state; rows not in ``keep`` count as not finite."""
    theta = state.draws(base.z)
    logp, grad = target.logp_grad(theta)
    finite = np.ones(len(theta), dtype=bool) if keep is None else keep
    logp, grad = np.where(finite, logp, np.nan), np.where(finite[:, None], grad, np.inf)
    return Evaluation(theta, logp, grad, finite, float(logp[finite].mean()) + state.entropy())


def estimate(estimator, target, state, base, keep=None):
    """Return the moments that one set of draws gives."""
    return AXES["estimator"][estimator](target, state, base, evaluate(target, state, base, keep))


def dense(curvature):
    """Return a curvature as a matrix."""
    return curvature if curvature.ndim == 2 else np.diag(curvature)


def exact_moments(target, state, family):
    """Return the exact whitened gradient and curvature (as a matrix)."""
    c = whitener(state)
    grad, curvature = target.moments(state.mean(), state.cov())
    return c.T @ grad, restrict(family, c.T @ curvature @ c)


def exact_gap(target, state, family):
    """Return 1/2 |g|^2 + 1/4 |A - I|^2 of the exact moments."""
    grad, curvature = exact_moments(target, state, family)
    return 0.5 * grad @ grad + 0.25 * np.sum((curvature - np.eye(len(grad))) ** 2)


@functools.cache
def base_sets(n_dim, seed):
    """Return 300 independent sets of 32 base draws."""
    rng = np.random.default_rng(seed)
    return [sobol_draws(32, n_dim, rng) for _ in range(300)]


@functools.cache
def repeated(family, estimator, make, where, seed):
    """Return target, state and the moments from many independent sets of draws; several tests look at them."""
    target = make()
    at = where == "at the optimum"
    state = state_of(family, *target.optimum(family)) if at else off_optimum(target, family, seed)
    return target, state, [estimate(estimator, target, state, base) for base in base_sets(target.n_dim, seed)]


def assert_mean_is(values, expected, n_se):
    """Compare the mean over independent sets with its expectation, in standard errors."""
    values = np.asarray(values)
    se = values.std(axis=0, ddof=1) / np.sqrt(len(values))
    assert (np.abs(values.mean(axis=0) - expected) <= n_se * se + 1e-12).all()


def off_optimum(target, family, seed):
    """Return a state some tenths of a nat off the optimum."""
    mean, cov = target.optimum(family)
    rng = np.random.default_rng(seed)
    factor = np.linalg.cholesky(cov)
    stretch = np.diag(np.exp(0.15 * rng.standard_normal(len(mean))))
    return state_of(family, mean + 0.3 * factor @ rng.standard_normal(len(mean)), factor @ stretch**2 @ factor.T)


@each_pair
@two_seeds
def test_one_antithetic_pair_is_exact_on_a_quadratic(family, estimator, seed):
    rng = np.random.default_rng(seed)
    state = random_state(family, 4, rng)
    precision = np.linalg.inv(random_covariance(rng, 4))
    target = Quadratic(rng.standard_normal(4), precision)
    moments = estimate(estimator, target, state, sobol_draws(2, 4, rng))
    c = whitener(state)
    np.testing.assert_allclose(moments.grad, c.T @ precision @ (target.mean - state.mean()), rtol=1e-10)
    np.testing.assert_allclose(dense(moments.curvature), restrict(family, c.T @ precision @ c), rtol=1e-9, atol=1e-10)


@each_pair
@two_seeds
@pytest.mark.parametrize("make", [logistic, poisson])
def test_gradient_and_curvature_are_unbiased(family, estimator, seed, make):
    """Against quadrature: at most 30 comparisons, each within 4.5 standard errors over 300 sets."""
    target, state, sets = repeated(family, estimator, make, "off it", seed)
    grad, curvature = exact_moments(target, state, family)
    assert_mean_is([m.grad for m in sets], grad, 4.5)
    assert_mean_is([dense(m.curvature) for m in sets], curvature, 4.5)


@each_pair
@two_seeds
def test_standard_errors_are_those_seen_over_repeated_draws(family, estimator, seed):
    """Mean squares over 300 sets: their ratio is 1 within about 4 sqrt(2/300 + 2/(7 * 300)) = .35."""
    _, _, sets = repeated(family, estimator, logistic, "off it", seed)
    for value, claimed in (
        (np.array([m.grad for m in sets]), np.array([m.grad_se for m in sets])),
        (np.array([np.diag(dense(m.curvature)) for m in sets]), np.array([m.curvature_se for m in sets])),
    ):
        ratio = np.mean(claimed**2, axis=0) / value.var(axis=0, ddof=1)
        assert (np.abs(ratio - 1.0) < 0.5).all()


@each_pair
@two_seeds
@pytest.mark.parametrize("where", ["at the optimum", "off it"])
@pytest.mark.parametrize("make", [logistic, poisson])
def test_gap_less_floor_is_unbiased(family, estimator, seed, where, make):
    """E[gap - floor] = 1/2 |g|^2 + 1/4 |A - I|^2 of the exact moments, everywhere; 0 at the optimum."""
    target, state, sets = repeated(family, estimator, make, where, seed)
    expected = exact_gap(target, state, family)
    assert (expected < 1e-10) == (where == "at the optimum")
    assert_mean_is([m.gap - m.floor for m in sets], expected, 4.0)


@each_pair
@two_seeds
def test_floor_sd_is_the_standard_deviation_of_the_corrected_gap_at_the_optimum(family, estimator, seed):
    """E[floor_sd^2] is the variance: paired over 300 sets, the difference within 4 standard errors."""
    _, _, sets = repeated(family, estimator, logistic, "at the optimum", seed)
    corrected = np.array([m.gap - m.floor for m in sets])
    claimed = np.array([m.floor_sd for m in sets])
    assert_mean_is(corrected**2 - claimed**2, 0.0, 4.0)
    # The floor is no detail: without it, the gap would be wrong by many standard errors.
    assert np.mean([m.floor for m in sets]) > 8 * corrected.std() / np.sqrt(len(sets))
    assert 0.6 < np.sqrt(np.mean(claimed**2)) / corrected.std() < 1.6


@each_pair
@two_seeds
def test_gap_formula_and_floor_in_explicit_sums(family, estimator, seed):
    """floor = sum_r |u_r - mean u|^2 / (2 R (R-1)) over the replicates, u = (g, (A - I) / sqrt 2)."""
    target = logistic()
    state = off_optimum(target, family, seed)
    base = sobol_draws(64, target.n_dim, np.random.default_rng(seed))
    c, n = whitener(state), base.n_replicates
    rows = []
    for part in base.replicates():
        theta = state.draws(base.z[part])
        curvature = restrict(family, -c.T @ target._hessians(theta).mean(axis=0) @ c)
        grad = (target._grad(theta) @ c + base.z[part]).mean(axis=0)
        rows.append(np.append(grad, ((curvature - np.eye(target.n_dim)) / np.sqrt(2)).ravel()))
    u = np.array(rows)
    centred = u - u.mean(axis=0)
    products = u @ u.T
    pairs = np.sum(products**2) - np.sum(np.diag(products) ** 2)
    moments = estimate(estimator, target, state, base)
    np.testing.assert_allclose(moments.gap, 0.5 * np.sum(u.mean(axis=0) ** 2), rtol=1e-9)
    np.testing.assert_allclose(moments.floor, np.sum(centred**2) / (2 * n * (n - 1)), rtol=1e-9)
    np.testing.assert_allclose(moments.floor_sd, np.sqrt(pairs / (n * (n - 1)) / (2 * n * (n - 1))), rtol=1e-9)


@each_pair
def test_no_noise_at_all_where_q_is_the_posterior(family, estimator, rng):
    """The path derivative: at q = p each draw gives 0, also where its antithetic twin was left out."""
    cov = restrict(family, random_covariance(rng, 4))
    target = Quadratic(rng.standard_normal(4), np.linalg.inv(cov))
    state = state_of(family, target.mean, cov)
    keep = np.ones(32, dtype=bool)
    keep[[0, 5, 6, 17]] = False
    moments = estimate(estimator, target, state, sobol_draws(32, 4, rng), keep)
    np.testing.assert_allclose(moments.grad, 0.0, atol=1e-10)
    np.testing.assert_allclose(moments.grad_se, 0.0, atol=1e-10)
    np.testing.assert_allclose(state.curvature_error(moments.curvature), 0.0, atol=1e-10)
    assert max(moments.gap, moments.floor, moments.floor_sd) < 1e-15


@each_pair
@two_seeds
def test_draws_that_are_not_finite_take_no_part(family, estimator, seed):
    """Mean of the means over replicates of the draws that are left; a replicate without any is left out."""
    target = logistic()
    state = off_optimum(target, family, seed)
    base = sobol_draws(32, target.n_dim, np.random.default_rng(seed))
    keep = np.ones(32, dtype=bool)
    keep[[1, 9, 10]] = False
    keep[base.replicates()[5]] = False
    moments = estimate(estimator, target, state, base, keep)
    c, grads, curvatures = whitener(state), [], []
    for part in base.replicates():
        left = np.arange(32)[part][keep[part]]
        if len(left):
            grads.append((target._grad(state.draws(base.z[left])) @ c + base.z[left]).mean(axis=0))
            curvatures.append(restrict(family, -c.T @ target._hessians(state.draws(base.z[left])).mean(axis=0) @ c))
    assert len(grads) == 7
    np.testing.assert_allclose(moments.grad, np.mean(grads, axis=0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(dense(moments.curvature), np.mean(curvatures, axis=0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(moments.grad_se, np.std(grads, axis=0, ddof=1) / np.sqrt(7), rtol=1e-9)


@each_pair
@pytest.mark.parametrize("n_draws", [2, 32], ids=["one pair", "one replicate left"])
def test_one_replicate_tells_nothing_of_its_own_noise(family, estimator, n_draws, rng):
    target = logistic()
    base = sobol_draws(n_draws, target.n_dim, rng)
    keep = np.zeros(n_draws, dtype=bool)
    keep[base.replicates()[-1]] = True
    moments = estimate(estimator, target, off_optimum(target, family, 1), base, keep)
    assert moments.floor == moments.floor_sd == np.inf
    assert np.isinf(moments.grad_se).all()
    assert np.isinf(moments.curvature_se).all()
    assert np.isfinite(moments.gap)
    assert np.isfinite(moments.grad).all()


@each_pair
def test_hessians_are_taken_at_the_finite_draws_only(family, estimator, rng):
    target = logistic().fresh()
    keep = np.ones(32, dtype=bool)
    keep[:3] = False
    estimate(estimator, target, off_optimum(target, family, 1), sobol_draws(32, target.n_dim, rng), keep)
    assert target.n_gradients == 32
    assert target.n_hessians == 29


@each_pair
def test_replicates_are_those_that_the_means_are_made_of(family, estimator, rng):
    """They serve the secant correction of the gap."""
    target = logistic()
    state = off_optimum(target, family, 1)
    moments = estimate(estimator, target, state, sobol_draws(32, target.n_dim, rng))
    if moments.replicates is None:
        assert state.exact_metric  # elsewhere the gap needs them
        return
    assert len(moments.replicates) == 8
    mean = moments.replicates.mean(axis=0)
    error = state.curvature_error(moments.curvature)
    np.testing.assert_allclose(mean[: target.n_dim], moments.grad, rtol=1e-12)
    np.testing.assert_allclose(np.sqrt(2) * mean[target.n_dim :], error.ravel(), rtol=1e-10, atol=1e-12)


@each_pair
def test_shifted_base_draws_give_another_answer(family, estimator, rng):
    """The draws of the evaluation, not others, are what is averaged."""
    target = logistic()
    state, base = off_optimum(target, family, 1), sobol_draws(8, target.n_dim, rng)
    first = estimate(estimator, target, state, base)
    second = estimate(estimator, target, state, replace(base, z=0.5 * base.z))
    assert np.abs(first.grad - second.grad).max() > 1e-3
