"""Memory that is freed stays with the process, for the next array of the same size."""

import functools

import numpy as np


@functools.cache
def keep_freed_memory() -> None:
    """Let the C library keep memory that is freed in arrays of up to 31 MB; do it once in a process.

    Evaluations make and free arrays of some hundred kilobytes, thousands of times. The GNU C library gives each back to
    the system, which fills it with zeros for the next one: a quarter of the time of a fit to 1,900 rows. It stops doing
    so for sizes that it has seen freed once. No page of this array is ever touched.
    """
    np.empty(3_900_000)
