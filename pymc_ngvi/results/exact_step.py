"""After the Gaussian fit: the exact or the nested posterior, where there is one, or the reason why not."""

import dataclasses
import functools
import logging
import time

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from pymc_ngvi.core.refusal import Reason
from pymc_ngvi.core.status import NotExactError, Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import GaussianState, VariationalState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.fitting.modes.found import N_SEEN, not_covered
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.price import TimeBudget, fit_seconds, in_words
from pymc_ngvi.fitting.progress import announced
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.fitting.threads import few_threads
from pymc_ngvi.marginal.exact import Unavailable, efficiency_of, exact_posterior, forest_of, is_even, work_of
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.state import ExactState
from pymc_ngvi.nested.posterior import latent_rows_of, nested_posterior
from pymc_ngvi.nested.seconds import LEAST, nested_seconds
from pymc_ngvi.nested.state import NestedState
from pymc_ngvi.results.costs import MANY_GLOBALS
from pymc_ngvi.results.fitted import Fitted

logger = logging.getLogger("pymc.ngvi")

#: Number of the random stream behind the exact step.
_STREAM = 6_000_000
#: Times as long as another posterior that the exact one may take where no cheap rule of quadrature will do.
_MOST_OF_OTHER = 3.0


class _TooDear(Unavailable):
    """It takes too long, and can be had by asking for it."""


