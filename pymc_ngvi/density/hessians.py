"""Second derivatives of a log density: by its rows where these give them, from its graph elsewhere."""

import functools

import numpy as np

from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.types import Array, MeanHessian, Target
from pymc_ngvi.density.by_rows import ByRows
from pymc_ngvi.density.evaluations import Evaluations
from pymc_ngvi.density.flat import FlatGraphs, Functions
from pymc_ngvi.density.mean_hessians import ModelHessian, PatternedHessian, RowsHessian, Together
from pymc_ngvi.density.rows import LikelihoodRows
from pymc_ngvi.density.second_order import SecondOrder
from pymc_ngvi.graphs import graph

#: Pairs of coordinates in sums, beyond which no pattern that has them all is made for reading.
_MOST_PAIRS = 10_000_000


class Hessians:
    """What is known of the Hessian of a log density, and its means over draws.

    Parameters
    ----------
    graphs : FlatGraphs
    functions : Functions
    observed : LikelihoodRows
        For Gauss-Newton diagonals.
    by_rows : ByRows
    evaluations : Evaluations
    start : ndarray, shape (n_dim,)
        A point where log p is finite.
    """

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
