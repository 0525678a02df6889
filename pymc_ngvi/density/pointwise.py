"""Log p and its gradient at points, where log p is a sum over rows: nothing is compiled for these."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.graph.basic import Variable

from pymc_ngvi.core.types import Array
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.reading.found import Compile
from pymc_ngvi.rows.row_hessian import RowGradient

#: From points to whether log p is finite there, as far as its conditions tell.
type Holds = Callable[[Array], NDArray[np.bool_]]


@dataclass(frozen=True, eq=False)
class Pointwise:
    """Log p by its rows, and -inf where a condition fails that rows leave out."""

    rows: Expectations
    gradient: RowGradient
    #: None where no condition is left out.
    holds: Holds | None

    @classmethod
    def of(cls, rows: Expectations, compile_: Compile) -> "Pointwise | None":
        """Return that of rows; None where a row has no derivative here, or a condition is not one of all of log p."""
        if rows.conditions is None:
            return None
        found = [rows.engine.first_derivatives(kind) for kind in rows.terms.rows]
        known = [kind for kind in found if kind is not None]
        if len(known) < len(found):
            return None
        gradient = RowGradient(rows.linear_map, rows.terms.slope, known)
        vector = rows.predictors.vector
        return cls(rows, gradient, _compiled(rows.conditions, vector, compile_) if rows.conditions else None)

    def logp(self, theta: Array) -> Array:
        """Return log p, (n_points,), at points (n_points, n_dim)."""
        with np.errstate(all="ignore"):
            return self._within(theta, self.rows.at(theta))

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p and its gradient, (n_points, n_dim)."""
        total, grad = self.gradient(theta)
        return self._within(theta, self.rows.constant + total), grad

    def _within(self, theta: Array, logp: Array) -> Array:
        if self.holds is not None and len(theta):
            logp[~self.holds(self.rows.predictors.linear_map(theta))] = -np.inf
        return logp


def _compiled(conditions: list[Variable], predictors: Variable, compile_: Compile) -> Holds:
    with without_c():
        each = pt.stack([condition.reshape(()) for condition in conditions])
        points, [values] = graph.over_draws([each], predictors)
    function = compile_([points], values)
    return lambda eta: np.asarray(function(eta), dtype=np.bool_).all(axis=1)
