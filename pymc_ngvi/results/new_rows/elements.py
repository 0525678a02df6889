"""Elements that were not in the fit, such as effects of new groups, given the rows that depend on them.

They are drawn from their prior given all else, many times for each draw of the posterior. The mean density of their
rows over these candidates is the predictive density of the rows, and one of the candidates is picked by it: importance
sampling for each new group by itself, which does not suffer from their number.
"""

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.results.new_rows.given import NewRows, Values

type Ints = NDArray[np.intp]

#: Candidates at first and at most; variance of log densities, in all, from which on there are more.
_FIRST, _MOST, _MOST_VARIANCE = 32, 1_024, 0.1
#: Numbers held at once.
_HELD = 2**26


@dataclass(frozen=True, eq=False)
class NewElements:
    """New elements at draws of the posterior.

    Parameters
    ----------
    log_ratio : ndarray, shape (n,)
        Log predictive density of the rows that depend on them.
    drawn : dict of str to ndarray
        The variables that have them, (n, *shape).
    variance : float
        Of the error of ``log_ratio``.
    """

    log_ratio: Array
    drawn: dict[str, AnyArray]
    variance: float


def rows_on_new(rows: NewRows) -> tuple[sparse.csr_array, dict[str, Ints]]:
    """Return which rows depend on which new elements, (n_rows, n_numbers), and the numbers of the elements.

    Elements have the same number where they belong together: those of a new level, in all variables of its dim; and
    those of a walk or a process. Others have -1.
    """
    numbers = _numbers(rows)
    n = 1 + max(int(of.max()) for of in numbers.values())
    free = rows.free(rows.point)
    first, second = (rows.drawn(free, seed) for seed in (0, 1))
    same = rows.logp(rows.known(free, first))
    # In each of so many points, the elements of one number are other ones.
    moved = {
        name: np.where(of == np.arange(n).reshape(-1, *(1,) * of.ndim), second[name], first[name])
        for name, of in numbers.items()
    }
    many = {name: np.repeat(values, n, axis=0) for name, values in free.items()}
    return sparse.csr_array((rows.logp(rows.known(many, moved)) != same).T), numbers


def with_new_elements(
    rows: NewRows, free: Values, depends: sparse.csr_array, numbers: dict[str, Ints], rng: np.random.Generator
) -> NewElements:
    """Return new elements at draws of the free variables.

    Parameters
    ----------
    rows : NewRows
    free : mapping of str to ndarray
        As in the fit, (n, *shape).
    depends : csr_array, shape (n_rows, n_numbers)
    numbers : dict of str to ndarray
    rng : numpy.random.Generator
    """
    which = np.flatnonzero(np.diff(depends.indptr))
    few = rows.only(which)
    rows, depends = (rows, depends) if few is None else (few, depends[which])
    # Numbers that a row has in common are drawn together.
    n_parts, part = csgraph.connected_components(depends.T @ depends, directed=False)
    which = np.flatnonzero(np.diff(depends.indptr))
    of_row = part[depends.indices[depends.indptr[which]]]
    sums = sparse.csr_array((np.ones(len(which)), (of_row, which)), shape=(n_parts, depends.shape[0]))
    chosen = _Candidates(n_parts, {name: np.where(of < 0, -1, part[of]) for name, of in numbers.items()}, rng)
    n_new = sum(int((of >= 0).sum()) for of in numbers.values())
    most = max(_FIRST, min(_MOST, _HELD // (len(next(iter(free.values()))) * (n_parts + n_new))))
    for i in range(most):
        drawn = rows.drawn(free, int(rng.integers(2**31)))
        chosen.add(drawn, (sums @ rows.logp(rows.known(free, drawn)).T).T)
        if i + 1 >= _FIRST and chosen.variance < _MOST_VARIANCE:
            break
    return NewElements(chosen.log_mean.sum(axis=1), chosen.drawn, chosen.variance)


class _Candidates:
    """Candidates of each part, of which one is kept, with a chance in proportion to its weight."""

    drawn: dict[str, AnyArray]

    def __init__(self, n_parts: int, parts: dict[str, Ints], rng: np.random.Generator) -> None:
        self._parts, self._rng, self._n = parts, rng, 0
        self._log_sum = self._log_square = np.full((1, n_parts), -np.inf)

    def add(self, drawn: dict[str, AnyArray], log_density: Array) -> None:
        """Add one candidate of all parts: their log densities are (n, n_parts)."""
        self._n += 1
        log_density = np.where(np.isfinite(log_density), log_density, -np.inf)
        if self._n == 1:
            self.drawn = dict(drawn)
        self._log_sum = np.logaddexp(self._log_sum, log_density)
        self._log_square = np.logaddexp(self._log_square, 2.0 * log_density)
        if self._n == 1:
            return
        with np.errstate(invalid="ignore"):
            taken = np.log(self._rng.random(log_density.shape)) < log_density - self._log_sum
        for name, part in self._parts.items():
            of_element = taken[:, np.maximum(part, 0)] & (part >= 0)
            self.drawn[name] = np.where(of_element, drawn[name], self.drawn[name])

    @property
    def log_mean(self) -> Array:
        """Logarithms of means over candidates, (n, n_parts)."""
        result: Array = self._log_sum - np.log(self._n)
        return result

    @property
    def variance(self) -> float:
        """Variance of the error of the sum of `log_mean` over parts, in the mean over draws."""
        with np.errstate(invalid="ignore"):
            of_weights = np.exp(self._log_square - 2.0 * self._log_sum) - 1.0 / self._n
        return float(np.nan_to_num(of_weights, nan=1.0).sum(axis=1).mean())


def _numbers(rows: NewRows) -> dict[str, Ints]:
    """Return the number of what each element belongs to, by variable; -1 for those that were in the fit."""
    known: dict[object, int] = {}
    result = {}
    for name in rows.grown:
        new = rows.is_new[name]
        axis = next((i for i in range(new.ndim) if not rows.is_continued(name) and _varies_along(new, i)), None)
        if axis is None:
            result[name] = np.where(new, known.setdefault(name, len(known)), -1)
            continue
        label, along = rows.labels(name, axis), np.full(new.shape[axis], -1, dtype=np.intp)
        for i in np.unique(np.nonzero(new)[axis]).tolist():
            along[i] = known.setdefault((label, i), len(known))
        result[name] = np.where(new, along.reshape([-1 if i == axis else 1 for i in range(new.ndim)]), -1)
    return result


def _varies_along(new: NDArray[np.bool_], axis: int) -> bool:
    """Tell whether whole slices of an array are new, or are not."""
    others = tuple(i for i in range(new.ndim) if i != axis)
    return bool((new == new.any(axis=others, keepdims=True)).all())
