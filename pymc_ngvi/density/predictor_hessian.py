"""Mean Hessians by predictors of a log density that is, in part, a sum over rows.

Rows are differentiated elementwise. What else there is, a function of the same predictors, takes products with sums of
columns that don't overlap; it has no part in what rows cost.
"""

import functools

from collections.abc import Callable

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.basic import Variable
from scipy import sparse

from pymc_ngvi.core.refusal import NotApart
from pymc_ngvi.core.sparsity.coloured import ColouredHessian, slices
from pymc_ngvi.core.values import Array
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.density.sparse_hessian import colour
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.ops import cost
from pymc_ngvi.reading.found import Compile
from pymc_ngvi.reading.interaction import PatternSearch
from pymc_ngvi.rows.linear_map import AffineMap
from pymc_ngvi.rows.row_hessian import FEW_PREDICTORS, RowHessian

type Simplify = Callable[[list[Variable]], list[Variable]]

#: Numbers in the predictors of draws that are evaluated at a time.
_MOST_ELEMENTS = 2**24
#: Step of the finite differences that check a Hessian, and the relative error that tells of a missing entry.
_STEP, _TOLERANCE = 1e-5, 1e-3


class PredictorHessian:
    """Mean Hessians of a log density by its linear predictors: elementwise those of rows, by products that of the rest.

    Parameters
    ----------
    parts : Expectations
        The density, taken apart.
    simplify, compile_ : callable
        How graphs are simplified, and compiled.

    Raises
    ------
    NotApart
        Where in the rest, predictors interact with too many others.
    MissingDerivativeError
        If an operation of a row has no second derivative.
    """

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
    def linear_map(self) -> AffineMap:
        """The predictors as functions of theta."""
        self._refresh()
        return self._parts.linear_map

    def mean(self, theta: Array) -> sparse.csr_array:
        """Return the mean Hessian with respect to the predictors over draws, (n_draws, n_dim).

        Raises
        ------
        NotApart
            Where data have changed so that log p does not come apart any more.
        """
        self._refresh()
        rows = self._rows.mean(theta)
        return rows if self._rest is None else rows + self._rest.mean(self._parts.linear_map, theta)

    def _refresh(self) -> None:
        """Take the data as they are now."""
        self._parts.refresh()
        if self._parts.terms is not self._terms:
            self._take()

    def agrees(self, point: Array, gradient: Callable[[Array], Array], rng: np.random.Generator) -> bool:
        """Tell whether the Hessian at a point, times a random vector, is what differences of gradients are there."""
        vector = rng.standard_normal((1, len(point)))
        step = _STEP * (1.0 + np.abs(point))
        along = step * vector[0]
        low, high = gradient(np.stack([point - along, point + along]))
        expected = 0.5 * (high - low)
        found = self.linear_map.quadratic_times(self.mean(point[None]), along[None])[0]
        scale = np.abs(expected).max(initial=0.0) + np.abs(found).max(initial=0.0)
        return not np.isfinite(scale) or bool(np.abs(found - expected).max(initial=0.0) <= _TOLERANCE * scale)


class RestHessian:
    """Mean Hessians of what is no sum over rows, by predictors.

    Parameters
    ----------
    parts : list of pytensor scalars
        Functions of the predictors, to be added.
    predictors : pytensor vector
    simplify, compile_ : callable

    Raises
    ------
    NotApart
        Where predictors interact with too many others.
    """

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

    def mean(self, linear: AffineMap, theta: Array) -> sparse.csr_array:
        """Return the mean over draws, (n_draws, n_dim)."""
        total = np.zeros(self._coloured.pattern.n_entries)
        for rows in slices(len(theta), max(1, _MOST_ELEMENTS // len(linear.offset))):
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
