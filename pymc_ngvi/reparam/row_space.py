"""The log density of a model in the space of its rows, as a target of a fit, and what a Gaussian there stands for."""

from collections.abc import Callable

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import cholesky, solve_lower
from pymc_ngvi.core.types import (
    Array,
    CountedElsewhere,
    Expectation,
    GaussianState,
    Later,
    MatrixHessian,
    OfAllData,
    RowRules,
    Spread,
)
from pymc_ngvi.density import LogDensity
from pymc_ngvi.density.expectations import SeenFromRows
from pymc_ngvi.families.gaussian import LowRankState


class RowSpaceDensity(OfAllData, CountedElsewhere):
    """Log density of a model in the coordinates of a `RowSpace`; all that is perpendicular integrated out."""

    has_hessian = True

    def __init__(self, density: LogDensity, seen: SeenFromRows) -> None:
        self.density = self.counter = density
        self.space, self._rows = seen.space, seen.rows
        self.n_dim = seen.space.n_dim

    def expected(
        self, q: Spread, rules: RowRules | None = None, *, adapt: bool = False, least: float = -np.inf
    ) -> Expectation:
        """Return the expectation under a Gaussian; see `LogDensity.expected`."""
        if rules is None:
            self.density.by_rows.check(self.space.to_theta(q.location[None])[0])
        self.density.count_expectation()
        inside = np.arange(len(self.space.kept), self.n_dim)
        mean = q.location[inside]
        prior = -0.5 * float(mean @ mean + q.covariances(inside, inside).sum())
        found = self._rows.under(q, rules=rules, adapt=adapt, least=least - prior)
        grad = found.grad.copy()
        grad[inside] -= mean

        def with_prior() -> MatrixHessian:
            hessian = np.array(found.hessian.products(np.eye(self.n_dim)))
            hessian[inside, inside] -= 1.0
            return MatrixHessian(hessian)

        return found._replace(value=found.value + prior, grad=grad, hessian=Later(None, with_prior))

    def directions(self, rows: NDArray[np.intp]) -> Array:
        """Return the slopes of the only predictor of each of some rows; see `RowsTarget`."""
        return self._rows.directions(rows)

    def rows_cover(self, draw: Callable[[], Array]) -> bool:
        """Tell whether rows are all of log p at draws; see `RowsTarget`."""
        return self.density.rows_cover(lambda: self.space.to_theta(draw()))

    def gaussian(self, q: GaussianState) -> LowRankState:
        """Return the Gaussian of theta that a Gaussian of these coordinates stands for."""
        half = q.whiten(np.eye(self.n_dim))
        root = cholesky(half @ half.T)
        assert root is not None
        inverse = solve_lower(root, np.eye(self.n_dim))
        core = inverse.T @ inverse - np.eye(self.n_dim)
        mean = self.space.to_theta(q.location[None])[0]
        return LowRankState(mean, 1.0 / self.space.scale(), self.space.axes(), core)
