"""Rows that depend on many predictors through one sum of these: given the others, that sum is all they see.

A group effect that is not centred enters as ``a + exp(s) * z``. Given s, a row is a function of one Gaussian variable,
whatever the number of effects in the sum.
"""

from collections.abc import Collection

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, toposort

from pymc_ngvi.ops.scalars import ScalarForm

type Slots = frozenset[Variable]

_NONE: Slots = frozenset()


def sum_of(value: Variable, slots: Collection[Variable]) -> tuple[Variable, Slots] | None:
    """Return a variable through which alone a row depends on some of its predictors, and these, two at least.

    Given all other predictors, the variable is an affine function of them.

    Parameters
    ----------
    value : pytensor variable
        A row, as a function of ``slots``.
    slots : collection of pytensor variables

    Returns
    -------
    tuple or None
        The variable with most of them; None where there is none.
    """
    depends: dict[Variable, Slots] = {slot: frozenset([slot]) for slot in slots}
    affine = dict(depends)
    order = [node.outputs[0] for node in toposort([value]) if len(node.outputs) == 1]
    for var in order:
        node = var.owner
        depends[var] = frozenset().union(*(depends.get(i, _NONE) for i in node.inputs))
        affine[var] = _affine(node, depends, affine)
    for var in sorted(order, key=lambda v: -len(affine[v])):
        if len(affine[var]) < 2:
            return None
        if not _depends_otherwise(value, var, affine[var]):
            return var, affine[var]
    return None


def _affine(node: Apply, depends: dict[Variable, Slots], affine: dict[Variable, Slots]) -> Slots:
    """Return predictors in which the output of a node is affine, all together."""
    form, inputs = ScalarForm.of(node), node.inputs
    if form is ScalarForm.SUM:
        bent = frozenset().union(*(depends.get(i, _NONE) - affine.get(i, _NONE) for i in inputs))
        return frozenset().union(*(affine.get(i, _NONE) for i in inputs)) - bent
    if form in (ScalarForm.PRODUCT, ScalarForm.QUOTIENT):
        best = max((inputs[k] for k in form.linear_in(len(inputs))), key=lambda i: len(affine.get(i, _NONE)))
        return affine.get(best, _NONE).difference(*(depends.get(i, _NONE) for i in inputs if i is not best))
    return _NONE


def _depends_otherwise(value: Variable, var: Variable, slots: Slots) -> bool:
    [without] = clone_replace([value], {var: var.type()}, rebuild_strict=False)
    return any(v in slots for v in ancestors([without]))
