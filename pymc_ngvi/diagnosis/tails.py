"""Pareto-smoothed importance weights: how many draws they are worth, and k-hat of the moments of each coordinate."""

from typing import NamedTuple

import numpy as np

from scipy.special import logsumexp

from pymc_ngvi.psis import MIN_KHAT_DRAWS, pareto_khat, smoothed
from pymc_ngvi.types import Array


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
    n_lost = int((~np.isfinite(log_ratio)).sum())
    if len(log_ratio) - n_lost < MIN_KHAT_DRAWS:
        return Weights(pareto_khat(log_p, log_q), 0.0, len(log_p), n_lost)
    smooth, khat = smoothed(log_ratio)
    effective = float(np.exp(2.0 * logsumexp(smooth) - logsumexp(2.0 * smooth)))
    return Weights(float("inf") if np.any(log_ratio == np.inf) else khat, effective, len(log_p), n_lost)


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
    with np.errstate(divide="ignore"):
        sizes = np.log(np.abs(standardised.T))
    return np.array([max(smoothed(log_ratio + size)[1], smoothed(log_ratio + 2.0 * size)[1]) for size in sizes])
