"""Mean Hessians with a known sparsity, from as few Hessian-vector products as the sparsity allows."""

import contextlib
import functools

from collections.abc import Callable, Iterator

import numpy as np

from pytensor.compile import Function
from pytensor.graph import Variable

from pymc_ngvi.core.messages import PatternWidened
from pymc_ngvi.core.pattern import DENSE, SMALLEST, Pattern
from pymc_ngvi.core.sizes import MOST_NUMBERS
from pymc_ngvi.core.sparsity import ColouredHessian, Colouring, Products, significant, slices
from pymc_ngvi.core.types import Array, Indices
from pymc_ngvi.density.flat import Functions
from pymc_ngvi.reading.predictors import DataSeen, HessianPattern, PatternSearch

#: Dimensions up to which a pattern is looked for in Hessians that count as dense.
_MOST_DENSE = 2_000


class SparseHessian:
    """The sparsity of the Hessian of a log density: found when first asked for, checked, and widened if need be."""

    def __init__(
        self,
        logp: Variable,
        theta: Variable,
        start: Array,
        varying: list[Variable],
        products: Products,
        error: Callable[[], Exception | None],
    ) -> None:
        self._logp, self._theta, self._start, self._varying = logp, theta, start, varying
        self._products, self._error = products, error
        self._data: DataSeen | None = None  # that the pattern was found with
        self._search: PatternSearch | None = None
        self._structure: HessianPattern | None = None
        self._found: tuple[ColouredHessian | None] | None = None
        # The last pattern that was coloured.
        self._last: tuple[Pattern, Colouring] | None = None
        self._rng = np.random.default_rng(0)
        self._n_calls = self.n_widened = 0
        #: Whether products have told that the Hessian is dense, or where it is not.
        self.looked = False

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: the compiled part is made again when it is needed."""
        return {**self.__dict__, "_search": None}

    @property
    def coloured(self) -> ColouredHessian | None:
        """The evaluation by coloured products; None where the Hessian counts as dense."""
        self._forget_old_data()
        if self._found is None:
            self._found = (self._find(),)
        return self._found[0]

    @property
    def pattern(self) -> Pattern | None:
        """Entries that can differ from 0; None where the Hessian counts as dense.

        It is found when it is first asked for, from the graph of log p. Where an operation is not understood, and
        would make all entries count, it is found by evaluating dense Hessians.
        """
        return None if self.coloured is None else self.coloured.pattern

    def _forget_old_data(self) -> None:
        # `pm.set_data` puts another array in the place of the old one.
        if self._data is not None and not self._data.are_current():
            self._data = self._structure = self._found = None
            self._n_calls, self.looked = 0, False

    def _by_graph(self) -> HessianPattern:
        if self._structure is None:
            self._data = DataSeen([self._logp], but=self._varying)
            if self._search is None:
                self._search = PatternSearch(self._logp, self._theta, self._varying)
            else:
                self._search.facts.refresh()
            self._structure = self._search.run()
        return self._structure

    @property
    def pattern_by_graph(self) -> Pattern | None:
        """The pattern as the graph tells it, whether coloured products pay for it or not."""
        self._forget_old_data()
        return self._by_graph().pattern

    def _find(self) -> ColouredHessian | None:
        n_dim = len(self._start)
        if n_dim < SMALLEST:
            return None
        structure = self._by_graph()
        coloured = self._coloured(structure.pattern)
        # A Hessian of one batch tells nothing of the others.
        look = coloured is None and structure.opaque and not self._varying and n_dim <= _MOST_DENSE
        if not look or self._error() is not None:
            return coloured
        self.looked = True
        return self._coloured(numerical_pattern(lambda point: self._products(point[None], np.eye(n_dim)), self._start))

    def _coloured(self, pattern: Pattern | None) -> ColouredHessian | None:
        """Return what evaluates a pattern; None where the matrix counts as dense: where half of the work is left."""
        if pattern is None or pattern.is_full:
            return None
        if self._last is None or not pattern.equals(self._last[0]):
            self._last = pattern, Colouring.of(pattern)
        colouring = self._last[1]
        few = 2 * colouring.n_colours <= pattern.n_dim and colouring.n_colours * pattern.n_dim <= MOST_NUMBERS
        return ColouredHessian(pattern, colouring, self._products) if few and self._error() is None else None

    def mean_values(self, theta: Array) -> Array:
        """Return the mean over draws at the entries of the pattern, (n_entries,)."""
        coloured = self.coloured
        if coloured is None:
            raise ValueError("The Hessian of this model counts as dense: it has no pattern.")
        self._n_calls += 1
        if len(theta) and self._n_calls & (self._n_calls - 1) == 0:
            point = theta[self._rng.integers(len(theta))]
            if len(coloured.inconsistent_rows(point, self._rng)) and self.widen(point[None]):
                raise PatternWidened(f"the Hessian has had entries that its pattern lacked {self.n_widened} times")
        return coloured.mean_values(theta)

    def widen(self, theta: Array) -> bool:
        """Add the entries that the pattern lacks at these points; tell whether there are any."""
        before = self.coloured
        if before is None:
            return False
        pattern: Pattern | None = before.pattern
        for point in theta:
            if pattern is not None:
                rows = before.inconsistent_rows(point, self._rng)
                pattern = before.missing_entries(point, rows, pattern) if len(rows) else pattern
        if pattern is not None and pattern.n_entries == before.pattern.n_entries:
            return False  # a rounding error
        self.n_widened += 1
        self._n_calls = 0  # check the next one
        self._found = (self._coloured(pattern),)
        return True


def numerical_pattern(hessian: Callable[[Array], Array], start: Array) -> Pattern | None:
    """Find a pattern where Hessians, (n_dim, n_dim), are not 0: at random points around a start.

    At the start itself, terms may vanish that don't elsewhere. None where no Hessian is finite.
    """
    rng = np.random.default_rng(0)
    found = None
    for sd in (0.5, 0.7, 1.0):
        matrix = hessian(start + sd * rng.standard_normal(len(start)))
        if np.all(np.isfinite(matrix)):
            found = significant(matrix) | (False if found is None else found)
            if np.mean(found) > DENSE:
                break
    return None if found is None else Pattern.of(found)


# --- means over draws of a Hessian by coordinates: at the entries of its pattern, or product by product ---


class CoordinateHessian:
    """Means over draws of the Hessian of a graph."""

    def __init__(self, functions: Functions, n_in_call: int) -> None:
        #: Directions in one call at one draw: they fill the cache, and what does not depend on them is done once.
        self._functions, self.n_in_call = functions, n_in_call

    @functools.cached_property
    def sparse(self) -> SparseHessian:
        """Its sparsity."""
        raise NotImplementedError

    def _function(self) -> Function:
        """Return what multiplies Hessians at draws with directions."""
        raise NotImplementedError

    def _draws_in_call(self, n_directions: int) -> int | None:
        """Return how many draws to evaluate in one call; None for one, a few directions at a time."""

    def mean_products(self, theta: Array, directions: Array) -> Array:
        """Return the mean over draws of the Hessian times each direction, (n_directions, n_dim)."""
        found = self._by_colours(theta, len(directions))
        if found is not None:
            return found[0].times(found[1], directions)
        return self.products_along(theta, directions)

    @np.errstate(all="ignore")
    def products_along(self, theta: Array, directions: Array) -> Array:
        """Return the same evaluated along each direction: no pattern is used."""
        total = np.zeros(directions.shape)
        for products in self._calls(theta, directions, self._draws_in_call(len(directions))):
            total += products.sum(axis=0)
        return total / len(theta)

    def mean_diagonal(self, theta: Array) -> Array:
        """Return the mean over draws of the diagonal, (n_dim,)."""
        n_dim = theta.shape[1]
        found = self._by_colours(theta, n_dim)
        if found is not None:
            return found[0].diagonal(found[1])
        total = np.zeros(n_dim)
        for point in theta:
            for at, axes in units(n_dim, self.n_in_call):
                total[at] += self.products_of_draws(point[None], axes)[0][np.arange(len(at)), at]
        return total / len(theta)

    def _by_colours(self, theta: Array, n_directions: int) -> tuple[ColouredHessian, Array] | None:
        """Return the mean Hessian at the entries of the pattern; None where that saves less than half of the work."""
        while (coloured := self.sparse.coloured) is not None and 2 * coloured.n_colours < n_directions:
            with contextlib.suppress(PatternWidened):
                return coloured, self.sparse.mean_values(theta)
        return None

    def _calls(self, theta: Array, directions: Array, n_draws: int | None) -> Iterator[Array]:
        """Multiply the Hessians at some draws after the others with each direction."""
        blocks = slices(len(directions), self.n_in_call if n_draws is None else len(directions) or 1)
        for rows in slices(len(theta), n_draws or 1):
            parts = [self.products_of_draws(theta[rows], directions[block]) for block in blocks]
            yield parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def products_of_draws(self, theta: Array, directions: Array) -> Array:
        """Multiply the Hessians at draws with directions in one call, (n_draws, n_directions, n_dim)."""
        function = self._function()
        with np.errstate(all="ignore"):  # far from the mode, densities overflow: the caller sees what is not finite
            filled_up = [self._functions.filled_up(np.ascontiguousarray(x)) for x in (theta, directions)]
            return np.asarray(function(*filled_up))[: len(theta), : len(directions)]


def units(n: int, n_in_call: int) -> Iterator[tuple[Indices, Array]]:
    """Go through the unit vectors of n dimensions, a block at a time, with their indices."""
    for rows in slices(n, n_in_call):
        at = np.arange(rows.start, rows.stop)
        block = np.zeros((len(at), n))
        block[at - rows.start, at] = 1.0
        yield at, block
