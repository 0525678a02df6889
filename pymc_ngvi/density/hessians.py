"""Second derivatives of a log density: by its rows where these give them, from its graph elsewhere."""

import dataclasses
import functools

from collections.abc import Callable

import numpy as np

from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.refusal import PatternLacks, PatternWidened, RowHessianGivenUp, RowsGivenUp
from pymc_ngvi.core.types import Array, MeanHessian, Target
from pymc_ngvi.density.by_rows import ByRows
from pymc_ngvi.density.evaluations import Evaluations
from pymc_ngvi.density.flat import FlatGraphs, Functions
from pymc_ngvi.density.rows import LikelihoodRows
from pymc_ngvi.density.second_order import SecondOrder
from pymc_ngvi.graphs import graph
from pymc_ngvi.rows.linear_map import entries_of
from pymc_ngvi.rows.mean_hessian import Known, PredictorMeanHessian

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


class PatternedHessian(MeanHessian):
    """The mean over draws of a Hessian that is not evaluated by rows, at the entries that rows tell of."""

    def __init__(self, by_rows: ByRows, whole: MeanHessian, n_dim: int) -> None:
        self._by_rows, self._whole, self._n_dim = by_rows, whole, n_dim

    @property
    def pattern(self) -> Pattern | None:
        """Entries that can differ from 0; None where the matrix counts as dense."""
        return self._by_rows.pattern if self._by_rows.gives_pattern else self._whole.pattern

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        return self._whole.products(directions)

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return self._whole.diagonal()

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


class RowsHessian(MeanHessian):
    """The mean over draws of the Hessian of a sum over rows.

    It counts as one evaluation at each of its draws.
    """

    def __init__(self, counter: Target, by_rows: ByRows, theta: Array, otherwise: Callable[[], MeanHessian]) -> None:
        self._counter, self._by_rows, self._theta, self._otherwise = counter, by_rows, theta, otherwise

    @property
    def pattern(self) -> Pattern | None:
        """Entries that can differ from 0; None where the matrix counts as dense."""
        return self._otherwise().pattern if self._by_rows.found is None else self._by_rows.pattern

    @functools.cached_property
    def _evaluated(self) -> MeanHessian:
        found = self._by_rows.evaluated(self._theta)
        if found is None:
            return self._otherwise()
        self._counter.n_hessians += len(self._theta)
        return found

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        return self._evaluated.products(directions)

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,)."""
        return self._evaluated.diagonal()

    def values(self) -> Array:
        """Return the entries of `pattern`, (n_entries,)."""
        return super().values() if self.pattern is None else self._of_rows.values()

    @property
    def summed(self) -> SummedPattern | None:
        """Entries that can differ from 0 beside sums over many coordinates; None where there are no such sums."""
        return self._by_rows.summed

    def summed_values(self) -> Array:
        """Return the entries of `summed`, by coordinates and sums; raise as `values` does."""
        return super().summed_values() if self.summed is None else self._of_rows.summed_values()

    @property
    def _of_rows(self) -> PredictorMeanHessian:
        evaluated = self._evaluated
        if not isinstance(evaluated, PredictorMeanHessian):
            if self._by_rows.found is None:
                raise RowsGivenUp("the rows are not all of log p")
            raise RowHessianGivenUp("second derivatives of rows are not those of log p")
        return evaluated


# --- second derivatives of a log density: by its rows where these give them, from its graph elsewhere ---

#: Pairs of coordinates in sums, beyond which no pattern that has them all is made for reading.
_MOST_PAIRS = 10_000_000


class Hessians:
    """What is known of the Hessian of a log density, and its means over draws."""

    def __init__(
        self,
        graphs: FlatGraphs,
        functions: Functions,
        observed: LikelihoodRows,
        by_rows: ByRows,
        evaluations: Evaluations,
        start: Array,
    ) -> None:
        self._graphs, self._functions, self._observed = graphs, functions, observed
        self._by_rows, self._evaluations, self._start = by_rows, evaluations, start

    def again(self, by_rows: ByRows, evaluations: Evaluations, start: Array) -> "Hessians":
        """Return what a new object would be for the data as they are now, without the work that is done already."""
        other = Hessians(self._graphs, self._functions, self._observed, by_rows, evaluations, start)
        if "second" in self.__dict__:
            other.second = self.second.again(start, evaluations, by_rows)
        return other

    @functools.cached_property
    def second(self) -> SecondOrder:
        """Those from the graph."""
        graphs, evaluations = self._graphs, self._evaluations
        return SecondOrder(graphs, self._functions, self._observed, self._start, evaluations, self._by_rows)

    @property
    def exist(self) -> bool:
        """Whether every operation of the model has a second derivative."""
        return (self._by_rows.gives_pattern and self._by_rows.is_smooth) or self.error() is None

    def error(self) -> graph.MissingDerivativeError | None:
        """Return the error that names the operation without a second derivative, if there is one."""
        return self._by_rows.error() if self._by_rows.gives_hessians else self.second.error()

    @property
    def pattern(self) -> Pattern | None:
        """Entries that can differ from 0; None where the Hessian counts as dense."""
        return self._by_rows.pattern if self._by_rows.gives_pattern else self.second.sparse.pattern

    @property
    def summed(self) -> SummedPattern | None:
        """The same beside sums over many coordinates; None where there are no such sums."""
        return self._by_rows.summed

    @property
    def structural_pattern(self) -> Pattern | None:
        """The same as the graph tells, of whatever use; None only where the entries are too many to hold or to read."""
        if self._by_rows.gives_pattern:
            summed = self._by_rows.summed
            many = summed is not None and summed.n_pairs > _MOST_PAIRS
            return None if many else self._by_rows.structure
        return self.pattern or self.second.sparse.pattern_by_graph

    def widen(self, theta: Array) -> bool:
        """Add the entries that `pattern` lacks at points, (n_points, n_dim); tell whether there are any."""
        # That of rows is wide enough as long as they add up to log p, which is seen to when they are evaluated.
        return not self._by_rows.gives_pattern and self.second.sparse.widen(np.atleast_2d(theta))

    @property
    def n_products(self) -> int:
        """Products with a vector that take as long as one Hessian."""
        return self._by_rows.n_products if self._by_rows.gives_hessians else self.second.n_products

    def mean(self, theta: Array, counter: Target) -> MeanHessian:
        """Return the mean over draws, (n_draws, n_dim), to be evaluated; ``counter`` is told of evaluations."""
        from_graph = functools.partial(self._from_graph, theta, counter)
        if self._by_rows.gives_hessians:
            return RowsHessian(counter, self._by_rows, theta, from_graph)
        whole = from_graph()
        return PatternedHessian(self._by_rows, whole, len(self._start)) if self._by_rows.gives_pattern else whole

    def means(self, draws: list[Array], counter: Target) -> list[MeanHessian]:
        """Return the mean over each of several sets of draws, to be evaluated."""
        if self._by_rows.gives_pattern or len(draws) < 2 or not self._graphs.shares_calls:
            return [self.mean(theta, counter) for theta in draws]
        together = Together(self.second, draws)
        return [
            ModelHessian(counter, self.second, theta, functools.partial(together.products, k))
            for k, theta in enumerate(draws)
        ]

    def _from_graph(self, theta: Array, counter: Target) -> ModelHessian:
        return ModelHessian(counter, self.second, theta)
