"""Polynomials of hyperparameters."""

import numpy as np

from pymc_ngvi.core.types import Array

#: Standardised hyperparameters are cut off here.
_FARTHEST = 7.0


def quadratic_terms(u: Array) -> Array:
    """Return 1, coordinates, (n, p), and their products, (n, n_terms)."""
    u = np.clip(u, -_FARTHEST, _FARTHEST)
    i, j = np.triu_indices(u.shape[1])
    return np.concatenate([np.ones((len(u), 1)), u, u[:, i] * u[:, j]], axis=1)
