"""Minibatches: the random row indices of ``pm.Minibatch``, held fixed until the next batch is asked for.

PyMC draws new indices at every call of a compiled function, so that log p, its gradient and its Hessian, compiled
apart, would each see other rows. Here they read the same shared vectors of indices.
"""

from dataclasses import dataclass

import numpy as np
import pytensor

from numpy.typing import NDArray
from pymc.data import MinibatchIndexRV, MinibatchOp
from pytensor.compile import Function
from pytensor.compile.rewriting import inline_ofg_node
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import toposort

from pymc_ngvi.graphs.backends import quick_mode, without_c

#: Marks the random streams behind the orders of the rows.
_PASSES = 6
_NO_ROWS = "pm.Minibatch needs at least one row of data to choose from; there are none."


@dataclass(frozen=True)
class _Index:
    """The rows that one call of ``pm.Minibatch`` selects: uniform in low, ..., high - 1, with replacement."""

    rows: Variable  # shared vector
    low: Variable
    high: Variable  # of a graph, for data may be shared variables


class Minibatches:
    """The row indices of all ``pm.Minibatch`` calls that some graphs depend on.

    Arrays of one call share their rows; separate calls have their own. The first batch is made with a fixed seed.
    """

    def __init__(self, outputs: list[Variable]) -> None:
        # PyMC clones graphs, but not the shared generator, which each call has for itself.
        self._indices: dict[Variable, _Index] = {}
        self._function: Function | None = None
        self._orders: dict[tuple[int, int, int], NDArray[np.intp]] = {}  # of the pass under way, of each call
        for node in _index_nodes(_inline(outputs)):
            if node.inputs[0] not in self._indices:
                self._indices[node.inputs[0]] = self._make(node)
        self.next_batch(np.random.default_rng(0))

    def __bool__(self) -> bool:
        return bool(self._indices)

    @property
    def rows(self) -> list[Variable]:
        """The shared vectors of row indices, one for each call."""
        return [index.rows for index in self._indices.values()]

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: the compiled function is made again when it is needed."""
        return {**self.__dict__, "_function": None, "_orders": {}}

    def hold(self, outputs: list[Variable]) -> list[Variable]:
        """Return ``outputs`` with the rows of the current batch in place of those that PyMC draws at random."""
        if not self._indices:
            return outputs
        outputs = _inline(outputs)
        rows = {
            node.outputs[1]: self._indices[node.inputs[0]].rows
            for node in _index_nodes(outputs)
            if node.inputs[0] in self._indices
        }
        return list(graph_replace(outputs, rows, strict=False)) if rows else outputs

    def next_batch(self, rng: np.random.Generator) -> None:
        """Draw new rows from ``rng``, for every graph that `hold` returned."""
        for index, low, high in zip(self._indices.values(), *self._bounds(), strict=True):
            n_rows = index.rows.type.shape[0]
            if not low < high:
                raise ValueError(_NO_ROWS)
            index.rows.set_value(rng.integers(low, high, size=n_rows))

    @property
    def n_batches(self) -> int:
        """Batches that make one pass through the data, of the call with most; 1 where there are none."""
        sizes = [index.rows.type.shape[0] for index in self._indices.values()]
        counts = [-(-(high - low) // n) for n, low, high in zip(sizes, *self._bounds(), strict=True)]
        return max(counts, default=1)

    def take_batch(self, seed: int, number: int) -> None:
        """Take batch ``number``, from 0, of passes through the data, each in a random order that ``seed`` tells."""
        for call, (index, low, high) in enumerate(zip(self._indices.values(), *self._bounds(), strict=True)):
            n_rows, size = index.rows.type.shape[0], high - low
            if size < 1:
                raise ValueError(_NO_ROWS)
            first, last = number * n_rows, (number + 1) * n_rows
            parts = []
            for which in range(first // size, -(-last // size)):  # a batch may end one pass and begin another
                order = self._order(seed, which, call, size)
                parts.append(order[max(first - which * size, 0) : last - which * size])
            index.rows.set_value(low + np.concatenate(parts))

    def _order(self, seed: int, which: int, call: int, size: int) -> NDArray[np.intp]:
        """Return the order of the rows in one pass; the last one of each call is kept."""
        key = (seed, which, call)
        order = self._orders.get(key)
        if order is None or len(order) != size:
            order = np.random.default_rng([seed, which, call, _PASSES]).permutation(size)
            self._orders = {k: v for k, v in self._orders.items() if k[2] != call} | {key: order}
        return order

    def _make(self, node: Apply) -> _Index:
        [batch_size] = node.op.size_param(node).data
        rows = pytensor.shared(np.zeros(batch_size, dtype="int64"), name="minibatch_rows", shape=(int(batch_size),))
        low, high = node.op.dist_params(node)
        # The bounds of a Minibatch of a Minibatch depend on indices, already made, of the one inside.
        return _Index(rows, *self.hold([low, high]))

    def _bounds(self) -> tuple[list[int], list[int]]:
        """Return the first row and the number of rows of each call, from the data as they are now."""
        if not self._indices:
            return [], []
        bounds = [bound for index in self._indices.values() for bound in (index.low, index.high)]
        try:
            with without_c():
                self._function = self._function or pytensor.function([], bounds, mode=quick_mode())
                values = [int(value.item()) for value in self._function()]  # of one element, but not of no axes
        except AssertionError as error:
            raise ValueError(
                "The arrays of one pm.Minibatch call have different numbers of rows. Give arrays that go together "
                "row by row."
            ) from error
        return values[::2], values[1::2]


def _inline(outputs: list[Variable]) -> list[Variable]:
    """Put the graph that each ``pm.Minibatch`` wraps in its place, in a copy: the model's own graph stays as it is."""
    while True:
        node = next((node for node in toposort(outputs) if isinstance(node.op, MinibatchOp)), None)
        if node is None:
            return outputs
        inner = dict(zip(node.outputs, inline_ofg_node(node), strict=True))
        outputs = list(graph_replace(outputs, inner, strict=False))


def _index_nodes(outputs: list[Variable]) -> list[Variable]:
    return [node for node in toposort(outputs) if isinstance(node.op, MinibatchIndexRV)]
