"""Rows whose own effect is integrated out: log E[exp f(eta + a z)], z a standard normal that this row alone reads.

What is integrated has one mode where f is concave. Nodes are equally far from each other in a variable u that is about
normal: z is u times the width of the integrand on either side of its mode, smoothly from one to the other. For smooth
functions this rule converges geometrically [1]_; it is made twice as fine until that changes little. Half of its nodes
are there already.

References
----------
.. [1] L. N. Trefethen and J. A. C. Weideman (2014). The exponentially convergent trapezoidal rule. SIAM Review 56(3).
   https://doi.org/10.1137/130932132
.. [2] L. Tierney (1994). Markov chains for exploring posterior distributions. Annals of Statistics 22(4).
   https://doi.org/10.1214/aos/1176325750
"""

import copy

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import prices
from pymc_ngvi.core.linalg import ROUNDING, TINY
from pymc_ngvi.core.sparsity import CACHED_ELEMENTS
from pymc_ngvi.core.types import Array, Indices
from pymc_ngvi.rows.expectation import (
    STREAMED_VALUES,
    Compiled,
    Levels,
    RowFunction,
    bend_rule,
    evaluated,
    row_slices,
    rule,
    unpacked,
)

# --- rows whose function is dear: polynomials in their only predictor stand for it where a Gaussian has its mass ---


#: Half of the interval of a polynomial, in standard deviations; those that have to be inside; part of the interval
#: that may do.
_HALF, _WITHIN, _NARROWER = 6.0, 4.5, 0.2
#: Degrees that are tried, and error of a polynomial, in nats, and relative to its largest coefficient.
_DEGREES, _ERROR = (12, 24, 48, 96), 1e-6
#: Coefficients, the last ones, that tell of the error; those that are left out, and steps in which degrees go.
_LAST, _LEFT, _STEP = 3, 1e-7, 4
#: Values, about, that are asked for at each at which a polynomial is fitted.
_TIMES = 4
#: Data that are alike: parts of a power of 2.
_ALIKE = 2.0**40
#: Smallest interval.
_LEAST = 1e-6


class _Tables:
    """Polynomials, each of all rows with the same data."""

    def __init__(self, data: list[Array]) -> None:
        self.data = data
        n = max((d.shape[1] for d in data), default=1)
        self.coefficients, self.degree = np.zeros((_DEGREES[0] + 1, n)), np.zeros(n, dtype=np.int16)
        self.middle, self.half = np.zeros(n), np.full(n, -1.0)


