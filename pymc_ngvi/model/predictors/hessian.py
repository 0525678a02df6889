"""Mean Hessians by predictors: second derivatives with respect to these, which are few a row, and two products with X.

A log density that is a sum over rows is, given its linear predictors, a function whose Hessian has a few entries for
each row: as many products as a row has predictors give it, however many coordinates the predictors are made of.
"""

from collections.abc import Callable

import numpy as np

from pytensor.graph.basic import Variable
from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.values import Array
from pymc_ngvi.model.graphs import cost, graph
from pymc_ngvi.model.graphs.backends import without_c
from pymc_ngvi.model.predictors.found import Compile, Predictors
from pymc_ngvi.model.predictors.linear_map import LinearMap
from pymc_ngvi.model.sparsity.colouring import Colouring
from pymc_ngvi.model.sparsity.dependence_sets import TooDenseError
from pymc_ngvi.model.sparsity.hessian import ColouredHessian, colour, slices
from pymc_ngvi.model.sparsity.interaction import PatternSearch

type Simplify = Callable[[list[Variable]], list[Variable]]

#: Numbers in the predictors of draws that are evaluated at a time.
_MOST_ELEMENTS = 2**24
#: Step of the finite differences that check a Hessian, and the relative error that tells of a missing entry.
_STEP, _TOLERANCE = 1e-5, 1e-3


class PredictorHessian:
    """Mean Hessians of a log density by its linear predictors.

    Parameters
    ----------
    logp : pytensor scalar
        Simplified.
    theta : pytensor vector
    simplify, compile_ : callable
        How graphs are simplified, and compiled.

    Raises
    ------
    ValueError
        Where log p does not come apart into predictors with few interactions.
    """

    def __init__(self, logp: Variable, theta: Variable, simplify: Simplify, compile_: Compile) -> None:
        self._predictors = Predictors(logp, theta, compile_)
        if self._predictors.are_theta:
            raise ValueError("no affine function but theta itself")
        eta = self._predictors.vector
        with without_c():
            [inner] = simplify([self._predictors.density()])
            self._search = PatternSearch(inner, eta)
            found = self._colour()  # before anything is compiled
            [grad] = simplify([graph.gradient(inner, eta)])
            direction = eta.type("direction")
            [product] = simplify([graph.hessian_product(grad, eta, direction)])
            draws, directions, along = graph.over_draws_and_directions(product, eta, direction)
        self._function = compile_([draws, directions], along)
        self._widest = cost.estimate([inner, grad]).widest
        self._coloured = ColouredHessian(*found, self._products, self._widest)

    def _colour(self) -> tuple[Pattern, Colouring]:
        pattern = self._search.run().pattern
        colouring = colour(pattern)
        if pattern is None or colouring is None:
            raise ValueError("predictors interact with too many others")
        return pattern, colouring

    def _products(self, points: Array, directions: Array) -> Array:
        with np.errstate(all="ignore"):  # densities overflow far from the mode: the caller sees what is not finite
            return np.asarray(self._function(np.ascontiguousarray(points), np.ascontiguousarray(directions)))

    def _refresh(self) -> None:
        """Take the data as they are now."""
        if self._predictors.refresh():
            self._coloured = ColouredHessian(*self._colour(), self._products, self._widest)

    @property
    def n_colours(self) -> int:
        """Products for one Hessian with respect to the predictors."""
        return self._coloured.n_colours

    @property
    def linear_map(self) -> LinearMap:
        """The predictors as functions of theta."""
        self._refresh()
        return self._predictors.linear_map

    def mean(self, theta: Array) -> sparse.csr_array:
        """Return the mean Hessian with respect to the predictors over draws, (n_draws, n_dim).

        Raises
        ------
        ValueError
            Where data have changed so that log p does not come apart any more.
        """
        linear = self.linear_map
        total = np.zeros(self._coloured.pattern.n_entries)
        for rows in slices(len(theta), max(1, _MOST_ELEMENTS // len(linear.offset))):
            total += len(theta[rows]) * self._coloured.mean_values(linear(theta[rows]))
        return self._coloured.pattern.symmetric(total / len(theta))

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


def predictor_hessian(
    logp: Variable, theta: Variable, simplify: Simplify, compile_: Compile
) -> PredictorHessian | None:
    """Return a `PredictorHessian` with arguments as it has; None where log p does not come apart."""
    try:
        return PredictorHessian(logp, theta, simplify, compile_)
    except (ValueError, TooDenseError):
        return None
