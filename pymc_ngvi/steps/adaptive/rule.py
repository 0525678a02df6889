r"""The default step rule: no learning rate, few draws, a stop rule in nats.

It follows the schedule that all kinds of q share. Natural steps of size 1 are taken while the ELBO on the draws at hand
does not fall, smaller ones where it would. What is added here is for Gaussians: near the optimum, secants correct the
natural gradient; in hierarchical models, group effects move first, and global parameters that still drift take strides.
"""

from dataclasses import replace

import numpy as np

from pymc_ngvi.core.draws import MAX_SOBOL_DIM, globals_first
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.types import Array, Assessment, BaseDraws, Evaluation, GaussianState, Moments, StepRule
from pymc_ngvi.estimators import in_full_metric
from pymc_ngvi.steps.adaptive.certificate import MAX_CURVATURE_ERROR, is_kinked
from pymc_ngvi.steps.adaptive.scales import MAX_RECOVERIES, N_RECOVERY, Tools, recovered
from pymc_ngvi.steps.adaptive.state import (
    MANY,
    MAX_ERROR,
    TENS_OF_THOUSANDS,
    THOUSANDS,
    AdaptiveState,
    GlobalGradient,
    Growth,
    Pair,
    coordinatewise,
    correct,
    has_effects,
    is_near,
    is_solved_for_globals,
    moments_of,
    natural_gradient,
    rescaled_gap,
    secants_serve,
    slack_among_effects,
    trusted,
)
from pymc_ngvi.steps.schedule.base import Schedule
from pymc_ngvi.steps.schedule.state import UNKNOWN, Belief, Failure, Step, search

#: Steps kept for the secant correction: where it serves only the last stretch, and where it is always needed.
_N_PAIRS, _N_PAIRS_INEXACT = 6, 12
#: A step near the optimum that leaves less than this part of the gap tells that there is nothing to correct; otherwise
#: so many of them are looked at on a fixed set before averaging begins.
_FAST_RATE, _N_LEARNED = 0.15, 6
#: Part of a corrected step, at least: one that has to be shorter tells that its secants are none.
_LEAST_CORRECTED = 0.01
#: Part of its noise to which a set is solved when it has no more to teach of a hierarchical model.
_EXHAUSTED = 0.25
#: Steps of the group effects alone at most, and nats a coordinate that one must gain to be followed by another.
MAX_SETTLING, LEAST_GAIN = 6, 0.01
#: Random streams from here on serve only to look, never to move a state.
_GRADIENTS_LEVEL, _RECOVERY_LEVEL = 4_000_000, 6_000_000


