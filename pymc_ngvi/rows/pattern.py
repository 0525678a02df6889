"""The pattern of a Hessian that is a sum over rows: the coordinates that meet in a row."""

from collections.abc import Iterable

import numpy as np

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.refusal import TooDenseError
from pymc_ngvi.core.sparsity.dependence_sets import Dependence, Ints
from pymc_ngvi.core.sparsity.interaction_pairs import Pairs
from pymc_ngvi.rows.expectation import RowFunction

#: Entries that are held, at most.
_MOST_ENTRIES = 40_000_000


def pattern_of(predictors: Dependence, pairs: Iterable[tuple[Ints, Ints]]) -> Pattern:
    """Return where X^T M X can differ from 0."""
    index = predictors.index.ravel()
    found = Pairs(predictors.sets.shape[1])
    for rows, cols in pairs:
        used = np.ones(len(rows), dtype=bool)
        first = Dependence(predictors.sets, index[rows])
        if np.array_equal(rows, cols):
            found.add_within(first, used)
        else:
            found.add_across(first, Dependence(predictors.sets, index[cols]), used)
    return found.pattern(_MOST_ENTRIES)


def pattern_of_rows(functions: Iterable[RowFunction], predictors: Dependence) -> Pattern | None:
    """Return where the Hessian of a sum over rows can differ from 0; None where these entries are too many to hold."""
    pairs = [(f.index[:, a], f.index[:, b]) for f in functions for a, b in np.argwhere(np.tril(f.interacts))]
    try:
        return pattern_of(predictors, pairs)
    except TooDenseError:
        return None
