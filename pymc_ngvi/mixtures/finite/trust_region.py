r"""The step rule of mixtures: from one Gaussian to as many components as pay, each within a trust region.

First one Gaussian is fitted, by the rule `adaptive`. Then modes are looked for from dispersed points; components are
placed there, and, one by one, where p has most mass that q lacks. Every mixture is solved on fixed draws, as many from
each component, where the ELBO must not fall; what gains no more than its noise on fresh draws is undone. Last, steps
are averaged over fresh sets, which tell what is left to gain.
"""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from pymc_ngvi.core.draws import BASE_DRAWS
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.types import Assessment, BaseDraws, Direction, Estimator, Evaluation, Target, Update
from pymc_ngvi.families.mixture import MixtureState
from pymc_ngvi.mixtures.finite.evaluation import (
    MixtureEvaluation,
    evaluate_mixture,
    mixture_moments,
    without_idle,
)
from pymc_ngvi.mixtures.finite.proposal import Proposal
from pymc_ngvi.mixtures.finite.search import addition, modes
from pymc_ngvi.mixtures.finite.splitting import join_overlapping, split
from pymc_ngvi.mixtures.finite.state import Accepted, MixtureFit
from pymc_ngvi.mixtures.finite.weights import WEIGHT_UPDATES
from pymc_ngvi.steps.adaptive.certificate import MAX_LOST, is_kinked
from pymc_ngvi.steps.adaptive.rule import Adaptive

#: Draws of each component: in the first set, at the end of a candidate's fit, and to average and to measure with.
_N_DRAWS, _ENOUGH, _MAX_DRAWS = 16, 32, 128
#: Times the largest set, to compare: gradients are cheap, and what a component gains may be little.
_MANY = 4
#: Draws of the mixture behind the ELBO at the end.
_N_ASSESSED = 1_024
#: Draws of the single Gaussian in the largest set, where it is but the beginning.
_GAUSSIAN_DRAWS = 256
#: Points around the Gaussian, and draws of the prior, from which modes are looked for, beside those around the start.
_N_AROUND, _N_PRIOR = 32, 64
#: Iterations of the single Gaussian, steps on one set of draws, idle ones among them, and averaged sets, at most.
_MAX_GAUSSIAN, _MAX_STEPS, _MAX_IDLE, _MAX_AVERAGED = 200, 40, 3, 12
#: Averaged steps that fresh draws may refuse.
_MAX_REFUSED = 2
#: Components of n_components="auto", at most, and candidates in a row that may fail.
_MOST, _MAX_FAILED = 30, 3
#: Nats within which components and weights move at first, at most, and the factor by which it is raised and lowered.
_RADIUS, _MAX_RADIUS, _MIN_RADIUS, _LONGER, _SHORTER = 1.0, 1e4, 1e-6, 2.0, 4.0
#: Weight below which a component is dropped: it costs as many nats.
_NEGLIGIBLE = 1e-4
#: Weight from which kinks under a component count.
_WEIGHTY = 0.1
#: Parts of the tolerance: what components that are dropped together may cost, and below which a set is solved; part of
#: what no q can gain that may be left.
_IDLE, _SOLVED, _UNREACHABLE = 0.5, 0.1, 0.03
#: Standard deviations, relative to those of the single Gaussian, beyond which a component has collapsed or run away.
_LEAST_SCALE, _MOST_SCALE = 1e-8, 1e6
#: Random streams of searches and of measurements.
_SEARCH_LEVEL, _MEASURE_LEVEL = 3_000_000, 1_000_000


