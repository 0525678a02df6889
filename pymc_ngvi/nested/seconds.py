"""How long a nested posterior takes, from sizes alone."""

import numpy as np

from pymc_ngvi.core import prices
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.families.dissection import find_structure
from pymc_ngvi.families.fill import cheapest_with_fill, step_seconds

#: Conditional fits, and for each hyperparameter; expectations that one takes, about, with what comes before and after
#: these; seconds of a fit beside them.
_FITS, _FITS_OF_EACH, _EXPECTATIONS, _PER_FIT = 60.0, 10.0, 5.0, 0.01
#: Expectations of a fit whose start is predicted; seconds that such fits may take all together, their number at least
#: and at most.
_EXPECTATIONS_OF_VALUE, _SECONDS_OF_VALUES, _FEWEST_VALUES, _MOST_VALUES = 2.5, 10.0, 128, 448
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
    return _PER_FIT + n_expectations * (prices.PER_ROW * given.rows.n_evaluations + _of_algebra(given))


def _of_algebra(given: RowsGiven) -> float:
    """Return the seconds of the linear algebra of one step, in the form that costs least."""
    filled = cheapest_with_fill(given.summed, lambda: given.pattern)
    if filled is not None:
        return step_seconds(filled)
    if given.pattern is not None:
        return step_seconds(find_structure(given.pattern))
    return prices.of_dense(given.n_dim, given.rows.n_rows)
