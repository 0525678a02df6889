r"""The step rule of mixtures: from one Gaussian to as many components as pay, each within a trust region.

First one Gaussian is fitted, by the rule `adaptive`. Then modes are looked for from dispersed points; components are
placed there, and, one by one, where p has most mass that q lacks. Every mixture is solved on fixed draws, as many from
each component, where the ELBO must not fall; what gains no more than its noise on fresh draws is undone. Last, steps
are averaged over fresh sets, which tell what is left to gain.
"""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from pymc_ngvi.draws import BASE_DRAWS
from pymc_ngvi.families.mixture import MixtureState
from pymc_ngvi.mixtures.evaluation import (
    MixtureEvaluation,
    evaluate_mixture,
    mixture_moments,
    without_idle,
)
from pymc_ngvi.mixtures.fitting import Accepted, MixtureFit
from pymc_ngvi.mixtures.proposal import Proposal
from pymc_ngvi.mixtures.search import addition, modes
from pymc_ngvi.mixtures.splitting import join_overlapping, split
from pymc_ngvi.mixtures.weights import WEIGHT_UPDATES
from pymc_ngvi.status import Status
from pymc_ngvi.steps.adaptive import Adaptive
from pymc_ngvi.types import Assessment, BaseDraws, Direction, Estimator, Evaluation, TargetDensity, Update

#: Draws of each component: in the first set, at the end of a candidate's fit, and to average and to measure with.
_N_DRAWS, _ENOUGH, _MAX_DRAWS = 16, 32, 128
#: Draws of the mixture behind the ELBO at the end.
_N_ASSESSED = 1_024
#: Draws of the single Gaussian in the largest set, where it is but the beginning.
_GAUSSIAN_DRAWS = 256
#: Points around the Gaussian, and draws of the prior, from which modes are looked for, beside those around the start.
_N_AROUND, _N_PRIOR = 32, 64
#: Iterations of the single Gaussian, steps on one set of draws, idle ones among them, and averaged sets, at most.
_MAX_GAUSSIAN, _MAX_STEPS, _MAX_IDLE, _MAX_AVERAGED = 200, 40, 3, 12
#: Components of n_components="auto", at most, and candidates in a row that may fail.
_MOST, _MAX_FAILED = 30, 4
#: Nats within which components and weights move at first, at most, and the factor by which it is raised and lowered.
_RADIUS, _MAX_RADIUS, _MIN_RADIUS, _LONGER, _SHORTER = 1.0, 1e4, 1e-6, 2.0, 4.0
#: Weight below which a component is dropped: it costs as many nats.
_NEGLIGIBLE = 1e-4
#: Parts of the tolerance: what components that are dropped together may cost, and below which a set is solved; part of
#: what no q can gain that may be left.
_IDLE, _SOLVED, _UNREACHABLE = 0.5, 0.1, 0.03
#: Standard deviations, relative to those of the single Gaussian, beyond which a component has collapsed or run away.
_LEAST_SCALE, _MOST_SCALE = 1e-8, 1e6
#: Random streams of searches and of measurements: they never move a state that is measured on them.
_SEARCH_LEVEL, _MEASURE_LEVEL = 3_000_000, 1_000_000


