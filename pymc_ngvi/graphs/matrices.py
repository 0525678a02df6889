"""Large known matrices, held where PyTensor does not look at their elements."""

from collections import defaultdict
from collections.abc import Collection

import numpy as np
import pytensor

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import toposort
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.math import Dot
from pytensor.tensor.subtensor import AdvancedSubtensor
from pytensor.tensor.variable import TensorConstant

#: Elements from which on a matrix is large.
_LARGE = 2**20


def hold_matrices(outputs: list[Variable]) -> list[Variable]:
    """Make shared variables of large constants that do nothing but multiply.

    To simplify a graph, PyTensor compares each element of a constant with the others, sums them up, looks for NaN, and
    copies what is transposed: as long as a whole evaluation, and as much memory as the data. What is made of other
    constants is computed once, beforehand, and stays one.
    """
    clients: defaultdict[Variable, list[Apply]] = defaultdict(list)
    for node in toposort(outputs):
        for var in node.inputs:
            clients[var].append(node)
    held: dict[tuple[object, ...], Variable] = {}
    found = {}
    for var in clients:
        if isinstance(var, TensorConstant) and var.data.size >= _LARGE and _multiplies(var, clients):
            data = var.data
            place = data.__array_interface__["data"], data.shape, data.strides, data.dtype
            if place not in held:  # the same array, used twice
                held[place] = pytensor.shared(data, borrow=True, shape=data.shape)
            found[var] = held[place]
    return list(graph_replace(outputs, found, strict=False)) if found else outputs


def hold_by_rows(outputs: list[Variable], indices: Collection[Variable]) -> list[Variable]:
    """Make shared variables, stored row by row, of constants whose rows are taken by an index that changes.

    Arrays made of data frames are stored column by column: taking 1,000 rows of 785 columns was seven times as slow.
    """
    found = {}
    for node in toposort(outputs):
        if isinstance(node.op, AdvancedSubtensor) and node.inputs[1] in indices:
            var = node.inputs[0]
            if isinstance(var, TensorConstant) and var.type.ndim > 1:
                found[var] = pytensor.shared(np.ascontiguousarray(var.data), borrow=True, shape=var.data.shape)
    return list(graph_replace(outputs, found, strict=False)) if found else outputs


def _multiplies(var: Variable, clients: defaultdict[Variable, list[Apply]]) -> bool:
    """Tell whether a matrix, or its transpose, is multiplied with others, and nothing else done to it."""
    if var.type.ndim != 2 or not np.issubdtype(var.type.dtype, np.floating):
        return False
    for node in clients[var]:
        op = node.op.core_op if isinstance(node.op, Blockwise) else node.op
        turned = isinstance(op, DimShuffle) and _multiplies(node.outputs[0], clients)
        if not (isinstance(op, Dot) or turned):
            return False
    return bool(clients[var])
