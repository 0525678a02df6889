"""The way through the plan: before a Gaussian fit, what needs none; after it, candidates in turn until one is exact."""

import math

from collections.abc import Callable, ValuesView
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, cast

from pymc_ngvi.core.prices import Work, expected_fit_seconds, fit_seconds, in_words
from pymc_ngvi.core.refusal import Failed, Reason, Unavailable
from pymc_ngvi.core.types import GaussianState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.fitting.errors import spared
from pymc_ngvi.fitting.modes.found import OtherMode, left_out, not_covered
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.progress import announced
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.marginal.exact import efficiency_of, is_even, is_nearly_even
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.posteriors.kinds import KINDS
from pymc_ngvi.posteriors.kinds.kind import PosteriorKind, PosteriorStart, if_available
from pymc_ngvi.posteriors.plan import GAUSSIAN, Candidate, Decision, Plan, TimeBudget, in_order

#: Seconds that a posterior may take without being asked for, where no Gaussian fit comes before it.
_MOST_SECONDS = 120.0
#: The same of the last resort, at least, where a model has no other posterior: what else there is would not do.
_OF_LAST_RESORT = 60.0
#: Said where a posterior has failed by an exception, and was not asked for.
_NEXT = "The fit goes on with the next posterior that the model may have, or is a Gaussian: print(approx.plan)."
#: Chance that a Gaussian fit by draws is not the posterior, so that the last resort is needed after it.
_NEEDED = 0.9
#: Seconds that a fit may take after others were tried in vain, at least, and as a part of what is expected.
_AFTER_OTHERS, _OF_EXPECTED = 5.0, 0.5


class _TooDear(Unavailable):
    """It takes too long, and can be had by asking for it."""


class Beginning(NamedTuple):
    """What other posteriors begin from: a Gaussian fit, its record, a seed, and what is wanted: a kind, or "auto".

    ``is_off`` tells whether the Gaussian can't be relied on, where nothing better has been found; ``tried``, what was
    tried before it: ``state`` is what came of that. ``tell`` is told how to get what there is so far.
    """

    density: ModelDensity
    q: GaussianState
    record: FitRecord
    seed: int
    max_seconds: float | None
    wanted: str
    progressbar: bool
    is_off: Callable[[], bool] = bool
    tried: tuple[Candidate, ...] = ()
    state: PoolState | None = None
    tell: Callable[[Callable[[], "Found"]], object] = bool

    def start(self) -> PosteriorStart:
        """Return what a kind of posterior begins from."""
        by_rows = self.density.n_directions is not None and self.record.estimator == "quadrature"
        others = [cast(GaussianState, mode.q) for mode in self.record.modes]
        return PosteriorStart(self.density, self.q, self.seed, others, by_rows, self.wanted != "auto")

    def budget(self) -> TimeBudget:
        """Return what the Gaussian fit took, and what it leaves."""
        density, record = self.density, self.record
        of_fit = fit_seconds(density, record.n_gradients, record.n_hessians, record.estimator)
        if self.max_seconds is not None:
            of_fit += record.n_searched * density.gradient_seconds
        unlimited = self.wanted != "auto" and self.max_seconds is None
        return TimeBudget(of_fit, math.inf if unlimited else self.max_seconds)


class Found(NamedTuple):
    """What a search has come to: a posterior, and what is said of others that were tried, or why there is none."""

    state: PoolState | None
    plan: Plan
    also: str = ""
    why_not: Unavailable | None = None


class _Offer(NamedTuple):
    """A candidate, its kind, what that goes by, and the seconds that it may take."""

    candidate: Candidate
    kind: PosteriorKind[Any]
    found: Any
    limit: float


def posterior_after(given: Beginning) -> Found:
    """Return the posterior that is wanted; where all will do, the first exact one, or else one that is not."""
    search = _PosteriorSearch(given)
    given.tell(search.so_far)
    return search.run()


