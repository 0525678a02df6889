"""Estimators of whitened gradient and curvature: exact where they should be, unbiased elsewhere, honest about noise."""

import functools
import pickle

from dataclasses import replace

import numpy as np
import pymc as pm
import pytest

from matrix import (
    OF_GAUSSIANS,
    OF_PRECISION,
    as_curvature,
    as_matrix,
    random_state,
    state_kind,
    state_of,
    stored,
    two_seeds,
    whitener,
)
from targets import Quadratic, logistic, poisson, random_covariance

from pymc_ngvi import LogDensity
from pymc_ngvi.core.draws import BASE_DRAWS, sobol_draws
from pymc_ngvi.core.types import BaseDraws, Evaluation
from pymc_ngvi.fitting.options import AXES
from pymc_ngvi.methods.estimators import in_full_metric

#: Family (the second factorisation of a dense one included) and estimator of every allowed combination, each once.
ALL_PAIRS = tuple(dict.fromkeys((state_kind(choice), choice.estimator) for choice in OF_GAUSSIANS))
#: Of these, the ones with draws.
PAIRS = tuple(pair for pair in ALL_PAIRS if pair[1] != "quadrature")
FROM_GRADIENTS = ("stein", "pathwise")
#: Independent sets of draws over which means and variances are taken.
N_SETS = 300


def of_pairs(*estimators):
    """Parametrise over the families of some estimators; all if none are named."""
    pairs = [pair for pair in PAIRS if not estimators or pair[1] in estimators]
    return pytest.mark.parametrize(("family", "estimator"), pairs, ids=["-".join(pair) for pair in pairs])


def of_pairs_and_seeds(*estimators):
    """Parametrise as `of_pairs`, with a second seed for dense covariances."""
    pairs = [pair for pair in PAIRS if not estimators or pair[1] in estimators]
    rows = [(*pair, seed) for pair in pairs for seed in ((1, 2) if pair[0] == "full" else (1,))]
    ids = [f"{family}-{estimator}-seed{seed}" for family, estimator, seed in rows]
    return pytest.mark.parametrize(("family", "estimator", "seed"), rows, ids=ids)


each_pair = of_pairs()
#: Gauss-Newton curvatures are squares, which no Gaussian target makes those of log p.
of_hessians = of_pairs("price", *FROM_GRADIENTS)
stl_or_not = pytest.mark.parametrize("stl", [True, False], ids=["stl", "no stl"])
each_kind = pytest.mark.parametrize("kind", BASE_DRAWS)


def evaluate(target, state, base, keep=None):
    """Evaluate a target at the draws of a state; rows not in ``keep`` count as not finite."""
    theta = state.draws(base.z)
    logp, grad = target.logp_grad(theta)
    finite = np.ones(len(theta), dtype=bool) if keep is None else keep
    logp, grad = np.where(finite, logp, np.nan), np.where(finite[:, None], grad, np.inf)
    return Evaluation(theta, logp, grad, finite, float(logp[finite].mean()) + state.entropy())


def estimate(estimator, target, state, base, keep=None, *, stl=True):
    """Return the moments that one set of draws gives."""
    return AXES["estimator"][estimator].moments(target, state, base, evaluate(target, state, base, keep), stl=stl)


def mirrored(matrix):
    """Return the symmetric matrix with the same lower triangle."""
    return np.tril(matrix) + np.tril(matrix, -1).T


def in_matrices(family, estimator, target, state, z, *, stl=True):
    """Return the means over base draws of whitened gradient and curvature, by the formulas of each estimator."""
    c, theta = whitener(state), state.mean() + z @ whitener(state).T
    grad = target._grad(theta) @ c
    w = grad + z if stl else grad
    if estimator == "price":
        curvature = -c.T @ target._hessians(theta).mean(axis=0) @ c
    elif estimator == "gauss_newton":
        residuals = target.y - target._slope(theta @ target.design.T)
        squares = sum(np.outer(x, x) * r2 for x, r2 in zip(target.design, np.mean(residuals**2, axis=0), strict=True))
        curvature = c.T @ (squares + np.eye(target.n_dim) / target.prior_sd**2) @ c
    else:
        product = np.einsum("ni,nj->ij", w, z) / len(z)
        if estimator == "stein":
            error = 0.5 * (product + product.T)
        else:  # the factor's gradient is a lower triangle: for a factor of the precision, that of z w^T
            error = mirrored(product.T if family in OF_PRECISION else product)
        curvature = np.eye(target.n_dim) - error - (0.0 if stl else np.eye(target.n_dim))
    return w.mean(axis=0), stored(family, curvature)


