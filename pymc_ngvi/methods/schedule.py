r"""The schedule of a fit, the same for every q: many steps on one set of draws, then one on each fresh set.

Far from the optimum, the problem is solved on one small set of base draws, where it is deterministic: steps are taken
that do not lower the ELBO on these draws, until what is left to gain is below the sampling error of the set.

Near it, each set of draws is fresh and serves for one step of size S / (N + S), where N counts the draws behind the
current state: the result is as accurate as if all draws so far had been used together. Since fresh draws had no part in
reaching the state, the gap measured on them, less its noise floor, is an honest estimate of what is still to be gained.
It decides when to stop.

A subclass says how its q moves and is measured.
"""

import abc

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np

from pymc_ngvi.core.draws import BASE_DRAWS, N_REPLICATES, sobol_draws
from pymc_ngvi.core.sizes import ASSESSMENT
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import (
    Array,
    Assessment,
    BaseDraws,
    Density,
    Evaluation,
    Indices,
    RuleState,
    StepRule,
    Target,
    VariationalState,
)
from pymc_ngvi.families.gaussian import AnyGaussian
from pymc_ngvi.methods.estimators import (
    SEEN,
    Direction,
    Estimator,
    Moments,
    Nats,
    Quadrature,
    Update,
    in_full_metric,
    price,
    stein,
)

# --- how many nats a converged fit may have left: the one meaning of ``tol`` ---


#: Nats that a converged fit in 100 dimensions may lack by default.
TOL = 0.05
#: At the default tolerance: nats per dimension that a converged fit may lack (a root-mean-square error of 0.03 sd in
#: the mean), and the nats below which nothing is asked.
PER_DIM, _LEAST = 1e-2, 1e-1
#: Part of the nats that no q of the family can gain, which a converged fit may lack.
_UNREACHABLE = 0.03
#: Part of the tolerance that counts where the metric is not exact: gaps are underestimated there.
_INEXACT = 0.3


@dataclass(frozen=True)
class Tolerance:
    """Nats of ELBO that a converged fit may still lack, with every step rule.

    They are in proportion to the dimension: in fewer than 100 less, down to a tenth, unless the posterior is far from
    every q of the family.
    """

    #: Of a fit in 100 dimensions.
    tol: float

    def most(self, q: VariationalState) -> float:
        """Return the tolerance however far the posterior is from Gaussian."""
        # Errors that are small in each of many coordinates add up.
        return self.tol * max(1.0, PER_DIM * float(q.n_dim))

    def least(self, q: VariationalState) -> float:
        """Return the tolerance where the posterior is near-Gaussian."""
        return self.tol * max(PER_DIM * float(q.n_dim), _LEAST)

    def at(self, q: VariationalState, spread: float, *, exact: bool = True) -> float:
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


@dataclass(frozen=True)
class ScheduleState:
    """What one iteration hands to the next."""

    q: VariationalState
    #: Sets of draws used so far; names the random stream of the current one.
    level: int
    base: BaseDraws
    #: At the draws of ``q``.
    evaluation: Any
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
    #: Why the last search found no acceptable step, where it found none.
    stalled: Status | None = None
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


class Step[Q, E: Any](NamedTuple):
    """A step on a fixed set that was accepted."""

    #: Where it led.
    q: Q
    #: There.
    evaluation: E
    size: float
    #: The natural gradient that was followed, for a rule that learns from it; shape (n_params,), or None.
    direction: Array | None = None
    #: Nats gained, and whether log p is finite at all that was tried before, for a rule that asks.
    gain: float = np.nan
    all_finite: bool = True


# --- back-tracking: shorten a step until it is good enough ---


#: Steps evaluated along one direction; each at least this part of the one before, and at most half of it.
MAX_TRIALS, LEAST_PART = 8, 0.25
#: Steps proposed for each of these, those included that lead to no state, and those that are hopeless.
_PROPOSED_PER_TRIAL = 4
#: Nats, and multiples of the rise that was promised, by which the ELBO falls at a step that is hopeless.
HOPELESS, TIMES = 1e3, 10.0


