r"""A secant correction of natural-gradient steps near the optimum.

A natural step of size 1 assumes that the negative Hessian of the ELBO is the Fisher information. Near the optimum of a
non-Gaussian posterior it is not: along the scale of a variance parameter it can be five times smaller, and plain steps
creep. The change of the natural gradient over a step measures it, and the inverse BFGS formula [1]_, on the last few
steps, corrects the next one. Everything is in whitened coordinates, where the Fisher information is the identity.

References
----------
.. [1] J. Nocedal (1980). Updating quasi-Newton matrices with limited storage. Mathematics of Computation 35.
   https://doi.org/10.1090/S0025-5718-1980-0572855-7
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, GaussianState, Moments

#: Step over change of gradient, at most: a flatter direction than this is not extrapolated.
MAX_STRETCH = 10.0
#: Where the Fisher information is the curvature of a Gaussian target: change of gradient over step, at most. Beyond it,
#: the pair tells of curvature far from here.
MAX_STIFFNESS = 3.0
#: Where it is not (a diagonal q ignores correlations): cosine between step and change, at least; stretch, at most.
MIN_COSINE, MAX_STRETCH_INEXACT = 1e-3, 1e4
#: Whitened length of a step, at least: the change over a shorter one may be rounding.
LEAST_STEP = 1e-6


@stored("adaptive.secant_pair")
class Pair(NamedTuple):
    """One step and the fall of the natural gradient over it, whitened, (n_params,) each."""

    step: Array
    change: Array


def natural_gradient(state: GaussianState, moments: Moments) -> Array:
    """Return the natural gradient in coordinates in which its squared length is twice the gap, (n_params,)."""
    error = state.flat(state.curvature_error(moments.curvature))
    return np.concatenate([moments.grad, error / np.sqrt(2.0)])


def moments_of(state: GaussianState, moments: Moments, direction: Array) -> Moments:
    """Return moments whose natural gradient is ``direction``: the inverse of `natural_gradient`."""
    n_dim = len(moments.grad)
    error = state.unflat(np.sqrt(2.0) * direction[n_dim:])
    identity = moments.curvature - state.curvature_error(moments.curvature)
    return replace(moments, grad=direction[:n_dim], curvature=identity + error)


def trusted(pair: Pair, q: GaussianState) -> bool:
    """Tell whether a pair measures a curvature that can be used."""
    product = q.inner(pair.step, pair.change)
    step_square, change_square = q.inner(pair.step, pair.step), q.inner(pair.change, pair.change)
    if step_square < LEAST_STEP**2:
        return False
    if not q.exact_metric:
        cosine = product / float(np.sqrt(step_square * change_square)) if change_square > 0.0 else 0.0
        return cosine > MIN_COSINE and product * MAX_STRETCH_INEXACT > step_square
    return product * MAX_STRETCH > step_square and change_square <= MAX_STIFFNESS * product


def correct(pairs: Sequence[Pair], gradient: Array, inner: Callable[[Array, Array], float] = np.dot) -> Array:
    """Multiply a natural gradient by the inverse-BFGS matrix of the pairs (two-loop recursion)."""
    direction = gradient.copy()
    coefficients = []
    for step, change in reversed(pairs):
        coefficient = inner(step, direction) / inner(step, change)
        direction -= coefficient * change
        coefficients.append(coefficient)
    for (step, change), coefficient in zip(pairs, reversed(coefficients), strict=True):
        direction += (coefficient - inner(change, direction) / inner(step, change)) * step
    return direction


def rescaled_gap(moments: Moments, pairs: Sequence[Pair]) -> Moments:
    """Return moments whose gap, floor and floor_sd are measured with the curvature that the pairs tell of.

    Where the Fisher information is not the curvature of the ELBO, 1/2 |natural gradient|^2 is not the gap; with the
    inverse curvature B of the pairs, 1/2 u^T B u is, and its noise follows from the replicates in the same way.
    """
    u = moments.replicates
    if u is None or not pairs:
        return moments
    n = len(u)
    mean = u.mean(axis=0)
    scaled = np.array([correct(pairs, row) for row in u])
    products = u @ scaled.T
    centred = np.sum((u - mean) * (scaled - scaled.mean(axis=0)))
    off_diagonal = float(np.sum(products * products) - np.sum(np.diag(products) ** 2))
    return replace(
        moments,
        gap=0.5 * float(mean @ scaled.mean(axis=0)),
        floor=0.5 * float(centred) / (n * (n - 1)) if n > 1 else np.inf,
        floor_sd=float(np.sqrt(off_diagonal / (n * (n - 1)) / (2.0 * n * (n - 1)))) if n > 1 else np.inf,
    )
