"""Hessians and their patterns from rows: those of log p, made without its gradient, its products or a colouring."""

import models
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_ngvi import LogDensity
from pymc_ngvi.core.refusal import RowHessianGivenUp
from pymc_ngvi.density import by_rows
from pymc_ngvi.rows.row_hessian import SecondDerivatives

_RNG = np.random.default_rng(61)
GROUP = np.repeat(np.arange(12), 4)
X = _RNG.normal(size=(48, 3))
COUNTS = _RNG.poisson(1.5, size=48)
CENSORED = _RNG.random(48) < 0.3


def intercepts():
    sd = pm.HalfNormal("sd", 1.3)
    b = pm.Normal("b", 0.1, sd, shape=12)
    pm.Poisson("y", pt.exp(X @ pm.Normal("beta", 0.1, 2.1, shape=3) + b[GROUP]), observed=COUNTS)


def not_centred():
    sd, z = pm.HalfNormal("sd", 1.3, shape=2), pm.Normal("z", 0.1, 1.2, shape=(12, 2))
    eta = pm.Normal("a") + z[GROUP, 0] * sd[0] + z[GROUP, 1] * sd[1] * X[:, 0]
    pm.StudentT("y", 4, eta, sigma=pm.HalfNormal("noise"), observed=X[:, 1])


def ordered():
    cut = pm.Normal("cut", [-1.0, 0.2, 1.1], 1.0, shape=3, transform=pm.distributions.transforms.ordered)
    pm.OrderedLogistic("y", eta=X @ pm.Normal("beta", shape=3), cutpoints=cut, observed=np.minimum(COUNTS, 3))


def simplex():
    """Of two parts: a log-sum of exponentials of x and -x."""
    weight = pm.Dirichlet("weight", np.array([1.5, 2.5]))
    pm.Normal("y", X @ pm.Normal("beta", shape=3) + weight[0], 1.2, observed=X[:, 1])


def branches():
    """Of which data choose one for each row, with other parameters."""
    sd, b = pm.HalfNormal("sd", 1.0), pm.Normal("b", shape=12)
    pm.Potential("p", -pt.log1p(pt.exp(X @ pm.Normal("beta", shape=3) + pt.switch(CENSORED, sd, b[GROUP]))).sum())


def clipped():
    b = pm.Normal("b", shape=12)
    pm.Potential("p", -(pt.exp(pt.clip(b[GROUP], -0.2, 0.3)) + pt.maximum(b[GROUP], 0.1) ** 2).sum())


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Also of rows that have many predictors, and are few."""
    monkeypatch.setattr(by_rows, "FEW_PREDICTORS", 30)


MODELS = [intercepts, not_centred, ordered, simplex, branches, clipped]


def density_of(make):
    with pm.Model() as model:
        make()
    return LogDensity(model)


@pytest.mark.parametrize("make", MODELS)
def test_the_pattern_is_that_of_the_graph(make):
    density = density_of(make)
    expected = density.second.sparse.pattern_by_graph
    found = density.structural_pattern
    np.testing.assert_array_equal(found.matrix.toarray(), expected.matrix.toarray())


def test_new_data_have_a_new_pattern_and_hessian():
    with pm.Model() as model:
        other = pm.Data("other", np.arange(12))
        effect = pm.Normal("effect", 0.1, 1.3, shape=12)
        pm.Poisson("y", pt.exp(effect + effect[other]), observed=COUNTS[:12])
    density, theta = LogDensity(model), np.full((1, 12), 0.2)
    assert density.pattern.n_entries == len(density.mean_hessian(theta).values()) == 12
    with model:
        pm.set_data({"other": np.roll(np.arange(12), 1)})
    assert density.pattern.n_entries == 24
    matrix = density.pattern.symmetric(density.mean_hessian(theta).values()).toarray()
    np.testing.assert_allclose(matrix, density.hessian(theta)[0], rtol=1e-12)


def test_wrong_second_derivatives_are_not_used(monkeypatch):
    """Products come from the graph of log p then; values, whose pattern may be another one, are asked for again."""
    entries = SecondDerivatives.entries
    monkeypatch.setattr(SecondDerivatives, "entries", lambda self, mean: entries(self, 1.01 * mean))
    density = density_of(intercepts)
    theta = models.random_points(density, 3, 3)
    with pytest.raises(RowHessianGivenUp):
        density.mean_hessian(theta).values()
    assert not density.by_rows.gives_hessians
    assert density.rows is not None  # their values are those of log p
    density = density_of(intercepts)
    expected = density.hessian(theta).mean(axis=0)
    found = density.mean_hessian(theta).products(np.eye(density.n_dim))
    np.testing.assert_allclose(found, expected, atol=1e-12 * np.abs(expected).max())
    assert not density.by_rows.gives_hessians
