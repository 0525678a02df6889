"""Maps of normal numbers in place of conditional densities: they have the distribution of the model, or are unused."""

import dataclasses

import numpy as np
import pytest

from marginal_terms import Groups, exact_state
from numpy.testing import assert_allclose
from scipy import special

from pymc_ngvi.marginal import conditionals, transport
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
def test_draws_have_the_distribution_of_the_model_for_few_evaluations(state, seed):
    """Given the globals, distribution functions of the model turn draws into uniform numbers."""
    _, rough = state.rest._conditionals(state)._maps
    assert not rough.any()
    rows = np.arange(0, len(state.pool.g), 3)
    shifts, choices = np.random.default_rng(seed).random((2, len(rows), N_GROUPS))
    n, draws = counted(state, lambda: state.rest._conditionals(state).draw(state.pool.g, rows, shifts, choices))
    # Of draws beyond the reach of the base rule, centres are found by the reference; no other is evaluated.
    far = state.pool.g[rows][
        state.rest.quadrature.base.is_beyond(state.rest.quadrature.whitening.features(state.pool.g[rows]))
    ]
    assert n == counted(state, lambda: state.rest.quadrature.reference(far))[0]
    assert n < 0.2 * len(rows)
    # A map rises: its numbers are those that it was given, but for its error, which is a hundredth where it counts.
    probability = distribution_functions(state, state.pool.g[rows], draws)
    weights = state.weights[rows] / state.weights[rows].sum()
    apart = np.abs(probability - choices)
    assert (weights @ apart).max() < 0.01
    assert (weights @ apart).mean() < 0.003


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


@pytest.mark.parametrize("seed", SEEDS)
def test_what_maps_do_not_serve_is_drawn_by_the_model(state, seed):
    """Of rough coordinates, draws are those without maps, number for number; the others keep theirs."""
    rows = np.arange(0, len(state.pool.g), 7)
    shifts, choices = np.random.default_rng(seed).random((2, len(rows), N_GROUPS))
    both, without, maps = (state.rest._conditionals(dataclasses.replace(state)) for _ in range(3))
    found, rough = state.rest._conditionals(state)._maps
    some = np.zeros_like(rough)
    some[[0, 17, N_GROUPS - 1]] = True
    vars(both)["_maps"], vars(without)["_maps"] = (found, some), None
    mixed, by_model, by_maps = (of.draw(state.pool.g, rows, shifts, choices) for of in (both, without, maps))
    assert_allclose(mixed[:, some], by_model[:, some], rtol=1e-12)
    assert np.abs(by_maps[:, some] - by_model[:, some]).max() > 0.01
    is_map = (mixed == by_maps).all(axis=0)
    assert not is_map[some].any()
    assert (is_map | (mixed == by_model).all(axis=0)).all()


@pytest.mark.parametrize("wrong", ["all", "one"])
def test_maps_that_are_wrong_are_not_used(groups, wrong, monkeypatch):
    fitted = conditionals.fit_transport

    def poor(*args):
        found = fitted(*args)
        factor = np.ones(N_GROUPS)
        factor[slice(None) if wrong == "all" else 5] = 1.1
        return dataclasses.replace(found, coefficients=factor * found.coefficients)

    monkeypatch.setattr(conditionals, "fit_transport", poor)
    state = exact_state(groups, [-1.0, 0.4], np.diag([0.1, 0.05]))
    maps = state.rest._conditionals(state)._maps
    if wrong == "all":
        assert maps is None
    else:
        np.testing.assert_array_equal(np.flatnonzero(maps[1]), [5])


@pytest.mark.parametrize("power", [1.0, 0.15])
def test_maps_are_those_of_known_distributions(power):
    """Of log gamma variables, over normal numbers of the same probability."""
    x = np.linspace(-1.0, 1.0, 13)
    shape = 4.0 / power
    low, high = (np.log(special.gammaincinv(shape, special.ndtr(end))) for end in (-4.5, 4.5))
    z = 0.5 * (low + high) + 0.5 * (high - low) * x
    polynomial = np.polynomial.polynomial.polyfit(x, shape * z - np.exp(z), 8, w=np.exp(-3.0 * x**2))
    [coefficients] = transport._maps(polynomial[None, 1:, None])
    w = np.linspace(-3.0, 3.0, 61)
    found = 0.5 * (low + high) + 0.5 * (high - low) * np.polynomial.polynomial.polyval(w, coefficients[:, 0])
    expected = np.log(special.gammaincinv(shape, special.ndtr(w)))
    sd = np.sqrt(special.polygamma(1, shape))
    assert np.abs(found - expected).max() < 0.01 * sd


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
