"""Mean Hessians that are known with respect to the linear predictors."""

import functools

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from scipy import sparse

from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.refusal import PatternLacks
from pymc_ngvi.core.target import MeanHessian, Rooted, Whitener
from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.linear_map import AffineMap
from pymc_ngvi.rows.seen import Roots

#: Relative difference of two products with a random vector that is rounding.
_ROUNDING = 1e-8


class Patterns(Protocol):
    """What says where a Hessian can differ from 0."""

    @property
    def pattern(self) -> Pattern | None:
        """Entries that can; None where it counts as dense."""

    @property
    def summed(self) -> SummedPattern | None:
        """The same beside sums over many coordinates; None where there are no such sums."""


class Known(NamedTuple):
    """Patterns that are known."""

    pattern: Pattern | None = None
    summed: SummedPattern | None = None


#: Of a Hessian of which no entries will be asked.
NO_PATTERNS = Known()


@dataclass(frozen=True, eq=False)
class PredictorMeanHessian(MeanHessian):
    """X^T M X for a symmetric sparse M."""

    #: The predictors.
    linear: AffineMap
    #: M; shape (n_predictors, n_predictors).
    matrix: sparse.csr_array
    #: Entries that `values` and `summed_values` return; asked only where one of these is.
    entries: Patterns = NO_PATTERNS
    #: X C for the Gaussian that the expectation was taken under.
    roots: Roots | None = None

    @property
    def pattern(self) -> Pattern | None:
        """Entries that `values` returns; None where the matrix counts as dense."""
        return self.entries.pattern

    @property
    def summed(self) -> SummedPattern | None:
        """Entries that `summed_values` returns; None where there are no sums over many coordinates."""
        return self.entries.summed

    @functools.cached_property
    def _dense(self) -> Array:
        return self.linear.quadratic(self.matrix)

    def whitened(self, state: Whitener) -> Array:
        """Return the whitened curvature, as a state stores it."""
        if not isinstance(state, Rooted):
            return super().whitened(state)
        if self.roots is not None and self.roots.is_of(state):
            return self.roots.curvature(self.matrix)
        scale = np.diagonal(state.root)
        if np.count_nonzero(state.root) == len(scale):  # coordinates that are independent
            return -scale[:, None] * self._dense * scale
        return super().whitened(state)

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        if 2 * len(directions) < directions.shape[1]:
            return self.linear.quadratic_times(self.matrix, directions)
        return directions @ self._dense

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return self.linear.quadratic_diagonal(self.matrix)

    def values(self) -> Array:
        """Return the entries of the pattern, (n_entries,)."""
        pattern = self.pattern
        return super().values() if pattern is None else self._in(pattern, self.linear)

    def summed_values(self) -> Array:
        """Return the entries of `summed`, by coordinates and sums, (n_entries,)."""
        summed = self.summed
        return super().summed_values() if summed is None else self._in(summed.pattern, self.linear.joint)

    def _in(self, pattern: Pattern, linear: AffineMap) -> Array:
        values = linear.quadratic_entries(self.matrix, pattern)
        probe = np.random.default_rng(0).standard_normal((1, pattern.n_dim))
        expected = linear.quadratic_times(self.matrix, probe)[0]
        found = pattern.symmetric(values) @ probe[0]
        if np.abs(found - expected).max(initial=0.0) > _ROUNDING * np.abs(expected).max(initial=0.0):
            raise PatternLacks("rows have entries that the pattern lacks")
        return values
