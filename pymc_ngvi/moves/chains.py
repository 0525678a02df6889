"""Many chains at once: trajectories of a length and a step size that all of them tell.

Step sizes go by the acceptance of all chains. Where some of the trajectories diverge, there may be a place, such as the
neck of a funnel, into which steps that are right elsewhere do not lead; chains that have never been there show nothing
of it. Then fewer trajectories are to be refused [2]_. In each iteration, a part of the chains takes smaller steps:
those get out of places where the usual ones are refused.

Trajectories have the length after which the slowest coordinates have got farthest for each gradient, as all chains
together tell along one long trajectory; [1]_ does so by the distance from the centre, which tails and many quick
coordinates drown here.

References
----------
.. [1] M. D. Hoffman, A. Radul and P. Sountsov (2021). An adaptive-MCMC scheme for setting trajectory lengths in
   Hamiltonian Monte Carlo. AISTATS. https://proceedings.mlr.press/v130/hoffman21a.html
.. [2] M. Betancourt and M. Girolami (2015). Hamiltonian Monte Carlo for hierarchical models. In Current Trends in
   Bayesian Methodology with Applications. https://doi.org/10.48550/arXiv.1312.0906
"""

import math

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array, HasGradient
from pymc_ngvi.moves.coordinates import ChainCoordinates
from pymc_ngvi.moves.leapfrog import PhasePoints, phase_points_at, trajectory
from pymc_ngvi.moves.verdict import MOST_DIVERGING

#: First length of trajectories: a quarter of a period. First step size, times the fourth root of the dimension.
_QUARTER, _FIRST_STEP = 0.5 * math.pi, 0.5
#: Refusals that are aimed at; part that is left of these where too many trajectories diverge, and the fewest.
_REFUSED, _FEWER, _FEWEST = 0.2, 0.25, 0.01
#: By how much lengths differ from the usual one, as a part; the golden section spreads them evenly.
_JITTER, _GOLDEN = 0.4, 0.618_033_988_749_895
#: Part of the chains that take smaller steps in an iteration, and these as parts of the usual one.
_PART, _SMALLER = 0.25, (0.5, 0.25, 0.1)
#: Part of the coordinates by which the length is chosen, the slowest; standard deviations beyond which none is farther.
_SLOWEST, _FAR = 0.1, 3.0
#: Steps of a trajectory at most; of the one by which the length is chosen, at least and at most.
_MOST_STEPS, _FEWEST_SEEN, _MOST_SEEN = 200, 4, 100
#: Gain of the logarithm of the step size for an error of the acceptance of 1: in the first iterations, and then.
_N_FIRST, _GAIN_FIRST, _GAIN = 3, 0.6, 0.3
#: By how many times what is aimed at more are refused, at most, as counts for the step size.
_WORST = 4.0


class Stretch(NamedTuple):
    """Draws of all chains in successive iterations, (n_draws, n_chains, n_dim), and log p, (n_draws, n_chains)."""

    x: Array
    logp: Array


