"""The mean Hessian at the entries of a pattern, from one product for each colour."""

import functools

from collections.abc import Callable

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sparsity.colouring import Colouring
from pymc_ngvi.core.values import Array

#: Multiplies the Hessians at (n_draws, n_dim) with (n_directions, n_dim): (n_draws, n_directions, n_dim).
Products = Callable[[Array, Array], Array]

#: Elements of a temporary: past the first, temporaries leave the cache; past the second, several fill the memory.
CACHED_ELEMENTS, _MOST_ELEMENTS = 2**16, 2**22
#: Relative error of a product with a random vector that tells of a missing entry.
_TOLERANCE = 1e-6
#: An entry that is smaller than this, relative to the largest of its row and column, is a rounding error.
_ROUNDING = 1e-12
#: Elements of all rows in which missing entries are looked for.
_MOST_SEARCHED = 25_000_000


class ColouredHessian:
    """The mean Hessian at the entries of a pattern."""

    def __init__(self, pattern: Pattern, colouring: Colouring, products: Products, widest: int) -> None:
        self.pattern, self.colouring = pattern, colouring
        self._products, self._widest = products, widest

    @property
    def n_colours(self) -> int:
        """Products for one Hessian."""
        return self.colouring.n_colours

    def mean_values(self, theta: Array) -> Array:
        """Return the mean over draws at the entries of the pattern, (n_entries,)."""
        return self.colouring.recover(self.mean_products(theta, self.colouring.directions()))

    def mean_products(self, theta: Array, directions: Array) -> Array:
        """Return the mean over draws of the Hessian times each direction, evaluated along it: no pattern is used."""
        n_draws, n_directions = batch(self._widest, len(directions))
        total = np.zeros((len(directions), theta.shape[1]))
        for rows in slices(len(theta), n_draws):
            for part in slices(len(directions), n_directions):
                products = self._products(theta[rows], directions[part])
                with np.errstate(all="ignore"):
                    total[part] += products.sum(axis=0)
        return total / len(theta)

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
            expected = self.mean_products(point[None], vector)[0]
            error = np.abs(self.times(values, vector)[0] - expected)
            scale = np.maximum(self.times(np.abs(values), np.abs(vector))[0], np.abs(expected))
        if not np.all(np.isfinite(scale)):
            return np.empty(0, dtype=np.intp)
        # Rounding errors may come from terms that cancel in a row.
        return np.flatnonzero(error > _TOLERANCE * scale + _ROUNDING * scale.max(initial=0.0))

    def missing_entries(self, point: Array, rows: NDArray[np.intp], known: Pattern) -> Pattern | None:
        """Add the entries of some rows to those that are known; None where these are too many to look at."""
        if len(rows) * len(point) > _MOST_SEARCHED:
            return None
        wider = known.matrix.astype(np.int8)
        for part in slices(len(rows), max(_MOST_ELEMENTS // len(point), 1)):
            axes = np.zeros((part.stop - part.start, len(point)))
            axes[np.arange(len(axes)), rows[part]] = 1.0
            found = significant(self.mean_products(point[None], axes))
            inside = sparse.coo_array(found)
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
