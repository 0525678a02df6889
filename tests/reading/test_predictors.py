"""Linear predictors found in graphs, and Hessians by them, against those from all coordinates."""

import numpy as np
import pymc as pm
import pytest

from numpy.testing import assert_allclose
from scipy import sparse

from pymc_ngvi import LogDensity
from pymc_ngvi.core.sparsity import Dependence
from pymc_ngvi.rows.linear_map import MatrixPlan
from pymc_ngvi.rows.row_hessian import SecondDerivatives, by_predictors

N, GROUPS = 120, 12
RNG = np.random.default_rng(20)
X = RNG.normal(size=(N, 5))
FIRST, SECOND = RNG.integers(GROUPS, size=N), RNG.integers(9, size=N)
BINARY = RNG.integers(2, size=N)


def crossed():
    u = pm.Normal("u", 0.0, pm.HalfNormal("s_u"), shape=GROUPS)
    v = pm.Normal("v", 0.0, pm.HalfNormal("s_v"), shape=9)
    pm.Bernoulli("y", logit_p=pm.math.dot(X, pm.Normal("beta", shape=5)) + u[FIRST] + v[SECOND], observed=BINARY)


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


def test_many_draws_are_evaluated_in_parts(monkeypatch):
    density = density_of(crossed)
    theta = draws_of(density, 7)
    whole = matrix_at(density, theta)
    monkeypatch.setattr("pymc_ngvi.rows.row_hessian.AT_ONCE", 2 * len(density.rows.linear_map.offset))
    assert_allclose(matrix_at(density, theta).toarray(), whole.toarray(), rtol=1e-12)
