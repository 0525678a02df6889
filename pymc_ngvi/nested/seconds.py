"""How long a nested posterior takes, from sizes alone."""

from collections.abc import Callable

import numpy as np

from pymc_ngvi.core import prices
from pymc_ngvi.density.gaussian_over import GaussianOver, gaussian_over
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.families.dissection import arithmetic_seconds, cheapest_form, step_seconds
from pymc_ngvi.families.matrices.partition import Partition
from pymc_ngvi.families.matrices.sparse.structure import SparseStructure

#: Conditional fits, and for each hyperparameter; expectations that one takes, about, with what comes before and after
#: these; seconds of a fit beside them.
_FITS, _FITS_OF_EACH, _EXPECTATIONS, PER_FIT = 60.0, 10.0, 5.0, 0.01
#: Expectations of a fit whose start is predicted; seconds that such fits may take all together, their number at least
#: and at most.
_EXPECTATIONS_OF_VALUE, _SECONDS_OF_VALUES, _FEWEST_VALUES, _MOST_VALUES = 2.5, 10.0, 128, 448
#: Hyperparameters of which log m is emulated, at most. Of more: fits on the way to the mode, for each; values from
#: which a proposal is learned and that are kept; values of draws that are annealed, and seconds that these may take.
MOST_EMULATED, _TO_MODE, _LEARNED, _ANNEALED, _SECONDS_OF_ANNEALED = 7, 35.0, 1_500.0, 10_000.0, 20.0
#: Seconds of any nested posterior, at least.
LEAST = 0.8


#: In batches: seconds beside those of fits; fits, and for each hyperparameter; seconds of one, of a row in it whose
#: function is quadratic, and of others; passes through the factor.
_BESIDE, _IN_BATCHES, _IN_BATCHES_OF_EACH, _PER_FIT_OF_MANY = 0.5, 30.0, 45.0, 5e-4
_PER_QUADRATIC_ROW, _PER_ROW_OF_MANY, _PASSES = 5e-7, 2e-6, 3.0
#: Seconds that more values than usual may take in batches, and how many there may be.
_SECONDS_OF_MORE, _MOST_OF_ALL = 1.0, 1_000


#: In closed form: seconds of a value, and part of the algebra of a step that a factor is; values, and for each
#: hyperparameter; those with draws at least.
_PER_VALUE_IN_CLOSED_FORM, _OF_STEP = 2e-4, 0.25
_IN_CLOSED_FORM, _IN_CLOSED_FORM_OF_EACH, _FEWEST_IN_CLOSED_FORM = 30.0, 30.0, 200


def nested_seconds(given: RowsGiven) -> float:
    """Return about how long a nested posterior takes."""
    n_dim, n_values = len(given.outside), n_values_of(given)
    if n_dim > MOST_EMULATED and given.over is not None:
        n_fits = _TO_MODE * n_dim + _LEARNED + (_ANNEALED if may_anneal(given) else 0.0)
        return _BESIDE + n_fits * _of_value(given)
    if (closed := gaussian_over(given)) is not None:
        return _BESIDE + (_IN_CLOSED_FORM + _IN_CLOSED_FORM_OF_EACH * n_dim + n_values) * _of_closed_form(closed)
    if given.over is not None:
        return _BESIDE + (_IN_BATCHES + _IN_BATCHES_OF_EACH * n_dim + n_values) * _of_many(given)
    n_fits = _FITS + _FITS_OF_EACH * n_dim
    return n_fits * _of_fit(given, _EXPECTATIONS) + n_values * _of_fit(given, _EXPECTATIONS_OF_VALUE)


def may_anneal(given: RowsGiven) -> bool:
    """Tell whether hyperparameters are many, and log m costs so little that draws of them can be annealed."""
    if len(given.outside) <= MOST_EMULATED or not given.is_quadratic or given.over is None:
        return False
    return _ANNEALED * _of_value(given) < _SECONDS_OF_ANNEALED


def _of_value(given: RowsGiven) -> float:
    """Return the seconds of a value of log m among many, with draws."""
    closed = gaussian_over(given)
    return _of_many(given) if closed is None else _of_closed_form(closed)


def _of_closed_form(over: GaussianOver) -> float:
    """Return the seconds of a value of log m in closed form."""
    fronts = over.precisions.fronts
    algebra = prices.of_fronts(fronts.n_products, fronts.n_fronts)
    return _PER_VALUE_IN_CLOSED_FORM + prices.PER_ROW_OF_VALUE * over.n_rows + _OF_STEP * algebra


def _of_many(given: RowsGiven) -> float:
    """Return the seconds of a fit among many, with its draws."""
    per_row = _PER_QUADRATIC_ROW if given.is_quadratic else _PER_ROW_OF_MANY
    return _PER_FIT_OF_MANY + per_row * given.rows.n_evaluations + _PASSES * of_algebra(given, arithmetic_seconds)


def n_values_of(given: RowsGiven) -> int:
    """Return at how many hyperparameters latent variables are drawn: as many as a few seconds allow."""
    fewest = _FEWEST_VALUES
    if (closed := gaussian_over(given)) is not None:
        each, fewest = _of_closed_form(closed), _FEWEST_IN_CLOSED_FORM
    elif given.over is None:
        return int(np.clip(_SECONDS_OF_VALUES / _of_fit(given, _EXPECTATIONS_OF_VALUE), _FEWEST_VALUES, _MOST_VALUES))
    else:
        each = _of_many(given)
    usual = np.clip(_SECONDS_OF_VALUES / each, fewest, _MOST_VALUES)
    return int(max(usual, min(_SECONDS_OF_MORE / each, _MOST_OF_ALL)))


def _of_fit(given: RowsGiven, n_expectations: float) -> float:
    return PER_FIT + n_expectations * (prices.PER_ROW * given.rows.n_evaluations + of_algebra(given))


def of_algebra(given: RowsGiven, of: Callable[[Partition | SparseStructure], float] = step_seconds) -> float:
    """Return the seconds of the linear algebra of one step, in the form that costs least."""
    form = cheapest_form(given.summed, lambda: given.pattern)
    return prices.of_dense(given.n_dim, given.rows.n_rows) if form is None else of(form)