def search[Q, E: Any](
    propose: Callable[[float], Q | None],
    evaluate: Callable[[Q], E],
    accepts: Callable[[E], bool],
    *,
    elbo: float,
    slope: float,
    first: float,
    most_trials: int = MAX_TRIALS,
) -> Step[Q, E] | Status:
    """Find a step that is accepted; return "stalled" where there is none, or that the ELBO is finite at none.

    Notes
    -----
    Far from the optimum a scale can be sent to where log p is -1e16 or not finite. Such hopeless trials say nothing of
    the direction, and do not count among those after which it is given up.
    """
    rho, trials, elbos = first, 0, []
    for _ in range(_PROPOSED_PER_TRIAL * most_trials):
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
    return Status.NO_FINITE_TRIAL if elbos and not np.isfinite(elbos).any() else Status.STALLED


#: Times that a step is halved until it leads to a valid state.
_MAX_HALVINGS = 40


def longest_step[T](propose: Callable[[float], T | None]) -> tuple[T, float] | None:
    """Return what the largest part 1, 1/2, ... of a step leads to, of those that lead to anything, and this part."""
    tried = ((propose(part), part) for part in 0.5 ** np.arange(_MAX_HALVINGS))
    return next(((q, part) for q, part in tried if q is not None), None)


# --- the schedule of a fit, the same for every q: many steps on one set of draws, then one on each fresh set ---

#: Draws below which nothing is certified, and a solved set is followed by a larger one.
FEW_DRAWS = 32
#: Part of the draws at which log p may be not finite in a converged fit: what q has there costs nothing in the means.
MAX_LOST = 0.02
#: Nats, and nats for each dimension, below which the noise of a set does not ask for a larger one.
NEAR_NATS = 0.5
#: Noise of a gap, in parts of the tolerance, that is none: Gaussian targets.
_NO_NOISE = 1e-3
#: Sets of the largest size after which the fit gives up on certifying its result.
MAX_ROUNDS = 4
#: Ratio of successive gaps above which averaging counts as creeping: where the metric is exact, and where it is not.
_CREEPING, _CREEPING_INEXACT = 1.0, 0.6
#: Accepted steps on one set of draws, at most, and part of the tolerance below which one gains nothing.
_MAX_STEPS, _GAIN = 60, 0.02
#: Part of the tolerance that the standard deviation of a measured gap may have, for the certificate.
_CERTAIN = 0.4
#: Relative rounding of an ELBO by draws.
ROUNDING = 1e-9
#: Part of the tolerance below which a set is solved, whatever its noise.
_SOLVED = 0.1
#: Growth of a set that is too small: where the metric is not exact, a small set misleads for longer.
_GROWTH, _GROWTH_INEXACT = 2, 4


def is_not_below(old: Any, new: Any, slack: float) -> bool:
    """Tell whether a step neither lowers the ELBO on the current draws by more than so much nor loses more of them."""
    loses = not np.isfinite(new.elbo) or new.n_dropped > old.n_dropped
    return bool(not loses and new.elbo >= old.elbo - slack)


