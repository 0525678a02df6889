"""Operations element by element; what they do to a number is in `scalars` and in `rows.programs.operations`."""

import numpy as np
import pytensor.scalar as ps

from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.elemwise import Elemwise

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.graphs.backends import python_loops
from pymc_ngvi.graphs.incomplete import is_tail
from pymc_ngvi.ops.elements import FromWays
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.ops.lifting import Apart, Lifting, broadcast_index
from pymc_ngvi.ops.record import Extra, OpRecord, largest
from pymc_ngvi.ops.scalars import ScalarForm, differentiable_inputs
from pymc_ngvi.ops.ways import Each

#: Functions of one argument that cost no more than a pass.
_CHEAP = {"neg", "abs", "sqr", "sqrt", "cast", "identity", "sign", "isnan", "isinf", "invert", "reciprocal"}


def _elements(node: Apply, facts: Facts) -> FromWays:
    form, inputs = ScalarForm.of(node), node.inputs
    linear = [inputs[k] for k in form.linear_in(len(inputs))]
    ways = [(var, Each(facts, var)) for var in differentiable_inputs(node)]
    if form is ScalarForm.CHOICE:
        ways = [(var, Each(facts, var, inputs[0], var is inputs[1])) for var in linear]
    unknown = [k for k, var in enumerate(inputs) if not facts.is_known(var)]
    pairs = [(inputs[a], inputs[b]) for a, b in form.multiplied(len(inputs)) if a in unknown and b in unknown]
    return FromWays(
        node, facts, ways, linear, pairs, factors=linear if form in (ScalarForm.PRODUCT, ScalarForm.QUOTIENT) else ()
    )


def _lifted(lift: Lifting, node: Apply, var: Variable, index: Ints) -> Variable:
    if ScalarForm.of(node) is ScalarForm.CHOICE and lift.facts.is_known(node.inputs[0]):
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


def _degrees(node: Apply) -> list[float | None]:
    form, n = ScalarForm.of(node), len(node.inputs)
    if form is ScalarForm.QUOTIENT:
        return [1.0, -1.0]
    return [1.0 if form is ScalarForm.PRODUCT else None] * n


def _work(node: Apply, unknown: int) -> Extra:
    size, scalar = largest(node.outputs, unknown), node.op.scalar_op
    name = str(getattr(scalar, "name", None) or type(scalar).__name__).lower()
    is_function = isinstance(scalar, ps.UnaryScalarOp) and not isinstance(scalar, ps.Cast) and name not in _CHEAP
    return Extra(
        in_python=size if python_loops([node]) else 0,
        in_tails=size if is_tail(node) else 0,
        functions=largest(node.outputs[:1], unknown) if is_function else 0,
    )


OPERATIONS: dict[type, OpRecord] = {
    Elemwise: OpRecord(_elements, _lifted, _degrees, "reads what rows share, element by element", _work),
}
