"""Steps of a mixture: on fixed draws, as many from each component, within a trust region; then averaged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Assessment, BaseDraws, Density, Estimator, GaussianState, Moments, Update
from pymc_ngvi.families.mixture import MixtureState
from pymc_ngvi.mixtures.finite.evaluation import MixtureEvaluation, MixtureMoments, evaluate_mixture, mixture_moments
from pymc_ngvi.steps.schedule.base import FEW_DRAWS, Schedule
from pymc_ngvi.steps.schedule.belief import Belief
from pymc_ngvi.steps.schedule.linesearch import Failure
from pymc_ngvi.steps.schedule.state import ScheduleState, Step

# --- one step of a mixture within a trust region: each component, and the weights, moves by so many nats at most ---
# A natural step of size :math:`\rho` of one component is shortened until KL(new || old) is within the radius [1]_, so
# that a component with a strange moment can't run away with the rest; likewise the weights.
#
# In the Fisher metric of component and draw together, the natural gradient with respect to the log weights is
# :math:`R_c = E_{q_c}[\log p - \log q]`, up to a constant [2]_: :math:`\log w_c' = \log w_c + \rho R_c`, normalised. A
# step of size 1 is exact for components that do not overlap.
#
# References
# ----------
# .. [1] O. Arenz, P. Dahlinger, Z. Ye, M. Volpp and G. Neumann (2023). A unified perspective on natural gradient
#    variational inference with Gaussian mixture models. TMLR. https://doi.org/10.48550/arXiv.2209.11533
# .. [2] W. Lin, M. E. Khan and M. Schmidt (2019). Fast and simple natural-gradient variational inference with mixture
#    of exponential-family approximations. ICML. https://doi.org/10.48550/arXiv.1906.02914

#: Halvings of a step that leaves the trust region; a component that needs more stays where it is.
_MAX_HALVINGS = 30
#: Least log weight of a component: far below it, nothing could raise it again.
LEAST_LOG_WEIGHT = -69.0


def moved_within(
    radius: float, update: Update, q: MixtureState, rewards: Array, moments: Sequence[Moments], step_size: float
) -> MixtureState:
    """Return the mixture after one step of every component and of the weights.

    Parameters
    ----------
    radius : float
        Nats that KL(new || old) of a component, and of the weights, may have.
    update : Update
        Of the components.
    q : MixtureState
    rewards : ndarray, shape (n_components,)
        Mean of log p - log q under each of them.
    moments : sequence of Moments
        Of each of them.
    step_size : float
        In (0, 1].
    """
    components = tuple(
        _component_within(radius, update, component, of_it, step_size)
        for component, of_it in zip(q.components, moments, strict=True)
    )
    return MixtureState(_weights_within(radius, q.log_weights, rewards, step_size), components)


def _component_within(
    radius: float, update: Update, component: GaussianState, moments: Moments, rho: float
) -> GaussianState:
    for _ in range(_MAX_HALVINGS):
        new = update(component, moments, rho, True)
        if new is not None and new.divergence(component) <= radius:
            return new
        rho *= 0.5
    return component


def _weights_within(radius: float, log_weights: Array, direction: Array, rho: float) -> Array:
    # A component that lies where log p is not finite loses its weight.
    lowest = np.min(direction, where=np.isfinite(direction), initial=0.0) - 100.0
    direction = np.where(np.isfinite(direction), direction, lowest)
    for _ in range(_MAX_HALVINGS):
        new = stepped_weights(log_weights, direction, rho)
        if float(np.exp(new) @ (new - log_weights)) <= radius:
            return new
        rho *= 0.5
    return log_weights


def stepped_weights(log_weights: Array, direction: Array, step_size: float) -> Array:
    """Return the log weights after a step, normalised, none below the least."""
    new = log_weights + step_size * (direction - direction.max())
    new = np.maximum(new - logsumexp(new), LEAST_LOG_WEIGHT)
    return new - logsumexp(new)


# --- steps of a mixture: on fixed draws, as many from each component, within a trust region; then averaged ---

#: Nats within which components and weights move at first, at most, and the factor by which it is raised and lowered.
_RADIUS, _MAX_RADIUS, _MIN_RADIUS, _LONGER, _SHORTER = 1.0, 1e4, 1e-6, 2.0, 4.0
#: Weight below which a component is dropped: it costs as many nats.
_NEGLIGIBLE = 1e-4
#: Sets that steps are averaged over, and steps among them that fresh draws may refuse, at most.
_MAX_AVERAGED, _MAX_REFUSED = 12, 2
#: Standard deviations, relative to those of the single Gaussian, beyond which a component has collapsed or run away.
_LEAST_SCALE, _MOST_SCALE = 1e-8, 1e6


@stored("mixture.steps")
@dataclass(frozen=True)
class MixtureSteps(ScheduleState):
    """What one iteration hands to the next: what every schedule does, and what follows.

    Parameters
    ----------
    base : BaseDraws
        Serves each component.
    single : GaussianState
        The Gaussian that the mixture began from.
    is_candidate : bool
        Not yet known to pay: once its sets are solved, it waits for a decision.
    waits : bool
        It does so now.
    failure : Status or None
        Why there is no going on: a component has collapsed or run away, or no draw is finite.
    to_beat : float
        ELBO of the accepted mixture, where this is a candidate.
    radius : float
        Of the trust region, nats.
    n_refused : int
        Averaged steps that would have lowered the ELBO.
    """

    q: MixtureState
    evaluation: MixtureEvaluation
    moments: MixtureMoments
    single: GaussianState | None = None
    is_candidate: bool = True
    waits: bool = False
    failure: Status | None = None
    to_beat: float = -np.inf
    radius: float = _RADIUS
    n_refused: int = 0


class MixtureSchedule(Schedule[MixtureSteps, MixtureState, MixtureEvaluation]):
    """Steps of a mixture of so many components.

    Parameters
    ----------
    target, update, estimator, **options
        Of `Schedule`; the update is applied to each component, and numbers of draws are those of each.
    """

    default_draws = (16, 128)
    max_idle = 40  # a candidate may go down

    def __init__(self, target: Density, update: Update, estimator: Estimator, **options: Any) -> None:
        super().__init__(target, update, estimator, **options)
        self._max_draws = self._n_draws << int(np.log2(self._max_draws // self._n_draws))
        self.few_draws = min(FEW_DRAWS, self._max_draws)

    @property
    def draws_at_end(self) -> int:
        """Draws of each component, to begin averaging with."""
        return max(self._max_draws // 2, self._n_draws)

    def base_draws(self, level: int, n_draws: int | None = None, *, times: int = 1) -> BaseDraws:
        """Return the base draws of one level, as many as the largest set has, or a multiple, if no number is given."""
        rng = np.random.default_rng([self.seed, level, 7])
        return self._draw(n_draws or times * self._max_draws, self._target.n_dim, rng)

    def evaluated(self, q: MixtureState, base: BaseDraws) -> MixtureEvaluation:
        """Return log p at draws of each component."""
        return evaluate_mixture(self._target, q, base, self._estimator)

    def sound(self, q: MixtureState, base: BaseDraws) -> tuple[MixtureState, MixtureEvaluation]:
        """Evaluate a mixture, without components of which no draw has a finite log density, if others have."""
        evaluation = self.evaluated(q, base)
        lost = ~np.isfinite(evaluation.rewards)
        if not lost.any() or lost.all():
            return q, evaluation
        return self.sound(q.without(lost), base)

    def moments(self, q: MixtureState, evaluation: MixtureEvaluation) -> MixtureMoments:
        """Return what is left to gain, and along what."""
        return mixture_moments(self._target, q, evaluation, self._estimator, stl=self._stl)

    def begin(
        self, q: MixtureState, level: int, single: GaussianState | None, n_draws: int | None = None
    ) -> MixtureSteps | None:
        """Return a mixture on a new set of draws; None where no draw is finite.

        Parameters
        ----------
        q : MixtureState
        level : int
        single : GaussianState or None
            The Gaussian that the mixture began from.
        n_draws : int, optional
            Of each component; default: those of the first set.
        """
        base = self.base_draws(level, n_draws or self._n_draws)
        q, evaluation = self.sound(q, base)
        if not np.isfinite(evaluation.elbo):
            return None
        moments = self.moments(q, evaluation)
        return MixtureSteps(q, level, base, evaluation, moments, belief=Belief.of(moments), single=single)

    def larger(self, state: MixtureSteps) -> MixtureSteps | None:
        """Return a candidate on a larger set; None where it has the largest."""
        if 2 * state.n_draws > self._max_draws:
            return None
        return self._redraw(replace(state, waits=False, idle=0), 2 * state.n_draws)

    def terminate(self, state: MixtureSteps) -> Status | None:
        """Return why to stop, or None to go on."""
        if state.failure is not None or self._is_certified(state):
            return state.failure or Status.CONVERGED
        ended = state.rounds > _MAX_AVERAGED or state.n_refused >= _MAX_REFUSED
        return Status.NOISE_LIMITED if ended else None

    def reopen(self, state: MixtureSteps) -> MixtureSteps:
        """Return a state in which a fit that gave up may try again."""
        return replace(state, rounds=0, n_refused=0)

    def _assessed(self, state: MixtureSteps) -> Assessment:
        raise NotImplementedError  # at draws of the mixture as a whole, by `TrustRegion`

    # --- how a mixture is measured --------------------------------------------------------------------------------

    def _drawn(
        self, state: MixtureSteps, level: int, n_draws: int
    ) -> tuple[MixtureState, BaseDraws, MixtureEvaluation]:
        base = self.base_draws(level, n_draws)
        q, evaluation = self.sound(state.q, base)
        return q, base, evaluation

    def _measured(self, state: MixtureSteps) -> MixtureSteps:
        return replace(state, moments=self.moments(state.q, state.evaluation))

    def _is_near(self, state: MixtureSteps, gap: float) -> bool:
        return True

    def _spread(self, state: MixtureSteps) -> float:
        return state.evaluation.spread()

    # --- steps ----------------------------------------------------------------------------------------------------

    def _found(self, state: MixtureSteps) -> tuple[MixtureSteps, Step[MixtureState, MixtureEvaluation] | Failure]:
        radius = state.radius
        while radius > _MIN_RADIUS:
            q = self._moved(state, 1.0, radius)
            evaluation = self.evaluated(q, state.base)
            if self._accepts(state, evaluation):
                if self._is_lost(q, state.single):
                    return replace(state, failure=Status.COLLAPSED), Failure.NOT_ACCEPTED
                return replace(state, radius=min(radius * _LONGER, _MAX_RADIUS)), Step(q, evaluation, 1.0)
            radius /= _SHORTER
        return state, Failure.NOT_ACCEPTED

    def _accepts(self, state: MixtureSteps, new: MixtureEvaluation) -> bool:
        # Few draws are overfitted: a candidate may lose on its own what it has gained there over the accepted mixture.
        least = (state.to_beat if state.is_candidate else state.elbo) - self._slack(state)
        return bool(new.n_dropped <= state.evaluation.n_dropped and new.elbo >= least)

    def _is_lost(self, q: MixtureState, single: GaussianState | None) -> bool:
        if single is None:
            return False
        unit = single.sd()
        ratio, far = q.sds / unit, np.abs(q.means - single.location) / unit
        return bool(ratio.min() < _LEAST_SCALE or max(ratio.max(), far.max()) > _MOST_SCALE)

    def _left(self, state: MixtureSteps) -> MixtureSteps:
        # Where components overlap, the metric is too large, and more is left than the gap tells: one more step.
        return state

    def _next_set(self, state: MixtureSteps) -> MixtureSteps:
        if state.failure is not None:
            return replace(state, waits=True)
        drop = state.q.weights < _NEGLIGIBLE
        state = replace(state, q=state.q.without(drop)) if drop.any() else state
        if not state.is_candidate:
            return super()._next_set(state)
        if state.n_draws >= self.few_draws:
            return replace(state, waits=True)
        return self._redraw(replace(state, idle=0), 2 * state.n_draws)

    def _redraw(self, state: MixtureSteps, n_draws: int) -> MixtureSteps:
        new = super()._redraw(state, n_draws)
        # No draw of any component is finite: nothing can be said of this mixture.
        return replace(new, waits=True, failure=Status.OUTSIDE_SUPPORT) if new.level == state.level else new

    def _averaged(self, state: MixtureSteps, rho: float) -> MixtureSteps:
        return self._pooled(state, self._moved(state, rho, _RADIUS), rho)

    def _moved(self, state: MixtureSteps, rho: float, radius: float) -> MixtureState:
        return moved_within(radius, self._update, state.q, state.evaluation.rewards, state.moments.parts, rho)

    def _average(self, state: MixtureSteps) -> MixtureSteps | None:
        """Take the step that pools this set with all before it, unless fresh draws say that it does harm."""
        new = super()._average(state)
        if new is None:
            return None
        before = self.evaluated(state.q, new.base)
        if new.elbo >= before.elbo - self.tolerance.most(state.q):
            return new
        kept = self._measured(replace(new, q=state.q, evaluation=before, n_refused=state.n_refused + 1))
        return replace(kept, n_pooled=state.n_pooled, belief=state.belief.measured(kept.moments))

    def _creeps(self, state: MixtureSteps, new: MixtureSteps) -> bool:
        return False  # a mixture that is accepted is not to be fitted to single sets again

    def _most_left(self, state: MixtureSteps) -> float:
        # The error of a gap is an upper bound: those of components are added up.
        return state.moments.gap - state.moments.floor + state.moments.floor_sd

    def _counts(self, n_draws: int) -> bool:
        return True
