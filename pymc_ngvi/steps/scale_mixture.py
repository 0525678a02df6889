r"""The step rule of the Student-t: natural gradients with a shape that is fitted, no learning rate, a stop rule in nats.

As in `adaptive`, the problem is first solved on one small set of base draws, where it is deterministic, then on sets
that double; near the optimum each set is fresh and serves for one step of size S / (N + S). Steps are natural gradients
in the Fisher information of the t density itself. Where such a step lowers the ELBO on the draws at hand, the natural
gradient of draw and mixing variable together, which is more cautious, takes its place and is shortened until it does
not.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from scipy.special import erf

from pymc_ngvi.draws import BASE_DRAWS
from pymc_ngvi.estimators import FROM_GRADIENTS
from pymc_ngvi.families.student_t import StudentTState
from pymc_ngvi.mixtures.scale_mixture import ScaleMoments, cautious, evaluate, measured, stepped, within
from pymc_ngvi.status import Status
from pymc_ngvi.steps.belief import UNKNOWN, Belief
from pymc_ngvi.steps.certificate import MAX_CURVATURE_ERROR, is_kinked, loses_draws
from pymc_ngvi.steps.drift import MAX_ERROR
from pymc_ngvi.steps.linesearch import search
from pymc_ngvi.steps.nearness import NEAR_NATS, is_near, secants_serve
from pymc_ngvi.steps.secant import Pair, correct, rescaled_gap, trusted
from pymc_ngvi.steps.tolerance import Tolerance
from pymc_ngvi.types import Array, Assessment, BaseDraws, Direction, Estimator, Evaluation, TargetDensity, Update

#: Draws in the first and in the largest set, with Hessians and from gradients alone; no set is smaller than the least.
_N_DRAWS, _MAX_DRAWS = 16, 1_024
_N_GRADIENTS, _MAX_GRADIENTS = 64, 16_384
_LEAST_DRAWS = 8
#: Draws for each dimension in the first set from gradients alone: fewer are overfitted.
_GRADIENTS_PER_DIM = 4
#: Draws below which nothing is certified, and times the dimension: in few dimensions, few draws tell of the tails.
_FEW_DRAWS, _FEW_TIMES_DIM = 128, 512
#: Sets of the largest size after which the fit gives up on certifying its result.
_MAX_ROUNDS = 4
#: Accepted steps on one set of draws, at most; and in a row that gain nothing.
_MAX_STEPS, _MAX_IDLE = 60, 3
#: Random streams from here on serve only to assess states, never to move them.
_ASSESSMENT_LEVEL = 1_000_000
#: Part of the nats that no t can gain, which a converged fit may lack; less where the metric is not exact.
_UNREACHABLE, _INEXACT = 0.03, 0.3
#: Part of the tolerance that the standard deviation of a measured gap may have.
_CERTAIN = 0.4
#: Error of 1/a that a converged fit may have: relative, and in any case.
_TAIL_RTOL, _TAIL_ATOL = 0.025, 0.01
#: Change of 1/a over a step, beyond which what was learned before is forgotten.
_MAX_TAIL_CHANGE = 0.05
#: Ratio of successive gaps above which averaging counts as creeping: where the metric is exact, and where it is not.
_CREEPING, _CREEPING_INEXACT = 1.0, 0.6
#: Steps kept for the secant correction; those looked at before averaging begins, unless one leaves less than a part.
_N_PAIRS, _N_LEARNED, _FAST_RATE = 6, 6, 0.15


@dataclass(frozen=True)
class ScaleMixtureStepState:
    """What one iteration hands to the next.

    Parameters
    ----------
    q : StudentTState
    level : int
        Sets of draws used so far; names the random stream of the current one.
    base : BaseDraws
        Standard normals and, in the last column, uniforms.
    evaluation : Evaluation
        At the draws of ``q``.
    moments : ScaleMoments
        There.
    fresh : bool
        ``base`` had no part in reaching ``q``.
    step_size : float
        The last one accepted.
    n_pooled : int
        Draws behind ``q``, while steps are averaged; 0 while a fixed set is being solved.
    belief : Belief
        Of the gap of ``q``; measured on fresh draws only.
    rounds : int
        Sets of fresh draws tried at the largest size.
    n_steps, idle : int
        Accepted steps on the current set; of these, in a row, those that gained nothing.
    stalled : bool
        The last search found no acceptable step.
    n_dropped : int
        Draws left out so far because log p or its gradient was not finite.
    pairs : tuple of Pair
        Recent steps on fixed sets, for the secant correction.
    n_learned : int
        Steps near the optimum that were looked at for it.
    """

    q: StudentTState
    level: int
    base: BaseDraws
    evaluation: Evaluation
    moments: ScaleMoments
    fresh: bool = True
    step_size: float = 1.0
    n_pooled: int = 0
    belief: Belief = UNKNOWN
    rounds: int = 0
    n_steps: int = 0
    idle: int = 0
    stalled: bool = False
    n_dropped: int = 0
    pairs: tuple[Pair, ...] = ()
    n_learned: int = 0

    @property
    def elbo(self) -> float:
        """ELBO on the current draws."""
        return self.evaluation.elbo

    @property
    def gap(self) -> float:
        """Estimated nats still to be gained: on fresh draws at least the sampling error of those behind the state."""
        m = self.moments.gaussian
        if not np.isfinite(m.floor):
            return float("inf")
        if not self.fresh:
            return m.gap
        return max(self.belief.mean, m.floor * self.n_draws / self.n_pooled if self.n_pooled else 0.0)

    @property
    def n_draws(self) -> int:
        """Draws in use."""
        return self.base.n_draws


class ScaleMixture:
    """Natural-gradient steps of a Student-t that need no learning rate.

    Parameters
    ----------
    target : TargetDensity
    update, estimator : callable
        Rows of the registries, of the Gaussian inside.
    seed : int
        Of the base draws.
    tol : float, default 0.05
        Stop when the nats still to be gained, with two standard deviations of their estimate, are below this in 100
        dimensions, in proportion to the dimension from 10 to 100.
    n_draws, max_draws : int, optional
        Sizes of the first and of the largest set of draws, powers of 2 where quasi-random, at least 8. With Hessians 16
        and 1,024; from gradients alone four times the dimension, 64 at least, and 16,384.
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
        target: TargetDensity,
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
        first, most = _N_DRAWS, _MAX_DRAWS
        if estimator in FROM_GRADIENTS:
            power = 2 ** int(np.ceil(np.log2(max(_GRADIENTS_PER_DIM * target.n_dim, 1))))
            first, most = max(_N_GRADIENTS, power), max(_MAX_GRADIENTS, power)
        self._n_draws = max(n_draws or min(first, max_draws or first), _LEAST_DRAWS)
        self._max_draws = max(max_draws or most, self._n_draws)
        few = max(_FEW_DRAWS, _FEW_TIMES_DIM / max(target.n_dim, 1))
        self._few_draws = min(2 ** int(np.ceil(np.log2(few))), self._max_draws)

    def base_draws(self, level: int, n_draws: int) -> BaseDraws:
        """Return the base draws of one level, a function of the seed: standard normals and a column of uniforms.

        The uniform is an even function of a normal, so that a pair z, -z shares its mixing variable: odd parts cancel.
        """
        base = self._draw(n_draws, self._target.n_dim + 1, np.random.default_rng([self._seed, level]))
        uniforms = erf(np.abs(base.z[:, 0]) / np.sqrt(2.0))
        return replace(base, z=np.column_stack([base.z[:, 1:], uniforms]))

    def first_evaluation(self, q: StudentTState) -> Evaluation:
        """Evaluate a starting state on the first base draws."""
        return evaluate(self._target, q, self.base_draws(0, self._n_draws))

    def init(self, q: StudentTState) -> ScaleMixtureStepState:
        """Return the state before the first iteration."""
        base = self.base_draws(0, self._n_draws)
        evaluation = evaluate(self._target, q, base)
        moments = self._measured(None, q, base, evaluation)
        n_dropped = int((~evaluation.finite).sum())
        return ScaleMixtureStepState(
            q, 0, base, evaluation, moments, belief=Belief.of(moments.gaussian), n_dropped=n_dropped
        )

    def step(self, state: ScaleMixtureStepState) -> ScaleMixtureStepState:
        """Take one step."""
        ready = state.fresh and state.n_pooled and not loses_draws(state.evaluation)
        if ready and self._has_learned(state) and is_near(state.q.gaussian, state.moments.gaussian, state.gap):
            averaged = self._average(state)
            if averaged is not None:
                return averaged
        return self._solve(replace(state, n_pooled=0))

    def terminate(self, state: ScaleMixtureStepState) -> Status | None:
        """Return why to stop, or None to go on."""
        if not state.fresh:
            return None
        m = state.moments.gaussian
        if not loses_draws(state.evaluation) and state.n_draws >= self._few_draws:
            # The last measurement alone must not speak against it, nor the sampling error of the draws behind the state.
            left = max(state.belief.bound, m.gap - m.floor + m.floor_sd)
            met = left < self._at(state) and state.gap < self._tolerance.most(state.q)
            if met and self._no_coordinate_is_off(state):
                return Status.NOT_SMOOTH if self._is_kinked(state) else Status.CONVERGED
        return self._why_given_up(state) if state.rounds >= _MAX_ROUNDS else None

    def assess(self, state: ScaleMixtureStepState) -> Assessment:
        """Evaluate a state on draws that had no part in reaching it."""
        if not state.fresh:
            aside = replace(state, level=_ASSESSMENT_LEVEL + state.level, belief=UNKNOWN)
            state = self._redraw(aside, max(state.n_draws, self._few_draws))
        evaluation, gap, gap_sd = state.evaluation, state.gap, state.belief.sd
        against = Status.NOISE_LIMITED if gap - 2.0 * gap_sd > self._tolerance.most(state.q) else None
        return Assessment(evaluation.theta, evaluation.logp, state.base.pairs(), gap, gap_sd, against)

    def conclude(self, status: Status, assessment: Assessment) -> Status:
        """Return the status in the light of what was measured at the end."""
        return assessment.against or status if status is Status.CONVERGED else status

    def reopen(self, state: ScaleMixtureStepState) -> ScaleMixtureStepState:
        """Return a state in which a fit that gave up may try again."""
        return replace(state, rounds=0)

    # --- near the optimum: one step from each fresh set -----------------------------------------------------------

    def _average(self, state: ScaleMixtureStepState) -> ScaleMixtureStepState | None:
        """Take the step that pools this set with all before it; None where it is not valid."""
        m, x, exact = state.moments.gaussian, state.moments, state.q.gaussian.exact_metric
        error, noise = state.gap, m.floor
        pooling = state.n_draws / (state.n_pooled + state.n_draws)
        rho = max(pooling, error / (error + noise) if error > 0.0 else 0.0)
        q = stepped(state.q, x, self._direction(state), self._update, rho, correct=False)
        if q is None:
            return None
        n_pooled, at = round(state.n_draws / rho), self._at(state)
        # Enough to tell whether the gap is below the tolerance, and where the shape is.
        needed = state.n_draws * max(m.floor_sd / (_CERTAIN * at), (x.tail_se / self._most_tail_error(state.q)) ** 2)
        n_draws = int(min(2 ** np.floor(np.log2(min(n_pooled, max(needed, self._few_draws)))), self._max_draws))
        if state.belief.bound < at:  # it seems to be done: the next set is to certify it
            n_draws = max(n_draws, self._few_draws)
        belief = state.belief.after_step(rho, noise) if exact else state.belief
        moved = replace(state, q=q, n_pooled=n_pooled, step_size=rho, stalled=False, belief=belief)
        new = self._redraw(moved, n_draws)
        if new.level == state.level:  # no draw of the new set is finite: stay, and go on with this set
            return None
        # Shrinking steps can't finish what a full step leaves over: then the set is worth solving, and learning from.
        found = Belief.of(new.moments.gaussian)
        most = (_CREEPING if exact else _CREEPING_INEXACT) * Belief.of(m).bound + 2.0 * new.moments.gaussian.floor_sd
        return replace(new, n_pooled=0, belief=found) if found.mean > most else new

    # --- far from it: many steps on one set -----------------------------------------------------------------------

    def _solve(self, state: ScaleMixtureStepState) -> ScaleMixtureStepState:
        """Take one step on the current set that does not lower the ELBO there; go to a fresh one if that solves it."""
        found = self._search(state)
        if found is None:
            return self._next_set(replace(state, stalled=True, pairs=()))
        q, evaluation, rho, direction = found
        gained = evaluation.elbo - state.elbo > 0.02 * self._tolerance.least(q)
        moved = replace(
            state,
            q=q,
            evaluation=evaluation,
            moments=self._measured(state, q, state.base, evaluation),
            fresh=False,
            stalled=False,
            step_size=rho,
            n_steps=state.n_steps + 1,
            idle=0 if gained else state.idle + 1,
        )
        moved = self._learn(state, moved, rho * direction)
        # Near the optimum, where the natural gradient of the draws and the ELBO on them differ by sampling error only.
        overshoots = rho < 1.0 and self._has_learned(moved) and self._is_near(moved)
        if moved.idle >= _MAX_IDLE or moved.n_steps >= _MAX_STEPS or overshoots:
            return self._next_set(moved)
        if not self._is_solved(moved):
            return moved
        learning = moved.n_draws >= self._few_draws and moved.n_learned and not self._has_learned(moved)
        return moved if learning and rho == 1.0 else self._next_set(moved)

    def _search(self, state: ScaleMixtureStepState) -> tuple[StudentTState, Evaluation, float, Array] | None:
        """Find a step that does not lower the ELBO on the current draws, and return its direction, too."""
        x = state.moments
        near = is_near(state.q.gaussian, x.gaussian, x.gap_of_gaussian)
        # On few draws, most of the shape's step may be noise, and far from the optimum all of it tells of other errors.
        trust = x.tail_step**2 / (x.tail_step**2 + x.tail_se**2) if near and x.tail_step else 0.0
        for direction in (*([self._direction(state)] if state.pairs else []), cautious(x, trust)):
            q = stepped(state.q, x, direction, self._update, 1.0, correct=True)
            evaluation = None if q is None else evaluate(self._target, q, state.base)
            if q is not None and evaluation is not None and self._accepts(state, evaluation):
                return q, evaluation, 1.0, direction
        # As if w were observed: a step of size 1 is then never too long for long.
        joint = x.metric.rewhitened(x.vector[None])[0]
        found = search(
            lambda rho: stepped(state.q, x, joint, self._update, rho, correct=True),
            lambda q: evaluate(self._target, q, state.base),
            lambda evaluation: self._accepts(state, evaluation),
            elbo=state.elbo,
            slope=float(x.vector @ x.vector),
            first=1.0,
        )
        return None if found is None else (*found, joint)

    def _accepts(self, state: ScaleMixtureStepState, new: Evaluation) -> bool:
        """Tell whether a step does not lower the ELBO on the current draws and loses no more of them."""
        old = state.evaluation
        if not np.isfinite(new.elbo) or (~new.finite).sum() > (~old.finite).sum():
            return False
        slack = 1e-9 * abs(old.elbo) + 0.5 * min(state.moments.gaussian.floor, self._tolerance.least(state.q))
        return new.elbo >= old.elbo - slack

    def _is_near(self, state: ScaleMixtureStepState) -> bool:
        return is_near(state.q.gaussian, state.moments.gaussian, state.moments.gaussian.gap)

    def _is_solved(self, state: ScaleMixtureStepState) -> bool:
        m = state.moments.gaussian
        return m.gap <= max(m.floor, 0.1 * self._tolerance.least(state.q))

    def _next_set(self, state: ScaleMixtureStepState) -> ScaleMixtureStepState:
        """Go to fresh draws after a set is solved, or as far solved as it can be."""
        near = self._is_near(state) and not state.stalled
        too_noisy = state.moments.gaussian.floor > max(NEAR_NATS, 4.0 * self._tolerance.least(state.q))
        grows = state.n_draws < self._few_draws or not near or too_noisy
        n_draws = min(2 * state.n_draws, self._max_draws) if grows else state.n_draws
        return self._redraw(replace(state, n_pooled=state.n_draws, belief=UNKNOWN, idle=0), n_draws)

    def _redraw(self, state: ScaleMixtureStepState, n_draws: int) -> ScaleMixtureStepState:
        base = self.base_draws(state.level + 1, n_draws)
        evaluation = evaluate(self._target, state.q, base)
        if not evaluation.finite.any():  # nothing can be said of it: the fit ends here
            return replace(state, fresh=True, stalled=True, rounds=_MAX_ROUNDS)
        moments = self._measured(state, state.q, base, evaluation)
        return replace(
            state,
            level=state.level + 1,
            base=base,
            evaluation=evaluation,
            moments=moments,
            fresh=True,
            n_steps=0,
            rounds=state.rounds + (n_draws >= self._max_draws),
            n_dropped=state.n_dropped + int((~evaluation.finite).sum()),
            belief=state.belief.measured(moments.gaussian),
        )

    # --- the secant correction ------------------------------------------------------------------------------------

    def _measured(
        self, state: ScaleMixtureStepState | None, q: StudentTState, base: BaseDraws, evaluation: Evaluation
    ) -> ScaleMoments:
        found = measured(self._target, q, base, evaluation, self._estimator, stl=self._stl)
        rescaled = rescaled_gap(found.gaussian, state.pairs if state else ())
        # Where the metric is exact, secants may raise an estimate, but not talk it down.
        lower = q.gaussian.exact_metric and rescaled.floor < found.gaussian.floor
        return found if lower else replace(found, gaussian=rescaled)

    def _direction(self, state: ScaleMixtureStepState) -> Array:
        """Return the natural gradient, corrected by recent steps where that serves."""
        gradient = state.moments.natural
        if state.pairs and secants_serve(state.q.gaussian, state.moments.gaussian, state.gap):
            direction = correct(state.pairs, gradient)
            if direction @ gradient > 0.0:
                return direction
        return gradient

    def _learn(self, old: ScaleMixtureStepState, new: ScaleMixtureStepState, step: Array) -> ScaleMixtureStepState:
        """Remember a step on a fixed set."""
        before, after, q = old.moments, new.moments, old.q.gaussian
        # Coordinates change with the shape.
        if abs(1.0 / new.q.shape - 1.0 / old.q.shape) > _MAX_TAIL_CHANGE:
            return replace(new, pairs=())
        if not secants_serve(q, before.gaussian, before.gaussian.gap):
            return new
        fast = q.exact_metric and not old.pairs and after.gaussian.gap < _FAST_RATE * before.gaussian.gap
        new = replace(new, n_learned=_N_LEARNED if fast else new.n_learned + 1)
        if q.exact_metric and after.gaussian.gap > 2.0 * before.gaussian.gap:
            return replace(new, pairs=())
        pair = Pair(step, before.natural - after.natural)
        return replace(new, pairs=(*new.pairs, pair)[-_N_PAIRS:]) if trusted(pair, q) else new

    def _has_learned(self, state: ScaleMixtureStepState) -> bool:
        return state.n_learned >= (_N_LEARNED if state.q.gaussian.exact_metric else 1)

    # --- the certificate ------------------------------------------------------------------------------------------

    def _at(self, state: ScaleMixtureStepState) -> float:
        """Return the tolerance for a state: raised where no t comes near the posterior."""
        keep = state.evaluation.finite
        h: Array = state.evaluation.logp[keep] - state.q.log_density(state.evaluation.theta[keep])
        unreachable = 0.5 * float(np.var(h)) if len(h) else 0.0
        q = state.q
        nats = float(np.clip(_UNREACHABLE * unreachable, self._tolerance.least(q), self._tolerance.most(q)))
        return nats if q.gaussian.exact_metric else _INEXACT * nats

    def _no_coordinate_is_off(self, state: ScaleMixtureStepState) -> bool:
        """Tell whether no coordinate has an error of mean or scale that is large by itself, beyond its noise."""
        m = state.moments.gaussian
        error = np.abs(m.grad) - 2.0 * m.grad_se
        of_scale = np.abs(state.q.gaussian.curvature_diagonal(m.curvature) - 1.0) - 2.0 * m.curvature_se
        x, most = state.moments, self._most_tail_error(state.q)
        if abs(x.tail_step) - x.tail_se > most or x.tail_se > most:
            return False
        return bool(np.max(error, initial=0.0) <= MAX_ERROR and np.max(of_scale, initial=0.0) <= MAX_CURVATURE_ERROR)

    @staticmethod
    def _most_tail_error(q: StudentTState) -> float:
        return _TAIL_ATOL + _TAIL_RTOL / q.shape

    def _is_kinked(self, state: ScaleMixtureStepState) -> bool:
        base, evaluation = within(state.q, state.base, state.evaluation, stl=True)
        return is_kinked(state.q.gaussian, base, evaluation, state.moments.of_estimator)

    def _why_given_up(self, state: ScaleMixtureStepState) -> Status:
        """Return the likeliest reason why the largest sets of draws did not certify the state."""
        if loses_draws(state.evaluation):
            return Status.OUTSIDE_SUPPORT
        if self._is_kinked(state):
            return Status.NOT_SMOOTH
        return Status.STALLED if state.stalled else Status.NOISE_LIMITED