class TrustRegion:
    """Mixtures of Gaussians: components found, added, fitted and dropped.

    Parameters
    ----------
    target : Target
    update, estimator : callable
        Rows of the registries, applied to each component.
    seed : int
    tol : float, default 0.05
        Nats that may be left to gain in 100 dimensions, and that a component should gain.
    n_draws, max_draws : int, optional
        Draws of each component in the first and in the largest set: 16 and 128, powers of 2 where quasi-random.
    base_draws : {"sobol", "antithetic", "plain"}
    stl : bool
    n_components : int or "auto", default "auto"
    weight_update : {"natural", "tan"}, default "natural"
    direction : callable, optional
        Not used.
    """

    #: Options that the rule takes, for the messages that refuse others.
    takes: ClassVar[frozenset[str]] = frozenset({"n_draws", "max_draws", "base_draws", "n_components", "weight_update"})

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
        n_components: int | str = "auto",
        weight_update: str = "natural",
        direction: Direction | None = None,
    ) -> None:
        self._target, self._estimator, self._stl = target, estimator, stl
        self._draw, self._seed = BASE_DRAWS[base_draws], seed
        self._propose = Proposal(update, WEIGHT_UPDATES[weight_update])
        self._worth = tol
        self._tol = tol * max(target.n_dim / 100.0, 0.1)
        self._most_tol = tol * max(target.n_dim / 100.0, 1.0)
        self._n_draws = n_draws or min(_N_DRAWS, max_draws or _N_DRAWS)
        self._max_draws = self._n_draws
        while 2 * self._max_draws <= max(max_draws or _MAX_DRAWS, self._n_draws):
            self._max_draws *= 2
        self._auto = n_components == "auto"
        self._n_components = _MOST if n_components == "auto" else int(n_components)
        # What the Gaussian lacks by the noise of few draws, the mixture that begins from it makes good.
        most = max_draws or (None if self._n_components == 1 else max(_GAUSSIAN_DRAWS, self._n_draws))
        sizes: dict[str, Any] = {"n_draws": n_draws, "max_draws": most, "base_draws": base_draws}
        self._gaussian = Adaptive(target, update, estimator, seed=seed, tol=tol, stl=stl, **sizes)

    def base_draws(self, level: int, n_draws: int) -> BaseDraws:
        """Return the base draws of one level: a function of the seed and the level."""
        return self._draw(n_draws, self._target.n_dim, np.random.default_rng([self._seed, level, 7]))

    def first_evaluation(self, q: MixtureState) -> Evaluation:
        """Evaluate a start, of one component, on the first base draws."""
        return self._gaussian.first_evaluation(q.components[0])

    def init(self, q: MixtureState) -> MixtureFit:
        """Return the state before the first iteration."""
        inner = self._gaussian.init(q.components[0])
        return MixtureFit(q, "gaussian", start=q.components[0], inner=inner, gap=inner.gap, last_elbo=inner.elbo)

    def step(self, state: MixtureFit) -> MixtureFit:
        """Do one thing: a step, a search, a decision."""
        return {
            "gaussian": self._fit_gaussian,
            "search": self._search,
            "solve": self._solve,
            "decide": self._decide,
            "grow": self._grow,
            "average": self._average,
        }[state.stage](state)

    def terminate(self, state: MixtureFit) -> Status | None:
        """Return why to stop, or None to go on."""
        if state.stage == "gaussian" and self._n_components == 1:
            return self._gaussian.terminate(state.inner)
        if state.status is not None or state.stage != "average":
            return state.status
        if state.left < self._tol_at(state):
            return Status.COLLAPSED if state.n_collapsed else Status.CONVERGED
        ended = state.n_averaged > _MAX_AVERAGED or state.n_refused >= _MAX_REFUSED
        return Status.NOISE_LIMITED if ended else None

    def assess(self, state: MixtureFit) -> Assessment:
        """Evaluate a state on draws that had no part in reaching it."""
        rng = np.random.default_rng([self._seed, _MEASURE_LEVEL])
        base = np.column_stack([rng.standard_normal((_N_ASSESSED, self._target.n_dim)), rng.random(_N_ASSESSED)])
        theta = state.q.draws(base)
        logp, units = self._target.logp_grad(theta)[0], np.arange(_N_ASSESSED)[:, None]
        q, measured = self._sound(state.q, self._fresh(2 * _MEASURE_LEVEL + state.level))
        if not np.isfinite(measured.rewards).all():
            return Assessment(theta, logp, units, np.nan, np.inf, Status.OUTSIDE_SUPPORT)
        moments = mixture_moments(self._target, q, measured, self._estimator, stl=self._stl)
        gap = max(moments.gap - moments.floor, 0.0) if np.isfinite(moments.floor) else np.nan
        return Assessment(theta, logp, units, gap, moments.floor_sd, self._against(q, measured, moments))

    def _against(self, q: MixtureState, measured: MixtureEvaluation, moments: Any) -> Status | None:
        """Return what speaks against a fit that seems to have converged: lost draws, and kinks."""
        if measured.lost() > MAX_LOST:
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
        beyond = assessment.gap - 2.0 * assessment.gap_sd > 2.0 * self._most_tol
        return assessment.against or (Status.NOISE_LIMITED if beyond else status)

    def reopen(self, state: MixtureFit) -> MixtureFit:
        """Return a state in which a fit that ended may try again."""
        state = replace(state, status=None, n_averaged=0, n_refused=0, n_steps=0)
        if state.inner is not None:
            return replace(state, inner=self._gaussian.reopen(state.inner))
        return state if state.stage == "average" else self._polish(state)

    # --- one Gaussian -------------------------------------------------------------------------------------------------

    def _fit_gaussian(self, state: MixtureFit) -> MixtureFit:
        inner = self._gaussian.step(state.inner)
        status = self._gaussian.terminate(inner)
        q = MixtureState.of([inner.q])
        moved = replace(
            state, working=q, inner=inner, gap=inner.gap, last_elbo=inner.elbo, n_dropped=inner.n_dropped,
            step_size=inner.step_size, n_draws=inner.n_draws, n_steps=state.n_steps + 1,
        )  # fmt: skip
        if self._n_components == 1:
            return replace(moved, gaussian=inner.q)
        if status is None and moved.n_steps < _MAX_GAUSSIAN:
            return moved
        return replace(moved, stage="search", inner=None)

    # --- components ---------------------------------------------------------------------------------------------------

    def _search(self, state: MixtureFit) -> MixtureFit:
        """Keep the Gaussian, and begin a mixture at the modes, if there are more than one."""
        rng = np.random.default_rng([self._seed, _SEARCH_LEVEL])
        accepted = self._accept(state, state.working)
        gaussian = state.working.components[0]
        extra = [gaussian.draws(3.0 * rng.standard_normal((_N_AROUND, self._target.n_dim)))]
        if hasattr(self._target, "prior_draws"):
            extra.append(self._target.prior_draws(_N_PRIOR, int(rng.integers(2**31))))
        found, log_mass = modes(self._target, state.start, np.concatenate(extra), rng, self._n_components)
        known = replace(state, accepted=accepted, gaussian=gaussian, level=state.level + 1, n_steps=0)
        if len(found) < 2:
            return replace(known, stage="grow")
        return self._begin(known, MixtureState.of(found, log_mass))

    def _grow(self, state: MixtureFit) -> MixtureFit:
        """Add the component that promises most to the accepted mixture, or go on to the end."""
        accepted = state.accepted
        full = accepted.q.n_components >= self._n_components
        # Half the spread is about what all components together could gain.
        near = self._auto and accepted.spread < self._worth
        if full or near or state.n_failed >= _MAX_FAILED:
            return self._polish(state)
        rng = np.random.default_rng([self._seed, _SEARCH_LEVEL, state.level])
        if state.n_failed % 2:  # where an addition failed, a component in two halves may serve
            measured = evaluate_mixture(
                self._target, accepted.q, self._fresh(_SEARCH_LEVEL + state.level), self._estimator
            )
            halved = split(accepted.q, measured, state.n_failed // 2)
            if halved is not None:
                return self._begin(replace(state, level=state.level + 1), halved)
        tried = list(state.tried)
        new = addition(self._target, accepted.q, rng, tried, accepted.elbo)
        if new is None:
            return self._polish(state)
        return self._begin(replace(state, tried=tuple(tried)), new)

    def _begin(self, state: MixtureFit, q: MixtureState) -> MixtureFit:
        return self._redraw(replace(state, working=q, stage="solve", radius=_RADIUS, n_each=self._n_draws, gap=np.nan))

    def _decide(self, state: MixtureFit) -> MixtureFit:
        """Keep the new mixture where it gains more than its noise; else go back to the last one."""
        old, new = state.accepted, self._accept(state, state.working)
        gain, noise = new.elbo - old.elbo, 2.0 * np.hypot(new.se, old.se)
        if new.lost > max(old.lost, MAX_LOST):  # what lies outside the support counts nowhere in its ELBO
            return self._failed(state)
        grows = not self._auto and old.q.n_components < new.q.n_components
        # One that was asked for need not gain; noise, which is huge where tails are heavy, excuses no loss of its own.
        if (grows and gain > -min(noise, self._worth)) or gain > max(self._worth if self._auto else 0.0, noise):
            return replace(state, stage="grow", accepted=new, n_failed=0, tried=())
        if state.last_elbo > old.elbo + self._worth and state.n_each < self._max_draws:
            # It gains on its own draws, which may have been too few to tell what holds on others.
            return self._redraw(replace(state, stage="solve", n_each=2 * state.n_each))
        return self._failed(state)

    def _failed(self, state: MixtureFit) -> MixtureFit:
        return replace(state, working=state.accepted.q, stage="grow", n_failed=state.n_failed + 1)

    def _accept(self, state: MixtureFit, q: MixtureState) -> Accepted:
        """Measure a mixture on fresh draws; where components are idle or overlap, one with fewer of them."""
        level = _MEASURE_LEVEL + 2 * state.level
        fewer, measured = self._sound(q, self._fresh(level, _MANY))
        if self._auto:
            fewer = without_idle(fewer, measured, _IDLE * self._worth)
            fewer, measured = self._sound(fewer, measured.base)
        while self._auto and fewer.n_components > 1:
            joined = join_overlapping(fewer, measured)
            if joined is None:
                break
            of_joined = evaluate_mixture(self._target, joined, measured.base, self._estimator)
            if not of_joined.elbo >= measured.elbo - _IDLE * self._worth:
                break
            fewer, measured = joined, of_joined
        # Those draws have chosen: others tell what it is worth.
        fewer, measured = self._sound(fewer, self._fresh(level + 1, _MANY))
        return Accepted(fewer, measured.elbo, measured.elbo_se(), measured.spread(), measured.lost())

    def _sound(self, q: MixtureState, base: BaseDraws) -> tuple[MixtureState, MixtureEvaluation]:
        """Evaluate a mixture, without components of which no draw has a finite log density, if others have."""
        evaluation = evaluate_mixture(self._target, q, base, self._estimator)
        lost = ~np.isfinite(evaluation.rewards)
        if not lost.any() or lost.all():
            return q, evaluation
        return self._sound(q.without(lost), base)

    # --- steps on a fixed set -----------------------------------------------------------------------------------------

    def _solve(self, state: MixtureFit) -> MixtureFit:
        """Take a step of all components that does not lower the ELBO on these draws."""
        moments = self._moments(state)
        radius = state.radius
        slack = 1e-9 * abs(state.elbo) + 0.5 * min(moments.floor, self._tol)
        while radius > _MIN_RADIUS:
            q = self._propose(state.working, state.evaluation, moments, 1.0, radius)
            evaluation = evaluate_mixture(self._target, q, state.evaluation.base, self._estimator)
            if evaluation.n_dropped <= state.evaluation.n_dropped and evaluation.elbo >= state.elbo - slack:
                break
            radius /= _SHORTER
        else:
            return self._next_set(state)
        if self._is_lost(q, state):
            return self._failed(replace(state, n_collapsed=state.n_collapsed + 1))
        idle = 0 if evaluation.elbo > state.elbo + 0.02 * self._tol else state.idle + 1
        moved = replace(
            state, working=q, evaluation=evaluation, last_elbo=evaluation.elbo, idle=idle,
            radius=min(radius * _LONGER, _MAX_RADIUS), n_steps=state.n_steps + 1, step_size=1.0,
        )  # fmt: skip
        solved = moments.gap <= max(moments.floor, _SOLVED * self._tol)
        return self._next_set(moved) if solved or idle >= _MAX_IDLE or moved.n_steps >= _MAX_STEPS else moved

    def _next_set(self, state: MixtureFit) -> MixtureFit:
        """Drop what has no weight; go to a larger set, or to the decision."""
        drop = state.working.weights < _NEGLIGIBLE
        q = state.working.without(drop) if drop.any() else state.working
        if state.n_each >= min(_ENOUGH, self._max_draws):
            return replace(state, working=q, stage="decide")
        return self._redraw(replace(state, working=q, n_each=2 * state.n_each))

    def _redraw(self, state: MixtureFit) -> MixtureFit:
        level = state.level + 1
        q, evaluation = self._sound(state.working, self.base_draws(level, state.n_each))
        drawn = replace(
            state, working=q, level=level, evaluation=evaluation, last_elbo=evaluation.elbo, n_steps=0, idle=0,
            n_draws=state.n_each * q.n_components, n_dropped=state.n_dropped + evaluation.n_dropped,
        )  # fmt: skip
        if np.isfinite(evaluation.rewards).all():
            return drawn
        # No draw of any component is finite: nothing can be said of this mixture.
        return replace(drawn, status=Status.OUTSIDE_SUPPORT) if state.stage == "average" else self._failed(drawn)

    def _is_lost(self, q: MixtureState, state: MixtureFit) -> bool:
        """Tell whether a component has collapsed onto a point or run away."""
        unit = state.gaussian.sd()
        ratio = q.sds / unit
        far = np.abs(q.means - state.gaussian.location) / unit
        return bool(ratio.min() < _LEAST_SCALE or max(ratio.max(), far.max()) > _MOST_SCALE)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _polish(self, state: MixtureFit) -> MixtureFit:
        """Go to fresh draws of the accepted mixture, of which steps are averaged."""
        q = state.accepted.q
        state = replace(state, working=q, n_pooled=_GAUSSIAN_DRAWS if q.n_components == 1 else _ENOUGH, n_averaged=0)
        n_each = max(self._max_draws // 2, self._n_draws)
        return self._measured(self._redraw(replace(state, stage="average", n_each=n_each)))

    def _average(self, state: MixtureFit) -> MixtureFit:
        """Take the step that pools this set with all before it, unless fresh draws say that it does harm."""
        moments = state.moments
        error = max(moments.gap - moments.floor, 0.0)
        rho = max(state.n_each / (state.n_pooled + state.n_each), error / (error + moments.floor))
        q = self._propose(state.working, state.evaluation, moments, rho, _RADIUS)
        larger = moments.floor > self._tol_at(state) and 2 * state.n_each <= self._max_draws
        n_each = state.n_each * (2 if larger else 1)
        moved = self._redraw(replace(state, working=q, step_size=rho, n_each=n_each))
        before = evaluate_mixture(self._target, state.working, moved.evaluation.base, self._estimator)
        if moved.status is None and moved.evaluation.elbo >= before.elbo - self._most_tol:
            return self._measured(replace(moved, n_pooled=round(state.n_each / rho)))
        kept = replace(state, n_each=n_each, level=moved.level, n_refused=state.n_refused + 1)
        return self._measured(replace(kept, evaluation=before, last_elbo=before.elbo))

    def _measured(self, state: MixtureFit) -> MixtureFit:
        if state.status is not None:
            return state
        moments = self._moments(state)
        noise = moments.floor * state.n_each / state.n_pooled  # what the draws behind the state leave
        left = max(moments.gap - moments.floor + moments.floor_sd, noise) if np.isfinite(noise) else np.inf
        gap = max(moments.gap - moments.floor, noise)
        return replace(state, moments=moments, gap=gap, left=left, n_averaged=state.n_averaged + 1)

    def _tol_at(self, state: MixtureFit) -> float:
        """Return the nats that may be left: more where no q of so many components comes near log p."""
        return float(np.clip(_UNREACHABLE * 0.5 * state.evaluation.spread(), self._tol, self._most_tol))

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _moments(self, state: MixtureFit) -> Any:
        return mixture_moments(self._target, state.working, state.evaluation, self._estimator, stl=self._stl)

    def _fresh(self, level: int, times: int = 1) -> BaseDraws:
        return self.base_draws(level, times * self._max_draws)
