"""A few of the rows of log p, and predictors, at many values of what is given."""

from dataclasses import replace

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.graph.basic import Variable

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.values import Array
from pymc_ngvi.density.over import OverGiven
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.loops import vectorised
from pymc_ngvi.reading.lift import Source
from pymc_ngvi.reading.reading import Reading
from pymc_ngvi.reading.terms import Rows
from pymc_ngvi.rows.engines.engine import Engine
from pymc_ngvi.rows.expectation import RowFunction


class FewRows:
    """Some rows and some predictors.

    Parameters
    ----------
    reading : Reading
        At one value.
    theta : pytensor vector
    over, over_simplified : OverGiven
        Of graphs, and of those that were simplified before.
    engine : Engine
    which : sequence of ndarray of int
        Rows, for each kind.
    beside : ndarray of int
        Predictors beside those of these rows.

    Attributes
    ----------
    predictors : ndarray of int
        All of them, ascending.
    """

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
        """Return predictors at points, what is linear in them, and functions of rows.

        Parameters
        ----------
        values : ndarray, shape (n, n_given)

        Returns
        -------
        eta, slope : ndarray, shapes (n, n_points, n_predictors), (n, n_predictors)
        functions : list of RowFunction
            Of the rows of all values, those of one after those of another.
        """
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
