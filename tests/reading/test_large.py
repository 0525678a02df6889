"""Recursions that are written out step by step, and Gaussian processes: the same derivatives, from smaller graphs."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from pytensor.graph.fg import FunctionGraph
from scipy import special

from pymc_ngvi import LogDensity
from pymc_ngvi.density import flat
from pymc_ngvi.graphs import graph, loops
from pymc_ngvi.graphs.backends import quick_mode

pytestmark = pytest.mark.usefixtures("_anew", "_backwards")

Y = np.array([0.3, 1.1, 1.9, 2.2, 3.4, 3.9, 4.2, 5.8, 6.1, 6.3, 7.7, 8.2, 8.4])


@pytest.fixture
def _backwards(monkeypatch):
    """Derivatives by PyTensor, also in few dimensions."""
    monkeypatch.setattr(flat, "MOST_DIMENSIONS", 0)


def smoothing():
    """Holt's method: the level and the slope of each step are those of the step before and something more."""
    with pm.Model() as model:
        a, b = pm.Normal("a"), pm.Normal("b")
        level, slope, means = pm.Normal("level"), pm.Normal("slope"), []
        for value in Y:
            mean = level + slope
            means.append(mean)
            new = mean + a * (value - mean)
            slope = slope + b * (new - level - slope)
            level = new
        pm.Normal("y", pt.stack(means), 0.7, observed=Y)
    return model


def smoothing_by_numpy(theta):
    a, b, level, slope = theta
    total = -0.5 * np.sum(theta**2) - 2.0 * np.log(2.0 * np.pi)
    for value in Y:
        mean = level + slope
        total = total - 0.5 * ((value - mean) / 0.7) ** 2 - np.log(0.7) - 0.5 * np.log(2.0 * np.pi)
        new = mean + a * (value - mean)
        slope = slope + b * (new - level - slope)
        level = new
    return total


def forward(*, vector):
    """The forward algorithm of a chain of two states, of which the second is never left, one step after the other."""
    y = np.sin(np.arange(5.0))
    with pm.Model() as model:
        mu, stay = pm.Normal("mu", shape=2), pm.Normal("stay")
        emit = -0.5 * (y[:, None] - mu) ** 2
        stays, leaves = pt.log(pt.sigmoid(stay)), pt.log(pt.sigmoid(-stay))
        moves = pt.stack([pt.stack([stays, leaves]), pt.constant(np.array([-np.inf, 0.0]))])
        if vector:
            alpha = emit[0]
            for t in range(1, len(y)):
                alpha = emit[t] + pt.logsumexp(alpha[:, None] + moves, axis=0)
            total = pt.logsumexp(alpha)
        else:
            first, second = emit[0, 0], emit[0, 1]
            for t in range(1, len(y)):
                second = emit[t, 1] + pt.logaddexp(first + leaves, second)
                first = emit[t, 0] + first * 0.0 + pt.logaddexp(first + stays, -np.inf)
            total = pt.logaddexp(first, second)
        pm.Potential("y", total)
    return model


def forward_by_numpy(theta):
    y = np.sin(np.arange(5.0))
    emit = -0.5 * (y[:, None] - theta[:2]) ** 2
    stays, leaves = -special.log1p(np.exp(-theta[2])), -special.log1p(np.exp(theta[2]))
    alpha = emit[0]
    for step in emit[1:]:
        alpha = step + np.array([alpha[0] + stays, np.logaddexp(alpha[0] + leaves, alpha[1])])
    return np.logaddexp(*alpha) - 0.5 * np.sum(theta**2) - 1.5 * np.log(2.0 * np.pi)


def check(density, log_density, theta):
    """Compare with central differences of a function of one vector."""
    logp, grad = density.logp_grad(theta[None])
    hessian, step = density.hessian(theta[None])[0], 1e-4
    axes = step * np.eye(len(theta))
    np.testing.assert_allclose(logp, [log_density(theta)], rtol=1e-12)
    slopes = [(log_density(theta + h) - log_density(theta - h)) / (2.0 * step) for h in axes]
    np.testing.assert_allclose(grad[0], slopes, rtol=1e-6, atol=1e-6)
    curvatures = [(density.grad(np.array([theta + h, theta - h])) * [[1.0], [-1.0]]).sum(axis=0) for h in axes]
    np.testing.assert_allclose(hessian, np.array(curvatures) / (2.0 * step), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(density.mean_hessian(theta[None]).products(np.eye(len(theta))), hessian, rtol=1e-12)


def test_sums_of_sums_are_not_written_out():
    density = LogDensity(smoothing())
    assert density.graphs.is_large
    check(density, smoothing_by_numpy, np.array([0.4, 0.3, 0.2, 0.6]))
    # Written as one each, the sums of the gradient have ten times as many terms.
    nodes = FunctionGraph(outputs=[density.graphs.grad], clone=True).apply_nodes
    assert sum(len(node.inputs) for node in nodes) < 100 * len(Y)


@pytest.mark.parametrize("vector", [True, False])
def test_recursions_of_log_sums(vector, monkeypatch):
    monkeypatch.setattr(loops, "_LARGE", 20)  # what takes so many steps takes a minute
    density = LogDensity(forward(vector=vector))
    assert density.graphs.is_large
    check(density, forward_by_numpy, np.array([0.4, -0.3, 0.8]))


def test_log_sums_have_the_derivatives_of_pytensor(rng):
    x, v = pt.matrix("x"), pt.matrix("v")

    def build():
        total = (pt.logsumexp(x, axis=1) ** 2).sum() + (pt.logaddexp(x[0], x[1], x[2]) ** 2).sum()
        return FunctionGraph(outputs=[total], clone=False, copy_inputs=False)

    def second(total):
        grad = pt.grad(total, x)
        outputs = graph.inline_inner_graphs([total, grad, pt.grad((grad * v).sum(), x)])
        return pytensor.function([x, v], outputs, mode=quick_mode())

    short = build()
    loops.short_derivatives.rewrite(short)
    assert not any(type(node.op).__name__ == "LogAddExp" for node in short.apply_nodes)
    point, along = 3.0 * rng.normal(size=(2, 3, 4))
    point[0, 0] = -np.inf
    for ours, theirs in zip(
        second(short.outputs[0])(point, along), second(build().outputs[0])(point, along), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)
