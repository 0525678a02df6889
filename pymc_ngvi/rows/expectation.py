"""Expectations of log p under a Gaussian, row by row: a row sees only the Gaussian of the few predictors that it has.

Gradient and Hessian with respect to the mean of the predictors come from values alone, by

    E[grad f] = L^-T E[f z],   E[hess f] = L^-T E[f (z z^T - I)] L^-1,   predictors = mean + L z,

which holds for functions with kinks, too. So do those of third and fourth order, of rows with one predictor.
"""

import functools
import itertools
import math

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core import prices
from pymc_ngvi.core.linalg import ROUNDING
from pymc_ngvi.core.sizes import AT_ONCE, CACHED
from pymc_ngvi.core.types import Array, Bools, Indices

# --- quadrature rules for expectations under normal distributions of few dimensions ---
#
# Gauss-Hermite rules are exact for polynomials and all but exact where a normal is narrow beside what is integrated.
# Elsewhere the trapezoidal rule converges faster than any power of its spacing [1]_; each further level has half of it,
# and reaches farther. In two dimensions each has a level of its own. In three and more, grids are sparse [2]_, with one
# level for all of them.
#
# References
# ----------
# .. [1] L. N. Trefethen and J. A. C. Weideman (2014). The exponentially convergent trapezoidal rule. SIAM Review 56(3).
#    https://doi.org/10.1137/130932132
# .. [2] F. Heiss and V. Winschel (2008). Likelihood approximation by numerical integration on sparse grids. Journal of
#    Econometrics 144(1). https://doi.org/10.1016/j.jeconom.2007.12.004

#: Nodes of the Gauss-Hermite rules of one dimension, by level; and of the trapezoidal rules that follow, spacing and
#: reach.
_GAUSS = (3, 5, 8, 12, 18)
_TRAPEZOIDAL = tuple((0.5**k, min(4.0 * (k + 1), 24.0)) for k in range(1, 7))
#: Dimensions up to which each has a level of its own.
_FEW = 2
#: Levels of sparse grids in more dimensions, and the nodes of the rules of one dimension that they are made of.
_SPARSE, _NODES = range(2, 6), range(1, 12, 2)


#: Nodes from which on a rule of one dimension tells of third and fourth derivatives.
_BENDS = 5
#: Decimals in which nodes are told apart.
_DECIMALS = 12


class NormalRule(NamedTuple):
    """Nodes, and the weights of expectations with them."""

    #: shape (n_nodes, k).
    nodes: Array
    #: Those of f, of z f, and of (z z^T - I) f, lower triangle by rows, for a standard normal z; shape (1 + k + k (k
    #: + 1) / 2, n_nodes).
    weights: Array


def blocks(k: int) -> tuple[int, ...]:
    """Return how many of ``k`` dimensions each level of a rule is for."""
    return (1,) * k if k <= _FEW else (k,)


def n_levels(size: int) -> int:
    """Return the number of levels for a block of dimensions; each is finer than the one before."""
    return len(_GAUSS) + len(_TRAPEZOIDAL) if size == 1 else len(_SPARSE)


@functools.cache
def rule(k: int, levels: tuple[int, ...]) -> NormalRule:
    """Return the rule in ``k`` dimensions that has a level for each of its `blocks`."""
    nodes, weights = _sparse_grid(k, _SPARSE[levels[0]]) if k > _FEW else _product([_line(level) for level in levels])
    i, j = np.tril_indices(k)
    second = nodes[:, i] * nodes[:, j] - (i == j)
    parts = np.concatenate([np.ones((len(nodes), 1)), nodes, second], axis=1)
    return NormalRule(nodes, np.ascontiguousarray((weights[:, None] * parts).T))


@functools.cache
def n_nodes(size: int, level: int) -> int:
    """Return the number of nodes for a block of dimensions; a product of rules has as many as the product of theirs."""
    return len(rule(size, (level,)).nodes)


