"""What is done otherwise with graphs of recursions that are written out step by step: thousands of small nodes.

PyTensor's rewrites take a time that grows with a power of the size of such graphs, minutes for a hundred steps, and
gain little. Which graphs count as large follows from their nodes alone; all others are treated as ever.
"""

from collections import defaultdict
from collections.abc import Collection
from functools import reduce

import numpy as np
import pytensor
import pytensor.scalar as ps
import pytensor.tensor as pt

from pytensor.graph import Apply, FunctionGraph, Variable, graph_replace
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.graph.traversal import toposort
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.special import LogAddExp, LogSumExp
from pytensor.tensor.subtensor import AdvancedSubtensor
from pytensor.tensor.variable import TensorConstant

from pymc_ngvi.core.sizes import STREAMED

# --- large known matrices, held where PyTensor does not look at their elements ---


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
        if isinstance(var, TensorConstant) and var.data.size >= STREAMED and _multiplies(var, clients):
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


#: Nodes of a log density beyond which rewriting all that is made of it takes longer than it saves: about 5 ms for each
#: of several times as many, and more than in proportion. Models that are written with vectors have 50 to 300.
_LARGE = 500
#: Terms of all sums for each node of a graph, were sums of sums written as one: up to 1 in models written with vectors,
#: 30 where 30 steps each add to what all steps before have added.
_MOST_TERMS = 4
#: Rewrites that write sums of sums, and products of products, as one, again at each place where they are used.
FLATTENING = ("local_add_canonizer", "local_mul_canonizer", "local_greedy_distributor")
#: What is left of the rewrites for the functions of a large graph, whose parts were simplified before.
FEW = (
    "merge",
    "canonicalize_db",
    "constant_folding",
    "local_mul_zero",
    "local_second_sink",
    "local_useless_elemwise",
    "local_useless_fill",
    "local_useless_unbatched_blockwise",
)


def is_large(logp: Variable) -> bool:
    """Tell whether a log density, before it is simplified, makes large graphs."""
    nodes = list(toposort([logp]))
    return len(nodes) > _LARGE or _flat_terms(nodes, [logp]) > _MOST_TERMS * len(nodes)


def _flat_terms(nodes: list[Apply], outputs: list[Variable]) -> int:
    """Count the terms of all sums, were each that is used by anything but a sum written as one."""
    terms: dict[Variable, int] = {}
    used = set(outputs)
    for node in nodes:
        [out, *_] = node.outputs
        if isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, ps.Add | ps.Sub):
            terms[out] = sum(terms.get(i, 1) for i in node.inputs)
        elif isinstance(node.op, DimShuffle) and node.op.is_left_expand_dims:
            terms[out] = terms.get(node.inputs[0], 1)
        else:
            used.update(node.inputs)
    return sum(n for var, n in terms.items() if var in used)


class ScalarLogAddExp(ps.BinaryScalarOp):
    """log(exp(x) + exp(y)), with derivatives of two nodes each."""

    nfunc_spec = ("numpy.logaddexp", 2, 1)

    def impl(self, x: float, y: float) -> float:
        """Return the value of one element."""
        return float(np.logaddexp(x, y))

    def pullback(
        self, inputs: list[Variable], outputs: list[Variable], output_gradients: list[Variable]
    ) -> list[Variable]:
        """Return the derivatives."""
        x, y = inputs
        [g] = output_gradients
        return [g * ps.sigmoid(x - y), g * ps.sigmoid(y - x)]


class _ShortLogSumExp(LogSumExp):
    """PyTensor's, with a derivative from its value: PyTensor differentiates each step of it."""

    def pullback(
        self, inputs: list[Variable], outputs: list[Variable], output_gradients: list[Variable]
    ) -> list[Variable]:
        [x], [out], [g] = inputs, outputs, output_gradients
        return [pt.expand_dims(g, self.axis) * pt.exp(x - pt.expand_dims(out, self.axis))]


_log_add_exp = Elemwise(ScalarLogAddExp(ps.upgrade_to_float, name="log_add_exp"), name="LogAddExp")


@node_rewriter([LogAddExp, LogSumExp])  # type: ignore[untyped-decorator]
def _short_derivative(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    if isinstance(node.op, _ShortLogSumExp):
        return None
    if isinstance(node.op, LogSumExp):
        return [_ShortLogSumExp(axis=node.op.axis)(*node.inputs)]
    return [short_log_add_exp(node.inputs)]


def short_log_add_exp(terms: list[Variable]) -> Variable:
    """Return the log of the sum of exponentials of variables, with derivatives of few nodes."""
    return reduce(_log_add_exp, terms)


#: Puts in the place of log-sums of exponentials, of which recursions consist, others with fewer nodes.
short_derivatives = dfs_rewriter(_short_derivative)
