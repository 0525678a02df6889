"""The verdict on a posterior: conditions, each with its figure, and what they come to in one of five words."""

import math

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.messages import percent
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array

#: Part of a variance that may be farther out than all draws: of a Student t with 3 degrees of freedom, at most 0.16 of
#: 10 is, and of products with lognormals 0.21; with 2.2, 0.3 to 0.5; with 1.2, 0.7 and more.
MOST_BEYOND, HEAVY = 0.6, "heavy tail"
#: Part of the effective size that is wanted, below which draws are too few to say anything of a posterior.
LEAST_PART = 0.25


@stored("verdict.against")
class Against(Enum):
    """What a condition that does not hold stands against."""

    #: Relying on the posterior.
    RELIABLE = auto()
    #: Calling it exact.
    EXACT = auto()
    #: Calling it known well: its draws are few.
    SIZE = auto()
    #: Nothing: it is a remark.
    NOTHING = auto()


class Word(StrEnum):
    """What a verdict comes to."""

    EXACT = "exact"
    FEW_DRAWS = "exact, few draws"
    RELIABLE = "reliable"
    NOT_JUDGED = "not judged"
    NOT_RELIABLE = "not reliable"


@stored("verdict.condition")
class Condition(NamedTuple):
    """What is asked of a posterior.

    Parameters
    ----------
    name : str
        What was measured.
    figure, limit : float
        What it came to, and what it may be: at most, or at least.
    sentence : str
        What is said where it does not hold, a clause.
    against : Against, default Against.RELIABLE
        What it stands against then.
    at_least, is_excused : bool, default False
        Which way the limit goes; whether the figure does not matter.
    cure : str, default ""
        What may help, a sentence.
    """

    name: str
    figure: float
    limit: float
    sentence: str
    against: Against = Against.RELIABLE
    at_least: bool = False
    is_excused: bool = False
    cure: str = ""

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong; not where the figure is NaN."""
        return self.is_excused or (self.figure >= self.limit if self.at_least else self.figure <= self.limit)

    @property
    def text(self) -> str:
        """The clause as a sentence."""
        return f"{self.sentence[0].upper()}{self.sentence[1:]}."

    def __str__(self) -> str:
        """Return the sentence, and what may help."""
        return f"{self.text} {self.cure}".rstrip()


def heavy_tail(beyond: float) -> Condition:
    """Return what is asked of tails, where standard deviations are to mean something."""
    said = (
        f"tails are so heavy that a variance may not exist ({percent(beyond)} of it is beyond all draws): use quantiles"
    )
    return Condition(HEAVY, beyond, MOST_BEYOND, said)


def few_draws(name: str, size: float, wanted: float, what: str) -> list[Condition]:
    """Return what is asked of an effective size: with a part of what is wanted, a posterior is known less well."""
    said = f"{what} is {'unknown' if math.isnan(size) else f'{size:,.0f}'}, below"
    least = LEAST_PART * wanted
    return [
        Condition(name, size, least, f"{said} {least:,.0f}", at_least=True),
        Condition(name, size, wanted, f"{said} {wanted:,.0f}", Against.SIZE, at_least=True, is_excused=size < least),
    ]


@stored("verdict")
@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a posterior can be relied on: the one verdict that all reports read.

    A kind of posterior that can be exact has figures and conditions of its own.

    Parameters
    ----------
    found : tuple of Condition
        What tests of its draws have found.
    open : str
        Why no test could tell, a clause; empty where one could.
    cure : str
        What may help where its own conditions do not hold, a sentence.
    is_tested : bool
        Whether tests of draws were made, or asked for.
    n_fits : int
        Fits given globals.
    lacking : float
        Nats that their ELBOs lack.
    n_modes : int
        Modes that it began from, or that chains do not cross.
    is_same : bool
        Whether log p is that of the approximation, up to a constant.
    """

    found: tuple[Condition, ...] = ()
    n_fits: int = 0
    lacking: float = 0.0
    n_modes: int = 1
    open: str = ""
    cure: str = ""
    is_tested: bool = False
    is_same: bool = False

    @property
    def claims_exact(self) -> bool:
        """Whether the posterior is exact where all conditions hold."""
        return self.is_same

    @property
    def own(self) -> list[Condition]:
        """What is asked of a posterior of its kind."""
        return []

    @property
    def details(self) -> str:
        """What goes behind "exact"."""
        return ""

    @property
    def conditions(self) -> list[Condition]:
        """All that is asked of it."""
        return [*self.own, *self.found]

    @property
    def failed(self) -> list[Condition]:
        """What stands against relying on the posterior; empty if nothing does."""
        return [c for c in self.conditions if c.against is Against.RELIABLE and not c.holds]

    @property
    def failures(self) -> tuple[str, ...]:
        """The same in clauses."""
        return tuple(c.sentence for c in self.failed)

    @property
    def shortfalls(self) -> tuple[str, ...]:
        """What stands against calling the posterior exact and known well, in clauses."""
        return tuple(c.sentence for c in self.conditions if c.against is not Against.NOTHING and not c.holds)

    @property
    def cures(self) -> list[str]:
        """What may help, each once."""
        return list(dict.fromkeys(filter(None, [*(c.cure for c in self.failed), self.cure])))

    @property
    def word(self) -> Word:
        """The verdict in a word."""
        against = {c.against for c in self.conditions if not c.holds}
        if Against.RELIABLE in against:
            return Word.NOT_RELIABLE
        if self.open:
            return Word.NOT_JUDGED
        if Against.EXACT in against or not self.claims_exact:
            return Word.RELIABLE
        return Word.FEW_DRAWS if Against.SIZE in against else Word.EXACT

    @property
    def is_exact(self) -> bool:
        """Whether the posterior is exact up to Monte Carlo error, however large that is."""
        return self.word in (Word.EXACT, Word.FEW_DRAWS)

    @property
    def is_reliable(self) -> bool:
        """Whether the posterior can be relied on, as far as tests can tell."""
        return self.word not in (Word.NOT_RELIABLE, Word.NOT_JUDGED)

    @property
    def tells_limits(self) -> bool:
        """Whether limits and probabilities are exact, whatever tails do to moments."""
        return all(c.holds or c.name == HEAVY for c in self.conditions if c.against is not Against.NOTHING)

    @property
    def sentence(self) -> str:
        """The verdict in a sentence."""
        short = "; ".join(self.shortfalls)
        exact = "Exact: the posterior is Gaussian" if self.is_same else f"Exact up to Monte Carlo error{self.details}"
        match self.word:
            case Word.EXACT:
                return f"{exact}."
            case Word.FEW_DRAWS:
                return f"{exact}. There are few draws: {short}."
            case Word.RELIABLE:
                return f"A reliable approximation{', not exact: ' * bool(short)}{short}."
            case Word.NOT_JUDGED:
                return f"An approximation, not judged: {self.open}."
        return f"Not reliable: {'; '.join(self.failures)}."

    @property
    def brief(self) -> str:
        """The same in a clause for one line; empty where the posterior is exact, or not judged."""
        first = next((c.sentence.partition(": ")[0] for c in self.failed), "")
        clauses = {
            Word.FEW_DRAWS: "from few draws",
            Word.RELIABLE: "reliable",
            Word.NOT_RELIABLE: f"not reliable, {first}",
        }
        return clauses.get(self.word, "")

    def __str__(self) -> str:
        """Return the verdict, and what may help where it is a bad one."""
        return " ".join([self.sentence, *self.cures])


