"""Adding up by group: the gradient of ``b[group]``, in every multilevel model.

PyTensor runs it by ``numpy.add.at``, which goes through its arguments one by one where they have several axes. With a
constant index, the entries can be put in order once, and added up by ``numpy.add.reduceat``.
"""

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.tensor.subtensor import AdvancedIncSubtensor

from pymc_ngvi.core.values import AnyArray


class AddByGroup(Op):
    """``x[..., index, ...] += y`` for a constant vector index that repeats entries.

    Parameters
    ----------
    idx_list : tuple
        As of `AdvancedIncSubtensor`; 0 stands for the vector.
    axis : int
        Of the vector, in x and in y.
    """

    __props__ = ("idx_list", "axis")

    def __init__(self, idx_list: tuple[slice | int, ...], axis: int) -> None:
        self.idx_list = idx_list
        self.axis = axis

    def make_node(
        self, x: Variable, y: Variable, order: Variable, starts: Variable, groups: Variable, *others: Variable
    ) -> Apply:
        """Take x and y, what puts y in the order of its groups, where each begins there, and its place in x."""
        inputs = [pt.as_tensor(i) for i in (x, y, order, starts, groups, *others)]
        return Apply(self, inputs, [inputs[0].type()])

    def perform(self, node: Apply, inputs: list[AnyArray], output_storage: list[list[AnyArray | None]]) -> None:
        """Add up."""
        x, y, order, starts, groups, *others = inputs
        indices = (groups, *(other.reshape(()) for other in others))
        where = tuple(i if isinstance(i, slice) else indices[i] for i in self.idx_list)
        out = x.copy()
        # No group twice: plain addition is right.
        out[where] += np.add.reduceat(y.take(order, axis=self.axis), starts, axis=self.axis)
        output_storage[0][0] = out


@node_rewriter([AdvancedIncSubtensor])  # type: ignore[untyped-decorator]
def add_by_group(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Use `AddByGroup` where the index is a constant vector, beside scalars and whole axes."""
    op = node.op
    x, y, *indices = node.inputs
    if op.set_instead_of_inc or op.ignore_duplicates or not _is_plain(op.idx_list):
        return None
    if not all(isinstance(index, Constant) and index.type.dtype.startswith("int") for index in indices):
        return None
    vector = np.asarray(indices[0].data)
    if vector.ndim != 1 or vector.size < 2 or vector.min() < 0 or any(i.data.size != 1 for i in indices[1:]):
        return None
    axis = op.idx_list.index(0)
    if y.type.ndim != x.type.ndim - len(indices) + 1 or y.type.shape[axis] != vector.size:
        return None
    order, starts, groups = _groups(vector)
    return [AddByGroup(op.idx_list, axis)(x, y, order, starts, groups, *indices[1:])]


def _is_plain(idx_list: tuple[slice | int, ...]) -> bool:
    """Tell whether the vector comes first among neighbouring indices, and all else are whole axes."""
    places = [place for place, i in enumerate(idx_list) if not isinstance(i, slice)]
    in_order = [idx_list[place] for place in places] == list(range(len(places)))
    neighbours = places == list(range(places[0], places[0] + len(places))) if places else False
    return in_order and neighbours and all(i == slice(None) for i in idx_list if isinstance(i, slice))


def _groups(vector: AnyArray) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    order = np.argsort(vector, kind="stable")
    groups, starts = np.unique(vector[order], return_index=True)
    return order.astype(np.intp), starts.astype(np.intp), groups.astype(np.intp)
