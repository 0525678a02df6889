"""What things cost, in estimated seconds on one thread: the one cost model behind every choice and every limit.

Estimates follow from counts of evaluations and the sizes of a model and its data, never from a clock: the same call
does the same on any machine, and on a busy one. ``tests/benchmarks/cost_model.py`` measures what the constants stand
for. What PyTensor's graphs cost to evaluate is in `pymc_ngvi.ops.cost`, in the same unit.
"""

import math

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import TINY
from pymc_ngvi.core.messages import Reason, Unavailable

#: An operation of a dense step, and of a sparse one.
PER_DENSE, PER_PRODUCT = 4.5e-11, 7e-11
#: Of fronts: a number, which is gathered and scattered; the calls of a step; the part of a step that each sum over many
#: coordinates adds; the part that a factor is, or covariances are, among many.
PER_ENTRY, OF_STEP, PER_SUM, OF_FACTOR = 1.5e-8, 2.5e-4, 1.8, 0.25
#: Of blocks beside a border: a number; the calls for each size.
PER_ENTRY_OF_BLOCKS, PER_SIZE = 6e-8, 4e-4
#: A call that evaluates rows, and a row of a value of log p.
PER_CALL, PER_ROW_OF_VALUE = 1e-4, 3.3e-8
#: A node of quadrature in trees, thousands of which are evaluated together, and a row there.
PER_NODE, PER_ROW_OF_NODE = 5e-6, 2e-8
#: A column of a Hessian at the draws of a step, in the smallest models.
PER_COLUMN = 1.5e-4
#: A value of log p, in gradients; an expectation over rows; a Hessian at least, and for each of its products: of rows,
#: as in regressions on many of them, which are products of matrices, and without rows.
OF_VALUE, OF_EXPECTATION, HESSIAN, OF_PRODUCT_BY_ROWS, OF_PRODUCT = 0.4, 15.0, 3.0, 0.3, 2.0
#: Gradients and Hessians of a fit that is yet to come, by draws; its expectations, by rows.
N_GRADIENTS, N_HESSIANS, N_EXPECTATIONS = 1_600, 1_200, 30
#: Seconds of such a fit by rows beside its expectations: choosing a start, steps, a look for other modes.
OF_FIT = 0.5


class Priced(Protocol):
    """What evaluations of a log density cost."""

    @property
    def gradient_seconds(self) -> float:
        """Of log p and its gradient at a point."""

    @property
    def n_products(self) -> int:
        """Products with vectors that a Hessian takes."""

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""

    @property
    def n_directions(self) -> int | None:
        """Predictors of its rows; None where log p is no sum over rows."""


# --- linear algebra ---------------------------------------------------------------------------------------------------


def parts_of_blocks(sizes: NDArray[np.integer], n_border: int) -> tuple[float, float, int]:
    """Return the operations in a step with blocks beside a border, numbers in the blocks, and sizes of these."""
    k, g = sizes.astype(np.float64), float(n_border)
    n_products = 3.0 * (np.sum(k**3 + k**2 * g + k * g**2) + g**3)
    return float(n_products), float(np.sum(k * (k + g))), len(set(sizes.tolist()))


def of_blocks(sizes: NDArray[np.integer], n_border: int) -> float:
    """Return the seconds of a step with blocks beside a border."""
    n_products, n_entries, n_sizes = parts_of_blocks(sizes, n_border)
    return PER_PRODUCT * n_products + PER_ENTRY_OF_BLOCKS * n_entries + PER_SIZE * n_sizes


def of_fronts(n_products: float, n_entries: float, n_sums: int = 0) -> float:
    """Return the seconds of a step with fronts, without its calls, beside sums over many coordinates."""
    return (PER_PRODUCT * n_products + PER_ENTRY * n_entries) * (1.0 + PER_SUM * n_sums)


def of_dense(n_dim: int) -> float:
    """Return the seconds of a step with a dense covariance."""
    return PER_DENSE * float(n_dim) ** 2 * n_dim


# --- evaluations and fits ---------------------------------------------------------------------------------------------


def _of_products(density: Priced, n_products: int) -> float:
    """Return what a Hessian costs, in gradients, that takes so many products."""
    return max(HESSIAN, (OF_PRODUCT if density.n_directions is None else OF_PRODUCT_BY_ROWS) * float(n_products))


