"""Importance sampling: Pareto-smoothed weights, k-hat, and ratios of integrals by bridge sampling [1]_.

The optimal bridge averages bounded functions, so that its error is known well [2]_, where draws of the one come near
those of the other; where they do not, few draws have all of a mean, which k-hat tells.

References
----------
.. [1] X.-L. Meng and W. H. Wong (1996). Simulating ratios of normalizing constants via a simple identity: a
   theoretical exploration. Statistica Sinica 6. https://www.jstor.org/stable/24306045
.. [2] Q. F. Gronau et al. (2017). A tutorial on bridge sampling. Journal of Mathematical Psychology 81.
   https://doi.org/10.1016/j.jmp.2017.09.005
"""

from enum import Enum
from typing import NamedTuple

import numpy as np

from scipy.special import boxcox, softmax

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.types import Array, Indices

# --- Pareto-smoothed importance sampling: weights, k-hat, and what they say of q ---
#
# `Weights.verdict` is the one judgement that summaries, diagnoses, corrections and pictures share.

# --- a generalised Pareto distribution in the place of the largest importance weights ---

#: Weights in a tail: a part of all where these are few, and a multiple of the square root of how many there are.
_PART, _OF_ROOT = 5, 3.0
#: Fewer make no tail.
_LEAST = 5
#: Of the estimate of the shape: the prior of its scale, and the shape towards which it shrinks, worth so many draws.
_PRIOR_SCALE, _PRIOR_SHAPE, _PRIOR_DRAWS = 3.0, 0.5, 10
#: Relative variance of weights below which both densities are the same: no mean differs by more than 0.0004 sds.
SAME = float(np.finfo(np.float32).eps)
#: Weights of a mean that are left out.
_NEGLIGIBLE = 10.0 * np.finfo(float).eps
#: What counts as 0: its reciprocal is far from an overflow.
_NOTHING = np.sqrt(np.finfo(float).tiny)


def smoothed_tail(log_weights: Array) -> tuple[Array, float]:
    """Replace the largest weights by quantiles of the generalised Pareto distribution that fits them.

    References
    ----------
    .. [1] Vehtari, Simpson, Gelman, Yao, Gabry (2024). Pareto smoothed importance sampling. JMLR 25(72).
    """
    n, result = len(log_weights), log_weights - log_weights.max()
    n_tail = tail_length(n)
    order = np.argsort(result)
    tail, below = order[n - n_tail :], order[n - n_tail - 1]
    if n_tail < _LEAST or np.ptp(result[tail]) < np.finfo(float).tiny:
        return result - logsumexp(result), float("-inf")
    cutoff, largest = np.exp(result[below]), result[tail].max()
    shape, scale = fitted_pareto(np.exp(result[tail]) - cutoff)
    if np.isfinite(shape) and scale > 0.0:
        at = (np.arange(n_tail) + 0.5) / n_tail
        # Quantiles are scale ((1 - at)^-shape - 1) / shape, or, where the shape is 0, those of an exponential.
        result[tail] = np.minimum(np.log(cutoff - scale * boxcox(1.0 - at, -shape)), largest)
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
    if quartile <= max(excess[0], _NOTHING):
        return float("inf"), float("nan")
    n_slopes = 30 + int(np.sqrt(n))
    steps = 1.0 - np.sqrt(n_slopes / (np.arange(n_slopes) + 0.5))
    slopes = 1.0 / excess[-1] + steps / (_PRIOR_SCALE * quartile)
    shapes = np.log1p(-np.outer(slopes, excess)).mean(axis=1)
    share = softmax(n * (np.log(-slopes / shapes) - shapes - 1.0))
    kept = share >= _NEGLIGIBLE
    slope = float(slopes[kept] @ share[kept] / share[kept].sum())
    shape = float(np.log1p(-slope * excess).mean())
    shrunk = (n * shape + _PRIOR_DRAWS * _PRIOR_SHAPE) / (n + _PRIOR_DRAWS)
    return (np.inf if np.isnan(shape) else shrunk), -shape / slope


