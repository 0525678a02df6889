"""A sparse precision and a dense one, on the same draws, take the same steps: it is the same q.

The dense twin is this file's own: a dense factor of the precision, in the order in which the sparse family has its
coordinates, with no use of any structure.
"""

import functools

import numpy as np
import pandas as pd
import pymc as pm
import pytest

from matrix import ignore, make_rule

from pymc_ngvi import LogDensity, fit_ngvi
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.types import MatrixHessian
from pymc_ngvi.families import FullPrecisionState, SparseFamily
from pymc_ngvi.families.gaussian import Partition
from pymc_ngvi.families.sparse import SparseStructure, find_blocks
from pymc_ngvi.fitting import loop
from pymc_ngvi.fitting.options import choose

NATURAL = choose(family="sparse")


class Permuted:
    """A density in another order of coordinates, which hands out dense Hessians or values at entries."""

    has_hessian, has_minibatch = True, False

    def __init__(self, density, order):
        self.density, self.order, self.n_dim = density, order, density.n_dim
        self.n_gradients = self.n_hessians = 0
        place = np.argsort(order)
        rows, cols = place[density.pattern.rows], place[density.pattern.cols]
        self.pattern = Pattern.of(self._dense(rows, cols, np.ones(len(rows))))
        self._rows, self._cols = rows, cols

    def _dense(self, rows, cols, values):
        matrix = np.zeros((self.n_dim, self.n_dim))
        matrix[rows, cols] = matrix[cols, rows] = values
        return matrix

    def logp_grad(self, theta):
        point = np.empty_like(theta)
        point[:, self.order] = theta
        logp, grad = self.density.logp_grad(point)
        return logp, grad[:, self.order]

    def mean_hessian(self, theta):
        point = np.empty_like(theta)
        point[:, self.order] = theta
        values = self.density.mean_hessian(point).values()
        return MatrixHessian(self._dense(self._rows, self._cols, values), self.pattern)


def both(model, n):
    """Return the states of the sparse family and of its dense twin after ``n`` iterations, and their ELBOs."""
    density = LogDensity(model)
    structure = find_blocks(density.pattern)
    target = Permuted(density, structure.order)
    labels = np.full(density.n_dim, -1)
    labels[: len(structure.locals_)] = np.repeat(np.arange(len(structure.sizes)), structure.sizes)
    families = SparseFamily(SparseStructure.of_blocks(Partition(labels))), FullPrecisionState
    point = density.initial_point()[structure.order]
    states = []
    for family in families:
        rule = make_rule(target, NATURAL, seed=4)
        q = family.from_scale(point, np.full(density.n_dim, 0.3))
        states.append(loop.run(rule, loop.start(rule, q), n, ignore))
    return states


@functools.cache
def simulated():
    rng = np.random.default_rng(8)
    group = np.repeat(np.arange(25), 5)
    x = rng.standard_normal(125)
    effects = 0.5 * rng.standard_normal((25, 2))
    y = rng.poisson(np.exp(0.4 + 0.3 * x + effects[group, 0] + effects[group, 1] * x))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 3, shape=2)
        sd = pm.HalfNormal("sd", 1, shape=2)
        z = pm.Normal("z", 0, 1, shape=(25, 2))
        b = beta + z * sd
        pm.Poisson("y", pm.math.exp(b[group, 0] + b[group, 1] * x), observed=y)
    return model


def epilepsy(folder):
    table = pd.read_csv(folder / "epilepsy.csv")
    group, visit = table["subject"].astype("category").cat.codes.to_numpy(), table["visit_code"].to_numpy(float)
    design = np.column_stack([np.ones(len(table)), table["log_base4"], table["trt"], visit])
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 10, shape=4)
        sd = pm.HalfNormal("sd", 1, shape=2)
        z = pm.Normal("z", 0, 1, shape=(int(group.max()) + 1, 2))
        eta = design @ beta + sd[0] * z[group, 0] + sd[1] * z[group, 1] * visit
        pm.Poisson("y", pm.math.exp(eta), observed=table["seizures"].to_numpy())
    return model


def toenail(folder):
    table = pd.read_csv(folder / "toenail.csv")
    group, time = table["patient"].astype("category").cat.codes.to_numpy(), table["time"].to_numpy(float)
    treated = table["treatment"].to_numpy(float)
    design = np.column_stack([np.ones(len(table)), treated, time, treated * time])
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 10, shape=4)
        s = pm.HalfNormal("s", 3)
        b = pm.Normal("b", 0, s, shape=int(group.max()) + 1)
        pm.Bernoulli("y", logit_p=design @ beta + b[group], observed=table["outcome"].to_numpy())
    return model


def check(sparse, dense):
    assert sparse.status == dense.status
    assert sparse.n_iterations == dense.n_iterations
    np.testing.assert_allclose(sparse.history.losses, dense.history.losses, rtol=1e-6)
    q, twin = sparse.rule.q, dense.rule.q
    sd = twin.sd()
    assert np.max(np.abs(q.mean() - twin.mean()) / sd) < 1e-6
    np.testing.assert_allclose(q.sd(), sd, rtol=1e-6)
    assert abs(q.entropy() - twin.entropy()) < 1e-6 * q.n_dim


@pytest.mark.usefixtures("_one_blas_thread")
@pytest.mark.parametrize("n", [3, 60], ids=["settling", "to the end"])
def test_simulated_slopes(n):
    check(*both(simulated(), n))


@pytest.mark.usefixtures("_one_blas_thread")
@pytest.mark.parametrize("model", [epilepsy, toenail])
def test_real_data(model, data_dir):
    check(*both(model(data_dir), 60))


def test_a_dense_covariance_ends_at_the_same_moments():
    """Other draws, another parametrisation, the same optimum."""
    sparse, dense = (
        fit_ngvi(model=simulated(), family=family, tol=0.01, random_seed=3, progressbar=False)
        for family in ("sparse", "full")
    )
    assert np.sqrt(np.mean(((sparse.mean_flat - dense.mean_flat) / dense.sd_flat) ** 2)) < 0.05
    assert np.sqrt(np.mean((sparse.sd_flat / dense.sd_flat - 1.0) ** 2)) < 0.05
    spread = np.hypot(sparse.elbo.se, dense.elbo.se)
    assert abs(sparse.elbo.value - dense.elbo.value) < 3.0 * spread + sparse.gap + dense.gap