class Schedule[S: ScheduleState, Q: VariationalState, E: Any](abc.ABC):
    """Many steps on one set of draws, then one on each fresh set.

    Parameters
    ----------
    target : Density
    update, estimator : callable
        Rows of the registries.
    seed : int
        Of the base draws.
    tol : float, default 0.05
        Nats that may be left to gain; see `Tolerance`.
    n_draws, max_draws : int, optional
        Sizes of the first and of the largest set of draws, powers of 2 where quasi-random.
    base_draws : {"sobol", "antithetic", "plain"}
    stl : bool
        Sticking the landing.
    direction : callable, optional
        Taken by every step rule; of use to those of Cholesky factors.
    """

    #: Options that the rule takes, for the messages that refuse others.
    takes: ClassVar[frozenset[str]] = frozenset({"n_draws", "max_draws", "base_draws"})
    #: Draws in the first and in the largest set if none are given, and those below which nothing is certified.
    default_draws: ClassVar[tuple[int, int]] = (8, 1_024)
    few_draws: int = FEW_DRAWS
    #: Accepted steps in a row that gain nothing, after which a set counts as solved.
    max_idle: ClassVar[int] = 3
    #: Whether all sets of fresh draws count among those after which a fit gives up, or those of the largest size.
    counts_all: ClassVar[bool] = False
    #: The class of states, and what tells its draws from those of others with the same seed.
    state: ClassVar[type[Any]]
    stream: ClassVar[tuple[int, ...]] = ()

    def __init__(
        self,
        target: Density,
        update: Update,
        estimator: Estimator,
        *,
        seed: int,
        tol: float = TOL,
        n_draws: int | None = None,
        max_draws: int | None = None,
        base_draws: str = "sobol",
        stl: bool = True,
        direction: Direction | None = None,
    ) -> None:
        first, most = self.default_draws
        self._target, self._update, self._estimator, self._stl = target, update, estimator, stl
        self._draw, self.seed, self.tolerance = BASE_DRAWS[base_draws], seed, Tolerance(tol)
        self._n_draws = n_draws or min(first, max_draws or first)
        self._max_draws = max(max_draws or most, self._n_draws)

    # --- what a subclass says -------------------------------------------------------------------------------------

    def base_draws(self, level: int, n_draws: int) -> BaseDraws:
        """Return the base draws of one level: a function of the seed and the level."""
        return self._draw(n_draws, self._target.n_dim, np.random.default_rng([self.seed, level, *self.stream]))

    def at(self, q: Q, level: int, n_draws: int) -> tuple[Q, BaseDraws, E]:
        """Return q, which may be left with fewer components, new base draws, and log p at these draws of it."""
        base = self.base_draws(level, n_draws)
        return q, base, cast(E, self._estimator.evaluate(self._target, q, base))

    @abc.abstractmethod
    def moments(self, q: Q, base: BaseDraws, evaluation: E) -> Nats:
        """Return what is left to gain, and along what."""

    def _measured(self, state: S) -> S:
        """Return a state with the moments at its draws."""
        return replace(state, moments=self.moments(cast(Q, state.q), state.base, state.evaluation))

    @abc.abstractmethod
    def _found(self, state: S) -> tuple[S, Step[Q, E] | Status]:
        """Return a step that `_accepts` takes, if there is one, and the state less what was of no use."""

    @abc.abstractmethod
    def _averaged(self, state: S, rho: float) -> S | None:
        """Return the state after a step of given size, as `_pooled` makes it; None where it is not valid."""

    @abc.abstractmethod
    def _is_near(self, state: S, gap: float) -> bool:
        """Tell whether a state with so many nats left is near enough to the optimum for steps to be averaged."""

    @abc.abstractmethod
    def _spread(self, state: S) -> float:
        """Return the variance of log p - log q under q."""

    def _is_exact(self, state: S) -> bool:
        """Tell whether the Fisher information is the curvature of the ELBO at the optimum."""
        return True

    def _is_at_rest(self, state: S) -> bool:
        """Tell whether nothing is off by much that few nats would hide: a coordinate, the shape."""
        return True

    def _is_kinked(self, state: S) -> bool:
        """Tell whether gradients show a curvature that Hessians miss."""
        return False

    def _has_learned(self, state: S) -> bool:
        """Tell whether steps on a fixed set have taught what they can."""
        return True

    def _learned(self, state: S, moved: S, step: Step[Q, E]) -> S:
        """Return a state with moments after a step on a fixed set, and what the step has taught."""
        return self._measured(moved)

    def _left(self, state: S) -> S:
        """Return what follows on a set that is solved."""
        return self._next_set(state)

    def _draws_needed(self, state: S) -> float:
        """Return the draws that the set after an averaged step needs, whatever the gap."""
        return self.few_draws

    # --- verbs of the loop ----------------------------------------------------------------------------------------

    def first_evaluation(self, q: Q) -> E:
        """Evaluate a starting state on the first base draws."""
        return self.at(q, 0, self._n_draws)[2]

    def begin(self, q: Q, level: int = 0, n_draws: int | None = None, **known: Any) -> S | None:
        """Return a state on a new set of draws; None where none of them is finite."""
        q, base, evaluation = self.at(q, level, n_draws or self._n_draws)
        if not np.isfinite(evaluation.elbo):
            return None
        moments, n_dropped = self.moments(q, base, evaluation), evaluation.n_dropped
        new = self.state(q, level, base, evaluation, moments, belief=Belief.of(moments), n_dropped=n_dropped, **known)
        return cast(S, new)

    def step(self, state: S) -> S:
        """Take one step."""
        ready = state.fresh and state.n_pooled and self._has_learned(state) and state.evaluation.lost <= MAX_LOST
        if ready and self._is_near(state, state.gap):
            averaged = self._average(state)
            if averaged is not None:
                return averaged
        return self._solve(replace(state, n_pooled=0))

    def terminate(self, state: S) -> Status | None:
        """Return why to stop, or None to go on."""
        if not state.fresh:
            return None
        if self._is_certified(state):
            return Status.NOT_SMOOTH if self._is_kinked(state) else Status.CONVERGED
        return self._why_given_up(state) if state.rounds >= MAX_ROUNDS else None

    def assess(self, state: S) -> Assessment:
        """Evaluate a state on draws that had no part in reaching it."""
        if not state.fresh:
            aside = replace(state, level=ASSESSMENT + state.level, belief=UNKNOWN)
            state = self._redraw(aside, max(state.n_draws, self.few_draws))
        return self._assessed(state)

    def _assessed(self, state: S) -> Assessment:
        """Return what the fresh draws of a state say of it."""
        evaluation, gap, gap_sd = state.evaluation, state.gap, state.belief.sd
        against = Status.NOISE_LIMITED if gap - 2.0 * gap_sd > self.tolerance.most(state.q) else None
        return Assessment(evaluation.theta, evaluation.logp, state.base.pairs(), gap, gap_sd, against)

    def reopen(self, state: S) -> S:
        """Return a state in which a fit that gave up may try again."""
        return replace(state, rounds=0)

    # --- the certificate ------------------------------------------------------------------------------------------

    def _tol_at(self, state: S) -> float:
        """Return the nats that may be left at a state."""
        return self.tolerance.at(state.q, self._spread(state), exact=self._is_exact(state))

    def _is_certified(self, state: S) -> bool:
        m, noiseless = state.moments, _NO_NOISE * self.tolerance.least(state.q)
        # A set that is its own first use certifies nothing unless its size lets the noise be judged.
        if state.evaluation.lost > MAX_LOST or not (state.n_draws >= self.few_draws or m.floor_sd <= noiseless):
            return False
        # Nor must the sampling error of the draws behind the state speak against it.
        met = self._most_left(state) < self._tol_at(state) and state.gap < self.tolerance.most(state.q)
        return met and self._is_at_rest(state)

    def _most_left(self, state: S) -> float:
        """Return the most nats that may be left to gain: as all sets tell, and the last one alone."""
        m = state.moments
        return max(state.belief.bound, m.gap - m.floor + m.floor_sd)

    def _why_given_up(self, state: S) -> Status:
        """Return the likeliest reason why the largest sets of draws did not certify the state."""
        if state.evaluation.lost > MAX_LOST:
            return Status.OUTSIDE_SUPPORT
        if self._is_kinked(state):
            return Status.NOT_SMOOTH
        return state.stalled or Status.NOISE_LIMITED

    # --- near the optimum: one step from each fresh set -----------------------------------------------------------

    def _average(self, state: S) -> S | None:
        """Take the step that pools this set with all before it; None where it is not valid."""
        # The gain of a Kalman filter: error of the state, G, against error of what this set says, R. Where G is nothing
        # but the error of the draws so far, it is S / (N + S).
        error, noise = state.gap, state.moments.floor
        pooling = state.n_draws / (state.n_pooled + state.n_draws)
        moved = self._averaged(state, max(pooling, error / (error + noise) if error > 0.0 else 0.0))
        if moved is None:
            return None
        new = self._redraw(moved, self._draws_to_average(state, moved.n_pooled))
        if new.level == state.level:  # no draw of the new set is finite: stay, and go on with this set
            return None
        # Shrinking steps can't finish what a full step leaves over: then the set is worth solving, and learning from.
        return replace(new, n_pooled=0, belief=Belief.of(new.moments)) if self._creeps(state, new) else new

    def _creeps(self, state: S, new: S) -> bool:
        """Tell whether an averaged step left more of the gap than it should have."""
        ratio = _CREEPING if self._is_exact(state) else _CREEPING_INEXACT
        most = ratio * Belief.of(state.moments).bound + 2.0 * new.moments.floor_sd
        return Belief.of(new.moments).mean > most

    def _pooled(self, state: S, q: Q, rho: float) -> S:
        """Return a state after an averaged step."""
        # Where the metric is not exact, a step may do less than it promises, but no harm.
        predicted = state.belief.after_step(rho, state.moments.floor) if self._is_exact(state) else state.belief
        n_pooled = round(state.n_draws / rho)
        return replace(state, q=q, n_pooled=n_pooled, step_size=rho, stalled=None, belief=predicted)

    def _draws_to_average(self, state: S, n_pooled: int) -> int:
        """Return the size of the set that follows an averaged step, after which ``n_pooled`` draws are behind it."""
        n_sds = 1.0 if self._is_exact(state) else 2.0
        needed = state.n_draws * n_sds * state.moments.floor_sd / (_CERTAIN * self._tol_at(state))
        n_draws = min(n_pooled, max(needed, self._draws_needed(state)), self._max_draws)
        return int(2.0 ** np.floor(np.log2(n_draws)))

    # --- far from it: many steps on one set -----------------------------------------------------------------------

    def _solve(self, state: S) -> S:
        """Take one step on the current set; go to a fresh one if that solves it."""
        state, step = self._found(state)
        if isinstance(step, Status):
            return self._next_set(replace(state, stalled=step))
        best = max(state.best, state.elbo)
        gained = step.evaluation.elbo - best > _GAIN * self.tolerance.least(step.q)
        moved = replace(
            state,
            q=step.q,
            evaluation=step.evaluation,
            fresh=False,
            stalled=None,
            step_size=step.size,
            n_steps=state.n_steps + 1,
            best=best,
            idle=0 if gained else state.idle + 1,
        )
        full = step.size == 1.0
        spent = moved.idle >= self.max_idle or moved.n_steps >= _MAX_STEPS
        # After a full step from within the sampling error, what is left on this set is far below it.
        if (full and self._has_learned(state) and self._is_solved(state)) or spent:
            return self._next_set(moved)
        moved = self._learned(state, moved, step)
        # Near the optimum, where the natural gradient of the draws and the ELBO on them differ by sampling error only.
        overshoots = not full and self._is_exact(state) and self._has_learned(moved)
        if overshoots and self._is_near(moved, moved.moments.gap):
            return self._next_set(moved)
        return self._left(moved) if self._is_solved(moved) else moved

    def _accepts(self, state: S, new: E) -> bool:
        """Tell whether a step neither lowers the ELBO on the current draws nor loses more of them."""
        return is_not_below(state.evaluation, new, self._slack(state))

    def _slack(self, state: S) -> float:
        """Return the nats by which the ELBO may fall on the draws in use, in a step that still counts as harmless.

        Within the sampling error the fixed point of the update and the maximum on these draws need not agree.
        """
        return ROUNDING * abs(state.elbo) + 0.5 * min(state.moments.floor, self.tolerance.least(state.q))

    def _is_solved(self, state: S) -> bool:
        """Tell whether a set of draws has little more to give: at most its noise."""
        return state.moments.gap <= max(state.moments.floor, _SOLVED * self.tolerance.least(state.q))

    def _next_set(self, state: S) -> S:
        """Go to fresh draws after a set is solved, or as far solved as it can be."""
        near = self._is_near(state, state.moments.gap) and not state.stalled
        too_noisy = state.moments.floor > max(NEAR_NATS, 4.0 * self.tolerance.least(state.q))
        grows = state.n_draws < self.few_draws or not near or too_noisy or state.evaluation.lost > MAX_LOST
        growth = _GROWTH if self._is_exact(state) else _GROWTH_INEXACT
        n_draws = min(state.n_draws * growth, self._max_draws) if grows else state.n_draws
        return self._redraw(replace(state, n_pooled=state.n_draws, belief=UNKNOWN, idle=0), n_draws)

    def _redraw(self, state: S, n_draws: int) -> S:
        """Return a state on fresh draws; one that gives up where none of them is finite."""
        level = state.level + 1
        q, base, evaluation = self.at(cast(Q, state.q), level, n_draws)
        if not np.isfinite(evaluation.elbo):  # nothing can be said of it: the fit ends here
            return replace(state, fresh=True, stalled=Status.STALLED, rounds=MAX_ROUNDS)
        drawn = replace(
            state,
            q=q,
            level=level,
            base=base,
            evaluation=evaluation,
            fresh=True,
            n_steps=0,
            best=-np.inf,
            rounds=state.rounds + (self.counts_all or n_draws >= self._max_draws),
            n_dropped=state.n_dropped + evaluation.n_dropped,
        )
        drawn = self._measured(drawn)
        return replace(drawn, belief=state.belief.measured(drawn.moments))


