"""Rows at many values in which effects that one row alone reads are integrated out; see `own_effects`, and `many`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.refusal import NotApart
from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.entries import Entries
from pymc_ngvi.rows.expectation import RowFunction
from pymc_ngvi.rows.integrated import Integrated
from pymc_ngvi.rows.many import ManyRows
from pymc_ngvi.rows.many_maps import ManyMaps, Sparsity
from pymc_ngvi.rows.own_draws import OwnDraws
from pymc_ngvi.rows.own_effects import Ints, OwnEffects, OwnGroup, predictors_of, priors_of
from pymc_ngvi.rows.seen import ManyRules, ManySeen
from pymc_ngvi.rows.tabulated import TabulatedRowFunction


@dataclass(frozen=True, eq=False)
class _OwnAtMany:
    """The effects of one group at many values.

    Parameters
    ----------
    mean, sd, ratio : ndarray, shape (n, n_effects)
        Of their priors' predictors, and w; see `own_effects`.
    slope : ndarray, shape (n, n_effects)
        By which rows read a standard normal in place of the effect.
    predictors : ndarray of int, shape (n_effects,)
        Of their priors.
    slot : int
        By which of their predictors rows read them.
    """

    mean: Array
    sd: Array
    ratio: Array
    slope: Array
    predictors: Ints
    slot: int

    def __getitem__(self, which: NDArray[np.intp]) -> "_OwnAtMany":
        """Return those at some of the values."""
        names = ("mean", "sd", "ratio", "slope")
        return replace(self, **{name: getattr(self, name)[which] for name in names})


@dataclass(frozen=True, eq=False)
class ManyRowsLeft(ManyRows):
    """Rows with effects integrated out, of the coordinates that are left.

    Parameters
    ----------
    own : list of _OwnAtMany
        Of the first functions, in their order.
    narrowing : Narrowing
    """

    own: list[_OwnAtMany]
    narrowing: "Narrowing"

    def __getitem__(self, which: NDArray[np.intp]) -> "ManyRows":
        """Return some of them, in that order."""
        rows = super().__getitem__(which)
        assert isinstance(rows, ManyRowsLeft)
        return rows if rows is self else replace(rows, own=[effects[which] for effects in self.own])

    @np.errstate(all="ignore")
    def drawn_inside(self, x: Array, rng: np.random.Generator) -> Array:
        """Return draws of all that is not given, (n, n_inside, m), given those that are left, (n, n_dim, m)."""
        n, _, m = x.shape
        eta = (self.maps.offset[:, :, None] + self.maps.times(x)).reshape(-1, m)
        result = np.empty((n, self.narrowing.n_inside, m))
        result[:, self.narrowing.kept] = x
        for (effects, function, coordinates), draws in zip(self._each(), self.narrowing.draws, strict=True):
            assert isinstance(function.function, Integrated)
            points = [np.ascontiguousarray(eta[at].T) for at in function.index.T]
            if function.k == 1:
                z = draws.drawn(rng, points[0], function.data[:-1], function.data[-1])
            else:
                z = function.function.drawn(rng, *points, *function.data)
            z = z.reshape(m, n, -1).transpose(1, 2, 0)
            of_prior = eta.reshape(n, -1, m)[:, effects.predictors]
            result[:, coordinates] = (effects.mean[:, :, None] + effects.sd[:, :, None] * z - of_prior) / effects.ratio[
                :, :, None
            ]
        return result

    @np.errstate(all="ignore")
    def moments_inside(
        self, mean: Array, sd: Array, seen: ManySeen, rules: ManyRules, covariance: Array
    ) -> tuple[Array, Array]:
        """Return means and sds of all that is not given, (n, n_inside) each, by Gaussians of what is left.

        Of a standard normal z that a row F(eta) = log E[exp f(eta + a z)] is integrated over, the mean given eta is
        a F'(eta) and the variance 1 + a^2 F''(eta). That mean varies by the squares of the mean derivatives of F'.
        """
        n = len(self)
        means, sds = (np.empty((n, self.narrowing.n_inside)) for _ in range(2))
        means[:, self.narrowing.kept], sds[:, self.narrowing.kept] = mean, sd
        with_priors = iter(self.narrowing.with_priors(self.maps, covariance))
        for (effects, function, coordinates), kind in zip(self._each(), self._taken(seen, rules), strict=False):
            grad, hessian = kind.derivatives()
            grad, along = grad[:, effects.slot].reshape(n, -1), hessian[:, effects.slot]
            root = kind._root
            spread = np.einsum("ra,rab->rb", along, root)
            varies = np.einsum("rb,rb->r", spread, spread)
            if function.k == 1:
                _, third, fourth, _ = kind.bends()
                variance = root[:, 0, 0] ** 2
                varies += (variance * third) ** 2 / 2.0 + variance**3 * fourth**2 / 6.0
            a, of_sd = effects.slope, effects.sd
            of_z = a * grad
            of_square = 1.0 + a**2 * (along[:, effects.slot] + varies).reshape(n, -1)
            across = sum(along[:, slot].reshape(n, -1) * next(with_priors) for slot in range(function.k))
            total = of_sd**2 * of_square + next(with_priors) - 2.0 * of_sd * a * across
            p = seen.mean[:, effects.predictors]
            means[:, coordinates] = (effects.mean + of_sd * of_z - p) / effects.ratio
            sds[:, coordinates] = np.sqrt(np.maximum(total, 0.0)) / np.abs(effects.ratio)
        return means, sds

    def _each(self) -> Iterator[tuple[_OwnAtMany, RowFunction, Ints]]:
        groups = self.narrowing.effects.groups
        return zip(self.own, self.functions[: len(groups)], (group.coordinates for group in groups), strict=True)


class Narrowing:
    """Integrates effects out of rows at many values.

    Parameters
    ----------
    effects : OwnEffects
    functions : list of RowFunction
        At one value.
    entries : Entries
        Of all coordinates.

    Attributes
    ----------
    entries : Entries
        Of those that are left.
    n_inside : int
    kept : ndarray of int
    draws : list of OwnDraws
        Of the effects of each group.

    Raises
    ------
    NotApart
        Where entries that are needed are in no pattern.
    """

    def __init__(
        self, effects: OwnEffects, functions: Sequence[RowFunction], sparsity: Sparsity, columns: Ints
    ) -> None:
        self.effects, self.n_inside, self.kept = effects, effects.n_dim, effects.kept
        self._apart = _Apart(sparsity, columns, effects.coordinates)
        sparsity, columns = self._apart.sparsity, self._apart.columns
        self._counts = [len(rows.index) for rows in functions]
        self.draws = [OwnDraws(functions[group.kind].function) for group in effects.groups]
        self._groups = [_GroupMap(group, functions, sparsity) for group in effects.groups]
        place = np.full(self.n_inside, -1, dtype=np.intp)
        place[self.kept] = np.arange(len(self.kept))
        d = sparsity.n_dim
        number = np.repeat(np.arange(sparsity.n_rows), np.diff(sparsity.starts))
        parts = [
            number * d + sparsity.indices,
            *(group.rows * d + sparsity.indices[group.source] for group in self._groups),
        ]
        every = np.unique(np.concatenate(parts))
        every = every[place[every % d] >= 0]
        starts = np.searchsorted(every // d, np.arange(sparsity.n_rows + 1))
        self._sparsity, self._columns = Sparsity(starts, place[every % d], len(self.kept)), place[columns]
        self._take, self._is_there = _found(every, parts[0])
        self._added = [_found(every, part) for part in parts[1:]]
        left = effects.left(functions)
        keep = [functions[group.kind].index[group.rows] for group in effects.groups]
        indices = [*keep, *(rows.index for rows in left)]
        pairs = [i[:, [a, b]] for i in indices for a in range(i.shape[1]) for b in range(a + 1)]
        self.entries = Entries(self._sparsity, self._columns, pairs)
        self._across = [
            np.stack([column, group.p], axis=1)
            for index, group in zip(keep, self._groups, strict=True)
            for column in (*index.T, group.p)
        ]
        self._of_priors = Entries(self._sparsity, self._columns, self._across)
        codes = self.entries.rows * len(self.kept) + self.entries.cols
        wanted = self._of_priors.rows * len(self.kept) + self._of_priors.cols
        self._places = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
        if not np.array_equal(codes[self._places], wanted):
            raise NotApart("means of effects' priors are read by no row with their effect")

    def with_priors(self, maps: ManyMaps, covariance: Array) -> list[Array]:
        """Return, group by group, covariances of rows' predictors with those of priors, and variances of these."""
        return self._of_priors.of(maps).covariances(covariance[:, self._places])

    def of(self, rows: ManyRows) -> tuple[ManyRows, NDArray[np.bool_]]:
        """Return rows of what is left, and where effects can be integrated out."""
        n, maps = len(rows), self._apart.of(rows.maps)
        offset, dense, constant = maps.offset.copy(), maps.dense, rows.constant.copy()
        data = np.zeros((n, len(self._sparsity.indices)))
        data[:, self._is_there] = maps.data[:, self._take]
        made, own, is_right = list[RowFunction](), list[_OwnAtMany](), np.ones(n, dtype=bool)
        for group, map_, (take, there) in zip(self.effects.groups, self._groups, self._added, strict=True):
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
            own.append(_OwnAtMany(mean, sd, w, ratio * sd, map_.p, group.slot))
            constant += (total - np.log(np.abs(w))).sum(axis=1)
        left = ManyMaps(offset, dense, self._columns, data, self._sparsity)
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

    def __init__(self, sparsity: Sparsity, columns: Ints, effects: Ints) -> None:
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
        return ManyMaps(maps.offset, maps.dense[:, :, self._stay], self.columns, data, self.sparsity)


