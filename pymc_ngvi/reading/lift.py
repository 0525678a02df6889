"""Elements of a variable, each as a function of the few predictors that it depends on.

An element of ``exp(log_sd)[group]`` is a function of one predictor, whichever the group: lifted, the variable is an
elementwise function of as many rows as elements are asked for, in which each row has its own copy of what it reads.
"""

import hashlib

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.basic import Constant, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.values import Array
from pymc_ngvi.ops.elements import core_op
from pymc_ngvi.ops.facts import CannotLift, Facts
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


# --- predictors of rows in terms of others: those that are the same numbers, written otherwise, are found by their
# values ---
#
# The mean of an observation, and what PyTensor makes of its distance from the data, may be two predictors of a row,
# which differ by an offset. Derivatives in the one mean something only where the other is gone.


#: Points beyond those that an affine relation takes.
_MORE = 3
#: Relative difference of values that is rounding.
_ROUNDING = 1e-9


class Basis:
    """Some of the predictors of rows, of which all others are affine functions."""

    def __init__(
        self, lift: Lift, n_rows: int, predictors: Callable[[int], Array], first: Sequence[Variable] = ()
    ) -> None:
        order = list(dict.fromkeys([*first, *lift.slots]))
        self._index = {slot: np.broadcast_to(lift.slots[slot], n_rows) for slot in order}
        self.slots: list[Variable] = order[:1]
        self._relations: dict[Variable, tuple[Array, Array]] = {}
        eta = predictors(len(order) + _MORE) if len(order) > 1 else np.empty((0, 0))
        for slot in order[1:]:
            found = _combination(eta[:, self._index[slot]], [eta[:, self._index[other]] for other in self.slots])
            if found is None:
                self.slots.append(slot)
            else:
                self._relations[slot] = found

    def index(self, slots: Sequence[Variable]) -> Ints:
        """Return the predictors of each row, (n_rows, n_slots)."""
        return np.stack([self._index[slot] for slot in slots], axis=1)

    def of(self, value: Variable, data: dict[Variable, Array]) -> tuple[Variable, dict[Variable, Array]]:
        """Return a function of slots as one of those of the basis alone, and its data."""
        used, data, written = set(ancestors([value])), dict(data), {}
        for slot, (slopes, offset) in self._relations.items():
            if slot not in used:
                continue
            written[slot] = _given("offset", offset, data)
            for other, slope in zip(self.slots, slopes, strict=False):
                if slope.any():
                    written[slot] = written[slot] + _given("slope", slope, data) * other
        if written:
            [value] = clone_replace([value], written, rebuild_strict=False)
        return value, data


def _given(name: str, values: Array, data: dict[Variable, Array]) -> Variable:
    """Return an input for known values of rows."""
    var = pt.tensor(name, dtype="float64", shape=(1, None))
    data[var] = np.ascontiguousarray(values[None])
    return var


def _combination(values: Array, others: list[Array]) -> tuple[Array, Array] | None:
    """Return the slopes, (n_others, n_rows), and the offset of a predictor that is an affine function of others."""
    known = np.stack([np.ones_like(values), *others], axis=-1).swapaxes(0, 1)
    slopes = (np.linalg.pinv(known) @ values.T[..., None])[..., 0]
    slopes[np.abs(slopes) <= _ROUNDING * np.abs(slopes).max(axis=1, keepdims=True)] = 0.0
    apart = np.abs((known @ slopes[..., None])[..., 0] - values.T)
    if (apart > _ROUNDING * (1.0 + np.abs(values.T))).any():
        return None
    return slopes.T[1:], slopes.T[0]