class PoolVerdict(Verdict):
    """That on weighted draws, which has figures and conditions of its own."""

    khat: float
    effective_size: float
    n_draws: int

    @property
    def claims_exact(self) -> bool:
        """Always."""
        return True

    @property
    def efficiency(self) -> float:
        """Part of the draws that is effective."""
        return self.effective_size / self.n_draws


#: Of a posterior before any test.
NOT_TESTED = Verdict(open="approx.diagnose() tells whether it is reliable")


# --- how much of a variance is farther out than any draw: integrals along lines through draws ---

#: Lines of each kind; coordinates along which they go, those in which draws are farthest out; distances on these, in
#: that of a draw, or in standard deviations.
_N_LINES, _FARTHEST, _DISTANCES = 16, 2, 2.0 ** np.arange(-4, 14)


def beyond_reach(log_p: Callable[[Array], Array], x: Array) -> float:
    """Return the part of the variance of draws, (n, d), that is farther out than any of them, the largest of several.

    Lines go through draws from their mean, and along coordinates in which some are far out. Along each, the second
    moment is an integral of exp(log p): where tails are so heavy that there is no standard deviation, nearly all of it
    is beyond what draws reach, wherever these have stopped.
    """
    mean, sd = x.mean(axis=0), np.maximum(x.std(axis=0), np.finfo(np.float64).tiny)  # draws may all have one value
    z = (x - mean) / sd
    some, farthest = z[:: -(-len(z) // _N_LINES)], np.abs(z).max(axis=0)
    ways = [(some, z.shape[1], float(np.linalg.norm(z, axis=1).max()))]
    for at in np.argsort(farthest)[-_FARTHEST:]:
        way = np.zeros_like(some)
        way[:, at] = np.where(some[:, at] < 0.0, -1.0, 1.0)
        ways.append((way, 1, float(farthest[at])))
    return max(_beyond(log_p, mean, sd, some, *way) for way in ways)


def _beyond(
    log_p: Callable[[Array], Array], mean: Array, sd: Array, some: Array, way: Array, n_dim: int, reach: float
) -> float:
    start = some - way * np.sum(some * way, axis=1, keepdims=True) / np.sum(way**2, axis=1, keepdims=True)
    points = start[:, None] + _DISTANCES[:, None] * way[:, None]
    with np.errstate(all="ignore"):
        values = log_p((mean + sd * points).reshape(-1, len(mean))).reshape(points.shape[:2])
        values[~np.isfinite(values)] = -np.inf
        lengths = _DISTANCES * np.linalg.norm(way, axis=1, keepdims=True)
        # What rises farther out is another mode, or rounding, and no tail.
        is_tail = ~((np.diff(values, axis=1) > 0.0) & (lengths[:, 1:] > reach)).any(axis=1)
    log_m = values[is_tail] + n_dim * np.log(_DISTANCES)
    m = np.exp(log_m - log_m.max(axis=1, keepdims=True))
    squares = lengths[is_tail] ** 2 * m / m.sum(axis=1, keepdims=True)
    return float(squares[lengths[is_tail] > reach].sum() / squares.sum()) if is_tail.any() else 0.0
