"""`backend="jax"`: the fits of NumPy, in float64, by functions of few shapes."""

import math
import sys

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

from pymc_ngvi import NGVI, LogDensity, Status
from pymc_ngvi.families.gaussian import DiagonalState
from pymc_ngvi.graphs.backends import InFloat64
from pymc_ngvi.rows import engines
from pymc_ngvi.rows.engines import OnJax

needs_jax = pytest.mark.skipif(
    not __import__("importlib").util.find_spec("jax"), reason="JAX is not installed: pip install jax"
)
RNG = np.random.default_rng(7)
X, BETA = RNG.normal(size=(150, 3)), np.array([0.7, -0.4, 0.2])
COIN = RNG.random(150) < 1 / (1 + np.exp(-X @ BETA))
GROUP = np.arange(120) % 6
GROUPED = RNG.poisson(np.exp(np.array([1.2, -0.6, 0.4, 0.9, -1.1, 0.2])[GROUP]))
HEAVY = X @ BETA + 0.5 * RNG.standard_t(4, size=150)


def logistic():
    beta = pm.Normal("beta", 0, 2, shape=3)
    pm.Bernoulli("y", logit_p=X @ beta, observed=COIN.astype(int))


def student():
    """Two predictors a row, one of which all rows share."""
    beta = pm.Normal("beta", 0, 2, shape=3)
    pm.StudentT("y", 4, mu=X @ beta, sigma=pm.HalfNormal("sigma", 2), observed=HEAVY)


def groups():
    """Predictors that come in by their sum, given a scale."""
    level, scale, effect = pm.Normal("level"), pm.HalfNormal("scale", 1), pm.Normal("effect", shape=6)
    pm.Poisson("y", pm.math.exp(level + (scale * effect)[GROUP]), observed=GROUPED)


def model_of(make):
    with pm.Model() as model:
        make()
    return model


@needs_jax
@pytest.mark.parametrize(("make", "family"), [(student, "full"), (groups, "block")])
def test_a_fit_on_jax_is_that_of_numpy(make, family, monkeypatch):
    monkeypatch.setattr(engines, "_FEW", 1_000)
    numpy, jax = (
        NGVI(model=model_of(make), family=family, random_seed=1).fit(backend=backend, progressbar=False)
        for backend in ("quick", "jax")
    )
    assert jax.status is numpy.status is Status.CONVERGED
    assert jax.record.estimator == "quadrature"
    assert any(isinstance(rows.function, OnJax) for rows in jax.density.rows.functions)
    assert (jax.backend, jax.n_iterations) == ("jax", numpy.n_iterations)
    sd = numpy.q.sd()
    np.testing.assert_allclose((jax.q.mean() - numpy.q.mean()) / sd, 0.0, atol=1e-8)
    np.testing.assert_allclose(jax.q.cov() / np.outer(sd, sd), numpy.q.cov() / np.outer(sd, sd), atol=1e-8)
    np.testing.assert_allclose(jax.hist, numpy.hist, rtol=1e-9)


@needs_jax
def test_second_derivatives_of_rows_are_those_of_numpy(monkeypatch):
    monkeypatch.setattr(engines, "_FEW", 0)
    theta = np.random.default_rng(3).normal(size=(5, 4))
    found, expected = (LogDensity(model_of(student), backend).mean_hessian(theta) for backend in ("jax", "quick"))
    np.testing.assert_allclose(found.products(np.eye(4)), expected.products(np.eye(4)), rtol=1e-12, atol=1e-12)


@needs_jax
def test_rows_with_an_operation_that_jax_lacks_are_left_to_numpy():
    with pm.Model() as model:
        pm.Potential("tail", pt.gammaincc(2.0, pm.math.exp(pm.Normal("x", shape=4))).sum())
    numpy, jax = LogDensity(model, "quick"), LogDensity(model, "jax")
    assert {type(rows.function).__name__ for rows in jax.rows.functions} == {"OnNumPy"}
    theta = np.random.default_rng(3).normal(size=(5, 4))
    np.testing.assert_allclose(jax.rows.at(theta), numpy.rows.at(theta), rtol=1e-12)


@needs_jax
def test_log_p_of_rows_is_theirs_on_jax_too(monkeypatch):
    """No function of a graph is compiled for it."""
    monkeypatch.setattr(engines, "_FEW", 0)
    monkeypatch.setattr(InFloat64, "__call__", None)
    theta = np.random.default_rng(3).normal(size=(7, 3))
    numpy, jax = (LogDensity(model_of(logistic), backend) for backend in ("quick", "jax"))
    np.testing.assert_allclose(jax.logp(theta), numpy.logp(theta), rtol=1e-12)
    for found, expected in zip(jax.logp_grad(theta), numpy.logp_grad(theta), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10)


@needs_jax
def test_on_a_gpu_rows_are_evaluated_many_at_a_time(monkeypatch):
    """Of a device there is no more here than its name, and what is asked for follows from that."""
    import jax

    called, sizes = OnJax.__call__, []

    def noted(self, *inputs):
        sizes.append(math.prod(np.broadcast_shapes(*[x.shape for x in inputs])))
        return called(self, *inputs)

    monkeypatch.setattr(OnJax, "__call__", noted)
    monkeypatch.setattr(engines, "CACHED_VALUES", 2_000)
    monkeypatch.setattr(engines, "_AT_A_TIME_ON_GPU", 50_000)
    most, value = {}, {}
    for device in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda name=device: name)
        density = LogDensity(model_of(student), "jax")
        sizes.clear()
        value[device] = density.rows.under(DiagonalState.from_scale(np.zeros(4), np.full(4, 0.3))).value
        most[device] = max(sizes)
    assert most["cpu"] <= 2_000 < most["gpu"] <= 50_000
    np.testing.assert_allclose(value["gpu"], value["cpu"], rtol=1e-13)


@needs_jax
def test_jax_keeps_its_own_precision():
    import jax
    import jax.numpy as jnp

    before = jax.config.jax_enable_x64
    density = LogDensity(model_of(logistic), "jax")
    assert density.logp_grad(np.full((1, 3), 0.1))[1].dtype == np.float64
    assert jax.config.jax_enable_x64 == before
    assert jnp.ones(1).dtype == (jnp.float64 if before else jnp.float32)


def test_without_jax_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pm.Model() as model:
        pm.Normal("x")
    with pytest.raises(ImportError, match="backend='jax' needs JAX, which is not installed: pip install jax"):
        LogDensity(model, "jax")
