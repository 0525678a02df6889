"""Statistics of the data by which a model standardises them, such as means: they stay those of the fit."""

from collections.abc import Collection, Sequence

import pytensor

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.scalar.basic import Add
from pytensor.tensor.elemwise import CAReduce
from pytensor.tensor.shape import Shape, Shape_i

from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.graphs.backends import quick_mode, without_c


def statistics(
    outputs: Sequence[Variable], data: Collection[Variable], lengths: Collection[int]
) -> dict[Variable, AnyArray]:
    """Return the values of means, standard deviations, maxima and the like of data, by which rows are standardised.

    A sum that is not divided by the number of rows is none of these: with it, weights of the rows that are there are
    made to add up to 1.

    Parameters
    ----------
    outputs : sequence of pytensor variables
    data : collection of pytensor variables
        Those that are to change: shared, and still with their values of the fit.
    lengths : collection of int
        Of their rows.

    Returns
    -------
    dict
        The last variables of each such computation: in ``(x - m) / s``, ``m`` and ``s``.
    """
    nodes = list(toposort(outputs))
    from_data = _from(nodes, set(data))
    reduced = [node for node in nodes if isinstance(node.op, CAReduce) and node.inputs[0] in from_data]
    over_rows = [
        node
        for node, shape in zip(reduced, _shapes([node.inputs[0] for node in reduced]), strict=True)
        if any(shape[axis] in lengths for axis in (range(len(shape)) if node.op.axis is None else node.op.axis))
    ]
    made, standard = _of_all_rows(nodes, over_rows)
    uses = [
        (used, node.outputs[0])
        for node in nodes
        for used in node.inputs
        if used in standard and made.isdisjoint(node.outputs)
    ]
    shapes = _shapes([output for _, output in uses])
    last = {used: None for (used, _), shape in zip(uses, shapes, strict=True) if not set(shape).isdisjoint(lengths)}
    return dict(zip(last, _evaluated(list(last)), strict=True))


def _of_all_rows(nodes: Sequence[Apply], over_rows: Sequence[Apply]) -> tuple[set[Variable], set[Variable]]:
    """Return what is made of reductions over rows alone, and what of it has more in it than sums."""
    made = {node.outputs[0] for node in over_rows}
    standard = {node.outputs[0] for node in over_rows if not isinstance(node.op.scalar_op, Add)}
    constant, counts = set[Variable](), set[Variable]()  # counts: made of lengths of data
    for node in nodes:
        if isinstance(node.op, Shape | Shape_i):
            counts |= set(node.outputs)
            continue
        if not all(isinstance(i, Constant) or i in made or i in constant or i in counts for i in node.inputs):
            continue
        counted = any(i in counts for i in node.inputs)
        if any(i in made for i in node.inputs):
            made |= set(node.outputs)
            if counted or any(i in standard for i in node.inputs):
                standard |= set(node.outputs)
        else:
            (counts if counted else constant).update(node.outputs)
    return made, standard


def _from(nodes: Sequence[Apply], data: set[Variable]) -> set[Variable]:
    """Return what is computed from data, and from constants."""
    found, constant = set(data), set[Variable]()
    for node in nodes:
        if all(isinstance(i, Constant) or i in constant or i in found for i in node.inputs):
            (found if any(i in found for i in node.inputs) else constant).update(node.outputs)
    return found


def _shapes(variables: Sequence[Variable]) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in shape) for shape in _evaluated([v.shape for v in variables])]


def _evaluated(variables: Sequence[Variable]) -> list[AnyArray]:
    if not variables:
        return []
    with without_c():
        values: list[AnyArray] = pytensor.function([], list(variables), mode=quick_mode())()
    return values
