"""Expectations of log p under a Gaussian, row by row: a row sees only the Gaussian of the few predictors that it has.

Gradient and Hessian with respect to the mean of the predictors come from values alone, by

    E[grad f] = L^-T E[f z],   E[hess f] = L^-T E[f (z z^T - I)] L^-1,   predictors = mean + L z,

which holds for functions with kinks, too. So do those of third and fourth order, of rows with one predictor.
"""

import functools
import math

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import normal_rules, prices
from pymc_ngvi.core.normal_rules import NormalRule, rule
from pymc_ngvi.core.values import Array

# --- which rule of quadrature each row has: a level for each block of its directions, all in one number ---


#: Bits of a level.
_BITS = 4
#: Values of a function that take as long as one more group of rows.
_GROUP = 2**13

type Levels = NDArray[np.int16]
type Index = NDArray[np.intp]


def unpacked(code: int, n_blocks: int) -> tuple[int, ...]:
    """Return the level of each block."""
    return tuple((code >> _BITS * block) % 2**_BITS for block in range(n_blocks))


def one_finer(block: int) -> int:
    """Return what is added to a code where a block goes to its next level."""
    return 1 << _BITS * block


def by_code(codes: Levels) -> Iterator[tuple[int, Index | slice]]:
    """Yield each code with the places that have it."""
    if len(codes) and (codes == codes[0]).all():
        yield int(codes[0]), slice(None)
        return
    for code in np.flatnonzero(np.bincount(codes)).tolist():
        yield code, np.flatnonzero(codes == code)


def merged(codes: Levels, n_blocks: int, n_nodes: Callable[[int], int]) -> Levels:
    """Return codes of rules as fine or finer, and no more of them than save time."""
    counts = np.bincount(codes)
    found = np.flatnonzero(counts)
    becomes = {code: code for code in found.tolist()}
    n_rows = dict(zip(found.tolist(), counts[found].tolist(), strict=True))
    while len(n_rows) > 1:
        least = min(n_rows, key=n_rows.__getitem__)
        pairs = [((least, other), _finest(least, other, n_blocks)) for other in n_rows if other != least]
        pair, both = min(pairs, key=lambda p: sum(n_rows[c] * (n_nodes(p[1]) - n_nodes(c)) for c in p[0]))
        if sum(n_rows[code] * (n_nodes(both) - n_nodes(code)) for code in pair) > _GROUP:
            break
        n_joined = sum(n_rows.pop(code) for code in pair)
        n_rows[both] = n_rows.get(both, 0) + n_joined
        becomes = {code: both if now in pair else now for code, now in becomes.items()}
    table = np.zeros(len(counts), dtype=np.int16)
    table[found] = [becomes[code] for code in found.tolist()]
    return table[codes]


def _finest(first: int, second: int, n_blocks: int) -> int:
    """Return the code that has the finer level of two in each block."""
    both = zip(unpacked(first, n_blocks), unpacked(second, n_blocks), strict=True)
    return sum(max(pair) * one_finer(block) for block, pair in enumerate(both))


type Compiled = Callable[..., Sequence[Array]]

#: Values of a function that are computed at a time, and those along a sum.
_CACHED, _STREAMED = 2**15, 2**14
#: Levels for predictors that others in a sum are multiplied by. E[exp(z e^s)] is not finite: what counts is where q has
#: its mass, and finer rules, which reach farther, would see how far out it gets large.
_FEW_LEVELS = 5
#: Part of a variance that has to be left, given the predictors before, for one to have a direction of its own.
_LEAST_VARIANCE = 1e-12


