"""Draws of group effects given the globals: they have the distribution of the model."""

import dataclasses

import numpy as np
import pytest

from marginal_terms import Groups, exact_state
from numpy.testing import assert_allclose
from scipy import stats

from pymc_ngvi.marginal.log_marginal import LogMarginal

SEEDS = [1, 2]
N_GROUPS, SIZE = 60, 12


@pytest.fixture(scope="module")
def groups():
    """Binary outcomes in groups, some of them all 0."""
    rng = np.random.default_rng(5)
    p = 1.0 / (1.0 + np.exp(-(-1.0 + 1.5 * rng.normal(size=N_GROUPS))))
    return Groups.logit(rng.binomial(SIZE, p), SIZE)


@pytest.fixture(scope="module")
def state(groups):
    return exact_state(groups, [-1.0, 0.4], np.diag([0.1, 0.05]))


@pytest.mark.parametrize("seed", SEEDS)
def test_draws_have_the_distribution_of_the_model(state, seed):
    """Given the globals, distribution functions of the model turn draws into uniform numbers."""
    rows = np.arange(0, len(state.pool.g), 3)
    shifts, choices = np.random.default_rng(seed).random((2, len(rows), N_GROUPS))
    draws = state.rest._conditionals(state).draw(state.pool.g, rows, shifts, choices)
    probability = distribution_functions(state, state.pool.g[rows], draws)
    assert stats.kstest(probability.ravel(), "uniform").pvalue > 1e-3
    z = (probability.mean(axis=0) - 0.5) * np.sqrt(12.0 * len(rows))
    assert np.abs(z).max() < 4.5
    assert (z**2).mean() < 2.0


def distribution_functions(state, g, draws):
    """Return P(b <= draw | g) of each group by the model, on a fine grid."""
    terms = state.rest.quadrature.terms.terms
    centres = state.rest.quadrature.reference(g).centres
    z = np.linspace(-9.0, 9.0, 1_201)
    grid = centres.mean[:, None] + centres.factor[:, None, :, 0] * z[:, None]
    values = np.concatenate([terms(g[i : i + 20], grid[i : i + 20])[1] for i in range(0, len(g), 20)])
    density = np.exp(values - values.max(axis=1, keepdims=True))
    cells = 0.5 * (density[:, 1:] + density[:, :-1])
    total = np.cumsum(cells, axis=1)
    total = np.concatenate([np.zeros_like(total[:, :1]), total], axis=1) / total[:, -1:]
    at = (draws - centres.mean) / centres.factor[:, :, 0]
    pairs = ((i, j) for i in range(len(g)) for j in range(N_GROUPS))
    return np.array([np.interp(at[i, j], z, total[i, :, j]) for i, j in pairs]).reshape(at.shape)


def test_draws_do_not_hang_on_what_was_drawn_before(groups):
    """A posterior that has drawn, and one that has not, give the same draws."""
    first, second = (exact_state(groups, [-1.0, 0.4], np.diag([0.1, 0.05])) for _ in range(2))
    first.draw(50, np.random.default_rng(0))
    np.testing.assert_array_equal(first.draw(200, np.random.default_rng(1)), second.draw(200, np.random.default_rng(1)))


def test_beyond_what_the_base_rule_has_learned_the_reference_is_asked(state):
    """Ten posterior standard deviations out, the polynomial says what it likes."""
    quadrature: LogMarginal = state.rest.quadrature
    assert quadrature.base is not None
    sd = state.sd()[state.rest.forest.globals_]
    mean = state.weights @ state.pool.g
    inside, outside = mean + 0.5 * sd, mean + np.array([-6.0, -5.0]) * sd
    g = np.stack([inside, outside])
    expected = quadrature.reference(g).log_marginal
    value, lost = quadrature(g)
    assert not lost.any()
    assert_allclose(value[1], expected[1], rtol=1e-12)
    assert value[0] != expected[0]
    assert_allclose(value[0], expected[0], atol=0.3)
    learned_there = dataclasses.replace(quadrature.base, gram=1e12 * quadrature.base.gram)
    assert _with_base(quadrature, learned_there)(g)[0][1] != pytest.approx(expected[1], abs=1e-3)


def _with_base(quadrature, base):
    """Return the same function with another base rule."""
    other = LogMarginal.__new__(LogMarginal)
    vars(other).update(vars(quadrature), base=base)
    return other
