"""How chains move: coordinates, trajectories, basins that they do not cross, and the masses of these.

A point is in the basin of the mode that a climb from there ends at. Any division of the space would do for the weights
of modes, as long as it is the same for all draws; this one leaves few draws near a border. Where one of the Gaussians
about the modes explains a point far better than the others do, no climb is needed.
"""

import math

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from pymc_ngvi.core.batch import Batch
from pymc_ngvi.core.climbs import MOST_STEPS, ascend, tops
from pymc_ngvi.core.draws import N_REPLICATES
from pymc_ngvi.core.importance import UNKNOWN, Estimate, Side, bridge
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.sizes import N_PREDICTED, N_REWEIGHTED
from pymc_ngvi.core.types import Array, Bools, GaussianState, HasGradient, Indices, base_draws_of

# --- coordinates in which chains move: whitened by a Gaussian, then by what the chains have seen ---

#: Draws at most from which directions are found.
_MOST_DRAWS = N_PREDICTED
#: By how much an eigenvalue is beyond the edge of noise.
_BEYOND = 1.05
#: Draws that the prior of a variance, 1, counts for.
_OF_PRIOR = 5.0


@dataclass(frozen=True, eq=False)
class ChainCoordinates:
    """Coordinates w with x = mean + C (centre + scale * S w), S = I + U (root - 1) U^T.

    C whitens the Gaussian. All else is found of draws: the centre, scales, and the few directions U in which their
    variance, ``root`` squared, is not that of noise. At first, w is whitened by the Gaussian alone.
    """

    gaussian: GaussianState
    #: shape (n_dim,).
    centre: Array
    scale: Array
    #: Orthonormal columns; shape (n_dim, n_directions).
    directions: Array
    #: shape (n_directions,).
    root: Array

    @classmethod
    def of(cls, gaussian: GaussianState) -> Self:
        """Return those that a Gaussian whitens."""
        d = gaussian.n_dim
        return cls(gaussian, np.zeros(d), np.ones(d), np.zeros((d, 0)), np.zeros(0))

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return len(self.scale)

    def draws(self, w: Array) -> Array:
        """Return the points of coordinates, (n_points, n_dim): draws of a Gaussian, where these are standard normal."""
        return self.gaussian.draws(self.centre + self.scale * self._stretched(w, self.root))

    def mean(self) -> Array:
        """Return the point of coordinates 0, (n_dim,)."""
        return self.draws(np.zeros((1, self.n_dim)))[0]

    def log_density(self, x: Array) -> Array:
        """Return the log density of the Gaussian that the coordinates whiten, (n_points,)."""
        at_mean = float(self.gaussian.log_density(self.gaussian.mean()[None])[0])
        log_det = float(np.log(self.scale).sum() + np.log(self.root).sum())
        return at_mean - log_det - 0.5 * np.sum(self.w(x) ** 2, axis=1)

    def _stretched(self, w: Array, root: Array) -> Array:
        return w + ((w @ self.directions) * (root - 1.0)) @ self.directions.T

    def velocity(self, momenta: Array) -> Array:
        """Return C (scale * S p), (n_points, n_dim)."""
        stretched = self.scale * self._stretched(momenta, self.root)
        return self.gaussian.draws(stretched) - self.gaussian.mean()

    def slope(self, grad: Array) -> Array:
        """Return the gradients in these coordinates, (n_points, n_dim)."""
        return self._stretched(self.scale * self.gaussian.whiten(grad), self.root)

    def w(self, x: Array) -> Array:
        """Return points in these coordinates, (n_points, n_dim)."""
        return self._stretched((base_draws_of(self.gaussian, x) - self.centre) / self.scale, 1.0 / self.root)

    def refitted(self, x: Array, size: float) -> Self:
        """Return coordinates found of draws, (n_draws, n_dim), that are worth ``size`` independent ones.

        An eigenvalue of their correlations counts where it is beyond what noise gives [1]_.

        References
        ----------
        .. [1] I. M. Johnstone (2001). On the distribution of the largest eigenvalue in principal components analysis.
           Annals of Statistics 29(2). https://doi.org/10.1214/aos/1009210544
        """
        z = base_draws_of(self.gaussian, x)
        weight = size / (size + _OF_PRIOR)
        centre, scale = z.mean(axis=0), np.sqrt(weight * z.var(axis=0) + 1.0 - weight)
        directions, root = _directions((z - centre) / scale, size)
        return type(self)(self.gaussian, centre, scale, directions, root)


