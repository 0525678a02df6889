"""Expectations of log p under a Gaussian, row by row: a row sees only the Gaussian of the few predictors that it has.

Gradient and Hessian with respect to the mean of the predictors come from values alone, by

    E[grad f] = L^-T E[f z],   E[hess f] = L^-T E[f (z z^T - I)] L^-1,   predictors = mean + L z,

which holds for functions with kinks, too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from numpy.typing import NDArray
from pytensor.compile import Function

from pymc_ngvi.core.normal_rules import n_levels, rule
from pymc_ngvi.core.values import Array
from pymc_ngvi.model.predictors.terms import Rows

#: Values of a function that are computed at a time.
_CACHED = 2**16
#: Part of a variance that has to be left, given the predictors before, for one to have a direction of its own.
_LEAST_VARIANCE = 1e-12


@dataclass
class RowFunction:
    """A function of the predictors of a row, compiled, with what is known of each row.

    Parameters
    ----------
    function : Function
    index : ndarray of int, shape (n_rows, k)
        Predictors.
    data : list of ndarray
        (1, n_rows) or (1, 1) each.
    """

    function: Function
    index: NDArray[np.int64]
    data: list[Array]
    level: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.level = np.zeros(len(self.index), dtype=np.int64)

    @classmethod
    def of(cls, rows: Rows, compile_: Callable[..., Function]) -> "RowFunction":
        """Compile rows."""
        return cls(compile_([*rows.slots, *rows.data], rows.value), rows.index, list(rows.data.values()))

    @property
    def k(self) -> int:
        """Predictors of a row."""
        return int(self.index.shape[1])

    def values(self, predictors: list[Array], at: NDArray[np.int64] | slice) -> Array:
        """Return values, (n_points, n_rows), at predictors of that shape each."""
        data = [d if d.shape[1] == 1 else np.ascontiguousarray(d[:, at]) for d in self.data]
        with np.errstate(all="ignore"):
            result = np.asarray(self.function(*predictors, *data))
        return np.broadcast_to(result, predictors[0].shape)

    def whitened(self, mean: Array, root: Array, level: int, at: NDArray[np.int64]) -> Array:
        """Return E[f], E[f z] and E[f (z z^T - I)], (1 + k + k (k + 1) / 2, n_rows)."""
        nodes, weights = rule(self.k, level)
        result = np.empty((len(weights), len(at)))
        for part in _slices(len(at), max(1, _CACHED // len(nodes))):
            m, r = mean[part], root[part]
            predictors = []
            for a in range(self.k):
                u = m[:, a] + np.multiply.outer(nodes[:, 0], r[:, a, 0])
                for b in range(1, a + 1):
                    u += np.multiply.outer(nodes[:, b], r[:, a, b])
                predictors.append(u)
            result[:, part] = weights @ self.values(predictors, at[part])
        return result

    def refine(self, mean: Array, root: Array, tolerance: float) -> Array:
        """Choose the rule of each row, and return what is wrong with its expectation, (n_rows,), at most."""
        left = np.arange(len(self.index))
        error = np.full(len(left), np.inf)
        last = self.whitened(mean, root, 0, left)
        for level in range(n_levels(self.k) - 1):
            finer = self.whitened(mean[left], root[left], level + 1, left)
            apart = np.abs(finer - last).max(axis=0)
            self.level[left], error[left] = level, np.where(np.isfinite(apart), apart, np.inf)
            far = ~(apart <= tolerance)
            left, last = left[far], finer[:, far]
            if not len(left):
                break
            self.level[left] = level + 1
        return error

    def moments(self, mean: Array, cov: Array) -> tuple[Array, Array, Array]:
        """Return E[f], (n_rows,), E[grad f], (n_rows, k), and E[hess f], (n_rows, k, k)."""
        root = roots(cov)
        whitened = np.empty((1 + self.k + self.k * (self.k + 1) // 2, len(mean)))
        for level in np.unique(self.level):
            at = np.flatnonzero(self.level == level)
            whitened[:, at] = self.whitened(mean[at], root[at], int(level), at)
        inverse = inverse_roots(root)
        i, j = np.tril_indices(self.k)
        second = np.empty((len(mean), self.k, self.k))
        second[:, i, j] = second[:, j, i] = whitened[1 + self.k :].T
        grad = np.einsum("rba,br->ra", inverse, whitened[1 : 1 + self.k])
        return whitened[0], grad, inverse.swapaxes(1, 2) @ second @ inverse


def roots(cov: Array) -> Array:
    """Return lower-triangular Cholesky factors of covariances, (n, k, k), with zeros for what has no variance left."""
    root = np.zeros_like(cov)
    for a in range(cov.shape[1]):
        for b in range(a):
            left = cov[:, a, b] - np.einsum("rc,rc->r", root[:, a, :b], root[:, b, :b])
            root[:, a, b] = np.divide(left, root[:, b, b], out=np.zeros(len(cov)), where=root[:, b, b] > 0.0)
        left = cov[:, a, a] - np.einsum("rc,rc->r", root[:, a, :a], root[:, a, :a])
        root[:, a, a] = np.sqrt(np.where(left > _LEAST_VARIANCE * cov[:, a, a], left, 0.0))
    return root


def inverse_roots(root: Array) -> Array:
    """Return the inverses of lower-triangular matrices of few rows; what has a zero on the diagonal has zeros there."""
    k = root.shape[1]
    inverse = np.zeros_like(root)
    for a in range(k):
        diagonal = root[:, a, a]
        there = diagonal > 0.0
        inverse[:, a, a] = np.divide(1.0, diagonal, out=np.zeros(len(root)), where=there)
        for b in range(a):
            inner = np.einsum("rc,rc->r", root[:, a, b:a], inverse[:, b:a, b])
            inverse[:, a, b] = -inner * inverse[:, a, a]
    return inverse


def _slices(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))
