"""Predictors of rows in terms of others: those that are the same numbers, written otherwise, are found by their values.

The mean of an observation, and what PyTensor makes of its distance from the data, may be two predictors of a row, which
differ by an offset. Derivatives in the one mean something only where the other is gone.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.sparsity.dependence_sets import Ints
from pymc_ngvi.core.values import Array
from pymc_ngvi.reading.lift import Lift

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
