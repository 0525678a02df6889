"""Precisions of one sparse pattern, many at once, and their Cholesky factors."""

import functools

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import prices
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.matrices.sparse.cholesky import SparseCholesky
from pymc_ngvi.families.matrices.sparse.fronts import Fronts, fronts_of
from pymc_ngvi.families.matrices.sparse.order import Supernodes

#: Part of the entries from which on a matrix is one front.
_DENSE = 0.5


class Precisions:
    """Sparse precisions of one pattern, and their factors."""

    def __init__(self, pattern: Pattern) -> None:
        d = pattern.n_dim
        is_dense = pattern.n_entries > _DENSE * d * (d + 1) / 2
        one = Supernodes(np.zeros(d, dtype=np.int64), np.zeros(1, dtype=np.int64))
        self.pattern, self.fronts = pattern, Fronts(pattern, one) if is_dense else fronts_of(pattern)
        self._places = self.fronts.places(pattern.rows, pattern.cols)
        self._diagonal = np.searchsorted(pattern.rows * d + pattern.cols, np.arange(d) * (d + 1))
        self._weights = np.where(pattern.off_diagonal, 2.0, 1.0)

    def factored(self, precision: Array) -> tuple["Factors | None", NDArray[np.bool_]]:
        """Return the factors of those of some precisions, (n, n_entries), that have one, and which these are."""
        self.count(len(precision))
        panels = np.zeros((len(precision), self.fronts.n_panels))
        panels[:, self._places] = precision
        cholesky, there = SparseCholesky.each(self.fronts, panels)
        found = Factors(self, cholesky) if there.any() else None
        return (found if found is None or there.all() else found[there]), there

    def count(self, n: int) -> None:
        """Count a pass through the factors of so many."""
        prices.count(n * prices.of_fronts(self.fronts.n_products, self.fronts.n_fronts))

    def trace(self, first: Array, second: Array) -> Array:
        """Return the traces of products of matrices, (n,), of which one has no other entries than these."""
        return np.einsum("ne,ne,e->n", first, second, self._weights)


@dataclass(frozen=True, eq=False)
class Factors:
    """Cholesky factors L_k of precisions."""

    of: Precisions
    cholesky: SparseCholesky

    def __getitem__(self, which: NDArray[np.generic]) -> "Factors":
        """Return some of them."""
        return Factors(self.of, SparseCholesky(self.cholesky.fronts, self.cholesky.panels[which]))

    @functools.cached_property
    def log_det(self) -> Array:
        """Log determinants of the factors, (n,)."""
        return self.cholesky.log_det()

    @functools.cached_property
    def covariance(self) -> Array:
        """Entries of the covariances, (n, n_entries)."""
        self.of.count(len(self.cholesky.panels))
        return self.cholesky.inverse[:, self.of._places]

    @property
    def sd(self) -> Array:
        """Standard deviations, (n, n_dim)."""
        return np.sqrt(self.covariance[:, self.of._diagonal])

    @property
    def entropy(self) -> Array:
        """Of the Gaussians, (n,), nats."""
        return 0.5 * self.of.pattern.n_dim * (1.0 + np.log(2.0 * np.pi)) - self.log_det

    def solve(self, columns: Array, *, transposed: bool = False) -> Array:
        """Return L_k^-1, or L_k^-T, times columns, (n, n_dim, m)."""
        return self.cholesky.solve(columns, transposed=transposed)

    def times_covariance(self, vectors: Array) -> Array:
        """Return the covariance times a vector for each, (n, n_dim)."""
        return self.solve(self.solve(vectors[:, :, None]), transposed=True)[:, :, 0]
