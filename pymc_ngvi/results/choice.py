"""Which posterior comes of a model: the loop over its candidates, the Gaussian fit among them, until one is exact.

What needs a Gaussian to begin from has the fit of one come before it. A fit by draws that takes longer than others do
is left for a while, and goes on if these come to nothing. Each candidate ends at twice its price, and hands on what is
left of the seconds; one that is sure to be exact, with no other after it, may take all of them.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import time

from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np

from pymc_ngvi.core.importance import SAME
from pymc_ngvi.core.messages import Failed, Reason, Unavailable, logger
from pymc_ngvi.core.prices import MOST_TIMES, UsedUp, Work, expected_fit_seconds, fit_seconds, in_words
from pymc_ngvi.core.progress import task
from pymc_ngvi.core.sizes import POSTERIORS, SLIGHT
from pymc_ngvi.core.status import Elbo, NotExactError, Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import GaussianState, VariationalState
from pymc_ngvi.core.verdict import Verdict, Word
from pymc_ngvi.density import Layout, ModelDensity
from pymc_ngvi.families import DiagonalState, FullState
from pymc_ngvi.fitting.modes import ModeSearch
from pymc_ngvi.fitting.options import MOST_ITERATIONS, FitOptions
from pymc_ngvi.fitting.problem import problem_of
from pymc_ngvi.fitting.record import (
    FitRecord,
    OtherMode,
    SoFar,
    left_out,
    not_covered,
    of_modes,
    record_of_pool,
    spared,
)
from pymc_ngvi.fitting.session import FitSession, first_state
from pymc_ngvi.fitting.threads import few_threads
from pymc_ngvi.marginal.exact import efficiency_of, is_even
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.posteriors.kinds import KINDS, PosteriorKind, PosteriorStart, if_available
from pymc_ngvi.posteriors.plan import GAUSSIAN, Candidate, Decision, Plan, TimeBudget, in_order
from pymc_ngvi.results.approximation import NGVIApproximation
from pymc_ngvi.results.diagnosis import standing_diagnosis

#: Seconds that a posterior may take without being asked for, where no Gaussian fit comes before it.
_MOST_SECONDS = 120.0
#: Times the price of a fit by draws up to which the last resort comes before it.
_BEFORE_FIT = 5.0
#: Seconds that a fit by draws may take after others came to nothing, at least, and as a part of what is expected: it is
#: not likely to be of use.
_AFTER_OTHERS, _OF_EXPECTED = 5.0, 0.5
#: Effective size of the hyperparameters below which a Gaussian fit of all coordinates may know more.
_FEWEST = 20.0
#: Dimensions up to which a Gaussian with the moments of a posterior has all correlations.
_MOST_DENSE = 2_000
#: Said where a posterior has failed by an exception.
_NEXT = "The fit continues with the next kind of posterior, or a Gaussian: print(approx.plan)."


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
@dataclasses.dataclass(frozen=True)
class Choice:
    """What was asked for, and so what is done again when a fit goes on."""

    #: "auto", "gaussian", or the name of a kind.
    wanted: str
    #: Of the fit.
    seed: int
    #: Estimated seconds that the fit and what comes after it may take.
    max_seconds: float | None = None
    #: Of a Gaussian fit that was not made, as another posterior came in the place of it.
    options: FitOptions | None = None

    def again[A: NGVIApproximation](self, approx: A) -> A:
        """Bring it up to date after its Gaussian fit went on; keep it where there is no better one."""
        candidates = Candidates(self, approx.density, type(approx))
        candidates.follow(approx.gaussian)
        if (state := candidates.state) is None:
            logger.info(f"The posterior stays as it was: {candidates.why_not}.")
            return approx
        approx.set_state(cast(VariationalState, state))  # but for a density
        return candidates.hand_over(approx, candidates._plan(), 0.0, 0.0)

    def further[A: NGVIApproximation](self, approx: A) -> A:
        """Make what no fit came before once more, from where it is, with other draws; keep the better one."""
        record, state, density = cast(FitRecord, approx.record), cast(PoolState, approx._state), approx.density
        clock, kind = time.perf_counter(), KINDS[state.kind]
        seed = _seed(_seed(POSTERIORS, self.seed), len(approx.hist))
        start = PosteriorStart(density, state.gaussian, seed, [], density.n_directions is not None)
        try:
            with few_threads(density), np.errstate(over="ignore"):
                new = kind.run(start, kind.possible(density), Work(), is_only=True)
        except Unavailable as reason:
            logger.info(f"The posterior stays as it was: {reason}.")
            return approx
        if _rank(new) > _rank(state):
            approx.set_state(cast(VariationalState, _with_moments(new)))
            record = dataclasses.replace(record, elbo=Elbo(*new.elbo()))
            record = _with_pool(record, density.layout, new, record.plan, 0.0, time.perf_counter() - clock)
        else:
            logger.info("The posterior stays as it was: more values of the hyperparameters did not improve it.")
        approx.record = dataclasses.replace(record, n_iterations=record.n_iterations + new.checks.n_fits)
        approx.hist = np.append(approx.hist, -new.elbo()[0])
        approx.gap_hist = np.append(approx.gap_hist, np.nan)
        return approx

    def gaussian_of[A: NGVIApproximation](self, approx: A) -> A:
        """Return the Gaussian fit that was not made, with the bits that it would have had."""
        approx._posterior.refuse_changed_data("The Gaussian fit can't be made with other data")
        density = approx.density
        density.n_gradients = density.n_hessians = 0
        clock, options = time.perf_counter(), cast(FitOptions, self.options)
        with few_threads(density):
            problem, rule, q, options = first_state(problem_of(density, options), options, self.seed, None, None)
            session = FitSession.begin(
                problem, rule, q, options, self.seed, clock=clock, search=ModeSearch.of(problem, options, self.seed)
            )
            session.run(MOST_ITERATIONS)
        make: Callable[..., A] = type(approx)
        q = session.outcome()[0]
        gaussian = make(density, q, random_seed=self.seed, include_transformed=approx.include_transformed)
        gaussian._follow(session)
        gaussian._session = session
        return gaussian


class Candidates[A: NGVIApproximation]:
    """The posteriors that may come of one call, what became of each, and what is left of the seconds."""

    def __init__(
        self,
        choice: Choice,
        density: ModelDensity,
        make: Callable[..., A],
        *,
        options: FitOptions | None = None,
        include_transformed: bool = False,
        so_far: SoFar[A] | None = None,
        pilot: A | None = None,
    ) -> None:
        self.choice, self.density, self._options = choice, density, options
        #: A fit to other data, from whose posterior that to these is found.
        self._pilot = pilot
        self._make, self._so_far = make, so_far
        self._include_transformed = include_transformed
        self._is_auto = choice.wanted == "auto"
        self._not_made = "other posteriors" if self._is_auto else f"the {choice.wanted} posterior"
        #: Exceptions that were not raised, as another candidate may come of it all the same.
        self.errors: list[BaseException] = []
        self.why_not: Unavailable | None = None
        #: The fit, from its beginning, and once it has come to its end, or is left.
        self._fit_of: A | None = None
        self._gaussian: A | None = None
        self._session: FitSession | None = None
        self._table: dict[str, Candidate] = {}
        #: What those kinds of posterior go by that the model has, and that were not tried.
        self._offers: dict[str, Any] = {}
        self._forget()
        self._reasons: list[Unavailable] = []
        self._states: list[PoolState] = []
        self._spent = 0.0
        self._by_rows = density.n_directions is not None
        if options is not None:
            self._by_rows &= options.choice.estimator == "quadrature"
        of_fit = expected_fit_seconds(density, by_rows=self._by_rows)
        self._budget = TimeBudget(of_fit, choice.max_seconds)
        #: Estimated seconds.
        self.left = min(of_fit + self._budget.left(), _MOST_SECONDS) if self._is_auto else math.inf
        if choice.max_seconds is not None:
            self.left = choice.max_seconds
        self._clock, self._compiled = time.perf_counter(), density.compile_seconds

    # --- before a Gaussian fit ---

    def first(self) -> str | None:
        """Return what comes before any Gaussian fit, as it takes less in the mean; the others come after it."""
        of_fit, density = self._budget.of_fit, self.density
        if density.has_minibatch or density.is_sharded or self.choice.wanted == GAUSSIAN:
            return None
        if self._pilot is not None:
            kind = getattr(self._pilot._state, "kind", GAUSSIAN)
            if kind in KINDS and not KINDS[kind].is_last and self.choice.wanted in ("auto", kind):
                self._look([kind], before_fit=True)
            return next(iter(self._offers), None)
        self._look(before_fit=True)
        offers = {name: found for name, found in self._offers.items() if self._is_affordable(name)}
        plain = [name for name, found in self._offers.items() if KINDS[name].is_plain(found)]

        def order(name: str) -> tuple[bool, float]:
            is_unsure, seconds = self._table[name].order
            return is_unsure, seconds + (0.0 if self._needs_none(name) else of_fit)

        name = min((name for name in offers if name not in plain), key=order, default=None)
        # By rows, a Gaussian is seldom far off where nothing is integrated.
        if name is None or not self._needs_none(name) or (plain and density.n_directions is not None):
            self._table.clear()
            self._forget()
            return None
        self._table = {name: self._table[name] for name in self._offers if name not in plain}
        self._offers = {name: found for name, found in offers.items() if name not in plain}
        return name

    def come_first(self) -> bool:
        """Try what needs no Gaussian fit, where that takes less in the mean; tell whether nothing needs to follow."""
        if (name := self.first()) is None:
            return False
        kind, reason = KINDS[name], self._try(name)
        if self._pilot is not None:  # where that comes to nothing, one without it does
            return (
                bool(self._states) and self._states[0].checks.is_exact >= cast(FitRecord, self._pilot.record).is_exact
            )
        before, rest = self._table[name], [c for n, c in self._table.items() if n != name]
        if self._states and (self._states[0].checks.word is Word.EXACT or not self._is_auto):
            return True
        if self._states and self._states[0].checks.effective_size < _FEWEST:
            self._states.clear()
        elif self._states and not any(self._budget.of_fit + c.seconds <= self.left for c in rest):
            self._table |= {c.kind: c.became(Decision.TOO_DEAR) for c in rest}
            if not self._states[0].checks.is_reliable:
                self._offers.clear()
                self._look(last=True)
                self._try_in_turn()
            return True
        if self._states:
            self._table[name] = before.became(Decision.CAME_FIRST, "not exact")
            return False
        code = None if reason is None else reason.code
        if code in (Reason.EXCEPTION, Reason.TOO_LONG) or (kind.is_last and code is not Reason.HOPELESS):
            self._became(name, Decision.FAILED, str(reason))
        else:  # it may begin from a fit
            del self._table[name]
        self._forget()
        return False

    def _needs_none(self, name: str) -> bool:
        """Tell whether it needs no Gaussian fit, and is worth to be tried without one."""
        kind, found = KINDS[name], self._offers[name]
        is_asked = not self._is_auto and not kind.is_last
        return kind.may_come_first and (is_asked or kind.comes_first(found, by_rows=self._by_rows))

    def _is_affordable(self, name: str) -> bool:
        most = _BEFORE_FIT * self._budget.of_fit if self._is_auto and KINDS[name].is_last else math.inf
        left = self.left if self._needs_none(name) else self._budget.left()
        return self._table[name].seconds <= min(most, left)

    def _forget(self) -> None:
        """Forget what was looked at, but not tried: after a fit, prices are known better."""
        self._offers.clear()
        others = [name for name in KINDS if self.choice.wanted not in ("auto", name)]
        tried = {n: c for n, c in self._table.items() if c.outcome in (Decision.FAILED, Decision.CAME_FIRST)}
        self._table = {name: Candidate(name, Decision.NOT_ASKED) for name in others} | tried

    # --- the Gaussian fit ---

    def fit(self, session: FitSession, gaussian: A, n: int, *, may_pause: bool) -> None:
        """Fit a Gaussian, until it takes longer than it is expected to and than others that may begin from anywhere."""
        self._session, self._fit_of, most = session, gaussian, math.inf
        if self._states:
            most = self.left
        else:
            self._tell(self._now_in_fit)
            if any(KINDS[n].is_last and c.outcome is Decision.FAILED for n, c in self._table.items()):
                most = math.inf if self.errors else self._most_of_fit
        later = self._pause_after(session.options) if may_pause else math.inf
        session.run(n, pause_after=later, most=most)
        gaussian._follow(session)

    def _pause_after(self, options: FitOptions) -> float:
        """Return the seconds after which a fit by draws is left for others that were not tried in vain."""
        if not self._is_auto or options.choice.estimator == "quadrature" or self.density.why_in_part:
            return math.inf
        found = [(k, if_available(k.possible, self.density)) for n, k in KINDS.items() if n not in self._table]
        prices = [k.price(of, self.density, by_rows=False).expected_seconds for k, of in found if of is not None]
        return max(min(prices, default=math.inf), expected_fit_seconds(self.density))

    @property
    def _most_of_fit(self) -> float:
        return max(_AFTER_OTHERS, _OF_EXPECTED * expected_fit_seconds(self.density))

    def after_fit(self, n: int) -> None:
        """Try what begins from the fit, which goes on first where it was left in vain."""
        session, gaussian = cast(FitSession, self._session), cast(A, self._fit_of)
        if session.is_paused:
            before = list(self._states), dict(self._table)
            self.follow(gaussian)
            if self._states and self._is_exact(self._states[0]):
                return
            lasts = {n: c for n, c in self._table.items() if c.outcome is Decision.FAILED and KINDS[n].is_last}
            self._states, self._table, self._gaussian = before[0], before[1] | lasts, None
            with few_threads(self.density):
                session.run(n - cast(FitRecord, gaussian.record).n_iterations, most=self._most_of_fit)
            gaussian._follow(session)
        if self.choice.wanted != GAUSSIAN:
            self.follow(gaussian)

    # --- after it ---

    def follow(self, gaussian: A) -> None:
        """Find the posterior that is wanted; where all will do, the first exact one, or else one that is not."""
        self._gaussian, self.why_not, density = gaussian, None, self.density
        self._forget()
        record = self._record_of_fit
        of_fit = fit_seconds(density, record.n_gradients, record.n_hessians, record.estimator)
        if self.choice.max_seconds is not None:
            of_fit += record.n_searched * density.gradient_seconds
        is_unlimited = not self._is_auto and self.choice.max_seconds is None
        self._budget = TimeBudget(of_fit, math.inf if is_unlimited else self.choice.max_seconds)
        self.left = self._budget.left() - self._spent
        self._by_rows = self._by_rows and record.estimator == "quadrature"
        failed = [c for c in self._table.values() if c.outcome is Decision.FAILED]
        self._reasons = [Failed(Reason.NOT_PASSED, c.reason) for c in failed]
        self._clock, self._compiled = time.perf_counter(), density.compile_seconds
        before = density.n_gradients, density.n_hessians
        if record.status is not Status.PAUSED:
            self._tell(self._now)
        try:
            if not record.status.can_be_followed:
                raise Unavailable(Reason.NOT_FOLLOWED, f"the fit ended {str(record.status)!r}")
            self._look()
            is_open = bool(self._offers) and self._is_auto and not record.modes
            if is_open and self._of_gaussian(is_even, otherwise=False):
                said = "importance weights are nearly equal, so that the Gaussian is close to the posterior"
                raise Unavailable(Reason.SUPERFLUOUS, said)
            self._try_in_turn()
            if self._is_auto and not any(s.checks.is_reliable and not self._missed_by(s) for s in self._states):
                self._last_resort()
            if not self._states:  # what can be had by asking counts most, then what was tried; of equals, the first
                raise max(self._reasons, key=lambda r: 2 * (r.code is Reason.TOO_DEAR) + isinstance(r, Failed))
            if self._is_auto and self._states[0].checks.word is not Word.EXACT:
                # One that is not reliable is no better than the Gaussian where its weights are worse.
                state, checks = self._states[0], self._states[0].checks
                is_wrong = not (checks.is_reliable or checks.tells_limits)
                if is_wrong and self._of_gaussian(efficiency_of, otherwise=0.0) > checks.efficiency:
                    weights = f"the weights of the {state.kind} posterior are worse than its own"
                    said = f"{weights}: {'; '.join(checks.failures)}"
                    self._became(state.kind, Decision.FAILED, said)
                    raise Failed(Reason.NOT_PASSED, said)
        except Unavailable as reason:
            self.why_not = reason
            if reason.code is not Reason.NOT_FOLLOWED:
                self._states.clear()
        finally:
            density.n_gradients, density.n_hessians = before  # those of the fit

    def _last_resort(self) -> None:
        """Try the last resort where the Gaussian can't be relied on either, and the seconds suffice.

        Where it takes no longer than anything may that follows a Gaussian, it is tried without a diagnosis: this is to
        find out what no short one would.
        """
        before, gaussian = list(self._reasons), cast(A, self._gaussian)
        self._look(last=True)
        quick = self._budget.left(is_plain=True)
        is_quick = any(self._table[name].seconds <= quick for name in self._offers)

        def is_off(density: ModelDensity, q: GaussianState) -> bool:
            has_others = any(not mode.is_equal for mode in self._record_of_fit.modes)
            return has_others or (is_quick and not is_even(density, q, SLIGHT)) or _is_off(gaussian)

        if bool(self._offers) and self._of_gaussian(is_off, otherwise=True):
            self._try_in_turn()
            return
        self._offers.clear()
        self._reasons = before  # a Gaussian that will do needs no other reason

    def _of_gaussian[T](self, judge: Callable[[ModelDensity, GaussianState], T], *, otherwise: T) -> T:
        """Return what is found of the Gaussian, or something else where that fails."""
        try:
            with spared("The assessment of the Gaussian", _NEXT), np.errstate(over="ignore"):
                return judge(self.density, cast(GaussianState, cast(A, self._gaussian).q))
        except Failed as reason:
            self._reasons.append(Failed(reason.code, f"the assessment of the Gaussian failed ({reason})"))
            return otherwise

    def _missed_by(self, state: PoolState) -> tuple[OtherMode, ...]:
        """Return the modes that a posterior leaves out."""
        return () if self._gaussian is None else not_covered(self._record_of_fit.modes, state, self.choice.seed)

    def _is_exact(self, state: PoolState) -> bool:
        return state.checks.word is Word.EXACT and not self._missed_by(state)

    def _rank(self, state: PoolState) -> tuple[bool, ...]:
        """Return what comes first: an exact posterior, one of all modes, a reliable one; of equals, the earlier one."""
        return not self._is_exact(state), bool(self._missed_by(state)), not state.checks.is_reliable

    # --- the loop ---

    def _look(self, kinds: Iterable[str] = (), *, before_fit: bool = False, last: bool = False) -> bool:
        """Look once for what there is of each kind: the table says what it takes, or why there is none.

        Those that could not come first are left for later; tell whether there are any to try.
        """
        density = self.density
        with few_threads(density):
            for name in kinds or KINDS:
                kind = KINDS[name]
                is_for_now = kind.is_last == last or self.choice.wanted == name
                if before_fit and kind.is_last and self._is_auto:
                    is_for_now = not self._offers
                # To look for some takes as long as a small fit: not where others cost less than any of these.
                cheaper = [n for n in self._offers if self._table[n].order < (False, kind.least)]
                if name in self._table or not is_for_now or (cheaper and (self._by_rows or not before_fit)):
                    continue
                try:
                    with self._sparing(kind, logging.DEBUG if self._gaussian is None else logging.WARNING):
                        found = kind.possible(density)
                        self._table[name] = kind.price(found, density, by_rows=self._by_rows)
                        self._offers[name] = found
                except Unavailable as reason:
                    outcome = Decision.FAILED if reason.code is Reason.EXCEPTION else Decision.REFUSED
                    self._table[name] = Candidate(name, outcome, reason=str(reason))
                    self._reasons.append(_by_name(name, reason))
        return bool(self._offers)

    def _leave_out(self, name: str, why: str = "") -> None:
        """Note that a posterior takes too long, or has, in a clause."""
        self._offers.pop(name, None)
        budget, seconds = self._budget, self._table[name].seconds
        either = "" if budget.max_seconds else f" or posterior={name!r}"
        asks = f"max_seconds={budget.asked_for(seconds)}{either} asks for it"
        than = (
            f", and max_seconds={budget.max_seconds:g} leaves {in_words(max(self.left, 0.0))}"
            if budget.max_seconds
            else ""
        )
        said = f"the {name} posterior {why or f'would take {in_words(seconds)}{than}'}; {asks}"
        self._reasons.append(Unavailable(Reason.TOO_DEAR, said, "" if budget.max_seconds else name))
        self._became(name, Decision.TOO_DEAR, asks)

    def _try_in_turn(self) -> None:
        """Find the first exact posterior, or those that are not exact."""
        while self._offers or self._look():
            name = min(self._offers, key=lambda name: self._table[name].order)
            if self._table[name].seconds > self.left:
                self._leave_out(name)
            elif self._try(name) is None and self._is_exact(self._states[0]):
                return

    def _try(self, name: str) -> Unavailable | None:
        """Make a posterior; return why there is none."""
        kind, found, candidate, density = KINDS[name], self._offers.pop(name), self._table[name], self.density
        is_asked_for = not self._is_auto or self.choice.max_seconds is not None
        takes_all = is_asked_for or (candidate.chance == 1.0 and not self._offers and self._gaussian is not None)
        work = Work(max(candidate.seconds, self.left / MOST_TIMES if takes_all else 0.0), self.left)
        try:
            with (
                task(kind.title, seconds=candidate.seconds), self._sparing(kind),
                few_threads(density), np.errstate(over="ignore"), work.counting(),
            ):  # fmt: skip
                is_only = all(KINDS[n].is_last for n in self._offers)
                state = kind.run(self._start(), found, work, is_only=is_only)
        except Unavailable as reason:
            if isinstance(reason, UsedUp):
                self._table[name] = dataclasses.replace(candidate, seconds=reason.seconds)
                self._offers[name] = found  # at this price, its turn may come again
                if work.left < 0.0 or reason.seconds > self.left - work.spent:
                    self._leave_out(name, str(reason).removeprefix("it "))
                return reason
            self._reasons.append(_by_name(name, reason))
            if reason.code is Reason.EXCEPTION:
                self.errors.append(reason.__cause__ or reason)
            self._became(name, Decision.FAILED, str(reason))
            return reason
        finally:
            seconds = work.spent
            if self._table[name].seconds == candidate.seconds:
                seconds = max(candidate.seconds, work.spent)
                self._table[name] = dataclasses.replace(self._table[name], seconds=seconds)
            self.left, self._spent = self.left - seconds, self._spent + seconds
        if self._gaussian is None:
            state = _with_moments(state)
        missed = self._missed_by(state)
        self._states.append(state)
        self._states.sort(key=self._rank)
        said = "" if self._is_exact(state) else "not exact"
        self._became(name, Decision.FAILED, f"it {left_out(missed)}" if missed else said)
        if self._gaussian is None:
            self._tell(self._now, will_do=True)
        return None

    def _start(self) -> PosteriorStart:
        """Return what a posterior begins from."""
        q, others = self._states[0].gaussian if self._states else None, list[GaussianState]()
        if self._gaussian is not None:
            q = cast(GaussianState, self._gaussian.q)
            others = [cast(GaussianState, mode.q) for mode in self._record_of_fit.modes]
        if self._pilot is not None:
            q = cast(GaussianState, self._pilot._begins_with)
        seed = _seed(POSTERIORS, self.choice.seed)
        return PosteriorStart(self.density, q, seed, others, self._by_rows, self._pilot is not None)

    def _sparing(self, kind: PosteriorKind[Any], level: int = logging.WARNING) -> Any:
        """Let a fit go on after an exception in a kind of posterior."""
        return spared(kind.title, _NEXT if self._is_auto else "The Gaussian fit is kept.", level)

    def _became(self, kind: str, outcome: Decision, reason: str = "") -> None:
        self._table[kind] = self._table[kind].became(outcome, reason)

    # --- what comes of it ---

    @property
    def state(self) -> PoolState | None:
        """The posterior that is no Gaussian, where there is one."""
        return self._states[0] if self._states else None

    def result(self) -> A:
        """Return the posterior, or the Gaussian with the reason why there is no other one."""
        gaussian, wanted = self._gaussian, self.choice.wanted
        if gaussian is None and self._fit_of is not None:
            return self._fit_of
        if (state := self.state) is not None:
            return self._approximation(state, self._plan())
        gaussian, reason = cast(A, gaussian), cast(Unavailable, self.why_not)
        gaussian.record = dataclasses.replace(self._record_of_fit, plan=self._plan())
        if not self._is_auto:
            raise NotExactError(
                f"No {wanted} posterior: {reason}. The Gaussian fit is kept: `error.approx`.", gaussian
            ) from reason
        gaussian.record = dataclasses.replace(
            gaussian.record,
            of_posterior=f"Gaussian: {reason}.",
            reason=str(reason.code),
            on_request=reason.on_request,
            elsewhere=tuple(str(r) for r in self._reasons if r.code is Reason.ELSEWHERE),
            # Where it is the posterior, its importance weights were looked at.
            judged=Verdict(is_same=self._of_gaussian(functools.partial(is_even, most=SAME), otherwise=False))
            if reason.code is Reason.SUPERFLUOUS
            else gaussian.record.judged,
        )
        return gaussian

    def hand_over(self, approx: A, plan: Plan, compiling: float, running: float) -> A:
        """Tell an approximation of its fit, and what became of the others."""
        state = cast(PoolState, self.state)
        may_be_better = () if self._is_exact(state) else (Reason.TOO_DEAR,)
        tried = [str(r) for r in self._reasons if isinstance(r, Failed) or r.code in may_be_better]
        also = f" Before it: {'; '.join(tried)}." if tried else ""
        record = _with_pool(self._record_of_fit, self.density.layout, state, plan, compiling, running, also)
        approx.take(self._gaussian, self.choice, record)
        return approx

    @property
    def _record_of_fit(self) -> FitRecord:
        return cast(FitRecord, cast(A, self._gaussian).record)

    def _plan(self) -> Plan:
        """Return what became of the candidates by now."""
        state, rows = self.state, dict(self._table)
        if state is not None and state.kind in rows:
            rows[state.kind] = rows[state.kind].became(Decision.TAKEN, "" if self._is_exact(state) else "not exact")
        outcome = Decision.TAKEN if state is None else Decision.CAME_FIRST
        gaussian, limit = Candidate(GAUSSIAN, outcome, self._budget.of_fit), ""
        if self._gaussian is None:
            gaussian = gaussian.became(Decision.ON_REQUEST)
            for other in self._states[1:]:
                rows[other.kind] = rows[other.kind].became(Decision.CAME_FIRST, "not exact")
        elif self.why_not is not None and self.why_not.code is Reason.NOT_FOLLOWED:
            limit = f"No other posterior was tried: {self.why_not}." * (state is None)
            gaussian = gaussian if state is None else gaussian.became(Decision.FAILED, str(self.why_not))
        return Plan(tuple(in_order([*rows.values(), gaussian])), limit)

    def _approximation(self, state: PoolState, plan: Plan) -> A:
        choice, gaussian, density = self.choice, self._gaussian, self.density
        compiling = density.compile_seconds - self._compiled
        running = time.perf_counter() - self._clock - compiling
        include = self._include_transformed if gaussian is None else gaussian.include_transformed
        approx = self._make(density, state, random_seed=choice.seed, include_transformed=include)
        if gaussian is not None:
            return self.hand_over(approx, plan, compiling, running)
        record = record_of_pool(density, state, Elbo(*state.elbo()), choice.seed, running)
        step = dataclasses.replace(choice, wanted=state.kind, options=self._options)
        approx.take(None, step, _with_pool(record, density.layout, state, plan, 0.0, 0.0))
        approx.hist, approx.gap_hist = np.array([-record.elbo.value]), np.array([math.nan])
        return approx

    # --- what there is if the call ends here ---

    def _tell(self, now: Callable[[], tuple[A, tuple[str, ...]]], *, will_do: bool = False) -> None:
        if self._so_far is not None:
            self._so_far.is_now(now, will_do=will_do)

    def _now(self) -> tuple[A, tuple[str, ...]]:
        plan = self._plan().interrupted()
        undone = plan.undone or (self._not_made,)
        if self.state is not None:
            return self._approximation(self.state, plan), undone
        gaussian = cast(A, self._gaussian)
        gaussian.record = dataclasses.replace(self._record_of_fit, plan=plan)
        return gaussian, undone

    def _now_in_fit(self) -> tuple[A, tuple[str, ...]]:
        session, gaussian = cast(FitSession, self._session), cast(A, self._fit_of)
        gaussian._follow(session)
        if self.choice.wanted == GAUSSIAN:
            return gaussian, session.undone
        tried = [c for c in self._table.values() if c.outcome is not Decision.NOT_ASKED]
        plan = Plan(
            (Candidate(GAUSSIAN, Decision.TAKEN), *tried), "No other posterior was tried: the fit was not finished."
        )
        gaussian.record = dataclasses.replace(cast(FitRecord, gaussian.record), plan=plan)
        return gaussian, (*session.undone, self._not_made)


def _seed(*numbers: int) -> int:
    return int(np.random.default_rng(numbers).integers(2**62))


def _by_name(kind: str, reason: Unavailable) -> Unavailable:
    """Return a reason that says which posterior it is about, where that was an exception."""
    if reason.code is not Reason.EXCEPTION:
        return reason
    named = Failed(reason.code, f"the {kind} posterior failed ({reason})")
    named.__cause__ = reason.__cause__
    return named


def _is_off(gaussian: NGVIApproximation) -> bool:
    """Tell whether a Gaussian fit is found to be unreliable, within the budget of a diagnosis, or is under way."""
    if gaussian.density.why_in_part:
        return False
    is_paused = gaussian.record is not None and gaussian.record.status is Status.PAUSED
    # That of the result may name other cures.
    asked = dataclasses.replace(gaussian._posterior, log_ratio=None, diagnosis=None)
    return is_paused or standing_diagnosis(asked).verdict is Word.NOT_RELIABLE


def _rank(state: PoolState) -> tuple[bool, bool, float]:
    checks = state.checks
    return checks.word is Word.EXACT, checks.is_reliable, checks.effective_size


def _with_moments(state: PoolState) -> PoolState:
    """Return a posterior that no fit came before with the Gaussian of its moments, which reports begin from."""
    q: GaussianState = DiagonalState.from_scale(state.mean(), state.sd())
    if state.n_dim <= _MOST_DENSE:
        with contextlib.suppress(np.linalg.LinAlgError):  # of fewer draws than coordinates
            q = FullState(state.mean(), np.linalg.cholesky(state.cov()))
    object.__setattr__(state, "gaussian", q)
    return state


def _with_pool(
    record: FitRecord,
    layout: Layout,
    state: PoolState,
    plan: Plan | None,
    compiling: float,
    running: float,
    also: str = "",
) -> FitRecord:
    """Return the record of a fit after which there is another posterior."""
    modes = not_covered(record.modes, state, record.seed, equal=True)
    missed = [mode for mode in modes if not mode.is_equal]
    return dataclasses.replace(
        record,
        modes=modes,
        kind=state.kind,
        of_posterior=also,
        judged=dataclasses.replace(state.checks, found=tuple(of_modes(missed, state, layout))),
        reason="",
        on_request="",
        plan=plan,
        compile_seconds=record.compile_seconds + compiling,
        run_seconds=record.run_seconds + running,
    )
