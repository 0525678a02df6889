"""From the pattern of a precision to a form of its factor: blocks beside a border, or what elimination fills in.

A border that touches everything (global parameters) shows by its degree in the graph of the pattern. Where what is left
falls into small components, these are the blocks. Where it does not (a chain in time, a map of regions), some *level
sets* of a breadth-first search are put into the border as well [1]_: each separates what is nearer from what is
further.

References
----------
.. [1] A. George and J. W. H. Liu (1978). An automatic nested dissection algorithm for irregular finite element
   problems. SIAM Journal on Numerical Analysis 15(5). https://doi.org/10.1137/0715069
"""

import functools

from collections.abc import Callable

import numpy as np

from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

from pymc_ngvi.core import prices
from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.families.gaussian import Partition
from pymc_ngvi.families.sparse import SparseStructure, SummedStructure

#: Borders tried at most: those of as many different degrees.
_N_DEGREES = 24
#: Smallest borders whose large components are cut.
_N_CUT = 3
#: Size of a component beyond which it is worth cutting.
_LARGE = 24
#: Levels between two separators that are tried: 2, 3, 4, 6, 8, 12, ..., 256.
_SPACINGS = sorted({m << k for m in (2, 3) for k in range(8)})[:-1]


_remembered = functools.lru_cache(maxsize=4)

#: Of each coordinate's block; -1 in the border; shape (n_dim,).
Labels = NDArray[np.intp]


@_remembered
def find_blocks(pattern: Pattern) -> Partition:
    """Return the blocks beside a border with which steps cost least."""
    graph = pattern.matrix
    candidates = [*by_degree(graph), by_independence(graph)]
    # Chains and fields are the large components beside a small border.
    beside = sorted(candidates, key=lambda labels: int(np.sum(labels < 0)))[:_N_CUT]
    candidates += [cut for candidate in beside for cut in _by_level(graph, candidate)]
    return Partition(
        min(candidates, key=lambda labels: step_flops(np.bincount(labels[labels >= 0]), int(np.sum(labels < 0))))
    )


def step_flops(sizes: NDArray[np.integer], n_border: int) -> float:
    """Return the cost of the linear algebra of one step, to a factor: blocks of ``sizes`` beside a border."""
    return prices.parts_of_blocks(sizes, n_border)[0] + 10.0 * float(sizes.sum())


def by_degree(graph: sparse.csr_array) -> list[Labels]:
    """Put coordinates of high degree into the border."""
    degrees = np.diff(graph.indptr)
    distinct = np.unique(degrees)
    tried = distinct[np.unique(np.linspace(0, len(distinct) - 1, _N_DEGREES).astype(int))]
    return [dissected(graph, degrees > limit) for limit in tried] + [dissected(graph, degrees >= 0)]


def dissected(graph: sparse.csr_array, border: NDArray[np.bool_]) -> Labels:
    """Return the components of what is not in the border."""
    labels = np.full(len(border), -1, dtype=np.intp)
    inside = np.flatnonzero(~border)
    if len(inside):
        labels[inside] = csgraph.connected_components(graph[inside][:, inside], directed=False)[1]
    return labels


def _by_level(graph: sparse.csr_array, labels: Labels) -> list[Labels]:
    """Cut large components by level sets."""
    sizes = np.bincount(labels[labels >= 0], minlength=1)
    large = np.flatnonzero(sizes > _LARGE)
    if len(large) == 0 or len(large) > _N_DEGREES:  # many large blocks: these are groups
        return []
    level = np.zeros(len(labels), dtype=np.intp)
    for block in large:
        inside = np.flatnonzero(labels == block)
        level[inside] = _levels(graph[inside][:, inside])
    cut = np.isin(labels, large)
    spacings = [m for m in _SPACINGS if m <= level.max()]
    return [dissected(graph, (labels < 0) | (cut & (level % m == m - 1))) for m in spacings]


def _levels(graph: sparse.csr_array) -> NDArray[np.intp]:
    """Return the distance of each vertex of a connected graph from one at its rim."""
    distance = np.zeros(graph.shape[0])
    for _ in range(3):
        distance = csgraph.dijkstra(graph, directed=False, indices=int(np.argmax(distance)), unweighted=True)
    return distance.astype(np.intp)


def by_independence(graph: sparse.csr_array) -> Labels:
    """Leave out of the border a largest set of coordinates that touch each other nowhere, as far as it is found.

    Those of low degree first; equals in an arbitrary order that is always the same: in that of their indices, a chain
    would take a round for each coordinate.
    """
    n_dim = graph.shape[0]
    ties = np.random.default_rng(0).permutation(n_dim)
    rank = np.argsort(np.lexsort((ties, np.diff(graph.indptr)))).astype(np.float64) + 1.0
    links = (graph.astype(np.float64) - sparse.diags_array(graph.diagonal().astype(np.float64))).tocsr()
    links.eliminate_zeros()
    linked, chosen, open_ = (
        np.flatnonzero(np.diff(links.indptr)),
        np.zeros(n_dim, dtype=bool),
        np.ones(n_dim, dtype=bool),
    )
    while open_.any():
        rank_left, nearest = np.where(open_, rank, np.inf), np.full(n_dim, np.inf)
        nearest[linked] = np.minimum.reduceat(rank_left[links.indices], links.indptr[linked])
        new = open_ & (rank < nearest)
        chosen |= new
        open_ &= ~new & ~(links @ new.astype(np.float64) > 0.0)
    # A single one is independent of nothing: the pattern is dense.
    return dissected(graph, ~chosen | (chosen.sum() == 1))


# --- what elimination fills in, where it costs less than blocks, and with sums beside ---


#: Pairs of coordinates in sums, beyond which the precision is not looked at without these.
_MANY_PAIRS = 1e6
#: Part of the cost of a step with blocks, beyond which these stay.
_MUCH = 0.8
#: Seconds of such a step up to which nothing else is looked for: to find it takes longer than all steps would gain.
_LITTLE = 4e-3


@_remembered
def find_filled(pattern: Pattern) -> SparseStructure | None:
    """Return the structure of a factor with fill-in, where its steps cost less than with blocks; None elsewhere."""
    of_blocks = step_seconds(find_blocks(pattern))
    if of_blocks < _LITTLE:
        return None
    structure = SparseStructure.of(pattern)
    return structure if step_seconds(structure) < _MUCH * of_blocks else None


find_summed = _remembered(SummedStructure.of_sums)


def cheapest_form(
    summed: SummedPattern | None, pattern: Callable[[], Pattern | None]
) -> Partition | SparseStructure | None:
    """Return the form of a factor that costs least: blocks beside a border, or with fill-in; None where it is dense."""
    beside = None if summed is None else find_summed(summed)
    if beside is not None and summed is not None and summed.n_pairs > _MANY_PAIRS:
        return beside
    without = pattern()
    forms = [beside] if without is None else [find_filled(without), find_blocks(without), beside]
    return min((form for form in forms if form is not None), key=step_seconds, default=None)


@_remembered
def structure_of(form: Partition | SparseStructure) -> SparseStructure:
    """Return the structure of a form."""
    return form if isinstance(form, SparseStructure) else SparseStructure.of_blocks(form)


def step_seconds(form: Partition | SparseStructure) -> float:
    """Return the seconds of the linear algebra of one step, with blocks beside a border, or with fronts."""
    if isinstance(form, SparseStructure):
        fronts = form.fronts
        n_sums = form.n_sums if isinstance(form, SummedStructure) else 0
        return prices.OF_STEP + prices.of_fronts(fronts.n_products, fronts.n_fronts, n_sums)
    return prices.of_blocks(form.sizes, form.n_border)
