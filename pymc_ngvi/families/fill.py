"""Where a sparse precision is held as it is, with what elimination fills in, beside sums; and where as an arrow."""

import functools

from collections.abc import Callable

import numpy as np

from pymc_ngvi.core import prices
from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.families.dissection import find_structure
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure
from pymc_ngvi.families.matrices.sparse.summed import SummedStructure

#: Pairs of coordinates in sums, beyond which the precision is not looked at without these.
_MANY_PAIRS = 1e6
#: Part of the cost of a step with an arrow, beyond which that stays.
_MUCH = 0.8
#: Seconds of such a step up to which nothing else is looked for: to find it takes longer than all steps would gain.
_LITTLE = 4e-3


@functools.lru_cache(maxsize=4)
def find_filled(pattern: Pattern) -> FilledStructure | None:
    """Return the structure of a factor with fill-in, where its steps cost less than with an arrow; None elsewhere."""
    of_arrow = step_seconds(find_structure(pattern))
    if of_arrow < _LITTLE:
        return None
    structure = FilledStructure.of(pattern)
    return structure if step_seconds(structure) < _MUCH * of_arrow else None


@functools.lru_cache(maxsize=4)
def find_summed(pattern: SummedPattern) -> SummedStructure:
    """Return the structure of a factor with fill-in beside sums."""
    return SummedStructure.of_sums(pattern)


def cheapest_with_fill(summed: SummedPattern | None, pattern: Callable[[], Pattern | None]) -> FilledStructure | None:
    """Return the structure of a factor with fill-in that costs least; None where another form costs less."""
    beside = None if summed is None else find_summed(summed)
    if beside is not None and summed is not None and summed.n_pairs > _MANY_PAIRS:
        return beside
    without = pattern()
    filled = None if without is None else find_filled(without)
    if beside is None:
        return filled
    others = [] if without is None else [step_seconds(find_structure(without))]
    others += [] if filled is None else [step_seconds(filled)]
    return beside if step_seconds(beside) < min(others, default=np.inf) else filled


def arithmetic_seconds(structure: ArrowStructure | FilledStructure) -> float:
    """Return the seconds of a step among many that share its calls."""
    if isinstance(structure, FilledStructure):
        return step_seconds(structure) - prices.PER_STACK * structure.fronts.n_stacks
    return step_seconds(structure) - prices.PER_SIZE * len(set(structure.sizes.tolist()))


def step_seconds(structure: ArrowStructure | FilledStructure) -> float:
    """Return the seconds of the linear algebra of one step, with blocks beside a border, or with fronts."""
    if isinstance(structure, FilledStructure):
        fronts = structure.fronts
        n_sums = structure.n_sums if isinstance(structure, SummedStructure) else 0
        return prices.of_fronts(fronts.n_products, fronts.n_fronts, fronts.n_stacks, n_sums)
    return prices.of_blocks(structure.sizes, structure.n_border)
