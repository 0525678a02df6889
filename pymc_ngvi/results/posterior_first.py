"""The posterior that comes before any Gaussian fit, in the place of one."""

import dataclasses
import math
import time

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.prices import Work
from pymc_ngvi.core.refusal import Reason, Unavailable
from pymc_ngvi.core.status import Status
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families import DENSE, INDEPENDENT, FullState
from pymc_ngvi.fitting.errors import SoFar
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.progress import announced
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.posteriors.kinds import KINDS
from pymc_ngvi.posteriors.kinds.kind import PosteriorKind
from pymc_ngvi.posteriors.plan import GAUSSIAN, Candidate, Decision, Plan
from pymc_ngvi.posteriors.search import (
    First,
    last_resorts,
    plan_without_gaussian,
    seconds_after_others,
    trying,
)
from pymc_ngvi.results.fitted import Fitted
from pymc_ngvi.results.posterior_step import PosteriorStep, made_from, with_moments, with_pool

#: Effective size of the hyperparameters below which a Gaussian fit of all coordinates may know more.
_FEWEST = 20.0
#: Seconds that are left in any case.
_LEAST_SECONDS = 1e-3


class NoneFirst(NamedTuple):
    """A Gaussian fit is to be made: its options, the seconds that it may take, and what was tried before it.

    ``state`` is the posterior that came of that, which is not exact; ``errors`` has the exceptions that were not
    raised, as a Gaussian may come of it all the same.
    """

    options: FitOptions
    tried: tuple[Candidate, ...] = ()
    most_seconds: float = math.inf
    state: PoolState | None = None
    errors: tuple[BaseException, ...] = ()


def posterior_first[A: Fitted](
    options: FitOptions,
    density: ModelDensity,
    seed: int,
    make: Callable[..., A],
    so_far: SoFar[A],
    *,
    include_transformed: bool,
    progressbar: bool = True,
) -> A | NoneFirst:
    """Return the posterior that comes first in the plan, where one does."""
    first = plan_without_gaussian(options, density)
    if first is None:
        return NoneFirst(options)
    clock, before = time.perf_counter(), density.compile_seconds
    candidate, kind = first.plan.candidates[0], KINDS[first.plan.candidates[0].kind]
    step = PosteriorStep(kind.name, seed, options.max_seconds, options)
    is_auto, less = options.posterior == "auto", options
    if options.max_seconds is not None:
        less = dataclasses.replace(options, max_seconds=max(options.max_seconds - candidate.seconds, _LEAST_SECONDS))
    try:
        with trying(kind, options.posterior):
            state = _alone(kind, first, density, step.stream, progressbar)
    except Unavailable as reason:
        failed = (candidate.became(Decision.FAILED, str(reason)),)
        if reason.code is Reason.EXCEPTION:
            return NoneFirst(less, failed, errors=(reason.__cause__ or reason,))
        is_in_vain = kind.is_last and reason.code is not Reason.HOPELESS  # or else it may begin from a fit
        return NoneFirst(less, failed, seconds_after_others(density)) if is_in_vain else NoneFirst(less)
    if state.checks.effective_size < _FEWEST and is_auto:
        return NoneFirst(less)
    plan = first.plan.having(candidate.became(Decision.TAKEN, "" if state.checks.is_exact else "not exact"))
    left = first.most_seconds - candidate.seconds

    def approx_of(state: PoolState, plan: Plan) -> A:
        approx = make(density, state, random_seed=seed, include_transformed=include_transformed)
        record = _record(density, state, seed, time.perf_counter() - clock - density.compile_seconds + before)
        approx.take(None, dataclasses.replace(step, wanted=state.kind), with_pool(record, state, plan, 0.0, 0.0))
        approx.hist, approx.gap_hist = np.array([-record.elbo.value]), np.array([math.nan])
        return approx

    def tell(plan: Plan) -> None:
        """Say what there is, while what the plan has left is tried."""
        plan = plan.interrupted()
        so_far.is_now(lambda: (approx_of(state, plan), plan.undone), will_do=True)

    tell(plan)
    if is_auto and not state.checks.is_exact and (follows := plan.not_needed):
        of_gaussian = next(c.seconds for c in plan.candidates if c.kind == GAUSSIAN)
        if any(of_gaussian + c.seconds <= left for c in follows):
            return NoneFirst(less, (candidate.became(Decision.CAME_FIRST, "not exact"),), left, state=state)
        for c in follows:
            plan = plan.having(c.became(Decision.TOO_DEAR))
    if is_auto and not state.checks.is_reliable:
        return approx_of(*_by_last_resort(state, plan, density, step.stream, left, progressbar, tell))
    return approx_of(state, plan)


def _alone(kind: PosteriorKind[Any], first: First, density: ModelDensity, seed: int, progressbar: bool) -> PoolState:
    """Return the posterior that comes before any Gaussian fit."""
    (candidate, *after), most = first.plan.candidates, first.most_seconds
    with announced(kind.title, candidate.seconds, progressbar):
        state = made_from(kind, density, None, seed, is_only=len(after) == 1, work=Work(candidate.seconds, most))
    return with_moments(state)


def _by_last_resort(
    state: PoolState, plan: Plan, density: ModelDensity, seed: int, seconds: float, progressbar: bool,
    tell: Callable[[Plan], None],
) -> tuple[PoolState, Plan]:  # fmt: skip
    """Return what the last resort makes of a posterior that can't be relied on, or else that one."""
    for kind, offer in last_resorts(density):
        if offer.seconds > seconds:
            plan = plan.having(offer.became(Decision.TOO_DEAR))
            continue
        tell(plan.having(offer))
        try:
            with announced(kind.title, offer.seconds, progressbar), trying(kind, "auto"):
                work = Work(offer.seconds, seconds)
                new = with_moments(made_from(kind, density, state.gaussian, seed, work=work))
        except Unavailable as reason:
            plan = plan.having(offer.became(Decision.FAILED, str(reason)))
            continue
        before = plan.of(state.kind)
        assert before is not None
        plan = plan.having(before.became(Decision.CAME_FIRST, "not exact"))
        return new, plan.having(offer.became(Decision.TAKEN))
    return state, plan


def _record(density: ModelDensity, state: PoolState, seed: int, seconds: float) -> FitRecord:
    """Return what there is to say of a posterior that no fit came before."""
    return FitRecord(
        status=Status.CONVERGED,
        elbo=Elbo(*state.elbo()),
        gap=math.nan,
        n_iterations=state.checks.n_fits,
        n_gradients=density.n_gradients,
        n_hessians=density.n_hessians,
        n_dropped=0,
        compile_seconds=density.compile_seconds,
        run_seconds=max(seconds, 0.0),
        family=DENSE if isinstance(state.gaussian, FullState) else INDEPENDENT,
        update="natural",
        estimator="quadrature",
        step=state.kind,
        backend=density.backend_in_use,
        family_reason=f"it has the moments of the {state.kind} posterior",
        seed=seed,
        summed_out=density.summed_out_names,
    )
