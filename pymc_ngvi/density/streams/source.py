"""Where batches come from: anything that can be iterated over, read once or several times."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.messages import shortened
from pymc_ngvi.core.stream import Place
from pymc_ngvi.density.streams.errors import BatchError

#: Number of the random streams behind orders of batches.
_ORDERS = 7
_WHAT = (
    "batches should be an iterable of dicts {name of a pm.Data: array}, such as a list, a generator, an object with "
    "__iter__, or one with __len__ and __getitem__"
)
_NO_OTHER = (
    "batches is an iterator, which can be read once: there is no other pass through the data. Give an object whose "
    "iter() begins anew."
)


class Raw(NamedTuple):
    """What a source gave."""

    #: Number of the batch: of the item, or of its place in the order of the source.
    which: int
    data: Any


class BatchSource:
    """An iterable of batches."""

    def __init__(self, given: Any) -> None:
        self.given = given
        is_factory = callable(given) and not hasattr(given, "__iter__") and not hasattr(given, "__getitem__")
        is_list = hasattr(given, "__getitem__") and hasattr(given, "__len__")
        is_usable = is_factory or is_list or hasattr(given, "__iter__")
        if isinstance(given, Mapping | str | bytes | np.ndarray) or not is_usable:
            raise TypeError(f"{_WHAT}; got {shortened(given)}.")
        self._iterate: Callable[[], Iterator[Any]] = (lambda: iter(given())) if is_factory else (lambda: iter(given))
        self.n_batches = _length(given) if hasattr(given, "__getitem__") else None
        self.is_read_once = isinstance(given, Iterator)
        self._open: Iterator[Any] | None = None
        self._next = Place()
        self._ahead: Raw | None = None
        self._last: tuple[Place, Raw] | None = None  # of what can be read once
        self._order: tuple[tuple[int, int], NDArray[np.intp]] | None = None

    @property
    def is_random(self) -> bool:
        """Whether each pass has an order of its own."""
        return self.n_batches is not None

    def look(self) -> Any:
        """Return the first batch, which will be read once more by `read`."""
        if self.is_random:
            if not self.n_batches:
                raise BatchError("batches is empty: its len() is 0.")
            return self._item(0, Place())
        if self._ahead is None:
            if self.is_read_once and self._open is not None:
                raise BatchError(
                    "batches is an iterator, which can be read once, and was read by an earlier fit: give another one, "
                    "or an object whose iter() begins anew."
                )
            found = self._following(Place())
            if found is None:
                once = " Iterators can be read once: this one may have been read before." if self.is_read_once else ""
                raise BatchError(f"batches is empty: it gave nothing.{once}")
            self._ahead = found
        return self._ahead.data

    def read(self, seed: int, place: Place) -> Raw | None:
        """Return the batch at a place; None after the last one of a pass."""
        if self.is_random:
            assert self.n_batches is not None
            if self._order is None or self._order[0] != (seed, place.number):
                order = np.random.default_rng([seed, place.number, _ORDERS]).permutation(self.n_batches)
                self._order = (seed, place.number), order
            order = self._order[1]
            if place.position >= len(order):
                return None
            which = int(order[place.position])
            return Raw(which, self._item(which, place))
        if self._last is not None and self._last[0] == place:  # a visit that was cut short
            return self._last[1]
        found, self._ahead = (self._ahead if place[:2] == (0, 0) else None), None
        found = found or self._following(place)
        self._last = (place, found) if self.is_read_once and found is not None else None
        return found

    def has_more(self, seed: int, place: Place) -> bool:
        """Tell whether a pass goes on at a place, which is not to be read then."""
        if self.n_batches is not None:
            return place.position < self.n_batches
        return self._following(place) is not None

    def all(self) -> Iterator[Any]:
        """Go through all batches, in the source's own order."""
        if self.is_read_once:
            raise BatchError(
                "batches is an iterator, which can be read once: what needs log p of all the data can't be had. Give "
                "an object whose iter() begins anew."
            )
        if self.n_batches is not None:
            for which in range(self.n_batches):
                yield self._item(which, Place(position=which))
            return
        try:
            yield from self._iterate()
        except Exception as error:
            raise BatchError(f"A batch can't be read: {type(error).__name__}: {error}") from error

    def _item(self, which: int, place: Place) -> Any:
        try:
            return self.given[which]
        except Exception as error:
            raise _unreadable(place, error, f", batches[{which}],") from error

    def _following(self, place: Place) -> Raw | None:
        """Return the batch at a place of the source's own order, going there where that is not the next one."""
        try:
            if self._open is None or self._next[:2] != place[:2] or (self.is_read_once and place.number):
                if self.is_read_once and (self._open is not None or place.number):
                    raise BatchError(_NO_OTHER)
                self._open = self._iterate()
                for _ in range(place.position):
                    next(self._open)
            assert self._open is not None
            data = next(self._open)
        except StopIteration:
            self._next = Place(place.number + 1)
            if not self.is_read_once:
                self._open = None
            return None
        except BatchError:
            raise
        except Exception as error:
            if not self.is_read_once:
                self._open = None
            raise _unreadable(place, error) from error
        self._next = Place(place.number, place.position + 1)
        return Raw(place.position, data)


def _unreadable(place: Place, error: Exception, which: str = "") -> BatchError:
    return BatchError(
        f"Batch {place.position + 1} of pass {place.number + 1}{which} can't be read: {type(error).__name__}: {error}"
    )


def _length(given: Any) -> int | None:
    try:
        return len(given)
    except TypeError:
        return None