def trying(kind: PosteriorKind[Any], wanted: str) -> AbstractContextManager[None]:
    """Let a fit go on after an exception in a kind of posterior."""
    return spared(kind.title, _NEXT if wanted == "auto" else "The Gaussian fit is kept.")


def only_gaussian(why: Unavailable, tried: tuple[Candidate, ...] = ()) -> Plan:
    """Return the plan of a fit that nothing follows, with what was tried before it ended."""
    return Plan((Candidate(GAUSSIAN, Decision.TAKEN), *tried), f"Nothing follows it: {why}.")


def nothing_after(why: Unavailable, tried: tuple[Candidate, ...], state: PoolState | None) -> Found:
    """Return what there is after a fit that nothing can follow: what came before it, or else the Gaussian."""
    if state is None:
        return Found(None, only_gaussian(why, tried), why_not=why)
    kept = [c.became(Decision.TAKEN, "not exact") if c.kind == state.kind else c for c in tried]
    return Found(state, Plan((Candidate(GAUSSIAN, Decision.FAILED, reason=str(why)), *kept)))


class _PosteriorSearch:
    """The way through the plan of one fit."""

    def __init__(self, given: Beginning) -> None:
        self._given, self._start, self._budget = given, given.start(), given.budget()
        self._left = self._budget.left()
        self._offers: dict[str, _Offer] = {}
        self._table = {
            name: Candidate(name, Decision.NOT_ASKED) for name in KINDS if given.wanted not in ("auto", name)
        } | {candidate.kind: candidate for candidate in given.tried}
        failed = [candidate for candidate in given.tried if candidate.outcome is Decision.FAILED]
        self._reasons: list[Unavailable] = [Failed(Reason.NOT_PASSED, candidate.reason) for candidate in failed]
        self._states: list[PoolState] = [] if given.state is None else [given.state]

    def run(self) -> Found:
        """Return what comes of it."""
        try:
            self._look()
            self._try_in_turn()
            is_any = any(state.checks.is_reliable and not self._missed_by(state) for state in self._states)
            if self._given.wanted == "auto" and not is_any:
                self._last_resort()
            if not self._states:
                # What can be had by asking for it counts most, then what was tried; of equals, the first.
                raise max(
                    self._reasons, key=lambda reason: 2 * isinstance(reason, _TooDear) + isinstance(reason, Failed)
                )
            state = self._states[0]
            if self._given.wanted == "auto" and not state.checks.is_exact:
                self._check_better(state)
        except Unavailable as reason:
            return Found(None, self._plan(Decision.TAKEN), why_not=reason)
        return self._found(state)

    def so_far(self) -> Found:
        """Return what there is if the search ends here."""
        found = self._found(self._states[0]) if self._states else Found(None, self._plan(Decision.TAKEN))
        return found._replace(plan=found.plan.interrupted())

    def _found(self, state: PoolState) -> Found:
        is_exact = state.checks.is_exact and not self._missed_by(state)
        self._became(state.kind, Decision.TAKEN, "" if is_exact else "not exact")
        also = [reason for reason in self._reasons if isinstance(reason, Failed) or not is_exact]
        return Found(state, self._plan(Decision.CAME_FIRST), _also(also))

    def _became(self, kind: str, outcome: Decision, reason: str = "") -> None:
        self._table[kind] = self._table[kind].became(outcome, reason)

    def _plan(self, of_gaussian: Decision) -> Plan:
        gaussian = Candidate(GAUSSIAN, of_gaussian, self._budget.of_fit)
        return Plan(tuple(in_order([gaussian, *self._table.values()])), self._budget.sentence)

    # --- what there is ---

    def _look(self) -> None:
        """Find the candidates but those that could not come first: to look for some takes as long as a small fit."""
        given = self._given
        for kind in self._looked_for():
            if all(offer.candidate.order >= (False, kind.least) for offer in self._offers.values()):
                self._offer(kind)
        is_open = bool(self._offers) and given.wanted == "auto" and not given.record.modes
        if is_open and self._of_gaussian(lambda: is_even(given.density, given.q), otherwise=False):
            said = "its importance weights are nearly equal: the Gaussian is the posterior near this mode"
            raise Unavailable(Reason.SUPERFLUOUS, said)

    def _others(self) -> ValuesView[_Offer]:
        """Return what is on offer, of all kinds, those that have not been looked for yet included."""
        for kind in self._looked_for():
            self._offer(kind)
        return self._offers.values()

    def _looked_for(self) -> list[PosteriorKind[Any]]:
        """Return the kinds that are tried in turn."""
        return [kind for kind in KINDS.values() if not kind.is_last or self._given.wanted == kind.name]

    def _offer(self, kind: PosteriorKind[Any]) -> None:
        """Look once for what there is of a kind: the table says what it takes, or why there is none."""
        if kind.name in self._table:
            return
        try:
            with trying(kind, self._given.wanted):
                found = kind.possible(self._given.density)
                candidate = kind.price(found, self._given.density, by_rows=self._start.by_rows)
        except Unavailable as reason:
            outcome = Decision.FAILED if reason.code is Reason.EXCEPTION else Decision.REFUSED
            self._table[kind.name] = Candidate(kind.name, outcome, reason=str(reason))
            self._reasons.append(_by_name(kind.name, reason))
            return
        self._table[kind.name] = candidate
        offer = _Offer(candidate, kind, found, self._budget.left())
        if candidate.seconds > offer.limit:
            self._leave_out(offer, offer.limit)
        else:
            self._offers[kind.name] = offer

    def _leave_out(self, offer: _Offer, left: float) -> None:
        """Note that a posterior takes too long."""
        name, seconds = offer.kind.name, offer.candidate.seconds
        self._reasons.append(_too_dear(self._budget, left, seconds, name))
        self._became(name, Decision.TOO_DEAR, _asks_for(self._budget, seconds, name))

    # --- what is tried ---

    def _try_in_turn(self) -> None:
        """Find the first exact posterior, or those that are not exact."""
        while self._offers or self._others():
            offer = self._offers.pop(min(self._offers, key=lambda kind: self._offers[kind].candidate.order))
            name, seconds = offer.kind.name, offer.candidate.seconds
            if seconds > self._left:  # after another one
                self._leave_out(offer, self._left)
                continue
            try:
                state = self._run(offer)
            except Unavailable as reason:
                self._left -= self._table[name].seconds
                self._reasons.append(_by_name(name, reason))
                self._became(name, Decision.FAILED, str(reason))
                continue
            self._left -= self._table[name].seconds
            missed = self._missed_by(state)
            if state.checks.is_exact and not missed:
                self._states.insert(0, state)
                return
            self._states.append(state)
            self._became(name, Decision.FAILED, f"it {left_out(missed)}" if missed else "not exact")

    def _missed_by(self, state: PoolState) -> tuple[OtherMode, ...]:
        """Return the modes that a posterior leaves out."""
        record = self._given.record
        return not_covered(record.modes, state, record.seed)

    def _last_resort(self) -> None:
        """Try the last resort where the Gaussian can't be relied on either, and the seconds suffice.

        Where it takes no longer than anything may that follows a Gaussian, it is tried without a diagnosis: this is to
        find out what no short one would.
        """
        before, given = list(self._reasons), self._given
        for kind in KINDS.values():
            if kind.is_last:
                self._offer(kind)
        quick = self._budget.left(is_plain=True)
        is_quick = any(offer.candidate.seconds <= quick for offer in self._offers.values())

        def is_off() -> bool:
            has_others = any(not mode.is_equal for mode in given.record.modes)
            return has_others or (is_quick and not is_nearly_even(given.density, given.q)) or given.is_off()

        if bool(self._offers) and self._of_gaussian(is_off, otherwise=True):
            self._try_in_turn()
            return
        self._offers.clear()
        self._reasons = before  # a Gaussian that will do needs no other reason

    def _run(self, offer: _Offer) -> PoolState:
        seconds = self._table[offer.kind.name].seconds
        work = Work() if self._given.wanted != "auto" and math.isinf(self._left) else Work(seconds, self._left)
        with announced(offer.kind.title, seconds, self._given.progressbar), trying(offer.kind, self._given.wanted):
            try:
                return offer.kind.run(self._start, offer.found, work, is_only=not self._offers)
            finally:
                if math.isfinite(work.price):
                    self._table[offer.kind.name] = replace(offer.candidate, seconds=work.price)

    def _of_gaussian[T](self, judge: Callable[[], T], *, otherwise: T) -> T:
        """Return what is found of the Gaussian, or something else where that fails."""
        try:
            with spared("The assessment of the Gaussian", _NEXT):
                return judge()
        except Failed as reason:
            self._reasons.append(Failed(reason.code, f"the assessment of the Gaussian failed ({reason})"))
            return otherwise

    def _check_better(self, state: PoolState) -> None:
        """Raise where a posterior is not reliable, and its weights are worse than those of the Gaussian."""
        given, checks = self._given, state.checks
        if checks.is_reliable:
            return
        if self._of_gaussian(lambda: efficiency_of(given.density, given.q), otherwise=0.0) > checks.efficiency:
            failures = "; ".join(checks.failures)
            said = f"the weights of the {state.kind} posterior are worse than its own: {failures}"
            self._became(state.kind, Decision.FAILED, said)
            raise Failed(Reason.NOT_PASSED, said)


