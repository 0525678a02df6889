"""The Hessian of all of log p but the log densities of rows: priors with their Jacobians."""

import contextlib

import numpy as np
import pytensor.tensor as pt

from pytensor.compile import Function

from pymc_ngvi.core.refusal import PatternWidened
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.gauss_newton.parts import GaussNewtonGraphs, units
from pymc_ngvi.density.sparse_hessian import SparseHessian
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c


class Rest:
    """Means over draws of the Hessian. Nothing is built before something is asked for.

    Parameters
    ----------
    parts : GaussNewtonGraphs
    """

    def __init__(self, parts: GaussNewtonGraphs) -> None:
        self._parts = parts
        self._sparse: SparseHessian | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: the pattern is found again."""
        return {**self.__dict__, "_sparse": None}

    def mean_diagonal(self, theta: Array) -> Array:
        """Return the mean of the diagonal over draws, (n_dim,)."""
        while (coloured := self._pattern().coloured) is not None:
            with contextlib.suppress(PatternWidened):
                return coloured.diagonal(self._pattern().mean_values(theta))
        total = np.zeros(theta.shape[1])
        for point in theta:
            for at, axes in units(theta.shape[1], self._parts.n_in_call):
                total[at] += self._products(point[None], axes)[0][np.arange(len(at)), at]
        return total / len(theta)

    def mean_products(self, theta: Array, directions: Array) -> Array:
        """Return the mean over draws of the Hessian times each direction, (n_directions, n_dim)."""
        while (coloured := self._pattern().coloured) is not None:
            with contextlib.suppress(PatternWidened):
                return coloured.times(self._pattern().mean_values(theta), directions)
        return np.mean([self._products(point[None], directions)[0] for point in theta], axis=0)

    def _pattern(self) -> SparseHessian:
        if self._sparse is None:
            parts = self._parts
            self._sparse = SparseHessian(
                parts.rest, parts.theta, parts.start, parts.graphs.minibatches.rows, self._products,
                lambda: None, parts.widest,
            )  # fmt: skip
        return self._sparse

    def _products(self, theta: Array, directions: Array) -> Array:
        function = self._parts.functions.once(self._parts.functions.made.rest, self._compile)
        with np.errstate(all="ignore"):
            filled_up = [self._parts.functions.filled_up(np.ascontiguousarray(x)) for x in (theta, directions)]
            return np.asarray(function(*filled_up))[: len(theta), : len(directions)]

    def _compile(self) -> Function:
        parts = self._parts
        direction = parts.theta.type("direction")
        with without_c():
            [grad] = parts.graphs.simplify([graph.gradient(parts.rest, parts.theta)])
            [product] = parts.graphs.simplify([graph.hessian_product(grad, parts.theta, direction)])
            draws, directions, batched = graph.over_draws_and_directions(product, parts.theta, direction)
            batched = pt.broadcast_to(batched, (draws.shape[0], directions.shape[0], draws.shape[1]))
        return parts.functions.compile([draws, directions], batched)
