"""Several of the same thing as one: arrays with one more axis, the first, in a dataclass."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Self

import numpy as np


class Batch:
    """A dataclass whose fields are arrays, other batches, lists of these, or None.

    What is said of the shape of a field is of one; of many, there is an axis of these in front.
    """

    def __getitem__(self, which: Any) -> Self:
        """Return one, some, or some in another order."""
        return self._from(lambda values: values[0][which], [self])

    @classmethod
    def stacked(cls, ones: Sequence[Self]) -> Self:
        """Return several as many."""
        return cls._from(np.stack, ones)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the many of all parts, one after the other."""
        return parts[0] if len(parts) == 1 else cls._from(np.concatenate, parts)

    @staticmethod
    def _from(function: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Batch):
            names = (field.name for field in fields(first))  # type: ignore[arg-type]
            return replace(first, **{n: Batch._from(function, [getattr(v, n) for v in values]) for n in names})  # type: ignore[type-var]
        if isinstance(first, list):
            return [Batch._from(function, part) for part in zip(*values, strict=True)]
        return None if first is None else function(values)
