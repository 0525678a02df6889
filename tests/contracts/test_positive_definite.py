"""No update ever leaves the positive-definite matrices, whatever curvature it is given: a valid state, or None."""

import warnings

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest

from hypothesis import given, settings
from matrix import (
    OF_PRECISION,
    PAIRS,
    as_curvature,
    as_matrix,
    each_family,
    factor_matrix,
    family_object,
    moments_from_draws,
    random_state,
    state_of,
    whitened_moments,
    whitener,
)
from targets import logistic

from pymc_ngvi.core.draws import plain_draws
from pymc_ngvi.families import BlockFamily, BlockStructure
from pymc_ngvi.fitting.registry import AXES

N_DIM = 4
each_pair = pytest.mark.parametrize(("family", "update"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
#: Updates of the precision, which exist for any symmetric curvature; the others need a shorter step for large ones.
always_valid = pytest.mark.parametrize(
    ("family", "update"), [pair for pair in PAIRS if pair[1] in ("natural", "natural_pd")]
)
seeds = st.integers(0, 2**32 - 1)
signs = st.sampled_from([-1.0, 1.0])


def size(smallest, largest):
    """Return a strategy for numbers of either sign, uniform in the logarithm of their size."""
    exponents = st.floats(np.log10(smallest), np.log10(largest))
    return st.builds(lambda sign, exponent: sign * 10.0**exponent, signs, exponents)


#: Eigenvalues of whitened curvatures.
EIGENVALUES = {
    "indefinite": st.floats(-10.0, 10.0),
    "nearly singular": st.one_of(st.just(0.0), size(1e-14, 1.0)),
    "large": size(1e-8, 1e8),
    "huge": size(1e-14, 1e12),
}


@st.composite
def curvatures(draw, kinds=tuple(EIGENVALUES)):
    """Return a symmetric matrix with eigenvalues of one kind, in a random orientation or along the coordinates."""
    eigenvalues = np.array(draw(st.lists(EIGENVALUES[draw(st.sampled_from(kinds))], min_size=N_DIM, max_size=N_DIM)))
    if draw(st.booleans()):
        return np.diag(eigenvalues)
    vectors = np.linalg.qr(np.random.default_rng(draw(seeds)).standard_normal((N_DIM, N_DIM)))[0]
    return (vectors * eigenvalues) @ vectors.T


@st.composite
def steps(draw, update):
    """Return a step size and whether to correct."""
    return draw(st.floats(1e-3, 5.0 if update == "natural_pd" else 1.0)), draw(st.booleans())


def rows_of_unit_length(state):
    """Return the factor with each row divided by its norm: of the correlation matrix of covariance or precision."""
    factor = factor_matrix(state)
    return factor / np.sqrt(np.sum(factor**2, axis=1))[:, None]


def assert_valid(state):
    """Check that a state is a Gaussian, and that its covariance is one in floating-point numbers too."""
    if "axes" not in state.params():
        factor = factor_matrix(state)
        assert np.isfinite(factor).all()
        np.testing.assert_array_equal(factor, np.tril(factor))
        assert (np.diag(factor) > 0.0).all()
    assert np.isfinite(state.mean()).all()
    assert np.isfinite(state.entropy())
    sd, cov = state.sd(), state.cov()
    assert np.isfinite(sd).all()
    assert (sd > 0.0).all()
    assert np.isfinite(cov).all()
    np.testing.assert_allclose(np.diag(cov), sd**2, rtol=1e-6)
    # The determinant is not 0, and rounding makes no eigenvalue clearly negative.
    assert np.linalg.eigvalsh(cov / np.outer(sd, sd)).min() > -1e-12
    assert np.isfinite(state.log_density(state.draws(np.ones((1, N_DIM))))).all()


def attempt(update, state, moments, step):
    """Take a step; a floating-point warning is a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new = AXES["update"][update](state, moments, *step)
        if new is not None:
            assert_valid(new)
    return new


@each_pair
@settings(max_examples=40)
@given(data=st.data(), seed=seeds, scale=st.floats(-4.0, 4.0), push=size(1e-6, 1e6))
def test_any_symmetric_curvature_gives_a_valid_state_or_none(family, update, data, seed, scale, push):
    rng = np.random.default_rng(seed)
    state = random_state(family, N_DIM, rng)
    state = state_of(family, state.mean(), 100.0**scale * state.cov())
    moments = whitened_moments(push * rng.standard_normal(N_DIM), as_curvature(state, data.draw(curvatures())))
    attempt(update, state, moments, data.draw(steps(update)))


@always_valid
@settings(max_examples=40)
@given(data=st.data(), seed=seeds)
def test_updates_of_the_precision_need_no_shorter_step(family, update, data, seed):
    """For whitened curvatures up to 1e8; the plain natural-parameter step only where the precision stays positive.

    With a factor of the precision there is no correction, so that all of its natural steps are plain.
    """
    rng = np.random.default_rng(seed)
    state = random_state(family, N_DIM, rng)
    curvature = data.draw(curvatures(("indefinite", "nearly singular", "large")))
    moments = whitened_moments(rng.standard_normal(N_DIM), as_curvature(state, curvature))
    rho, _ = data.draw(steps(update))
    corrected, new = (attempt(update, state, moments, (rho, correct)) for correct in (True, False))
    if family in OF_PRECISION:
        assert (corrected is None) == (new is None)
    else:
        assert corrected is not None
    if update == "natural_pd":
        assert new is not None
        return
    stored = as_matrix(state, as_curvature(state, curvature))
    smallest = np.linalg.eigvalsh((1.0 - rho) * np.eye(N_DIM) + rho * stored).min()
    rounding = 1e-10 * max(1.0, np.abs(stored).max())
    assert abs(smallest) < rounding or (new is not None) == (smallest > 0.0)


@each_pair
@pytest.mark.parametrize("estimator", ["stein", "pathwise"])
@settings(max_examples=20)
@given(data=st.data(), seed=seeds, n_draws=st.sampled_from([1, 1, 2]), stl=st.booleans())
def test_noise_of_a_single_draw_gives_a_valid_state_or_none(family, update, estimator, data, seed, n_draws, stl):
    """Outer products of rank 1, at a state that may be far from the posterior."""
    rng, target = np.random.default_rng(seed), logistic(n_dim=N_DIM)
    state = random_state(family, N_DIM, rng)
    base = plain_draws(n_draws, N_DIM, rng)
    attempt(update, state, moments_from_draws(target, state, base, estimator, stl=stl), data.draw(steps(update)))


@each_pair
@settings(max_examples=20)
@given(data=st.data(), seed=seeds, where=st.integers(0, N_DIM - 1), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_moments_that_are_not_finite_give_none(family, update, data, seed, where, bad):
    """One entry of the curvature on the diagonal, two beside it, or one of the gradient."""
    rng = np.random.default_rng(seed)
    state = random_state(family, N_DIM, rng)
    grad, curvature = rng.standard_normal(N_DIM), data.draw(curvatures(("indefinite",)))
    kind = data.draw(st.sampled_from(["diagonal", "beside it", "gradient"]))
    if kind == "gradient":
        grad[where] = bad
    elif kind == "diagonal" or "sd" in state.params():
        curvature[where, where] = bad
    else:
        curvature[0, 3] = curvature[3, 0] = bad  # the two coordinates that share a block
    moments = whitened_moments(grad, as_curvature(state, curvature))
    assert attempt(update, state, moments, data.draw(steps(update))) is None


@each_pair
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e100])
@pytest.mark.parametrize("estimator", ["stein", "pathwise"])
def test_one_gradient_that_is_not_finite_or_enormous_gives_none_or_a_valid_state(family, update, estimator, bad, rng):
    state = random_state(family, N_DIM, rng)

    class Broken:
        n_dim = N_DIM

        def logp_grad(self, theta):
            return np.zeros(len(theta)), np.full_like(theta, bad)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the estimate, which the step rules guard
        moments = moments_from_draws(Broken(), state, plain_draws(1, N_DIM, rng), estimator)
        moments.curvature  # noqa: B018 (formed where it is asked for)
    new = attempt(update, state, moments, (0.5, True))
    assert new is None or np.isfinite(bad)


@pytest.mark.parametrize(("family", "update"), [pair for pair in PAIRS if pair[1] == "sqrt"])
@settings(max_examples=50)
@given(data=st.data(), seed=seeds, rho=st.floats(1e-3, 1.0))
def test_retracted_diagonals_stay_positive_for_curvatures_of_any_moderate_size(family, update, data, seed, rho):
    """What the retraction is for: where the plain step in the factor is refused, this one is not."""
    rng = np.random.default_rng(seed)
    state = random_state(family, N_DIM, rng)
    curvature = as_curvature(state, 1e4 * data.draw(curvatures(("indefinite",))))
    moments = whitened_moments(rng.standard_normal(N_DIM), curvature)
    new = attempt(update, state, moments, (rho, False))
    assert new is not None
    c = np.diag(whitener(state))
    change = np.clip(0.5 * rho * (1.0 - state.curvature_diagonal(curvature)), -4.0, 4.0)
    np.testing.assert_allclose(np.diag(whitener(new)) / c, np.exp(change), rtol=1e-8)


@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 0, 0, 1, 1, 1]], ids=["one block", "two blocks"])
@pytest.mark.parametrize("family", ["full", "block"])
def test_values_too_far_apart_for_rounding_give_none(family, labels):
    """Along three directions 1e40, 1, 1: beside the first, what is left of the others would be rounding, or 0."""
    n_dim = len(labels) if family == "block" else 3
    made_by = BlockFamily(BlockStructure(labels)) if family == "block" else family_object(family, n_dim)
    state = made_by.from_scale(np.zeros(n_dim), np.ones(n_dim))
    for seed in range(20):
        vectors = np.linalg.qr(np.random.default_rng(seed).standard_normal((3, 3)))[0]
        curvature = np.kron(np.eye(n_dim // 3), (vectors * [1.0, 2.0, 3.0]) @ vectors.T)
        for largest in (1e16, 1e40):
            new = state.precision_scaled_by_function(
                as_curvature(state, curvature), lambda a, most=largest: np.where(a > 2.5, most, 1.0), np.ones(n_dim)
            )
            assert (new is None) == (largest > 1e30)
            # One part in 1e8 of the root: the covariance is that of the two other directions.
            if new is not None:
                block = new[0].cov()[:3, :3]
                np.testing.assert_allclose(block, vectors[:, :2] @ vectors[:, :2].T, rtol=1e-6, atol=1e-6)


@each_family
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("part", [1.0 - 1e-15, 1.0 + 1e-15], ids=["all but", "more than"])
def test_a_factor_that_cancels_to_rounding_is_no_state(family, signed, part, rng):
    """Be what is left positive or negative: which of the two depends on the processor."""
    state = random_state(family, 4, rng)
    assert state.plus(np.zeros(4), -part * state.factor, signed=signed) is None
    assert state.plus(np.zeros(4), -0.999 * state.factor, signed=signed) is not None


@pytest.mark.parametrize("family", ["full", "block"])
def test_two_gaussians_whose_covariance_is_singular_to_rounding_are_not_merged(family):
    made_by = BlockFamily(BlockStructure([0, 0])) if family == "block" else family_object(family, 2)
    state = made_by.from_scale(np.zeros(2), np.ones(2))
    factor = np.array([[1.0, 0.0], [1.0, 1e-18]])
    narrow = replace(state, factor=factor if family == "full" else factor.ravel())
    with pytest.raises(np.linalg.LinAlgError, match="nearly singular"):
        narrow.merged(narrow, 0.5)
    factor[1, 1] = 1e-10
    narrow = replace(state, factor=factor if family == "full" else factor.ravel())
    np.testing.assert_allclose(narrow.merged(narrow, 0.5).factor, narrow.factor, rtol=1e-4)


@each_family
def test_a_factor_that_numbers_can_not_hold_is_no_state(family):
    """Halving a step needs to be told; a standard deviation of 0 would end the fit with an error."""
    state = family_object(family, 4).from_scale(np.zeros(4), np.full(4, 1e-300))
    assert state.plus(np.zeros(4), -state.factor) is None
    huge = state.add_to_diagonal(np.zeros_like(state.factor), 1e60)
    assert state.precision_scaled_by(huge, np.ones(4)) is None
    tiny = family_object(family, 4).from_scale(np.zeros(4), np.full(4, 1.0))
    assert tiny.precision_scaled_by(huge, np.ones(4)) is not None
