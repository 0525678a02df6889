"""Mean Hessians that are known with respect to the linear predictors."""

import functools

from dataclasses import dataclass

import numpy as np

from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.target import MeanHessian
from pymc_ngvi.core.values import Array
from pymc_ngvi.model.predictors.linear_map import LinearMap
from pymc_ngvi.model.sparsity.hessian import PatternWidened

#: Relative difference of two products with a random vector that is rounding.
_ROUNDING = 1e-8


@dataclass(frozen=True, eq=False)
class PredictorMeanHessian(MeanHessian):
    """X^T M X for a symmetric sparse M.

    Parameters
    ----------
    linear : LinearMap
        The predictors.
    matrix : scipy.sparse.csr_array, shape (n_predictors, n_predictors)
        M.
    pattern : Pattern or None
        Entries that `values` returns.
    """

    linear: LinearMap
    matrix: sparse.csr_array
    pattern: Pattern | None = None

    @functools.cached_property
    def _dense(self) -> Array:
        return self.linear.quadratic(self.matrix)

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        if 2 * len(directions) < directions.shape[1]:
            return self.linear.quadratic_times(self.matrix, directions)
        result: Array = directions @ self._dense
        return result

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return self.linear.quadratic_diagonal(self.matrix)

    def values(self) -> Array:
        """Return the entries of the pattern, (n_entries,).

        Raises
        ------
        ValueError
            Where the matrix counts as dense.
        PatternWidened
            Where it has entries that the pattern lacks, and still does.
        """
        if self.pattern is None:
            return super().values()
        values = self.linear.quadratic_entries(self.matrix, self.pattern)
        probe = np.random.default_rng(0).standard_normal((1, self.pattern.n_dim))
        expected = self.linear.quadratic_times(self.matrix, probe)[0]
        found = self.pattern.symmetric(values) @ probe[0]
        if np.abs(found - expected).max(initial=0.0) > _ROUNDING * np.abs(expected).max(initial=0.0):
            raise PatternWidened("rows have entries that the pattern lacks")
        return values
