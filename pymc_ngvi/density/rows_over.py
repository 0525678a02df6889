"""Log p as rows at many values of the coordinates that are given, all in one evaluation; see `rows.many`.

What `RowsGiven` reads at one value stays when that changes: which elements are rows, and of what predictors. Numbers
that hang on it are computed for hundreds of values by the same graphs, with one more axis.
"""

import functools

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.graph.basic import Variable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.refusal import NotApart
from pymc_ngvi.core.values import Array
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.loops import vectorised
from pymc_ngvi.reading.found import Compile
from pymc_ngvi.reading.reading import Reading
from pymc_ngvi.reading.terms import Rows
from pymc_ngvi.rows.engines.on_pytensor import Engine
from pymc_ngvi.rows.entries import Entries, ManyMaps, Sparsity
from pymc_ngvi.rows.expectation import RowFunction
from pymc_ngvi.rows.many import ManyRows, ManyRowsLeft, Narrowing
from pymc_ngvi.rows.own_effects import OwnEffects

# --- graphs that hang on given values at many of these: the same graphs, with one more axis ---


class OverGiven:
    """Puts an axis of values in front of graphs that hang on what is given."""

    def __init__(self, given: Variable, compile_: Compile) -> None:
        self._given, self._compile = given, compile_
        [self._n] = given.type.shape

    def hangs(self, var: Variable) -> bool:
        """Tell whether a variable hangs on it."""
        return self._given in set(ancestors([var]))

    def outputs(self, outputs: list[Variable], inputs: list[Variable]) -> Callable[..., list[Array]]:
        """Return a function of values, (n, n_given), and inputs: outputs that hang on values have an axis in front.

        Others have one of length 1.
        """
        if not outputs:
            return lambda values, *others: []
        values = pt.matrix("values", dtype="float64", shape=(None, self._n))
        batched = self._vectorised(outputs, {self._given: values})
        batched = [
            b if self.hangs(o) and b.type.ndim > o.type.ndim else pt.expand_dims(b, 0)
            for b, o in zip(batched, outputs, strict=True)
        ]
        function = self._compile([values, *inputs], batched)
        return lambda at, *others: [np.asarray(out) for out in function(at, *others)]

    def pointwise(self, output: Variable, theta: Variable) -> Callable[[Array, Array], Array]:
        """Return a function of values, (n, n_given), and of points at each, (n, m, n_dim)."""
        points = pt.tensor3("points", dtype="float64", shape=(None, None, *theta.type.shape))

        def compiled(length: int | None) -> Callable[[Array, Array], Array]:
            values = pt.tensor3("values", dtype="float64", shape=(None, length, self._n))
            [batched] = self._vectorised([output], {self._given: values, theta: points})
            batched = batched + 0.0 * (values[:, :, 0] + points[:, :, 0])
            function = self._compile([values, points], batched)
            return lambda at, theta: np.asarray(
                function(np.repeat(at[:, None], length or theta.shape[1], axis=1), np.ascontiguousarray(theta))
            )

        once = compiled(1)
        try:
            once(np.zeros((2, self._n)), np.zeros((2, 2, *theta.type.shape)))
        except np.linalg.LinAlgError:  # of these values, not of shapes; it is a ValueError, too
            return once
        except ValueError:  # a static length of 1 is lost where PyTensor reshapes: values are repeated at each point
            return compiled(None)
        return once

    def _vectorised(self, outputs: list[Variable], new: dict[Variable, Variable]) -> list[Variable]:
        """Return outputs with an axis in front; what is given is an input, and not shared, by then."""
        with without_c():
            stand_in = pt.vector("given", dtype="float64", shape=(self._n,))
            apart = graph_replace(outputs, {self._given: stand_in}, strict=False)
            inputs = {stand_in if var is self._given else var: batch for var, batch in new.items()}
            return vectorised(list(apart), inputs)


#: Relative difference of two values of log p that is rounding; nats that what is constant in it may be off by.
_ROUNDING, _NATS = 1e-9, 0.01


