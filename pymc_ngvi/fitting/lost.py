"""Data that can't be had any more, in the middle of a fit: what it had come to is kept."""

import contextlib

from collections.abc import Callable, Iterator

from pymc_ngvi.density.shards.errors import BrokenExecutorError, ShardError
from pymc_ngvi.density.streams.errors import BatchError

#: Errors after which a fit may go on.
LOST = (ShardError, BrokenExecutorError, BatchError)


@contextlib.contextmanager
def keeping(approx: object, follow: Callable[[], object] | None = None) -> Iterator[None]:
    """Give such an error the approximation, after a function that brings it up to date."""
    try:
        yield
    except LOST as error:
        if follow is not None:
            follow()
        error.approx = approx
        raise
