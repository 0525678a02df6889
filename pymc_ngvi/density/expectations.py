"""Log p as a sum over rows: expectations under a Gaussian q of theta, and terms by coordinates."""

import copy
import functools

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytensor.tensor as pt

from numpy.typing import NDArray
from scipy import linalg, sparse

from pymc_ngvi.core.messages import NotApart
from pymc_ngvi.core.sizes import MOST_NUMBERS, STREAMED
from pymc_ngvi.core.types import Array, Bends, Expectation, Indices, RowRules, Spread
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.reading.predictors import ROUNDING, Compile, JointPredictors, Reading
from pymc_ngvi.rows.engines import engine_for
from pymc_ngvi.rows.expectation import Compiled, RowFunction, changed, row_slices
from pymc_ngvi.rows.linear_map import Entries, LinearMap, ManyMaps, Seen, symmetric
from pymc_ngvi.rows.many import ManyRows, priors_of
from pymc_ngvi.rows.row_hessian import FirstDerivatives, PredictorMeanHessian
from pymc_ngvi.rows.separable import is_quadratic

#: Nats that quadrature may be off by, all rows together, where their functions are smooth; for each coordinate, where
#: that is more; the least for a row.
_TOLERANCE, _PER_DIM, _LEAST = 1e-4, 1e-6, 1e-12


