"""Rewrites on the way from PyMC's graph to ours: long chains indexed by small integers, solves for many groups, and
what is evaluated twice or can't fail."""

import logging

import hierarchical
import numpy as np
import pymc as pm
import pytensor
import pytensor.sparse
import pytensor.tensor as pt
import pytest

from models import Reference
from numpy.testing import assert_allclose
from pytensor.compile.mode import Mode
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.linalg.solvers.core import SolveBase
from pytensor.tensor.math import All
from scipy import linalg, sparse, special, stats

from pymc_ngvi import LogDensity
from pymc_ngvi.density import without_c
from pymc_ngvi.graphs import rewrites

pytestmark = pytest.mark.usefixtures("_anew")

N = 300
SIGMA = 0.5


def chain(kind):
    """Return a chain of known step size seen with noise, and the coefficient of the state before in the next one."""
    y = np.sin(np.arange(N) / 20.0)
    with pm.Model() as model:
        level = pm.Normal("level", 0.0, 2.0)
        start = pm.Normal.dist(0.0, 3.0)
        if kind == "walk":
            state, rho = pm.GaussianRandomWalk("state", sigma=SIGMA, init_dist=start, steps=N - 1), 1.0
        else:
            rho = 0.8
            state = pm.AR("state", rho=rho, sigma=SIGMA, init_dist=start, steps=N - 1)
        pm.Normal("y", level + state, 1.0, observed=y)
    return model, rho, y


