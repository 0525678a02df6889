"""The part of the step rule `scale_mixture` in which q is a Student-t with tails of its own."""

from dataclasses import dataclass, replace

import numpy as np

from scipy.special import erf

from pymc_ngvi.core.draws import BASE_DRAWS
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Assessment, BaseDraws, Estimator, Evaluation, Target, Update
from pymc_ngvi.families.student_t import StudentTState
from pymc_ngvi.mixtures.student_t.gradients import (
    TAIL_ATOL,
    TAIL_RTOL,
    ScaleMoments,
    measured,
    stepped,
    within,
)
from pymc_ngvi.steps.adaptive.belief import UNKNOWN, Belief
from pymc_ngvi.steps.adaptive.certificate import MAX_CURVATURE_ERROR, is_kinked, loses_draws
from pymc_ngvi.steps.adaptive.drift import MAX_ERROR
from pymc_ngvi.steps.adaptive.linesearch import Failure, search
from pymc_ngvi.steps.adaptive.nearness import NEAR_NATS, is_near
from pymc_ngvi.steps.adaptive.tolerance import Tolerance

#: Sets of the largest size after which the fit gives up on certifying its result.
MAX_ROUNDS = 4
#: Accepted steps on one set of draws, at most; and in a row that gain nothing.
_MAX_STEPS, _MAX_IDLE = 60, 3
#: Random streams: of all sets but those of the Gaussian before, and of those that serve only to assess states.
_LEVEL, _ASSESSMENT_LEVEL = 100_000, 1_000_000
#: Part of the nats that no t can gain, which a converged fit may lack; less where the metric is not exact.
_UNREACHABLE, _INEXACT = 0.03, 0.3
#: Part of the tolerance that the standard deviation of a measured gap may have.
_CERTAIN = 0.4
#: Ratio of successive gaps above which averaging counts as creeping: where the metric is exact, and where it is not.
_CREEPING, _CREEPING_INEXACT = 1.0, 0.6


@stored("student_t.steps")
@dataclass(frozen=True)
class AsStudentT:
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
    blind : bool
        Of a stalled state: none of the steps that were tried has a finite ELBO.
    n_dropped : int
        Draws left out so far because log p or its gradient was not finite.
    n_returns : int
        Times that the fit has gone back to a Gaussian.
    origin : StudentTState or None
        The Gaussian that was given tails, where there was one.
    origin_elbo : float
        Its ELBO.
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
    blind: bool = False
    n_dropped: int = 0
    n_returns: int = 0
    origin: StudentTState | None = None
    origin_elbo: float = -np.inf

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