# --- Pareto-smoothed importance sampling: weights, k-hat, and what they say of q ---

#: k-hat above which no number of draws is enough.
MOST_KHAT = 0.7
#: Fewer draws leave too short a tail to fit a Pareto distribution to.
MIN_KHAT_DRAWS = 100
#: Log weights this far below the smallest finite one count as none: less than the smallest double.
_NO_WEIGHT = 700.0
#: Log ratios that differ by less are those of a q that is the posterior.
_ALL_EQUAL = 1e-8
#: Relative variance up to which weights count as nearly equal, the draws that it has to rest on, and part of the draws
#: that may be lost.
_EVEN, _LEAST_BEHIND, _MOST_LOST = 1.0 / 9.0, 30.0, 0.001
#: k-hat, and part of the draws that weights are worth, beyond which, in so few dimensions, weights are uneven for
#: another reason than the number of coordinates or the far tails.
_WORST_KHAT, _LEAST_EFFECTIVE, _FEW = 1.0, 0.02, 50


def smoothed(log_ratio: Array) -> tuple[Array, float]:
    """Return log weights with a Pareto-smoothed tail, and the shape of the tail, k-hat."""
    finite = np.isfinite(log_ratio)
    if not finite.any():
        return np.full(len(log_ratio), -np.inf), float("inf")
    filled = np.where(finite, log_ratio, log_ratio[finite].min() - _NO_WEIGHT)
    if np.ptp(filled) < _ALL_EQUAL:
        return filled, float("-inf")
    with np.errstate(over="ignore"):  # quantiles of a tail that is very heavy; none is above the largest weight
        smooth, khat = smoothed_tail(filled)
    return np.where(finite, smooth, -np.inf), khat


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
    return np.inf if np.any(log_ratio == np.inf) else smoothed(log_ratio)[1]


def khat_limit(n_draws: int) -> float:
    """Return the k-hat above which estimates weighted by ``n_draws`` draws can't be trusted."""
    return min(1.0 - 1.0 / float(np.log10(n_draws)), MOST_KHAT)


def tail_length(n_draws: int) -> int:
    """Return how many of the weights of so many draws count to their tail."""
    return int(min(n_draws / _PART, _OF_ROOT * np.sqrt(n_draws)))


def khat_error(khat: float, n_draws: int) -> float:
    """Return the standard error of a k-hat, NaN where that is infinite.

    Notes
    -----
    That of the maximum likelihood estimate of the shape of a generalised Pareto distribution, (1 + k) / sqrt(M) for M
    draws in the tail [1]_, shrunk as the estimate is towards a half.

    References
    ----------
    .. [1] R. L. Smith (1987). Estimating tails of probability distributions. Annals of Statistics 15(3).
       https://doi.org/10.1214/aos/1176350499
    """
    n_tail = tail_length(n_draws)
    return float(max(1.0 + khat, 0.5) * np.sqrt(n_tail) / (n_tail + _PRIOR_DRAWS)) if np.isfinite(khat) else np.nan


class WeightVerdict(Enum):
    """What importance weights say of q; its value is a clause."""

    EVEN = "importance weights are nearly equal, so the approximation is close to the posterior wherever it has draws."
    USABLE = "importance weights can correct the approximation: approx.corrected()."
    UNEVEN = (
        "importance weights can't correct the approximation, as its tails are lighter than those of the posterior, or "
        "there are many parameters."
    )
    FAR = "importance weights can't correct the approximation, as it has hardly any draws in much of the posterior."
    UNKNOWN = "there are too few draws to judge importance weights."

    @property
    def helps(self) -> bool:
        """Whether estimates can be weighted."""
        return self in (WeightVerdict.EVEN, WeightVerdict.USABLE)


