"""The secant correction against explicit matrices, and against targets of known curvature."""

from types import SimpleNamespace

import numpy as np
import pytest

from matrix import each_family, random_state, two_seeds
from targets import Quadratic

from pymc_ngvi.estimators.summary import moments_at_draws
from pymc_ngvi.families import DiagonalState
from pymc_ngvi.steps.adaptive.secant import Pair, correct, moments_of, natural_gradient, rescaled_gap, trusted


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


@two_seeds
def test_the_last_pair_is_met_exactly(seed):
    rng = np.random.default_rng(seed)
    pairs = pairs_of(curvature_of(5, rng), 4, rng)
    np.testing.assert_allclose(correct(pairs, pairs[-1].change), pairs[-1].step, rtol=1e-10)


@each_family
@two_seeds
def test_moments_of_a_direction_have_it_as_natural_gradient(family, seed):
    rng = np.random.default_rng(seed)
    state = random_state(family, 4, rng)
    hessians = rng.standard_normal((8, 4, 4))
    targets = [Quadratic(np.zeros(4), h + h.T) for h in hessians]
    curvatures = np.array([state.curvature(target.mean_hessian(np.zeros((1, 4)))) for target in targets])
    moments = moments_at_draws(state, rng.standard_normal((8, 4)), curvatures)
    direction = rng.standard_normal(len(natural_gradient(state, moments)))
    np.testing.assert_allclose(natural_gradient(state, moments_of(state, moments, direction)), direction, rtol=1e-12)
    gradient = natural_gradient(state, moments)
    np.testing.assert_allclose(0.5 * gradient @ gradient, moments.gap, rtol=1e-12)


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


E1, E2 = np.eye(2)


@pytest.mark.parametrize(
    ("pair", "exact_metric", "expected"),
    [
        pytest.param(Pair(E1, 0.5 * E1), True, True, id="softer"),
        pytest.param(Pair(E1, 2.0 * E1), True, True, id="stiffer"),
        pytest.param(Pair(E1, 0.05 * E1), True, False, id="too-soft"),
        pytest.param(Pair(E1, 4.0 * E1), True, False, id="too-stiff"),
        pytest.param(Pair(E1, -0.5 * E1), True, False, id="wrong-sign"),
        pytest.param(Pair(E1, -0.5 * E1), False, False, id="wrong-sign-inexact"),
        pytest.param(Pair(E1, 0.05 * E1), False, True, id="soft-inexact"),
        pytest.param(Pair(E1, 40.0 * E1), False, True, id="stiff-inexact"),
        pytest.param(Pair(E1, 1e-5 * E1), False, False, id="flat-inexact"),
        pytest.param(Pair(E1, 1e-4 * E1 + E2), False, False, id="orthogonal-inexact"),
        pytest.param(Pair(1e-9 * E1, 1e-9 * E1), True, False, id="rounding"),
        pytest.param(Pair(1e-9 * E1, 1e-9 * E1), False, False, id="rounding-inexact"),
        pytest.param(Pair(E1, 0.0 * E1), False, False, id="no-change"),
    ],
)
def test_which_pairs_are_trusted(pair, exact_metric, expected):
    assert trusted(pair, SimpleNamespace(exact_metric=exact_metric, inner=lambda a, b: float(a @ b))) is expected
