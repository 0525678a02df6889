"""The mean Hessian at the entries of a pattern, from one product for each colour."""

import functools
import itertools

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sizes import AT_ONCE, HELD
from pymc_ngvi.core.types import Array

# --- colourings of a sparse symmetric matrix: all of its entries from few matrix-vector products ---
#
# A column may share a colour, that is a product, with others as long as every entry can be read off somewhere: entry
# (i, j) from the product of j's colour at row i if no other column of that colour has an entry in row i, or, as the
# matrix is symmetric, from the product of i's colour at row j. This is a star colouring of the graph of the matrix
# (Gebremedhin, Manne and Pothen, 2005).


Indices = NDArray[np.intp]

#: Edges of a graph that is coloured vertex by vertex in Python: a second; and over all the orders that are tried.
_GREEDY_EDGES, _ALL_GREEDY_EDGES = 2_000_000, 300_000
#: Sets of vertices with a colour of their own that are tried.
_N_CUTS = 8


@dataclass(frozen=True, eq=False)
class Colouring:
    """Columns of a symmetric matrix, grouped so that the sums over groups determine all entries."""

    #: 0, ..., n_colours - 1; shape (n_dim,).
    colours: Indices
    n_colours: int
    #: Where each entry of the pattern is found in the products, flattened; shape (n_entries,).
    places: Indices

    @classmethod
    def of(cls, pattern: Pattern) -> Self:
        """Return a colouring of a pattern with few colours."""
        below = pattern.off_diagonal
        rows, cols, n_dim = pattern.rows[below], pattern.cols[below], pattern.n_dim
        own = _own_colours(rows, cols, n_dim)
        n_own = int(own.sum())
        inside = ~(own[rows] | own[cols])
        rest = np.flatnonzero(~own)
        index = np.cumsum(~own) - 1
        colours = np.empty(n_dim, dtype=np.intp)
        colours[own] = np.arange(n_own)
        colours[rest] = n_own + _colour_rest(_graph(index[rows[inside]], index[cols[inside]], len(rest)))
        n_colours = int(colours.max(initial=-1)) + 1
        at_row = colours[pattern.cols] * pattern.n_dim + pattern.rows
        at_col = colours[pattern.rows] * pattern.n_dim + pattern.cols
        # Where another column of a colour has an entry in the row of one, it is alone in the column of the other.
        places = np.concatenate([at_row, at_col[below]])
        _, which, counts = np.unique(places, return_inverse=True, return_counts=True)
        return cls(colours, n_colours, np.where(counts[which[: len(at_row)]] == 1, at_row, at_col))

    def directions(self) -> Array:
        """Return the sum of the unit vectors of each colour, (n_colours, n_dim)."""
        directions = np.zeros((self.n_colours, len(self.colours)))
        directions[self.colours, np.arange(len(self.colours))] = 1.0
        return directions

    def recover(self, products: Array) -> Array:
        """Return the entries of the lower triangle."""
        return products.ravel()[self.places]


# --- the choice of colours --------------------------------------------------------------------------------------------


def _own_colours(rows: Indices, cols: Indices, n_dim: int) -> NDArray[np.bool_]:
    """Choose the vertices with a colour of their own: those of the highest degrees, down to one of the widest gaps.

    What the rest will need is estimated by its highest degree: neighbours of one vertex mostly need different colours.
    """
    degrees = _degrees(rows, cols, n_dim)
    best, fewest = np.zeros(n_dim, dtype=bool), degrees.max(initial=0) + 1
    descending = np.sort(degrees)[::-1]
    ratios = (descending[:-1] + 1.0) / (descending[1:] + 1.0)
    for cut in np.sort(np.argsort(-ratios, kind="stable")[:_N_CUTS]):
        if ratios[cut] == 1.0 or cut + 2 >= fewest:
            continue
        own = degrees >= descending[cut]
        inside = ~(own[rows] | own[cols])
        total = own.sum() + _degrees(rows[inside], cols[inside], n_dim).max(initial=0) + 1
        if total < fewest:
            best, fewest = own, total
    return best


