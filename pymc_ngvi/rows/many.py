"""Rows at many values of what their predictors' coefficients depend on: hundreds of log densities in one evaluation.

At each value k of the hyperparameters log p is a sum over the same rows, of predictors offset_k + X_k x with X_k of one
pattern. Rows of all values are evaluated together; so are products with all X_k, as those of one block-diagonal matrix.
"""

import functools

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.refusal import TooDenseError
from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.expectation import RowFunction
from pymc_ngvi.rows.levels import Levels
from pymc_ngvi.rows.scatter import Scatter
from pymc_ngvi.rows.taken import Taken

#: Products of two entries of X that covariances may be sums of, at most, at one value.
_MOST_PRODUCTS = 20_000_000
#: Values of rows at a time.
_AT_A_TIME = 2**18


@dataclass(frozen=True, eq=False)
class ManyMaps:
    """Affine functions of one pattern, eta_k = offset_k + X_k x_k.

    Parameters
    ----------
    offset : ndarray, shape (n, n_predictors)
    dense : ndarray, shape (n, n_predictors, n_dense), or (1, ...) where it is the same for all
        Columns of X that are dense.
    columns : ndarray of int, shape (n_dense,)
        Which these are.
    data : ndarray, shape (n, n_entries)
        Entries of the others.
    sparsity : Sparsity
        Where these are.
    """

    offset: Array
    dense: Array
    columns: NDArray[np.intp]
    data: Array
    sparsity: "Sparsity"

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.offset)

    def __getitem__(self, which: NDArray[np.intp]) -> "ManyMaps":
        """Return some of them."""
        dense = self.dense if len(self.dense) == 1 else self.dense[which]
        return replace(self, offset=self.offset[which], dense=dense, data=self.data[which])

    @functools.cached_property
    def blocks(self) -> sparse.csr_array:
        """The sparse parts of all X as one block-diagonal matrix."""
        return self.sparsity.repeated(len(self)).filled(self.data)

    def times(self, x: Array) -> Array:
        """Return X_k times columns, (n, n_predictors, m) from (n, n_dim, m)."""
        n, d, m = x.shape
        result: Array = np.matmul(self.dense, x[:, self.columns]) if len(self.columns) else np.zeros((n, 1, m))
        if self.data.shape[1]:
            result = result + np.asarray(self.blocks @ x.reshape(n * d, m)).reshape(n, -1, m)
        return np.broadcast_to(result, (n, self.offset.shape[1], m))

    def transposed_times(self, eta: Array) -> Array:
        """Return X_k^T times vectors, (n, n_dim) from (n, n_predictors)."""
        n = len(self)
        result = np.zeros((n, self.sparsity.n_dim))
        if self.data.shape[1]:
            result += np.asarray(self.blocks.T @ eta.ravel()).reshape(n, -1)
        if len(self.columns):
            result[:, self.columns] += np.matmul(eta[:, None], self.dense)[:, 0]
        return result


    def transposed_rows(self, index: NDArray[np.intp]) -> Array:
        """Return some rows of X_k as columns, (n, n_dim, n_rows)."""
        n, sparsity = len(self), self.sparsity
        result = np.zeros((n, sparsity.n_dim, len(index)))
        result[:, self.columns] = np.swapaxes(self.dense[:, index], 1, 2)
        for at, row in enumerate(index):
            here = slice(sparsity.starts[row], sparsity.starts[row + 1])
            result[:, sparsity.indices[here], at] = self.data[:, here]
        return result


