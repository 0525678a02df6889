"""Two samples of a quantity compared by ranks: what has heavy tails is compared as well as what has none.

Values of both samples are replaced by normal scores, the quantiles of a standard normal at their ranks among all. These
are the same for any increasing function of the quantity, such as its logarithm, and their moments exist.
"""

import numpy as np

from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import rankdata

from pymc_ngvi.core.types import Array
from pymc_ngvi.results.diagnosis.moment_drift import Estimates

#: Standard deviation of normal scores below which a quantity counts as constant.
_CONSTANT = 1e-3


def normal_scores(values: Array) -> Array:
    """Return normal scores of the columns of draws, (n_draws, n_columns); those with NaN are NaN."""
    with np.errstate(invalid="ignore"):
        ranks = rankdata(values, axis=0)
        result: Array = ndtri((ranks - 0.5) / len(values))
    return result


def rank_drift(before: Array, after: Array) -> tuple[Estimates, Estimates]:
    """Return by how much mean and standard deviation of normal scores change."""
    n = len(before)
    scores = normal_scores(np.concatenate([before, after]))
    old, new = scores[:n], scores[n:]
    old_mean, new_mean, old_sd, new_sd = old.mean(axis=0), new.mean(axis=0), old.std(axis=0), new.std(axis=0)
    usable = (old_sd > _CONSTANT) & (new_sd > _CONSTANT)  # False for NaN
    with np.errstate(invalid="ignore", divide="ignore"):
        shift = (new_mean - old_mean) / old_sd
        shift_se = (new - old).std(axis=0, ddof=1) / old_sd / np.sqrt(n)
        squares = ((new - new_mean) / new_sd) ** 2 - ((old - old_mean) / old_sd) ** 2
        growth = relative(np.log(new_sd / old_sd), 0.5 * squares.std(axis=0, ddof=1) / np.sqrt(n))
    return where_usable(usable, Estimates(shift, shift_se)), where_usable(usable, growth)


def limit_drift(before: Array, after: Array, level: float) -> Estimates:
    """Return by how much a quantile changes, in normal scores of the draws before.

    Its error is such that chance is judged by a sign test: of the outermost of all draws, as many should come from
    before as from after. Quantiles of few draws have longer tails.
    """
    n = len(before)
    at = np.sort(after, axis=0)[min(int(level * n), n - 1)]
    n_outer = max(int(2 * n * min(level, 1.0 - level)), 1)
    order = np.argsort(np.concatenate([before, after]), axis=0)
    outer = order[-n_outer:] if level > 0.5 else order[:n_outer]
    with np.errstate(invalid="ignore"):
        below = (np.sum(before <= at, axis=0) + 0.5) / (n + 1)
        varied = ~np.isnan(before + after).any(axis=0) & (np.sum(before == at, axis=0) <= 1)
    value = ndtri(below) - ndtri(level)
    certain = 2.0 * np.abs(np.sum(outer >= n, axis=0) - 0.5 * n_outer) / np.sqrt(n_outer)
    density = np.exp(-0.5 * ndtri(level) ** 2) / np.sqrt(2.0 * np.pi)
    least = np.sqrt(2.0 * level * (1.0 - level) / n) / density
    return where_usable(varied, Estimates(value, np.maximum(np.abs(value) / np.maximum(certain, 0.1), 0.5 * least)))


def relative(log_ratio: Array, se: Array) -> Estimates:
    """Return a ratio less 1 from its logarithm, as many standard errors from 0."""
    growth = np.expm1(log_ratio)
    with np.errstate(invalid="ignore", divide="ignore"):
        return Estimates(growth, se * np.where(log_ratio == 0.0, 1.0, growth / log_ratio))


def where_usable(usable: NDArray[np.bool_], estimates: Estimates) -> Estimates:
    """Return estimates, 0 with an error of 1 where they are of no use."""
    return Estimates(np.where(usable, estimates.value, 0.0), np.where(usable, estimates.se, 1.0))