def _by_name(kind: str, reason: Unavailable) -> Unavailable:
    """Return a reason that says which posterior it is about, where that was an exception."""
    if reason.code is not Reason.EXCEPTION:
        return reason
    named = Failed(reason.code, f"the {kind} posterior failed ({reason})")
    named.__cause__ = reason.__cause__
    return named


def _asks_for(budget: TimeBudget, seconds: float, kind: str) -> str:
    either = "" if budget.max_seconds else f" or posterior={kind!r}"
    return f"max_seconds={budget.asked_for(seconds)}{either} asks for it"


def _too_dear(budget: TimeBudget, left: float, seconds: float, kind: str) -> _TooDear:
    than = f", and max_seconds={budget.max_seconds:g} leaves {in_words(left)}" if budget.max_seconds else ""
    said = f"the {kind} posterior would take {in_words(seconds)}{than}; {_asks_for(budget, seconds, kind)}"
    return _TooDear(Reason.TOO_DEAR, said, "" if budget.max_seconds else kind)


def _also(reasons: list[Unavailable]) -> str:
    """Return what there is to say of posteriors that were left out, or failed."""
    tried = [str(reason) for reason in reasons if isinstance(reason, _TooDear | Failed)]
    return f" Before it: {'; '.join(tried)}." if tried else ""


