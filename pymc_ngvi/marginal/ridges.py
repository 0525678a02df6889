"""Ridges of log m: where it stays high far from the mode, along a curve that a Student t does not follow.

A weight of a mixture near 0, a rate that saturates: some of the globals no longer matter then, and others are as wide
as their priors. Draws about the bulk rarely hit such a ridge, which may be thin and bent, so that neither weights nor
their k-hat say that it is missed. So it is followed: one coordinate is moved away from the mode in steps, and log m
maximised over all others at each [1]_.

References
----------
.. [1] L. Tierney and J. B. Kadane (1986). Accurate approximations for posterior moments and marginal densities. Journal
   of the American Statistical Association 81(393). https://doi.org/10.1080/01621459.1986.10478240
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.student_mixture import StudentMixture

#: Distances from the mode, in standard deviations: each is 1.4 times as far as the one before.
_DISTANCES = 2.0 ** np.arange(0.5, 5.5, 0.5)
#: Nats below the top down to which a ridge is followed: a Gaussian has 1e-5 of its mass beyond.
_LOWEST = 10.0
#: Steps of Newton at each distance, their lengths that are tried, and the longest one, in standard deviations.
_N_NEWTON, _LENGTHS, _LONGEST = 5, np.array([1.0, 0.5, 0.2, 0.05]), 3.0
#: Step of finite differences, and the widest that a component may be, in standard deviations.
_STEP, _WIDEST = 0.01, 4.0
#: Degrees of freedom of components.
_DF = 7.0


class RidgeSlopes(NamedTuple):
    """Values, gradients and Hessians of log m at some points, in standard deviations."""

    value: Array
    gradient: Array
    hessian: Array


def ridges(
    log_density: Callable[[Array], Array], mode: Array, sd: Array, along: NDArray[np.intp]
) -> StudentMixture | None:
    """Follow log m from its mode along some coordinates, in both directions; None where nothing was found."""
    of, p = _standardised(log_density, mode, sd), len(mode)
    fixed, side = np.repeat(along, 2), np.tile([-1.0, 1.0], len(along))
    at, before = np.zeros((len(fixed), p)), np.zeros((len(fixed), p))
    previous, top = 0.0, float(of(np.zeros((1, p)))[0])
    means, factors = [], []
    for distance in _DISTANCES:
        begun = at + (at - before) * ((distance - previous) / previous if previous else 0.0)
        begun[np.arange(len(fixed)), fixed] = side * distance
        found, slopes = _maximised(of, begun, fixed)
        value = slopes.value
        going = value > top - _LOWEST
        for i in np.flatnonzero(going):
            means.append(found[i])
            factors.append(_factor(slopes.hessian[i], fixed[i], found[i] - at[i]))
        if not going.any():
            break
        fixed, side = fixed[going], side[going]
        before, at, previous = at[going], found[going], float(distance)
    if not means:
        return None
    n = len(means)
    return StudentMixture(np.full(n, 1.0 / n), mode + sd * np.array(means), sd[:, None] * np.array(factors), _DF)


def components_above(log_density: Callable[[Array], Array], points: Array, sd: Array) -> StudentMixture:
    """Return components at the modes above some points."""
    centre, n = points[0], len(points)
    at, slopes = _maximised(_standardised(log_density, centre, sd), (points - centre) / sd)
    roots = np.linalg.cholesky([_inverse(-hessian) for hessian in slopes.hessian])
    return StudentMixture(np.full(n, 1.0 / n), centre + sd * at, sd[:, None] * roots, _DF)


def _standardised(function: Callable[[Array], Array], mode: Array, sd: Array) -> Callable[[Array], Array]:
    def of(u: Array) -> Array:
        with np.errstate(all="ignore"):
            values = function(mode + sd * u)
        return np.where(np.isfinite(values), values, -np.inf)

    return of


def work_in_dimensions(p: int) -> int:
    """Return the evaluations that following one coordinate in both directions takes at most."""
    return 2 * len(_DISTANCES) * work_of_climb(p)


def work_of_climb(p: int) -> int:
    """Return the evaluations that a climb takes at most."""
    of_slopes = 1 + 2 * p + p * (p - 1) // 2
    return _N_NEWTON * (of_slopes + len(_LENGTHS)) + of_slopes


def _maximised(
    of: Callable[[Array], Array], at: Array, fixed: NDArray[np.intp] | None = None
) -> tuple[Array, RidgeSlopes]:
    """Return where the density is largest over all coordinates, or all but one, by damped steps of Newton."""
    n, p = at.shape
    each = np.arange(n)
    for _ in range(_N_NEWTON):
        slopes = _slopes(of, at)
        gradient, hessian = slopes.gradient.copy(), -slopes.hessian
        if fixed is not None:
            gradient[each, fixed] = 0.0
            hessian[each, fixed], hessian[each, :, fixed] = 0.0, 0.0
            hessian[each, fixed, fixed] = 1.0
        values, vectors = np.linalg.eigh(hessian)
        along = np.einsum("nji,nj->ni", vectors, gradient) / np.maximum(np.abs(values), 1.0 / _WIDEST**2)
        step = np.einsum("nij,nj->ni", vectors, along)
        step *= np.minimum(1.0, _LONGEST / np.maximum(np.linalg.norm(step, axis=1), 1e-300))[:, None]
        tried = at[:, None] + _LENGTHS[:, None] * step[:, None]
        new = of(tried.reshape(-1, p)).reshape(n, -1)
        best = new.argmax(axis=1)
        rises = new[each, best] > slopes.value
        if not rises.any():
            return at, slopes
        at = np.where(rises[:, None], tried[each, best], at)
    return at, _slopes(of, at)


def _slopes(of: Callable[[Array], Array], at: Array) -> RidgeSlopes:
    """Return values, gradients and Hessians by differences; 0 where these are not finite."""
    n, p = at.shape
    first, second = np.triu_indices(p, 1)
    steps = _STEP * np.eye(p)
    shifts = np.concatenate([np.zeros((1, p)), steps, -steps, steps[first] + steps[second]])
    values = of((at[:, None] + shifts).reshape(-1, p)).reshape(n, -1)
    here, up, down = values[:, 0], values[:, 1 : 1 + p], values[:, 1 + p : 1 + 2 * p]
    with np.errstate(invalid="ignore"):
        gradient = (up - down) / (2.0 * _STEP)
        hessian = np.zeros((n, p, p))
        hessian[:, range(p), range(p)] = (up - 2.0 * here[:, None] + down) / _STEP**2
        mixed = values[:, 1 + 2 * p :] - up[:, first] - up[:, second] + here[:, None]
    hessian[:, first, second] = hessian[:, second, first] = mixed / _STEP**2
    usable = np.isfinite(gradient).all(axis=1) & np.isfinite(hessian).all(axis=(1, 2))
    return RidgeSlopes(here, np.where(usable[:, None], gradient, 0.0), np.where(usable[:, None, None], hessian, 0.0))


def _factor(hessian: Array, fixed: int, step: Array) -> Array:
    """Return the factor of a component: the others given the fixed coordinate, and the way from the point before."""
    precision = -hessian
    precision[fixed], precision[:, fixed] = 0.0, 0.0
    precision[fixed, fixed] = 1.0
    cov = _inverse(precision)
    cov[fixed], cov[:, fixed] = 0.0, 0.0
    return np.linalg.cholesky(cov + np.outer(step, step) + 1e-12 * np.eye(len(step)))


def _inverse(precision: Array) -> Array:
    values, vectors = np.linalg.eigh(precision)
    return (vectors / np.maximum(values, 1.0 / _WIDEST**2)) @ vectors.T
