"""Second derivatives of a log density from its graph: products, means, and what a known sparsity saves of them."""

import dataclasses
import functools
import logging

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor.tensor as pt

from pytensor.compile import Function
from pytensor.graph.basic import Variable
from scipy import sparse

from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.refusal import NotApart, PatternLacks, PatternWidened, RowHessianGivenUp, RowsGivenUp
from pymc_ngvi.core.sizes import HELD
from pymc_ngvi.core.sparsity.coloured import ColouredHessian, batch, slices
from pymc_ngvi.core.types import Array, Later, MeanHessian, Target
from pymc_ngvi.density.by_rows import ByRows
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.density.flat import FlatGraphs, Functions, jets_of
from pymc_ngvi.density.gauss_newton.matrix import GaussNewtonGraphs, GaussNewtonMatrix
from pymc_ngvi.density.info import LikelihoodRows
from pymc_ngvi.density.sparse_hessian import CoordinateHessian, SparseHessian, colour
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.jets import Jets
from pymc_ngvi.graphs.loops import draws_in_call
from pymc_ngvi.ops import cost
from pymc_ngvi.reading.affine import PatternSearch
from pymc_ngvi.reading.found import Compile
from pymc_ngvi.rows.linear_map import LinearMap, entries_of
from pymc_ngvi.rows.row_hessian import FEW_PREDICTORS, Known, PredictorMeanHessian, RowHessian, curvature_agrees

# --- mean Hessians by predictors of a log density that is, in part, a sum over rows ---
# Rows are differentiated elementwise. What else there is, a function of the same predictors, takes products with sums
# of columns that don't overlap; it has no part in what rows cost.

type Simplify = Callable[[list[Variable]], list[Variable]]


class PredictorHessian:
    """Mean Hessians of a log density by its linear predictors: elementwise for rows, by products for the rest."""

    def __init__(self, parts: Expectations, simplify: Simplify, compile_: Compile) -> None:
        self._parts, self._simplify, self._compile = parts, simplify, compile_
        self._take()

    def _take(self) -> None:
        self._terms, eta = self._parts.terms, self._parts.predictors.vector
        rows = [part for part in self._terms.rows if part.index.shape[1] <= FEW_PREDICTORS and not part.is_whole]
        rest = [*self._terms.rest, *[part.of(eta) for part in self._terms.rows if part not in rows]]
        self._rest = RestHessian(rest, eta, self._simplify, self._compile) if rest else None
        self._rows = RowHessian(self._parts.linear_map, [self._parts.engine.second_derivatives(part) for part in rows])
        self._most = max((part.index.shape[1] for part in rows), default=0)

    def products_of(self, estimated: cost.Cost) -> float:
        """Return how many products with the Hessian of log p, given what that costs, take as long as one Hessian."""
        if self._rest is None:
            return self._most
        return self._most + self._rest.n_colours * min(self._rest.cost.quick_seconds / estimated.quick_seconds, 1.0)

    @property
    def linear_map(self) -> LinearMap:
        """The predictors as functions of theta."""
        self._refresh()
        return self._parts.linear_map

    def mean(self, theta: Array) -> sparse.csr_array:
        """Return the mean Hessian with respect to the predictors over draws, (n_draws, n_dim)."""
        self._refresh()
        rows = self._rows.mean(theta)
        return rows if self._rest is None else rows + self._rest.mean(self._parts.linear_map, theta)

    def _refresh(self) -> None:
        """Take the data as they are now."""
        self._parts.refresh()
        if self._parts.terms is not self._terms:
            self._take()


