"""Small models and fits that tests share, callbacks, and what a backend needs."""

import numpy as np
import pymc as pm
import pytensor
import pytest

import pymc_ngvi

SEEDS = (1, 2)
MEANS, SDS = np.array([1.0, -2.0, 0.0, 3.0]), np.array([2.0, 0.1, 1.0, 30.0])


def fit(model, **options):
    with model:
        return pymc_ngvi.fit_ngvi(progressbar=False, **{"random_seed": 1, "posterior": "gaussian", **options})


def gaussian_model():
    """Independent coordinates of different scales, with dims."""
    with pm.Model(coords={"group": ["a", "b", "c"]}) as model:
        pm.Normal("level", MEANS[0], SDS[0])
        pm.Normal("effect", MEANS[1:], SDS[1:], dims="group")
    return model


def in_groups():
    """Four groups, whose posterior is exact by trees."""
    y = np.random.default_rng(3).normal(np.repeat([-1.0, 0.0, 1.0, 2.0], 5))
    with pm.Model() as model:
        a = pm.Normal("a", 0.0, pm.HalfNormal("tau"), shape=4)
        pm.Normal("y", a[np.repeat(range(4), 5)], observed=y)
    return model


def stop_at(iteration):
    """Return a callback that ends the fit after the given iteration."""

    def stop(approx, losses, i):
        if i == iteration:
            raise StopIteration

    return stop


def needs(backend):
    """Skip a test where a backend can not run."""
    if backend == "c" and not pytensor.config.cxx:
        pytest.skip("needs a C++ compiler")
    if backend in ("numba", "jax"):
        pytest.importorskip(backend)