class _GroupMap:
    """Where a sparse matrix has what concerns the effects of one group."""

    def __init__(self, group: OwnGroup, functions: Sequence[RowFunction], sparsity: Sparsity) -> None:
        self.eta, self.p = predictors_of(group, functions)
        d, starts = sparsity.n_dim, sparsity.starts
        codes = np.repeat(np.arange(sparsity.n_rows), np.diff(starts)) * d + sparsity.indices
        order = np.argsort(codes, kind="stable")
        self.of_w, has_w = _where(codes, order, self.p * d + group.coordinates)
        self.of_b, self.has_b = _where(codes, order, self.eta * d + group.coordinates)
        if not has_w.all():
            raise NotApart("an effect is not read by its prior")
        counts = (starts[1:] - starts[:-1])[self.p]
        self.number = np.repeat(np.arange(len(self.p)), counts)
        self.source = (
            np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + starts[self.p][self.number]
        )
        self.rows = self.eta[self.number]


def _where(codes: Ints, order: Ints, wanted: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return where codes are those that are wanted, and which are there."""
    at = order[np.minimum(np.searchsorted(codes, wanted, sorter=order), len(codes) - 1)]
    return at, codes[at] == wanted


def _found(every: Ints, codes: Ints) -> tuple[Ints, Ints]:
    """Return which of some codes are among all, and where they are there."""
    if not len(every):
        return every[:0], every[:0]
    at = np.minimum(np.searchsorted(every, codes), len(every) - 1)
    there = np.flatnonzero(every[at] == codes)
    return there, at[there]


def _at(rows: Ints, per: int, n: int) -> Ints:
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