def _directions(v: Array, size: float) -> tuple[Array, Array]:
    """Return directions in which the variance of standardised draws is not 1, and its roots."""
    v = v[:: -(-len(v) // _MOST_DRAWS)]
    n, d = v.shape
    if d <= n:
        values, vectors = np.linalg.eigh(v.T @ v / n)
    else:
        values, left = np.linalg.eigh(v @ v.T / n)
        vectors = v.T @ left / np.sqrt(n * np.maximum(values, np.finfo(np.float64).tiny))
    edge = np.sqrt(d / min(size, n))
    far = values > _BEYOND * (1.0 + edge) ** 2
    if edge < 1.0:
        far |= (values < (1.0 - edge) ** 2 / _BEYOND) & (values > 0.0)
    return vectors[:, far], np.sqrt(values[far])


# --- Hamiltonian trajectories of many points at once, accepted or refused by Metropolis ---
# References
# ----------
# .. [1] R. M. Neal (2011). MCMC using Hamiltonian dynamics. Handbook of Markov Chain Monte Carlo, chapter 5.
#    https://doi.org/10.1201/b10905-6

#: Nats that a trajectory may lose before it is said to diverge, as in Stan. What ends where there is no log p does not.
_MOST_LOST = 1_000.0


@dataclass
class PhasePoints(Batch):
    """Where points are, with log p and its whitened gradient; rows are independent."""

    x: Array
    logp: Array
    slope: Array

    @property
    def finite(self) -> Bools:
        """Where log p and its gradient are finite."""
        return np.isfinite(self.logp) & np.isfinite(self.slope).all(axis=1)


#: Told the number of the step, where points are on their trajectories, and the probabilities of stopping there.
type Watch = Callable[[int, PhasePoints, Array], None]


def phase_points_at(target: HasGradient, metric: ChainCoordinates, x: Array) -> PhasePoints:
    """Return points with log p and its whitened gradient."""
    logp, grad = target.logp_grad(x)
    with np.errstate(invalid="ignore", over="ignore"):
        return PhasePoints(x, logp, metric.slope(grad))


def trajectory(
    target: HasGradient,
    metric: ChainCoordinates,
    points: PhasePoints,
    momenta: Array,
    n_steps: int,
    size: float | Array,
    rng: np.random.Generator,
    watch: Watch | None = None,
) -> tuple[PhasePoints, Array, Bools]:
    """Return where points are after one leapfrog trajectory each, and probabilities of acceptance; which diverged."""
    now, p = points, momenta
    with np.errstate(all="ignore"):
        p = p + 0.5 * size * now.slope
        for i in range(n_steps):
            x = now.x + size * metric.velocity(p)
            lost = ~np.isfinite(x).all(axis=1)
            x[lost] = points.x[lost]
            now = phase_points_at(target, metric, x)
            now.logp[lost] = -np.inf
            now.slope[~now.finite] = 0.0  # it goes on straight, and is refused at the end
            if watch is not None:
                watch(i, now, _probability(_change(points, momenta, now, p + 0.5 * size * now.slope)))
            p = p + (0.5 if i == n_steps - 1 else 1.0) * size * now.slope
        change = _change(points, momenta, now, p)
        probability = _probability(change)
    taken = rng.random(len(probability)) < probability
    arrived = PhasePoints(
        np.where(taken[:, None], now.x, points.x),
        np.where(taken, now.logp, points.logp),
        np.where(taken[:, None], now.slope, points.slope),
    )
    return arrived, probability, np.isfinite(change) & (change < -_MOST_LOST)


def _change(start: PhasePoints, momenta: Array, end: PhasePoints, p: Array) -> Array:
    """Return the change of the log density of points with momenta: minus that of the energy."""
    return end.logp - start.logp - 0.5 * np.sum(p**2 - momenta**2, axis=1)


def _probability(change: Array) -> Array:
    return np.exp(np.minimum(np.where(np.isfinite(change), change, -np.inf), 0.0))


# --- basins of log p that chains do not cross: which there are, and which one a point is in ---

#: Basins at most.
MOST_BASINS = N_REPLICATES
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

    def labels(self, x: Array) -> Indices:
        """Return the basin of each point, (n_points,)."""
        result, clear = self.explained(x)
        unclear = np.flatnonzero(~clear)
        if len(unclear):
            result[unclear] = _nearest(self.modes, self.climbs.ends(x[unclear])[0])
        return result

    def inside(self, number: int, x: Array) -> Bools:
        """Tell which points are in a basin."""
        return self.labels(x) == number

    def explained(self, x: Array) -> tuple[Indices, Bools]:
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


def _nearest(modes: Array, ends: Array) -> Indices:
    return np.argmin([np.sum((ends - mode) ** 2, axis=1) for mode in modes], axis=0)


# --- masses of log p in regions by bridge sampling, and the weights of modes that follow ---
# The bridge goes from a Gaussian, fitted to some of the draws, to the other draws.

#: Error of a log mass beyond which neither is known.
MOST_ERROR = 0.3


def log_mass(
    log_p: Callable[[Array], Array],
    coordinates: ChainCoordinates,
    x: Array,
    logp: Array,
    n_starts: int,
    size: float,
    rng: np.random.Generator,
) -> Estimate:
    """Return the log mass of what chains are draws of.

    Gaussians are fitted to every second superchain, and met by the draws of the others; then the other way round.
    """
    from arviz_stats.base import array_stats  # which takes a while to import

    is_even = np.arange(x.shape[1]) // (x.shape[1] // n_starts) % 2 == 0

    def by(half: Bools) -> Estimate:
        gaussian, of_half = coordinates.refitted(x[:, ~half].reshape(-1, x.shape[2]), 0.5 * size), x[:, half]
        proposed = gaussian.draws(rng.standard_normal((N_REWEIGHTED, gaussian.n_dim)))
        with np.errstate(all="ignore"):
            of_proposed = log_p(proposed) - gaussian.log_density(proposed)
            of_draws = logp[:, half] - gaussian.log_density(of_half.reshape(-1, x.shape[2])).reshape(of_half.shape[:2])
            worth = float(array_stats.ess(of_draws[:, :, None], chain_axis=1, draw_axis=0, method="bulk")[0])
            worth = min(worth / of_draws.size, 1.0) if worth > 0.0 else 1.0 / of_draws.size  # NaN of what is constant
            draws = Side(of_draws.ravel(), np.zeros(of_draws.size), worth)
            of_proposed = np.where(np.isfinite(of_proposed), of_proposed, -np.inf)
            return bridge(draws, Side(of_proposed, np.zeros(N_REWEIGHTED)))

    one, other = by(is_even), by(~is_even)
    se = 0.5 * float(np.max([math.hypot(one.se, other.se), abs(one.value - other.value)]))  # NaN stays NaN
    return Estimate(0.5 * (one.value + other.value), math.inf if math.isnan(se) else se)


@dataclass(frozen=True)
class ModeWeights:
    """Weights of modes."""

    #: With their standard errors; shape (n_modes,).
    weights: Array
    errors: Array
    #: Independent draws whose numbers at the modes would tell any mean as well.
    size: float
    total: Estimate

    @classmethod
    def of(cls, masses: Sequence[Estimate]) -> Self:
        """Return those of log masses with independent errors; of size 0 where one of them is not known."""
        values, se, _ = np.array(masses).T
        if not (se <= MOST_ERROR).all():
            return cls(np.full(len(se), math.nan), np.full(len(se), math.inf), 0.0, UNKNOWN)
        total = float(logsumexp(values))
        weights = np.exp(values - total)
        # Of the log masses' errors e, weights change by w (e - sum w e).
        root = weights[:, None] * (np.eye(len(weights)) - weights) * se
        scaled = root / np.sqrt(np.maximum(weights, np.finfo(np.float64).tiny))[:, None]
        worst = float(np.linalg.norm(scaled, 2))
        error = float(np.linalg.norm(weights * se))
        return cls(
            weights, np.linalg.norm(root, axis=1), worst**-2 if worst > 0.0 else math.inf, Estimate(total, error)
        )
