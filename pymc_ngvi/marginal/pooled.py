"""A distribution of flat vectors that is a weighted pool of globals, and something for the others given these."""

import functools
import uuid
import weakref

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.proposals import effective_size
from pymc_ngvi.marginal.sampling import Pool, Sampled, Sequences, relative_sd_errors

_KNOWN: "weakref.WeakValueDictionary[int, PoolState]" = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class PoolState:
    """The globals of a posterior as a weighted pool.

    Parameters
    ----------
    sampled : Sampled
        Globals as weighted draws.
    sequences : Sequences
        Make more of them.
    gaussian : GaussianState
        The fit that it began from.
    others : tuple of GaussianState
        Fits at other modes, where it began as well.
    number : int
        Stands for it among the shared variables of a graph; the same when it is pickled.
    """

    sampled: Sampled
    sequences: Sequences
    gaussian: Any
    others: tuple[Any, ...] = field(default=(), kw_only=True)
    number: int = field(default_factory=lambda: uuid.uuid4().int >> 66, kw_only=True)

    #: What it is called among the shared variables of a graph, and in errors.
    kind: ClassVar[str]
    #: What is computed when it is asked for, and not pickled.
    computed: ClassVar[tuple[str, ...]] = ("_last", "sd_errors")

    def __post_init__(self) -> None:
        _KNOWN[self.number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes it again: the one of that number, where it is there still."""
        parts = {k: v for k, v in self.__dict__.items() if k not in self.computed}
        return _restored, (type(self), self.number, parts)

    def params(self) -> dict[str, Array]:
        """Return what stands for the state among the shared variables of a graph: its number, and the pool."""
        return {
            self.kind: np.array([self.number]),
            "globals": self.pool.g,
            "log_weights": self.log_weights,
        }

    @classmethod
    def from_params(cls, params: dict[str, Array]) -> Self:
        """Return the state with these parameters.

        Raises
        ------
        ValueError
            If it is not in memory any more.
        """
        known = _KNOWN.get(int(params[cls.kind][0]))
        if not isinstance(known, cls):
            raise ValueError(
                f"No {cls.kind} posterior has this number: arrays alone don't tell it. Keep, or pickle, the "
                "approximation that they come from."
            )
        return known

    @property
    def pool(self) -> Pool:
        """The weighted draws of the globals."""
        return self.sampled.pool

    @functools.cached_property
    def _smoothed(self) -> tuple[Array, float]:
        return self.pool.weights()

    @property
    def weights(self) -> Array:
        """Smoothed weights of the pool, (n,); they add up to 1."""
        return self._smoothed[0]

    @property
    def log_weights(self) -> Array:
        """Their logarithms."""
        with np.errstate(divide="ignore"):
            return np.log(self.weights)

    @property
    def khat(self) -> float:
        """Pareto k-hat of the weights."""
        return self._smoothed[1]

    @property
    def effective_size(self) -> float:
        """Effective number of draws of the globals."""
        return effective_size_of(self.weights)

    @functools.cached_property
    def sd_errors(self) -> Array:
        """Relative standard errors of the standard deviations of the globals, (n_globals,), from their weights."""
        return relative_sd_errors(self.pool.g, self.weights)

    def for_draws(self, n: int) -> Pool:
        """Return a pool whose effective size is ``n``, as far as the budget goes; the last one is kept."""
        if n <= self.effective_size:
            return self.pool
        if self._last.get("n") != n:
            pool = self.sequences.enlarged(self.pool, self.sampled.proposal, n)
            self._last.update(n=n, pool=pool)
        result: Pool = self._last["pool"]
        return result

    @functools.cached_property
    def _last(self) -> dict[str, Any]:
        return {}

    def effective_size_for(self, n: int) -> float:
        """Return the effective size of the pool that ``n`` draws are taken from."""
        pool = self.for_draws(n)
        return self.effective_size if pool is self.pool else effective_size_of(pool.weights()[0])

    def effective_size_for_globals(self, n: int) -> float:
        """Return the effective size of the globals that ``n`` draws are taken from."""
        return self.effective_size_for(n)

    def effective_for(self, n: int) -> float:
        """Return how many independent draws ``n`` of its draws are worth."""
        reached = effective_size(self.for_draws(n).log_ratio) >= n
        return float(n) if reached else min(float(n), self.effective_size_for(n))

    def draws_with_ratio(self, n: int) -> tuple[Array, Array] | None:
        """Return draws that are not weighted given their globals, and log weights they would have; None without."""
        return None

    def weight_of(self, theta: Array) -> Array | None:
        """Return the log weights by which draws were picked, (n_draws,); None where only globals have some."""
        return None

    def __copy__(self) -> Self:
        """Return itself: nothing of it changes."""
        return self


def _restored(cls: type[PoolState], number: int, parts: dict[str, Any]) -> PoolState:
    known = _KNOWN.get(number)
    if known is not None:
        return known
    state = cls.__new__(cls)
    vars(state).update(parts)
    state.__post_init__()
    return state


def effective_size_of(weights: Array) -> float:
    """Return the effective number of draws of some weights that add up to 1."""
    return float(1.0 / np.sum(weights**2))
