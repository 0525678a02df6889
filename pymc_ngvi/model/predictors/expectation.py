"""Expectations of log p under a Gaussian, row by row: a row sees only the Gaussian of the few predictors that it has.

Gradient and Hessian with respect to the mean of the predictors come from values alone, by

    E[grad f] = L^-T E[f z],   E[hess f] = L^-T E[f (z z^T - I)] L^-1,   predictors = mean + L z,

which holds for functions with kinks, too.
"""

import functools

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from numpy.typing import NDArray
from pytensor.compile import Function

from pymc_ngvi.core.normal_rules import Rule, n_levels, rule
from pymc_ngvi.core.values import Array
from pymc_ngvi.model.predictors.compiled import CompiledOnce
from pymc_ngvi.model.predictors.terms import Rows

type Levels = NDArray[np.int8]

#: Points at a time of a function that is more than arithmetic with numbers.
_AT_A_TIME = 32
#: Values of a function that are computed at a time.
_CACHED = 2**16
#: Rules for predictors that are in no sum, and along the sum, by level; where there are no others.
_PAIRS, _ALONG = ((0, 0), (1, 1), (1, 2), (2, 2), (2, 3)), tuple((0, level) for level in range(6))
#: Values of a function that one expectation may take, where finer rules have not settled it.
_MOST_VALUES = 2**22
#: Part of a variance that has to be left, given the predictors before, for one to have a direction of its own.
_LEAST_VARIANCE = 1e-12


