"""Log p as a function of some coordinates alone, the others being given: a sum over rows, whatever these are.

Where hyperparameters are given, a Gaussian process, a random walk, a map or crossed effects are latent Gaussian models:
the predictors of all rows are affine in what is left, by a matrix that depends on the hyperparameters. These are shared
variables of the graph. To the search for rows they are data, and what has been found stays when they change.
"""

import functools

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.refusal import NotApart, Reason, Refused
from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.target import OfAllData
from pymc_ngvi.core.types import Array, Expectation, GaussianState, RowRules, Spread
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.density.flat import DataSeen
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.density.rows_over import OverGiven, RowsLeftOver, RowsOver
from pymc_ngvi.density.sparse_hessian import is_dense
from pymc_ngvi.density.split import Pieces, local_input
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.loops import vectorised
from pymc_ngvi.reading.reading import Reading
from pymc_ngvi.reading.terms import Rows, Source
from pymc_ngvi.rows.engines.on_pytensor import Engine
from pymc_ngvi.rows.expectation import RowFunction
from pymc_ngvi.rows.pattern import pattern_of_rows
from pymc_ngvi.rows.quadratic import is_concave, is_quadratic

# --- a few of the rows of log p, and predictors, at many values of what is given ---


class FewRows:
    """Some rows and some predictors."""

    def __init__(
        self,
        reading: Reading,
        theta: Variable,
        over: OverGiven,
        over_simplified: OverGiven,
        engine: Engine,
        which: list[Ints],
        beside: Ints,
    ) -> None:
        self._engine, self._reading = engine, reading
        kinds = [(rows, at) for rows, at in zip(reading.terms.rows, which, strict=True) if len(at)]
        read = [rows.index[at].ravel() for rows, at in kinds]
        self.predictors = np.unique(np.concatenate([beside, *read])).astype(np.int64)
        self._rows = [self._of(rows, at) for rows, at in kinds]
        self.points = np.zeros((1, theta.type.shape[0]))
        self._set_up_predictors(theta, over_simplified)
        weigh = reading.terms.weigh
        self._zeros = weigh.zeros()
        self._sources = [source for rows in self._rows for source in rows.sources.values()]
        outputs = [self._numbers_of(source) for source in self._sources]
        outputs.append(self._numbers_of(Source(reading.predictors.vector, self.predictors, is_weight=True)))
        self._evaluate = over.outputs(outputs, weigh.inputs)

    def _of(self, rows: Rows, at: Ints) -> Rows:
        """Return some rows, with other numbers for their predictors."""
        sources = {
            var: source._replace(elements=source.elements[at] if len(source.elements) > 1 else source.elements)
            for var, source in rows.sources.items()
        }
        data = {var: values if values.shape[1] == 1 else values[:, at] for var, values in rows.data.items()}
        return replace(rows, index=np.searchsorted(self.predictors, rows.index[at]), data=data, sources=sources)

    def _numbers_of(self, source: Source) -> Variable:
        """Return elements of a known variable, or weights of those of another."""
        weigh = self._reading.terms.weigh
        if not source.is_weight:
            return source.var.ravel()[source.elements]
        found = [out for (_, var), out in zip(weigh.pairs, weigh.outputs, strict=True) if var is source.var]
        total = pt.zeros(len(source.elements))
        for weight in found:
            total = total + weight.ravel()[source.elements]
        return total

    def _set_up_predictors(self, theta: Variable, over: OverGiven) -> None:
        found = self._reading.predictors
        self._fixed = found.linear_map
        ends = np.cumsum([found.size(var) for var in found.variables])
        parts, where = list[Variable](), list[NDArray[np.intp]]()
        for var, end in zip(found.variables, ends, strict=True):
            start = end - found.size(var)
            at = np.flatnonzero((self.predictors >= start) & (self.predictors < end))
            if len(at) and over.hangs(var):
                parts.append(var.ravel()[self.predictors[at] - start])
                where.append(at)
        self._hanging = np.concatenate([*where, np.empty(0, dtype=np.intp)])
        if parts:
            with without_c():
                points = pt.matrix("points", dtype="float64", shape=(None, theta.type.shape[0]))
                [at_points] = vectorised([pt.concatenate(parts)], {theta: points})
            self._predict = over.outputs([at_points], [points])

    def look_at(self, points: Array) -> None:
        """Take the points, (n_points, n_dim), at which predictors are wanted."""
        self.points, self._of_fixed = points, self._fixed(points)[:, self.predictors]

    def at(self, values: Array) -> tuple[Array, Array, list[RowFunction]]:
        """Return predictors at points, what is linear in them, and functions of rows."""
        n = len(values)
        with np.errstate(all="ignore"):
            eta = np.tile(self._of_fixed, (n, 1, 1))
            if len(self._hanging):
                [found] = self._predict(values, self.points)
                eta[:, :, self._hanging] = found
            numbers = [out.reshape(len(out), -1) for out in self._evaluate(values, *self._zeros)]
            slope = np.broadcast_to(numbers.pop(), (n, len(self.predictors)))
            functions = [
                self._function(rows, index, numbers, n) for rows, index in zip(self._rows, self.indices(n), strict=True)
            ]
        return eta, slope, functions

    def indices(self, n: int) -> list[NDArray[np.int64]]:
        """Return the predictors of rows at ``n`` values, kind by kind, those of one value after those of another."""
        apart = len(self.predictors) * np.arange(n)[:, None, None]
        return [(rows.index + apart).reshape(-1, rows.index.shape[1]) for rows in self._rows]

    def _function(self, rows: Rows, index: NDArray[np.int64], numbers: list[Array], n: int) -> RowFunction:
        """Return the function of rows of one kind, whose numbers are the next ones."""
        data = {}
        for var in rows.sources:
            own = np.broadcast_to(numbers.pop(0), (n, len(rows.index)))
            data[var] = own.reshape(1, -1).astype(var.type.dtype)
        for var, own in rows.data.items():  # of no source: the same at all values
            data.setdefault(var, np.tile(own, (1, n)) if own.shape[1] > 1 else own)
        return self._engine.row_function(replace(rows, index=index, data={var: data[var] for var in rows.data}))


