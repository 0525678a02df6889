"""Gaussian rows in closed form: log p of latent variables at many hyperparameters, without sums over rows for each.

Given the hyperparameters, log p is a polynomial of the second degree in the latent variables. Its coefficients are sums
over rows of products: design weights, second derivatives and slopes of rows. These hang on few functions of the
hyperparameters, which a few numbers tell, so that all sums are computed once. Slopes are those at a point near the
posterior: residuals are small there, and nothing cancels, however large the data are beside their spread.
"""

import functools

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scipy import sparse

from pymc_ngvi.core.batch import Batch
from pymc_ngvi.core.linalg import all_finite
from pymc_ngvi.core.messages import NotApart
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sizes import AT_ONCE
from pymc_ngvi.core.types import Array, Indices
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.families.sparse import Precisions
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.rows.many import ManyRows
from pymc_ngvi.rows.separable import CrossProducts, Separable, derivatives_of

# What the coefficients of log p are made of where rows are polynomials of the second degree, and where it belongs.


@dataclass(frozen=True, eq=False)
class Numbers(Batch):
    """What coefficients are made of, at one value of what is given."""

    #: Entries of X: the sparse ones, and all of the dense columns.
    designs: Array
    #: Of each row by each of its predictors, and what is linear in predictors.
    slopes: Array
    #: Second derivatives of rows, by pairs of predictors.
    bends: Array


class Places(NamedTuple):
    """Where these are; all arrays are as long as they are."""

    #: Of entries of X.
    rows: Indices
    cols: Indices
    #: The predictor that each slope is by.
    slope_of: Indices
    #: Slopes of one kind and slot.
    slope_kind: Indices
    #: The predictors that each second derivative is by; shape (n_bends, 2).
    bend_of: Indices

    @classmethod
    def of(cls, given: RowsGiven) -> "Places":
        """Return those of rows."""
        plan = given.reading.predictors.plan
        n, n_dense = plan.n_rows, len(plan.columns)
        order = np.lexsort((plan.cols, plan.rows))
        slope_of, slope_kind, bend_of = list[Indices](), list[Indices](), list[Indices]()
        for kind in given.reading.terms.rows:
            for column in kind.index.T:
                slope_of.append(column)
                slope_kind.append(np.full(len(column), len(slope_kind)))
            bend_of += [kind.index[:, pair] for pair in zip(*np.tril_indices(kind.index.shape[1]), strict=True)]
        slope_of.append(np.arange(n))
        slope_kind.append(np.full(n, len(slope_kind)))
        return cls(
            np.concatenate([plan.rows[order], np.repeat(np.arange(n), n_dense)]),
            np.concatenate([plan.cols[order], np.tile(plan.columns, n)]),
            *map(np.concatenate, (slope_of, slope_kind, bend_of)),
        )


def numbers_of(given: RowsGiven, rows: ManyRows, x: Array) -> Numbers:
    """Return the numbers of rows, slopes being those at a point, (n_dim,)."""
    n, maps = len(rows), rows.maps
    at = maps.times(np.broadcast_to(x[:, None], (n, len(x), 1)))[:, :, 0]
    eta = (maps.offset + at).ravel()
    slopes, bends = list[Array](), list[Array]()
    for function in rows.functions:  # predictors are in the order of the terms: rows of all values share none
        for parts, part in zip((slopes, bends), derivatives_of(function, eta[function.index]), strict=True):
            parts.append(part.reshape(n, -1, part.shape[1]).mT.reshape(n, -1))
    dense = np.broadcast_to(maps.dense, (n, *maps.dense.shape[1:])).reshape(n, -1)
    designs = np.concatenate([maps.data, dense], axis=1)
    return Numbers(designs, np.concatenate([*slopes, rows.slope], axis=1), np.concatenate(bends, axis=1))


# Gaussian rows in closed form.

