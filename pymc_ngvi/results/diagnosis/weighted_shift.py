"""By how much importance weights move what is computed of draws: where q is no Gaussian's image of the posterior.

Quantities are compared as normal scores of the draws of q, as moved draws are (`ranks`). Both sides are the same draws,
so that the error of a difference is that of the weights alone.
"""

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy.special import ndtri

from pymc_ngvi.core.psis import smoothed
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.functionals import Functionals
from pymc_ngvi.results.diagnosis.functionals import TAIL, beyond_by_kind
from pymc_ngvi.results.diagnosis.moment_drift import Estimates
from pymc_ngvi.results.diagnosis.ranks import relative, where_usable

#: Part of the values that has to differ from the next one.
_DIFFERENT = 0.9


@dataclass(frozen=True)
class WeightedShift:
    """Differences of weighted draws from those of q."""

    functionals: Functionals
    #: Of the mean and of the limits of 89 % intervals, in standard deviations, of each column.
    mean: Estimates
    #: Relative to that of q.
    sd: Estimates
    lower: Estimates
    upper: Estimates

    def beyond(self, of: Estimates, size: float, certain: float) -> NDArray[np.intp]:
        """Return the columns of which an estimate stands out."""
        return beyond_by_kind(self.functionals.is_whole, of, size, certain)


def weighted_shift_of(functionals: Functionals, theta: Array, log_ratio: Array) -> WeightedShift:
    """Return what weights change."""
    values = functionals.at(theta)
    order = np.argsort(values, axis=0)
    usable = _few_ties(np.take_along_axis(values, order, axis=0))
    scores = ndtri((np.arange(len(values)) + 0.5) / len(values))[:, None]
    sorted_weights = _weights(log_ratio)[order]  # of each column, in the order of its values, with the same scores
    parts = (*_moments(scores, sorted_weights), *(_limit(scores, sorted_weights, p) for p in (TAIL, 1.0 - TAIL)))
    return WeightedShift(functionals, *(where_usable(usable, part) for part in parts))


def _weights(log_ratio: Array) -> Array:
    log_weights = smoothed(log_ratio)[0]
    weights: Array = np.exp(log_weights - log_weights.max())
    return weights / weights.sum()


def _few_ties(ordered: Array) -> NDArray[np.bool_]:
    """Tell which columns, in order, have no NaN, which is last, and few values that are the same."""
    with np.errstate(invalid="ignore"):
        different = np.mean(np.diff(ordered, axis=0) > 0.0, axis=0)
    return ~np.isnan(ordered[-1]) & (different > _DIFFERENT)


def _moments(scores: Array, weights: Array) -> tuple[Estimates, Estimates]:
    """Return mean and relative standard deviation."""
    apart, before = weights - 1.0 / len(weights), scores.std()
    mean = np.sum(weights * scores, axis=0)
    squares = (scores - mean) ** 2
    variance = np.sum(weights * squares, axis=0)
    shift = Estimates(mean / before, np.sqrt(np.sum(apart**2 * squares, axis=0)) / before)
    error = 0.5 * np.sqrt(np.sum((apart * (squares / variance - 1.0)) ** 2, axis=0))
    return shift, relative(0.5 * np.log(variance) - np.log(before), error)


def _limit(scores: Array, weights: Array, level: float) -> Estimates:
    """Return by how much a quantile is off; its error takes the density of a normal of the same moments."""
    below = np.cumsum(weights, axis=0) >= level
    found = scores[np.argmax(below, axis=0), 0]
    error = np.sqrt(np.sum(((weights - 1.0 / len(weights)) * ((scores <= found) - level)) ** 2, axis=0))
    mean = np.sum(weights * scores, axis=0)
    sd = np.sqrt(np.sum(weights * (scores - mean) ** 2, axis=0))
    density = np.exp(-0.5 * ((found - mean) / sd) ** 2) / (np.sqrt(2.0 * np.pi) * sd)
    return Estimates(found - ndtri(level), error / density)
