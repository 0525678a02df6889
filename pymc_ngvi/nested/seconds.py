"""How long a nested posterior takes, from sizes alone."""

import numpy as np

from pymc_ngvi.core import prices
from pymc_ngvi.density.gaussian_over import gaussian_over
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.marginal.sampler import EFFECTIVE, MOST, size_wanted

#: Fits on the way to the mode and about it, for each hyperparameter, and for each two of these; seconds beside all
#: fits.
_TO_MODE, _OF_EACH, _OF_EACH_TWO, _BESIDE = 30.0, 22.0, 0.5, 0.5
#: Part of the seconds of a value that it takes among many, in the mean.
_IN_BATCHES = 0.4
#: Seconds that values with draws may take all together, their number at least and at most.
_SECONDS_OF_VALUES, _FEWEST_VALUES = 10.0, 192
#: Seconds of any nested posterior, at least.
LEAST = 0.8
#: In batches: seconds of a fit, of a row in it whose function is quadratic, and of others; passes through the factor.
_PER_FIT_OF_MANY, _PER_QUADRATIC_ROW, _PER_ROW_OF_MANY, _PASSES = 5e-4, 5e-7, 2e-6, 3.0
#: In closed form: seconds of a value.
_PER_VALUE_IN_CLOSED_FORM = 2e-4


def nested_seconds(given: RowsGiven) -> float:
    """Return about how long a nested posterior takes."""
    p = len(given.outside)
    n_fits = _TO_MODE + _OF_EACH * p + _OF_EACH_TWO * p**2
    return _BESIDE + _IN_BATCHES * (n_fits + n_expected(given)) * seconds_of_value(given)


def n_expected(given: RowsGiven) -> float:
    """Return at how many hyperparameters latent variables are drawn, about."""
    wanted = size_wanted(len(given.outside), seconds_of_value(given))
    return min(wanted / EFFECTIVE, n_values_of(given))


def n_values_of(given: RowsGiven) -> int:
    """Return at how many hyperparameters latent variables are drawn at most: as many as a few seconds allow."""
    return int(np.clip(_SECONDS_OF_VALUES / seconds_of_value(given), _FEWEST_VALUES, MOST))


def seconds_of_value(given: RowsGiven) -> float:
    """Return the seconds of a value of log m, with draws."""
    if (over := gaussian_over(given)) is not None:
        of_rows = prices.PER_ROW_OF_VALUE * over.n_rows
        return _PER_VALUE_IN_CLOSED_FORM + of_rows + prices.OF_FACTOR * over.precisions.seconds
    per_row = _PER_QUADRATIC_ROW if given.is_quadratic else _PER_ROW_OF_MANY
    return _PER_FIT_OF_MANY + per_row * given.n_evaluations + _PASSES * given.precisions.seconds