class RowsOver:
    """Rows at many values of what is given."""

    def __init__(
        self,
        reading: Reading,
        given: Variable,
        parts: list[Variable],
        theta: Variable,
        engine: Engine,
        compile_: Compile,
        points: Array,
        tolerance: float,
    ) -> None:
        if any(rows.is_whole for rows in reading.terms.rows):
            raise NotApart("a row is more than arithmetic with numbers")
        self._reading, self._terms, self._engine = reading, reading.terms, engine
        self._points, self._tolerance = points, tolerance
        over = OverGiven(given, compile_)
        self._logp = over.pointwise(pt.add(pt.constant(0.0), *parts), theta)
        self._predictors = _Predictors(reading, theta, over)
        weigh = self._terms.weigh
        self._weights = over.outputs(weigh.outputs, weigh.inputs)
        known = dict.fromkeys(s.var for r in self._terms.rows for s in r.sources.values() if not s.is_weight)
        self._known = list(known)
        self._values = over.outputs(self._known, [])
        self._shares = any((r.index == r.index[0]).all(axis=0).any() for r in self._terms.rows if len(r.index) > 1)
        self.entries = Entries(
            self._predictors.sparsity,
            self._predictors.columns,
            [
                np.ascontiguousarray(rows.index[:, [a, b]])
                for rows in self._terms.rows
                for a in range(rows.index.shape[1])
                for b in range(a + 1)
            ],
        )

    @property
    def n_values(self) -> int:
        """Numbers of the predictors at one value."""
        return self._predictors.n_values

    @property
    def sparsity(self) -> Sparsity:
        """Where predictors' matrices have entries, but for their dense columns."""
        return self._predictors.sparsity

    @property
    def columns(self) -> NDArray[np.intp]:
        """These columns."""
        return self._predictors.columns

    def logp(self, values: Array, theta: Array) -> Array:
        """Return log p, (n, m), at points (n, m, n_dim) for each of the values, (n, n_outside)."""
        with np.errstate(all="ignore"):
            return self._logp(values, theta)

    def at(self, values: Array) -> tuple[ManyRows, NDArray[np.bool_]]:
        """Return rows at some values, (n, n_outside), and at which of them they add up to log p.

        Elsewhere, numbers mean nothing.
        """
        if len(values) == 1 and self._shares:  # an engine would put first what all rows of one value share
            rows, is_right = self.at(np.repeat(values, 2, axis=0))
            return rows[np.array([0])], is_right[:1]
        n = len(values)
        with np.errstate(all="ignore"), without_c():
            maps = self._predictors.maps(values)
            weigh = self._terms.weigh
            total: dict[Variable, Array] = {}
            for (_, var), weight in zip(weigh.pairs, self._weights(values, *weigh.zeros()), strict=True):
                total[var] = total.get(var, 0.0) + _flat(weight)
            known = dict(zip(self._known, (_flat(v) for v in self._values(values)), strict=True))
            slope = np.zeros_like(maps.offset)
            predictors = self._reading.predictors.vector
            if predictors in total:
                slope = slope + total.pop(predictors)
            functions = [self._function(rows, known, total, n) for rows in self._terms.rows]
        is_right = self._counted(total)
        rows = ManyRows(maps, self.entries, functions, slope, np.zeros(n), self._tolerance)
        constant, agrees = self._anchored(rows, values)
        return replace(rows, constant=np.where(np.isfinite(constant), constant, -np.inf)), is_right & agrees

    def _function(self, rows: Rows, known: dict[Variable, Array], total: dict[Variable, Array], n: int) -> RowFunction:
        data = {}
        for var, source in rows.sources.items():
            values = (total if source.is_weight else known)[source.var][:, source.elements]
            data[var] = np.broadcast_to(values, (n, len(rows.index))).reshape(1, -1).astype(var.type.dtype)
        for var, values in rows.data.items():  # of no source: the same at all values
            data.setdefault(var, np.tile(values, (1, n)) if values.shape[1] > 1 else values)
        apart = len(self._terms.slope) * np.arange(n)[:, None, None]
        index = (rows.index + apart).reshape(-1, rows.index.shape[1])
        return self._engine.row_function(replace(rows, index=index, data={v: data[v] for v in rows.data}))

    def _counted(self, total: dict[Variable, Array]) -> NDArray[np.bool_]:
        """Tell at which values as many elements of log p count as where it was read."""
        n_before = sum(len(s.elements) for rows in self._terms.rows for s in rows.sources.values() if s.is_weight)
        counts = sum(np.count_nonzero(weight, axis=1) for weight in total.values())
        return np.asarray(counts == n_before)

    def _anchored(self, rows: ManyRows, values: Array) -> tuple[Array, NDArray[np.bool_]]:
        """Return what is constant in log p, and where rows agree with it."""
        n, points = len(values), self._points
        at = np.broadcast_to(points, (n, *points.shape))
        logp = self.logp(values, at)
        with np.errstate(all="ignore"):
            of_rows = rows.values(np.swapaxes(at, 1, 2))
            constant = logp[:, 0] - of_rows[:, 0]
            size = 1.0 + np.abs(logp) + np.abs(constant)[:, None]
            apart = np.abs(of_rows + constant[:, None] - logp) > _ROUNDING * size
            agrees = ~(apart & np.isfinite(logp)).any(axis=1) & np.isfinite(constant)
            # Where log p is so large that its last digit counts, what is constant in it would be rounding.
            return constant, agrees & (np.spacing(np.abs(logp[:, 0])) < _NATS)


