"""Integrals over trees of local coordinates: which trees there are, where nodes are put, and messages."""

import functools

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

from pymc_ngvi.core import prices
from pymc_ngvi.core.batch import Batch
from pymc_ngvi.core.linalg import SMALL, logsumexp
from pymc_ngvi.core.messages import Reason, Unavailable
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sizes import CACHED
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, Bools, Indices
from pymc_ngvi.density.expectations import RowTerms
from pymc_ngvi.families.sparse import by_degree, by_independence, dissected

# --- which coordinates are global, and the others as trees ---
#
# What a coordinate depends on, given the globals, is its path.
#
# Given the globals, coordinates fall into independent blocks. Within a block, a coordinate is taken out such that the
# rest falls apart, and so on: the *elimination tree*. Terms of log p that touch several coordinates of a block touch
# only ones of a single path, from the root of a tree downwards. An integral over a block is then one over its root,
# of a product of integrals over what hangs below it: its cost grows with the length of the longest path, not with the
# size of the block. A dense block of k coordinates is a path of k; a hub with leaves has 2 levels; a chain of 25 has
# 5.


#: Globals that importance sampling can cope with; levels that quadrature can.
MOST_GLOBALS, MOST_LEVELS = 100, 5
#: Globals up to which a model without local coordinates is sampled: of those with 16 and 18, sds were 9 and 17 % off.
MOST_PLAIN = 15
#: Blocks from which on few coordinates are worth the quadrature: those that can all be sampled.
_FEW = 3
#: Nodes in each level that costs are compared by.
_NODES = 3.0


@stored("exact.forest")
@dataclass(frozen=True, eq=False)
class Forest:
    """Global coordinates, and trees of local ones."""

    #: Ascending; shape (n_globals,).
    globals_: Indices
    #: Ascending; "place" below is one in this array; shape (n_local,).
    locals_: Indices
    #: Place of the coordinate above; -1 for a root; shape (n_local,).
    parent: Indices
    #: 0 for a root; shape (n_local,).
    level: Indices

    @property
    def n_globals(self) -> int:
        """Number of global coordinates."""
        return len(self.globals_)

    @property
    def n_local(self) -> int:
        """Number of local coordinates."""
        return len(self.locals_)

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return self.n_globals + self.n_local

    @functools.cached_property
    def n_levels(self) -> int:
        """Coordinates in the longest path; 0 without local ones."""
        return int(self.level.max(initial=-1)) + 1

    @functools.cached_property
    def path(self) -> Indices:
        """Places from the root to each local coordinate, (n_local, n_levels); itself again beyond its end."""
        result = np.empty((self.n_local, self.n_levels), dtype=np.intp)
        for at in self.at_level:
            above = self.parent[at]
            level = self.level[at[0]]
            if level:
                result[at, :level] = result[above, :level]
            result[at, level:] = at[:, None]
        return result

    @functools.cached_property
    def at_level(self) -> tuple[Indices, ...]:
        """Places of the coordinates of each level."""
        return tuple(np.flatnonzero(self.level == level) for level in range(self.n_levels))

    @functools.cached_property
    def children(self) -> tuple[tuple[Indices, Indices, Indices], ...]:
        """For each level: an order in which siblings are neighbours, their parents, and where each family begins."""
        result = []
        for at in self.at_level:
            order = np.argsort(self.parent[at], kind="stable")
            result.append((order, *np.unique(self.parent[at][order], return_index=True)))
        return tuple(result)

    @functools.cached_property
    def block(self) -> Indices:
        """Number of the tree of each local coordinate, (n_local,)."""
        roots = self.path[:, 0] if self.n_levels else np.empty(0, dtype=np.intp)
        return np.unique(roots, return_inverse=True)[1].astype(np.intp)

    @property
    def n_blocks(self) -> int:
        """Number of trees."""
        return len(self.at_level[0]) if self.n_levels else 0


