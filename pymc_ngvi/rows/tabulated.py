"""Rows whose function is dear: polynomials in their only predictor stand for it where their Gaussian has its mass."""

import copy

from dataclasses import dataclass, field

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.normal_rules import rule
from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.expectation import Index, Levels, RowFunction, bend_rule, evaluated, row_slices, unpacked

#: Half of the interval of a polynomial, in standard deviations; those that have to be inside; part of the interval
#: that may do.
_HALF, _WITHIN, _NARROWER = 6.0, 4.5, 0.2
#: Degrees that are tried, and error of a polynomial, in nats, and relative to its largest coefficient.
_DEGREES, _ERROR, _ROUNDING = (12, 24, 48, 96), 1e-9, 1e-13
#: Coefficients, the last ones, that tell of the error; those that are left out, and steps in which degrees go.
_LAST, _LEFT, _STEP = 3, 1e-10, 4
#: Values, about, that are asked for at each at which a polynomial is fitted.
_TIMES = 4
#: Data that are alike: parts of a power of 2. Values of rows at a time.
_ALIKE, _AT_A_TIME = 2.0**40, 2**14
#: Smallest interval.
_LEAST = 1e-6


class _Tables:
    """Polynomials, each of all rows with the same data."""

    def __init__(self, data: list[Array]) -> None:
        self.data = data
        n = max((d.shape[1] for d in data), default=1)
        self.coefficients, self.degree = np.zeros((_DEGREES[0] + 1, n)), np.zeros(n, dtype=np.int16)
        self.middle, self.half = np.zeros(n), np.full(n, -1.0)

    def __len__(self) -> int:
        """Return their number."""
        return len(self.degree)


def distinct(data: list[Array], n: int) -> tuple[Index, Index]:
    """Return rows of which no two have the same data, but for rounding, and which of these each row is like."""
    known = [d[0] for d in data if d.shape[1] > 1]
    if not known:
        return np.zeros(min(n, 1), dtype=np.intp), np.zeros(n, dtype=np.intp)
    result = np.zeros(n, dtype=np.intp)
    for values in known:
        if values.dtype.kind == "f":
            mantissa, exponent = np.frexp(values.astype(np.float64))
            values = np.ldexp(np.round(mantissa * _ALIKE), exponent)
        _, number = np.unique(values, return_inverse=True)
        _, result = np.unique(result * (number.max() + 1) + number, return_inverse=True)
    _, first = np.unique(result, return_index=True)
    return first, result


