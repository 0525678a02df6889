"""Second derivatives of a log density from its graph: products, means, and what a known sparsity saves of them."""

import functools

from collections.abc import Callable

import numpy as np

from pytensor.compile import Function
from pytensor.graph.basic import Variable

from pymc_ngvi.core.messages import PatternWidened, RowHessianGivenUp, RowsGivenUp
from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.sparsity import batch
from pymc_ngvi.core.types import Array, Later, MeanHessian, Target
from pymc_ngvi.density.by_rows import ByRows
from pymc_ngvi.density.flat import FlatGraphs, Functions, jets_of
from pymc_ngvi.density.gauss_newton import GaussNewtonGraphs, GaussNewtonMatrix
from pymc_ngvi.density.sparse_hessian import CoordinateHessian, SparseHessian
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.loops import draws_in_call
from pymc_ngvi.ops.jets import Jets
from pymc_ngvi.rows.linear_map import entries_of
from pymc_ngvi.rows.row_hessian import PredictorMeanHessian

# --- second derivatives of a log density from its graph: products, means, and what a known sparsity saves of them ---

#: Draws that one call should take of a small dense Hessian.
_LEAST_BATCH = 4


class SecondOrder(CoordinateHessian):
    """Second derivatives of a log density. Nothing is built before something is asked for."""

    def __init__(
        self,
        graphs: FlatGraphs,
        functions: Functions,
        start: Array,
    ) -> None:
        self._widest = graphs.cost.widest
        parts = GaussNewtonGraphs(graphs, functions, start, self._widest)
        super().__init__(functions, parts.n_in_call)
        self.gauss_newton, self._graphs = GaussNewtonMatrix(parts), graphs
        self.n_dim = len(start)
        self.sparse = SparseHessian(
            graphs.logp,
            graphs.theta,
            start,
            graphs.minibatches.rows,
            self.products_along,
            self.error,
        )

    @property
    def _jets(self) -> Jets | None:
        return jets_of(self._graphs, self._functions)

    def error(self) -> graph.MissingDerivativeError | None:
        """Return the error that names the operation without a second derivative, if there is one."""
        return None if self._jets is not None else self._no_hessian

    @functools.cached_property
    def _no_hessian(self) -> graph.MissingDerivativeError | None:
        with self._functions.timed():
            try:
                self._product  # noqa: B018 (made once)
            except graph.MissingDerivativeError as error:
                return error.with_traceback(None)
        return None

    @functools.cached_property
    def _product(self) -> tuple[Variable, Variable]:
        """A direction, and the graph of the Hessian times it."""
        direction = self._graphs.theta.type("direction")
        with without_c():
            simplify = graph.simplify_little if self._graphs.is_large else self._graphs.simplify
            [product] = simplify([graph.hessian_product(self._graphs.grad, self._graphs.theta, direction)])
        return direction, product

    @property
    def n_products(self) -> int:
        """Products that one Hessian takes by coordinates: one for each, or for each colour of the pattern."""
        coloured = self.sparse.coloured
        return self.n_dim if coloured is None else coloured.n_colours

    def at_draws(self, theta: Array, directions: Array) -> Array:
        """Multiply the Hessian at each draw with each direction, (n_draws, n_directions, n_dim)."""
        n_draws = None if self._jets is None else self._batch(len(directions))[0]
        return np.concatenate(list(self._calls(theta, directions, n_draws)))

    # --- by coordinates ---

    def _draws_in_call(self, n_directions: int) -> int | None:
        n_draws, together = self._batch(n_directions)
        # A call takes many draws where it would take longer than the work for one.
        takes_draws = (
            self.sparse.looked  # or this asks for what is being looked for
            or self.sparse.coloured is not None
            or self._jets is not None
            or self._batch(self.n_dim)[0] >= _LEAST_BATCH
        )
        return n_draws if together == n_directions and takes_draws else None

    def mean_products_of_each(self, draws: list[Array], directions: Array) -> list[Array] | None:
        """Return `mean_products` over each set of draws, in few calls; None where sparsity saves more than that."""
        n_draws = self._draws_in_call(len(directions))
        if self.sparse.coloured is not None or n_draws is None:
            return None
        products = np.concatenate(list(self._calls(np.concatenate(draws), directions, n_draws)))
        ends = np.cumsum([len(part) for part in draws])
        return [part.mean(axis=0) for part in np.split(products, ends[:-1])]

    def _batch(self, n_directions: int) -> tuple[int, int]:
        """Return how many draws and directions to evaluate in one call."""
        n_draws, n_directions = batch(self._widest, n_directions)
        if self._graphs.shares_calls:
            n_draws = max(n_draws, draws_in_call(self._widest * n_directions))
        return n_draws, n_directions

    def mean_diagonal(self, theta: Array) -> Array:
        """Return the mean over draws of the diagonal, (n_dim,)."""
        if self._jets is not None:
            return self.mean_products(theta, np.eye(self.n_dim)).diagonal().copy()
        return super().mean_diagonal(theta)

    def products_of_draws(self, theta: Array, directions: Array) -> Array:
        """Multiply the Hessians at draws with directions in one call, (n_draws, n_directions, n_dim)."""
        jets = self._jets
        if jets is not None:
            with np.errstate(all="ignore"):
                return np.asarray(np.matmul(directions, jets.hessians(theta)))
        return super().products_of_draws(theta, directions)

    def _function(self) -> Function:
        return self._functions.once("products", self._compile_products)

    def _compile_products(self) -> Function:
        direction, product = self._product
        with without_c():
            draws, directions, batched = graph.over_draws_and_directions(product, self._graphs.theta, direction)
        return self._functions.compile([draws, directions], batched)


