"""The sparsity pattern of the Hessian of log p: no entry of dense Hessians may be missing, and few may be too many."""

import models
import numpy as np
import pymc as pm
import pytensor
import pytensor.sparse
import pytensor.tensor as pt
import pytest
import scipy.sparse

from pytensor.compile.mode import Mode

from pymc_ngvi import LogDensity
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.reading.predictors import PatternSearch

RNG = np.random.default_rng(7)
GROUP = np.repeat(np.arange(4), 5)
ITEM = np.tile(np.arange(5), 4)
X = RNG.normal(size=20)
BINARY = RNG.integers(0, 2, 20)
COUNT = RNG.poisson(3.0, 20)
REAL = RNG.normal(size=20)
ADJACENCY = np.array([[0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [0, 0, 1, 0, 1], [0, 0, 0, 1, 0]])


def intercepts_centred():
    b = pm.Normal("b", pm.Normal("mu"), pm.HalfNormal("sd"), shape=4)
    pm.Bernoulli("y", logit_p=b[GROUP] + pm.Normal("slope") * X, observed=BINARY)


def _cholesky():
    return pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=pm.Exponential.dist(1.0), compute_corr=True)[0]


def correlated_centred():
    b = pm.MvNormal("b", mu=pm.Normal("mu", shape=2), chol=_cholesky(), shape=(4, 2))
    pm.Bernoulli("y", logit_p=b[GROUP, 0] + b[GROUP, 1] * X, observed=BINARY)


def crossed():
    person = pm.Normal("person", 0.0, pm.HalfNormal("sd_person"), shape=4)
    item = pm.Normal("item", 0.0, pm.HalfNormal("sd_item"), shape=5)
    kept = slice(0, 20, 3)  # not every person meets every item
    pm.Bernoulli("y", logit_p=person[GROUP[kept]] - item[ITEM[kept]], observed=BINARY[kept])


def two_parameter_items():
    ability, difficulty = pm.Normal("ability", shape=4), pm.Normal("difficulty", shape=5)
    discrimination = pm.LogNormal("discrimination", 0.0, pm.HalfNormal("sd"), shape=5)
    kept = slice(0, 20, 3)
    g, i = GROUP[kept], ITEM[kept]
    pm.Bernoulli("y", logit_p=discrimination[i] * (ability[g] - difficulty[i]), observed=BINARY[kept])


def nested():
    region = pm.Normal("region", 0.0, pm.HalfNormal("sd_region"), shape=2)
    town = pm.Normal("town", region[[0, 0, 1, 1]], pm.HalfNormal("sd_town"), shape=4)
    pm.Poisson("y", pt.exp(town[GROUP]), observed=COUNT)


def random_walk():
    level = pm.GaussianRandomWalk("level", sigma=pm.HalfNormal("sd"), init_dist=pm.Normal.dist(), shape=20)
    pm.Poisson("y", pt.exp(level), observed=COUNT)


def autoregressive():
    level = pm.AR("level", rho=pm.Normal("rho", shape=2), sigma=1.1, init_dist=pm.Normal.dist(shape=2), shape=20)
    pm.Poisson("y", pt.exp(level), observed=COUNT)


def intrinsic_spatial():
    spatial = pm.ICAR("spatial", W=ADJACENCY)
    pm.Poisson("y", pt.exp(pm.HalfNormal("sd") * spatial[ITEM]), observed=COUNT)


def spatial():
    where = pm.CAR("where", np.zeros(5), ADJACENCY, alpha=pm.Beta("alpha", 2.0, 2.0), tau=pm.HalfNormal("tau"))
    pm.Poisson("y", pt.exp(where[ITEM]), observed=COUNT)


def known_covariance():
    cov = np.kron(np.eye(3), [[1.0, 0.5], [0.5, 1.0]])
    b = pm.MvNormal("b", mu=np.zeros(6), cov=cov)
    pm.Poisson("y", pt.exp(b[GROUP] + b[5]), observed=COUNT)


def ordered_logit():
    ordered = pm.distributions.transforms.ordered
    cut = pm.Normal("cut", 0.0, 3.0, shape=3, transform=ordered, initval=[-1.0, 0.0, 1.0])
    pm.OrderedLogistic("y", eta=pm.Normal("b", shape=4)[GROUP], cutpoints=cut, observed=COUNT % 4, compute_p=False)


def multinomial_logit():
    weights = pm.Normal("weights", shape=(2, 3))
    b = pm.Normal("b", 0.0, pm.HalfNormal("sd"), shape=(4, 3))
    pm.Categorical("y", logit_p=np.stack([X, REAL], 1) @ weights + b[GROUP], observed=COUNT % 3)