class Weights(NamedTuple):
    """What importance weights p/q say of q as a whole.

    Parameters
    ----------
    khat : float
        Pareto shape of their tail: -inf where they are equal, inf where one draw, or none, has all the weight.
    effective : float
        Effective sample size: 1 / sum of squared weights, their tail smoothed unless they are nearly equal.
    n_draws : int
    n_lost : int
        Draws at which log p or log q is not finite.
    uneven : float
        Upper bound of the variance of the weights, relative to their mean squared, by its own standard error.
    n_behind : float
        Effective number of draws that this variance rests on.

    Notes
    -----
    The variance of the weights bounds what q is off by: a mean by its square root, in standard deviations of q, a
    variance by the root of twice as much (Cauchy and Schwarz). Up to a ninth, that is a third of a standard deviation.
    It can be taken at its word where it does not rest on a handful of draws [1]_, and weights can be used then;
    otherwise larger weights still are to be expected of more draws, and k-hat decides.

    References
    ----------
    .. [1] A. B. Owen (2013). Monte Carlo theory, methods and examples, section 9.3. https://artowen.su.domains/mc/
    """

    khat: float
    effective: float
    n_draws: int
    n_lost: int
    uneven: float = float("inf")
    n_behind: float = 0.0

    def verdict(self, n_dim: int = 0) -> WeightVerdict:
        """Return what the weights say: the one judgement that all reports share.

        Parameters
        ----------
        n_dim : int, default 0
            Dimension of q: in many, weights are uneven for a good q, too. 0: not known.
        """
        if self.n_draws < MIN_KHAT_DRAWS:
            return WeightVerdict.UNKNOWN
        enough = self.khat == -np.inf or self.n_behind >= _LEAST_BEHIND
        if enough and self.n_lost <= _MOST_LOST * self.n_draws and self.uneven <= _EVEN:
            return WeightVerdict.EVEN
        if enough or self.khat <= khat_limit(self.n_draws):
            return WeightVerdict.USABLE
        is_far = self.khat > _WORST_KHAT and self.effective < _LEAST_EFFECTIVE * self.n_draws
        return WeightVerdict.FAR if 0 < n_dim <= _FEW and is_far else WeightVerdict.UNEVEN

    def sentence(self, n_dim: int = 0) -> str:
        """Return k-hat with its error, and what that means."""
        return f"Pareto k-hat is {self.khat_text()}: {self.verdict(n_dim).value}"

    def khat_text(self) -> str:
        """Return k-hat and its standard error."""
        error = khat_error(self.khat, self.n_draws)
        return f"{self.khat:.2f}" + (f" ± {error:.2f}" if np.isfinite(error) else "")


def weigh(log_p: Array, log_q: Array | float = 0.0) -> tuple[Array, Weights]:
    """Smooth importance weights, and say how even they are.

    Parameters
    ----------
    log_p, log_q : ndarray, shape (n_draws,)
        Log densities at draws of q; constants do not matter.

    Returns
    -------
    log_weights : ndarray, shape (n_draws,)
        Normalised; -inf where p is 0 or not known, and everywhere for fewer than 100 finite ones. Weights that are all
        but equal are left as they are: a tail of that shape would be smoothed to one that is heavier.
    weights : Weights

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(1).normal(size=10_000)
    >>> weigh(log_p=-0.5 * (x / 1.05) ** 2, log_q=-0.5 * x**2)[1].verdict().name
    'EVEN'
    >>> weigh(log_p=-0.5 * (x / 3.0) ** 2, log_q=-0.5 * x**2)[1].verdict().name
    'UNEVEN'
    """
    with np.errstate(invalid="ignore"):
        ratio = np.asarray(log_p, dtype=np.float64) - np.asarray(log_q, dtype=np.float64)
    n, finite = len(ratio), np.isfinite(ratio)
    n_lost = n - int(finite.sum())
    if n - n_lost < MIN_KHAT_DRAWS:
        return np.full(n, -np.inf), Weights(float("inf"), 0.0, n, n_lost)
    raw = np.where(finite, ratio, -np.inf)
    raw = raw - logsumexp(raw)
    uneven, n_behind = _unevenness(np.exp(raw))
    smooth, khat = smoothed(ratio)
    if np.any(ratio == np.inf):
        khat = float("inf")
    smooth = smooth - logsumexp(smooth)
    found = Weights(khat, effective_size(smooth), n, n_lost, uneven, n_behind)
    even = found.verdict() is WeightVerdict.EVEN
    return (raw, found._replace(effective=effective_size(raw))) if even else (smooth, found)


