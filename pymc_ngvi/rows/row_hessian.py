"""Mean Hessians over draws of a sum over rows: elementwise second derivatives of each row, and products with X."""

import functools

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.messages import OtherForm, TooDenseError
from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.sizes import AT_ONCE, HELD
from pymc_ngvi.core.sparsity import CACHED_ELEMENTS, Dependence, Ints, Pairs
from pymc_ngvi.core.types import Array, MeanHessian, Rooted, Whitener
from pymc_ngvi.rows.expectation import Compiled, RowFunction, row_slices
from pymc_ngvi.rows.linear_map import LinearMap, consecutive

# --- mean Hessians that are known with respect to the linear predictors ---


#: Relative difference of two products with a random vector that is rounding.
_ROUNDING = 1e-8


#: What has ``pattern`` and ``summed``: these of a Hessian, known or found when they are asked for.
type Patterns = Any


class Known(NamedTuple):
    """Patterns that are known."""

    pattern: Pattern | None = None
    summed: SummedPattern | None = None


#: Of a Hessian of which no entries will be asked.
NO_PATTERNS = Known()


@dataclass(frozen=True, eq=False)
class PredictorMeanHessian(MeanHessian):
    """X^T M X for a symmetric sparse M."""

    #: The predictors.
    linear: LinearMap
    #: M; shape (n_predictors, n_predictors).
    matrix: sparse.csr_array
    #: Entries that `values` and `summed_values` return; asked only where one of these is.
    entries: Patterns = NO_PATTERNS

    @property
    def pattern(self) -> Pattern | None:
        """Entries that `values` returns; None where the matrix counts as dense."""
        return self.entries.pattern

    @property
    def summed(self) -> SummedPattern | None:
        """Entries that `summed_values` returns; None where there are no sums over many coordinates."""
        return self.entries.summed

    @functools.cached_property
    def _dense(self) -> Array:
        return self.linear.quadratic(self.matrix)

    def whitened(self, state: Whitener) -> Array:
        """Return the whitened curvature, as a state stores it."""
        if not isinstance(state, Rooted):
            return super().whitened(state)
        scale = np.diagonal(state.root)
        if np.count_nonzero(state.root) == len(scale):  # coordinates that are independent
            return -scale[:, None] * self._dense * scale
        return super().whitened(state)

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        if 2 * len(directions) < directions.shape[1]:
            return self.linear.quadratic_times(self.matrix, directions)
        return directions @ self._dense

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return self.linear.quadratic_diagonal(self.matrix)

    def values(self) -> Array:
        """Return the entries of the pattern, (n_entries,)."""
        pattern = self.pattern
        return super().values() if pattern is None else self._in(pattern, self.linear)

    def summed_values(self) -> Array:
        """Return the entries of `summed`, by coordinates and sums, (n_entries,)."""
        summed = self.summed
        return super().summed_values() if summed is None else self._in(summed.pattern, self.linear.joint)

    def _in(self, pattern: Pattern, linear: LinearMap) -> Array:
        values = linear.quadratic_entries(self.matrix, pattern)
        probe = np.random.default_rng(0).standard_normal((1, pattern.n_dim))
        expected = linear.quadratic_times(self.matrix, probe)[0]
        found = pattern.symmetric(values) @ probe[0]
        if np.abs(found - expected).max(initial=0.0) > _ROUNDING * np.abs(expected).max(initial=0.0):
            raise OtherForm("rows have entries that the pattern lacks")
        return values


# --- gradients of a sum over rows at many points: derivatives of each row by its predictors, and products with X ---


@dataclass(frozen=True, eq=False)
class RowDerivatives:
    """Rows with their derivatives by their predictors, those alone that are not 0 everywhere."""

    order: ClassVar[int]
    #: Returns the derivatives, at most (n_points, n_rows), from predictors and data; first ones come after the value.
    function: Compiled
    #: The predictors of each row; shape (n_rows, k).
    index: NDArray[np.int64]
    #: By which predictor of a row each derivative is, or by which pair of them, the first not before the second.
    by: list[tuple[int, ...]]
    #: (1, n_rows) or (1, 1) each.
    data: list[Array]
    #: How many of the first predictors are the same for all rows: the function takes these with one column.
    n_shared: int = 0

    @functools.cached_property
    def _columns(self) -> list[slice | Ints]:
        return [consecutive(column[:1] if a < self.n_shared else column) for a, column in enumerate(self.index.T)]


class FirstDerivatives(RowDerivatives):
    """The first derivatives of rows."""

    order = 1

    @property
    def places(self) -> list[NDArray[np.int64]]:
        """The predictors that derivatives are by, for each of ``by``: one where all rows share it."""
        return [self.index[:1, a] if a < self.n_shared else self.index[:, a] for [a] in self.by]

    def __call__(self, eta: Array) -> tuple[Array, list[Array]]:
        """Return the sum over rows, (n_points,), and derivatives, (n_places, n_points) each, at predictors."""
        shape = len(eta), len(self.index)
        found = self.function(*[eta[:, at] for at in self._columns], *self.data)
        value, *slopes = [x if x.shape == shape else np.broadcast_to(x, shape) for x in found]
        kinds = zip(self.by, slopes, strict=True)
        return value.sum(axis=1), [s.sum(axis=1)[None] if a < self.n_shared else s.T for [a], s in kinds]


