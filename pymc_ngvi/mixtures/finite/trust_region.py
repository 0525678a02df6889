r"""The step rule of mixtures: from one Gaussian to as many components as pay, each within a trust region.

First one Gaussian is fitted, by the rule `adaptive`. Then modes are looked for from dispersed points; components are
placed there, and, one by one, where p has most mass that q lacks. Every mixture is solved on fixed draws, as many from
each component, where the ELBO must not fall; what gains no more than its noise on fresh draws is undone. Last, steps
are averaged over fresh sets, which tell what is left to gain.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import (
    Array,
    Assessment,
    Estimator,
    Evaluation,
    GaussianState,
    Outer,
    StepRule,
    Target,
    Update,
)
from pymc_ngvi.families.mixture import MixtureState
from pymc_ngvi.mixtures.finite.evaluation import MixtureEvaluation, MixtureMoments, without_idle
from pymc_ngvi.mixtures.finite.search import addition, modes
from pymc_ngvi.mixtures.finite.steps import MixtureSchedule, MixtureSteps
from pymc_ngvi.steps.adaptive.certificate import is_kinked
from pymc_ngvi.steps.adaptive.rule import Adaptive
from pymc_ngvi.steps.adaptive.state import AdaptiveState
from pymc_ngvi.steps.schedule.base import MAX_LOST, Schedule

# --- what one iteration of the step rule `trust_region` hands to the next ---

Stage = Literal["gaussian", "search", "solve", "grow", "average"]


@stored("mixture.accepted")
@dataclass(frozen=True)
class Accepted:
    """The best mixture so far, and its ELBO on fresh draws with the standard error.

    Parameters
    ----------
    q : MixtureState
    elbo, se : float
    spread : float
        Variance of log p - log q under q.
    lost : float
        Part of q at which log p is not finite.
    """

    q: MixtureState
    elbo: float
    se: float
    spread: float
    lost: float


@stored("mixture.fit")
@dataclass(frozen=True)
class MixtureFit:
    """What one iteration hands to the next.

    Parameters
    ----------
    stage : {"gaussian", "search", "solve", "grow", "average"}
        What the next step does.
    start : GaussianState
        The start, from which modes are looked for.
    of_gaussian : AdaptiveState
        Of the single Gaussian.
    of_mixture : MixtureSteps or None
        Of the mixture under way: a candidate, before it is known whether it pays, or the accepted one at the end.
    gaussian : GaussianState or None
        The single Gaussian, once it is fitted.
    accepted : Accepted or None
        The best mixture so far.
    level : int
        Names the random stream of the current draws.
    n_steps, n_failed, n_collapsed : int
        Steps of the single Gaussian, candidates in a row that did not pay, and those of which a component collapsed or
        ran away.
    n_lost : int
        Draws left out in earlier parts of the fit.
    tried : tuple of ndarray
        Where components were added to the accepted mixture.
    status : Status or None
        Why to stop.
    """

    stage: Stage
    start: GaussianState
    of_gaussian: AdaptiveState
    of_mixture: MixtureSteps | None = None
    gaussian: GaussianState | None = None
    accepted: Accepted | None = None
    level: int = 0
    n_steps: int = 0
    n_failed: int = 0
    n_collapsed: int = 0
    n_lost: int = 0
    tried: tuple[Array, ...] = ()
    status: Status | None = None

    @property
    def q(self) -> MixtureState:
        """The approximation if the fit ended here: no candidate that may not pay."""
        if self.accepted is not None and self.stage != "average":
            return self.accepted.q
        return MixtureState.of([self.of_gaussian.q]) if self.of_mixture is None else self.of_mixture.q

    @property
    def elbo(self) -> float:
        """ELBO of ``q``: on the current draws, or, where a candidate is on trial, as measured when it was accepted."""
        if self.accepted is not None and self.stage != "average":
            return self.accepted.elbo
        return self._under_way.elbo

    @property
    def gap(self) -> float:
        """Estimated nats that ``q`` still lacks; NaN where a candidate is on trial."""
        return self._under_way.gap if self.stage in ("gaussian", "search", "average") else np.nan

    @property
    def n_draws(self) -> int:
        """Draws in use, of all components together."""
        of = self.of_mixture
        return self.of_gaussian.n_draws if of is None else of.n_draws * of.q.n_components

    @property
    def step_size(self) -> float:
        """The last step size."""
        return self._under_way.step_size

    @property
    def n_dropped(self) -> int:
        """Draws left out so far because log p or its gradient was not finite."""
        return self.n_lost + self._under_way.n_dropped

    @property
    def growing(self) -> NDArray[np.intp]:
        """Coordinates in which the standard deviations of the single Gaussian grow without end."""
        return self.of_gaussian.growing

    @property
    def _under_way(self) -> AdaptiveState | MixtureSteps:
        return self.of_gaussian if self.of_mixture is None else self.of_mixture


# --- the step rule of mixtures: from one Gaussian to as many components as pay, each within a trust region ---

#: Times the largest set, to compare: gradients are cheap, and what a component gains may be little.
_MANY = 4
#: Draws of the mixture behind the ELBO at the end.
_N_ASSESSED = 1_024
#: Draws of the single Gaussian in the largest set, where it is but the beginning, and of each component of others
#: behind the mixture that steps are averaged from.
_GAUSSIAN_DRAWS, _SOLVED_DRAWS = 256, 32
#: Points around the Gaussian, and draws of the prior, from which modes are looked for, beside those around the start.
_N_AROUND, _N_PRIOR = 32, 64
#: Iterations of the single Gaussian, at most.
_MAX_GAUSSIAN = 200
#: Components of n_components="auto", at most, and candidates in a row that may fail.
_MOST, _MAX_FAILED = 30, 3
#: Weight from which kinks under a component count.
_WEIGHTY = 0.1
#: Part of the tolerance that components that are dropped together may cost.
_IDLE = 0.5
#: Random streams of searches and of measurements.
_SEARCH_LEVEL, _MEASURE_LEVEL = 3_000_000, 1_000_000


class TrustRegion(StepRule[MixtureState, MixtureFit]):
    """Mixtures of Gaussians: components found, added, fitted and dropped.

    Parameters
    ----------
    target : Target
    update, estimator : callable
        Rows of the registries, applied to each component.
    n_components : int or "auto", default "auto"
    **options
        Of `Schedule`: numbers of draws are those of each component, 16 and 128 by default; ``tol`` is also what a
        component should gain.
    """

    #: Options that the rule takes, for the messages that refuse others.
    takes: ClassVar[frozenset[str]] = Schedule.takes | {"n_components"}

    def __init__(
        self,
        target: Target,
        update: Update,
        estimator: Estimator,
        *,
        n_components: int | str = "auto",
        **options: Any,
    ) -> None:
        self._auto = n_components == "auto"
        self._n_components = _MOST if n_components == "auto" else int(n_components)
        self._steps = MixtureSchedule(target, update, estimator, **options)
        if self._n_components > 1 and options.get("max_draws") is None:
            # What the Gaussian lacks by the noise of few draws, the mixture that begins from it makes good.
            options["max_draws"] = max(_GAUSSIAN_DRAWS, options.get("n_draws") or 0)
        self._gaussian = Adaptive(target, update, estimator, **options)
        self._target, self._seed, self._tolerance = target, self._steps.seed, self._steps.tolerance
        self._worth = self._tolerance.tol

    def first_evaluation(self, q: MixtureState) -> Evaluation:
        """Evaluate a start, of one component, on the first base draws."""
        return self._gaussian.first_evaluation(q.components[0])

    def init(self, q: MixtureState) -> MixtureFit:
        """Return the state before the first iteration."""
        return MixtureFit("gaussian", q.components[0], self._gaussian.init(q.components[0]))

    def step(self, state: MixtureFit) -> MixtureFit:
        """Do one thing: a step, a search, a decision."""
        return {
            "gaussian": self._fit_gaussian,
            "search": self._search,
            "solve": self._solve,
            "grow": self._grow,
            "average": self._average,
        }[state.stage](state)

    def terminate(self, state: MixtureFit) -> Status | None:
        """Return why to stop, or None to go on."""
        if state.stage == "gaussian" and self._n_components == 1:
            return self._gaussian.terminate(state.of_gaussian)
        if state.status is not None or state.stage != "average" or state.of_mixture is None:
            return state.status
        status = self._steps.terminate(state.of_mixture)
        return Status.COLLAPSED if status is Status.CONVERGED and state.n_collapsed else status

    def assess(self, state: MixtureFit) -> Assessment:
        """Evaluate a state on draws that had no part in reaching it."""
        rng = np.random.default_rng([self._seed, _MEASURE_LEVEL])
        base = np.column_stack([rng.standard_normal((_N_ASSESSED, self._target.n_dim)), rng.random(_N_ASSESSED)])
        theta = state.q.draws(base)
        logp, units = self._target.logp_grad(theta)[0], np.arange(_N_ASSESSED)[:, None]
        fresh = self._steps.base_draws(2 * _MEASURE_LEVEL + state.level)
        q, measured = self._steps.sound(state.q, fresh)
        if not np.isfinite(measured.rewards).all():
            return Assessment(theta, logp, units, np.nan, np.inf, Status.OUTSIDE_SUPPORT)
        moments = self._steps.moments(q, measured)
        gap = max(moments.gap - moments.floor, 0.0) if np.isfinite(moments.floor) else np.nan
        against = self._against(q, measured, moments)
        if against is None and gap - 2.0 * moments.floor_sd > 2.0 * self._tolerance.most(q):
            against = Status.NOISE_LIMITED
        return Assessment(theta, logp, units, gap, moments.floor_sd, against)

    def _against(self, q: MixtureState, measured: MixtureEvaluation, moments: MixtureMoments) -> Status | None:
        """Return what speaks against a fit that seems to have converged: lost draws, and kinks."""
        if measured.lost > MAX_LOST:
            return Status.OUTSIDE_SUPPORT
        kinked = [
            is_kinked(component, measured.base, part, of_part)
            for component, part, of_part, w in zip(q.components, measured.parts, moments.parts, q.weights, strict=True)
            if w >= _WEIGHTY
        ]
        return Status.NOT_SMOOTH if any(kinked) else None

    def conclude(self, status: Status, assessment: Assessment) -> Status:
        """Return the status in the light of what was measured at the end."""
        if status not in (Status.CONVERGED, Status.NOISE_LIMITED):
            return status
        return assessment.against or status

    def reopen(self, state: MixtureFit) -> MixtureFit:
        """Return a state in which a fit that ended may try again."""
        state = replace(state, status=None)
        if state.stage == "gaussian":
            return replace(state, n_steps=0, of_gaussian=self._gaussian.reopen(state.of_gaussian))
        if state.stage == "average" and state.of_mixture is not None:
            return replace(state, of_mixture=self._steps.reopen(state.of_mixture))
        return self._polish(state)

    # --- one Gaussian -------------------------------------------------------------------------------------------------

    def _fit_gaussian(self, state: MixtureFit) -> MixtureFit:
        inner = self._gaussian.step(state.of_gaussian)
        moved = replace(state, of_gaussian=inner, n_steps=state.n_steps + 1)
        if self._n_components == 1:
            return replace(moved, gaussian=inner.q)
        if self._gaussian.terminate(inner) is None and moved.n_steps < _MAX_GAUSSIAN:
            return moved
        return replace(moved, stage="search")

    # --- components ---------------------------------------------------------------------------------------------------

    def _search(self, state: MixtureFit) -> MixtureFit:
        """Keep the Gaussian, and begin a mixture at the modes, if there are more than one."""
        rng = np.random.default_rng([self._seed, _SEARCH_LEVEL])
        gaussian = state.of_gaussian.q
        accepted = self._accept(state, MixtureState.of([gaussian]))
        extra = [gaussian.draws(3.0 * rng.standard_normal((_N_AROUND, self._target.n_dim)))]
        if hasattr(self._target, "info"):
            extra.append(self._target.info.prior_draws(_N_PRIOR, int(rng.integers(2**31))))
        found, log_mass = modes(self._target, state.start, np.concatenate(extra), rng, self._n_components)
        known = replace(state, accepted=accepted, gaussian=gaussian, level=state.level + 1)
        if len(found) < 2:
            return replace(known, stage="grow")
        return self._begin(known, MixtureState.of(found, log_mass))

    def _grow(self, state: MixtureFit) -> MixtureFit:
        """Add the component that promises most to the accepted mixture, or go on to the end."""
        accepted = _accepted(state)
        full = accepted.q.n_components >= self._n_components
        # Half the spread is about what all components together could gain.
        near = self._auto and accepted.spread < self._worth
        if full or near or state.n_failed >= _MAX_FAILED:
            return self._polish(state)
        rng = np.random.default_rng([self._seed, _SEARCH_LEVEL, state.level])
        if state.n_failed % 2:  # where an addition failed, a component in two halves may serve
            measured = self._steps.evaluated(accepted.q, self._steps.base_draws(_SEARCH_LEVEL + state.level))
            halved = split(accepted.q, measured, state.n_failed // 2)
            if halved is not None:
                return self._begin(replace(state, level=state.level + 1), halved)
        tried = list(state.tried)
        new = addition(self._target, accepted.q, rng, tried, accepted.elbo)
        if new is None:
            return self._polish(state)
        return self._begin(replace(state, tried=tuple(tried)), new)

    def _begin(self, state: MixtureFit, q: MixtureState) -> MixtureFit:
        """Put a candidate on trial."""
        level, n_lost = state.level + 1, state.n_dropped
        begun = self._steps.begin(q, level, state.gaussian)
        moved = replace(state, stage="solve", level=level, of_mixture=begun, n_lost=n_lost)
        if begun is None:
            return self._failed(moved)
        return replace(moved, of_mixture=replace(begun, to_beat=_accepted(state).elbo))

    def _solve(self, state: MixtureFit) -> MixtureFit:
        """Take a step of the candidate; decide on it once it is solved."""
        inner = _under_way(state)
        if not inner.waits:
            inner = self._steps.step(inner)
            return replace(state, of_mixture=inner, level=inner.level)
        if inner.failure is None:
            return self._decide(state, inner)
        return self._failed(replace(state, n_collapsed=state.n_collapsed + (inner.failure is Status.COLLAPSED)))

    def _decide(self, state: MixtureFit, inner: MixtureSteps) -> MixtureFit:
        """Keep the new mixture where it gains more than its noise; else go back to the last one."""
        old, new = _accepted(state), self._accept(state, inner.q)
        gain, noise = new.elbo - old.elbo, 2.0 * np.hypot(new.se, old.se)
        if new.lost > max(old.lost, MAX_LOST):  # what lies outside the support counts nowhere in its ELBO
            return self._failed(state)
        grows = not self._auto and old.q.n_components < new.q.n_components
        # One that was asked for need not gain; noise, which is huge where tails are heavy, excuses no loss of its own.
        if (grows and gain > -min(noise, self._worth)) or gain > max(self._worth if self._auto else 0.0, noise):
            return replace(state, stage="grow", accepted=new, n_failed=0, tried=())
        # It may gain on its own draws, which may have been too few to tell what holds on others.
        larger = self._steps.larger(inner) if inner.elbo > old.elbo + self._worth else None
        return self._failed(state) if larger is None else replace(state, of_mixture=larger, level=larger.level)

    def _failed(self, state: MixtureFit) -> MixtureFit:
        return replace(state, stage="grow", n_failed=state.n_failed + 1)

    def _accept(self, state: MixtureFit, q: MixtureState) -> Accepted:
        """Measure a mixture on fresh draws; where components are idle or overlap, one with fewer of them."""
        level = _MEASURE_LEVEL + 2 * state.level
        fewer, measured = self._steps.sound(q, self._steps.base_draws(level, times=_MANY))
        if self._auto:
            fewer = without_idle(fewer, measured, _IDLE * self._worth)
            fewer, measured = self._steps.sound(fewer, measured.base)
        while self._auto and fewer.n_components > 1:
            joined = join_overlapping(fewer, measured)
            if joined is None:
                break
            of_joined = self._steps.evaluated(joined, measured.base)
            if not of_joined.elbo >= measured.elbo - _IDLE * self._worth:
                break
            fewer, measured = joined, of_joined
        # Those draws have chosen: others tell what it is worth.
        fewer, measured = self._steps.sound(fewer, self._steps.base_draws(level + 1, times=_MANY))
        return Accepted(fewer, measured.elbo, measured.elbo_se(), measured.spread(), measured.lost)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _polish(self, state: MixtureFit) -> MixtureFit:
        """Go to fresh draws of the accepted mixture, of which steps are averaged."""
        q, level = _accepted(state).q, state.level + 1
        n_pooled = _GAUSSIAN_DRAWS if q.n_components == 1 else _SOLVED_DRAWS
        begun = self._steps.begin(q, level, state.gaussian, self._steps.draws_at_end)
        moved = replace(state, stage="average", level=level, n_lost=state.n_dropped)
        if begun is None:
            return replace(moved, status=Status.OUTSIDE_SUPPORT)
        return replace(moved, of_mixture=replace(begun, is_candidate=False, n_pooled=n_pooled))

    def _average(self, state: MixtureFit) -> MixtureFit:
        inner = self._steps.step(_under_way(state))
        return replace(state, of_mixture=inner, level=inner.level)


def _accepted(state: MixtureFit) -> Accepted:
    if state.accepted is None:
        raise RuntimeError("No mixture is accepted before the single Gaussian is.")
    return state.accepted


def _under_way(state: MixtureFit) -> MixtureSteps:
    if state.of_mixture is None:
        raise RuntimeError("No mixture is under way before the single Gaussian is fitted.")
    return state.of_mixture


# --- components in two halves, where one misses the shape of log p, and two in one, where they overlap ---

#: Distance of the halves from where the whole was, in its own standard deviations: mean and covariance of the two
#: together are those of the whole.
_APART = 0.6
#: Mean responsibility of one component for the draws of another, from which the two may be one.
_OVERLAP = 0.1


def split(q: MixtureState, evaluation: MixtureEvaluation, rank: int = 0) -> MixtureState | None:
    """Return a mixture with one component in two halves, along the direction in which it errs most.

    Parameters
    ----------
    q : MixtureState
    evaluation : MixtureEvaluation
        At its draws.
    rank : int, default 0
        0 for the component that errs most: by its weight times the variance of log p - log q; 1 for the next, ...

    Returns
    -------
    MixtureState or None
        None where there is no such component.
    """
    spread = q.weights * np.array(
        [np.var(r[np.isfinite(r)]) if np.isfinite(r).any() else 0.0 for r in evaluation.ratios]
    )
    if rank >= q.n_components or not spread.any():
        return None
    c = int(np.argsort(-spread)[rank])
    whole, ratios = q.components[c], evaluation.ratios[c]
    direction = _direction(evaluation.base.z, ratios, _together(whole))
    tighter = 1.0 / (1.0 - _APART**2) - 1.0
    matrix = tighter * whole.outer_mean(Outer(direction[None], direction[None], 0.0))
    scaled = whole.precision_scaled_by(whole.add_to_diagonal(matrix, 1.0), np.zeros(q.n_dim))
    if scaled is None:
        return None
    step = whole.unwhiten(_APART * direction)
    halves = [replace(scaled[0], location=whole.location + sign * step) for sign in (1.0, -1.0)]
    log_half = q.log_weights[c] - np.log(2.0)
    log_weights = np.append(q.log_weights, log_half)
    log_weights[c] = log_half
    return MixtureState.of([*q.with_component(c, halves[0]).components, halves[1]], log_weights)


def join_overlapping(q: MixtureState, evaluation: MixtureEvaluation) -> MixtureState | None:
    """Return a mixture in which the two components that overlap most are one, of the same mean and covariance.

    None where no component has part in the draws of another, or where the two would make a singular one.
    """
    shares = np.array([q.responsibilities(part.theta).mean(axis=0) for part in evaluation.parts])
    np.fill_diagonal(shares, 0.0)
    c, k = np.unravel_index(np.argmax(shares), shares.shape)
    if shares[c, k] < _OVERLAP:
        return None
    both = np.logaddexp(q.log_weights[c], q.log_weights[k])
    try:
        one = q.components[k].merged(q.components[c], float(np.exp(q.log_weights[c] - both)))
    except np.linalg.LinAlgError:
        return None
    log_weights = q.log_weights.copy()
    log_weights[k] = both
    joined = MixtureState(log_weights, q.with_component(int(k), one).components)
    return joined.without(np.arange(q.n_components) == c)


def _together(state: GaussianState) -> NDArray[np.intp]:
    """Return the coordinates whose whitened curvature a state stores whole: in these a direction may be any."""
    if not state.exact_metric:
        return np.empty(0, dtype=np.intp)
    return np.arange(state.n_dim) if state.globals_ is None else state.globals_


def _direction(z: Array, ratios: Array, together: NDArray[np.intp]) -> Array:
    """Return the whitened direction in which log p - log q is farthest from its mean, (n_dim,): an axis, or of some."""
    keep = np.isfinite(ratios)
    error = (ratios[keep] - ratios[keep].mean()) ** 2
    weighted = z[keep] * (error / max(error.sum(), 1e-300))[:, None]
    direction = np.zeros(z.shape[1])
    if len(together):
        direction[together] = np.linalg.eigh(weighted[:, together].T @ z[np.ix_(keep, together)])[1][:, -1]
    else:
        direction[np.argmax(np.sum(weighted * z[keep], axis=0))] = 1.0
    return direction
