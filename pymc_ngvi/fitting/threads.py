"""How many threads linear algebra may take."""

from contextlib import AbstractContextManager, nullcontext

from threadpoolctl import threadpool_limits

from pymc_ngvi.model import LogDensity


def few_threads(density: LogDensity) -> AbstractContextManager[object]:
    """Keep BLAS to one thread for small models: waking others takes longer than the work."""
    return threadpool_limits(1, user_api="blas") if density.is_small else nullcontext()
