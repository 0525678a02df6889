"""Draws of the prior on the unconstrained scale: dispersed points from which modes can be looked for."""

import warnings

import numpy as np
import pymc as pm

from pymc_ngvi.core.types import Array
from pymc_ngvi.model.graphs.backends import without_c
from pymc_ngvi.model.layout import Layout


def prior_draws(model: pm.Model, layout: Layout, n_draws: int, seed: int) -> Array:
    """Draw from the prior.

    Parameters
    ----------
    model : pymc.Model
    layout : Layout
        Of its free variables.
    n_draws, seed : int

    Returns
    -------
    ndarray, shape (n, n_dim)
        Unconstrained. Draws that are not finite are left out; none where the prior can't be drawn from (``pm.Flat``).
    """
    values = []
    for v in layout.variables:
        rv = model[v.name]
        transform = model.rvs_to_transforms[rv]
        values.append(rv if transform is None else transform.forward(rv, *rv.owner.inputs))
    try:
        with without_c(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of draws that are not finite
            drawn = pm.draw(values, draws=n_draws, random_seed=seed, mode="FAST_COMPILE")
    except (NotImplementedError, RuntimeError, ValueError, TypeError):
        return np.empty((0, layout.n_dim))
    flat = np.concatenate([np.asarray(d, dtype=np.float64).reshape(n_draws, -1) for d in drawn], axis=1)
    result: Array = flat[np.isfinite(flat).all(axis=1)]
    return result
