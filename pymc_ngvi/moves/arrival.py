"""Whether chains have arrived: chains that began at one point do not differ more than others, nor drift.

The chains of a superchain begin at one point. Chains that have not forgotten it are alike within their superchain, and
differ between superchains: where that is not much more than chance, they have forgotten it [1]_. Chains that never move
pass any comparison of chains that began apart, as draws of the same distribution; they do not pass this one.

All is judged by normal scores of ranks, of each quantity and of its distance from its median: means exist, and spreads
are judged as well as places. Ranks take little notice of a few draws that are very far out, but means do: no draw may
have a log p that is far below that of all others, as that of a chain is which has not left where it began.

References
----------
.. [1] C. C. Margossian, M. D. Hoffman, P. Sountsov, L. Riou-Durand, A. Vehtari and A. Gelman (2024). Nested R-hat:
   assessing the convergence of Markov chain Monte Carlo when running many short chains. Bayesian Analysis.
   https://doi.org/10.1214/24-BA1453
"""

import math

from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import rankdata

from pymc_ngvi.core.types import Array

#: Numbers that are ranked at once.
_AT_ONCE = 2**22
#: Change of a mean between halves, in standard deviations, that does not count; error of the first kind of all tests.
_SLIGHT, _LEVEL = 0.05, 0.01
#: How far below the median log p may be, in distances of a low quantile from it: tails of log p are exponential.
_LOW, _FARTHEST = 0.05, 10.0
#: Part of the draws whose log p tells what is high; parts that are looked at for chains that stay in a peak.
_HIGHEST, _PEAKS = 0.1, (0.01, 0.005, 0.0025)
#: Quantities whose effective sizes are computed: those that mix most slowly.
_MOST_SIZES = 32
#: Draws of a chain that an effective size takes.
_FEWEST_DRAWS = 4
#: The tails whose effective sizes count.
_TAILS = (0.05, 0.95)


class Mixing(NamedTuple):
    """What is measured of draws of chains, for each quantity, (n_quantities,); NaN of what is constant, or NaN.

    Parameters
    ----------
    rhat : ndarray
        Nested R-hat, the larger one of places and spreads.
    trend : ndarray
        Change between the halves of the chains, in its standard errors.
    memory : ndarray
        Correlation of successive draws, the larger one of places and spreads.
    """

    rhat: Array
    trend: Array
    memory: Array

    def joined(self, other: "Mixing") -> "Mixing":
        """Return that of these quantities and of others."""
        return Mixing(*(np.concatenate(both) for both in zip(self, other, strict=True)))


