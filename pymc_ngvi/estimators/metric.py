"""The gap of a q without correlations, with the curvature that it leaves out.

In such a family the Fisher information is not the curvature of the ELBO: an error of the mean along a direction in
which the posterior is correlated counts for too little in 1/2 |natural gradient|^2, by a factor of ten or more.
"""

from dataclasses import replace

import numpy as np

from pymc_ngvi.core.linalg import cholesky, solve_lower, symmetrise
from pymc_ngvi.core.types import Array, Density, GaussianState, Moments
from pymc_ngvi.estimators.summary import gap_of

#: Draws that the curvature is averaged over, and dimensions beyond which it is left alone.
_N_DRAWS, _MAX_DIM = 16, 2_000
#: Part of a gap that is seen in the family's own metric, at the least that was met.
SEEN = 0.1


def in_full_metric(target: Density, q: GaussianState, theta: Array, moments: Moments) -> Moments | None:
    """Return moments whose gap, floor and floor_sd count errors of the mean by the full curvature of log p."""
    u = moments.replicates
    factor = None if u is None else _full_curvature_factor(target, q, theta[:_N_DRAWS])
    if u is None or factor is None:
        return None
    n = len(moments.grad)
    errors = solve_lower(factor, u[:, :n].T).T
    gap, floor, floor_sd = gap_of(np.concatenate([errors, u[:, n:]], axis=1))
    return replace(moments, gap=gap, floor=floor, floor_sd=floor_sd)


def _full_curvature_factor(target: Density, q: GaussianState, theta: Array) -> Array | None:
    """Return the Cholesky factor of the dense whitened curvature."""
    if not target.has_hessian or q.n_dim > _MAX_DIM:
        return None
    directions = q.draws(np.eye(q.n_dim)) - q.location  # the rows of C^T
    products = target.mean_hessian(theta).products(directions)
    return cholesky(symmetrise(-q.whiten(products)))
