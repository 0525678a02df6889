"""Draws without weights from draws with weights, none of them twice."""

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array


def without_replacement(weights: Array, n: int, rng: np.random.Generator) -> tuple[NDArray[np.intp], float]:
    """Choose draws with probabilities in proportion to their weights, by systematic sampling [1]_.

    The probability that a draw is among the ``n`` is ``n`` times its weight, exactly, so that plain means over them
    have the weighted mean as their expectation. Where that would exceed 1 the draw is taken for certain, and the rest
    of its weight is left out: with a pool several times larger than ``n`` this is little.

    Parameters
    ----------
    weights : ndarray, shape (n_pool,)
        They sum to 1.
    n : int
        At most the number of positive weights.
    rng : numpy.random.Generator
        Advanced.

    Returns
    -------
    chosen : ndarray of int, shape (n,)
        Different from each other, in random order.
    left_out : float
        The weight that certain draws have beyond ``1/n``.

    Raises
    ------
    ValueError
        For fewer positive weights than ``n``.

    References
    ----------
    .. [1] Madow (1949). On the theory of systematic sampling, II. Annals of Mathematical Statistics 20(3).
       https://doi.org/10.1214/aoms/1177729988

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_ngvi.results.corrections.resampling import without_replacement
    >>> chosen, left_out = without_replacement(np.array([0.5, 0.0, 0.25, 0.25]), 2, np.random.default_rng(1))
    >>> 0 in chosen, 1 in chosen, left_out
    (True, False, 0.0)
    """
    order = rng.permutation(np.flatnonzero(weights > 0.0))
    if len(order) < n:
        raise ValueError(f"{n:,} different draws were asked for, and {len(order):,} have any weight: take fewer.")
    chances = _inclusion(weights[order], n)
    certain = chances >= 1.0
    others, chances = order[~certain], chances[~certain]
    rest = n - int(certain.sum())
    chosen = order[certain]
    if rest:
        ends = np.cumsum(chances)
        ends *= rest / ends[-1]  # rounding: the last end has to be above the last point
        points = rng.random() + np.arange(rest)
        chosen = np.concatenate([chosen, others[np.searchsorted(ends, points, side="right")]])
    left_out = float(np.maximum(weights - 1.0 / n, 0.0).sum())
    return rng.permutation(chosen), left_out


def _inclusion(weights: Array, n: int) -> Array:
    """Return probabilities that add up to n: in proportion to the weights, but 1 where they would exceed it."""
    largest = np.sort(weights)[::-1]
    rest = np.cumsum(largest[::-1])[::-1]  # the sum from each on
    # The first that need not be certain when all larger ones are.
    n_certain = int(np.argmax((n - np.arange(len(largest))) * largest <= rest * (1.0 + 1e-12)))
    return np.minimum(weights * ((n - n_certain) / rest[n_certain]), 1.0)
