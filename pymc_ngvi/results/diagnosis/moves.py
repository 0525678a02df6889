r"""Draws of q moved towards the posterior by short Hamiltonian trajectories.

Trajectories leave the posterior as it is. If q is the posterior, moved draws have its moments; where they don't, q is
wrong, and the drift says in which direction and by how much at least. In coordinates whitened by q, a quarter of a
period makes a draw forget where it began, and a few steps make a quarter.

Each draw has a *control*: a draw that moves with the same momenta, but in q. Its law is exactly q, and where q is near
the posterior it stays near the draw, so that most of the noise of a drift cancels.

References
----------
.. [1] J. Heng and P. E. Jacob (2019). Unbiased Hamiltonian Monte Carlo with couplings. Biometrika 106.
   https://doi.org/10.1093/biomet/asy074
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.moves.leapfrog import PhasePoints, WhitenedMomenta, phase_points_at, trajectory
from pymc_ngvi.results.posterior import MovePlan

#: A quarter of a period in whitened coordinates, and by how much, as a part, trajectories differ from it.
_QUARTER, _JITTER = 0.5 * np.pi, 0.2
#: Acceptance that is aimed at, and below which nothing is said of the moved draws.
AIM, LEAST_ACCEPTANCE = 0.8, 0.3
#: First step size times the fourth root of the dimension; largest and smallest one; steps of a trajectory at most.
_FIRST, _LARGEST, _SMALLEST, _MOST_STEPS = 1.2, 0.9, 1e-3, 24
#: Draws on which a step size is tried, how often, and its factor from one trial to the next.
_N_PILOT, _TRIALS, _FACTOR = 32, 8, 1.6
#: Draws that are moved, at least.
_LEAST_MOVED = 48
#: The same where gradients are few, and trajectories then.
_LEAST_WITHIN, _FEWEST_TRAJECTORIES = 32, 2


@dataclass(frozen=True)
class Moved:
    """Draws before and after trajectories, unconstrained."""

    #: Before and after; rows belong together; shape (n_draws, n_dim).
    start: Array
    end: Array
    #: Draws of q that are correlated with ``end``; shape (n_draws, n_dim).
    control: Array
    #: shape (n_draws,).
    log_p_start: Array
    log_p_end: Array
    #: Mean probability that a trajectory was accepted.
    acceptance: float
    n_trajectories: int
    #: Of the last trajectory, in whitened coordinates.
    step_size: float
    #: Draws of q left out because log p or its gradient is not finite there.
    n_lost: int
    n_gradients: int


def move(
    density: ModelDensity,
    plan: MovePlan,
    base: Array,
    rng: np.random.Generator,
    *,
    n_trajectories: int,
    max_gradients: int | None = None,
    strict: bool = False,
    advance: Callable[[float], None] = lambda _: None,
) -> Moved:
    """Move draws of q by Metropolis-corrected Hamiltonian trajectories."""
    n_dim, before = plan.gaussian.n_dim, density.n_gradients
    step = min(_FIRST * n_dim**-0.25, _LARGEST)
    if strict and max_gradients is not None:
        n_trajectories, n_draws = _within(max_gradients, step, n_trajectories, len(base))
        if not n_draws:
            return _unmoved(n_dim)
        base = base[:n_draws]
    x = plan.draw(base)
    x = x[np.isfinite(x).all(axis=1)]
    points = phase_points_at(plan.target, WhitenedMomenta.by(plan.gaussian), x)
    n_lost = len(base) - int(points.finite.sum())
    start = points = points.at(np.flatnonzero(points.finite))
    acceptance = np.zeros(n_trajectories)
    if len(start.x):
        step = _tried_step(plan, points, step, rng)
        n_draws = _affordable(len(start.x), step, n_trajectories, max_gradients)
        if strict and max_gradients is not None:
            n_draws = min(n_draws, _within(max_gradients, step, n_trajectories, n_draws, tried=True)[1])
        start = points = points.at(np.arange(n_draws))
        advance(len(x) + _N_PILOT)
    control = start.x
    for t in range(n_trajectories if len(start.x) else 0):
        # A draw that is refused in the end loses its control: the last trajectory takes smaller steps.
        n_steps, size = _steps(step if t < n_trajectories - 1 else 0.5 * step, rng)
        momenta = rng.standard_normal(points.x.shape)
        if plan.coupled:
            control = _turned(plan.gaussian, control, momenta, n_steps, size)
        points, acceptance[t] = _trajectory(plan, points, momenta, n_steps, size, rng)
        advance(len(points.x) * n_steps)
        if acceptance[t] < AIM - 0.15:
            step = max(step / _FACTOR, _SMALLEST)
    first, last, of_q = (plan.on_model_scale(p) for p in (start.x, points.x, control))
    kept = np.isfinite(first).all(axis=1) & np.isfinite(last).all(axis=1) & np.isfinite(of_q).all(axis=1)
    return Moved(
        start=first[kept],
        end=last[kept],
        control=of_q[kept],
        log_p_start=start.logp[kept],
        log_p_end=points.logp[kept],
        acceptance=float(acceptance.mean()),
        n_trajectories=n_trajectories if len(start.x) else 0,
        step_size=float(step),
        n_lost=n_lost,
        n_gradients=density.n_gradients - before,
    )


def _affordable(n_draws: int, step: float, n_trajectories: int, max_gradients: int | None) -> int:
    """Return how many draws to move: as many as there are, or as a number of gradients allows."""
    if max_gradients is None:
        return n_draws
    n_steps = (n_trajectories + 1) * min(np.ceil(_QUARTER / step), _MOST_STEPS)
    return int(np.clip(max_gradients // n_steps, min(_LEAST_MOVED, n_draws), n_draws))


def _unmoved(n_dim: int) -> Moved:
    none = np.empty((0, n_dim))
    return Moved(none, none, none, np.empty(0), np.empty(0), float("nan"), 0, float("nan"), 0, 0)


def _within(
    max_gradients: int, step: float, n_trajectories: int, n_draws: int, *, tried: bool = False
) -> tuple[int, int]:
    """Return how many trajectories and draws a number of gradients allows: no draws where that is too few of them."""
    n_steps = min(np.ceil(_QUARTER / step), _MOST_STEPS)
    for n in (n_trajectories,) if tried else (n_trajectories, min(n_trajectories, _FEWEST_TRAJECTORIES)):
        # A draw takes its start, trajectories, and a last one in smaller steps; the pilot half a trajectory.
        affordable = int((max_gradients - (0 if tried else 0.5 * _N_PILOT * n_steps)) // ((n + 1) * n_steps + 1))
        if affordable >= _LEAST_WITHIN:
            return n, min(n_draws, affordable)
    return n_trajectories, 0


def _steps(step: float, rng: np.random.Generator) -> tuple[int, float]:
    """Return the number of steps of a quarter of a period, as near as that may be, and their size, both jittered."""
    length = _QUARTER * (1.0 + _JITTER * (2.0 * rng.random() - 1.0))
    n_steps = int(np.clip(np.ceil(length / step), 1, _MOST_STEPS))
    return n_steps, min(step, length / n_steps)


def _tried_step(plan: MovePlan, points: PhasePoints, step: float, rng: np.random.Generator) -> float:
    """Return the first step size in a falling sequence that has the acceptance aimed at, on some of the draws."""
    pilot = points.at(np.arange(min(_N_PILOT, len(points.x))))
    for _ in range(_TRIALS):
        n_steps, size = _steps(step, rng)
        # Half of a trajectory tells as much about its energy.
        _, accepted = _trajectory(plan, pilot, rng.standard_normal(pilot.x.shape), -(-n_steps // 2), size, rng)
        if accepted >= AIM:
            break
        step = max(step / _FACTOR, _SMALLEST)
    return step


def _trajectory(
    plan: MovePlan, points: PhasePoints, momenta: Array, n_steps: int, size: float, rng: np.random.Generator
) -> tuple[PhasePoints, float]:
    """Return where the draws are after one leapfrog trajectory each, and the mean probability of acceptance."""
    points, probability, _ = trajectory(
        plan.target, WhitenedMomenta.by(plan.gaussian), points, momenta, n_steps, size, rng
    )
    return points, float(probability.mean())


def _turned(gaussian: GaussianState, control: Array, momenta: Array, n_steps: int, size: float) -> Array:
    """Turn draws of a Gaussian by the angle that the same leapfrog steps turn those of a standard normal."""
    angle = n_steps * float(np.arccos(1.0 - 0.5 * min(size, 1.9) ** 2))
    centre = gaussian.mean()
    return centre + np.cos(angle) * (control - centre) + np.sin(angle) * (gaussian.draws(momenta) - centre)
