"""Another posterior than a Gaussian, after a Gaussian fit or in the place of one, or the reason why there is none.

In the place of one it is a variational fit as well: its ELBO is that of the joint distribution q(theta) q(x | theta) of
hyperparameters and latent variables, and each of its iterations is a Gaussian fit of the latter by natural gradients.
"""

import dataclasses
import functools
import logging
import math
import operator
import time

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.refusal import Reason, Unavailable
from pymc_ngvi.core.status import NotExactError, Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import GaussianState, VariationalState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families import DENSE, INDEPENDENT, DiagonalState, FullState
from pymc_ngvi.fitting.begun import first_state
from pymc_ngvi.fitting.modes.found import N_SEEN, not_covered
from pymc_ngvi.fitting.modes.search import ModeSearch
from pymc_ngvi.fitting.options import MOST_ITERATIONS, FitOptions
from pymc_ngvi.fitting.problem import problem_of
from pymc_ngvi.fitting.progress import FitProgress, announced
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.fitting.session import FitSession
from pymc_ngvi.fitting.threads import few_threads
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.posteriors.kinds import KINDS
from pymc_ngvi.posteriors.kinds.kind import PosteriorKind, PosteriorStart
from pymc_ngvi.posteriors.plan import Candidate, Decision, Plan
from pymc_ngvi.posteriors.search import (
    Beginning,
    First,
    Found,
    last_resorts,
    only_gaussian,
    plan_without_gaussian,
    posterior_after,
)
from pymc_ngvi.results.diagnosis.budget import SUMMARY
from pymc_ngvi.results.diagnosis.diagnose import standing_diagnosis
from pymc_ngvi.results.diagnosis.kept import Kept
from pymc_ngvi.results.fitted import Fitted

logger = logging.getLogger("pymc.ngvi")

#: Number of the random stream behind it.
_STREAM = 6_000_000
#: Dimensions up to which a Gaussian with the moments of a posterior has all correlations.
_MOST_DENSE = 2_000
#: Effective size of the hyperparameters below which a Gaussian fit of all coordinates may know more.
_FEWEST = 20.0
#: Seconds that are left in any case.
_LEAST_SECONDS = 1e-3


def check_wanted(options: FitOptions, density: ModelDensity) -> None:
    """Raise ValueError, before anything is computed, where a posterior is asked for that can't be had."""
    if options.posterior not in KINDS:
        return
    try:
        KINDS[options.posterior].possible(density)
    except Unavailable as reason:
        raise ValueError(
            f"This model has no {options.posterior} posterior: {reason}. Leave posterior out for a Gaussian."
        ) from None