# --- before a Gaussian fit ---


class First(NamedTuple):
    """What comes before any Gaussian fit: the plan, whose first candidate it is, and the seconds that it may take."""

    plan: Plan
    most_seconds: float


def plan_without_gaussian(options: FitOptions, density: ModelDensity) -> First | None:
    """Return what comes before any Gaussian fit; None where nothing does."""
    if density.has_minibatch or density.is_sharded or options.posterior == GAUSSIAN:
        return None
    is_auto = options.posterior == "auto"
    of_fit = expected_fit_seconds(density, by_rows=density.n_directions is not None)
    most = _affordable(options, of_fit)
    kinds = [kind for kind in KINDS.values() if (is_auto and not kind.is_last) or kind.name == options.posterior]
    candidates = _before_gaussian(kinds, options, density, of_fit, most)
    if not candidates and is_auto and not any(if_available(kind.possible, density) for kind in kinds):
        most = max(most, _OF_LAST_RESORT) if options.max_seconds is None else most
        candidates = _last_resort_alone(options, density, most)
    if not candidates:
        return None
    limit = f"Before any Gaussian fit, {in_words(most)} may be taken." if math.isfinite(most) else ""
    return First(Plan((*candidates, Candidate(GAUSSIAN, Decision.ON_REQUEST, of_fit)), limit), most)


