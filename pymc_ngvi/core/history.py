"""A history of numbers that grows by one row in each iteration, without being copied each time."""

from dataclasses import dataclass, field

import numpy as np

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array

_FIRST_CAPACITY = 64


@dataclass
class _Room:
    """Memory that successive histories share, and how much of it is taken."""

    rows: Array
    n_taken: int


@stored("history", content=("first", "second"), make="of_columns")
@dataclass(frozen=True)
class History:
    """Rows of figures; immutable, but the next one shares its memory.

    Parameters
    ----------
    n : int
        Rows.
    """

    n: int = 0
    _room: _Room = field(default_factory=lambda: _Room(np.empty((_FIRST_CAPACITY, 2)), 0))

    def appended(self, *row: float) -> "History":
        """Return the history with one more row; takes constant time on average."""
        room = self._room
        if room.n_taken != self.n or self.n == len(room.rows):  # another went on from here already, or it is full
            rows = np.empty((max(2 * self.n, _FIRST_CAPACITY), len(row)))
            rows[: self.n] = room.rows[: self.n]
            room = _Room(rows, self.n)
        room.rows[self.n] = row
        room.n_taken = self.n + 1
        return History(self.n + 1, room)

    def column(self, index: int) -> Array:
        """Return one column, (n,), read-only."""
        values: Array = self._room.rows[: self.n, index]
        values.flags.writeable = False
        return values

    @property
    def first(self) -> Array:
        """The first column."""
        return self.column(0)

    @property
    def second(self) -> Array:
        """The second column."""
        return self.column(1)

    @classmethod
    def of_columns(cls, first: Array, second: Array) -> "History":
        """Return the history with these columns, (n,) each."""
        history = cls()
        for row in zip(first.tolist(), second.tolist(), strict=True):
            history = history.appended(*row)
        return history