@stored("exact.step")
@dataclass(frozen=True)
class PosteriorStep:
    """What comes after a Gaussian fit, or before one.

    Parameters
    ----------
    wanted : str
        "auto", or the name of a kind.
    seed : int
        Of the fit.
    max_seconds : float, optional
        Estimated seconds that the fit and what comes after it may take.
    options : FitOptions, optional
        Of a Gaussian fit that was not made, as another posterior came in the place of it.
    tried : tuple of Candidate
        What was tried before the fit, in vain, and is not to be tried again.
    """

    wanted: str
    seed: int
    max_seconds: float | None = None
    options: FitOptions | None = None
    tried: tuple[Candidate, ...] = ()

    @property
    def stream(self) -> int:
        """Seed of what it draws, apart from those of the fit."""
        return int(np.random.default_rng([_STREAM, self.seed]).integers(2**62))

    def after[A: Fitted](self, gaussian: A, make: Callable[..., A], *, progressbar: bool = True) -> A:
        """Return another posterior, or the Gaussian with the reason why not, such as an interrupt.

        Parameters
        ----------
        gaussian : NGVIApproximation
        make : callable
            The class of approximations.
        progressbar : bool, default True

        Raises
        ------
        NotExactError
            Where one was asked for and a check of it failed, or it would take more seconds than there are; the Gaussian
            fit is its ``approx``.
        """
        record = gaussian.record
        assert record is not None
        clock, before = time.perf_counter(), gaussian.density.compile_seconds
        found = self._found(gaussian, record, progressbar)
        if found.state is None:
            reason = found.why_not
            assert reason is not None
            gaussian.record = dataclasses.replace(record, plan=found.plan)
            is_interrupted = record.status is Status.INTERRUPTED or reason.code is Reason.INTERRUPTED
            if self.wanted != "auto" and not is_interrupted:
                raise NotExactError(
                    f"No {self.wanted} posterior: {reason}. The Gaussian fit is kept: `error.approx`.", gaussian
                )
            gaussian.record = dataclasses.replace(
                gaussian.record, posterior=f"Gaussian: {reason}.", reason=str(reason.code), on_request=reason.on_request
            )
            return gaussian
        return self._with(found, gaussian, make, clock, before)

    def meanwhile[A: Fitted](
        self, gaussian: A, make: Callable[..., A], *, progressbar: bool = True
    ) -> "tuple[A | None, PosteriorStep]":
        """Return an exact posterior that begins from a fit that is paused, if there is one, and the step after it."""
        record = gaussian.record
        assert record is not None
        clock, before = time.perf_counter(), gaussian.density.compile_seconds
        found = self._found(gaussian, record, progressbar)
        if found.state is not None and found.state.checks.is_exact:
            return self._with(found, gaussian, make, clock, before), self
        lasts = [c for c in found.plan.candidates if c.outcome is Decision.FAILED and KINDS[c.kind].is_last]
        return None, dataclasses.replace(self, tried=(*self.tried, *lasts))

    def _with[A: Fitted](self, found: Found, gaussian: A, make: Callable[..., A], clock: float, before: float) -> A:
        """Return the approximation that a search has led to."""
        record, state = gaussian.record, found.state
        assert record is not None
        assert state is not None
        compiling = gaussian.density.compile_seconds - before
        running = time.perf_counter() - clock - compiling
        approx = make(gaussian.density, state, random_seed=self.seed, include_transformed=gaussian.include_transformed)
        approx.take(gaussian, self, _with_pool(record, state, found.plan, compiling, running, found.also))
        return approx

    def again[A: Fitted](self, approx: A) -> A:
        """Bring it up to date after its Gaussian fit went on; keep it where there is no better one."""
        gaussian = approx.gaussian
        record = gaussian.record
        assert record is not None
        found = self._found(gaussian, record, progressbar=True)
        if found.state is None:
            logger.info(f"The posterior stays as it was: {found.why_not}.")
            return approx
        approx.set_state(cast(VariationalState, found.state))  # but for a density
        approx.take(gaussian, self, _with_pool(record, found.state, found.plan, 0.0, 0.0, found.also))
        return approx

    def further[A: Fitted](self, approx: A) -> A:
        """Make what no fit came before once more, from where it is, with other draws; keep the better one."""
        record, state = approx.record, cast(PoolState, approx._state)
        assert record is not None
        clock = time.perf_counter()
        seed = int(np.random.default_rng([self.stream, len(approx.hist)]).integers(2**62))
        try:
            new = _made(KINDS[state.kind], approx.density, state.gaussian, seed)
        except (Unavailable, KeyboardInterrupt) as reason:
            logger.info(f"The posterior stays as it was: {str(reason) or 'interrupted from the keyboard'}.")
            return approx
        if _rank(new) > _rank(state):
            approx.set_state(cast(VariationalState, _with_moments(new)))
            record = dataclasses.replace(record, elbo=Elbo(*new.elbo()))
            record = _with_pool(record, new, record.plan, 0.0, time.perf_counter() - clock)
        else:
            logger.info("The posterior stays as it was: more hyperparameters made it no better.")
        approx.record = dataclasses.replace(record, n_iterations=record.n_iterations + new.checks.n_fits)
        approx.hist = np.append(approx.hist, -new.elbo()[0])
        approx.gap_hist = np.append(approx.gap_hist, np.nan)
        return approx

    def gaussian_of[A: Fitted](self, approx: A) -> A:
        """Return the Gaussian fit that was not made, with the bits that it would have had."""
        assert self.options is not None
        approx.refuse_changed_data("The Gaussian fit can't be made any more, with other data")
        density = approx.density
        density.n_gradients = density.n_hessians = 0
        clock, options = time.perf_counter(), self.options
        with FitProgress(False, None) as progress, few_threads(density):
            problem, rule, q, options = first_state(problem_of(density, options), options, self.seed, None, None)
            session = FitSession.begin(
                problem, rule, q, options, self.seed, clock=clock, search=ModeSearch.of(problem, options, self.seed)
            )
            session.run(MOST_ITERATIONS, progress)
        outcome = session.outcome()
        make: Callable[..., A] = type(approx)
        gaussian = make(density, outcome.q, random_seed=self.seed, include_transformed=approx.include_transformed)
        gaussian._follow(outcome)
        gaussian._session = session
        return gaussian

    def _found(self, gaussian: Fitted, record: FitRecord, progressbar: bool) -> Found:
        """Return what comes of the plan."""
        if not record.status.can_be_followed:
            why = Unavailable(Reason.NOT_FOLLOWED, f"the fit ended {str(record.status)!r}")
            return Found(None, only_gaussian(why), why_not=why)
        density = gaussian.density
        before = density.n_gradients, density.n_hessians
        try:
            with few_threads(density), np.errstate(over="ignore"):  # what overflows has no weight
                q, most = cast(GaussianState, gaussian.q), self.max_seconds
                is_off = functools.partial(_is_off, gaussian)
                return posterior_after(
                    Beginning(density, q, record, self.stream, most, self.wanted, progressbar, is_off, self.tried)
                )
        except KeyboardInterrupt:
            kind = "an exact or nested" if self.wanted == "auto" else f"the {self.wanted}"
            said = f"before {kind} posterior was there; posterior='gaussian' stops at this fit"
            why = Unavailable(Reason.INTERRUPTED, f"interrupted from the keyboard {said}")
            return Found(None, only_gaussian(why), why_not=why)
        finally:
            density.n_gradients, density.n_hessians = before  # those of the fit


