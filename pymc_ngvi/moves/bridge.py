"""Masses of log p in regions by bridge sampling [1]_, and the weights of modes that follow.

The bridge goes from a Gaussian, fitted to some of the draws, to the other draws. Its optimum counts draws of the
posterior by their effective number; its error is that of means of bounded functions, and so known well [2]_.

References
----------
.. [1] X.-L. Meng and W. H. Wong (1996). Simulating ratios of normalizing constants via a simple identity: a theoretical
   exploration. Statistica Sinica 6. https://www.jstor.org/stable/24306045
.. [2] Q. F. Gronau et al. (2017). A tutorial on bridge sampling. Journal of Mathematical Psychology 81.
   https://doi.org/10.1016/j.jmp.2017.09.005
"""

import math

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.types import Array
from pymc_ngvi.moves.coordinates import ChainCoordinates

#: Draws of each Gaussian.
_N_DRAWS = 4_096
#: Iterations for the optimum, and the change of the log mass that ends them.
_MOST_ITERATIONS, _SAME = 1_000, 1e-9
#: Error of a log mass beyond which neither is known.
MOST_ERROR = 0.3


class LogMass(NamedTuple):
    """The logarithm of an integral of exp(log p), and its standard error, nats."""

    value: float
    se: float


UNKNOWN = LogMass(math.nan, math.nan)


def log_mass(
    log_p: Callable[[Array], Array],
    coordinates: ChainCoordinates,
    x: Array,
    logp: Array,
    n_starts: int,
    size: float,
    rng: np.random.Generator,
) -> LogMass:
    """Return the log mass of what chains are draws of.

    Gaussians are fitted to every second superchain, and met by the draws of the others; then the other way round.
    """
    is_even = np.arange(x.shape[1]) // (x.shape[1] // n_starts) % 2 == 0

    def by(half: NDArray[np.bool_]) -> LogMass:
        gaussian = coordinates.refitted(x[:, ~half].reshape(-1, x.shape[2]), 0.5 * size)
        return _bridge(log_p, gaussian, x[:, half], logp[:, half], rng)

    one, other = by(is_even), by(~is_even)
    se = 0.5 * max(math.hypot(one.se, other.se), abs(one.value - other.value))
    return LogMass(0.5 * (one.value + other.value), math.inf if math.isnan(se) else se)


def _bridge(
    log_p: Callable[[Array], Array], gaussian: ChainCoordinates, x: Array, logp: Array, rng: np.random.Generator
) -> LogMass:
    """Return the log mass by the draws of a Gaussian, and those of chains that it was not fitted to."""
    proposed = gaussian.draws(rng.standard_normal((_N_DRAWS, gaussian.n_dim)))
    with np.errstate(all="ignore"):
        of_proposed = log_p(proposed) - gaussian.log_density(proposed)
        of_draws = logp - gaussian.log_density(x.reshape(-1, x.shape[2])).reshape(logp.shape)
    of_proposed = np.where(np.isfinite(of_proposed), of_proposed, -np.inf)
    if not np.isfinite(of_proposed).any():
        return LogMass(math.nan, math.inf)
    value, n = float(np.median(of_draws)), float(of_draws.size)
    for _ in range(2):  # the second time with the effective number of the draws
        value = _optimum(of_draws.ravel(), of_proposed, n, value)
        at_proposed, at_draws = _bounded(of_proposed - value, of_draws - value, n)
        n = _effective(at_draws)
    square = _relative_variance(at_proposed) / _N_DRAWS + _relative_variance(at_draws) / n
    return LogMass(value, math.sqrt(square) if math.isfinite(square) else math.inf)


def _optimum(of_draws: Array, of_proposed: Array, n: float, value: float) -> float:
    """Return the log mass at which the optimal bridge with this mass gives it back; iterated from a first value."""
    log_s, log_t = math.log(n / (n + _N_DRAWS)), math.log(_N_DRAWS / (n + _N_DRAWS))
    for _ in range(_MOST_ITERATIONS):
        above = logsumexp(of_proposed - np.logaddexp(log_s + of_proposed, log_t + value)) - math.log(_N_DRAWS)
        below = logsumexp(-np.logaddexp(log_s + of_draws, log_t + value)) - math.log(len(of_draws))
        change, value = abs(above - below - value), float(above - below)
        if not change > _SAME:
            break
    return value


def _bounded(of_proposed: Array, of_draws: Array, n: float) -> tuple[Array, Array]:
    """Return p / (s p + t g) at proposed draws, and g / (s p + t g) at draws, p being normalised."""
    s, t = n / (n + _N_DRAWS), _N_DRAWS / (n + _N_DRAWS)
    with np.errstate(over="ignore"):
        return 1.0 / (s + t * np.exp(-of_proposed)), 1.0 / (s * np.exp(of_draws) + t)


def _relative_variance(values: Array) -> float:
    mean = float(values.mean())
    return float(values.var()) / mean**2 if mean > 0.0 else math.inf


def _effective(values: Array) -> float:
    """Return the effective number of draws of chains, (n_draws, n_chains), for a mean."""
    from arviz_stats.base import array_stats  # which takes a while to import

    size = float(array_stats.ess(values[:, :, None], chain_axis=1, draw_axis=0, method="mean")[0])
    return min(size, values.size) if size > 0.0 else 1.0  # NaN of what is constant, or of few draws


@dataclass(frozen=True)
class ModeWeights:
    """Weights of modes."""

    #: With their standard errors; shape (n_modes,).
    weights: Array
    errors: Array
    #: Independent draws whose numbers at the modes would tell any mean as well.
    size: float
    total: LogMass

    @classmethod
    def of(cls, masses: Sequence[LogMass]) -> Self:
        """Return those of log masses with independent errors; of size 0 where one of them is not known."""
        values, se = np.array(masses).T
        if not (se <= MOST_ERROR).all():
            return cls(np.full(len(se), math.nan), np.full(len(se), math.inf), 0.0, UNKNOWN)
        total = float(logsumexp(values))
        weights = np.exp(values - total)
        # Of the log masses' errors e, weights change by w (e - sum w e).
        root = weights[:, None] * (np.eye(len(weights)) - weights) * se
        scaled = root / np.sqrt(np.maximum(weights, np.finfo(np.float64).tiny))[:, None]
        worst = float(np.linalg.norm(scaled, 2))
        error = float(np.linalg.norm(weights * se))
        return cls(weights, np.linalg.norm(root, axis=1), worst**-2 if worst > 0.0 else math.inf, LogMass(total, error))