# --- mean Hessians of a model's log density: from its graph, by rows, and from its graph at the entries of rows ---


class Together:
    """Products of the mean Hessians over several sets of draws, evaluated for all sets when they are for the first."""

    def __init__(self, second: SecondOrder, draws: list[Array]) -> None:
        self._second, self._draws = second, draws
        self._directions: Array | None = None
        self._found: list[Array] | None = None

    def products(self, k: int, directions: Array) -> Array | None:
        """Return those of the mean over one set; None for other directions, or where one set at a time is faster."""
        if self._directions is None:
            self._directions = directions.copy()
            self._found = self._second.mean_products_of_each(self._draws, directions)
        if self._found is None or not np.array_equal(directions, self._directions):
            return None
        return self._found[k]


class ModelHessian(MeanHessian):
    """The mean over draws of the Hessian of a model's log density.

    It counts as one evaluation at each of its draws, in however many calls.
    """

    def __init__(
        self,
        counter: Target,
        second: SecondOrder,
        theta: Array,
        together: Callable[[Array], Array | None] = lambda directions: None,
    ) -> None:
        self._counter, self._second, self._theta, self._together = counter, second, theta, together
        self._counted = False

    @property
    def pattern(self) -> Pattern | None:
        """Entries that can differ from 0; None where the matrix counts as dense."""
        return self._second.sparse.pattern

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        self._count()
        found = self._together(directions)
        return self._second.mean_products(self._theta, directions) if found is None else found

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,).

        It takes a product for each coordinate, or for each colour of `pattern`; there is never a matrix of all of them.
        """
        self._count()
        return self._second.mean_diagonal(self._theta)

    def values(self) -> Array:
        """Return the entries of `pattern`, (n_entries,): the lower triangle, in the order of the pattern.

        It takes one product for each of a few sums of columns, whose entries don't overlap.
        """
        values = self._second.sparse.mean_values(self._theta)
        self._count()
        return values

    def _count(self) -> None:
        if not self._counted:
            self._counter.n_hessians += len(self._theta)
            self._counted = True


class PatternedHessian(Later):
    """The mean over draws of a Hessian that is not evaluated by rows, at the entries that rows tell of."""

    def __init__(self, by_rows: ByRows, whole: MeanHessian, n_dim: int) -> None:
        super().__init__(None, lambda: whole)
        self._by_rows, self._whole, self._n_dim = by_rows, whole, n_dim

    @property
    def pattern(self) -> Pattern | None:
        """Entries that can differ from 0; None where the matrix counts as dense."""
        return self._by_rows.pattern if self._by_rows.gives_pattern else self._whole.pattern

    def values(self) -> Array:
        """Return the entries of `pattern`, (n_entries,)."""
        pattern = self.pattern
        if pattern is None or not self._by_rows.gives_pattern:
            return self._whole.values()
        if self._whole.pattern is None:
            return self._whole.products(np.eye(self._n_dim))[pattern.rows, pattern.cols]
        try:
            values = self._whole.values()
        except PatternWidened as widened:
            self._by_rows.give_up(why := "the Hessian has entries that rows tell nothing of")
            raise RowsGivenUp(why) from widened
        own = self._whole.pattern
        return values if own.equals(pattern) else entries_of(own.symmetric(values), pattern)


class RowsHessian(Later):
    """The mean over draws of the Hessian of a sum over rows.

    Where it turns out not to be that of log p, the Hessian of its graph is evaluated in its place; entries of the
    pattern, which that does not give, raise then.
    """

    def __init__(self, counter: Target, by_rows: ByRows, theta: Array, otherwise: Callable[[], MeanHessian]) -> None:
        super().__init__(None, self._evaluated)
        self._counter, self._by_rows, self._theta, self._otherwise = counter, by_rows, theta, otherwise

    @property
    def pattern(self) -> Pattern | None:
        """Entries that can differ from 0; None where the matrix counts as dense."""
        return self._otherwise().pattern if self._by_rows.found is None else self._by_rows.pattern

    def _evaluated(self) -> MeanHessian:
        found = self._by_rows.evaluated(self._theta)
        if found is None:
            return self._otherwise()
        self._counter.n_hessians += len(self._theta)
        return found

    def values(self) -> Array:
        """Return the entries of `pattern`, (n_entries,)."""
        return MeanHessian.values(self) if self.pattern is None else self._of_rows.values()

    @property
    def summed(self) -> SummedPattern | None:
        """Entries that can differ from 0 beside sums over many coordinates; None where there are no such sums."""
        return self._by_rows.summed

    def summed_values(self) -> Array:
        """Return the entries of `summed`, by coordinates and sums; raise as `values` does."""
        return super().summed_values() if self.summed is None else self._of_rows.summed_values()

    @property
    def _of_rows(self) -> PredictorMeanHessian:
        if not isinstance(self._known, PredictorMeanHessian):
            if self._by_rows.found is None:
                raise RowsGivenUp("the rows are not all of log p")
            raise RowHessianGivenUp("second derivatives of rows are not those of log p")
        return self._known
