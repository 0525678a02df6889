"""Natural steps by rows that JAX takes whole: the same fits as NumPy's, and what is said where it can't."""

import functools
import logging
import sys

import numpy as np
import pymc as pm
import pytest

from pymc_ngvi import NGVI, fit_ngvi
from pymc_ngvi.core.status import Status
from pymc_ngvi.density import LogDensity
from pymc_ngvi.families import DiagonalState, FullState
from pymc_ngvi.fitting.defaults import options_for

needs_jax = pytest.mark.skipif(
    not __import__("importlib").util.find_spec("jax"), reason="JAX is not installed: pip install jax"
)
RNG = np.random.default_rng(7)
X, BETA = RNG.normal(size=(150, 3)), np.array([0.7, -0.4, 0.2])
COIN, COUNTS = RNG.random(150) < 1 / (1 + np.exp(-X @ BETA)), RNG.poisson(np.exp(X @ BETA))
GROUP = np.arange(120) % 6
GROUPED = RNG.poisson(np.exp(np.array([1.2, -0.6, 0.4, 0.9, -1.1, 0.2])[GROUP]))
HEAVY = X @ BETA + 0.5 * RNG.standard_t(4, size=150)


def logistic():
    beta = pm.Normal("beta", 0, 2, shape=3)
    pm.Bernoulli("y", logit_p=X @ beta, observed=COIN.astype(int))


def poisson():
    beta = pm.Normal("beta", 0, 2, shape=3)
    pm.Poisson("y", pm.math.exp(X @ beta), observed=COUNTS)


def student():
    """Two predictors a row, one of which all rows share."""
    beta = pm.Normal("beta", 0, 2, shape=3)
    pm.StudentT("y", 4, mu=X @ beta, sigma=pm.HalfNormal("sigma", 2), observed=HEAVY)


def groups():
    """Predictors that come in by their sum, given a scale."""
    level, scale, effect = pm.Normal("level"), pm.HalfNormal("scale", 1), pm.Normal("effect", shape=6)
    pm.Poisson("y", pm.math.exp(level + (scale * effect)[GROUP]), observed=GROUPED)


def separated():
    """Rows bend where the prior is wide: natural steps are shortened, and steps of Newton follow."""
    beta = pm.Normal("beta", 0, 40, shape=3)
    pm.Bernoulli("y", logit_p=X[:20] @ beta, observed=(X[:20, 0] > 0.1).astype(int))


@functools.cache
def fitted(make, family, backend):
    with pm.Model() as model:
        make()
    inference = NGVI(model=model, family=family, random_seed=1)
    return inference.fit(backend=backend, progressbar=False), inference._density


@needs_jax
@pytest.mark.parametrize(
    ("make", "family"),
    [
        (logistic, "full"),
        (student, "full"),
        (groups, "diagonal"),
        (separated, "full"),
        (poisson, "diagonal"),
        (student, "diagonal"),
    ],
)
def test_a_fit_on_jax_is_that_of_numpy(make, family):
    (numpy, _), (jax, density) = fitted(make, family, "quick"), fitted(make, family, "jax")
    assert jax.status is numpy.status is Status.CONVERGED
    assert jax.record.estimator == "quadrature"
    assert density.by_rows.on_jax.compiled  # it was JAX that took steps
    assert (jax.backend, jax.n_iterations) == ("jax", numpy.n_iterations)
    sd = numpy.q.sd()
    np.testing.assert_allclose((jax.q.mean() - numpy.q.mean()) / sd, 0.0, atol=1e-8)
    np.testing.assert_allclose(jax.q.cov() / np.outer(sd, sd), numpy.q.cov() / np.outer(sd, sd), atol=1e-8)
    np.testing.assert_allclose(jax.hist, numpy.hist, rtol=1e-9)
    np.testing.assert_allclose((jax.elbo.value, jax.gap), (numpy.elbo.value, numpy.gap), rtol=1e-8, atol=1e-12)


@needs_jax
@pytest.mark.parametrize("state", [FullState, DiagonalState])
def test_products_with_large_matrices_are_those_of_numpy(state, monkeypatch):
    from pymc_ngvi.density.jitted import rows

    (_, numpy), (_, jax) = fitted(student, "full", "quick"), fitted(student, "full", "jax")
    monkeypatch.setattr(rows, "_LARGE", 0)
    q = state.from_scale(np.array([0.3, -0.2, 0.1, -0.4]), np.array([0.2, 0.1, 0.3, 0.25]))
    expected, found = numpy.expected(q), jax.expected(q)
    assert isinstance(found.hessian, rows.HessianOnJax)
    np.testing.assert_allclose(found.value, expected.value, rtol=1e-12)
    np.testing.assert_allclose(found.grad, expected.grad, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(found.hessian.whitened(q), expected.hessian.whitened(q), rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(found.hessian.diagonal(), expected.hessian.diagonal(), rtol=1e-9)


@needs_jax
def test_jax_keeps_its_own_precision():
    import jax
    import jax.numpy as jnp

    before = jax.config.jax_enable_x64
    _, density = fitted(logistic, "full", "jax")
    assert density.logp_grad(np.full((1, 3), 0.1))[1].dtype == np.float64
    assert jax.config.jax_enable_x64 == before
    assert jnp.ones(1).dtype == (jnp.float64 if before else jnp.float32)


@needs_jax
def test_callbacks_are_told_of_every_iteration():
    _, density = fitted(logistic, "full", "jax")
    seen = []
    approx = fit_ngvi(
        model=density.model, family="full", backend="jax", random_seed=1, progressbar=False,
        callbacks=[lambda approx, losses, i: seen.append((i, len(losses)))],
    )  # fmt: skip
    assert seen == [(i, i) for i in range(1, approx.n_iterations + 1)]


@needs_jax
@pytest.mark.parametrize(
    ("make", "given", "why"),
    [
        (logistic, {"family": "block"}, "family='full' or 'diagonal', and this is family='block'"),
        (logistic, {"family": "full", "estimator": "stein"}, "this is estimator='stein'"),
    ],
)
def test_what_jax_cannot_take_whole_is_compiled_as_before(make, given, why, caplog):
    with pm.Model() as model:
        make()
    density = LogDensity(model, "jax")
    with caplog.at_level(logging.INFO, logger="pymc.ngvi"):
        options = options_for(given, density)
    assert "backend='jax' compiles log p and its derivatives, not whole steps" in caplog.text
    assert why in caplog.text
    assert density.rows is None
    assert options.choice.estimator != "quadrature"


@needs_jax
def test_an_operation_that_jax_lacks_is_named(monkeypatch, caplog):
    from pymc_ngvi.density.jitted import rows

    def lacking(inputs, outputs):
        raise NotImplementedError("No JAX conversion for the given `Op`: Bessel")

    monkeypatch.setattr(rows, "jaxed", lacking)
    with pm.Model() as model:
        logistic()
    density = LogDensity(model, "jax")
    with caplog.at_level(logging.INFO, logger="pymc.ngvi"):
        assert density.rows is None
    assert "an operation has no version in JAX (No JAX conversion for the given `Op`: Bessel)" in caplog.text


def test_without_jax_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pm.Model() as model:
        pm.Normal("x")
    with pytest.raises(ImportError, match="backend='jax' needs JAX, which is not installed: pip install jax"):
        LogDensity(model, "jax")