class _Failed(Unavailable):
    """It was tried."""


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
    """

    wanted: str
    seed: int
    max_seconds: float | None = None

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
            state, also = self._state(gaussian, record, progressbar)
        except Unavailable as reason:
            if self.wanted != "auto" and record.status is not Status.INTERRUPTED:
                raise NotExactError(
                    f"No {self.wanted} posterior: {reason}. The Gaussian fit is kept: `error.approx`.", gaussian
                ) from None
            gaussian.record = dataclasses.replace(
                record, posterior=f"Gaussian: {reason}.", reason=str(reason.code), on_request=reason.on_request
            )
            return gaussian
        except KeyboardInterrupt:
            gaussian.record = dataclasses.replace(
                record, posterior=f"Gaussian: {self._interrupted}", reason=str(Reason.INTERRUPTED)
            )
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
            state, also = self._state(gaussian, record, progressbar=True)
        except Unavailable as reason:
            logger.info(f"The posterior stays as it was: {reason}.")
            return approx
        except KeyboardInterrupt:
            logger.info(f"The posterior stays as it was: {self._interrupted}")
            return approx
        approx.set_state(cast(VariationalState, state))  # but for a density
        approx.take(gaussian, self, with_pool(record, state, 0.0, 0.0, also))
        return approx

    def _state(self, gaussian: Fitted, record: FitRecord, progressbar: bool) -> tuple[ExactState | NestedState, str]:
        """Return what is wanted; where all will do, the exact posterior, or else the nested one."""
        if not record.status.can_be_followed:
            raise Unavailable(Reason.NOT_FOLLOWED, f"the fit ended {str(record.status)!r}")
        seed, density = self.stream, gaussian.density
        before = density.n_gradients, density.n_hessians
        try:
            with few_threads(density), np.errstate(over="ignore"):  # what overflows has no weight
                price = self._price(density, record)
                given = _Beginning(density, cast(GaussianState, gaussian.q), seed, price, progressbar)
                return self._of_kinds(given, record)
        finally:
            density.n_gradients, density.n_hessians = before  # those of the fit

    def _price(self, density: ModelDensity, record: FitRecord) -> TimeBudget:
        """Return what the fit took, and what it leaves."""
        of_fit = fit_seconds(density, record.n_gradients, record.n_hessians, record.estimator)
        if self.max_seconds is not None:
            of_fit += record.n_searched * density.gradient_seconds
        unlimited = self.wanted != "auto" and self.max_seconds is None
        return TimeBudget(of_fit, np.inf if unlimited else self.max_seconds)

    def _of_kinds(self, given: "_Beginning", record: FitRecord) -> tuple[ExactState | NestedState, str]:
        """Return the posterior that is wanted, and what there is to say of others that were tried."""
        found: list[NestedState] = []
        reasons: list[Unavailable] = []
        left = given.price.left()
        for attempt in _attempts(given, self.wanted, record, reasons):
            if attempt.seconds > left:  # after another one
                reasons.append(_too_dear(given.price, left, attempt.seconds, attempt.kind))
                continue
            left -= attempt.seconds
            try:
                state = attempt.run()
            except Unavailable as reason:
                reasons.append(reason)
                continue
            if isinstance(state, ExactState) or state.checks.is_exact:
                return state, _also([reason for reason in reasons if isinstance(reason, _Failed)])
            found.append(state)
        if found:
            return found[0] if self.wanted != "auto" else _if_better(found[0], given), _also(reasons)
        # What can be had by asking for it counts most, then what was tried; of equals, the first.
        raise max(reasons, key=lambda reason: 2 * isinstance(reason, _TooDear) + isinstance(reason, _Failed))


@dataclass(frozen=True)
class _Beginning:
    """What other posteriors begin from: the Gaussian fit, a seed, and what they may take."""

    density: ModelDensity
    q: GaussianState
    seed: int
    price: TimeBudget
    progressbar: bool


def _if_better(state: NestedState, given: _Beginning) -> NestedState:
    """Return a nested posterior that is reliable, or whose weights are better than those of the Gaussian.

    Raises
    ------
    Unavailable
        Where it is neither.
    """
    if not state.checks.is_reliable and efficiency_of(given.density, given.q) > state.checks.efficiency:
        failures = "; ".join(state.checks.failures)
        said = f"the weights of the nested posterior are worse than its own: {failures}"
        raise _Failed(Reason.NOT_PASSED, said)
    return state


class _Attempt(NamedTuple):
    """A posterior that may come of a model, and the seconds that it is estimated to take."""

    kind: str
    seconds: float
    is_last: bool
    run: Callable[[], ExactState | NestedState]


def _attempts(given: _Beginning, wanted: str, record: FitRecord, reasons: list[Unavailable]) -> Iterator[_Attempt]:
    """Yield what to try, the cheapest first, as far as it may be paid for; add why others are left out to ``reasons``.

    Whether there is a nested posterior is looked into where it may come first, or the exact one has failed: to find
    its rows takes as long as a small fit.

    Raises
    ------
    Unavailable
        Where the Gaussian is the posterior.
    """

    @functools.cache
    def nested() -> _Attempt | None:
        return _or_reason(lambda: _nested_attempt(given), reasons) if wanted != "exact" else None

    exact = _or_reason(lambda: _exact_attempt(given, record, nested), reasons) if wanted != "nested" else None
    comes_first = exact is not None and not exact.is_last and exact.seconds < LEAST
    found = [attempt for attempt in (None if comes_first else nested(), exact) if attempt is not None]
    if found and wanted == "auto" and not record.modes and is_even(given.density, given.q):
        said = "its importance weights are nearly equal: the Gaussian is the posterior near this mode"
        raise Unavailable(Reason.SUPERFLUOUS, said)
    yield from sorted(found, key=lambda attempt: (attempt.is_last, attempt.seconds))
    if comes_first and (other := nested()) is not None:
        yield other


def _or_reason(make: Callable[[], _Attempt], reasons: list[Unavailable]) -> _Attempt | None:
    """Return an attempt, or add why there is none."""
    try:
        return make()
    except Unavailable as reason:
        reasons.append(reason)
        return None


def _nested_attempt(given: _Beginning) -> _Attempt:
    """Return how the nested posterior is to be had; raise Unavailable where there is none, or it takes too long."""
    seconds = nested_seconds(latent_rows_of(given.density))
    _check(given.price, given.price.left(), seconds, "nested")
    return _Attempt("nested", seconds, False, functools.partial(_nested, given, seconds))


def _exact_attempt(given: _Beginning, record: FitRecord, nested: Callable[[], _Attempt | None]) -> _Attempt:
    """Return how the exact posterior is to be had; raise Unavailable where there is none, or it takes too long."""
    density, forest = given.density, forest_of(given.density)
    rows = density.by_rows.found if density.n_directions is not None and record.estimator == "quadrature" else None
    work = work_of(forest, density.gradient_seconds, 0 if rows is None else rows.n_rows)
    left = given.price.left(is_plain=not work.has_blocks)
    _check(given.price, left, work.seconds, "exact")

    def most() -> float:
        """Return how many values it may take where no cheap rule will do: it leaves what the other one takes."""
        other = nested()
        return work.most_values(left if other is None else min(left - other.seconds, _MOST_OF_OTHER * other.seconds))

    run = functools.partial(_exact, given, forest, work.seconds, most, _gaussians(record))
    return _Attempt("exact", work.seconds, forest.n_globals > MANY_GLOBALS, run)


def _check(price: TimeBudget, left: float, seconds: float, kind: str) -> None:
    """Raise where a posterior takes longer than it may."""
    if seconds > left:
        raise _too_dear(price, left, seconds, kind)


def _too_dear(price: TimeBudget, left: float, seconds: float, kind: str) -> _TooDear:
    than = f", and max_seconds={price.max_seconds:g} leaves {in_words(left)}" if price.max_seconds else ""
    ask = f"max_seconds={price.asked_for(seconds)}" + ("" if price.max_seconds else f" or posterior={kind!r}")
    said = f"the {kind} posterior would take {in_words(seconds)}{than}; {ask} asks for it"
    return _TooDear(Reason.TOO_DEAR, said, "" if price.max_seconds else kind)


def _also(reasons: list[Unavailable]) -> str:
    """Return what there is to say of posteriors that were left out, or failed."""
    tried = [str(reason) for reason in reasons if isinstance(reason, _TooDear | _Failed)]
    return f" Before it: {'; '.join(tried)}." if tried else ""


def _gaussians(record: FitRecord) -> list[GaussianState]:
    """Return the fits at other modes."""
    return [cast(GaussianState, mode.q) for mode in record.modes]


def _exact(
    given: _Beginning, forest: Forest, seconds: float, most: Callable[[], float], others: Sequence[GaussianState]
) -> ExactState:
    with announced("Exact posterior", seconds, given.progressbar):
        try:
            state = exact_posterior(given.density, given.q, forest, given.seed, most, others)
        except Unavailable as reason:
            raise _Failed(reason.code, reason.sentence, reason.on_request) from None
    if not state.checks.is_exact:
        raise _Failed(Reason.NOT_PASSED, "; ".join(state.checks.failures))
    return state


def _nested(given: _Beginning, seconds: float) -> NestedState:
    with announced("Nested posterior", seconds, given.progressbar):
        return nested_posterior(given.density, given.q, given.seed)


def with_pool(
    record: FitRecord, state: ExactState | NestedState, compiling: float, running: float, also: str = ""
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
        compile_seconds=record.compile_seconds + compiling,
        run_seconds=record.run_seconds + running,
    )
