"""What one iteration hands to the next, in every schedule."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, Self

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, BaseDraws, FittedState

# --- how many nats a converged fit may have left: the one meaning of ``tol`` ---


#: Nats that a converged fit in 100 dimensions may lack by default.
TOL = 0.05
#: At the default tolerance: nats per dimension that a converged fit may lack (a root-mean-square error of .03 sd in
#: the mean), and the nats below which nothing is asked.
_PER_DIM, _LEAST = 1e-2, 1e-1
#: Part of the nats that no q of the family can gain, which a converged fit may lack.
_UNREACHABLE = 0.03
#: Part of the tolerance that counts where the metric is not exact: gaps are underestimated there.
_INEXACT = 0.3


@dataclass(frozen=True)
class Tolerance:
    """Nats of ELBO that a converged fit may still lack, with every step rule.

    In fewer than 100 dimensions they are less, in proportion to the dimension down to a tenth, unless the posterior is
    far from every q of the family; for a q that tells group effects from global parameters, which are judged one by
    one, the proportion goes on above 100.
    """

    #: Of a fit in 100 dimensions.
    tol: float

    def most(self, q: FittedState) -> float:
        """Return the tolerance however far the posterior is from Gaussian."""
        # Among group effects, errors that are small in each add up; elsewhere nothing tells them from global ones.
        return self.tol * (1.0 if q.globals_ is None else max(1.0, _PER_DIM * float(q.n_dim)))

    def least(self, q: FittedState) -> float:
        """Return the tolerance where the posterior is near-Gaussian."""
        return min(self.tol * max(_PER_DIM * float(q.n_dim), _LEAST), self.most(q))

    def at(self, q: FittedState, spread: float, *, exact: bool = True) -> float:
        """Return the tolerance for a state.

        Where the posterior is far from it, half the variance of log p - log q under q tells how many nats the best q of
        the family lacks; to find that q to within a small part of them is enough.
        """
        nats = float(np.clip(_UNREACHABLE * (0.5 * spread), self.least(q), self.most(q)))
        return nats if exact else _INEXACT * nats


# --- what is known of the gap of a state: a scalar Kalman filter over measurements on fresh draws ---
#
# Near the optimum, one set of draws measures the gap with an error that is as large as the gap itself, and a fit that
# stops at a low measurement would report a gap that is too low. But most of what is left is the sampling error of the
# draws behind the state, and that is known: a step of size rho from a gap G, on draws with noise floor R, leaves
# rho^2 R of noise, and (1 - rho)^2 G of the gap where the Fisher information is the curvature. Along a flatter
# direction it leaves more; (1 - rho) G is taken, so that a gap along one direction is not believed away.


#: Relative error of a predicted gap: steps are not exact, and the Fisher information is not quite the curvature.
_MODEL_ERROR = 0.3
#: Standard deviations between prediction and measurement beyond which the prediction counts for nothing.
_SURPRISE = 3.0


class Nats(Protocol):
    """What is left to gain, as one set of draws has it."""

    @property
    def gap(self) -> float:
        """Half the squared length of the natural gradient."""

    @property
    def floor(self) -> float:
        """What noise alone would make it."""

    @property
    def floor_sd(self) -> float:
        """Standard deviation of the difference at the optimum."""


@stored("adaptive.belief")
@dataclass(frozen=True)
class Belief:
    """Estimate of the nats still to be gained by a state."""

    #: Not clipped: may be below 0 after a single measurement.
    mean: float = np.inf
    #: Standard deviation of the error of ``mean``; inf before any measurement.
    sd: float = np.inf

    @classmethod
    def of(cls, moments: Nats) -> Self:
        """Return what one set of fresh draws says by itself."""
        gap = moments.gap - moments.floor
        return cls(gap, _measurement_sd(moments, gap))

    def after_step(self, step_size: float, floor: float) -> Self:
        """Predict the gap after a step on draws with noise floor ``floor``, nats."""
        left = 1.0 - step_size
        mean = left * max(self.mean, 0.0) + step_size**2 * floor
        return type(self)(mean, float(np.hypot(left * self.sd, _MODEL_ERROR * mean)))

    def measured(self, moments: Nats) -> Self:
        """Combine a prediction with a measurement on fresh draws."""
        alone = self.of(moments)
        sd = _measurement_sd(moments, max(self.mean, 0.0)) if np.isfinite(self.sd) else np.inf
        if not np.isfinite(sd) or sd == 0.0 or abs(alone.mean - self.mean) > _SURPRISE * np.hypot(sd, self.sd):
            return alone
        gain = self.sd**2 / (self.sd**2 + sd**2)
        return type(self)(self.mean + gain * (alone.mean - self.mean), self.sd * float(np.sqrt(1.0 - gain)))

    @property
    def bound(self) -> float:
        """Mean plus two standard deviations."""
        return self.mean + 2.0 * self.sd


#: Before any measurement.
UNKNOWN = Belief()


def _measurement_sd(moments: Nats, gap: float) -> float:
    """Return the standard deviation of a corrected gap where the true one is ``gap``.

    Its variance is tr(Cov^2) / (2 S^2) + g^T Cov g / S. ``floor_sd`` is the root of the first term; the second is taken
    for a g that lies as the noise does.
    """
    if moments.floor <= 0.0:
        return moments.floor_sd
    return moments.floor_sd * float(np.sqrt(1.0 + 2.0 * max(gap, 0.0) / moments.floor))


class Evaluated(Protocol):
    """log p at the draws of a state, as far as the schedule asks."""

    @property
    def elbo(self) -> float:
        """ELBO on these draws; -inf where none is finite."""

    @property
    def n_dropped(self) -> int:
        """Draws at which log p or its gradient is not finite."""

    @property
    def lost(self) -> float:
        """Part of q that they stand for."""


@dataclass(frozen=True)
class ScheduleState:
    """What one iteration hands to the next."""

    q: FittedState
    #: Sets of draws used so far; names the random stream of the current one.
    level: int
    base: BaseDraws
    #: At the draws of ``q``.
    evaluation: Evaluated
    #: There.
    moments: Nats
    #: ``base`` had no part in reaching ``q``.
    fresh: bool = True
    #: The last one accepted.
    step_size: float = 1.0
    #: Draws behind ``q``, while steps are averaged; 0 while a fixed set is being solved.
    n_pooled: int = 0
    #: Of the gap of ``q``; measured on fresh draws only.
    belief: Belief = UNKNOWN
    #: Sets of fresh draws tried at the largest size.
    rounds: int = 0
    #: Accepted steps on the current set.
    n_steps: int = 0
    #: ELBO on the current set before its last step, or an earlier one if that was higher.
    best: float = -np.inf
    #: Accepted steps in a row that gained nothing.
    idle: int = 0
    #: The last search found no acceptable step.
    stalled: bool = False
    #: Of a stalled state: none of the steps that were tried has a finite ELBO.
    blind: bool = False
    #: Draws left out so far because log p or its gradient was not finite.
    n_dropped: int = 0

    @property
    def elbo(self) -> float:
        """ELBO on the current draws."""
        return self.evaluation.elbo

    @property
    def gap(self) -> float:
        """Estimated nats of ELBO still to be gained; on fresh draws, corrected for their noise.

        At least the sampling error of the draws behind the state: a fit stops where a measurement is low.
        """
        if not np.isfinite(self.moments.floor):  # a single replicate tells nothing of its noise
            return float("inf")
        if not self.fresh:
            return self.moments.gap
        sampling_error = self.moments.floor * self.n_draws / self.n_pooled if self.n_pooled else 0.0
        return max(self.belief.mean, sampling_error)

    @property
    def n_draws(self) -> int:
        """Draws in use."""
        return self.base.n_draws

    @property
    def growing(self) -> NDArray[np.intp]:
        """Coordinates whose standard deviations grow without end: none that this schedule looks for."""
        return np.empty(0, dtype=np.intp)


class Step[Q, E](NamedTuple):
    """A step on a fixed set that was accepted."""

    #: Where it led.
    q: Q
    #: There.
    evaluation: E
    size: float
    #: The natural gradient that was followed, for a rule that learns from it; shape (n_params,), or None.
    direction: Array | None = None


# --- back-tracking: shorten a step until it is good enough ---


#: Steps evaluated along one direction; each at least this part of the one before, and at most half of it.
MAX_TRIALS, LEAST_PART = 8, 0.25
#: Steps proposed along one direction, those included that lead to no state, and those that are hopeless.
MAX_PROPOSED, _PROPOSED_PER_TRIAL = 30, 4
#: Nats, and multiples of the rise that was promised, by which the ELBO falls at a step that is hopeless.
HOPELESS, TIMES = 1e3, 10.0


class Failure(Enum):
    """Why a search found no step."""

    #: Steps were tried and fell short, or none leads to a valid state.
    NOT_ACCEPTED = "not accepted"
    #: Steps were tried, and at none is the ELBO finite.
    NOT_FINITE = "not finite"


def search[Q, E: Evaluated](
    propose: Callable[[float], Q | None],
    evaluate: Callable[[Q], E],
    accepts: Callable[[E], bool],
    *,
    elbo: float,
    slope: float,
    first: float,
    most_trials: int = MAX_TRIALS,
) -> Step[Q, E] | Failure:
    """Find a step that is accepted.

    Notes
    -----
    Far from the optimum a scale can be sent to where log p is -1e16 or not finite. Such hopeless trials say nothing of
    the direction, and do not count among those after which it is given up.
    """
    rho, trials, elbos = first, 0, []
    for _ in range(min(MAX_PROPOSED, _PROPOSED_PER_TRIAL * most_trials)):
        q = propose(rho)
        if q is None:
            rho *= 0.5
            continue
        evaluation = evaluate(q)
        if accepts(evaluation):
            return Step(q, evaluation, rho)
        elbos.append(evaluation.elbo)
        gained = evaluation.elbo - elbo
        trials += np.isfinite(gained) and -gained <= max(HOPELESS, TIMES * rho * slope)  # or it ended far away
        if trials == most_trials:
            break
        # On to the top of the parabola of this slope through what was gained, or near.
        top = 0.5 * rho * slope / (rho * slope - gained) if np.isfinite(gained) and rho * slope > gained else 0.5
        rho *= float(np.clip(top, LEAST_PART, 0.5))
    return Failure.NOT_FINITE if elbos and not np.isfinite(elbos).any() else Failure.NOT_ACCEPTED