# --- what step rules share that go by an ELBO without noise: the prior, and rows or batches, by quadrature ---


#: Of an ELBO that is known without draws.
NO_DRAWS = BaseDraws(np.empty((0, 0)), 1)


class ExactRule[T, S: RuleState](StepRule[AnyGaussian, S]):
    """A step rule on an ELBO without noise; on a target T; see `StepRule` for the parameters.

    Raises
    ------
    TypeError
        For an estimator with noise.
    """

    takes: ClassVar[frozenset[str]] = frozenset()
    takes_any_start = True

    def __init__(
        self,
        target: Target,
        update: Update,
        estimator: Estimator,
        *,
        direction: Direction | None = None,
        seed: int,
        tol: float = TOL,
        stl: bool = True,
    ) -> None:
        if not isinstance(estimator, Quadrature):
            raise TypeError("this step rule needs an ELBO without noise: take estimator='quadrature'")
        self._target: T = cast(Any, target)
        self._update, self._estimator = update, estimator
        self._tolerance, self._seed = Tolerance(tol), seed


# --- what speaks against a fit that seems to have converged: lost draws, and kinks that Hessians do not see ---

#: Whitened error of the diagonal curvature that a converged coordinate may have.
MAX_CURVATURE_ERROR = 0.2
#: Standard errors by which the curvature that gradients show must differ from the Hessians' to be no noise, in one
#: dimension; in more, what the largest of so many normals adds.
_N_SE_KINK = 2.5
#: The quantile to which lower values of log p - log q are raised.
_UPPER = 0.75
#: Nats below which nothing is told apart: sums of lower ones overflow.
_LOWEST = -1e200


