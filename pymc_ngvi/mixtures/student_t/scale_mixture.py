r"""The step rule of the Student-t: no learning rate, a shape that is fitted, a stop rule in nats.

A fit begins as that of a Gaussian, by the rule `adaptive`, and stays one until the gradients on fresh draws show that
heavier tails would raise the ELBO. Then it goes on likewise with the t: many steps on one set of draws, where the
problem is deterministic, and near the optimum one step of size S / (N + S) on each fresh set. Steps are natural
gradients in the Fisher information of the t itself. Where one lowers the ELBO on the draws at hand, the natural
gradient of draw and mixing variable together, which is more cautious, takes its place, shortened until it does not.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from numpy.typing import NDArray
from scipy.special import erf

from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Assessment, BaseDraws, Density, Estimator, Evaluation, StepRule, Update
from pymc_ngvi.families.student_t import MOST_SHAPE, StudentTState
from pymc_ngvi.mixtures.student_t.gradients import (
    LEAST_TAIL,
    TAIL_ATOL,
    TAIL_RTOL,
    ScaleMoments,
    Tails,
    measured,
    stepped,
    within,
)
from pymc_ngvi.steps.adaptive.certificate import MAX_CURVATURE_ERROR, is_kinked, loses_draws
from pymc_ngvi.steps.adaptive.global_gradient import MAX_ERROR
from pymc_ngvi.steps.adaptive.nearness import is_near
from pymc_ngvi.steps.adaptive.rule import Adaptive
from pymc_ngvi.steps.adaptive.state import AdaptiveState
from pymc_ngvi.steps.schedule.base import FEW_DRAWS, NEAR_NATS, Schedule
from pymc_ngvi.steps.schedule.belief import Belief
from pymc_ngvi.steps.schedule.linesearch import Failure, search
from pymc_ngvi.steps.schedule.state import ScheduleState, Step

# --- the part of the step rule `scale_mixture` in which q is a Student-t with tails of its own ---

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


# --- the step rule of the Student-t: no learning rate, a shape that is fitted, a stop rule in nats ---

#: Draws in the first and in the largest set from gradients alone, and, for each dimension, in the first: fewer are
#: overfitted.
_N_GRADIENTS, _MAX_GRADIENTS, _GRADIENTS_PER_DIM = 64, 16_384, 4
#: Draws below which nothing is said of tails, and times the dimension: in few dimensions, few draws tell of them. Fewer
#: than the least, which max_draws does not change, have no replicates to judge by.
_FEW_DRAWS, _FEW_TIMES_DIM, _LEAST_DRAWS = 128, 512, 16
#: Standard errors by which heavier tails must gain something: along the way, and on the larger set at the end.
_N_SE, _N_SE_AT_END = 3.0, 2.0
#: Nats for each dimension below which tails are looked at: far from the optimum they would make up for other errors.
_NEAR_PER_DIM = 0.1
#: Times that a fit may find that the tails are no heavier than a Gaussian's after all.
_MAX_RETURNS = 2
#: Nats below the ELBO of the Gaussian that it began from, at which a t is given up.
_WORSE = 1.0
#: Random streams: of the larger set at the end; between those of parts of a fit; between the seeds of Gaussian parts.
_CHECK_LEVEL, _LEVELS, _LATER = 500_000, 10_000, 1_000_003


@stored("scale_mixture.as_gaussian")
@dataclass(frozen=True)
class AsGaussian:
    """A fit that is still that of a Gaussian.

    Parameters
    ----------
    of_gaussian : AdaptiveState
    checked : bool
        Whether a larger set of draws at the end has shown that heavier tails gain nothing.
    n_returns : int
        Times that the fit came back to here.
    n_lost : int
        Draws left out in earlier parts of the fit.
    """

    of_gaussian: AdaptiveState
    checked: bool = False
    n_returns: int = 0
    n_lost: int = 0

    @property
    def q(self) -> StudentTState:
        """The Gaussian, as a t with many degrees of freedom."""
        return StudentTState(self.of_gaussian.q, float(np.log(MOST_SHAPE)))

    @property
    def elbo(self) -> float:
        """ELBO on the current draws."""
        return self.of_gaussian.elbo

    @property
    def gap(self) -> float:
        """Estimated nats still to be gained."""
        return self.of_gaussian.gap

    @property
    def n_draws(self) -> int:
        """Draws in use."""
        return self.of_gaussian.n_draws

    @property
    def step_size(self) -> float:
        """The last step size."""
        return self.of_gaussian.step_size

    @property
    def n_dropped(self) -> int:
        """Draws left out so far because log p or its gradient was not finite."""
        return self.n_lost + self.of_gaussian.n_dropped

    @property
    def growing(self) -> NDArray[np.intp]:
        """Coordinates whose standard deviations grow without end."""
        return self.of_gaussian.growing


class ScaleMixture(StepRule[StudentTState, AsGaussian | AsStudentT]):
    """Natural-gradient steps of a Student-t that need no learning rate.

    Parameters
    ----------
    target : Density
    update, estimator : callable
        Rows of the registries, of the Gaussian inside.
    seed : int
        Of the base draws.
    n_draws, max_draws : int, optional
        Sizes of the first and of the largest set of draws, powers of 2 where quasi-random. With Hessians 8 and 1,024;
        from gradients alone four times the dimension, 64 at least, and 16,384.
    **options
        Others of `Schedule`.
    """

    #: Options that the rule takes, for the messages that refuse others.
    takes: ClassVar[frozenset[str]] = Schedule.takes

    def __init__(
        self,
        target: Density,
        update: Update,
        estimator: Estimator,
        *,
        seed: int,
        n_draws: int | None = None,
        max_draws: int | None = None,
        **options: Any,
    ) -> None:
        first, most = Schedule.default_draws
        if not estimator.uses_hessians:
            first = max(_N_GRADIENTS, _power_of_2(_GRADIENTS_PER_DIM * target.n_dim))
            most = max(_MAX_GRADIENTS, first)
        n_draws = n_draws or min(first, max_draws or first)
        most = max(max_draws or most, n_draws)
        few = max(_FEW_DRAWS, _power_of_2(_FEW_TIMES_DIM / max(target.n_dim, 1)))
        few = max(min(few, most), _LEAST_DRAWS)
        parts, options = (target, update, estimator), {**options, "max_draws": most}
        self._target, self._estimator = target, estimator
        self._gaussian = Adaptive(*parts, seed=seed, n_draws=n_draws, **options)
        self._later = Adaptive(*parts, seed=seed + _LATER, n_draws=few, **options)
        self._t = StudentTSteps(*parts, seed=seed, n_draws=few, few_draws=few, **options)

    def first_evaluation(self, q: StudentTState) -> Evaluation:
        """Evaluate a starting state on the first base draws."""
        return self._gaussian.first_evaluation(q.gaussian) if _is_gaussian(q) else self._t.first_evaluation(q)

    def init(self, q: StudentTState) -> AsGaussian | AsStudentT:
        """Return the state before the first iteration."""
        begun = None if _is_gaussian(q) else self._t.begin(q)
        return begun or AsGaussian(self._gaussian.init(q.gaussian))

    def step(self, state: AsGaussian | AsStudentT) -> AsGaussian | AsStudentT:
        """Take one step."""
        if isinstance(state, AsGaussian):
            return self._step_of_gaussian(state)
        new = self._t.step(state)
        if new.fresh and _is_gaussian(new.q) and new.moments.tail_step <= 0.0:
            return self._back(new, new.q)
        # Few draws may have promised what none can hold: where log p falls off exponentially, no t has a finite ELBO.
        if new.origin is not None and new.elbo < new.origin_elbo - _WORSE:
            return self._back(new, new.origin)
        return new

    def terminate(self, state: AsGaussian | AsStudentT) -> Status | None:
        """Return why to stop, or None to go on."""
        if isinstance(state, AsGaussian):
            return self._gaussian.terminate(state.of_gaussian) if state.checked else None
        return self._t.terminate(state)

    def assess(self, state: AsGaussian | AsStudentT) -> Assessment:
        """Evaluate a state on draws that had no part in reaching it."""
        if isinstance(state, AsGaussian):
            return self._gaussian.assess(state.of_gaussian)
        return self._t.assess(state)

    def reopen(self, state: AsGaussian | AsStudentT) -> AsGaussian | AsStudentT:
        """Return a state in which a fit that gave up may try again."""
        if isinstance(state, AsGaussian):
            return replace(state, of_gaussian=self._gaussian.reopen(state.of_gaussian), checked=False)
        return self._t.reopen(state)

    def _step_of_gaussian(self, state: AsGaussian) -> AsGaussian | AsStudentT:
        """Take one step of the Gaussian; give it tails where they gain something."""
        inner = (self._later if state.n_returns else self._gaussian).step(state.of_gaussian)
        moved = replace(state, of_gaussian=inner, checked=False)
        if state.n_returns >= _MAX_RETURNS:
            return replace(moved, checked=True)
        q = inner.q
        if self._gaussian.terminate(inner) is not None:
            base = self._gaussian.base_draws(_CHECK_LEVEL + inner.level, self._t.few_draws)
            evaluation = self._estimator.evaluate(self._target, q, base)
            n_se = _N_SE_AT_END
        else:
            near = inner.gap < NEAR_NATS + _NEAR_PER_DIM * q.n_dim
            if not (inner.fresh and near) or inner.n_draws < FEW_DRAWS or loses_draws(inner.evaluation):
                return moved
            base, evaluation, n_se = inner.base, inner.evaluation, _N_SE
        begun = None
        if evaluation.finite.any() and Tails.beyond(q, base, evaluation).gain(n_se):
            begun = self._t.begin(moved.q, level=inner.level + _LEVELS * state.n_returns)
        if begun is None:
            return replace(moved, checked=n_se == _N_SE_AT_END)
        n_dropped = moved.n_dropped + begun.n_dropped
        return replace(begun, n_dropped=n_dropped, n_returns=state.n_returns, origin=begun.q, origin_elbo=begun.elbo)

    def _back(self, state: AsStudentT, q: StudentTState) -> AsGaussian:
        """Return to a Gaussian."""
        n_returns, n_lost = state.n_returns + 1, state.n_dropped
        return AsGaussian(self._later.init(q.gaussian), n_returns=n_returns, n_lost=n_lost)


def _is_gaussian(q: StudentTState) -> bool:
    return 1.0 / q.shape <= LEAST_TAIL * (1.0 + 1e-9)


def _power_of_2(value: float) -> int:
    """Return the least power of 2 that is not below a number."""
    return 1 << int(np.ceil(np.log2(max(value, 1.0))))
