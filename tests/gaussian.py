"""Fits whose posterior is a Gaussian, and a model of which that is the posterior."""

import numpy as np
import pymc as pm

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