@dataclass(frozen=True, eq=False)
class Sparsity:
    """Where a sparse matrix has entries, row by row.

    Parameters
    ----------
    starts : ndarray of int, shape (n_rows + 1,)
    indices : ndarray of int, shape (n_entries,)
    n_dim : int
        Number of columns.
    """

    starts: Ints
    indices: Ints
    n_dim: int

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1

    def repeated(self, n: int) -> "Sparsity":
        """Return that of a block-diagonal matrix with so many blocks; the last one is remembered."""
        if self._last.get("n") != n:
            apart = np.arange(n)[:, None]
            starts = (self.starts[:-1] + len(self.indices) * apart).ravel()
            starts = np.append(starts, n * len(self.indices))
            indices = (self.indices + self.n_dim * apart).ravel()
            self._last.update(n=n, it=Sparsity(starts, indices, n * self.n_dim))
        result: Sparsity = self._last["it"]
        return result

    @functools.cached_property
    def _last(self) -> dict[str, object]:  # noqa: D102
        return {}

    def filled(self, values: Array) -> sparse.csr_array:
        """Return the matrix with these values, in any shape."""
        return sparse.csr_array((values.ravel(), self.indices, self.starts), shape=(self.n_rows, self.n_dim))


class _Products(NamedTuple):
    """Covariances of pairs of predictors, as sums over entries of the covariance of x.

    Parameters
    ----------
    sparsity : Sparsity
        From entries to all pairs.
    first, second : ndarray of int, shape (n_products,)
        Entries of X that are multiplied.
    """

    sparsity: Sparsity
    first: Ints
    second: Ints


class Entries:
    """Entries of symmetric matrices by x that rows ask for: of its covariance, and of its precision.

    Parameters
    ----------
    sparsity : Sparsity
        Of X, but for its dense columns.
    columns : ndarray of int
        These.
    pairs : list of ndarray of int, shape (n_pairs, 2)
        Pairs of predictors that rows have, (i, j), each list of them for one pair of slots of one kind.

    Attributes
    ----------
    rows, cols : ndarray of int, shape (n_entries,)
        The lower triangle: all that are asked for, and the diagonal.

    Raises
    ------
    TooDenseError
    """

    def __init__(self, sparsity: Sparsity, columns: NDArray[np.intp], pairs: list[Ints]) -> None:
        self.n_dim, self._columns, self.pairs = sparsity.n_dim, columns, pairs
        d = self.n_dim
        used = np.unique(sparsity.indices) if len(columns) else np.empty(0, dtype=np.int64)
        parts = [_products(sparsity, pair) for pair in pairs]
        codes = np.concatenate([np.maximum(a, b) * d + np.minimum(a, b) for *_, a, b in parts])
        i, j = np.tril_indices(len(columns))
        among = np.maximum(columns[i], columns[j]) * d + np.minimum(columns[i], columns[j])
        between = np.maximum(columns[:, None], used) * d + np.minimum(columns[:, None], used)
        every = np.unique(np.concatenate([codes, among, between.ravel(), np.arange(d) * (d + 1)]))
        self.rows, self.cols = every // d, every % d
        self._used = used
        full = np.empty((len(columns),) * 2, dtype=np.int64)
        full[i, j] = full[j, i] = np.searchsorted(every, among)
        self._among, self._between = full, np.searchsorted(every, between)
        counts = np.concatenate([part[0] for part in parts])
        starts = np.concatenate([[0], np.cumsum(counts)])
        sums = Sparsity(starts, np.searchsorted(every, codes), len(every))
        self._products = _Products(sums, *(np.concatenate([part[k] for part in parts]) for k in (1, 2)))
        self._ends = np.cumsum([0, *map(len, pairs)])
        self.is_off = self.rows != self.cols

    def of(self, maps: ManyMaps) -> "EntriesAt":
        """Return what goes with some maps."""
        first, second = self._products.first, self._products.second
        values = maps.data[:, first] * maps.data[:, second]
        return EntriesAt(self, maps, self._products.sparsity.repeated(len(maps)).filled(values))