# --- log p as a function of some coordinates alone, the others being given: a sum over rows, whatever these are ---

#: How far from the start values are given first: at special ones, such as a correlation of 0, entries are missing.
_AROUND = 0.1
#: The same of points at which rows are compared with log p: far ones tell more, and are rough: where a covariance is
#: nearly singular, all digits of log p may be lost there.
_DISTANCES = (0.1, 1e-3)
#: Nats that what is constant in log p may be off by.
_NATS = 0.01


class NotRows(Refused):
    """Given these coordinates, log p is no sum over rows of the others; the sentence says why, in a clause."""


class RowsGiven(OfAllData):
    """Log p as rows in the coordinates that are left where others are given."""

    has_hessian = True
    is_uneven = False
    #: What was found of that with which data; see `gaussian_over`.
    closed_form: tuple[DataSeen, Any] | None

    def __init__(self, density: LogDensity, outside: NDArray[np.intp]) -> None:
        graphs, functions = density.graphs, density.functions
        self.outside = outside
        self.n_gradients = self.n_hessians = 0
        self.inside = np.setdiff1d(np.arange(density.n_dim), outside)
        self.kept = np.arange(len(self.inside))
        start = density.initial_point()
        self._start = start[self.inside]
        first = start[outside] + _AROUND * np.random.default_rng(0).standard_normal(len(outside))
        with functions.timed(), without_c():
            self.first = first
            self._given = pytensor.shared(first, "given", shape=(len(outside),))
            theta = local_input(len(self.inside))
            pieces = Pieces(outside, density.n_dim, self._given, theta)
            sums = [factor.logp.sum() for factor in graphs.factors]
            parts = graphs.simplify(graph.on_flat_vector(density.model, density.layout, sums, pieces))
            simplify, compile_ = functools.partial(graph.simplify, check_bounds=False), functions.compile_for_rows
            try:
                reading = Reading(parts, theta, simplify, compile_)
                self.rows = Expectations(reading, compile_, functions.backend_of_rows)
            except NotApart as refused:
                raise NotRows(refused.code, refused.sentence) from None
            except ValueError as error:  # of an operation whose values can't be computed
                raise NotRows(Reason.NO_PREDICTORS, str(error)) from None
            if self.rows.terms.rest:
                raise NotRows(Reason.NOT_ALL_ROWS, self.rows.terms.why[0])
            self._reading, self._parts, self._theta, self._compile = reading, parts, theta, compile_
            self._compile_simplified = functions.compile_simplified
            points, [values] = graph.over_draws([pt.add(pt.constant(0.0), *parts)], theta)
            self._logp = (self._compile_simplified if self.is_quadratic else compile_)([points], values)
        shared = [v for v in ancestors(parts) if isinstance(v, SharedVariable) and v is not self._given]
        self.data, self.closed_form = shared, None
        self._apart = np.random.default_rng(1).standard_normal((1, self.n_dim))

    @property
    def n_dim(self) -> int:
        """Number of coordinates that are left."""
        return len(self.inside)

    def start(self) -> Array:
        """Return where fits begin, (n_dim,): where the model does, unless `begin_at` says otherwise."""
        return self._start.copy()

    def begin_at(self, x: Array) -> None:
        """Let fits begin elsewhere, (n_dim,), and take what is constant in log p from its value there."""
        self._start = x.copy()

    def give(self, values: Array) -> bool:
        """Take values of the coordinates that are given, (n_outside,); tell whether rows add up to log p there."""
        self._given.set_value(np.asarray(values, dtype=np.float64))
        try:
            if self.rows.renew() and self._is_anchored():
                return True
            self.rows.retake()
        except (NotApart, ValueError, np.linalg.LinAlgError):  # values may be out of bounds
            return False
        return not self.rows.terms.rest and self._is_anchored()

    def give_first(self) -> None:
        """Take the values that were given first, and data as they are now."""
        self._given.set_value(self.first)
        if not self.rows.renew():
            self.rows.retake()

    def _is_anchored(self) -> bool:
        """Take what is constant in log p from its value at the start, and tell whether rows agree near it."""
        for distance in _DISTANCES:
            points = np.concatenate([self._start[None], self._start + distance * self._apart])
            logp = self.logp(points)
            # Where log p is so large that its last digit counts, what is constant in it would be rounding.
            if not np.spacing(np.abs(logp[0])) < _NATS:
                return False
            if self.rows.anchor(points, logp):
                return True
        return False

    @functools.cached_property
    def _many(self) -> OverGiven:
        return OverGiven(self._given, self._compile_simplified)

    @functools.cached_property
    def logp_over(self) -> Callable[[Array, Array], Array]:
        """Log p, (n, m), at many values of what is given, (n, n_outside), and points (n, m, n_dim) for each."""
        return self._many.pointwise(pt.add(pt.constant(0.0), *self._parts), self._theta)

    def few_rows(self, which: list[NDArray[np.int64]], beside: NDArray[np.int64]) -> FewRows:
        """Return some rows, kind by kind, and predictors beside theirs, at many values of what is given."""
        over = OverGiven(self._given, self._compile)
        return FewRows(self._reading, self._theta, over, self._many, self.rows.engine, which, beside)

    @functools.cached_property
    def over(self) -> RowsOver | RowsLeftOver | None:
        """The same at many values of what is given; None where that takes one after the other."""
        if self.rows.joint is not None:
            return None
        points = np.concatenate([self._start[None], self._start + _DISTANCES[0] * self._apart])
        try:
            return RowsOver(
                self._reading, self._given, self._parts, self._theta, self.rows.engine, self._compile, points,
                self.rows.tolerance,
            )  # fmt: skip
        except (NotApart, NotImplementedError):
            return None

    @functools.cached_property
    def is_concave(self) -> bool:
        """Whether log p is concave in what is left, as far as its rows are looked at: with no more than one mode."""
        with np.errstate(all="ignore"):
            eta = self.rows.linear_map(self.start()[None])[0]
        return all(is_quadratic(rows) or is_concave(rows, eta[rows.index]) for rows in self.rows.functions)

    @functools.cached_property
    def is_quadratic(self) -> bool:
        """Whether log p is quadratic in what is left, and so a Gaussian, whatever is given."""
        return not self.rows.has_conditions and all(is_quadratic(rows) for rows in self.rows.functions)

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

    def drawn_inside(self, theta: Array, rng: np.random.Generator) -> Array:
        """Return draws of all that is not given, (n, n_inside), given those that are left, (n, n_dim): the same."""
        return theta

    def moments_inside(self, q: GaussianState) -> tuple[Array, Array]:
        """Return means and sds of all that is not given, (n_inside,) each, by a Gaussian of what is left."""
        return q.mean(), q.sd()

    def expected(
        self, q: Spread, rules: RowRules | None = None, *, adapt: bool = False, least: float = -np.inf
    ) -> Expectation:
        """Return the expectation under a Gaussian; see `RowsTarget`."""
        self.n_gradients += 1
        self.n_hessians += 1
        return self.rows.under(q, self, rules, adapt=adapt, least=least)

    def rows_cover(self, draw: Callable[[], Array]) -> bool:
        """Return True: rows are compared with log p where values are given."""
        return True

    def directions(self, rows: NDArray[np.intp]) -> Array:
        """Return the slopes of the only predictor of each of some rows; see `BentRowsTarget`."""
        return self.rows.directions(rows)

    @functools.cached_property
    def pattern(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0; None where it counts as dense."""
        pattern = pattern_of_rows(self.rows.functions, self.rows.predictors.dependence)
        return None if is_dense(pattern) else pattern

    @functools.cached_property
    def summed(self) -> SummedPattern | None:
        """The same beside sums over many coordinates; None where there are no such sums."""
        joint = self.rows.joint
        pattern = None if joint is None else pattern_of_rows(self.rows.functions, joint.dependence)
        return None if joint is None or pattern is None else SummedPattern(pattern, joint.linear_map.weights)
