"""Callbacks of users, which a fit calls after each iteration."""

from collections.abc import Callable, Sequence

from pymc_ngvi.core.types import Array, VariationalState
from pymc_ngvi.fitting.session import Observer
from pymc_ngvi.results.approximation import NGVIApproximation

#: Called with the approximation, the losses (None without ``score``) and the number of the iteration.
type Callback = Callable[[NGVIApproximation, Array | None, int], object]


def observer_of(approx: NGVIApproximation, callbacks: Sequence[Callback]) -> Observer | None:
    """Return what calls them, with the approximation up to date; None where there are none."""

    def observe(q: VariationalState, losses: Array | None, n_iterations: int) -> None:
        approx.become(q)
        for callback in callbacks:
            callback(approx, losses, n_iterations)

    return observe if callbacks else None
