r"""The default step rule: no learning rate, few draws, a stop rule in nats.

It follows the schedule that all kinds of q share, and looks for scales of latent effects that a fit has lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np

from pymc_ngvi.core.sizes import ASSESSMENT, MAX_DENSE_DIM
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import (
    Array,
    Assessment,
    BaseDraws,
    Density,
    Evaluation,
    Indices,
    MatrixHessian,
    MeanHessian,
    PatternHessian,
    StepRule,
    VariationalState,
)
from pymc_ngvi.families.gaussian import AnyGaussian
from pymc_ngvi.methods.estimators import Moments, gap_of, in_full_metric
from pymc_ngvi.methods.schedule import (
    MAX_CURVATURE_ERROR,
    NEAR_NATS,
    PER_DIM,
    ROUNDING,
    TOL,
    Schedule,
    ScheduleState,
    Step,
    is_kinked,
    is_not_below,
    search,
)

# --- a log density given some of its coordinates, which get a narrow Gaussian of their own ---


class Conditioned:
    """The density of the other coordinates given some, times a Gaussian of these.

    A fit of it is one of the conditional posterior, by any family, in the coordinates of the whole.
    """

    def __init__(self, target: Density, index: Indices, point: Array, sd: Array) -> None:
        self._target, self._index, self._point, self._sd = target, index, point, sd
        self.n_dim, self.has_hessian = target.n_dim, target.has_hessian

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p, (n_draws,), and its gradient, (n_draws, n_dim)."""
        logp, grad = self._target.logp_grad(self._given(theta))
        standard = (theta[:, self._index] - self._point) / self._sd
        grad = grad.copy()
        grad[:, self._index] = -standard / self._sd
        return logp - 0.5 * np.sum(standard**2, axis=1), grad

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the mean of hess log p over draws."""
        whole = self._target.mean_hessian(self._given(theta))
        own, pattern = np.zeros(self.n_dim), whole.pattern
        own[self._index] = -(self._sd**-2.0)
        if pattern is None:
            is_own = (own != 0.0) | (own != 0.0)[:, None]
            return MatrixHessian(np.where(is_own, np.diag(own), whole.products(np.eye(self.n_dim))))
        rows, cols = own[pattern.rows], own[pattern.cols]
        is_own, on_diagonal = (rows != 0.0) | (cols != 0.0), np.where(pattern.off_diagonal, 0.0, rows)
        return PatternHessian(pattern, np.where(is_own, on_diagonal, whole.values()))

    def _given(self, theta: Array) -> Array:
        given = theta.copy()
        given[:, self._index] = self._point
        return given


# --- scales of latent effects that a fit has lost: found, and looked for where they may be ---
# Effects b ~ N(0, s) in their centred form have a second place to go to: b near 0, s near 0, where the ELBO has a
# plateau along log s whose slope (1 nat a unit, that of the Jacobian) natural gradients all but miss. There they
# measure a gap of 0.02 nats where 50 are missing: each step fits s to the spread of b in q, and that spread to s.
#
# The curvature tells. In log s it is -2 E[sum b^2] / s^2; at the mean of q alone, -2 sum E[b]^2 / s^2. Where most of it
# is owed to the spread of b, s follows q, not the data. Then log s is moved, up or down, with the others fitted to it,
# for as long as the ELBO rises.

#: Times that lost scales are looked for in one fit, and draws to move on and to judge by.
MAX_RECOVERIES, N_RECOVERY = 4, (16, 32)
#: Part of the curvature in log s that the mean of q has to account for.
_LEAST_OWN = 0.12
#: Steps in log s, the first tried: far, and near; and most of them in a row.
_STRIDES, _MOST_STRIDES = (1.0, 0.5), 10
#: Natural steps of the others after each, at most, and the gap per dimension below which they are fitted.
_MOST_STEPS, _FITTED = 3, 0.02
#: Standard errors by which the ELBO must rise, and the nats of a tolerance.
_N_SE_OF_GAIN = 2.0
#: Elements of one variable that are moved one by one; more are moved together.
_FEW = 3
#: Elements beyond which a variable is not looked at: scales of single observations, not of effects.
_MANY = 200


def lost_scales(target: Density, q: AnyGaussian) -> list[Indices]:
    """Return the coordinates of scales that follow q instead of the data, those in one array to be moved together.

    It takes one Hessian, and none for a target that does not tell which coordinates are logarithms of positive
    variables.
    """
    positive: Sequence[Indices] = getattr(target, "positive", ())
    if not positive or not target.has_hessian:
        return []
    hessian = target.mean_hessian(q.mean()[None])
    if hessian.pattern is None and q.n_dim > MAX_DENSE_DIM:
        return []
    own, groups = -hessian.diagonal(), list[Indices]()
    for index in (i for i in positive if len(i) <= _MANY):
        unit = np.zeros((len(index), q.n_dim))
        unit[np.arange(len(index)), index] = 1.0
        curvature = q.precision_product(unit)[np.arange(len(index)), index]
        with np.errstate(invalid="ignore"):
            lost = index[own[index] < _LEAST_OWN * curvature]
        groups += [lost] if len(lost) > _FEW else list(lost[:, None])
    return groups


def _is_better(new: Evaluation, old: Evaluation) -> bool:
    if not (new.finite.all() and old.finite.all()):
        return bool(np.isfinite(new.elbo) and new.finite.sum() > old.finite.sum())
    gain = new.elbo - old.elbo
    difference = new.logp - old.logp
    se = float(np.std(difference, ddof=1)) / np.sqrt(len(difference))
    return bool(gain > max(TOL, _N_SE_OF_GAIN * se))


# --- a secant correction of natural-gradient steps near the optimum ---
#
# A natural step of size 1 assumes that the negative Hessian of the ELBO is the Fisher information. Near the optimum of
# a non-Gaussian posterior it is not: along the scale of a variance parameter it can be five times smaller, and plain
# steps creep. The change of the natural gradient over a step measures it, and the inverse BFGS formula [1]_, on the
# last few steps, corrects the next one. Everything is in whitened coordinates, where the Fisher information is the
# identity.
#
# References
# ----------
# .. [1] J. Nocedal (1980). Updating quasi-Newton matrices with limited storage. Mathematics of Computation 35.
#    https://doi.org/10.1090/S0025-5718-1980-0572855-7


#: Step over change of gradient, at most: a flatter direction than this is not extrapolated.
MAX_STRETCH = 10.0
#: Where the Fisher information is the curvature of a Gaussian target: change of gradient over step, at most. Beyond it,
#: the pair tells of curvature far from here.
MAX_STIFFNESS = 3.0
#: Where it is not (a diagonal q ignores correlations): cosine between step and change, at least; stretch, at most.
MIN_COSINE, MAX_STRETCH_INEXACT = 1e-3, 1e4
#: Whitened length of a step, at least: the change over a shorter one may be rounding.
LEAST_STEP = 1e-6


@stored("adaptive.secant_pair")
class Pair(NamedTuple):
    """One step and the fall of the natural gradient over it, whitened, (n_params,) each."""

    step: Array
    change: Array


def natural_gradient(state: AnyGaussian, moments: Moments) -> Array:
    """Return the natural gradient in coordinates in which its squared length is twice the gap, (n_params,)."""
    return np.concatenate([moments.grad, state.add_to_diagonal(moments.curvature, -1.0).ravel() / np.sqrt(2.0)])


def moments_of(state: AnyGaussian, moments: Moments, direction: Array) -> Moments:
    """Return moments whose natural gradient is ``direction``: the inverse of `natural_gradient`."""
    n_dim = len(moments.grad)
    error = np.sqrt(2.0) * direction[n_dim:].reshape(moments.curvature.shape)
    return replace(moments, grad=direction[:n_dim], curvature=state.add_to_diagonal(error, 1.0))


def trusted(pair: Pair, q: AnyGaussian) -> bool:
    """Tell whether a pair measures a curvature that can be used."""
    product = q.inner(pair.step, pair.change)
    step_square, change_square = q.inner(pair.step, pair.step), q.inner(pair.change, pair.change)
    if step_square < LEAST_STEP**2:
        return False
    if not q.exact_metric:
        cosine = product / float(np.sqrt(step_square * change_square)) if change_square > 0.0 else 0.0
        return cosine > MIN_COSINE and product * MAX_STRETCH_INEXACT > step_square
    return product * MAX_STRETCH > step_square and change_square <= MAX_STIFFNESS * product


def correct(pairs: Sequence[Pair], gradient: Array, inner: Callable[[Array, Array], float] = np.dot) -> Array:
    """Multiply a natural gradient by the inverse-BFGS matrix of the pairs (two-loop recursion)."""
    direction = gradient.copy()
    coefficients = []
    for step, change in reversed(pairs):
        coefficient = inner(step, direction) / inner(step, change)
        direction -= coefficient * change
        coefficients.append(coefficient)
    for (step, change), coefficient in zip(pairs, reversed(coefficients), strict=True):
        direction += (coefficient - inner(change, direction) / inner(step, change)) * step
    return direction


def rescaled_gap(moments: Moments, pairs: Sequence[Pair]) -> Moments:
    """Return moments whose gap, floor and floor_sd are measured with the curvature that the pairs tell of.

    Where the Fisher information is not the curvature of the ELBO, 1/2 |natural gradient|^2 is not the gap; with the
    inverse curvature B of the pairs, 1/2 u^T B u is, and its noise follows from the replicates in the same way.
    """
    u = moments.replicates
    if u is None or not pairs:
        return moments
    gap, floor, floor_sd = gap_of(u, np.array([correct(pairs, row) for row in u]))
    return replace(moments, gap=gap, floor=floor, floor_sd=floor_sd)


# --- standard deviations that grow without end: a sign of an improper posterior ---
#
# Where log p has no curvature in some direction, natural steps double the variance there, for ever: the ELBO gains the
# logarithm of the scale each time. A proper posterior that is wide is reached in a few steps, because its curvature,
# however small, is seen; then the standard deviation stays.


#: Iterations between two looks, and looks that are kept.
SPAN, _N_LOOKS = 20, 3
#: Growth that tells: from each look to the next, over those that are kept, and since the start; the latter also for a
#: fit that found no optimum.
_PER_SPAN, _LATELY, _IN_ALL, _IN_ALL_ENDED = 2.0, 100.0, 1e6, 1e3
#: The first three where the ELBO is exact: what grows there does not grow by chance, but may grow slowly.
_EXACT = 1.1, 1.3, 1e4


@stored("adaptive.growth")
@dataclass(frozen=True)
class Growth:
    """Standard deviations of q at the start and at the last looks."""

    #: Iterations so far.
    n: int = 0
    #: At the start; shape (n_dim,), or None.
    first: Array | None = None
    #: After every twentieth iteration, the last three of them; shape (n_dim,).
    looks: tuple[Array, ...] = ()
    #: Whether the fit is one without noise.
    exact: bool = False

    def after(self, q: VariationalState) -> Self:
        """Return what is known after one more iteration, which led to ``q``."""
        n = self.n + 1
        if self.first is not None and n % SPAN:
            return replace(self, n=n)
        sd = q.sd()
        first = sd if self.first is None else self.first
        return replace(self, n=n, first=first, looks=(*self.looks, sd)[-_N_LOOKS:])

    def coordinates(self) -> Indices:
        """Return the coordinates whose standard deviations keep growing, those that grew most first."""
        grown = self.grown()
        return np.argsort(-grown)[: np.count_nonzero(grown)]

    @property
    def is_unbounded(self) -> bool:
        """Whether some standard deviation has grown by orders of magnitude, and goes on."""
        return bool(np.any(self.grown() >= self._least[2]))

    def grown(self) -> Array:
        """Return the growth of each standard deviation since the start; 0 where it does not go on."""
        if self.first is None or len(self.looks) < _N_LOOKS:
            return np.zeros(0)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            looks = np.array(self.looks)
            goes_on = (looks[1:] / looks[:-1]).min(axis=0) >= self._least[0]
            goes_on &= looks[-1] / looks[0] >= self._least[1]
            return np.where(goes_on, looks[-1] / self.first, 0.0)

    @property
    def _least(self) -> tuple[float, float, float]:
        """Growth from each look to the next, over those that are kept, and in all, that tells."""
        return _EXACT if self.exact else (_PER_SPAN, _LATELY, _IN_ALL)


@stored("adaptive.state")
@dataclass(frozen=True)
class AdaptiveState(ScheduleState):
    """What one iteration hands to the next: what every schedule does, and what follows."""

    q: AnyGaussian
    evaluation: Evaluation
    moments: Moments
    #: To be tried next on a fixed set.
    next_step_size: float = 1.0
    #: Recent steps, for the secant correction.
    pairs: tuple[Pair, ...] = ()
    #: Steps on fixed sets near the optimum that were looked at for it; `_N_LEARNED` if one showed there is no need.
    n_learned: int = 0
    #: Of standard deviations.
    growth: Growth = field(default_factory=Growth)
    #: Times that may follow in which lost scales are looked for.
    n_recoveries: int = 0


#: Whitened errors below which the fit counts as near the optimum.
NEAR_ERROR = 0.6
#: Nats, beyond one for each dimension, below which secants serve where the metric is not exact.
_TAME_NATS = 10.0


def is_near(q: AnyGaussian, moments: Moments, gap: float) -> bool:
    """Tell whether a state is near the optimum: in nats, and by the whitened errors of means and scales."""
    largest = np.max(np.abs([moments.grad, q.curvature_diagonal(moments.curvature) - 1.0]), initial=0.0)
    return bool(gap < near(q) and largest < NEAR_ERROR)


def near(q: AnyGaussian) -> float:
    """Return the nats below which a state counts as near the optimum."""
    return max(NEAR_NATS, PER_DIM * float(q.n_dim))


#: Whitened error of a mean that a converged fit may have.
_MAX_ERROR = 0.1


def is_at_rest(q: AnyGaussian, moments: Moments) -> bool:
    """Tell whether no mean and no scale is off by more than a converged fit may leave, and two standard errors."""
    of_mean = np.abs(moments.grad) - 2.0 * moments.grad_se
    of_scale = np.abs(q.curvature_diagonal(moments.curvature) - 1.0) - 2.0 * moments.curvature_se
    return bool(np.max(of_mean, initial=0.0) <= _MAX_ERROR and np.max(of_scale, initial=0.0) <= MAX_CURVATURE_ERROR)


def secants_serve(q: AnyGaussian, moments: Moments, gap: float) -> bool:
    """Tell whether a state is near enough to the optimum for secants: nearer where the metric is exact."""
    if not q.exact_metric:
        return gap < _TAME_NATS + float(q.n_dim)
    return is_near(q, moments, gap)


# --- the default step rule: no learning rate, few draws, a stop rule in nats ---
# It follows the schedule that all kinds of q share. Natural steps of size 1 are taken while the ELBO on the draws at
# hand does not fall, smaller ones where it would. What is added here is for Gaussians: near the optimum, secants
# correct the natural gradient.

#: Steps kept for the secant correction.
N_PAIRS = 12
#: A step near the optimum that leaves less than this part of the gap tells that there is nothing to correct; otherwise
#: so many of them are looked at on a fixed set before averaging begins.
_FAST_RATE, _N_LEARNED = 0.15, 6
#: Part of a corrected step, at least: one that has to be shorter tells that its secants are none.
_LEAST_CORRECTED = 0.01
#: Random streams from here on serve only to look for scales, never to move a state.
_RECOVERY_LEVEL = 6 * ASSESSMENT


class Adaptive(Schedule[AdaptiveState, AnyGaussian, Evaluation], StepRule[AnyGaussian, AdaptiveState]):
    """Second-order steps of a Gaussian that need no learning rate; the parameters are those of `Schedule`."""

    state = AdaptiveState

    # --- verbs of the loop ----------------------------------------------------------------------------------------

    def init(self, q: AnyGaussian) -> AdaptiveState:
        """Return the state before the first iteration."""
        new = self.begin(q, growth=Growth(first=q.sd()), n_recoveries=MAX_RECOVERIES)
        assert new is not None  # starts have a finite ELBO
        return new

    def step(self, state: AdaptiveState) -> AdaptiveState:
        """Take one step."""
        new = super().step(state)
        new = replace(new, growth=state.growth.after(new.q))
        ends_set = new.fresh and (state.level == 0 or self.terminate(new) not in (None, Status.UNBOUNDED))
        return self._with_scales(new) if new.n_recoveries and ends_set else new

    def terminate(self, state: AdaptiveState) -> Status | None:
        """Return why to stop, or None to go on."""
        return Status.UNBOUNDED if state.growth.is_unbounded else super().terminate(state)

    def reopen(self, state: AdaptiveState) -> AdaptiveState:
        """Return a state in which a fit that gave up may try again."""
        return replace(super().reopen(state), growth=Growth(first=state.q.sd()))

    # --- lost scales ----------------------------------------------------------------------------------------------

    def _with_scales(self, state: AdaptiveState) -> AdaptiveState:
        """Look for lost scales elsewhere, by draws to move on and others to judge by."""
        base, fresh = (self.base_draws(_RECOVERY_LEVEL + 2 * state.level + k, n) for k, n in enumerate(N_RECOVERY))
        q, best = state.q, None
        for index in lost_scales(self._target, state.q):
            best = best or self._estimator.evaluate(self._target, state.q, fresh)
            for stride in (s * sign for s in _STRIDES for sign in (1.0, -1.0)):
                moved, evaluation = self._climb(base, fresh, q, best, index, stride)
                if moved is not q:
                    q, best = moved, evaluation
                    break
        if q is state.q:
            return replace(state, n_recoveries=state.n_recoveries - 1 if state.level <= 1 else 0)
        anew = AdaptiveState(q, state.level, state.base, state.evaluation, state.moments, n_dropped=state.n_dropped)
        anew = replace(anew, growth=state.growth, n_recoveries=state.n_recoveries - 1)
        return self._redraw(anew, self._n_draws)

    def _climb(
        self, base: BaseDraws, fresh: BaseDraws, q: AnyGaussian, best: Evaluation, index: Indices, stride: float
    ) -> tuple[AnyGaussian, Evaluation]:
        """Move some scales by strides for as long as the ELBO rises on draws that the others were not fitted to."""
        origin, sd, trial = q.mean()[index], q.sd()[index], q
        for k in range(_MOST_STRIDES):
            trial = self._fitted(
                Conditioned(self._target, index, origin + (k + 1) * stride, sd), base, trial, _MOST_STEPS
            )
            evaluation = self._estimator.evaluate(self._target, trial, fresh)
            if not _is_better(evaluation, best):
                break
            q, best = trial, evaluation
        return q, best

    def _fitted(
        self, given: Conditioned, base: BaseDraws, q: AnyGaussian, n_steps: int, known: Evaluation | None = None
    ) -> AnyGaussian:
        """Return the state after a few natural steps given some coordinates."""
        evaluation = self._estimator.evaluate(given, q, base) if known is None else known
        if not (n_steps and evaluation.finite.any()):
            return q
        moments = self._estimator.moments(given, q, base, evaluation)
        found = search(
            lambda rho: self._update(q, moments, rho, True),
            lambda state: self._estimator.evaluate(given, state, base),
            lambda new: is_not_below(evaluation, new, ROUNDING * abs(evaluation.elbo)),
            elbo=evaluation.elbo,
            slope=2.0 * moments.gap,
            first=1.0,
        )
        if isinstance(found, Status):
            return q
        is_fitted = found.size == 1.0 and moments.gap < _FITTED * q.n_dim
        return self._fitted(given, base, found.q, 0 if is_fitted else n_steps - 1, found.evaluation)

    # --- how a Gaussian is measured -------------------------------------------------------------------------------

    def moments(self, q: AnyGaussian, base: BaseDraws, evaluation: Evaluation) -> Moments:
        """Return whitened gradient and curvature."""
        return self._estimator.moments(self._target, q, base, evaluation, stl=self._stl)

    def _measured(self, state: AdaptiveState) -> AdaptiveState:
        moments = self.moments(state.q, state.base, state.evaluation)
        rescaled = rescaled_gap(moments, state.pairs)
        # Where the metric is exact, secants may raise an estimate, but not talk it down.
        talked_down = state.q.exact_metric and rescaled.floor < moments.floor
        return replace(state, moments=moments if talked_down else rescaled)

    def _is_exact(self, state: AdaptiveState) -> bool:
        return state.q.exact_metric

    def _is_near(self, state: AdaptiveState, gap: float) -> bool:
        return is_near(state.q, state.moments, gap)

    def _is_at_rest(self, state: AdaptiveState) -> bool:
        return is_at_rest(state.q, state.moments)

    def _is_kinked(self, state: AdaptiveState) -> bool:
        return is_kinked(state.q, state.base, state.evaluation, state.moments)

    def _spread(self, state: AdaptiveState) -> float:
        keep = state.evaluation.finite
        # log q up to a constant: the draws are whitened normals.
        h = state.evaluation.logp[keep] + 0.5 * np.sum(state.base.z[keep] ** 2, axis=1)
        return float(np.var(h)) if len(h) else 0.0

    def _why_given_up(self, state: AdaptiveState) -> Status:
        seems_unbounded = np.any(state.growth.grown() >= _IN_ALL_ENDED)
        return Status.UNBOUNDED if seems_unbounded else super()._why_given_up(state)

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
        q = self._update(state.q, moments, rho, False)
        return None if q is None else self._pooled(state, q, rho)

    # --- steps on a fixed set -------------------------------------------------------------------------------------

    def _found(self, state: AdaptiveState) -> tuple[AdaptiveState, Step[AnyGaussian, Evaluation] | Status]:
        direction, moments = self._corrected(state)
        corrected = moments is not state.moments
        step = self._line_search(state, moments, 1.0 if corrected else state.next_step_size)
        if corrected and (isinstance(step, Status) or step.size < _LEAST_CORRECTED):
            direction = natural_gradient(state.q, state.moments)
            state = replace(state, pairs=())
            step = self._line_search(state, state.moments, 1.0)
        if isinstance(step, Status):
            return replace(state, next_step_size=1.0), step
        state = replace(state, next_step_size=min(1.0, 4.0 * step.size))
        return state, step._replace(direction=step.size * direction)

    def _line_search(
        self, state: AdaptiveState, moments: Moments, first: float
    ) -> Step[AnyGaussian, Evaluation] | Status:
        """Shorten the step until the ELBO on the current draws does not fall and no more draws are lost."""
        return search(
            lambda rho: self._update(state.q, moments, rho, True),
            lambda q: self._estimator.evaluate(self._target, q, state.base),
            lambda evaluation: self._accepts(state, evaluation),
            elbo=state.elbo,
            slope=2.0 * state.moments.gap,
            first=first,
        )

    def _left(self, state: AdaptiveState) -> AdaptiveState:
        learning = state.n_draws >= self.few_draws and state.n_learned and not self._has_learned(state)
        if learning and state.step_size == 1.0:
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
        self, state: AdaptiveState, moved: AdaptiveState, step: Step[AnyGaussian, Evaluation]
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
        return replace(new, pairs=(*new.pairs, pair)[-N_PAIRS:])

    def _has_learned(self, state: AdaptiveState) -> bool:
        return state.n_learned >= (_N_LEARNED if state.q.exact_metric else 1)
