"""Memory of the process: freed arrays that it keeps, and when Python looks for garbage."""

import contextlib
import functools
import gc

from collections.abc import Iterator

import numpy as np


@functools.cache
def keep_freed_memory() -> None:
    """Let the C library keep memory that is freed in arrays of up to 31 MB; do it once in a process.

    Evaluations make and free arrays of some hundred kilobytes, thousands of times. The GNU C library gives each back to
    the system, which fills it with zeros for the next one: a quarter of the time of a fit to 1,900 rows. It stops doing
    so for sizes that it has seen freed once. No page of this array is ever touched.
    """
    np.empty(3_900_000)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Let Python look for no garbage as long as the context lasts, in which graphs or modules are made.

    They are many objects, and none of them garbage; to go through all of the process takes 0.15 s each time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