@dataclass
class RowFunction:
    """A function of the predictors of a row, compiled, with the data of each row.

    Parameters
    ----------
    function : callable
    index : ndarray of int, shape (n_rows, k)
        Predictors.
    data : list of ndarray
        (1, n_rows) or (1, 1) each.
    """

    function: Callable[..., Sequence[Array]]
    index: NDArray[np.int64]
    data: list[Array]

    def at(self, index: NDArray[np.int64], keep: NDArray[np.bool_]) -> "RowFunction":
        """Return some of the rows, with other numbers for the predictors, (n_rows, k)."""
        data = [d if d.shape[1] == 1 else np.ascontiguousarray(d[:, keep]) for d in self.data]
        return replace(self, index=np.ascontiguousarray(index[keep]), data=data)

    @property
    def k(self) -> int:
        """Predictors of a row."""
        return int(self.index.shape[1])

    @property
    def n_levels(self) -> int:
        """Rules of quadrature, from coarse to fine."""
        return n_levels(self.k)

    def n_nodes(self, level: int) -> int:
        """Nodes of a rule."""
        return len(rule(self.k, level).nodes)

    @property
    def n_directions(self) -> int:
        """Directions in which the function varies, all others given."""
        return self.k

    def values(self, predictors: Sequence[Array], at: NDArray[np.int64] | slice) -> Array:
        """Return values, (n_points, n_rows), at predictors of that shape each."""
        return self._evaluated(self.function, predictors, at)

    def _evaluated(
        self, function: Callable[..., Sequence[Array]], predictors: Sequence[Array], at: NDArray[np.int64] | slice
    ) -> Array:
        data = [d if d.shape[1] == 1 else np.ascontiguousarray(d[:, at]) for d in self.data]
        with np.errstate(all="ignore"):
            [result] = function(*predictors, *data)
        return np.broadcast_to(np.asarray(result), predictors[0].shape)

    def whitened(self, mean: Array, root: Array, level: int, at: NDArray[np.int64]) -> Array:
        """Return E[f], E[f z] and E[f (z z^T - I)], (1 + k + k (k + 1) / 2, n_rows)."""
        nodes, weights = rule(self.k, level)
        result = np.empty((len(weights), len(at)))
        for part in _slices(len(at), max(1, _CACHED // len(nodes))):
            points = _points(mean[part], root[part], nodes)
            result[:, part] = weights @ self.values(points, at[part])
        return result

    def rules(
        self, mean: Array, root: Array, rows: NDArray[np.intp], least: Levels, tolerance: float
    ) -> tuple[Levels, Array]:
        """Choose the rule of each row.

        Parameters
        ----------
        mean, root : ndarray, shapes (n_rows, k), (n_rows, k, k)
            Of the predictors: mean, and Cholesky factor of the covariance.
        rows : ndarray of int, shape (n_rows,)
            Which rows these are.
        least : ndarray of int, shape (n_rows,)
            Level to begin with.
        tolerance : float
            Nats that the expectation of a row may be off by.

        Returns
        -------
        level : ndarray of int, shape (n_rows,)
        error : ndarray, shape (n_rows,)
            What is wrong with the expectation by this rule, at most, nats.
        """
        level = np.minimum(least, self.n_levels - 2).astype(np.int8)
        error = np.full(len(level), np.inf)
        left = np.arange(len(level))
        while len(left):
            now = int(level[left].min())
            at = left[level[left] == now]
            if now and self.n_nodes(now + 1) * len(at) > _MOST_VALUES:
                break
            coarse, fine = (self.whitened(mean[at], root[at], now + more, rows[at]) for more in (0, 1))
            with np.errstate(invalid="ignore"):
                apart = np.abs(fine - coarse).max(axis=0)
            error[at] = np.where(np.isfinite(apart), apart, np.inf)
            level[at[~(apart <= tolerance)]] += 1
            left = np.flatnonzero((error > tolerance) & (level < self.n_levels - 1))
        return level, error

    def moments(self, mean: Array, cov: Array, levels: Levels) -> tuple[Array, Array, Array]:
        """Return E[f], (n_rows,), E[grad f], (n_rows, k), and E[hess f], (n_rows, k, k)."""
        root = roots(cov)
        whitened = np.empty((1 + self.k + self.k * (self.k + 1) // 2, len(mean)))
        for level in np.unique(levels):
            at = np.flatnonzero(levels == level)
            whitened[:, at] = self.whitened(mean[at], root[at], int(level), at)
        inverse = inverse_roots(root)
        i, j = np.tril_indices(self.k)
        second = np.empty((len(mean), self.k, self.k))
        second[:, i, j] = second[:, j, i] = whitened[1 + self.k :].T
        grad = np.einsum("rba,br->ra", inverse, whitened[1 : 1 + self.k])
        return whitened[0], grad, inverse.swapaxes(1, 2) @ second @ inverse


@dataclass
class SummedRowFunction(RowFunction):
    """One that depends on its last predictors through a sum alone.

    Given the others, u, only one direction counts of what these are made of, z: that in which the sum moves. What is
    perpendicular to it integrates out.

    Parameters
    ----------
    sum_ : Function
        Of all predictors and the data: affine in the last ``n_summed``.
    n_summed : int
    """

    sum_: Function
    n_summed: int

    @property
    def n_levels(self) -> int:
        """Pairs of rules, from coarse to fine: for the others, and along the sum."""
        return len(self._levels)

    @property
    def n_directions(self) -> int:
        """Directions in which the function varies, all others given."""
        return self._n_others + 1

    @property
    def _levels(self) -> tuple[tuple[int, int], ...]:
        return _PAIRS if self._n_others else _ALONG

    def n_nodes(self, level: int) -> int:
        """Nodes of a pair of rules."""
        others, along = self._levels[level]
        return (len(rule(self._n_others, others).nodes) if self._n_others else 1) * len(rule(1, along).nodes)

    @property
    def _n_others(self) -> int:
        return self.k - self.n_summed

    def whitened(self, mean: Array, root: Array, level: int, at: NDArray[np.int64]) -> Array:
        """Return E[f], E[f z] and E[f (z z^T - I)], (1 + k + k (k + 1) / 2, n_rows)."""
        others, along = self._levels[level]
        first = rule(self._n_others, others) if self._n_others else Rule(np.zeros((1, 0)), np.ones((1, 1)))
        second = rule(1, along)
        result = np.empty((1 + self.k + self.k * (self.k + 1) // 2, len(at)))
        for part in _slices(len(at), max(1, _CACHED // (len(first.nodes) * len(second.nodes)))):
            result[:, part] = self._part(mean[part], root[part], first, second, at[part])
        return result

    def _part(self, mean: Array, root: Array, first: Rule, second: Rule, at: NDArray[np.int64]) -> Array:
        m, n_rows = self._n_others, len(at)
        padded = np.concatenate([first.nodes, np.zeros((len(first.nodes), self.n_summed))], axis=1)
        points = _points(mean, root, padded)
        direction = self._direction(points, root[:, m:, m:], at)
        step = np.einsum("rab,nrb->anr", root[:, m:, m:], direction)
        zeta = second.nodes[:, 0]
        shape = (len(zeta) * len(padded), n_rows)
        full = [np.broadcast_to(u, (len(zeta), *u.shape)).reshape(shape) for u in points[:m]]
        full += [(u + zeta[:, None, None] * s).reshape(shape) for u, s in zip(points[m:], step, strict=True)]
        values = self.values(full, at).reshape(len(zeta), -1)
        value, slope, bend = (second.weights @ values).reshape(3, len(padded), n_rows)
        weight, lower = first.weights[0], list(zip(*np.tril_indices(self.k), strict=True))
        of_u = first.weights @ value
        n_u, u_entries = 1 + m, {pair: 1 + m + n for n, pair in enumerate(zip(*np.tril_indices(m), strict=True))}
        result = [of_u[0], *of_u[1:n_u]]
        result += [np.einsum("n,nr,nr->r", weight, slope, direction[:, :, a]) for a in range(self.n_summed)]
        for a, b in lower:
            if a < m:
                result.append(of_u[u_entries[a, b]])
            elif b < m:
                result.append(np.einsum("n,nr,nr->r", first.weights[1 + b], slope, direction[:, :, a - m]))
            else:
                both = direction[:, :, a - m] * direction[:, :, b - m]
                result.append(np.einsum("n,nr,nr->r", weight, bend, both))
        return np.stack(result)

    def _direction(self, points: list[Array], root: Array, at: NDArray[np.int64]) -> Array:
        """Return the unit vectors of z along which the sum moves, (n_nodes, n_rows, n_summed)."""
        m, zero = self._n_others, np.zeros_like(points[0])
        others = points[:m]
        start = self._evaluated(self.sum_, [*others, *[zero] * self.n_summed], at)
        slopes = []
        for a in range(self.n_summed):
            unit = [np.ones_like(zero) if b == a else zero for b in range(self.n_summed)]
            slopes.append(self._evaluated(self.sum_, [*others, *unit], at) - start)
        moved = np.einsum("anr,rab->nrb", np.stack(slopes), root)
        length = np.linalg.norm(moved, axis=2, keepdims=True)
        result: Array = np.divide(moved, length, out=np.zeros_like(moved), where=length > 0.0)
        return result


def row_function(rows: Rows, compile_: CompiledOnce) -> RowFunction:
    """Compile rows."""
    inputs, data = [*rows.slots, *rows.data], list(rows.data.values())
    function = compile_(inputs, [rows.value])
    if rows.is_whole:
        return RowFunction(functools.partial(_few_at_a_time, function), rows.index, data)
    if rows.sum_ is None:
        return RowFunction(function, rows.index, data)
    return SummedRowFunction(function, rows.index, data, compile_(inputs, [rows.sum_]), rows.n_summed)


def _few_at_a_time(function: Function, *predictors: Array) -> list[Array]:
    """Evaluate what may take much memory at a point."""
    parts = [function(*[p[at] for p in predictors])[0] for at in _slices(len(predictors[0]), _AT_A_TIME)]
    return [np.concatenate(parts)]


def _points(mean: Array, root: Array, nodes: Array) -> list[Array]:
    """Return predictors, (n_nodes, n_rows) each, at nodes, (n_nodes, k)."""
    points = []
    for a in range(nodes.shape[1]):
        u = mean[:, a] + np.multiply.outer(nodes[:, 0], root[:, a, 0])
        for b in range(1, a + 1):
            u += np.multiply.outer(nodes[:, b], root[:, a, b])
        points.append(u)
    return points


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
