"""Effects that one row alone reads: which these are, and the rows that are left when they are integrated out.

Such an effect x has a normal prior, a row that is quadratic in one predictor p, and is read by one row of another kind,
in one of its predictors, eta. With p = w x + what others add to it, and eta = b x + the same, that predictor is

    eta - (b / w) p + (b / w) p,

of which the first part does not hang on x, and p is normal, whatever the others are. So the row, integrated over p, is
a function of the first part: centred and non-centred forms come to the same.
"""

import itertools

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.expectation import RowFunction
from pymc_ngvi.rows.quadratic import FAR, are_concave, is_quadratic
from pymc_ngvi.rows.separable import derivatives_of

type Ints = NDArray[np.intp]


class OwnGroup(NamedTuple):
    """Effects that rows of one kind read, one each."""

    #: shape (n,).
    coordinates: Ints
    #: The kind of rows that read them, which of these, (n,), and by which of their predictors.
    kind: int
    rows: Ints
    slot: int
    #: Their priors.
    prior_kind: int
    prior_rows: Ints


class Priors(NamedTuple):
    """Normal densities of predictors: means, standard deviations, and logarithms of what they integrate to, (n,)."""

    mean: Array
    sd: Array
    log_total: Array


@dataclass(frozen=True, eq=False)
class OwnEffects:
    """Effects that rows read as their own."""

    groups: list[OwnGroup]
    #: Number of coordinates.
    n_dim: int

    @property
    def coordinates(self) -> Ints:
        """All of them, in the order of the groups."""
        return np.concatenate([group.coordinates for group in self.groups])

    @property
    def kept(self) -> Ints:
        """All other coordinates, ascending."""
        return np.setdiff1d(np.arange(self.n_dim), self.coordinates)


def priors_of(rows: RowFunction, at: Ints) -> Priors | None:
    """Return the normal densities that some rows, quadratic in their only predictor, are; None where one is none."""
    index = rows.index[at]
    some = RowFunction(rows.function, index, rows.data_of(at), rows.interacts, n_shared=rows.n_shared)
    grad, second = derivatives_of(some, np.zeros((len(at), 1)))
    with np.errstate(all="ignore"):
        mean, sd = -grad[:, 0] / second[:, 0], np.sqrt(-1.0 / second[:, 0])
        [top] = some.values([mean[None]], slice(None))
    if not (np.isfinite(sd) & np.isfinite(top) & (sd > 0.0)).all():
        return None
    return Priors(mean, sd, top + np.log(sd) + 0.5 * np.log(2.0 * np.pi))


def predictors_of(group: OwnGroup, functions: Sequence[RowFunction]) -> tuple[Ints, Ints]:
    """Return the predictors that read effects, and those of their priors, (n,) each."""
    return functions[group.kind].index[group.rows, group.slot], functions[group.prior_kind].index[group.prior_rows, 0]


# --- which effects one row alone reads, and whether they can be integrated out; see `own_effects` ---


#: Part of the elements of a variable that rows are to read as their own: few do not pay for the further kind of rows.
_LEAST_PART = 0.5
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
    if not are_concave(some, slots[0], start[some.index], FAR).all():
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
