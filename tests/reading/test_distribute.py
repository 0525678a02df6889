"""Products of unknowns: rows are found behind factors of linear functions, and of sums."""

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest

from models import random_points
from numpy.testing import assert_allclose

from pymc_ngvi import LogDensity
from pymc_ngvi.families import DiagonalState
from pymc_ngvi.graphs import graph
from pymc_ngvi.ops.elements import Facts
from pymc_ngvi.reading.predictors import as_sum, factors_outside, scales_outside

N, P = 60, 20
RNG = np.random.default_rng(8)
X, REAL = RNG.normal(size=(N, P)), RNG.normal(size=N)
BINARY, COUNTS = RNG.binomial(1, 0.4, N), RNG.poisson(1.5, 25)
PRECISION = X.T @ X + np.eye(P)


def scaled_coefficients():
    z, mean, scale = pm.Normal("z", shape=P), pm.Normal("mean"), pm.HalfNormal("scale")
    pm.Bernoulli("y", logit_p=pm.Normal("a") + X @ (mean + scale * z), observed=BINARY)


def scaled_columns():
    z, scale = pm.Normal("z", shape=(P, 3)), pm.HalfNormal("scale", shape=3)
    pm.Normal("y", X @ (z * scale), 1.0, observed=RNG.normal(size=(N, 3)))


def scaled_walk():
    steps, scale = pm.Normal("steps", shape=N), pm.HalfNormal("scale")
    pm.Normal("y", pt.cumsum(steps * scale), 1.0, observed=REAL)


def squares_by_hand():
    b, sd = pm.Normal("b", shape=P), pm.HalfNormal("sd")
    error = REAL - X @ b
    pm.Potential("y", -N * pt.log(sd) - 0.5 * pt.dot(error, error) / sd**2)