#: Predictors of a row whose second derivatives are quickly compiled.
FEW_PREDICTORS = 5
#: Fourth power of the step of the differences that check a Hessian, for values and curvatures of about 1, and the
#: relative error that tells of a wrong one.
_STEP, _TOLERANCE = 1e-14, 1e-3


class SecondDerivatives(RowDerivatives):
    """The second derivatives of rows."""

    order = 2

    def add(self, eta: Array, total: Array) -> None:
        """Add the sums over draws to a total, (n_pairs, n_rows); ``eta`` is (n_draws, n_predictors)."""
        n_rows, at_a_time = len(self.index), getattr(self.function, "at_a_time", CACHED_ELEMENTS)
        for draws in row_slices(len(eta), max(1, at_a_time // max(n_rows, 1))):
            few = [eta[draws, at] for at in self._columns]
            with np.errstate(all="ignore"):  # densities overflow far from the mode: the caller sees it
                for of_pair, values in zip(total, self.function(*few, *self.data), strict=True):
                    of_pair += np.broadcast_to(values, (len(few[0]), n_rows)).sum(axis=0)

    def entries(self, mean: Array) -> Iterator[tuple[Array, Ints, Ints]]:
        """Return values, rows and columns of the Hessian by all predictors, from means, (n_pairs, n_rows)."""
        for (a, b), values in zip(self.by, mean, strict=True):
            yield values, self.index[:, a], self.index[:, b]
            if a != b:
                yield values, self.index[:, b], self.index[:, a]


def by_predictors(linear: LinearMap, derivatives: Sequence[SecondDerivatives], theta: Array) -> sparse.csr_array:
    """Return the mean Hessian with respect to the predictors over draws, (n_draws, n_dim)."""
    n, kinds = len(linear.offset), [kind for kind in derivatives if kind.by]
    totals = [np.zeros((len(kind.by), len(kind.index))) for kind in kinds]
    for draws in row_slices(len(theta), max(1, AT_ONCE // max(n, 1))):
        eta = linear(theta[draws])
        for kind, total in zip(kinds, totals, strict=True):
            kind.add(eta, total)
    parts = [p for kind, total in zip(kinds, totals, strict=True) for p in kind.entries(total / len(theta))]
    if not parts:
        return sparse.csr_array((n, n))
    values, i, j = (np.concatenate(part) for part in zip(*parts, strict=True))
    return sparse.csr_array((values, (i, j)), shape=(n, n))


def curvature_agrees(
    linear: LinearMap,
    matrix: sparse.csr_array,
    point: Array,
    values: Callable[[Array], Array],
    rng: np.random.Generator,
) -> bool:
    """Tell whether X^T M X at a point is, along a random line, what differences of values are there."""
    along = rng.standard_normal((1, len(point)))
    moved = linear.times(along)[0]
    size = float(np.abs(moved) @ (abs(matrix) @ np.abs(moved)))
    [here] = values(point[None])
    if not (size > 0.0 and np.isfinite(size) and np.isfinite(here)):
        return True
    step = (_STEP * (1.0 + abs(here)) / size) ** 0.25
    low, high = values(np.concatenate([point - step * along, point + step * along]))
    apart = (low - here) + (high - here) - step**2 * float(moved @ (matrix @ moved))
    return not np.isfinite(apart) or abs(apart) <= _TOLERANCE * step**2 * size


# --- derivatives of rows, added up by predictor ---


class Scatter:
    """Adds up gradients and Hessians of rows; where entries belong is found once."""

    def __init__(self, index: Sequence[Ints], n: int) -> None:
        self._n = n
        self._at = np.concatenate([kind.ravel() for kind in index])
        squares = [(kind[:, :, None] * n + kind[:, None, :]).ravel() for kind in index]
        entries, self._place = np.unique(np.concatenate(squares), return_inverse=True)
        self._columns = entries % n
        self._starts = np.searchsorted(entries, n * np.arange(n + 1))

    def __call__(self, grads: Sequence[Array], hessians: Sequence[Array]) -> tuple[Array, sparse.csr_array]:
        """Return the sums."""
        grad = np.bincount(self._at, np.concatenate([g.ravel() for g in grads]), minlength=self._n)
        values = np.concatenate([h.ravel() for h in hessians])
        sums = np.bincount(self._place, values, minlength=len(self._columns))
        return grad, sparse.csr_array((sums, self._columns, self._starts), shape=(self._n, self._n))


# --- the pattern of a Hessian that is a sum over rows: the coordinates that meet in a row ---


def pattern_of_rows(functions: Iterable[RowFunction], predictors: Dependence) -> Pattern | None:
    """Return where the Hessian of a sum over rows can differ from 0; None where these entries are too many to hold."""
    index, found = predictors.index.ravel(), Pairs(predictors.sets.shape[1])
    pairs = [(f.index[:, a], f.index[:, b]) for f in functions for a, b in np.argwhere(np.tril(f.interacts))]
    try:
        for rows, cols in pairs:
            used = np.ones(len(rows), dtype=bool)
            first = Dependence(predictors.sets, index[rows])
            if np.array_equal(rows, cols):
                found.add_within(first, used)
            else:
                found.add_across(first, Dependence(predictors.sets, index[cols]), used)
        return found.pattern(HELD)
    except TooDenseError:
        return None
