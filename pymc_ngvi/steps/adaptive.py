r"""The default step rule: full natural steps with back-tracking, on draws that are fixed, then multiplied.

On a set of base draws the problem is deterministic: steps of size 1 are taken while the ELBO on those draws does not
fall, smaller ones where it would. When what is left to gain on these draws is below their sampling error, the set is
replaced by a fresh one four times as large. Fresh draws had no part in reaching the state: the gap measured on them,
less its noise floor, is an honest estimate of what is still to be gained, and decides when to stop.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pymc_ngvi.draws import antithetic_draws
from pymc_ngvi.status import Status
from pymc_ngvi.types import Array, BaseDraws, Estimator, Evaluation, Moments, TargetDensity, Update

#: Whitened mean (sds) and diagonal curvature that a converged coordinate may be off by.
_MAX_MEAN_ERROR, _MAX_CURVATURE_ERROR = 0.1, 0.2
#: Nats per dimension that a converged fit may lack: a root-mean-square error of .03 sd in the mean.
_TOL_PER_DIM, _TOL_LEAST = 5e-4, 2e-3
#: Draws are multiplied by this when a level is solved.
_GROWTH = 4
#: Step sizes tried before a level counts as solved as far as it can be.
_MAX_HALVINGS = 12
#: Rounds of fresh draws at `max_draws` before the fit gives up on certifying its result.
_MAX_ROUNDS = 3


@dataclass(frozen=True)
class AdaptiveState:
    """What one iteration hands to the next.

    Parameters
    ----------
    q : VariationalState
    level : int
        Sets of draws used so far; names the random stream of the current one.
    base : BaseDraws
    evaluation : Evaluation
        At the draws of ``q``.
    moments : Moments
        There.
    step_size : float
        To be tried next.
    fresh : bool
        ``base`` had no part in reaching ``q``.
    rounds : int
        Sets of fresh draws tried at the largest size.
    stalled : bool
        The last line search found no acceptable step.
    n_dropped : int
        Draws left out so far because log p or its gradient was not finite.
    """

    q: Any
    level: int
    base: BaseDraws
    evaluation: Evaluation
    moments: Moments
    step_size: float
    fresh: bool
    rounds: int = 0
    stalled: bool = False
    n_dropped: int = 0

    @property
    def elbo(self) -> float:
        """ELBO on the current draws."""
        return self.evaluation.elbo

    @property
    def gap(self) -> float:
        """Estimated nats of ELBO still to be gained, corrected for noise, at least 0."""
        return max(self.moments.gap - self.moments.floor, 0.0) if self.fresh else self.moments.gap


class Adaptive:
    """Second-order steps that need no learning rate.

    Parameters
    ----------
    target : TargetDensity
    update : callable
    estimator : callable
    seed : int
        Of the base draws.
    tol : float, default 0.05
        Stop when the nats still to be gained, with two standard deviations of their estimate, are below this (and
        below .0005 per dimension, but never less than .002 is asked).
    n_draws, max_draws : int
        Sizes of the first and of the largest set of draws, powers of 2.
    """

    def __init__(
        self,
        target: TargetDensity,
        update: Update,
        estimator: Estimator,
        *,
        seed: int,
        tol: float = 0.05,
        n_draws: int = 8,
        max_draws: int = 2048,
    ) -> None:
        self._target = target
        self._update = update
        self._estimator = estimator
        self._seed = seed
        self._tol = min(tol, max(_TOL_PER_DIM * target.n_dim * tol / 0.05, _TOL_LEAST * tol / 0.05))
        self._n_draws = n_draws
        self._max_draws = max_draws

    def evaluate(self, q: Any, base: BaseDraws) -> Evaluation:
        """Evaluate log p and its gradient at the draws of ``q``."""
        theta = q.draws(base.z)
        logp, grad = self._target.logp_grad(theta)
        finite = np.isfinite(logp) & np.isfinite(grad).all(axis=1)
        elbo = float(logp[finite].mean()) + q.entropy() if finite.any() else -np.inf
        return Evaluation(theta, logp, grad, finite, elbo)

    def base_draws(self, level: int, n_draws: int) -> BaseDraws:
        """Return the base draws of one level: a function of the seed and the level alone."""
        rng = np.random.default_rng([self._seed, level])
        return antithetic_draws(n_draws, self._target.n_dim, rng)

    def init(self, q: Any) -> AdaptiveState:
        """Return the state before the first iteration."""
        base = self.base_draws(0, self._n_draws)
        evaluation = self.evaluate(q, base)
        moments = self._estimator(self._target, q, base, evaluation)
        return AdaptiveState(
            q, 0, base, evaluation, moments, 1.0, fresh=True, n_dropped=int((~evaluation.finite).sum())
        )

    def step(self, state: AdaptiveState) -> AdaptiveState:
        """Take one step, and go to fresh draws if that solves the problem on the current ones."""
        q, evaluation, step_size = self._line_search(state)
        if q is None:
            return self._redraw(replace(state, stalled=True, step_size=1.0))
        moved = replace(
            state, q=q, evaluation=evaluation, stalled=False, fresh=False, step_size=min(1.0, 4 * step_size)
        )
        # After a full step from within the sampling error, what is left on these draws is far below it.
        if step_size == 1.0 and state.moments.gap <= 2.0 * max(state.moments.floor, 0.1 * self._tol):
            return self._redraw(moved)
        moments = self._estimator(self._target, q, state.base, evaluation)
        return replace(moved, moments=moments)

    def terminate(self, state: AdaptiveState) -> Status | None:
        """Return why to stop, or None to go on."""
        if not state.fresh:
            return None
        m = state.moments
        gap_met = m.gap - m.floor + 2.0 * m.floor_sd < self._tol
        mean_met = np.max(np.abs(m.grad) - 2.0 * m.grad_se, initial=0.0) <= _MAX_MEAN_ERROR
        error = np.abs(_diagonal(m.curvature) - 1.0) - 2.0 * m.curvature_se
        curvature_met = np.max(error, initial=0.0) <= _MAX_CURVATURE_ERROR
        if gap_met and mean_met and curvature_met:
            return Status.CONVERGED
        if state.rounds > _MAX_ROUNDS:
            return Status.STALLED if state.stalled else Status.NOISE_LIMITED
        return None

    def _redraw(self, state: AdaptiveState) -> AdaptiveState:
        n_draws = min(state.base.n_draws * _GROWTH, self._max_draws)
        at_limit = state.base.n_draws >= self._max_draws
        base = self.base_draws(state.level + 1, n_draws)
        evaluation = self.evaluate(state.q, base)
        return replace(
            state,
            level=state.level + 1,
            base=base,
            evaluation=evaluation,
            moments=self._estimator(self._target, state.q, base, evaluation),
            fresh=True,
            rounds=state.rounds + at_limit,
            n_dropped=state.n_dropped + int((~evaluation.finite).sum()),
        )

    def _line_search(self, state: AdaptiveState) -> tuple[Any, Evaluation, float]:
        """Halve the step until the ELBO on the current draws does not fall and no more draws are lost."""
        rho = state.step_size
        for _ in range(_MAX_HALVINGS):
            q = self._update(state.q, state.moments, rho, True)
            if q is not None:
                evaluation = self.evaluate(q, state.base)
                if self._accept(state, evaluation):
                    return q, evaluation, rho
            rho /= 2
        return None, state.evaluation, rho

    def _accept(self, state: AdaptiveState, new: Evaluation) -> bool:
        old = state.evaluation
        if not np.isfinite(new.elbo) or (~new.finite).sum() > (~old.finite).sum():
            return False
        # Within the sampling error the fixed point of the update and the maximum on these draws need not agree.
        slack = 1e-9 * abs(old.elbo) + min(0.5 * state.moments.floor, 0.5 * self._tol)
        return new.elbo >= old.elbo - slack


def _diagonal(curvature: Array) -> Array:
    return np.diagonal(curvature) if curvature.ndim == 2 else curvature
