"""Seeds, in every form that NumPy and PyMC take: as a generator, or as the whole number that a fit goes by."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from numpy.typing import NDArray

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
    several = isinstance(random_seed, list | tuple) or (isinstance(random_seed, np.ndarray) and random_seed.ndim)
    values = list(random_seed) if several else [random_seed]
    if not values or not all(_is_whole(value) for value in values):
        raise ValueError(
            "random_seed should be a whole number of at least 0, a list of such numbers, a SeedSequence, Generator or "
            f"RandomState of NumPy, or None; got {random_seed!r}."
        )
    return [int(value) for value in values]


def _is_whole(value: object) -> bool:
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 0
