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

from pymc_ngvi.core import prices
from pymc_ngvi.core.batch import Batch
from pymc_ngvi.core.messages import NotApart
from pymc_ngvi.core.sizes import CACHED
from pymc_ngvi.core.types import Array, Bools, Indices, RowRules
from pymc_ngvi.rows.expectation import RowFunction, Taken
from pymc_ngvi.rows.integrated import Integrated, TabulatedRowFunction
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
        functions, starts = list[RowFunction](), self.slope.shape[1] * np.arange(len(which))
        for function in self.functions:
            per = len(function.index) // len(self)
            index = (function.index[:per] + starts[:, None, None]).reshape(-1, function.k)
            functions.append(function.some((per * which[:, None] + np.arange(per)).ravel(), index))
        return replace(
            self, maps=self.maps[which], functions=functions, slope=self.slope[which], constant=self.constant[which]
        )

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
        return self._completed(x, lambda function, points, data: function.drawn(rng, *points, *data))

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
        groups = zip(self.own, self.narrowing.effects.groups, self.narrowing.groups, self.functions, strict=False)
        for effects, group, map_, function in groups:
            assert isinstance(function.function, Integrated)
            points = [np.ascontiguousarray(eta[at].T) for at in function.index.T]
            z = normals(function.function, points, function.data).reshape(m, n, -1).transpose(1, 2, 0)
            moved = effects.mean[:, :, None] + effects.sd[:, :, None] * z - eta.reshape(n, -1, m)[:, map_.p]
            result[:, group.coordinates] = moved / effects.ratio[:, :, None]
        return result


class Narrowing:
    """Integrates effects out of rows at many values."""

    def __init__(
        self, effects: OwnEffects, functions: Sequence[RowFunction], sparsity: Sparsity, columns: Indices
    ) -> None:
        self.effects, self.n_inside, self.kept = effects, effects.n_dim, effects.kept
        self._apart = _Apart(sparsity, columns, effects.coordinates)
        sparsity, columns = self._apart.sparsity, self._apart.columns
        self._counts = [len(rows.index) for rows in functions]
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
