"""Rows at many values of what their predictors' coefficients depend on: hundreds of log densities in one evaluation.

At each value k of the hyperparameters log p is a sum over the same rows, of predictors offset_k + X_k x with X_k of one
pattern. Rows of all values are evaluated together; so are products with all X_k, as those of one block-diagonal matrix.
"""

import functools
import itertools

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from scipy import sparse
from scipy.special import ndtri

from pymc_ngvi.core import prices
from pymc_ngvi.core.batch import Batch
from pymc_ngvi.core.messages import NotApart
from pymc_ngvi.core.sizes import CACHED
from pymc_ngvi.core.types import Array, Bools, Indices, RowRules
from pymc_ngvi.rows.expectation import Compiled, RowFunction, Taken
from pymc_ngvi.rows.integrated import Integrated, TabulatedRowFunction, densities, distinct, sampled
from pymc_ngvi.rows.linear_map import Entries, EntriesAt, ManyMaps, Seen, Sparsity, symmetric
from pymc_ngvi.rows.row_hessian import Scatter
from pymc_ngvi.rows.separable import FAR, are_concave, derivatives_of, is_quadratic

# --- effects that one row alone reads: which these are, and the rows that are left when they are integrated out ---
#
# Such an effect x has a normal prior, a row that is quadratic in one predictor p, and is read by one row of another
# kind, in one of its predictors, eta. With p = w x + what others add to it, and eta = b x + the same, that predictor is
#
#     eta - (b / w) p + (b / w) p,
#
# of which the first part does not hang on x, and p is normal, whatever the others are. So the row, integrated over p,
# is a function of the first part: centred and non-centred forms come to the same.


class OwnGroup(NamedTuple):
    """Effects that rows of one kind read, one each."""

    #: shape (n,).
    coordinates: Indices
    #: The kind of rows that read them, which of these, (n,), and by which of their predictors.
    kind: int
    rows: Indices
    slot: int
    #: Their priors.
    prior_kind: int
    prior_rows: Indices


@dataclass(frozen=True, eq=False)
class OwnEffects:
    """Effects that rows read as their own."""

    groups: list[OwnGroup]
    #: Number of coordinates.
    n_dim: int

    @property
    def coordinates(self) -> Indices:
        """All of them, in the order of the groups."""
        return np.concatenate([group.coordinates for group in self.groups])

    @property
    def kept(self) -> Indices:
        """All other coordinates, ascending."""
        return np.setdiff1d(np.arange(self.n_dim), self.coordinates)


def priors_of(rows: RowFunction, at: Indices) -> tuple[Array, Array, Array] | None:
    """Return the normal densities that some rows, quadratic in their only predictor, are; None where one is none.

    Their means, standard deviations, and logarithms of what they integrate to, (n,) each.
    """
    index = rows.index[at]
    some = RowFunction(rows.function, index, rows.data_of(at), rows.interacts, n_shared=rows.n_shared)
    grad, second = derivatives_of(some, np.zeros((len(at), 1)))
    with np.errstate(all="ignore"):
        mean, sd = -grad[:, 0] / second[:, 0], np.sqrt(-1.0 / second[:, 0])
        [top] = some.values([mean[None]], slice(None))
    if not (np.isfinite(sd) & np.isfinite(top) & (sd > 0.0)).all():
        return None
    return mean, sd, top + np.log(sd) + 0.5 * np.log(2.0 * np.pi)


# --- which effects one row alone reads, and whether they can be integrated out ---


#: Part of the elements of a variable that rows are to read as their own: few do not pay for the further kind of rows.
_LEAST_PART = 0.5
#: Rows that read such an effect; what is said where there are none.
_PRIOR_AND_ROW, _NONE = 2, "no effect is read by one row alone"


