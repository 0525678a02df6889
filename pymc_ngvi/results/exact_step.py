"""After the Gaussian fit: the exact or the nested posterior, where there is one, or the reason why not."""

import dataclasses
import functools
import logging
import time

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from pymc_ngvi.core.status import NotExactError
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import GaussianState, VariationalState
from pymc_ngvi.fitting.modes.found import N_SEEN, not_covered
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.progress import WorkProgress
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.fitting.threads import few_threads
from pymc_ngvi.marginal.exact import Unavailable, budget_after, exact_posterior, forest_of, is_even, work_of
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.state import ExactState
from pymc_ngvi.model import LogDensity
from pymc_ngvi.nested.posterior import nested_posterior, rows_of
from pymc_ngvi.nested.seconds import seconds_of
from pymc_ngvi.nested.state import NestedState
from pymc_ngvi.results.costs import MANY_GLOBALS
from pymc_ngvi.results.fitted import Fitted

logger = logging.getLogger("pymc.ngvi")

#: Number of the random stream behind the exact step.
_STREAM = 6_000_000
_TOO_LONG = "the nested posterior would take many times as long as the fit; posterior='nested' asks for it"


class _TooDear(Unavailable):
    """It can be had by asking for it."""


class _Failed(Unavailable):
    """It was tried."""


