"""After the Gaussian fit: the exact or the nested posterior, where there is one, or the reason why not."""

import dataclasses
import logging
import time

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from pymc_ngvi.core.status import NotExactError
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import GaussianState, VariationalState
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.progress import WorkProgress
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.fitting.threads import few_threads
from pymc_ngvi.marginal.exact import Unavailable, exact_posterior, forest_of, is_even, work_of
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
#: Seconds that nested fits always may take, and how many times as long as the Gaussian fit.
_ALWAYS, _MOST_WORK = 120.0, 4.0
_TOO_LONG = "the nested posterior would take many times as long as the fit; posterior='nested' asks for it"
_EVEN = "its importance weights are nearly equal: the Gaussian is the posterior near this mode"


class _Even(Unavailable):
    """The Gaussian is the posterior."""


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
            state = self._state(gaussian, record)
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
        approx.take(gaussian, self, with_pool(record, state, compiling, running))
        return approx

    def again[A: Fitted](self, approx: A) -> A:
        """Bring an exact posterior up to date after its Gaussian fit went on; keep it where there is no better one."""
        gaussian = approx.gaussian
        record = gaussian.record
        assert record is not None
        try:
            state = self._state(gaussian, record)
        except Unavailable as reason:
            logger.info(f"The posterior stays as it was: {reason}.")
            return approx
        approx.set_state(cast(VariationalState, state))  # but for a density
        approx.take(gaussian, self, with_pool(record, state, 0.0, 0.0))
        return approx

    def _state(self, gaussian: Fitted, record: FitRecord) -> ExactState | NestedState:
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
    ) -> ExactState | NestedState:
        if self.wanted == "nested":
            return self._nested(density, q, record, seed)
        if self.wanted == "exact":
            return self._exact(density, q, record, seed)
        kinds: list[Callable[..., ExactState | NestedState]] = [self._exact, self._nested]
        if _has_many_globals(density):
            kinds.reverse()
        reasons = []
        for kind in kinds:
            try:
                return kind(density, q, record, seed)
            except _Even:
                raise
            except Unavailable as reason:
                reasons.append(reason)
        of_exact, of_nested = reasons if kinds[0] == self._exact else reasons[::-1]
        # What can be had by asking for it counts most.
        raise of_nested if str(of_nested) == _TOO_LONG and "asks for it" not in str(of_exact) else of_exact

    def _exact(self, density: LogDensity, q: GaussianState, record: FitRecord, seed: int) -> ExactState:
        forest, most = forest_of(density), np.inf
        with WorkProgress("Exact posterior", 1):
            if self.wanted == "auto":
                work = work_of(
                    forest,
                    record.n_gradients,
                    record.n_hessians,
                    density.gradient_seconds,
                    by_quadrature=record.estimator == "quadrature",
                )
                most = work.most_evaluations
                if work.is_too_much:
                    raise Unavailable(f"{work.reason}; posterior='exact' asks for it")
                if is_even(density, q):
                    raise _Even(_EVEN)
            state = exact_posterior(density, q, forest, seed, most)
            checks = state.checks
        if not checks.is_exact:
            raise Unavailable("; ".join(checks.failures))
        return state

    def _nested(self, density: LogDensity, q: GaussianState, record: FitRecord, seed: int) -> NestedState:
        given = rows_of(density)
        if self.wanted == "auto":
            seconds = seconds_of(given)
            if seconds > max(_ALWAYS, _MOST_WORK * record.run_seconds):
                raise Unavailable(_TOO_LONG)
            if is_even(density, q):
                raise _Even(_EVEN)
        with WorkProgress("Nested posterior", 1):
            return nested_posterior(density, q, seed)


def _has_many_globals(density: LogDensity) -> bool:
    """Tell whether importance sampling of the globals beside independent blocks is not promising."""
    try:
        return forest_of(density).n_globals > MANY_GLOBALS
    except Unavailable:
        return False


def with_pool(record: FitRecord, state: ExactState | NestedState, compiling: float, running: float) -> FitRecord:
    """Return the record of a fit after which there is an exact or a nested posterior."""
    is_nested = isinstance(state, NestedState)
    return dataclasses.replace(
        record,
        posterior=state.checks.sentence,
        is_exact=state.checks.is_exact,
        is_nested=is_nested,
        doubts=state.checks.failures if is_nested else (),
        compile_seconds=record.compile_seconds + compiling,
        run_seconds=record.run_seconds + running,
    )
