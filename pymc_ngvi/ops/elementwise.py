"""Operations element by element; what they do to a number is in `scalars` and in `rows.programs.operations`."""

import itertools

import numpy as np

from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.elemwise import Elemwise

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.ops.elements import Made
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.ops.lifting import Apart, Lifting, broadcast_index
from pymc_ngvi.ops.operation import Operation
from pymc_ngvi.ops.scalars import Form, differentiable_inputs
from pymc_ngvi.ops.ways import Each


def _elements(node: Apply, facts: Facts) -> Made:
    form, inputs = Form.of(node), differentiable_inputs(node)
    ways = [(var, Each(facts, var)) for var in inputs]
    if form is Form.SUM:
        return Made(node, facts, ways, inputs)
    if form is Form.CHOICE:
        condition, yes, no = node.inputs
        chosen = [(yes, Each(facts, yes, condition, True)), (no, Each(facts, no, condition, False))]
        return Made(node, facts, chosen, inputs)
    if form is Form.PRODUCT:
        unknown = [var for var in inputs if not facts.is_known(var)]
        return Made(node, facts, ways, inputs, list(itertools.combinations(unknown, 2)), factors=inputs)
    if form is Form.QUOTIENT:
        return Made(node, facts, ways, inputs[:1], [(inputs[0], inputs[1])], factors=inputs[:1])
    return Made(node, facts, ways)


def _lifted(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
    if Form.of(node) is Form.CHOICE and lift.facts.is_known(node.inputs[0]):
        return _switched(lift, node, var, index)
    return node.op(*_parts(lift, node, index))


def _parts(lift: Lifting, node: Apply, index: Ints) -> list[Variable]:
    """Return the elements of the inputs that those of an elementwise function are made of."""
    shapes = [lift.facts.shape(i) for i in node.inputs]
    whole = np.broadcast_shapes(*shapes)
    return [lift.of(i, broadcast_index(index, whole, shape)) for i, shape in zip(node.inputs, shapes, strict=True)]


def _switched(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
    """Return elements that data choose from two branches: rows of different predictors are kept apart."""
    shape = lift.facts.shape(var)
    try:
        condition = np.broadcast_to(lift.facts.value(node.inputs[0]), shape).ravel()[index] != 0
    except KeyError:
        return node.op(*_parts(lift, node, index))
    if len(index) and (condition == condition[0]).all():
        branch = node.inputs[1 if condition[0] else 2]
        return lift.of(branch, broadcast_index(index, shape, lift.facts.shape(branch)))
    result = node.op(*_parts(lift, node, index))
    reads = [lift.reads(branch) for branch in result.owner.inputs[1:]]
    if reads[0] != reads[1] and all(reads):
        raise Apart(condition.astype(np.int64))
    return result


OPERATIONS: dict[type, Operation] = {Elemwise: Operation(_elements, _lifted)}
