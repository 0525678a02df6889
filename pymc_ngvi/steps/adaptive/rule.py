r"""The default step rule: no learning rate, few draws, a stop rule in nats.

Far from the optimum, the problem is solved on one small set of base draws, where it is deterministic: natural steps of
size 1 are taken while the ELBO on these draws does not fall, smaller ones where it would, until what is left to gain is
below the sampling error of the set.

Near it, each set of draws is fresh and serves for one step of size S / (N + S), where N counts the draws behind the
current state: the result is as accurate as if all draws so far had been used together. Since fresh draws had no part in
reaching the state, the gap measured on them, less its noise floor, is an honest estimate of what is still to be gained.
It decides when to stop.
"""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from pymc_ngvi.core.draws import BASE_DRAWS, MAX_SOBOL_DIM, globals_first
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.types import (
    Array,
    Assessment,
    BaseDraws,
    Direction,
    Estimator,
    Evaluation,
    Moments,
    Target,
    Update,
)
from pymc_ngvi.steps.adaptive.belief import UNKNOWN, Belief
from pymc_ngvi.steps.adaptive.certificate import FEW_DRAWS, assessed, is_kinked, loses_draws, why_given_up
from pymc_ngvi.steps.adaptive.drift import Drift, with_stride
from pymc_ngvi.steps.adaptive.growth import Growth
from pymc_ngvi.steps.adaptive.linesearch import Failure, search
from pymc_ngvi.steps.adaptive.nearness import (
    TENS_OF_THOUSANDS,
    THOUSANDS,
    has_effects,
    is_near,
    is_solved,
    secants_serve,
    slack_of,
)
from pymc_ngvi.steps.adaptive.scales import MAX_RECOVERIES, N_RECOVERY, Tools, recovered
from pymc_ngvi.steps.adaptive.secant import Pair, correct, moments_of, natural_gradient, rescaled_gap, trusted
from pymc_ngvi.steps.adaptive.set_size import draws_to_average, draws_to_solve
from pymc_ngvi.steps.adaptive.settling import LEAST_GAIN, MAX_SETTLING, can_settle, without_globals
from pymc_ngvi.steps.adaptive.state import AdaptiveState
from pymc_ngvi.steps.adaptive.tolerance import Tolerance, no_coordinate_is_off

#: Draws in the first and in the largest set.
_N_DRAWS, _MAX_DRAWS = 8, 1_024
#: Noise of a gap, in parts of the tolerance, that is none: Gaussian targets.
_NO_NOISE = 1e-3
#: Sets of `max_draws` fresh draws after which the fit gives up on certifying its result.
_MAX_ROUNDS = 4
#: Ratio of successive gaps above which averaging counts as creeping: where the metric is exact, and where it is not.
_CREEPING, _CREEPING_INEXACT = 1.0, 0.6
#: Steps kept for the secant correction: where it serves only the last stretch, and where it is always needed.
_N_PAIRS, _N_PAIRS_INEXACT = 6, 12
#: A step near the optimum that leaves less than this part of the gap tells that there is nothing to correct; otherwise
#: so many of them are looked at on a fixed set before averaging begins.
_FAST_RATE, _N_LEARNED = 0.15, 6
#: Part of its noise to which a set is solved when it has no more to teach of a hierarchical model.
_EXHAUSTED = 0.25
#: Accepted steps on one set of draws, at most: a target that takes more is better served by more draws.
_MAX_STEPS = 60
#: Random streams from here on serve only to assess states, never to move them.
_ASSESSMENT_LEVEL, _LISTENING_LEVEL, _RECOVERY_LEVEL = 1_000_000, 4_000_000, 6_000_000
#: Accepted steps in a row that gain nothing, after which the set counts as solved.
_MAX_IDLE = 3


