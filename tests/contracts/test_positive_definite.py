"""No update ever leaves the positive-definite matrices, whatever curvature it is given: a valid state, or None."""

import warnings

import hypothesis.strategies as st
import numpy as np
import pytest

from hypothesis import given, settings
from matrix import (
    PAIRS,
    as_curvature,
    each_family,
    factor_matrix,
    family_object,
    random_state,
    state_of,
    whitened_moments,
)

from pymc_ngvi.fitting.options import AXES
from pymc_ngvi.methods.cholesky import plus

N_DIM = 4
each_pair = pytest.mark.parametrize(("family", "update"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
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


@each_family
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("part", [1.0 - 1e-15, 1.0 + 1e-15], ids=["all but", "more than"])
def test_a_factor_that_cancels_to_rounding_is_no_state(family, signed, part, rng):
    """Be what is left positive or negative: which of the two depends on the processor."""
    state = random_state(family, 4, rng)
    assert plus(state, np.zeros(4), -part * state.factor, signed=signed) is None
    assert plus(state, np.zeros(4), -0.999 * state.factor, signed=signed) is not None


@each_family
def test_a_factor_that_numbers_can_not_hold_is_no_state(family):
    """Halving a step needs to be told; a standard deviation of 0 would end the fit with an error."""
    state = family_object(family, 4).from_scale(np.zeros(4), np.full(4, 1e-300))
    assert plus(state, np.zeros(4), -state.factor) is None
    huge = state.add_to_diagonal(np.zeros_like(state.factor), 1e60)
    assert state.precision_scaled_by(huge, np.ones(4)) is None
    tiny = family_object(family, 4).from_scale(np.zeros(4), np.full(4, 1.0))
    assert tiny.precision_scaled_by(huge, np.ones(4)) is not None
