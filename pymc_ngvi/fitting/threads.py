"""How many threads linear algebra may take."""

import functools

from contextlib import AbstractContextManager, nullcontext

from threadpoolctl import ThreadpoolController

from pymc_ngvi.core.shared_context import SharedContext
from pymc_ngvi.density import ModelDensity


def few_threads(density: ModelDensity) -> AbstractContextManager[object]:
    """Keep BLAS to one thread where waking others takes longer than the work.

    Small models are such, and sums over rows of any size: their products are many and thin, one for each part of the
    rows that fits in the cache.
    """
    alone = density.is_small or density.by_rows.are_known
    return one_thread() if alone else nullcontext()


def one_thread() -> AbstractContextManager[object]:
    """Keep BLAS to one thread, for the same bits wherever it is: how it sums hangs on their number."""
    return _ONE_THREAD


@functools.cache
def _controller() -> ThreadpoolController:
    """Return what sets threads: looking for the libraries takes longer than some fits of one iteration."""
    return ThreadpoolController()


_ONE_THREAD = SharedContext(lambda: _controller().limit(limits=1, user_api="blas"))
