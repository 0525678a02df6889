"""Loops (`pytensor.scan`): one loop for all draws and directions, and the same numbers as one draw at a time."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from pytensor.graph.traversal import ancestors
from pytensor.scan.op import Scan
from pytensor.scan.utils import until
from pytensor.tensor.blockwise import Blockwise

from pymc_ngvi import LogDensity
from pymc_ngvi.density import flat
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import quick_mode, without_c
from pymc_ngvi.graphs.loops import vectorised

Y = np.array([0.3, -1.1, 0.4, 1.9, -0.2, 0.8])
THETA = np.array([[0.3, -0.2, 0.1], [-1.0, 0.4, 0.9], [0.0, 1.3, -0.6], [0.7, 0.1, 0.2]])


def scan(step, **options):
    return pytensor.scan(step, return_updates=False, **options)


def garch():
    """A state with one lag; sequences that depend on theta, and those that do not; the state also enters squared."""
    with pm.Model() as model:
        x = pm.Normal("x", shape=3)
        start, slope, feedback = pt.exp(x[0]), pt.sigmoid(x[1]), pt.sigmoid(x[2])
        variance = scan(
            lambda e, y, v, s, f: 0.1 + s * (e + 0.1 * y) ** 2 + f * v + 0.01 * v**2,
            sequences=[pt.as_tensor(Y[:-1]) - x[0], pt.as_tensor(Y[1:])],
            outputs_info=[start], non_sequences=[slope, feedback],
        )  # fmt: skip
        pm.Normal("y", 0.0, pt.sqrt(variance), observed=Y[1:])
    return model


def two_lags():
    """A state with two lags that starts the same everywhere, and an output that is no state, of vectors."""
    with pm.Model() as model:
        x = pm.Normal("x", shape=3)
        _, means = scan(
            lambda y, u, w, b: (b[0] * u + pt.tanh(b[1] * w) + y, pt.exp(b) * u * w),
            sequences=[Y], outputs_info=[{"initial": pt.as_tensor([0.5, -0.5]), "taps": [-2, -1]}, None],
            non_sequences=[x],
        )  # fmt: skip
        pm.Normal("y", means.sum(axis=1), 1.0, observed=Y)
    return model


def filtered():
    """Wrapped graphs (log-sum-exp) inside of the step, a matrix that depends on theta, and the last state alone."""
    with pm.Model() as model:
        x = pm.Normal("x", shape=3)
        moves = pt.log(pt.stack([pt.stack([pt.sigmoid(x[0]), pt.sigmoid(-x[0])]), pt.constant(np.array([0.2, 0.8]))]))
        emitted = -0.5 * (Y[:, None] - x[1:]) ** 2
        alpha = scan(
            lambda e, a, m: pt.logsumexp(a[:, None] + m, axis=0) + e,
            sequences=[emitted[1:]], outputs_info=[emitted[0]], non_sequences=[moves],
        )  # fmt: skip
        pm.Potential("y", pt.logsumexp(alpha[-1]))
    return model


def nested():
    """A loop inside of a loop."""
    with pm.Model() as model:
        x = pm.Normal("x", shape=3)

        def inner(w, u, x):
            return scan(lambda c, v, w: pt.tanh(c * v + w), sequences=[x], outputs_info=[u], non_sequences=[w])[-1]

        path = scan(inner, sequences=[Y], outputs_info=[pt.zeros(())], non_sequences=[x])
        pm.Normal("y", path, 0.5, observed=Y)
    return model


def emitted_in_the_step():
    """Densities of distributions inside of the step; what is the same at all steps, and what depends on their data."""
    with pm.Model() as model:
        x = pm.Normal("x", shape=3)

        def step(y, a, x):
            moves = pt.log(pm.math.softmax(pt.stack([x[:2], x[1:]]), axis=1))
            return pt.logsumexp(a[:, None] + moves, axis=0) + pm.logp(pm.Normal.dist(x[1:], x[0]), y)

        alpha = scan(step, sequences=[Y], outputs_info=[pt.zeros(2, dtype="float64")], non_sequences=[x])
        pm.Potential("y", pt.logsumexp(alpha[-1]))
    return model


def kalman():
    """A Kalman filter of a local linear trend, by matrices."""
    move, see = np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([[1.0, 0.0]])
    with pm.Model() as model:
        x = pm.Normal("x", shape=3)

        def step(y, a, p, moved, seen):
            a, p = pt.dot(move, a), pt.dot(pt.dot(move, p), move.T) + moved
            f = pt.dot(pt.dot(see, p), see.T) + seen
            root, gain = pt.linalg.cholesky(f), pt.linalg.solve(f, pt.dot(see, p)).T
            error = pt.linalg.solve_triangular(root, y - pt.dot(see, a), lower=True)
            fit = -0.5 * (error**2).sum() - pt.log(pt.diag(root)).sum()
            return a + pt.dot(gain, y - pt.dot(see, a)), p - pt.dot(pt.dot(gain, see), p), fit

        *_, fits = scan(
            step, sequences=[Y[:, None]],
            outputs_info=[pt.stack([x[0], pt.constant(0.1)]), pt.constant(4.0 * np.eye(2)), None],
            non_sequences=[pt.diag(pt.exp(x[:2])), pt.exp(x[2]) * np.eye(1)],
        )  # fmt: skip
        pm.Potential("y", fits.sum())
    return model


MODELS = {
    "garch": garch, "two_lags": two_lags, "filtered": filtered, "nested": nested, "kalman": kalman,
    "emitted": emitted_in_the_step,
}  # fmt: skip
SLOW = ("filtered", "nested", "kalman", "emitted")


def compiled(inputs, outputs):
    with without_c():
        return pytensor.function(inputs, outputs, mode=quick_mode(), on_unused_input="ignore")


def per_entry(outputs):
    """Loops that are run again for each entry of a batch."""
    nodes = {v.owner for v in ancestors(outputs) if v.owner is not None}
    return [n for n in nodes if isinstance(n.op, Blockwise) and isinstance(n.op.core_op, Scan)]


def loops(outputs):
    return [v.owner for v in ancestors(outputs) if v.owner is not None and isinstance(v.owner.op, Scan)]


@pytest.fixture(params=[0, 20], ids=["backwards", "forwards"])
def _either_way(request, monkeypatch):
    """Derivatives by PyTensor, and those that are carried along."""
    monkeypatch.setattr(flat, "MOST_DIMENSIONS", request.param)


@pytest.fixture
def _backwards(monkeypatch):
    monkeypatch.setattr(flat, "MOST_DIMENSIONS", 0)


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_one_draw_at_a_time_and_values_those_of_the_model(name):
    model = MODELS[name]()
    density = LogDensity(model, "quick")
    one = compiled([density.graphs.theta], density.graphs.logp_grad)  # one draw at a time
    logp, grad = density.logp_grad(THETA)
    for i, theta in enumerate(THETA):
        expected_logp, expected_grad = one(theta)
        np.testing.assert_allclose(logp[i], expected_logp, rtol=1e-12)
        np.testing.assert_allclose(grad[i], expected_grad, rtol=1e-10, atol=1e-12)
    with without_c():
        of_model = compiled(model.value_vars, model.logp())
    np.testing.assert_allclose(logp[[0, 3]], [of_model(theta) for theta in THETA[[0, 3]]], rtol=1e-8)


@pytest.mark.usefixtures("_either_way")
def test_outside_of_the_support_of_a_distribution_in_a_step_nothing_is_raised():
    density = LogDensity(emitted_in_the_step(), "quick")
    logp, _ = density.logp_grad(THETA)
    assert logp.tolist() == [logp[0], -np.inf, -np.inf, logp[3]]  # standard deviations of -1 and 0
    assert np.isfinite(logp[[0, 3]]).all()


@pytest.mark.usefixtures("_backwards")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in MODELS])
def test_hessians_are_differences_of_gradients(name):
    density = LogDensity(MODELS[name](), "quick")
    one = compiled([density.graphs.theta], density.graphs.logp_grad)
    directions = np.random.default_rng(1).normal(size=(2, 3))
    step = 1e-5
    for theta in THETA[:2]:
        found = density.mean_hessian(theta[None]).products(directions)
        moved = [(one(theta + step * d)[1] - one(theta - step * d)[1]) / (2 * step) for d in directions]
        np.testing.assert_allclose(found, moved, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_no_loop_is_run_for_each_draw_or_direction(name):
    density = LogDensity(MODELS[name](), "quick")
    theta = density.graphs.theta
    _, batched = graph.over_draws(density.graphs.logp_grad, theta)
    assert loops(batched), "no loop left: the test sees nothing"
    assert not per_entry(batched)
    direction, product = density.second._product
    *_, products = graph.over_draws_and_directions(product, theta, direction)
    assert loops([products])
    assert not per_entry([products])


def test_a_loop_over_two_axes_is_that_of_each_pair():
    x, w = pt.vector("x", shape=(3,)), pt.vector("w", shape=(3,))
    path = scan(lambda a, s, c: pt.tanh(s * c + a), sequences=[x], outputs_info=[w[0]], non_sequences=[w[1:].sum()])
    xs, ws = pt.tensor("xs", shape=(None, 1, 3)), pt.tensor("ws", shape=(1, None, 3))
    [path] = graph.simplify([path])
    [batched] = vectorised([path], {x: xs, w: ws})
    assert not per_entry([batched])
    a, b = np.random.default_rng(2).normal(size=(2, 4, 3))
    b = b[:2]
    found = compiled([xs, ws], batched)(a[:, None], b[None])
    assert found.shape == (4, 2, 3)
    one = compiled([x, w], path)
    np.testing.assert_allclose(found, [[one(i, j) for j in b] for i in a], rtol=1e-12)


def test_a_loop_whose_state_says_when_it_ends_is_left_alone():
    x = pt.vector("x", shape=(2,))
    path = scan(lambda s, x: (s + x[0] ** 2, until(s > x[1])), outputs_info=[x[0]], non_sequences=[x], n_steps=9)
    [batched] = vectorised(graph.simplify([path[-1]]), {x: pt.matrix("xs", shape=(None, 2))})
    assert per_entry([batched])


def test_an_output_that_differs_nowhere_is_repeated():
    x = pt.vector("x", shape=(2,))
    both = scan(lambda y, s, t: (s * x[0], t + y), sequences=[Y], outputs_info=[x[1], pt.zeros(())], non_sequences=[])
    xs = pt.matrix("xs", shape=(None, 2))
    [batched] = vectorised(graph.simplify([both[0] + both[1]]), {x: xs})
    draws = np.array([[1.1, 4.0], [0.9, 5.0]])
    expected = [d[1] * d[0] ** np.arange(1, 7) + np.cumsum(Y) for d in draws]
    np.testing.assert_allclose(compiled([xs], batched)(draws), expected, rtol=1e-12)