def find_own(
    functions: Sequence[RowFunction], sets: sparse.csr_array, linear_in: Bools, start: Array
) -> tuple[OwnEffects | None, str]:
    """Find effects that rows read as their own; None where there are none, and why."""
    n_dim = sets.shape[1]
    sets = sparse.csr_array(sets, dtype=np.int64)
    readers = [_reading(rows, sets) for rows in functions]
    counts = np.bincount(np.concatenate([r.indices for r in readers]), minlength=n_dim)
    linear = np.bincount(sparse.csr_array(sets[np.flatnonzero(linear_in)]).indices, minlength=n_dim) > 0
    left = (counts == _PRIOR_AND_ROW) & ~linear
    plain = [type(rows) is RowFunction for rows in functions]
    quadratic = [is_plain and is_quadratic(rows) for is_plain, rows in zip(plain, functions, strict=True)]
    used = [np.zeros(len(rows.index), dtype=bool) for rows in functions]
    groups, why = list[OwnGroup](), _NONE
    order = sorted(range(len(functions)), key=lambda kind: -len(functions[kind].index))
    priors = [kind for kind in order if quadratic[kind] and functions[kind].k == 1]
    for prior, kind in itertools.product(priors, (kind for kind in order if plain[kind] and not quadratic[kind])):
        of_prior = _one_each(readers[prior], left)
        of_rows = _one_each(readers[kind], of_prior >= 0)
        both = np.flatnonzero(of_rows >= 0)
        both = both[~used[kind][of_rows[both]] & ~used[prior][of_prior[both]]]
        both = both[np.argsort(of_rows[both], kind="stable")]
        if not len(both) or len(both) < _LEAST_PART * len(functions[prior].index):
            continue
        found = _group(functions, sets, start, OwnGroup(both, kind, of_rows[both], -1, prior, of_prior[both]))
        if isinstance(found, str):
            why = found
            continue
        groups.append(found)
        left[both], used[kind][found.rows], used[prior][found.prior_rows] = False, True, True
    return (OwnEffects(groups, n_dim), "") if groups else (None, why)


def _group(functions: Sequence[RowFunction], sets: sparse.csr_array, start: Array, own: OwnGroup) -> OwnGroup | str:
    """Return effects with the predictor by which rows read them, or why they can't be integrated out."""
    rows = functions[own.kind]
    reads = [(sets[rows.index[own.rows, a], own.coordinates] != 0) for a in range(rows.k)]
    slots = [a for a in range(rows.k) if reads[a].all()]
    if len(slots) != 1 or sum(int(read.sum()) for read in reads) != len(own.rows) or slots[0] < rows.n_shared:
        return "rows read their own effect in several ways"
    some = rows.some(own.rows, rows.index[own.rows])
    if not are_concave(some, slots[0], start[some.index], FAR).all():
        return "the log density of a row is not concave in its own effect"
    return own._replace(slot=slots[0])


def _reading(rows: RowFunction, sets: sparse.csr_array) -> sparse.csr_array:
    """Return which coordinates each row reads, with each once."""
    total = sparse.csr_array(sets[rows.index[:, 0]], copy=True)
    for column in rows.index.T[1:]:
        total = sparse.csr_array(total + sets[column])
    total.sum_duplicates()
    return total


def _one_each(reader: sparse.csr_array, wanted: Bools) -> Indices:
    """Return the row that reads each coordinate, (n_dim,), where each row has one of those that are wanted; else -1."""
    result = np.full(reader.shape[1], -1, dtype=np.intp)
    number = np.repeat(np.arange(reader.shape[0]), np.diff(reader.indptr))
    here = wanted[reader.indices]
    rows, columns = number[here], reader.indices[here]
    _, first = np.unique(rows, return_index=True)
    result[columns[first]] = rows[first]
    return result


@dataclass(frozen=True, eq=False)
class ManyExpected(Batch):
    """Expectations under Gaussians."""

    #: Of log p; shape (n,).
    value: Array
    #: Of its derivatives by the predictors; shape (n, n_predictors).
    slope: Array
    #: Entries of minus the mean Hessian by x; shape (n, n_entries).
    precision: Array
    rules: RowRules
    #: The mean Hessian by the predictors, block-diagonal; None where some were left out.
    matrix: sparse.csr_array | None = None


