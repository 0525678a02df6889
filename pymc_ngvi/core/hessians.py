"""Mean Hessians whose entries are known, or will be."""

import functools

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.target import MeanHessian
from pymc_ngvi.core.values import Array


@dataclass(frozen=True)
class MatrixHessian(MeanHessian):
    """A Hessian that is known: a symmetric matrix."""

    #: shape (n_dim, n_dim).
    matrix: Array
    #: Entries that `values` returns.
    pattern: Pattern | None = None

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        return directions @ self.matrix

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return np.diagonal(self.matrix)

    def values(self) -> Array:
        """Return the entries of ``pattern``, (n_entries,)."""
        if self.pattern is None:
            return super().values()
        return self.matrix[self.pattern.rows, self.pattern.cols]


class PatternHessian(MeanHessian):
    """A sparse Hessian that is known."""

    def __init__(self, pattern: Pattern, values: Array) -> None:
        self._pattern, self._values = pattern, values

    @property
    def pattern(self) -> Pattern:
        """Entries that can differ from 0."""
        return self._pattern

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        return (self._pattern.symmetric(self._values) @ directions.T).T

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return self._values[~self._pattern.off_diagonal]

    def values(self) -> Array:
        """Return the entries of the pattern, (n_entries,)."""
        return self._values


class Later(MeanHessian):
    """A Hessian that is evaluated when something is asked of it."""

    def __init__(self, pattern: Pattern | None, evaluate: Callable[[], MeanHessian]) -> None:
        self._pattern, self._evaluate = pattern, evaluate

    @functools.cached_property
    def _known(self) -> MeanHessian:
        return self._evaluate()

    @property
    def pattern(self) -> Pattern | None:
        """Entries that can differ from 0; None where the matrix counts as dense."""
        return self._pattern

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        return self._known.products(directions)

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return self._known.diagonal()

    def values(self) -> Array:
        """Return the entries of the pattern, (n_entries,)."""
        return self._known.values()
