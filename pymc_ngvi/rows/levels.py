"""Which rule of quadrature each row has: a level for each block of its directions, all in one number."""

from collections.abc import Callable, Iterator

import numpy as np

from numpy.typing import NDArray

#: Bits of a level.
_BITS = 4
#: Values of a function that take as long as one more group of rows.
_GROUP = 2**13

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
    for code in np.flatnonzero(np.bincount(codes)).tolist():
        yield code, np.flatnonzero(codes == code)


def merged(codes: Levels, n_blocks: int, n_nodes: Callable[[int], int]) -> Levels:
    """Return codes of rules as fine or finer, and no more of them than save time."""
    counts = np.bincount(codes)
    found = np.flatnonzero(counts)
    becomes = {code: code for code in found.tolist()}
    n_rows = dict(zip(found.tolist(), counts[found].tolist(), strict=True))
    while len(n_rows) > 1:
        least = min(n_rows, key=n_rows.__getitem__)
        pairs = [((least, other), _finest(least, other, n_blocks)) for other in n_rows if other != least]
        pair, both = min(pairs, key=lambda p: sum(n_rows[c] * (n_nodes(p[1]) - n_nodes(c)) for c in p[0]))
        if sum(n_rows[code] * (n_nodes(both) - n_nodes(code)) for code in pair) > _GROUP:
            break
        n_joined = sum(n_rows.pop(code) for code in pair)
        n_rows[both] = n_rows.get(both, 0) + n_joined
        becomes = {code: both if now in pair else now for code, now in becomes.items()}
    table = np.zeros(len(counts), dtype=np.int16)
    table[found] = [becomes[code] for code in found.tolist()]
    return table[codes]


def _finest(first: int, second: int, n_blocks: int) -> int:
    """Return the code that has the finer level of two in each block."""
    both = zip(unpacked(first, n_blocks), unpacked(second, n_blocks), strict=True)
    return sum(max(pair) * one_finer(block) for block, pair in enumerate(both))
