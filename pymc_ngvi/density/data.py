"""The data of a model: whether they are still what they were, and log p given those of then."""

import contextlib

from collections.abc import Iterator

import numpy as np
import pymc as pm

from pymc_ngvi.core.values import AnyArray


class DataSnapshot:
    """Remembers the data that a model had, to tell later whether it was changed."""

    def __init__(self, model: pm.Model) -> None:
        self._model = model
        self._take()

    def _take(self) -> None:
        """Remember the data as they are now."""
        self._arrays: dict[str, AnyArray] = {
            var.name: var.get_value(borrow=True) for var in self._model.data_vars if hasattr(var, "get_value")
        }
        # Lengths of dims follow the data.
        self._lengths: dict[str, AnyArray] = {
            name: var.get_value(borrow=True)
            for name, var in self._model.dim_lengths.items()
            if hasattr(var, "get_value")
        }

    def changed(self) -> list[str]:
        """Return the names of the data that differ from what they were."""
        return [
            name
            for name, then in self._arrays.items()
            if (now := self._model[name].get_value(borrow=True)) is not then and not np.array_equal(now, then)
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Give the model the data of then, for as long as the context lasts."""
        model = self._model
        pairs = [(model[name], then) for name, then in self._arrays.items()]
        pairs += [(model.dim_lengths[name], then) for name, then in self._lengths.items()]
        moved = [(var, then, now) for var, then in pairs if (now := var.get_value(borrow=True)) is not then]
        try:
            for var, then, _ in moved:
                var.set_value(then, borrow=True)
            yield
        finally:
            for var, _, now in moved:
                var.set_value(now, borrow=True)