class Adaptive(Schedule[AdaptiveState, GaussianState, Evaluation], StepRule[GaussianState, AdaptiveState]):
    """Second-order steps of a Gaussian that need no learning rate; the parameters are those of `Schedule`."""

    def base_draws(self, level: int, n_draws: int, q: GaussianState | None = None) -> BaseDraws:
        """Return the base draws of one level: a function of the seed, the level and the global coordinates of q."""
        base = self._draw(n_draws, self._target.n_dim, np.random.default_rng([self.seed, level]))
        # In more dimensions than quasi-random points have, global parameters come first.
        if q is None or q.globals_ is None or q.n_dim <= MAX_SOBOL_DIM:
            return base
        return globals_first(base, q.globals_)

    def first_evaluation(self, q: GaussianState) -> Evaluation:
        """Evaluate a starting state on the first base draws."""
        return self._at(q, 0, self._n_draws)[1]

    # --- verbs of the loop ----------------------------------------------------------------------------------------

    def init(self, q: GaussianState) -> AdaptiveState:
        """Return the state before the first iteration."""
        base, evaluation = self._at(q, 0, self._n_draws)
        moments = self._estimator.moments(self._target, q, base, evaluation, stl=self._stl)
        return AdaptiveState(
            q,
            0,
            base,
            evaluation,
            moments,
            belief=Belief.of(moments),
            n_dropped=evaluation.n_dropped,
            n_settling=MAX_SETTLING if q.globals_ is not None and 0 < len(q.globals_) < q.n_dim else 0,
            drift=GlobalGradient.measured(None, q, moments, base.n_draws),
            growth=Growth(first=q.sd()),
            n_recoveries=MAX_RECOVERIES,
        )

    def step(self, state: AdaptiveState) -> AdaptiveState:
        """Take one step."""
        new = self._settle(state) if state.n_settling else super().step(state)
        new = replace(new, growth=state.growth.after(new.q))
        ends_set = new.fresh and (state.level == 0 or self.terminate(new) not in (None, Status.UNBOUNDED))
        return self._with_scales(new) if new.n_recoveries and ends_set else new

    def terminate(self, state: AdaptiveState) -> Status | None:
        """Return why to stop, or None to go on."""
        return Status.UNBOUNDED if state.growth.is_unbounded else super().terminate(state)

    def reopen(self, state: AdaptiveState) -> AdaptiveState:
        """Return a state in which a fit that gave up may try again."""
        return replace(super().reopen(state), growth=Growth(first=state.q.sd()))

    def _settle(self, state: AdaptiveState) -> AdaptiveState:
        """Take one step of the group effects alone, the global parameters being held.

        At the start, group effects are near 0 with a spread that has nothing to do with the data. Steps of all
        coordinates at once would first fit the scale of the effects to that, and then creep along the plateau of
        effects that are all but 0, for twenty iterations on a centred logistic model. Held at their wide start, global
        parameters let the effects find the data.
        """
        grad, curvature = state.q.without_globals(state.moments.grad, state.moments.curvature)
        moments = replace(state.moments, grad=grad, curvature=curvature, replicates=None)
        step = self._line_search(state, moments, 1.0)
        if isinstance(step, Failure):
            return self._solve(replace(state, n_settling=0))
        gained = step.evaluation.elbo - state.elbo > LEAST_GAIN * step.q.n_dim
        moved = replace(
            state,
            q=step.q,
            evaluation=step.evaluation,
            fresh=False,
            step_size=step.size,
            n_settling=state.n_settling - 1 if gained else 0,
            drift=None,
        )
        return self._measured(moved)

    def _with_scales(self, state: AdaptiveState) -> AdaptiveState:
        """Look for lost scales elsewhere; return the state as it is where none are."""
        bases = [self.base_draws(_RECOVERY_LEVEL + 2 * state.level + k, n, state.q) for k, n in enumerate(N_RECOVERY)]
        q = recovered(Tools(self._target, self._update, self._estimator, *bases), state.q)
        if q is None:
            return replace(state, n_recoveries=state.n_recoveries - 1 if state.level <= 1 else 0)
        moved = AdaptiveState(q, state.level, state.base, state.evaluation, state.moments, n_dropped=state.n_dropped)
        moved = replace(moved, growth=state.growth, n_recoveries=state.n_recoveries - 1)
        return self._redraw(moved, self._n_draws)

    # --- how a Gaussian is measured -------------------------------------------------------------------------------

    def _at(self, q: GaussianState, level: int, n_draws: int) -> tuple[BaseDraws, Evaluation]:
        base = self.base_draws(level, n_draws, q)
        return base, self._estimator.evaluate(self._target, q, base)

    def _drawn(self, state: AdaptiveState, level: int, n_draws: int) -> tuple[GaussianState, BaseDraws, Evaluation]:
        return state.q, *self._at(state.q, level, n_draws)

    def _measured(self, state: AdaptiveState) -> AdaptiveState:
        moments = self._estimator.moments(self._target, state.q, state.base, state.evaluation, stl=self._stl)
        rescaled = rescaled_gap(moments, state.pairs)
        # Where the metric is exact, secants may raise an estimate, but not talk it down.
        talked_down = state.q.exact_metric and rescaled.floor < moments.floor
        return replace(state, moments=moments if talked_down else rescaled)

    def _redraw(self, state: AdaptiveState, n_draws: int) -> AdaptiveState:
        new = super()._redraw(state, n_draws)
        if new.level == state.level:
            return new
        drift = GlobalGradient.measured(state.drift, new.q, new.moments, n_draws)
        if drift is not None and has_effects(new.q, TENS_OF_THOUSANDS) and new.belief.bound < self._tol_at(new):
            # Only noise in the global parameters keeps the fit from ending, which Hessians would not lower.
            stream = _GRADIENTS_LEVEL + 1_000 * new.level
            drift = drift.with_more_sets(new.q, lambda k: self._at(new.q, stream + k, n_draws))
        return replace(new, drift=drift)

    def _is_exact(self, state: AdaptiveState) -> bool:
        return state.q.exact_metric

    def _is_near(self, state: AdaptiveState, gap: float) -> bool:
        return is_near(state.q, state.moments, gap)

    def _is_at_rest(self, state: AdaptiveState) -> bool:
        m, index = state.moments, state.q.globals_
        grad, curvature = coordinatewise(state.q, m)
        grad_se, curvature_se = (
            (m.grad_se, m.curvature_se) if index is None else (m.grad_se[index], m.curvature_se[index])
        )
        error, curvature_error = np.abs(grad) - 2.0 * grad_se, np.abs(curvature - 1.0) - 2.0 * curvature_se
        if index is not None and (state.drift is None or not state.drift.is_settled()):
            return False
        mean_met = np.max(error, initial=0.0) <= MAX_ERROR
        return bool(mean_met and np.max(curvature_error, initial=0.0) <= MAX_CURVATURE_ERROR)

    def _is_kinked(self, state: AdaptiveState) -> bool:
        return is_kinked(state.q, state.base, state.evaluation, state.moments)

    def _spread(self, state: AdaptiveState) -> float:
        keep = state.evaluation.finite
        # log q up to a constant: the draws are whitened normals.
        h = state.evaluation.logp[keep] + 0.5 * np.sum(state.base.z[keep] ** 2, axis=1)
        return float(np.var(h)) if len(h) else 0.0

    def _why_given_up(self, state: AdaptiveState) -> Status:
        return Status.UNBOUNDED if state.growth.seems_unbounded else super()._why_given_up(state)

    def _assessed(self, state: AdaptiveState) -> Assessment:
        most = self.tolerance.most(state.q)
        evaluation, gap, gap_sd = state.evaluation, state.gap, state.belief.sd
        if not state.q.exact_metric and evaluation.finite.any():
            full = in_full_metric(self._target, state.q, evaluation.theta[evaluation.finite], state.moments)
            if full is not None:
                gap, gap_sd = max(full.gap - full.floor, 0.0), full.floor_sd
        # Not what the certificate says: then it is hidden by noise, or along correlations that the family leaves out.
        hidden = Status.NOISE_LIMITED if state.q.exact_metric else Status.LEVELLED
        against = hidden if gap - 2.0 * gap_sd > most else None
        return Assessment(evaluation.theta, evaluation.logp, state.base.pairs(), gap, gap_sd, against)

    # --- averaged steps -------------------------------------------------------------------------------------------

    def _averaged(self, state: AdaptiveState, rho: float) -> AdaptiveState | None:
        _, moments = self._corrected(state)
        stride = state.drift.stride(state.stride) if state.drift else None
        if stride is not None:
            step = stride.step / rho
            grad = moments.grad.copy()
            grad[state.q.globals_] = np.where(step != 0.0, step, grad[state.q.globals_])
            moments = replace(moments, grad=grad)
        q = self._update(state.q, moments, rho, False)
        if q is None:
            return None
        moved = self._pooled(state, q, rho)
        if stride is None:
            return moved
        return replace(moved, n_pooled=state.n_draws, drift=None, stride=stride, belief=UNKNOWN)

    def _draws_needed(self, state: AdaptiveState) -> float:
        restless = has_effects(state.q, THOUSANDS) and not (state.drift and state.drift.is_settled())
        return state.n_draws if restless else self.few_draws

    def _rounded(self, state: AdaptiveState, n_draws: float) -> float:
        # Among many group effects noise falls faster than the number of draws: the larger set is the cheaper one.
        return (
            float(2.0 ** np.ceil(np.log2(n_draws))) if has_effects(state.q, MANY) else super()._rounded(state, n_draws)
        )

    # --- steps on a fixed set -------------------------------------------------------------------------------------

    def _found(self, state: AdaptiveState) -> tuple[AdaptiveState, Step[GaussianState, Evaluation] | Failure]:
        direction, moments = self._corrected(state)
        corrected = moments is not state.moments
        step = self._line_search(state, moments, 1.0 if corrected else state.next_step_size)
        if corrected and (isinstance(step, Failure) or step.size < _LEAST_CORRECTED):
            direction = natural_gradient(state.q, state.moments)
            state = replace(state, pairs=())
            step = self._line_search(state, state.moments, 1.0)
        if isinstance(step, Failure):
            return replace(state, next_step_size=1.0), step
        state = replace(state, drift=None, next_step_size=min(1.0, 4.0 * step.size))
        return state, step._replace(direction=step.size * direction)

    def _line_search(
        self, state: AdaptiveState, moments: Moments, first: float
    ) -> Step[GaussianState, Evaluation] | Failure:
        """Shorten the step until the ELBO on the current draws does not fall and no more draws are lost."""
        return search(
            lambda rho: self._update(state.q, moments, rho, True),
            lambda q: self._estimator.evaluate(self._target, q, state.base),
            lambda evaluation: self._accepts(state, evaluation),
            elbo=state.elbo,
            slope=2.0 * state.moments.gap,
            first=first,
        )

    def _slack(self, state: AdaptiveState) -> float:
        return slack_among_effects(state, super()._slack(state), self.tolerance.least(state.q))

    def _is_solved(self, state: AdaptiveState) -> bool:
        if has_effects(state.q, MANY):
            return is_solved_for_globals(state.q, state.moments, self._solved(state))
        return super()._is_solved(state)

    def _left(self, state: AdaptiveState) -> AdaptiveState:
        learning = state.n_draws >= self.few_draws and state.n_learned and not self._has_learned(state)
        # Little is left to learn from where group effects hide a creeping global parameter no longer.
        exhausted = state.q.globals_ is not None and state.moments.gap < _EXHAUSTED * state.moments.floor
        if learning and state.step_size == 1.0 and not exhausted:
            return state
        # Within the sampling error, where full steps overshoot, there is nothing more to learn.
        return self._next_set(replace(state, n_learned=_N_LEARNED) if learning else state)

    # --- the secant correction ------------------------------------------------------------------------------------

    def _corrected(self, state: AdaptiveState) -> tuple[Array, Moments]:
        """Return the natural gradient and the moments that give it, corrected by recent steps where that serves."""
        gradient = natural_gradient(state.q, state.moments)
        if state.pairs and secants_serve(state.q, state.moments, state.gap):
            direction = correct(state.pairs, gradient)
            if direction @ gradient > 0.0:
                return direction, moments_of(state.q, state.moments, direction)
        return gradient, state.moments

    def _learned(
        self, state: AdaptiveState, moved: AdaptiveState, step: Step[GaussianState, Evaluation]
    ) -> AdaptiveState:
        new = self._measured(moved)
        if step.direction is None or not secants_serve(state.q, state.moments, state.moments.gap):
            return new
        exact = state.q.exact_metric
        fast = exact and not state.pairs and new.moments.gap < _FAST_RATE * state.moments.gap
        new = replace(new, n_learned=_N_LEARNED if fast else new.n_learned + 1)
        if exact and new.moments.gap > 2.0 * state.moments.gap:
            return replace(new, pairs=())
        change = natural_gradient(state.q, state.moments) - natural_gradient(new.q, new.moments)
        pair = Pair(step.direction, change)
        if not trusted(pair, state.q):
            return new
        return replace(new, pairs=(*new.pairs, pair)[-(_N_PAIRS if exact else _N_PAIRS_INEXACT) :])

    def _has_learned(self, state: AdaptiveState) -> bool:
        # Strides do for thousands of group effects what learning on a fixed set does for other models.
        return has_effects(state.q, THOUSANDS) or state.n_learned >= (_N_LEARNED if state.q.exact_metric else 1)
