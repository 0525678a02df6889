"""Elements of a variable, each as a function of the few predictors that it depends on.

An element of ``exp(log_sd)[group]`` is a function of one predictor, whichever the group: lifted, the variable is an
elementwise function of as many rows as elements are asked for, in which each row has its own copy of what it reads.
"""

import hashlib

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.values import Array
from pymc_ngvi.ops.elements import core_op
from pymc_ngvi.ops.facts import Facts
from pymc_ngvi.ops.lifting import CannotLift
from pymc_ngvi.ops.registry import operation


class Source(NamedTuple):
    """Where known values of rows are from."""

    #: Whose value they are elements of; or, of weights, whose elements they weigh.
    var: Variable
    #: Which, flat.
    elements: Ints
    is_weight: bool = False


@dataclass
class Lift:
    """Lifts elements of variables to rows."""

    facts: Facts
    predictors: Variable
    #: Inputs of the lifted function, (n_points, n_rows) each, with the predictor that each row reads there.
    slots: dict[Variable, Ints] = field(default_factory=dict)
    #: Inputs for known values, (1, n_rows) each or (1, 1), with these.
    data: dict[Variable, Array] = field(default_factory=dict)
    #: Where these are from.
    sources: dict[Variable, Source] = field(default_factory=dict)
    _done: dict[tuple[Variable, bytes], Variable] = field(default_factory=dict)

    def of(self, var: Variable, index: Ints) -> Variable:
        """Return elements of a variable as a function of rows."""
        key = (var, hashlib.blake2b(index.tobytes(), digest_size=16).digest())
        if key not in self._done:
            self._done[key] = self._lifted(var, index)
        return self._done[key]

    def copy(self) -> "Lift":
        """Return another one that has lifted the same, and goes on by itself."""
        return replace(
            self, slots=dict(self.slots), data=dict(self.data), sources=dict(self.sources), _done=dict(self._done)
        )

    def back_to(self, other: "Lift") -> None:
        """Forget what was lifted since another one was like this one."""
        self.slots, self.data, self.sources, self._done = other.slots, other.data, other.sources, other._done

    def reads(self, value: Variable) -> set[Variable]:
        """Return the slots that a function of rows reads."""
        return {v for v in ancestors([value]) if v in self.slots}

    def columns(self, n_rows: int) -> Ints:
        """Return the predictors of each row, (n_rows, n_slots)."""
        return np.stack([np.broadcast_to(at, n_rows) for at in self.slots.values()], axis=1)

    def _lifted(self, var: Variable, index: Ints) -> Variable:
        if var is self.predictors:
            slot = pt.matrix(f"predictor {len(self.slots)}", dtype="float64", shape=(None, None))
            self.slots[slot] = index
            return slot
        if self.facts.is_known(var):
            return self._known(var, index)
        node = var.owner
        if node is None:
            raise CannotLift(f"{var} varies")
        rule = operation(node.op).lift
        if isinstance(rule, str):
            raise CannotLift(f"PyTensor's {type(core_op(node.op)).__name__} {rule}")
        return rule(self, node, var, index)

    def _known(self, var: Variable, index: Ints) -> Variable:
        if isinstance(var, Constant) and np.size(var.data) == 1:
            return pt.constant(np.reshape(var.data, (1, 1)))
        try:
            value = np.asarray(self.facts.value(var))
        except KeyError as error:
            raise CannotLift(f"the value of {var} is not at hand") from error
        rows = value.reshape(1, -1)[:, index]
        given = pt.tensor(f"data {len(self.data)}", dtype=rows.dtype, shape=(1, 1 if len(index) == 1 else None))
        self.data[given], self.sources[given] = rows, Source(var, index)
        return given
