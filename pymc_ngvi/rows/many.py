"""Rows at many values of what their predictors' coefficients depend on: hundreds of log densities in one evaluation.

At each value k of the hyperparameters log p is a sum over the same rows, of predictors offset_k + X_k x with X_k of one
pattern. Rows of all values are evaluated together; so are products with all X_k, as those of one block-diagonal matrix.
"""

import functools

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.entries import Entries, EntriesAt, ManyMaps
from pymc_ngvi.rows.expectation import Levels, RowFunction
from pymc_ngvi.rows.pattern import Scatter
from pymc_ngvi.rows.seen import ManyRules, ManySeen
from pymc_ngvi.rows.taken import Taken

#: Values of rows at a time.
_AT_A_TIME = 2**18


@dataclass(frozen=True, eq=False)
class ManyExpected:
    """Expectations under Gaussians."""

    #: Of log p; shape (n,).
    value: Array
    #: Of its derivatives by the predictors; shape (n, n_predictors).
    slope: Array
    #: Entries of minus the mean Hessian by x; shape (n, n_entries).
    precision: Array
    rules: ManyRules
    #: The mean Hessian by the predictors, block-diagonal; None where some were left out.
    matrix: sparse.csr_array | None = None

    def __getitem__(self, which: NDArray[np.intp]) -> "ManyExpected":
        """Return those of some of them."""
        return ManyExpected(self.value[which], self.slope[which], self.precision[which], self.rules[which])

    @classmethod
    def together(cls, parts: Sequence["ManyExpected"]) -> "ManyExpected":
        """Return several as one."""
        value, slope, precision = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("value", "slope", "precision")
        )
        return cls(value, slope, precision, ManyRules.together([part.rules for part in parts]))


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
            weights += [
                (1.0 if a == b else 2.0) * hessian[:, a, b].reshape(n, -1) for a in range(k) for b in range(a + 1)
            ]
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
        """Return draws of all that is not given, (n, n_inside, m), given (n, n_dim, m): the same."""
        return x

    def moments_inside(
        self, mean: Array, sd: Array, seen: ManySeen, rules: ManyRules, covariance: Array
    ) -> tuple[Array, Array]:
        """Return means and sds of all that is not given, (n, n_inside) each, by Gaussians of what is left."""
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