def mixture():
    b = pm.Normal("b", 0.0, pm.HalfNormal("sd"), shape=4)
    two = [pm.Normal.dist(b[GROUP], 1.1), pm.Normal.dist(b[GROUP] + pm.Normal("shift"), 2.1)]
    pm.Mixture("y", w=pm.Dirichlet("w", np.ones(2)), comp_dists=two, observed=REAL)


def dummies():
    design = pm.Data("design", np.eye(4)[GROUP])
    pm.Bernoulli("y", logit_p=design @ pm.Normal("b", shape=4) + pm.Normal("a", shape=5)[ITEM], observed=BINARY)


#: True where the pattern should be exact.
MODELS = {
    intercepts_centred: True,
    correlated_centred: True,
    crossed: True,
    two_parameter_items: True,
    nested: True,
    random_walk: True,
    autoregressive: True,
    intrinsic_spatial: True,
    spatial: True,
    known_covariance: True,
    ordered_logit: True,
    multinomial_logit: True,
    mixture: True,
    dummies: True,
}


def _density(make):
    with pm.Model() as model:
        make()
    return LogDensity(model, "quick")


def _dense_hessians(grad, theta, points):
    """Evaluate the Hessians without rewriting their graph, which would take most of the time."""
    direction = theta.type()
    with without_c():
        product = graph.inline_inner_graphs([graph.hessian_product(grad, theta, direction)])
        mode = Mode(linker="py", optimizer=None)
        function = pytensor.function([theta, direction], product, mode=mode, on_unused_input="ignore")
    return np.array([[function(point, axis)[0] for axis in np.eye(len(point))] for point in points])


def _nonzeros(hessians):
    size = np.abs(hessians).max(axis=0)
    found = size > 1e-11 * size.max()
    return found | found.T


def _assert_covers(pattern, nonzeros, exact):
    found = pattern.matrix.toarray()
    assert not np.argwhere(nonzeros & ~found).tolist()
    if exact:
        assert not np.argwhere(found & ~nonzeros & ~np.eye(len(found), dtype=bool)).tolist()