class StudentTSteps:
    """Steps of a Student-t: many on one set of draws, then one on each fresh set.

    Parameters
    ----------
    target : Target
    update, estimator : callable
        Rows of the registries, of the Gaussian inside.
    tolerance : Tolerance
    seed : int
        Of the base draws.
    few_draws, max_draws : int
        Draws below which nothing is certified; of the largest set.
    base_draws : str
        Kind of base draws.
    stl : bool
        Sticking the landing.
    """

    def __init__(
        self,
        target: Target,
        update: Update,
        estimator: Estimator,
        tolerance: Tolerance,
        *,
        seed: int,
        few_draws: int,
        max_draws: int,
        base_draws: str,
        stl: bool,
    ) -> None:
        self._target = target
        self._update = update
        self._estimator = estimator
        self._tolerance = tolerance
        self._seed = seed
        self._few_draws = few_draws
        self._max_draws = max_draws
        self._draw = BASE_DRAWS[base_draws]
        self._stl = stl

    def base_draws(self, level: int, n_draws: int) -> BaseDraws:
        """Return the base draws of one level, a function of the seed: standard normals and a column of uniforms.

        The uniform is an even function of a normal, so that a pair z, -z shares its mixing variable: odd parts cancel.
        """
        base = self._draw(n_draws, self._target.n_dim + 1, np.random.default_rng([self._seed, _LEVEL + level]))
        uniforms = erf(np.abs(base.z[:, 0]) / np.sqrt(2.0))
        return replace(base, z=np.column_stack([base.z[:, 1:], uniforms]))

    def evaluate(self, q: StudentTState, n_draws: int) -> Evaluation:
        """Evaluate a starting state on the first base draws."""
        return self._estimator.evaluate(self._target, q, self.base_draws(0, n_draws))

    def begin(self, q: StudentTState, n_draws: int, *, level: int = 0) -> AsStudentT | None:
        """Return the state before the first step; None where no draw is finite."""
        base = self.base_draws(level, n_draws)
        evaluation = self._estimator.evaluate(self._target, q, base)
        if not evaluation.finite.any():
            return None
        moments = self._measured(q, base, evaluation)
        n_dropped = int((~evaluation.finite).sum())
        return AsStudentT(q, level, base, evaluation, moments, belief=Belief.of(moments.gaussian), n_dropped=n_dropped)

    def step(self, state: AsStudentT) -> AsStudentT:
        """Take one step."""
        ready = state.fresh and state.n_pooled and not loses_draws(state.evaluation)
        if ready and is_near(state.q.gaussian, state.moments.gaussian, state.gap):
            averaged = self._average(state)
            if averaged is not None:
                return averaged
        return self._solve(replace(state, n_pooled=0))

    def terminate(self, state: AsStudentT) -> Status | None:
        """Return why to stop, or None to go on."""
        if not state.fresh:
            return None
        m = state.moments.gaussian
        if not loses_draws(state.evaluation) and state.n_draws >= self._few_draws:
            # Neither the last measurement alone must speak against it, nor the error of the draws behind the state.
            left = max(state.belief.bound, m.gap - m.floor + m.floor_sd)
            met = left < self._at(state) and state.gap < self._tolerance.most(state.q)
            # Where the largest set can't tell the shape any better, it makes no difference to the ELBO.
            if met and self._no_coordinate_is_off(state) and (state.rounds or self._is_settled(state)):
                return Status.NOT_SMOOTH if self._is_kinked(state) else Status.CONVERGED
        return self._why_given_up(state) if state.rounds >= MAX_ROUNDS else None

    def assess(self, state: AsStudentT) -> Assessment:
        """Evaluate a state on draws that had no part in reaching it."""
        if not state.fresh:
            aside = replace(state, level=_ASSESSMENT_LEVEL + state.level, belief=UNKNOWN)
            state = self._redraw(aside, max(state.n_draws, self._few_draws))
        evaluation, gap, gap_sd = state.evaluation, state.gap, state.belief.sd
        against = Status.NOISE_LIMITED if gap - 2.0 * gap_sd > self._tolerance.most(state.q) else None
        return Assessment(evaluation.theta, evaluation.logp, state.base.pairs(), gap, gap_sd, against)

    # --- near the optimum: one step from each fresh set -----------------------------------------------------------

    def _average(self, state: AsStudentT) -> AsStudentT | None:
        """Take the step that pools this set with all before it; None where it is not valid."""
        m, x, exact = state.moments.gaussian, state.moments, state.q.gaussian.exact_metric
        error, noise = state.gap, m.floor
        pooling = state.n_draws / (state.n_pooled + state.n_draws)
        rho = max(pooling, error / (error + noise) if error > 0.0 else 0.0)
        q = stepped(state.q, x, x.direction(), self._update, rho, correct=False)
        if q is None:
            return None
        n_pooled, at = round(state.n_draws / rho), self._at(state)
        # Enough to tell whether the gap is below the tolerance, and where the shape is.
        needed = state.n_draws * max(m.floor_sd / (_CERTAIN * at), (x.tail_se / _most_tail_error(state.q)) ** 2)
        n_draws = int(min(2 ** np.floor(np.log2(min(n_pooled, max(needed, self._few_draws)))), self._max_draws))
        if state.belief.bound < at:  # it seems to be done: the next set is to certify it
            n_draws = max(n_draws, self._few_draws)
        belief = state.belief.after_step(rho, noise) if exact else state.belief
        moved = replace(state, q=q, n_pooled=n_pooled, step_size=rho, stalled=False, belief=belief)
        new = self._redraw(moved, n_draws)
        if new.level == state.level:  # no draw of the new set is finite: stay, and go on with this set
            return None
        # Shrinking steps can't finish what a full step leaves over: then the set is worth solving.
        found = Belief.of(new.moments.gaussian)
        most = (_CREEPING if exact else _CREEPING_INEXACT) * Belief.of(m).bound + 2.0 * new.moments.gaussian.floor_sd
        return replace(new, n_pooled=0, belief=found) if found.mean > most else new

    # --- far from it: many steps on one set -----------------------------------------------------------------------

    def _solve(self, state: AsStudentT) -> AsStudentT:
        """Take one step on the current set that does not lower the ELBO there; go to a fresh one if that solves it."""
        found = self._search(state)
        if isinstance(found, Failure):
            return self._next_set(replace(state, stalled=True, blind=found is Failure.NOT_FINITE))
        q, evaluation, rho = found
        gained = evaluation.elbo - state.elbo > 0.02 * self._tolerance.least(q)
        moved = replace(
            state,
            q=q,
            evaluation=evaluation,
            moments=self._measured(q, state.base, evaluation),
            fresh=False,
            stalled=False,
            step_size=rho,
            n_steps=state.n_steps + 1,
            idle=0 if gained else state.idle + 1,
        )
        # Near the optimum, where the natural gradient of the draws and the ELBO on them differ by sampling error only.
        overshoots = rho < 1.0 and self._is_near(moved)
        spent = moved.idle >= _MAX_IDLE or moved.n_steps >= _MAX_STEPS
        return self._next_set(moved) if overshoots or spent or self._is_solved(moved) else moved

    def _search(self, state: AsStudentT) -> tuple[StudentTState, Evaluation, float] | Failure:
        """Find a step that does not lower the ELBO on the current draws."""
        x = state.moments
        near = is_near(state.q.gaussian, x.gaussian, x.gap_of_gaussian)
        # On few draws, most of the shape's step may be noise, and far from the optimum all of it tells of other errors.
        trust = x.tail_step**2 / (x.tail_step**2 + x.tail_se**2) if near and x.tail_step else 0.0
        full = stepped(state.q, x, x.direction(trust), self._update, 1.0, correct=True)
        if full is not None:
            evaluation = self._estimator.evaluate(self._target, full, state.base)
            if self._accepts(state, evaluation):
                return full, evaluation, 1.0
        return search(
            lambda rho: stepped(state.q, x, x.vector, self._update, rho, correct=True),
            lambda q: self._estimator.evaluate(self._target, q, state.base),
            lambda evaluation: self._accepts(state, evaluation),
            elbo=state.elbo,
            slope=float(x.vector @ x.vector),
            first=1.0,
        )

    def _accepts(self, state: AsStudentT, new: Evaluation) -> bool:
        """Tell whether a step does not lower the ELBO on the current draws and loses no more of them."""
        old = state.evaluation
        if not np.isfinite(new.elbo) or (~new.finite).sum() > (~old.finite).sum():
            return False
        slack = 1e-9 * abs(old.elbo) + 0.5 * min(state.moments.gaussian.floor, self._tolerance.least(state.q))
        return new.elbo >= old.elbo - slack

    def _is_near(self, state: AsStudentT) -> bool:
        return is_near(state.q.gaussian, state.moments.gaussian, state.moments.gaussian.gap)

    def _is_solved(self, state: AsStudentT) -> bool:
        m = state.moments.gaussian
        return m.gap <= max(m.floor, 0.1 * self._tolerance.least(state.q))

    def _next_set(self, state: AsStudentT) -> AsStudentT:
        """Go to fresh draws after a set is solved, or as far solved as it can be."""
        near = self._is_near(state) and not state.stalled
        too_noisy = state.moments.gaussian.floor > max(NEAR_NATS, 4.0 * self._tolerance.least(state.q))
        grows = state.n_draws < self._few_draws or not near or too_noisy or loses_draws(state.evaluation)
        n_draws = min(2 * state.n_draws, self._max_draws) if grows else state.n_draws
        return self._redraw(replace(state, n_pooled=state.n_draws, belief=UNKNOWN, idle=0), n_draws)

    def _redraw(self, state: AsStudentT, n_draws: int) -> AsStudentT:
        base = self.base_draws(state.level + 1, n_draws)
        evaluation = self._estimator.evaluate(self._target, state.q, base)
        if not evaluation.finite.any():  # nothing can be said of it: the fit ends here
            return replace(state, fresh=True, stalled=True, rounds=MAX_ROUNDS)
        moments = self._measured(state.q, base, evaluation)
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

    def _measured(self, q: StudentTState, base: BaseDraws, evaluation: Evaluation) -> ScaleMoments:
        return measured(self._target, q, base, evaluation, self._estimator, stl=self._stl)

    # --- the certificate ------------------------------------------------------------------------------------------

    def _at(self, state: AsStudentT) -> float:
        """Return the tolerance for a state: raised where no t comes near the posterior."""
        q, keep = state.q, state.evaluation.finite
        h: Array = state.evaluation.logp[keep] - q.log_density(state.evaluation.theta[keep])
        unreachable = 0.5 * float(np.var(h)) if len(h) else 0.0
        nats = float(np.clip(_UNREACHABLE * unreachable, self._tolerance.least(q), self._tolerance.most(q)))
        return nats if q.gaussian.exact_metric else _INEXACT * nats

    def _no_coordinate_is_off(self, state: AsStudentT) -> bool:
        """Tell whether no coordinate has an error of mean or scale that is large by itself, beyond its noise."""
        m = state.moments.gaussian
        error = np.abs(m.grad) - 2.0 * m.grad_se
        of_scale = np.abs(state.q.gaussian.curvature_diagonal(m.curvature) - 1.0) - 2.0 * m.curvature_se
        return bool(np.max(error, initial=0.0) <= MAX_ERROR and np.max(of_scale, initial=0.0) <= MAX_CURVATURE_ERROR)

    @staticmethod
    def _is_settled(state: AsStudentT) -> bool:
        """Tell whether the shape has come to rest."""
        x, most = state.moments, _most_tail_error(state.q)
        return abs(x.tail_step) - x.tail_se <= most and x.tail_se <= most

    def _is_kinked(self, state: AsStudentT) -> bool:
        base, evaluation = within(state.q, state.base, state.evaluation, stl=True)
        return is_kinked(state.q.gaussian, base, evaluation, state.moments.of_estimator)

    def _why_given_up(self, state: AsStudentT) -> Status:
        """Return the likeliest reason why the largest sets of draws did not certify the state."""
        if loses_draws(state.evaluation):
            return Status.OUTSIDE_SUPPORT
        if self._is_kinked(state):
            return Status.NOT_SMOOTH
        if state.stalled:
            return Status.NO_FINITE_TRIAL if state.blind else Status.STALLED
        return Status.NOISE_LIMITED


def _most_tail_error(q: StudentTState) -> float:
    """Return the error of 1/a that a converged fit may have."""
    return TAIL_ATOL + TAIL_RTOL / q.shape
