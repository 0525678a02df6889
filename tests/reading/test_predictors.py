"""Linear predictors found in graphs, and Hessians by them, against those from all coordinates."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from numpy.testing import assert_allclose
from scipy import sparse

import pymc_ngvi

from pymc_ngvi import LogDensity
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sparsity.dependence_sets import Dependence
from pymc_ngvi.density import second_order
from pymc_ngvi.density.by_rows import ByRows
from pymc_ngvi.density.second_order import PredictorHessian, predictor_hessian
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.reading.affine import predictors
from pymc_ngvi.rows.linear_map import LinearMap

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


def correlated():
    """The prior of the effects is no sum over rows."""
    factor, *_ = pm.LKJCholeskyCov("factor", n=3, eta=2.0, sd_dist=pm.HalfNormal.dist(1.0, shape=3))
    u = pm.MvNormal("u", np.zeros(3), chol=factor, shape=(GROUPS, 3))
    pm.Bernoulli("y", logit_p=pm.Normal("a") + pt.sum(X[:, :3] * u[FIRST], axis=-1), observed=BINARY)


MODELS = [
    correlated,
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


def by_predictors(density):
    return PredictorHessian(density.by_rows.parts, density.graphs.simplify, density.functions.compile)


def draws_of(density, n=3, seed=1):
    return density.initial_point() + 0.3 * np.random.default_rng(seed).normal(size=(n, density.n_dim))


@pytest.mark.parametrize("make", MODELS)
def test_hessians_are_those_from_all_coordinates(make):
    density = density_of(make)
    theta = draws_of(density)
    expected = density.mean_hessian(theta).products(np.eye(density.n_dim))
    found = by_predictors(density)
    matrix, linear = found.mean(theta), found.linear_map
    scale = np.abs(expected).max()
    assert_allclose(linear.quadratic(matrix), expected, atol=1e-12 * scale)
    assert_allclose(linear.quadratic_diagonal(matrix), np.diag(expected), atol=1e-12 * scale)
    vectors = np.random.default_rng(2).normal(size=(4, density.n_dim))
    assert_allclose(linear.quadratic_times(matrix, vectors), vectors @ expected, atol=1e-11 * scale)
    pattern = Pattern.of(np.random.default_rng(3).random((density.n_dim,) * 2) < 0.3)
    entries = linear.quadratic_entries(matrix, pattern)
    assert_allclose(entries, expected[pattern.rows, pattern.cols], atol=1e-12 * scale)


def test_rows_take_as_many_products_as_they_have_predictors():
    densities = {make.__name__: density_of(make) for make in (logistic, unknown_scale, noncentred)}
    taken = {name: by_predictors(density).products_of(density.graphs.cost) for name, density in densities.items()}
    assert taken == {"logistic": 1, "unknown_scale": 2, "noncentred": 3}


def test_what_is_no_row_takes_products_of_its_own():
    density = density_of(correlated)
    found = by_predictors(density)
    assert 0 < found._rest.n_colours <= 9 + 3
    taken = found.products_of(density.graphs.cost)
    assert 1 < taken < 1 + found._rest.n_colours  # each takes less time than one of the whole


def test_what_is_affine():
    theta = pt.vector("theta", shape=(6,))
    eta = 2.0 * theta[:3] - theta[3:][::-1] / 4.0 + np.arange(3.0)
    logp = -pt.exp(eta[[0, 1, 1]]).sum() - (theta[5] * theta[0]) + pt.cumsum(theta)[2]
    found = predictors(logp, theta, Facts(logp, theta))
    assert sorted(var.type.shape for var in found) == [(3,), (6,), (6,)]  # eta, theta, its cumulative sums


def test_what_a_condition_alone_reads_is_a_predictor_too():
    theta = pt.vector("theta", shape=(12,))
    logp = pt.switch(theta[11] > 0.0, -((theta[:11] + theta[1:]) ** 4).sum(), -np.inf)
    found = predictors(logp, theta, Facts(logp, theta))
    assert sorted(var.type.shape for var in found) == [(11,), (12,)]


@pytest.mark.parametrize("share", [0.05, 0.6])
def test_a_linear_map_has_the_matrix_of_its_function(share):
    rng = np.random.default_rng(4)
    matrix = rng.normal(size=(40, 15)) * (rng.random((40, 15)) < share)
    matrix[:, 3], matrix[:, 4] = rng.normal(size=40), 0.0
    sets = sparse.csr_array(np.vstack([np.zeros(15), matrix]) != 0)
    made = LinearMap.of(lambda theta: 7.0 + theta @ matrix.T, Dependence(sets, np.arange(1, 41)), 15)
    theta = rng.normal(size=(5, 15))
    assert_allclose(made(theta), 7.0 + theta @ matrix.T, atol=1e-13)
    eta = rng.normal(size=(2, 40))
    assert_allclose(made.transposed_times(eta), eta @ matrix, atol=1e-13)
    assert 3 in made.columns


def test_what_couples_all_coordinates_does_not_come_apart():
    def make():
        pm.Potential("all", -pt.log1p((pm.Normal("x", shape=20) ** 2).sum()))

    density = density_of(make)
    assert density.by_rows.parts.terms.rest
    assert predictor_hessian(density.by_rows.parts, density.graphs.simplify, density.functions.compile) is None


def test_other_data_give_another_hessian():
    with pm.Model(coords={"row": np.arange(N)}) as model:
        x, y = pm.Data("x", X, dims=("row", "k")), pm.Data("y_", BINARY, dims="row")
        pm.Bernoulli("y", logit_p=pm.math.dot(x, pm.Normal("beta", shape=5)) + pm.Normal("a"), observed=y)
    density = LogDensity(model)
    theta, found = draws_of(density), by_predictors(density)
    found.mean(theta)
    with model:
        pm.set_data({"x": 2.0 * X[::-1], "y_": 1 - BINARY})
    again = density.again()
    expected = again.mean_hessian(theta).products(np.eye(6))
    assert_allclose(found.linear_map.quadratic(found.mean(theta)), expected, atol=1e-12 * np.abs(expected).max())


def test_many_draws_are_evaluated_in_parts(monkeypatch):
    density = density_of(crossed)
    found, theta = by_predictors(density), draws_of(density, 7)
    whole = found.mean(theta)
    monkeypatch.setattr("pymc_ngvi.rows.row_hessian._MOST_ELEMENTS", 2 * len(found.linear_map.offset))
    assert_allclose(found.mean(theta).toarray(), whole.toarray(), rtol=1e-12)


# --- in a fit ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def _without_rows(monkeypatch):
    monkeypatch.setattr(ByRows, "found", None)


@pytest.fixture
def _always(monkeypatch, _without_rows):
    monkeypatch.setattr(second_order, "_WORTH", 0.0)


def fitted(make, **options):
    with pm.Model():
        make()
        return pymc_ngvi.fit_ngvi(posterior="gaussian", random_seed=1, progressbar=False, **options)


@pytest.mark.usefixtures("_without_rows")
@pytest.mark.parametrize(
    ("make", "family"), [(crossed, "full"), (many_groups, "sparse"), (crossed, "diagonal"), (crossed, "block")]
)
def test_a_fit_by_predictors_is_the_same_fit(make, family, monkeypatch):
    expected = fitted(make, family=family)
    monkeypatch.setattr(second_order, "_WORTH", 0.0)
    monkeypatch.setattr(second_order, "_FEWER", 1)
    found = fitted(make, family=family)
    assert found.density.second._predictors is not None
    assert (found.n_iterations, found.n_gradients) == (expected.n_iterations, expected.n_gradients)
    assert found.n_hessians == expected.n_hessians
    assert_allclose(found.mean_flat, expected.mean_flat, atol=1e-8)
    assert_allclose(found.sd_flat, expected.sd_flat, rtol=1e-8)


@pytest.mark.usefixtures("_always")
def test_a_hessian_that_is_not_that_of_log_p_is_not_used(monkeypatch):
    mean = PredictorHessian.mean
    monkeypatch.setattr(PredictorHessian, "mean", lambda self, theta: 1.01 * mean(self, theta))
    density = density_of(crossed)
    theta = draws_of(density)
    expected = density.second.mean_products(theta, np.eye(density.n_dim))
    assert_allclose(density.mean_hessian(theta).products(np.eye(density.n_dim)), expected, rtol=1e-12)
    assert density.second._predictors is None


@pytest.mark.usefixtures("_always")
def test_checks_are_not_counted_as_evaluations():
    density = density_of(crossed)
    density.mean_hessian(draws_of(density)).diagonal()
    assert density.second._predictors is not None
    assert (density.n_gradients, density.n_hessians) == (0, 3)


def test_small_models_do_without():
    assert density_of(crossed).second._predictors is None
