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
LEAST = 0.5


#: In batches: seconds beside those of fits; fits, and for each hyperparameter; seconds of one, of a row in it whose
#: function is quadratic, and of others; passes through the factor.
_BESIDE, _IN_BATCHES, _IN_BATCHES_OF_EACH, _PER_FIT_OF_MANY = 0.3, 30.0, 30.0, 5e-4
_PER_QUADRATIC_ROW, _PER_ROW_OF_MANY, _PASSES = 5e-7, 2e-6, 3.0


def nested_seconds(given: RowsGiven) -> float:
    """Return about how long a nested posterior takes."""
    n_dim, n_values = len(given.outside), n_values_of(given)
    if given.over is not None:
        return _BESIDE + (_IN_BATCHES + _IN_BATCHES_OF_EACH * n_dim + n_values) * _of_many(given)
    n_fits = _FITS + _FITS_OF_EACH * n_dim
    return n_fits * _of_fit(given, _EXPECTATIONS) + n_values * _of_fit(given, _EXPECTATIONS_OF_VALUE)


def _of_many(given: RowsGiven) -> float:
    """Return the seconds of a fit among many, with its draws."""
    per_row = _PER_QUADRATIC_ROW if given.is_quadratic else _PER_ROW_OF_MANY
    algebra = max(_of_algebra(given) - prices.PER_STACK, 0.0)  # calls are for many
    return _PER_FIT_OF_MANY + per_row * given.rows.n_evaluations + _PASSES * algebra


def n_values_of(given: RowsGiven) -> int:
    """Return at how many hyperparameters latent variables are drawn: as many as a few seconds allow."""
    of_value = _of_fit(given, _EXPECTATIONS_OF_VALUE) if given.over is None else _of_many(given)
    return int(np.clip(_SECONDS_OF_VALUES / of_value, _FEWEST_VALUES, _MOST_VALUES))


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