def effective_size(log_weights: Array) -> float:
    """Return (sum w)^2 / sum w^2, 0 where there are no weights."""
    top = log_weights.max(initial=-np.inf)
    if not np.isfinite(top):
        return 0.0
    w = np.exp(log_weights - top)
    return float(w.sum() ** 2 / (w**2).sum())


def _unevenness(weights: Array) -> tuple[float, float]:
    """Return an upper bound of the relative variance of weights, and the draws that it rests on."""
    square = (len(weights) * weights - 1.0) ** 2
    total = square.sum()
    if not total > 0.0:
        return 0.0, float(len(weights))
    n_behind = float(total**2 / np.sum(square**2))
    return float(square.mean() * (1.0 + 2.0 / np.sqrt(n_behind))), n_behind


# --- ratios of integrals by bridge sampling ---

#: Iterations for the optimum, and the change of the log ratio that ends them.
_MOST_ITERATIONS, _SAME = 1_000, 1e-9


class Estimate(NamedTuple):
    """The logarithm of a mean or of an integral, its standard error in nats, and the k-hat of what is averaged."""

    value: float
    se: float
    khat: float = -np.inf


UNKNOWN = Estimate(np.nan, np.nan)


def log_mean(log_values: Array, log_weights: Array, worth: float = 1.0, part: Indices | None = None) -> Estimate:
    """Return the log of a weighted mean; each draw is worth so many independent ones, or only parts are independent."""
    log_weights = log_weights - logsumexp(log_weights)
    value = logsumexp(log_weights + log_values)
    with np.errstate(over="ignore", invalid="ignore"):
        moved = np.exp(log_weights + log_values - value) - np.exp(log_weights)
        if part is not None:
            moved = np.bincount(np.unique(part, return_inverse=True)[1], moved)
            moved = moved * np.sqrt(len(moved) / (len(moved) - 1.0)) if len(moved) > 1 else np.full(1, np.inf)
    return Estimate(float(value), float(np.sqrt(moved @ moved / worth)), smoothed(log_weights + log_values)[1])


class Side(NamedTuple):
    """Draws of one of two densities."""

    #: Log of the first density over the second, neither of them normalised; shape (n_draws,).
    log_ratio: Array
    log_weights: Array
    #: Independent draws that each is worth.
    worth: float = 1.0

    @property
    def size(self) -> float:
        """How many independent draws of equal weight they are worth."""
        return self.worth * effective_size(self.log_weights)


def bridge(first: Side, second: Side) -> Estimate:
    """Return the logarithm of the integral of the first density over that of the second."""
    log_s, log_t = np.log([first.size, second.size]) - np.log(first.size + second.size)
    value, total = float(np.median(first.log_ratio)), logsumexp(first.log_weights) - logsumexp(second.log_weights)
    for _ in range(_MOST_ITERATIONS):
        at_first = -np.logaddexp(log_s + first.log_ratio, log_t + value)
        at_second = second.log_ratio - np.logaddexp(log_s + second.log_ratio, log_t + value)
        last, value = value, logsumexp(second.log_weights + at_second) - logsumexp(first.log_weights + at_first) + total
        if not abs(value - last) > _SAME:
            break
    ends = log_mean(at_first, *first[1:]), log_mean(at_second, *second[1:])
    return Estimate(float(value), float(np.hypot(ends[0].se, ends[1].se)), max(of.khat for of in ends))
