"""Straight lines of scalar operations: values that can be compared, kept, differentiated, and evaluated."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """An operation on values by number."""

    #: In `pymc_ngvi.rows.programs.operations.OPERATIONS`.
    name: str
    read: tuple[int, ...]


@dataclass(frozen=True)
class RowProgram:
    """A function of rows. Values are numbered: first the inputs, then constants, then what calls make, in order.

    Programs of the same function, whatever graphs they were read from, are mostly equal.
    """

    n_inputs: int
    #: Inputs that are booleans.
    conditions: tuple[int, ...]
    constants: tuple[float, ...]
    calls: tuple[Call, ...]
    outputs: tuple[int, ...]

    @property
    def used(self) -> list[int]:
        """The inputs that something hangs on."""
        read = {k for call in self.calls for k in call.read} | set(self.outputs)
        return [k for k in range(self.n_inputs) if k in read]
