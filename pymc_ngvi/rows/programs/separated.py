"""Values as sums of products: of functions of some inputs, and of functions of the others."""

from collections.abc import Collection
from itertools import product

from pymc_ngvi.rows.programs.writer import Writer, Written

#: Products, at most.
_MOST = 6

#: A function of some inputs, and one of the others.
type Product = tuple[Written, Written]


class Separation:
    """Writes values as sums of products."""

    def __init__(self, writer: Writer, first: Collection[int]) -> None:
        self._writer, self._first = writer, set(first)
        self._one = writer.constant(1.0)

    def of(self, value: Written) -> list[Product]:
        """Return products that add up to a value; the value itself, times 1, where there are none."""
        found = self._of(value)
        if found is None:
            return [(value, self._one)]
        merged: dict[int, Product] = {}
        for one, other in found:
            before = merged.get(other.at)
            merged[other.at] = (one if before is None else before[0] + one, other)
        return list(merged.values())

    def _of(self, value: Written) -> list[Product] | None:
        inputs = self._writer.inputs_of(value)
        if not inputs & self._first:
            return [(self._one, value)]
        if inputs <= self._first:
            return [(value, self._one)]
        name, args = self._writer.name_of(value), self._writer.arguments(value)
        parts = [self._of(arg) for arg in args]
        if name not in ("add", "sub", "neg", "mul", "div") or any(part is None for part in parts):
            return None
        found = [part for part in parts if part is not None]
        if name == "neg":
            return [(-one, other) for one, other in found[0]]
        if name == "add":
            return found[0] + found[1]
        if name == "sub":
            return found[0] + [(-one, other) for one, other in found[1]]
        if name == "mul":
            pairs = list(product(*found))
            return [(a[0] * b[0], a[1] * b[1]) for a, b in pairs] if len(pairs) <= _MOST else None
        if len(found[1]) > 1:
            return None
        [(by, by_other)] = found[1]
        return [(one / by, other / by_other) for one, other in found[0]]
