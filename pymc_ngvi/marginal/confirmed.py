"""Integrals about centres that are corrected until the quadrature itself confirms them, block by block."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.centres import Centres, corrected_centres
from pymc_ngvi.marginal.nodes import PathRule
from pymc_ngvi.marginal.parts import SomeBlocks
from pymc_ngvi.marginal.quadrature import blocks_off_centre, integral_of

#: Corrections of centres before a draw counts as lost.
_MOST_CORRECTIONS = 8


class Confirmed(NamedTuple):
    """What is known of one part of the blocks.

    Parameters
    ----------
    log_marginal : ndarray, shape (n,)
        Its share of log m.
    centres : Centres
    skew : ndarray, shape (n, n_places)
    lost : ndarray of bool, shape (n,)
        Draws with a block whose centre was not found.
    n_corrected : ndarray of int, shape (n,)
        How often some block had to be evaluated again.
    """

    log_marginal: Array
    centres: Centres
    skew: Array
    lost: NDArray[np.bool_]
    n_corrected: NDArray[np.intp]


def confirmed(
    part: SomeBlocks, rule: PathRule, g: Array, centres: Centres, wider: Callable[[int], PathRule]
) -> Confirmed:
    """Integrate a part; where nodes of a block were about the wrong centre, again about a better one.

    Parameters
    ----------
    part : SomeBlocks
    rule : PathRule
    g : ndarray, shape (n, n_globals)
    centres : Centres
        To begin with, of all parts.
    wider : callable
        From the number of corrections so far to the rule of the next one.
    """
    n, forest = len(g), part.forest
    about = centres.of(part.places, forest.n_levels)
    one = integral_of(part, rule, g, about)
    assert one.shape is not None
    of_blocks, skew = one.of_blocks, one.shape.skew
    found = corrected_centres(about, one.shape, forest)
    pending = blocks_off_centre(forest, one.shape, rule, of_blocks)
    n_corrected = np.zeros(n, dtype=np.intp)
    for turn in range(_MOST_CORRECTIONS - 1):
        left = np.flatnonzero(pending.any(axis=1))
        if not len(left):
            break
        n_corrected[left] += 1
        rule, about = wider(turn), found[left]
        again = integral_of(part, rule, g[left], about)
        assert again.shape is not None
        blocks = pending[left]
        of_blocks[left] = np.where(blocks, again.of_blocks, of_blocks[left])
        places = blocks[:, forest.block]
        skew[left] = np.where(places, again.shape.skew, skew[left])
        found = found.replaced(left, corrected_centres(about, again.shape, forest), places)
        pending[left] = blocks & blocks_off_centre(forest, again.shape, rule, again.of_blocks)
    lost = pending.any(axis=1)
    return Confirmed(one.of_globals + of_blocks.sum(axis=1), found, skew, lost, n_corrected + lost)