def check_wanted(options: FitOptions, density: LogDensity) -> None:
    """Raise ValueError, before anything is computed, where a posterior is asked for that can't be had."""
    try:
        if options.posterior == "exact":
            forest_of(density)
        elif options.posterior == "nested":
            rows_of(density)
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
    """

    wanted: str
    seed: int

    @property
    def stream(self) -> int:
        """Seed of what it draws, apart from those of the fit."""
        return int(np.random.default_rng([_STREAM, self.seed]).integers(2**62))

    def after[A: Fitted](self, gaussian: A, make: Callable[..., A]) -> A:
        """Return the exact or the nested posterior, or the Gaussian with the reason why not.

        Parameters
        ----------
        gaussian : NGVIApproximation
        make : callable
            The class of approximations.

        Raises
        ------
        NotExactError
            Where the exact posterior was asked for and a check of it failed; the Gaussian fit is its ``approx``.
        """
        record = gaussian.record
        assert record is not None
        clock, before = time.perf_counter(), gaussian.density.compile_seconds
        try:
            state, also = self._state(gaussian, record)
        except Unavailable as reason:
            if self.wanted != "auto":
                raise NotExactError(
                    f"No {self.wanted} posterior: {reason}. The Gaussian fit is kept: `error.approx`.", gaussian
                ) from None
            gaussian.record = dataclasses.replace(record, posterior=f"Gaussian: {reason}.")
            return gaussian
        compiling = gaussian.density.compile_seconds - before
        running = time.perf_counter() - clock - compiling
        approx = make(gaussian.density, state, random_seed=self.seed, include_transformed=gaussian.include_transformed)
        approx.take(gaussian, self, with_pool(record, state, compiling, running, also))
        return approx

    def again[A: Fitted](self, approx: A) -> A:
        """Bring an exact posterior up to date after its Gaussian fit went on; keep it where there is no better one."""
        gaussian = approx.gaussian
        record = gaussian.record
        assert record is not None
        try:
            state, also = self._state(gaussian, record)
        except Unavailable as reason:
            logger.info(f"The posterior stays as it was: {reason}.")
            return approx
        approx.set_state(cast(VariationalState, state))  # but for a density
        approx.take(gaussian, self, with_pool(record, state, 0.0, 0.0, also))
        return approx

    def _state(self, gaussian: Fitted, record: FitRecord) -> tuple[ExactState | NestedState, str]:
        """Return what is wanted; where all will do, the exact posterior, or else the nested one."""
        if not record.status.can_be_followed:
            raise Unavailable(f"the fit ended {str(record.status)!r}")
        seed, density = self.stream, gaussian.density
        before = density.n_gradients, density.n_hessians
        try:
            with few_threads(density):
                return self._of_kinds(density, cast(GaussianState, gaussian.q), record, seed)
        finally:
            density.n_gradients, density.n_hessians = before  # those of the fit

    def _of_kinds(
        self, density: LogDensity, q: GaussianState, record: FitRecord, seed: int
    ) -> tuple[ExactState | NestedState, str]:
        """Return the posterior that is wanted, and what there is to say of others that were tried."""
        if self.wanted == "nested":
            return _nested(density, q, seed), ""
        if self.wanted == "exact":
            return _exact(density, q, seed, others=_gaussians(record)), ""
        found: list[NestedState] = []
        reasons: list[Unavailable] = []
        for attempt in _attempts(density, q, record, seed, reasons):
            try:
                state = attempt.run()
            except Unavailable as reason:
                reasons.append(reason)
                continue
            if isinstance(state, ExactState) or state.checks.is_exact:
                return state, _also(reasons)
            found.append(state)
        if found:
            return max(found, key=lambda state: state.checks.is_reliable), _also(reasons)
        # What can be had by asking for it counts most, then what was tried; of equals, the first.
        raise max(reasons, key=lambda reason: 2 * isinstance(reason, _TooDear) + isinstance(reason, _Failed))


class _Attempt(NamedTuple):
    """A posterior that may come of a model, and the seconds that it is estimated to take."""

    seconds: float
    is_last: bool
    run: Callable[[], ExactState | NestedState]


def _attempts(
    density: LogDensity, q: GaussianState, record: FitRecord, seed: int, reasons: list[Unavailable]
) -> list[_Attempt]:
    """Return what to try, the cheapest first; add why others are left out to ``reasons``.

    Raises
    ------
    Unavailable
        Where the Gaussian is the posterior.
    """
    found, of_nested, no_nested = [], np.inf, None
    of_fit = record.n_gradients * density.gradient_seconds
    try:
        of_nested = seconds_of(rows_of(density))
    except Unavailable as reason:
        no_nested = reason
    try:
        forest = forest_of(density)
        n_rows = density.rows.n_rows if density.rows is not None and record.estimator == "quadrature" else 0
        work = work_of(forest, record.n_gradients, record.n_hessians, density.gradient_seconds, n_rows)
        of_fit = work.of_fit
        if work.is_too_much:
            raise _TooDear(f"{work.reason}; posterior='exact' asks for it")
        run = functools.partial(
            _exact, density, q, seed, forest, work.most_values(of_nested), others=_gaussians(record)
        )
        found.append(_Attempt(work.seconds, forest.n_globals > MANY_GLOBALS, run))
    except Unavailable as reason:
        reasons.append(reason)
    if no_nested is not None:
        reasons.append(no_nested)
    elif of_nested <= budget_after(of_fit):
        found.append(_Attempt(of_nested, False, functools.partial(_nested, density, q, seed)))
    else:
        reasons.append(_TooDear(_TOO_LONG))
    if found and not record.modes and is_even(density, q):
        raise Unavailable("its importance weights are nearly equal: the Gaussian is the posterior near this mode")
    return sorted(found, key=lambda attempt: (attempt.is_last, attempt.seconds))


def _also(reasons: list[Unavailable]) -> str:
    """Return what there is to say of posteriors that were left out, or failed."""
    tried = [str(reason) for reason in reasons if isinstance(reason, _TooDear | _Failed)]
    return f" Before it: {'; '.join(tried)}." if tried else ""


def _gaussians(record: FitRecord) -> list[GaussianState]:
    """Return the fits at other modes."""
    return [cast(GaussianState, mode.q) for mode in record.modes]


def _exact(
    density: LogDensity,
    q: GaussianState,
    seed: int,
    forest: Forest | None = None,
    most: float = np.inf,
    others: Sequence[GaussianState] = (),
) -> ExactState:
    with WorkProgress("Exact posterior", 1):
        try:
            state = exact_posterior(density, q, forest or forest_of(density), seed, most, others)
        except Unavailable as reason:
            raise _Failed(f"{reason}") from None
    if not state.checks.is_exact:
        raise _Failed("; ".join(state.checks.failures))
    return state


def _nested(density: LogDensity, q: GaussianState, seed: int) -> NestedState:
    with WorkProgress("Nested posterior", 1):
        return nested_posterior(density, q, seed)


def with_pool(
    record: FitRecord, state: ExactState | NestedState, compiling: float, running: float, also: str = ""
) -> FitRecord:
    """Return the record of a fit after which there is an exact or a nested posterior."""
    is_nested, modes = isinstance(state, NestedState), record.modes
    if modes:
        modes = not_covered(modes, state.gaussian, state.draw(N_SEEN, np.random.default_rng(record.seed)))
    return dataclasses.replace(
        record,
        modes=modes,
        posterior=state.checks.sentence + also,
        is_exact=state.checks.is_exact,
        is_nested=is_nested,
        doubts=state.checks.failures if is_nested else (),
        compile_seconds=record.compile_seconds + compiling,
        run_seconds=record.run_seconds + running,
    )
