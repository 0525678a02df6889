"""Where the free variables of a model meet the rows of its data, from the graph of the log densities of these rows.

Each variable of the graph has at most one axis of rows. It is followed from the log densities back through the
operations that keep rows apart, to the places where what all rows share comes in: as weights of a matrix product, or
element by element.
"""

from dataclasses import dataclass

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape
from pytensor.tensor.special import LogAddExp
from pytensor.tensor.subtensor import AdvancedSubtensor, Subtensor

from pymc_ngvi.core.refusal import Reason, RefusedFor
from pymc_ngvi.graphs.inner import copy_of
from pymc_ngvi.ops.registry import operation


class NoLayers(RefusedFor):
    """An operation is not known to keep rows apart, or the rows have no axis of their own."""

    reason = Reason.NO_LAYERS


@dataclass(frozen=True)
class DenseLayer:
    """Weights of a matrix product with rows."""

    #: The weights, (n_in, n_out), or transposed.
    shared: Variable
    #: What is multiplied, (n_rows, n_in), and the product, (n_rows, n_out); or transposed.
    inputs: Variable
    tap: Variable
    transposed: bool

    def pair(self, slope: Variable) -> tuple[Variable, Variable]:
        """Return inputs and the slope of the product, with rows along the first axis."""
        return (self.inputs.T, slope.T) if self.transposed else (self.inputs, slope)

    def by_rows(self, slope: Variable) -> Variable:
        """Return the derivatives of each row with respect to the weights, (n_rows, ...)."""
        inputs, slope = self.pair(slope)
        first, second = (slope, inputs) if self.transposed else (inputs, slope)
        return first[:, :, None] * second[:, None, :]


@dataclass(frozen=True)
class Copied:
    """A variable that each row reads, element by element."""

    #: Of length 1 along the axis of rows.
    shared: Variable
    #: Copies of it, one for each row.
    tap: Variable
    axis: int

    def by_rows(self, slope: Variable) -> Variable:
        """Return the derivatives of each row with respect to the variable, (n_rows, ...)."""
        order = [self.axis, *["x" if k == self.axis else k for k in range(slope.type.ndim)]]
        return slope.dimshuffle(order)


@dataclass(frozen=True)
class Own:
    """Elements of theta that are of one row each, or of one group of rows."""

    #: No element of theta is twice in a row of it.
    tap: Variable

    @property
    def shared(self) -> Variable:
        """The same."""
        return self.tap


Tap = DenseLayer | Copied | Own


def find_taps(row: Variable, theta: Variable) -> tuple[Variable, list[Tap]]:
    """Find where theta comes into the log densities of rows, along their first axis."""
    if row.type.ndim not in (1, 2) or row.type.broadcastable[0]:
        raise NoLayers("one row")
    fgraph = copy_of([row])
    search = _TapSearch(fgraph, theta)
    search.assign(fgraph.outputs[0], 0)
    for node in reversed(fgraph.toposort()):
        for out in node.outputs:
            if out in search.axes:
                search.follow(node, out, search.axes[out])
    if theta in search.axes:
        search.taps.append(Own(theta))
    return fgraph.outputs[0], search.taps


def is_part(var: Variable, theta: Variable) -> bool:
    """Tell whether a variable has elements of theta, each of them once at most."""
    while var is not theta:
        node = var.owner
        if node is None or not isinstance(node.op, Subtensor | Reshape | DimShuffle):
            return False
        var = node.inputs[0]
    return True


class _TapSearch:
    def __init__(self, fgraph: FunctionGraph, theta: Variable) -> None:
        self._fgraph, self._theta = fgraph, theta
        found = {theta}
        for node in fgraph.toposort():
            if not found.isdisjoint(node.inputs):
                found.update(out for out in node.outputs if "float" in getattr(out.type, "dtype", ""))
        self._depends = found
        self._copies: dict[tuple[Variable, int], Variable] = {}
        self.axes: dict[Variable, int] = {}
        self.taps: list[Tap] = []

    def assign(self, var: Variable, axis: int) -> None:
        """Note which axis of a variable is that of rows."""
        if var in self._depends and self.axes.setdefault(var, axis) != axis:
            raise NoLayers("two axes of rows")

    def follow(self, node: Apply, out: Variable, axis: int) -> None:
        """Go on from the output of a node to its inputs."""
        op = node.op
        if is_part(out, self._theta):
            self.taps.append(Own(out))
        elif isinstance(op, Elemwise | LogAddExp) and all(i.type.ndim == out.type.ndim for i in node.inputs):
            self._elementwise(node, out, axis)
        elif isinstance(op, Dot):
            rows, shared = node.inputs if axis == 0 else node.inputs[::-1]
            self.assign(rows, axis)
            if shared in self._depends:
                self.taps.append(DenseLayer(shared, rows, out, transposed=axis == 1))
        elif isinstance(op, AdvancedSubtensor):
            source, index, *_ = node.inputs
            if axis != 0 or node.op.idx_list[0] != 0 or "int" not in index.type.dtype:
                raise NoLayers("an index")
            if _counts_rows(index, source):
                self.assign(source, 0)
            elif is_part(source, self._theta) and index.type.ndim == 1 and len(node.inputs) == 2:
                self.taps.append(Own(out))
            else:
                raise NoLayers("an index")
        else:
            rule = operation(op).axis
            found = None if isinstance(rule, str) or isinstance(op, Blockwise) else rule(node, out, axis)
            if found is None:
                raise NoLayers(str(op))
            for var in node.inputs:
                self.assign(var, found)

    def _elementwise(self, node: Apply, out: Variable, axis: int) -> None:
        rowed = next(i for i in node.inputs if not i.type.broadcastable[axis])
        for at, var in enumerate(node.inputs):
            if var not in self._depends:
                continue
            if not var.type.broadcastable[axis]:
                self.assign(var, axis)
                continue
            if (var, axis) not in self._copies:
                shape = [rowed.shape[k] if k == axis else var.shape[k] for k in range(var.type.ndim)]
                static = [rowed.type.shape[k] if k == axis else var.type.shape[k] for k in range(var.type.ndim)]
                lengths = [s if n is None else n for s, n in zip(shape, static, strict=True)]
                self._copies[var, axis] = pt.alloc(var, *lengths)
                self.taps.append(Copied(var, self._copies[var, axis], axis))
            self._fgraph.change_node_input(node, at, self._copies[var, axis], check=False)


def _counts_rows(index: Variable, source: Variable) -> bool:
    """Tell whether an index takes each row in its turn."""
    if not isinstance(index, Constant) or index.data.ndim == 0 or index.data.size != index.data.shape[0]:
        return False
    n_rows = index.data.size
    return source.type.shape[0] in (None, n_rows) and np.array_equal(index.data.ravel(), np.arange(n_rows))
