"""How many threads linear algebra may take, and contexts that change what all threads of a process share."""

import functools
import threading

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType

from threadpoolctl import ThreadpoolController

from pymc_ngvi.density import ModelDensity

# --- contexts that change what all threads of a process share ---


class SharedContext:
    """A context that the first thread that needs it enters, and the last one leaves.

    Each for itself would save what another one has changed, and leave that behind.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make, self._lock, self._n_inside, self._stack = make, threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        """Enter it, unless a thread is inside."""
        with self._lock:
            if not self._n_inside:
                self._stack.enter_context(self._make())
            self._n_inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave it, if no other thread is inside; errors pass."""
        with self._lock:
            self._n_inside -= 1
            if not self._n_inside:
                self._stack.close()


# --- how many threads linear algebra may take ---


def few_threads(density: ModelDensity) -> AbstractContextManager[object]:
    """Keep BLAS to one thread where waking others takes longer than the work.

    Small models are such, and sums over rows of any size: their products are many and thin, one for each part of the
    rows that fits in the cache.
    """
    return ONE_THREAD if density.is_small or density.by_rows.are_known else nullcontext()


#: Sets threads: looking for the libraries takes longer than some fits of one iteration.
_controller = functools.cache(ThreadpoolController)
#: Keeps BLAS to one thread, for the same bits wherever it is: how it sums hangs on their number.
ONE_THREAD = SharedContext(lambda: _controller().limit(limits=1, user_api="blas"))