def distinct(data: list[Array], n: int) -> tuple[Indices, Indices]:
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
    _of: Indices = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Begin without polynomials."""
        first, self._of = distinct(self.data, len(self.index))
        self._tables = _Tables(self.data_of(first))

    def some(self, rows: Indices, index: NDArray[np.int64]) -> RowFunction:
        """Return some of the rows, in that order, with their polynomials."""
        result = copy.copy(self)
        result.index, result.data, result._of = index, self.data_of(rows), self._of[rows]
        return result

    @property
    def n_in_the_mean(self) -> int:
        """Evaluations of a log density, about, that each of many values takes."""
        return max(1, self.n_evaluations // _TIMES)

    def whitened(self, mean: Array, root: Array, codes: Levels, rows: Indices) -> Array:
        """Return expectations; see `RowFunction`."""
        self._cover(mean[:, 0], root[:, 0, 0], rows)
        return super().whitened(mean, root, codes, rows)

    def _by_rule(self, code: int, mean: Array, root: Array, rows: Indices) -> Array:
        levels = unpacked(code, len(self.blocks))
        nodes = rule(1, levels).nodes
        values = self._at(nodes @ root[:, :, 0].T + mean[:, 0], rows)
        return bend_rule(levels[0]) @ values

    def values(self, predictors: list[Array], at: Indices | slice) -> Array:  # type: ignore[override]
        """Return values, (n_points, n_rows), at predictors of that shape."""
        return self._at(predictors[0], np.arange(len(self.index))[at])

    def _at(self, points: Array, rows: Indices) -> Array:
        result, known, tables = np.empty(points.shape), self._tables, self._of[rows]
        order = np.argsort(known.degree[tables], kind="stable")
        for part in row_slices(len(order), max(1, STREAMED_VALUES // max(len(points), 1))):
            own, here = tables[order[part]], points[:, order[part]]
            degree, x = known.degree[own], (here - known.middle[own]) / known.half[own]
            values = _series(known.coefficients[: degree.max() + 1, own], x)
            outside = ~(np.abs(x) <= 1.0) | (degree == 0)
            if outside.any():
                number = order[part][np.nonzero(outside)[1]]
                values[outside] = super().values([here[outside][None]], rows[number])[0]
            result[:, order[part]] = values
        return result

    def _cover(self, mean: Array, sd: Array, rows: Indices) -> None:
        """See to it that intervals hold Gaussians."""
        known, of = self._tables, self._of[rows]
        fine = np.isfinite(mean) & np.isfinite(sd)
        half = known.half[of]
        outside = fine & (np.abs(mean - known.middle[of]) + _WITHIN * sd > half)
        outside &= (half < 0.0) | (_HALF * sd > _LEAST)
        wanted = np.zeros(len(known.degree), dtype=bool)
        wanted[of[outside]] = True
        if len(rows) < len(self.index) and not wanted.any():
            return
        lowest, highest = np.full(len(known.degree), np.inf), np.full(len(known.degree), -np.inf)
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

    def _make(self, which: Indices) -> None:
        """Find polynomials by values at the extrema of Chebyshev's."""
        known = self._tables
        known.degree[which] = 0
        for degree in _DEGREES:
            j = np.arange(degree + 1)
            points = known.middle[which] + known.half[which] * np.cos(np.pi / degree * j)[:, None]
            data = [d if d.shape[1] == 1 else d[:, which] for d in known.data]
            values = evaluated(self.function, [points, *data], points.shape)
            matrix = np.cos(np.pi / degree * np.outer(j, j)) * (2.0 / degree)
            matrix[:, [0, -1]] *= 0.5
            matrix[[0, -1]] *= 0.5
            found = matrix @ values
            size = np.abs(found)
            good = size[-_LAST:].max(axis=0) <= _ERROR + ROUNDING * size.max(axis=0)
            if good.any() and degree >= len(known.coefficients):
                more = np.zeros((degree + 1 - len(known.coefficients), len(known.degree)))
                known.coefficients = np.concatenate([known.coefficients, more])
            if good.any():
                known.coefficients[: degree + 1, which[good]] = found[:, good]
                known.degree[which[good]] = _needed(size[:, good])
            which = which[~good]
            if not len(which):
                return


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
    matters = size > _LEFT + ROUNDING * size.max(axis=0)
    last = len(size) - 1 - matters[::-1].argmax(axis=0)
    return np.minimum(_STEP * np.maximum(-(-last // _STEP), 1), len(size) - 1)


#: How far nodes reach, in widths, where what is integrated is e^-26 of its top; the first distance between them.
_REACH, _FIRST = 7.2, 1.2
#: Change of the logarithm of an integral that is no reason for finer nodes: what is left is about its square. Times
#: that the rule may be made finer, and over how many widths those of the two sides pass into one another.
_CHANGE, _FINEST, _BEND = 1e-5, 6, 2.0
#: Steps to a mode, and part of a width by which they may end beside it; steps to the widths.
_CLIMBS, _NEAR, _WIDTHS = 40, 0.1, 4
#: Steps after which longer ones are tried, as far from a mode those of Newton are short where f is exponential; by what
#: they are longer.
_PATIENT, _LONGER = 6, np.array([1.0, 4.0, 16.0])[:, None, None]
#: Distance over which derivatives are taken, in widths, and at least, relative; change of a width at a time; a fall of
#: 0, in nats.
_DIFFERENCE, _SMALLEST, _AT_MOST, _NOTHING = 0.05, 1e-6, 3.0, 1e-12
#: Steps of the sampler. Distribution functions of its proposals are off by 0.16 where effects are five times as wide as
#: what a row tells; after 1, 2 and 3 steps by 0.035, 0.01 and 0.004, and with scales up to 1 by 0.002 at most.
_STEPS = 3
#: Values of a predictor at which nodes are sought for the draws of a row; by how much centres may be off the lines
#: between their neighbours, in scales: with predictors over 27 units, draws between 4 values were 2.7 sd off.
_N_SOUGHT, _OFF_LINE = 7, 0.5
_ROOT_2_PI = float(np.sqrt(2.0 * np.pi))


@dataclass(frozen=True, eq=False)
class _Place:
    """Where nodes are: z = centre + scale u + bend (sqrt(u^2 + b^2) - b), (n_points, n_rows) each."""

    centre: Array
    scale: Array
    bend: Array

    def at(self, u: Array) -> tuple[Array, Array]:
        """Return z, and dz / du."""
        root = np.sqrt(u * u + _BEND**2)
        return self.centre + self.scale * u + self.bend * (root - _BEND), self.scale + self.bend * (u / root)


@dataclass(frozen=True, eq=False)
class _Integrand:
    """f(eta + a z) - z^2 / 2 for some points of some rows."""

    #: f.
    function: Compiled
    #: The predictors eta, (n_points, n_rows) or (n_points, 1) each.
    points: list[Array]
    #: (1, n_rows) or (1, 1) each.
    data: list[Array]
    #: a, one for each predictor, in the shapes of data.
    slopes: list[Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """Points and rows."""
        return np.broadcast_shapes(*[x.shape for x in (*self.points, *self.data, *self.slopes)])

    def __call__(self, z: Array) -> Array:
        """Return values, in the shape of z: (n_points, n_rows), or (n, n_points, n_rows) for several z at each."""
        flat = (-1, z.shape[-1])
        moved = []
        for point, slope in zip(self.points, self.slopes, strict=True):
            if point.shape[1] == 1 and not slope.any():
                moved.append(np.broadcast_to(point, (*z.shape[:-1], 1)).reshape(-1, 1))
            else:
                moved.append((point + slope * z).reshape(flat))
        n = z.size // z.shape[-1]
        squares = z * z
        squares *= -0.5
        squares += evaluated(self.function, [*moved, *self.data], (n, z.shape[-1])).reshape(z.shape)
        return squares

    def rows(self, at: Indices | slice) -> "_Integrand":
        """Return the same for some of the rows; a single column is that of all."""
        parts = [
            [x if x.shape[1] == 1 else np.ascontiguousarray(x[:, at]) for x in some]
            for some in (self.points, self.data, self.slopes)
        ]
        return _Integrand(self.function, *parts)


@dataclass(frozen=True)
class Integrated:
    """A function of rows with an effect integrated out."""

    #: f, concave along the effect, of ``n_predictors`` predictors and data.
    function: Compiled
    n_predictors: int

    #: Evaluations of f that one of this takes, about.
    n_evaluations = 32

    def __call__(self, *inputs: Array) -> Sequence[Array]:
        """Return log E[exp f], (n_points, n_rows), from predictors, data, and the slopes a."""
        return [self._in_parts(_log_mean, inputs, len(_nodes_at(1)))]

    def drawn(self, rng: np.random.Generator, *inputs: Array) -> Array:
        """Return one draw of z given the predictors for each of the points, (n_points, n_rows)."""
        with prices.Work().counting():  # a posterior is drawn from once: no limit is for that
            return self._in_parts(lambda some: _drawn(some, rng), inputs)

    @np.errstate(all="ignore")  # densities overflow far from the mode: the caller sees what is not finite
    def _in_parts(self, take: Callable[[_Integrand], Array], inputs: Sequence[Array], n_nodes: int = 1) -> Array:
        """Apply a function, which evaluates some nodes at a time, to the integrands of few rows and points."""
        k = self.n_predictors
        points, data, slopes = list(inputs[:k]), list(inputs[k : len(inputs) - k]), list(inputs[len(inputs) - k :])
        whole = _Integrand(self.function, points, data, slopes)
        n_points, n_rows = whole.shape
        result = np.empty(whole.shape)
        most = max(1, CACHED_ELEMENTS // n_nodes)
        n_at_once = min(n_points, most)
        for rows in row_slices(n_rows, max(1, most // n_at_once)):
            part = whole.rows(rows)
            for at in row_slices(n_points, n_at_once):
                result[at, rows] = take(replace(part, points=[x[at] for x in part.points]))
        return result


# --- where nodes are ---


def _nodes_of(of: _Integrand) -> _Place:
    """Return where nodes are, by mode and widths."""
    centre, width = _mode(of)
    top = of(centre)
    sides = np.array([[[-1.0]], [[1.0]]])
    widths = np.stack([width, width])
    for _ in range(_WIDTHS):
        fall = np.sqrt(2.0 * np.maximum(top - of(centre + sides * _REACH * widths), _NOTHING))
        change = np.clip(_REACH / fall, 1.0 / _AT_MOST, _AT_MOST)
        # Where there is no number, that is too far out.
        widths *= np.where(np.isnan(change), 1.0 / _AT_MOST, change)
    return _Place(centre, 0.5 * (widths[0] + widths[1]), 0.5 * (widths[1] - widths[0]))


def _nodes_between(of: _Integrand) -> _Place:
    """Return where nodes are at many values of the only predictor: linear between few, where that is near enough."""
    if len(of.points) > 1 or len(of.points[0]) <= _N_SOUGHT:
        return _nodes_of(of)
    [eta] = of.points
    low, high = np.fmin.reduce(eta, axis=0), np.fmax.reduce(eta, axis=0)
    place = _nodes_of(replace(of, points=[np.linspace(low, high, _N_SOUGHT)]))
    middle = 0.5 * (place.centre[:-2] + place.centre[2:])
    if not (np.abs(middle - place.centre[1:-1]) < _OFF_LINE * place.scale[1:-1]).all():
        return _nodes_of(of)
    at = (eta - low) * ((_N_SOUGHT - 1) / np.maximum(high - low, TINY))
    left = np.clip(at.astype(np.intp), 0, _N_SOUGHT - 2)

    def between(few: Array) -> Array:
        below, above = (np.take_along_axis(few, left + up, axis=0) for up in (0, 1))
        return below + (at - left) * (above - below)

    return _Place(between(place.centre), between(place.scale), between(place.bend))


def _mode(of: _Integrand) -> tuple[Array, Array]:
    """Go up by Newton steps with differences as derivatives; return the mode, and the width by the curvature there."""
    shape = of.shape
    z, width, radius = np.zeros(shape), np.ones(shape), np.ones(shape)
    value, rows = of(z), np.arange(shape[1])
    for number in range(_CLIMBS):
        some = of if len(rows) == shape[1] else of.rows(rows)
        at, now, size = z[:, rows], value[:, rows], width[:, rows]
        apart = np.maximum(_DIFFERENCE * size, _SMALLEST * (1.0 + np.abs(at)))
        below, above = some(np.stack([at - apart, at + apart]))
        # With f concave, the curvature is that of the normal density at least.
        curvature = np.maximum((2.0 * now - below - above) / apart**2, 1.0)
        step = np.clip((above - below) / (2.0 * apart * curvature), -radius[:, rows], radius[:, rows])
        step = np.where(np.isfinite(step), step, 0.0)
        width[:, rows] = size = np.where(np.isfinite(curvature), 1.0 / np.sqrt(curvature), size)
        left = (np.abs(step) > _NEAR * size).any(axis=0)
        if not left.any():
            break
        if number >= _PATIENT:
            longer = np.where(np.isnan(beyond := some(at + step * _LONGER)), -np.inf, beyond).argmax(axis=0)
            step = step * _LONGER[longer, 0, 0]
        then = some(at + step)
        rises = then >= now
        z[:, rows], value[:, rows] = np.where(rises, at + step, at), np.where(rises, then, now)
        radius[:, rows] = np.where(rises, 2.0 * radius[:, rows], 0.25 * np.abs(step))
        rows = rows[left]
    return z, width


# --- what is taken there ---


def _nodes_at(level: int) -> Array:
    """Return nodes, twice as close as those of the level before, which are among them."""
    return np.linspace(-_REACH, _REACH, 1 + round(2.0 * _REACH / _FIRST) * 2**level)


def _integrand(of: _Integrand, place: _Place, nodes: Array) -> tuple[Array, Array]:
    """Return the logarithm of what is integrated over z, and dz / du, at nodes, (n_nodes, n_points, n_rows) each."""
    z, slope = place.at(nodes[:, None, None])
    return of(z), slope


def _sum(heights: Array, slope: Array, top: Array) -> Array:
    """Return the sum over nodes of what is integrated, over e^top; heights are written over."""
    heights -= top
    np.exp(heights, out=heights)
    return np.asarray(np.einsum("npr,npr->pr", heights, slope))


def _log_mean(of: _Integrand) -> Array:
    """Return log E[exp f], each row by nodes that are as close as it takes."""
    place, rows, spacing = _nodes_of(of), np.arange(of.shape[1]), _FIRST
    heights, slope = _integrand(of, place, _nodes_at(0))
    top = heights.max(axis=0)
    top = np.where(np.isfinite(top), top, 0.0)
    total, result = _sum(heights, slope, top), np.empty(of.shape)
    for level in range(1, 1 + _FINEST):
        new = _nodes_at(level)[1::2]
        coarse, spacing = total, 0.5 * spacing
        for at in row_slices(len(new), max(1, CACHED_ELEMENTS // total.size)):
            total = total + _sum(*_integrand(of, place, new[at]), top)
        result[:, rows] = np.log(total * (spacing / _ROOT_2_PI)) + top
        left = np.flatnonzero((np.abs(np.log(total / (2.0 * coarse))) > _CHANGE).any(axis=0))
        if not len(left):
            break
        rows, total, top = rows[left], total[:, left], top[:, left]
        of, place = of.rows(left), _Place(place.centre[:, left], place.scale[:, left], place.bend[:, left])
    return result


def _drawn(of: _Integrand, rng: np.random.Generator) -> Array:
    """Return a draw of z at each point, by an independence sampler [2]_ whose proposals are normal in u."""
    place = _nodes_between(of)

    def proposed() -> tuple[Array, Array]:
        u = rng.standard_normal(place.centre.shape)
        z, slope = place.at(u)
        return z, of(z) + 0.5 * u * u + np.log(slope)

    current, ratio = proposed()
    for _ in range(_STEPS):
        z, log_weight = proposed()
        accept = np.log(rng.random(z.shape)) < log_weight - ratio
        current, ratio = np.where(accept, z, current), np.where(accept, log_weight, ratio)
    return current
