"""Which rule of quadrature each row has: a level for each block of its directions, all in one number."""

from collections.abc import Iterator

import numpy as np

from numpy.typing import NDArray

#: Bits of a level.
_BITS = 4

type Levels = NDArray[np.int16]
type Index = NDArray[np.intp]


def unpacked(code: int, n_blocks: int) -> tuple[int, ...]:
    """Return the level of each block."""
    return tuple((code >> _BITS * block) % 2**_BITS for block in range(n_blocks))


def one_finer(block: int) -> int:
    """Return what is added to a code where a block goes to its next level."""
    return 1 << _BITS * block


def by_code(codes: Levels) -> Iterator[tuple[int, Index | slice]]:
    """Yield each code with the places that have it."""
    if len(codes) and (codes == codes[0]).all():
        yield int(codes[0]), slice(None)
        return
    for code in np.unique(codes):
        yield int(code), np.flatnonzero(codes == code)