@functools.lru_cache(maxsize=1)  # a pattern is the same object for other data that depend on the same coordinates
def find_forest(pattern: Pattern | None, n_dim: int, variables: tuple[slice, ...] = ()) -> Forest:
    """Return the globals and trees of which integrals cost least."""
    if pattern is None or n_dim <= _FEW:
        return _only_globals(n_dim)
    graph = pattern.matrix
    found: list[tuple[float, int, Forest]] = []
    reasons: list[tuple[int, str]] = []
    labels = {some.tobytes(): some for some in (*by_degree(graph), by_independence(graph))}
    labels |= {v.tobytes(): v for v in _by_size(graph, variables)}
    for i, label in enumerate(sorted(labels.values(), key=lambda v: int(np.sum(v < 0)))):
        n_globals = int(np.sum(label < 0))
        if n_globals > MOST_GLOBALS or n_globals == n_dim:
            break
        if not n_globals or (n_dim <= MOST_PLAIN and label.max() < _FEW):
            continue
        try:
            forest = _grown(graph, label)
        except Unavailable as reason:
            reasons.append((n_globals, reason.sentence))
        else:
            # The evaluations of all local terms that the posterior takes, to a factor: importance sampling is the less
            # efficient the more globals there are, and the less Gaussian these are.
            found.append((_NODES**forest.n_levels * (10.0 + forest.n_globals) ** 3, i, forest))
    if found:
        return min(found, key=lambda f: f[:2])[2]
    if n_dim <= MOST_GLOBALS:
        return _only_globals(n_dim)
    fewest = min((n for v in labels.values() if (n := int(np.sum(v < 0)))), default=n_dim)
    raise Unavailable(Reason.NO_FOREST, reasons[-1][1] if reasons else _too_many(fewest, n_dim))


def _by_size(graph: sparse.csr_array, variables: Sequence[slice]) -> Iterator[Indices]:
    """Take the variables of at most so many elements as the globals, for each number of elements."""
    sizes = np.array([v.stop - v.start for v in variables], dtype=np.intp)
    for most in np.unique(sizes)[:-1]:
        is_global = np.zeros(graph.shape[0], dtype=bool)
        for variable, size in zip(variables, sizes, strict=True):
            is_global[variable] |= size <= most
        if is_global.sum() > MOST_GLOBALS:
            return
        yield dissected(graph, is_global)


def _only_globals(n_dim: int) -> Forest:
    if n_dim > MOST_GLOBALS:
        raise Unavailable(Reason.NO_FOREST, _too_many(n_dim, n_dim))
    none = np.empty(0, dtype=np.intp)
    return Forest(np.arange(n_dim), none, none, none)


def _too_many(n_globals: int, n_dim: int) -> str:
    which = "none of them independent of others" if n_globals == n_dim else "those that blocks depend on"
    return f"{n_globals:,} coordinates ({which}) would be global, and at most {MOST_GLOBALS} can be"


def _grown(graph: sparse.csr_array, labels: Indices) -> Forest:
    """Return the forest beside these globals (negative labels); raise Unavailable where it is too deep or wide."""
    inside = np.flatnonzero(labels >= 0)
    widest = int(np.bincount(labels[inside]).max())
    n = len(inside)
    links = graph[inside][:, inside].astype(np.int8).tocsr()
    parent, level = np.full(n, -1, dtype=np.intp), np.zeros(n, dtype=np.intp)
    left, above = np.arange(n), np.full(n, -1, dtype=np.intp)  # what has no level yet, and the root above it
    for depth in range(MOST_LEVELS + 1):
        if not len(left):
            return Forest(np.flatnonzero(labels < 0), inside, parent, level)
        component = csgraph.connected_components(links[left][:, left], directed=False)[1]
        roots = _roots(links[left][:, left], component)
        parent[left[roots]], level[left[roots]] = above[left[roots]], depth
        above[left] = left[roots][component]
        left = np.delete(left, roots)
    said = f"blocks of up to {widest:,} coordinates have no tree of at most {MOST_LEVELS} levels"
    raise Unavailable(Reason.NO_FOREST, said)


def _roots(links: sparse.csr_array, component: Indices) -> Indices:
    """Return a central vertex of each connected component, in the order of their numbers.

    Leaves are peeled off again and again: the last to go is the centre of a tree. Where something is left that has no
    leaves, its vertex of highest degree is taken.
    """
    n, n_components = links.shape[0], int(component.max()) + 1
    degree = np.diff(links.indptr) - links.diagonal()
    rows = np.repeat(np.arange(n), np.diff(links.indptr))
    there = np.ones(n, dtype=bool)
    peeled = np.full(n, -1.0)
    current = degree.astype(np.intp)
    for turn in range(n):
        leaves = there & (current <= 1)
        if not leaves.any():
            break
        peeled[leaves] = turn
        there &= ~leaves
        lost = leaves[rows] & there[links.indices]
        current = current - np.bincount(links.indices[lost], minlength=n)
    peeled[there] = n + degree[there]
    order = np.lexsort((-np.arange(n), peeled, component))  # the first of those that are equally central comes last
    last = np.flatnonzero(np.diff(component[order], append=n_components))
    return order[last]


