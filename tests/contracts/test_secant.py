"""The secant correction against explicit matrices, and against targets of known curvature."""

import numpy as np
import pytest

from matrix import two_seeds

from pymc_ngvi.families import DiagonalState
from pymc_ngvi.methods.adaptive import Pair, correct, rescaled_gap
from pymc_ngvi.methods.estimators import moments_at_draws


def pairs_of(curvature, n, rng):
    """Return pairs of random steps on a quadratic of a given curvature."""
    return tuple(Pair(step, curvature @ step) for step in rng.standard_normal((n, len(curvature))))


def explicit_inverse(pairs, n):
    """Return the inverse BFGS matrix by its textbook recursion, oldest pair first."""
    inverse = np.eye(n)
    for step, change in pairs:
        r = 1.0 / (step @ change)
        left = np.eye(n) - r * np.outer(step, change)
        inverse = left @ inverse @ left.T + r * np.outer(step, step)
    return inverse


def curvature_of(n, rng):
    vectors = np.linalg.qr(rng.standard_normal((n, n)))[0]
    return (vectors * np.linspace(0.2, 2.0, n)) @ vectors.T


@two_seeds
@pytest.mark.parametrize("n_pairs", [0, 1, 3])
def test_correction_is_the_bfgs_matrix(seed, n_pairs):
    rng = np.random.default_rng(seed)
    pairs, gradient = pairs_of(curvature_of(5, rng), n_pairs, rng), rng.standard_normal(5)
    before = gradient.copy()
    np.testing.assert_allclose(correct(pairs, gradient), explicit_inverse(pairs, 5) @ gradient, rtol=1e-10)
    np.testing.assert_array_equal(gradient, before)


def test_rescaled_gap_is_exact_where_the_curvature_is_known():
    """The ELBO falls by 1/2 sum lambda_i e_i^2; its natural gradient is lambda e, which alone would give lambda^2."""
    n, error = 3, np.array([0.5, -0.2, 0.1])
    curvature = np.array([0.2, 1.0, 1.0])
    state = DiagonalState(np.zeros(n), np.ones(n))
    moments = moments_at_draws(state, np.tile(-curvature * error, (8, 1)), np.ones((8, n)))
    step = np.array([1.0, 0, 0, 0, 0, 0])
    rescaled = rescaled_gap(moments, (Pair(step, 0.2 * step),))
    np.testing.assert_allclose(rescaled.gap, 0.5 * np.sum(curvature * error**2), rtol=1e-12)
    np.testing.assert_allclose(moments.gap, 0.5 * np.sum((curvature * error) ** 2), rtol=1e-12)
    assert rescaled_gap(moments, ()) is moments


@two_seeds
def test_rescaled_noise_is_that_of_the_rescaled_gap(seed):
    """Over 2,000 simulations at the optimum: the corrected gap has mean 0, and floor_sd as its standard deviation."""
    rng = np.random.default_rng(seed)
    n = 6
    state = DiagonalState(np.zeros(n), np.ones(n))
    step = np.concatenate([rng.standard_normal(n), np.zeros(n)])
    pairs = (Pair(step, 0.3 * step),)
    corrected, claimed = [], []
    for _ in range(2_000):
        moments = rescaled_gap(moments_at_draws(state, rng.standard_normal((8, n)), np.ones((8, n))), pairs)
        corrected.append(moments.gap - moments.floor)
        claimed.append(moments.floor_sd)
    assert abs(np.mean(corrected)) < 5 * np.std(corrected) / np.sqrt(2_000)
    assert 0.85 < np.std(corrected) / np.sqrt(np.mean(np.square(claimed))) < 1.18