def squares_of_groups():
    b, sd = pm.Normal("b", shape=P), pm.HalfNormal("sd", shape=3)
    squares = ((REAL - X @ b) ** 2).reshape((3, N // 3)).sum(axis=1)
    pm.Potential("y", pt.sum(-N / 3 * pt.log(sd) - 0.5 * squares / sd**2))


def quadratic_form():
    b, precision = pm.Flat("b", shape=P), pm.Gamma("precision", 2, 2)
    pm.Potential("prior", 0.5 * P * pt.log(precision) - 0.5 * precision * pt.dot(b, pt.dot(PRECISION, b)))
    pm.Normal("y", X @ b, 1.0, observed=REAL)


def autoregression_in_space():
    place = np.arange(25)
    apart = np.abs(place[:, None] // 5 - place // 5) + np.abs(place[:, None] % 5 - place % 5)
    field = pm.CAR("field", np.zeros(25), (apart == 1).astype(int), pm.Beta("alpha", 2, 2), pm.Gamma("tau", 2, 2))
    pm.Poisson("y", pm.math.exp(pm.Normal("a") + field), observed=COUNTS)


def scaled_covariance():
    u = pm.MvNormal("u", np.zeros(P), cov=pm.HalfNormal("scale") ** 2 * PRECISION)
    pm.Normal("y", X @ u, pm.HalfNormal("sd"), observed=REAL)


def scaled_precision():
    u = pm.MvNormal("u", np.zeros(P), tau=PRECISION / pm.HalfNormal("variance"))
    pm.Bernoulli("y", logit_p=X @ u, observed=BINARY)


def scaled_factor_of_many():
    u = pm.MvNormal("u", pm.Normal("mean"), chol=pm.HalfNormal("scale") * np.linalg.cholesky(PRECISION), shape=(3, P))
    pm.Normal("y", X @ u.T, 1.0, observed=RNG.normal(size=(N, 3)))


def shapes_of_rows_of_any_number():
    eta = pm.Normal("a") + pm.Normal("b") * pm.Data("x", REAL)
    pm.Weibull("y", pm.Gamma("shape", 2, 1), pm.math.exp(eta), observed=np.exp(REAL))


@pytest.mark.parametrize(
    ("build", "n_directions"),
    [
        (scaled_coefficients, 2), (scaled_columns, 2), (scaled_walk, 2), (squares_by_hand, 2), (squares_of_groups, 2),
        (quadratic_form, 3), (autoregression_in_space, 4), (scaled_covariance, 2), (scaled_precision, 3),
        (scaled_factor_of_many, 2), (shapes_of_rows_of_any_number, 2),
    ],
)  # fmt: skip
def test_rows_are_found_behind_factors(build, n_directions):
    with pm.Model() as model:
        build()
    density = LogDensity(model)
    assert density.rows is not None
    assert density.rows.n_directions == n_directions
    assert not density.described_rows().rest
    theta = random_points(density, 5, seed=2)
    assert_allclose(density.rows.at(theta), density.logp(theta), rtol=1e-9)


THETA = pt.vector("theta", shape=(6,))
SCALE, PAIR = pt.exp(THETA[0]), THETA[:2]
REST = THETA[2:]


LINEAR = {
    "a scale": pt.dot(X[:, :4], SCALE * REST),
    "a mean and a scale": pt.dot(X[:, :4], PAIR[1] - SCALE * REST),
    "a divisor": pt.dot(X[:, :4], REST / SCALE + REST**2 + 1.0),
    "known elements": pt.dot(X[:, :4], SCALE * PAIR[1] * np.arange(4.0)),
    "rows, from the right": pt.dot(pt.exp(PAIR)[:, None] * REST.reshape((2, 2)), X[:2, :3]),
    "columns": pt.dot(X[:5, :2], pt.exp(PAIR) * REST.reshape((2, 2))),
    "rows, from the left": pt.dot(X[:5, :2], pt.exp(PAIR)[:, None] * REST.reshape((2, 2))),
    "cumulative sums along an axis": pt.cumsum(SCALE * REST.reshape((2, 2)), axis=1),
    "cumulative sums": pt.cumsum(SCALE * REST),
    "sums along an axis": (pt.exp(PAIR)[:, None] * REST.reshape((2, 2))).sum(axis=1),
    "a triangular matrix": pt.linalg.solve_triangular(np.tril(PRECISION[:4, :4]), SCALE * REST, lower=True),
}


@pytest.mark.parametrize("name", LINEAR)
def test_factors_are_taken_out_without_change(name):
    [logp] = graph.simplify([pt.exp(0.1 * LINEAR[name]).sum()])
    written = factors_outside(logp, Facts(logp, THETA))
    assert (written is logp) == (name == "rows, from the left")  # which are added up
    compare(logp, written)


SUMS = {
    "a factor": SCALE * (REST**2).sum(),
    "a divisor": (3.0 - (REST**3).sum()) / SCALE + REST.sum(),
    "factors of factors": SCALE * (PAIR[1] * pt.exp(REST).sum() + pt.sin(REST).sum()) + 2.0,
    "factors of rows": (pt.exp(PAIR) * (REST.reshape((2, 2)) ** 2).sum(axis=1)).sum(),
    "of columns": (pt.exp(PAIR)[None] * (REST.reshape((2, 2)) ** 2).sum(axis=1, keepdims=True)).sum(),
    "a quadratic form": pt.dot(PAIR, pt.dot(np.ones((2, 2)), pt.exp(PAIR))) * SCALE,
    "a product with data": SCALE * pt.dot(X[:1, :4], REST**2)[0],
    "two sums": (REST**2).sum() * pt.exp(REST).sum() * SCALE,
    "cumulative sums": SCALE * pt.cumsum(REST**2)[2],
    "a choice by data": SCALE * pt.switch(np.array([True, False]), (REST.reshape((2, 2)) ** 2).sum(axis=1), 3.0).sum(),
    "known and unknown parts": SCALE * pt.concatenate([(REST**2).sum()[None], np.array([2.0, 3.0])]).sum(),
    "a sum into an element": SCALE * pt.set_subtensor(pt.constant(np.arange(3.0))[1], (REST**2).sum()).sum(),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_brought_outside_without_change(name):
    [logp] = graph.simplify([SUMS[name]])
    written = as_sum(logp, THETA)
    assert (written is logp) == (name == "two sums")
    compare(logp, written)


K = PRECISION[:4, :4]
SCALED = {
    "a factor": pt.linalg.cholesky(SCALE * K) @ REST[:, None],
    "a divisor, twice": pt.linalg.cholesky(K / SCALE / PAIR[1] ** 2) @ REST[:, None],
    "a triangular solution": pt.linalg.solve_triangular(SCALE * np.linalg.cholesky(K), REST[:, None], lower=True),
    "a solution": pt.linalg.solve(SCALE * K, REST, b_ndim=1),
    "a transpose": (SCALE * X[:4, :4]).T @ REST[:, None],
    "a product of two": (SCALE * K) @ REST.reshape((4, 1)) @ (PAIR[:1, None] * np.ones((1, 3))),
    "an unknown matrix": pt.linalg.cholesky(SCALE * K + pt.eye(4)) @ REST[:, None],
}


@pytest.mark.parametrize("name", SCALED)
def test_scales_of_matrices_are_taken_out_without_change(name):
    [logp] = graph.simplify([pt.exp(0.1 * SCALED[name]).sum()])
    written = scales_outside(logp, Facts(logp, THETA))
    assert (written is logp) == (name == "an unknown matrix")
    compare(logp, written)


def compare(before, after):
    """Compare two forms of a function at two points."""
    function = pytensor.function([THETA], [before, after], mode="FAST_COMPILE")
    for theta in np.random.default_rng(1).normal(size=(2, 6)):
        assert_allclose(*function(theta), rtol=1e-12)


def test_linear_directions_have_no_curvature_by_quadrature():
    """A product of scales and effects is linear in one of them, whatever rules of quadrature are off by."""
    place = np.arange(100)
    apart = np.abs(place[:, None] // 10 - place // 10) + np.abs(place[:, None] % 10 - place % 10)
    with pm.Model() as model:
        precision = 1.0 / pm.HalfNormal("sd") ** 2
        field = pm.CAR("field", np.zeros(100), (apart == 1).astype(int), pm.Beta("alpha", 2, 2), precision)
        pm.Poisson("y", pm.math.exp(pm.Normal("a") + field), observed=np.random.default_rng(0).poisson(2.0, 100))
    density = LogDensity(model)
    hessian = density.expected(DiagonalState.from_scale(density.initial_point(), np.full(density.n_dim, 0.3))).hessian
    matrix, rows, cols = hessian.products(np.eye(density.n_dim)), density.pattern.rows, density.pattern.cols
    inside = np.zeros(matrix.shape, dtype=bool)
    inside[rows, cols] = inside[cols, rows] = True
    assert np.abs(matrix[~inside]).max() == 0.0
    assert_allclose(hessian.values(), matrix[rows, cols])
