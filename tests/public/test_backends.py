"""All backends compute the same: one small model with a transform, a likelihood and its second derivatives."""

import functools

import numpy as np
import pymc as pm
import pytest

from gaussian import needs

from pymc_ngvi import LogDensity

POINTS, DIRECTIONS = 0.4 * np.random.default_rng(1).normal(size=(5, 3)), np.random.default_rng(2).normal(size=(2, 3))


def small_density(backend, products=True):
    """Few nodes, for each takes time to compile: a transform, data, second derivatives that are no constants."""
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.1, 2.1, shape=2)
        sigma = pm.HalfNormal("sigma", 1.3)
        x = np.array([[0.3, 1.2], [-0.7, 0.4], [1.1, -2.1]])
        mu = x @ slope if products else slope[0] * x[:, 0] + slope[1] * x[:, 1]
        pm.Normal("y", mu, sigma, observed=[0.4, -1.2, 2.3])
    return LogDensity(model, backend)


@functools.cache
def quick(products):
    return evaluate(small_density("quick", products))


def evaluate(density):
    return [density.logp(POINTS), *density.logp_grad(POINTS), density.hessian_products(POINTS, DIRECTIONS)]


@pytest.mark.filterwarnings("ignore:PyTensor could not link to a BLAS:UserWarning")  # slow, not wrong
@pytest.mark.parametrize(
    ("backend", "products"),
    [
        ("jax", True),
        ("numba", False),
        # Products of matrices take Numba most of a minute to compile.
        pytest.param("numba", True, marks=pytest.mark.slow),
        pytest.param("c", True, marks=pytest.mark.slow),
    ],
)
def test_all_backends_agree(backend, products):
    needs(backend)
    density = small_density(backend, products)
    assert density.backend == backend
    # The same operations in another order.
    for what, value, expected in zip(
        ("logp", "logp", "grad", "products"), evaluate(density), quick(products), strict=True
    ):
        assert value.dtype == np.float64
        np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-10, err_msg=what)
    # Jax pads batches: the padding must not come back, nor count.
    assert density.logp(POINTS[:1]).shape == (1,)
    assert density.n_gradients == len(POINTS)
