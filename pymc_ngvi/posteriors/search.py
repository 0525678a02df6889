"""After a Gaussian fit: candidates are tried in the order of the plan, until one is exact."""

import functools
import math

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from pymc_ngvi.core.prices import in_words
from pymc_ngvi.core.refusal import Reason
from pymc_ngvi.core.types import GaussianState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.fitting.progress import announced
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.marginal.exact import Longer, Unavailable, efficiency_of, exact_posterior, forest_of, is_even
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.state import ExactState
from pymc_ngvi.nested.posterior import nested_posterior
from pymc_ngvi.nested.state import NestedState
from pymc_ngvi.posteriors.candidates import UNEVEN, comes_before_nested, exact_candidate, nested_candidate, work_of
from pymc_ngvi.posteriors.plan import Candidate, Decision, Plan, TimeBudget, in_order


class _TooDear(Unavailable):
    """It takes too long, and can be had by asking for it."""


class _Failed(Unavailable):
    """It was tried."""


@dataclass(frozen=True)
class Beginning:
    """What other posteriors begin from.

    Parameters
    ----------
    density : ModelDensity
    q : GaussianState
        The Gaussian fit.
    record : FitRecord
        Of it.
    seed : int
    budget : TimeBudget
    wanted : {"auto", "exact", "nested"}
    progressbar : bool
    """

    density: ModelDensity
    q: GaussianState
    record: FitRecord
    seed: int
    budget: TimeBudget
    wanted: str
    progressbar: bool

    @property
    def others(self) -> list[GaussianState]:
        """Fits at other modes."""
        return [cast(GaussianState, mode.q) for mode in self.record.modes]


class Found(NamedTuple):
    """What a search has come to.

    Parameters
    ----------
    state : ExactState or NestedState or None
        None: the Gaussian is the posterior.
    plan : Plan
    also : str
        What there is to say of others that were tried.
    why_not : Unavailable or None
        Why the Gaussian is the posterior.
    """

    state: ExactState | NestedState | None
    plan: Plan
    also: str = ""
    why_not: Unavailable | None = None


class _Offer(NamedTuple):
    """A candidate, the seconds that it may take, and how to have it, given what tells whether it may take more."""

    candidate: Candidate
    limit: float
    run: Callable[[Callable[[float], bool]], ExactState | NestedState]


def posterior_after(given: Beginning) -> Found:
    """Return the posterior that is wanted; where all will do, the first exact one, or else the nested one."""
    return _PosteriorSearch(given).run()


def only_gaussian(why: Unavailable) -> Plan:
    """Return the plan of a fit that nothing follows."""
    return Plan((Candidate("gaussian", Decision.TAKEN),), f"Nothing follows it: {why}.")


