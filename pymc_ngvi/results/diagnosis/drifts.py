"""Draws moved towards the posterior, and all that drifts: moments, log p, and what is computed of draws."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pymc_ngvi.core.types import Array
from pymc_ngvi.density.functionals import Functionals
from pymc_ngvi.results.diagnosis import findings, functional_findings
from pymc_ngvi.results.diagnosis.budget import Budget
from pymc_ngvi.results.diagnosis.functionals import FunctionalDrift, functional_drift_of
from pymc_ngvi.results.diagnosis.joint_drift import JointDrift, joint_drift_of
from pymc_ngvi.results.diagnosis.moment_drift import MomentDrift, drift_of
from pymc_ngvi.results.diagnosis.moves import Moved, move
from pymc_ngvi.results.diagnosis.scores import ScoreDrift, score_drift_of
from pymc_ngvi.results.posterior import Posterior

#: Numbers in the draws that are moved; at least so many draws.
_MOVED_ELEMENTS, _FEWEST_MOVED = 2**20, 48
#: Moved draws below which nothing is said of their moments.
_LEAST_MOVED = 32
#: How many times as many draws are moved where the first ask for more.
_AGAIN = 3
#: Draws that are moved where a posterior's own checks speak for it, and trajectories of each.
FEW_MOVED, FEW_TRAJECTORIES = 64, 2
#: Gradients at other draws, then, and fewest of these.
_SCORED, _FEWEST_SCORED = 512, 64
#: Part of a budget that is too small for all of these that such gradients take.
_OF_SCORES = 0.4


@dataclass(frozen=True)
class Drifts:
    """Moved draws, and what drifts.

    Parameters
    ----------
    moved : Moved
    moments : MomentDrift or None
        By gradients at other draws where these are looked at, else of moved ones; None where too few could be moved.
    joint : JointDrift or None
        None where too few draws could be moved.
    functionals : FunctionalDrift or None
        Of what moved draws are to tell; None where there are none, or they would take too long.
    scores : ScoreDrift or None
        What gradients at other draws say.
    """

    moved: Moved
    moments: MomentDrift | None = None
    joint: JointDrift | None = None
    functionals: FunctionalDrift | None = None
    scores: ScoreDrift | None = None

    def asks_for_more(self, is_nested: bool) -> bool:
        """Tell whether other moved draws may tell what is error from what is chance.

        Where gradients at many draws were looked at as well, that takes more than a suspicion. A nested posterior
        without them is Gaussian given its hyperparameters, and has no check of its own of what is computed of draws:
        there, a suspicion is enough.
        """
        moments, joint, functionals, scores = self.moments, self.joint, self.functionals, self.scores
        if moments is not None and findings.stands_out(moments):
            return True
        # Of few draws, errors are known roughly: nothing is said before it was seen of more.
        if functionals is not None and functional_findings.functional_stands_out(functionals):
            return True
        if self.predictors is not None and functional_findings.functional_stands_out(self.predictors):
            return True
        if moments is None or joint is None:
            return False
        if findings.joint_stands_out(joint, moments):
            return True
        of_functionals = is_nested and functionals is not None and functional_findings.is_suspicious(functionals)
        return scores is None and (of_functionals or joint.is_suspicious)

    @property
    def predictors(self) -> FunctionalDrift | None:
        """Linear predictors by gradients, where these are looked at."""
        return None if self.scores is None else self.scores.predictors

    def seen_again(self, other: "Drifts") -> "Drifts":
        """Return, of moments, what this and an independent one have in common; of all else, what both show together.

        Where gradients were looked at, a posterior's own checks speak for it, and all has to be seen twice: errors of
        few draws are known roughly, and of products with gradients as well.
        """
        if self.moments is None or other.moments is None:
            return other
        joint, functionals, scores = other.joint, other.functionals, other.scores
        if self.joint is not None and joint is not None:
            joint = self.joint.with_others(joint)
        if self.scores is not None and scores is not None:
            scores = self.scores.seen_again(scores)
        if self.functionals is not None and functionals is not None:
            both = self.functionals.with_others if scores is None else self.functionals.seen_again
            functionals = both(functionals)
        return Drifts(other.moved, self.moments.seen_again(other.moments), joint, functionals, scores)


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

    Where the own checks of a pool speak for it, few draws are moved first, and gradients at more of them looked at.
    """
    first = (FEW_MOVED, FEW_TRAJECTORIES) if budget.scored else (n_draws, n_trajectories)
    found = _once(posterior, rng, *first, budget, functionals, advance)
    record = posterior.record
    if record is not None and record.is_pool and found.asks_for_more(record.is_nested):
        if not budget.cut:
            factor = 1 if budget.scored else _AGAIN
            n_draws, budget = factor * n_draws, replace(budget, n_gradients=factor * budget.n_gradients)
        found = found.seen_again(_once(posterior, rng, n_draws, n_trajectories, budget, functionals, lambda _: None))
    return found


def most_scored(budget: Budget) -> int:
    """Return at how many draws a budget has gradients evaluated, beside those of moved draws: 0 for too few."""
    if not budget.scored:
        return 0
    n = min(_SCORED, max(int(_OF_SCORES * budget.n_gradients), min(_FEWEST_SCORED, budget.n_gradients)))
    return n if n >= _FEWEST_SCORED else 0


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
    scores, n_scored = None, most_scored(budget)
    if n_scored and (scores := score_drift_of(posterior, rng, n_scored, functionals)) is not None:
        functionals = None if functionals is None else functionals.without_predictors()
    advance(n_scored)
    base, plan = q.base(most_moved(q.n_dim, n_draws), rng), q.plan(density)
    moved = move(
        density, plan, base, rng, n_trajectories=n_trajectories, max_gradients=budget.n_gradients - n_scored,
        strict=budget.cut, advance=advance,
    )  # fmt: skip
    if len(moved.end) < _LEAST_MOVED:
        return Drifts(moved, None if scores is None else scores.moments, scores=scores)
    took = moved.n_gradients * density.gradient_seconds
    moments = drift_of(moved, q.mean(), q.sd(), _log_q(posterior, moved))
    return Drifts(
        moved,
        moments if scores is None else replace(scores.moments, log_p=moments.log_p),
        joint_drift_of(moved),
        None if functionals is None else functional_drift_of(functionals, moved.control, moved.end, took),
        scores,
    )


def _log_q(posterior: Posterior, moved: Moved) -> tuple[Array, Array] | None:
    """Return log q at starts and at controls; None where it is not known."""
    q = posterior.distribution
    start, control = q.log_density(moved.start), q.log_density(moved.control)
    return None if start is None or control is None else (start, control)