def _degrees(rows: Indices, cols: Indices, n_dim: int) -> Indices:
    return np.bincount(np.concatenate([rows, cols]), minlength=n_dim)


def _graph(rows: Indices, cols: Indices, n_dim: int) -> sparse.csr_array:
    """Return the symmetric matrix of the edges, as 32-bit indices, which the graph routines want."""
    both = np.concatenate([rows, cols]).astype(np.int32), np.concatenate([cols, rows]).astype(np.int32)
    return sparse.coo_array((np.ones(len(both[0]), dtype=np.int8), both), shape=(n_dim, n_dim)).tocsr()


def _colour_rest(graph: sparse.csr_array) -> Indices:
    """Return the best colouring found: by components, and greedy star colourings in as many orders as there is time."""
    n_dim = graph.shape[0]
    if not graph.nnz:
        return np.zeros(n_dim, dtype=np.intp)
    best, degrees, work = _by_component(graph), np.diff(graph.indptr), max(graph.nnz // 2, n_dim)
    last = int(np.argmax(best))
    if best[last] <= 2 or degrees[last] == best[last] or work > _GREEDY_EDGES:  # a clique needs as many
        return best
    rcm = csgraph.reverse_cuthill_mckee(graph, symmetric_mode=True)
    orders = [rcm, np.argsort(-degrees, kind="stable"), np.arange(n_dim)][: max(_ALL_GREEDY_EDGES // work, 1)]
    flat = graph.indices.tolist()
    neighbours = [flat[a:b] for a, b in itertools.pairwise(graph.indptr.tolist())]
    return min([best, *(_star_colouring(neighbours, order.tolist()) for order in orders)], key=lambda c: int(c.max()))


def _by_component(graph: sparse.csr_array) -> Indices:
    """Colour the members of each connected component 0, 1, 2, ..."""
    n_components, labels = csgraph.connected_components(graph, directed=False)
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels, minlength=n_components)
    colours = np.empty(len(labels), dtype=np.intp)
    colours[order] = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return colours


def _star_colouring(neighbours: list[list[int]], order: list[int]) -> Indices:
    """Give each vertex in turn the first colour that closes no path of four vertices in two colours.

    Sets of colours are the bits of integers. A vertex is the centre of a star for each colour that two of its
    neighbours have: another neighbour of a leaf must not get the colour of the centre.
    """
    n_dim = len(neighbours)
    bits = [0] * n_dim  # the colour; 0 before there is one
    once, twice = [0] * n_dim, [0] * n_dim  # colours of one neighbour or more; of two or more
    centres = [0] * n_dim  # of the stars that the vertex is a leaf of
    for v in order:
        forbidden, doubled = 0, twice[v]
        for w in neighbours[v]:
            bit = bits[w]
            if bit:
                forbidden |= bit | centres[w]
                if bit & doubled:  # v becomes a centre: its leaves' other neighbours must differ from it
                    forbidden |= once[w]
        new = ~forbidden & (forbidden + 1)
        bits[v] = new
        for w in neighbours[v]:
            if bits[w] & doubled:
                centres[w] |= new
            if not once[w] & new:
                once[w] |= new
            elif twice[w] & new:
                centres[v] |= bits[w]
            else:
                twice[w] |= new
                if bits[w]:
                    for u in neighbours[w]:
                        if bits[u] == new:
                            centres[u] |= bits[w]
    return np.array([bit.bit_length() - 1 for bit in bits], dtype=np.intp)


#: Multiplies the mean of the Hessians at (n_draws, n_dim) with (n_directions, n_dim), along these alone.
Products = Callable[[Array, Array], Array]

#: Elements of a temporary: past the first, temporaries leave the cache; past the second, several fill the memory.
CACHED_ELEMENTS, _MOST_ELEMENTS = 2**16, AT_ONCE
#: Relative error of a product with a random vector that tells of a missing entry.
_TOLERANCE = 1e-6
#: An entry that is smaller than this, relative to the largest of its row and column, is a rounding error.
_ROUNDING = 1e-12


class ColouredHessian:
    """The mean Hessian at the entries of a pattern."""

    def __init__(self, pattern: Pattern, colouring: Colouring, products: Products) -> None:
        self.pattern, self.colouring, self._products = pattern, colouring, products

    @property
    def n_colours(self) -> int:
        """Products for one Hessian."""
        return self.colouring.n_colours

    def mean_values(self, theta: Array) -> Array:
        """Return the mean over draws at the entries of the pattern, (n_entries,)."""
        return self.colouring.recover(self._products(theta, self.colouring.directions()))

    @functools.cached_property
    def _entries(self) -> sparse.csr_array:
        """Where both triangles of the matrix find their values."""
        return self.pattern.symmetric(np.arange(self.pattern.n_entries))

    def times(self, values: Array, directions: Array) -> Array:
        """Multiply the symmetric matrix with these values with each direction, (n_directions, n_dim)."""
        entries = self._entries
        matrix = sparse.csr_array((values[entries.data], entries.indices, entries.indptr), shape=entries.shape)
        return np.ascontiguousarray((matrix @ directions.T).T)

    def diagonal(self, values: Array) -> Array:
        """Return the diagonal of the matrix with these values, (n_dim,)."""
        return values[~self.pattern.off_diagonal]

    # --- entries that the pattern lacks -------------------------------------------------------------------------------

    def inconsistent_rows(self, point: Array, rng: np.random.Generator) -> NDArray[np.intp]:
        """Return the rows in which the Hessian at one point does not give its product with a random vector.

        None where either is not finite: nothing is known then.
        """
        vector = rng.standard_normal((1, len(point)))
        values = self.mean_values(point[None])
        with np.errstate(all="ignore"):
            expected = self._products(point[None], vector)[0]
            error = np.abs(self.times(values, vector)[0] - expected)
            scale = np.maximum(self.times(np.abs(values), np.abs(vector))[0], np.abs(expected))
        if not np.all(np.isfinite(scale)):
            return np.empty(0, dtype=np.intp)
        # Rounding errors may come from terms that cancel in a row.
        return np.flatnonzero(error > _TOLERANCE * scale + _ROUNDING * scale.max(initial=0.0))

    def missing_entries(self, point: Array, rows: NDArray[np.intp], known: Pattern) -> Pattern | None:
        """Add the entries of some rows to those that are known; None where these are too many to look at."""
        if len(rows) * len(point) > HELD:
            return None
        wider = known.matrix.astype(np.int8)
        for part in slices(len(rows), max(_MOST_ELEMENTS // len(point), 1)):
            axes = np.zeros((part.stop - part.start, len(point)))
            axes[np.arange(len(axes)), rows[part]] = 1.0
            inside = sparse.coo_array(significant(self._products(point[None], axes)))
            shape = (len(point), len(point))
            wider = wider + sparse.coo_array((inside.data.astype(np.int8), (rows[part][inside.row], inside.col)), shape)
        return Pattern.of(wider)


def significant(rows: Array) -> NDArray[np.bool_]:
    """Tell which entries of rows of a matrix are more than rounding errors of the largest of the row."""
    size = np.abs(rows)
    return size > _ROUNDING * size.max(axis=1, keepdims=True, initial=0.0)


def batch(widest: int, n_directions: int) -> tuple[int, int]:
    """Return how many draws and directions to evaluate in one call, of which one has ``widest`` elements."""
    most = min(max(_MOST_ELEMENTS // max(widest, 1), 1), max(n_directions, 1))
    n_directions = -(-max(n_directions, 1) // -(-max(n_directions, 1) // most))  # parts of about the same size
    return int(np.clip(CACHED_ELEMENTS // (max(widest, 1) * n_directions), 1, 64)), n_directions


def slices(n: int, size: int) -> list[slice]:
    """Cut range(n) into slices of at most ``size``; at least one, so that no rows give an empty result."""
    return [slice(i, min(i + size, n)) for i in range(0, n, size)] or [slice(0, 0)]
