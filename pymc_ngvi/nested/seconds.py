"""How long a nested posterior takes, from sizes alone: it is the same on a busy machine.

All constants are seconds on one thread. Those of linear algebra are from steps of 17 models with 200 to 6,000 latent
variables: chains, maps, crossed effects with fronts of up to 1,100, Gaussian processes. They come to within a fifth of
each.
"""

import numpy as np

from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.families.dissection import find_structure
from pymc_ngvi.families.fill import cheapest_with_fill
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure
from pymc_ngvi.families.matrices.sparse.summed import SummedStructure

#: Conditional fits, and for each hyperparameter; expectations that one takes, about, with what comes before and after
#: these; seconds of a fit, and of a row.
_FITS, _FITS_OF_EACH, _EXPECTATIONS, _PER_FIT, _PER_ROW = 60.0, 10.0, 5.0, 0.01, 2e-6
#: Expectations of a fit whose start is predicted; seconds that such fits may take all together, their number at least
#: and at most.
_EXPECTATIONS_OF_VALUE, _SECONDS_OF_VALUES, _FEWEST_VALUES, _MOST_VALUES = 2.5, 10.0, 128, 448
#: Of an operation in a dense matrix of one state, and in the fronts or blocks of a sparse one; of a number in these,
#: which is gathered and scattered; of the calls for a stack of fronts, and for a size of blocks.
_PER_DENSE, _PER_FLOP, _PER_ENTRY, _PER_STACK, _PER_SIZE = 4.5e-11, 7e-11, 3.5e-8, 1.6e-4, 9e-4
#: Part of a step with fronts that each sum adds.
_PER_SUM = 1.8


#: Seconds of any nested posterior, at least.
LEAST = _FITS * _PER_FIT + min(_MOST_VALUES * _PER_FIT, _SECONDS_OF_VALUES)


def nested_seconds(given: RowsGiven) -> float:
    """Return about how long a nested posterior takes."""
    n_fits = _FITS + _FITS_OF_EACH * len(given.outside)
    return n_fits * _of_fit(given, _EXPECTATIONS) + n_values_of(given) * _of_fit(given, _EXPECTATIONS_OF_VALUE)


def n_values_of(given: RowsGiven) -> int:
    """Return at how many hyperparameters latent variables are drawn: as many as a few seconds allow."""
    return int(np.clip(_SECONDS_OF_VALUES / _of_fit(given, _EXPECTATIONS_OF_VALUE), _FEWEST_VALUES, _MOST_VALUES))


def _of_fit(given: RowsGiven, n_expectations: float) -> float:
    return _PER_FIT + n_expectations * (_PER_ROW * given.rows.n_evaluations + _of_algebra(given))


def _of_algebra(given: RowsGiven) -> float:
    """Return the seconds of the linear algebra of one step, in the form that costs least."""
    filled = cheapest_with_fill(given.summed, lambda: given.pattern)
    if filled is not None:
        return of_fronts(filled)
    if given.pattern is not None:
        return of_blocks(find_structure(given.pattern))
    return _PER_DENSE * float(given.n_dim) ** 2 * (given.n_dim + given.rows.n_rows)


def of_fronts(structure: FilledStructure) -> float:
    """Return the seconds of a step with fronts, as these are filled up."""
    fronts = structure.fronts
    seconds = _PER_FLOP * fronts.n_products + _PER_ENTRY * fronts.n_fronts + _PER_STACK * fronts.n_stacks
    return seconds * (1.0 + _PER_SUM * structure.n_sums) if isinstance(structure, SummedStructure) else seconds


def of_blocks(structure: ArrowStructure) -> float:
    """Return the seconds of a step with blocks beside a border."""
    k, g = structure.sizes.astype(np.float64), float(structure.n_border)
    products = 3.0 * (np.sum(k**3 + k**2 * g + k * g**2) + g**3)
    entries = np.sum(k * (k + g)) + g**2
    return float(_PER_FLOP * products + _PER_ENTRY * entries + _PER_SIZE * len(set(structure.sizes.tolist())))