def _is_off(gaussian: Fitted) -> bool:
    """Tell whether a Gaussian fit is found to be unreliable, within the budget of a summary, or is under way."""
    if gaussian.density.why_in_part:
        return False
    if gaussian.record is not None and gaussian.record.status is Status.PAUSED:
        return True
    return standing_diagnosis(gaussian._posterior, Kept(), SUMMARY).verdict == "not reliable"


class NoneFirst(NamedTuple):
    """No posterior came before a Gaussian fit: the options of that, and what was tried in vain for as long as it may.

    What was tried leaves fewer seconds.
    """

    options: FitOptions
    tried: tuple[Candidate, ...] = ()


def posterior_first[A: Fitted](
    options: FitOptions,
    density: ModelDensity,
    seed: int,
    make: Callable[..., A],
    *,
    include_transformed: bool,
    progressbar: bool = True,
) -> A | NoneFirst:
    """Return the posterior that comes first in the plan, where one does.

    Parameters
    ----------
    options : FitOptions
    density : ModelDensity
    seed : int
    make : callable
        The class of approximations.
    include_transformed, progressbar : bool
    """
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
        state = _alone(kind, first, density, step.stream, progressbar)
    except Unavailable as reason:
        is_in_vain = kind.is_last and reason.code is not Reason.HOPELESS  # or else it may begin from a fit
        return NoneFirst(less, (candidate.became(Decision.FAILED, str(reason)),) if is_in_vain else ())
    if state.checks.effective_size < _FEWEST and is_auto:
        return NoneFirst(less)
    plan = first.plan.having(candidate.became(Decision.TAKEN, "" if state.checks.is_exact else "not exact"))
    if is_auto and not state.checks.is_exact:
        left = first.most_seconds - candidate.seconds
        state, plan = _by_last_resort(state, plan, density, step.stream, left, progressbar)
    approx = make(density, state, random_seed=seed, include_transformed=include_transformed)
    record = _record(density, state, seed, time.perf_counter() - clock - density.compile_seconds + before)
    approx.take(None, dataclasses.replace(step, wanted=state.kind), _with_pool(record, state, plan, 0.0, 0.0))
    approx.hist, approx.gap_hist = np.array([-record.elbo.value]), np.array([math.nan])
    return approx