@dataclass
class TabulatedRowFunction(RowFunction):
    """A function of one predictor, by polynomials on an interval for all rows with the same data.

    Intervals hold the first Gaussians that expectations are taken under, and others where these are elsewhere. Outside
    of them, and where no polynomial will do, the function itself is evaluated.
    """

    _tables: _Tables = field(init=False, repr=False)
    _of: Index = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Begin without polynomials."""
        first, self._of = distinct(self.data, len(self.index))
        self._tables = _Tables(self.data_of(first))

    def some(self, rows: Index, index: NDArray[np.int64]) -> RowFunction:
        """Return some of the rows, in that order, with their polynomials."""
        result = copy.copy(self)
        result.index, result.data, result._of = index, self.data_of(rows), self._of[rows]
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
        return bend_rule(levels[0]) @ values

    def values(self, predictors: list[Array], at: Index | slice) -> Array:  # type: ignore[override]
        """Return values, (n_points, n_rows), at predictors of that shape."""
        return self._at(predictors[0], np.arange(len(self.index))[at])

    def _at(self, points: Array, rows: Index) -> Array:
        result = np.empty(points.shape)
        tables = self._of[rows]
        degree = self._tables.degree[tables]
        for one in np.unique(degree):
            columns = np.flatnonzero(degree == one)
            for at in row_slices(len(columns), max(1, _AT_A_TIME // max(len(points), 1))):
                self._write(points, rows, tables, columns[at], int(one), result)
        return result

    def _write(self, points: Array, rows: Index, tables: Index, columns: Index, degree: int, result: Array) -> None:
        """Write values of some of the rows."""
        own, here = tables[columns], np.ascontiguousarray(points[:, columns])
        if not degree:
            result[:, columns] = super().values([here], rows[columns])
            return
        x = (here - self._tables.middle[own]) / self._tables.half[own]
        values = _series(self._tables.coefficients[: degree + 1, own], x)
        if (outside := ~(np.abs(x) <= 1.0)).any():
            number = columns[np.nonzero(outside)[1]]
            values[outside] = super().values([here[outside][None]], rows[number])[0]
        result[:, columns] = values

    def _cover(self, mean: Array, sd: Array, rows: Index) -> None:
        """See to it that intervals hold Gaussians."""
        known, of = self._tables, self._of[rows]
        fine = np.isfinite(mean) & np.isfinite(sd)
        half = known.half[of]
        outside = fine & (np.abs(mean - known.middle[of]) + _WITHIN * sd > half)
        outside &= (half < 0.0) | (_HALF * sd > _LEAST)
        wanted = np.zeros(len(known), dtype=bool)
        wanted[of[outside]] = True
        if len(rows) < len(self.index) and not wanted.any():
            return
        lowest, highest = np.full(len(known), np.inf), np.full(len(known), -np.inf)
        reach = np.maximum(_HALF * sd, _LEAST)
        np.minimum.at(lowest, of[fine], (mean - reach)[fine])
        np.maximum.at(highest, of[fine], (mean + reach)[fine])
        width = 0.5 * (highest - lowest)
        narrow = (known.half > 0.0) & (width > _LEAST) & (width < _NARROWER * known.half)
        if len(rows) == len(self.index):
            wanted |= narrow
        # Other rows may have the polynomial that there is.
        joined = np.flatnonzero(wanted & (known.half > 0.0) & ~narrow & (known.half < width / _NARROWER))
        lowest[joined] = np.minimum(lowest[joined], known.middle[joined] - known.half[joined])
        highest[joined] = np.maximum(highest[joined], known.middle[joined] + known.half[joined])
        if len(which := np.flatnonzero(wanted)):
            known.middle[which] = 0.5 * (lowest + highest)[which]
            known.half[which] = 0.5 * (highest - lowest)[which]
            self._make(which)

    def _make(self, which: Index) -> None:
        """Find polynomials by values at the extrema of Chebyshev's."""
        known = self._tables
        known.degree[which] = 0
        values = np.empty((0, 0))
        for degree in _DEGREES:
            x = np.cos(np.pi / degree * np.arange(degree + 1))[:, None]
            if values.size:
                every = np.empty((degree + 1, len(which)))
                every[::2], every[1::2] = values, self._direct(x[1::2], which)
                values = every
            else:
                values = self._direct(x, which)
            j = np.arange(degree + 1)
            matrix = np.cos(np.pi / degree * np.outer(j, j)) * (2.0 / degree)
            matrix[:, [0, -1]] *= 0.5
            matrix[[0, -1]] *= 0.5
            found = matrix @ values
            size = np.abs(found)
            good = size[-_LAST:].max(axis=0) <= _ERROR + _ROUNDING * size.max(axis=0)
            if good.any() and degree >= len(known.coefficients):
                more = np.zeros((degree + 1 - len(known.coefficients), len(known)))
                known.coefficients = np.concatenate([known.coefficients, more])
            if good.any():
                known.coefficients[: degree + 1, which[good]] = found[:, good]
                known.degree[which[good]] = _needed(size[:, good])
            which, values = which[~good], values[:, ~good]
            if not len(which):
                return

    def _direct(self, x: Array, which: Index) -> Array:
        known = self._tables
        points = known.middle[which] + known.half[which] * x
        data = [d if d.shape[1] == 1 else d[:, which] for d in known.data]
        return evaluated(self.function, [points, *data], points.shape)


def _series(coefficients: Array, x: Array) -> Array:
    """Return a sum of Chebyshev polynomials, by Clenshaw's recurrence, (n_points, n_rows)."""
    twice, last, before = x + x, np.broadcast_to(coefficients[-1], x.shape).copy(), np.zeros(x.shape)
    for c in coefficients[-2:0:-1]:
        before *= -1.0
        before += c
        before += twice * last
        last, before = before, last
    return coefficients[0] + x * last - before


def _needed(size: Array) -> Array:
    """Return the degrees that some polynomials need, (n,), by the sizes of coefficients: few different ones."""
    matters = size > _LEFT + _ROUNDING * size.max(axis=0)
    last = len(size) - 1 - matters[::-1].argmax(axis=0)
    return np.minimum(_STEP * np.maximum(-(-last // _STEP), 1), len(size) - 1)
