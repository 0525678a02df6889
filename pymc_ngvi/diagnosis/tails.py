"""Pareto-smoothed importance weights: how many draws they are worth, and k-hat of the moments of each coordinate."""

from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy.special import logsumexp

from pymc_ngvi.diagnostics import MIN_KHAT_DRAWS, pareto_khat
from pymc_ngvi.types import Array

#: Columns whose k-hats are estimated together.
_COLUMNS = 64
#: Of the fit of a generalised Pareto distribution: grid points beside the root of the sample size, scale of the prior
#: on the grid, and weight of the prior k = .5, in draws.
_GRID, _PRIOR_SCALE, _PRIOR_DRAWS = 30, 3.0, 10.0


class Weights(NamedTuple):
    """What importance weights p/q say of q as a whole.

    Parameters
    ----------
    khat : float
    effective : float
        Effective sample size of the smoothed weights: 1 / sum of their squares.
    n_draws : int
    n_lost : int
        Draws at which log p or log q is not finite.
    """

    khat: float
    effective: float
    n_draws: int
    n_lost: int


def weights_of(log_p: Array, log_q: Array) -> Weights:
    """Return k-hat and effective sample size of the weights at draws of q, (n_draws,) each."""
    with np.errstate(invalid="ignore"):
        log_ratio = log_p - log_q
    finite = np.isfinite(log_ratio)
    n_lost = int((~finite).sum())
    return Weights(pareto_khat(log_p, log_q), _effective(log_ratio[finite]), len(log_p), n_lost)


def _effective(log_ratio: Array) -> float:
    """Return the effective sample size of smoothed weights."""
    if len(log_ratio) < MIN_KHAT_DRAWS:
        return 0.0
    from arviz_stats.base import array_stats  # .7 s to import

    try:
        smoothed, _ = array_stats.psislw(-log_ratio)  # expects the negated log ratio
    except ValueError:  # all weights of the tail are equal: there is nothing to smooth
        smoothed = log_ratio
    return float(np.exp(2.0 * logsumexp(smoothed) - logsumexp(2.0 * smoothed)))


def coordinate_khats(log_ratio: Array, standardised: Array) -> Array:
    """Return k-hat of the weighted mean and second moment of each coordinate, the worse of the two.

    Parameters
    ----------
    log_ratio : ndarray, shape (n_draws,)
        log p - log q at draws of q, finite.
    standardised : ndarray, shape (n_draws, n_coordinates)
        The draws, less the mean of q, in its standard deviations.

    Returns
    -------
    ndarray, shape (n_coordinates,)

    References
    ----------
    .. [1] A. Vehtari, D. Simpson, A. Gelman, Y. Yao and J. Gabry (2024). Pareto smoothed importance sampling.
       JMLR 25(72). https://doi.org/10.48550/arXiv.1507.02646

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(1).standard_normal((10_000, 2))
    >>> log_ratio = 0.45 * x[:, 0] ** 2  # p is wider than q in the first coordinate
    >>> khats = coordinate_khats(log_ratio, x)
    >>> bool(khats[0] > khats[1])
    True
    """
    result = np.empty(standardised.shape[1])
    for at in range(0, len(result), _COLUMNS):
        columns = slice(at, at + _COLUMNS)
        with np.errstate(divide="ignore"):
            size = np.log(np.abs(standardised[:, columns]))
        of_mean = tail_shapes(log_ratio[:, None] + size)
        result[columns] = np.fmax(of_mean, tail_shapes(log_ratio[:, None] + 2.0 * size))
    return result


def tail_shapes(log_values: Array) -> Array:
    """Return the Pareto shape of the right tail of each column of positive values, given as logs.

    Parameters
    ----------
    log_values : ndarray, shape (n_draws, n_columns)

    Returns
    -------
    ndarray, shape (n_columns,)
        -inf where the values of a tail are equal, or nearly.
    """
    n_draws = len(log_values)
    n_tail = int(3.0 * n_draws**0.5) if n_draws > 225 else n_draws // 5
    top = np.partition(log_values, n_draws - n_tail - 1, axis=0)[n_draws - n_tail - 1 :]
    top = np.exp(top - top.max(axis=0))
    excess = np.sort(top[1:] - top[0], axis=0).T
    quartile = excess[:, int(n_tail / 4 + 0.5) - 1]
    usable = (quartile > excess[:, 0]) & (excess[:, -1] > 0.0)
    shapes = np.full(len(excess), -np.inf)
    shapes[usable] = _pareto_shapes(excess[usable], quartile[usable])
    return shapes


def _pareto_shapes(excess: Array, quartile: Array) -> NDArray[np.float64]:
    """Return the posterior mean of the shape, from sorted excesses over a threshold, (n_columns, n_tail)."""
    n_tail = excess.shape[1]
    n_grid = _GRID + int(n_tail**0.5)
    grid = (1.0 - np.sqrt(n_grid / (np.arange(1, n_grid + 1) - 0.5))) / _PRIOR_SCALE
    b = grid / quartile[:, None] + 1.0 / excess[:, -1:]
    k = np.stack([np.log1p(-column[:, None] * excess).mean(axis=1) for column in b.T], axis=1)
    with np.errstate(all="ignore"):
        profile = n_tail * (np.log(-b / k) - k - 1.0)
        b_mean = np.sum(b * np.exp(profile - logsumexp(profile, axis=1, keepdims=True)), axis=1)
        k_mean = np.log1p(-b_mean[:, None] * excess).mean(axis=1)
    result: NDArray[np.float64] = (n_tail * k_mean + 0.5 * _PRIOR_DRAWS) / (n_tail + _PRIOR_DRAWS)
    return np.where(np.isnan(result), np.inf, result)
