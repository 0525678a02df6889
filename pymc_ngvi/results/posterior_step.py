"""Another posterior than a Gaussian, after a Gaussian fit or in the place of one, or the reason why there is none.

In the place of one it is a variational fit as well: its ELBO is that of the joint distribution q(theta) q(x | theta) of
hyperparameters and latent variables, and each of its iterations is a Gaussian fit of the latter by natural gradients.
"""

import dataclasses
import functools
import logging
import time

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from rich.theme import Theme

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.prices import Work
from pymc_ngvi.core.refusal import Reason, Unavailable
from pymc_ngvi.core.status import NotExactError, Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import GaussianState, VariationalState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families import DiagonalState, FullState
from pymc_ngvi.fitting.begun import first_state
from pymc_ngvi.fitting.errors import SoFar
from pymc_ngvi.fitting.modes.found import left_out, not_covered
from pymc_ngvi.fitting.modes.search import ModeSearch
from pymc_ngvi.fitting.options import MOST_ITERATIONS, FitOptions
from pymc_ngvi.fitting.problem import problem_of
from pymc_ngvi.fitting.progress import FitProgress, watching
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.fitting.session import FitSession
from pymc_ngvi.fitting.threads import few_threads
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.posteriors.kinds import KINDS
from pymc_ngvi.posteriors.kinds.kind import PosteriorKind, PosteriorStart
from pymc_ngvi.posteriors.plan import Candidate, Decision, Plan
from pymc_ngvi.posteriors.search import (
    Beginning,
    Found,
    nothing_after,
    only_gaussian,
    posterior_after,
    seconds_after_others,
)
from pymc_ngvi.results.diagnosis.diagnose import standing_diagnosis
from pymc_ngvi.results.diagnosis.diagnosis import Kept
from pymc_ngvi.results.diagnosis.weights import SUMMARY
from pymc_ngvi.results.fitted import Fitted

logger = logging.getLogger("pymc.ngvi")

#: Number of the random stream behind it.
_STREAM = 6_000_000
#: Dimensions up to which a Gaussian with the moments of a posterior has all correlations.
_MOST_DENSE = 2_000


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
    """What comes after a Gaussian fit, or before one."""

    #: "auto", or the name of a kind.
    wanted: str
    #: Of the fit.
    seed: int
    #: Estimated seconds that the fit and what comes after it may take.
    max_seconds: float | None = None
    #: Of a Gaussian fit that was not made, as another posterior came in the place of it.
    options: FitOptions | None = None
    #: What was tried before the fit, in vain, and is not to be tried again.
    tried: tuple[Candidate, ...] = ()

    @property
    def stream(self) -> int:
        """Seed of what it draws, apart from those of the fit."""
        return int(np.random.default_rng([_STREAM, self.seed]).integers(2**62))

    def after[A: Fitted](
        self, gaussian: A, make: Callable[..., A], so_far: SoFar[A], earlier: PoolState | None, *, progressbar: bool
    ) -> A:
        """Return another posterior, or the Gaussian with the reason why not."""
        record = gaussian.record
        assert record is not None
        clock, before = time.perf_counter(), gaussian.density.compile_seconds

        def tell(search: Callable[[], Found]) -> None:
            """Say what there is while posteriors are tried: the Gaussian, or the first of them."""

            def now() -> tuple[A, tuple[str, ...]]:
                found = search()
                undone = found.plan.undone or (self._others,)
                if found.state is not None:
                    return self._with(found, gaussian, make, clock, before), undone
                gaussian.record = dataclasses.replace(record, plan=found.plan)
                return gaussian, undone

            so_far.is_now(now)

        found = self._search(gaussian, record, progressbar, earlier, tell)
        if found.state is None:
            reason = found.why_not
            assert reason is not None
            gaussian.record = dataclasses.replace(record, plan=found.plan)
            if self.wanted != "auto":
                raise NotExactError(
                    f"No {self.wanted} posterior: {reason}. The Gaussian fit is kept: `error.approx`.", gaussian
                ) from reason
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
        found = self._search(gaussian, record, progressbar)
        if found.state is not None and found.state.checks.is_exact:
            return self._with(found, gaussian, make, clock, before), self
        lasts = [c for c in found.plan.candidates if c.outcome is Decision.FAILED and KINDS[c.kind].is_last]
        return None, dataclasses.replace(self, tried=(*self.tried, *lasts))

    def following[A: Fitted](
        self,
        session: FitSession,
        gaussian: A,
        make: Callable[..., A],
        n: int,
        so_far: SoFar[A],
        earlier: PoolState | None,
        *,
        progressbar: bool,
        theme: Theme | None,
    ) -> A:
        """Return what comes of a fit, which goes on first where it has paused in vain, within limits."""
        step = self
        gaussian._follow(session.outcome())
        if session.is_paused:
            exact, step = self.meanwhile(gaussian, make, progressbar=progressbar)
            if exact is not None:
                return exact
            density, record = gaussian.density, gaussian.record
            assert record is not None
            with FitProgress(progressbar, theme) as progress, few_threads(density), watching(density, progress):
                session.run(n - record.n_iterations, progress, most=seconds_after_others(density))
            gaussian._follow(session.outcome())
        if self.wanted == "gaussian":
            return gaussian
        return step.after(gaussian, make, so_far, earlier, progressbar=progressbar)

    def tell_of_fit[A: Fitted](self, session: FitSession, gaussian: A, so_far: SoFar[A]) -> None:
        """Say what there is while a fit is under way."""

        def now() -> tuple[A, tuple[str, ...]]:
            gaussian._follow(session.outcome())
            assert gaussian.record is not None
            if self.wanted == "gaussian":
                return gaussian, session.undone
            why = Unavailable(Reason.NOT_FOLLOWED, "the fit did not come to its end")
            gaussian.record = dataclasses.replace(gaussian.record, plan=only_gaussian(why, self.tried))
            return gaussian, (*session.undone, self._others)

        so_far.is_now(now)

    @property
    def _others(self) -> str:
        return "other posteriors" if self.wanted == "auto" else f"the {self.wanted} posterior"

    def _with[A: Fitted](self, found: Found, gaussian: A, make: Callable[..., A], clock: float, before: float) -> A:
        """Return the approximation that a search has led to."""
        record, state = gaussian.record, found.state
        assert record is not None
        assert state is not None
        compiling = gaussian.density.compile_seconds - before
        running = time.perf_counter() - clock - compiling
        approx = make(gaussian.density, state, random_seed=self.seed, include_transformed=gaussian.include_transformed)
        approx.take(gaussian, self, with_pool(record, state, found.plan, compiling, running, found.also))
        return approx

    def again[A: Fitted](self, approx: A) -> A:
        """Bring it up to date after its Gaussian fit went on; keep it where there is no better one."""
        gaussian = approx.gaussian
        record = gaussian.record
        assert record is not None
        found = self._search(gaussian, record, progressbar=True)
        if found.state is None:
            logger.info(f"The posterior stays as it was: {found.why_not}.")
            return approx
        approx.set_state(cast(VariationalState, found.state))  # but for a density
        approx.take(gaussian, self, with_pool(record, found.state, found.plan, 0.0, 0.0, found.also))
        return approx

    def further[A: Fitted](self, approx: A) -> A:
        """Make what no fit came before once more, from where it is, with other draws; keep the better one."""
        record, state = approx.record, cast(PoolState, approx._state)
        assert record is not None
        clock = time.perf_counter()
        seed = int(np.random.default_rng([self.stream, len(approx.hist)]).integers(2**62))
        try:
            new = made_from(KINDS[state.kind], approx.density, state.gaussian, seed)
        except Unavailable as reason:
            logger.info(f"The posterior stays as it was: {reason}.")
            return approx
        if _rank(new) > _rank(state):
            approx.set_state(cast(VariationalState, with_moments(new)))
            record = dataclasses.replace(record, elbo=Elbo(*new.elbo()))
            record = with_pool(record, new, record.plan, 0.0, time.perf_counter() - clock)
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

    def _search(
        self,
        gaussian: Fitted,
        record: FitRecord,
        progressbar: bool,
        earlier: PoolState | None = None,
        tell: Callable[[Callable[[], Found]], object] = bool,
    ) -> Found:
        """Return what comes of the plan."""
        if not record.status.can_be_followed:
            why = Unavailable(Reason.NOT_FOLLOWED, f"the fit ended {str(record.status)!r}")
            return nothing_after(why, self.tried, earlier)
        density, most = gaussian.density, self.max_seconds
        before = density.n_gradients, density.n_hessians
        try:
            with few_threads(density), np.errstate(over="ignore"):  # what overflows has no weight
                q, is_off = cast(GaussianState, gaussian.q), functools.partial(_is_off, gaussian)
                return posterior_after(
                    Beginning(
                        density, q, record, self.stream, most, self.wanted, progressbar, is_off, self.tried, earlier,
                        tell,
                    )
                )  # fmt: skip
        finally:
            density.n_gradients, density.n_hessians = before  # those of the fit