@dataclass(frozen=True, eq=False)
class ManyRows:
    """Log densities that are sums over the same rows."""

    maps: ManyMaps
    entries: Entries
    #: Of all rows of all of them: row r of the k-th is row k n_rows + r.
    functions: list[RowFunction]
    #: What is linear; shape (n, n_predictors).
    slope: Array
    #: shape (n,).
    constant: Array
    #: Nats that quadrature may be off by in each row.
    tolerance: float

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.maps)

    def __getitem__(self, which: Indices) -> "ManyRows":
        """Return some of them, in that order."""
        if len(which) == len(self) and (which == np.arange(len(self))).all():
            return self
        functions = [self._some(f, which) for f in self.functions]
        return replace(
            self, maps=self.maps[which], functions=functions, slope=self.slope[which], constant=self.constant[which]
        )

    def _some(self, function: RowFunction, which: Indices) -> RowFunction:
        n, n_predictors = len(self), self.slope.shape[1]
        per = len(function.index) // n
        index = function.index[:per] + n_predictors * np.arange(len(which))[:, None, None]
        return function.some((per * which[:, None] + np.arange(per)).ravel(), index.reshape(-1, function.k))

    @functools.cached_property
    def at(self) -> EntriesAt:
        """Entries with numbers."""
        return self.entries.of(self.maps)

    @functools.cached_property
    def scatter(self) -> Scatter:
        """What adds up derivatives of rows by predictor."""
        return Scatter([f.index for f in self.functions], self.slope.size)

    def seen(self, mean: Array, covariance: Array) -> Seen:
        """Return what rows see of Gaussians with means, (n, n_dim), and entries of covariances, (n, n_entries)."""
        eta = self.maps.offset + self.maps.times(mean[:, :, None])[:, :, 0]
        return Seen(eta, self.at.covariances(covariance))

    @np.errstate(all="ignore")
    def expected(self, seen: Seen, rules: RowRules | None = None, *, adapt: bool = False) -> ManyExpected:
        """Return expectations where predictors are distributed so, by rules that are given, adapted or chosen here."""
        n = len(self)
        kinds = self.taken(seen, rules)
        if rules is None or adapt:
            for kind in kinds:
                kind.choose(self.tolerance)
        found = [kind.derivatives() for kind in kinds]
        grad, matrix = self.scatter(*zip(*found, strict=True))
        weights = []
        for _, hessian in found:
            k = hessian.shape[1]
            weights += [
                (1.0 if a == b else 2.0) * hessian[:, a, b].reshape(n, -1) for a in range(k) for b in range(a + 1)
            ]
        value = self.constant + np.einsum("nr,nr->n", self.slope, seen.mean)
        for kind in kinds:
            value += kind.values.reshape(n, -1).sum(axis=1)
        codes, sds = ([getattr(kind, name).reshape(n, -1) for kind in kinds] for name in ("codes", "sd"))
        now = RowRules(np.concatenate(codes, axis=1), np.concatenate(sds, axis=1))
        slope = self.slope + grad.reshape(n, -1)
        return ManyExpected(value, slope, -self.at.quadratic(weights, matrix), now, matrix)

    def taken(self, seen: Seen, rules: RowRules | None) -> list[Taken]:
        """Return the expectations of each kind of rows by rules that are given, or the coarsest."""
        result, pairs, start = [], iter(seen.covariances), 0
        n, mean = len(self), seen.mean.ravel()
        for function in self.functions:
            here, given = slice(start, start + len(function.index) // n), None
            if rules is not None:
                given = rules.level[:, here].ravel(), rules.sd[:, here].ravel()
            start = here.stop
            result.append(Taken(function, mean[function.index], symmetric(pairs, function.k), given))
        return result

    def drawn_inside(self, x: Array, rng: np.random.Generator) -> Array:
        """Return draws of all that is not given, (n, n_inside, m), given (n, n_dim, m): the same."""
        return x

    @np.errstate(all="ignore")
    def values(self, x: Array) -> Array:
        """Return log p, (n, m), at m points for each of them, (n, n_dim, m)."""
        n, _, m = x.shape
        eta = (self.maps.offset[:, :, None] + self.maps.times(x)).reshape(-1, m)
        result: Array = self.constant[:, None] + np.einsum("nr,nrm->nm", self.slope, eta.reshape(n, -1, m))
        for function in self.functions:
            per = len(function.index) // n
            size = max(1, CACHED // (per * m)) * per
            for start in range(0, n * per, size):
                rows = np.arange(start, min(start + size, n * per))
                index = function.index[rows]
                part = function.values([np.ascontiguousarray(eta[at].T) for at in index.T], rows)
                prices.count(prices.PER_CALL + prices.PER_ROW_OF_VALUE * part.size)
                result[rows[0] // per : (rows[-1] + 1) // per] += part.reshape(m, -1, per).sum(axis=2).T
        return result


# --- quantiles of densities that are known at points of a grid, many at a time ---

_ROOT_2PI = float(np.sqrt(2.0 * np.pi))


def quantiles(normals: Array, points: Array, density: Array, areas: Array) -> Array:
    """Return where distributions have the probabilities that some numbers have under a standard normal.

    Cubics between the points have the right values and slopes there. Probabilities are added up from either end, so
    that both tails keep their digits. Beyond the points, quantiles stay at the first and last of these.
    """
    below, above = np.cumsum(areas, axis=0), np.cumsum(areas[::-1], axis=0)[::-1]
    total = below[-1]
    below, above = below[:-1], above[1:]
    score = ndtri(np.minimum(below, above) / total)
    score = np.where(below < above, score, -score)
    slope = np.exp(-0.5 * score**2) * (total / _ROOT_2PI) / density
    points = np.broadcast_to(points, score.shape)
    return np.array([_near(normal, score, points, slope) for normal in normals])


def _near(wanted: float, x: Array, y: Array, slope: Array) -> Array:
    """Return y at a value of x, ascending along the first axis, by cubics from values and slopes at both ends."""
    left = np.clip((x < wanted).sum(axis=0) - 1, 0, len(x) - 2)[None]
    (x_left, x_right), (y_left, y_right), (first, last) = (
        (np.take_along_axis(values, left, axis=0)[0], np.take_along_axis(values, left + 1, axis=0)[0])
        for values in (x, y, slope)
    )
    width = x_right - x_left
    part = np.clip((wanted - x_left) / width, 0.0, 1.0)
    rest = 1.0 - part
    ends = (1.0 + 2.0 * part) * rest**2 * y_left + (1.0 + 2.0 * rest) * part**2 * y_right
    return ends + part * rest * width * (rest * first - part * last)


# --- draws of effects that one row alone reads, given the predictors of their rows: many at a time ---
# Given eta, what a row reads, v = eta + a z, has the density exp(f(v) - (v - eta)^2 / (2 a^2)). Rows with the same data
# share this family of distributions, whatever the hyperparameters are: its quantiles are smooth functions of eta and of
# log a, and stand on a lattice. Interpolated between its points, they make proposals whose density is known, and which
# an independence sampler [1]_ corrects: what interpolation is off by, that is exact but for its square.
#
# References
# ----------
# .. [1] L. Tierney (1994). Markov chains for exploring posterior distributions. Annals of Statistics 22(4).
#    https://doi.org/10.1214/aos/1176325750

#: Distance between values of log a, and between quantiles, in standard deviations of a normal; how far these go.
_OF_LOG, _OF_NORMAL, _FARTHEST = 0.2, 0.25, 5.0
#: Values of eta, the numbers that are tried; error of interpolation in it, in standard deviations.
_N_ETA, _ERROR = (33, 65, 129, 257), 0.05
#: Part of their range by which values of eta go farther than they are asked for; part of them on each side that is far.
_MARGIN, _RARE = 0.4, 1e-3
#: Draws for each distribution from which on a lattice pays; numbers in it at most; distributions at a time.
_PAYS, _MOST_NUMBERS, _DISTRIBUTIONS_AT_A_TIME = 100, 2**23, 2**12
_NORMAL = _OF_NORMAL * np.arange(-round(_FARTHEST / _OF_NORMAL), round(_FARTHEST / _OF_NORMAL) + 1.0)


class _Cells(NamedTuple):
    """Where predictors are on the lattice: numbers of the first points, (n_points, n_rows), of two values of log a."""

    first: Indices
    second: Indices
    part: Array
    part_second: Array


class OwnDraws:
    """Draws effects of one kind of rows with one predictor."""

    def __init__(self, function: Compiled) -> None:
        self._function = function
        self._data: list[Array] = []
        self._lowest, self._step, self._n_eta = 0.0, 0.0, _N_ETA[0]
        self._place: dict[int, int] = {}
        self._quantiles = np.empty((0, 0, 0, len(_NORMAL)))

    @np.errstate(all="ignore")
    def drawn(
        self, rng: np.random.Generator, eta: Array, data: list[Array], slope: Array, *, has_far: bool = True
    ) -> Array:
        """Return one draw of z for each predictor, (n_points, n_rows).

        A few that are far out, at hyperparameters of next to no weight, may keep all off the lattice: then they are
        drawn by themselves.
        """
        first, number = distinct(data, eta.shape[1])
        some = [d if d.shape[1] == 1 else d[:, first] for d in data]
        log_a = np.log(np.abs(slope[0])) / _OF_LOG
        if not self._reaches(some, eta, log_a, len(first)):
            direct, (low, high) = Integrated(self._function, 1).drawn, np.quantile(eta, (_RARE, 1.0 - _RARE))
            is_far = ((eta < low) | (eta > high)).any(axis=0) | (not has_far)
            if is_far.all():
                return direct(rng, eta, *data, slope)
            result, self._data = np.empty(eta.shape), []  # a lattice of the others alone
            few, others = ([d[:, at] if d.shape[1] > 1 else d for d in (*data, slope)] for at in (is_far, ~is_far))
            result[:, is_far] = direct(rng, eta[:, is_far], *few)
            result[:, ~is_far] = self.drawn(rng, eta[:, ~is_far], others[:-1], others[-1], has_far=False)
            return result
        cells = self._cells(eta, number, log_a)

        def proposed() -> tuple[Array, Array]:
            v, log_density = self._proposed(rng, cells)
            z, [of_row] = (v - eta) / slope, self._function(v, *data)
            return z, of_row - 0.5 * z * z - log_density

        return sampled(proposed, rng)

    def _reaches(self, data: list[Array], eta: Array, log_a: Array, n: int) -> bool:
        """See to it that the lattice holds some predictors; tell whether it does, and pays."""
        lowest, highest = float(eta.min()), float(eta.max())
        if not (np.isfinite(lowest) and np.isfinite(highest) and np.isfinite(log_a).all()):
            return False
        below = np.floor(log_a).astype(np.intp)
        needed = np.union1d(below, below + 1)
        if eta.size < _PAYS * n * len(needed):
            return False
        alike = len(self._data) == len(data) and all(map(np.array_equal, self._data, data))
        if not alike or lowest < self._lowest or highest > self._lowest + self._step * (self._n_eta - 1):
            margin = _MARGIN * (highest - lowest) + 1e-6
            self._data, self._lowest, self._n_eta = data, lowest - margin, _N_ETA[0]
            self._step = (highest - lowest + 2.0 * margin) / (self._n_eta - 1)
            self._place = {}
        return self._make(needed, n)

    def _make(self, needed: Indices, n: int) -> bool:
        """Find quantiles at some values of log a; tell whether predictors are close enough for these."""
        missing = [k for k in needed.tolist() if k not in self._place]
        while missing:
            if (len(self._place) + len(missing)) * n * self._n_eta * len(_NORMAL) > _MOST_NUMBERS:
                return False
            numbers = np.array(missing)
            eta = (self._lowest + self._step * np.arange(self._n_eta))[:, None]
            new = np.empty((len(numbers), n, self._n_eta, len(_NORMAL)))
            at_once = max(1, _DISTRIBUTIONS_AT_A_TIME // (n * self._n_eta))
            for start in range(0, len(numbers), at_once):
                a = np.exp(_OF_LOG * np.repeat(numbers[start : start + at_once], n))[None]
                m = a.shape[1] // n
                data = [np.tile(d, (1, m)) if d.shape[1] > 1 else d for d in self._data]
                points = np.broadcast_to(eta, (self._n_eta, m * n))
                v = eta[None] + a * _quantiles(*densities(self._function, points, data, a))
                new[start : start + m] = v.transpose(2, 1, 0).reshape(m, n, self._n_eta, -1)
            middle = new[:, :, 1::2]
            at, one = (
                len(_NORMAL) // 2,
                round(1.0 / _OF_NORMAL),
            )  # of quantiles: the median, and what an sd is beside it
            sd = 0.5 * (middle[..., at + one] - middle[..., at - one])
            apart = np.abs(middle - 0.5 * (new[:, :, :-1:2] + new[:, :, 2::2])) / sd[..., None]
            if np.nanmax(apart) < 4.0 * _ERROR:  # a quarter of it is left between points
                kept = self._quantiles[: len(self._place)] if self._place else new[:0]
                self._quantiles = np.concatenate([kept, new])
                self._place |= {k: len(kept) + i for i, k in enumerate(missing)}
                return bool(np.isfinite(new).all())
            if self._n_eta == _N_ETA[-1]:
                return False
            self._step, self._n_eta = 0.5 * self._step, 2 * self._n_eta - 1
            self._place, missing = {}, needed.tolist()
        return True

    def _cells(self, eta: Array, number: Indices, log_a: Array) -> _Cells:
        shape = self._quantiles.shape
        at = (eta - self._lowest) / self._step
        left = np.minimum(at.astype(np.intp), self._n_eta - 2)
        below = np.floor(log_a).astype(np.intp)
        lowest = int(below.min())
        places = np.full(int(below.max()) - lowest + 2, -1, dtype=np.intp)
        for k, place in self._place.items():
            if 0 <= k - lowest < len(places):
                places[k - lowest] = place
        first, second = (
            ((places[below - lowest + up] * shape[1] + number) * shape[2] + left) * shape[3] for up in (0, 1)
        )
        return _Cells(first, second, at - left, np.broadcast_to(log_a - below, eta.shape))

    def _proposed(self, rng: np.random.Generator, cells: _Cells) -> tuple[Array, Array]:
        """Return draws of v, and their log densities but for a constant."""
        normal = np.clip(rng.standard_normal(cells.first.shape), _NORMAL[0], _NORMAL[-1])
        at = (normal - _NORMAL[0]) / _OF_NORMAL
        left = np.minimum(at.astype(np.intp), len(_NORMAL) - 2)
        known, ends = self._quantiles.ravel(), []
        for end in (0, 1):
            found = []
            for start in (cells.first, cells.second):
                corner = start + left
                corner += end
                below = known.take(corner)
                corner += len(_NORMAL)
                above = known.take(corner)
                above -= below
                above *= cells.part
                above += below
                found.append(above)
            found[1] -= found[0]
            found[1] *= cells.part_second
            found[1] += found[0]
            ends.append(found[1])
        ends[1] -= ends[0]
        at -= left
        normal *= normal
        normal *= -0.5
        normal -= np.log(ends[1])
        return ends[0] + at * ends[1], normal


def _quantiles(z: Array, density: Array, slope: Array, spacing: float) -> Array:
    """Return the quantiles of distributions at those of a normal, (n_quantiles, n_points, n_rows); see `densities`."""
    # Between two nodes: the integral of a cubic through these and the ones beside them.
    per_node = density * slope
    areas = 13.0 * (per_node[1:-2] + per_node[2:-1]) - per_node[:-3] - per_node[3:]
    return quantiles(_NORMAL, z[2:-2], density[2:-2], np.maximum(areas * (spacing / 24.0), np.finfo(np.float64).tiny))


# --- rows at many values in which effects that one row alone reads are integrated out ---


@dataclass(frozen=True, eq=False)
class _OwnEffects(Batch):
    """The effects of one group."""

    #: Of their priors' predictors, and w, as above; shape (n_effects,).
    mean: Array
    sd: Array
    ratio: Array
    #: By which rows read a standard normal in place of the effect; shape (n_effects,).
    slope: Array


@dataclass(frozen=True, eq=False)
class ManyRowsLeft(ManyRows):
    """Rows with effects integrated out, of the coordinates that are left."""

    #: Of the first functions, in their order.
    own: list[_OwnEffects]
    narrowing: "Narrowing"

    def __getitem__(self, which: Indices) -> "ManyRows":
        """Return some of them, in that order."""
        rows = super().__getitem__(which)
        assert isinstance(rows, ManyRowsLeft)
        return rows if rows is self else replace(rows, own=[effects[which] for effects in self.own])

    def drawn_inside(self, x: Array, rng: np.random.Generator) -> Array:
        """Return draws of all that is not given, (n, n_inside, m), given those that are left, (n, n_dim, m)."""
        draws = iter(self.narrowing.draws)

        def drawn(function: Integrated, points: list[Array], data: list[Array]) -> Array:
            of_group = next(draws)
            if len(points) > 1:
                return function.drawn(rng, *points, *data)
            return of_group.drawn(rng, points[0], data[:-1], data[-1])

        return self._completed(x, drawn)

    def completed(self, x: Array, z: Array) -> Array:
        """Return the same with effects as some standard normals, (n, n_effects, m), have them."""
        parts = iter(np.split(z, np.cumsum([len(group.rows) for group in self.narrowing.effects.groups])[:-1], axis=1))
        return self._completed(x, lambda *_: next(parts).reshape(-1, x.shape[2]).T)

    @np.errstate(all="ignore")
    def _completed(self, x: Array, normals: Callable[[Integrated, list[Array], list[Array]], Array]) -> Array:
        """Return all that is not given from what is left and from standard normals of each group, (m, n n_effects)."""
        n, _, m = x.shape
        eta = (self.maps.offset[:, :, None] + self.maps.times(x)).reshape(-1, m)
        result = np.empty((n, self.narrowing.n_inside, m))
        result[:, self.narrowing.kept] = x
        for effects, function, group, of_prior in self._each():
            assert isinstance(function.function, Integrated)
            points = [np.ascontiguousarray(eta[at].T) for at in function.index.T]
            z = normals(function.function, points, function.data).reshape(m, n, -1).transpose(1, 2, 0)
            moved = effects.mean[:, :, None] + effects.sd[:, :, None] * z - eta.reshape(n, -1, m)[:, of_prior]
            result[:, group.coordinates] = moved / effects.ratio[:, :, None]
        return result

    def _each(self) -> Iterator[tuple[_OwnEffects, RowFunction, OwnGroup, Indices]]:
        """Yield the effects of each group, their rows, and the predictors of their priors."""
        groups = self.narrowing.effects.groups
        of_priors = (map_.p for map_ in self.narrowing.groups)
        return zip(self.own, self.functions[: len(groups)], groups, of_priors, strict=True)


class Narrowing:
    """Integrates effects out of rows at many values."""

    def __init__(
        self, effects: OwnEffects, functions: Sequence[RowFunction], sparsity: Sparsity, columns: Indices
    ) -> None:
        self.effects, self.n_inside, self.kept = effects, effects.n_dim, effects.kept
        self._apart = _Apart(sparsity, columns, effects.coordinates)
        sparsity, columns = self._apart.sparsity, self._apart.columns
        self._counts = [len(rows.index) for rows in functions]
        self.draws = [OwnDraws(functions[group.kind].function) for group in effects.groups]
        self.groups = [_GroupMap(group, functions, sparsity) for group in effects.groups]
        d = sparsity.n_dim
        left = np.concatenate([self.kept, np.arange(self.n_inside, d)])  # sums over many coordinates come last
        place = np.full(d, -1, dtype=np.intp)
        place[left] = np.arange(len(left))
        number = np.repeat(np.arange(sparsity.n_rows), np.diff(sparsity.starts))
        parts = [
            number * d + sparsity.indices,
            *(group.rows * d + sparsity.indices[group.source] for group in self.groups),
        ]
        every = np.unique(np.concatenate(parts))
        every = every[place[every % d] >= 0]
        starts = np.searchsorted(every // d, np.arange(sparsity.n_rows + 1))
        self._sparsity, self._columns = Sparsity(starts, place[every % d], len(left)), place[columns]
        #: Of each part, which entries are left, and where.
        self._places = [(np.flatnonzero(here), at[here]) for at, here in (_where(every, part) for part in parts)]
        keep = [functions[group.kind].index[group.rows] for group in effects.groups]
        indices = [*keep, *(rows.index for rows in self._left(functions, 1))]
        self.entries = Entries(self._sparsity, self._columns, indices)

    def of(self, rows: ManyRows) -> tuple[ManyRows, Bools]:
        """Return rows of what is left, and where effects can be integrated out."""
        n, maps = len(rows), self._apart.of(rows.maps)
        offset, dense, constant = maps.offset.copy(), maps.dense, rows.constant.copy()
        data = np.zeros((n, len(self._sparsity.indices)))
        (kept, places), *added = self._places
        data[:, places] = maps.data[:, kept]
        made, own, is_right = list[RowFunction](), list[_OwnEffects](), np.ones(n, dtype=bool)
        for group, map_, (take, there) in zip(self.effects.groups, self.groups, added, strict=True):
            per = self._counts[group.prior_kind]
            found = priors_of(rows.functions[group.prior_kind], _at(group.prior_rows, per, n))
            if found is None:
                return rows, np.zeros(n, dtype=bool)
            mean, sd, total = (x.reshape(n, -1) for x in found)
            w, b = maps.data[:, map_.of_w], np.where(map_.has_b, maps.data[:, map_.of_b], 0.0)
            is_right &= (w != 0.0).all(axis=1)
            ratio = b / w
            offset[:, map_.eta] += ratio * (mean - offset[:, map_.p])
            if len(self._columns) and maps.dense[:, map_.p].any():
                dense = np.repeat(dense, n, axis=0) if len(dense) < n else dense.copy()
                dense[:, map_.eta] -= ratio[:, :, None] * dense[:, map_.p]
            if len(take):
                source = map_.source[take]
                np.subtract.at(data.T, there, (ratio[:, map_.number[take]] * maps.data[:, source]).T)
            made.append(_integrated(rows.functions[group.kind], group, self._counts[group.kind], n, ratio * sd))
            own.append(_OwnEffects(mean, sd, w, ratio * sd))
            constant += (total - np.log(np.abs(w))).sum(axis=1)
        weights = None if maps.weights is None else maps.weights[:, self.kept]
        left = ManyMaps(offset, dense, self._columns, data, self._sparsity, weights)
        functions = [*made, *self._left(rows.functions, n)]
        constant = np.where(np.isfinite(constant), constant, -np.inf)
        return ManyRowsLeft(left, self.entries, functions, rows.slope, constant, rows.tolerance, own, self), is_right

    def _left(self, functions: Sequence[RowFunction], n: int) -> Iterator[RowFunction]:
        keep = [np.ones(count, dtype=bool) for count in self._counts]
        for group in self.effects.groups:
            keep[group.kind][group.rows] = keep[group.prior_kind][group.prior_rows] = False
        for rows, some in zip(functions, keep, strict=True):
            if some.any():
                at = np.flatnonzero(np.tile(some, n))
                yield rows if some.all() else rows.some(at, rows.index[at])


class _Apart:
    """Takes columns of effects from the dense ones, as which they count where there are few rows."""

    def __init__(self, sparsity: Sparsity, columns: Indices, effects: Indices) -> None:
        is_effect = np.isin(columns, effects)
        self.sparsity, self.columns = sparsity, columns[~is_effect]
        self._moved, self._stay = np.flatnonzero(is_effect), np.flatnonzero(~is_effect)
        if not len(self._moved):
            return
        number = np.repeat(np.arange(sparsity.n_rows), np.diff(sparsity.starts))
        new = np.repeat(np.arange(sparsity.n_rows), len(self._moved))
        rows = np.concatenate([number, new])
        indices = np.concatenate([sparsity.indices, np.tile(columns[self._moved], sparsity.n_rows)])
        self._order = np.argsort(rows, kind="stable")
        starts = np.searchsorted(rows[self._order], np.arange(sparsity.n_rows + 1))
        self.sparsity = Sparsity(starts, indices[self._order], sparsity.n_dim)

    def of(self, maps: ManyMaps) -> ManyMaps:
        """Return maps of which those columns are sparse."""
        if not len(self._moved):
            return maps
        n = len(maps)
        moved = np.broadcast_to(maps.dense[:, :, self._moved], (n, self.sparsity.n_rows, len(self._moved)))
        data = np.concatenate([maps.data, moved.reshape(n, -1)], axis=1)[:, self._order]
        return replace(
            maps, dense=maps.dense[:, :, self._stay], columns=self.columns, data=data, sparsity=self.sparsity
        )


class _GroupMap:
    """Where a sparse matrix has what concerns the effects of one group."""

    def __init__(self, group: OwnGroup, functions: Sequence[RowFunction], sparsity: Sparsity) -> None:
        # The predictors that read effects, and those of their priors.
        self.eta = functions[group.kind].index[group.rows, group.slot]
        self.p = functions[group.prior_kind].index[group.prior_rows, 0]
        d, starts = sparsity.n_dim, sparsity.starts
        codes = np.repeat(np.arange(sparsity.n_rows), np.diff(starts)) * d + sparsity.indices
        self.of_w, has_w = _where(codes, self.p * d + group.coordinates)
        self.of_b, self.has_b = _where(codes, self.eta * d + group.coordinates)
        if not has_w.all():
            raise NotApart("an effect is not read by its prior")
        counts = (starts[1:] - starts[:-1])[self.p]
        self.number = np.repeat(np.arange(len(self.p)), counts)
        self.source = (
            np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + starts[self.p][self.number]
        )
        self.rows = self.eta[self.number]


def _where(codes: Indices, wanted: Indices) -> tuple[Indices, Bools]:
    """Return where codes are those that are wanted, and which are there."""
    if not len(codes):
        return np.zeros_like(wanted), np.zeros(len(wanted), dtype=bool)
    order = np.argsort(codes, kind="stable")
    at = order[np.minimum(np.searchsorted(codes, wanted, sorter=order), len(codes) - 1)]
    return at, codes[at] == wanted


def _at(rows: Indices, per: int, n: int) -> Indices:
    """Return the numbers of some rows at all values."""
    return np.asarray((per * np.arange(n)[:, None] + rows).ravel())


def _integrated(reads: RowFunction, group: OwnGroup, per: int, n: int, slope: Array) -> RowFunction:
    at = _at(group.rows, per, n)
    slopes = [np.zeros((1, 1))] * reads.k
    slopes[group.slot] = slope.reshape(1, -1)
    data = [*reads.data_of(at), *slopes]
    kind = TabulatedRowFunction if reads.k == 1 else RowFunction
    interacts = np.ones((reads.k,) * 2, dtype=bool)
    return kind(Integrated(reads.function, reads.k), reads.index[at], data, interacts, n_shared=reads.n_shared)
