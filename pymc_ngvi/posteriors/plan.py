"""The plan: which posteriors may come of a model, what each takes and is expected to be, and what became of it.

What is sure to be exact, and soon, is tried before what may be, as it has more effective draws. Others are tried in the
order of their price over the chance that they turn out to be exact: of all orders, that one takes the fewest seconds to
an exact posterior in the mean [1]_. A failure hands on what is left of the seconds.

References
----------
.. [1] M. L. Weitzman (1979). Optimal search for the best alternative. Econometrica 47(3).
   https://doi.org/10.2307/1910412
"""

import math

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from pymc_ngvi.core.prices import LEAST_PRICE, MOST_TIMES, rounded_up
from pymc_ngvi.core.stored import stored

#: What may follow a Gaussian fit, in its seconds, and seconds on top: all together, four times the fit and 20 s.
_MOST_WORK, _ALWAYS = 3.0, 20.0
_TITLES = ("posterior", "seconds", "expected", "outcome")
#: The candidate that is always there.
GAUSSIAN = "gaussian"


@dataclass(frozen=True)
class TimeBudget:
    """What a call has taken, and what it may take."""

    #: Estimated seconds of the Gaussian fit.
    of_fit: float
    #: Of the whole call, where the user says so.
    max_seconds: float | None = None

    def left(self, *, is_plain: bool = False) -> float:
        """Return the estimated seconds that may follow the fit; is_plain: without groups to integrate over."""
        if self.max_seconds is not None:
            return max(self.max_seconds - self.of_fit, 0.0)
        return (
            max(MOST_TIMES * LEAST_PRICE, _MOST_WORK * self.of_fit) if is_plain else _MOST_WORK * self.of_fit + _ALWAYS
        )

    def asked_for(self, seconds: float) -> str:
        """Return the ``max_seconds`` that would let something follow which takes so many seconds."""
        return f"{rounded_up(1.2 * (self.of_fit + seconds)):,.0f}".replace(",", "_")


@stored("plan.outcome")
class Decision(Enum):
    """What became of a candidate."""

    TAKEN = "taken"
    CAME_FIRST = "came first"  # another posterior began from it
    REFUSED = "can't be had"
    TOO_DEAR = "too dear"
    FAILED = "failed"
    NOT_NEEDED = "not needed"
    INTERRUPTED = "interrupted"
    NOT_ASKED = "not asked for"
    ON_REQUEST = "made when asked for"


@stored("plan.candidate")
@dataclass(frozen=True)
class Candidate:
    """A posterior that may come of a model."""

    #: "gaussian", or the name of a kind: the value of the option ``posterior`` that asks for it.
    kind: str
    outcome: Decision = Decision.NOT_NEEDED
    #: Its price, estimated seconds on one thread; NaN where it is not known, or there is none.
    seconds: float = math.nan
    #: That it turns out to be exact, up to Monte Carlo error.
    chance: float = 0.0
    #: Why it can't be had, or failed, in a clause.
    reason: str = ""
    #: Part of the price that is spent by the time that it is known not to be exact.
    of_failure: float = 1.0

    @property
    def expected_seconds(self) -> float:
        """What it takes in the mean, over its chance."""
        if not self.chance > 0.0:
            return math.inf
        return self.seconds * (self.chance + (1.0 - self.chance) * self.of_failure) / self.chance

    @property
    def order(self) -> tuple[bool, float]:
        """By which candidates are tried: first those that are sure to be exact, and soon; then by the mean."""
        return not (self.chance >= 1.0 and self.seconds < LEAST_PRICE), self.expected_seconds

    @property
    def worth(self) -> str:
        """What it is expected to be, in a word or two."""
        if self.kind == GAUSSIAN:
            return "approximate"
        if self.outcome is Decision.REFUSED or not self.chance:
            return ""
        return "exact" if self.chance == 1.0 else "may be exact"

    def became(self, outcome: Decision, reason: str = "") -> "Candidate":
        """Return it with what became of it."""
        return replace(self, outcome=outcome, reason=reason)

    def row(self) -> tuple[str, str, str, str]:
        """Return its row of the table."""
        price = "" if math.isnan(self.seconds) else f"{self.seconds:,.{0 if self.seconds >= 10.0 else 1}f}"
        said = self.outcome.value + (f": {self.reason}" if self.reason else "")
        return "Gaussian" if self.kind == GAUSSIAN else self.kind, price, self.worth, said


@stored("plan")
@dataclass(frozen=True)
class Plan:
    """How the posterior of a model was chosen: ``print(approx.plan)`` shows the table."""

    #: In the order in which they were to be tried; those that can't be had, last.
    candidates: tuple[Candidate, ...]
    #: Why no others were tried, in a sentence.
    limit: str = ""

    def __str__(self) -> str:
        """Return the table."""
        rows = [_TITLES, *(candidate.row() for candidate in self.candidates)]
        first, second, third, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [f"{a:<{first}}  {b:>{second}}  {c:<{third}}  {d}".rstrip() for a, b, c, d in rows]
        return "\n".join([*lines, *filter(None, [self.limit])])

    @property
    def taken(self) -> Candidate | None:
        """The candidate that the posterior is."""
        return next((candidate for candidate in self.candidates if candidate.outcome is Decision.TAKEN), None)

    def interrupted(self) -> "Plan":
        """Return the plan of a call that ends here: what is not needed so far was not done."""
        ended = (c.became(Decision.INTERRUPTED) if c.outcome is Decision.NOT_NEEDED else c for c in self.candidates)
        return replace(self, candidates=tuple(ended))

    @property
    def undone(self) -> tuple[str, ...]:
        """What an interrupt has left out, in noun phrases."""
        return tuple(f"the {c.kind} posterior" for c in self.candidates if c.outcome is Decision.INTERRUPTED)

    def of(self, kind: str) -> Candidate | None:
        """Return the candidate of a kind, if there is one."""
        return next((candidate for candidate in self.candidates if candidate.kind == kind), None)


def in_order(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates as they are tried: the Gaussian first, or last on request; then those without a price."""

    def key(candidate: Candidate) -> tuple[bool, float]:
        if candidate.kind == GAUSSIAN and candidate.outcome is not Decision.ON_REQUEST:
            return False, 0.0
        return (True, math.inf) if candidate.kind == GAUSSIAN or math.isnan(candidate.seconds) else candidate.order

    return sorted(candidates, key=key)