def _is_off(gaussian: Fitted) -> bool:
    """Tell whether a Gaussian fit is found to be unreliable, within the budget of a summary, or is under way."""
    if gaussian.density.why_in_part:
        return False
    if gaussian.record is not None and gaussian.record.status is Status.PAUSED:
        return True
    return standing_diagnosis(gaussian._posterior, Kept(), SUMMARY).verdict == "not reliable"


def made_from(
    kind: PosteriorKind[Any],
    density: ModelDensity,
    q: GaussianState | None,
    seed: int,
    *,
    is_only: bool = True,
    work: Work | None = None,
) -> PoolState:
    """Return a posterior that no fit comes before, from the Gaussian with the moments of another one if there is."""
    start = PosteriorStart(density, q, seed, [], density.n_directions is not None)
    with few_threads(density), np.errstate(over="ignore"):  # what overflows has no weight
        return kind.run(start, kind.possible(density), work or Work(), is_only=is_only)


def _rank(state: PoolState) -> tuple[bool, bool, float]:
    checks = state.checks
    return checks.is_exact, checks.is_reliable, checks.effective_size


def with_moments(state: PoolState) -> PoolState:
    """Return a posterior that no fit came before with the Gaussian of its moments, which reports begin from."""
    if state.n_dim > _MOST_DENSE:
        q: GaussianState = DiagonalState.from_scale(state.mean(), state.sd())
    else:
        q = FullState(state.mean(), np.linalg.cholesky(state.cov()))
    object.__setattr__(state, "gaussian", q)
    return state


def with_pool(
    record: FitRecord, state: PoolState, plan: Plan | None, compiling: float, running: float, also: str = ""
) -> FitRecord:
    """Return the record of a fit after which there is another posterior."""
    modes, checks = not_covered(record.modes, state, record.seed, equal=True), state.checks
    missed = tuple(mode for mode in modes if not mode.is_equal)
    return dataclasses.replace(
        record,
        modes=modes,
        posterior=checks.sentence + also if not missed else f"It {left_out(missed)}. {checks.sentence}{also}",
        reason="",
        on_request="",
        is_exact=checks.is_exact and not missed,
        is_nested=state.rest.is_nested,
        doubts=checks.failures,
        plan=plan,
        compile_seconds=record.compile_seconds + compiling,
        run_seconds=record.run_seconds + running,
    )