def fit_seconds(density: Priced, n_gradients: int, n_hessians: int, estimator: str) -> float:
    """Return the seconds of so many evaluations; with ``"quadrature"``, gradients are expectations."""
    if estimator == "quadrature":
        return OF_EXPECTATION * n_gradients * density.gradient_seconds
    of_hessians = _of_products(density, density.n_products) * n_hessians if n_hessians else 0.0
    return (n_gradients + of_hessians) * density.gradient_seconds


def expected_fit_seconds(density: Priced, *, by_rows: bool = False) -> float:
    """Return the seconds of a fit that is yet to come: by rows, or by draws with a dense Hessian."""
    if by_rows:
        return OF_FIT + fit_seconds(density, N_EXPECTATIONS, N_EXPECTATIONS, "quadrature")
    return (N_GRADIENTS + _of_products(density, density.n_dim) * N_HESSIANS) * density.gradient_seconds


def of_value(gradient_seconds: float) -> float:
    """Return the seconds of a value of log p, of many at once: regressions took 0.2 to 0.45 of a gradient."""
    return max(OF_VALUE * gradient_seconds, TINY)  # a constant takes nothing


def of_node(n_rows: int, part: float = 1.0) -> float:
    """Return the seconds of a node of quadrature in trees with so many rows, or in a part of these trees."""
    return PER_NODE * part + PER_ROW_OF_NODE * n_rows


# --- what has been used up ---

#: How many times its price a posterior may take; seconds to which no price is known better.
MOST_TIMES, LEAST_PRICE = 2.0, 1.5


class UsedUp(Unavailable):
    """A posterior has taken what it may, or would take more: so many seconds in all, as far as can be told."""

    def __init__(self, sentence: str, seconds: float) -> None:
        super().__init__(Reason.TOO_LONG, sentence)
        self.seconds = seconds


class Work:
    """What a posterior has taken, and may take, in estimated seconds; no clock decides."""

    def __init__(self, price: float = math.inf, most: float = math.inf) -> None:
        self.price, self.spent, self.most = price, 0.0, most

    def may_take(self, seconds: float) -> bool:
        """Tell whether it may take so many seconds, where it turns out to take longer: up to that multiple, too.

        They are its price then, as far as there is so much left.
        """
        price = max(self.price, min(seconds, self.most))
        may_take = seconds <= MOST_TIMES * price
        self.price = price if may_take else self.price
        return may_take

    @property
    def left(self) -> float:
        """What is left of a multiple of the price."""
        return MOST_TIMES * max(self.price, LEAST_PRICE) - self.spent

    def count(self, seconds: float) -> None:
        """Count what is taken, and end at a multiple of the price."""
        self.spent += seconds
        if self.left < 0.0:
            raise UsedUp(f"it was stopped after {in_words(self.spent)}", MOST_TIMES * self.spent)

    def expect(self, seconds: float) -> None:
        """Take what it turns out to take as its price, and end where that is more than there is."""
        if not self.may_take(seconds):
            raise UsedUp(f"it would take {in_words(seconds)}", seconds)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count all that is evaluated in this context."""
        token = _WORK.set(self)
        try:
            yield
        finally:
            _WORK.reset(token)


_NO_LIMIT = Work()
_WORK: ContextVar[Work] = ContextVar("work", default=_NO_LIMIT)


def count(seconds: float) -> None:
    """Count what an evaluation takes, where there is a limit."""
    _WORK.get().count(seconds)


def left() -> float:
    """Return the seconds that are left here."""
    return _WORK.get().left


def expect(times: float) -> None:
    """Expect so many times as much again as was taken so far, where there is a limit."""
    work = _WORK.get()
    work.expect((1.0 + times) * work.spent)


# --- in words ---------------------------------------------------------------------------------------------------------


#: In seconds, and in minutes.
_MINUTE = _HOUR = 60.0


def in_words(seconds: float) -> str:
    """Return seconds in words: about 0.4 s, about 40 s, about 12 min."""
    if seconds < 2.0 * _MINUTE:
        return f"about {seconds:{'.0f' if seconds >= 1.0 else '.1g'}} s"
    minutes = seconds / _MINUTE
    return f"about {minutes:.0f} min" if minutes < 2.0 * _HOUR else f"about {minutes / _HOUR:,.0f} h"


def rounded_up(seconds: float) -> float:
    """Return a round number that is not less."""
    unit = 10.0 ** max(math.ceil(math.log10(max(seconds, 1.0) / 50.0)), 0)
    return unit * -(-seconds // unit)