def nested_rhat(values: Array, n_starts: int) -> Array:
    """Return nested R-hat, (n_quantities,).

    Parameters
    ----------
    values : ndarray, shape (n_draws, n_chains, n_quantities)
        Chains that began at the same point are together.
    n_starts : int

    Examples
    --------
    >>> import numpy as np
    >>> frozen = np.broadcast_to(np.repeat(np.random.default_rng(1).normal(size=(8, 1)), 16, axis=0), (10, 128, 1))
    >>> bool(nested_rhat(frozen, 8)[0] > 1e6)
    True
    """
    n, n_chains, k = values.shape
    chains = values.mean(axis=0).reshape(n_starts, n_chains // n_starts, k)
    within = values.var(axis=0, ddof=1).mean(axis=0) if n > 1 else 0.0
    between = chains.mean(axis=1).var(axis=0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        rhat: Array = np.sqrt(1.0 + between / (chains.var(axis=1, ddof=1).mean(axis=0) + within))
    return rhat


def worth_of(values: Array, n_starts: int) -> float:
    """Return how many independent draws chains are worth, roughly: two of each superchain at least.

    Means of superchains differ by as much as means of so many draws do, in the median of quantities.

    Parameters
    ----------
    values : ndarray, shape (n_draws, n_chains, n_quantities)
    n_starts : int
    """
    rhat = nested_rhat(values, n_starts)
    square = float(np.median(rhat[np.isfinite(rhat)] ** 2 - 1.0)) if np.isfinite(rhat).any() else np.inf
    return float(np.clip(n_starts / max(square, 1e-9), 2.0 * n_starts, values.shape[0] * values.shape[1]))


def mixing_of(values: Array, n_starts: int) -> Mixing:
    """Return what is measured of the quantities of chains, (n_draws, n_chains, n_quantities)."""
    n, n_chains, k = values.shape
    each = max(1, _AT_ONCE // (n * n_chains))
    parts = [_of_columns(values[:, :, i : i + each], n_starts) for i in range(0, k, each)]
    return Mixing(*(np.concatenate(of_all) for of_all in zip(*parts, strict=True)))


def _of_columns(values: Array, n_starts: int) -> Mixing:
    shape = values.shape
    with np.errstate(invalid="ignore"):
        ranks = rankdata(values.reshape(-1, shape[2]).T, axis=1).T.reshape(shape)
        measured = [
            (nested_rhat(scores, n_starts), _trend(scores), _memory(scores)) for scores in _places_and_spreads(ranks)
        ]
    rhat, trend, memory = (np.maximum(a, b) for a, b in zip(*measured, strict=True))
    varies = np.ptp(ranks, axis=(0, 1)) > 0.0  # False for NaN
    return Mixing(*(np.where(varies, of, np.nan) for of in (rhat, trend, memory)))


def _places_and_spreads(ranks: Array) -> tuple[Array, Array]:
    """Return normal scores of quantities, and of their distances from the median, by the ranks of the first."""
    n = ranks.shape[0] * ranks.shape[1]
    return ndtri((ranks - 0.5) / n), ndtri(np.maximum(np.abs(2.0 * ranks - n - 1.0), 0.5) / n)


def _trend(scores: Array) -> Array:
    """Return by how much means change from one half of the chains to the other, in standard errors; 0 for little."""
    half = len(scores) // 2
    if not half:
        return np.zeros(scores.shape[2])
    changes = scores[-half:].mean(axis=0) - scores[:half].mean(axis=0)
    mean, error = changes.mean(axis=0), changes.std(axis=0, ddof=1) / np.sqrt(len(changes))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.abs(mean) > _SLIGHT, np.abs(mean) / error, 0.0)


def _memory(scores: Array) -> Array:
    """Return the correlation of successive draws."""
    apart = scores - scores.mean(axis=(0, 1))
    variance = (apart**2).mean(axis=(0, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        result: Array = (apart[1:] * apart[:-1]).mean(axis=(0, 1)) / variance
    return result


def is_far(logp: Array) -> NDArray[np.bool_]:
    """Tell which draws have a log p so low that they can be none of the posterior, by all draws, (n_draws, n_chains).

    Examples
    --------
    >>> import numpy as np
    >>> logp = -0.5 * np.random.default_rng(1).chisquare(5, (50, 128))
    >>> logp[:20, 3] = -1_000.0
    >>> int(is_far(logp).sum())
    20
    """
    low, middle = np.quantile(logp, [_LOW, 0.5])
    return logp < middle - _FARTHEST * (middle - low)


def peak_size(logp: Array) -> float:
    """Return the effective size of being among the highest draws by log p: small where few chains stay in a peak.

    That is the least one of a hundredth, and of a half and a quarter of it: a peak that is seldom entered hides among
    others.

    Parameters
    ----------
    logp : ndarray, shape (n_draws, n_chains)
    """
    from arviz_stats.base import array_stats

    if len(logp) < _FEWEST_DRAWS or not np.ptp(logp):
        return math.inf
    shown = np.ascontiguousarray(logp[:, :, None])
    sizes = [array_stats.ess(shown, chain_axis=1, draw_axis=0, method="quantile", prob=1.0 - part) for part in _PEAKS]
    return float(np.min(sizes))


def height_above(logp: Array, highest: float) -> float:
    """Return how far log p at points on the way was above that at all draws, in ranges of the highest tenth of these.

    Where chains have arrived, points on their way are distributed as draws are, but for errors of the steps. There are
    a few for each draw: if log p has an upper tail as that of an exponential, the highest one of these is beyond a
    whole range with a chance of about one in a hundred. It is far beyond where chains pass by a narrow peak, into
    which no trajectory leads. A range is one nat at least.

    Parameters
    ----------
    logp : ndarray
        At draws.
    highest : float
        At points on the way.
    """
    top = float(logp.max())
    return (highest - top) / max(top - float(np.quantile(logp, 1.0 - _HIGHEST)), 1.0)


def most_trend(n_quantities: int) -> float:
    """Return the standard errors that a change of so many quantities may have by chance."""
    return float(-ndtri(_LEVEL / (4.0 * max(n_quantities, 1))))  # two sides, places and spreads


def effective_sizes(values: Array, memory: Array) -> tuple[float, float]:
    """Return the least effective sizes, bulk and tail, of those quantities that mix most slowly.

    Parameters
    ----------
    values : ndarray, shape (n_draws, n_chains, n_quantities)
    memory : ndarray, shape (n_quantities,)
        By which these are known; NaN of what is left out.
    """
    from arviz_stats.base import array_stats  # which takes a while to import

    known = np.flatnonzero(np.isfinite(memory))
    slowest = known[np.argsort(-memory[known], kind="stable")[:_MOST_SIZES]]
    if not len(slowest):
        return math.inf, math.inf
    if len(values) < _FEWEST_DRAWS:
        return 0.0, 0.0
    shown = np.ascontiguousarray(values[:, :, slowest])
    bulk = array_stats.ess(shown, chain_axis=1, draw_axis=0, method="bulk")
    tail = array_stats.ess(shown, chain_axis=1, draw_axis=0, method="tail", prob=_TAILS)
    return float(np.min(bulk)), float(np.min(tail))
