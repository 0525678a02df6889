"""Basins of log p that chains do not cross: which there are, and which one a point is in.

A point is in the basin of the mode that a climb from there ends at. Any division of the space would do for the weights
of modes, as long as it is the same for all draws; this one leaves few draws near a border. Where one of the Gaussians
about the modes explains a point far better than the others do, no climb is needed.
"""

import math

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.climbs import MOST_STEPS, ascend, tops
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.types import Array, HasGradient
from pymc_ngvi.moves.coordinates import ChainCoordinates

# --- basins of log p that chains do not cross: which there are, and which one a point is in ---

#: Basins at most.
MOST_BASINS = 8
#: Nats that another step may gain where a climb has ended at a mode.
_FLAT = 1.0
#: Variance of the means of chains in a round, over that within them, from which on they may be in several basins; or
#: the square of the distance of one of them from all.
_APART, _FAR = 0.4, 9.0
#: Part of the chains that change basins within a round, from which on these are no separate ones.
_MOST_CROSSED = 0.25
#: Nats by which a Gaussian has to explain a point better than the others, and standard deviations that the square of
#: the distance from its mean may be above that of most draws, where no climb is needed.
_CLEAR, _TYPICAL = 10.0, 3.0
#: Independent draws that a chain in a round is worth, about.
_WORTH = 4.0


class Climbs(NamedTuple):
    """Climbs of log p in coordinates of chains."""

    target: HasGradient
    coordinates: ChainCoordinates
    #: Length of a step at most: that of chains on trajectories, which do not jump over valleys.
    longest: float

    def ends(self, x: Array) -> tuple[Array, Array]:
        """Return where climbs from points end, in the coordinates, and log p there."""
        with np.errstate(all="ignore"):
            return ascend(self, self.coordinates.w(x), MOST_STEPS, self.longest)

    def logp_grad(self, w: Array, /) -> tuple[Array, Array]:
        """Evaluate log p and its gradient in the coordinates."""
        logp, grad = self.target.logp_grad(self.coordinates.draws(w))
        with np.errstate(invalid="ignore", over="ignore"):
            return logp, self.coordinates.slope(grad)


class Counted:
    """A log density that counts its evaluations, in ``n``, and knows the highest value so far, in ``highest``."""

    def __init__(self, target: HasGradient) -> None:
        self._target, self.n, self.highest = target, 0, -np.inf

    def logp_grad(self, theta: Array, /) -> tuple[Array, Array]:
        """Evaluate log p and its gradient."""
        self.n += len(theta)
        logp, grad = self._target.logp_grad(theta)
        self.highest = float(logp[np.isfinite(logp)].max(initial=self.highest))
        return logp, grad


@dataclass(frozen=True, eq=False)
class Basins:
    """A division of the space by where climbs of log p end."""

    climbs: Climbs
    #: In the coordinates of climbs; shape (n_basins, n_dim).
    modes: Array
    #: Those of the draws in each basin.
    about: list[ChainCoordinates]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.modes)

    def labels(self, x: Array) -> NDArray[np.intp]:
        """Return the basin of each point, (n_points,)."""
        result, clear = self.explained(x)
        unclear = np.flatnonzero(~clear)
        if len(unclear):
            result[unclear] = _nearest(self.modes, self.climbs.ends(x[unclear])[0])
        return result

    def inside(self, number: int, x: Array) -> NDArray[np.bool_]:
        """Tell which points are in a basin."""
        return self.labels(x) == number

    def explained(self, x: Array) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Return which Gaussian explains each point best, and whether that is clear."""
        d = x.shape[1]
        with np.errstate(invalid="ignore", over="ignore"):
            logs = np.nan_to_num(np.array([about.log_density(x) for about in self.about]), nan=-np.inf)
            best = np.argmax(logs, axis=0)
            first, second = -np.sort(-logs, axis=0)[:2]
            top = np.array([about.log_density(about.mean()[None])[0] for about in self.about])
            square = 2.0 * (top[best] - first)
            return best, (first - second > _CLEAR) & (square < d + _TYPICAL * np.sqrt(2.0 * d))


def are_apart(x: Array) -> bool:
    """Tell whether chains, (n_draws, n_chains, n_dim), are so far apart that they may be in several basins."""
    means, within = x.mean(axis=0), x.var(axis=0, ddof=1).mean(axis=0)
    squares = (means - means.mean(axis=0)) ** 2
    return bool(((squares.mean(axis=0) > _APART * within) | (squares.max(axis=0) > _FAR * within)).any())


def basins_among(climbs: Climbs, x: Array) -> Basins | None:
    """Return the basins that chains are in, and do not cross; None where there is one, or too many, or chains cross."""
    ends, logp = climbs.ends(x[-1])
    modes = ends[tops(lambda w: climbs.logp_grad(w)[0], ends, logp, MOST_BASINS + 1)]
    if not 1 < len(modes) <= MOST_BASINS:
        return None
    slopes = np.linalg.norm(climbs.logp_grad(modes)[1], axis=1)
    if not (slopes * climbs.longest < _FLAT).all():  # climbs that have not got to an end are at no mode
        return None
    now, before = _nearest(modes, ends), _nearest(modes, climbs.ends(x[0])[0])
    stayed = before == now
    parts = [x[:, stayed & (now == i)] for i in range(len(modes))]
    if stayed.mean() < 1.0 - _MOST_CROSSED or not all(part.size for part in parts):
        return None
    about = [climbs.coordinates.refitted(of.reshape(-1, of.shape[2]), _WORTH * of.shape[1]) for of in parts]
    basins = Basins(climbs, modes, about)
    best, clear = basins.explained(x[-1])
    return basins if (best[clear] == now[clear]).all() else None


def _nearest(modes: Array, ends: Array) -> NDArray[np.intp]:
    return np.argmin([np.sum((ends - mode) ** 2, axis=1) for mode in modes], axis=0)


# --- masses of log p in regions by bridge sampling [1]_, and the weights of modes that follow ---
# The bridge goes from a Gaussian, fitted to some of the draws, to the other draws. Its optimum counts draws of the
# posterior by their effective number; its error is that of means of bounded functions, and so known well [2]_.
#
# References
# ----------
# .. [1] X.-L. Meng and W. H. Wong (1996). Simulating ratios of normalizing constants via a simple identity: a
#    theoretical exploration. Statistica Sinica 6. https://www.jstor.org/stable/24306045
# .. [2] Q. F. Gronau et al. (2017). A tutorial on bridge sampling. Journal of Mathematical Psychology 81.
#    https://doi.org/10.1016/j.jmp.2017.09.005

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
        s, t = n / (n + _N_DRAWS), _N_DRAWS / (n + _N_DRAWS)
        with np.errstate(over="ignore"):  # p / (s p + t g) and g / (s p + t g), which are bounded, p being normalised
            at_proposed, at_draws = (
                1.0 / (s + t * np.exp(value - of_proposed)),
                1.0 / (s * np.exp(of_draws - value) + t),
            )
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
