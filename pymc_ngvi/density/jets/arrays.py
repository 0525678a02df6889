"""Arrays of jets: values with first and second derivatives.

Each has two leading axes: terms and points. The terms are the value, its derivatives by each coordinate, and its second
derivatives by each pair of coordinates, of which there is one of (i, j) and (j, i). What does not depend on the point
has one value in the place of as many as there are points, and what has no derivatives has the value alone.
"""

from enum import IntEnum
from functools import cached_property

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.refusal import Reason, RefusedFor
from pymc_ngvi.core.values import AnyArray, Array


class NoJet(RefusedFor):
    """A graph has an operation for which there is no rule."""

    reason = Reason.NO_RULE


class JetKind(IntEnum):
    """What is known of a variable: it is the same at all points, it differs but has no derivatives, or it has them."""

    FIXED = 0
    VALUE = 1
    JET = 2


class Space:
    """The points of one evaluation, and how many derivatives are wanted."""

    def __init__(self, n_dim: int, n_points: int, order: int) -> None:
        self.n_dim, self.n_points, self.order = n_dim, n_points, order

    @cached_property
    def n_terms(self) -> int:
        """Terms of a jet."""
        return n_terms(self.n_dim, self.order)

    @cached_property
    def pairs(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Coordinates of each second derivative."""
        first, second = np.tril_indices(self.n_dim)
        return first, second

    def of_points(self, theta: Array) -> Array:
        """Return the jets of coordinates, (n_terms, n_points, n_dim), at points, (n_points, n_dim)."""
        jets = np.zeros((self.n_terms, *theta.shape))
        jets[0] = theta
        if self.order:
            jets[1 : 1 + self.n_dim] = np.eye(self.n_dim)[:, None]
        return jets

    def lifted(self, x: AnyArray) -> AnyArray:
        """Return an array with all terms and points."""
        if x.shape[:2] == (self.n_terms, self.n_points):
            return x
        result = np.zeros((self.n_terms, self.n_points, *x.shape[2:]))
        result[: len(x)] = x
        return result

    def seconds(self, x: Array) -> Array:
        """Return the second derivatives of a jet."""
        return x[1 + self.n_dim :]

    def products(self, x: Array, y: Array) -> Array:
        """Return what a product adds to second derivatives: x_i y_j + x_j y_i, or x_i x_j where both are the same."""
        i, j = self.pairs
        x1 = x[1 : 1 + self.n_dim]
        if x is y:
            return x1[i] * x1[j]
        y1 = y[1 : 1 + self.n_dim]
        both: Array = x1[i] * y1[j]
        both += x1[j] * y1[i]
        return both


def n_terms(n_dim: int, order: int = 2) -> int:
    """Return the terms of a jet."""
    return 1 + (n_dim if order else 0) + (n_dim * (n_dim + 1) // 2 if order == 2 else 0)
