"""Effects that one row alone reads: which these are, and the rows that are left when they are integrated out.

Such an effect x has a normal prior, a row that is quadratic in one predictor p, and is read by one row of another kind,
in one of its predictors, eta. With p = w x + what others add to it, and eta = b x + the same, that predictor is

    eta - (b / w) p + (b / w) p,

of which the first part does not hang on x, and p is normal, whatever the others are. So the row, integrated over p, is
a function of the first part: centred and non-centred forms come to the same.
"""

import itertools

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from numpy.typing import NDArray
from scipy import sparse

from pymc_ngvi.core.sparsity.dependence_sets import Dependence
from pymc_ngvi.core.values import Array
from pymc_ngvi.rows.expectation import RowFunction
from pymc_ngvi.rows.integrated import Integrated, TabulatedRowFunction
from pymc_ngvi.rows.linear_map import LinearMap
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

    def left(self, functions: Sequence[RowFunction]) -> list[RowFunction]:
        """Return rows that are neither read here nor priors."""
        keep = [np.ones(len(rows.index), dtype=bool) for rows in functions]
        for group in self.groups:
            keep[group.kind][group.rows] = keep[group.prior_kind][group.prior_rows] = False
        return [
            rows if all_.all() else rows.at(rows.index, all_)
            for rows, all_ in zip(functions, keep, strict=True)
            if all_.any()
        ]

    def dependence(self, whole: Dependence, functions: Sequence[RowFunction]) -> Dependence:
        """Return the coordinates that are left, and sums after them if there are any, on which predictors depend."""
        sets = sparse.csr_array(whole.sets.tocsr()[whole.index.ravel()], dtype=np.float64)
        n_predictors, n_joint = sets.shape
        for group in self.groups:
            eta, p = predictors_of(group, functions)
            sets = sets + _sparse(np.ones(len(eta)), eta, p, (n_predictors, n_predictors)) @ sets
        keep = np.concatenate([self.kept, np.arange(self.n_dim, n_joint)])
        some = sparse.csr_array(sets[:, keep])
        empty = sparse.csr_array((1, len(keep)))
        return Dependence(sparse.csr_array(sparse.vstack([empty, some])) != 0.0, np.arange(1, n_predictors + 1))


@dataclass(frozen=True, eq=False)
class Narrowed:
    """Rows in the coordinates that are left, at one value of what they hang on."""

    #: First those with effects integrated out, one for each group.
    functions: list[RowFunction]
    #: To predictors, of coordinates that are left and of sums, if there are any.
    linear: LinearMap
    #: What is to be added to log p.
    constant: float
    effects: OwnEffects
    priors: list[Priors]
    #: w, of each group.
    ratios: list[Array]
    #: p, of each group.
    prior_predictors: list[Ints]

    def drawn(self, eta: Array, rng: np.random.Generator) -> Array:
        """Return draws of the effects, (n, n_effects), given predictors, (n, n_predictors)."""
        z = [_integrated(rows).drawn(rng, *_inputs(rows, eta)) for rows, *_ in self._each()]
        return self.at(eta, np.concatenate(z, axis=1))

    def at(self, eta: Array, z: Array) -> Array:
        """Return the effects, (n, n_effects), from predictors and from standard normals."""
        parts, start = [], 0
        for rows, prior, w, p in self._each():
            own = z[:, start : start + len(rows.index)]
            parts.append((prior.mean + prior.sd * own - eta[:, p]) / w)
            start += len(rows.index)
        return np.concatenate(parts, axis=1)

    def conditional_mean(self, eta: Array) -> Array:
        """Return means of the effects, (n, n_effects), given predictors, (n, n_predictors)."""
        z = [_integrated(rows).moments(*_inputs(rows, eta))[0] for rows, *_ in self._each()]
        return self.at(eta, np.concatenate(z, axis=1))

    def pairs(self) -> list[NDArray[np.int64]]:
        """Return the pairs of predictors whose covariances `moments` takes: lists for one group after the other."""
        found = []
        for rows, _, _, p in self._each():
            columns = [*rows.index.T, p]
            found += [np.stack([columns[a], columns[b]], axis=1) for a in range(rows.k + 1) for b in range(a + 1)]
        return found

    def moments(self, mean: Array, covariances: Sequence[Array], nodes: Array, weights: Array) -> tuple[Array, Array]:
        """Return means and standard deviations of the effects, (n_effects,) each, where predictors are normal."""
        means, sds, given = list[Array](), list[Array](), iter(covariances)
        for rows, prior, w, p in self._each():
            k, n = rows.k, len(rows.index)
            cov = np.empty((n, k + 1, k + 1))
            for a in range(k + 1):
                for b in range(a + 1):
                    cov[:, a, b] = cov[:, b, a] = next(given)
            of_group = self.effects.groups[len(means)]
            # All but the predictor that reads the effect are taken at their conditional means.
            slot = of_group.slot
            sd = np.sqrt(np.maximum(cov[:, slot, slot], 0.0))
            along = cov[:, slot] * np.divide(1.0, sd, out=np.zeros(n), where=sd > 0.0)[:, None]
            points = [mean[rows.index[:, a]] + nodes[:, None] * along[:, a] for a in range(k)]
            z, variance = _integrated(rows).moments(*points, *rows.data)
            of_z = weights @ z
            square = weights @ (variance + (z - of_z) ** 2)
            across = (weights * nodes) @ z * along[:, k]
            total = prior.sd**2 * square + cov[:, k, k] - 2.0 * prior.sd * across
            means.append((prior.mean + prior.sd * of_z - mean[p]) / w)
            sds.append(np.sqrt(np.maximum(total, 0.0)) / np.abs(w))
        return np.concatenate(means), np.concatenate(sds)

    def _each(self) -> Iterator[tuple[RowFunction, Priors, Array, Ints]]:
        n = len(self.effects.groups)
        return zip(self.functions[:n], self.priors, self.ratios, self.prior_predictors, strict=True)


