"""After the Gaussian fit: the exact or the nested posterior, where there is one, or the reason why not."""

import dataclasses
import logging
import time

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.refusal import Reason
from pymc_ngvi.core.status import NotExactError, Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import GaussianState, VariationalState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families import DiagonalState, FullState
from pymc_ngvi.fitting.begun import first_state
from pymc_ngvi.fitting.modes.found import N_SEEN, not_covered
from pymc_ngvi.fitting.modes.search import ModeSearch
from pymc_ngvi.fitting.options import MOST_ITERATIONS, FitOptions
from pymc_ngvi.fitting.problem import problem_of
from pymc_ngvi.fitting.progress import FitProgress
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.fitting.session import FitSession
from pymc_ngvi.fitting.threads import few_threads
from pymc_ngvi.marginal.exact import Unavailable, forest_of
from pymc_ngvi.marginal.state import ExactState
from pymc_ngvi.nested.posterior import latent_rows_of, nested_posterior
from pymc_ngvi.nested.state import NestedState
from pymc_ngvi.posteriors.candidates import budget_after
from pymc_ngvi.posteriors.plan import Plan
from pymc_ngvi.posteriors.search import Beginning, Found, only_gaussian, posterior_after
from pymc_ngvi.results.fitted import Fitted

logger = logging.getLogger("pymc.ngvi")

#: Number of the random stream behind the exact step.
_STREAM = 6_000_000
#: Dimensions up to which a Gaussian with the moments of a nested posterior has all correlations.
_MOST_DENSE = 2_000


def check_wanted(options: FitOptions, density: ModelDensity) -> None:
    """Raise ValueError, before anything is computed, where a posterior is asked for that can't be had."""
    try:
        if options.posterior == "exact":
            forest_of(density)
        elif options.posterior == "nested":
            latent_rows_of(density)
    except Unavailable as reason:
        raise ValueError(
            f"This model has no {options.posterior} posterior: {reason}. Leave posterior out for a Gaussian."
        ) from None


