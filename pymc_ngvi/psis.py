"""Pareto-smoothed importance sampling, by ``arviz_stats``: weights, k-hat and what it means."""

import numpy as np

from pymc_ngvi.types import Array

#: Fewer draws leave too short a tail to fit a Pareto distribution to.
MIN_KHAT_DRAWS = 100
#: Log weights this far below the smallest finite one count as none: less than the smallest double.
_NO_WEIGHT = 700.0
#: Log ratios that differ by less are those of a q that is the posterior.
_ALL_EQUAL = 1e-8


def smoothed(log_ratio: Array) -> tuple[Array, float]:
    """Return log weights with a Pareto-smoothed tail, and the shape of the tail, k-hat.

    Parameters
    ----------
    log_ratio : ndarray, shape (n_draws,)
        log p - log q; what is not finite has no weight. At least one is.

    Returns
    -------
    log_weights : ndarray, shape (n_draws,)
        Up to a constant.
    khat : float
        -inf where all weights, or all in the tail, are equal.
    """
    finite = np.isfinite(log_ratio)
    filled = np.where(finite, log_ratio, log_ratio[finite].min() - _NO_WEIGHT)
    if np.ptp(filled) < _ALL_EQUAL:
        return filled, float("-inf")
    from arviz_stats.base import array_stats  # .7 s to import

    try:
        smooth, khat = array_stats.psislw(-filled)  # expects the negated log ratio
    except ValueError:  # all weights of the tail are equal: as light as a tail can be
        smooth, khat = filled, -np.inf
    return np.where(finite, smooth, -np.inf), float("inf") if np.isnan(khat) else float(khat)


def pareto_khat(log_p: Array, log_q: Array) -> float:
    """Estimate the Pareto shape k of the importance weights p/q from draws of q.

    Parameters
    ----------
    log_p, log_q : ndarray, shape (n_draws,)
        Log densities at the same draws, on the unconstrained scale; constants do not matter. Draws whose ``log_p``
        is -inf or NaN count as draws of weight zero.

    Returns
    -------
    float
        -inf where all weights are equal (q is the posterior), inf where no draw, or one of infinite density, has
        all the weight.

    Raises
    ------
    ValueError
        For fewer than 100 draws.

    References
    ----------
    .. [1] Vehtari, Simpson, Gelman, Yao, Gabry (2024). Pareto smoothed importance sampling. JMLR 25(72).
    .. [2] Yao, Vehtari, Simpson, Gelman (2018). Yes, but did it work? Evaluating variational inference. ICML.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(1).normal(size=10_000)
    >>> narrow = pareto_khat(log_p=-0.5 * (x / 2) ** 2, log_q=-0.5 * x**2)  # p is twice as wide as q
    >>> wide = pareto_khat(log_p=-0.5 * (2 * x) ** 2, log_q=-0.5 * x**2)  # p is half as wide as q
    >>> narrow > 0.5 > 0 > wide
    True
    """
    if len(log_p) < MIN_KHAT_DRAWS:
        raise ValueError(f"k-hat needs at least {MIN_KHAT_DRAWS} draws; got {len(log_p)}. Take 10,000.")
    log_ratio = np.asarray(log_p, dtype=np.float64) - np.asarray(log_q, dtype=np.float64)
    if np.any(log_ratio == np.inf) or not np.isfinite(log_ratio).any():
        return float("inf")
    return smoothed(log_ratio)[1]


def khat_limit(n_draws: int) -> float:
    """Return the k-hat above which estimates weighted by ``n_draws`` draws can't be trusted."""
    return min(1.0 - 1.0 / float(np.log10(n_draws)), 0.7)


def khat_meaning(khat: float, n_draws: int = 10_000) -> str:
    """Say what a k-hat means, in one sentence, and what to do where it is large."""
    if khat <= 0.5:
        return "q is close to the posterior; importance weights correct what is left."
    if khat <= khat_limit(n_draws):
        return "q is usable, and importance weights improve it."
    if khat <= 1.0:
        return (
            "q misses part of the posterior (tails, skewness or correlations), or the dimension is high: check "
            "standard deviations against another family, or reparametrise."
        )
    return (
        "q is far from the posterior somewhere: trust neither its tails nor its standard deviations; try a richer "
        "family, reparametrise, or use pm.sample."
    )