@pytest.mark.parametrize("kind", ["walk", "ar"])
def test_chains_longer_than_an_int8(kind, caplog, rng):
    """Everything is Gaussian: log p is a sum of squares of known linear functions."""
    model, rho, y = chain(kind)
    with pytensor.config.change_flags(on_opt_error="warn"), caplog.at_level(logging.WARNING):
        density = LogDensity(model, "quick")
        theta = rng.normal(size=(2, N + 1))
        logp, grad = density.logp_grad(theta)
        hessian = density.hessian(theta[:1])[0]
    assert caplog.text == ""

    maps = np.zeros((2 * N + 1, N + 1))  # from level and state to what is Normal, in units of its sd
    maps[0, 0], maps[1, 1] = 1.0 / 2.0, 1.0 / 3.0
    maps[2 : N + 1, 1:] = (np.eye(N)[1:] - rho * np.eye(N)[:-1]) / SIGMA
    maps[N + 1 :, 0], maps[N + 1 :, 1:] = 1.0, np.eye(N)
    sds, offset = np.r_[2.0, 3.0, np.full(N - 1, SIGMA), np.ones(N)], np.r_[np.zeros(N + 1), y]
    residuals = theta @ maps.T - offset
    np.testing.assert_allclose(logp, (stats.norm.logpdf(residuals) - np.log(sds)).sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(grad, -residuals @ maps, rtol=1e-9, atol=1e-9)
    expected = -maps.T @ maps
    np.testing.assert_allclose(hessian, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(density.pattern.matrix.toarray(), expected != 0.0)


# --- solves -----------------------------------------------------------------------------------------------------------


def solves(nodes):
    """Return the nodes that solve linear systems."""
    return [node for node in nodes if isinstance(getattr(node.op, "core_op", node.op), SolveBase)]


@pytest.fixture
def n_calls(monkeypatch):
    """Count the calls of the function that solves."""
    calls = []
    for kind in SolveBase.__subclasses__():
        perform = kind.perform

        def counted(self, *args, perform=perform):
            calls.append(1)
            return perform(self, *args)

        monkeypatch.setattr(kind, "perform", counted)
    return calls


@pytest.mark.parametrize("likelihood", [pytest.param("gaussian", marks=pytest.mark.slow), "logistic"])
def test_groups_with_one_covariance_share_a_solve(likelihood, n_calls, rng, monkeypatch):
    monkeypatch.setattr(rewrites, "_FEW_UNKNOWNS", 1)  # as if there were many
    model = hierarchical.correlated(n_groups=7, per_group=3, likelihood=likelihood)
    density = LogDensity(model, "quick")
    theta = 0.3 * rng.normal(size=(3, density.n_dim))
    density.logp_grad(theta)
    density.mean_hessian(theta).values()
    functions = [density.functions.made[name] for name in ("logp_grad", "products")]
    for function in functions:
        found = solves(function.maker.fgraph.apply_nodes)
        assert found
        assert all(getattr(node.op, "core_op", node.op).b_ndim == 2 for node in found)
        # All groups are columns of one matrix.
        assert all(node.inputs[1].type.shape[-1] == 7 for node in found)
    # By draw in each of the nodes, and by direction too in those of the product: never by group.
    n_calls.clear()
    density.logp_grad(theta)
    assert len(n_calls) == len(theta) * len(solves(functions[0].maker.fgraph.apply_nodes))

    with without_c():
        reference = Reference(model, density.layout, Mode("py", "fast_compile"))
        expected = [reference(point, direction) for point in theta[:1] for direction in np.eye(density.n_dim)]
    logp, grad = density.logp_grad(theta[:1])
    # A constant of PyMC's is in single precision.
    np.testing.assert_allclose(logp[0], expected[0][0], atol=1e-7)
    np.testing.assert_allclose(grad[0], expected[0][1], rtol=1e-9, atol=1e-10)
    hessian = np.array([product for _, _, product in expected])
    pattern = density.pattern
    at_first = density.mean_hessian(theta[:1]).values()
    np.testing.assert_allclose(at_first, hessian[pattern.rows, pattern.cols], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(density.hessian(theta[:1])[0], hessian, rtol=1e-9, atol=1e-9)
    # No entry of the pattern is there for nothing: each group touches itself and the globals that it depends on.
    np.testing.assert_array_equal(pattern.matrix.toarray(), np.abs(hessian) > 1e-12)


def test_other_operations_on_batches_stay_as_they_are(caplog):
    matrices, vectors = pt.tensor3("a", shape=(7, 4, 4)), pt.matrix("b", shape=(7, 4))
    factors = pt.linalg.cholesky(matrices)
    solved = pt.linalg.solve_triangular(pt.matrix("c", shape=(4, 4)), vectors, lower=True, b_ndim=1)
    fgraph = FunctionGraph(outputs=[factors, solved], clone=False, copy_inputs=False)
    assert rewrites.solve_at_once(fgraph)
    assert fgraph.outputs[0] is factors
    assert not caplog.text


# --- shorter ----------------------------------------------------------------------------------------------------------


def shortened(output):
    """Return a graph after the rewrites that shorten it."""
    fgraph = FunctionGraph(outputs=[output], clone=False, copy_inputs=False)
    rewrites.shorter.rewrite(fgraph)
    return fgraph.outputs[0]


def test_a_bernoulli_likelihood_has_no_checks():
    y = np.array([0, 1, 1, 0])
    with pm.Model() as model:
        x = pm.Normal("x", 0.1, 1.3, shape=4)
        pm.Bernoulli("y", logit_p=x, observed=y)
    density = LogDensity(model, "quick")
    theta = np.array([[0.3, -2.0, 800.0, -800.0], [0.0, 3.0, -1.0, 900.0]])
    expected = stats.norm.logpdf(theta, 0.1, 1.3) - np.where(y, np.logaddexp(0, -theta), np.logaddexp(0, theta))
    for logp, grad in (density.logp_grad(theta), density._batch("logp_grad", theta)):  # by rows, and whole
        np.testing.assert_allclose(logp, expected.sum(axis=1), rtol=1e-7)
        np.testing.assert_allclose(grad, (0.1 - theta) / 1.3**2 + y - special.expit(theta), rtol=1e-6, atol=1e-12)
    outputs = density.functions.made["logp_grad"].maker.fgraph.outputs
    assert not any(isinstance(v.owner.op, All) for v in ancestors(outputs) if v.owner is not None)


X = pt.vector("x")


@pytest.mark.parametrize(
    "check",
    [
        X >= 0.0,
        pt.exp(X) >= 0.1,
        pt.exp(X) <= 0.0,
        pt.exp(X) <= 1.0,
        pt.exp(X) < 0.0,
        pt.eq(pt.exp(X), 0.0),
        pt.sigmoid(X) <= 0.5,
        pt.sigmoid(X) < 1.0,
        pt.sigmoid(X) >= 1.0,
        pt.softplus(X) <= 1.0,
        pt.tanh(X) <= 1.0,
        pt.erfc(X) <= 1.5,
        1 - pt.exp(X) >= 0.0,
        2 * pt.erf(X) >= -1.0,
        pt.constant([0.0, 1.0]) * pt.exp(X) > 0.0,
        pt.constant([0.0, 1.0]) > 0.0,
    ],
)
def test_checks_that_can_fail_stay(check):
    output = pt.all(check)
    assert shortened(output) is output


@pytest.mark.parametrize(
    "check",
    [
        pt.exp(X) > 0.0,
        pt.sigmoid(X) <= 1.0,
        0.5 * pt.erfc(-X / np.sqrt(2)) <= 1.0,
        1 - pt.exp(-pt.exp(X)) >= 0.0,
        1 - pt.exp(-pt.exp(X)) <= 1.0,
        pt.exp(-pt.softplus(X)) < 2.0,
    ],
)
def test_checks_that_hold_whatever_theta_is_go(check):
    assert shortened(pt.all(check)).data


def test_a_complementary_log_log_link_keeps_its_digits():
    """-exp(x) of a 0, and log(1 - exp(-exp(x))) of a 1, from where probabilities are rounded to 0 to where to 1."""
    with pm.Model() as model:
        x = pm.Flat("x", shape=2)
        pm.Bernoulli("y", 1 - pm.math.exp(-pm.math.exp(x)), observed=[0, 1])
    density = LogDensity(model, "quick")
    theta = np.array([[-40.0, -30.0], [0.3, 0.2], [4.5, 6.0]])
    expected = -np.exp(theta[:, 0]) + np.log(-np.expm1(-np.exp(theta[:, 1])))
    for logp in (density.logp(theta), density.by_rows.logp(theta)):
        np.testing.assert_allclose(logp, expected, rtol=1e-9)


def test_a_parameter_out_of_its_range_is_still_seen():
    """The sd of the first is exp(x), that of the second x itself."""
    with pm.Model() as model:
        x = pm.Normal("x", 0.1, 1.3)
        pm.Normal("a", 0.0, pt.exp(x), observed=[0.4])
        pm.Normal("b", 0.0, x, observed=[0.4])
    density = LogDensity(model, "quick")
    values = density.logp(np.array([[0.5], [-0.5], [np.nan]]))
    assert np.isfinite(values[0])
    assert values[1] == -np.inf
    assert not np.isfinite(values[2])


# --- sparse matrices ---


def test_products_with_sparse_matrices_are_taken_for_all_draws(rng):
    x, w = (
        sparse.random(9, 4, 0.4, format="csr", random_state=1),
        sparse.random(4, 3, 0.5, format="csc", random_state=2),
    )

    def density(left, right):
        with pm.Model() as model:
            b = pm.Normal("b", shape=(4, 2))
            pm.Potential("p", -pt.exp(left(b)).sum() - pt.exp(right(b.T)).sum())
        return LogDensity(model)

    made = density(lambda b: pytensor.sparse.structured_dot(x, b), lambda b: pytensor.sparse.dot(b, w))
    dense = density(lambda b: pt.dot(x.toarray(), b), lambda b: pt.dot(b, w.toarray()))
    theta = rng.normal(size=(3, 8))
    for found, expected in zip(made.logp_grad(theta), dense.logp_grad(theta), strict=True):
        assert_allclose(found, expected, rtol=1e-12)
    assert_allclose(made.hessian(theta), dense.hessian(theta), rtol=1e-12, atol=1e-13)
    assert made.rows is not None


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("unit_diagonal", [True, False])
@pytest.mark.parametrize("n", [2, 5])
def test_triangular_systems_by_their_elements(lower, unit_diagonal, n):
    rng = np.random.default_rng(n)
    a, b = rng.normal(size=(n, n)) + 3.0 * np.eye(n), rng.normal(size=(7, n))
    matrix, vectors = pt.matrix("a", shape=(n, n)), pt.matrix("b", shape=(None, n))
    solved = pt.linalg.solve_triangular(matrix, vectors, lower=lower, unit_diagonal=unit_diagonal, b_ndim=1)
    fgraph = rewrites.copy_of([solved])
    assert rewrites.solve_at_once(fgraph)
    [found] = fgraph.outputs
    assert bool(solves(fgraph.apply_nodes)) == (n > 2)
    expected = linalg.solve_triangular(a, b.T, lower=lower, unit_diagonal=unit_diagonal).T
    assert_allclose(found.eval({matrix: a, vectors: b}), expected, rtol=1e-12)
