"""Draws moved towards the posterior, and all that drifts: moments, log p, and what is computed of draws."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pymc_ngvi.core.types import Array
from pymc_ngvi.results.diagnosis import findings, functional_findings
from pymc_ngvi.results.diagnosis.budget import Budget
from pymc_ngvi.results.diagnosis.functionals import FunctionalDrift, Functionals, functional_drift_of
from pymc_ngvi.results.diagnosis.joint_drift import JointDrift, joint_drift_of
from pymc_ngvi.results.diagnosis.moment_drift import MomentDrift, drift_of
from pymc_ngvi.results.diagnosis.moves import Moved, move
from pymc_ngvi.results.posterior import Posterior

#: Numbers in the draws that are moved; at least so many draws.
_MOVED_ELEMENTS, _FEWEST_MOVED = 2**20, 48
#: Moved draws below which nothing is said of their moments.
_LEAST_MOVED = 32
#: How many times as many draws are moved where the first ask for more.
_AGAIN = 3


@dataclass(frozen=True)
class Drifts:
    """Moved draws, and what drifts.

    Parameters
    ----------
    moved : Moved
    moments : MomentDrift or None
        None where too few draws could be moved; ``joint`` too, then.
    joint : JointDrift or None
    functionals : FunctionalDrift or None
        None where there are none, or they would take too long.
    """

    moved: Moved
    moments: MomentDrift | None = None
    joint: JointDrift | None = None
    functionals: FunctionalDrift | None = None

    def asks_for_more(self, is_nested: bool) -> bool:
        """Tell whether other moved draws may tell what is error from what is chance.

        A nested posterior is Gaussian given its hyperparameters, and has no check of its own of what is computed of
        draws: there, a suspicion is enough.
        """
        if self.moments is None or self.joint is None:
            return False
        functionals = self.functionals
        by_functionals = functionals is not None and (
            functional_findings.functional_stands_out(functionals)
            or (is_nested and functional_findings.is_suspicious(functionals))
        )
        joint = self.joint
        by_log_p = joint.is_suspicious or joint.is_much(self.moments.log_p) or joint.is_much(joint.location)
        return findings.stands_out(self.moments) or by_functionals or by_log_p

    def seen_again(self, other: "Drifts") -> "Drifts":
        """Return, of moments, what this and an independent one have in common; of all else, what both show together."""
        if self.moments is None or self.joint is None or other.moments is None or other.joint is None:
            return other
        functionals = None
        if self.functionals is not None and other.functionals is not None:
            functionals = self.functionals.with_others(other.functionals)
        return Drifts(
            other.moved, self.moments.seen_again(other.moments), self.joint.with_others(other.joint), functionals
        )


def most_moved(n_dim: int, n_draws: int) -> int:
    """Return how many of some draws can be moved at once."""
    return min(n_draws, max(_FEWEST_MOVED, _MOVED_ELEMENTS // max(n_dim, 1)))


def drifts_of(
    posterior: Posterior,
    rng: np.random.Generator,
    n_draws: int,
    n_trajectories: int,
    budget: Budget,
    functionals: Functionals | None,
    advance: Callable[[float], None],
) -> Drifts:
    """Move draws and return what drifts.

    Parameters
    ----------
    posterior : Posterior
    rng : numpy.random.Generator
    n_draws, n_trajectories : int
    budget : Budget
    functionals : Functionals or None
        What to compute of draws.
    advance : callable
        Told how many gradients were evaluated.

    Notes
    -----
    Of a pool, thousands of coordinates err by chance: what other checks speak against has to be seen twice, in the same
    coordinates. What is computed of draws, and log p, are judged by both sets of draws together, of which the second is
    larger: no importance weights tell what is wrong with these.
    """
    found = _once(posterior, rng, n_draws, n_trajectories, budget, functionals, advance)
    record = posterior.record
    if record is not None and record.is_pool and found.asks_for_more(record.is_nested):
        if not budget.cut:
            n_draws, budget = _AGAIN * n_draws, replace(budget, n_gradients=_AGAIN * budget.n_gradients)
        found = found.seen_again(_once(posterior, rng, n_draws, n_trajectories, budget, functionals, lambda _: None))
    return found


def _once(
    posterior: Posterior,
    rng: np.random.Generator,
    n_draws: int,
    n_trajectories: int,
    budget: Budget,
    functionals: Functionals | None,
    advance: Callable[[float], None],
) -> Drifts:
    q, density = posterior.distribution, posterior.density
    base, plan = q.base(most_moved(q.n_dim, n_draws), rng), q.plan(density)
    moved = move(
        density, plan, base, rng, n_trajectories=n_trajectories, max_gradients=budget.n_gradients,
        strict=budget.cut, advance=advance,
    )  # fmt: skip
    if len(moved.end) < _LEAST_MOVED:
        return Drifts(moved)
    log_q = _log_q(posterior, moved)
    took = moved.n_gradients * density.gradient_seconds
    return Drifts(
        moved,
        drift_of(moved, q.mean(), q.sd(), log_q),
        joint_drift_of(moved),
        None if functionals is None else functional_drift_of(functionals, moved.control, moved.end, took),
    )


def _log_q(posterior: Posterior, moved: Moved) -> tuple[Array, Array] | None:
    """Return log q at starts and at controls; None where it is not known."""
    q = posterior.distribution
    start, control = q.log_density(moved.start), q.log_density(moved.control)
    return None if start is None or control is None else (start, control)
