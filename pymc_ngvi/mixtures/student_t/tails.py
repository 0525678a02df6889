"""The part of the step rule `scale_mixture` in which q is a Student-t with tails of its own."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scipy.special import erf

from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Assessment, BaseDraws, Density, Estimator, Evaluation, Update
from pymc_ngvi.families.student_t import StudentTState
from pymc_ngvi.mixtures.student_t.gradients import (
    TAIL_ATOL,
    TAIL_RTOL,
    ScaleMoments,
    measured,
    stepped,
    within,
)
from pymc_ngvi.steps.adaptive.certificate import MAX_CURVATURE_ERROR, is_kinked
from pymc_ngvi.steps.adaptive.global_gradient import MAX_ERROR
from pymc_ngvi.steps.adaptive.nearness import is_near
from pymc_ngvi.steps.schedule.base import Schedule
from pymc_ngvi.steps.schedule.belief import Belief
from pymc_ngvi.steps.schedule.linesearch import Failure, search
from pymc_ngvi.steps.schedule.state import ScheduleState, Step

#: Random streams of all sets but those of the Gaussian before.
_LEVEL = 100_000


@stored("student_t.steps")
@dataclass(frozen=True)
class AsStudentT(ScheduleState):
    """What one iteration hands to the next: what every schedule does, and what follows.

    Parameters
    ----------
    base : BaseDraws
        Standard normals and, in the last column, uniforms.
    n_returns : int
        Times that the fit has gone back to a Gaussian.
    origin : StudentTState or None
        The Gaussian that was given tails, where there was one.
    origin_elbo : float
        Its ELBO.
    """

    q: StudentTState
    evaluation: Evaluation
    moments: ScaleMoments
    n_returns: int = 0
    origin: StudentTState | None = None
    origin_elbo: float = -np.inf


class StudentTSteps(Schedule[AsStudentT, StudentTState, Evaluation]):
    """Steps of a Student-t.

    Parameters
    ----------
    target, update, estimator, **options
        Of `Schedule`; update and estimator are those of the Gaussian inside.
    few_draws : int
        Draws below which nothing is certified.
    """

    def __init__(
        self, target: Density, update: Update, estimator: Estimator, *, few_draws: int, **options: Any
    ) -> None:
        super().__init__(target, update, estimator, **options)
        self.few_draws = few_draws

    def base_draws(self, level: int, n_draws: int) -> BaseDraws:
        """Return the base draws of one level, a function of the seed: standard normals and a column of uniforms.

        The uniform is an even function of a normal, so that a pair z, -z shares its mixing variable: odd parts cancel.
        """
        base = self._draw(n_draws, self._target.n_dim + 1, np.random.default_rng([self.seed, _LEVEL + level]))
        uniforms = erf(np.abs(base.z[:, 0]) / np.sqrt(2.0))
        return replace(base, z=np.column_stack([base.z[:, 1:], uniforms]))

    def first_evaluation(self, q: StudentTState) -> Evaluation:
        """Evaluate a starting state on the first base draws."""
        return self._at(q, 0, self.few_draws)[1]

    def begin(self, q: StudentTState, *, level: int = 0) -> AsStudentT | None:
        """Return the state before the first step; None where no draw is finite."""
        base, evaluation = self._at(q, level, self.few_draws)
        if not evaluation.finite.any():
            return None
        moments = measured(self._target, q, base, evaluation, self._estimator, stl=self._stl)
        belief = Belief.of(moments)
        return AsStudentT(q, level, base, evaluation, moments, belief=belief, n_dropped=evaluation.n_dropped)

    # --- how a t is measured --------------------------------------------------------------------------------------

    def _at(self, q: StudentTState, level: int, n_draws: int) -> tuple[BaseDraws, Evaluation]:
        base = self.base_draws(level, n_draws)
        return base, self._estimator.evaluate(self._target, q, base)

    def _drawn(self, state: AsStudentT, level: int, n_draws: int) -> tuple[StudentTState, BaseDraws, Evaluation]:
        return state.q, *self._at(state.q, level, n_draws)

    def _measured(self, state: AsStudentT) -> AsStudentT:
        moments = measured(self._target, state.q, state.base, state.evaluation, self._estimator, stl=self._stl)
        return replace(state, moments=moments)

    def _is_exact(self, state: AsStudentT) -> bool:
        return bool(state.q.gaussian.exact_metric)

    def _is_near(self, state: AsStudentT, gap: float) -> bool:
        return is_near(state.q.gaussian, state.moments.gaussian, gap)

    def _spread(self, state: AsStudentT) -> float:
        keep = state.evaluation.finite
        h = state.evaluation.logp[keep] - state.q.log_density(state.evaluation.theta[keep])
        return float(np.var(h)) if len(h) else 0.0

    def _is_at_rest(self, state: AsStudentT) -> bool:
        m, x, most = state.moments.gaussian, state.moments, _most_tail_error(state.q)
        error: Array = np.abs(m.grad) - 2.0 * m.grad_se
        of_scale = np.abs(state.q.gaussian.curvature_diagonal(m.curvature) - 1.0) - 2.0 * m.curvature_se
        if error.max() > MAX_ERROR or of_scale.max() > MAX_CURVATURE_ERROR:
            return False
        # Where the largest set can't tell the shape any better, it makes no difference to the ELBO.
        return bool(state.rounds > 0 or max(abs(x.tail_step) - x.tail_se, x.tail_se) <= most)

    def _is_kinked(self, state: AsStudentT) -> bool:
        base, evaluation = within(state.q, state.base, state.evaluation, stl=True)
        return is_kinked(state.q.gaussian, base, evaluation, state.moments.of_estimator)

    def _assessed(self, state: AsStudentT) -> Assessment:
        evaluation, gap, gap_sd = state.evaluation, state.gap, state.belief.sd
        against = Status.NOISE_LIMITED if gap - 2.0 * gap_sd > self.tolerance.most(state.q) else None
        return Assessment(evaluation.theta, evaluation.logp, state.base.pairs(), gap, gap_sd, against)

    # --- steps ----------------------------------------------------------------------------------------------------

    def _averaged(self, state: AsStudentT, rho: float) -> AsStudentT | None:
        x = state.moments
        q = stepped(state.q, x, x.direction(), self._update, rho, correct=False)
        return None if q is None else self._pooled(state, q, rho)

    def _draws_needed(self, state: AsStudentT) -> float:
        """Return as many draws as tell where the shape is."""
        return max(self.few_draws, state.n_draws * (state.moments.tail_se / _most_tail_error(state.q)) ** 2)

    def _draws_to_average(self, state: AsStudentT, n_pooled: int) -> int:
        n_draws = super()._draws_to_average(state, n_pooled)
        # If it seems to be done, the next set is to certify it.
        return max(n_draws, self.few_draws) if state.belief.bound < self._tol_at(state) else n_draws

    def _found(self, state: AsStudentT) -> tuple[AsStudentT, Step[StudentTState, Evaluation] | Failure]:
        x = state.moments
        near = is_near(state.q.gaussian, x.gaussian, x.gap_of_gaussian)
        # On few draws, most of the shape's step may be noise, and far from the optimum all of it tells of other errors.
        trust = x.tail_step**2 / (x.tail_step**2 + x.tail_se**2) if near and x.tail_step else 0.0
        full = stepped(state.q, x, x.direction(trust), self._update, 1.0, correct=True)
        if full is not None:
            evaluation = self._estimator.evaluate(self._target, full, state.base)
            if self._accepts(state, evaluation):
                return state, Step(full, evaluation, 1.0)
        return state, search(
            lambda rho: stepped(state.q, x, x.vector, self._update, rho, correct=True),
            lambda q: self._estimator.evaluate(self._target, q, state.base),
            lambda evaluation: self._accepts(state, evaluation),
            elbo=state.elbo,
            slope=float(x.vector @ x.vector),
            first=1.0,
        )


def _most_tail_error(q: StudentTState) -> float:
    """Return the error of 1/a that a converged fit may have."""
    return TAIL_ATOL + TAIL_RTOL / q.shape
