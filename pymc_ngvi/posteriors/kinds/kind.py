"""What the plan asks of a kind of posterior."""

import logging

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from pymc_ngvi.core.prices import Work
from pymc_ngvi.core.refusal import Unavailable
from pymc_ngvi.core.types import GaussianState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.fitting.record import spared
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.posteriors.plan import Candidate


class PosteriorStart(NamedTuple):
    """What a posterior begins from: a fit of all coordinates if there is one, others at other modes.

    By rows: whether values of log p are those of its rows. Of other data: whether the fit is one to these.
    """

    density: ModelDensity
    q: GaussianState | None
    seed: int
    others: list[GaussianState]
    by_rows: bool
    of_other_data: bool = False


class PosteriorKind[Found](ABC):
    """A kind of posterior: whether a model has it, what it takes and is worth, and how it is made.

    ``Found`` is what it goes by: trees, rows given hyperparameters. A kind is a subclass in a file of its own, and a
    row of `KINDS`.
    """

    #: The value of the option ``posterior`` that asks for it, which is what it is called.
    name: ClassVar[str]
    #: Seconds of any, at least: where another one takes fewer, it is not looked for.
    least: ClassVar[float] = 0.0
    #: Whether it may be made without a Gaussian fit before it.
    may_come_first: ClassVar[bool] = False
    #: Whether it is tried, without being asked for, only where nothing else can be relied on.
    is_last: ClassVar[bool] = False
    #: Part of its price after which it is known not to be exact.
    of_failure: ClassVar[float] = 1.0

    @property
    def title(self) -> str:
        """What is announced before it."""
        return f"{self.name.capitalize()} posterior"

    @abstractmethod
    def possible(self, density: ModelDensity) -> Found:
        """Return what it goes by; raise `Unavailable` with the reason where a model has none."""

    @abstractmethod
    def chance(self, found: Found) -> float:
        """Return the chance that it turns out to be exact."""

    @abstractmethod
    def seconds(self, found: Found, density: ModelDensity, *, by_rows: bool) -> float:
        """Return the estimated seconds that it takes."""

    def price(self, found: Found, density: ModelDensity, *, by_rows: bool) -> Candidate:
        """Return it as a candidate, with its seconds."""
        seconds = self.seconds(found, density, by_rows=by_rows)
        return Candidate(self.name, seconds=seconds, chance=self.chance(found), of_failure=self.of_failure)

    @abstractmethod
    def run(self, start: PosteriorStart, found: Found, work: Work, *, is_only: bool) -> PoolState:
        """Return the posterior; raise `Unavailable`: `UsedUp` if it takes too long, `Failed` if it is no use.

        ``work`` counts what it takes; ``is_only``: there is no other one to try after it.
        """

    def is_plain(self, found: Found) -> bool:
        """Tell whether nothing is integrated: then a Gaussian is seldom far off."""
        return False

    def comes_first(self, found: Found, *, by_rows: bool) -> bool:
        """Tell whether it is worth to be tried before any Gaussian fit, without being asked for."""
        return False


def if_available[Found](find: Callable[[ModelDensity], Found], density: ModelDensity) -> Found | None:
    """Return what a model is found to have for a kind of posterior; None where that is Unavailable."""
    try:
        with spared("Looking for a posterior", "It is left out.", logging.DEBUG):
            return find(density)
    except Unavailable:
        return None