def has_diverged(
    q: AnyGaussian, evaluation: Evaluation, units: Indices, first_elbo: float, *, on_batches: bool = False
) -> bool:
    """Tell whether a fit ended far below its start.

    Steps on noise may lose a little, and a minibatch says little of all the data. The ELBO of the result is therefore
    taken on eight parts of the draws, on a minibatch each; the start has to be above the best of them by more than they
    range over: of nine equals, one stands out so far by chance once in many thousands. Draws below the upper quartile
    count as if they were there: that raises the ELBO, and where log p falls exponentially, few draws are all of it.
    """
    if not (np.isfinite(q.mean()).all() and np.isfinite(q.sd()).all()):
        return True
    if not np.isfinite(first_elbo):
        return False
    h = np.where(evaluation.finite, evaluation.logp - q.log_density(evaluation.theta), np.nan)
    h = np.maximum(h, _LOWEST)
    for own in units if on_batches else [units.ravel()]:
        if np.isfinite(h[own]).any():
            h[own] = np.maximum(h[own], np.nanquantile(h[own], _UPPER))
    parts = [h[part.ravel()] for part in np.array_split(units, N_REPLICATES)]
    elbos = [float(np.mean(part[np.isfinite(part)])) for part in parts if np.isfinite(part).any()]
    return not elbos or bool(2.0 * max(elbos) - min(elbos) < first_elbo - q.n_dim)


