"""A log density given some of its coordinates, which get a narrow Gaussian of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.types import (
    Array,
    BentRowsTarget,
    Density,
    Expectation,
    MeanHessian,
    RowRules,
    RowsTarget,
    Spread,
    mean_hessians,
)


class Conditioned:
    """The density of the other coordinates given some, times a Gaussian of these.

    A fit of it is one of the conditional posterior, by any family, in the coordinates of the whole.

    Parameters
    ----------
    target : Density
    index : ndarray of int, shape (n_given,)
        Coordinates that are given.
    point, sd : ndarray, shape (n_given,)
        Of their Gaussian; what the others are given is ``point``.
    """

    def __init__(self, target: Density, index: NDArray[np.intp], point: Array, sd: Array) -> None:
        self._target, self._index, self._point, self._sd = target, index, point, sd
        self.n_dim = target.n_dim

    @property
    def has_hessian(self) -> bool:
        """Whether every operation of the model has a second derivative."""
        return self._target.has_hessian

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p, (n_draws,), and its gradient, (n_draws, n_dim)."""
        logp, grad = self._target.logp_grad(self._given(theta))
        standard = (theta[:, self._index] - self._point) / self._sd
        grad = grad.copy()
        grad[:, self._index] = -standard / self._sd
        return logp - 0.5 * np.sum(standard**2, axis=1), grad

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the mean of hess log p over draws."""
        return self.mean_hessians([theta])[0]

    def mean_hessians(self, draws: list[Array]) -> list[MeanHessian]:
        """Return the mean of hess log p over each of several sets of draws, together where the whole has them so."""
        found = mean_hessians(self._target, [self._given(theta) for theta in draws])
        return [_GivenHessian(hessian, self._index, self._sd**2, self.n_dim) for hessian in found]

    def expected(
        self, q: Spread, rules: RowRules | None = None, *, adapt: bool = False, least: float = -np.inf
    ) -> Expectation:
        """Return the expectation under a Gaussian, where that of the whole is known without draws."""
        given = _Given(q, self._index, self._point)
        apart = q.location[self._index] - self._point
        square = (apart**2 + q.covariances(self._index, self._index)) / self._sd**2
        own = -0.5 * float(square.sum())
        whole = cast(RowsTarget, self._target).expected(given, rules, adapt=adapt, least=least - own)
        grad = whole.grad.copy()
        grad[self._index] = -apart / self._sd**2
        hessian = _GivenHessian(whole.hessian, self._index, self._sd**2, self.n_dim)
        return whole._replace(value=whole.value + own, grad=grad, hessian=hessian)

    def directions(self, rows: NDArray[np.intp]) -> Array:
        """Return the slopes of the only predictor of each of some rows; see `BentRowsTarget`."""
        slopes = cast(BentRowsTarget, self._target).directions(rows)
        slopes[:, self._index] = 0.0
        return slopes

    def rows_cover(self, draw: Callable[[], Array]) -> bool:
        """Tell whether rows are all of log p at draws; see `RowsTarget`."""
        return cast(RowsTarget, self._target).rows_cover(lambda: self._given(draw()))

    def _given(self, theta: Array) -> Array:
        given = theta.copy()
        given[:, self._index] = self._point
        return given


class _Given:
    """A Gaussian with some coordinates at a point."""

    def __init__(self, q: Spread, index: NDArray[np.intp], point: Array) -> None:
        self._q, self._is_given = q, np.zeros(len(q.location), dtype=bool)
        self._is_given[index] = True
        self.location = q.location.copy()
        self.location[index] = point

    def covariances(self, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> Array:
        """Return entries of the covariance, (n,)."""
        return np.where(self._is_given[rows] | self._is_given[cols], 0.0, self._q.covariances(rows, cols))

    def covariance_times(self, vectors: Array) -> Array:
        """Return the covariance times each vector, (n_vectors, n_dim)."""
        result = self._q.covariance_times(np.where(self._is_given, 0.0, vectors))
        result[:, self._is_given] = 0.0
        return result


@dataclass(frozen=True)
class _GivenHessian(MeanHessian):
    """Some rows and columns are 0 but for the diagonal: minus the inverse of ``variance``, (n_given,)."""

    whole: MeanHessian
    index: NDArray[np.intp]
    variance: Array
    n_dim: int

    @property
    def pattern(self) -> Pattern | None:
        """That of the whole."""
        return self.whole.pattern

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        free = directions.copy()
        free[:, self.index] = 0.0
        products = self.whole.products(free)
        products[:, self.index] = -directions[:, self.index] / self.variance
        return products

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        diagonal = self.whole.diagonal()
        diagonal[self.index] = -1.0 / self.variance
        return diagonal

    def values(self) -> Array:
        """Return the entries of ``pattern``, (n_entries,)."""
        pattern = self.pattern
        assert pattern is not None
        return self._given(pattern, self.whole.values())

    @property
    def summed(self) -> SummedPattern | None:
        """That of the whole; None where a sum has one of the given coordinates."""
        summed = self.whole.summed
        return None if summed is None or summed.weights[:, self.index].any() else summed

    def summed_values(self) -> Array:
        """Return the entries of ``summed``, (n_entries,)."""
        summed = self.summed
        return super().summed_values() if summed is None else self._given(summed.pattern, self.whole.summed_values())

    def _given(self, pattern: Pattern, of_whole: Array) -> Array:
        values, own = of_whole.copy(), np.zeros(pattern.n_dim)
        own[self.index] = -1.0 / self.variance
        is_given = own != 0.0
        values[is_given[pattern.rows] | is_given[pattern.cols]] = 0.0
        diagonal = is_given[pattern.rows] & (pattern.rows == pattern.cols)
        values[diagonal] = own[pattern.rows[diagonal]]
        return values