# --- Gauss-Hermite nodes of a path, and the limits within which few of them can be trusted ---

_LOG_2PI = float(np.log(2.0 * np.pi))
#: Nodes of a line from which on they are evenly spaced on the scale of asinh, and how far they reach, in standard
#: deviations: to other modes, and into tails. About one of two modes, they find the other one up to 13 of its standard
#: deviations away: log m of pairs of a t with 2 df, 13 of their scales apart, is 0.01 nats off; it was 3.
WIDE, _REACH = 61, 50.0
#: Numbers of nodes in each coordinate that are tried: of a path of several, as large a part, up to a few hundred nodes
#: in all. Two say nothing of a variance. Spaces between wide ones are halved.
_LADDER = (3, 4, 5, 7, 9, 13, 19, 27, 41, WIDE, 2 * WIDE - 1, 2 * (2 * WIDE - 1) - 1)


@stored("exact.rule")
@dataclass(frozen=True)
class PathRule:
    """A product rule on the standardised coordinates of a path: the integral of h is the sum of exp(log_weight) h."""

    #: In each coordinate.
    n_nodes: int
    #: Coordinates of the longest path.
    n_levels: int

    @property
    def nodes(self) -> Array:
        """All nodes, (n_nodes ** n_levels, n_levels); the coordinate of the root changes slowest."""
        return _products(self.n_nodes, self.n_levels)

    @property
    def powers(self) -> Array:
        """Of all nodes: coordinates, products of two, and the cube of the last, (n_levels (n_levels + 1) + 1, n)."""
        return _powers(self.n_nodes, self.n_levels)

    @property
    def limits(self) -> tuple[float, float, float]:
        """How far the mean of z may be from 0, and in which interval its variance has to lie."""
        far = min(self.n_nodes - 1, 6) / 8.0
        most = 1.0 + 1.4 * far
        return far, 1.0 / most, most

    @property
    def sure(self) -> "PathRule":
        """The same, or the middle one of those that are tried if that has more nodes: one whose centres are good."""
        rules = references(self.n_levels)
        return max(self, rules[len(rules) // 2], key=lambda one: one.n_nodes)


@functools.cache
def _products(n_nodes: int, n_levels: int) -> Array:
    mesh = np.meshgrid(*[_line(n_nodes)[0]] * n_levels, indexing="ij")
    return np.stack(mesh, axis=-1).reshape(-1, n_levels)


@functools.cache
def _powers(n_nodes: int, n_levels: int) -> Array:
    z = _products(n_nodes, n_levels)
    return np.concatenate([z.T, (z[:, :, None] * z[:, None]).reshape(len(z), -1).T, z[None, :, -1] ** 3])


@functools.cache
def _line(n_nodes: int) -> tuple[Array, Array]:
    """Return nodes of one coordinate, and log weights: of few, those of Gauss and Hermite over the standard normal."""
    if n_nodes >= WIDE:
        t, step = np.linspace(-np.arcsinh(_REACH), np.arcsinh(_REACH), n_nodes, retstep=True)
        return np.sinh(t), np.log(step * np.cosh(t))
    x, w = np.polynomial.hermite_e.hermegauss(n_nodes)
    log_weight = np.log(w)
    return x, log_weight - logsumexp(log_weight) + 0.5 * x**2 + 0.5 * _LOG_2PI


def references(n_levels: int) -> list[PathRule]:
    """Return the rules that are tried, the smallest first."""
    return [PathRule(n, n_levels) for n in _LADDER[: len(_LADDER) // n_levels]]


# --- the terms of log p by parts: some blocks at a time, at many draws of the globals, so that all stays in cache ---


#: Draws at a time, and draws times nodes.
_MOST_DRAWS, _MOST_POINTS = 256, 2**12


@dataclass(frozen=True, eq=False)
class SomeBlocks:
    """Some of the blocks."""

    #: Of these alone, with all globals.
    forest: Forest
    #: Where their coordinates are among all local ones.
    places: Indices | slice
    #: Which they are.
    blocks: slice
    #: From globals, (n, p), and their local coordinates, (n, n_nodes, n_places), to the term of the globals, (n,),
    #: and theirs, (n, n_nodes, n_places). The first is 0 in all parts but one.
    terms: Callable[[Array, Array], tuple[Array, Array]]


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """How the terms are evaluated."""

    #: Draws at a time.
    size: int
    parts: list[SomeBlocks]


class TermsOfBlocks(Protocol):
    """The terms of log p; see `pymc_ngvi.marginal.on_model.FittedDensity`."""

    def terms(self, g: Array, local: Array) -> tuple[Array, Array]:
        """Return the term of the globals and those of local coordinates."""

    def plan(self, forest: Forest, n_draws: int, n_nodes: int) -> BatchPlan:
        """Return how to evaluate them by parts."""


def whole(terms: TermsOfBlocks, forest: Forest, size: int) -> BatchPlan:
    """Return the plan of a single part, at so many draws at a time."""
    return BatchPlan(size, [SomeBlocks(forest, slice(None), slice(None), terms.terms)])


class TermsByRows:
    """Plans for terms that are made of rows."""

    def __init__(self, terms: RowTerms, forest: Forest) -> None:
        self._terms, self._forest = terms, forest
        self._plans: dict[int, list[SomeBlocks]] = {}
        self._order = np.argsort(forest.block, kind="stable")
        self._starts = np.searchsorted(forest.block[self._order], np.arange(forest.n_blocks + 1))

    def terms(self, g: Array, local: Array) -> tuple[Array, Array]:
        """Return the term of the globals, (n,), and those of local coordinates, (n, n_nodes, n_local)."""
        n, n_nodes, n_local = local.shape
        of_globals, of_locals = np.zeros(n), np.empty((n_local, n_nodes, n)).transpose(2, 1, 0)
        plan = self.plan(self._forest, n, n_nodes)
        for start in range(0, n, plan.size):
            rows = slice(start, start + plan.size)
            for part in plan.parts:
                first, second = part.terms(g[rows], local[rows, :, part.places])
                of_globals[rows] += first
                of_locals[rows, :, part.places] = second
        return of_globals, of_locals

    def plan(self, forest: Forest, n_draws: int, n_nodes: int) -> BatchPlan:
        """Return how to evaluate terms at so many draws, and nodes each."""
        size = min(n_draws, _MOST_DRAWS, max(1, _MOST_POINTS // n_nodes))
        n_rows = max(1, 2 * CACHED // (max(size, 1) * n_nodes)).bit_length()
        if n_rows not in self._plans:
            self._plans[n_rows] = self._parts(2 ** (n_rows - 1))
        return BatchPlan(size, self._plans[n_rows])

    def _parts(self, n_rows: int) -> list[SomeBlocks]:
        """Return parts of about so many rows."""
        label = (np.cumsum(self._terms.n_rows) - 1) // n_rows
        starts = np.flatnonzero(np.diff(label, prepend=-1))
        return [self._part(int(a), int(b)) for a, b in zip(starts, [*starts[1:], len(label)], strict=True)]

    def _part(self, first: int, last: int) -> SomeBlocks:
        places = np.sort(self._order[self._starts[first] : self._starts[last]])
        of_blocks = self._terms.of_blocks(first, last, places).terms
        of_globals = self._terms.of_globals if first == 0 else lambda g: np.zeros(len(g))
        forest = sub_forest(self._forest, places)
        at = slice(int(places[0]), int(places[-1]) + 1) if places[-1] - places[0] == len(places) - 1 else places
        each = prices.of_node(int(self._terms.n_rows[first:last].sum()), (last - first) / len(self._terms.n_rows))

        def terms(g: Array, local: Array) -> tuple[Array, Array]:
            prices.count(len(g) * local.shape[1] * each)
            return of_globals(g), of_blocks(g, local)

        return SomeBlocks(forest, at, slice(first, last), terms)


def sub_forest(forest: Forest, places: Indices) -> Forest:
    """Return the forest of some whole trees."""
    parent = forest.parent[places]
    inner = np.where(parent < 0, -1, np.searchsorted(places, parent))
    return Forest(forest.globals_, forest.locals_[places], inner, forest.level[places])


# --- where quadrature nodes are put ---
#
# Conditional means and Cholesky factors of the local coordinates given the globals.
#
# The factor L of a tree has a row for each coordinate, with entries in the columns of its path only: b = m + L z
# gives a coordinate its mean, plus multiples of the standardised coordinates above it, plus one of its own.

#: Standardised variances that a correction of the factor trusts, at least and at most; and means, at most. Beyond, the
#: nodes see one flank, or all of the mass is at one of them: a parabola tells more.
LEAST, _FARTHEST = 0.04, 1.5
_MOST = 1.0 / LEAST


@stored("exact.centres")
@dataclass(frozen=True, eq=False)
class Centres(Batch):
    """Conditional means and Cholesky factors for some draws of the globals."""

    #: shape (n, n_local).
    mean: Array
    #: Row c: entries in the columns of the path of c; the last of them is positive, what is beyond is 0; shape (n,
    #: n_local, n_levels).
    factor: Array

    def __len__(self) -> int:
        """Return the number of draws."""
        return len(self.mean)

    @classmethod
    def empty(cls, n: int, forest: Forest) -> "Centres":
        """Return centres to be put in, with factors of 0; in memory, draws are neighbours."""
        factor = np.zeros((forest.n_levels, forest.n_local, n))
        return cls(np.empty((forest.n_local, n)).T, factor.transpose(2, 1, 0))

    def put(self, rows: slice, places: Indices | slice, other: "Centres") -> None:
        """Put those of some trees at some draws in their place."""
        self.mean[rows, places] = other.mean
        self.factor[rows, places, : other.factor.shape[2]] = other.factor

    def replaced(self, rows: NDArray[np.integer], new: "Centres", places: Bools) -> "Centres":
        """Return a copy with some of those of some draws replaced: where ``places``, (n_rows, n_local), says so."""
        mean, factor = self.mean.copy(), self.factor.copy()
        mean[rows] = np.where(places, new.mean, mean[rows])
        factor[rows] = np.where(places[..., None], new.factor, factor[rows])
        return Centres(mean, factor)

    def of(self, places: Indices | slice, n_levels: int) -> "Centres":
        """Return those of some trees, with paths of at most ``n_levels`` coordinates."""
        return Centres(self.mean[:, places], self.factor[:, places, :n_levels])

    def at(self, nodes: Array) -> Array:
        """Return m + L z, (n, n_nodes, n_local), for the same nodes z, (n_nodes, n_levels), in all trees.

        In memory, draws are neighbours.
        """
        result = np.repeat(self.mean.T[:, None], len(nodes), axis=1)
        for factor, z in zip(np.moveaxis(self.factor, 2, 0), nodes.T, strict=True):
            result += factor.T[:, None] * z[:, None]
        return result.transpose(2, 1, 0)

    def at_own(self, z: Array, forest: Forest) -> Array:
        """Return m + L z, (n, k, n_local), for standardised coordinates z, (n, k, n_local)."""
        if forest.n_levels == 1:
            return self.mean[:, None] + self.factor[:, None, :, 0] * z
        result = self.mean[:, None] + 0.0 * z
        for level in range(forest.n_levels):
            result += self.factor[:, None, :, level] * z[:, :, forest.path[:, level]]
        return result

    def own(self, forest: Forest) -> Array:
        """Return the entries of the diagonal, (n, n_local)."""
        if forest.n_levels == 1:
            return self.factor[:, :, 0]
        return np.take_along_axis(self.factor, forest.level[None, :, None], axis=2)[:, :, 0]

    def variance(self) -> Array:
        """Return the conditional variances, (n, n_local)."""
        return np.sum(self.factor**2, axis=2)


@dataclass(frozen=True, eq=False)
class Shape:
    """Moments of the standardised coordinates z under the conditional density; m = 0 and L L^T = I are asked for."""

    #: shape (n, n_local).
    mean: Array
    #: Of the path of each coordinate; the identity beyond its end; shape (n, n_local, n_levels, n_levels).
    cov: Array
    #: Third standardised cumulant; shape (n, n_local).
    skew: Array
    #: Where a parabola through the largest value and its neighbours has its top, given the coordinates above, and the
    #: standard deviation of the Gaussian that it is the logarithm of; 0 and 1 where nodes are not far off; shape (n,
    #: n_local).
    peak: Array
    width: Array

    @classmethod
    def empty(cls, n: int, forest: Forest) -> "Shape":
        """Return what is asked for, at ``n`` draws; in memory, draws are neighbours."""
        shape, depth = (forest.n_local, n), forest.n_levels
        cov = np.zeros((depth, depth, *shape))
        cov[range(depth), range(depth)] = 1.0
        mean, skew, peak = (np.zeros(shape).T for _ in range(3))
        return cls(mean, cov.transpose(3, 2, 0, 1), skew, peak, np.ones(shape).T)

    def put(self, rows: slice, places: Indices | slice, other: "Shape") -> None:
        """Put the moments of some trees at some draws in their place."""
        depth = other.cov.shape[-1]
        self.cov[rows, places, :depth, :depth] = other.cov
        for name in ("mean", "skew", "peak", "width"):
            getattr(self, name)[rows, places] = getattr(other, name)

    def own(self, forest: Forest) -> Array:
        """Return the variance of each coordinate, (n, n_local)."""
        if forest.n_levels == 1:
            return self.cov[..., 0, 0]
        return np.take_along_axis(np.diagonal(self.cov, axis1=2, axis2=3), forest.level[None, :, None], axis=2)[..., 0]

    def variances(self) -> tuple[Array, Array]:
        """Return the least and the largest variance in any direction of the path of each coordinate, (n, n_local)."""
        cov = self.cov
        if cov.shape[-1] == 1:
            return cov[..., 0, 0], cov[..., 0, 0]
        if cov.shape[-1] == 2:
            middle, half = 0.5 * (cov[..., 0, 0] + cov[..., 1, 1]), 0.5 * (cov[..., 0, 0] - cov[..., 1, 1])
            radius: Array = np.sqrt(half**2 + cov[..., 0, 1] ** 2)
            return middle - radius, middle + radius
        values: Array = np.asarray(np.linalg.eigvalsh(np.where(np.isfinite(cov), cov, 0.0)), dtype=np.float64)
        return values[..., 0], values[..., -1]


def far_off(mean: Array, variance: Array) -> Bools:
    """Tell where the nodes see one flank, or all of the mass is at one of them."""
    return (variance < LEAST) | (variance > _MOST) | (np.abs(mean) > _FARTHEST)


def corrected_centres(centres: Centres, shape: Shape, forest: Forest) -> Centres:
    """Return m + L E[z] and L chol(cov z) [1]_; where nodes are far off, the top and width of a parabola instead.

    References
    ----------
    .. [1] J. C. Naylor and A. F. M. Smith (1982). Applications of a method for the efficient computation of posterior
       distributions. Journal of the Royal Statistical Society C 31(3). https://doi.org/10.2307/2347995
    """
    own = shape.own(forest)
    far = far_off(shape.mean, own)
    mean = centres.at_own(np.where(far, shape.peak, shape.mean)[:, None], forest)[:, 0]
    if forest.n_levels == 1:
        scale = np.where(far, shape.width, np.sqrt(np.clip(own, LEAST, _MOST)))
        return Centres(mean, centres.factor * scale[:, :, None])
    roots = np.linalg.cholesky(_clipped(shape.cov))
    factor = np.zeros_like(centres.factor)
    for level, at in enumerate(forest.at_level):
        # The last row of L_path chol(cov_path): beyond the end of a path, the covariance is the identity.
        path = forest.path[at, : level + 1]
        rows = np.zeros((len(mean), len(at), level + 1))
        rows[:, :, level] = shape.width[:, at]
        rows = np.where(far[:, at, None], rows, roots[:, at, level, : level + 1])
        # A coordinate is a sum over its path of entries of L times standardised ones, which are corrected in turn.
        for above in range(level):
            inner = roots[:, path[:, above], above, : above + 1]
            inner = np.where(far[:, path[:, above], None], _diagonal(shape.width[:, path[:, above]], above), inner)
            factor[:, at, : above + 1] += centres.factor[:, at, above, None] * inner
        factor[:, at, : level + 1] += centres.factor[:, at, level, None] * rows
    return Centres(mean, factor)


def _clipped(cov: Array) -> Array:
    """Return covariances, (..., depth, depth), whose variances in any direction are those that a correction trusts."""
    of_rows = np.abs(cov).sum(axis=-1)
    own = np.diagonal(cov, axis1=-2, axis2=-1)
    # By Gershgorin's theorem nearly all are as they should be, and eigenvalues take longest.
    doubtful = ~((2.0 * own - of_rows >= LEAST) & (of_rows <= _MOST)).all(axis=-1)
    if not doubtful.any():
        return cov
    values, vectors = np.linalg.eigh(cov[doubtful])
    values = np.clip(values, LEAST, _MOST)
    result = cov.copy()
    result[doubtful] = (vectors * values[..., None, :]) @ np.swapaxes(vectors, -1, -2)
    return result


def _diagonal(widths: Array, level: int) -> Array:
    """Return rows that are 0 but for their last entry, (n, n_places, level + 1)."""
    result = np.zeros((*widths.shape, level + 1))
    result[:, :, level] = widths
    return result


# --- messages from the leaves to the roots, weights back ---

#: Width of a parabola at most, its step where it is not bent, and the farthest step, in standardised units.
_WIDEST, _STEP, _LONGEST = 5.0, 3.0, 1e6


class Integral(NamedTuple):
    """What one pass of quadrature gives, of all blocks or some."""

    #: The term of the globals; 0 in all parts but one; shape (n,).
    of_globals: Array
    #: The logarithm of the integral of each block; shape (n, n_blocks).
    of_blocks: Array
    #: Moments of the standardised local coordinates; of no draws, where they were not asked for.
    shape: Shape

    @property
    def log_marginal(self) -> Array:
        """Log m(g), the logarithm of the integral of exp(log p) over all local coordinates, (n,)."""
        return np.nan_to_num(self.of_globals + self.of_blocks.sum(axis=1), nan=-np.inf, posinf=np.inf, neginf=-np.inf)


def integrate(
    terms: TermsOfBlocks,
    forest: Forest,
    rule: PathRule,
    g: Array,
    centres: Centres,
    *,
    moments: bool = True,
) -> Integral:
    """Integrate the local coordinates out, about given centres."""
    return by_plan(terms.plan(forest, len(g), len(rule.nodes)), forest, rule, g, centres, moments=moments)


def by_plan(
    plan: BatchPlan, forest: Forest, rule: PathRule, g: Array, centres: Centres, *, moments: bool = True
) -> Integral:
    """Integrate the blocks of a plan."""
    n = len(g)
    of_globals, of_blocks = np.zeros(n), np.empty((forest.n_blocks, n)).T
    shape = Shape.empty(n if moments else 0, forest)
    for start in range(0, n, plan.size):
        rows = slice(start, start + plan.size)
        near = centres[rows]
        for part in plan.parts:
            one = integral_of(part, rule, g[rows], near.of(part.places, part.forest.n_levels), moments=moments)
            of_globals[rows] += one.of_globals
            if moments:
                shape.put(rows, part.places, one.shape)
            of_blocks[rows, part.blocks] = one.of_blocks
    return Integral(of_globals, of_blocks, shape)


def integral_of(part: SomeBlocks, rule: PathRule, g: Array, near: Centres, *, moments: bool = True) -> Integral:
    """Integrate the local coordinates of one part out, about centres that are its own."""
    forest = part.forest
    rule = PathRule(rule.n_nodes, forest.n_levels)
    of_globals, of_locals = part.terms(g, near.at(rule.nodes))
    with np.errstate(all="ignore"):
        values = np.where(np.isfinite(of_locals), of_locals, -np.inf)
        tables, messages = upwards(forest, rule.n_nodes, values, _line(rule.n_nodes)[1][None, :, None])
        of_blocks = messages[0][:, 0] + by_root(forest, np.log(near.own(forest)))
        shape = _moments(forest, rule, tables, messages) if moments else Shape.empty(0, forest)
    return Integral(of_globals, of_blocks, shape)


def by_root(forest: Forest, values: Array) -> Array:
    """Return sums over trees, (n, n_blocks), of values of their coordinates, (n, n_local)."""
    if forest.n_levels == 1:
        return values
    order = np.argsort(forest.block, kind="stable")
    starts = np.searchsorted(forest.block[order], np.arange(forest.n_blocks))
    return np.add.reduceat(values[:, order], starts, axis=1)


def upwards(forest: Forest, k: int, values: Array, log_weight: Array) -> tuple[list[Array], list[Array]]:
    """Sum the nodes of each coordinate out, the deepest first."""
    n_levels = forest.n_levels
    tables: list[Array] = []
    messages: list[Array] = []
    from_below: Array | None = None  # (n, k^(level + 1), n_local) from children, 0 where there are none
    for level in reversed(range(n_levels)):
        at = forest.at_level[level]
        stride = k ** (n_levels - 1 - level)
        table = values[:, ::stride] if n_levels == 1 else values[:, ::stride, at]
        if from_below is not None:
            table = table + from_below[:, :, at]
        own = log_weight if n_levels == 1 or log_weight.shape[2] == 1 else log_weight[:, :, at]
        table = table.reshape(len(values), k**level, k, -1) + own[:, None]
        top = table.max(axis=2, keepdims=True)
        top = np.where(np.isfinite(top), top, 0.0)
        message = np.log(np.exp(table - top).sum(axis=2)) + top[:, :, 0]
        tables.insert(0, table)
        messages.insert(0, message)
        if level:
            from_below = np.zeros((len(values), k**level, forest.n_local))
            order, parents, starts = forest.children[level]
            from_below[:, :, parents] = np.add.reduceat(np.take(message, order, axis=2), starts, axis=2)
    return tables, messages


def _moments(forest: Forest, rule: PathRule, tables: list[Array], messages: list[Array]) -> Shape:
    """Return the moments of the standardised coordinates, from the roots down."""
    n, n_local = len(messages[0]), forest.n_local
    shape = Shape.empty(n, forest)
    mean, cov, skew = shape.mean, shape.cov, shape.skew
    weights_above: Array | None = None
    place_in_level = np.empty(n_local, dtype=np.intp)
    for level, at in enumerate(forest.at_level):
        place_in_level[at] = np.arange(len(at))
        weights = np.exp(tables[level] - messages[level][:, :, None])  # of the own nodes given those above
        weights = np.where(np.isfinite(weights), weights, 0.0)
        if weights_above is not None:
            above = weights_above[:, :, place_in_level[forest.parent[at]]]
            weights = weights * above[:, :, None]
        weights = weights.reshape(n, rule.n_nodes ** (level + 1), len(at))
        powers = PathRule(rule.n_nodes, level + 1).powers
        moments = (powers @ weights.T).transpose(1, 2, 0)  # (n_powers, n, n_places)
        first = moments[: level + 1]
        second = moments[level + 1 : -1].reshape(level + 1, level + 1, n, len(at)) - first[:, None] * first
        to = slice(None) if forest.n_levels == 1 else at  # quicker than by number
        cov[:, to, : level + 1, : level + 1] = second.transpose(2, 3, 0, 1)
        m, v = first[level], np.maximum(second[level, level], SMALL)
        third = moments[-1] - m * (3.0 * v + m**2)
        mean[:, to], skew[:, to] = m, third / (v * np.sqrt(v))
        draws, places = np.nonzero(far_off(m, second[level, level]))
        if len(draws):
            table = tables[level][draws, :, :, places]
            peak, width = _parabola(table, weights.reshape(n, -1, rule.n_nodes, len(at))[draws, :, :, places])
            if rule.n_nodes >= WIDE:  # which are near to any mass: a parabola would be about one mode
                is_known = v[draws, places] >= LEAST
                peak, width = (np.where(is_known, x[draws, places], y) for x, y in ((m, peak), (np.sqrt(v), width)))
            shape.peak[draws, at[places]], shape.width[draws, at[places]] = peak, width
        weights_above = weights
    return shape


def _parabola(table: Array, weights: Array) -> tuple[Array, Array]:
    """Return top and width of a parabola through the largest value and its neighbours, (m,) each, from (m, n_above, k).

    At the most likely nodes of the coordinates above. For a Gaussian it is exact, however far off the nodes are.
    """
    m, _, k = table.shape
    if k < 3:
        return np.zeros(m), np.ones(m)
    each, (line, log_weight) = np.arange(m), _line(k)
    values = table[each, weights.sum(axis=2).argmax(axis=1)] - log_weight
    values = np.where(np.isfinite(values), values, -1e300)
    middle = np.clip(values.argmax(axis=1), 1, k - 2)
    y0, y1, y2 = (values[each, middle + i] for i in (-1, 0, 1))
    x0, x1, x2 = (line[middle + i] for i in (-1, 0, 1))
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curvature = -2.0 * (right - left) / (x2 - x0)
    slope = (left * (x2 - x1) + right * (x1 - x0)) / (x2 - x0)
    bent = curvature > 1.0 / _WIDEST**2
    step = np.where(bent, slope / np.where(bent, curvature, 1.0), np.sign(slope) * _STEP)
    width = np.where(bent, 1.0 / np.sqrt(np.where(bent, curvature, 1.0)), _WIDEST)
    return x1 + np.clip(step, -_LONGEST, _LONGEST), np.maximum(width, 1e-150)


def blocks_off_centre(forest: Forest, shape: Shape, rule: PathRule, of_blocks: Array) -> Bools:
    """Tell which blocks of which draws have nodes about the wrong centres, (n, n_blocks)."""
    far, least, most = rule.limits
    low, high = shape.variances()
    off = (np.abs(shape.mean) > far) | (low < least) | (high > most)
    if forest.n_levels > 1:
        off = by_root(forest, off.astype(np.float64)) > 0.0
    return off | ~np.isfinite(of_blocks)
