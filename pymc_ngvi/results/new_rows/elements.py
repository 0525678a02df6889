"""Elements that were not in the fit, such as effects of new groups, given the rows that depend on them.

They are drawn many times for each draw of the posterior: from their prior given all else, and, where they may have any
values, about where their rows say that they are. The mean weight of these candidates is the predictive density of the
rows, and one of them is picked by its weight: importance sampling for each new group by itself, which does not suffer
from their number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.marginal.student_mixture import StudentMixture
from pymc_ngvi.results.new_rows.given import NewRows, Values, length_of

type Ints = NDArray[np.intp]

#: Candidates at first and at most; variance of log densities, in all, from which on there are more.
_FIRST, _MOST, _MOST_VARIANCE = 8, 1_024, 0.1
#: Candidates from the prior that tell where new elements are; part of the later ones that are from it; how much wider
#: the others are, and their degrees of freedom.
_PILOTS, _FROM_PRIOR, _WIDER, _DF = 4, 0.2, 1.3, 7.0
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
    same = rows.known(free, first)
    # In each of so many points, the elements of one number are other ones.
    moved = {
        name: np.where(of == np.arange(n).reshape(-1, *(1,) * of.ndim), second[name], first[name])
        for name, of in numbers.items()
    }
    many = rows.known({name: np.repeat(values, n, axis=0) for name, values in free.items()}, moved)
    depends = sparse.csr_array((rows.logp(many) != rows.logp(same)).T)
    part = _tied(rows, numbers, same, many)
    joined = sparse.csr_array((np.ones(n, dtype=bool), (np.arange(n), part)))
    return depends @ joined, {name: np.where(of < 0, -1, part[of]) for name, of in numbers.items()}


def with_new_elements(
    rows: NewRows, free: Values, log_weights: Array, depends: sparse.csr_array, numbers: dict[str, Ints],
    rng: np.random.Generator,
) -> NewElements:  # fmt: skip
    """Return new elements at draws of the free variables.

    Parameters
    ----------
    rows : NewRows
    free : mapping of str to ndarray
        As in the fit, (n, *shape).
    log_weights : ndarray, shape (n,)
        Of the draws, with the rows that depend on nothing new.
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
    part_of = {name: np.where(of < 0, -1, part[of]) for name, of in numbers.items()}
    proposal = _Proposal(rows, free, part_of, n_parts, rng)
    chosen = _Candidates(n_parts, part_of, rng)

    def of_rows(drawn: Values) -> Array:
        return (sums @ rows.logp(rows.known(free, drawn)).T).T

    if rows.is_free:
        pilots = [rows.drawn(free, int(rng.integers(2**31))) for _ in range(_PILOTS)]
        proposal.learn(pilots, [of_rows(drawn) for drawn in pilots], log_weights)
    most = max(_FIRST, min(_MOST, _HELD // (len(log_weights) * (n_parts + proposal.n_elements))))
    for i in range(most):
        drawn, log_ratio = proposal.draw()
        chosen.add(drawn, of_rows(drawn) + log_ratio)
        if i + 1 >= _FIRST and chosen.variance < _MOST_VARIANCE:
            break
    return NewElements(chosen.log_mean.sum(axis=1), chosen.drawn, chosen.variance)


def _tied(rows: NewRows, numbers: dict[str, Ints], same: Values, many: Values) -> Ints:
    """Return one number for those of which one is a parameter of the prior of another, as a school is of its class."""
    n = length_of(many)
    if len(numbers) < 2:
        return np.arange(n)
    if not rows.has_elementwise_priors:
        return np.zeros(n, dtype=np.intp)
    before, after, ties = rows.prior_logp(same), rows.prior_logp(many), np.eye(n, dtype=bool)
    for name, of in numbers.items():
        moved, element = np.nonzero((after[name] != before[name]).reshape(n, -1) & (of.ravel() >= 0))
        ties[moved, of.ravel()[element]] = True
    return csgraph.connected_components(sparse.csr_array(ties), directed=False)[1].astype(np.intp)


class _Proposal:
    """Where candidates are drawn: from the prior; and, once it has learned, mostly about where rows say that they are.

    Parameters
    ----------
    rows : NewRows
    free : mapping of str to ndarray
    parts : dict of str to ndarray of int
        The part that each element belongs to, by variable; -1 for those that were in the fit.
    n_parts : int
    rng : numpy.random.Generator
    """

    def __init__(
        self, rows: NewRows, free: Values, parts: dict[str, Ints], n_parts: int, rng: np.random.Generator
    ) -> None:
        self._rows, self._free, self._n_parts, self._rng = rows, free, n_parts, rng
        self._places = {name: np.flatnonzero(of >= 0) for name, of in parts.items()}
        self._part = np.concatenate([parts[name].ravel()[at] for name, at in self._places.items()])
        shape = (n_parts, len(self._part))
        self._sums = sparse.csr_array((np.ones(len(self._part)), (self._part, np.arange(len(self._part)))), shape=shape)
        self._learned: list[tuple[Ints, Array, Array]] | None = None

    @property
    def n_elements(self) -> int:
        """Number of new elements."""
        return len(self._part)

    def learn(self, pilots: Sequence[Values], log_density: Sequence[Array], log_weights: Array) -> None:
        """Learn where elements are, from draws of their prior with the log densities of their rows, (n, n_parts)."""
        values = np.concatenate([self._elements(drawn) for drawn in pilots])
        log_all = np.concatenate([of + log_weights[:, None] for of in log_density])
        learned = []
        for p in range(self._n_parts):
            at, of_part = np.flatnonzero(self._part == p), log_all[:, p]
            w = np.exp(of_part - of_part.max()) if np.isfinite(of_part.max()) else np.ones(len(of_part))
            w /= w.sum()
            mean = w @ values[:, at]
            apart = values[:, at] - mean
            cov, wide = (apart.T * w) @ apart, np.diag(values[:, at].var(axis=0))
            few = len(at) / (len(at) + 1.0 / np.sum(w**2))  # of few effective draws, moments are those of the prior
            learned.append((at, mean, _WIDER * np.linalg.cholesky((1.0 - few) * cov + few * wide)))
        self._learned = learned

    def draw(self) -> tuple[dict[str, AnyArray], Array]:
        """Return one candidate of all parts, and its log density under the prior over that here, (n, n_parts)."""
        drawn, rng = self._rows.drawn(self._free, int(self._rng.integers(2**31))), self._rng
        values = self._elements(drawn)
        n = len(values)
        if self._learned is None:
            return drawn, np.zeros((n, self._n_parts))
        from_prior = rng.random((n, self._n_parts)) < _FROM_PRIOR
        log_q = np.empty((n, self._n_parts))
        for p, (at, mean, factor) in enumerate(self._learned):
            z = rng.standard_normal((n, len(at))) / np.sqrt(rng.chisquare(_DF, n) / _DF)[:, None]
            values[:, at] = np.where(from_prior[:, [p]], values[:, at], mean + z @ factor.T)
            log_q[:, p] = _log_t(values[:, at], mean, factor)
        drawn = self._with(drawn, values)
        prior = self._rows.prior_logp(self._rows.known(self._free, drawn))
        log_prior = (self._sums @ self._elements(prior).T).T
        mixed = np.logaddexp(np.log(_FROM_PRIOR) + log_prior, np.log1p(-_FROM_PRIOR) + log_q)
        return drawn, log_prior - mixed

    def _elements(self, drawn: Values) -> Array:
        """Return all new elements, (n, n_elements)."""
        parts = [np.asarray(drawn[name]).reshape(len(drawn[name]), -1)[:, at] for name, at in self._places.items()]
        return np.concatenate(parts, axis=1).astype(np.float64)

    def _with(self, drawn: Values, values: Array) -> dict[str, AnyArray]:
        """Return variables with new elements in their places."""
        ends = np.cumsum([len(at) for at in self._places.values()])[:-1]
        result = {}
        for (name, at), of_name in zip(self._places.items(), np.split(values, ends, axis=1), strict=True):
            flat = np.array(drawn[name]).reshape(len(values), -1)
            flat[:, at] = of_name
            result[name] = flat.reshape(drawn[name].shape)
        return result


def _log_t(x: Array, mean: Array, factor: Array) -> Array:
    """Return log densities of a multivariate Student t, (n,)."""
    return StudentMixture(np.ones(1), mean[None], factor[None], _DF).log_density(x)


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
        return self._log_sum - np.log(self._n)

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
