"""Sizes of arrays; sizes that are refused, with what to do instead: of covariances, and numbers of draws and chains."""

from typing import Any

import numpy as np

from pymc_ngvi.core.linalg import GIB

#: Numbers in an array: that stay in a cache; of temporaries in a loop over parts; that are held at once, and kept; at
#: most.
CACHED, STREAMED, AT_ONCE, HELD, MOST_NUMBERS = 2**17, 2**20, 2**22, 2**25, 2**27
#: Draws by default: that are predicted, shown, weighted by other densities, and weighed, where evaluations are cheap.
N_PREDICTED, N_SHOWN, N_REWEIGHTED, N_WEIGHED = 1_000, 2_000, 4_000, 10_000
#: Largest dimension for which a dense covariance is made.
MAX_COV_DIM = 5_000


def check_cov_size(n_dim: int) -> None:
    """Raise ValueError if a dense covariance of ``n_dim`` coordinates is too large to make."""
    if n_dim > MAX_COV_DIM:
        raise ValueError(
            f"The covariance of {n_dim:,} coordinates would take {8 * n_dim**2 / GIB:.1f} GiB of "
            "memory. Use std or sd_flat for the standard deviations, and cov_of(names) for the "
            "covariance of some variables."
        )


def check_draws(n: Any) -> int:
    """Return a number of draws; raise ValueError if it is not a whole number of at least 1."""
    if n != int(n) or n < 1:
        raise ValueError(f"The number of draws should be a whole number of at least 1; got {n!r}.")
    return int(n)


def check_chains(chains: object) -> int:
    """Return a number of chains; raise ValueError if it is not a whole number of at least 1."""
    if not isinstance(chains, int | np.integer) or isinstance(chains, bool) or chains < 1:
        raise ValueError(f"chains should be a whole number of at least 1; got {chains!r}.")
    return int(chains)
