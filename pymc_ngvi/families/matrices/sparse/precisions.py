"""Precisions of one sparse pattern, many at once, and their Cholesky factors."""

import functools

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import prices
from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.matrices.sparse.cholesky import SparseCholesky
from pymc_ngvi.families.matrices.sparse.fronts import Fronts, Supernodes, fronts_of
from pymc_ngvi.families.matrices.sparse.structure import Summed, SummedCholesky, Sums

#: Part of the entries from which on a matrix is one front.
_DENSE = 0.5


class Precisions:
    """Sparse precisions of one pattern, which may be by coordinates x and sums A x over many of these together."""

    def __init__(self, pattern: Pattern, weights: Array | None = None) -> None:
        self.pattern, among = pattern, pattern
        if weights is not None:
            among = SummedPattern(pattern, weights).among
        d = self.n_dim = among.n_dim
        is_dense = among.n_entries > _DENSE * d * (d + 1) / 2
        one = Supernodes(np.zeros(d, dtype=np.int64), np.zeros(1, dtype=np.int64))
        self.fronts = Fronts(among, one) if is_dense else fronts_of(among)
        self.sums = None if weights is None else Sums.of(weights, self.fronts.globals_)
        self.inner = pattern.rows < d
        self.places = self.fronts.places(among.rows, among.cols)
        self.diagonal = np.searchsorted(pattern.rows * pattern.n_dim + pattern.cols, np.arange(d) * (pattern.n_dim + 1))
        self._weights = np.where(pattern.off_diagonal, 2.0, 1.0)

    def factored(self, precision: Array) -> tuple["Factors | None", NDArray[np.bool_]]:
        """Return the factors of those of some precisions, (n, n_entries), that have one, and which these are."""
        prices.count(prices.OF_FACTOR * len(precision) * self.seconds)
        panels = np.zeros((len(precision), self.fronts.n_panels))
        panels[:, self.places] = precision[:, self.inner]
        cholesky: SparseCholesky | SummedCholesky
        if self.sums is None:
            cholesky, there = SparseCholesky.each(self.fronts, panels)
        else:
            summed = Summed(panels, self.sums.slopes(self.pattern, precision))
            cholesky, there = SummedCholesky.each(self.fronts, self.sums, summed)
        found = Factors(self, cholesky) if there.any() else None
        return (found if found is None or there.all() else found[there]), there

    def independent(self, values: Array) -> Array:
        """Return precisions, (n, n_entries), of independent coordinates, (n, n_dim)."""
        precision = np.zeros((len(values), self.pattern.n_entries))
        precision[:, self.diagonal] = values
        return precision

    @property
    def seconds(self) -> float:
        """What a step with one takes, about."""
        n_sums = 0 if self.sums is None else len(self.sums.weights)
        return prices.of_fronts(self.fronts.n_products, self.fronts.n_fronts, n_sums)

    def trace(self, first: Array, second: Array) -> Array:
        """Return the traces of products of matrices, (n,), of which one has no other entries than these."""
        return np.einsum("ne,ne,e->n", first, second, self._weights)


@dataclass(frozen=True, eq=False)
class Factors:
    """Cholesky factors L_k of precisions."""

    of: Precisions
    cholesky: SparseCholesky | SummedCholesky

    def __getitem__(self, which: NDArray[np.generic]) -> "Factors":
        """Return some of them."""
        return Factors(self.of, self.cholesky[which])

    @functools.cached_property
    def log_det(self) -> Array:
        """Log determinants of the factors, (n,)."""
        return np.asarray(self.cholesky.log_det())

    @functools.cached_property
    def covariance(self) -> Array:
        """Entries of the covariances, (n, n_entries)."""
        of = self.of
        prices.count(prices.OF_FACTOR * len(self.log_det) * of.seconds)
        if isinstance(self.cholesky, SparseCholesky):
            return self.cholesky.inverse[:, of.places]
        rows, cols, weights, d = of.pattern.rows, of.pattern.cols, self.cholesky.sums.weights, of.n_dim
        result, inner, both = np.empty((len(self.log_det), len(rows))), of.inner, cols >= d
        result[:, inner] = self.cholesky.covariances(rows[inner], cols[inner], of.places)
        of_sums = np.broadcast_to(weights.T, (len(result), *weights.T.shape))
        of_sums = self.solve(self.solve(of_sums), transposed=True)
        across = ~inner & ~both
        result[:, across] = of_sums[:, cols[across], rows[across] - d]
        result[:, both] = (weights @ of_sums)[:, rows[both] - d, cols[both] - d]
        return result

    @property
    def entropy(self) -> Array:
        """Of the Gaussians, (n,), nats."""
        return 0.5 * self.of.n_dim * (1.0 + np.log(2.0 * np.pi)) - self.log_det

    def solve(self, columns: Array, *, transposed: bool = False) -> Array:
        """Return L_k^-1, or L_k^-T, times columns, (n, n_dim, m)."""
        return self.cholesky.solve(columns, transposed=transposed)

    def times_covariance(self, vectors: Array) -> Array:
        """Return the covariance times a vector for each, (n, n_dim)."""
        return self.solve(self.solve(vectors[:, :, None]), transposed=True)[:, :, 0]
