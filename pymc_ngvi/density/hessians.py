"""Second derivatives of a log density: from its graph, from as few products as its sparsity allows, and by rows."""

import contextlib
import functools

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pytensor.compile import Function
from pytensor.graph.basic import Variable

from pymc_ngvi.core.messages import OtherForm, PatternWidened, RowsGivenUp
from pymc_ngvi.core.pattern import DENSE, SMALLEST, Pattern, SummedPattern
from pymc_ngvi.core.sizes import MOST_NUMBERS
from pymc_ngvi.core.sparsity import CACHED_ELEMENTS, ColouredHessian, Colouring, batch, significant, slices
from pymc_ngvi.core.types import Array, Indices, Later, MeanHessian, Target
from pymc_ngvi.density.by_rows import ByRows
from pymc_ngvi.density.flat import FlatGraphs, Functions, jets_of
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.loops import draws_in_call
from pymc_ngvi.ops.jets import Jets
from pymc_ngvi.reading.predictors import DataSeen, PatternSearch
from pymc_ngvi.rows.linear_map import entries_of
from pymc_ngvi.rows.row_hessian import PredictorMeanHessian

# --- second derivatives of a function of the flat vector from its graph: products, means, and its sparsity ---

#: Draws that one call should take of a small dense Hessian.
_LEAST_BATCH = 4
#: Dimensions up to which a pattern is looked for in Hessians that count as dense.
_MOST_DENSE = 2_000


