"""Which coordinates of theta each element of each variable of a graph depends on."""

import numpy as np

from pytensor.graph.basic import Apply, Variable

from pymc_ngvi.core.sparsity.dependence_sets import Dependence, joined
from pymc_ngvi.ops.elements import Elements, core_op
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.ops.registry import elements


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
