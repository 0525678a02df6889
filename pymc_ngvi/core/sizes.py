"""Numbers of draws and of chains, and sizes of arrays: defaults, and what is refused; seeds of random numbers."""

from collections.abc import Sequence
from typing import Any, SupportsInt

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import GIB

#: Numbers in an array: that stay in a cache; of temporaries in a loop over parts; that are held at once, and kept; at
#: most.
CACHED, STREAMED, AT_ONCE, HELD, MOST_NUMBERS = 2**17, 2**20, 2**22, 2**25, 2**27
#: Multiplications of small matrices from which on a call of LAPACK takes no longer than compiled loops.
LARGE = 16_000.0
#: Draws by default: that are predicted, shown, weighted by other densities, and weighed, where evaluations are cheap.
N_PREDICTED, N_SHOWN, N_REWEIGHTED, N_WEIGHED = 1_000, 2_000, 4_000, 10_000
#: Chains by default, as many as ``pm.sample`` runs.
N_CHAINS = 4
#: Effective draws by which a mean is known well enough, and its error then, in standard deviations: moves of moments
#: and relative errors of standard deviations that are not more hardly matter either. Part of the mass in a tail, of
#: which limits tell.
ENOUGH = 400.0
SLIGHT, TAIL = ENOUGH**-0.5, 0.05
#: Largest dimensions for which a dense covariance is made: without being asked for, as a product with it costs as much
#: as many a gradient beyond, and at all.
MAX_DENSE_DIM, MAX_COV_DIM = 500, 5_000


def check_cov_size(n_dim: int) -> None:
    """Raise ValueError if a dense covariance of ``n_dim`` coordinates is too large to make."""
    if n_dim > MAX_COV_DIM:
        raise ValueError(
            f"The covariance of {n_dim:,} coordinates would take {8 * n_dim**2 / GIB:.1f} GiB of "
            "memory. Use std or sd_flat for the standard deviations, and cov_of(names) for the "
            "covariance of some variables."
        )


def check_draws(n: Any, what: str = "The number of draws") -> int:
    """Return a number of draws, or of chains; raise ValueError if it is not a whole number of at least 1."""
    if not isinstance(n, SupportsInt) or n != int(n) or int(n) < 1:
        names = " For names, use var_names=[...]." * isinstance(n, str | Sequence)
        raise ValueError(f"{what} should be a whole number of at least 1; got {n!r}.{names}")
    return int(n)


def draws_of_chains(draws: Any, chains: Any = N_CHAINS) -> int:
    """Return the number of draws that chains of equal length have together, at least as many as asked for."""
    n_chains = check_draws(chains, "chains")
    return -(-check_draws(draws) // n_chains) * n_chains


# --- seeds, in every form that NumPy and PyMC take: as a generator, or as the whole number that a fit goes by ---

#: What can be given as ``random_seed``; an alias that signatures show by its name.
type Seed = (
    int
    | Sequence[int]
    | NDArray[np.integer[Any]]
    | np.random.SeedSequence
    | np.random.BitGenerator
    | np.random.Generator
    | np.random.RandomState
    | None
)

#: Of draws behind what is not to change by itself.
FIXED_SEED = 20_240_607
#: Seeds that are drawn from a generator are below this.
END = 2**31
#: Numbers of random streams apart from those of fits, whose levels and iterations are below a million.
ASSESSMENT, DRAWS, WEIGHTS, _, _, POSTERIORS, MODES, MANY, PRIORS, UPDATES = range(1_000_000, 11_000_000, 1_000_000)


def generator_of(random_seed: object) -> np.random.Generator:
    """Return the generator that a seed stands for."""
    if isinstance(random_seed, np.random.RandomState):
        return np.random.default_rng(random_seed.randint(2**32, size=4, dtype=np.uint32))
    if isinstance(random_seed, np.random.Generator | np.random.BitGenerator | np.random.SeedSequence | None):
        return np.random.default_rng(random_seed)
    return np.random.default_rng(_entropy(random_seed))


def seed_of(random_seed: object) -> int:
    """Return a seed as one whole number of at least 0; equal seeds give equal numbers."""
    if isinstance(random_seed, np.random.RandomState):
        return int(random_seed.randint(END, dtype=np.int64))
    if isinstance(random_seed, np.random.Generator | np.random.BitGenerator | None):
        return int(np.random.default_rng(random_seed).integers(END))
    if not isinstance(random_seed, np.random.SeedSequence):
        entropy = _entropy(random_seed)
        if len(entropy) == 1:
            return entropy[0]
        random_seed = np.random.SeedSequence(entropy)
    return int(random_seed.generate_state(1, np.uint64)[0])


def _entropy(random_seed: Any) -> list[int]:
    """Return the whole numbers of a seed."""
    values = np.atleast_1d(np.asarray(random_seed, dtype=object)).tolist()
    is_whole = (isinstance(v, int | np.integer) and not isinstance(v, bool) and v >= 0 for v in values)
    if not values or not all(is_whole):
        raise ValueError(
            "random_seed should be a whole number of at least 0, a list of such numbers, a SeedSequence, Generator or "
            f"RandomState of NumPy, or None; got {random_seed!r}."
        )
    return [int(value) for value in values]
