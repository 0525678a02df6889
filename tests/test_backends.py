"""All backends compute the same: one small model with a transform, a likelihood and its second derivatives."""

import models
import numpy as np
import pytensor
import pytest

from pymc_ngvi.model import LogDensity

POINTS, DIRECTIONS = 0.4 * np.random.default_rng(1).normal(size=(5, 3)), np.random.default_rng(2).normal(size=(2, 3))


def small_density(backend):
    return LogDensity(models.gamma_log_link(), backend)


@pytest.fixture(scope="module")
def quick():
    return evaluate(small_density("quick"))


def evaluate(density):
    return [density.logp(POINTS), *density.logp_grad(POINTS), density.hessian_products(POINTS, DIRECTIONS)]


def needs(backend):
    if backend == "c" and not pytensor.config.cxx:
        pytest.skip("needs a C++ compiler")
    if backend in ("numba", "jax"):
        pytest.importorskip(backend)


@pytest.mark.filterwarnings("ignore:PyTensor could not link to a BLAS:UserWarning")  # slow, not wrong
@pytest.mark.parametrize("backend", ["numba", "c", "jax"])
def test_all_backends_agree(backend, quick):
    needs(backend)
    density = small_density(backend)
    assert density.backend == backend
    # PyTensor's trigamma in C has 8 digits.
    rtol = 1e-7 if backend == "c" else 1e-9
    for what, value, expected in zip(("logp", "logp", "grad", "products"), evaluate(density), quick, strict=True):
        assert value.dtype == np.float64
        np.testing.assert_allclose(value, expected, rtol=rtol, atol=1e-10, err_msg=what)
    # Jax pads batches: the padding must not come back, nor count.
    assert density.logp(POINTS[:1]).shape == (1,)
    assert density.n_gradients == len(POINTS)