#: Values of what is given from which it is found what numbers follow from, and others where that is tried; how far from
#: the start these are. The others are farther out: there, what is smooth differs from what is a combination.
_N_SAMPLES, _N_TRIED, _SPREAD, _SPREAD_OF_TRIED = 12, 3, 0.7, 2.0
#: Parts of numbers that are rounding: of design weights, of second derivatives, of slopes beside the largest.
_OF_DESIGNS, _OF_BENDS, _OF_SLOPES = 1e-9, 1e-8, 1e-7
#: Points near the posterior at which log p is compared, as closely as slopes are.
_N_POINTS = 2
#: Steps to the mode: those after the first see to its rounding.
_STEPS = 4
#: Products of functions at most.
_MOST_PRODUCTS = 500


class GaussianOver:
    """Coefficients at many values of what is given."""

    def __init__(self, given: RowsGiven) -> None:
        self._given = given
        if given.precisions.sums is not None:
            raise NotApart("rows read sums over many coordinates")
        self.x = _mode(given)
        given.begin_at(self.x)
        values, samples = self._samples()
        self._places = Places.of(given)
        designs, slopes, bends = self._separated(samples)
        of = self._places
        n, d = given.reading.predictors.plan.n_rows, given.n_dim
        matrices = [
            sparse.csr_array((w[keep], (of.rows[keep], of.cols[keep])), shape=(n, d))
            for w in designs.weights.T
            if (keep := w != 0.0) is not None
        ]
        if len(matrices) ** 2 * len(bends.members) > _MOST_PRODUCTS:
            raise NotApart("coefficients hang on too many functions")
        self._precision = CrossProducts(matrices, [_symmetric(-w, of.bend_of, n) for w in bends.weights.T])
        totals = np.stack([np.bincount(of.slope_of, w, minlength=n) for w in slopes.weights.T], axis=1)
        self._grad = np.stack([matrix.T @ totals for matrix in matrices], axis=1)  # (d, n_designs, n_slopes)
        self._members = [part.members for part in (designs, slopes, bends)]  # which tell of all others
        if not self.agrees(values[-_N_TRIED:]):
            raise NotApart("log p is no such polynomial")

    @property
    def pattern(self) -> Pattern:
        """Where precisions can differ from 0."""
        return self._precision.pattern

    @functools.cached_property
    def precisions(self) -> Precisions:
        """What factors them."""
        first = self._given.precisions
        return first if first.pattern.equals(self.pattern) else Precisions(self.pattern)

    @property
    def n_rows(self) -> int:
        """Rows whose log p is evaluated."""
        return self._given.n_rows

    def _samples(self) -> tuple[Array, Numbers]:
        """Return values of what is given at which rows add up to log p, and numbers there."""
        given, rng, values, found = self._given, np.random.default_rng(2), list[Array](), list[Numbers]()
        for spread, wanted in ((_SPREAD, _N_SAMPLES), (_SPREAD_OF_TRIED, _N_TRIED)):
            size = min(wanted, max(1, AT_ONCE // given.n_rows))
            for _ in range(2 * wanted // size):
                some = given.first + spread * rng.standard_normal((size, len(given.first)))
                rows, agrees = given.at(some)
                which = np.flatnonzero(agrees)[:wanted]
                values.append(some[which])
                found.append(numbers_of(given, rows, self.x)[which])
                wanted -= len(which)
                if not wanted:
                    break
            else:
                raise NotApart("rows do not add up to log p")
        return np.concatenate(values), Numbers.joined(found)

    def _separated(self, samples: Numbers) -> tuple[Separable, Separable, Separable]:
        designs, slopes, bends = samples.designs, samples.slopes, samples.bends
        own = np.zeros(self._places.slope_kind.max() + 1)
        np.maximum.at(own, self._places.slope_kind, np.abs(slopes).max(axis=0))
        result = []
        for part, scale, tolerance in (
            (designs, np.abs(designs).max(axis=0), _OF_DESIGNS),
            (slopes, own[self._places.slope_kind], _OF_SLOPES),
            (bends, np.abs(bends).max(axis=0), _OF_BENDS),
        ):
            if not np.isfinite(part).all():
                raise NotApart("derivatives of rows are not finite")
            found = Separable.of(part[:_N_SAMPLES], scale, tolerance)
            if found is None or not found.agrees(part[_N_SAMPLES:], scale, 10.0 * tolerance):
                raise NotApart("coefficients hang on too many functions")
            result.append(found)
        return result[0], result[1], result[2]

    def at(self, values: Array) -> tuple[Array, Array]:
        """Return the gradient, (n, n_dim), and minus second derivatives, (n, n_entries), at values, (n, n_given)."""
        with np.errstate(all="ignore"):
            numbers = numbers_of(self._given, self._given.rows(values), self.x)
            every = numbers.designs, numbers.slopes, numbers.bends
            designs, slopes, bends = (part[:, at] for part, at in zip(every, self._members, strict=True))
            grad = np.einsum("dkq,nk,nq->nd", self._grad, designs, slopes, optimize=True)
            return np.ascontiguousarray(grad), self._precision(designs, bends)

    def logp(self, values: Array, points: Array) -> Array:
        """Return log p, (n, m), at points (n, m, n_dim) for each of the values, (n, n_given)."""
        return self._given.logp_of_whole(values, points)

    def agrees(self, values: Array) -> bool:
        """Tell whether log p at its mode and beside it is what they say, at values, (n, n_given)."""
        size = max(1, AT_ONCE // self.precisions.fronts.n_fronts)
        return all(self._agree(values[start : start + size]) for start in range(0, len(values), size))

    def _agree(self, values: Array) -> bool:
        grad, precision = self.at(values)
        factors, there = self.precisions.factored(precision)
        if factors is None or not there.all():
            return False
        base = np.random.default_rng(1).standard_normal((*grad.shape, _N_POINTS))
        moves = np.swapaxes(factors.solve(base, transposed=True), 1, 2)
        mode = (self.x + factors.times_covariance(grad))[:, None]
        logp = self.logp(values, np.concatenate([mode, mode + moves], axis=1))
        apart = logp[:, 1:] - logp[:, :1] + 0.5 * np.einsum("ndm,ndm->nm", base, base)
        size = len(self.x) + np.abs(logp[:, :1])
        return bool((np.abs(apart) <= _OF_SLOPES * size).all())


def gaussian_over(given: RowsGiven) -> GaussianOver | None:
    """Return the coefficients of log p with the data as they are now; None where there is no closed form."""
    if not given.is_quadratic:
        return None
    if given.closed_form is None:
        start = given.start
        try:
            with without_c():  # which takes long to enter: not for each evaluation
                found: GaussianOver | None = GaussianOver(given)
        except (NotApart, NotImplementedError, ValueError, np.linalg.LinAlgError):
            found = None
            given.begin_at(start)  # fits have to find their way themselves
        given.closed_form = (found,)
    return given.closed_form[0]


def _mode(given: RowsGiven) -> Array:
    """Return where log p is largest for the values that are given now, (n_dim,)."""
    rows, precisions, x = given.rows(given.first[None]), given.precisions, given.start[None]
    factors, _ = precisions.factored(precisions.independent(np.ones(x.shape)))
    for _ in range(_STEPS):
        assert factors is not None
        expected = rows.expected(rows.seen(x, factors.covariance))
        if not all_finite(expected.slope, expected.precision):
            raise NotApart("derivatives of rows are not finite")
        factors, _ = precisions.factored(expected.precision)
        if factors is None:
            raise NotApart("log p has no mode")
        x = x + factors.times_covariance(rows.maps.transposed_times(expected.slope))
    return x[0]


def _symmetric(values: Array, pairs: Indices, n: int) -> sparse.csr_array:
    """Return the matrix with values at pairs of predictors, (n_pairs, 2), each way where these are two."""
    keep = values != 0.0
    (i, j), values = pairs[keep].T, values[keep]
    off = i != j
    data = np.concatenate([values, values[off]])
    return sparse.csr_array((data, (np.concatenate([i, j[off]]), np.concatenate([j, i[off]]))), shape=(n, n))