class Chains:
    """Chains in motion.

    Parameters
    ----------
    target : HasGradient
    coordinates : ChainCoordinates
    x : ndarray, shape (n_chains, n_dim)
        Where they begin; log p and its gradient are finite there.
    rng : numpy.random.Generator
    inside : callable, optional
        Tells which points are of the region that chains are to stay in: a trajectory that ends elsewhere is refused.

    Attributes
    ----------
    step, length : float
        Of trajectories, in the coordinates.
    acceptance, diverging : float
        Mean probability of acceptance in the last run of iterations; part of its trajectories that diverged.
    refused : float
        Part of the trajectories that is aimed at to be refused.
    outflow : float
        Part of the trajectories of that run that would have left the region.
    """

    def __init__(
        self,
        target: HasGradient,
        coordinates: ChainCoordinates,
        x: Array,
        rng: np.random.Generator,
        inside: Callable[[Array], NDArray[np.bool_]] | None = None,
    ) -> None:
        self._target, self._rng, self._inside = target, rng, inside
        self._jitter = rng.random()
        self.coordinates = coordinates
        self.step, self.length = _FIRST_STEP * x.shape[1] ** -0.25, _QUARTER
        self.acceptance, self.outflow, self._n_left = math.nan, 0.0, 0
        self.refused, self.diverging = _REFUSED, 0.0
        self._points = phase_points_at(target, coordinates, x)

    @property
    def n_chains(self) -> int:
        """Number of chains."""
        return len(self._points.x)

    @property
    def size(self) -> int:
        """Numbers that say where they all are."""
        return self._points.x.size

    @property
    def n_steps(self) -> int:
        """Steps of a trajectory, in the mean."""
        return int(np.clip(math.ceil(self.length / self.step), 1, _MOST_STEPS))

    def run(self, n: int, *, n_adapting: int = 0, every: int = 1) -> Stretch:
        """Return draws of ``n`` iterations: every so many of those after the first, in which the step size is adapted.

        Parameters
        ----------
        n, n_adapting : int
        every : int, default 1
        """
        shape = ((n - n_adapting) // every, *self._points.x.shape)
        self._n_left, is_first = 0, math.isnan(self.acceptance)
        kept, accepted, diverging = Stretch(np.empty(shape), np.empty(shape[:2])), np.zeros(n), np.zeros(n)
        for i in range(n):
            accepted[i], diverging[i] = self._iterate()
            if i < n_adapting:
                gain = _GAIN_FIRST if i < _N_FIRST else _GAIN
                # relative to what is aimed at: as quick for one refusal in a hundred as for one in five
                error = 1.0 - (1.0 - accepted[i]) / self.refused
                self.step *= math.exp(gain * _REFUSED * max(error, -_WORST))
            elif (i - n_adapting) % every == every - 1:
                at = (i - n_adapting) // every
                kept.x[at], kept.logp[at] = self._points.x, self._points.logp
        self.diverging = float(diverging[n_adapting:].mean())
        if self.diverging > MOST_DIVERGING and not is_first:
            self.refused = max(_FEWER * self.refused, _FEWEST)
        self.acceptance = float(accepted[n_adapting:].mean())
        self.outflow = self._n_left / (n * shape[1])
        return kept

    def _iterate(self) -> tuple[float, float]:
        """Move all chains; return the acceptance of those with the usual step size, and the part that diverges."""
        n, rng = len(self._points.x), self._rng
        self._jitter = (self._jitter + _GOLDEN) % 1.0
        length = self.length * (1.0 + _JITTER * (2.0 * self._jitter - 1.0))
        n_steps = int(np.clip(math.ceil(length / self.step), 1, _MOST_STEPS))
        usual = rng.random(n) >= _PART
        size = self.step * np.where(usual, 1.0, rng.choice(_SMALLER, n))
        probability, diverged = self._move(n_steps, size[:, None])
        counted = usual if usual.any() else ~usual
        return float(probability[counted].mean()), float(diverged[counted].mean())

    def _move(
        self, n_steps: int, size: float | Array, watch: "_Distances | None" = None
    ) -> tuple[Array, NDArray[np.bool_]]:
        momenta = self._rng.standard_normal(self._points.x.shape)
        before = self._points
        self._points, probability, diverged = trajectory(
            self._target, self.coordinates, before, momenta, n_steps, size, self._rng, watch
        )
        if self._inside is not None:
            self._refuse_leaving(before)
        return probability, diverged

    def _refuse_leaving(self, before: PhasePoints) -> None:
        """Put points that have left the region back to where they were."""
        assert self._inside is not None
        now = self._points
        moved = np.flatnonzero((now.x != before.x).any(axis=1))
        left = moved[~self._inside(now.x[moved])]
        now.x[left], now.logp[left], now.slope[left] = before.x[left], before.logp[left], before.slope[left]
        self._n_left += len(left)

    def join(self, stuck: NDArray[np.intp], n_starts: int) -> None:
        """Let chains that do not move go on from where others are that began at the same point, if these do.

        Parameters
        ----------
        stuck : ndarray of int
        n_starts : int
            Chains that began at the same point are together.
        """
        each, rows = self.n_chains // n_starts, np.arange(self.n_chains)
        for chain in stuck.tolist():
            first = chain - chain % each
            others = np.setdiff1d(np.arange(first, first + each), stuck)
            if len(others):
                rows[chain] = self._rng.choice(others)
        if len(stuck):
            self._points = self._points.at(rows)

    def refit(self, draws: Array, size: float) -> None:
        """Take coordinates found of draws, (n_draws, n_dim), worth so many, and choose the length of trajectories."""
        self.coordinates = self.coordinates.refitted(draws, size)
        self._points = phase_points_at(self._target, self.coordinates, self._points.x)
        n_steps = int(np.clip(math.ceil(2.0 * self.length / self.step), _FEWEST_SEEN, _MOST_SEEN))
        seen = _Distances(self.coordinates, self._points, n_steps)
        self._move(n_steps, self.step, seen)
        self.length = seen.best * self.step


class _Distances:
    """Sees how far the slowest coordinates get along a trajectory, in place and in distance from the centre.

    The square of the distance from the start is 0 there, and 1, in twice the variance, where that is forgotten.
    """

    def __init__(self, coordinates: ChainCoordinates, points: PhasePoints, n_steps: int) -> None:
        self._coordinates, self._first = coordinates, _places(coordinates, points)
        self._twice = 2.0 * self._first.var(axis=0) + np.finfo(np.float64).tiny
        self._of_step = np.zeros((n_steps, self._first.shape[1]))

    def __call__(self, i: int, points: PhasePoints, probability: Array) -> None:
        squares = (_places(self._coordinates, points) - self._first) ** 2
        self._of_step[i] = probability @ squares / (len(squares) * self._twice)

    @property
    def best(self) -> int:
        """Steps in which the slowest coordinates get farthest, for each gradient."""
        n_steps, n = self._of_step.shape
        slowest = np.sort(np.minimum(self._of_step, 1.0), axis=1)[:, : max(1, round(_SLOWEST * n))]
        return int(np.argmax(slowest.mean(axis=1) / np.arange(1, n_steps + 1))) + 1


def _places(coordinates: ChainCoordinates, points: PhasePoints) -> Array:
    """Return coordinates, and their distances from the centre, of which far ones count as less far."""
    with np.errstate(over="ignore", invalid="ignore"):
        w = np.clip(np.nan_to_num(coordinates.w(points.x)), -_FAR, _FAR)
    return np.concatenate([w, np.abs(w)], axis=1)
