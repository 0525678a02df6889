"""An elimination order for the Cholesky factor of a sparse matrix: the parts that are eliminated together.

Coordinates that touch much come last. The others are cut into halves by *separators*, these into quarters, and so on
[1]_: parts of one depth touch each other nowhere, whatever has been eliminated before, so that they can be treated
together. Where nothing separates, as with crossed effects, coordinates that touch each other nowhere come first, and
what is left is dense, or nearly so.

References
----------
.. [1] A. George and J. W. H. Liu (1978). An automatic nested dissection algorithm for irregular finite element
   problems. SIAM Journal on Numerical Analysis 15(5). https://doi.org/10.1137/0715069
"""

from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

Ints = NDArray[np.int64]

#: Coordinates that are not cut any further.
_LEAF = 10
#: Part of a component in the smaller half, at least, and in the separator, at most.
_LEAST_HALF, _MOST_BETWEEN = 0.05, 0.3
#: Multiples of the mean degree beyond which coordinates are set apart.
_HIGH = (4.0, 16.0, 64.0)
#: Part of the coordinates that touch one other at most, from which on they are eliminated first, as those of trees are.
_MANY = 0.05
#: Pairs of coordinates that touch one of those that come first, at most.
_MOST_PAIRS = 2e8
#: Part of those that are still open among which some are chosen in a slow round.
_SLOWLY = 0.1
#: Multiple of the root of the dimension that separators don't exceed in chains and maps.
_SMALL = 4.0


class Supernodes(NamedTuple):
    """Coordinates that are eliminated together."""

    #: Of each coordinate; shape (n_dim,).
    part: Ints
    #: The deepest are eliminated first; those of one depth touch each other nowhere by then; shape (n_parts,).
    depth: Ints


def candidates(graph: sparse.csr_array) -> list[Supernodes]:
    """Return orders of which one should be good."""
    degree = np.diff(graph.indptr)
    limits = np.unique(np.array(_HIGH) * degree.mean())
    leaves = _leaves(graph, degree > limits[1])
    if leaves.sum() >= _MANY * len(degree) and not leaves.all():
        rest, filled = _without(graph, leaves)
        return [_joined(parts, rest, leaves) for parts in candidates(filled)]
    found, largest = {}, np.inf
    for limit in limits:
        apart = np.flatnonzero(degree > limit)
        if len(apart) not in found:
            found[len(apart)] = parts = _dissected(graph, apart)
            sizes = np.bincount(parts.part)[int(len(apart) > 0) :]
            largest = min(largest, int(sizes.max(initial=0)))
    if largest <= _SMALL * np.sqrt(graph.shape[0]):
        return list(found.values())
    # Nothing separates.
    firsts = [independent(graph, slowly=True), *(_one_side(graph, degree > limit) for limit in limits[-1:])]
    bearable = [first for first in firsts if first.sum() > 1 and np.sum(degree[first].astype(float) ** 2) < _MOST_PAIRS]
    return [*found.values(), *(_beside(graph, first) for first in bearable)]