def is_kinked(q: AnyGaussian, base: BaseDraws, evaluation: Evaluation, moments: Moments) -> bool:
    """Tell whether gradients show a curvature that Hessians miss: that of kinks, where log p has no Hessian.

    By Stein's identity the diagonal of A is 1 - E[w z] with w = C^T grad log p + z, kinks included.
    """
    pairs = base.pairs()
    pairs = pairs[evaluation.finite[pairs].all(axis=1)]
    if len(pairs) < FEW_DRAWS // 2:
        return False
    rows = pairs.ravel()  # gradients of the others may be infinite
    z = base.z[rows]
    products = (q.whiten(evaluation.grad[rows]) + z) * z
    products = products.reshape(*pairs.shape, -1).mean(axis=1)
    missed = np.abs(q.curvature_diagonal(moments.curvature) - 1.0 + products.mean(axis=0))
    se = products.std(axis=0, ddof=1) / np.sqrt(len(pairs))
    n_se = _N_SE_KINK + np.sqrt(2.0 * np.log(max(len(se), 1)))
    return bool(np.any(missed > MAX_CURVATURE_ERROR + n_se * se))


# --- how many nats a state still lacks, measured on fresh draws, and what speaks against believing it ---

#: Draws of a measurement with Hessians, and from gradients alone.
N_HESSIANS, N_GRADIENTS = 64, 2_048