class TrustRegion:
    """Mixtures of Gaussians: components found, added, fitted and dropped.

    Parameters
    ----------
    target : TargetDensity
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
        self._max_draws = max(max_draws or _MAX_DRAWS, self._n_draws)
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
        if state.status is not None or state.stage != "average":
            return state.status
        if state.left < self._tol_at(state):
            return Status.CONVERGED
        return Status.NOISE_LIMITED if state.n_averaged > _MAX_AVERAGED else None

    def assess(self, state: MixtureFit) -> Assessment:
        """Evaluate a state on draws that had no part in reaching it."""
        measured = self._on_fresh_draws(state.q, _MEASURE_LEVEL + state.level, self._max_draws)
        moments = mixture_moments(self._target, state.q, measured, self._estimator, stl=self._stl)
        rng = np.random.default_rng([self._seed, _MEASURE_LEVEL])
        base = np.column_stack([rng.standard_normal((_N_ASSESSED, self._target.n_dim)), rng.random(_N_ASSESSED)])
        theta = state.q.draws(base)
        logp = self._target.logp_grad(theta)[0]
        gap = max(moments.gap - moments.floor, 0.0)
        return Assessment(theta, logp, np.arange(_N_ASSESSED)[:, None], gap, moments.floor_sd)

    def conclude(self, status: Status, assessment: Assessment) -> Status:
        """Return the status in the light of what was measured at the end."""
        beyond = assessment.gap - 2.0 * assessment.gap_sd > 2.0 * self._most_tol
        return Status.NOISE_LIMITED if status is Status.CONVERGED and beyond else status

    def reopen(self, state: MixtureFit) -> MixtureFit:
        """Return a state in which a fit that ended may try again."""
        state = replace(state, status=None, n_averaged=0)
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
        if status is None and moved.n_steps < _MAX_GAUSSIAN:
            return moved
        if self._n_components == 1:
            return replace(moved, status=status or Status.NOISE_LIMITED)
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
            measured = self._on_fresh_draws(accepted.q, _MEASURE_LEVEL + state.level, self._max_draws)
            halved = split(accepted.q, measured, state.n_failed // 2)
            if halved is not None:
                return self._begin(replace(state, level=state.level + 1), halved)
        tried = list(state.tried)
        new = addition(self._target, accepted.q, rng, tried, accepted.elbo)
        if new is None:
            return self._polish(state)
        return self._begin(replace(state, tried=tuple(tried)), new)

    def _begin(self, state: MixtureFit, q: MixtureState) -> MixtureFit:
        return self._redraw(replace(state, working=q, stage="solve", radius=_RADIUS, n_each=self._n_draws))

    def _decide(self, state: MixtureFit) -> MixtureFit:
        """Keep the new mixture where it gains more than its noise; else go back to the last one."""
        old, new = state.accepted, self._accept(state, state.working)
        gain, noise = new.elbo - old.elbo, 2.0 * np.hypot(new.se, old.se)
        wanted = self._worth if self._auto else 0.0
        forced = not self._auto and old.q.n_components < new.q.n_components and gain > -noise
        if forced or gain > max(wanted, noise if self._auto else 0.0):
            return replace(state, stage="grow", accepted=new, n_failed=0, tried=(), gap=state.gap)
        return replace(state, working=old.q, stage="grow", n_failed=state.n_failed + 1)

    def _accept(self, state: MixtureFit, q: MixtureState) -> Accepted:
        measured = self._on_fresh_draws(q, _MEASURE_LEVEL + state.level, self._max_draws)
        fewer = without_idle(q, measured, _IDLE * self._worth) if self._auto else q
        if fewer.n_components < q.n_components:
            measured = self._on_fresh_draws(fewer, _MEASURE_LEVEL + state.level, self._max_draws)
        while self._auto and fewer.n_components > 1:
            joined = join_overlapping(fewer, measured)
            if joined is None:
                break
            of_joined = self._on_fresh_draws(joined, _MEASURE_LEVEL + state.level, self._max_draws)
            if of_joined.elbo < measured.elbo - _IDLE * self._worth:
                break
            fewer, measured = joined, of_joined
        return Accepted(fewer, measured.elbo, measured.elbo_se(), measured.spread())

    # --- steps on a fixed set -----------------------------------------------------------------------------------------

    def _solve(self, state: MixtureFit) -> MixtureFit:
        """Take a step of all components that does not lower the ELBO on these draws."""
        moments = self._moments(state)
        radius = state.radius
        slack = 1e-9 * abs(state.elbo) + 0.5 * min(moments.floor, self._tol)
        while radius > _MIN_RADIUS:
            q = self._propose(state.working, state.evaluation, moments, 1.0, radius)
            evaluation = evaluate_mixture(self._target, q, state.evaluation.base)
            if evaluation.n_dropped <= state.evaluation.n_dropped and evaluation.elbo >= state.elbo - slack:
                break
            radius /= _SHORTER
        else:
            return self._next_set(state)
        if reason := self._limits(q, state):
            return replace(state, status=reason)
        idle = 0 if evaluation.elbo > state.elbo + 0.02 * self._tol else state.idle + 1
        moved = replace(
            state, working=q, evaluation=evaluation, last_elbo=evaluation.elbo, gap=moments.gap, idle=idle,
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
        evaluation = evaluate_mixture(self._target, state.working, self.base_draws(level, state.n_each))
        return replace(
            state, level=level, evaluation=evaluation, last_elbo=evaluation.elbo, n_steps=0, idle=0,
            n_draws=state.n_each * state.working.n_components, n_dropped=state.n_dropped + evaluation.n_dropped,
        )  # fmt: skip

    def _limits(self, q: MixtureState, state: MixtureFit) -> Status | None:
        """Return why to give up, where a component collapses onto a point or runs away."""
        unit = state.gaussian.sd()
        ratio = q.sds / unit
        far = np.abs(q.means - state.gaussian.location) / unit
        lost = ratio.min() < _LEAST_SCALE or max(ratio.max(), far.max()) > _MOST_SCALE
        return Status.COLLAPSED if lost else None

    # --- the end ------------------------------------------------------------------------------------------------------

    def _polish(self, state: MixtureFit) -> MixtureFit:
        """Go to fresh draws of the accepted mixture, of which steps are averaged."""
        state = replace(state, working=state.accepted.q, n_pooled=_ENOUGH, n_averaged=0)
        return self._measured(replace(state, stage="average", n_each=self._max_draws // 2))

    def _average(self, state: MixtureFit) -> MixtureFit:
        """Take the step that pools this set with all before it, and measure on a fresh one."""
        moments = state.moments
        error = max(moments.gap - moments.floor, 0.0)
        rho = max(state.n_each / (state.n_pooled + state.n_each), error / (error + moments.floor))
        q = self._propose(state.working, state.evaluation, moments, rho, _RADIUS)
        n_each = min(self._max_draws, state.n_each * (2 if moments.floor > self._tol_at(state) else 1))
        n_pooled = round(state.n_each / rho)
        return self._measured(replace(state, working=q, n_pooled=n_pooled, step_size=rho, n_each=n_each))

    def _measured(self, state: MixtureFit) -> MixtureFit:
        new = self._redraw(state)
        moments = self._moments(new)
        noise = moments.floor * new.n_each / new.n_pooled  # what the draws behind the state leave
        left = max(moments.gap - moments.floor + moments.floor_sd, noise)
        gap = max(moments.gap - moments.floor, noise)
        return replace(new, moments=moments, gap=gap, left=left, n_averaged=state.n_averaged + 1)

    def _tol_at(self, state: MixtureFit) -> float:
        """Return the nats that may be left: more where no q of so many components comes near log p."""
        return float(np.clip(_UNREACHABLE * 0.5 * state.evaluation.spread(), self._tol, self._most_tol))

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _moments(self, state: MixtureFit) -> Any:
        return mixture_moments(self._target, state.working, state.evaluation, self._estimator, stl=self._stl)

    def _on_fresh_draws(self, q: MixtureState, level: int, n_draws: int) -> MixtureEvaluation:
        return evaluate_mixture(self._target, q, self.base_draws(level, n_draws))