def _integrated(rows: RowFunction) -> Integrated:
    assert isinstance(rows.function, Integrated)
    return rows.function


def _inputs(rows: RowFunction, eta: Array) -> list[Array]:
    """Return predictors and data of rows at points, (n, n_predictors)."""
    return [*(np.ascontiguousarray(eta[:, at]) for at in rows.index.T), *rows.data]


def narrowed(effects: OwnEffects, functions: Sequence[RowFunction], linear: LinearMap) -> Narrowed | None:
    """Integrate effects out; None where a prior is no normal density."""
    made, priors, ratios, predictors, constant = list[RowFunction](), [], [], [], 0.0
    for group in effects.groups:
        eta, p = predictors_of(group, functions)
        prior = priors_of(functions[group.prior_kind], group.prior_rows)
        w, b = _entries(linear, p, group.coordinates), _entries(linear, eta, group.coordinates)
        if prior is None or not (w != 0.0).all():
            return None
        slope = b / w
        offset, dense, rest = linear.offset.copy(), linear.dense, linear.rest
        offset[eta] += slope * (prior.mean - linear.offset[p])
        if len(linear.columns) and linear.dense[p].any():
            dense = dense.copy()
            dense[eta] -= slope[:, None] * linear.dense[p]
        of_prior = sparse.csr_array(rest[p])
        if of_prior.nnz > len(p):  # priors whose means hang on other coordinates
            n = len(linear.offset)
            rest = sparse.csr_array(rest - _sparse(slope, eta, np.arange(len(p)), (n, len(p))) @ of_prior)
        linear = LinearMap(offset, dense, linear.columns, rest)
        reads = functions[group.kind]
        keep = np.zeros(len(reads.index), dtype=bool)
        keep[group.rows] = True
        some = reads.at(reads.index, keep)
        slopes = [np.zeros((1, 1))] * reads.k
        slopes[group.slot] = (slope * prior.sd)[None]
        function, data = Integrated(some.function, reads.k), [*some.data, *slopes]
        kind = TabulatedRowFunction if reads.k == 1 else RowFunction
        made.append(kind(function, some.index, data, np.ones((reads.k,) * 2, dtype=bool), n_shared=reads.n_shared))
        constant += float(np.sum(prior.log_total - np.log(np.abs(w))))
        priors.append(prior)
        ratios.append(w)
        predictors.append(p)
    keep_columns = np.concatenate([effects.kept, np.arange(effects.n_dim, linear.n_dim)])
    place = np.full(linear.n_dim, -1, dtype=np.intp)
    place[keep_columns] = np.arange(len(keep_columns))
    here = place[linear.columns] >= 0
    rest = sparse.csr_array(linear.rest[:, keep_columns])
    return Narrowed(
        [*made, *effects.left(functions)],
        LinearMap(linear.offset, linear.dense[:, here], place[linear.columns[here]], rest),
        constant,
        effects,
        priors,
        ratios,
        predictors,
    )


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


def _entries(linear: LinearMap, rows: Ints, columns: Ints) -> Array:
    """Return entries of X, (n,)."""
    result = np.asarray(linear.rest[rows, columns]).ravel().astype(np.float64)
    place = np.full(linear.n_dim, -1, dtype=np.intp)
    place[linear.columns] = np.arange(len(linear.columns))
    dense = np.flatnonzero(place[columns] >= 0)
    result[dense] += linear.dense[rows[dense], place[columns[dense]]]
    return result


def _sparse(values: Array, rows: Ints, columns: Ints, shape: tuple[int, int]) -> sparse.csr_array:
    return sparse.csr_array((values, (rows, columns)), shape=shape)


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
