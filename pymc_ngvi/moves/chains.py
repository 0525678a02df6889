"""Many chains at once: trajectories of a length and a step size that all of them tell.

Step sizes go by the acceptance of all chains, the length of trajectories by the change in the distance from the centre
[1]_, seen along one long trajectory. In each iteration, a part of the chains takes smaller steps: those get out of
places where the usual ones are refused.

References
----------
.. [1] M. D. Hoffman, A. Radul and P. Sountsov (2021). An adaptive-MCMC scheme for setting trajectory lengths in
   Hamiltonian Monte Carlo. AISTATS. https://proceedings.mlr.press/v130/hoffman21a.html
"""

import math

from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.types import Array, Density
from pymc_ngvi.moves.coordinates import Coordinates
from pymc_ngvi.moves.leapfrog import Points, evaluated, trajectory

#: First length of trajectories: a quarter of a period. First step size, times the fourth root of the dimension.
_QUARTER, _FIRST = 0.5 * math.pi, 0.5
#: Acceptance that is aimed at.
_AIM = 0.8
#: By how much lengths differ from the usual one, as a part; the golden section spreads them evenly.
_JITTER, _GOLDEN = 0.4, 0.618_033_988_749_895
#: Part of the chains that take smaller steps in an iteration, and these as parts of the usual one.
_PART, _SMALLER = 0.25, (0.5, 0.25, 0.1)
#: Steps of a trajectory at most; of the one by which the length is chosen, at least and at most.
_MOST_STEPS, _FEWEST_SEEN, _MOST_SEEN = 200, 4, 100
#: Gain of the logarithm of the step size for an error of the acceptance of 1: in the first iterations, and then.
_N_FIRST, _GAIN_FIRST, _GAIN = 3, 0.6, 0.3


class Stretch(NamedTuple):
    """Draws of all chains in successive iterations, (n_draws, n_chains, n_dim), and log p, (n_draws, n_chains)."""

    x: Array
    logp: Array

    def joined(self, other: "Stretch") -> "Stretch":
        """Return the draws of both, one after the other."""
        return Stretch(np.concatenate([self.x, other.x]), np.concatenate([self.logp, other.logp]))


class Chains:
    """Chains in motion.

    Parameters
    ----------
    target : Density
    coordinates : Coordinates
    x : ndarray, shape (n_chains, n_dim)
        Where they begin; log p and its gradient are finite there.
    rng : numpy.random.Generator

    Attributes
    ----------
    n_gradients : int
        Evaluated so far.
    step, length : float
        Of trajectories, in the coordinates.
    acceptance : float
        Mean probability of acceptance in the last run of iterations.
    """

    def __init__(self, target: Density, coordinates: Coordinates, x: Array, rng: np.random.Generator) -> None:
        self._target, self._rng = target, rng
        self._jitter = rng.random()
        self.coordinates, self.n_gradients = coordinates, 0
        self.step, self.length = _FIRST * x.shape[1] ** -0.25, _QUARTER
        self.acceptance = math.nan
        self._points = self._evaluated(x)

    def _evaluated(self, x: Array) -> Points:
        self.n_gradients += len(x)
        return evaluated(self._target, self.coordinates, x)

    @property
    def n_steps(self) -> int:
        """Steps of a trajectory, in the mean."""
        return int(np.clip(math.ceil(self.length / self.step), 1, _MOST_STEPS))

    def run(self, n: int, *, n_adapting: int = 0) -> Stretch:
        """Return the draws of ``n`` iterations but for the first ``n_adapting``, in which the step size is adapted."""
        kept = Stretch(
            np.empty((n - n_adapting, *self._points.x.shape)), np.empty((n - n_adapting, len(self._points.x)))
        )
        accepted = np.zeros(n)
        for i in range(n):
            accepted[i] = self._iterate()
            if i < n_adapting:
                gain = _GAIN_FIRST if i < _N_FIRST else _GAIN
                self.step *= math.exp(gain * (accepted[i] - _AIM))
            else:
                kept.x[i - n_adapting], kept.logp[i - n_adapting] = self._points.x, self._points.logp
        self.acceptance = float(accepted[n_adapting:].mean()) if n > n_adapting else float(accepted.mean())
        return kept

    def _iterate(self) -> float:
        """Move all chains; return the acceptance of those with the usual step size."""
        n, rng = len(self._points.x), self._rng
        self._jitter = (self._jitter + _GOLDEN) % 1.0
        length = self.length * (1.0 + _JITTER * (2.0 * self._jitter - 1.0))
        n_steps = int(np.clip(math.ceil(length / self.step), 1, _MOST_STEPS))
        usual = rng.random(n) >= _PART
        size = self.step * np.where(usual, 1.0, rng.choice(_SMALLER, n))
        probability = self._move(n_steps, size[:, None])
        return float(probability[usual].mean()) if usual.any() else float(probability.mean())

    def _move(self, n_steps: int, size: float | Array, watch: "_Growth | None" = None) -> Array:
        momenta = self._rng.standard_normal(self._points.x.shape)
        self._points, probability = trajectory(
            self._target, self.coordinates, self._points, momenta, n_steps, size, self._rng, watch
        )
        self.n_gradients += n_steps * len(momenta)
        return probability

    def refit(self, draws: Array, size: float) -> None:
        """Take coordinates found of draws, (n_draws, n_dim), worth so many, and choose the length of trajectories."""
        self.coordinates = self.coordinates.refitted(draws, size)
        self._points = self._evaluated(self._points.x)
        n_steps = int(np.clip(math.ceil(2.0 * self.length / self.step), _FEWEST_SEEN, _MOST_SEEN))
        growth = _Growth(self.coordinates, self._points, n_steps)
        self._move(n_steps, self.step, growth)
        self.length = growth.best * self.step


class _Growth:
    """Sees how far the distance from the centre changes along a trajectory, for each of its steps."""

    def __init__(self, coordinates: Coordinates, points: Points, n_steps: int) -> None:
        self._coordinates, self._first = coordinates, _squares(coordinates, points)
        self._of_step = np.zeros(n_steps)

    def __call__(self, i: int, points: Points, probability: Array) -> None:
        change = _squares(self._coordinates, points) - self._first
        with np.errstate(invalid="ignore"):
            of_chains = np.where(probability > 0.0, probability * change**2, 0.0)
        self._of_step[i] = of_chains.mean() / (i + 1)

    @property
    def best(self) -> int:
        """Steps for which it changes most, for each gradient."""
        return int(self._of_step.argmax()) + 1


def _squares(coordinates: Coordinates, points: Points) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        result: Array = np.sum(coordinates.w(points.x) ** 2, axis=1)
    return result