class Adaptive:
    """Second-order steps that need no learning rate.

    Parameters
    ----------
    target : Target
    update, estimator : callable
        Rows of the registries.
    seed : int
        Of the base draws.
    tol : float, default 0.05
        Stop when the nats still to be gained, with two standard deviations of their estimate, are below this in 100
        dimensions, and no coordinate is off by much. In d dimensions it is ``tol * max(d, 10) / 100``; below 100, only
        where the posterior is near-Gaussian, and above, only for a q that tells globals from group effects, of which
        the globals are judged one by one.
    n_draws, max_draws : int, optional
        Sizes of the first and of the largest set of draws, powers of 2 where quasi-random: 8 and 1,024.
    base_draws : {"sobol", "antithetic", "plain"}
    stl : bool
        Sticking the landing.
    direction : callable, optional
        Not used.
    """

    #: Options that the rule takes, for the messages that refuse others.
    takes: ClassVar[frozenset[str]] = frozenset({"n_draws", "max_draws", "base_draws"})

    def __init__(
        self,
        target: Target,
        update: Update,
        estimator: Estimator,
        *,
        seed: int,
        tol: float = 0.05,
        n_draws: int | None = None,
        max_draws: int | None = None,
        base_draws: str = "sobol",
        stl: bool = True,
        direction: Direction | None = None,
    ) -> None:
        self._target = target
        self._update = update
        self._estimator = estimator
        self._stl = stl
        self._draw = BASE_DRAWS[base_draws]
        self._seed = seed
        self._tolerance = Tolerance(tol)
        self._n_draws = n_draws or min(_N_DRAWS, max_draws or _N_DRAWS)
        self._max_draws = max(max_draws or _MAX_DRAWS, self._n_draws)

    def base_draws(self, level: int, n_draws: int, q: Any = None) -> BaseDraws:
        """Return the base draws of one level: a function of the seed, the level and the global coordinates of q."""
        rng = np.random.default_rng([self._seed, level])
        base = self._draw(n_draws, self._target.n_dim, rng)
        # In more dimensions than quasi-random points have, global parameters come first.
        few = q is None or q.globals_ is None or q.n_dim <= MAX_SOBOL_DIM
        return base if few else globals_first(base, q.globals_)

    def first_evaluation(self, q: Any) -> Evaluation:
        """Evaluate a starting state on the first base draws."""
        return self._drawn(q, 0, self._n_draws)[1]

    def init(self, q: Any) -> AdaptiveState:
        """Return the state before the first iteration."""
        base, evaluation = self._drawn(q, 0, self._n_draws)
        n_dropped = int((~evaluation.finite).sum())
        moments = self._estimator.moments(self._target, q, base, evaluation, stl=self._stl)
        n_settling = MAX_SETTLING if can_settle(q) else 0
        state = AdaptiveState(q, 0, base, evaluation, moments, n_dropped=n_dropped, n_settling=n_settling)
        drift = Drift.measured(None, q, moments, base.n_draws)
        state = replace(state, belief=Belief.of(moments), drift=drift, growth=Growth(first=q.sd()))
        return replace(state, n_recoveries=MAX_RECOVERIES)

    def step(self, state: AdaptiveState) -> AdaptiveState:
        """Take one step."""
        new = self._step(state)
        new = replace(new, growth=state.growth.after(new.q))
        ends_set = new.fresh and (state.level == 0 or self.terminate(new) not in (None, Status.UNBOUNDED))
        return self._with_scales(new) if new.n_recoveries and ends_set else new

    def _with_scales(self, state: AdaptiveState) -> AdaptiveState:
        """Look for lost scales elsewhere; return the state as it is where none are."""
        bases = [self.base_draws(_RECOVERY_LEVEL + 2 * state.level + k, n, state.q) for k, n in enumerate(N_RECOVERY)]
        q = recovered(Tools(self._target, self._update, self._estimator, *bases), state.q)
        if q is None:
            return replace(state, n_recoveries=state.n_recoveries - 1 if state.level <= 1 else 0)
        moved = AdaptiveState(q, state.level, state.base, state.evaluation, state.moments, n_dropped=state.n_dropped)
        moved = replace(moved, growth=state.growth, n_recoveries=state.n_recoveries - 1)
        return self._redraw(moved, self._n_draws)

    def _step(self, state: AdaptiveState) -> AdaptiveState:
        if state.n_settling:
            return self._settle(state)
        ready = state.fresh and state.n_pooled and self._has_learned(state) and not loses_draws(state.evaluation)
        if ready and is_near(state.q, state.moments, state.gap):
            averaged = self._average(state)
            if averaged is not None:
                return averaged
        return self._solve(replace(state, n_pooled=0))

    def terminate(self, state: AdaptiveState) -> Status | None:
        """Return why to stop, or None to go on."""
        if state.growth.is_unbounded:
            return Status.UNBOUNDED
        if not state.fresh:
            return None
        m, noiseless = state.moments, _NO_NOISE * self._tolerance.least(state.q)
        # A set that is its own first use certifies nothing unless its size lets the noise be judged.
        if not loses_draws(state.evaluation) and (state.n_draws >= FEW_DRAWS or m.floor_sd <= noiseless):
            # The last measurement alone must not speak against it, either.
            gap_met = max(state.belief.bound, m.gap - m.floor + m.floor_sd) < self._tolerance.at(state)
            # Nor the sampling error of the draws behind the state.
            gap_met = gap_met and state.gap < self._tolerance.most(state.q)
            if gap_met and no_coordinate_is_off(state):
                return Status.NOT_SMOOTH if is_kinked(state.q, state.base, state.evaluation, m) else Status.CONVERGED
        return why_given_up(state) if state.rounds >= _MAX_ROUNDS else None

    def assess(self, state: AdaptiveState) -> Assessment:
        """Evaluate a state on draws that had no part in reaching it."""
        if not state.fresh:
            aside = replace(state, level=_ASSESSMENT_LEVEL + state.level, belief=UNKNOWN)
            state = self._redraw(aside, max(state.n_draws, FEW_DRAWS))
        return assessed(self._target, state, self._tolerance.most(state.q))

    def conclude(self, status: Status, assessment: Assessment) -> Status:
        """Return the status in the light of what was measured at the end."""
        return assessment.against or status if status is Status.CONVERGED else status

    def reopen(self, state: AdaptiveState) -> AdaptiveState:
        """Return a state in which a fit that gave up may try again."""
        return replace(state, rounds=0)

    def _settle(self, state: AdaptiveState) -> AdaptiveState:
        """Take one step of the group effects alone."""
        found = self._line_search(state, without_globals(state.q, state.moments), 1.0)
        if isinstance(found, Failure):
            return self._solve(replace(state, n_settling=0))
        q, evaluation, rho = found
        gained = evaluation.elbo - state.elbo > LEAST_GAIN * q.n_dim
        n_settling = state.n_settling - 1 if gained else 0
        moved = replace(
            state, q=q, evaluation=evaluation, fresh=False, step_size=rho, n_settling=n_settling, drift=None
        )
        return replace(moved, moments=self._moments(moved))

    # --- near the optimum: one step from each fresh set -----------------------------------------------------------

    def _average(self, state: AdaptiveState) -> AdaptiveState | None:
        """Take the step that pools this set with all before it; None where it is not valid."""
        # The gain of a Kalman filter: error of the state, G, against error of what this set says, R. Where G is nothing
        # but the error of the draws so far, it is S / (N + S).
        error, noise = state.gap, state.moments.floor
        pooling = state.n_draws / (state.n_pooled + state.n_draws)
        rho = max(pooling, error / (error + noise) if error > 0.0 else 0.0)
        n_pooled = round(state.n_draws / rho)
        _, moments = self._corrected(state)
        stride = state.drift.stride(state.stride) if state.drift else None
        if stride is not None:
            moments, n_pooled = with_stride(state.q, moments, stride.step / rho), state.n_draws
        q = self._update(state.q, moments, rho, False)
        if q is None:
            return None
        # Where the metric is not exact, a step may do less than it promises, but no harm.
        predicted = state.belief.after_step(rho, noise) if state.q.exact_metric else state.belief
        moved = replace(state, q=q, n_pooled=n_pooled, step_size=rho, stalled=False, belief=predicted)
        if stride is not None:
            moved = replace(moved, drift=None, stride=stride, belief=UNKNOWN)
        n_draws = draws_to_average(state, n_pooled, self._tolerance.at(state), self._max_draws)
        new = self._redraw(moved, n_draws)
        if new.level == state.level:  # no draw of the new set is finite: stay, and go on with this set
            return None
        # Shrinking steps can't finish what a full step leaves over: then the set is worth solving, and learning from.
        ratio = _CREEPING if state.q.exact_metric else _CREEPING_INEXACT
        measured = Belief.of(new.moments)
        creeps = measured.mean > ratio * Belief.of(state.moments).bound + 2.0 * new.moments.floor_sd
        return replace(new, n_pooled=0, belief=measured) if creeps else new

    # --- far from it: many steps on one set -----------------------------------------------------------------------

    def _solve(self, state: AdaptiveState) -> AdaptiveState:
        """Take one back-tracked step on the current set; go to a fresh one if that solves it."""
        direction, moments = self._corrected(state)
        corrected = moments is not state.moments
        first = 1.0 if corrected else state.next_step_size
        found = self._line_search(state, moments, first)
        if isinstance(found, Failure) and corrected:
            direction = natural_gradient(state.q, state.moments)
            state = replace(state, pairs=())
            found = self._line_search(state, state.moments, 1.0)
        if isinstance(found, Failure):
            blind = found is Failure.NOT_FINITE
            return self._next_set(replace(state, stalled=True, blind=blind, next_step_size=1.0))
        q, evaluation, rho = found
        best = max(state.best, state.elbo)
        gained = evaluation.elbo - best > 0.02 * self._tolerance.least(q)
        moved = replace(
            state,
            q=q,
            evaluation=evaluation,
            fresh=False,
            stalled=False,
            step_size=rho,
            next_step_size=min(1.0, 4.0 * rho),
            n_steps=state.n_steps + 1,
            best=best,
            drift=None,
            idle=0 if gained else state.idle + 1,
        )
        return self._conclude(state, moved, rho * direction)

    def _conclude(self, state: AdaptiveState, moved: AdaptiveState, step: Array) -> AdaptiveState:
        """Learn from a step on a fixed set, and decide whether the set has more to give."""
        full = moved.step_size == 1.0
        # After a full step from within the sampling error, what is left on this set is far below it.
        if (full and self._has_learned(state) and self._is_solved(state.q, state.moments)) or self._is_spent(moved):
            return self._next_set(moved)
        moved = self._learn(state, replace(moved, moments=self._moments(moved)), step)
        overshoots = not full and state.q.exact_metric and self._has_learned(moved)
        if overshoots and is_near(moved.q, moved.moments, moved.moments.gap):
            return self._next_set(moved)
        if not self._is_solved(moved.q, moved.moments):
            return moved
        learning = moved.n_draws >= FEW_DRAWS and moved.n_learned and not self._has_learned(moved)
        # Little is left to learn from where group effects hide a creeping global parameter no longer.
        exhausted = moved.q.globals_ is not None and moved.moments.gap < _EXHAUSTED * moved.moments.floor
        if learning and full and not exhausted:
            return moved
        # Within the sampling error, where full steps overshoot, there is nothing more to learn.
        return self._next_set(replace(moved, n_learned=_N_LEARNED) if learning else moved)

    def _line_search(self, state: AdaptiveState, moments: Moments, first: float) -> Any:
        """Shorten the step until the ELBO on the current draws does not fall and no more draws are lost."""
        return search(
            lambda rho: self._update(state.q, moments, rho, True),
            lambda q: self._estimator.evaluate(self._target, q, state.base),
            lambda evaluation: self._accepts(state, evaluation),
            elbo=state.elbo,
            slope=2.0 * state.moments.gap,
            first=first,
        )

    def _accepts(self, state: AdaptiveState, new: Evaluation) -> bool:
        old = state.evaluation
        if not np.isfinite(new.elbo) or (~new.finite).sum() > (~old.finite).sum():
            return False
        slack = slack_of(state, self._tolerance.least(state.q))
        return new.elbo >= old.elbo - slack

    def _next_set(self, state: AdaptiveState) -> AdaptiveState:
        """Go to fresh draws after a set is solved, or as far solved as it can be."""
        larger = draws_to_solve(state, self._tolerance.least(state.q), self._max_draws)
        return self._redraw(replace(state, n_pooled=state.n_draws, belief=UNKNOWN, idle=0), larger)

    def _redraw(self, state: AdaptiveState, n_draws: int) -> AdaptiveState:
        level = state.level + 1
        base, evaluation = self._drawn(state.q, level, n_draws)
        if not evaluation.finite.any():  # nothing can be said of it: the fit ends here
            return replace(state, fresh=True, stalled=True, rounds=_MAX_ROUNDS)
        drawn = replace(
            state,
            level=level,
            base=base,
            evaluation=evaluation,
            fresh=True,
            n_steps=0,
            best=-np.inf,
            rounds=state.rounds + (n_draws >= self._max_draws),
            n_dropped=state.n_dropped + int((~evaluation.finite).sum()),
        )
        moments = self._moments(drawn)
        belief = state.belief.measured(moments)
        drift = Drift.measured(state.drift, state.q, moments, n_draws)
        if drift is not None and has_effects(state.q, TENS_OF_THOUSANDS) and belief.bound < self._tolerance.at(drawn):
            # Only noise in the global parameters keeps the fit from ending, which Hessians would not lower.
            stream = _LISTENING_LEVEL + 1_000 * level
            drift = drift.listened(state.q, lambda k: self._drawn(state.q, stream + k, n_draws))
        return replace(drawn, moments=moments, belief=belief, drift=drift)

    def _drawn(self, q: Any, level: int, n_draws: int) -> tuple[BaseDraws, Evaluation]:
        base = self.base_draws(level, n_draws, q)
        return base, self._estimator.evaluate(self._target, q, base)

    def _moments(self, state: AdaptiveState) -> Moments:
        moments = self._estimator.moments(self._target, state.q, state.base, state.evaluation, stl=self._stl)
        rescaled = rescaled_gap(moments, state.pairs)
        # Where the metric is exact, secants may raise an estimate, but not talk it down.
        return moments if state.q.exact_metric and rescaled.floor < moments.floor else rescaled

    # --- the secant correction ------------------------------------------------------------------------------------

    def _corrected(self, state: AdaptiveState) -> tuple[Array, Moments]:
        """Return the natural gradient and the moments that give it, corrected by recent steps where that serves."""
        gradient = natural_gradient(state.q, state.moments)
        if state.pairs and secants_serve(state.q, state.moments, state.gap):
            direction = correct(state.pairs, gradient)
            if direction @ gradient > 0.0:
                return direction, moments_of(state.q, state.moments, direction)
        return gradient, state.moments

    def _learn(self, old: AdaptiveState, new: AdaptiveState, step: Array) -> AdaptiveState:
        """Remember a step on a fixed set."""
        if not secants_serve(old.q, old.moments, old.moments.gap):
            return new
        exact = old.q.exact_metric
        fast = exact and not old.pairs and new.moments.gap < _FAST_RATE * old.moments.gap
        new = replace(new, n_learned=_N_LEARNED if fast else new.n_learned + 1)
        if exact and new.moments.gap > 2.0 * old.moments.gap:
            return replace(new, pairs=())
        change = natural_gradient(old.q, old.moments) - natural_gradient(new.q, new.moments)
        pair = Pair(step, change)
        if not trusted(pair, old.q):
            return new
        return replace(new, pairs=(*new.pairs, pair)[-(_N_PAIRS if exact else _N_PAIRS_INEXACT) :])

    def _has_learned(self, state: AdaptiveState) -> bool:
        # Strides do for thousands of group effects what learning on a fixed set does for other models.
        return has_effects(state.q, THOUSANDS) or state.n_learned >= (_N_LEARNED if state.q.exact_metric else 1)

    def _is_spent(self, state: AdaptiveState) -> bool:
        return state.idle >= _MAX_IDLE or state.n_steps >= _MAX_STEPS

    def _is_solved(self, q: Any, moments: Moments) -> bool:
        return is_solved(q, moments, 0.1 * self._tolerance.least(q))