def exact_moments(target, state, family, estimator="price"):
    """Return the exact whitened gradient and curvature (as a matrix)."""
    c = whitener(state)
    grad, curvature = target.moments(state.mean(), state.cov())
    if estimator == "gauss_newton":
        squares = target._over_predictor(
            lambda eta: (target.y[:, None] - target._slope(eta)) ** 2, state.mean(), state.cov()
        )
        curvature = target.design.T @ (squares[:, None] * target.design) + np.eye(target.n_dim) / target.prior_sd**2
    return c.T @ grad, stored(family, c.T @ curvature @ c)


def exact_gap(target, state, family, estimator):
    """Return 1/2 |g|^2 + 1/4 |A - I|^2 of the exact moments."""
    grad, curvature = exact_moments(target, state, family, estimator)
    return 0.5 * grad @ grad + 0.25 * np.sum((curvature - np.eye(len(grad))) ** 2)


@functools.cache
def base_sets(n_dim, seed):
    """Return independent sets of 32 base draws."""
    rng = np.random.default_rng([seed, n_dim])
    return [sobol_draws(32, n_dim, rng) for _ in range(N_SETS)]


def optimum(target, family):
    """Return mean and covariance of the best approximation."""
    return target.optimum("full" if family == "full precision" else family)


@functools.cache
def repeated(family, estimator, make, where, seed):
    """Return target, state and the moments from many independent sets of draws; several tests look at them."""
    target = make()
    at = where == "at the optimum"
    state = state_of(family, *optimum(target, family)) if at else off_optimum(target, family, seed)
    return target, state, [estimate(estimator, target, state, base) for base in base_sets(target.n_dim, seed)]


def assert_mean_is(values, expected, n_se):
    """Compare the mean over independent sets with its expectation, in standard errors."""
    values = np.asarray(values)
    se = values.std(axis=0, ddof=1) / np.sqrt(len(values))
    assert (np.abs(values.mean(axis=0) - expected) <= n_se * se + 1e-12).all()


def off_optimum(target, family, seed):
    """Return a state some tenths of a nat off the optimum."""
    mean, cov = optimum(target, family)
    rng = np.random.default_rng(seed)
    factor = np.linalg.cholesky(cov)
    stretch = np.diag(np.exp(0.15 * rng.standard_normal(len(mean))))
    return state_of(family, mean + 0.3 * factor @ rng.standard_normal(len(mean)), factor @ stretch**2 @ factor.T)


@of_pairs("price")
@two_seeds
@stl_or_not
@pytest.mark.parametrize("kind", ["sobol", "antithetic"])
def test_one_antithetic_pair_with_hessians_is_exact_on_a_quadratic(family, estimator, seed, stl, kind):
    rng = np.random.default_rng(seed)
    state = random_state(family, 4, rng)
    precision = np.linalg.inv(random_covariance(rng, 4))
    target = Quadratic(rng.standard_normal(4), precision)
    moments = estimate(estimator, target, state, BASE_DRAWS[kind](2, 4, rng), stl=stl)
    c = whitener(state)
    np.testing.assert_allclose(moments.grad, c.T @ precision @ (target.mean - state.mean()), rtol=1e-10)
    expected = stored(family, c.T @ precision @ c)
    np.testing.assert_allclose(as_matrix(state, moments.curvature), expected, rtol=1e-9, atol=1e-10)


