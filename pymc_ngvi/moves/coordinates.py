"""Coordinates in which chains move: whitened by a Gaussian, then by what the chains have seen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array, GaussianState, HasGradient, base_draws_of

# --- coordinates in which chains move: whitened by a Gaussian, then by what the chains have seen ---

#: Draws at most from which directions are found.
_MOST_DRAWS = 1_000
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
class PhasePoints:
    """Where points are, with log p and its whitened gradient; rows are independent."""

    x: Array
    logp: Array
    slope: Array

    def at(self, rows: NDArray[np.integer] | NDArray[np.bool_]) -> "PhasePoints":
        """Return some of them."""
        return PhasePoints(self.x[rows], self.logp[rows], self.slope[rows])

    @property
    def finite(self) -> NDArray[np.bool_]:
        """Where log p and its gradient are finite."""
        return np.isfinite(self.logp) & np.isfinite(self.slope).all(axis=1)


class Arrived(NamedTuple):
    """Where points are after acceptance, the probabilities of that, and which trajectories diverged, (n_points,)."""

    points: PhasePoints
    probability: Array
    diverged: NDArray[np.bool_]


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
) -> Arrived:
    """Return where points are after one leapfrog trajectory each."""
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
    return Arrived(arrived, probability, np.isfinite(change) & (change < -_MOST_LOST))


def _change(start: PhasePoints, momenta: Array, end: PhasePoints, p: Array) -> Array:
    """Return the change of the log density of points with momenta: minus that of the energy."""
    return end.logp - start.logp - 0.5 * np.sum(p**2 - momenta**2, axis=1)


def _probability(change: Array) -> Array:
    return np.exp(np.minimum(np.where(np.isfinite(change), change, -np.inf), 0.0))