@dataclass(frozen=True, eq=False)
class EntriesAt:
    """The same with numbers: the sums of all maps as one block-diagonal matrix."""

    entries: Entries
    maps: ManyMaps
    sums: sparse.csr_array

    def covariances(self, values: Array) -> list[Array]:
        """Return the covariances of each list of pairs, (n, n_pairs), from entries of those of x, (n, n_entries)."""
        own, maps = self.entries, self.maps
        n = len(values)
        found = np.asarray(self.sums @ values.ravel()).reshape(n, -1)
        result = [found[:, a:b] for a, b in zip(own._ends[:-1], own._ends[1:], strict=True)]
        if not len(own._columns):
            return result
        among = values[:, own._among]
        left = np.matmul(maps.dense, among)  # (n, n_predictors, n_dense)
        beside = None
        if len(own._used):
            between = np.zeros((n, own.n_dim, len(own._columns)))
            between[:, own._used] = values[:, own._between].transpose(0, 2, 1)
            shape = (n * own.n_dim, -1)
            beside = np.asarray(maps.blocks @ between.reshape(shape)).reshape(n, -1, len(own._columns))
        for total, pair in zip(result, own.pairs, strict=True):
            i, j = (_slice_or(side) for side in pair.T)
            of_i, of_j = maps.dense[:, i], maps.dense[:, j]
            total += np.einsum("nrp,nrp->nr", left[:, i], np.broadcast_to(of_j, left[:, i].shape))
            if beside is not None:
                total += np.einsum("nrp,nrp->nr", beside[:, i], np.broadcast_to(of_j, beside[:, i].shape))
                total += np.einsum("nrp,nrp->nr", beside[:, j], np.broadcast_to(of_i, beside[:, j].shape))
        return result

    def quadratic(self, weights: Sequence[Array], matrix: sparse.csr_array) -> Array:
        """Return the entries of X^T M X, (n, n_entries).

        Parameters
        ----------
        weights : sequence of ndarray, shape (n, n_pairs)
            M at each list of pairs, (i, j); twice that where i is another slot of a row than j.
        matrix : scipy.sparse.csr_array
            M of all, as one block-diagonal matrix.
        """
        own, maps = self.entries, self.maps
        n = len(maps)
        result = np.asarray(self.sums.T @ np.concatenate(weights, axis=1).ravel()).reshape(n, -1)
        result[:, own.is_off] *= 0.5
        if len(own._columns):
            p = len(own._columns)
            dense = np.broadcast_to(maps.dense, (n, *maps.dense.shape[1:]))
            product = np.asarray(matrix @ dense.reshape(-1, p)).reshape(n, -1, p)
            result[:, own._among] = np.matmul(np.swapaxes(maps.dense, 1, 2), product)
            if len(own._used):
                across = np.asarray(maps.blocks.T @ product.reshape(-1, p)).reshape(n, -1, p)
                result[:, own._between] = across[:, own._used].transpose(0, 2, 1)
        return result


def _slice_or(index: Ints) -> slice | Ints:
    """Return a slice where an index is one: no copy is made then."""
    if len(index) and index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