@dataclass
class RowFunction:
    """A function of the predictors of a row, compiled, with the data of each row."""

    function: Compiled
    #: Predictors; shape (n_rows, k).
    index: NDArray[np.int64]
    #: (1, n_rows) or (1, 1) each.
    data: list[Array]
    #: By which pairs of predictors a second derivative may differ from 0; shape (k, k).
    interacts: NDArray[np.bool_]
    #: How many of the first predictors are the same for all rows, as a scale is: the function takes these with one
    #: column, and what hangs on them alone is computed once.
    n_shared: int = field(default=0, kw_only=True)

    def at(self, index: NDArray[np.int64], keep: NDArray[np.bool_]) -> "RowFunction":
        """Return some of the rows, with other numbers for the predictors, (n_rows, k)."""
        data = [d if d.shape[1] == 1 else np.ascontiguousarray(d[:, keep]) for d in self.data]
        return replace(self, index=np.ascontiguousarray(index[keep]), data=data)

    def some(self, rows: Index, index: NDArray[np.int64]) -> "RowFunction":
        """Return some of the rows, in that order, of predictors (n_rows, k)."""
        return replace(self, index=index, data=self.data_of(rows))

    @property
    def k(self) -> int:
        """Predictors of a row."""
        return int(self.index.shape[1])

    @property
    def n_directions(self) -> int:
        """Directions in which the function varies, all others given."""
        return self.k

    @property
    def n_evaluations(self) -> int:
        """Evaluations of a log density that one of the function takes."""
        return int(getattr(self.function, "n_evaluations", 1))

    @property
    def at_a_time(self) -> int:
        """Values that are computed at a time."""
        return int(getattr(self.function, "at_a_time", _CACHED))

    @property
    def n_in_the_mean(self) -> int:
        """The same where many values of the same rows are asked for."""
        return self.n_evaluations

    @functools.cached_property
    def blocks(self) -> tuple[int, ...]:
        """How many of the directions each level of a rule is for."""
        return normal_rules.blocks(self.k)

    @functools.cached_property
    def n_levels(self) -> tuple[int, ...]:
        """Levels that each of these has."""
        return tuple(map(normal_rules.n_levels, self.blocks))

    @property
    def n_moments(self) -> int:
        """Expectations that gradient and Hessian are made of, and the value."""
        return 1 + self.k + self.k * (self.k + 1) // 2

    @property
    def n_bends(self) -> int:
        """Expectations of third and fourth order beside these."""
        return 2 if self.k == 1 else 0

    def n_nodes(self, code: int) -> int:
        """Nodes of a rule."""
        return _n_nodes(self.blocks, code)

    def values(self, predictors: Sequence[Array], at: Index | slice) -> Array:
        """Return values, (n_points, n_rows), at predictors of that shape each; who asks counts what that takes."""
        points = [p[:, :1] if a < self.n_shared else p for a, p in enumerate(predictors)]
        [result] = self.function(*points, *self.data_of(at))
        return np.broadcast_to(result, predictors[0].shape)

    def data_of(self, at: Index | slice) -> list[Array]:
        """Return the data of some rows."""
        return [d if d.shape[1] == 1 else np.ascontiguousarray(d[:, at]) for d in self.data]

    def whitened(self, mean: Array, root: Array, codes: Levels, rows: Index) -> Array:
        """Return E[f], E[f z] and E[f (z z^T - I)] of rows, each by its own rule.

        Of rows with one predictor, E[f (z^3 - 3 z)] and E[f (z^4 - 6 z^2 + 3)] as well.
        """
        result = np.empty((self.n_moments + self.n_bends, len(codes)))
        for code, at in by_code(codes):
            result[:, at] = self._by_rule(code, mean[at], root[at], rows[at])
        return result

    def _by_rule(self, code: int, mean: Array, root: Array, rows: Index) -> Array:
        size, levels = self._rows_at_a_time(code), unpacked(code, len(self.blocks))
        parts = [
            self._part(levels, mean[part], root[part], self.data_of(rows[part])) for part in row_slices(len(mean), size)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _rows_at_a_time(self, code: int) -> int:
        return max(1, self.at_a_time // self.n_nodes(code))

    def _part(self, levels: tuple[int, ...], mean: Array, root: Array, data: list[Array]) -> Array:
        nodes, weights = rule(self.k, levels)
        if self.n_bends:
            weights = bend_rule(levels[0])
        points = [
            *points_at(mean[:1, : self.n_shared], root[:1], nodes),
            *points_at(mean[:, self.n_shared :], root[:, self.n_shared :], nodes),
        ]
        return weights @ evaluated(self.function, [*points, *data], (len(nodes), len(mean)))


@dataclass
class SummedRowFunction(RowFunction):
    """One that depends on its last predictors through a sum alone.

    Given the others, u, only one direction counts of what these are made of, z: that in which the sum moves. What is
    perpendicular to it integrates out. What hangs on u alone is computed once for all nodes along the sum.
    """

    n_summed: int
    #: From u and the data to the sum where all that it is a sum of is 0, and the products that its slopes in these
    #: are made of: first factors that may hang on u, then as many that hang on data alone.
    along: Compiled
    #: In which of these each product is the slope, or a part of it.
    owners: list[int]
    #: The function, given those of u that it depends on otherwise, the sum, and the data.
    of_sum: Compiled
    #: Which of u these are.
    beside: list[int]
    #: Whether all rows have the same u: functions take these with one column.
    shares_u: bool = field(default=False, kw_only=True)

    n_bends = 0

    @property
    def n_directions(self) -> int:
        """Directions in which the function varies, all others given."""
        return self.n_others + 1

    @functools.cached_property
    def blocks(self) -> tuple[int, ...]:
        """Those of the others, and the sum."""
        return (*normal_rules.blocks(self.n_others), 1)

    @functools.cached_property
    def n_levels(self) -> tuple[int, ...]:
        """Levels that each of these has."""
        *others, along = map(normal_rules.n_levels, self.blocks)
        return (*(min(n, _FEW_LEVELS) for n in others), along)

    @property
    def n_others(self) -> int:
        """Predictors beside those of the sum."""
        return self.k - self.n_summed

    def _rows_at_a_time(self, code: int) -> int:
        *others, _ = unpacked(code, len(self.blocks))
        return max(1, self.at_a_time // len(rule(self.n_others, tuple(others)).nodes))

    def _part(self, levels: tuple[int, ...], mean: Array, root: Array, data: list[Array]) -> Array:
        first, second = rule(self.n_others, levels[:-1]), rule(1, levels[-1:])
        m, of_u, n_products = self.n_others, slice(0, 1) if self.shares_u else slice(None), len(self.owners)
        points = points_at(mean[of_u, :m], root[of_u, :m, :m], first.nodes)
        start, *found = self.along(*points, *data)
        slopes, per_row = _stacked(found[:n_products], len(first.nodes)), _stacked(found[n_products:], 1)
        at = [m + owner for owner in self.owners]
        moves = root[:, at].transpose(1, 2, 0) * per_row
        path = np.concatenate([(mean[:, at].T * per_row[:, 0])[:, None], moves[:, :m]], axis=1)
        middle = start + _sum_of(slopes, _one_and(m, levels[:-1]), path)
        across = [_sum_of(slopes, _one_and(m, levels[:-1])[:1], moves[:, a : a + 1]) for a in range(m, self.k)]
        sd = np.sqrt(sum(map(np.square, across)))
        result = np.empty((3, *middle.shape))
        nodes, own = second.nodes[:, :, None], [d[None] for d in data]
        at_a_time = getattr(self.of_sum, "at_a_time", _STREAMED)
        for some in row_slices(len(middle), max(1, at_a_time // (len(nodes) * middle.shape[1]))):
            sums = nodes * sd[some]
            sums += middle[some]
            beside = [points[a][None, some] for a in self.beside]
            values = evaluated(self.of_sum, [*beside, sums, *own], sums.shape)
            result[:, some] = (second.weights @ values.reshape(len(sums), -1)).reshape(3, *sums.shape[1:])
        value, slope, bend = result
        per_sd = np.divide(1.0, sd, out=sd)
        per_sd[np.isposinf(per_sd)] = 0.0
        slope *= per_sd
        bend *= per_sd
        bend *= per_sd
        once = _weighted(first.weights[: 1 + m], slopes, slope)
        twice = np.stack([_weighted(first.weights[:1], s * slopes, bend)[:, 0] for s in slopes])
        return _joined(first, value, once, twice, moves[:, m:])


@functools.cache
def bend_rule(level: int) -> Array:
    """Return the weights of a rule of one dimension, and those of third and fourth order, (5, n_nodes)."""
    return np.concatenate([rule(1, (level,)).weights, normal_rules.bend_weights(level)])


@functools.cache
def _n_nodes(blocks: tuple[int, ...], code: int) -> int:
    return math.prod(map(normal_rules.n_nodes, blocks, unpacked(code, len(blocks))))


@functools.cache
def _one_and(k: int, levels: tuple[int, ...]) -> Array:
    """Return 1 and the directions at the nodes of a rule, (1 + k, n_nodes)."""
    nodes = rule(k, levels).nodes
    return np.concatenate([np.ones((1, len(nodes))), nodes.T])


def _stacked(found: Sequence[Array], n_nodes: int) -> Array:
    """Return functions of nodes, and of rows or not, in one array, (n, n_nodes, n_rows or 1)."""
    found = [np.atleast_2d(x) for x in found]
    result = np.empty((len(found), n_nodes, max(x.shape[1] for x in found)))
    for place, x in zip(result, found, strict=True):
        place[...] = x
    return result


def _sum_of(slopes: Array, of_nodes: Array, per_row: Array) -> Array:
    """Return the sum over a and j of slopes[a] of_nodes[j] per_row[a, j], (n_nodes, n_rows)."""
    if slopes.shape[2] == 1:
        factors = (slopes[:, None, :, 0] * of_nodes).reshape(-1, len(slopes[0]))
        return np.asarray(factors.T @ per_row.reshape(len(factors), -1))
    return functools.reduce(np.add, (s * (of_nodes.T @ x) for s, x in zip(slopes, per_row, strict=True)))


def _weighted(weights: Array, slopes: Array, values: Array) -> Array:
    """Return weighted sums over nodes of each slope times values, (n, n_weights, n_rows)."""
    if slopes.shape[2] == 1:
        factors = (slopes[:, None, :, 0] * weights).reshape(-1, len(values))
        return np.asarray(factors @ values).reshape(len(slopes), len(weights), -1)
    return np.stack([weights @ (s * values) for s in slopes])


def _joined(first: NormalRule, value: Array, once: Array, twice: Array, root: Array) -> Array:
    """Return expectations in all directions."""
    m = first.nodes.shape[1]
    of_u = first.weights @ value
    of_z = np.einsum("bar,bjr->ajr", root, once)
    of_both = np.einsum("bar,bcr->acr", root, np.einsum("bcr,car->bar", twice, root))
    result = [*of_u[: 1 + m], *of_z[:, 0], *of_u[1 + m :]]
    for a in range(len(of_z)):
        result += [*of_z[a, 1:], *of_both[a, : a + 1]]
    return np.stack(result)


def evaluated(function: Compiled, inputs: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Return the only output of a function, as an array of the shape of its points."""
    prices.count(prices.PER_CALL + prices.PER_ROW_OF_VALUE * 0.5 * len(inputs) * math.prod(shape))
    [result] = function(*inputs)
    return result if result.shape == shape else np.broadcast_to(np.asarray(result), shape)


def points_at(mean: Array, root: Array, nodes: Array) -> list[Array]:
    """Return predictors, (n_nodes, n_rows) each, at nodes in the directions of the columns of the root."""
    return [nodes @ root[:, a].T + mean[:, a] for a in range(mean.shape[1])]


def derivatives(whitened: Array, root: Array) -> tuple[Array, Array]:
    """Return E[grad f], (n_rows, k), and E[hess f], (n_rows, k, k), from `RowFunction.whitened`."""
    k = root.shape[1]
    inverse = inverse_roots(root)
    i, j = np.tril_indices(k)
    second = np.empty((len(root), k, k))
    second[:, i, j] = second[:, j, i] = whitened[1 + k : 1 + k + len(i)].T
    grad = np.einsum("rba,br->ra", inverse, whitened[1 : 1 + k])
    return grad, inverse.swapaxes(1, 2) @ second @ inverse


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


def row_slices(n: int, size: int) -> Iterator[slice]:
    """Cut ``n`` elements into parts of a size."""
    return (slice(start, min(start + size, n)) for start in range(0, n, size))