def _one_side(graph: sparse.csr_array, apart: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the larger side of a graph with two, within each of which nothing touches, as of two crossed effects.

    The sides of each component apart; none where there are not two.
    """
    result = np.zeros(graph.shape[0], dtype=bool)
    inside = np.flatnonzero(~apart)
    inner = graph[inside][:, inside]
    n_components, component = csgraph.connected_components(inner, directed=False)
    side = _levels(inner, component.astype(np.int64)) % 2 == 1
    whole = inner.tocoo()
    within = (side[whole.row] == side[whole.col]) & (whole.row != whole.col)
    if not within.any():
        size = np.bincount(component)
        larger = 2 * np.bincount(component, side, minlength=n_components) > size
        result[inside] = side == larger[component]
    return result


def _leaves(graph: sparse.csr_array, apart: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return coordinates that touch no more than one other, but for those apart; of two that touch each other, one."""
    whole = graph.tocoo()
    inner = (whole.row != whole.col) & ~apart[whole.row] & ~apart[whole.col]
    row, col = whole.row[inner], whole.col[inner]
    result = ~apart & (np.bincount(row, minlength=len(apart)) <= 1)
    result[row[result[row] & result[col] & (row > col)]] = False
    return result


def _without(graph: sparse.csr_array, first: NDArray[np.bool_]) -> tuple[Ints, sparse.csr_array]:
    """Return which coordinates are left when independent ones were eliminated, and their pattern, filled in by that."""
    rest, inner = np.flatnonzero(~first), np.flatnonzero(first)
    among, between = graph[rest][:, rest].astype(np.int32), graph[rest][:, inner].astype(np.int32)
    return rest, (among + between @ between.T).astype(bool).tocsr()


def _joined(found: Supernodes, rest: Ints, first: NDArray[np.bool_]) -> Supernodes:
    """Return the order of all from that of the rest, which comes after ``first``."""
    inner = np.flatnonzero(first)
    part = np.empty(len(first), dtype=np.int64)
    part[rest], part[inner] = found.part, len(found.depth) + np.arange(len(inner))
    return Supernodes(part, np.append(found.depth, np.full(len(inner), found.depth.max(initial=-1) + 1)))


def _beside(graph: sparse.csr_array, first: NDArray[np.bool_]) -> Supernodes:
    """Eliminate independent coordinates first, and dissect what is left."""
    rest, filled = _without(graph, first)
    degree = np.diff(filled.indptr)
    return _joined(_dissected(filled, np.flatnonzero(degree > _HIGH[0] * degree.mean())), rest, first)


def _dissected(graph: sparse.csr_array, apart: Ints) -> Supernodes:
    """Cut into halves until these are small, coordinates ``apart`` aside."""
    part = np.full(graph.shape[0], -1, dtype=np.int64)
    part[apart] = 0
    depth = [np.zeros(int(len(apart) > 0), dtype=np.int64)]
    n_parts = len(depth[0])
    open_ = np.flatnonzero(part < 0)
    graph = graph[open_][:, open_]
    while len(open_):
        component = _cut(graph)
        done = component >= 0
        found, here = np.unique(component[done], return_inverse=True)
        part[open_[done]] = n_parts + here
        n_parts += len(found)
        depth.append(np.full(len(found), len(depth)))
        left = np.flatnonzero(~done)
        graph, open_ = graph[left][:, left], open_[left]
    return Supernodes(part, np.concatenate(depth))


def _cut(graph: sparse.csr_array) -> Ints:
    """Return the component of each coordinate of a separator, and of small components; -1 for others."""
    n_components, component = csgraph.connected_components(graph, directed=False)
    component = component.astype(np.int64)
    size = np.bincount(component)
    small = size <= _LEAF
    result = np.where(small[component], component, -1)
    if small.all():
        return result
    level = _levels(graph, component)
    # Each level of each component, one after the other.
    depth = np.zeros(n_components, dtype=np.int64)
    np.maximum.at(depth, component, level)
    start = np.cumsum(depth + 1) - (depth + 1)
    count = np.bincount(start[component] + level, minlength=int(depth.sum()) + n_components)
    owner = np.repeat(np.arange(n_components), depth + 1)
    until = np.cumsum(count)
    before = until - count - (until - count)[start][owner]
    less = np.minimum(before, size[owner] - before - count)
    with np.errstate(divide="ignore"):
        score = np.where(less >= _LEAST_HALF * size[owner], count / less, np.inf)
    order = np.lexsort((score, owner))
    best = order[start]
    separates = np.isfinite(score[best]) & (count[best] <= _MOST_BETWEEN * size)
    chosen = separates[component] & (level == (best - start)[component])
    # What touches nothing beyond stays on its side.
    beyond = graph @ (separates[component] & (level == (best - start)[component] + 1))
    result[chosen & beyond] = component[chosen & beyond]
    dense = ~separates[component]
    result[dense] = component[dense]
    return result


def _levels(graph: sparse.csr_array, component: Ints) -> Ints:
    """Return the distance of each vertex from one at the rim of its component."""
    n = graph.shape[0]
    start = np.unique(component, return_index=True)[1]
    distance = np.zeros(n, dtype=np.int64)
    for _ in range(2):
        root = sparse.csr_array((np.ones(len(start), dtype=bool), (np.zeros(len(start), int), start)), shape=(1, n + 1))
        whole = sparse.vstack([sparse.csr_array((graph.data, graph.indices, graph.indptr), shape=(n, n + 1)), root])
        order, before = csgraph.breadth_first_order(whole.tocsr(), n, directed=True)
        distance = _depths(order, before)[:n]
        last = np.lexsort((distance, component))
        start = last[np.cumsum(np.bincount(component)) - 1]
    return distance


def _depths(order: Ints, before: Ints) -> Ints:
    """Return the distance of each vertex from the first of a breadth-first order, less one."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    jump = np.zeros(len(order), dtype=np.int64)
    jump[1:] = place[before[order[1:]]]
    steps = np.ones(len(order), dtype=np.int64)
    steps[0] = 0
    while jump.any():
        steps += steps[jump]
        jump = jump[jump]
    result = np.empty(len(order), dtype=np.int64)
    result[order] = steps - 1
    return result


def independent(graph: sparse.csr_array, *, slowly: bool = False) -> NDArray[np.bool_]:
    """Return a largest set of coordinates that touch each other nowhere, as far as it is found; those of low degree."""
    n_dim = graph.shape[0]
    # Those of low degree first; equals in an arbitrary order that is always the same: in that of their indices, a chain
    # would take a round for each coordinate.
    ties = np.random.default_rng(0).permutation(n_dim)
    rank = np.argsort(np.lexsort((ties, np.diff(graph.indptr)))).astype(np.float64) + 1.0
    links = (graph.astype(np.float64) - sparse.diags_array(graph.diagonal().astype(np.float64))).tocsr()
    links.eliminate_zeros()
    chosen, open_ = np.zeros(n_dim, dtype=bool), np.ones(n_dim, dtype=bool)
    while open_.any():
        few = open_
        if slowly:
            left = links @ open_.astype(np.float64)
            rank = np.argsort(np.lexsort((ties, left, ~open_))).astype(np.float64) + 1.0
            few = open_ & (rank <= max(1.0, _SLOWLY * open_.sum()))
        nearest = _least_neighbour(links, np.where(open_, rank, np.inf))
        new = few & (rank < nearest)
        chosen |= new
        open_ &= ~new & ~(links @ new.astype(np.float64) > 0.0)
    return chosen


def _least_neighbour(links: sparse.csr_array, rank: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least rank among the neighbours of each vertex, inf where there are none."""
    result = np.full(links.shape[0], np.inf)
    some = np.flatnonzero(np.diff(links.indptr))
    if len(some):
        result[some] = np.minimum.reduceat(rank[links.indices], links.indptr[some])
    return result