@each_pair
@stl_or_not
@each_kind
def test_gradient_and_curvature_are_unbiased(family, estimator, stl, kind):
    """Against quadrature: at most 20 comparisons, each within 4 standard errors over 300 replicates of 8 draws."""
    target = logistic()
    state, rng = off_optimum(target, family, 1), np.random.default_rng(1)
    sets = [BASE_DRAWS[kind](8, target.n_dim, rng).z for _ in range(N_SETS)]
    base = BaseDraws(np.concatenate(sets), N_SETS, antithetic=kind != "plain")
    moments = estimate(estimator, target, state, base, stl=stl)
    grad, curvature = exact_moments(target, state, family, estimator)
    assert_mean_is(moments.replicates[:, : target.n_dim], grad, 4.0)
    errors = np.sqrt(2.0) * moments.replicates[:, target.n_dim :]
    expected = state.add_to_diagonal(as_curvature(state, curvature), -1.0)
    assert_mean_is(errors, expected.ravel(), 4.0)
    np.testing.assert_allclose(moments.grad, moments.replicates[:, : target.n_dim].mean(axis=0), rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(
        state.add_to_diagonal(moments.curvature, -1.0).ravel(), errors.mean(axis=0), rtol=1e-8, atol=1e-10
    )


@of_pairs_and_seeds()
def test_standard_errors_are_those_seen_over_repeated_draws(family, estimator, seed):
    """Mean squares over 300 sets: for normal noise their ratio is 1 within 4 sqrt(2/300 + 2/(7 * 300)) = .35.

    Products of normals have heavier tails, hence a wider margin than that.
    """
    _, state, sets = repeated(family, estimator, logistic, "off it", seed)
    for value, claimed in (
        (np.array([m.grad for m in sets]), np.array([m.grad_se for m in sets])),
        (np.array([state.curvature_diagonal(m.curvature) for m in sets]), np.array([m.curvature_se for m in sets])),
    ):
        ratio = np.mean(claimed**2, axis=0) / value.var(axis=0, ddof=1)
        assert (np.abs(ratio - 1.0) < 0.5).all()


@of_pairs_and_seeds()
@pytest.mark.parametrize("where", ["at the optimum", "off it"])
def test_gap_less_floor_is_unbiased(family, estimator, seed, where):
    """E[gap - floor] = 1/2 |g|^2 + 1/4 |A - I|^2 of the exact moments, everywhere; 0 at the optimum."""
    make = poisson if seed == 2 else logistic
    target, state, sets = repeated(family, estimator, make, where, seed)
    expected = exact_gap(target, state, family, estimator)
    # Squares of gradients are near the curvature, but not equal to it.
    assert (expected < 1e-10) == (where == "at the optimum" and estimator != "gauss_newton")
    assert_mean_is([m.gap - m.floor for m in sets], expected, 4.0)


@of_pairs_and_seeds("price", *FROM_GRADIENTS)
def test_floor_sd_is_the_standard_deviation_of_the_corrected_gap_at_the_optimum(family, estimator, seed):
    """E[floor_sd^2] is the variance: paired over 300 sets, the difference within 4 standard errors."""
    _, _, sets = repeated(family, estimator, logistic, "at the optimum", seed)
    corrected = np.array([m.gap - m.floor for m in sets])
    claimed = np.array([m.floor_sd for m in sets])
    assert_mean_is(corrected**2 - claimed**2, 0.0, 4.0)
    # The floor is no detail: without it, the gap would be wrong by many standard errors.
    assert np.mean([m.floor for m in sets]) > 8 * corrected.std() / np.sqrt(len(sets))
    assert 0.6 < np.sqrt(np.mean(claimed**2)) / corrected.std() < 1.6


@of_hessians
@each_kind
def test_no_noise_at_all_where_q_is_the_posterior(family, estimator, kind, rng):
    """The path derivative: at q = p each draw gives 0, also where its antithetic twin was left out."""
    cov = stored(family, random_covariance(rng, 4))
    target = Quadratic(rng.standard_normal(4), np.linalg.inv(cov))
    state = state_of(family, target.mean, cov)
    keep = np.ones(32, dtype=bool)
    keep[[0, 5, 6, 17]] = False
    base = BASE_DRAWS[kind](32, 4, rng)
    moments = estimate(estimator, target, state, base, keep)
    np.testing.assert_allclose(moments.grad, 0.0, atol=1e-10)
    np.testing.assert_allclose(moments.grad_se, 0.0, atol=1e-10)
    np.testing.assert_allclose(moments.curvature_se, 0.0, atol=1e-10)
    np.testing.assert_allclose(state.add_to_diagonal(moments.curvature, -1.0), 0.0, atol=1e-10)
    assert max(moments.gap, moments.floor, moments.floor_sd) < 1e-15
    # Without it, the noise is that of z, and of z z^T where the curvature comes from gradients; about 1/sqrt(28).
    noisy = estimate(estimator, target, state, base, keep, stl=False)
    assert (noisy.grad_se > 0.01).all()
    np.testing.assert_allclose(noisy.grad, -np.mean(in_replicates(base, keep), axis=0), rtol=1e-8, atol=1e-10)
    if estimator == "price":
        np.testing.assert_allclose(noisy.curvature_se, 0.0, atol=1e-10)
    else:
        assert (noisy.curvature_se > 0.03).all()


def in_replicates(base, keep):
    """Return the mean base draw of each replicate, of those that are left."""
    return [base.z[part][keep[part]].mean(axis=0) for part in base.replicates()]


@of_pairs("price", "gauss_newton", *FROM_GRADIENTS)
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
    grads, curvatures = [], []
    for part in base.replicates():
        left = np.arange(32)[part][keep[part]]
        if len(left):
            grad, curvature = in_matrices(family, estimator, target, state, base.z[left])
            grads.append(grad)
            curvatures.append(curvature)
    assert len(grads) == 7
    np.testing.assert_allclose(moments.grad, np.mean(grads, axis=0), rtol=1e-9, atol=1e-12)
    found = as_matrix(state, moments.curvature)
    np.testing.assert_allclose(found, np.mean(curvatures, axis=0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(moments.grad_se, np.std(grads, axis=0, ddof=1) / np.sqrt(7), rtol=1e-9)
    # Without replicates, the mean over all draws that are left.
    moments = estimate(estimator, target, state, replace(base, n_replicates=1), keep)
    grad, curvature = in_matrices(family, estimator, target, state, base.z[keep])
    np.testing.assert_allclose(moments.grad, grad, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(as_matrix(state, moments.curvature), curvature, rtol=1e-9, atol=1e-12)


# --- from values alone ------------------------------------------------------------------------------------------------


@of_pairs("score")
@each_kind
@pytest.mark.parametrize("n_draws", [32, 26])  # 13 pairs make one replicate
def test_values_alone_have_no_noise_where_q_is_the_posterior(family, estimator, kind, n_draws, rng):
    cov = stored(family, random_covariance(rng, 4))
    target = Quadratic(rng.standard_normal(4), np.linalg.inv(cov))
    state, keep = state_of(family, target.mean, cov), np.ones(n_draws, dtype=bool)
    keep[[0, 5, 6, 17]] = False
    moments = estimate(estimator, target, state, BASE_DRAWS[kind](n_draws, 4, rng), keep)
    np.testing.assert_allclose(moments.grad, 0.0, atol=1e-10)
    np.testing.assert_allclose(state.add_to_diagonal(moments.curvature, -1.0), 0.0, atol=1e-10)


@of_pairs("score")
@stl_or_not
@pytest.mark.parametrize("kind", ["plain", "antithetic"])
@two_seeds
def test_a_mean_over_others_leaves_estimates_from_few_values_unbiased(family, estimator, stl, kind, seed):
    """Against the closed form for a Gaussian target, by sets of four draws, within 4.5 standard errors."""
    rng = np.random.default_rng(seed)
    state, precision = random_state(family, 3, rng), np.linalg.inv(random_covariance(rng, 3))
    target = Quadratic(state.mean() + 0.3 * state.sd(), precision)
    sets = [BASE_DRAWS[kind](4, 3, rng) for _ in range(4_000)]
    moments = [estimate(estimator, target, state, base, stl=stl) for base in sets]
    c = whitener(state)
    assert_mean_is([m.grad for m in moments], c.T @ precision @ (target.mean - state.mean()), 4.5)
    expected = stored(family, c.T @ precision @ c)
    assert_mean_is([as_matrix(state, m.curvature) for m in moments], expected, 4.5)


# --- without draws ----------------------------------------------------------------------------------------------------


@functools.cache
def rows_of_logistic():
    """Return the log density of `logistic`, as a model."""
    target = logistic()
    with pm.Model() as model:
        b = pm.Normal("b", 0.0, target.prior_sd, shape=target.n_dim)
        pm.Bernoulli("y", logit_p=pm.math.dot(target.design, b), observed=target.y)
    return LogDensity(model)


# A sparse precision takes no Hessian that counts as dense.
@pytest.mark.parametrize("family", [family for family, e in ALL_PAIRS if e == "quadrature" and family != "sparse"])
@two_seeds
def test_moments_without_draws_are_exact(family, seed):
    """Of the family's own entries; there is no noise, and so no floor."""
    target, density, estimator = logistic(), rows_of_logistic().again(), AXES["estimator"]["quadrature"]
    state = off_optimum(target, family, seed)
    base = sobol_draws(2, target.n_dim, np.random.default_rng(seed))
    evaluation = estimator.evaluate(density, state, base)
    moments = estimator.moments(density, state, base, evaluation)
    grad, curvature = exact_moments(target, state, family)
    np.testing.assert_allclose(moments.grad, grad, rtol=0.0, atol=1e-4)
    np.testing.assert_allclose(as_matrix(state, moments.curvature), curvature, rtol=0.0, atol=1e-4)
    np.testing.assert_allclose(moments.gap, exact_gap(target, state, family, "price"), rtol=1e-3)
    assert moments.gap > 0.01
    assert moments.floor == moments.floor_sd == 0.0
    assert (density.n_gradients, density.n_hessians) == (1, 1)
    np.testing.assert_allclose(evaluation.elbo, target.elbo(state.mean(), state.cov()), rtol=0.0, atol=3e-4)


def test_without_rows_there_are_no_expectations(rng):
    state = off_optimum(logistic(), "full", 1)
    with pytest.raises(ValueError, match="this target has none"):
        AXES["estimator"]["quadrature"].evaluate(logistic(), state, sobol_draws(2, 5, rng))


# --- families without correlations ------------------------------------------------------------------------------------


@two_seeds
@pytest.mark.parametrize("family", ["diagonal", "block"])
def test_an_error_of_the_mean_along_a_correlation_counts_in_full(family, seed):
    """On a Gaussian target the gap of a shifted best q is 1/2 shift^T P shift; in q's own metric it is a fraction."""
    rng = np.random.default_rng(seed)
    precision = np.linalg.inv(random_covariance(rng, 6, 1e3))
    target = Quadratic(rng.standard_normal(6), precision)
    mean, cov = target.optimum(family)
    weakest = np.linalg.eigh(precision)[1][:, 0]  # where the posterior is widest, and q far too narrow
    state = state_of(family, mean + 0.5 * weakest, cov)
    moments = estimate("price", target, state, sobol_draws(64, 6, rng))
    full = in_full_metric(target, state, state.draws(rng.standard_normal((16, 6))), moments)
    expected = 0.5 * 0.25 * weakest @ precision @ weakest
    assert moments.gap < 0.3 * expected
    np.testing.assert_allclose(full.gap - full.floor, expected, rtol=1e-6)
    assert in_full_metric(target, state, state.draws(np.zeros((1, 6))), replace(moments, replicates=None)) is None


@pytest.mark.parametrize("name", list(AXES["estimator"]))
def test_a_pickle_is_the_estimator_of_that_name(name):
    """Step rules compare estimators by identity."""
    estimator = AXES["estimator"][name]
    assert pickle.loads(pickle.dumps(estimator)) is estimator
