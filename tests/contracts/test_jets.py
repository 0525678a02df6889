"""Derivatives that are carried along a graph: those of PyTensor, operation by operation and in loops."""

import cloudpickle
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from operations import with_branches

from pymc_ngvi import LogDensity
from pymc_ngvi.density import flat
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import quick_mode, without_c
from pymc_ngvi.ops.jets import Jets, forward_mode

X = np.array([[0.7, -0.4, 1.3], [0.2, 0.9, -1.1], [-0.6, 0.3, 0.5], [1.4, -1.2, 0.1]])
A = np.array([[0.5, -0.2, 0.7], [1.1, 0.4, -0.3]])


def set_and_add(x):
    y = pt.set_subtensor(pt.zeros((4, 2))[1:3, 0], x[:2] ** 2)
    y = pt.inc_subtensor(y[1:, 1], x * x[0])
    y = pt.inc_subtensor(y[np.array([0, 2, 2])], pt.exp(x)[:, None])
    return pt.sum(y**3) + pt.sum(pt.set_subtensor(x[np.array([2, 0])], 1.5) ** 2 * x)


def matrices(x):
    a, b = pt.outer(x, x + 1.0), pt.exp(A * x)
    return pt.dot(b, a).sum() + pt.dot(pt.dot(A, x), pt.dot(b, x)) + pt.exp(pt.diagonal(a, offset=1)).sum()


PLACES = pt.constant(np.array([[0, 2], [1, 1], [2, 0]]))
of_each = pt.vectorize(lambda row, at: row[at], signature="(n),(m)->(m)")


def positive(x):
    """A matrix that is positive definite wherever it is taken."""
    root = pt.outer(x, x[::-1]) + A.T @ A * pt.exp(x)
    return root @ root.T + 0.5 * pt.eye(3)


def solutions(x):
    a, b = pt.outer(x, x + 1.0) + 2.0 * pt.eye(3), pt.outer(pt.exp(x), x[:2])
    of_vectors = pt.linalg.solve(a, x**2, b_ndim=1) * x + pt.linalg.solve(3.0 * np.eye(3) + A.T @ A, x**2, b_ndim=1)
    return of_vectors.sum() + pt.sum(pt.linalg.solve(a, b) ** 2) + pt.linalg.solve(a, A[0], b_ndim=1)[1]


def triangles(x):
    a = pt.outer(x, x + 2.0) + 3.0 * pt.eye(3)
    lower = pt.linalg.solve_triangular(a, x**2, lower=True, b_ndim=1)
    upper = pt.linalg.solve_triangular(a, x**2, lower=False, unit_diagonal=True, b_ndim=1)
    return (
        pt.sum(lower * upper)
        + pt.sum(pt.linalg.cho_solve((pt.tril(a), True), x, b_ndim=1) ** 2)
        + pt.sum(pt.linalg.cho_solve((pt.triu(a), False), pt.outer(x, x)) ** 2)
    )


def factors(x):
    upper = pt.linalg.cholesky(positive(x), lower=False)
    return (
        pt.sum(pt.linalg.cholesky(positive(x)) ** 3)
        + pt.sum(upper * pt.outer(x, x))
        + pt.sum(pt.linalg.solve(positive(x), x, assume_a="pos", b_ndim=1) * x)
    )


