"""Hamiltonian trajectories of many points at once, accepted or refused by Metropolis.

References
----------
.. [1] R. M. Neal (2011). MCMC using Hamiltonian dynamics. Handbook of Markov Chain Monte Carlo, chapter 5.
   https://doi.org/10.1201/b10905-6
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array, GaussianState, HasGradient

#: Nats that a trajectory may lose before it is said to diverge, as in Stan. What ends where there is no log p does not.
_MOST_LOST = 1_000.0


class MomentumMetric(Protocol):
    """The linear map from whitened momenta to velocities, and its transpose."""

    def velocity(self, momenta: Array) -> Array:
        """Return velocities of the coordinates, (n_points, n_dim)."""

    def slope(self, grad: Array) -> Array:
        """Return whitened gradients, (n_points, n_dim)."""


class WhitenedMomenta(NamedTuple):
    """Velocities drawn from a Gaussian."""

    gaussian: GaussianState
    #: shape (n_dim,).
    centre: Array

    @classmethod
    def by(cls, gaussian: GaussianState) -> "WhitenedMomenta":
        """Return those of a Gaussian."""
        return cls(gaussian, gaussian.mean())

    def velocity(self, momenta: Array) -> Array:
        """Return C p, (n_points, n_dim)."""
        return self.gaussian.draws(momenta) - self.centre

    def slope(self, grad: Array) -> Array:
        """Return C^T times gradients, (n_points, n_dim)."""
        return self.gaussian.whiten(grad)


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


def phase_points_at(target: HasGradient, metric: MomentumMetric, x: Array) -> PhasePoints:
    """Return points with log p and its whitened gradient."""
    logp, grad = target.logp_grad(x)
    with np.errstate(invalid="ignore", over="ignore"):
        return PhasePoints(x, logp, metric.slope(grad))


def trajectory(
    target: HasGradient,
    metric: MomentumMetric,
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