class _Predictors:
    """The predictors' matrices at many values."""

    def __init__(self, reading: Reading, theta: Variable, over: OverGiven) -> None:
        found = reading.predictors
        self._plan = found.plan
        hanging = [var for var in found.variables if over.hangs(var)]
        sizes = [found.size(var) for var in found.variables]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        self._where = np.concatenate(
            [
                np.arange(a, b)
                for var, a, b in zip(found.variables, starts[:-1], starts[1:], strict=True)
                if var in hanging
            ]
            or [np.empty(0, dtype=np.intp)]
        ).astype(np.intp)
        self._fixed = found.linear_map
        order = np.lexsort((self._plan.cols, self._plan.rows))
        self._order = order
        counts = np.bincount(self._plan.rows, minlength=self._plan.n_rows)
        [n_dim] = theta.type.shape
        self.sparsity = Sparsity(np.concatenate([[0], np.cumsum(counts)]), self._plan.cols[order], n_dim)
        self.columns = self._plan.columns
        self._evaluate = None
        if hanging:
            with without_c():
                points = pt.matrix("points", dtype="float64", shape=(None, n_dim))
                everything = pt.concatenate([var.ravel() for var in hanging])
                [at_points] = vectorised([everything], {theta: points})
            self._evaluate = over.outputs([at_points], [points])
            self._directions = np.concatenate([np.zeros((1, n_dim)), self._plan.directions])

    @property
    def n_values(self) -> int:
        """Numbers that are computed at one value."""
        return (1 + len(self._plan.directions)) * max(len(self._where), 1)

    @functools.cached_property
    def _of_fixed(self) -> Array:
        """Entries of the sparse part, in the order of `sparsity`, where the linear map was found."""
        rest = self._fixed.rest
        rows, cols = self._plan.rows[self._order], self._plan.cols[self._order]
        return np.asarray(rest[rows, cols]).ravel() if len(rows) else np.empty(0)

    def maps(self, values: Array) -> ManyMaps:
        """Return the predictors as functions of theta at values, (n, n_given)."""
        n, plan = len(values), self._plan
        offset = np.tile(self._fixed.offset, (n, 1))
        data, dense = np.tile(self._of_fixed, (n, 1)), self._fixed.dense[None]
        if self._evaluate is None:
            return ManyMaps(offset, dense, self.columns, data, self.sparsity)
        [found] = self._evaluate(values, self._directions)  # (n, 1 + n_directions, n_hanging)
        found = np.broadcast_to(found, (n, *found.shape[1:]))
        offset[:, self._where] = found[:, 0]
        apart = found[:, 1:] - found[:, :1]
        n_colours = len(plan.directions) - len(self.columns)
        if len(self.columns) and (apart[:, n_colours:] != self._fixed.dense[self._where].T).any():
            dense = np.repeat(dense, n, axis=0)
            dense[:, self._where] = np.swapaxes(apart[:, n_colours:], 1, 2)
        if data.shape[1]:
            place = np.full(plan.n_rows, -1, dtype=np.intp)
            place[self._where] = np.arange(len(self._where))
            rows, colours = plan.rows[self._order], plan.colours[self._order]
            some = np.flatnonzero(place[rows] >= 0)
            data[:, some] = apart[:, colours[some], place[rows[some]]]
        return ManyMaps(offset, dense, self.columns, data, self.sparsity)


def _flat(found: Array) -> Array:
    """Return numbers at each value, (n, n_elements) or (1, n_elements)."""
    return found.reshape(len(found), -1)


# --- log p as rows at many values of what is given, with effects that one row alone reads integrated out ---


class RowsLeftOver:
    """Rows of what is left at many values of what is given."""

    def __init__(self, whole: RowsOver, effects: OwnEffects, functions: Sequence[RowFunction]) -> None:
        self._whole = whole
        self._narrowing = Narrowing(effects, functions, whole.sparsity, whole.columns)
        self.entries = self._narrowing.entries

    @property
    def n_values(self) -> int:
        """Numbers of the predictors at one value."""
        return self._whole.n_values

    def at(self, values: Array) -> tuple[ManyRows, NDArray[np.bool_]]:
        """Return rows at some values, (n, n_outside), and at which of them they add up to log p."""
        rows, agrees = self._whole.at(values)
        if not agrees.any():
            return rows, agrees
        with np.errstate(all="ignore"):
            narrowed, is_right = self._narrowing.of(rows)
        return narrowed, agrees & is_right

    def logp(self, values: Array, theta: Array) -> Array:
        """Return log p, (n, m), at points (n, m, n_dim) for each of the values, (n, n_outside)."""
        rows, agrees = self.at(values)
        result = np.full(theta.shape[:2], -np.inf)
        if isinstance(rows, ManyRowsLeft):
            result[agrees] = rows.values(np.swapaxes(theta, 1, 2))[agrees]
        return result
