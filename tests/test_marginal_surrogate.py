"""Polynomials in place of conditional densities: they give candidates the weights of the model, or are not used."""

import dataclasses

import numpy as np
import pytest

from marginal_terms import Groups, exact_state
from numpy.testing import assert_allclose

from pymc_ngvi.marginal import conditionals
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


def counted(state, call):
    """Return how many pairs of draws and nodes a call evaluates, and what it returns."""
    terms, before = state.rest.quadrature.terms, type(state.rest.quadrature.terms).terms
    n = 0

    def counting(self, g, local):
        nonlocal n
        n += local.shape[0] * local.shape[1]
        return before(self, g, local)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(terms), "terms", counting)
        result = call()
    return n, result


@pytest.mark.parametrize("seed", SEEDS)
def test_draws_are_those_of_the_model_for_few_evaluations(state, seed):
    """The same uniform numbers choose the same candidates, but for one in fifty of any group."""
    assert state.rest._conditionals(state)._surrogate is not None
    rows = np.arange(0, len(state.pool.g), 3)
    shifts, choices = np.random.default_rng(seed).random((2, len(rows), N_GROUPS))
    n, draws = counted(state, lambda: state.rest._conditionals(state).draw(state.pool.g, rows, shifts, choices))
    # Of draws beyond the reach of the base rule, centres are found by the reference; no other is evaluated.
    far = state.pool.g[rows][
        state.rest.quadrature.base.is_beyond(state.rest.quadrature.whitening.features(state.pool.g[rows]))
    ]
    assert n == counted(state, lambda: state.rest.quadrature.reference(far))[0]
    assert n < 0.2 * len(rows)
    with_model = state.rest._conditionals(dataclasses.replace(state))
    vars(with_model)["_surrogate"] = None
    n_by_model, expected = counted(state, lambda: with_model.draw(state.pool.g, rows, shifts, choices))
    assert n_by_model >= 5 * len(rows)
    weights = state.weights[rows] / state.weights[rows].sum()
    # Candidates are the same numbers, but for those moved to the ends of the range.
    other = np.abs(draws - expected) > 1e-12
    assert (weights @ other).max() < 0.03
    assert (weights @ other).mean() < 0.01


@pytest.mark.parametrize("wrong", ["coefficients", "range"])
def test_one_that_gives_other_weights_is_not_used(groups, wrong, monkeypatch):
    fitted = conditionals.fit_surrogate

    def poor(*args):
        surrogate = fitted(*args)
        if wrong == "coefficients":
            return dataclasses.replace(surrogate, coefficients=0.9 * surrogate.coefficients)
        return dataclasses.replace(surrogate, half=1.1 * surrogate.half)

    monkeypatch.setattr(conditionals, "fit_surrogate", poor)
    state = exact_state(groups, [-1.0, 0.4], np.diag([0.1, 0.05]))
    assert state.rest._conditionals(state)._surrogate is None


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
