"""Which effects one row alone reads, and whether they can be integrated out; see `own_effects`."""

import itertools

from collections.abc import Sequence

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.expectation import RowFunction
from pymc_ngvi.rows.own_effects import Ints, OwnEffects, OwnGroup
from pymc_ngvi.rows.quadratic import are_concave, is_quadratic

#: Part of the elements of a variable that rows are to read as their own: few do not pay for the further kind of rows.
_LEAST_PART = 0.5
#: A line on which rows are looked at, about where their predictors are at the start.
_LINE = np.linspace(-12.0, 12.0, 49)
#: Rows that read such an effect; what is said where there are none.
_PRIOR_AND_ROW, _NONE = 2, "no effect is read by one row alone"


def find_own(
    functions: Sequence[RowFunction], sets: sparse.csr_array, linear_in: NDArray[np.bool_], start: Array
) -> tuple[OwnEffects | None, str]:
    """Find effects that rows read as their own; None where there are none, and why."""
    n_dim = sets.shape[1]
    sets = sparse.csr_array(sets, dtype=np.int64)
    readers = [_reading(rows, sets) for rows in functions]
    counts = np.bincount(np.concatenate([r.indices for r in readers]), minlength=n_dim)
    linear = np.bincount(sparse.csr_array(sets[np.flatnonzero(linear_in)]).indices, minlength=n_dim) > 0
    left = (counts == _PRIOR_AND_ROW) & ~linear
    plain = [type(rows) is RowFunction for rows in functions]
    quadratic = [is_plain and is_quadratic(rows) for is_plain, rows in zip(plain, functions, strict=True)]
    used = [np.zeros(len(rows.index), dtype=bool) for rows in functions]
    groups, why = list[OwnGroup](), _NONE
    order = sorted(range(len(functions)), key=lambda kind: -len(functions[kind].index))
    priors = [kind for kind in order if quadratic[kind] and functions[kind].k == 1]
    for prior, kind in itertools.product(priors, (kind for kind in order if plain[kind] and not quadratic[kind])):
        of_prior = _one_each(readers[prior], left)
        of_rows = _one_each(readers[kind], of_prior >= 0)
        both = np.flatnonzero(of_rows >= 0)
        both = both[~used[kind][of_rows[both]] & ~used[prior][of_prior[both]]]
        both = both[np.argsort(of_rows[both], kind="stable")]
        if not len(both) or len(both) < _LEAST_PART * len(functions[prior].index):
            continue
        found = _group(functions, sets, start, OwnGroup(both, kind, of_rows[both], -1, prior, of_prior[both]))
        if isinstance(found, str):
            why = found
            continue
        groups.append(found)
        left[both], used[kind][found.rows], used[prior][found.prior_rows] = False, True, True
    return (OwnEffects(groups, n_dim), "") if groups else (None, why)


def _group(functions: Sequence[RowFunction], sets: sparse.csr_array, start: Array, own: OwnGroup) -> OwnGroup | str:
    """Return effects with the predictor by which rows read them, or why they can't be integrated out."""
    rows = functions[own.kind]
    reads = [(sets[rows.index[own.rows, a], own.coordinates] != 0) for a in range(rows.k)]
    slots = [a for a in range(rows.k) if reads[a].all()]
    if len(slots) != 1 or sum(int(read.sum()) for read in reads) != len(own.rows) or slots[0] < rows.n_shared:
        return "rows read their own effect in several ways"
    keep = np.zeros(len(rows.index), dtype=bool)
    keep[own.rows] = True
    some = rows.at(rows.index, keep)
    if not are_concave(some, slots[0], start[some.index], _LINE).all():
        return "the log density of a row is not concave in its own effect"
    return own._replace(slot=slots[0])


def _reading(rows: RowFunction, sets: sparse.csr_array) -> sparse.csr_array:
    """Return which coordinates each row reads, with each once."""
    total = sparse.csr_array(sets[rows.index[:, 0]], copy=True)
    for column in rows.index.T[1:]:
        total = sparse.csr_array(total + sets[column])
    total.sum_duplicates()
    return total


def _one_each(reader: sparse.csr_array, wanted: NDArray[np.bool_]) -> Ints:
    """Return the row that reads each coordinate, (n_dim,), where each row has one of those that are wanted; else -1."""
    result = np.full(reader.shape[1], -1, dtype=np.intp)
    number = np.repeat(np.arange(reader.shape[0]), np.diff(reader.indptr))
    here = wanted[reader.indices]
    rows, columns = number[here], reader.indices[here]
    _, first = np.unique(rows, return_index=True)
    result[columns[first]] = rows[first]
    return result
