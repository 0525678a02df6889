"""Graphs that hang on given values at many of these: the same graphs, with one more axis."""

from collections.abc import Callable

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.basic import Variable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.values import Array
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
