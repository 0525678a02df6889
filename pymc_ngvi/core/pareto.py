"""A generalised Pareto distribution in the place of the largest importance weights."""

import numpy as np

from scipy.special import softmax

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.types import Array

#: Weights in a tail: a part of all where these are few, and a multiple of the square root of how many there are.
_PART, _OF_ROOT, _FEW_DRAWS = 5, 3.0, 225
#: Fewer make no tail.
_LEAST = 5
#: Of the estimate of the shape: the prior of its scale, and the shape towards which it shrinks, worth so many draws.
_PRIOR_SCALE, _PRIOR_SHAPE, _PRIOR_DRAWS = 3.0, 0.5, 10
#: Weights of a mean that are left out.
_NEGLIGIBLE = 10.0 * np.finfo(float).eps


def smoothed_tail(log_weights: Array) -> tuple[Array, float]:
    """Replace the largest weights by quantiles of the generalised Pareto distribution that fits them.

    Parameters
    ----------
    log_weights : ndarray, shape (n,)
        Finite.

    Returns
    -------
    log_weights : ndarray, shape (n,)
        Of weights that add up to 1; as they were where no distribution fits.
    shape : float
        Of the distribution, k: -inf where there is no tail, or all its weights are equal; inf where none fits.

    References
    ----------
    .. [1] Vehtari, Simpson, Gelman, Yao, Gabry (2024). Pareto smoothed importance sampling. JMLR 25(72).
    """
    n, result = len(log_weights), log_weights - log_weights.max()
    n_tail = int(_OF_ROOT * np.sqrt(n)) if n > _FEW_DRAWS else n // _PART
    order = np.argsort(result)
    tail, below = order[n - n_tail :], order[n - n_tail - 1]
    if n_tail < _LEAST or np.ptp(result[tail]) < np.finfo(float).tiny:
        return result - logsumexp(result), float("-inf")
    cutoff, largest = np.exp(result[below]), result[tail].max()
    shape, scale = fitted_pareto(np.exp(result[tail]) - cutoff)
    if np.isfinite(shape) and scale > 0.0:
        at = (np.arange(n_tail) + 0.5) / n_tail
        result[tail] = np.minimum(np.log(cutoff + _quantiles(at, shape, scale)), largest)
    return result - logsumexp(result), shape


def fitted_pareto(excess: Array) -> tuple[float, float]:
    """Return shape and scale of a generalised Pareto distribution of what exceeds a threshold, (n,), in rising order.

    A mean over the profile likelihood [1]_ of -shape / scale, shrunk a little; inf and NaN where the smallest quarter
    is 0.

    References
    ----------
    .. [1] J. Zhang and M. A. Stephens (2009). A new and efficient estimation method for the generalized Pareto
       distribution. Technometrics 51(3). https://doi.org/10.1198/tech.2009.08017
    """
    n = len(excess)
    quartile = excess[int(n / 4 + 0.5) - 1]
    if quartile <= excess[0]:
        return float("inf"), float("nan")
    n_slopes = 30 + int(np.sqrt(n))
    steps = 1.0 - np.sqrt(n_slopes / (np.arange(n_slopes) + 0.5))
    slopes = 1.0 / excess[-1] + steps / (_PRIOR_SCALE * quartile)
    shapes = np.log1p(-np.outer(slopes, excess)).mean(axis=1)
    share = softmax(n * (np.log(-slopes / shapes) - shapes - 1.0))
    kept = share >= _NEGLIGIBLE
    slope = float(slopes[kept] @ share[kept] / share[kept].sum())
    shape = float(np.log1p(-slope * excess).mean())
    if np.isnan(shape):
        return float("inf"), float("nan")
    return (n * shape + _PRIOR_DRAWS * _PRIOR_SHAPE) / (n + _PRIOR_DRAWS), -shape / slope


def _quantiles(probability: Array, shape: float, scale: float) -> Array:
    log_survival = np.log1p(-probability)
    if shape == 0.0:
        return -scale * log_survival
    return scale * np.expm1(-shape * log_survival) / shape
