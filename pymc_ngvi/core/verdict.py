"""Whether a posterior can be called exact, or relied on: conditions, each with its figure, and what is said of them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core.messages import percent
from pymc_ngvi.core.types import Array

#: Part of a variance that may be farther out than all draws: of a Student t with 3 degrees of freedom, at most 0.16 of
#: 10 is, and of products with lognormals 0.21; with 2.2, 0.3 to 0.5; with 1.2, 0.7 and more.
MOST_BEYOND, HEAVY = 0.6, "heavy tail"


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
    is_vital : bool, default True
        Whether the posterior can't be relied on without it; else it can only not be called exact.
    at_least, is_excused : bool, default False
        Which way the limit goes; whether the figure does not matter.
    """

    name: str
    figure: float
    limit: float
    sentence: str
    is_vital: bool = True
    at_least: bool = False
    is_excused: bool = False

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong; not where the figure is NaN."""
        return self.is_excused or (self.figure >= self.limit if self.at_least else self.figure <= self.limit)


def heavy_tail(beyond: float) -> Condition:
    """Return what is asked of tails, where standard deviations are to mean something."""
    said = f"{percent(beyond)} of a variance is farther out than all draws, if there is a variance: go by limits"
    return Condition(HEAVY, beyond, MOST_BEYOND, said)


class Verdict:
    """What conditions come to; a kind of posterior has its figures, its conditions and its words."""

    khat: float
    effective_size: float
    n_fits: int
    lacking: float
    n_modes: int = 1

    @property
    def conditions(self) -> list[Condition]:
        """All that is asked."""
        raise NotImplementedError

    @property
    def efficiency(self) -> float:
        """Part of the draws that is effective."""
        raise NotImplementedError

    @property
    def sentence(self) -> str:
        """The verdict in a sentence or two."""
        raise NotImplementedError

    @property
    def failures(self) -> tuple[str, ...]:
        """What stands against relying on the posterior, in clauses; empty if nothing does."""
        return tuple(c.sentence for c in self.conditions if c.is_vital and not c.holds)

    @property
    def shortfalls(self) -> tuple[str, ...]:
        """What stands against calling the posterior exact, in clauses."""
        return tuple(c.sentence for c in self.conditions if not c.holds)

    @property
    def is_exact(self) -> bool:
        """Whether nothing stands against calling the posterior exact up to simulation error."""
        return not self.shortfalls

    @property
    def is_reliable(self) -> bool:
        """Whether nothing stands against relying on the posterior."""
        return not self.failures

    @property
    def tells_limits(self) -> bool:
        """Whether limits and probabilities are exact, whatever tails do to moments."""
        return all(c.holds or c.name == HEAVY for c in self.conditions)


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
    mean, sd = x.mean(axis=0), x.std(axis=0)
    z = (x - mean) / sd
    some, farthest = z[:: -(-len(z) // _N_LINES)], np.abs(z).max(axis=0)
    ways = [(some, z.shape[1], float(np.linalg.norm(z, axis=1).max()))]
    for at in np.argsort(farthest)[-_FARTHEST:]:
        way = np.zeros_like(some)
        way[:, at] = np.sign(some[:, at])
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
