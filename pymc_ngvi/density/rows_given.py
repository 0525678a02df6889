"""Log p as a function of some coordinates alone, the others being given: a sum over rows, whatever these are.

Where hyperparameters are given, a Gaussian process, a random walk, a map or crossed effects are latent Gaussian models:
the predictors of all rows are affine in what is left, by a matrix that depends on the hyperparameters. These are shared
variables of the graph. To the search for rows they are data, and what has been found stays when they change.
"""

import functools

import numpy as np
import pytensor

from numpy.typing import NDArray

from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.refusal import Reason, Refused
from pymc_ngvi.core.sparsity.dependence_sets import Dependence, TooDenseError
from pymc_ngvi.core.types import Array, Expectation, RowRules, Spread
from pymc_ngvi.density.expectations import Expectations, Seen
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.density.pieces import Pieces, local_input
from pymc_ngvi.density.sparse_hessian import is_dense
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.rows.pattern import pattern_of

#: How far from the start values are given first: at special ones, such as a correlation of 0, entries are missing.
_AROUND = 0.1
#: The same of points at which rows are compared with log p: far ones tell more, and are rough: where a covariance is
#: nearly singular, all digits of log p may be lost there.
_DISTANCES = (0.1, 1e-3)


class NotRows(Refused):
    """Given these coordinates, log p is no sum over rows of the others; the sentence says why, in a clause."""


class RowsGiven:
    """Log p as rows in the coordinates that are left where others are given.

    Parameters
    ----------
    density : LogDensity
        Without minibatches.
    outside : ndarray of int, shape (n_outside,)
        Coordinates that are given, ascending.

    Attributes
    ----------
    inside : ndarray of int, shape (n_dim,)
        All others.
    rows : Expectations

    Raises
    ------
    NotRows
    """

    def __init__(self, density: LogDensity, outside: NDArray[np.intp]) -> None:
        graphs, functions = density.graphs, density.functions
        self.outside = outside
        self.inside = np.setdiff1d(np.arange(density.n_dim), outside)
        start = density.initial_point()
        self._start = start[self.inside]
        first = start[outside] + _AROUND * np.random.default_rng(0).standard_normal(len(outside))
        with functions.timed(), without_c():
            self._given = pytensor.shared(first, "given", shape=(len(outside),))
            theta = local_input(len(self.inside))
            pieces = Pieces(outside, density.n_dim, self._given, theta)
            [logp] = graph.on_flat_vector(density.model, density.layout, [density.model.logp()], pieces)
            [logp] = graphs.simplify([logp])
            simplify = functools.partial(graph.simplify, check_bounds=False)
            try:
                self.rows = Expectations(logp, theta, simplify, functions.compile_for_rows, functions.backend_of_rows)
            except ValueError as error:
                raise NotRows(Reason.NO_PREDICTORS, str(error)) from None
            except TooDenseError:
                raise NotRows(Reason.TOO_DENSE, "too many predictors have covariances") from None
            if self.rows.terms.rest:
                raise NotRows(Reason.NOT_ALL_ROWS, self.rows.terms.why[0])
            points, [values] = graph.over_draws([logp], theta)
            self._logp = functions.compile_for_rows([points], values)
        self._apart = np.random.default_rng(1).standard_normal((1, self.n_dim))

    @property
    def n_dim(self) -> int:
        """Number of coordinates that are left."""
        return len(self.inside)

    def start(self) -> Array:
        """Return where the model starts, (n_dim,)."""
        return self._start.copy()

    def give(self, values: Array) -> bool:
        """Take values of the coordinates that are given, (n_outside,); tell whether rows add up to log p there."""
        self._given.set_value(np.asarray(values, dtype=np.float64))
        try:
            if self.rows.renew() and self._is_anchored():
                return True
            self.rows.retake()
        except (ValueError, TooDenseError, np.linalg.LinAlgError):
            return False
        return not self.rows.terms.rest and self._is_anchored()

    def _is_anchored(self) -> bool:
        """Take what is constant in log p from its value at the start, and tell whether rows agree near it."""
        for distance in _DISTANCES:
            points = np.concatenate([self._start[None], self._start + distance * self._apart])
            logp = self.logp(points)
            if not np.isfinite(logp[0]):
                return False
            if self.rows.anchor(points, logp):
                return True
        return False

    def logp(self, theta: Array) -> Array:
        """Return log p, (n_points,), at points (n_points, n_dim)."""
        with np.errstate(all="ignore"):
            return np.asarray(self._logp(theta))

    def logp_of_all(self, theta: Array) -> Array:
        """Return log p, (n_points,), at points of all coordinates; what is given stays."""
        given = self._given.get_value()
        result = np.empty(len(theta))
        for row, point in enumerate(theta):
            self._given.set_value(point[self.outside])
            result[row] = self.logp(point[None, self.inside])[0]
        self._given.set_value(given)
        return result

    def seen(self, q: Spread) -> Seen:
        """Return what rows see of a Gaussian."""
        return self.rows.seen(q)

    def under_seen(self, seen: Seen, rules: RowRules | None = None) -> Expectation:
        """Return expectations where predictors are distributed as they were, perhaps at other values."""
        return self.rows.under_seen(seen, self, rules)

    def expected(
        self, q: Spread, rules: RowRules | None = None, *, adapt: bool = False, least: float = -np.inf
    ) -> Expectation:
        """Return the expectation under a Gaussian; see `RowsTarget`."""
        return self.rows.under(q, self, rules, adapt=adapt, least=least)

    @functools.cached_property
    def pattern(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0; None where it counts as dense."""
        pattern = self._pattern_of(self.rows.predictors.dependence)
        return None if is_dense(pattern) else pattern

    @functools.cached_property
    def summed(self) -> SummedPattern | None:
        """The same beside sums over many coordinates; None where there are no such sums."""
        joint = self.rows.joint
        pattern = None if joint is None else self._pattern_of(joint.dependence)
        return None if joint is None or pattern is None else SummedPattern(pattern, joint.linear_map.weights)

    def _pattern_of(self, dependence: Dependence) -> Pattern | None:
        pairs = [
            (part.index[:, a], part.index[:, b])
            for part in self.rows.functions
            for a, b in np.argwhere(np.tril(part.interacts))
        ]
        try:
            return pattern_of(dependence, pairs)
        except TooDenseError:
            return None
