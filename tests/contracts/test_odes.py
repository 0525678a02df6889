"""Differential equations: one integration for all draws, and both derivatives of the solution."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from scipy import integrate, stats

from pymc_ngvi import LogDensity
from pymc_ngvi.graphs import odes
from pymc_ngvi.graphs.backends import quick_mode, without_c
from pymc_ngvi.rows.programs import CannotFollow

TIMES = (0.5, 1.0, 2.5)
OBSERVED = np.array([[1.2, 0.8], [1.3, 0.9], [0.9, 1.4]])


def decay(y, t, p):
    return [-p[0] * y[0]]


def predators(y, t, p):
    return [p[0] * y[0] - p[1] * y[0] * y[1] + 0.1 * pt.sin(t), p[1] * y[0] * y[1] - p[2] * y[1]]


def linear(y, t, p):
    return pt.dot(pt.constant(np.array([[-0.5, 0.2], [0.1, -1.0]])), y) * p[0]


def equations(function, n_states, n_parameters):
    return odes.Equations(function, TIMES, 0.0, n_states, n_parameters)


def predator_model():
    equation = pm.ode.DifferentialEquation(func=predators, times=TIMES, n_states=2, n_theta=3, t0=0.0)
    with pm.Model() as model:
        p = pm.LogNormal("p", -0.5, 0.3, shape=3)
        start = pm.LogNormal("start", 0.0, 0.2, shape=2)
        pm.LogNormal("y", pt.log(equation(y0=start, theta=p)), 0.3, observed=OBSERVED)
    return model


def test_solution_and_derivatives_of_a_decay_are_exact():
    both = np.array([[2.0, 0.7], [1.5, 0.1], [0.3, 2.0]])  # initial state, rate
    solved = odes._solve(equations(decay, 1, 1), 2, both)
    assert solved.shape == (3, 3, 1 + 2 + 4)
    t = np.array(TIMES)
    for (y0, k), found in zip(both, solved, strict=True):
        e = np.exp(-k * t)
        expected = np.column_stack([y0 * e, e, -t * y0 * e, 0 * t, -t * e, -t * e, t**2 * y0 * e])
        np.testing.assert_allclose(found, expected, atol=3e-7)


@pytest.mark.parametrize(("function", "n_parameters"), [(predators, 3), (linear, 1)])
def test_derivatives_are_differences(function, n_parameters):
    both = np.array([[1.0, 0.8, *[0.6, 0.9, 0.7][:n_parameters]], [0.7, 1.4, *[1.1, 0.4, 0.9][:n_parameters]]])
    n, eq, step = both.shape[1], equations(function, 2, n_parameters), 1e-3
    solved = odes._solve(eq, 2, both)
    first = solved[:, :, 2 : 2 + 2 * n].reshape(2, 3, 2, n)
    second = solved[:, :, 2 + 2 * n :].reshape(2, 3, 2, n, n)
    for j, axis in enumerate(np.eye(n)):
        more, less = odes._solve(eq, 1, both + step * axis), odes._solve(eq, 1, both - step * axis)
        moved = (more - less) / (2 * step)
        np.testing.assert_allclose(first[..., j], moved[:, :, :2], atol=1e-4)
        np.testing.assert_allclose(second[..., j], moved[:, :, 2:].reshape(2, 3, 2, n), rtol=1e-4, atol=1e-4)


def test_log_density_is_that_of_the_solution():
    density = LogDensity(predator_model(), "quick")
    theta = density.initial_point() + 0.1 * np.random.default_rng(1).normal(size=(4, 5))

    def slopes(y, t, p):
        return [p[0] * y[0] - p[1] * y[0] * y[1] + 0.1 * np.sin(t), p[1] * y[0] * y[1] - p[2] * y[1]]

    expected = []
    for point in theta:
        p, start = np.exp(point[:3]), np.exp(point[3:])
        solved = integrate.odeint(slopes, start, (0.0, *TIMES), args=(p,))[1:]
        priors = stats.norm.logpdf(point, [-0.5] * 3 + [0.0] * 2, [0.3] * 3 + [0.2] * 2).sum()
        expected.append(priors + stats.lognorm.logpdf(OBSERVED, 0.3, scale=solved).sum())
    np.testing.assert_allclose(density.logp(theta), expected, rtol=1e-6, atol=1e-5)


def test_hessians_are_differences_of_gradients():
    density = LogDensity(predator_model(), "quick")
    theta, step = density.initial_point() + 0.1 * np.random.default_rng(2).normal(size=5), 1e-3
    ends = [density.logp_grad(theta + step * np.array([-axis, axis]))[1] for axis in np.eye(5)]
    moved = [more - less for less, more in ends]
    np.testing.assert_allclose(density.hessian(theta[None])[0], np.array(moved) / (2 * step), rtol=1e-3, atol=2e-3)


@pytest.fixture(name="integrations")
def _integrations(monkeypatch):
    calls, inner = [], odes._solve

    def solve(equations_, order, both):
        calls.append((order, len(both)))
        return inner(equations_, order, both)

    monkeypatch.setattr(odes, "_solve", solve)
    return calls


def test_one_integration_gives_all_draws_and_derivatives(integrations):
    density = LogDensity(predator_model(), "quick")
    theta = density.initial_point() + 0.1 * np.random.default_rng(3).normal(size=(7, 5))
    density.logp_grad(theta)
    assert integrations == [(1, 7)]
    integrations.clear()
    density.mean_hessians([theta[:4], theta[4:]])[0].products(np.eye(5))
    assert integrations == [(2, 7)]


def test_a_draw_without_solution_leaves_the_others_alone(integrations):
    eq = equations(lambda y, t, p: [p[0] * y[0] ** 2], 1, 1)  # 1 / (1 / y0 - p t)
    both = np.array([[0.1, 1.0], [5.0, 1.0], [0.2, 1.0], [np.nan, 1.0]])
    solved = odes._solve(eq, 1, both)
    np.testing.assert_allclose(solved[[0, 2], :, 0], 1 / (1 / both[[0, 2], :1] - np.array(TIMES)), rtol=1e-6)
    assert np.isnan(solved[[1, 3]]).all()
    assert integrations


def test_the_solution_with_leading_axes_is_that_of_each_draw():
    eq = equations(predators, 2, 3)
    y0, p = pt.tensor(shape=(None, 1, 2), dtype="float64"), pt.tensor(shape=(1, None, 3), dtype="float64")
    outputs = odes.Solution(eq, 1)(y0, p, return_list=True)
    with without_c():
        function = pytensor.function([y0, p], [*outputs, *[o.shape for o in outputs]], mode=quick_mode())
    rng = np.random.default_rng(4)
    starts, rates = rng.uniform(0.5, 1.5, (2, 2)), rng.uniform(0.5, 1.0, (4, 3))
    values, slopes, *shapes = function(starts[:, None], rates[None])
    assert values.shape == tuple(shapes[0]) == (2, 4, 3, 2)
    assert slopes.shape == tuple(shapes[1]) == (2, 4, 3, 2, 5)
    one = odes._solve(eq, 1, np.concatenate([starts[1], rates[2]])[None])[0]
    np.testing.assert_allclose(values[1, 2], one[:, :2], rtol=1e-6)
    np.testing.assert_allclose(slopes[1, 2].reshape(3, -1), one[:, 2:], rtol=1e-5, atol=1e-7)


def with_matrix(y, t, p):
    return pt.dot(pt.stack([[p[0], 1.0], [0.0, p[1]]]), y)


@pytest.mark.parametrize("function", [predators, with_matrix])
def test_slopes_that_are_carried_along_are_those_of_numbers(function, rng, monkeypatch):
    """Where an operation is on arrays, all are."""
    both = rng.uniform(0.5, 1.5, size=(4, 5))
    slopes = odes.slopes_of.__wrapped__
    found = slopes(equations(function, 2, 3), 2)(both, 0.3)

    def refuse(*_):
        raise CannotFollow("not one number")

    monkeypatch.setattr(odes, "read", refuse)
    for one, other in zip(found, slopes(equations(function, 2, 3), 2)(both, 0.3), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-14, atol=1e-15)


def test_data_may_be_read_by_time(rng):
    """Of a table, and of what users may set anew."""
    table, scale = np.array([0.4, -0.3, 1.1]), pytensor.shared(np.array([2.0, 0.5]))

    def forced(y, t, p):
        return [scale[0] * pt.constant(table)[pt.cast(pt.floor(t), "int64")] - p[0] * y[0] ** 2]

    slopes, both = odes.slopes_of.__wrapped__(equations(forced, 1, 1), 2), rng.uniform(0.5, 1.5, size=(3, 2))
    for new in (2.0, 0.7):
        scale.set_value(np.array([new, 0.5]))
        value, first, second = slopes(both, 1.3)
        y, p = both.T
        np.testing.assert_allclose(value[:, 0], new * table[1] - p * y**2, rtol=1e-14)
        np.testing.assert_allclose(first[:, 0], np.column_stack([-2.0 * p * y, -(y**2)]), rtol=1e-14)
        expected = [[-2.0 * p, -2.0 * y], [-2.0 * y, 0.0 * y]]
        np.testing.assert_allclose(second[:, 0], np.moveaxis(np.array(expected), 2, 0), rtol=1e-14, atol=1e-15)


def stiff(y, t, p):
    return [-p[0] * (y[0] - pt.cos(t))]


def test_stiff_equations_are_solved_beside_others():
    eq, both = equations(stiff, 1, 1), np.array([[0.0, 1e6], [0.0, 1.0]])
    together, alone = odes._solve(eq, 1, both), odes._solve(eq, 1, both[1:])
    np.testing.assert_allclose(together[0, :, 0], np.cos(TIMES), atol=1e-5)
    np.testing.assert_allclose(together[1:], alone, atol=1e-6)