class RestHessian:
    """Mean Hessians of what is no sum over rows, by predictors."""

    def __init__(self, parts: list[Variable], predictors: Variable, simplify: Simplify, compile_: Compile) -> None:
        with without_c():
            [rest] = simplify([functools.reduce(pt.add, parts)])
            pattern = PatternSearch(rest, predictors).run().pattern
            colouring = colour(pattern)  # before anything is compiled
            if pattern is None or colouring is None:
                raise NotApart("predictors interact with too many others")
            [grad] = simplify([graph.gradient(rest, predictors)])
            direction = predictors.type("direction")
            [product] = simplify([graph.hessian_product(grad, predictors, direction)])
            draws, directions, along = graph.over_draws_and_directions(product, predictors, direction)
        self._function = compile_([draws, directions], along)
        self.cost, self.n_colours = cost.estimate([rest, grad]), colouring.n_colours
        self._coloured = ColouredHessian(pattern, colouring, self._products, self.cost.widest)

    def _products(self, points: Array, directions: Array) -> Array:
        with np.errstate(all="ignore"):  # densities overflow far from the mode: the caller sees what is not finite
            return np.asarray(self._function(np.ascontiguousarray(points), np.ascontiguousarray(directions)))

    def mean(self, linear: LinearMap, theta: Array) -> sparse.csr_array:
        """Return the mean over draws, (n_draws, n_dim)."""
        total = np.zeros(self._coloured.pattern.n_entries)
        for rows in slices(len(theta), max(1, HELD // len(linear.offset))):
            total += len(theta[rows]) * self._coloured.mean_values(linear(theta[rows]))
        return self._coloured.pattern.symmetric(total / len(theta))


def predictor_hessian(parts: Expectations | None, simplify: Simplify, compile_: Compile) -> PredictorHessian | None:
    """Return a `PredictorHessian` with arguments as it has; None where log p does not come apart."""
    if parts is None:
        return None
    try:
        return PredictorHessian(parts, simplify, compile_)
    except (NotApart, graph.MissingDerivativeError):
        return None


# --- second derivatives of a log density from its graph: products, means, and what a known sparsity saves of them ---

#: Draws that one call should take of a small dense Hessian.
_LEAST_BATCH = 4
#: Products of a Hessian in gradients, and the seconds of one from which on it may be worth looking for predictors; on
#: minibatches, each of which has predictors of its own.
_PRODUCT, _WORTH, _WORTH_ANEW = 0.4, 2e-3, 5e-3
#: How many products by coordinates one by predictors has to save.
_FEWER = 2

logger = logging.getLogger("pymc.ngvi")


class SecondOrder(CoordinateHessian):
    """Second derivatives of a log density. Nothing is built before something is asked for."""

    def __init__(
        self,
        graphs: FlatGraphs,
        functions: Functions,
        rows: LikelihoodRows,
        start: Array,
        by_rows: ByRows,
        density: Any,
    ) -> None:
        #: The log density itself, which evaluates gradients.
        self._by_rows, self._density = by_rows, density
        self._cost, self._widest = graphs.cost, graphs.cost.widest
        parts = GaussNewtonGraphs(graphs, functions, rows, start, self._widest)
        super().__init__(functions, parts.n_in_call)
        self.gauss_newton, self._graphs = GaussNewtonMatrix(parts), graphs
        self.n_dim, self._n_by_predictors = len(start), 0
        self._no_hessian: graph.MissingDerivativeError | None = None
        self.sparse = SparseHessian(
            graphs.logp,
            graphs.theta,
            start,
            graphs.minibatches.rows,
            self.products_of_draws,
            self.error,
            self._widest,
        )

    def again(self, start: Array, by_rows: ByRows, density: Any) -> "SecondOrder":
        """Return what a new object would be for the data as they are now, without the work that is done already."""
        other = SecondOrder.__new__(SecondOrder)
        other.__dict__.update(self.__dict__)
        other._by_rows, other._density, other._n_by_predictors = by_rows, density, 0
        other.sparse = self.sparse.again(start, other.products_of_draws, other.error)
        return other

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: compiled functions are made again when they are needed."""
        return {name: value for name, value in self.__dict__.items() if name != "_predictors"}

    @property
    def _jets(self) -> Jets | None:
        return jets_of(self._graphs, self._functions)

    def error(self) -> graph.MissingDerivativeError | None:
        """Return the error that names the operation without a second derivative, if there is one."""
        if self._jets is not None:
            return None
        if "_product" not in self.__dict__ and self._no_hessian is None:
            with self._functions.timed():
                try:
                    self._product  # noqa: B018 (made once)
                except graph.MissingDerivativeError as error:
                    self._no_hessian = error.with_traceback(None)
        return self._no_hessian

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

    # --- by predictors ---

    @functools.cached_property
    def _predictors(self) -> PredictorHessian | None:
        """Makes Hessians from fewer products than the pattern does; None where that is not worth its while."""
        graphs, functions = self._graphs, self._functions
        seconds = _PRODUCT * self.n_products * self._density.gradient_seconds
        in_vain = graphs.is_large or self._jets is not None
        if in_vain or seconds < (_WORTH_ANEW if graphs.minibatches else _WORTH) or self.error():
            return None
        with functions.timed():
            found = predictor_hessian(self._by_rows.parts, graphs.simplify, functions.compile)
        return found if found is not None and _FEWER * found.products_of(self._cost) <= self.n_products else None

    def by_predictors(self, theta: Array) -> tuple[LinearMap, sparse.csr_array] | None:
        """Return the predictors, and the mean Hessian with respect to them; None where they are not used.

        A check, now and then, sees whether that is the curvature of log p.
        """
        if self._predictors is None or not len(theta):
            return None
        self._n_by_predictors += 1
        if self._n_by_predictors & (self._n_by_predictors - 1) == 0:
            rng = np.random.default_rng([self._n_by_predictors])
            point = theta[rng.integers(len(theta))]
            linear, matrix = self._predictors.linear_map, self._predictors.mean(point[None])
            if not curvature_agrees(linear, matrix, point, self._density.logp_at_few, rng):
                logger.info("The Hessian by linear predictors is not that of log p: it is found from all coordinates.")
                self._predictors = None
                return None
        return self._predictors.linear_map, self._predictors.mean(theta)

    # --- by coordinates ---

    def _draws_in_call(self, n_directions: int) -> int | None:
        n_draws, together = self._batch(n_directions)
        # A call takes many draws where it would take longer than the work for one.
        takes_draws = self.sparse.needs_products or self._jets is not None or self._batch(self.n_dim)[0] >= _LEAST_BATCH
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
        return self._functions.once(self._functions.made.products, self._compile_products)

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
        if self._by_predictors is not None:
            return self._by_predictors.products(directions)
        found = self._together(directions)
        return self._second.mean_products(self._theta, directions) if found is None else found

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,).

        It takes a product for each coordinate, for each colour of `pattern`, or for each predictor of a row, but never
        holds a matrix of all of them.
        """
        self._count()
        found = self._by_predictors
        return self._second.mean_diagonal(self._theta) if found is None else found.diagonal()

    def values(self) -> Array:
        """Return the entries of `pattern`, (n_entries,): the lower triangle, in the order of the pattern.

        It takes one product for each of a few sums of columns, whose entries don't overlap.
        """
        values = self._values_by_predictors()
        if values is None:
            values = self._second.sparse.mean_values(self._theta)
        self._count()
        return values

    def _values_by_predictors(self) -> Array | None:
        """Return them by predictors; None without these, and where the pattern lacks entries that these have."""
        if self._by_predictors is None or self.pattern is None:
            return None
        try:
            return dataclasses.replace(self._by_predictors, entries=Known(self.pattern)).values()
        except PatternLacks:
            return None

    @functools.cached_property
    def _by_predictors(self) -> PredictorMeanHessian | None:
        found = self._second.by_predictors(self._theta)
        return None if found is None else PredictorMeanHessian(*found)

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
        same = np.array_equal(own.rows, pattern.rows) and np.array_equal(own.cols, pattern.cols)
        return values if same else entries_of(own.symmetric(values), pattern)


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
