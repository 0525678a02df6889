"""Precisions of one sparse pattern, many at once, and their Cholesky factors."""

import functools

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.types import Array
from pymc_ngvi.families.matrices.sparse.cholesky import SparseCholesky
from pymc_ngvi.families.matrices.sparse.fronts import Fronts, fronts_of
from pymc_ngvi.families.matrices.sparse.order import Supernodes
from pymc_ngvi.families.matrices.sparse.repeated import RepeatedFronts

#: Part of the entries from which on a matrix is one front.
_DENSE = 0.5


class Precisions:
    """Sparse precisions of one pattern, and their factors.

    Parameters
    ----------
    pattern : Pattern
        Where they can differ from 0.
    """

    def __init__(self, pattern: Pattern) -> None:
        d = pattern.n_dim
        is_dense = pattern.n_entries > _DENSE * d * (d + 1) / 2
        one = Supernodes(np.zeros(d, dtype=np.int64), np.zeros(1, dtype=np.int64))
        self.pattern, self.fronts = pattern, Fronts(pattern, one) if is_dense else fronts_of(pattern)
        self._places = self.fronts.places(pattern.rows, pattern.cols)
        self._diagonal = np.searchsorted(pattern.rows * d + pattern.cols, np.arange(d) * (d + 1))
        self._weights = np.where(pattern.off_diagonal, 2.0, 1.0)
        self._last_repeated = functools.lru_cache(maxsize=4)(self._repeated)  # of this one alone

    def _repeated(self, n: int) -> tuple[RepeatedFronts, NDArray[np.int64]]:
        """Return the fronts of so many, and where their panels have the entries, (n, n_entries)."""
        fronts = RepeatedFronts(self.fronts, n)
        return fronts, fronts.of_panels(self._places)

    def factored(self, precision: Array) -> tuple["Factors | None", NDArray[np.bool_]]:
        """Return the factors of those of some precisions, (n, n_entries), that have one, and which these are."""
        found = self._of(precision)
        if found is not None:
            return found, np.ones(len(precision), dtype=bool)
        there = self._have_factors(precision)
        return (self._of(precision[there]) if there.any() else None), there

    def _of(self, precision: Array) -> "Factors | None":
        fronts, at = self._last_repeated(len(precision))
        panels = np.zeros(fronts.n_panels)
        panels[at] = precision
        cholesky = SparseCholesky.of(fronts, panels)
        return None if cholesky is None else Factors(self, cholesky, at, len(precision))

    def _have_factors(self, precision: Array) -> NDArray[np.bool_]:
        if self._of(precision) is not None:
            return np.ones(len(precision), dtype=bool)
        if len(precision) == 1:
            return np.zeros(1, dtype=bool)
        half = len(precision) // 2
        return np.concatenate([self._have_factors(precision[:half]), self._have_factors(precision[half:])])

    def trace(self, first: Array, second: Array) -> Array:
        """Return the traces of products of matrices, (n,), of which one has no other entries than these."""
        return np.einsum("ne,ne,e->n", first, second, self._weights)


@dataclass(frozen=True, eq=False)
class Factors:
    """Cholesky factors L_k of precisions.

    Parameters
    ----------
    of : Precisions
    cholesky : SparseCholesky
        Of all as one block-diagonal matrix.
    at : ndarray of int, shape (n, n_entries)
        Where panels have the entries.
    n : int
    """

    of: Precisions
    cholesky: SparseCholesky
    at: NDArray[np.intp]
    n: int

    @functools.cached_property
    def log_det(self) -> Array:
        """Log determinants of the factors, (n,)."""
        diagonal = self.cholesky.panels[self.cholesky.fronts.diagonal].reshape(self.n, -1)
        return np.log(diagonal).sum(axis=1)

    @functools.cached_property
    def covariance(self) -> Array:
        """Entries of the covariances, (n, n_entries)."""
        return self.cholesky.inverse[self.at]

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
        n, d, m = columns.shape
        return self.cholesky.solve(columns.reshape(n * d, m), transposed=transposed).reshape(n, d, m)

    def times_covariance(self, vectors: Array) -> Array:
        """Return the covariance times a vector for each, (n, n_dim)."""
        return self.solve(self.solve(vectors[:, :, None]), transposed=True)[:, :, 0]
