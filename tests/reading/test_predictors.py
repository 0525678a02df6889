"""Linear predictors found in graphs, and Hessians by them, against those from all coordinates."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from numpy.testing import assert_allclose
from scipy import sparse

from pymc_ngvi import LogDensity
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sparsity import Dependence
from pymc_ngvi.rows.linear_map import MatrixPlan
from pymc_ngvi.rows.row_hessian import SecondDerivatives, by_predictors

N, GROUPS = 120, 12
RNG = np.random.default_rng(20)
X = RNG.normal(size=(N, 5))
FIRST, SECOND = RNG.integers(GROUPS, size=N), RNG.integers(9, size=N)
COUNTS = RNG.poisson(2.0, size=N)
BINARY = RNG.integers(2, size=N)


def logistic():
    beta = pm.Normal("beta", 0.0, 2.0, shape=5)
    pm.Bernoulli("y", logit_p=pm.Normal("a") + pm.math.dot(X, beta), observed=BINARY)


def unknown_scale():
    beta = pm.Normal("beta", 0.0, 2.0, shape=5)
    pm.StudentT("y", nu=4.0, mu=pm.math.dot(X, beta), sigma=pm.HalfNormal("sigma"), observed=X[:, 0])


def crossed():
    u = pm.Normal("u", 0.0, pm.HalfNormal("s_u"), shape=GROUPS)
    v = pm.Normal("v", 0.0, pm.HalfNormal("s_v"), shape=9)
    pm.Bernoulli("y", logit_p=pm.math.dot(X, pm.Normal("beta", shape=5)) + u[FIRST] + v[SECOND], observed=BINARY)


def many_groups():
    u = pm.Normal("u", 0.0, pm.HalfNormal("s"), shape=60)
    pm.Poisson(
        "y",
        pm.math.exp(0.3 * pm.math.dot(X[:, :2], pm.Normal("beta", shape=2)) + u[np.arange(N) // 2]),
        observed=COUNTS,
    )


def noncentred():
    z, s = pm.Normal("z", shape=GROUPS), pm.HalfNormal("s")
    pm.Poisson("y", pm.math.exp(0.3 * pm.math.dot(X, pm.Normal("beta", shape=5)) + (z * s)[FIRST]), observed=COUNTS)


def zero_inflated():
    mu = pm.math.exp(0.3 * pm.math.dot(X, pm.Normal("beta", shape=5)))
    psi = pm.math.sigmoid(pm.math.dot(X, pm.Normal("gamma", shape=5)))
    pm.ZeroInflatedPoisson("y", psi, mu, observed=COUNTS)


def ordered():
    cuts = pm.Normal("cuts", [-1.0, 1.0], 1.0, transform=pm.distributions.transforms.ordered, initval=[-1.0, 1.0])
    eta = pm.math.dot(X, pm.Normal("beta", shape=5))
    pm.OrderedLogistic("y", eta, cuts, observed=COUNTS.clip(0, 2))


def mixture_of_rows():
    first, second = pm.math.dot(X, pm.Normal("b", shape=5)), pm.math.dot(X, pm.Normal("c", shape=5))
    parts = [pm.Normal.dist(first, 1.0), pm.Normal.dist(second, 2.0)]
    pm.Mixture("y", pm.Dirichlet("w", np.ones(2)), parts, observed=X[:, 0])


def random_walk():
    steps = pm.Normal("steps", 0.0, 0.1, shape=N)
    pm.Poisson("y", pm.math.exp(pt.cumsum(steps)), observed=COUNTS)


MODELS = [
    logistic,
    unknown_scale,
    crossed,
    noncentred,
    many_groups,
    zero_inflated,
    ordered,
    mixture_of_rows,
    random_walk,
]


def density_of(make):
    with pm.Model() as model:
        make()
    return LogDensity(model)


def matrix_at(density, theta):
    rows = density.rows
    derivatives = [rows.engine.derivatives(part, SecondDerivatives) for part in rows.terms.rows]
    return by_predictors(rows.linear_map, derivatives, theta)


def draws_of(density, n=3, seed=1):
    return density.initial_point() + 0.3 * np.random.default_rng(seed).normal(size=(n, density.n_dim))


@pytest.mark.parametrize("make", MODELS)
def test_hessians_are_those_from_all_coordinates(make):
    density = density_of(make)
    theta = draws_of(density)
    expected = density.second.mean_products(theta, np.eye(density.n_dim))
    matrix, linear = matrix_at(density, theta), density.rows.linear_map
    scale = np.abs(expected).max()
    assert_allclose(linear.quadratic(matrix), expected, atol=1e-12 * scale)
    assert_allclose(linear.quadratic_diagonal(matrix), np.diag(expected), atol=1e-12 * scale)
    vectors = np.random.default_rng(2).normal(size=(4, density.n_dim))
    assert_allclose(linear.quadratic_times(matrix, vectors), vectors @ expected, atol=1e-11 * scale)
    pattern = Pattern.of(np.random.default_rng(3).random((density.n_dim,) * 2) < 0.3)
    entries = linear.quadratic_entries(matrix, pattern)
    assert_allclose(entries, expected[pattern.rows, pattern.cols], atol=1e-12 * scale)


@pytest.mark.parametrize("share", [0.05, 0.6])
def test_a_linear_map_has_the_matrix_of_its_function(share):
    rng = np.random.default_rng(4)
    matrix = rng.normal(size=(40, 15)) * (rng.random((40, 15)) < share)
    matrix[:, 3], matrix[:, 4] = rng.normal(size=40), 0.0
    sets = sparse.csr_array(np.vstack([np.zeros(15), matrix]) != 0)
    made = MatrixPlan.of(Dependence(sets, np.arange(1, 41)), 15).matrix(lambda theta: 7.0 + theta @ matrix.T)
    theta = rng.normal(size=(5, 15))
    assert_allclose(made(theta), 7.0 + theta @ matrix.T, atol=1e-13)
    eta = rng.normal(size=(2, 40))
    assert_allclose(made.transposed_times(eta), eta @ matrix, atol=1e-13)
    assert 3 in made.columns


def test_other_data_give_another_hessian():
    with pm.Model(coords={"row": np.arange(N)}) as model:
        x, y = pm.Data("x", X, dims=("row", "k")), pm.Data("y_", BINARY, dims="row")
        pm.Bernoulli("y", logit_p=pm.math.dot(x, pm.Normal("beta", shape=5)) + pm.Normal("a"), observed=y)
    density = LogDensity(model)
    theta = draws_of(density)
    matrix_at(density, theta)
    with model:
        pm.set_data({"x": 2.0 * X[::-1], "y_": 1 - BINARY})
    again = density.again()
    expected, found = again.second.mean_products(theta, np.eye(6)), matrix_at(again, theta)
    assert_allclose(again.rows.linear_map.quadratic(found), expected, atol=1e-12 * np.abs(expected).max())


def test_many_draws_are_evaluated_in_parts(monkeypatch):
    density = density_of(crossed)
    theta = draws_of(density, 7)
    whole = matrix_at(density, theta)
    monkeypatch.setattr("pymc_ngvi.rows.row_hessian.AT_ONCE", 2 * len(density.rows.linear_map.offset))
    assert_allclose(matrix_at(density, theta).toarray(), whole.toarray(), rtol=1e-12)
