"""Which variables of a graph are affine functions of theta, and which of them all else is made of."""

import numpy as np
import pytensor.scalar as ps

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import toposort
from pytensor.tensor.elemwise import Elemwise

from pymc_ngvi.core.sparsity.dependence_sets import Dependence, joined
from pymc_ngvi.ops.elements import Elements, Rearranged, core_op
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.ops.registry import elements

# --- which coordinates of theta each element of each variable of a graph depends on ---


class Dependences:
    """Computes the dependence of variables when it is asked for, and keeps it."""

    def __init__(self, facts: Facts, theta: Variable) -> None:
        self.facts = facts
        self.opaque: set[str] = set()
        self._done: dict[Variable, Dependence] = {theta: Dependence.identity(facts.shape(theta)[0])}
        self._position = {node: i for i, node in enumerate(facts.nodes)}

    def of(self, var: Variable) -> Dependence:
        """Return the dependence of an active variable."""
        for node in self._missing(var):
            found = elements(node, self.facts)
            if type(found) is Elements:
                self.opaque.add(type(core_op(node.op)).__name__)
            for out, made in zip(node.outputs, found.depends(self._done.__getitem__), strict=True):
                self._done[out] = made
        return self._done[var]

    def _missing(self, var: Variable) -> list[Apply]:
        missing: set[Apply] = set()
        stack = [var]
        while stack:
            node = stack.pop().owner
            if node is not None and node not in missing and node.outputs[0] not in self._done:
                missing.add(node)
                stack.extend(i for i in self.facts.active_inputs(node) if i not in self._done)
        return sorted(missing, key=self._position.__getitem__)


def dependence_of(outputs: list[Variable], facts: Facts, theta: Variable) -> Dependence:
    """Return the dependence of the elements of some variables, one after the other."""
    dependences = Dependences(facts, theta)
    sets, indices = joined([dependences.of(var) for var in outputs])
    return Dependence(sets, np.concatenate([index.ravel() for index in indices]))


def predictors(logp: Variable, theta: Variable, facts: Facts) -> list[Variable]:
    """Return the affine functions of theta that what is not affine is made of, in the order of the graph."""
    affine, nodes = affine_functions(theta, facts)
    # Conditions count, too, through which no derivative passes.
    others = (node for node in toposort([logp]) if node not in nodes)
    return list(dict.fromkeys(_root(i, facts) for node in others for i in node.inputs if i in affine))


def grouped(logp: Variable, facts: Facts, theta: Variable) -> Variable:
    """Return log p with the affine operands of sums that are not affine added up first."""
    affine, nodes = affine_functions(theta, facts)
    sums = {}
    for node in facts.nodes:
        if node in nodes or not isinstance(node.op, Elemwise) or not isinstance(node.op.scalar_op, ps.Add):
            continue
        parts = [i for i in node.inputs if i in affine]
        others = [i for i in node.inputs if i not in affine]
        if len(parts) > 1:
            sums[node.outputs[0]] = node.op(node.op(*parts), *others)
    return with_others(logp, sums)


def with_others(logp: Variable, others: dict[Variable, Variable]) -> Variable:
    """Return log p with other variables in the place of some; these may be made of one another."""
    if not others:
        return logp
    [result] = clone_replace([logp], others, rebuild_strict=False)
    return result


def affine_functions(theta: Variable, facts: Facts) -> tuple[set[Variable], set[Apply]]:
    """Return the variables that are affine functions of theta, and the nodes that make them."""
    affine, nodes = {theta}, set[Apply]()
    for node in facts.nodes:
        if _is_affine(node, facts, affine):
            affine.update(node.outputs)
            nodes.add(node)
    return affine, nodes


def _root(var: Variable, facts: Facts) -> Variable:
    """Return the affine function that a variable is a rescaled, shifted or rearranged copy of."""
    while var.owner is not None:
        varying = set(varying_inputs(var.owner, facts))
        copies = isinstance(var.owner.op, Elemwise) or is_moved(var.owner, facts)
        if not copies or len(varying) != 1:
            break
        [var] = varying
    return var


def _is_affine(node: Apply, facts: Facts, affine: set[Variable]) -> bool:
    """Tell whether the outputs of a node are affine functions of theta, given which variables before it are."""
    if not all(i in affine for i in varying_inputs(node, facts)):
        return False
    return is_linear(node, facts)


def is_linear(node: Apply, facts: Facts) -> bool:
    """Tell whether the outputs of a node are affine functions of those of its inputs that are not known."""
    return elements(node, facts).is_linear(varying_inputs(node, facts))


def is_moved(node: Apply, facts: Facts) -> bool:
    """Tell whether a node does nothing but move elements."""
    return isinstance(elements(node, facts), Rearranged)


def varying_inputs(node: Apply, facts: Facts) -> list[Variable]:
    """Return the inputs of a node that are not known: those through which derivatives pass, and steps."""
    return [i for i in node.inputs if not facts.is_known(i)]