def _alone(kind: PosteriorKind[Any], first: First, density: ModelDensity, seed: int, progressbar: bool) -> PoolState:
    """Return the posterior that comes before any Gaussian fit."""
    (candidate, *after), most = first.plan.candidates, first.most_seconds
    with announced(kind.title, candidate.seconds, progressbar):
        state = _made(kind, density, None, seed, is_only=len(after) == 1, may_take=functools.partial(operator.ge, most))
    return _with_moments(state)


def _by_last_resort(
    state: PoolState, plan: Plan, density: ModelDensity, seed: int, seconds: float, progressbar: bool
) -> tuple[PoolState, Plan]:
    """Return what the last resort makes of a posterior that is not exact, or else that one."""
    for kind, offer in last_resorts(density):
        if offer.seconds > seconds:
            plan = plan.having(offer.became(Decision.TOO_DEAR))
            continue
        try:
            with announced(kind.title, offer.seconds, progressbar):
                new = _made(kind, density, state.gaussian, seed, may_take=functools.partial(operator.ge, seconds))
        except Unavailable as reason:
            plan = plan.having(offer.became(Decision.FAILED, str(reason)))
            continue
        before = plan.of(state.kind)
        assert before is not None
        plan = plan.having(before.became(Decision.CAME_FIRST, "not exact"))
        return _with_moments(new), plan.having(offer.became(Decision.TAKEN))
    return state, plan


def _made(
    kind: PosteriorKind[Any],
    density: ModelDensity,
    q: GaussianState | None,
    seed: int,
    *,
    is_only: bool = True,
    may_take: Callable[[float], bool] = lambda seconds: True,
) -> PoolState:
    """Return a posterior that no fit comes before, from the Gaussian with the moments of another one if there is."""
    start = PosteriorStart(density, q, seed, [], density.n_directions is not None)
    with few_threads(density), np.errstate(over="ignore"):  # what overflows has no weight
        return kind.run(start, kind.possible(density), may_take, is_only=is_only)


def _rank(state: PoolState) -> tuple[bool, bool, float]:
    checks = state.checks
    return checks.is_exact, checks.is_reliable, checks.effective_size


def _with_moments(state: PoolState) -> PoolState:
    """Return a posterior that no fit came before with the Gaussian of its moments, which reports begin from."""
    if state.n_dim > _MOST_DENSE:
        q: GaussianState = DiagonalState.from_scale(state.mean(), state.sd())
    else:
        q = FullState(state.mean(), np.linalg.cholesky(state.cov()))
    object.__setattr__(state, "gaussian", q)
    return state


def _with_pool(
    record: FitRecord, state: PoolState, plan: Plan | None, compiling: float, running: float, also: str = ""
) -> FitRecord:
    """Return the record of a fit after which there is another posterior."""
    modes, checks = record.modes, state.checks
    if modes:
        modes = not_covered(modes, state.gaussian, state.draw(N_SEEN, np.random.default_rng(record.seed)))
    return dataclasses.replace(
        record,
        modes=modes,
        posterior=checks.sentence + also,
        reason="",
        on_request="",
        is_exact=checks.is_exact,
        is_nested=state.rest.is_nested,
        doubts=checks.failures,
        plan=plan,
        compile_seconds=record.compile_seconds + compiling,
        run_seconds=record.run_seconds + running,
    )


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
    )