def _products(sparsity: Sparsity, pair: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return, for pairs of rows of X, how many products of entries each has, which entries, and in what columns."""
    i, j = pair.T
    lengths = np.diff(sparsity.starts)
    n_i, n_j = lengths[i], lengths[j]
    n = n_i * n_j
    if n.sum() > _MOST_PRODUCTS:
        raise TooDenseError
    number = np.repeat(np.arange(len(pair)), n)
    place = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
    per_row = np.maximum(np.repeat(n_j, n), 1)
    at_i = sparsity.starts[i][number] + place // per_row
    at_j = sparsity.starts[j][number] + place % per_row
    return n, at_i, at_j, sparsity.indices[at_i], sparsity.indices[at_j]


class ManySeen(NamedTuple):
    """What rows see of Gaussians: means of predictors, (n, n_predictors), and covariances, (n, n_pairs) each."""

    mean: Array
    covariances: list[Array]

    def __getitem__(self, which: object) -> "ManySeen":  # type: ignore[override]
        """Return that of some of them."""
        return ManySeen(self.mean[which], [c[which] for c in self.covariances])  # type: ignore[index]

    @classmethod
    def together(cls, parts: Sequence["ManySeen"]) -> "ManySeen":
        """Return several as one."""
        covariances = [np.concatenate(c) for c in zip(*(part.covariances for part in parts), strict=True)]
        return cls(np.concatenate([part.mean for part in parts]), covariances)


class ManyRules(NamedTuple):
    """Rules of quadrature, and standard deviations that they were chosen for, (n, n_rows) each."""

    level: Levels
    sd: NDArray[np.float32]

    def __getitem__(self, which: object) -> "ManyRules":  # type: ignore[override]
        """Return those of some of them."""
        return ManyRules(self.level[which], self.sd[which])  # type: ignore[index]

    @classmethod
    def together(cls, parts: Sequence["ManyRules"]) -> "ManyRules":
        """Return several as one."""
        return cls(*(np.concatenate(part) for part in zip(*parts, strict=True)))


class ManyExpected(NamedTuple):
    """Expectations under Gaussians.

    Parameters
    ----------
    value : ndarray, shape (n,)
        Of log p.
    slope : ndarray, shape (n, n_predictors)
        Of its derivatives by the predictors.
    precision : ndarray, shape (n, n_entries)
        Entries of minus the mean Hessian by x.
    rules : ManyRules
    matrix : scipy.sparse.csr_array or None
        The mean Hessian by the predictors, block-diagonal; None where some were left out.
    """

    value: Array
    slope: Array
    precision: Array
    rules: ManyRules
    matrix: sparse.csr_array | None = None

    def __getitem__(self, which: object) -> "ManyExpected":  # type: ignore[override]
        """Return those of some of them."""
        return ManyExpected(self.value[which], self.slope[which], self.precision[which], self.rules[which])  # type: ignore[index]

    @classmethod
    def together(cls, parts: Sequence["ManyExpected"]) -> "ManyExpected":
        """Return several as one."""
        value, slope, precision = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("value", "slope", "precision")
        )
        return cls(value, slope, precision, ManyRules.together([part.rules for part in parts]))


@dataclass(frozen=True, eq=False)
class ManyRows:
    """Log densities that are sums over the same rows.

    Parameters
    ----------
    maps : ManyMaps
    entries : Entries
    functions : list of RowFunction
        Of all rows of all of them: row r of the k-th is row k n_rows + r.
    slope : ndarray, shape (n, n_predictors)
        What is linear.
    constant : ndarray, shape (n,)
    tolerance : float
        Nats that quadrature may be off by in each row.
    """

    maps: ManyMaps
    entries: Entries
    functions: list[RowFunction]
    slope: Array
    constant: Array
    tolerance: float

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.maps)

    @property
    def n_dim(self) -> int:
        """Number of coordinates x."""
        return self.entries.n_dim

    def __getitem__(self, which: NDArray[np.intp]) -> "ManyRows":
        """Return some of them, in that order."""
        if len(which) == len(self) and (which == np.arange(len(self))).all():
            return self
        functions = [self._some(f, which) for f in self.functions]
        return replace(
            self, maps=self.maps[which], functions=functions, slope=self.slope[which], constant=self.constant[which]
        )

    def _some(self, function: RowFunction, which: NDArray[np.intp]) -> RowFunction:
        n, n_predictors = len(self), self.slope.shape[1]
        per = len(function.index) // n
        index = function.index[:per] + n_predictors * np.arange(len(which))[:, None, None]
        return function.some((per * which[:, None] + np.arange(per)).ravel(), index.reshape(-1, function.k))

    @functools.cached_property
    def at(self) -> EntriesAt:
        """Entries with numbers."""
        return self.entries.of(self.maps)

    @functools.cached_property
    def _scatter(self) -> Scatter:
        return Scatter([f.index for f in self.functions], self.slope.size)

    def seen(self, mean: Array, covariance: Array) -> ManySeen:
        """Return what rows see of Gaussians with means, (n, n_dim), and entries of covariances, (n, n_entries)."""
        eta = self.maps.offset + self.maps.times(mean[:, :, None])[:, :, 0]
        return ManySeen(eta, self.at.covariances(covariance))

    @np.errstate(all="ignore")
    def expected(self, seen: ManySeen, rules: ManyRules | None = None) -> ManyExpected:
        """Return expectations where predictors are distributed so, by rules that are given or chosen here."""
        n = len(self)
        kinds = self._taken(seen, rules)
        if rules is None:
            for kind in kinds:
                kind.choose(self.tolerance)
        found = [kind.derivatives() for kind in kinds]
        grad, matrix = self._scatter(*zip(*found, strict=True))
        weights = []
        for _, hessian in found:
            k = hessian.shape[1]
            weights += [(1.0 if a == b else 2.0) * hessian[:, a, b].reshape(n, -1) for a in range(k) for b in range(a + 1)]
        value = self.constant + np.einsum("nr,nr->n", self.slope, seen.mean)
        for kind in kinds:
            value += kind.values.reshape(n, -1).sum(axis=1)
        now = (np.concatenate([part(kind).reshape(n, -1) for kind in kinds], axis=1) for part in (_codes, _sds))
        slope = self.slope + grad.reshape(n, -1)
        return ManyExpected(value, slope, -self.at.quadratic(weights, matrix), ManyRules(*now), matrix)

    def _taken(self, seen: ManySeen, rules: ManyRules | None) -> list[Taken]:
        result, pairs, start = [], iter(seen.covariances), 0
        n, mean = len(self), seen.mean.ravel()
        for function in self.functions:
            k, n_rows = function.k, len(function.index)
            cov = np.empty((n_rows, k, k))
            for a in range(k):
                for b in range(a + 1):
                    cov[:, a, b] = cov[:, b, a] = next(pairs).ravel()
            given = None
            if rules is not None:
                here = slice(start, start + n_rows // n)
                given = rules.level[:, here].ravel(), rules.sd[:, here].ravel()
            start += n_rows // n
            result.append(Taken(function, mean[function.index], cov, given))
        return result

    def drawn_inside(self, x: Array, rng: np.random.Generator) -> Array:
        """Return draws of all that is not given, (n, n_inside, m), given those that are left, (n, n_dim, m): the same."""
        return x

    def moments_inside(self, mean: Array, sd: Array, seen: ManySeen, rules: ManyRules, covariance: Array) -> tuple[Array, Array]:
        """Return means and sds of all that is not given, (n, n_inside) each, by Gaussians of what is left.

        Parameters
        ----------
        mean, sd : ndarray, shape (n, n_dim)
            Of what is left.
        seen : ManySeen
        rules : ManyRules
        covariance : ndarray, shape (n, n_entries)
        """
        return mean, sd

    @np.errstate(all="ignore")
    def values(self, x: Array) -> Array:
        """Return log p, (n, m), at m points for each of them, (n, n_dim, m)."""
        n, _, m = x.shape
        eta = (self.maps.offset[:, :, None] + self.maps.times(x)).reshape(-1, m)
        result: Array = self.constant[:, None] + np.einsum("nr,nrm->nm", self.slope, eta.reshape(n, -1, m))
        for function in self.functions:
            per = len(function.index) // n
            size = max(1, _AT_A_TIME // (per * m)) * per
            for start in range(0, n * per, size):
                rows = np.arange(start, min(start + size, n * per))
                index = function.index[rows]
                part = function.values([np.ascontiguousarray(eta[at].T) for at in index.T], rows)
                result[rows[0] // per : (rows[-1] + 1) // per] += part.reshape(m, -1, per).sum(axis=2).T
        return result


def _codes(kind: Taken) -> Levels:
    return kind.codes


def _sds(kind: Taken) -> NDArray[np.float32]:
    return kind.sd