class _PosteriorSearch:
    """The way through the plan of one fit."""

    def __init__(self, given: Beginning) -> None:
        self._given, self._left = given, given.budget.left()
        self._offers: dict[str, _Offer] = {}
        self._dear: dict[str, _Offer] = {}
        self._table: dict[str, Candidate] = {
            kind: Candidate(kind, Decision.NOT_ASKED)
            for kind in ("exact", "nested")
            if given.wanted not in ("auto", kind)
        }
        self._reasons: list[Unavailable] = []

    def run(self) -> Found:
        """Return what comes of it."""
        given = self._given
        try:
            self._look()
            states = self._tried()
            if not states:
                # What can be had by asking for it counts most, then what was tried; of equals, the first.
                raise max(
                    self._reasons, key=lambda reason: 2 * isinstance(reason, _TooDear) + isinstance(reason, _Failed)
                )
            state = states[0]
            if given.wanted == "auto" and isinstance(state, NestedState) and not state.checks.is_exact:
                self._check_better(state)
        except Unavailable as reason:
            return Found(None, self._plan(Decision.TAKEN), why_not=reason)
        kind, is_exact = "nested" if isinstance(state, NestedState) else "exact", state.checks.is_exact
        self._became(kind, Decision.TAKEN, "" if is_exact else "not exact")
        also = [reason for reason in self._reasons if isinstance(reason, _Failed) or not is_exact]
        return Found(state, self._plan(Decision.CAME_FIRST), _also(also))

    def _became(self, kind: str, outcome: Decision, reason: str = "") -> None:
        self._table[kind] = self._table[kind].became(outcome, reason)

    def _plan(self, of_gaussian: Decision) -> Plan:
        budget = self._given.budget
        gaussian = Candidate("gaussian", of_gaussian, budget.of_fit)
        return Plan(tuple(in_order([gaussian, *self._table.values()])), budget.sentence)

    # --- what there is ---

    def _look(self) -> None:
        """Find the candidates; whether there is a nested posterior, only where it may come first.

        To find its rows takes as long as a small fit.

        Raises
        ------
        Unavailable
            Where the Gaussian is the posterior.
        """
        given, exact = self._given, self._offered("exact")
        if exact is None or not comes_before_nested(exact.candidate):
            nested = self._offered("nested")
            if nested is not None and (dear := self._dear.get("exact")) is not None:
                self._take_back(dear, nested)
        if self._offers and given.wanted == "auto" and not given.record.modes and is_even(given.density, given.q):
            said = "its importance weights are nearly equal: the Gaussian is the posterior near this mode"
            raise Unavailable(Reason.SUPERFLUOUS, said)

    def _offered(self, kind: str) -> _Offer | None:
        """Return what there is of a kind; None where there is nothing, or it takes too long, as the table says."""
        if kind in self._table:
            return self._offers.get(kind)
        try:
            offer = self._exact_offer() if kind == "exact" else self._nested_offer()
        except Unavailable as reason:
            self._table[kind] = Candidate(kind, Decision.REFUSED, reason=str(reason))
            self._reasons.append(reason)
            return None
        self._table[kind] = offer.candidate
        if offer.candidate.seconds > offer.limit:
            self._leave_out(offer, offer.limit)
            return None
        self._offers[kind] = offer
        return offer

    def _exact_offer(self) -> _Offer:
        given = self._given
        forest = forest_of(given.density)
        by_rows = given.density.n_directions is not None and given.record.estimator == "quadrature"
        work = work_of(forest, given.density, by_rows=by_rows)
        candidate = exact_candidate(forest, work)

        def run(may_take: Callable[[float], bool]) -> ExactState:
            return _exact(given, forest, self._table["exact"].seconds, lambda n_values: may_take(n_values * work.each))

        return _Offer(candidate, given.budget.left(is_plain=not forest.n_local), run)

    def _nested_offer(self) -> _Offer:
        candidate = nested_candidate(self._given.density)

        def run(_: Callable[[float], bool]) -> NestedState:
            return _nested(self._given, candidate.seconds, UNEVEN if "exact" in self._offers else math.inf)

        return _Offer(candidate, self._given.budget.left(), run)

    def _leave_out(self, offer: _Offer, left: float) -> None:
        """Note that a posterior takes too long."""
        kind, seconds = offer.candidate.kind, offer.candidate.seconds
        self._dear[kind] = offer
        self._reasons.append(_too_dear(self._given.budget, left, seconds, kind))
        self._became(kind, Decision.TOO_DEAR, _asks_for(self._given.budget, seconds, kind))

    def _take_back(self, dear: _Offer, nested: _Offer) -> None:
        """Take a posterior after all that was too dear by itself, where another one would take longer."""
        if dear.candidate.seconds <= nested.candidate.seconds:
            self._offers["exact"] = dear
            self._reasons = [reason for reason in self._reasons if not isinstance(reason, _TooDear)]
            self._became("exact", Decision.NOT_NEEDED)

    # --- what is tried ---

    def _tried(self) -> list[ExactState | NestedState]:
        """Return the first exact posterior, or those that are not exact."""
        states: list[ExactState | NestedState] = []
        while self._offers or self._offered("nested") is not None:
            offer = self._offers.pop(min(self._offers, key=lambda kind: self._offers[kind].candidate.expected_seconds))
            kind, seconds = offer.candidate.kind, offer.candidate.seconds
            if seconds > self._left:  # after another one
                self._leave_out(offer, self._left)
                continue
            try:
                state = offer.run(functools.partial(self._may_take, offer))
            except Longer:  # another one may come before it
                self._left -= seconds
                self._offers[kind] = offer._replace(candidate=self._table[kind])
                continue
            except Unavailable as reason:
                self._left -= self._table[kind].seconds
                self._reasons.append(reason)
                self._became(kind, Decision.FAILED, str(reason))
                continue
            self._left -= self._table[kind].seconds
            if state.checks.is_exact:
                return [state]
            states.append(state)
        return states

    def _may_take(self, offer: _Offer, seconds: float) -> bool:
        """Tell whether a posterior that turns out to take longer may go on, or another one is to be tried before it."""
        longer = replace(offer.candidate, seconds=max(seconds, offer.candidate.seconds))
        self._table[longer.kind] = longer
        if seconds <= offer.candidate.seconds:
            return True
        other = self._offered("nested")
        return seconds <= self._left and (other is None or longer.expected_seconds <= other.candidate.expected_seconds)

    def _check_better(self, state: NestedState) -> None:
        """Raise where a nested posterior is not reliable, and its weights are worse than those of the Gaussian."""
        given = self._given
        if not state.checks.is_reliable and efficiency_of(given.density, given.q) > state.checks.efficiency:
            failures = "; ".join(state.checks.failures)
            said = f"the weights of the nested posterior are worse than its own: {failures}"
            self._became("nested", Decision.FAILED, said)
            raise _Failed(Reason.NOT_PASSED, said)


def _exact(given: Beginning, forest: Forest, seconds: float, may_take: Callable[[float], bool]) -> ExactState:
    with announced("Exact posterior", seconds, given.progressbar):
        try:
            state = exact_posterior(given.density, given.q, forest, given.seed, may_take, given.others)
        except Longer:
            raise
        except Unavailable as reason:
            raise _Failed(reason.code, reason.sentence, reason.on_request) from None
    if not state.checks.is_exact:
        raise _Failed(Reason.NOT_PASSED, "; ".join(state.checks.failures))
    return state


def _nested(given: Beginning, seconds: float, most_variance: float) -> NestedState:
    with announced("Nested posterior", seconds, given.progressbar):
        return nested_posterior(given.density, given.q, given.seed, most_variance)


def _asks_for(budget: TimeBudget, seconds: float, kind: str) -> str:
    either = "" if budget.max_seconds else f" or posterior={kind!r}"
    return f"max_seconds={budget.asked_for(seconds)}{either} asks for it"


def _too_dear(budget: TimeBudget, left: float, seconds: float, kind: str) -> _TooDear:
    than = f", and max_seconds={budget.max_seconds:g} leaves {in_words(left)}" if budget.max_seconds else ""
    said = f"the {kind} posterior would take {in_words(seconds)}{than}; {_asks_for(budget, seconds, kind)}"
    return _TooDear(Reason.TOO_DEAR, said, "" if budget.max_seconds else kind)


def _also(reasons: list[Unavailable]) -> str:
    """Return what there is to say of posteriors that were left out, or failed."""
    tried = [str(reason) for reason in reasons if isinstance(reason, _TooDear | _Failed)]
    return f" Before it: {'; '.join(tried)}." if tried else ""
