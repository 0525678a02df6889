"""Weighted draws: how they are picked, and how well they tell moments and limits."""

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.psis import effective_size, khat_error, smoothed
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array

#: k-hat of the weights of a pool at most, but for its standard error.
MOST_KHAT = 0.5
#: Effective size at least of the draws in a tail with 5 % of the mass, as a part of all: equal weights have 0.05, six
#: fits of a walk whose scale had a limit 0.3 sd off 0.0025 to 0.0165.
LEAST_TAIL, _OF_TAIL = 0.02, 0.05
#: The largest of weights that are nearly even, over their mean.
_MOST_EVEN = 3.0
#: Neighbours that are not ordered any more.
_FEW = 2


def has_light_tail(khat: float, n_draws: int) -> bool:
    """Tell whether k-hat of the weights of so many draws is as low as that of a good pool, but for its error."""
    error = khat_error(khat, n_draws)
    return khat < MOST_KHAT + (error if np.isfinite(error) else 0.0)


def picked(weights: Array, uniform: Array) -> NDArray[np.intp]:
    """Return the rows that uniform numbers pick by weight."""
    total = np.cumsum(weights)
    return np.minimum(np.searchsorted(total / total[-1], uniform, side="right"), len(weights) - 1)


def evenly_picked(weights: Array, n: int, at: float) -> NDArray[np.intp]:
    """Return ``n`` rows by weight, as evenly as can be: at this part, from 0 to 1, of each of ``n`` equal steps."""
    return picked(weights, (np.arange(n) + at) / n)


def normalised_weights(log_weights: Array) -> Array:
    """Return weights that add up to 1."""
    return np.exp(log_weights - logsumexp(log_weights))


def smoothed_weights(log_ratio: Array) -> tuple[Array, float]:
    """Return weights with a smoothed tail, (n,), that add up to 1, and k-hat.

    No tail is heavy where weights are nearly even: of 1,000 with k = 0.5, the largest one is some 30 times their mean.
    """
    log_weights, khat = smoothed(log_ratio)
    is_even = np.exp(log_ratio.max() - logsumexp(log_ratio)) * len(log_ratio) < _MOST_EVEN
    return normalised_weights(log_weights), min(khat, 0.0) if is_even else khat


def relative_sd_errors(g: Array, weights: Array) -> Array:
    """Return relative standard errors of standard deviations over weighted draws, (p,), by the delta method [1]_.

    The influence of a draw on a variance v is w ((x - m)^2 - v). Of n equal weights of a Gaussian, this is
    1 / sqrt(2 n); of a thin tail that few draws are in, it is many times as large.

    References
    ----------
    .. [1] A. B. Owen (2013). Monte Carlo theory, methods and examples, chapter 9. https://artowen.su.domains/mc/
    """
    square = (g - weights @ g) ** 2
    variance = weights @ square
    influence = weights[:, None] * (square - variance)
    return 0.5 * np.sqrt(np.sum(influence**2, axis=0)) / np.where(variance > 0.0, variance, 1.0)


def tail_size(g: Array, weights: Array) -> float:
    """Return the effective size of the draws in a tail of a coordinate, the least of all: what limits rest on."""
    of_draws = weights[np.argsort(g, axis=0)]
    sizes = []
    for w in (of_draws, of_draws[::-1]):
        beyond = np.where(np.cumsum(w, axis=0) - w < _OF_TAIL, w, 0.0)
        sizes.append(beyond.sum(axis=0) ** 2 / (beyond**2).sum(axis=0))
    return float(np.min(sizes))


#: Interleaved parts of the draws of the globals, whose spread is the error of the normalising constant; and of draws of
#: equal weight.
N_PARTS = 8


@stored("exact.pool")
@dataclass(frozen=True, eq=False)
class Pool:
    """Weighted draws of the globals."""

    #: shape (n, p).
    g: Array
    #: log m, and the log density of the proposal; shape (n,).
    log_marginal: Array
    log_density: Array
    #: Number of an interleaved part; shape (n,).
    part: NDArray[np.intp]

    @property
    def log_ratio(self) -> Array:
        """Log weights before they are smoothed, (n,)."""
        return self.log_marginal - self.log_density

    def weights(self) -> tuple[Array, float]:
        """Return the smoothed weights, (n,), that add up to 1, and k-hat."""
        return smoothed_weights(self.log_ratio)

    def log_normaliser(self) -> tuple[float, float]:
        """Return the logarithm of the integral of m, and its standard error, from the spread of interleaved parts."""
        numbers = np.unique(self.part)
        means = np.array([_log_mean(self.log_ratio[self.part == i]) for i in numbers])
        value = _log_mean(means)
        if len(means) < 2:
            return value, float("inf")
        # Of few coordinates, parts are nearly the same: half of what independent draws have, at least.
        return value, max(
            float(np.std(np.exp(means - value), ddof=1) / np.sqrt(len(means))),
            0.5 * float(np.sqrt(1.0 / effective_size(self.log_ratio) - 1.0 / len(self.g))),
        )

    def check(self, n_globals: int) -> None:
        """Raise ValueError where the arrays do not go together."""
        n = len(self.g)
        shapes = {np.shape(a) for a in (self.log_marginal, self.log_density, self.part)}
        if shapes != {(n,)} or self.g.shape != (n, n_globals) or not np.isfinite(self.log_density).all():
            raise ValueError("the arrays of the pool do not go together")


def _log_mean(values: Array) -> float:
    return float(logsumexp(values) - np.log(len(values)))


def by_neighbours(points: Array) -> NDArray[np.intp]:
    """Return an order in which neighbours are near each other: halves, halved again along what is longest."""
    order, first = np.arange(len(points)), np.zeros(1, dtype=np.intp)
    w = np.full(len(points), 1.0 / len(points))
    while True:  # all parts at once
        size = np.diff(np.append(first, len(order)))
        part = np.repeat(np.arange(len(first)), size)
        x, goes_on = points[order], size > _FEW
        if not goes_on.any():
            return order
        mean = np.add.reduceat(w[:, None] * x, first) * (1.0 / np.add.reduceat(w, first))[:, None]
        longest = np.add.reduceat(w[:, None] * (x - mean[part]) ** 2, first).argmax(axis=1)
        along = np.where(goes_on[part], x[np.arange(len(x)), longest[part]], 0.0)
        order = order[np.lexsort((along, part))]
        reached = np.cumsum(w)
        reached -= (reached[first] - w[first])[part]
        half = 0.5 * reached[first + size - 1]
        below = np.add.reduceat((reached < half[part]).astype(np.intp), first)
        first = np.union1d(first, (first + np.clip(below, 1, np.maximum(size - 1, 1)))[goes_on])
