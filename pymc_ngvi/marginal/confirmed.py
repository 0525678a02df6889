"""Integrals about centres that are corrected until the quadrature itself confirms them, block by block."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.centres import Centres, Shape, corrected_centres
from pymc_ngvi.marginal.nodes import PathRule
from pymc_ngvi.marginal.parts import SomeBlocks
from pymc_ngvi.marginal.quadrature import PartIntegral, blocks_off_centre, integral_of

#: Corrections of centres before a draw counts as lost.
_MOST_CORRECTIONS = 8


class Confirmed(NamedTuple):
    """What is known of one part of the blocks."""

    #: Its share of log m; shape (n,).
    log_marginal: Array
    centres: Centres
    #: shape (n, n_places).
    skew: Array
    #: Draws with a block whose centre was not found; shape (n,).
    lost: NDArray[np.bool_]
    #: How often some block had to be evaluated again; shape (n,).
    n_corrected: NDArray[np.intp]


def confirmed(
    part: SomeBlocks, rule: PathRule, g: Array, centres: Centres, wider: Callable[[int], PathRule], size: int
) -> Confirmed:
    """Integrate a part; where nodes of a block were about the wrong centre, again about a better one."""
    n, forest = len(g), part.forest
    n_values = size * len(rule.nodes)
    about = centres.of(part.places, forest.n_levels)
    one, found, pending = _about(part, rule, g, about, size)
    assert one.shape is not None
    of_blocks, skew = one.of_blocks, one.shape.skew
    n_corrected = np.zeros(n, dtype=np.intp)
    for turn in range(_MOST_CORRECTIONS - 1):
        left = np.flatnonzero(pending.any(axis=1))
        if not len(left):
            break
        n_corrected[left] += 1
        rule = wider(turn)
        again, better, still = _about(part, rule, g[left], found[left], max(1, n_values // len(rule.nodes)))
        assert again.shape is not None
        blocks = pending[left]
        of_blocks[left] = np.where(blocks, again.of_blocks, of_blocks[left])
        places = blocks[:, forest.block]
        skew[left] = np.where(places, again.shape.skew, skew[left])
        found = found.replaced(left, better, places)
        pending[left] = blocks & still
    lost = pending.any(axis=1)
    return Confirmed(one.of_globals + of_blocks.sum(axis=1), found, skew, lost, n_corrected + lost)


def _about(
    part: SomeBlocks, rule: PathRule, g: Array, about: Centres, size: int
) -> tuple[PartIntegral, Centres, NDArray[np.bool_]]:
    """Integrate a part, so many draws at a time; also return corrected centres, and which blocks need them."""
    n, forest = len(g), part.forest
    starts = range(0, n, size)
    parts = [integral_of(part, rule, g[i : i + size], about[i : i + size], moments=True) for i in starts]
    one = parts[0]
    if len(parts) > 1:
        shape = Shape.empty(n, forest)
        for i, each in zip(starts, parts, strict=True):
            assert each.shape is not None
            shape.put(slice(i, i + size), slice(None), each.shape)
        of_globals, of_blocks = (np.concatenate([getattr(p, k) for p in parts]) for k in ("of_globals", "of_blocks"))
        one = PartIntegral(of_globals, of_blocks, shape)
    assert one.shape is not None
    off = blocks_off_centre(forest, one.shape, PathRule(rule.n_nodes, forest.n_levels), one.of_blocks)
    return one, corrected_centres(about, one.shape, forest), off
