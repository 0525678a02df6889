"""Contexts that change what all threads of a process share."""

import threading

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType


class SharedContext:
    """A context that the first thread that needs it enters, and the last one leaves.

    Each for itself would save what another one has changed, and leave that behind.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make, self._lock, self._n_inside = make, threading.Lock(), 0
        self._context: AbstractContextManager[object]

    def __enter__(self) -> None:
        """Enter it, unless a thread is inside."""
        with self._lock:
            if not self._n_inside:
                context = self._make()
                context.__enter__()
                self._context = context
            self._n_inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave it, if no other thread is inside; errors pass."""
        with self._lock:
            self._n_inside -= 1
            if not self._n_inside:
                self._context.__exit__(None, None, None)
