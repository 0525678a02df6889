"""How long a nested posterior takes, from sizes alone."""

import numpy as np

from pymc_ngvi.core import prices
from pymc_ngvi.density.gaussian_over import gaussian_over
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.marginal.sampler import MOST, WANTED, WANTED_OF_MORE

#: Fits on the way to the mode and about it, for each hyperparameter, and for each two of these; seconds beside all
#: fits; part of the values that is effective, about.
_TO_MODE, _OF_EACH, _OF_EACH_TWO, _BESIDE, _EFFECTIVE = 30.0, 22.0, 0.5, 0.5, 0.7
#: Part of the seconds of a value that it takes among many, in the mean.
_IN_BATCHES = 0.4
#: Seconds that values with draws may take all together, their number at least and at most; seconds of values beyond
#: those that are wanted in any case, and how many of these there are at most; seconds of a value that are next to none.
_SECONDS_OF_VALUES, _FEWEST_VALUES, _SECONDS_OF_WANTED, _MOST_WANTED, CHEAP = 10.0, 192, 0.15, 1_000.0, 6e-4
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
    return min(n_wanted(given) / _EFFECTIVE, n_values_of(given))


def n_values_of(given: RowsGiven) -> int:
    """Return at how many hyperparameters latent variables are drawn at most: as many as a few seconds allow."""
    return int(np.clip(_SECONDS_OF_VALUES / seconds_of_value(given), _FEWEST_VALUES, MOST))


def n_wanted(given: RowsGiven) -> float:
    """Return the effective size that hyperparameters are to have: more where they cost next to nothing.

    Where draws have weights, a few of them tell the variance of what grows fast with the latent variables.
    """
    seconds = _SECONDS_OF_WANTED * (1.0 if given.is_quadratic else 2.0)
    return max(WANTED.get(len(given.outside), WANTED_OF_MORE), min(seconds / seconds_of_value(given), _MOST_WANTED))


def seconds_of_value(given: RowsGiven) -> float:
    """Return the seconds of a value of log m, with draws."""
    if (over := gaussian_over(given)) is not None:
        of_rows = prices.PER_ROW_OF_VALUE * over.n_rows
        return _PER_VALUE_IN_CLOSED_FORM + of_rows + prices.OF_FACTOR * over.precisions.seconds
    per_row = _PER_QUADRATIC_ROW if given.is_quadratic else _PER_ROW_OF_MANY
    return _PER_FIT_OF_MANY + per_row * given.n_evaluations + _PASSES * given.precisions.seconds