class GraphHessian:
    """Second derivatives of log p, or of a part of it, and their sparsity: found, checked, and widened if need be.

    Nothing is built before something is asked for.
    """

    def __init__(self, f: Variable, graphs: FlatGraphs, functions: Functions, start: Array) -> None:
        self._f, self._graphs, self._functions, self._start = f, graphs, functions, start
        self._widest = graphs.cost.widest
        #: Directions in one call at one draw: they fill the cache, and what does not depend on them is done once.
        self.n_in_call = max(2 * CACHED_ELEMENTS // max(self._widest, 1), 16)
        self._data: DataSeen | None = None  # that the pattern was found with
        self._search: PatternSearch | None = None
        self._structure: tuple[Pattern | None, list[str]] | None = None
        self._found: tuple[ColouredHessian | None] | None = None
        # The last pattern that was coloured.
        self._last: tuple[Pattern, Colouring] | None = None
        self._rng = np.random.default_rng(0)
        self._n_calls = self.n_widened = 0
        #: Whether products have told that the Hessian is dense, or where it is not.
        self._looked = False

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: the compiled part is made again when it is needed."""
        return {**self.__dict__, "_search": None}

    # --- its graph ---

    @property
    def _jets(self) -> Jets | None:
        return jets_of(self._graphs, self._functions) if self._f is self._graphs.logp else None

    @functools.cached_property
    def _product(self) -> tuple[Variable, Variable]:
        """A direction, and the graph of the Hessian times it."""
        graphs = self._graphs
        direction = graphs.theta.type("direction")
        with without_c():
            grad = graphs.grad
            if self._f is not graphs.logp:
                [grad] = graphs.simplify([graph.gradient(self._f, graphs.theta)])
            simplify = graph.simplify_little if graphs.is_large else graphs.simplify
            [product] = simplify([graph.hessian_product(grad, graphs.theta, direction)])
        return direction, product

    @functools.cached_property
    def _no_hessian(self) -> graph.MissingDerivativeError | None:
        with self._functions.timed():
            try:
                self._product  # noqa: B018 (made once)
            except graph.MissingDerivativeError as error:
                return error.with_traceback(None)
        return None

    def error(self) -> graph.MissingDerivativeError | None:
        """Return the error that names the operation without a second derivative, if there is one."""
        return None if self._jets is not None else self._no_hessian

    def compiled(self) -> Function:
        """Compile what multiplies Hessians at draws with directions."""
        direction, product = self._product
        with without_c():
            draws, directions, batched = graph.over_draws_and_directions(product, self._graphs.theta, direction)
        return self._functions.compile([draws, directions], batched)

    # --- products ---

    def _products(self, theta: Array, directions: Array) -> Array:
        """Multiply the Hessians at draws with directions in one call, (n_draws, n_directions, n_dim)."""
        with np.errstate(all="ignore"):  # far from the mode, densities overflow: the caller sees what is not finite
            if (jets := self._jets) is not None:
                return np.asarray(np.matmul(directions, jets(theta, 2)[2]))
            name = "products" if self._f is self._graphs.logp else "products of a part"
            function = self._functions.once(name, self.compiled)
            filled_up = [self._functions.filled_up(np.ascontiguousarray(x)) for x in (theta, directions)]
            return np.asarray(function(*filled_up))[: len(theta), : len(directions)]

    def _calls(self, theta: Array, directions: Array, n_draws: int | None) -> Iterator[Array]:
        """Multiply the Hessians at some draws after the others with each direction."""
        blocks = slices(len(directions), self.n_in_call if n_draws is None else len(directions) or 1)
        for rows in slices(len(theta), n_draws or 1):
            parts = [self._products(theta[rows], directions[block]) for block in blocks]
            yield parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _batch(self, n_directions: int) -> tuple[int, int]:
        """Return how many draws and directions to evaluate in one call."""
        n_draws, n_directions = batch(self._widest, n_directions)
        if self._graphs.shares_calls:
            n_draws = max(n_draws, draws_in_call(self._widest * n_directions))
        return n_draws, n_directions

    def _draws_in_call(self, n_directions: int) -> int | None:
        """Return how many draws to evaluate in one call; None for one, a few directions at a time."""
        n_draws, together = self._batch(n_directions)
        # A call takes many draws where it would take longer than the work for one.
        takes_draws = (
            self._looked  # or this asks for what is being looked for
            or self.coloured is not None
            or self._jets is not None
            or self._batch(len(self._start))[0] >= _LEAST_BATCH
        )
        return n_draws if together == n_directions and takes_draws else None

    def at_draws(self, theta: Array, directions: Array) -> Array:
        """Multiply the Hessian at each draw with each direction, (n_draws, n_directions, n_dim)."""
        n_draws = None if self._jets is None else self._batch(len(directions))[0]
        return np.concatenate(list(self._calls(theta, directions, n_draws)))

    @np.errstate(all="ignore")
    def _along(self, theta: Array, directions: Array) -> Array:
        """Return the mean over draws of the Hessian times each direction: no pattern is used."""
        total = np.zeros(directions.shape)
        for products in self._calls(theta, directions, self._draws_in_call(len(directions))):
            total += products.sum(axis=0)
        return total / len(theta)

    def mean_products(self, theta: Array, directions: Array) -> Array:
        """Return the mean over draws of the Hessian times each direction, (n_directions, n_dim)."""
        found = self._by_colours(theta, len(directions))
        return self._along(theta, directions) if found is None else found[0].times(found[1], directions)

    def mean_products_of_each(self, draws: Sequence[Array], directions: Array) -> list[Array]:
        """Return `mean_products` over each set of draws, in few calls where sparsity saves no more than that."""
        n_draws = self._draws_in_call(len(directions))
        if self.coloured is not None or n_draws is None or len(draws) == 1:
            return [self.mean_products(theta, directions) for theta in draws]
        products = np.concatenate(list(self._calls(np.concatenate(draws), directions, n_draws)))
        ends = np.cumsum([len(part) for part in draws])
        return [part.mean(axis=0) for part in np.split(products, ends[:-1])]

    def mean_diagonal(self, theta: Array) -> Array:
        """Return the mean over draws of the diagonal, (n_dim,)."""
        n_dim = theta.shape[1]
        if self._jets is not None:
            return self.mean_products(theta, np.eye(n_dim)).diagonal().copy()
        found = self._by_colours(theta, n_dim)
        if found is not None:
            return found[0].diagonal(found[1])
        total = np.zeros(n_dim)
        for point in theta:
            for at, axes in units(n_dim, self.n_in_call):
                total[at] += self._products(point[None], axes)[0][np.arange(len(at)), at]
        return total / len(theta)

    def _by_colours(self, theta: Array, n_directions: int) -> tuple[ColouredHessian, Array] | None:
        """Return the mean Hessian at the entries of the pattern; None where that saves less than half of the work."""
        while (coloured := self.coloured) is not None and 2 * coloured.n_colours < n_directions:
            with contextlib.suppress(PatternWidened):
                return coloured, self.mean_values(theta)
        return None

    # --- sparsity ---

    @property
    def coloured(self) -> ColouredHessian | None:
        """The evaluation by coloured products; None where the Hessian counts as dense."""
        self._forget_old_data()
        if self._found is None:
            self._found = (self._find(),)
        return self._found[0]

    @property
    def n_products(self) -> int:
        """Products that one Hessian takes: one for each coordinate, or for each colour of the pattern."""
        return len(self._start) if self.coloured is None else self.coloured.n_colours

    @property
    def pattern(self) -> Pattern | None:
        """Entries that can differ from 0; None where the Hessian counts as dense.

        It is found when it is first asked for, from the graph of log p. Where an operation is not understood, and
        would make all entries count, it is found by evaluating dense Hessians.
        """
        return None if self.coloured is None else self.coloured.pattern

    @property
    def pattern_by_graph(self) -> Pattern | None:
        """The pattern as the graph tells it, whether coloured products pay for it or not."""
        return self._by_graph()[0]

    def _forget_old_data(self) -> None:
        # `pm.set_data` puts another array in the place of the old one.
        if self._data is not None and not self._data.are_current():
            self._data = self._structure = self._found = None
            self._n_calls, self._looked = 0, False

    def _by_graph(self) -> tuple[Pattern | None, list[str]]:
        """Return the pattern as the graph tells it, and operations that were not understood."""
        self._forget_old_data()
        if self._structure is None:
            varying = self._graphs.minibatches.rows
            self._data = DataSeen([self._f], but=varying)
            if self._search is None:
                self._search = PatternSearch(self._f, self._graphs.theta, varying)
            else:
                self._search.facts.refresh()
            self._structure = self._search.run()
        return self._structure

    def _find(self) -> ColouredHessian | None:
        n_dim = len(self._start)
        if n_dim < SMALLEST:
            return None
        pattern, opaque = self._by_graph()
        coloured = self._coloured(pattern)
        # A Hessian of one batch tells nothing of the others.
        look = coloured is None and opaque and not self._graphs.minibatches and n_dim <= _MOST_DENSE
        if not look or self.error() is not None:
            return coloured
        self._looked = True
        return self._coloured(numerical_pattern(lambda point: self._along(point[None], np.eye(n_dim)), self._start))

    def _coloured(self, pattern: Pattern | None) -> ColouredHessian | None:
        """Return what evaluates a pattern; None where the matrix counts as dense: where half of the work is left."""
        if pattern is None or pattern.is_full:
            return None
        if self._last is None or not pattern.equals(self._last[0]):
            self._last = pattern, Colouring.of(pattern)
        colouring = self._last[1]
        few = 2 * colouring.n_colours <= pattern.n_dim and colouring.n_colours * pattern.n_dim <= MOST_NUMBERS
        return ColouredHessian(pattern, colouring, self._along) if few and self.error() is None else None

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


def units(n: int, n_in_call: int) -> Iterator[tuple[Indices, Array]]:
    """Go through the unit vectors of n dimensions, a block at a time, with their indices."""
    for rows in slices(n, n_in_call):
        at = np.arange(rows.start, rows.stop)
        block = np.zeros((len(at), n))
        block[at - rows.start, at] = 1.0
        yield at, block


# --- mean Hessians of a model's log density: from its graph, by rows, and from its graph at the entries of rows ---


class ModelHessian(MeanHessian):
    """The mean over draws of a Hessian that is found from a graph.

    It counts as one evaluation at each of its draws, in however many calls. Products of the means over several sets of
    draws, the k-th of which this is, are found together.
    """

    def __init__(
        self,
        counter: Target,
        second: GraphHessian,
        draws: Sequence[Array],
        k: int = 0,
        found: dict[bytes, list[Array]] | None = None,
    ) -> None:
        self._counter, self._second, self._draws, self._k = counter, second, draws, k
        self._found: dict[bytes, list[Array]] = {} if found is None else found
        self._counted = False

    @property
    def pattern(self) -> Pattern | None:
        """Entries that can differ from 0; None where the matrix counts as dense."""
        return self._second.pattern

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        self._count()
        if len(self._draws) == 1:
            return self._second.mean_products(self._draws[0], directions)
        key = directions.tobytes()
        if key not in self._found:
            self._found[key] = self._second.mean_products_of_each(self._draws, directions)
        return self._found[key][self._k]

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,).

        It takes a product for each coordinate, or for each colour of `pattern`; there is never a matrix of all of them.
        """
        self._count()
        return self._second.mean_diagonal(self._draws[self._k])

    def values(self) -> Array:
        """Return the entries of `pattern`, (n_entries,): the lower triangle, in the order of the pattern.

        It takes one product for each of a few sums of columns, whose entries don't overlap.
        """
        values = self._second.mean_values(self._draws[self._k])
        self._count()
        return values

    def _count(self) -> None:
        if not self._counted:
            self._counter.n_hessians += len(self._draws[self._k])
            self._counted = True


class RowsHessian(Later):
    """The mean over draws of the Hessian of a sum over rows: by these, or from a graph, at entries that they tell of.

    Where rows turn out not to be all of log p, values of the pattern raise.
    """

    def __init__(self, counter: Target, by_rows: ByRows, theta: Array, whole: MeanHessian) -> None:
        super().__init__(None, self._evaluated)
        self._counter, self._by_rows, self._theta, self._whole = counter, by_rows, theta, whole

    @property
    def pattern(self) -> Pattern | None:
        """Entries that can differ from 0; None where the matrix counts as dense."""
        return self._by_rows.pattern if self._by_rows.gives_pattern else self._whole.pattern

    def _evaluated(self) -> MeanHessian:
        found = self._by_rows.evaluated(self._theta) if self._by_rows.gives_hessians else None
        if found is None:
            return self._whole
        self._counter.n_hessians += len(self._theta)
        return found

    def values(self) -> Array:
        """Return the entries of `pattern`, (n_entries,)."""
        known = self._known
        if not self._by_rows.gives_pattern:
            raise RowsGivenUp("the rows are not all of log p")
        pattern, own = self._by_rows.pattern, known.pattern
        if pattern is None or isinstance(known, PredictorMeanHessian):
            return known.values()
        if own is None:
            return known.products(np.eye(pattern.n_dim))[pattern.rows, pattern.cols]
        try:
            values = known.values()
        except PatternWidened as widened:
            self._by_rows.give_up(why := "the Hessian has entries that rows tell nothing of")
            raise RowsGivenUp(why) from widened
        return values if own.equals(pattern) else entries_of(own.symmetric(values), pattern)

    @property
    def summed(self) -> SummedPattern | None:
        """Entries that can differ from 0 beside sums over many coordinates; None where there are no such sums."""
        return self._by_rows.summed

    def summed_values(self) -> Array:
        """Return the entries of `summed`, by coordinates and sums; raise where rows do not give them."""
        if self.summed is not None and not isinstance(self._known, PredictorMeanHessian):
            raise OtherForm("second derivatives of rows are not those of log p")
        return self._known.summed_values()
