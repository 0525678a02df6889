"""Graphs that hang on given values at many of these: the same graphs, with one more axis."""

from collections.abc import Callable

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.basic import Variable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.values import Array
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.loops import vectorised
from pymc_ngvi.reading.found import Compile


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
        with without_c():
            matrix, at_points = graph.over_draws([output], theta)
            at_points = graph.with_shapes(at_points)
        # One axis after the other: a static length of 1, of an axis of both, would be lost where PyTensor reshapes.
        values = pt.matrix("values", dtype="float64", shape=(None, self._n))
        points = pt.tensor3("points", dtype="float64", shape=(None, None, matrix.type.shape[1]))
        [batched] = self._vectorised(at_points, {self._given: values, matrix: points})
        batched = batched + 0.0 * (values[:, :1] + points[:, :, 0])
        function = self._compile([values, points], batched)
        return lambda at, theta: np.asarray(function(np.ascontiguousarray(at), np.ascontiguousarray(theta)))

    def _vectorised(self, outputs: list[Variable], new: dict[Variable, Variable]) -> list[Variable]:
        """Return outputs with an axis in front; what is given is an input, and not shared, by then."""
        with without_c():
            stand_in = pt.vector("given", dtype="float64", shape=(self._n,))
            apart = graph_replace(outputs, {self._given: stand_in}, strict=False)
            inputs = {stand_in if var is self._given else var: batch for var, batch in new.items()}
            return vectorised(list(apart), inputs)
