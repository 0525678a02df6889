"""Which coordinates are global, and the others as trees: what a coordinate depends on, given the globals, is its path.

Given the globals, coordinates fall into independent blocks. Within a block, a coordinate is taken out such that the
rest falls apart, and so on: the *elimination tree*. Terms of log p that touch several coordinates of a block touch
only ones of a single path, from the root of a tree downwards. An integral over a block is then one over its root, of a
product of integrals over what hangs below it: its cost grows with the length of the longest path, not with the size of
the block. A dense block of k coordinates is a path of k; a hub with leaves has 2 levels; a chain of 25 has 5.
"""

import functools

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.refusal import Reason, Refused
from pymc_ngvi.core.stored import stored
from pymc_ngvi.families.dissection import by_degree, by_independence, dissected

Integers = NDArray[np.intp]

#: Globals that importance sampling can cope with; levels that quadrature can.
MOST_GLOBALS, MOST_LEVELS = 100, 5
#: Globals up to which a model without local coordinates is sampled: of those with 16 and 18, sds were 9 and 17 % off.
MOST_PLAIN = 15
#: Coordinates up to which a few blocks are not worth the quadrature, and how many blocks are.
_SMALL, _FEW = 15, 3
#: Nodes in each level that costs are compared by.
_NODES = 3.0


class NoForest(Refused):
    """The coordinates do not fall into small blocks beside few globals; the sentence says which limit it is."""


@stored("exact.forest")
@dataclass(frozen=True, eq=False)
class Forest:
    """Global coordinates, and trees of local ones."""

    #: Ascending; shape (n_globals,).
    globals_: Integers
    #: Ascending; "place" below is one in this array; shape (n_local,).
    locals_: Integers
    #: Place of the coordinate above; -1 for a root; shape (n_local,).
    parent: Integers
    #: 0 for a root; shape (n_local,).
    level: Integers

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
    def path(self) -> Integers:
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
    def at_level(self) -> tuple[Integers, ...]:
        """Places of the coordinates of each level."""
        return tuple(np.flatnonzero(self.level == level) for level in range(self.n_levels))

    @functools.cached_property
    def children(self) -> tuple[tuple[Integers, Integers, Integers], ...]:
        """For each level: an order in which siblings are neighbours, their parents, and where each family begins."""
        result = []
        for at in self.at_level:
            order = np.argsort(self.parent[at], kind="stable")
            result.append((order, *np.unique(self.parent[at][order], return_index=True)))
        return tuple(result)

    @functools.cached_property
    def block(self) -> Integers:
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
        if not n_globals or (n_dim <= _SMALL and label.max() < _FEW):
            continue
        try:
            forest = _grown(graph, label)
        except NoForest as reason:
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
    raise NoForest(Reason.NO_FOREST, reasons[-1][1] if reasons else _too_many(fewest, n_dim))


def _by_size(graph: sparse.csr_array, variables: Sequence[slice]) -> Iterator[Integers]:
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
        raise NoForest(Reason.NO_FOREST, _too_many(n_dim, n_dim))
    none = np.empty(0, dtype=np.intp)
    return Forest(np.arange(n_dim), none, none, none)


def _too_many(n_globals: int, n_dim: int) -> str:
    which = "none of them independent of others" if n_globals == n_dim else "those that blocks depend on"
    return f"{n_globals:,} coordinates ({which}) would be global, and at most {MOST_GLOBALS} can be"


def _grown(graph: sparse.csr_array, labels: Integers) -> Forest:
    """Return the forest beside these globals (negative labels); raise NoForest where it is too deep or wide."""
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
    raise NoForest(Reason.NO_FOREST, said)


def _roots(links: sparse.csr_array, component: Integers) -> Integers:
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
