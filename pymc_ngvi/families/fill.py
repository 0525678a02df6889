"""Where a sparse precision is held as it is, with what elimination fills in, beside sums; and where as an arrow."""

import functools

from collections.abc import Callable

import numpy as np

from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.families.dissection import find_structure, step_flops
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure
from pymc_ngvi.families.matrices.sparse.summed import SummedStructure

#: What arithmetic on fronts costs in the unit of `step_flops`; calls of small functions for each stack of them; and for
#: each size of block of an arrow.
_PER_FLOP, _PER_STACK, _PER_SIZE = 2.0, 8e5, 1.5e5
#: Times that vectors of each sum go through the fronts in a step, in passes with a matrix.
_PER_SUM = 0.5
#: Pairs of coordinates in sums, beyond which the precision is not looked at without these.
_MANY_PAIRS = 1e6
#: Part of the cost of a step with an arrow, beyond which that stays.
_MUCH = 0.8


@functools.lru_cache(maxsize=4)
def find_filled(pattern: Pattern) -> FilledStructure | None:
    """Return the structure of a factor with fill-in, where its steps cost less than with an arrow; None elsewhere.

    Parameters
    ----------
    pattern : Pattern
        Of the precision.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy import sparse
    >>> n = 5_000
    >>> chain = Pattern.of(sparse.diags_array([np.ones(n), np.ones(n - 1)], offsets=[0, 1]))
    >>> structure = find_filled(chain)
    >>> structure.fronts.n_entries < 8 * n
    True
    >>> find_filled(Pattern.of(np.eye(n))) is None
    True
    """
    of_arrow = arrow_cost(find_structure(pattern))
    if _MUCH * of_arrow < _PER_STACK:
        return None
    structure = FilledStructure.of(pattern)
    return structure if filled_cost(structure) < _MUCH * of_arrow else None


@functools.lru_cache(maxsize=4)
def find_summed(pattern: SummedPattern) -> SummedStructure:
    """Return the structure of a factor with fill-in beside sums."""
    return SummedStructure.of_sums(pattern)


def cheapest_with_fill(summed: SummedPattern | None, pattern: Callable[[], Pattern | None]) -> FilledStructure | None:
    """Return the structure of a factor with fill-in that costs least; None where another form costs less.

    Parameters
    ----------
    summed : SummedPattern or None
        Of the precision beside sums over many coordinates, where there may be any.
    pattern : callable
        Returns that of all coordinates, None where it counts as dense; not called where it would be large.
    """
    beside = None if summed is None else find_summed(summed)
    if beside is not None and summed is not None and summed.n_pairs > _MANY_PAIRS:
        return beside
    without = pattern()
    filled = None if without is None else find_filled(without)
    if beside is None:
        return filled
    others = [] if without is None else [arrow_cost(find_structure(without))]
    others += [] if filled is None else [filled_cost(filled)]
    return beside if filled_cost(beside) < min(others, default=np.inf) else filled


def arrow_cost(structure: ArrowStructure) -> float:
    """Return the cost of the linear algebra of one step, calls of functions included."""
    return step_flops(structure.sizes, structure.n_border) + _PER_SIZE * len(set(structure.sizes.tolist()))


def filled_cost(structure: FilledStructure) -> float:
    """Return that of a step with fill-in, beside sums or not, in the same unit."""
    cost = _PER_FLOP * structure.fronts.flops + _PER_STACK * structure.fronts.n_stacks
    return cost * (1.0 + _PER_SUM * structure.n_sums) if isinstance(structure, SummedStructure) else cost