@stored("exact.step")
@dataclass(frozen=True)
class ExactStep:
    """What comes after a Gaussian fit.

    Parameters
    ----------
    wanted : {"auto", "exact", "nested"}
    seed : int
        Of the fit.
    max_seconds : float, optional
        Estimated seconds that the fit and what comes after it may take.
    options : FitOptions, optional
        Of a Gaussian fit that was not made, as another posterior came in the place of it.
    """

    wanted: str
    seed: int
    max_seconds: float | None = None
    options: FitOptions | None = None

    @property
    def stream(self) -> int:
        """Seed of what it draws, apart from those of the fit."""
        return int(np.random.default_rng([_STREAM, self.seed]).integers(2**62))

    @property
    def _interrupted(self) -> str:
        """What is said after an interrupt from the keyboard."""
        kind = "an exact or nested" if self.wanted == "auto" else f"the {self.wanted}"
        return (
            f"interrupted from the keyboard before {kind} posterior was there; posterior='gaussian' stops at this fit."
        )

    def after[A: Fitted](self, gaussian: A, make: Callable[..., A], *, progressbar: bool = True) -> A:
        """Return the exact or the nested posterior, or the Gaussian with the reason why not, such as an interrupt.

        Parameters
        ----------
        gaussian : NGVIApproximation
        make : callable
            The class of approximations.
        progressbar : bool, default True

        Raises
        ------
        NotExactError
            Where the exact posterior was asked for and a check of it failed, or it would take more seconds than there
            are; the Gaussian fit is its ``approx``.
        """
        record = gaussian.record
        assert record is not None
        clock, before = time.perf_counter(), gaussian.density.compile_seconds
        try:
            found = self._found(gaussian, record, progressbar)
        except KeyboardInterrupt:
            gaussian.record = dataclasses.replace(
                record, posterior=f"Gaussian: {self._interrupted}", reason=str(Reason.INTERRUPTED)
            )
            return gaussian
        if found.state is None:
            reason = found.why_not
            assert reason is not None
            gaussian.record = dataclasses.replace(record, plan=found.plan)
            if self.wanted != "auto" and record.status is not Status.INTERRUPTED:
                raise NotExactError(
                    f"No {self.wanted} posterior: {reason}. The Gaussian fit is kept: `error.approx`.", gaussian
                )
            gaussian.record = dataclasses.replace(
                gaussian.record, posterior=f"Gaussian: {reason}.", reason=str(reason.code), on_request=reason.on_request
            )
            return gaussian
        compiling = gaussian.density.compile_seconds - before
        running = time.perf_counter() - clock - compiling
        state, options = found.state, {"include_transformed": gaussian.include_transformed}
        approx = make(gaussian.density, state, random_seed=self.seed, **options)
        approx.take(gaussian, self, with_pool(record, state, found.plan, compiling, running, found.also))
        return approx

    def again[A: Fitted](self, approx: A) -> A:
        """Bring an exact posterior up to date after its Gaussian fit went on; keep it where there is no better one."""
        gaussian = approx.gaussian
        record = gaussian.record
        assert record is not None
        try:
            found = self._found(gaussian, record, progressbar=True)
        except KeyboardInterrupt:
            logger.info(f"The posterior stays as it was: {self._interrupted}")
            return approx
        if found.state is None:
            logger.info(f"The posterior stays as it was: {found.why_not}.")
            return approx
        approx.set_state(cast(VariationalState, found.state))  # but for a density
        approx.take(gaussian, self, with_pool(record, found.state, found.plan, 0.0, 0.0, found.also))
        return approx

    def further[A: Fitted](self, approx: A) -> A:
        """Make a nested posterior once more, from where it is, with other draws; keep the better one."""
        record, state = approx.record, cast(NestedState, approx._state)
        assert record is not None
        clock = time.perf_counter()
        seed = int(np.random.default_rng([self.stream, len(approx.hist)]).integers(2**62))
        try:
            with few_threads(approx.density):
                new = nested_posterior(approx.density, state.gaussian, seed)
        except (Unavailable, KeyboardInterrupt) as reason:
            logger.info(f"The posterior stays as it was: {str(reason) or 'interrupted from the keyboard'}.")
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

    def _found(self, gaussian: Fitted, record: FitRecord, progressbar: bool) -> Found:
        """Return what comes of the plan."""
        if not record.status.can_be_followed:
            why = Unavailable(Reason.NOT_FOLLOWED, f"the fit ended {str(record.status)!r}")
            return Found(None, only_gaussian(why), why_not=why)
        density = gaussian.density
        before = density.n_gradients, density.n_hessians
        try:
            with few_threads(density), np.errstate(over="ignore"):  # what overflows has no weight
                budget = budget_after(density, record, self.wanted, self.max_seconds)
                q = cast(GaussianState, gaussian.q)
                return posterior_after(Beginning(density, q, record, self.stream, budget, self.wanted, progressbar))
        finally:
            density.n_gradients, density.n_hessians = before  # those of the fit


def _rank(state: NestedState) -> tuple[bool, bool, float]:
    checks = state.checks
    return checks.is_exact, checks.is_reliable, checks.effective_size


def with_moments(state: NestedState) -> NestedState:
    """Return a nested posterior that no fit came before with the Gaussian of its moments, which reports begin from."""
    if state.n_dim > _MOST_DENSE:
        q: GaussianState = DiagonalState.from_scale(state.mean(), state.sd())
    else:
        q = FullState(state.mean(), np.linalg.cholesky(state.cov()))
    object.__setattr__(state, "gaussian", q)
    return state


def with_pool(
    record: FitRecord,
    state: ExactState | NestedState,
    plan: Plan | None,
    compiling: float,
    running: float,
    also: str = "",
) -> FitRecord:
    """Return the record of a fit after which there is an exact or a nested posterior."""
    modes = record.modes
    if modes:
        modes = not_covered(modes, state.gaussian, state.draw(N_SEEN, np.random.default_rng(record.seed)))
    return dataclasses.replace(
        record,
        modes=modes,
        posterior=state.checks.sentence + also,
        reason="",
        on_request="",
        is_exact=state.checks.is_exact,
        is_nested=isinstance(state, NestedState),
        doubts=state.checks.failures,
        plan=plan,
        compile_seconds=record.compile_seconds + compiling,
        run_seconds=record.run_seconds + running,
    )
