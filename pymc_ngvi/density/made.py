"""What was built of a model, a field for each part: fits that build nothing anew share it."""

import collections

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pytensor.compile import Function
from pytensor.compile.sharedvalue import SharedVariable

from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.refusal import Refused
from pymc_ngvi.core.values import Array
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.density.jets.evaluation import Jets
from pymc_ngvi.density.pointwise import Pointwise
from pymc_ngvi.density.row_space import SeenFromRows
from pymc_ngvi.reading.reading import Reading
from pymc_ngvi.reading.terms import Terms

#: From points, (n_points, n_dim), to values there.
type Batched = Callable[[Array], tuple[Array, ...]]


class Once[T]:
    """What is made when it is first asked for."""

    def __init__(self) -> None:
        self._made: tuple[T] | None = None

    @property
    def is_made(self) -> bool:
        """Whether it was asked for."""
        return self._made is not None

    @property
    def value(self) -> T:
        """What was made."""
        assert self._made is not None
        return self._made[0]

    def of(self, make: Callable[[], T]) -> T:
        """Return it, made now or earlier."""
        if self._made is None:
            self._made = (make(),)
        return self._made[0]


class OfTerms[T]:
    """What follows from rows, made once for the same data."""

    def __init__(self) -> None:
        self._made: tuple[Terms, T] | None = None

    @property
    def is_made(self) -> bool:
        """Whether it was asked for, with whatever data."""
        return self._made is not None

    def of(self, rows: Expectations, make: Callable[[Expectations], T]) -> T:
        """Return that of some rows, made now or earlier."""
        if self._made is None or self._made[0] is not rows.terms:
            self._made = (rows.terms, make(rows))
        return self._made[1]


class DataSeen:
    """The values of data at some time."""

    def __init__(self, shared: Sequence[SharedVariable]) -> None:
        self._shared = shared
        self._values = self._now()

    def _now(self) -> list[object]:
        return [variable.get_value(borrow=True) for variable in self._shared]

    def are_current(self) -> bool:
        """Tell whether the data are the same now, be it in other arrays."""
        now = self._now()
        if not all(map(_are_equal, now, self._values)):
            return False
        self._values = now
        return True


def _are_equal(one: object, other: object) -> bool:
    if one is other:
        return True
    return isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.array_equal(one, other)


@dataclass
class RowsFound:
    """The rows of a log density, or why it has none."""

    #: Log p taken apart, with whatever data; None where it did not come apart.
    reading: Reading | None = None
    #: The same for expectations.
    parts: Expectations | None = None
    #: Those that were seen to be all of log p.
    agreed: Terms | None = None
    #: Why there are no rows with the data that are in ``seen``.
    refused: Refused | None = None
    seen: DataSeen | None = None
    #: Whether second derivatives of rows were found to be wrong.
    no_hessian: bool = False
    derivatives: OfTerms[Any] = field(default_factory=OfTerms)
    hessian: OfTerms[Any] = field(default_factory=OfTerms)
    structure: OfTerms[Pattern | None] = field(default_factory=OfTerms)
    #: Of the Hessian by rows, with whatever data.
    last_structure: Pattern | None = None
    with_sums: OfTerms[SummedPattern | None] = field(default_factory=OfTerms)
    are_smooth: OfTerms[bool] = field(default_factory=OfTerms)
    from_rows: OfTerms[SeenFromRows | None] = field(default_factory=OfTerms)
    pointwise: OfTerms[Pointwise | None] = field(default_factory=OfTerms)


def _by_key() -> collections.defaultdict[Any, Once[Any]]:
    return collections.defaultdict(Once)


@dataclass
class Made:
    """What was built of a model."""

    #: At many points.
    logp: Once[Batched] = field(default_factory=Once)
    logp_grad: Once[Batched] = field(default_factory=Once)
    #: At points one by one, compiled quickly.
    logp_at_few: Once[Function] = field(default_factory=Once)
    #: Estimated time of a gradient, from rows or not.
    gradient_seconds: collections.defaultdict[bool, Once[float]] = field(default_factory=_by_key)
    jets: Once[Jets] = field(default_factory=Once)
    #: Products of Hessians with directions: at a point, and at draws.
    products: Once[Function] = field(default_factory=Once)
    coloured: Once[Function] = field(default_factory=Once)
    #: Of the Gauss-Newton matrix.
    squares: Once[Any] = field(default_factory=Once)
    row_gradients: Once[Any] = field(default_factory=Once)
    n_rows: Once[Function] = field(default_factory=Once)
    rest: Once[Function] = field(default_factory=Once)
    rows: RowsFound = field(default_factory=RowsFound)
    #: Log p as rows, its hyperparameters given; or why it is none.
    latent_rows: Once[Any] = field(default_factory=Once)
    #: The terms of a shard at its own coordinates.
    terms_of_shard: Once[Any] = field(default_factory=Once)
    #: The terms of log p, by the globals beside these.
    terms_beside: collections.defaultdict[tuple[int, ...], Once[Any]] = field(default_factory=_by_key)
    #: Functions of constrained values, by what is evaluated.
    constrained: collections.defaultdict[tuple[object, ...], Once[Any]] = field(default_factory=_by_key)
    #: Draws of discrete variables that were summed out.
    discrete: Once[Any] = field(default_factory=Once)

    @property
    def names(self) -> set[str]:
        """The fields of what was made."""
        return {name for name, value in vars(self).items() if isinstance(value, Once) and value.is_made}