def _before_gaussian(
    wanted: list[PosteriorKind[Any]], options: FitOptions, density: ModelDensity, of_fit: float, most: float
) -> list[Candidate]:
    """Return the candidate that comes first, and those that would come after it; none where none comes first."""
    is_auto, by_rows = options.posterior == "auto", density.n_directions is not None
    first, after = [kind for kind in wanted if kind.may_come_first], []
    if not first:
        return []
    for kind in wanted:
        found = None if kind in first else if_available(kind.possible, density)
        if found is not None and not kind.is_plain(found):
            after.append(kind.price(found, density, by_rows=by_rows))
        elif found is not None and by_rows:
            return []  # a Gaussian is seldom far off
    left = TimeBudget(of_fit, options.max_seconds).left()
    sure = [c for c in after if c.chance >= 1.0 and c.seconds <= left]
    follows = min((of_fit + candidate.expected_seconds for candidate in sure or after), default=math.inf)
    for kind in first:
        if by_rows and follows <= kind.least:
            continue  # it takes no less: it need not be looked for
        found = if_available(kind.possible, density)
        is_asked = not (is_auto or kind.is_last)
        if found is None or not (is_asked or kind.comes_first(found, by_rows=by_rows)):
            continue
        candidate = kind.price(found, density, by_rows=by_rows)
        if candidate.order <= (not sure, follows) and candidate.seconds <= most:
            return [candidate, *after]
    return []


def _last_resort_alone(options: FitOptions, density: ModelDensity, most: float) -> list[Candidate]:
    """Return the last resort, where it takes less in the mean before a Gaussian fit than after it."""
    by_rows = options.choice.estimator == "quadrature"
    of_fit = expected_fit_seconds(density, by_rows=by_rows)
    for kind, candidate in last_resorts(density):
        before = candidate.seconds + (1.0 - candidate.chance) * of_fit
        is_early = kind.may_come_first and kind.comes_first(kind.possible(density), by_rows=by_rows)
        if is_early and candidate.seconds <= most and before <= of_fit + _NEEDED * candidate.seconds:
            return [candidate]
    return []


def last_resorts(density: ModelDensity) -> list[tuple[PosteriorKind[Any], Candidate]]:
    """Return the kinds that a model has for where nothing else can be relied on, with their prices."""
    by_rows = density.n_directions is not None
    found = [(kind, if_available(kind.possible, density)) for kind in KINDS.values() if kind.is_last]
    return [(kind, kind.price(of, density, by_rows=by_rows)) for kind, of in found if of is not None]


def seconds_until_others(options: FitOptions, density: ModelDensity, tried: tuple[Candidate, ...] = ()) -> float:
    """Return the seconds after which a Gaussian fit is left for a while, for posteriors that may begin from anywhere.

    That is where it turns out to take longer than is expected, and than they do; those that were tried in vain are not
    waited for.
    """
    if options.posterior != "auto" or options.choice.estimator == "quadrature" or density.why_in_part:
        return math.inf
    in_vain = {candidate.kind for candidate in tried}
    found = [(kind, if_available(kind.possible, density)) for name, kind in KINDS.items() if name not in in_vain]
    prices = [kind.price(of_kind, density, by_rows=False) for kind, of_kind in found if of_kind is not None]
    least = min((candidate.expected_seconds for candidate in prices), default=math.inf)
    return max(least, expected_fit_seconds(density))


def seconds_after_others(density: ModelDensity) -> float:
    """Return the seconds that a fit by draws may take after others came to nothing: it is not likely to be of use."""
    return max(_AFTER_OTHERS, _OF_EXPECTED * expected_fit_seconds(density))


def _affordable(options: FitOptions, of_fit: float) -> float:
    """Return the seconds that it may take: as many as a Gaussian fit and what may follow it."""
    if options.max_seconds is not None:
        return options.max_seconds
    return min(of_fit + TimeBudget(of_fit).left(), _MOST_SECONDS) if options.posterior == "auto" else math.inf