class Measured(NamedTuple):
    """What is left to gain."""

    #: Nats, and the standard deviation of their error.
    gap: float
    sd: float
    #: What a fit deserves in spite of a small gap.
    against: Status | None = None
    #: Variance of log p - log q.
    spread: float = 0.0


#: Where the gap is unknown.
UNKNOWN_GAP = Measured(np.nan, np.inf)


def measured_gap(target: Target, q: AnyGaussian, rng: np.random.Generator, *, second_order: bool) -> Measured:
    """Measure the gap of a state on fresh draws.

    With Hessians where the fit has used them, or where they add little to what it has cost. They miss kinks: where
    gradients show another curvature, a fit by gradients is measured by gradients, and one by Hessians is not believed.
    """
    cheap = 2 * N_HESSIANS * target.n_dim <= target.n_gradients
    if target.has_hessian and (second_order or cheap):
        base = sobol_draws(N_HESSIANS, target.n_dim, rng)
        measured = measured_at(target, q, base, price.evaluate(target, q, base), price)
        if second_order or measured.against is not Status.NOT_SMOOTH:
            return measured
    base = sobol_draws(N_GRADIENTS, target.n_dim, rng)
    return measured_at(target, q, base, stein.evaluate(target, q, base), stein)


def measured_at(
    target: Target,
    q: AnyGaussian,
    base: BaseDraws,
    evaluation: Evaluation,
    estimator: Estimator,
    *,
    full_metric: bool = True,
) -> Measured:
    """Measure the gap of a state that has been evaluated."""
    if not evaluation.finite.any():
        return Measured(np.nan, np.inf, Status.OUTSIDE_SUPPORT)
    moments = estimator.moments(target, q, base, evaluation)
    against = Status.OUTSIDE_SUPPORT if evaluation.lost > MAX_LOST else None
    if against is None and estimator is price and is_kinked(q, base, evaluation, moments):
        against = Status.NOT_SMOOTH
    keep, full = evaluation.finite, None
    if full_metric and not q.exact_metric:
        full = in_full_metric(target, q, evaluation.theta[keep], moments)
    hidden = 1.0 if q.exact_metric or full is not None else SEEN
    moments = full or moments
    spread = float(np.var(evaluation.logp[keep] - q.log_density(evaluation.theta[keep])))
    return Measured(max(moments.gap - moments.floor, 0.0) / hidden, moments.floor_sd / hidden, against, spread)