FUNCTIONS = {
    "arithmetic": lambda x: (x[0] * x[1] - x[2] / (2.0 + x[0] ** 2)) * 3.0 - 2.0 / pt.exp(x[1]) - x[1],
    "of many": lambda x: x[0] * x[1] * x[2] * 2.0 * (x[1] + 3.0 + x + A.sum(axis=0) + x[0] * x).sum() - (1.0 - x[2]),
    "functions": lambda x: pt.sum(
        pt.gammaln(pt.exp(x)) + pt.sigmoid(x) * pt.softplus(x[::-1]) + pt.log1p(x**2) + pt.tanh(x)
    ),
    "powers": lambda x: pt.sum(pt.sqr(x) ** x[0] + pt.exp(x) ** 3 + pt.abs(x) * pt.erf(x)),
    "branches": lambda x: pt.sum(
        pt.switch(x > 0.25, x**3, pt.exp(x)) * pt.maximum(x, 0.1) + pt.minimum(x**2, 0.5) + pt.clip(x, -0.5, 0.8) ** 2
    ) + pt.switch(x[0] > 0.0, 2.0, x[1] ** 2) + pt.floor(x[2]) * x[0],
    "largest": lambda x: pt.max(pt.outer(x, x**2), axis=1).sum() + pt.max(x) ** 2,
    "log sums": lambda x: pt.logsumexp(A * x, axis=1).sum() * x[0] + pt.logaddexp(x[0], x[1] ** 2) ** 2
    + pt.logsumexp(pt.stack([x[2], pt.constant(-np.inf)])),
    "shapes": lambda x: pt.sum(
        pt.join(0, x, A[0], x**2).reshape((3, 3)).T[1:, ::2] * pt.stack([x[0], pt.constant(0.3)])
    ) + pt.sum(pt.alloc(x[1] ** 2, 4) * pt.alloc(x**2, 2, 3)[:, :1].sum()),
    "elements": lambda x: pt.sum(x[np.array([0, 2, 2])] ** 3 * x) + x[-1] ** 3,
    "set": set_and_add,
    "sums": lambda x: pt.sum(pt.cumsum(x**2) * x) + pt.sum(pt.sum(A * x**2, axis=1) ** 2),
    "products of matrices": matrices,
    "solutions": solutions,
    "triangles": triangles,
    "factors": factors,
    "inverses": lambda x: pt.sum(pt.linalg.inv(pt.outer(x, x**2) + 2.0 * pt.eye(3)) ** 3),
    "determinants": lambda x: pt.linalg.det(pt.outer(x, x + 1.0) - pt.eye(3)) ** 2
    + pt.linalg.slogdet(pt.outer(x, x**2) - pt.eye(3))[1] * x[0],
    "of each": lambda x: pt.sum(of_each(pt.outer(x, x + 1.0), PLACES) * of_each(x**2, PLACES)),
    "sorted signs": lambda x: pt.sum(pt.sort((x > 0.25).astype("int64")) * x**2),
    "conditions": lambda x: pt.switch(pt.all(x > -2.0), (x**3).sum(), -np.inf),
}  # fmt: skip