def _line(level: int) -> tuple[Array, Array]:
    """Return nodes and weights of a rule of one dimension."""
    if level < len(_GAUSS):
        return _gauss(_GAUSS[level])
    spacing, reach = _TRAPEZOIDAL[level - len(_GAUSS)]
    n = round(reach / spacing)
    z = spacing * np.arange(-n, n + 1, dtype=np.float64)
    w = np.exp(-0.5 * z * z)
    return z, np.asarray(w / w.sum(), dtype=np.float64)


def _gauss(n: int) -> tuple[Array, Array]:
    z, w = np.polynomial.hermite_e.hermegauss(n)
    return z, w / w.sum()


def _product(axes: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Return nodes, (n_nodes, k), and weights of a product of rules of one dimension; of none, one node."""
    if not axes:
        return np.zeros((1, 0)), np.ones(1)
    nodes = np.stack([z.ravel() for z in np.meshgrid(*[z for z, _ in axes], indexing="ij")], axis=1)
    weights: Array = functools.reduce(np.multiply.outer, [w for _, w in axes]).ravel()
    return nodes, weights


def _sparse_grid(k: int, level: int) -> tuple[Array, Array]:
    """Return a sparse grid: a sum of products of rules that are fine in few dimensions at a time [2]_."""
    nodes, weights = [], []
    for total in range(max(0, level - k + 1), level + 1):
        sign = (-1) ** (level - total) * math.comb(k - 1, level - total)
        for bars in itertools.combinations(range(total + k - 1), k - 1):  # all ways to make a sum of sizes
            sizes = np.diff([-1, *bars, total + k - 1]) - 1
            z, w = _product([_gauss(_NODES[i]) for i in sizes])
            nodes.append(z)
            weights.append(sign * w)
    distinct, place = np.unique(np.round(np.concatenate(nodes), _DECIMALS), axis=0, return_inverse=True)
    return distinct, np.bincount(place.ravel(), np.concatenate(weights))


# --- which rule of quadrature each row has: a level for each block of its directions, all in one number ---

#: Bits of a level.
_BITS = 4

type Levels = NDArray[np.int16]


def unpacked(code: int, n_blocks: int) -> tuple[int, ...]:
    """Return the level of each block."""
    return tuple((code >> _BITS * block) % 2**_BITS for block in range(n_blocks))


def one_finer(block: int) -> int:
    """Return what is added to a code where a block goes to its next level."""
    return 1 << _BITS * block


def by_code(codes: Levels) -> Iterator[tuple[int, Indices | slice]]:
    """Yield each code with the places that have it."""
    if len(codes) and (codes == codes[0]).all():
        yield int(codes[0]), slice(None)
        return
    for code in np.flatnonzero(np.bincount(codes)).tolist():
        yield code, np.flatnonzero(codes == code)


# --- expectations row by row ---

type Compiled = Callable[..., Sequence[Array]]

#: Values of a function that are computed at a time, and those along a sum.
CACHED_VALUES, STREAMED_VALUES = 2**15, 2**14
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
    interacts: Bools
    #: How many of the first predictors are the same for all rows, as a scale is: the function takes these with one
    #: column, and what hangs on them alone is computed once.
    n_shared: int = field(default=0, kw_only=True)

    def some(self, rows: Indices, index: NDArray[np.int64]) -> "RowFunction":
        """Return some of the rows, in that order, of predictors (n_rows, k)."""
        return replace(self, index=np.ascontiguousarray(index), data=self.data_of(rows))

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
        return int(getattr(self.function, "at_a_time", CACHED_VALUES))

    @property
    def n_in_the_mean(self) -> int:
        """The same where many values of the same rows are asked for."""
        return self.n_evaluations

    @functools.cached_property
    def blocks(self) -> tuple[int, ...]:
        """How many of the directions each level of a rule is for."""
        return blocks(self.k)

    @functools.cached_property
    def n_levels(self) -> tuple[int, ...]:
        """Levels that each of these has."""
        return tuple(map(n_levels, self.blocks))

    @property
    def n_bends(self) -> int:
        """Expectations of third and fourth order beside those that gradient and Hessian are made of."""
        return 2 if self.k == 1 else 0

    def n_nodes(self, code: int) -> int:
        """Nodes of a rule."""
        return math.prod(map(n_nodes, self.blocks, unpacked(code, len(self.blocks))))

    def values(self, predictors: Sequence[Array], at: Indices | slice) -> Array:
        """Return values, (n_points, n_rows), at predictors of that shape each; who asks counts what that takes."""
        points = [p[:, :1] if a < self.n_shared else p for a, p in enumerate(predictors)]
        [result] = self.function(*points, *self.data_of(at))
        return np.broadcast_to(result, predictors[0].shape)

    def data_of(self, at: Indices | slice) -> list[Array]:
        """Return the data of some rows."""
        return [d if d.shape[1] == 1 else np.ascontiguousarray(d[:, at]) for d in self.data]

    def whitened(self, mean: Array, root: Array, codes: Levels, rows: Indices) -> Array:
        """Return E[f], E[f z] and E[f (z z^T - I)] of rows, each by its own rule.

        Of rows with one predictor, E[f (z^3 - 3 z)] and E[f (z^4 - 6 z^2 + 3)] as well.
        """
        result = np.empty((1 + self.k + self.k * (self.k + 1) // 2 + self.n_bends, len(codes)))
        for code, at in by_code(codes):
            result[:, at] = self._by_rule(code, mean[at], root[at], rows[at])
        return result

    def _by_rule(self, code: int, mean: Array, root: Array, rows: Indices) -> Array:
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
        return (*blocks(self.n_others), 1)

    @functools.cached_property
    def n_levels(self) -> tuple[int, ...]:
        """Levels that each of these has."""
        *others, along = map(n_levels, self.blocks)
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
        result = np.empty((len(second.weights), *middle.shape))
        nodes, own = second.nodes[:, :, None], [d[None] for d in data]
        at_a_time = getattr(self.of_sum, "at_a_time", STREAMED_VALUES)
        for some in row_slices(len(middle), max(1, at_a_time // (len(nodes) * middle.shape[1]))):
            sums = nodes * sd[some]
            sums += middle[some]
            beside = [points[a][None, some] for a in self.beside]
            values = evaluated(self.of_sum, [*beside, sums, *own], sums.shape)
            result[:, some] = (second.weights @ values.reshape(len(sums), -1)).reshape(-1, *sums.shape[1:])
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
    """Return the weights of a rule of one dimension, and those of third and fourth order, (5, n_nodes).

    The last two are those of (z^3 - 3 z) f and (z^4 - 6 z^2 + 3) f; 0 of a coarse rule: with three nodes they would
    tell of second derivatives.
    """
    z, w = _line(level)
    third_and_fourth = w * np.polynomial.hermite_e.hermevander(z, _BENDS - 1).T[3:] * (len(z) >= _BENDS)
    return np.concatenate([rule(1, (level,)).weights, third_and_fourth])


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


# --- the choice of a rule of quadrature for each row: as fine as it takes, in each of its directions ---


#: Nodes of a rule, at most, where finer ones have not settled it.
_MOST_NODES = 10_000
#: Level of a rule that reaches five standard deviations: coarser ones would not see a bend out there.
_FAR = 3
#: Part that counts of an error in a derivative, in units of standard deviations: it moves the optimum, and costs what
#: its square does.
_OF_DERIVATIVES = 0.1


class _RuleSearch:
    """Chooses the rules of rows, from given ones on; each block of directions of a row has a finer one, tried, or none.

    Where the expectation differs too much from that by the next finer rule in one of the directions, that one is taken.
    """

    def __init__(
        self, function: RowFunction, mean: Array, root: Array, rows: Indices, codes: Levels, whitened: Array
    ) -> None:
        self._function, self._mean, self._root, self._rows = function, mean, root, rows
        self.codes, self.whitened = codes.copy(), whitened.copy()
        shape = len(function.blocks), len(codes)
        #: Nats by which expectations may be wrong, as far as finer rules tell; infinite where they are not finite.
        self.apart = np.full(shape, np.inf)
        self._finer, self._of_finer = np.empty((shape[0], *whitened.shape)), np.full(shape, -1, dtype=np.int16)
        self._can_refine = np.zeros(shape, dtype=bool)

    def run(self, tolerance: float) -> None:
        """Refine rules until expectations are right to a tolerance."""
        left = np.arange(len(self.codes))
        for block in range(len(self.apart)):
            self.compare(block, left)
        while len(left):
            worst = self.to_refine(left, tolerance)
            for block in range(len(self.apart)):
                at = left[worst == block]
                self.refine(block, at)
                self.compare(block, at)
            left = left[worst >= 0]

    def compare(self, block: int, at: Indices) -> None:
        """Try a finer rule in a block of directions; where there is none, what is known of the error stays."""
        for code, part in by_code(self.codes[at]):
            where, finer = at[part], self._finer_than(code, block, len(at[part]))
            self._can_refine[block, where] = finer is not None
            if finer is not None:
                new = where[self._of_finer[block, where] != finer]
                self._finer[block][:, new], self._of_finer[block, new] = self._by_rule(finer, new), finer
                self.apart[block, where] = self._apart(self._finer[block][:, where], self.whitened[:, where])

    def to_refine(self, at: Indices, tolerance: float) -> Indices:
        """Return the block of each row in which the error is largest; -1 where it may stay, or has to."""
        apart = np.where(self._can_refine[:, at], self.apart[:, at], 0.0)
        worst = apart.argmax(axis=0)
        # Finer rules reach farther: what is not finite stays so.
        hopeless = ~np.isfinite(self.whitened[:, at]).all(axis=0)
        allowed = tolerance + ROUNDING * np.abs(self.whitened[0, at])
        enough = (apart.max(axis=0) <= allowed / len(apart)) | (self.apart[:, at].sum(axis=0) <= allowed)
        return np.where(enough | hopeless, -1, worst)

    def refine(self, block: int, at: Indices) -> None:
        """Take the next finer rule in a block of directions."""
        for code, part in by_code(self.codes[at]):
            where, finer = at[part], self._finer_than(code, block, len(at[part]))
            self.codes[where] = code = code + one_finer(block)
            self.whitened[:, where] = self._finer[block][:, where] if code == finer else self._by_rule(code, where)

    def _finer_than(self, code: int, block: int, n_rows: int) -> int | None:
        """Return the rule that one is compared with: the next, but one that reaches as far as bends may count."""
        n_nodes, n_levels = self._function.n_nodes, self._function.n_levels
        level = unpacked(code, len(n_levels))[block]
        if level + 1 >= n_levels[block]:
            return None
        far = min(_FAR, n_levels[block] - 1) if self._function.blocks[block] == 1 else 0
        finer = code + one_finer(block) * max(1, far - level)
        few = n_nodes(finer) <= _MOST_NODES or len(n_levels) == 1
        return (
            finer
            if few and (level < far or n_nodes(finer) * n_rows * self._function.n_evaluations <= AT_ONCE)
            else None
        )

    def _by_rule(self, code: int, at: Indices) -> Array:
        codes = np.full(len(at), code, dtype=np.int16)
        return self._function.whitened(self._mean[at], self._root[at], codes, self._rows[at])

    def _apart(self, new: Array, old: Array) -> Array:
        with np.errstate(invalid="ignore"):
            apart = np.abs(new - old)[: len(new) - self._function.n_bends]
            apart[1:] *= _OF_DERIVATIVES
        return np.where(np.isfinite(apart).all(axis=0), apart.max(axis=0), np.inf)


#: Times wider than it was for which a predictor needs another look at its rule, and part of its width for which it may
#: do with a coarser one; with these, those are looked at that will need it soon.
_WIDER, _NARROWER, _SOON_WIDER, _SOON_NARROWER = 1.25, 0.5, 1.1, 0.7

#: Whitened third and fourth derivatives, relative to the value, that are rounding.
_STRAIGHT = 1e-9


class Taken:
    """Expectations of rows of one kind."""

    def __init__(
        self, rows: RowFunction, mean: Array, cov: Array, given: tuple[Levels, NDArray[np.float32]] | None
    ) -> None:
        self._rows, self._mean, self.root = rows, mean, roots(cov)
        self._sd = np.sqrt(cov.diagonal(axis1=1, axis2=2).max(axis=1)).astype(np.float32)
        nothing = np.zeros(len(mean), dtype=np.int16), np.zeros(len(mean), dtype=np.float32)
        self._is_new = given is None
        self.codes, self.sd = nothing if given is None else given
        #: Nats by which expectations may be wrong, as far as finer rules tell; NaN where none was tried; (n_rows,).
        self.errors = np.full(len(mean), np.nan)
        self._whitened = rows.whitened(mean, self.root, self.codes, np.arange(len(mean)))

    @property
    def values(self) -> Array:
        """The expectation of each row, (n_rows,)."""
        return self._whitened[0]

    def choose(self, tolerance: float, at_a_time: int = CACHED) -> None:
        """Choose the rules of rows that are wider than those they have were chosen for, or much narrower."""
        wider, narrower = np.ones(len(self.codes), dtype=bool), np.zeros(len(self.codes), dtype=bool)
        if not self._is_new:
            wider, narrower = changed(self.codes, self.sd, self._sd)
        at = np.flatnonzero(wider | narrower)
        if not len(at):
            return
        self.codes, self.sd = np.where(narrower, 0, self.codes).astype(np.int16), self.sd.copy()
        coarser = np.flatnonzero(narrower)
        mean, root = self._mean, self.root
        if len(coarser):
            self._whitened[:, coarser] = self._rows.whitened(mean[coarser], root[coarser], self.codes[coarser], coarser)
        for part in (at[here] for here in row_slices(len(at), at_a_time)):
            search = _RuleSearch(self._rows, mean[part], root[part], part, self.codes[part], self._whitened[:, part])
            search.run(tolerance)
            self.codes[part], self.sd[part], self._whitened[:, part] = search.codes, self._sd[part], search.whitened
            self.errors[part] = search.apart.sum(axis=0)

    def bends(self) -> tuple[Array, Array, Array, Bools]:
        """Return E[f''], E[f^(3)], E[f^(4)] of rows with one predictor, and where the last two are not rounding."""
        second, third, fourth = self._whitened[2:]
        sd = self.root[:, 0, 0]
        per_sd = np.divide(1.0, sd, out=np.zeros_like(sd), where=sd > 0.0)
        is_bent = np.abs(third) + np.abs(fourth) > _STRAIGHT * (1.0 + np.abs(self._whitened[0]))
        return second * per_sd**2, third * per_sd**3, fourth * per_sd**4, is_bent

    def derivatives(self) -> tuple[Array, Array]:
        """Return E[grad f], (n_rows, k), and E[hess f], (n_rows, k, k)."""
        grad, hessian = derivatives(self._whitened, self.root)
        if not self._rows.interacts.all():  # quadrature is off by little, but not by nothing
            hessian[:, ~self._rows.interacts] = 0.0
        return grad, hessian


def changed(codes: Levels, before: NDArray[np.float32], now: NDArray[np.float32]) -> tuple[Bools, Bools]:
    """Return which rows are wider, and which narrower, than those that their rules were chosen for."""
    fine = codes > 0
    wider, narrower = now > _WIDER * before, fine & (now < _NARROWER * before)
    if wider.any() or narrower.any():
        wider, narrower = now > _SOON_WIDER * before, fine & (now < _SOON_NARROWER * before)
    return wider, narrower