@pytest.mark.parametrize(("make", "exact"), MODELS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_pattern_is_that_of_dense_hessians(make, exact, rng):
    density = _density(make)
    found = PatternSearch(density.graphs.logp, density.graphs.theta).run()
    assert found[1] == []
    points = density.initial_point() + 0.3 * rng.normal(size=(2, density.n_dim))
    _assert_covers(found[0], _nonzeros(_dense_hessians(density.graphs.grad, density.graphs.theta, points)), exact)


def test_single_precision_model():
    with pytensor.config.change_flags(floatX="float32"):
        density = _density(intercepts_centred)
    double = _density(intercepts_centred)
    single, double = (PatternSearch(d.graphs.logp, d.graphs.theta).run()[0] for d in (density, double))
    assert np.array_equal(single.matrix.toarray(), double.matrix.toarray())


def test_sparse_adjacency_is_that_of_a_dense_one():
    def model(adjacency):
        where = pm.CAR("where", np.zeros(5), adjacency, alpha=pm.Beta("alpha", 2.0, 2.0), tau=pm.HalfNormal("tau"))
        pm.Poisson("y", pt.exp(where[ITEM]), observed=COUNT)

    dense, sparse = (
        PatternSearch(d.graphs.logp, d.graphs.theta).run()
        for d in (_density(lambda: model(ADJACENCY)), _density(lambda: model(scipy.sparse.csr_matrix(ADJACENCY))))
    )
    assert sparse[1] == []
    assert np.array_equal(sparse[0].matrix.toarray(), dense[0].matrix.toarray())
    assert dense[0].n_entries < 7 * 8 // 2


def test_scan_is_opaque():
    density = LogDensity(models.scan_ar1(6), "quick")
    found = PatternSearch(density.graphs.logp, density.graphs.theta).run()
    assert found[1] == ["Scan"]
    points = density.initial_point() + np.array([[0.3], [0.7]])
    _assert_covers(found[0], _nonzeros(_dense_hessians(density.graphs.grad, density.graphs.theta, points)), exact=False)


# --- graphs by hand ---

THETA = pt.vector("theta", shape=(6,))
HALF = scipy.sparse.csr_matrix(np.array([[1.0, 0, 0], [0, 2.0, 1.0]]))
TRIANGLE = np.array([[2.0, 0, 0, 0], [0.4, 1.0, 0, 0], [0, 0.5, 3.0, 0], [0, 0, 0, 1.5]])


def _matrix(v):
    return v.reshape((2, 3))


def _stack(v):
    return pt.stack([_matrix(v), 2.0 * _matrix(v) + 1.0])


#: Log densities of six coordinates, and whether their pattern should be exact.
GRAPHS = {
    "linear": (lambda v: (v * np.arange(6.0)).sum(), True),
    "factor of a sum": (lambda v: v[0] * (v[1:] ** 2).sum(), True),
    "product of sums": (lambda v: v[:3].sum() * v[2:5].sum(), True),
    "product of three": (lambda v: (v[0] * v[1:3] * v[3:5]).sum(), True),
    "outer product": (lambda v: (v[:2, None] * v[None, 2:5] * np.array([[1.0, 0, 1.0], [0, 1.0, 0]])).sum(), True),
    "quotient": (lambda v: (v[:3] / v[3:]).sum(), True),
    "quotient of a product": (lambda v: (v[:2] * v[2:4] / v[4:]).sum(), True),
    "constant over coordinates": (lambda v: (np.array([1.0, 0.0, 2.0]) / (v[:3] + v[3:])).sum(), True),
    "zeros of a factor": (lambda v: pt.exp(v + np.array([1.0, 0, 0, 1.0, 0, 0]) * v[5]).sum(), True),
    "zero weights": (lambda v: (pt.exp(v[1:] + v[:-1]) * np.array([1.0, 0, 0, 1.0, 0])).sum(), True),
    "known switch": (lambda v: pt.switch([True, False, True], pt.exp(v[:3] + v[5]), v[3:] ** 3).sum(), True),
    "known switch inside": (lambda v: pt.exp(pt.switch([True, False, True], v[:3], v[2:5]) + v[5]).sum(), True),
    "known switch of a constant": (lambda v: pt.exp(pt.switch([True, False, True], v[:3], 0.3) + v[5]).sum(), True),
    "unknown switch of constants": (lambda v: (pt.switch(v[0], 1.3, 2.1) * v[1:] ** 2).sum(), True),
    "unknown switch": (lambda v: pt.switch(v[:3] > v[5], pt.exp(v[:3] + v[4]), v[3:] ** 3).sum(), False),
    "dot": (lambda v: pt.exp(pt.dot(np.array([[1.0, 1.0, 0], [0, 0, 1.0]]), v[:3]) + v[4:]).sum(), True),
    "dot from the right": (lambda v: pt.exp(pt.dot(_matrix(v), np.array([[1.0, 0], [1.0, 0], [0, 1.0]]))).sum(), True),
    "linear dot": (lambda v: (pt.dot(np.array([[1.0, 1.0, 0], [0, 0, 1.0]]), v[:3] * v[3:]) * [1.0, 0]).sum(), True),
    "linear dot from the right": (
        lambda v: (pt.dot(_matrix(v) ** 2 * v[0], np.array([[1.0, 0], [1.0, 0], [0, 1.0]])) * [0.0, 1.0]).sum(),
        True,
    ),
    "quadratic form": (lambda v: pt.dot(v, pt.dot(np.diag(np.ones(5), 1), v)), True),
    "bilinear dot": (lambda v: pt.dot(_matrix(v), pt.exp(_matrix(v)).T).sum(), True),
    "batched dot": (lambda v: pt.exp(pt.matmul(_stack(v), np.array([[1.0, 0], [0, 1.0], [0, 1.0]]))).sum(), True),
    "batched dot of two": (lambda v: pt.exp(pt.matmul(_stack(v), _matrix(v).T)).sum(), True),
    "bilinear batched dot": (lambda v: pt.matmul(_stack(v), pt.exp(_matrix(v)).T).sum(), True),
    "sparse dot": (lambda v: pt.exp(pytensor.sparse.dot(HALF, v[:3, None])).sum(), True),
    "linear sparse dot": (lambda v: pytensor.sparse.dot(HALF, (v[:3] * v[3:])[:, None]).sum(), True),
    "solve": (lambda v: pt.exp(pt.linalg.solve_triangular(TRIANGLE, v[:4], lower=True)).sum(), True),
    "solve columns": (lambda v: (pt.linalg.solve(np.eye(2) * v[0] + 0.3, v[1:5].reshape((2, 2))) ** 2).sum(), True),
    "solve for constants": (lambda v: pt.linalg.solve(pt.diag(v[:3]) + v[3], np.eye(3)[:, :2]).sum(), True),
    "solve a batch": (
        lambda v: pt.exp(pt.linalg.solve_triangular(TRIANGLE[None, :3, :3], _stack(v), b_ndim=1, lower=True)).sum(),
        True,
    ),
    "linear solve": (
        lambda v: (pt.linalg.solve_triangular(TRIANGLE, v[:4] ** 2 * v[5], lower=True) * [0, 0, 1.0, 0]).sum(),
        True,
    ),
    "cumulative sum": (lambda v: pt.exp(pt.cumsum(v)[:3]).sum(), True),
    "linear cumulative sum": (lambda v: pt.cumsum(v[1:] * v[:-1])[2], True),
    "cumulative product": (lambda v: pt.cumprod(v)[2] + (v**3).sum(), True),
    "set elements": (lambda v: pt.exp(pt.set_subtensor(v[1:3], v[4:])[:4] * v[3]).sum(), True),
    "add to elements": (lambda v: pt.exp(pt.inc_subtensor(pt.zeros(3)[[0, 0, 2]], v[:3])).sum(), True),
    "linear additions": (lambda v: (pt.inc_subtensor(v[[0, 0, 2]], v[3:] * v[:3]) * [1.0, 0, 0, 0, 0, 0]).sum(), True),
    "additions to what interacts": (lambda v: pt.inc_subtensor((v[:3] * v[3:])[[0, 0]], v[:2] ** 3).sum(), True),
    "join what is computed": (lambda v: pt.exp(pt.concatenate([v[:2] + v[2:4], v[1:2] * v[4]]) + v[5]).sum(), True),
    "split and join": (lambda v: pt.exp(pt.concatenate(pt.split(v, [2, 4], n_splits=2)[::-1])[1:] + v[0]).sum(), True),
    "transpose": (lambda v: (_matrix(v).T.ravel()[1:] * v[:-1]).sum(), True),
    "repeat": (lambda v: pt.exp(pt.repeat(v[:3], 2) + v[5]).sum(), True),
    "diagonal": (lambda v: pt.exp(pt.diag(pt.diag(v[:3]) * v[3]) + v[4]).sum(), True),
    "product over an axis": (lambda v: pt.prod(_matrix(v), axis=1, no_zeros_in_input=True).sum(), True),
    "log sum exp": (lambda v: pt.logsumexp(_matrix(v), axis=1).sum(), True),
    "determinant": (lambda v: pt.linalg.det(pt.diag(v[:3]) + 0.1) + v[4] * v[5], True),
    "Cholesky": (lambda v: pt.log(pt.diag(pt.linalg.cholesky(pt.diag(pt.exp(v[:3])) + 0.1))).sum(), True),
    "whole numbers": (lambda v: (pt.floor(v[0]) * v[1:] ** 2).sum(), True),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graph(name, rng):
    make, exact = GRAPHS[name]
    [logp] = graph.simplify([make(THETA)])
    found = PatternSearch(logp, THETA).run()
    hessians = _dense_hessians(graph.gradient(logp, THETA), THETA, rng.uniform(0.5, 1.5, size=(2, 6)))
    _assert_covers(found[0], _nonzeros(hessians), exact)


def test_kinks_count():
    # The Hessian of |u| is 0 wherever it exists, but its expectation is not.
    found = PatternSearch(abs(THETA[0] - THETA[1]) + THETA[2], THETA).run()[0]
    assert [pair for pair in zip(found.rows, found.cols, strict=True) if pair[0] != pair[1]] == [(1, 0)]


def test_values_that_vary_are_not_used():
    data, index = pytensor.shared(np.zeros(3)), pytensor.shared(np.arange(3), shape=(3,))
    logp = (pt.exp(THETA[:3] + THETA[5]) * data).sum() + (THETA[index] ** 2 * 2.0).sum()
    assert PatternSearch(logp, THETA).run()[0].n_entries == 6
    with_data = PatternSearch(logp, THETA, varying=[data]).run()
    assert with_data[0].n_entries == 6 + 3
    assert with_data[1] == []
    # Any element may be looked up: all interact.
    with_index = PatternSearch(logp, THETA, varying=[index]).run()
    assert with_index[0].n_entries == 21
    assert with_index[1] == ["AdvancedSubtensor"]


def test_lengths_that_vary_are_not_used():
    index = pytensor.shared(np.arange(3))
    found = PatternSearch((THETA[index] ** 2).sum(), THETA, varying=[index]).run()
    assert found == (None, ["AdvancedSubtensor"])


def test_data_count_as_they_are_now():
    group = pytensor.shared(np.array([0, 1, 2]))  # neither value nor length is in the graph
    logp = pt.exp(THETA[group] + THETA[5] + pt.zeros_like(THETA[group])).sum()
    pattern = PatternSearch(logp, THETA).run()[0]
    assert pattern.matrix.toarray()[5].tolist() == [True, True, True, False, False, True]
    group.set_value(np.array([3]))
    pattern = PatternSearch(logp, THETA).run()[0]
    assert pattern.matrix.toarray()[5].tolist() == [False, False, False, True, False, True]
