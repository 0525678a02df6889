"""A graph as a list of rules on jets."""

from dataclasses import dataclass
from functools import reduce

import numpy as np
import pytensor.scalar as ps

from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.scan.op import Scan
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.special import LogAddExp, LogSumExp

from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.jets.arrays import JetKind, Space
from pymc_ngvi.density.jets.elementwise import Elementwise, Rule, elementwise
from pymc_ngvi.density.jets.loops import Loop
from pymc_ngvi.density.jets.scalars import JetOperation, ScalarFunctions, scalar_functions
from pymc_ngvi.density.jets.structural import structural
from pymc_ngvi.graphs.large import short_log_add_exp

#: In the place of what nothing reads any more.
_NOTHING: AnyArray = np.empty(0)


@dataclass
class _Call:
    """A rule, the slots that it reads and writes, and those that nothing reads afterwards."""

    rule: Rule | Loop | JetOperation
    read: list[int]
    write: list[int]
    last: list[int]


class Rules:
    """Makes the rules of element by element operations, all at once, when the graph has been gone through."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def add(self, call: _Call) -> None:
        """Note a call that waits for its rule."""
        if isinstance(call.rule, JetOperation):
            self._calls.append(call)

    def make(self) -> None:
        """Give each call its rule."""
        operations = list(dict.fromkeys(call.rule for call in self._calls if isinstance(call.rule, JetOperation)))
        functions = scalar_functions(operations)
        rules = {operation: _rule(operation, functions[operation]) for operation in operations}
        for call in self._calls:
            if isinstance(call.rule, JetOperation):
                call.rule = rules[call.rule]


def _rule(operation: JetOperation, functions: ScalarFunctions) -> Rule:
    if operation.by:
        return Elementwise(operation.by, functions)
    return lambda space, *inputs: np.asarray(functions.value([x[0] for x in inputs]))[None]


def _stands_for_others(node: Apply) -> bool:
    """Tell whether other nodes take the place of one: a graph that it wraps, or products of two for that of many."""
    op = node.op
    if isinstance(op, Elemwise):
        return isinstance(op.scalar_op, ps.Mul) and len(node.inputs) > 2
    return isinstance(op, LogAddExp) or (isinstance(op, OpFromGraph) and not isinstance(op, LogSumExp))


class Program:
    """Evaluates outputs of a graph, with their derivatives.

    Parameters
    ----------
    inputs : list of pytensor variables
    kinds : list of JetKind
        Of the inputs.
    outputs : list of pytensor variables
    rules : Rules

    Attributes
    ----------
    kinds : list of JetKind
        Of the outputs.

    Raises
    ------
    NoJet
        Where an operation has no rule.
    """

    def __init__(self, inputs: list[Variable], kinds: list[JetKind], outputs: list[Variable], rules: Rules) -> None:
        self._rules, self._calls = rules, list[_Call]()
        self._slots = {var: k for k, var in enumerate(inputs)}
        self._kinds, self._n_inputs = list(kinds), len(inputs)
        self._constants: dict[int, AnyArray] = {}
        for node in toposort(outputs, blockers=inputs):
            self._translate(node)
        self._outputs = [self._slot(out) for out in outputs]
        self.kinds = [self._kinds[k] for k in self._outputs]
        self._find_last_uses()

    def _new(self, var: Variable, kind: JetKind) -> int:
        self._slots[var] = len(self._kinds)
        self._kinds.append(kind)
        return self._slots[var]

    def _slot(self, var: Variable) -> int:
        if var not in self._slots:
            assert isinstance(var, Constant)
            self._constants[self._new(var, JetKind.FIXED)] = np.asarray(var.data)[None, None]
        return self._slots[var]

    def _translate(self, node: Apply) -> None:
        op = node.op
        if _stands_for_others(node):
            self._inline(node)
            return
        read = [self._slot(i) for i in node.inputs]
        kinds = [self._kinds[k] for k in read]
        if isinstance(op, Scan):
            loop = Loop(node, kinds, self._inner)
            self._call(loop, read, [self._new(out, kind) for out, kind in zip(node.outputs, loop.kinds, strict=True)])
            return
        rule = elementwise(node, kinds) if isinstance(op, Elemwise) else structural(op, node, kinds)
        kind = JetKind.FIXED if isinstance(op, Shape | Shape_i) else max(kinds, default=JetKind.FIXED)
        of_integers = min(kind, JetKind.VALUE)
        is_real = [out.type.dtype.startswith("float") for out in node.outputs]
        write = [self._new(out, kind if real else of_integers) for out, real in zip(node.outputs, is_real, strict=True)]
        self._call(rule, read, write)

    def _inline(self, node: Apply) -> None:
        """Go through the graph that a node stands for."""
        if isinstance(node.op, LogAddExp):
            outputs = [short_log_add_exp(node.inputs)]
        elif isinstance(node.op, Elemwise):
            outputs = [reduce(node.op, node.inputs)]
        else:
            inner = node.op.fgraph
            outputs = inner.bind(dict(zip(inner.inputs, node.inputs, strict=True)))
        for part in toposort(outputs, blockers=list(self._slots)):
            self._translate(part)
        for out, inner_out in zip(node.outputs, outputs, strict=True):
            self._slots[out] = self._slot(inner_out)

    def _inner(
        self, inputs: list[Variable], kinds: list[JetKind], outputs: list[Variable]
    ) -> "tuple[Program, list[JetKind]]":
        program = Program(inputs, kinds, outputs, self._rules)
        return program, program.kinds

    def _call(self, rule: Rule | Loop | JetOperation, read: list[int], write: list[int]) -> None:
        call = _Call(rule, read, write, [])
        self._calls.append(call)
        self._rules.add(call)

    def _find_last_uses(self) -> None:
        kept = {*self._outputs, *self._constants, *range(self._n_inputs)}
        seen: set[int] = set(kept)
        for call in reversed(self._calls):
            call.last = [k for k in dict.fromkeys([*call.read, *call.write]) if k not in seen]
            seen.update(call.last)

    def __call__(self, space: Space, inputs: list[AnyArray]) -> list[AnyArray]:
        """Return the outputs."""
        values: list[AnyArray] = [*inputs, *[_NOTHING] * (len(self._kinds) - self._n_inputs)]
        for slot, constant in self._constants.items():
            values[slot] = constant
        for call in self._calls:
            assert not isinstance(call.rule, JetOperation)
            found = call.rule(space, *[values[k] for k in call.read])
            if isinstance(found, list):
                for slot, value in zip(call.write, found, strict=True):
                    values[slot] = value
            else:
                values[call.write[0]] = found
            for slot in call.last:
                values[slot] = _NOTHING
        return [values[k] for k in self._outputs]
