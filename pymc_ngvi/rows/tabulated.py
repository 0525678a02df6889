"""Rows whose function is dear: polynomials in their only predictor stand for it where their Gaussian has its mass."""

from dataclasses import dataclass, field

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.normal_rules import rule
from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.expectation import RowFunction, bend_rule
from pymc_ngvi.rows.levels import Index, Levels, unpacked

#: Half of the interval of a polynomial, in standard deviations; those that have to be inside; part of the interval
#: that may do.
_HALF, _WITHIN, _NARROWER = 6.0, 4.5, 0.2
#: Degrees that are tried, and error of a polynomial, in nats, and relative to its largest coefficient.
_DEGREES, _ERROR, _ROUNDING = (12, 24, 48), 1e-9, 1e-13
#: Coefficients, the last ones, that tell of the error.
_LAST = 3
#: Values, about, that are asked for at each at which a polynomial is fitted.
_TIMES = 4
#: Smallest interval.
_LEAST = 1e-6


@dataclass
class TabulatedRowFunction(RowFunction):
    """A function of one predictor, by polynomials on an interval of its own for each row.

    Intervals are about the first Gaussian that expectations are taken under, and others where one is elsewhere. Outside
    of them, and where no polynomial will do, the function itself is evaluated.
    """

    _coefficients: Array = field(init=False, repr=False)
    _degree: Levels = field(init=False, repr=False)
    _middle: Array = field(init=False, repr=False)
    _half: Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Begin without polynomials."""
        n = len(self.index)
        self._coefficients, self._degree = np.zeros((_DEGREES[0] + 1, n)), np.zeros(n, dtype=np.int16)
        self._middle, self._half = np.zeros(n), np.full(n, -1.0)

    def some(self, rows: Index, index: NDArray[np.int64]) -> RowFunction:
        """Return some of the rows, in that order, with their polynomials."""
        result = RowFunction.some(self, rows, index)
        assert isinstance(result, TabulatedRowFunction)
        result._coefficients = self._coefficients[:, rows]
        result._degree, result._middle, result._half = self._degree[rows], self._middle[rows], self._half[rows]
        return result

    @property
    def n_in_the_mean(self) -> int:
        """Evaluations of a log density, about, that each of many values takes."""
        return max(1, self.n_evaluations // _TIMES)

    def whitened(self, mean: Array, root: Array, codes: Levels, rows: Index) -> Array:
        """Return expectations; see `RowFunction`."""
        self._cover(mean[:, 0], root[:, 0, 0], rows)
        return super().whitened(mean, root, codes, rows)

    def _by_rule(self, code: int, mean: Array, root: Array, rows: Index) -> Array:
        levels = unpacked(code, len(self.blocks))
        nodes = rule(1, levels).nodes
        values = self._at(nodes @ root[:, :, 0].T + mean[:, 0], rows)
        result: Array = bend_rule(levels[0]) @ values
        return result

    def values(self, predictors: list[Array], at: Index | slice) -> Array:  # type: ignore[override]
        """Return values, (n_points, n_rows), at predictors of that shape."""
        return self._at(predictors[0], np.arange(len(self.index))[at])

    def _at(self, points: Array, rows: Index) -> Array:
        result = np.empty(points.shape)
        x = (points - self._middle[rows]) / self._half[rows]
        degree = self._degree[rows]
        for one in np.unique(degree):
            columns = np.flatnonzero(degree == one)
            if one:
                every = len(columns) == len(rows)
                own = x if every else x[:, columns]
                result[:, columns] = _series(self._coefficients[: one + 1, rows if every else rows[columns]], own)
        outside = ~(np.abs(x) <= 1.0)
        outside[:, degree == 0] = True
        if outside.all():
            return super().values([points], rows)
        if outside.any():
            number = np.nonzero(outside)[1]
            result[outside] = super().values([points[outside][None]], rows[number])[0]
        return result

    def _cover(self, mean: Array, sd: Array, rows: Index) -> None:
        """See to it that intervals hold Gaussians."""
        half = self._half[rows]
        new = np.abs(mean - self._middle[rows]) + _WITHIN * sd > half
        new |= _HALF * sd < _NARROWER * half
        new &= (half < 0.0) | (_HALF * sd > _LEAST)
        if new.any():
            rows = rows[new]
            self._middle[rows], self._half[rows] = mean[new], np.maximum(_HALF * sd[new], _LEAST)
            self._make(rows)

    def _make(self, rows: Index) -> None:
        """Find polynomials by values at the extrema of Chebyshev's."""
        self._degree[rows] = 0
        values = np.empty((0, 0))
        for degree in _DEGREES:
            x = np.cos(np.pi / degree * np.arange(degree + 1))[:, None]
            if values.size:
                every = np.empty((degree + 1, len(rows)))
                every[::2], every[1::2] = values, self._direct(x[1::2], rows)
                values = every
            else:
                values = self._direct(x, rows)
            found = _of_values(degree) @ values
            size = np.abs(found)
            good = size[-_LAST:].max(axis=0) <= _ERROR + _ROUNDING * size.max(axis=0)
            if good.any() and degree >= len(self._coefficients):
                more = np.zeros((degree + 1 - len(self._coefficients), len(self.index)))
                self._coefficients = np.concatenate([self._coefficients, more])
            self._coefficients[: degree + 1, rows[good]], self._degree[rows[good]] = found[:, good], degree
            rows, values = rows[~good], values[:, ~good]
            if not len(rows):
                return

    def _direct(self, x: Array, rows: Index) -> Array:
        return super().values([self._middle[rows] + self._half[rows] * x], rows)


def _series(coefficients: Array, x: Array) -> Array:
    """Return a sum of Chebyshev polynomials, by Clenshaw's recurrence, (n_points, n_rows)."""
    twice, last, before = x + x, np.broadcast_to(coefficients[-1], x.shape).copy(), np.zeros(x.shape)
    for c in coefficients[-2:0:-1]:
        before *= -1.0
        before += c
        before += twice * last
        last, before = before, last
    result: Array = coefficients[0] + x * last - before
    return result


def _of_values(degree: int) -> Array:
    """Return the matrix from values at the extrema of a Chebyshev polynomial to coefficients of these."""
    j = np.arange(degree + 1)
    matrix = np.cos(np.pi / degree * np.outer(j, j)) * (2.0 / degree)
    matrix[:, [0, -1]] *= 0.5
    matrix[[0, -1]] *= 0.5
    return matrix