class Expectations:
    """Expectations of a log density that is a sum over rows."""

    def __init__(self, reading: Reading, compile_: Compile, backend: str = "quick") -> None:
        self.n_rows_in_all = 0
        self.reading, self.predictors, self.engine = reading, reading.predictors, engine_for(backend, compile_)
        self._take()

    def _take(self) -> None:
        self.terms, self.constant = self.reading.terms, 0.0
        #: The predictors as functions of coordinates and sums over many of these; None where there are no such sums.
        self.joint: JointPredictors | None = None
        if self.terms.rest:  # no expectation is ever taken
            return
        #: The functions of rows, kind by kind.
        self.functions = [self.engine.row_function(rows) for rows in self.terms.rows]
        # Of the predictors in which log p is not linear.
        used = np.concatenate([np.empty(0, dtype=np.int64), *(rows.index.ravel() for rows in self.functions)])
        self.joint = self.predictors.with_sums(np.unique(used))
        self._sum_up(self.predictors.linear_map if self.joint is None else self.joint.linear_map)

    def anchor(self, theta: Array, logp: Array) -> bool:
        """Take what is constant in log p from its value at a point, and tell whether others agree."""
        self.constant = 0.0
        rows = self.at(theta)
        self.constant = float(logp[0] - rows[0])
        return self.agrees(theta, logp)

    def agrees(self, theta: Array, logp: Array, *, everywhere: bool = False) -> bool:
        """Tell whether log p is what the rows add up to at points, (n_points, n_dim), where it is finite."""
        keep = np.isfinite(logp)
        size = 1.0 + np.abs(logp[keep]) + abs(self.constant)
        with np.errstate(invalid="ignore"):
            agree = bool(np.all(np.abs(self.at(theta[keep]) - logp[keep]) <= ROUNDING * size))
        return agree and not (everywhere and np.isfinite(self.at(theta[np.isneginf(logp)])).any())

    def at(self, theta: Array) -> Array:
        """Return log p at points, (n_points,)."""
        total = np.empty(len(theta))
        for part in row_slices(len(theta), max(1, STREAMED // max(len(self.terms.slope), 1))):
            eta = self.linear_map(theta[part])
            total[part] = self.constant + eta @ self.terms.slope
            for rows in self.functions:
                total[part] += rows.values([eta[:, at] for at in rows.index.T], slice(None)).sum(axis=1)
        return total

    def refresh(self, *, anew: bool = False) -> None:
        """Take the data as they are now, as a `Reading` does; `anchor` is needed where they have changed."""
        if self.reading.refresh(anew=anew):
            self._take()

    # --- in other coordinates ---

    def times_used(self) -> NDArray[np.int64]:
        """Return how often each predictor occurs, (n_predictors,)."""
        result = np.asarray(self.terms.slope != 0.0, dtype=np.int64)
        for rows in self.functions:
            result += np.bincount(rows.index.ravel(), minlength=len(result))
        return result

    def on(self, linear: LinearMap, predictors: Indices, constant: float) -> "Expectations":
        """Return the sum of the rows that are functions of some predictors, these being affine in other coordinates."""
        other = copy.copy(self)
        place = np.full(len(self.terms.slope), -1, dtype=np.int64)
        place[predictors] = np.arange(len(predictors))
        kept = [np.flatnonzero((place[rows.index] >= 0).all(axis=1)) for rows in self.functions]
        other.functions = [
            rows.some(at, place[rows.index[at]]) for rows, at in zip(self.functions, kept, strict=True) if len(at)
        ]
        other.terms = replace(self.terms, slope=self.terms.slope[predictors])
        other.constant = self.constant + constant
        other._sum_up(linear)
        return other

    def _sum_up(self, linear: LinearMap) -> None:
        """Find what of the covariance of q rows need, and where in the derivatives theirs belong."""
        #: The predictors as functions of theta.
        self.linear_map = linear
        maps, slope = ManyMaps.of(linear), self.terms.slope[None]
        entries = Entries(maps.sparsity, maps.columns, [rows.index for rows in self.functions])
        self._many = ManyRows(maps, entries, self.functions, slope, np.zeros(1), self.tolerance)

    @property
    def tolerance(self) -> float:
        """Nats that quadrature may be off by in each row."""
        in_all = max(_TOLERANCE, _PER_DIM * self.linear_map.n_dim)
        return max(in_all / max(self.n_rows, self.n_rows_in_all, 1), _LEAST)

    @property
    def n_directions(self) -> int:
        """Directions in which the functions of rows vary, at most."""
        return max((rows.n_directions for rows in self.functions), default=0)

    @property
    def n_rows(self) -> int:
        """Rows, all kinds together."""
        return sum(len(rows.index) for rows in self.functions)

    @np.errstate(all="ignore")
    def seen(self, q: Spread) -> Seen:
        """Return what rows see of a Gaussian."""
        eta, many = self.linear_map(q.location[None]), self._many
        values = self.linear_map.covariances(q, many.entries.rows, many.entries.cols)
        return Seen(eta, many.at.covariances(values[None]))

    # Densities overflow far from the mode: the caller sees what is not finite.
    @np.errstate(all="ignore")
    def under(
        self,
        q: Spread | Seen,
        entries: Any = None,
        rules: RowRules | None = None,
        *,
        adapt: bool = False,
        least: float = -np.inf,
    ) -> Expectation:
        """Return expectations under a Gaussian, or what rows see of one; see `PredictorMeanHessian`."""
        seen = q if isinstance(q, Seen) else self.seen(q)
        linear, fixed = self.linear_map, self.constant + float(self.terms.slope @ seen.mean[0])
        kinds = self._many.taken(seen, None if rules is None else RowRules.stacked([rules]))
        if (rules is None or adapt) and not fixed + sum(kind.values.sum() for kind in kinds) < least:
            for kind in kinds:
                kind.choose(self.tolerance)
        grad, matrix = self._many.scatter(*zip(*[kind.derivatives() for kind in kinds], strict=True))
        slope, bends = linear.transposed_times((self.terms.slope + grad)[None])[0], None
        if kinds and all(rows.n_bends for rows in self.functions):
            bends = Bends(*map(np.concatenate, zip(*[kind.bends() for kind in kinds], strict=True)))
        return Expectation(
            fixed + float(sum(kind.values.sum() for kind in kinds)),
            float(sum(kind.errors.sum() for kind in kinds)),
            slope,
            PredictorMeanHessian(linear, matrix, entries),
            RowRules(np.concatenate([kind.codes for kind in kinds]), np.concatenate([kind.sd for kind in kinds])),
            bends,
        )

    @np.errstate(all="ignore")
    def are_stale(self, seen: Seen, rules: RowRules) -> bool:
        """Tell whether rows are wider, or much narrower, than those that rules were chosen for."""
        now, covariances = [], iter(seen.covariances)
        for rows in self.functions:
            variances = symmetric(covariances, rows.k).diagonal(axis1=1, axis2=2)
            now.append(np.sqrt(variances.max(axis=1)).astype(np.float32))
        wider, narrower = changed(rules.level, rules.sd, np.concatenate(now))
        return bool(wider.any() or narrower.any())

    def directions(self, rows: Indices) -> Array:
        """Return the slopes of the only predictor of each of some rows, (n, n_dim)."""
        return self.linear_map.plain.rows(np.concatenate([kind.index[:, 0] for kind in self.functions])[rows])


# --- log p and its gradient at points, where log p is a sum over rows: nothing is compiled for these ---


class Pointwise:
    """Log p by its rows, and -inf where a condition fails that rows leave out."""

    def __init__(
        self,
        rows: Expectations,
        kinds: Sequence[FirstDerivatives],
        holds: Callable[[Array], NDArray[np.bool_]] | None,
    ) -> None:
        self._rows, self._kinds = rows, kinds
        #: From predictors to whether conditions hold, each; None where no condition is left out.
        self._holds = holds
        places = np.concatenate([np.empty(0, dtype=np.int64), *(at for kind in kinds for at in kind.places)])
        entries = np.ones(len(places)), (places, np.arange(len(places)))
        self._to_predictors = sparse.csr_array(entries, shape=(len(rows.terms.slope), len(places)))

    @classmethod
    def of(cls, rows: Expectations, compile_: Compile) -> "Pointwise | None":
        """Return that of rows; None where a row has no derivative here, or a condition is not one of all of log p."""
        conditions = rows.reading.conditions
        if conditions is None:
            return None
        found = [rows.engine.derivatives(kind, FirstDerivatives) for kind in rows.terms.rows]
        known = [kind for kind in found if kind is not None]
        if len(known) < len(found):
            return None
        if not conditions:
            return cls(rows, known, None)
        with without_c():
            each = pt.stack([condition.reshape(()) for condition in conditions])
            points, [values] = graph.over_draws([each], rows.predictors.vector)
        return cls(rows, known, compile_([points], values))

    # Densities overflow far from the mode: the caller sees what is not finite.
    @np.errstate(all="ignore")
    def logp(self, theta: Array) -> Array:
        """Return log p, (n_points,), at points (n_points, n_dim)."""
        return self._within(theta, self._rows.at(theta))

    @np.errstate(all="ignore")
    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p and its gradient, (n_points, n_dim)."""
        at_once = max(1, STREAMED // max(*self._to_predictors.shape, 1))
        total, grad = np.empty(len(theta)), np.empty(theta.shape)
        for at in row_slices(len(theta), at_once):
            total[at], grad[at] = self._few(theta[at])
        return self._within(theta, self._rows.constant + total), grad

    def _few(self, theta: Array) -> tuple[Array, Array]:
        linear, slope = self._rows.linear_map, self._rows.terms.slope
        eta = linear(theta)
        total: Array = eta @ slope
        slopes, start = np.empty((self._to_predictors.shape[1], len(theta))), 0
        for kind in self._kinds:
            value, found = kind(eta)
            total += value
            for part in found:
                slopes[start : start + len(part)] = part
                start += len(part)
        by_predictor: Array = self._to_predictors @ slopes
        by_predictor += slope[:, None]
        return total, linear.transposed_times(by_predictor.T)

    def _within(self, theta: Array, logp: Array) -> Array:
        if self._holds is not None and len(theta):
            hold = np.asarray(self._holds(self._rows.predictors.linear_map(theta)), dtype=np.bool_)
            logp[~hold.all(axis=1)] = -np.inf
        return logp


# --- coordinates that the data see through fewer predictors than there are coordinates ---

#: Coordinates from which on it pays, and the part of them that may be left.
_FEWEST, _PART = 100, 0.5
#: Part of the largest direction below which one counts as none.
_RANK = 1e-10


@dataclass(frozen=True, eq=False)
class RowSpace:
    """Coordinates z of a model: those ``kept``, and some in the place of those ``normal``.

    Those with normal priors are mean + sd * (basis z + what is perpendicular), which q has as the prior has it.
    """

    #: Coordinates of theta; shape (n_kept,), (n_normal,).
    kept: Indices
    normal: Indices
    #: Of the priors; shape (n_normal,).
    mean: Array
    sd: Array
    #: Orthonormal columns; shape (n_normal, n_basis).
    basis: Array

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return len(self.kept) + int(self.basis.shape[1])

    def to_theta(self, z: Array) -> Array:
        """Return theta, (n, n_theta), at points, (n, n_dim), with nothing perpendicular."""
        theta = np.empty((len(z), len(self.kept) + len(self.normal)))
        theta[:, self.kept] = z[:, : len(self.kept)]
        theta[:, self.normal] = self.mean + self.sd * (z[:, len(self.kept) :] @ self.basis.T)
        return theta

    def of_theta(self, theta: Array) -> Array:
        """Return the coordinates of one point, (n_dim,)."""
        inside = ((theta[self.normal] - self.mean) / self.sd) @ self.basis
        return np.concatenate([theta[self.kept], inside])

    def sd_of(self, sd: Array) -> Array:
        """Return standard deviations, (n_dim,), where coordinates of theta are independent with those given."""
        inside = np.sqrt((sd[self.normal] / self.sd) ** 2 @ self.basis**2)
        return np.concatenate([sd[self.kept], inside])

    def axes(self) -> Array:
        """Return the directions of z in theta, in units of the priors, (n_theta, n_dim): orthonormal."""
        result = np.zeros((len(self.kept) + len(self.normal), self.n_dim))
        result[self.kept, np.arange(len(self.kept))] = 1.0
        result[self.normal, len(self.kept) :] = self.basis
        return result

    def scale(self) -> Array:
        """Return the units of the priors, (n_theta,); 1 for coordinates that are kept."""
        result = np.ones(len(self.kept) + len(self.normal))
        result[self.normal] = self.sd
        return result


@dataclass(frozen=True, eq=False)
class SeenFromRows:
    """Log p by rows, in the coordinates of a `RowSpace`."""

    space: RowSpace
    #: All rows but the normal priors, with all constants: those of the priors, and of what is perpendicular.
    rows: Expectations


def seen_from_rows(rows: Expectations) -> SeenFromRows | None:
    """Return log p in the space of its rows; None where that has not far fewer dimensions."""
    linear = rows.linear_map.plain
    n_dim = linear.rest.shape[1]
    if n_dim < _FEWEST:
        return None
    coordinates, at, mean, sd, value = _fixed_normals(rows)
    used = np.setdiff1d(np.flatnonzero(rows.times_used()), at)
    kept = np.setdiff1d(np.arange(n_dim), coordinates)
    if not len(used) or len(kept) + len(used) > _PART * n_dim or len(used) * n_dim > MOST_NUMBERS:
        return None
    matrix = linear.rows(used)
    q, r, _ = linalg.qr((matrix[:, coordinates] * sd).T, mode="economic", pivoting=True)
    size = np.abs(np.diagonal(r))
    basis = np.ascontiguousarray(q[:, : np.count_nonzero(size > _RANK * size.max(initial=0.0))])
    space = RowSpace(kept, coordinates, mean, sd, basis)
    if space.n_dim > _PART * n_dim:
        return None
    reduced = np.concatenate([matrix[:, kept], (matrix[:, coordinates] * sd) @ basis], axis=1)
    offset = linear.offset[used] + matrix[:, coordinates] @ mean
    nothing = sparse.csr_array((len(used), space.n_dim))
    inner = LinearMap(offset, np.ascontiguousarray(reduced), np.arange(space.n_dim), nothing)
    # Priors are standard normals in the directions of the basis; what is perpendicular is integrated out.
    return SeenFromRows(space, rows.on(inner, used, value - 0.5 * basis.shape[1] * np.log(2.0 * np.pi)))


def _fixed_normals(rows: Expectations) -> tuple[Indices, Indices, Array, Array, float]:
    """Return coordinates with fixed normal priors, their predictors, means, sds, and the log of what priors come to."""
    linear, times = rows.linear_map.plain, rows.times_used()
    n_entries = np.diff(linear.rest.indptr) + np.count_nonzero(linear.dense, axis=1)
    # Of a predictor of one coordinate, x times its factor: with x = 1, and with x the number of the coordinate.
    factor, number = linear.times(np.stack([np.ones(linear.n_dim), np.arange(linear.n_dim)]))
    parts = []
    for function in rows.functions:
        at = function.index[:, 0]
        inner = np.flatnonzero((n_entries[at] == 1) & (times[at] == 1))
        if function.k > 1 or not len(inner) or not is_quadratic(function):
            continue
        if (found := priors_of(function, inner)) is not None:
            eta, sd, total = found
            here, own = at[inner], factor[at[inner]]
            coordinates = np.rint(number[here] / own).astype(np.intp)
            mean, sd = (eta - linear.offset[here]) / own, sd / np.abs(own)
            parts.append((coordinates, here, mean, sd, total - np.log(np.abs(own))))
    if not parts:
        return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.intp), np.empty(0), np.empty(0), 0.0
    coordinates, at, mean, sd, total = (np.concatenate(part) for part in zip(*parts, strict=True))
    # A coordinate with two priors keeps both.
    _, place, counts = np.unique(coordinates, return_inverse=True, return_counts=True)
    one = np.flatnonzero(counts[place] == 1)
    one = one[np.argsort(coordinates[one])]
    return coordinates[one], at[one], mean[one], sd[one], float(total[one].sum())


# --- log p by its rows as a term of the globals and one term for each local coordinate, at draws and quadrature nodes
#
#     log p(g, b) = f_0(g) + sum_c f_c(g, b_path(c)),
#
# where path(c) is the way from the root of c's tree to c itself (`pymc_ngvi.marginal.quadrature`). A row belongs to the
# deepest coordinate that its predictors depend on. A predictor is offset + X_g g + X_b b: its first two parts are
# computed once for each draw of the globals, whatever the number of quadrature nodes, and functions of globals alone,
# the exponential of a log scale for instance, once for all rows.
#
# Rows come first in all arrays here, then nodes, then draws: sums over the rows of a coordinate are sums of vectors.

#: Why terms can't be told apart.
SEVERAL = "an element of log p depends on several blocks of local coordinates at once"


#: A `pymc_ngvi.marginal.quadrature.Forest`, which is above.
type Trees = Any


@dataclass(frozen=True, eq=False)
class _Slot:
    """A predictor of each row."""

    #: Whether it depends on local coordinates; and whether it is one predictor for all rows.
    is_local: bool
    is_same: bool
    #: shape (n_rows,).
    offset: Array
    #: shape (n_rows, n_globals).
    of_globals: sparse.csr_array
    #: One row each where all rows have the same predictor; shape (n_rows, n_local).
    of_locals: sparse.csr_array

    def part(self, rows: slice, place: Indices, n_local: int) -> "_Slot":
        """Return that of some rows, with columns only for some coordinates, whose numbers are in ``place``."""
        rows = slice(0, 1) if self.is_same else rows
        local = _rows_of(self.of_locals, rows)
        local = sparse.csr_array((local.data, place[local.indices], local.indptr), shape=(local.shape[0], n_local))
        return _Slot(self.is_local, self.is_same, self.offset[rows], _rows_of(self.of_globals, rows), local)

    def at(self, g: Array, local: Array | None, n_nodes: int) -> Array:
        """Return values, (n_rows or 1, n_nodes or 1, n), at globals (n, p) and locals (n_local, n_nodes * n)."""
        first = self.of_globals.toarray() @ g.T
        first += self.offset[:, None]
        if not self.is_local:
            return first[:, None]
        result: Array = (self.of_locals @ local).reshape(len(first), n_nodes, len(g))
        result += first[:, None]
        return result


@dataclass(frozen=True, eq=False)
class _Kind:
    """Rows that are the same function, in the order of the blocks that they belong to."""

    function: Compiled
    slots: list[_Slot]
    #: (n_rows, 1, 1) or (1, 1, 1) each.
    data: list[Array]
    #: Place of the coordinate that each belongs to; -1 for none; shape (n_rows,).
    owner: Indices
    n_local: int

    def part(self, rows: slice, place: Indices, n_local: int) -> "_Kind":
        """Return some of the rows, with coordinates numbered by ``place``."""
        slots = [slot.part(rows, place, n_local) for slot in self.slots]
        data = [d if len(d) == 1 else d[rows] for d in self.data]
        return _Kind(self.function, slots, data, place[self.owner[rows]], n_local)

    @functools.cached_property
    def _to_owners(self) -> sparse.csr_array | None:
        """Adds rows up by coordinate; None where each coordinate has one row, in order."""
        n = len(self.owner)
        if n == self.n_local and np.array_equal(self.owner, np.arange(n)):
            return None
        return sparse.csr_array((np.ones(n), (self.owner, np.arange(n))), shape=(self.n_local, n))

    def values(self, g: Array, local: Array | None, n_nodes: int) -> Array:
        """Return the values of the rows, (n_rows, n_nodes, n)."""
        [result] = self.function(*[slot.at(g, local, n_nodes) for slot in self.slots], *self.data)
        return np.broadcast_to(np.asarray(result), (len(self.owner), n_nodes, len(g)))

    def add(self, g: Array, local: Array, n_nodes: int, total: Array) -> None:
        """Add the sums of coordinates to ``total``, (n_local, n_nodes * n)."""
        values = self.values(g, local, n_nodes).reshape(len(self.owner), -1)
        total += values if self._to_owners is None else self._to_owners @ values


@dataclass(frozen=True, eq=False)
class BlockTerms:
    """The terms of some blocks."""

    kinds: list[_Kind]
    #: What is linear; shape (n_local,).
    slope: Array

    # Far out, densities overflow: the caller sees it.
    @np.errstate(all="ignore")
    def terms(self, g: Array, local: Array) -> Array:
        """Return the terms, (n, n_nodes, n_local), of local coordinates of that shape beside globals (n, p)."""
        n, n_nodes, n_local = local.shape
        flat = np.ascontiguousarray(local.transpose(2, 1, 0)).reshape(n_local, -1)
        total = self.slope[:, None] * flat
        for kind in self.kinds:
            kind.add(g, flat, n_nodes, total)
        return total.reshape(n_local, n_nodes, n).transpose(2, 1, 0)


class RowTerms:
    """The terms of log p, from its rows."""

    def __init__(self, rows: Expectations, forest: Trees) -> None:
        self._forest = forest
        self._linear = linear = rows.linear_map.plain
        n, d = linear.rest.shape
        starts = n * np.searchsorted(linear.columns, np.arange(d + 1))  # of columns, those of the dense ones alone
        dense = (linear.dense.T.ravel(), np.tile(np.arange(n), len(linear.columns)), starts)
        whole = sparse.csc_array(linear.rest.tocsc() + sparse.csc_array(dense, shape=(n, d)))
        self._of_globals = sparse.csr_array(whole[:, forest.globals_])
        self._of_locals = sparse.csr_array(whole[:, forest.locals_])
        self._of_locals.eliminate_zeros()
        slope = linear.transposed_times(rows.terms.slope[None])[0]
        self._constant = rows.constant + float(rows.terms.slope @ linear.offset)
        self._slope_of_globals, self._slope = slope[forest.globals_], slope[forest.locals_]
        self._kinds: list[_Kind] = []
        self._alone: list[_Kind] = []
        for rows_ in rows.functions:
            owner = owners([self._of_locals[column] for column in rows_.index.T], forest)
            block = np.append(forest.block, -1)[owner]
            order = np.argsort(block, kind="stable")
            first = int(np.searchsorted(block[order], 0))
            if first:
                self._alone.append(self._kind(rows_, order[:first], owner))
            if first < len(order):
                self._kinds.append(self._kind(rows_, order[first:], owner))
        n_blocks = int(forest.block.max()) + 1
        self.n_rows = np.zeros(n_blocks, dtype=np.intp)
        for made in self._kinds:
            self.n_rows += np.bincount(forest.block[made.owner], minlength=n_blocks)
        self._starts = [
            np.searchsorted(forest.block[kind.owner], np.arange(n_blocks + 1)).astype(np.intp) for kind in self._kinds
        ]

    def _kind(self, rows: RowFunction, at: Indices, owner: Indices) -> _Kind:
        function, data = rows.function, [d[0] if d.shape[1] == 1 else d[0, at] for d in rows.data]
        slots = [self._slot(column) for column in rows.index[at].T]
        return _Kind(function, slots, [one[:, None, None] for one in data], owner[at], self._forest.n_local)

    def _slot(self, column: Indices) -> _Slot:
        is_same = bool((column == column[0]).all())
        column = column[:1] if is_same else column
        of_locals = self._of_locals[column]
        return _Slot(of_locals.nnz > 0, is_same, self._linear.offset[column], self._of_globals[column], of_locals)

    @np.errstate(all="ignore")
    def of_globals(self, g: Array) -> Array:
        """Return the term of the globals alone, (n,), at points (n, p)."""
        total: Array = self._constant + g @ self._slope_of_globals
        for kind in self._alone:
            for part in row_slices(len(g), max(1, STREAMED // len(kind.owner))):
                total[part] += kind.values(g[part], None, 1)[:, 0].sum(axis=0)
        return total

    def of_blocks(self, first: int, last: int, places: Indices) -> BlockTerms:
        """Return the terms of the blocks from ``first`` to before ``last``, whose coordinates are at ``places``."""
        place = np.full(self._forest.n_local, -1, dtype=np.intp)
        place[places] = np.arange(len(places))
        parts = [
            kind.part(slice(int(starts[first]), int(starts[last])), place, len(places))
            for kind, starts in zip(self._kinds, self._starts, strict=True)
            if starts[first] < starts[last]
        ]
        return BlockTerms(parts, self._slope[places])


def owners(of_locals: Sequence[sparse.csr_array], forest: Trees) -> Indices:
    """Return the place of the deepest coordinate that each row depends on, (n_rows,), -1 for none."""
    n_rows = of_locals[0].shape[0]
    row = np.concatenate([np.repeat(np.arange(n_rows), np.diff(x.indptr)) for x in of_locals])
    place = np.concatenate([x.indices for x in of_locals]).astype(np.intp)
    owner = np.full(n_rows, -1, dtype=np.intp)
    order = np.argsort(forest.level[place], kind="stable")
    owner[row[order]] = place[order]  # the deepest comes last
    if (forest.path[owner[row], forest.level[place]] != place).any():
        raise NotApart(SEVERAL)
    return owner


def _rows_of(matrix: sparse.csr_array, rows: slice) -> sparse.csr_array:
    """Return some rows that follow each other, without a copy of the entries."""
    indptr = matrix.indptr[rows.start : rows.stop + 1]
    entries = slice(int(indptr[0]), int(indptr[-1]))
    parts = (matrix.data[entries], matrix.indices[entries], indptr - indptr[0])
    return sparse.csr_array(parts, shape=(rows.stop - rows.start, matrix.shape[1]))