def by_pytensor(out, theta):
    """Value, gradient and Hessian at one point."""
    with without_c():
        [out] = with_branches([out])
        grad = pt.grad(out, theta)
        rows = [pt.grad(grad[i], theta, disconnected_inputs="ignore") for i in range(3)]
        return pytensor.function([theta], [out, grad, pt.stack(rows)], mode=quick_mode(), on_unused_input="ignore")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_are_those_of_pytensor(name):
    theta = pt.vector("theta", shape=(3,))
    with without_c():
        [out] = graph.simplify([FUNCTIONS[name](theta)])
        jets = Jets(*forward_mode(out, theta), lambda i, o: pytensor.function(i, o, mode=quick_mode()))
    reference = by_pytensor(FUNCTIONS[name](theta), theta)
    (logp,), (value, grad), (*_, hessians) = (jets(X, order) for order in range(3))
    for k, point in enumerate(X):
        expected, slope, curvature = reference(point)
        np.testing.assert_allclose([logp[k], value[k]], [expected, expected], rtol=1e-12)
        np.testing.assert_allclose(grad[k], slope, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(hessians[k], curvature, rtol=1e-9, atol=1e-11)


def test_a_matrix_without_a_factor_says_nothing_of_other_points():
    theta = pt.vector("theta", shape=(3,))
    with without_c():
        [out] = graph.simplify([pt.sum(pt.linalg.cholesky(pt.diag(theta + 2.0)) ** 3)])
        jets = Jets(*forward_mode(out, theta), lambda i, o: pytensor.function(i, o, mode=quick_mode()))
    points = np.array([X[0], [-3.0, 0.0, 0.0], X[1]])
    logp, grad = jets(points, 1)
    hessians = jets(points, 2)[2]
    np.testing.assert_allclose(logp[::2], np.sum((X[:2] + 2.0) ** 1.5, axis=1))
    np.testing.assert_allclose(grad[::2], 1.5 * np.sqrt(X[:2] + 2.0))
    np.testing.assert_allclose(hessians[0], np.diag(0.75 / np.sqrt(X[0] + 2.0)), atol=1e-14)
    assert np.isnan([logp[1], *grad[1], *hessians[1].ravel()]).all()


def volatility():
    """A loop whose state has two lags, beside what is collected."""
    y = np.array([0.3, -1.1, 0.4, 1.9, -0.2, 0.8])
    with pm.Model() as model:
        x = pm.Normal("x", shape=3)
        states, squares = pytensor.scan(
            lambda e, before, last, s: (s[0] * before + pt.tanh(s[1] * last) + e, e**2 * pt.exp(last)),
            sequences=[y], outputs_info=[{"initial": pt.exp(x[:2]), "taps": [-2, -1]}, None], non_sequences=[x],
            return_updates=False,
        )  # fmt: skip
        pm.Potential("y", -0.5 * pt.sum((y - states) ** 2) - 0.1 * squares.sum())
    return model


@pytest.mark.parametrize("backend", ["quick", "auto"])
def test_loops_in_few_dimensions_need_no_gradient_by_pytensor(backend, monkeypatch):
    density = LogDensity(volatility(), backend)
    monkeypatch.setattr(graph, "gradient", None)
    logp, grad = density.logp_grad(X)
    hessians = density.hessian(X)
    monkeypatch.undo()
    monkeypatch.setattr(flat, "MOST_DIMENSIONS", 2)
    backwards = LogDensity(volatility(), backend)
    assert backwards.graphs.forward is None
    np.testing.assert_allclose(logp, backwards.logp(X), rtol=1e-12)
    np.testing.assert_allclose(grad, backwards.grad(X), rtol=1e-11)
    np.testing.assert_allclose(hessians, backwards.hessian(X), rtol=1e-10, atol=1e-12)
    mean = density.mean_hessian(X)
    np.testing.assert_allclose(mean.diagonal(), np.diag(hessians.mean(axis=0)), rtol=1e-12)
    monkeypatch.undo()
    again = cloudpickle.loads(cloudpickle.dumps(density))
    np.testing.assert_array_equal(again.hessian(X), hessians)


def test_a_recursion_in_halves_is_carried_along_and_not_lifted():
    """A hidden Markov model as a tree of sums: lifted, each step has a copy of what all others read."""
    y, moves, at = np.random.default_rng(1).normal(size=129), np.array([[0.8, 0.2], [0.3, 0.7]]), np.array([-0.8, 1.1])
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 2.0, shape=2)
        emitted = -0.5 * (pt.constant(y)[:, None] - mu) ** 2
        steps, n = np.log(moves) + emitted[1:, None, :], 128
        while n > 1:
            pairs, n = steps[::2, :, :, None] + steps[1::2, None, :, :], n // 2
            steps = pt.concatenate([pt.logsumexp(part, axis=2) for part in (pairs[: n // 2], pairs[n // 2 :])])
        pm.Potential("outcomes", pt.logsumexp(emitted[0][:, None] + np.log(0.5) + steps[0]))
    density = LogDensity(model)
    assert density.graphs.forward is not None
    assert density.by_rows.found is None or density.by_rows.found.terms.rest
    each = np.exp(-0.5 * (y[:, None] - at) ** 2)
    forward = 0.5 * each[0]
    for row in each[1:]:
        forward = (forward @ moves) * row
    prior = -0.125 * at @ at - np.log(8.0 * np.pi)
    [logp], [slope] = density.logp_grad(at[None])
    np.testing.assert_allclose(logp, prior + np.log(forward.sum()), rtol=1e-10)
    step = 1e-5 * np.eye(2)
    np.testing.assert_allclose(slope, (density.logp(at + step) - density.logp(at - step)) / 2e-5, rtol=1e-6)
